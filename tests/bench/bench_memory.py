"""Benchmark: peak memory of ``replay simulate`` on a trace and on the same trace eight times over.

    PYTHONPATH=tests python -P tests/bench/bench_memory.py TRACE DRAFT [--times 8]

Each runs in a process of its own; peak resident memory is the kernel's count (VmHWM). Not part of ``make test``.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click

import replay
from replay.traces.captured import CapturedRequest
from replay.traces.writer import TraceWriter

# The command itself, then the kernel's own count of the most memory that this process ever held.
RUN = """
import sys
from replay.cli.app import cli
cli(sys.argv[1:], standalone_mode=False)
status = open("/proc/self/status").read()
print(status.split("VmHWM:")[1].split("kB")[0].strip(), file=sys.stderr)
"""


def peak_mb(trace: Path, draft: Path) -> float:
    """Peak resident memory of one simulate, in MB."""
    command = [sys.executable, "-c", RUN, "simulate", str(trace), "--draft", str(draft), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stderr.split()[-1]) / 1e3


def repeat(trace: replay.Trace, folder: Path, times: int) -> None:
    """Write ``times`` copies of every request, under ids of their own, into a new trace."""
    header = replace(trace.header, state="recording", requests=None, requests_sha256=None, weights=None, rounds=False,
                     rounds_sha256=None)  # fmt: skip
    with TraceWriter.create(folder, header) as writer:
        writer.write_target_weights(trace.embed_weight(), None)
        for copy in range(times):
            for index, row in enumerate(trace.requests.iter_rows(named=True)):
                rows = trace.read(index, list(header.taps))
                ids, logprobs, logsumexp = trace.logits(index)
                writer.add([
                    CapturedRequest(
                        request_id=f"{copy}-{row['request_id']}",
                        category=row["category"],
                        prompt_ids=rows.tokens[: rows.prompt_tokens].tolist(),
                        output_ids=rows.tokens[rows.prompt_tokens :].tolist(),
                        finish_reason=row["finish_reason"],
                        source=row["source"],
                        temperature=row["temperature"],
                        top_p=row["top_p"],
                        top_k=row["top_k"],
                        taps=rows.taps,
                        topk_ids=ids.int(),
                        topk_logprobs=logprobs,
                        logsumexp=logsumexp,
                    )
                ])  # fmt: skip
        writer.finish()


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--times", type=int, default=8)
def main(trace: Path, draft: Path, times: int) -> None:
    """Print both peaks and their ratio."""
    opened = replay.Trace.open(trace)
    with tempfile.TemporaryDirectory() as folder:
        repeat(opened, Path(folder) / "trace", times)
        once, often = peak_mb(trace, draft), peak_mb(Path(folder) / "trace", draft)
    requests = len(opened.requests)
    print(f"{requests} requests: {once:.0f} MB; {requests * times} requests: {often:.0f} MB ({often / once:.2f} times)")


if __name__ == "__main__":
    main()
