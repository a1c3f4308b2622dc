"""Where the numbers of a report come from, as pairs of a word and what it was."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replay.analysis import wording
from replay.analysis.acceptance import VariantSummary
from replay.traces.rounds import Rounds
from replay.traces.taps import tap_index

# Keys of ``Rounds.trace`` that have a line or a section of their own.
_SAID = {"path", "target", "dtype", "engine", "engine_version", "taps", "missing", "config_ids"}


def provenance(
    rounds: Rounds, summaries: Sequence[VariantSummary], *, seed: int, resamples: int
) -> Iterator[tuple[str, str]]:
    """Trace, target, engine, drafts, wirings and how the numbers were made.

    ``rounds.trace["config_ids"]``, where it is there, maps a wiring (``embed,3,16``) to the layer ids that each engine
    and version needs for it, or to why it has none: ``{"SGLang 0.5.23": [-1, 2, 15], "SpecForge 0.2": "none: ..."}``.
    """
    trace = rounds.trace
    yield "trace", _joined(trace.get("path"), _after("taps", trace.get("taps")))
    yield "target", _joined(trace.get("target"), trace.get("dtype"))
    yield "engine", _text([trace.get("engine"), trace.get("engine_version")], " ")
    for key in sorted(set(trace) - _SAID):
        yield key.replace("_", " "), _text(trace[key], ", ")
    for name in dict.fromkeys(summary.draft for summary in summaries):
        yield "draft", _joined(name, _text(rounds.drafts.get(name), " · "))
    ids = trace.get("config_ids")
    for wiring in dict.fromkeys(summary.wiring for summary in summaries):
        yield "wiring", _wiring(wiring, ids.get(",".join(wiring)) if isinstance(ids, dict) else None)
    profiles = wording.listed(list(dict.fromkeys(summary.engine for summary in summaries)))
    numerics = wording.listed(list(dict.fromkeys(summary.numerics for summary in summaries)))
    yield "replay", f"engine profile {profiles} · numerics {numerics} · {sum(s.seconds for s in summaries):.1f} s"
    yield "intervals", f"bootstrap over requests, {wording.count(resamples)} resamples, seed {seed}"


def _wiring(wiring: Sequence[str], ids: Any) -> str:
    places = [name if tap_index(name) is None else f"R[{tap_index(name)}]" for name in wiring]
    said = f"{','.join(wiring)} = {' '.join(places)}"
    if not isinstance(ids, Mapping) or not ids:
        return said
    engines = [f"{engine} {_ids(value)}" for engine, value in ids.items()]
    return f"{said}; config ids: {' · '.join(engines)}"


def _ids(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _joined(*parts: Any) -> str:
    return _text([part for part in parts if part], " · ")


def _after(word: str, value: Any) -> str:
    return f"{word} {_text(value, ',')}" if value else ""


def _text(value: Any, between: str) -> str:
    """A JSON value as words; nothing as a dash."""
    if isinstance(value, Mapping):
        return between.join(f"{key} {_text(item, ',')}" for key, item in value.items()) or wording.NOTHING
    if isinstance(value, list | tuple):
        return between.join(_text(item, ",") for item in value if item is not None) or wording.NOTHING
    return wording.NOTHING if value is None else str(value)
