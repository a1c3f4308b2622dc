"""Benchmark: a latent head as wide as Kimi-K2's (7168) on one pack of rows, against the machine's own matrix products.

    PYTHONPATH=tests python -P tests/bench/bench_kimi_size.py [--rows R] [--layers-dim F] [--runs N]

Random weights. For each stage of the first pass it prints the seconds of the head, those of the bare products of the
same shapes, and their ratio: fc, the projections with latent attention and MLP, and lm_head with its argmax. Both run
in one process, in turns, after a warm-up; times are medians. On a CPU without kernels for bf16 the bare products are in
fp32, which is as fast as that CPU multiplies (replay/narrow_products.py). Judge the ratios. Not part of ``make test``:
it takes about 5 GiB, more in fp32, and some minutes of a small machine.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import click
import torch
from support.heads import tiny_config
from support.kimi_sizes import SIZES
from torch import Tensor
from torch.nn import functional

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import parse_config
from replay.checkpoint.tensor_table import expected_tensors
from replay.drafting.first_pass import first_pass
from replay.drafting.next_tokens import next_tokens
from replay.drafting.rows import DraftInput
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.narrow_products import has_kernels


def make_head() -> Head:
    """Random weights in bf16; the target's embedding has the rows that are drafted from alone."""
    config = parse_config(tiny_config(**SIZES))
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        if name == "d2t":
            tensors[name] = torch.zeros(shape, dtype=torch.int64)
        else:
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)
    embed = torch.empty((32000, config.hidden_size), dtype=torch.bfloat16).normal_()
    return Head(Checkpoint("kimi-sized", config, tensors, ()), TargetTables(embed), execution=Execution(torch.bfloat16))


def seconds(runs: int, *works: Callable[[], object]) -> list[float]:
    """The median time of each, run in turns after one warm-up."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(runs + 1):
        for place, work in enumerate(works):
            start = perf_counter()
            work()
            if number:
                times[place].append(perf_counter() - start)
    return [median(one) for one in times]


def products(head: Head, rows: int, anchors: int) -> list[tuple[Tensor, Tensor]]:
    """Operands of the bare products of the layer: every row up to attention, those of anchors alone behind it.

    Attention itself has four: queries into the latents' space and values out of it by head, scores and mixed latents in
    fp32 over every row, as the head computes them.
    """
    heads, latent = head.config.num_heads, head.config.latent
    assert latent is not None
    width, half = latent.kv_rank + latent.rope, torch.bfloat16
    found = [
        (torch.randn(heads, rows, latent.nope).to(half), torch.randn(heads, latent.nope, latent.kv_rank).to(half)),
        (torch.randn(heads * anchors, width), torch.randn(rows, width)),
        (torch.randn(heads * anchors, rows), torch.randn(latent.kv_rank, rows)),
        (
            torch.randn(heads, anchors, latent.kv_rank).to(half),
            torch.randn(heads, latent.kv_rank, latent.value).to(half),
        ),
    ]
    for name, one in head._weights.items():
        if one.ndim == 2 and name.startswith("layers.") and "kv_b_proj" not in name:
            behind = "o_proj" in name or ".mlp." in name
            found.append((torch.randn(anchors if behind else rows, one.shape[1]).to(one.dtype), one))
    return found


def fastest(x: Tensor) -> Tensor:
    """``x`` in the dtype in which this CPU multiplies it fastest."""
    return x if has_kernels(x.dtype) else x.float()


def multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """x times the transposed matrix, or head by head."""
    return torch.bmm(x, matrix) if x.ndim == 3 else functional.linear(x, matrix)


@click.command()
@click.option("--rows", type=int, default=512)
@click.option("--runs", type=int, default=3)
def main(rows: int, runs: int) -> None:
    """Print the seconds of each stage, of the bare products, and their ratio."""
    torch.manual_seed(0)
    with torch.inference_mode():
        head = make_head()
        width = head.config.features_width
        tokens = torch.randint(0, 32000, (rows + 2,))
        features = torch.randn(rows, width).to(torch.bfloat16)
        item = DraftInput(tokens, features, prompt_tokens=rows // 2)
        state = torch.randn(rows, head.config.hidden_size).to(torch.bfloat16)
        layer = [(fastest(x), fastest(matrix)) for x, matrix in products(head, rows, item.anchors)]
        fc, lm_head, wide, last = map(fastest, (head._weights["fc.weight"], head._lm_head_WE, features, state))
        whole, fused = seconds(runs, lambda: first_pass(head, [item]), lambda: head.fuse(features))
        stages = {
            "fc": (lambda: head.fuse(features), lambda: functional.linear(wide, fc)),
            "lm_head and argmax": (lambda: next_tokens(head, state), lambda: functional.linear(last, lm_head)),
        }
        parameters = sum(one.numel() for one in head._weights.values())
        print(f"{parameters / 1e9:.2f} billion parameters, {rows} rows, {torch.get_num_threads()} threads")
        for name, works in stages.items():
            ours, bare = seconds(runs, *works)
            print(f"{name:<28} {ours:8.3f} s   products alone {bare:8.3f} s   {bare / ours:5.0%} of their rate")
        (bare,) = seconds(runs, lambda: [multiply(*pair) for pair in layer])
        ours = whole - fused
        print(f"{'layer with latent attention':<28} {ours:8.3f} s   products alone {bare:8.3f} s   "
              f"{bare / ours:5.0%} of their rate")  # fmt: skip


if __name__ == "__main__":
    main()
