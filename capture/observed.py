"""Accept length as a server has reported it: from its log, /metrics, /server_info, answers, or a plain number.

Parsers are pure functions on text. They read SGLang's own definition (0.5.23, managers/scheduler_components/
metrics_reporter.py): a log line's accept length is 1 + the mean accepted drafts of its interval; with overlap
scheduling it counts one verify beyond the end of each request, which the per-request counters do not. A log line does
not say over how many rounds it was taken, so a mean over lines is a mean of lines, and is called so.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.errors import CaptureError, TraceCorruptError
from replay.traces.fields import is_number, parse_json
from replay.traces.files import read_small

_DECODE = re.compile(
    r"Decode batch.*?#running-req: (?P<running>\d+).*?accept len: (?P<length>\d+(?:\.\d+)?), "
    r"accept rate: (?P<rate>\d+(?:\.\d+)?)"
)
_METRIC = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$", re.ASCII)
_MOST = 1 << 28  # bytes of a file that is read


@dataclass(frozen=True, slots=True)
class LogLine:
    """One decode line: requests then running, accept length and rate of the interval before it."""

    running: int
    accept_length: float
    accept_rate: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server reported. ``histogram`` and ``rounds`` where it counted them, else None; ``source`` in words."""

    accept_length: float
    source: str
    rounds: int | None = None
    histogram: tuple[int, ...] | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None


def parse_log(text: str) -> list[LogLine]:
    """Every decode line of an SGLang log that has an accept length, in order; all other lines are passed over."""
    return [
        LogLine(int(match["running"]), float(match["length"]), float(match["rate"]))
        for line in text.splitlines()
        if (match := _DECODE.search(line))
    ]


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
    for line in text.splitlines():
        match = _METRIC.match(line.strip())
        if match and match["name"].startswith("sglang:spec_"):
            try:
                value = float(match["value"])
            except ValueError:
                continue
            if math.isfinite(value):
                values.setdefault(match["name"], []).append(value)
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


def observed_server_info(info: Mapping[str, Any]) -> Observed | None:
    """From /server_info: the mean since the server started, as of its last log interval; None where it has none yet."""
    states = info.get("internal_states")
    lengths = [
        state["avg_spec_accept_length"]
        for state in (states if isinstance(states, list) else [])
        if isinstance(state, dict) and is_number(state.get("avg_spec_accept_length"), 0, _MOST)
    ]
    if not lengths:
        return None
    return Observed(
        sum(lengths) / len(lengths),
        "avg_spec_accept_length of /server_info, since the server started",
        num_steps=_count(info.get("speculative_num_steps")),
        num_draft_tokens=_count(info.get("speculative_num_draft_tokens")),
    )


def observed_counters(metas: Sequence[Mapping[str, Any]]) -> Observed | None:
    """From the ``meta_info`` of answers, or the ``server`` of responses.jsonl: counted rounds; None without any.

    The names of SGLang before 2026 (spec_accept_histogram) are read too. Only where no answer has a histogram is the
    length taken from completion tokens, less the one of each request that its prefill gave.
    """
    histogram: list[int] = []
    rounds = emitted = 0
    for meta in metas:
        counts = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or meta.get("histogram")
        verifies = _count(meta.get("spec_verify_ct")) or _count(meta.get("verify_rounds")) or 0
        rounds += verifies
        if verifies:
            emitted += max(0, (_count(meta.get("completion_tokens")) or 0) - 1)
        for place, count in enumerate(counts if isinstance(counts, list) else []):
            histogram += [0] * (place + 1 - len(histogram))
            histogram[place] += _count(count) or 0
    total = sum(histogram)
    if total:
        mean = 1 + sum(place * count for place, count in enumerate(histogram)) / total
        return Observed(mean, f"histograms of {len(metas)} requests, as the server counted", total, tuple(histogram))
    if rounds:
        return Observed(emitted / rounds, f"completion tokens over verify rounds of {len(metas)} requests", rounds)
    return None


def read_observed(source: str) -> Observed:
    """What ``source`` says: a number, or a file of one of the kinds above, told apart by what is in it.

    Raises CaptureError where it says nothing of an accept length.
    """
    possible = "a number, an SGLang log, a /metrics page, a /server_info document, or answers as JSON lines"
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
    path = Path(source)
    try:
        text = read_small(path.resolve(), _MOST).decode(errors="replace")
    except TraceCorruptError as error:
        raise CaptureError(f"{error}; give a part of it, or {possible}") from error
    except OSError as error:
        raise CaptureError(f"{source} cannot be read ({error.strerror}): give {possible}") from error
    found = _from_json(text) or observed_metrics(text) or observed_log(text)
    if found is None:
        if text.lstrip().startswith("{"):
            parse_json(text, str(path), CaptureError, constants=True)  # says what keeps it from being read
        raise CaptureError(f"{path} says nothing of an accept length: give {possible}")
    return found


def _from_json(text: str) -> Observed | None:
    """A /server_info document, one answer or several, or JSON lines of answers."""
    try:
        values: list[Any] = [parse_json(text, "it", ValueError, constants=True)]
    except ValueError:
        try:
            values = [parse_json(line, "it", ValueError, constants=True) for line in text.splitlines() if line.strip()]
        except ValueError:
            return None
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    objects = [value for value in values if isinstance(value, dict)]
    if len(objects) == 1 and "internal_states" in objects[0]:
        return observed_server_info(objects[0])
    metas = [value.get("meta_info") or value.get("server") or value for value in objects]
    return observed_counters([meta for meta in metas if isinstance(meta, dict)])


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
