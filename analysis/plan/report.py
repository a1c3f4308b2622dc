"""A plan → what a person reads: what to do at each load, tables, schedules, doubts, provenance. Nothing is computed."""

from collections.abc import Iterator, Sequence
from math import isnan

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.bootstrap import FEW_REQUESTS
from replay.analysis.plan.plan import MISFIT, NOISY, Choice, Plan, Range, Row, untimed_plain
from replay.analysis.plan.policies import Rule
from replay.analysis.plan.schedules import sglang_schedule, steps_by_batch, vllm_schedule
from replay.analysis.plan.settings import PLAIN
from replay.analysis.plan.shares import best_drafting, share
from replay.analysis.plan.timings import Timing
from replay.analysis.tables import Fitted, bullet, column, heading, pairs

TERM_WORDS = {
    "pass": "the target's pass, however many rows",
    "row": "each row in the target's pass",
    "kv": "each token of context, by request",
    "rest": "what speculation adds to each round",
    "draft": "each draft step",
    "draft-row": "each row in a draft step",
}
SOURCE_WORDS = {"rounds": "", "timing": "measured", "typed": "typed", "bounds": "bounded"}
OTHERWISE = 0.05  # share by which a server's accept length differs from the replay's before it is said
RULE_WORDS = ("Stopping", "Verifying fewer, drafting all,")


def render_plan(plan: Plan, provenance: Sequence[tuple[str, str]], requests: int | None = None) -> RenderableType:
    """The report of a plan, which adapts to the console's width."""
    parts: list[RenderableType] = [Text(answer(plan, choice), style="bold") for choice in plan.choices]
    for choice in plan.choices:
        rows = [row for row in plan.rows if row.load == choice.load]
        parts += [Text(), heading(choice.load.spelled[0].upper() + choice.load.spelled[1:]), _table(rows)]
        parts += [Text(), Text(shares(plan, choice))] if shares(plan, choice) else []
    parts += [Text(), heading("Costs"), _costs(plan)]
    parts += list(_schedules(plan))
    for rules, what in zip((plan.rules, plan.verify_rules), RULE_WORDS, strict=True):
        if rules:
            parts += [Text(), heading(f"{what} by the head's own confidence"), _rules(rules), Text()]
            parts += [Text(rule_sentence(rule)) for rule in rules]
    parts += [Text(), heading("Doubts")]
    parts += [bullet(doubt) for doubt in doubts(plan, requests)] or [Text("  none of the checks raised one")]
    return Group(*parts, Text(), heading("Provenance"), pairs(list(provenance)))


def answer(plan: Plan, choice: Choice) -> str:
    """What to do at one load, in one sentence or two."""
    place = choice.load.spelled[0].upper() + choice.load.spelled[1:]
    best = choice.best
    plain = next((row for row in plan.rows if (row.load, row.setting) == (choice.load, PLAIN)), None)
    if plain is None:
        return (
            f"{place}: cannot tell whether it pays, since no timing says what a step without speculation takes. Of the "
            f"depths {best.setting.spelled} has the most, {_speed(best)}."
        )
    if choice.advice == "cannot tell":
        others = wording.listed([setting.spelled for setting in (best.setting, *choice.alike)][:4])
        more = "" if choice.measure is None else f" Time {choice.measure.spelled} there: it would tell most."
        return f"{place}: cannot tell. {others[0].upper() + others[1:]} cannot be told apart.{more}"
    if choice.advice == "do not speculate":
        drafting = best_drafting(plan, choice)
        against = "" if drafting is None else f", the best depth ({drafting.setting.spelled}) {_speed(drafting)}"
        return f"{place}: do not speculate. Without it {_speed(plain)}{against}."
    gain = "" if best.speedup is None else f", {_times(best.speedup)} without speculation"
    tied = wording.listed([setting.spelled for setting in choice.alike][:4])
    same = f"; {tied} cannot be told from it" if choice.alike else ""
    return f"{place}: speculate with {best.setting.spelled}. {_speed(best).capitalize()}{gain}{same}."


def shares(plan: Plan, choice: Choice) -> str:
    """How much of the loss is the head and how much the machine; empty where the time without is not known."""
    found = share(plan, choice)
    if found is None:
        return ""
    return (
        f"At {found.setting.spelled} a round takes as long as {_about(found.break_even, 2)} plain steps, so "
        f"speculation breaks even at that accept length; the head gives {_about(found.free_machine, 2)}. With every "
        "draft accepted "
        f"it would be {_about(found.perfect_head, 2)} times as fast as without, with drafting and verifying for free "
        f"{_about(found.free_machine, 2)} times."
    )


def doubts(plan: Plan, requests: int | None = None) -> tuple[str, ...]:
    """The sentences that apply; ``requests`` stand behind accept lengths that were replayed."""
    return tuple(_doubts(plan, requests))


def _doubts(plan: Plan, requests: int | None) -> Iterator[str]:
    if requests is not None and requests < FEW_REQUESTS:
        yield (
            f"Accept lengths come from {wording.counted(requests, 'request')}, and an interval from fewer than "
            f"{FEW_REQUESTS} is often too narrow: capture more."
        )
    if any(choice.load.context for choice in plan.choices) and _free_context(plan):
        yield "The context changes nothing here, as it has no cost: type --cost kv=MS, of one token of context."
    yield from _doubts_of_timings(plan)
    loose = [row for row in plan.rows if not row.round_ms.known]
    if loose:
        where = f"{loose[0].setting.spelled} at {loose[0].load.spelled}"
        yield (
            f"{len(loose)} of {len(plan.rows)} times are not determined by the timings, the first {where} "
            f"({_between(loose[0].round_ms, 1)} ms); their tok/s are ranges, not predictions."
        )
    if any(row.length_source == "bounds" for row in plan.rows):
        yield (
            "Accept lengths that are marked bounded come from other depths: replay simulate --steps with each of them "
            "gives them exactly."
        )
    if any(row.length_source in ("timing", "typed") for row in plan.rows):
        yield "Accept lengths that were typed or came with a timing have no interval."
    if plan.timings and (loads := untimed_plain(plan)):
        yield f"Nobody timed {loads[0].spelled} without speculation; add it, since every answer is held against it."


def _doubts_of_timings(plan: Plan) -> Iterator[str]:
    if plan.misfit > MISFIT:
        yield (
            f"No cost model of this kind meets the timings within {wording.percent(plan.misfit, 0)}: some were "
            "measured on another machine, version or load, or the server's time does not grow in straight lines."
        )
    if noisy := [timing for timing in plan.timings if timing.error > NOISY]:
        yield (
            f"{len(noisy)} of {len(plan.timings)} timings are not known within {wording.percent(NOISY, 0)}, the first "
            f"{noisy[0].setting.spelled} at {noisy[0].load.spelled} within {wording.percent(noisy[0].error, 0)} alone: "
            "measure while nothing else runs there, or more often."
        )
    servers = [server for timing in plan.timings for server in timing.servers]
    if len(engines := dict.fromkeys(server.engine for server in servers)) > 1:
        yield (
            f"The timings are of {len(engines)} engine versions ({wording.listed(list(engines)[:4])}), and a plan is "
            "for one: time every setting on the same."
        )
    if any(server.recording for server in servers):
        yield "A server that was timed recorded, so it was slower than the one to plan for: time one that does not."
    yield from _served_otherwise(plan)


def _served_otherwise(plan: Plan) -> Iterator[str]:
    """Where a timed server accepted another number of tokens than the replay says; the row has the replay's."""
    rows = {(row.load, row.setting): row.accept_length for row in plan.rows if row.length_source == "rounds"}
    found: list[tuple[float, Timing, float, float]] = []
    for timing in plan.timings:
        told, served = rows.get((timing.load, timing.setting)), timing.accept_length
        if served is not None and told is not None and not told.low <= served <= told.high:
            found.append((abs(served - told.value) / told.value, timing, served, told.value))
    if found and max(apart for apart, *_ in found) > OTHERWISE:
        _, timing, served, replayed = max(found, key=lambda one: one[0])
        where = f"{timing.setting.spelled} at {timing.load.spelled}"
        yield (
            f"The server that was timed accepted {served:.2f} tokens a round with {where}, and the replay says "
            f"{replayed:.2f}, which the plan goes by. With what it accepted it makes "
            f"{timing.load.batch * served / timing.seconds:.1f} tok/s there. replay diagnose names what keeps a server "
            "short."
        )


def _free_context(plan: Plan) -> bool:
    """Whether nothing was timed and no cost of context typed, so that it counts for nothing."""
    return not plan.timings and all(term.ms.high == 0 for term in plan.costs if term.name == "kv")


def _table(rows: Sequence[Row]) -> Fitted:
    labels = [row.setting.spelled for row in rows]
    names = column("setting", labels, left=True)
    first = (
        column("accept\nlength", [_about(row.accept_length, 3) for row in rows]),
        column(
            "", [SOURCE_WORDS.get(row.length_source, "") if row.setting.speculates else "" for row in rows], left=True
        ),
        column("tok/s", [_about(row.tokens_per_second, 1) for row in rows]),
        column("range", [_between(row.tokens_per_second, 1) for row in rows]),
        column("times\nplain", ["" if row.speedup is None else _about(row.speedup, 2) for row in rows]),
    )
    second = (
        column("ms a\nround", [_about(row.round_ms, 2) for row in rows]),
        column("range", [_between(row.round_ms, 2) for row in rows]),
        column("", ["timed" if row.timed else "" for row in rows], left=True),
        column("breaks\neven at", ["" if row.break_even is None else _about(row.break_even, 2) for row in rows]),
        column("ms a\ntoken", [_about(row.token_ms, 2) for row in rows]),
    )
    return Fitted((names,), (first, second), tuple(labels))


def _costs(plan: Plan) -> Fitted:
    names = column("term", [term.name for term in plan.costs], left=True)
    columns = (
        column("ms", [_between(term.ms, 3) for term in plan.costs]),
        column("what", [TERM_WORDS[term.name] + (" (typed)" if term.typed else "") for term in plan.costs], left=True),
    )
    return Fitted((names,), (columns,), tuple(term.name for term in plan.costs))


def _schedules(plan: Plan) -> Iterator[RenderableType]:
    steps = steps_by_batch(plan.choices)
    if steps is None or len(plan.choices) < 2:
        return
    yield from (Text(), heading("By batch, for the engines"))
    yield pairs(
        [
            ("SGLang", f"--speculative-adaptive --speculative-adaptive-config FILE, with {sglang_schedule(steps)}"),
            ("vLLM", f'in --speculative-config: "num_speculative_tokens_per_batch_size": {vllm_schedule(steps)}'),
        ]
    )


def _rules(rules: Sequence[Rule]) -> Fitted:
    names = column("at", [rule.load.spelled for rule in rules], left=True)
    columns = (
        column("verify while\nproduct at least", [f"{rule.threshold:g}" for rule in rules]),
        column("accept\nlength", [wording.decimal(rule.accept_length, 3) for rule in rules]),
        column("drafted\na round", [wording.decimal(rule.drafted, 2) for rule in rules]),
        column("verified\na round", [wording.decimal(rule.verified, 2) for rule in rules]),
        column("tok/s", [wording.decimal(rule.tokens_per_second[0], 1) for rule in rules]),
        column("range", [wording.interval(rule.tokens_per_second[1:], 1) for rule in rules]),
    )
    return Fitted((names,), (columns,), tuple(rule.load.spelled for rule in rules))


def rule_sentence(rule: Rule) -> str:
    """What a rule is worth against the best fixed depth."""
    value, low, high = rule.gain
    place = rule.load.spelled[0].upper() + rule.load.spelled[1:]
    if isnan(low):
        return (
            f"{place}: {value:.3f} times the tok/s of the best fixed depth ({rule.against.spelled}) on one request "
            "alone, which chose the rule."
        )
    told = "more than" if low > 1 else "less than" if high < 1 else "not told apart from"
    return (
        f"{place}: {told} the best fixed depth ({rule.against.spelled}), {value:.3f} times its tok/s "
        f"({low:.3f} to {high:.3f})."
    )


def _speed(row: Row) -> str:
    found = row.tokens_per_second
    return f"{_about(found, 1)} tok/s" + ("" if found.known else f" ({_between(found, 1)})")


def _times(found: Range) -> str:
    return f"{found.value:.2f} times ({_between(found, 2)}) the speed"


def _about(found: Range, digits: int) -> str:
    return wording.decimal(found.value, digits)


def _between(found: Range, digits: int) -> str:
    return wording.interval((found.low, found.high), digits)
