"""Options and arguments that several commands take, each said once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.cli.terminal import say
from replay.errors import UsageError
from replay.traces.addresses import is_address, is_pattern, parse_address, refuse_address
from replay.traces.remote import as_source

if TYPE_CHECKING:
    from replay.check.facts import Target
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.engines.wiring import Wiring
    from replay.traces.header import TargetInfo
    from replay.traces.parts import Part
    from replay.traces.reader import Trace

Command = Callable[..., None]


class _Source(click.Path):
    """A path that is read from, or an address in storage elsewhere."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return as_source(value) if is_address(value) else super().convert(value, param, ctx)


class _Heads(_Source):
    """A source; of several heads in storage their pattern, as text (drafts.py)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        several = is_address(value) and is_pattern(value)
        return parse_address(value, pattern=True) if several else super().convert(value, param, ctx)


class _Place(click.Path):
    """A path of this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        refuse_address(value)
        return super().convert(value, param, ctx)


SOURCE = _Source(path_type=Path)
HEADS = _Heads(path_type=Path)
PATH = _Place(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
trace_argument = click.argument("trace", type=SOURCE, metavar="TRACE")
draft_option = click.option(
    "--draft", required=True, type=SOURCE, metavar="DIR|ID", help="Draft head's folder, or its hub id, e.g. org/name."
)
trained_wiring_option = click.option(
    "--wiring",
    metavar="W",
    help="What the head was trained on, if you know it: taps, e.g. embed,3,31, or an engine's layer ids, e.g. "
    "specforge:1,14,26; config is what the head states.",
)
target_option = click.option(
    "--target",
    type=SOURCE,
    metavar="DIR",
    help="The target's checkpoint, if the trace lacks its weights (--no-weights) and it has moved.",
)
observed_option = click.option(
    "--observed",
    metavar="FILE|ACCEPT_LENGTH",
    help="What a server accepted elsewhere: an accept length; or a log of SGLang, vLLM or llama.cpp, a /metrics page, "
    "a /server_info document, TensorRT-LLM's iteration statistics, or answers that have one.",
)
no_verify_option = click.option(
    "--no-verify",
    is_flag=True,
    help="Read trace.json and the rows of the trace as they are, without a look at their checksums.",
)
cache_option = click.option(
    "--cache",
    type=PATH,
    metavar="DIR",
    help="Keep what was replayed here, and replay nothing twice. It holds at most 20 GB, or REPLAY_CACHE_GB. Safe to "
    "delete.",
)
sort_option = click.option(
    "--sort",
    type=click.Choice(("typed", "length")),
    help="Rows of the table as typed, or by accept length.  [default: typed, of more than 12 variants length]",
)
top_option = click.option("--top", type=click.IntRange(min=1), metavar="N", help="Show the first N rows only.")
format_option = click.option(
    "--format",
    "table_format",
    type=click.Choice(("csv", "md", "parquet")),
    help="Print the table alone, in this form, instead of the report.",
)
api_key_option = click.option(
    "--api-key", envvar="REPLAY_API_KEY", metavar="KEY", help="Of the server.  [default: $REPLAY_API_KEY, else none]"
)


def source_options(command: Command) -> Command:
    """Where what a rounds file names lies now, ``trace``, ``draft`` and ``target``, and ``no_verify``."""
    said = "[default: as the rounds say]"
    for option in (
        no_verify_option,
        target_option,
        click.option("--draft", type=SOURCE, metavar="DIR", help=f"The head, if it has moved.  {said}"),
        click.option("--trace", type=SOURCE, metavar="DIR", help=f"The trace, if it has moved.  {said}"),
    ):
        command = option(command)
    return command


def part_options(command: Command) -> Command:
    """Options that ask for a part of a trace; the command takes them as ``read_part`` does."""
    for option in (
        click.option(
            "--limit",
            type=int,
            metavar="N",
            help="Of what is left, the first N requests, of each trace that is replayed.",
        ),
        click.option(
            "--first-turn", is_flag=True, help="Of requests NAME#1, NAME#2, ... of one text, the first alone."
        ),
        click.option("--request", multiple=True, metavar="ID", help="Only this request; repeat for several."),
        click.option(
            "--category", multiple=True, metavar="NAME", help="Only requests of this category; repeat for several."
        ),
    ):
        command = option(command)
    return command


def read_part(category: tuple[str, ...], request: tuple[str, ...], first_turn: bool, limit: int | None) -> "Part":
    """What the part options asked for."""
    from replay.traces.parts import Part

    return Part(category, request, first_turn, limit)


def workers_options(command: Command) -> Command:
    """Who replays; the command takes them as ``read_workers`` does."""
    for option in (
        click.option(
            "--ray",
            metavar="auto|local|HOST:PORT",
            help="Replay as tasks of a Ray cluster, with the same result; auto is that of this machine.",
        ),
        click.option(
            "--workers",
            type=int,
            metavar="N",
            help="Replay in N processes side by side, with the same result.  [default: 1, this process]",
        ),
    ):
        command = option(command)
    return command


def read_workers(workers: int | None, ray: str | None) -> int | str | None:
    """What the options of workers asked for. Raises UsageError for what cannot be, and for both."""
    if workers is not None:
        from replay.simulator.workers import check_workers

        check_workers(workers)
    if ray is None:
        return workers
    from replay.simulator.connection import check_address

    check_address(ray)
    if workers is not None:
        raise UsageError("--workers are processes of this machine, --ray those of a cluster; type one of them")
    return ray


def open_whole(
    path: Path, target: Path | None = None, *, allow_incomplete: bool = False, verify: bool = True
) -> "Trace":
    """The trace that was typed, and after --target where the target's checkpoint is now.

    Raises UsageError for the checkpoint of another target, and as ``Trace.open``.
    """
    from replay.check.mistaken import refuse_no_trace
    from replay.traces.reader import Trace

    refuse_no_trace(path)
    opened = Trace.open(path, allow_incomplete=allow_incomplete, target=target, verify=verify)
    if target is not None:
        _check_target(target, opened)
    return opened


def open_trace(path: Path, part: "Part", target: Path | None = None, *, verify: bool = True) -> "Trace":
    """The part of a trace that is asked for; of an unfinished one what is whole. Raises as ``open_whole``."""
    return _open_begun(path, target, verify).take(part)


def open_traces(
    paths: Mapping[str, Path], part: "Part", target: Path | None = None, *, verify: bool = True
) -> "dict[str, Trace]":
    """The part of each of several traces, as ``open_trace``. Those without any of what is asked for are left out.

    Each is held against its checksums now, so that none fails after another was replayed. Raises as ``open_trace``
    and ``choose_of_each``.
    """
    from replay.traces.parts import choose_of_each

    whole = {name: _open_begun(path, target, verify) for name, path in paths.items()}
    if len(whole) == 1 or part.whole:
        opened = {name: trace.take(part) for name, trace in whole.items()}
    else:
        parts = choose_of_each(part, {name: trace.records for name, trace in whole.items()})
        for name in whole.keys() - parts.keys():
            say(f"note: trace {name} has no such request and is left out ({part})")
        opened = {name: whole[name].take(within) for name, within in parts.items()}
    if len(whole) > 1:
        for trace in opened.values():
            trace.check_sums()
    return opened


def _open_begun(path: Path, target: Path | None, verify: bool) -> "Trace":
    from replay.errors import TraceIncompleteError

    opened = open_whole(path, target, allow_incomplete=True, verify=verify)
    if not opened.records and opened.header.state != "complete":
        raise TraceIncompleteError(f"{path} holds no whole request yet; wait for one, or capture with --resume")
    return opened


def read_draft(path: Path) -> "Checkpoint":
    """The head in a folder that was typed after --draft. Raises UsageError for a target's, CheckpointError."""
    from replay.check.inspection import refuse_target
    from replay.checkpoint.checkpoint import read_checkpoint
    from replay.checkpoint.hub import head_folder

    folder = head_folder(path)
    refuse_target(folder)
    return read_checkpoint(folder)


def _check_target(target: Path, trace: "Trace") -> None:
    from replay.capture.target_files import fingerprint_target

    if not target.is_dir():
        raise UsageError(f"--target {target} is no folder; give that of the target's checkpoint")
    if trace.header.target.fingerprint and fingerprint_target(target) != trace.header.target.fingerprint:
        raise UsageError(
            f"--target {target} is not the checkpoint of {trace.header.target.name} that {trace.path} was recorded "
            "from; give that one, with all its files as they were"
        )


def parse_wiring_option(text: str | None, target: "TargetInfo | Target") -> "Wiring | None":
    """The wiring that was typed for this target; None where none was, or the head's own. Raises WiringError."""
    from replay.engines.wiring import CONFIG, parse_wiring

    if text is None or text.strip() == CONFIG:
        return None
    return parse_wiring(text, layers=target.layers, architecture=target.architecture)
