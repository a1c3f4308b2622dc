"""Accept length as a server has reported it: from its log, /metrics, /server_info, answers, or a plain number.

What other engines than SGLang print is read by observed_engines.py. Parsers are pure functions on text. They read
SGLang's own definition (0.5.23, managers/scheduler_components/metrics_reporter.py): a log line's accept length is 1 +
the mean accepted drafts of its interval; with overlap scheduling it counts one verify beyond the end of each request,
which the per-request counters do not. A log line does not say over how many rounds it was taken, so a mean over lines
is a mean of lines, and is called so.
"""

import codecs
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from replay.capture.observed_engines import (
    llama_log,
    tensorrt_answers,
    tensorrt_statistics,
    vllm_log,
    vllm_metrics,
)
from replay.capture.observed_number import Observed
from replay.errors import CaptureError, TraceCorruptError
from replay.printable import counted
from replay.traces.fields import is_number, parse_json
from replay.traces.files import as_path, read_small

# In parts, each found after the one before: one expression with gaps would try every pair of places.
_RUNNING = re.compile(r"#running-req: (\d{1,9})", re.ASCII)
_LENGTHS = re.compile(r"accept len: (\d{1,9}(?:\.\d{1,9})?), accept rate: (\d{1,9}(?:\.\d{1,9})?)", re.ASCII)
_LINE = re.compile(r"[^\r\n]+")
_METRIC = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$", re.ASCII)
_MOST = 1 << 26  # bytes of a file that is read
_LARGEST = 1 << 53  # of a count
_MOST_COLUMNS = 1 << 12  # of a histogram, which has one for each number of accepted tokens


@dataclass(frozen=True, slots=True)
class LogLine:
    """One decode line: requests then running, accept length and rate of the interval before it."""

    running: int
    accept_length: float
    accept_rate: float


def parse_log(text: str) -> list[LogLine]:
    """Every decode line of an SGLang log that has an accept length, in order; all other lines are passed over."""
    return [found for line in _lines(text) if "Decode batch" in line and (found := _log_line(line))]


def _log_line(line: str) -> LogLine | None:
    running = _RUNNING.search(line, line.index("Decode batch"))
    told = _LENGTHS.search(line, running.end()) if running else None
    return LogLine(int(running[1]), float(told[1]), float(told[2])) if running and told else None


def observed_log(text: str) -> Observed | None:
    """The mean over a log's decode lines, each weighed by its running requests; None where it has none."""
    lines = [line for line in parse_log(text) if line.running]
    weight = sum(line.running for line in lines)
    if not weight:
        return None
    mean = sum(line.accept_length * line.running for line in lines) / weight
    return Observed(mean, f"mean of {len(lines)} decode lines of a log, weighed by running requests")


def observed_metrics(text: str) -> Observed | None:
    """From a /metrics page: the gauge of the last log interval; None where it is absent or was never set.

    With several ranks or models the gauges of those that drafted are averaged.
    """
    values: dict[str, list[float]] = {}
    for name, _, value in _samples(text, "sglang:spec_"):
        values.setdefault(name, []).append(value)
    lengths = [value for value in values.get("sglang:spec_accept_length", []) if value > 0]
    if not lengths:
        return None
    steps, nodes = values.get("sglang:spec_num_steps"), values.get("sglang:spec_num_draft_tokens")
    return Observed(
        sum(lengths) / len(lengths),
        "gauge sglang:spec_accept_length of /metrics, its last log interval",
        num_steps=int(steps[0]) if steps else None,
        num_draft_tokens=int(nodes[0]) if nodes else None,
    )


def _samples(text: str, prefix: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and finite value of each sample of a /metrics page whose name begins so."""
    for line in _lines(text):
        match = _METRIC.match(line.strip()) if line.lstrip().startswith(prefix) else None
        if match:
            try:
                value = float(match["value"])
            except ValueError:
                continue
            if math.isfinite(value):
                yield match["name"], match["labels"] or "", value


def observed_server_info(info: Mapping[str, Any]) -> Observed | None:
    """From /server_info: the mean since the server started, as of its last log interval; None where it has none yet."""
    states = info.get("internal_states")
    lengths = [
        state["avg_spec_accept_length"]
        for state in (states if isinstance(states, list) else [])
        if isinstance(state, dict) and is_number(state.get("avg_spec_accept_length"), 0, 1e9)
    ]
    if not lengths:
        return None
    return Observed(
        sum(lengths) / len(lengths),
        "avg_spec_accept_length of /server_info, since the server started",
        num_steps=_count(info.get("speculative_num_steps")),
        num_draft_tokens=_count(info.get("speculative_num_draft_tokens")),
    )


def observed_counters(metas: Iterable[Mapping[str, Any]]) -> Observed | None:
    """From the ``meta_info`` of answers, or the ``server`` of responses.jsonl: counted rounds; None without any.

    The names of SGLang before 2026 (spec_accept_histogram) are read too. Only where no answer has a histogram is the
    length taken from completion tokens, less the one of each request that its prefill gave.
    """
    histogram: list[int] = []
    rounds = emitted = answers = 0
    for answers, meta in enumerate(metas, start=1):  # noqa: B007
        counts = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or meta.get("histogram")
        verifies = _count(meta.get("spec_verify_ct")) or _count(meta.get("verify_rounds")) or 0
        rounds += verifies
        if verifies:
            emitted += max(0, (_count(meta.get("completion_tokens")) or 0) - 1)
        for place, count in enumerate(counts[:_MOST_COLUMNS] if isinstance(counts, list) else []):
            histogram += [0] * (place + 1 - len(histogram))
            histogram[place] += _count(count) or 0
    total = sum(histogram)
    if total:
        mean = 1 + sum(place * count for place, count in enumerate(histogram)) / total
        return Observed(mean, f"histograms of {answers} requests, as the server counted", total, tuple(histogram))
    if rounds:
        return Observed(
            emitted / rounds, f"completion tokens over verify rounds of {counted(answers, 'request')}", rounds
        )
    return None


def read_observed(source: str) -> Observed:
    """What ``source`` says: a number, or a file of one of the kinds above, told apart by what is in it.

    Raises CaptureError where it says nothing of an accept length.
    """
    possible = (
        "a number, a log of SGLang, vLLM or llama.cpp, a /metrics page, a /server_info document, TensorRT-LLM's "
        "iteration statistics, or answers as JSON lines"
    )
    try:
        number = float(source)
    except ValueError:
        number = None
    if number is not None:
        if not math.isfinite(number) or number < 1:
            raise CaptureError(f"{source} is no accept length: it counts the bonus token, so it is 1 or more")
        return Observed(number, "given")
    if not source.strip():
        raise CaptureError(f"nothing was given: give {possible}")
    path = as_path(source)
    try:
        text = _text(read_small(path, _MOST, follow=True))
    except (TraceCorruptError, ValueError) as error:
        said = str(error) if isinstance(error, TraceCorruptError) else f"{path} cannot be read: {error}"
        raise CaptureError(f"{said}; give a part of it, or {possible}") from error
    found = _from_json(text) or observed_metrics(text) or vllm_metrics(_samples(text, "vllm:spec_decode_"))
    found = found or observed_log(text) or vllm_log(_lines(text)) or llama_log(_lines(text))
    if found is None:
        if "draft acceptance rate = " in text:
            raise CaptureError(
                f"{path} says llama.cpp's draft acceptance rate, accepted / drafted tokens, and no number of rounds, "
                'so no accept length follows: give a log that has its lines "statistics ...: #gen drafts = ..." too'
            )
        if text.lstrip().startswith("{"):
            parse_json(text, str(path), CaptureError, constants=True)  # says what keeps it from being read
        raise CaptureError(f"{path} says nothing of an accept length: give {possible}")
    return found


def _text(data: bytes) -> str:
    """Bytes of a log as text. Raises ValueError for those of another encoding."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16, save it as UTF-8")
    if b"\0" in data:
        raise ValueError(f"it holds a zero byte, first at byte {data.index(0)}, so it is no text")
    return data.removeprefix(codecs.BOM_UTF8).decode(errors="replace")


def _lines(text: str) -> Iterator[str]:
    """Those with something in them, one at a time: there may be millions."""
    return (match[0] for match in _LINE.finditer(text) if not match[0].isspace())


def _from_json(text: str) -> Observed | None:
    """A /server_info document, one answer or several, or JSON lines of answers."""
    try:
        document = parse_json(text, "it", ValueError, constants=True)
    except ValueError:
        try:
            values = [parse_json(line, "it", ValueError, constants=True) for line in _lines(text)]
        except ValueError:
            return None
    else:
        if isinstance(document, dict) and "internal_states" in document:
            return observed_server_info(document)
        values = document if isinstance(document, list) else [document]
    return observed_counters(_metas(values)) or tensorrt_statistics(values) or tensorrt_answers(values)


def _metas(values: Iterable[object]) -> Iterator[Mapping[str, Any]]:
    for value in values:
        meta = (value.get("meta_info") or value.get("server") or value) if isinstance(value, dict) else None
        if isinstance(meta, dict):
            yield meta


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _LARGEST else None
