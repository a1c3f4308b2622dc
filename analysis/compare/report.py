"""A comparison → what a person reads: answer line, tables, doubts, provenance. Nothing is computed here."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.bootstrap import FEW_REQUESTS
from replay.analysis.compare.common_anchors import CommonDrafts
from replay.analysis.compare.compare import MOST_REQUESTS, CategoryGap, Comparison, Pair, Side
from replay.analysis.compare.pairing import PairedRounds
from replay.analysis.compare.texts import TextAgreement
from replay.analysis.p_values import LEVEL, requests_needed
from replay.analysis.tables import Fitted, bullet, column, heading, pairs
from replay.analysis.view import LONG, WHOLE, View

# Common rounds below this share of all are told apart from what a server shows.
FEW_COMMON = 0.25

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
        a, b = _sides(pair)
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


def doubts(comparison: Comparison) -> tuple[str, ...]:
    """The sentences that apply."""
    return tuple(_doubts(comparison))


def _doubts(comparison: Comparison) -> Iterator[str]:
    for names, which in ((comparison.only_a, "first"), (comparison.only_b, "second")):
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            yield f"{wording.counted(len(names), 'request')} of the {which} rounds only ({shown}) were left out."
    silent = max((pair.without_rounds for pair in comparison.pairs), default=0)
    if silent:
        yield f"{wording.counted(silent, 'request')} without rounds under one of two variants were left out."
    fewest = min((pair.requests for pair in comparison.pairs), default=0)
    if fewest < FEW_REQUESTS:
        yield (
            f"Only {wording.counted(fewest, 'request')} can be compared, and an interval from fewer than "
            f"{FEW_REQUESTS} is often too narrow: capture more."
        )
    apart = [pair for pair in comparison.pairs if min(pair.anchors.share_a, pair.anchors.share_b) < FEW_COMMON]
    if apart:
        pair = min(apart, key=lambda pair: pair.anchors.share_b)
        yield (
            f"The walks rarely meet: {wording.counted(pair.anchors.rounds, 'round')} of {' and '.join(_sides(pair))} "
            f"start at the same anchor, less than {wording.percent(FEW_COMMON, 0)} of one's."
        )
    yield from _resolution_doubts(comparison.pairs, fewest)
    if len(comparison.pairs) == 1:
        yield from _category_doubts(comparison.pairs[0].categories)
    if any(pair.anchors.drafts is None for pair in comparison.pairs):
        yield "Trees are compared by how many tokens were accepted only, not token by token."


def _resolution_doubts(found: Sequence[Pair], fewest: int) -> Iterator[str]:
    """Where the number of requests or of comparisons, not the difference, decides that nothing is told apart."""
    needed = requests_needed(len(found))
    if fewest < needed:
        yield (
            f"{wording.counted(fewest, 'request')} cannot call any difference better or worse among "
            f"{wording.counted(len(found), 'comparison')}, however large it is: capture at least {needed}."
        )
        return
    unsure = sum(pair.verdict == "cannot tell" and (pair.ci95[0] > 0 or pair.ci95[1] < 0) for pair in found)
    if unsure:
        exclude = "interval excludes" if unsure == 1 else "intervals exclude"
        yield (
            f"{wording.count(unsure)} {exclude} 0 where the p value does not suffice for "
            f"{wording.counted(len(found), 'comparison')}: capture more requests, or compare fewer variants."
        )


def _category_doubts(rows: Sequence[CategoryGap]) -> Iterator[str]:
    """By the number of requests that an interval is made of: one from a few says less than its 95 %."""
    shown = [row for row in rows if not math.isnan(row.ci95[0])]
    few = [row for row in shown if row.requests < FEW_REQUESTS]
    count = len(shown) - len(few)
    if count > 1:
        chance = wording.decimal(count * LEVEL, 1)
        of = f"categories of {FEW_REQUESTS} requests and more" if few else "categories"
        yield f"Of {count} intervals of {of} {chance} exclude 0 by chance even where nothing differs."
    if few:
        least = min(few, key=lambda row: row.requests)
        have = "category has" if len(few) == 1 else "categories have"
        yield (
            f"{len(few)} {have} fewer than {FEW_REQUESTS} requests ({least.category or 'without a name'} has "
            f"{least.requests}), and such intervals exclude 0 far more often than 5 times in 100 where nothing differs."
        )


def _sides(pair: Pair) -> tuple[str, str]:
    """What A and B are called: their own names, with the letter where these are the same."""
    a, b = pair.a.variant, pair.b.variant
    return (a, b) if a != b else (f"A ({a})", f"B ({b})")


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
