"""Benchmark: tokens a second of an SGLang server on the CPU rig with recording off and on.

    python tests/bench_recording.py [--target DIR] [--draft DIR] [--prompts FILE] [--requests 8] [--repeats 5]

Two servers stand side by side, one plain and one that ``replay serve`` would have started, and take turns on the same
prompts: what else the machine does strikes both. *Off* is answers alone; *on* is ``replay capture --server`` with all
that it does here too: rows through the spool, joined, checked and written to a trace. Outputs and histograms of the two
servers are held against each other on the way. Not part of ``make test``.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rig.server import Server, start_server

import replay
from replay.capture.events import Event, Finished, Planned
from replay.capture.recording import RECORD_VARIABLE
from replay.capture.serve import ServeOptions, prepare
from replay.capture.server import capture_server
from replay.capture.server_ask import ServerOptions
from replay.demo import sample_head, sample_prompts

# A server that waits must not take the processor from the one that works.
PATIENT = ("--sleep-on-idle",)


@dataclass(frozen=True)
class Load:
    """What each turn asks for."""

    prompts: Path
    new_tokens: int
    concurrency: int


@contextmanager
def servers(target: Path, draft: Path, steps: int, folder: Path) -> Iterator[tuple[Server, Server]]:
    """A plain server and one that records into ``folder``."""
    arguments = ["--model-path", str(target), "--speculative-algorithm", "EAGLE3",
                 "--speculative-draft-model-path", str(draft)]  # fmt: skip
    made = prepare(ServeOptions(folder, arguments), {})
    recording = {RECORD_VARIABLE: made.environment[RECORD_VARIABLE]}
    with ExitStack() as stack:
        plain, recorded = (
            stack.enter_context(
                start_server(target, draft, log=folder.parent / name, steps=steps, extra_args=PATIENT, env=env)
            )
            for name, env in (("plain.log", {}), ("recorded.log", recording))
        )
        yield plain, recorded


def capture(server: Server, load: Load, out: Path) -> tuple[float, replay.Trace]:
    """Tokens a second of one capture, from its first prompt to its finished trace."""
    at: dict[type[Event], float] = {}

    def note(event: Event) -> None:
        at[type(event)] = time.monotonic()

    options = ServerOptions(
        server.url, load.prompts, out, max_new_tokens=load.new_tokens, concurrency=load.concurrency, weights=False
    )
    result = capture_server(options, note)
    return result.output_tokens / (at[Finished] - at[Planned]), replay.Trace.open(out)


def answer(server: Server, load: Load, trace: replay.Trace) -> float:
    """Tokens a second of the same prompts with recording off; raises where an answer is not the trace's."""
    rows = [trace.read(index, []) for index in range(len(trace))]
    began = time.monotonic()
    answers = server.generate(
        [one.tokens[: one.prompt_tokens].tolist() for one in rows],
        max_new_tokens=load.new_tokens, concurrency=load.concurrency,
    )  # fmt: skip
    seconds = time.monotonic() - began
    for one, record, given in zip(rows, trace.records, answers, strict=True):
        same = one.tokens[one.prompt_tokens :].tolist() == given.output_ids
        counted = tuple(given.meta_info["spec_correct_drafts_histogram"])
        if not same or record.server_histogram != counted:
            click.echo(f"{record.request_id}: another {'histogram' if same else 'output'} with recording off")
    return sum(len(given.output_ids) for given in answers) / seconds


def report(off: Sequence[float], on: Sequence[float]) -> str:
    """Medians, and the median of what each pair of turns lost."""
    lost = [1 - slow / fast for fast, slow in zip(off, on, strict=True)]
    return (
        f"recording off {statistics.median(off):.2f} tokens/s, on {statistics.median(on):.2f} (medians of {len(on)}); "
        f"recording costs {100 * statistics.median(lost):.1f} % ({100 * min(lost):.1f} to {100 * max(lost):.1f} %)"
    )


@click.command()
@click.option("--target", type=click.Path(path_type=Path), help="[default: SmolLM2-135M-Instruct]")
@click.option("--draft", type=click.Path(path_type=Path), help="[default: the head that comes with the project]")
@click.option("--prompts", type=click.Path(path_type=Path), help="[default: those of replay demo]")
@click.option("--requests", type=int, default=8)
@click.option("--repeats", type=int, default=5)
@click.option("--steps", type=int, default=5)
@click.option("--new-tokens", type=int, default=48)
@click.option("--concurrency", type=int, default=4)
def main(
    target: Path | None, draft: Path | None, prompts: Path | None, requests: int, repeats: int, steps: int,
    new_tokens: int, concurrency: int,
) -> None:  # fmt: skip
    """Print both rates, turn by turn, and what recording costs."""
    from replay.capture.smollm2 import smollm2

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = folder / "prompts.jsonl"
        chosen.write_text("\n".join((prompts or sample_prompts()).read_text().splitlines()[:requests]))
        load = Load(chosen, new_tokens, concurrency)
        off: list[float] = []
        on: list[float] = []
        with servers(target or smollm2(), draft or sample_head(), steps, folder / "recording") as (plain, recorded):
            for turn in range(repeats + 1):  # the first warms both up
                rate, trace = capture(recorded, load, folder / f"trace-{turn}")
                on.append(rate)
                off.append(answer(plain, load, trace))
                click.echo(f"{'warm-up' if turn == 0 else turn}: off {off[-1]:.2f}, on {on[-1]:.2f} tokens/s")
        click.echo(report(off[1:], on[1:]))


if __name__ == "__main__":
    main()
