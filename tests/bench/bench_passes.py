"""Benchmark: drafts of every anchor, a pass per step, against the slow twin; and time against the number of anchors.

    PYTHONPATH=tests python -P tests/bench/bench_passes.py TRACE DRAFT [--requests N] [--steps K]

Both run in one process on the same requests, after a warm-up; the time of the passes is the median of several runs.
Judge ratios, not seconds. Not part of ``make test``.
"""

from pathlib import Path
from statistics import median
from time import perf_counter

import click
import torch
from twins.rounds import replay_request

import replay
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import PACK_ROWS, draft_input


def packs(inputs: list[DraftInput]) -> list[list[DraftInput]]:
    """As simulate packs them."""
    result: list[list[DraftInput]] = [[]]
    for item in inputs:
        if result[-1] and sum(len(other.tokens_T) for other in result[-1]) + len(item.tokens_T) > PACK_ROWS:
            result.append([])
        result[-1].append(item)
    return result


def pass_seconds(head: object, inputs: list[DraftInput], steps: int, runs: int) -> float:
    times = []
    for _ in range(runs):
        start = perf_counter()
        for pack in packs(inputs):
            draft_every_anchor(head, pack, steps)  # type: ignore[arg-type]
        times.append(perf_counter() - start)
    return median(times)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--requests", type=int, default=None, help="Only the first N requests.")
@click.option("--steps", type=int, default=5)
@click.option("--runs", type=int, default=5)
def main(trace: Path, draft: Path, requests: int | None, steps: int, runs: int) -> None:
    """Print times of passes and twin, and time per anchor over growing parts of the trace."""
    opened = replay.Trace.open(trace)
    checkpoint = replay.load_head(draft)
    variant = resolve(replay.Variant(checkpoint.name, steps=steps), checkpoint, opened)
    head = build_head(checkpoint, variant, opened)
    count = min(requests or len(opened.requests), len(opened.requests))
    inputs = [draft_input(opened.read(index, variant.wiring.taps), variant.wiring) for index in range(count)]
    with torch.inference_mode():
        pass_seconds(head, inputs, steps, 1)
        print(f"{'requests':>9} {'anchors':>9} {'seconds':>9} {'us/anchor':>10}")
        for part in sorted({max(1, count // share) for share in (8, 4, 2, 1)}):
            anchors = sum(item.anchors for item in inputs[:part])
            seconds = pass_seconds(head, inputs[:part], steps, runs)
            print(f"{part:>9} {anchors:>9} {seconds:>9.3f} {seconds / anchors * 1e6:>10.1f}")
        start = perf_counter()
        rounds = 0
        for item in inputs:
            rounds += len(replay_request(head, item.tokens_T, item.features_RKD, item.prompt_tokens, steps))
        twin = perf_counter() - start
    print(f"twin: {rounds} rounds in {twin:.1f} s; passes: all {anchors} anchors in {seconds:.3f} s, "
          f"{twin / seconds:.0f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
