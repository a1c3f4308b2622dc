"""Replayed accept length of a draft head on prompts it has not seen.

    python scripts/measure_head.py --target SMOLLM2 --draft HEAD --prompts traces/samples/prompts.jsonl

The target answers each prompt greedily; the head drafts `--draft-steps` tokens at every anchor; the served walk
counts. This is for training: quick, in memory, greedy. `replay capture` and `replay simulate` are the real thing.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from target import Slots, Target, block_argmax
from tokenizers import Tokenizer
from torch import Tensor
from write_text import END, PREFIX, REPLY

from replay.checkpoint.checkpoint import read_checkpoint
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.verify.accept import continuations, count_accepted, served_walk

TAPS = (3, 16)


@torch.inference_mode()
def answer_greedily(target: Target, tokenizer: Tokenizer, prompts: Sequence[str], new_tokens: int) -> list[DraftInput]:
    """The target's own greedy answers, with the features of `embed,3,16`."""
    prefix, end = tokenizer.encode(PREFIX).ids, tokenizer.token_to_id(END)
    tokens = [tokenizer.encode(PREFIX + prompt + REPLY).ids for prompt in prompts]
    lengths = [len(row) for row in tokens]
    slots = Slots(target, len(prompts), max(lengths) + new_tokens, prefix, TAPS)
    slots.prefill(list(range(len(prompts))), [row[:-1] for row in tokens])
    for _ in range(new_tokens):
        chosen = block_argmax(slots.step(torch.tensor([row[-1] for row in tokens])))
        for row, token in zip(tokens, chosen.tolist(), strict=True):
            row.append(token)
    cut = [
        row[: row.index(end, length) + 1] if end in row[length:] else row
        for row, length in zip(tokens, lengths, strict=True)
    ]
    return [draft_input(target, row, slots.kept[i, : len(row) - 1].clone(), lengths[i]) for i, row in enumerate(cut)]


def draft_input(target: Target, tokens: Sequence[int], kept: Tensor, prompt_tokens: int) -> DraftInput:
    """A request from its tokens and the kept R[3], R[16], final of each position but the last."""
    tokens_T = torch.tensor(tokens)
    return DraftInput(tokens_T, wired(target, tokens_T[:-1], kept), prompt_tokens)


def wired(target: Target, tokens: Tensor, kept: Tensor) -> Tensor:
    """Features `embed,3,16` from tokens [..., T] and what was kept of them [..., T, 3, D]."""
    return torch.cat([torch.nn.functional.embedding(tokens, target.embed), kept[..., 0, :], kept[..., 1, :]], dim=-1)


def shorten(item: DraftInput, new_tokens: int) -> DraftInput:
    """The same request, had it stopped after `new_tokens`."""
    return DraftInput(item.tokens_T[: item.prompt_tokens + new_tokens], item.features_RKD, item.prompt_tokens)


@torch.inference_mode()
def count_rounds(head: Head, inputs: Sequence[DraftInput], steps: int) -> tuple[int, int]:
    """Rounds of the served walk and tokens accepted in them."""
    rounds = accepted = 0
    for item, drafts in zip(inputs, draft_every_anchor(head, inputs, steps), strict=True):
        tokens = item.tokens_T.numpy()
        anchors = item.prompt_tokens + np.arange(item.anchors)
        chosen = continuations(tokens, np.array([], dtype=np.int64), anchors, steps)
        counts = count_accepted(drafts.drafted_AK.numpy(), chosen)
        walk = served_walk(counts, prompt_tokens=item.prompt_tokens, tokens=len(tokens))
        rounds, accepted = rounds + len(walk), accepted + sum(step.accepted for step in walk)
    return rounds, accepted


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="jsonl with a prompt (one user turn) a row")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--draft-steps", type=int, default=5)
    args = parser.parse_args()
    target = Target(args.target)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    head = Head(read_checkpoint(args.draft), TargetTables(target.embed), execution=Execution(torch.bfloat16))
    answers = answer_greedily(target, tokenizer, read_prompts(args.prompts), max(args.new_tokens))
    for new_tokens in args.new_tokens:
        rounds, accepted = count_rounds(head, [shorten(item, new_tokens) for item in answers], args.draft_steps)
        length = accepted / rounds + 1
        print(f"{new_tokens} new tokens: accept length {length:.3f} ({accepted} accepted in {rounds} rounds)")


if __name__ == "__main__":
    main()
