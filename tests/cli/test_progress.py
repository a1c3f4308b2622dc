"""How far a command is: lines without a terminal, -q and -v, and that the events move within one pack of requests."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.every_command import every_command
from support.heads import tiny_config, write_head
from support.trace_maker import H, V, make_four, make_header, make_request, write_trace

import replay
from replay.capture.events import CaptureProgress, CaptureResult, Loading, Planned
from replay.cli import progress as module
from replay.cli.app import cli
from replay.cli.progress import Progress, State, spell_seconds
from replay.simulator import simulation
from replay.simulator.cache import open_cache, simulate_cached
from replay.simulator.progress import ReplayProgress

CONFIG = tiny_config(hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1]})
NOTE = ("--num-draft-tokens", "9")  # of a chain of 5 steps, which is noted


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_rate_and_time_left() -> None:
    """80 of 480 in 40 s are 2 a second, and 400 are left."""
    lines: list[str] = []
    clock = Clock()
    told = Progress("preparing", write=lines.append, clock=clock)
    clock.now += 7
    told.tell()
    told.update("replaying", 0, 480, "requests")
    clock.now += 40
    told.update("replaying", 80, 480, "requests", also="3 safe")
    told.tell()
    assert lines == [
        "replay: preparing for 7 s",
        "replay: replaying for 40 s, 80 of 480 requests (17%), 2 requests/s, about 3 min left, 3 safe",
    ]


def test_another_stage_has_a_rate_of_its_own() -> None:
    first = State("one", "requests", 0.0, 10.0, 0.0)
    assert first.moved("one", 5.0, 10.0, "requests", "", 5.0).rate(5.0) == 1.0
    second = first.moved("two", 4.0, 10.0, "requests", "", 20.0)
    assert second.rate(21.0) is None
    assert second.moved("two", 8.0, 10.0, "requests", "", 21.0).rate(22.0) == 2.0


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "2 h 0 min"), (7500, "2 h 5 min")]
)
def test_times_are_spelled(seconds: float, said: str) -> None:
    assert spell_seconds(seconds) == said


@pytest.fixture
def typed(tmp_path: Path) -> list[str]:
    trace = write_trace(tmp_path / "trace", [make_four()])
    return ["simulate", str(trace), "--draft", str(write_head(tmp_path / "d", CONFIG)), *NOTE]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that takes 0.3 s, and lines after 0.1 s and then every 0.1 s."""
    real: Any = simulation.simulate_with_notes

    def simulate(*given: Any, on_event: Any, **named: Any) -> Any:
        on_event(ReplayProgress(1, 4))
        time.sleep(0.3)
        return real(*given, on_event=on_event, **named)

    monkeypatch.setattr("replay.simulator.cache.simulate_with_notes", simulate)
    monkeypatch.setattr(module.show_progress.__wrapped__, "__kwdefaults__", {"first": 0.1, "every": 0.1})
    monkeypatch.setattr(module, "VERBOSE", 0.02)


@pytest.mark.usefixtures("slow")
def test_long_work_without_a_terminal_says_how_far_it_is(typed: list[str]) -> None:
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 0, done.output
    note, *lines = done.stderr.splitlines()
    assert note.startswith("note: topk 1") and 1 <= len(lines) <= 4
    assert re.fullmatch(r"replay: replaying for 0 s, 1 of 4 requests \(25%\)(, .*)?", lines[0])
    loud = CliRunner().invoke(cli, [*typed, "-v"]).stderr.splitlines()
    assert len(loud) > len(lines) + 1


def test_short_work_says_nothing(typed: list[str]) -> None:
    assert "replaying" not in CliRunner().invoke(cli, typed).stderr


@pytest.mark.usefixtures("slow")
def test_quiet_is_quiet_but_for_a_refusal(typed: list[str]) -> None:
    done = CliRunner().invoke(cli, [*typed, "-q"])
    assert (done.exit_code, done.stderr) == (0, "") and "Accept length" in done.stdout
    refused = CliRunner().invoke(cli, [*typed, "--quiet", "--temperature", "1"])
    assert refused.exit_code == 1 and "temperature 1 was asked for" in refused.stderr


@pytest.mark.parametrize("command", [command for _, command in every_command(cli)], ids=lambda command: command.name)
def test_every_command_can_be_quiet_or_verbose_but_not_both(command: click.Command) -> None:
    assert {"-q", "-v"} <= {name for option in command.params for name in option.opts}
    with pytest.raises(click.UsageError, match="one of --quiet and --verbose"):
        command.make_context(command.name, ["-q", "-v"])


def test_progress_moves_within_one_pack_of_16_requests(tmp_path: Path) -> None:
    """All of them fit one pass, and the variants are what is left to go through."""
    header = replace(make_header(), taps={**make_header().taps})
    trace = write_trace(tmp_path / "t", [[make_request(f"r{n}", n, output=6) for n in range(16)]], header=header)
    head = replay.load_head(write_head(tmp_path / "d", CONFIG))
    wirings = [replay.parse_wiring(text, layers=4) for text in ("embed,2", "2,embed", "2,final", "final,2")]
    events: list[ReplayProgress] = []
    replay.simulate(
        replay.Trace.open(trace), {"h": head}, replay.sweep(draft=["h"], wiring=wirings), on_event=events.append
    )
    assert [one.done + one.part for one in events] == [4, 8, 12, 16, 16]
    assert {one.total for one in events} == {16}


def test_a_capture_says_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from replay.cli.capture import run_capture

    seen: list[State] = []
    real = Progress.update

    def update(self: Progress, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        seen.append(self.state)

    def capture(_: object, on_event: Any) -> CaptureResult:
        on_event(Loading("m", 2))
        on_event(Planned(2, 0, 5, 40))
        on_event(CaptureProgress(1, 2, 10, 30, 2.0, 5.0))
        return CaptureResult(tmp_path, 2, 2, 5, 20, 1.0, ("final",), "lookup")

    monkeypatch.setattr(Progress, "update", update)
    monkeypatch.setattr("replay.capture.local.record.capture_local", capture)
    run_capture(replay.CaptureOptions(model="m", prompts=tmp_path, out=tmp_path))
    assert [one.stage for one in seen] == ["loading the target", "recording", "recording"]
    assert (seen[-1].done, seen[-1].total, seen[-1].also) == (10, 40, "1 of 2 requests safe")


@pytest.mark.usefixtures("slow")
def test_a_terminal_gets_a_bar_and_no_line_but_after_v(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    bar = CliRunner().invoke(cli, typed).stderr
    assert "25%" in bar and "replay: replaying" not in bar
    assert "replay: replaying" in CliRunner().invoke(cli, [*typed, "-v"]).stderr


def test_a_sweep_with_a_cache_is_counted_over_all_that_is_replayed(tmp_path: Path) -> None:
    """Two wirings share no pass, so that four requests are replayed twice."""
    trace = replay.Trace.open(write_trace(tmp_path / "t", [make_four()]))
    heads = {"h": replay.load_head(write_head(tmp_path / "d", CONFIG))}
    wirings = [replay.parse_wiring(text, layers=4) for text in ("embed,2", "2,embed")]
    events: list[ReplayProgress] = []
    cache = open_cache(tmp_path / "c", trace, heads, "cpu", agreement=False)
    asked = replay.sweep(draft=["h"], wiring=wirings)
    simulate_cached(cache, trace, heads, asked, agreement=False, on_event=events.append)
    assert {(event.stage, event.total) for event in events} == {("replaying", 8)}
    done = [event.done + event.part for event in events]
    assert done == sorted(done) and done[-1] == 8
