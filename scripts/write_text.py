"""Let the target write its own training conversations.

    python scripts/write_text.py --target SMOLLM2 --out text.jsonl.gz --until 19:15

Half of the user turns begin with an opener and are finished by the target (T=1, top-50); the other half are made from
templates. The target then answers, three in four times greedily, otherwise at T=0.7 with top-50. One row a
conversation: {"id", "kind", "input_ids", "output_ids", "greedy"}. Rows are appended in whole gzip members as they
finish, so the file may be read and the script stopped at any time; started again with the same arguments it goes on.
Conversation n always starts from the same words (`--seed`); what is sampled also depends on its neighbours in the
batch.

With `--features` the residual stream at `--taps` and the state after the final norm, which the target has computed
anyway, go to safetensors shards in that folder: one tensor [tokens - 1, taps + 1, hidden] a conversation, named by
its id.
"""

import argparse
import gzip
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from target import Slots, Target, block_argmax, block_top
from tokenizers import Tokenizer
from torch import Tensor
from turns import made, opener

BEGIN, END = "<|im_start|>", "<|im_end|>"
PREFIX = f"{BEGIN}system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face{END}\n{BEGIN}user\n"
REPLY = f"{END}\n{BEGIN}assistant\n"
SPECIAL = 17  # ids below this are the tokenizer's special tokens
TOP = 50


@dataclass
class Conversation:
    """A conversation on its way through a slot."""

    number: int
    kind: str
    tokens: list[int]
    greedy: bool
    turn_left: int
    answering: bool = False
    forced: deque[int] = field(default_factory=deque)
    answer: list[int] = field(default_factory=list)
    features: Tensor | None = None

    def temperature(self) -> float:
        return 1.0 if not self.answering else 0.0 if self.greedy else 0.7


class Writer:
    """Fills the slots, steps them together and hands over what is finished."""

    def __init__(
        self, target: Target, tokenizer: Tokenizer, args: argparse.Namespace, passages: list[str], done: set[int]
    ) -> None:
        self.target, self.tokenizer, self.args, self.passages = target, tokenizer, args, passages
        self.prefix = tokenizer.encode(PREFIX).ids
        self.reply = tokenizer.encode(REPLY).ids
        self.end = tokenizer.token_to_id(END)
        self.numbers = (n for n in range(args.start, 10**9) if n not in done)
        self.slots = Slots(target, args.batch, args.capacity, self.prefix, tuple(args.taps))
        self.running: list[Conversation] = []

    def new(self) -> Conversation:
        while True:
            number = next(self.numbers)
            random = Random(f"{self.args.seed}/{number}")
            greedy = random.random() < self.args.greedy
            if random.random() < self.args.openers:
                turn = self.tokenizer.encode(opener(random)).ids
                return Conversation(number, "opener", self.prefix + turn, greedy, random.randint(8, 60))
            turn = self.tokenizer.encode(made(random, self.passages)).ids
            if len(self.prefix) + len(turn) + len(self.reply) + self.args.answer_tokens < self.args.capacity:
                return Conversation(number, "made", self.prefix + turn + self.reply, greedy, 0, answering=True)

    def fill(self, at: list[int]) -> None:
        fresh = [self.new() for _ in at]
        for slot, conversation in zip(at, fresh, strict=True):
            if slot == len(self.running):
                self.running.append(conversation)
            else:
                self.running[slot] = conversation
        self.slots.prefill(at, [c.tokens[:-1] for c in fresh])

    def choose(self, logits: torch.Tensor) -> list[int]:
        chosen = block_argmax(logits)
        temperature = torch.tensor([c.temperature() for c in self.running])
        hot = temperature.nonzero()[:, 0]
        if len(hot):
            values, ids = block_top(logits[hot], TOP)
            drawn = (values / temperature[hot, None]).softmax(-1).multinomial(1)
            chosen[hot] = ids.gather(1, drawn)[:, 0]
        return chosen.tolist()

    def advance(self, conversation: Conversation, token: int) -> bool:
        """Take one token in; true when the conversation is over."""
        if conversation.forced:
            conversation.tokens.append(conversation.forced.popleft())
            conversation.answering = not conversation.forced
        elif not conversation.answering:
            if token == self.end or conversation.turn_left <= 0:
                conversation.forced.extend(self.reply)
                return self.advance(conversation, token)
            conversation.turn_left -= 1
            conversation.tokens.append(token)
            return token < SPECIAL
        else:
            conversation.tokens.append(token)
            conversation.answer.append(token)
        return (token == self.end and bool(conversation.answer)) or len(conversation.answer) >= self.args.answer_tokens

    def run(self) -> Iterator[list[Conversation]]:
        """Endless; after each step the conversations that ended with it."""
        self.fill(list(range(self.args.batch)))
        empty: list[int] = []
        for step in range(10**9):
            if len(empty) >= self.args.refill:
                self.fill(empty)
                empty = []
            if step % 32 == 0:
                order = self.slots.length.sort().indices
                self.slots.reorder(order)
                self.running = [self.running[i] for i in order]
                empty = [new for new, old in enumerate(order.tolist()) if old in set(empty)]
            self.slots.length[empty] = 0
            chosen = self.choose(self.slots.step(torch.tensor([c.tokens[-1] for c in self.running])))
            skip = set(empty)
            over = [i for i, c in enumerate(self.running) if i not in skip and self.advance(c, chosen[i])]
            empty += over
            for i in over:
                self.running[i].features = self.slots.kept[i, : len(self.running[i].tokens) - 1].clone()
            yield [self.running[i] for i in over]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a jsonl.gz; what a killed writer left half done at the end is dropped."""
    rows: list[dict[str, Any]] = []
    try:
        with gzip.open(path, "rt") as lines:
            rows.extend(json.loads(line) for line in lines)
    except EOFError:
        pass
    return rows


def read_passages(path: Path, tokenizer: Tokenizer, skip_every: int) -> list[str]:
    """Two to four sentences of prose answers the target wrote before, but of every `skip_every`th row (held out)."""
    passages = []
    for i, row in enumerate(read_rows(path)):
        sentences = tokenizer.decode(row["output_ids"]).split(". ")
        if (
            i % skip_every
            and len(sentences) > 3
            and not any(c in row["output_ids"] for c in tokenizer.encode("```").ids)
        ):
            passages.append(". ".join(sentences[: 2 + i % 3]) + ".")
    return passages


def answered(conversation: Conversation) -> dict[str, Any]:
    cut = len(conversation.tokens) - len(conversation.answer)
    return {
        "id": conversation.number,
        "kind": conversation.kind,
        "input_ids": conversation.tokens[:cut],
        "output_ids": conversation.answer,
        "greedy": conversation.greedy,
    }


def save(conversations: list[Conversation], out: Path, folder: Path | None) -> None:
    """Features first: a row in `out` has its features on disk."""
    if folder and conversations:
        folder.mkdir(parents=True, exist_ok=True)
        shard = {str(c.number): c.features for c in conversations if c.features is not None}
        save_file(shard, folder / f"{conversations[0].number:07d}.safetensors")
    with out.open("ab") as file:
        file.write(gzip.compress("".join(json.dumps(answered(c)) + "\n" for c in conversations).encode()))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", type=Path, required=True, help="folder with config.json, model.safetensors (bf16), tokenizer.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="jsonl.gz to append to")
    parser.add_argument(
        "--passages", type=Path, help="earlier text of the target, to paste into templates that need a passage"
    )
    parser.add_argument("--features", type=Path, help="folder for feature shards")
    parser.add_argument(
        "--taps", type=int, nargs="*", default=[3, 16], help="R indices of the stream to keep with --features"
    )
    parser.add_argument("--until", help="stop at this time of day (HH:MM)")
    parser.add_argument("--tokens", type=int, default=10**9, help="stop after this many new answer tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first conversation")
    parser.add_argument("--batch", type=int, default=128, help="sequences in lock-step")
    parser.add_argument("--refill", type=int, default=6, help="finished slots that are worth a prefill")
    parser.add_argument("--capacity", type=int, default=512, help="longest conversation in tokens")
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument(
        "--openers", type=float, default=0.5, help="share of user turns that the target finishes itself"
    )
    parser.add_argument("--greedy", type=float, default=0.75, help="share of greedy answers")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    done = {row["id"] for row in read_rows(args.out)} if args.out.exists() else set()
    torch.manual_seed(args.seed + len(done))
    passages = read_passages(args.passages, tokenizer, skip_every=20) if args.passages else []
    writer = Writer(Target(args.target), tokenizer, args, passages, done)
    stop = (
        datetime.combine(datetime.now(), datetime.strptime(args.until, "%H:%M").time()) if args.until else datetime.max
    )

    started, tokens, rows = time.monotonic(), 0, 0
    pending: list[Conversation] = []
    for over in writer.run():
        pending += [conversation for conversation in over if len(conversation.answer) > 1]
        finished = datetime.now() >= stop or tokens >= args.tokens
        if len(pending) >= 64 or finished:
            save(pending, args.out, args.features)
            tokens, rows = tokens + sum(len(c.answer) for c in pending), rows + len(pending)
            seconds = time.monotonic() - started
            print(f"{rows} conversations, {tokens} answer tokens, {tokens / seconds:.0f} tok/s", flush=True)
            pending = []
        if finished:
            return


if __name__ == "__main__":
    main()
