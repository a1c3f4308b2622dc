"""Benchmark: one sweep of 32 variants against 32 single replays of the same trace, for two kinds of sweep.

    PYTHONPATH=tests python -P tests/bench/bench_sweep.py TRACE DRAFT

*Steps*: 4 wirings x 1 to 8 steps; all steps of a wiring come out of one run. *Faults*: 2 wirings x 1, 3, 5, 7 steps x 4
faults; of these faults three share a first pass, and each drafts by itself from there on. Both sides run in one
process, so that neither pays for imports; the single runs are one ``replay.simulate`` each. Not part of ``make test``.
"""

from pathlib import Path
from time import perf_counter

import click

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.faults.table import parse_faults
from replay.simulator.variant import sweep

FAULTS = ("none", "position.offset=1", "kv.slot-write=overwrite", "wiring.recycle-norm=other")


WIRINGS = ("embed,3,16", "3,16,28", "3,embed,16", "embed,16,28")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--wiring", "wirings", multiple=True, default=WIRINGS, help="four; of faults the first two are swept")
def main(trace: Path, draft: Path, wirings: tuple[str, ...]) -> None:
    """Print both times and their ratio; every single run is timed, the sweep once before and once after them."""
    opened, heads = replay.Trace.open(trace), {"head": replay.load_head(draft)}
    taps = [replay.parse_wiring(text) for text in wirings]
    faults = [parse_faults(text) for text in FAULTS]
    for name, variants in {
        "steps": sweep(draft=["head"], wiring=taps, steps=list(range(1, 9))),
        "faults": sweep(draft=["head"], wiring=taps[:2], steps=[1, 3, 5, 7], faults=faults),
    }.items():
        replay.simulate(opened, heads, variants[:1])  # warm up
        before = _seconds(opened, heads, variants)
        single = sum(_seconds(opened, heads, [variant]) for variant in variants)
        after = _seconds(opened, heads, variants)
        once = (before + after) / 2
        print(
            f"{name}: {len(variants)} variants: one sweep {once:.1f} s ({before:.1f} and {after:.1f}), single runs "
            f"{single:.1f} s: {once / single:.2f} of them",
            flush=True,
        )


def _seconds(trace: replay.Trace, heads: dict[str, Checkpoint], variants: list[replay.Variant]) -> float:
    start = perf_counter()
    replay.simulate(trace, heads, variants)
    return perf_counter() - start


if __name__ == "__main__":
    main()
