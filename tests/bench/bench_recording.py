"""Benchmark: tokens a second of an SGLang server on the CPU rig with recording off and on, and the bytes it writes.

    PYTHONPATH=tests python -P tests/bench/bench_recording.py [--target DIR] [--draft DIR] [--prompts FILE]
        [--requests 4] [--repeats 11]

Two servers stand side by side, one plain and one that ``replay serve`` would have started, and take turns on the same
prompts: what else the machine does strikes both. *Off* is answers alone; *on* is ``replay capture --server`` with all
that it does here too: rows through the spool, joined, checked and written to a trace. Beside tokens a second, which a
busy machine blurs, stands the processor time of server and client together, which on a CPU server is what a token
costs. Outputs and histograms of the two servers are held against each other on the way. Then the same prompts are
captured once by each choice of what is kept, and the bytes that the server writes are counted. ``--repeats 0`` does
this alone. Not part of ``make test``.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from rig.server import Server, start_server
from support.spooled import counting_spool

import replay
from replay.capture.client.capture import capture_server
from replay.capture.events import Event, Finished, Planned
from replay.capture.options import ServerOptions
from replay.capture.plugin.launch import ServeOptions, prepare
from replay.capture.plugin.recording import RECORD_VARIABLE
from replay.traces.sample_files import sample_head, sample_prompts


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
            stack.enter_context(start_server(target, draft, log=folder.parent / name, steps=steps, env=env))
            for name, env in (("plain.log", {}), ("recorded.log", recording))
        )
        yield plain, recorded


@dataclass(frozen=True)
class Clock:
    """Seconds that have passed, and processor seconds of a server's processes and of this one."""

    wall: float
    cpu: float

    @classmethod
    def read(cls, server: Server) -> "Clock":
        """Now. The server's processes are those of its group (``/proc/PID/stat``: fields 5, 14 and 15)."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if int(fields[2]) == server.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") + time.process_time())


@dataclass(frozen=True)
class Turn:
    """What a server did with the prompts once."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @classmethod
    def between(cls, tokens: int, begun: Clock, ended: Clock) -> "Turn":
        """``tokens`` came from ``begun`` to ``ended``."""
        return cls(tokens, ended.wall - begun.wall, ended.cpu - begun.cpu)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def cost(self) -> float:
        """Processor milliseconds a token."""
        return 1e3 * self.cpu_seconds / self.tokens

    def __str__(self) -> str:
        return f"{self.rate:.2f} tokens/s, {self.cost:.1f} ms of processor a token"


def capture(server: Server, load: Load, out: Path) -> tuple[Turn, replay.Trace]:
    """One capture, from its first prompt to its finished trace."""
    at: dict[type[Event], Clock] = {}

    def note(event: Event) -> None:
        at[type(event)] = Clock.read(server)

    options = ServerOptions(
        server.url, load.prompts, out, max_new_tokens=load.new_tokens, concurrency=load.concurrency, weights=False
    )
    result = capture_server(options, note)
    return Turn.between(result.output_tokens, at[Planned], at[Finished]), replay.Trace.open(out)


def answer(server: Server, load: Load, trace: replay.Trace) -> Turn:
    """The same prompts with recording off; says where an answer is not the trace's."""
    rows = [trace.read(index, []) for index in range(len(trace))]
    begun = Clock.read(server)
    answers = server.generate(
        [one.tokens[: one.prompt_tokens].tolist() for one in rows],
        max_new_tokens=load.new_tokens, concurrency=load.concurrency,
    )  # fmt: skip
    turn = Turn.between(sum(len(given.output_ids) for given in answers), begun, Clock.read(server))
    for one, record, given in zip(rows, trace.records, answers, strict=True):
        same = one.tokens[one.prompt_tokens :].tolist() == given.output_ids
        counted = tuple(given.meta_info["spec_correct_drafts_histogram"])
        if not same or record.server_histogram != counted:
            click.echo(f"{record.request_id}: another {'histogram' if same else 'output'} with recording off")
    return turn


CHOICES: dict[str, dict[str, Any]] = {
    "without a choice": {},
    "--taps-for 1": {"taps_for": 1},
    "--rows fp8": {"rows": "fp8"},
    "--prompt-rows last:32": {"prompt_rows": 32},
    "all three": {"taps_for": 1, "rows": "fp8", "prompt_rows": 32},
}


class Everything:
    """What a client of an older replay asks for."""

    def spell(self) -> str:
        """Nothing in the id."""
        return ""


def spooled_by_choice(server: Server, load: Load, folder: Path) -> Iterator[str]:
    """For each choice, what the server writes and what the trace then holds, in bytes a token."""
    for name, choice in {"everything": {}, **CHOICES}.items():
        out = folder / f"chosen-{name.replace(' ', '-')}"
        options = ServerOptions(
            server.url, load.prompts, out, max_new_tokens=load.new_tokens, concurrency=load.concurrency, weights=False,
            **choice,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch, counting_spool() as spooled:
            if name == "everything":
                patch.setattr("replay.capture.kept.Kept.asked", lambda *_: Everything())
            capture_server(options, lambda _: None)
        tokens = sum(record.tokens for record in replay.Trace.open(out).records)
        stored = sum(path.stat().st_size for path in out.glob("shard-*"))
        files, taps, shards = (round(count / tokens) for count in (spooled.files, spooled.tap_bytes, stored))
        yield (
            f"{name}: {files} bytes a token in files of the server, {taps} of them rows of taps; {shards} in the "
            f"trace ({tokens} tokens)"
        )


def report(off: Sequence[Turn], on: Sequence[Turn]) -> str:
    """Medians, and of each pair of turns what recording added."""
    more = [100 * (with_it.cost / without.cost - 1) for without, with_it in zip(off, on, strict=True)]
    slower = [100 * (1 - with_it.rate / without.rate) for without, with_it in zip(off, on, strict=True)]
    lines = [
        f"{name}: {statistics.median(turn.rate for turn in turns):.2f} tokens/s, "
        f"{statistics.median(turn.cost for turn in turns):.1f} ms of processor a token (medians of {len(turns)})"
        for name, turns in (("recording off", off), ("recording on", on))
    ]
    lines += [
        f"{what} (median of pairs): {statistics.median(parts):.1f} % ({min(parts):.1f} to {max(parts):.1f} %)"
        for what, parts in (("processor time added", more), ("tokens a second lost", slower))
    ]
    return "\n".join(lines)


@click.command()
@click.option("--target", type=click.Path(path_type=Path), help="[default: SmolLM2-135M-Instruct]")
@click.option("--draft", type=click.Path(path_type=Path), help="[default: the head that comes with the project]")
@click.option("--prompts", type=click.Path(path_type=Path), help="[default: those of replay demo]")
@click.option("--requests", type=int, default=4)
@click.option("--repeats", type=int, default=11)
@click.option("--steps", type=int, default=5)
@click.option("--new-tokens", type=int, default=32)
@click.option("--concurrency", type=int, default=4)
def main(
    target: Path | None, draft: Path | None, prompts: Path | None, requests: int, repeats: int, steps: int,
    new_tokens: int, concurrency: int,
) -> None:  # fmt: skip
    """Print both rates, turn by turn, what the server writes by choice, and what recording costs."""
    from replay.capture.demo_target import smollm2

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = folder / "prompts.jsonl"
        chosen.write_text("\n".join((prompts or sample_prompts()).read_text().splitlines()[:requests]))
        load = Load(chosen, new_tokens, concurrency)
        off: list[Turn] = []
        on: list[Turn] = []
        with servers(target or smollm2(), draft or sample_head(), steps, folder / "recording") as (plain, recorded):
            _, trace = capture(recorded, load, folder / "warm-up")
            answer(plain, load, trace)
            for turn in range(repeats):
                if turn % 2:  # whatever drifts, drifts both ways
                    off.append(answer(plain, load, trace))
                on.append(capture(recorded, load, folder / f"trace-{turn}")[0])
                if not turn % 2:
                    off.append(answer(plain, load, trace))
                click.echo(f"{turn}: off {off[-1]}; on {on[-1]}")
            for line in spooled_by_choice(recorded, load, folder):
                click.echo(line)
        if repeats:
            click.echo(report(off, on))


if __name__ == "__main__":
    main()
