"""Timings out of the files that engines' own benchmarks and servers write.

Told apart by what is in them:

- a timings file of ``replay time`` (traces/timings.py): JSON lines with ``round_ms`` of each repeat.
- SGLang's scripts/playground/bench_speculative.py (0.5.23): JSON lines with ``batch_size``, ``steps``, ``topk``,
  ``num_draft_tokens``, ``acc_length`` and ``step_time``, the seconds of a round.
- SGLang's bench_serving (0.5.23, benchmark/serving.py, --output-file) and vLLM's ``vllm bench serve --save-result``
  (0.32): ``mean_tpot_ms``, ``max_concurrency`` or ``concurrency``, and ``accept_length`` or
  ``spec_decode_acceptance_length``. A round lasts TPOT x accept length. Which steps were drafted is not in vLLM's file;
  it is typed behind the file's name.
- an SGLang log (0.5.23, managers/scheduler_components/metrics_reporter.py): decode lines with ``#running-req``,
  ``accept len`` and ``gen throughput (token/s)``. A line counts where the line before it is a decode line of as many
  requests: then nothing was prefilled in its interval. The steps are read from the server's arguments in the same log.
- two or more /metrics pages, ``EARLIER,LATER`` (pages.py).
"""

import codecs
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay.analysis.plan.pages import ROUNDED, is_page, timings_of_pages
from replay.analysis.plan.settings import (
    MOST_BATCH,
    MOST_NODES,
    MOST_STEPS,
    PLAIN,
    Load,
    Setting,
    make_setting,
    read_pairs,
    whole,
)
from replay.analysis.plan.timings import Server, Timing, check_accept, round_seconds
from replay.errors import TraceCorruptError, TraceError, TraceVersionError, UsageError
from replay.printable import counted, one_line, shorten
from replay.traces.fields import is_integer, is_number, parse_json, show
from replay.traces.files import as_path, read_small
from replay.traces.timings import is_measured, read_measured

_MOST = 1 << 26  # bytes of a file that is read
_TYPED = {name: name for name in ("batch", "steps", "topk", "draft_tokens")}
_SECONDS = 10  # for which the page at an address is looked at
_FORMS = (
    "a file of replay time, JSON of bench_speculative, bench_serving or vllm bench serve, two /metrics pages, or an "
    "SGLang log with decode lines"
)
_RUNNING = re.compile(r"#running-req: (\d{1,9})", re.ASCII)
_LENGTH = re.compile(r"accept len: (\d{1,9}(?:\.\d{1,9})?)", re.ASCII)
_SPEED = re.compile(r"gen throughput \(token/s\): (\d{1,12}(?:\.\d{1,9})?)", re.ASCII)
_ARGUMENT = re.compile(r"speculative_(num_steps|eagle_topk|num_draft_tokens)=(\d{1,6})", re.ASCII)


def read_benchmark(typed: str) -> list[Timing]:
    """Timings of ``FILE`` or ``FILE:steps=5,batch=8``; what is typed behind the colon goes before what the file says.

    Raises UsageError for a file that cannot be read or says no time of a round, and for what lacks its steps.
    """
    name, said = _split(typed)
    paths = _paths(name)
    path = paths[0]
    texts = [_read(one) for one in paths]
    if len(texts) > 1 and not all(map(is_page, texts)):
        raise UsageError(f"--bench {name} names several files, and not all are /metrics pages; repeat --bench for each")
    if is_page(texts[0]):
        return timings_of_pages(texts, name, said)
    (text,) = texts
    documents = _documents(text, path)
    if documents is None:
        timings = list(_from_log(text, path, said))
    else:
        timings = [found for where, document in documents for found in _from_document(document, path, where, said)]
    if not timings:
        raise UsageError(f"{path} says no time of a round; possible are {_FORMS}")
    return timings


def _paths(name: str) -> list[Path]:
    """Raises UsageError where one of several names is empty."""
    parts = [name] if "," not in name or as_path(name).exists() else [part.strip() for part in name.split(",")]
    if not all(part.strip() for part in parts):
        raise UsageError(
            f"--bench {shorten(repr(name), 200)} names a file without a name; type FILE, or EARLIER,LATER for two "
            "/metrics pages"
        )
    return [as_path(part) for part in parts]


def places_of(typed: str) -> list[Path | str]:
    """What ``typed`` as --bench reads: the files, links followed, or the address. Raises UsageError."""
    name, _ = _split(typed)
    return [name] if _is_address(name) else [Path(os.path.realpath(path)) for path in _paths(name)]


def address_of_pages(typed: str) -> tuple[str, int] | None:
    """The address of a /metrics page that was typed as --bench, and for how many seconds to look; None for a file."""
    if not _is_address(typed):
        return None
    name, said = _split(typed)
    return name, whole(said, "seconds", _SECONDS, 1, 3600)


def read_pages(typed: str, texts: Sequence[str]) -> list[Timing]:
    """Timings of the pages at the address ``typed``, in the order in which they came. Raises UsageError."""
    name, said = _split(typed)
    return timings_of_pages(texts, name, {key: value for key, value in said.items() if key != "seconds"})


def _read(path: Path) -> str:
    try:
        return _text(read_small(path, _MOST, follow=True))
    except TraceCorruptError as error:
        why = f"{path} is UTF-16; save it as UTF-8" if str(error) == "UTF-16" else f"{error}; give {_FORMS}"
        raise UsageError(why) from error


def _split(typed: str) -> tuple[str, Mapping[str, float]]:
    """The name, and what is typed behind its last colon. A file that is there may have any name."""
    name, colon, words = typed.rpartition(":")
    there = os.path.lexists(typed) or all(map(os.path.lexists, typed.split(",")))
    if there or not colon or "=" not in words or "/" in words:
        return typed, {}
    known = _TYPED | {"seconds": "seconds"} if _is_address(typed) else _TYPED
    return name, read_pairs(words, "--bench", known)


def _is_address(typed: str) -> bool:
    return typed.lower().startswith(("http://", "https://"))


def _text(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TraceCorruptError("UTF-16")
    return data.removeprefix(codecs.BOM_UTF8).decode(errors="replace")


def _documents(text: str, path: Path) -> list[tuple[str, Mapping[str, Any]]] | None:
    """The JSON objects of a document, a list or JSON lines, each with where it stands; None where it is none of these.

    Raises UsageError for a line among JSON objects that is none.
    """
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        whole_text = parse_json(text, "it", ValueError, constants=True)
        found = whole_text if isinstance(whole_text, list) else [whole_text]
    except ValueError:
        return _json_lines(text, path)
    return [(str(path), item) for item in found if isinstance(item, dict)]


def _json_lines(text: str, path: Path) -> list[tuple[str, Mapping[str, Any]]] | None:
    """None where the first line is no JSON object: a log may begin with a bracket."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            item = parse_json(line, where, UsageError, constants=True)
            if not isinstance(item, dict):
                raise UsageError(f"{where} is {show(item)} where a JSON object must stand")
        except UsageError as error:
            if not found:
                return None
            raise UsageError(f"{error}; take that line out, or measure again") from error
        found.append((where, item))
    return found


def _from_document(document: Mapping[str, Any], path: Path, where: str, said: Mapping[str, float]) -> list[Timing]:
    if said and (is_measured(document) or "step_time" in document):
        raise UsageError(f"{path} says batch and steps of every line itself; type its name alone")
    if is_measured(document):
        return _from_measured(document, path, where)
    if "step_time" in document:
        return [_from_bench_speculative(document, path)]
    if "mean_tpot_ms" in document:
        found = _from_bench_serving(document, path, said)
        return [] if found is None else [found]
    return []


def _from_measured(document: Mapping[str, Any], path: Path, where: str) -> list[Timing]:
    """Each repeat is a timing: their spread says how far the median is trusted."""
    try:
        line = read_measured(document, where)
    except TraceVersionError as error:
        raise UsageError(str(error)) from error
    except TraceError as error:
        raise UsageError(f"{error}; take that timing out, or type replay time anew") from error
    setting = make_setting(line.steps, line.topk, line.num_draft_tokens)
    if (line.steps, line.topk, line.num_draft_tokens) != (setting.steps, setting.topk, setting.num_draft_tokens):
        raise UsageError(
            f"{where} says steps {line.steps}, topk {line.topk} and {counted(line.num_draft_tokens, 'draft token')}, "
            f"and a chain of {setting.spelled} has {setting.num_draft_tokens}; take that timing out"
        )
    server = Server(one_line(line.model, 200), one_line(line.engine, 200), line.recording)
    recording = ", recording" if line.recording else ""
    source = one_line(
        f"measured on {line.time[:10]} ({shorten(line.model, 80)}, {shorten(line.engine, 60)}{recording}), {path.name}",
        300,
    )
    load = Load(line.batch, line.context)
    return [Timing(setting, load, ms / 1000, line.accept_length, source, servers=(server,)) for ms in line.round_ms]


def _from_bench_speculative(document: Mapping[str, Any], path: Path) -> Timing:
    batch, steps = _count(document, "batch_size", MOST_BATCH), _count(document, "steps", MOST_STEPS)
    seconds = _number(document, "step_time", 1e-9, 1e6)
    if not batch or steps is None or seconds is None:
        raise UsageError(
            f"{path} has a line of batch_size {show(document.get('batch_size'))}, steps {show(document.get('steps'))} "
            f"and step_time {show(document['step_time'])}, no timing of a server; take it out"
        )
    topk, size = _count(document, "topk", MOST_NODES) or 1, _count(document, "num_draft_tokens", MOST_NODES)
    setting = make_setting(steps, topk, size)
    accept = _number(document, "acc_length", 1, setting.most) if setting.speculates else 1.0
    return Timing(setting, Load(batch), seconds, accept, f"bench_speculative, {path.name}")


def _count(document: Mapping[str, Any], key: str, most: int) -> int | None:
    value = document.get(key)
    return int(value) if is_integer(value, 0, most) and isinstance(value, int) else None


def _number(document: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = document.get(key)
    return float(value) if is_number(value, low, high) and isinstance(value, int | float) else None


def _from_bench_serving(document: Mapping[str, Any], path: Path, said: Mapping[str, float]) -> Timing | None:
    tpot = _number(document, "mean_tpot_ms", 1e-6, 1e9)
    told = [_number(document, key, 1, MOST_STEPS + 1) for key in ("accept_length", "spec_decode_acceptance_length")]
    accept = next((length for length in told if length is not None), None)
    if tpot is None:
        return None
    arguments = _server_arguments(document)
    if accept is None and (said.get("steps") or arguments.get("num_steps")):
        raise UsageError(f"{path} has no accept length, though its server drafted; type --time with accept=L instead")
    setting = PLAIN if accept is None else _setting(arguments, said, path)
    length = check_accept(setting, accept) or 1.0
    return Timing(setting, Load(_batch(document, said, path)), tpot * length / 1000, length, path.name)


def _batch(document: Mapping[str, Any], said: Mapping[str, float], path: Path) -> int:
    """Requests that ran at a time: what was typed, else the mean that ran, else the limit."""
    if "batch" in said:
        return whole(said, "batch", 1, 1, MOST_BATCH)
    for key in ("concurrency", "max_concurrency"):
        if (running := _number(document, key, 0.5, MOST_BATCH)) is not None:
            return max(1, round(running))
    raise UsageError(f"{path} does not say how many requests ran at a time; type {path}:batch=N")


def _server_arguments(document: Mapping[str, Any]) -> dict[str, int]:
    info = document.get("server_info")
    told = info if isinstance(info, dict) else {}
    return {
        key: count
        for key in ("num_steps", "eagle_topk", "num_draft_tokens")
        if (count := _count(told, f"speculative_{key}", MOST_NODES))
    }


def _setting(arguments: Mapping[str, int], said: Mapping[str, float], path: Path) -> Setting:
    """What the server drafted: as typed, else as its own arguments say. Raises UsageError where neither does."""
    steps = whole(said, "steps", arguments.get("num_steps", 0), 1 if "steps" in said else 0, MOST_STEPS)
    if not steps:
        raise UsageError(f"{path} does not say how many steps were drafted; type {path}:steps=N")
    topk = whole(said, "topk", arguments.get("eagle_topk", 1), 1, MOST_NODES)
    nodes = whole(said, "draft_tokens", arguments.get("num_draft_tokens", 0), 0, MOST_NODES)
    return make_setting(steps, topk, nodes or None)


def _from_log(text: str, path: Path, said: Mapping[str, float]) -> Iterator[Timing]:
    arguments = {key: int(value) for key, value in _ARGUMENT.findall(text)}
    before = None
    for line in text.splitlines():
        if "Prefill batch" in line:
            before = None
        if "Decode batch" not in line:
            continue
        running, speed = _RUNNING.search(line), _SPEED.search(line)
        if not running or not speed:
            continue
        batch, previous = int(running[1]), before
        before = batch
        if batch and batch == previous and 0 < batch <= MOST_BATCH and float(speed[1]) > 0:
            yield _from_line(line, Load(batch), float(speed[1]), arguments, path, said)


def _from_line(
    line: str, load: Load, speed: float, arguments: Mapping[str, int], path: Path, said: Mapping[str, float]
) -> Timing:
    told = _LENGTH.search(line)
    setting = _setting(arguments, said, path) if told else PLAIN
    accept = float(told[1]) if told else 1.0
    if not 1 - ROUNDED <= accept <= setting.most + ROUNDED:
        raise UsageError(
            f"{path} has accept length {accept:g}, and {setting.spelled} accept {setting.most} at most; type the steps "
            f"that its server drafted as {path}:steps=N"
        )
    accept = min(max(accept, 1.0), setting.most)
    return Timing(setting, load, round_seconds(load, accept, speed), accept, f"log {path.name}")
