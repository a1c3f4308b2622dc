"""Train an EAGLE-3 draft head for a small Llama-form target, wiring `embed,3,16`, on text the target wrote itself.

    python scripts/train_head.py --target SMOLLM2 --text text.jsonl.gz:FEATURES --out head/ --minutes 30

The forward is replay's own (`replay.head.model.Head`), fed from fp32 master weights through bf16; only the attention
over batches of equal length and the loss live here. Loss: cross-entropy against the target's distribution restricted to
the draft vocabulary, on answer positions; step j of the training-time test feeds back the head's own states and
weighs 0.8^j. Muon moves the eight matrices, AdamW the rest. Every `--score-every` minutes the head is scored by the
replayed accept length on held-out conversations (every 20th of the first text file) and on `--prompts`, and written
to `--out` with its optimizer state, so that the run may be stopped at any time and gone on with (`--resume`).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from measure_head import TAPS, answer_greedily, count_rounds, draft_input, read_prompts, wired
from safetensors import safe_open
from safetensors.torch import save_file
from target import Target
from tokenizers import Tokenizer
from torch import Tensor
from write_text import read_rows

from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.checkpoint.config import HeadConfig, parse_config
from replay.checkpoint.tensor_table import expected_tensors
from replay.drafting.rows import DraftInput
from replay.head.model import Head, HeadOutput, TargetTables
from replay.head.products import Execution

HELD_OUT = 20  # every 20th conversation of the first text file
MATRICES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Row:
    """One conversation and where its features are or will be."""

    store: "FeatureStore"
    key: str
    tokens: list[int]
    prompt: int
    greedy: bool


class FeatureStore:
    """Safetensors shards of R[3], R[16] and the final state at each position but the last: [tokens - 1, 3, D] a key."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder, self.target = folder, target
        folder.mkdir(parents=True, exist_ok=True)
        self.files: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self.place = {key: file for file in self.files for key in file.keys()}

    def load(self, rows: Sequence[Row]) -> list[Tensor]:
        """Features of rows; what is missing is computed together, and written."""
        missing = [row for row in rows if row.key not in self.place]
        if missing:
            length = max(len(row.tokens) for row in missing) - 1
            ids = torch.zeros(len(missing), length, dtype=torch.long)
            for line, row in zip(ids, missing, strict=True):
                line[: len(row.tokens) - 1] = torch.tensor(row.tokens[:-1])
            with torch.inference_mode():
                stream, final = self.target.stream(ids, TAPS)
                kept = torch.stack([*(stream[tap] for tap in TAPS), final], dim=2)
            path = self.folder / f"made-{missing[0].key}.safetensors"
            save_file({row.key: kept[i, : len(row.tokens) - 1].clone() for i, row in enumerate(missing)}, path)
            file: Any = safe_open(path, "pt")
            self.place |= {row.key: file for row in missing}
        return [self.place[row.key].get_tensor(row.key) for row in rows]


def read_text(spec: str, target: Target) -> list[Row]:
    """Rows of `FILE.jsonl.gz:FEATURES_FOLDER`."""
    path, _, folder = spec.partition(":")
    store = FeatureStore(Path(folder), target)
    rows = []
    for i, row in enumerate(read_rows(Path(path))):
        tokens = row["input_ids"] + row["output_ids"]
        if len(row["output_ids"]) > 2:
            rows.append(Row(store, str(row.get("id", i)), tokens, len(row["input_ids"]), row["greedy"]))
    return rows


def batches(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Batches of like total and prompt length."""
    order = sorted(rows, key=lambda row: (len(row.tokens) // 16, row.prompt))
    return [order[i : i + size] for i in range(0, len(order), size)]


@dataclass(frozen=True)
class Batch:
    """Padded [B, T] rows of a step; only rows from `start` on are anchors (A = T - start of them)."""

    tokens_BT: Tensor
    features: Tensor
    final_BTD: Tensor
    start: int
    prompt_B: Tensor
    length_B: Tensor


def collate(rows: Sequence[Row], target: Target) -> Batch:
    kept = rows[0].store.load(rows)
    length = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    states = torch.zeros(len(rows), length, len(TAPS) + 1, target.hidden, dtype=target.embed.dtype)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        states[i, : len(row.tokens) - 1] = kept[i]
    prompt = torch.tensor([row.prompt for row in rows])
    return Batch(
        tokens,
        wired(target, tokens, states),
        states[:, :, -1],
        int(prompt.min()) - 1,
        prompt,
        torch.tensor([len(row.tokens) for row in rows]),
    )


class BatchAttention:
    """Attention over padded batches: committed rows, then each anchor's own chain, as one masked product.

    Chain keys of all anchors stand behind the committed ones and the mask lets each anchor see its own only; on matrix
    units that is faster than handling the diagonal by itself.
    """

    def __init__(self, batch: int, length: int, start: int) -> None:
        self.batch, anchors = batch, torch.arange(start, length)
        self.mask = torch.arange(length) <= anchors[:, None]
        self.own = torch.eye(len(anchors), dtype=torch.bool)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def keep(self, some: Tensor) -> None:
        """From here on only these of the anchors go on; to be called before any has a chain."""
        self.mask, self.own = self.mask[some], torch.eye(len(some), dtype=torch.bool)

    def __call__(self, layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, (self.batch, -1)).transpose(1, 2) for part in (q_RNH, k_RMH, v_RMH))
        if self.keys:
            self.mask = torch.cat([self.mask, self.own], dim=1)
        group = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(group, dim=1))
        self.values.append(v.repeat_interleave(group, dim=1))
        mixed = F.scaled_dot_product_attention(
            q, torch.cat(self.keys, 2), torch.cat(self.values, 2), attn_mask=self.mask
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


class Distill(torch.autograd.Function):
    """Loss and gradient in one go, block by block, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, normed_RE: Tensor, weight_WE: Tensor, wanted_RW: Tensor) -> Tensor:
        grad_normed, grad_weight = torch.empty_like(normed_RE), torch.zeros(weight_WE.shape)
        loss = torch.zeros(())
        for first in range(0, len(normed_RE), 512):
            normed, wanted = normed_RE[first : first + 512], wanted_RW[first : first + 512].float()
            log_q = F.linear(normed, weight_WE).float().log_softmax(-1)
            loss -= torch.dot(wanted.flatten(), log_q.flatten())
            grad = log_q.exp_().sub_(wanted).to(normed.dtype)
            grad_normed[first : first + 512] = grad @ weight_WE
            grad_weight += grad.T @ normed
        ctx.save_for_backward(grad_normed, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_normed, grad_weight = ctx.saved_tensors
        return grads[0].to(grad_normed.dtype) * grad_normed, grads[0] * grad_weight, None


def distill(normed_RE: Tensor, weight_WE: Tensor, wanted_RW: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy between the wanted distribution and the head's."""
    loss: Tensor = Distill.apply(normed_RE, weight_WE, wanted_RW)  # type: ignore[no-untyped-call]
    return loss


class Trainer:
    """Master weights, draft vocabulary and the loss of a batch."""

    def __init__(self, target: Target, config: dict[str, Any], draft_ids_W: Tensor, weights: dict[str, Tensor]) -> None:
        self.target, self.document, self.config = target, config, parse_config(config)
        self.weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        self.maps = {
            "d2t": draft_ids_W - torch.arange(len(draft_ids_W)),
            "t2d": torch.zeros(self.config.vocab_size).bool(),
        }
        self.maps["t2d"][draft_ids_W] = True
        self.target_rows_WD = target.head.weight[draft_ids_W]

    def head(self) -> Head:
        """The head with today's weights, in bf16."""
        checkpoint = Checkpoint("training", self.config, self.weights | self.maps, ())
        return Head(checkpoint, TargetTables(self.target.embed), execution=Execution(torch.bfloat16))

    def loss(self, batch: Batch, steps: int, share: float = 1.0) -> Tensor:
        """Of the anchors, a random ``share`` goes on after the first step, and weighs the more for it."""
        head, (size, length) = self.head(), batch.tokens_BT.shape
        weight_WE = self.weights["lm_head.weight"].to(torch.bfloat16)
        anchors = torch.arange(batch.start, length)
        position_BA = anchors.expand(size, -1)
        drafted_from = position_BA >= batch.prompt_B[:, None] - 1
        known_BT = self.maps["t2d"][batch.tokens_BT]
        wanted, place_BT = self._wanted(batch)
        attend = BatchAttention(size, length, batch.start)
        keep = torch.arange(size * length).view(size, length)[:, batch.start :].flatten()
        following_BT = torch.cat([batch.tokens_BT[:, 1:], batch.tokens_BT[:, :1]], dim=1)
        output = head.forward(
            head.embed(following_BT.flatten()),
            head.fuse(batch.features.flatten(0, 1)),
            torch.arange(length).repeat(size),
            attend,
            keep,
        )
        total, count = torch.zeros(()), 0.0
        alive_BA = drafted_from
        for step in range(steps):
            if step == 1 and share < 1:
                some = torch.randperm(len(anchors))[: max(1, round(share * len(anchors)))].sort().values
                feedback = output.feedback_RE.unflatten(0, (size, -1))[:, some].flatten(0, 1)
                output = HeadOutput(output.normed_RE, feedback)
                anchors, position_BA, alive_BA = anchors[some], position_BA[:, some], alive_BA[:, some]
                attend.keep(some)
            if step:
                ahead = (anchors + 1 + step).clamp(max=length - 1)
                embeds = head.embed(batch.tokens_BT[:, ahead].flatten())
                output = head.forward(embeds, output.feedback_RE, (position_BA + step).flatten(), attend)
            predicted = (anchors + 2 + step).clamp(max=length - 1)
            # A token outside of the draft vocabulary ends the chain, so what follows it is never drafted.
            inside = position_BA + 2 + step < batch.length_B[:, None]
            alive_BA = alive_BA & inside & known_BT[:, predicted]
            rows = alive_BA.flatten().nonzero()[:, 0]
            wanted_RW = wanted[place_BT[:, predicted - 1].flatten()[rows]]
            weight = 0.8**step / (share if step else 1.0)
            total = total + weight * distill(output.normed_RE[rows], weight_WE, wanted_RW)
            count += weight * len(rows)
        return total / max(count, 1.0)

    @torch.no_grad()
    def _wanted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's distribution over the draft vocabulary at answer positions, and where each position's stands."""
        position = torch.arange(batch.tokens_BT.shape[1])
        used_BT = (position >= batch.prompt_B[:, None]) & (position < batch.length_B[:, None] - 1)
        place_BT = used_BT.flatten().cumsum(0).view_as(used_BT) - 1
        final = batch.final_BTD[used_BT]
        parts = [F.linear(part, self.target_rows_WD).float().softmax(-1).to(part.dtype) for part in final.split(512)]
        return torch.cat(parts), place_BT

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        named = {
            name.replace("layers.0.", "midlayer."): w.detach().to(torch.bfloat16) for name, w in self.weights.items()
        }
        tensors = named | self.maps
        check_checkpoint(folder.name, self.config, tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.document, indent=2) + "\n")


class Muon:
    """Momentum whose update is made orthogonal by five Newton-Schulz iterations (Jordan et al. 2024)."""

    def __init__(self, matrices: Sequence[Tensor], momentum: float = 0.95) -> None:
        self.matrices, self.momentum = matrices, momentum
        self.velocity = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, velocity in zip(self.matrices, self.velocity, strict=True):
            assert matrix.grad is not None
            velocity.lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonal(matrix.grad.lerp(velocity, self.momentum))
            matrix.add_(update, alpha=-rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
            matrix.grad = None


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly."""
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / (x.float().norm() + 1e-7).to(x.dtype)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    return x.float()


def head_config(target: Target, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """config.json as SGLang reads it: layer ids count from 0 and capture what comes out, so R = id + 1."""
    theirs = json.loads((folder / "config.json").read_text())
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden,
        "target_hidden_size": target.hidden,
        "intermediate_size": args.mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": target.width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": theirs["max_position_embeddings"],
        "vocab_size": theirs["vocab_size"],
        "draft_vocab_size": args.vocabulary,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": theirs["bos_token_id"],
        "eos_token_id": theirs["eos_token_id"],
        "torch_dtype": "bfloat16",
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 15], "use_aux_hidden_state": True},
    }


def start_weights(target: Target, config: HeadConfig, draft_ids_W: Tensor) -> dict[str, Tensor]:
    """lm_head and the last norm start as the target's; other norms at one; matrices small and random."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 2:
            weights[name] = torch.randn(shape, generator=generator) * 0.5 * shape[1] ** -0.5
        elif name != "d2t":
            weights[name] = torch.ones(shape)
    weights["lm_head.weight"] = target.head.weight[draft_ids_W].float()
    weights["norm.weight"] = target.norm.float().clone()
    return weights


def draft_vocabulary(rows: Sequence[Row], size: int, vocab: int) -> Tensor:
    """The `size` most frequent answer tokens, ascending."""
    counts = torch.zeros(vocab, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(torch.tensor(row.tokens[row.prompt :]), minlength=vocab)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    print(f"draft vocabulary {size}: {counts[ids].sum() / counts.sum():.2%} of answer tokens", flush=True)
    return ids


def schedule(progress: float, iteration: int, fall_from: float) -> float:
    """Learning rate as a share of its peak: short warm-up, level, then a linear fall."""
    fall = (1 - progress) / max(1e-9, 1 - fall_from)
    return min(1.0, (iteration + 1) / 20) * max(0.02, min(1.0, fall))


def epochs(groups: list[list[Row]], seed: int) -> Iterator[list[Row]]:
    random = Random(seed)
    while True:
        random.shuffle(groups)
        yield from groups


def score(trainer: Trainer, sets: dict[str, list[DraftInput]]) -> str:
    head = trainer.head()
    parts = []
    for name, inputs in sets.items():
        rounds, accepted = count_rounds(head, inputs, 5)
        parts.append(f"{name} {accepted / rounds + 1:.3f}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", type=Path, required=True, help="folder with config.json, model.safetensors (bf16), tokenizer.json"
    )
    parser.add_argument("--text", action="append", required=True, help="FILE.jsonl.gz:FEATURES_FOLDER; may be repeated")
    parser.add_argument("--prompts", type=Path, help="jsonl of unseen prompts to score on, too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="state.pt of an earlier run")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--steps", default="1:0.5,2:0.75,4:1", help="training-time-test steps and the share of time they end at"
    )
    parser.add_argument("--fall-from", type=float, default=0.5, help="share of time from which the rate falls")
    parser.add_argument("--anchors", type=float, default=1.0, help="share of anchors that steps after the first run on")
    parser.add_argument("--batch", type=int, default=12, help="conversations in a batch")
    parser.add_argument("--score-every", type=float, default=4, help="minutes")
    parser.add_argument("--vocabulary", type=int, default=5504)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=1024)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target = Target(args.target)
    texts = [read_text(spec, target) for spec in args.text]
    held_out = texts[0][::HELD_OUT]
    texts[0] = [row for i, row in enumerate(texts[0]) if i % HELD_OUT]
    rows = [row for text in texts for row in text]
    print(f"{len(rows)} conversations, {sum(len(r.tokens) - r.prompt for r in rows)} answer tokens", flush=True)
    state = torch.load(args.resume, weights_only=True) if args.resume else {}
    config = state.get("config") or head_config(target, args.target, args)
    draft_ids = state["ids"] if state else draft_vocabulary(rows, args.vocabulary, config["vocab_size"])
    trainer = Trainer(
        target, config, draft_ids, state.get("weights") or start_weights(target, parse_config(config), draft_ids)
    )
    matrices = [w for name, w in trainer.weights.items() if name.split(".")[-2] in MATRICES]
    others = [w for w in trainer.weights.values() if all(w is not matrix for matrix in matrices)]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=args.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    if state:
        muon.velocity = state["muon"]
        adam.load_state_dict(state["adam"])

    held_out = [row for row in held_out if row.greedy][:64]
    sets = {"held-out": [_cut(target, row, kept) for row in held_out for kept in row.store.load([row])]}
    if args.prompts:
        tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
        sets["prompts"] = answer_greedily(target, tokenizer, read_prompts(args.prompts), 128)
    stages = [(int(steps), float(until)) for steps, until in (part.split(":") for part in args.steps.split(","))]

    groups = [group for text in texts for group in batches(text, args.batch)]
    started, scored, smooth = time.monotonic(), time.monotonic(), math.nan
    for iteration, group in enumerate(epochs(groups, args.seed)):
        progress = (time.monotonic() - started) / (60 * args.minutes)
        done = progress >= 1
        if done or time.monotonic() - scored > 60 * args.score_every:
            trainer.export(args.out)
            saved = {"config": config, "ids": draft_ids, "weights": {k: w.detach() for k, w in trainer.weights.items()}}
            torch.save(saved | {"muon": muon.velocity, "adam": adam.state_dict()}, args.out / "state.pt")
            print(f"{iteration}: {progress * args.minutes:.1f} min, accept length {score(trainer, sets)}", flush=True)
            scored = time.monotonic()
        if done:
            return
        steps = next(steps for steps, until in stages if progress <= until or until >= 1)
        loss = trainer.loss(collate(group, target), steps, args.anchors)
        loss.backward()
        rate = schedule(progress, iteration, args.fall_from)
        muon.step(args.muon_rate * rate)
        adam.param_groups[0]["lr"] = args.adam_rate * rate
        adam.step()
        adam.zero_grad()
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        if iteration % 20 == 0:
            seconds = time.monotonic() - started
            print(f"{iteration}: {seconds / 60:.1f} min, {steps} steps, loss {smooth:.3f}", flush=True)


def _cut(target: Target, row: Row, kept: Tensor) -> DraftInput:
    tokens = row.tokens[: row.prompt + 64]
    return draft_input(target, tokens, kept[: len(tokens) - 1], row.prompt)


if __name__ == "__main__":
    main()
