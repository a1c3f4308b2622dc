"""A plan as a page: what to do at each load, charts, the tables behind them, schedules to paste, costs, doubts."""

from collections.abc import Iterator

from replay.analysis import wording
from replay.analysis.page.document import document
from replay.analysis.page.parts import doubts_section, pairs_section, section, sentence, table, to_copy
from replay.analysis.page.plan_charts import plan_charts
from replay.analysis.plan.ask import Planned
from replay.analysis.plan.plan import Choice, Plan, Range, Row
from replay.analysis.plan.policies import Rule
from replay.analysis.plan.report import RULE_WORDS, SOURCE_WORDS, TERM_WORDS, answer, doubts, rule_sentence, shares
from replay.analysis.plan.schedules import sglang_schedule, steps_by_batch, vllm_schedule

_ADVICE = ("speculate", "do not speculate", "cannot tell")


def write_plan(planned: Planned, text: str) -> str:
    """The HTML; ``text`` is the plan as the terminal shows it. Raises UsageError where charts cannot be drawn."""
    plan = planned.plan
    answers = [answer(plan, choice) for choice in plan.choices]
    title, said = (answers[0], ()) if len(answers) == 1 else (_title(plan), answers)
    sections = [
        *(line for choice in plan.choices for line in _load(plan, choice)),
        *_schedules(plan),
        *_rules(plan),
        *_costs(plan),
        *doubts_section(doubts(plan, planned.requests)),
        *pairs_section("Provenance", planned.provenance),
    ]
    return document(title, said, plan_charts(plan), sections, text)


def _title(plan: Plan) -> str:
    """What to do at how many loads, and where."""
    told = []
    for advice in _ADVICE:
        loads = [choice.load.spelled for choice in plan.choices if choice.advice == advice]
        if loads:
            named = wording.listed(loads) if len(loads) < 5 else f"{len(loads)} of {len(plan.choices)} loads"
            told.append(f"{advice} at {named}")
    joined = "; ".join(told)
    return f"{joined[:1].upper()}{joined[1:]}."


def _load(plan: Plan, choice: Choice) -> Iterator[str]:
    heads = (
        "setting", "accept length", "from", "tok/s", "range", "times plain", "ms a round", "range", "timed",
        "breaks even at", "ms a token",
    )  # fmt: skip
    rows = [row for row in plan.rows if row.load == choice.load]
    name = choice.load.spelled[0].upper() + choice.load.spelled[1:]
    cells = table(heads, [_cells(row) for row in rows], f"settings at {choice.load.spelled}", left=(2, 8))
    said = shares(plan, choice)
    return section(name, cells, sentence(said) if said else "")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.setting.spelled,
        _value(row.accept_length, 3),
        SOURCE_WORDS.get(row.length_source, "") if row.setting.speculates else "",
        _value(row.tokens_per_second, 1),
        _between(row.tokens_per_second, 1),
        "" if row.speedup is None else _value(row.speedup, 2),
        _value(row.round_ms, 2),
        _between(row.round_ms, 2),
        "timed" if row.timed else "",
        "" if row.break_even is None else _value(row.break_even, 2),
        _value(row.token_ms, 2),
    )


def _value(found: Range, digits: int) -> str:
    return wording.decimal(found.value, digits)


def _between(found: Range, digits: int) -> str:
    return wording.interval((found.low, found.high), digits)


def _costs(plan: Plan) -> Iterator[str]:
    """Every term with its ends over all cost models that the timings leave, and the timings."""
    terms = [
        (term.name, wording.decimal(term.ms.low), wording.decimal(term.ms.high), TERM_WORDS[term.name],
         "typed" if term.typed else "follows from the timings")
        for term in plan.costs
    ]  # fmt: skip
    said = (
        "Least and most over every cost model that meets all timings within their errors; of typed terms both are one."
    )
    parts = [sentence(said, "dim"), table(("term", "least ms", "most ms", "what", "from"), terms, "costs", left=(3, 4))]
    timings = [
        (one.setting.spelled, one.load.spelled, wording.decimal(1000 * one.seconds), wording.percent(one.error),
         wording.NOTHING if one.accept_length is None else wording.decimal(one.accept_length), one.source,
         wording.count(one.count))
        for one in plan.timings
    ]  # fmt: skip
    heads = ("setting", "at", "ms a round", "within", "accept length", "from", "measured")
    if timings:
        parts += ["<h3>Timings</h3>", table(heads, timings, "timings", left=(1, 5))]
    return section("Costs", *parts)


def _schedules(plan: Plan) -> Iterator[str]:
    steps = steps_by_batch(plan.choices)
    if len(plan.choices) < 2:
        return
    if steps is None:
        why = "None: a load has no sure answer, a tree is best, or a batch was planned twice."
        yield from section("By batch, for the engines", sentence(why))
        return
    yield from section(
        "By batch, for the engines",
        sentence("SGLang: --speculative-adaptive --speculative-adaptive-config FILE, with this in FILE"),
        to_copy(sglang_schedule(steps)),
        sentence("vLLM: in --speculative-config"),
        to_copy(f'"num_speculative_tokens_per_batch_size": {vllm_schedule(steps)}'),
    )


def _rules(plan: Plan) -> Iterator[str]:
    heads = ("at", "verify while product at least", "accept length", "drafted a round", "verified a round", "tok/s",
             "range")  # fmt: skip
    for rules, what, name in zip((plan.rules, plan.verify_rules), RULE_WORDS, ("rules", "verify rules"), strict=True):
        if rules:
            said = (sentence(rule_sentence(rule)) for rule in rules)
            yield from section(
                f"{what} by the head's own confidence", table(heads, [_rule_cells(rule) for rule in rules], name), *said
            )


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    return (
        rule.load.spelled,
        f"{rule.threshold:g}",
        wording.decimal(rule.accept_length),
        wording.decimal(rule.drafted, 2),
        wording.decimal(rule.verified, 2),
        wording.decimal(rule.tokens_per_second[0], 1),
        wording.interval(rule.tokens_per_second[1:], 1),
    )
