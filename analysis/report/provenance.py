"""Where the numbers of a report come from, as pairs of a word and what it was."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replay.analysis import wording
from replay.analysis.summary import VariantSummary
from replay.printable import one_line
from replay.traces.parts import parts_told
from replay.traces.rounds import Rounds
from replay.traces.taps import tap_index

# What a file may say is shown so far: characters of a word and of what is said of it, and how many words.
_MOST_WORD, _MOST_TEXT, _MOST_KEYS = 40, 600, 12
# Keys of ``Rounds.trace`` that have a line of their own, or are said elsewhere.
_SAID = {
    "path", "taps", "requests", "target", "dtype", "model_type", "layers", "hidden_size", "engine", "engine_version",
    "missing", "wirings", "doubts", "traces", "fingerprint", "architecture", "vocab_size", "tie_word_embeddings",
    "part",
}  # fmt: skip


def provenance(
    rounds: Rounds, summaries: Sequence[VariantSummary], *, seed: int, resamples: int
) -> Iterator[tuple[str, str]]:
    """Trace, target, engine, drafts, wirings and how the numbers were made.

    ``rounds.trace["wirings"]``, where it is there, maps a wiring (``embed,3,16``) to a list of objects ``engine``,
    ``ids`` (null: none does it) and ``note``: what each engine's config says to get this wiring.
    """
    for word, said in _provenance(rounds, summaries, seed, resamples):
        yield one_line(word, _MOST_WORD), one_line(said, _MOST_TEXT)


def _provenance(
    rounds: Rounds, summaries: Sequence[VariantSummary], seed: int, resamples: int
) -> Iterator[tuple[str, str]]:
    trace = rounds.trace
    yield "trace", _joined(trace.get("path"), _after("taps", trace.get("taps")))
    size = [_after(word, trace.get(key)) for word, key in (("layers", "layers"), ("hidden size", "hidden_size"))]
    yield "target", _joined(trace.get("target"), trace.get("model_type"), *size, trace.get("dtype"))
    yield "engine", _text([trace.get("engine"), trace.get("engine_version")], " ")
    for key in sorted(set(trace) - _SAID)[:_MOST_KEYS]:
        yield key.replace("_", " "), _text(trace[key], ", ")
    yield from (("part", said) for said in parts_told(trace)[:_MOST_KEYS])
    for name in dict.fromkeys(summary.draft for summary in summaries):
        facts = rounds.drafts.get(name)
        told = facts if isinstance(facts, Mapping) else {}
        yield "draft", _joined(name, *(_after(key.replace("_", " "), told[key]) for key in told if key != "notes"))
        notes = told.get("notes")
        yield from (("", str(note)) for note in (notes if isinstance(notes, list) else [])[:_MOST_KEYS])
    ids = trace.get("wirings")
    for wiring in dict.fromkeys(summary.wiring for summary in summaries):
        yield "wiring", _wiring(wiring, ids.get(",".join(wiring), ()) if isinstance(ids, Mapping) else ())
    profiles = wording.listed(list(dict.fromkeys(summary.engine for summary in summaries)))
    numerics = wording.listed(list(dict.fromkeys(summary.numerics for summary in summaries)))
    yield "replay", f"engine profile {profiles} · numerics {numerics} · {sum(s.seconds for s in summaries):.1f} s"
    yield "intervals", f"bootstrap over requests, {wording.count(resamples)} resamples, seed {seed}"


def _wiring(wiring: Sequence[str], engines: Any) -> str:
    """The R indices of a wiring, then the layer ids that each engine's config needs for it."""
    places = [name if tap_index(name) is None else f"R[{tap_index(name)}]" for name in wiring]
    said = f"{','.join(wiring)} = {' '.join(places)}"
    ids = [_ids(engine) for engine in engines if isinstance(engine, Mapping)]
    return f"{said}; config ids: {' · '.join(ids)}" if ids else said


def _ids(engine: Mapping[str, Any]) -> str:
    ids, note = engine.get("ids"), engine.get("note")
    said = "none" if ids is None else f"[{', '.join(map(str, ids))}]"
    return f"{engine.get('engine')} {said}" + (f" ({note})" if note else "")


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
