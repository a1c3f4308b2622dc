"""`replay diagnose`: every hypothesis replayed and held against what a server did. The whole story, step by step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH
from replay.analysis.diagnosis.gain import Gain
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.ladder.ladder import Ladder
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.advice import check_width, conclude
from replay.diagnosis.case import Case
from replay.diagnosis.elsewhere import requests_of_all
from replay.diagnosis.feed import read_feeding
from replay.diagnosis.gains import gains_at_anchors, gains_of_walks
from replay.diagnosis.hypotheses import WIRED_OTHERWISE, Hypothesis
from replay.diagnosis.ladder import climb
from replay.diagnosis.observed import observe
from replay.diagnosis.progress import Tell, Trying
from replay.diagnosis.reference import Reference, measure, measure_discordance
from replay.diagnosis.search import search
from replay.diagnosis.trials import Trial, healthy
from replay.engines.wiring import Wiring, parse_wiring
from replay.simulator.binding import resolve
from replay.simulator.cache import open_cache
from replay.simulator.cache_keys import unlike_here
from replay.simulator.held import richest_requests
from replay.simulator.kept import keep_tasks
from replay.simulator.progress import ReplayProgress
from replay.simulator.variant import ResolvedVariant, Variant, default_steps
from replay.simulator.workers import use_workers
from replay.traces.fields import count_of
from replay.traces.files import as_path
from replay.traces.given import check_callable, check_given
from replay.traces.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from replay.capture.observed_number import Observed


def diagnose_server(
    trace: Trace,
    checkpoint: Checkpoint,
    served: Variant,
    *,
    trained: Wiring | None = None,
    observed: "Observed | None" = None,
    without: Collection[str] = (),
    ladder: bool = True,
    cache: Path | None = None,
    workers: int | str | None = None,
    on_event: Tell = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Why a server that ran ``served`` accepted what it did.

    ``trained`` is the wiring the head was made for, where known; ``observed`` an accept length from elsewhere, else
    the trace's own server is explained; kinds of faults in ``without`` are not tried. With ``ladder`` the way from the
    training metric down to what was observed follows (ladder.py). ``cache`` is a folder in which what was replayed is
    kept, so that a diagnosis that was stopped goes on, and ``workers`` a number of processes that replay, as in
    ``simulate``. ``on_note`` is told of entries of the cache that are damaged, and of nodes of a cluster as in
    ``use_workers``. Raises TraceError where nothing was observed, UsageError where the two differ in steps or for a
    cache of a trace that is not verified, and whatever ``simulate`` raises.
    """
    case = open_case(trace, checkpoint, served, trained, observed, without)
    heads = {case.served.draft: checkpoint}
    with use_workers(workers, trace, heads, "cpu", on_note) as hands:
        if cache is not None:
            kernels = None if hands is None else hands.kernels
            kept = open_cache(cache, case.trace, heads, "cpu", agreement=False, kernels=kernels, on_note=on_note)
            if kept is None:
                on_note(f"note: the recording of {trace.path} has not ended, so --cache keeps nothing of it")
            case = replace(case, cache=kept)
        if hands is not None and (unlike := unlike_here(hands.kernels)):
            on_note(
                f"note: this machine and the cluster round differently ({unlike}): the training metric is made here"
            )
        return _explain(replace(case, workers=keep_tasks(case.cache, hands)), ladder, on_event)


def _explain(case: Case, ladder: bool, on_event: Tell) -> Diagnosis:
    if case.observation.kind == LENGTH:
        check_width(case, on_event)
    reference = measure(case, on_event) if case.observation.kind == DRAFTED else None
    if case.observation.kind == HISTOGRAM:
        case = replace(case, observation=replace(case.observation, discordant=measure_discordance(case)))
    tried, final = search(case, reference, on_event)
    gains, compared = _gains(case, reference, tried, final, on_event)
    found = conclude(case, reference, tried, final, gains, compared, on_event)
    return replace(found, ladder=_climb(case, found, tried, on_event)) if ladder else found


def _gains(
    case: Case, reference: Reference | None, tried: Sequence[Trial], final: Sequence[Trial], tell: Tell
) -> tuple[list[Gain], int]:
    """What accepts more than what is served, and of how many it is the best; nothing where something else is wrong."""
    if reference is None:
        return gains_of_walks(case, final), len(tried)
    if healthy(final).scored.fits or case.trained is not None:
        return gains_at_anchors(case, tell)
    return [], 0


def open_case(
    trace: Trace,
    checkpoint: Checkpoint,
    served: Variant,
    trained: Wiring | None,
    observed: "Observed | None",
    without: Collection[str] = (),
) -> Case:
    """All that is known before anything is replayed. Raises as ``diagnose_server``."""
    resolved = resolve(served, checkpoint, trace)
    other = None if trained == resolved.wiring else trained
    tried = richest_requests(trace)
    return Case(
        tried,
        trace,
        checkpoint,
        resolved,
        other,
        observe(tried, resolved.steps, observed),
        read_feeding(tried),
        without,
    )


def served_variant(trace: Trace, draft: str, head: Checkpoint | None = None, **given: object) -> Variant:
    """The variant that the recorded server ran, from the trace's header; what is ``given`` (not None) goes before it.

    Where nothing says how many steps, a ``head`` that drafts blocks fills them. Raises UsageError for values that
    cannot be.
    """
    details = trace.header.engine.details
    told: dict[str, object] = {}
    for name, key in (
        ("steps", "speculative_num_steps"),
        ("topk", "speculative_eagle_topk"),
        ("num_draft_tokens", "speculative_num_draft_tokens"),
    ):
        if (count := count_of(details.get(key, ""))) is not None:
            told[name] = count
    if head is not None and head.config.block is not None:
        told["steps"] = _block_steps(head, told)
    stored = details.get("speculative_draft_kv_cache_dtype") or details.get("kv_cache_dtype")
    if stored in ("fp8_e4m3", "fp8_e5m2"):
        told["precision"] = f"kv={stored}"
    if details.get("wiring"):
        told["wiring"] = parse_wiring(details["wiring"], layers=trace.header.target.layers)
    told |= {name: value for name, value in given.items() if value is not None}
    if told.get("topk", 1) == 1:
        told.pop("num_draft_tokens", None)
    return Variant(draft=draft, **told)  # type: ignore[arg-type]


def _block_steps(head: Checkpoint, told: Mapping[str, object]) -> object:
    """SGLang 0.5.23 arg_groups/speculative_hook.py ``_handle_dflash`` sets the number of steps to 1 whatever a block
    has, and the number of draft tokens to those of a block."""
    tokens = told.get("num_draft_tokens")
    if isinstance(tokens, int) and tokens > 1 and told.get("topk", 1) == 1:
        return tokens - 1
    return told.get("steps", default_steps(head))


def _climb(case: Case, found: Diagnosis, tried: Sequence[Trial], tell: Tell) -> Ladder:
    """From the training metric to what was observed, with the fault that was found among the rungs."""
    served, right = _ends(case, found, {one.hypothesis.name: one.hypothesis for one in tried})
    same = requests_of_all(case, [served, replace(served, wiring=right)])

    def on_event(progress: ReplayProgress) -> None:
        tell(Trying("the ladder", progress.done, progress.total, progress.part, "requests"))

    return climb(
        same,
        case.checkpoint,
        served,
        right,
        trained_steps=None,
        observed=observe(same, case.served.steps, case.observation.given).accepted,
        served_products=False,
        cache=case.cache,
        workers=case.workers,
        on_event=on_event,
    )


def _ends(case: Case, found: Diagnosis, tried: Mapping[str, Hypothesis]) -> tuple[ResolvedVariant, Wiring]:
    """The variant that was served as far as it is known now, and the wiring that the head was trained on."""
    better = next((gain for gain in found.gains if gain.label == found.named), None)
    if better is not None:
        return case.served, parse_wiring(better.value) if better.kind == WIRED_OTHERWISE else case.right_wiring
    return case.served if found.named is None else tried[found.named].variant, case.right_wiring


def diagnose(
    trace: Trace,
    head: Checkpoint,
    *,
    observed: "float | str | Path | Observed | None" = None,
    trained: Wiring | None = None,
    wiring: Wiring | None = None,
    steps: int | None = None,
    topk: int | None = None,
    num_draft_tokens: int | None = None,
    precision: str | None = None,
    engine: str | None = None,
    ladder: bool = True,
    cache: Path | None = None,
    workers: int | str | None = None,
    on_event: Tell = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """What `replay diagnose` finds: why the server that ran ``head`` accepted what it did.

    ``observed``: an accept length or a file that has one (capture/observed.py), else the trace's own server is
    explained. ``trained``: the wiring that the head was made for, where known. What the server ran, ``wiring`` (what it
    feeds) to ``engine``, is as the trace says where it is not given. ``cache``, ``workers`` and ``on_note`` as in
    ``diagnose_server``. Raises as that, and CaptureError for an ``observed`` that says nothing.
    """
    from replay.capture.observed import read_observed
    from replay.capture.observed_number import Observed

    check_given("trace", trace, Trace, "a trace was expected; open one by replay.Trace.open")
    check_given("head", head, Checkpoint, "a head was expected; read one by replay.load_head")
    check_given("trained", trained, (Wiring, type(None)), "a wiring was expected; make one by replay.parse_wiring")
    check_callable("on_event", on_event, "a function that takes an event was expected; leave it out")
    check_callable("on_note", on_note, "a function that takes a sentence was expected; leave it out")
    served = served_variant(
        trace, head.name, head, steps=steps, topk=topk, num_draft_tokens=num_draft_tokens, precision=precision,
        engine=engine, wiring=wiring,
    )  # fmt: skip
    kept = None if cache is None else as_path(cache)
    seen = observed if observed is None or isinstance(observed, Observed) else read_observed(str(observed))
    return diagnose_server(
        trace,
        head,
        served,
        trained=trained,
        observed=seen,
        ladder=ladder,
        cache=kept,
        workers=workers,
        on_event=on_event,
        on_note=on_note,
    )
