"""What was typed → the plan: timings read, loads and depths listed, accept lengths found."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from replay.analysis import wording
from replay.analysis.json_document import JsonObject, object_json
from replay.analysis.plan.benchmarks import places_of, read_benchmark, read_pages
from replay.analysis.plan.costs import NO_TIMING, typed_costs
from replay.analysis.plan.lengths import Length, drafts_blocks, lengths_of_rounds, lengths_of_timings, with_bounds
from replay.analysis.plan.plan import Plan, make_plan
from replay.analysis.plan.policies import Played, Rule, depth_lengths
from replay.analysis.plan.report import answer, doubts
from replay.analysis.plan.schedules import sglang_schedule, steps_by_batch, vllm_schedule
from replay.analysis.plan.settings import MOST_BATCH, MOST_CONTEXT, MOST_STEPS, Load, Setting, make_setting
from replay.analysis.plan.timings import (
    Timing,
    join_timings,
    refuse_two_models,
    typed_length,
    typed_timing,
)
from replay.errors import UsageError
from replay.printable import html_table, one_line, shorten
from replay.traces.given import check_given, check_list
from replay.traces.rounds import Rounds, check_are_rounds

_RANGES = ("tokens_per_second", "gain")  # of a rule
_MOST_LISTED = 256  # batches or depths of one plan


@dataclass(frozen=True, slots=True)
class Question:
    """The options of `replay plan` as they were typed (replay/cli/plan.py says what each is)."""

    times: Sequence[str] = ()
    benches: Sequence[str] = ()
    costs: Sequence[str] = ()
    lengths: Sequence[str] = ()
    batch: str = ""
    context: int | None = None
    steps: str = ""
    variant: str | None = None
    pages: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by address in ``benches``, what came from there


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and where its numbers come from, as pairs of words."""

    plan: Plan
    provenance: tuple[tuple[str, str], ...]
    requests: int | None = None  # behind the accept lengths, where they were replayed

    def __repr__(self) -> str:
        return one_line(f"Planned({' '.join(answer(self.plan, choice) for choice in self.plan.choices)})")

    def _repr_html_(self) -> str:
        rows = [[choice.load.spelled, choice.advice, answer(self.plan, choice)] for choice in self.plan.choices]
        return html_table("Plan", ("at", "advice", "why"), rows)

    def to_json(self) -> JsonObject:
        """The body of `replay plan --json`."""
        plan, steps = self.plan, steps_by_batch(self.plan.choices)
        return {
            "answers": [answer(plan, choice) for choice in plan.choices],
            "choices": [_choice_json(choice) for choice in object_json({"all": plan.choices})["all"]],
            "rows": [object_json(row) for row in plan.rows],
            "costs": [object_json(term) for term in plan.costs],
            "timings": [_timing_json(timing) for timing in plan.timings],
            "misfit": plan.misfit,
            "schedules": None if steps is None else {"sglang": sglang_schedule(steps), "vllm": vllm_schedule(steps)},
            "rules": [_rule_json(rule) for rule in plan.rules],
            "verify_rules": [_rule_json(rule) for rule in plan.verify_rules],
            "doubts": list(doubts(plan, self.requests)),
            "provenance": [{"what": what, "said": said} for what, said in self.provenance],
        }


def _rule_json(rule: Rule) -> JsonObject:
    ranges = {name: dict(zip(("value", "low", "high"), getattr(rule, name), strict=True)) for name in _RANGES}
    return object_json(rule) | ranges


def _timing_json(timing: Timing) -> JsonObject:
    return {name: value for name, value in object_json(timing).items() if name != "servers"}  # ``source`` names them


def _choice_json(choice: JsonObject) -> JsonObject:
    return choice | {"best": choice["best"]["setting"]}


@dataclass(frozen=True, slots=True)
class Costs:
    """What a question says of costs: terms that were typed, timings, and the loads to plan for."""

    typed: Mapping[str, float]
    timings: tuple[Timing, ...]
    loads: tuple[Load, ...]


def plan(
    rounds: Rounds | None = None,
    *,
    times: Sequence[str] = (),
    benches: Sequence[str] = (),
    costs: Sequence[str] = (),
    lengths: Sequence[str] = (),
    batch: str = "",
    context: int | None = None,
    steps: str = "",
    variant: str | None = None,
) -> Planned:
    """Whether speculation pays, at which depth and batch: what `replay plan` says of ``rounds`` and timings.

    The options are those of the command, spelled as there; those that can be repeated are lists. ``batch`` is in
    requests, ``context`` in tokens; ``benches`` are files. ``replay.charts`` shows what comes back.

    Raises UsageError for what means nothing, without any timing or cost, and where no accept length is known.

    >>> planned = replay.plan(times=["batch=1,tok/s=90", "batch=1,steps=3,accept=2.1,tok/s=110"])
    >>> [choice.advice for choice in planned.plan.choices]
    ['speculate']
    """
    if rounds is not None:
        check_are_rounds("rounds", rounds)
    for name, given in (("times", times), ("benches", benches), ("costs", costs), ("lengths", lengths)):
        kinds = (str, PurePath) if name == "benches" else str
        check_list(name, given, kinds, f'a list of texts was expected; pass {name}=["..."]')
    for name, typed in (("batch", batch), ("steps", steps)):
        check_given(name, typed, str, f'a text was expected; pass {name}="1,32"')
    check_given("variant", variant, (str, type(None)), "the name of a variant was expected")
    check_given("context", context, (int, type(None)), "a number of tokens was expected")
    asked = Question(times, [str(one) for one in benches], costs, lengths, batch, context, steps, variant)
    return answer_question(asked, read_costs(asked), rounds, "" if rounds is None else "rounds")


def read_costs(asked: Question) -> Costs:
    """All of a question but its accept lengths, so that what is wrong there is said before anything is replayed.

    Raises UsageError for timings, costs, batches and depths that mean nothing, and without any timing or cost.
    """
    typed = typed_costs(asked.costs)
    _refuse_twice(asked.benches)
    read = [
        timing
        for bench in asked.benches
        for timing in (read_pages(bench, asked.pages[bench]) if bench in asked.pages else read_benchmark(bench))
    ]
    refuse_two_models(read)
    timings = join_timings([*map(typed_timing, asked.times), *read])
    if not timings and not typed:
        raise UsageError(NO_TIMING)
    if typed.get("kv") and asked.context is None and not any(timing.load.context for timing in timings):
        raise UsageError("--cost kv counts tokens of context, and none are told; type --context N")
    if asked.context is not None and not 1 <= asked.context <= MOST_CONTEXT:
        raise UsageError(f"--context {asked.context} cannot be; type 1 to {MOST_CONTEXT} tokens")
    if asked.context is not None:
        timings = [_at(timing, asked.context) for timing in timings]
    listed(asked.steps, "--steps", MOST_STEPS)
    return Costs(typed, tuple(timings), tuple(_loads(asked, timings)))


def _refuse_twice(benches: Sequence[str]) -> None:
    """Raises UsageError where one measurement would count as two, which would make its error smaller."""
    seen: set[object] = set()
    for bench in benches:
        for place in places_of(bench):
            if place in seen:
                raise UsageError(
                    f"--bench names {shorten(str(place), 200)} twice, which is one measurement; type it once"
                )
            seen.add(place)


def answer_question(
    asked: Question,
    costs: Costs,
    rounds: Rounds | None = None,
    called: str = "",
    played: Sequence[tuple[Played, Length]] = (),
) -> Planned:
    """The plan for what was asked; ``called`` is what the rounds file or the trace is called.

    Accept lengths are those of ``rounds``, else of the rules that were ``played`` on a trace, else those typed or read
    with timings. Raises UsageError where no accept length is known, and where rounds hold variants that differ
    in more than depth.
    """
    timings = costs.timings
    lengths = _known_lengths(asked, rounds, played, timings)
    depths = [] if played else [make_setting(count) for count in listed(asked.steps, "--steps", MOST_STEPS)]
    timed = [timing.setting for timing in timings if timing.setting.speculates]
    if rounds is not None and drafts_blocks(rounds, asked.variant):
        if any(depth not in lengths for depth in depths):
            raise UsageError(
                "a DFlash head's accept length at one depth says nothing of others; simulate each of --steps"
            )
    else:
        lengths = with_bounds(lengths, [*depths, *timed])
    plan = make_plan(timings, costs.typed, lengths, costs.loads, played=played)
    requests = len(rounds.requests) if rounds is not None else len(played[0][0].counts) if played else None
    return Planned(plan, tuple(_provenance(called, lengths, timings, costs.typed)), requests)


def _known_lengths(
    asked: Question, rounds: Rounds | None, played: Sequence[tuple[Played, Length]], timings: Sequence[Timing]
) -> dict[Setting, Length]:
    """Raises UsageError where none is known, and where there are two sources."""
    if rounds is None and asked.variant is not None:
        raise UsageError("--variant names a variant of a rounds file, and none was given; leave it out, or type ROUNDS")
    if (rounds is not None or played) and asked.lengths:
        raise UsageError("accept lengths come from a file or from --length, not from both; leave one out")
    if rounds is not None:
        return lengths_of_rounds(rounds, asked.variant)
    if played:
        return depth_lengths(played)
    found = lengths_of_timings([*timings, *_once(map(typed_length, asked.lengths))])
    if len(found) < 2:
        raise UsageError(
            "no accept length is known; type a rounds file of replay simulate --steps 1 --steps 3 -o ROUNDS, or a "
            "trace and --draft, or --length steps=3,accept=2.1, or accept=L in --time"
        )
    return found


def _once(lengths: Iterable[Timing]) -> list[Timing]:
    """Raises UsageError for two accept lengths of one setting."""
    told: dict[Setting, Timing] = {}
    for length in lengths:
        if told.setdefault(length.setting, length) is not length:
            raise UsageError(f"--length says the accept length of {length.setting.spelled} twice; type it once")
    return list(told.values())


def _at(timing: Timing, context: int) -> Timing:
    """A timing that does not say its context is taken to be at the one that is planned."""
    return timing if timing.load.context else replace(timing, load=Load(timing.load.batch, context))


def _loads(asked: Question, timings: Sequence[Timing]) -> list[Load]:
    """Those that were typed, else those that were timed; the context too."""
    contexts = {timing.load.context for timing in timings}
    if len(contexts) > 1 and asked.context is None and (asked.batch or None in contexts):
        raise UsageError("the timings are of several contexts, or some say none; type --context N to plan for one")
    context = asked.context or (next(iter(contexts)) if len(contexts) == 1 else None)
    batches = listed(asked.batch, "--batch", MOST_BATCH)
    if batches:
        return [Load(batch, context) for batch in batches]
    timed = sorted({timing.load for timing in timings}, key=lambda load: (load.batch, load.context or 0))
    return timed or [Load(1, context)]


def listed(text: str, option: str, most: int) -> list[int]:
    """``1,8,32`` as numbers, each once. Raises UsageError."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isascii() and word.isdigit() and len(word) < 10 and 1 <= int(word) <= most for word in words):
        raise UsageError(f"{option} is {text!r}; type whole numbers from 1 to {most}, such as 1,8,32")
    if len(words) > _MOST_LISTED:
        raise UsageError(f"{option} lists {len(words)} numbers; type at most {_MOST_LISTED}")
    return list(dict.fromkeys(int(word) for word in words))


def _provenance(
    called: str,
    lengths: Mapping[Setting, Length],
    timings: Sequence[Timing],
    costs: Mapping[str, float],
) -> list[tuple[str, str]]:
    known = [setting.spelled for setting, length in lengths.items() if setting.speculates and length.source != "bounds"]
    told = [("accept length", called)] if called else []
    told = told or [("accept length", "as typed or read with the timings")]
    told.append(("depths", wording.listed(known)))
    for timing in timings:
        seen = f"{timing.setting.spelled} at {timing.load.spelled}: {1000 * timing.seconds:.3f} ms a round"
        many = "" if timing.count == 1 else f", median of {wording.count(timing.count)}"
        told.append(("timing", f"{seen}, within {wording.percent(timing.error)} ({timing.source}{many})"))
    if costs:
        told.append(("typed costs", ", ".join(f"{name} {1000 * seconds:g} ms" for name, seconds in costs.items())))
    return told
