"""Benchmark: one sweep of 32 variants against 32 single replays of the same trace.

    python tests/bench_sweep.py TRACE DRAFT

The variants are 2 wirings x 4 numbers of steps x 4 faults. Both sides run in one process, so that neither pays for
imports; the single runs are one ``replay.simulate`` each. Not part of ``make test``.
"""

from pathlib import Path
from time import perf_counter

import click

import replay
from replay.faults import parse_faults
from replay.variant import sweep
from replay.weights import Checkpoint

FAULTS = ("none", "position.offset=1", "kv.slot-write=overwrite", "wiring.recycle-norm=other")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--wiring", "wirings", multiple=True, default=("embed,3,16", "3,16,28"))
def main(trace: Path, draft: Path, wirings: tuple[str, ...]) -> None:
    """Print both times and their ratio; every single run is timed, the sweep once before and once after them."""
    opened, head = replay.Trace.open(trace), replay.load_head(draft)
    variants = sweep(
        draft=["head"],
        wiring=[replay.parse_wiring(text) for text in wirings],
        steps=[1, 3, 5, 7],
        faults=[parse_faults(text) for text in FAULTS],
    )
    heads = {"head": head}
    replay.simulate(opened, heads, variants[:1])  # warm up
    before = _seconds(opened, heads, variants)
    single = sum(_seconds(opened, heads, [variant]) for variant in variants)
    after = _seconds(opened, heads, variants)
    once = (before + after) / 2
    print(
        f"{len(variants)} variants: one sweep {once:.1f} s ({before:.1f} and {after:.1f}), single runs {single:.1f} s: "
          f"{once / single:.2f} of them")  # fmt: skip


def _seconds(trace: replay.Trace, heads: dict[str, Checkpoint], variants: list[replay.Variant]) -> float:
    start = perf_counter()
    replay.simulate(trace, heads, variants)
    return perf_counter() - start


if __name__ == "__main__":
    main()
