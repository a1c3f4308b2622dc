"""A comparison → what a person reads: answer line, tables, doubts, provenance. Nothing is computed here."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.compare.common_anchors import CommonDrafts
from replay.analysis.compare.compare import MOST_REQUESTS, Comparison, Pair, Side
from replay.analysis.compare.doubts import doubts, sides_of
from replay.analysis.compare.pairing import PairedRounds
from replay.analysis.compare.texts import TextAgreement
from replay.analysis.tables import Fitted, bullet, column, heading, pairs
from replay.analysis.view import LONG, WHOLE, View

_WORDS = {
    "better": "accepts more than",
    "worse": "accepts less than",
    "equal": "accepts the same as",
    "cannot tell": "cannot be told from",
}
_RULE = (
    "difference: accept length of B minus that of A over the same requests; better or worse where its 95 % interval "
    "excludes 0 and p is at most 0.05, equal where no resample tells the two apart, within 1 % where the whole "
    "interval lies so near 0"
)
_HOLM = "; Holm p: adjusted for {count} comparisons"


def render_comparison(comparison: Comparison, joined: PairedRounds, view: View = WHOLE) -> RenderableType:
    """The report of ``joined``, which adapts to the console's width; details where there is one pair.

    ``view`` says which of several pairs have a row, and in which order; A's stands above them.
    """
    first = Text(answer(comparison), style="bold")
    shown = view.rows(list(enumerate(comparison.pairs, start=1)), lambda row: row[1].b.accept_length)
    parts: list[RenderableType] = [first, Text(), _pair_table(shown, comparison.pairs[0].a, joined)]
    if left := len(comparison.pairs) - len(shown):
        parts += [Text(), Text(f"{wording.count(left)} more {'variant is' if left == 1 else 'variants are'} not shown")]
    rule = _RULE + (_HOLM.format(count=len(comparison.pairs)) if len(comparison.pairs) > 1 else "")
    parts += [Text(), Text(rule, style="dim")]
    if len(comparison.pairs) == 1:
        parts += _details(comparison.pairs[0])
    if comparison.texts is not None:
        parts += [Text(), heading("Text by text"), Text(_text_sentence(comparison.texts)), Text()]
        parts.append(_texts(comparison.texts))
    parts += [Text(), heading("Doubts")]
    parts += [bullet(doubt) for doubt in doubts(comparison)] or [Text("  none of the checks raised one")]
    parts += [Text(), heading("Provenance"), pairs(list(_provenance(comparison, joined)))]
    return Group(*parts, Text(), first) if len(shown) > LONG else Group(*parts)


def answer(comparison: Comparison) -> str:
    """The first line: what may be said of B against A, or of how many B against one A."""
    if len(comparison.pairs) == 1:
        pair = comparison.pairs[0]
        a, b = sides_of(pair)
        if math.isnan(pair.difference):
            return f"{b} against {a}: no request has rounds under both."
        return (
            f"{b} {_WORDS[pair.verdict]} {a}{_near(pair)}: accept length "
            f"{wording.decimal(pair.b.accept_length)} against {wording.decimal(pair.a.accept_length)}, difference "
            f"{_signed(pair.difference)}{_within(pair.ci95)}, {wording.counted(pair.requests, 'request')}."
        )
    found = [pair.verdict for pair in comparison.pairs]
    told = [f"{found.count(word)} {word}" for word in _WORDS if word in found]
    return f"{len(found)} variants against {comparison.pairs[0].a.variant}: {wording.listed(told)}."


def _near(pair: Pair) -> str:
    return " and lies within 1 %" if pair.within_1_percent and pair.verdict != "equal" else ""


def _signed(number: float) -> str:
    return wording.NOTHING if math.isnan(number) else f"{number:+z.3f}"


def _within(bounds: tuple[float, float]) -> str:
    return "" if math.isnan(bounds[0]) else f" (95 % interval {_interval(bounds)})"


def _interval(bounds: tuple[float, float]) -> str:
    return wording.NOTHING if math.isnan(bounds[0]) else " to ".join(map(_signed, bounds))


def _pair_table(shown: Sequence[tuple[int, Pair]], a: Side, joined: PairedRounds) -> Fitted:
    """A's row, then one for each B, with the letter of its place among all."""
    found = [pair for _, pair in shown]
    sides = [a, *(pair.b for pair in found)]
    named = [variant.name for variant in joined.rounds.variants]
    letters = [named[place] for place in (0, *(place for place, _ in shown))]
    labels = [f"{letter:<{len(named[-1])}}  {side.variant}" for letter, side in zip(letters, sides, strict=True)]
    near = [{True: "yes", False: "no", None: wording.NOTHING}[pair.within_1_percent] for pair in found]
    columns = [
        column("accept\nlength", [wording.decimal(side.accept_length) for side in sides]),
        column("difference", ["", *(_signed(pair.difference) for pair in found)]),
        column("95 %\ninterval", ["", *(_interval(pair.ci95) for pair in found)]),
    ]
    if len(named) > 2:
        columns.append(column("Holm\np", ["", *(_p_value(pair.p_holm) for pair in found)]))
    columns.append(column("verdict", ["", *(pair.verdict for pair in found)], left=True))
    columns.append(column("within\n1 %", ["", *near], left=True))
    counts = [
        column("rounds", [wording.count(side.rounds) for side in sides]),
        column("accepted /\ndrafted", [f"{wording.count(s.accepted)} / {wording.count(s.drafted)}" for s in sides]),
    ]
    return Fitted((column("variant", labels, left=True),), (tuple(columns), tuple(counts)), tuple(labels))


def _p_value(p: float) -> str:
    """Never 0, which no p value is."""
    return "< 0.001" if p < 0.001 else wording.decimal(p)


def _details(pair: Pair) -> list[RenderableType]:
    common = pair.anchors
    parts: list[RenderableType] = [Text(), heading("The same anchors"), Text(_anchor_sentence(pair))]
    if common.drafts is not None and common.rounds:
        parts.append(Text(_draft_sentence(common.drafts, common.rounds)))
    if common.rounds:
        parts += [Text(), _positions(pair)]
    if pair.categories:
        parts += [Text(), heading("By category"), _categories(pair)]
    if pair.most_different:
        parts += [Text(), heading("Requests that differ most"), _requests(pair)]
    return parts


def _draft_sentence(drafts: CommonDrafts, rounds: int) -> str:
    total = wording.counted(drafts.tokens_equal + drafts.tokens_different, "drafted token")
    return (
        f"Of {total} side by side {wording.count(drafts.tokens_equal)} are equal; {wording.count(drafts.alike)} of "
        f"{wording.counted(rounds, 'draft')} are equal throughout."
    )


def _anchor_sentence(pair: Pair) -> str:
    common = pair.anchors
    if not common.rounds:
        return "No round of one starts where a round of the other does."
    shares = f"{wording.percent(common.share_a)} of A's, {wording.percent(common.share_b)} of B's"
    return (
        f"{wording.counted(common.rounds, 'round')} of both start at the same anchor ({shares}): A accepted "
        f"{wording.counted(common.accepted_a, 'token')} there, B {wording.count(common.accepted_b)}, "
        f"{_signed(common.difference)} a round{_within(common.ci95)}; A accepted more in "
        f"{wording.count(common.a_more)}, B in {wording.count(common.b_more)}, both the same in "
        f"{wording.count(common.equal)}."
    )


def _positions(pair: Pair) -> Fitted:
    rows, drafts = pair.anchors.positions, pair.anchors.drafts
    columns = [
        column(
            "A accepted /\ngot there", [f"{wording.count(r.accepted_a)} / {wording.count(r.reached_a)}" for r in rows]
        ),
        column("share", [wording.percent(row.conditional_a) for row in rows]),
        column(
            "B accepted /\ngot there", [f"{wording.count(r.accepted_b)} / {wording.count(r.reached_b)}" for r in rows]
        ),
        column("share", [wording.percent(row.conditional_b) for row in rows]),
    ]
    if drafts is not None:
        parted = [wording.count(count) for count in drafts.parted[: len(rows)]]
        columns.append(column("drafts\npart here", parted))
    numbers = column("position", [str(place) for place in range(1, len(rows) + 1)])
    return Fitted((numbers,), (tuple(columns),), ())


def _categories(pair: Pair) -> Fitted:
    rows = pair.categories
    names = column("category", [row.category or wording.NOTHING for row in rows], left=True)
    columns = [
        column("requests", [wording.count(row.requests) for row in rows]),
        column("A", [wording.decimal(row.a.accept_length) for row in rows]),
        column("B", [wording.decimal(row.b.accept_length) for row in rows]),
        column("difference", [_signed(row.difference) for row in rows]),
        column("95 % interval", [_interval(row.ci95) for row in rows]),
    ]
    return Fitted((names,), (tuple(columns),), ())


def _requests(pair: Pair) -> Fitted:
    rows = pair.most_different
    names = column("request", [row.request_id for row in rows], left=True)
    columns = [
        column("rounds\nof A", [wording.count(row.rounds_a) for row in rows]),
        column("rounds\nof B", [wording.count(row.rounds_b) for row in rows]),
        column("accept\nlength A", [wording.decimal(row.accept_length_a) for row in rows]),
        column("accept\nlength B", [wording.decimal(row.accept_length_b) for row in rows]),
        column("category", [row.category or wording.NOTHING for row in rows], left=True),
    ]
    return Fitted((names,), (tuple(columns),), tuple(row.request_id for row in rows))


def _text_sentence(texts: TextAgreement) -> str:
    return (
        f"Two recordings of {wording.counted(texts.requests, 'prompt')}; {wording.count(texts.equal)} of their texts "
        f"do not part before one ends. {wording.counted(texts.common_tokens, 'output token')} stand before the texts "
        f"part, of {wording.count(texts.output_tokens_a)} of A and {wording.count(texts.output_tokens_b)} of B; only "
        "rounds there start at the same anchor."
    )


def _texts(texts: TextAgreement) -> Fitted:
    """The first to part first."""
    rows = sorted(texts.each, key=lambda one: one.common_tokens)[:MOST_REQUESTS]
    names = column("request", [row.request_id for row in rows], left=True)
    columns = [
        column("same\ntokens", [wording.count(row.common_tokens) for row in rows]),
        column("tokens\nof A", [wording.count(row.output_tokens_a) for row in rows]),
        column("tokens\nof B", [wording.count(row.output_tokens_b) for row in rows]),
        column("accept\nlength A", [wording.decimal(row.accept_length_a) for row in rows]),
        column("accept\nlength B", [wording.decimal(row.accept_length_b) for row in rows]),
    ]
    return Fitted((names,), (tuple(columns),), tuple(row.request_id for row in rows))


def _provenance(comparison: Comparison, joined: PairedRounds) -> Iterator[tuple[str, str]]:
    traces = joined.traces if joined.texts is not None else (joined.rounds.trace,)
    for letter, trace in zip("AB", traces, strict=False):
        told = [trace.get(key) for key in ("path", "target", "engine", "engine_version")]
        yield f"trace of {letter}" if len(traces) > 1 else "trace", " · ".join(str(item) for item in told if item)
    for which, part in zip(("first", "second"), comparison.parts, strict=False):
        if part:
            yield f"part of {which} file" if joined.files > 1 else "part", part
    for variant in joined.rounds.variants:
        facts = [variant.draft, ",".join(variant.wiring), wording.counted(variant.steps, "step"), variant.precision]
        facts += [variant.numerics, f"kv {variant.kv}", *(f"fault {fault}" for fault in variant.faults)]
        if variant.topk > 1:
            facts.insert(3, f"topk {variant.topk}, {variant.num_draft_tokens} draft tokens")
        file = ["first file" if variant.name == "A" else "second file"] if joined.files > 1 else []
        yield variant.name, " · ".join([joined.shown[variant.name], *file, *facts])
    yield "requests", f"{wording.count(comparison.requests)} in both"
    yield (
        "intervals",
        f"paired bootstrap over requests, {wording.count(comparison.resamples)} resamples, seed {comparison.seed}",
    )
    yield "p values", "Student's t over requests"
