"""What it costs to hold a trace against its checksums, the first time and remembered, beside reading its rows at all.

PYTHONPATH=tests .venv/bin/python -P tests/bench/bench_verify.py [GiB]
"""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from support.trace_maker import changed, make_header, make_request

from replay.traces import verify
from replay.traces.header import TapInfo
from replay.traces.reader import Trace
from replay.traces.writer import TraceWriter

ROWS, SHARDS = 1 << 14, 8


def write(folder: Path, size: float) -> None:
    """A trace whose tap 2 fills about so many GiB; its rows are noise."""
    width = int(size * 2**30) // (2 * ROWS * SHARDS)
    base = make_header()
    header = replace(
        base, target=replace(base.target, hidden_size=width), embed="lookup",
        taps={name: TapInfo("bfloat16", width) for name in ("2", "final")},
    )  # fmt: skip
    with TraceWriter.create(folder, header) as writer:
        for number in range(SHARDS):
            request = make_request(f"r{number}", number, prompt=ROWS // 2 - 3, output=4)
            rows = ROWS // 2
            taps = {name: torch.randn(rows, width).bfloat16() for name in ("2", "final")}
            writer.add([changed(request, taps=taps)])
        writer.finish()


def seconds(folder: Path, *, check: bool) -> float:
    """Of processor time, to open the trace and read all its rows."""
    start = time.process_time()
    trace = Trace.open(folder, verify=check)
    for index in range(len(trace)):
        trace.read(index, ["2", "final"])
    return time.process_time() - start


def main() -> None:
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    folder = Path(tempfile.mkdtemp())
    os.environ["REPLAY_CACHE"] = str(folder / "cache")
    try:
        write(folder / "trace", size)
        time.sleep(verify._FRESH / 1e9)
        told = sum(file.stat().st_size for file in (folder / "trace").iterdir()) / 2**30
        seconds(folder / "trace", check=False)  # into the page cache
        plain, first, again = (seconds(folder / "trace", check=check) for check in (False, True, True))
        print(f"{told:.2f} GiB: {plain:.2f} s without, {first:.2f} s the first time, {again:.2f} s remembered")
        print(f"checksums: {told / (first - plain):.2f} GiB/s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
