"""The ladder of one head and one server: which replays it takes, run, and handed to analysis/ladder/ladder.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.engines.precision import Precision
from replay.engines.profiles import NUMERICS
from replay.errors import ReplayError
from replay.faults.table import TREE_FAULT
from replay.simulator.variant import CHAIN_KV, TREE_KVS
from replay.verify.rules import Rule

if TYPE_CHECKING:
    from replay.analysis.ladder.ladder import Factor, Ladder
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.engines.wiring import Wiring
    from replay.simulator.cache import Cache
    from replay.simulator.progress import ReplayProgress
    from replay.simulator.tasks import Workers
    from replay.simulator.variant import ResolvedVariant, Variant
    from replay.traces.reader import Trace

GREEDY = Rule()
# Which fields of a variant each rung switches from what training assumed to what the server has.
PRECISION, KV, WIRING, FAULT, CONFIGURATION = "precision", "KV", "wiring", "fault", "configuration"
FIELDS: Mapping[str, tuple[str, ...]] = {
    PRECISION: ("precision", "numerics"),
    KV: ("kv",),
    WIRING: ("wiring",),
    FAULT: ("faults",),
    CONFIGURATION: ("steps", "topk", "num_draft_tokens"),
}
# The same whoever runs the head: whose head it is, how the target verifies, whose conventions are followed.
COMMON = ("draft", "verify", "engine")


def climb(
    trace: "Trace",
    checkpoint: "Checkpoint",
    served: "Variant | ResolvedVariant",
    trained_wiring: "Wiring",
    *,
    trained_steps: int | None,
    observed: float | Mapping[str, Sequence[int]] | None = None,
    device: str = "cpu",
    served_products: bool = True,
    cache: "Cache | None" = None,
    workers: "Workers | None" = None,
    seed: int = 0,
    resamples: int = DEFAULT_RESAMPLES,
    on_event: "Callable[[ReplayProgress], None]" = lambda _: None,
) -> "Ladder":
    """From the training metric of ``checkpoint`` down to what a server accepted that runs it as ``served`` says.

    Every rung holds drafts against the recorded tokens, whatever acceptance rule ``served`` names; a note says so.
    ``trained_wiring`` and ``trained_steps`` (None: as many as the server's) are what training assumed, in fp32 and
    with nothing wrong. ``observed`` is an accept length, or by request id the server's rounds by accepted tokens (None:
    what the trace holds of it); ``served_products`` as ``simulate`` takes it, ``cache`` keeps the replays and
    ``workers`` do them. Up to 2^5 replays, which share what they can. Raises WiringError, CheckpointError,
    UsageError or TraceError.
    """
    from replay.analysis.ladder.ladder import Replays, build_ladder
    from replay.simulator.binding import resolve
    from replay.simulator.cache import simulate_kept
    from replay.simulator.held import requests_with_taps
    from replay.simulator.teacher_forced import score_anchors

    served = resolve(served, checkpoint, trace)
    rule = str(served.verify)
    served = replace(served, verify=GREEDY)
    ideal = ideal_variant(served, trained_wiring, trained_steps)
    trace = requests_with_taps(trace, [ideal, served], {served.draft: checkpoint})
    factors = list_factors(ideal, served)
    playable, why_not = _playable(ideal, served, factors, trace, checkpoint)
    distinct = list(dict.fromkeys(playable.values()))
    total = 2 * len(trace.requests)
    anchors = score_anchors(
        trace,
        checkpoint,
        ideal,
        device=device,
        on_event=lambda event: on_event(replace(event, total=total)),
    )
    rounds = simulate_kept(
        cache,
        trace,
        {served.draft: checkpoint},
        distinct,
        device=device,
        served_products=served_products,
        workers=workers,
        on_event=lambda event: on_event(replace(event, done=event.total + event.done, total=total)),
    )
    names = {chosen: rounds.variants[distinct.index(variant)].name for chosen, variant in playable.items()}
    replays = Replays(rounds, factors, names, why_not, rule)
    return build_ladder(anchors, replays, observed=observed, seed=seed, resamples=resamples)


def ideal_variant(served: "ResolvedVariant", trained_wiring: "Wiring", trained_steps: int | None) -> "ResolvedVariant":
    """What training assumed of a server: chains in fp32, refreshed draft KV, no fault."""
    steps = served.steps if trained_steps is None else trained_steps
    return replace(
        served,
        wiring=trained_wiring,
        precision=Precision("fp32"),
        numerics=NUMERICS[served.engine.numerics],
        kv=CHAIN_KV,
        faults=(),
        steps=steps,
        topk=1,
        num_draft_tokens=steps + 1,
    )


def mix(ideal: "ResolvedVariant", served: "ResolvedVariant", chosen: frozenset[str]) -> "ResolvedVariant":
    """``ideal`` with the fields of the ``chosen`` factors as they are served."""
    fields = {field: getattr(served, field) for factor in chosen for field in FIELDS[factor]}
    if fields.get("topk", ideal.topk) == 1:
        fields["faults"] = tuple(fault for fault in fields.get("faults", ideal.faults) if fault.kind != TREE_FAULT)
    tree = fields.get("topk", ideal.topk) > 1
    if KV not in chosen:
        # Trees as training would have them: a node sees its own ancestors, whatever the engine's layout is.
        fields["kv"] = "path" if tree else ideal.kv
    if not tree and fields["kv"] in TREE_KVS:
        fields["kv"] = CHAIN_KV  # a chain has one column: both layouts are the same
    return replace(ideal, **fields)


def list_factors(ideal: "ResolvedVariant", served: "ResolvedVariant") -> "tuple[Factor, ...]":
    """The rungs between the ideal walk and the served one, in order; a fault only where there is one.

    A tree's KV layout comes after the configuration, as a chain has none.
    """
    from replay.analysis.ladder.ladder import Factor

    tree = served.topk > 1
    order = [PRECISION, WIRING, FAULT, CONFIGURATION, KV] if tree else [PRECISION, KV, WIRING, FAULT, CONFIGURATION]
    healthy = ("refresh", "path") if tree else ("refresh",)
    differs = {name: _differ(ideal, served, name) for name in order} | {KV: served.kv not in healthy}
    return tuple(
        Factor(name, _say(name, ideal, served, differs[name]), differs[name])
        for name in order
        if name != FAULT or served.faults
    )


def _differ(ideal: "ResolvedVariant", served: "ResolvedVariant", factor: str) -> bool:
    return any(getattr(ideal, field) != getattr(served, field) for field in FIELDS[factor])


def _say(factor: str, ideal: "ResolvedVariant", served: "ResolvedVariant", differs: bool) -> str:
    """One sentence for a rung."""
    if factor == PRECISION:
        said = f"{served.precision}, rounded in the order of {served.numerics.name}"
        return f"The head runs in {said}, instead of fp32." if differs else "The head runs in fp32 on the server too."
    if factor == KV:
        if served.topk > 1:
            return (
                "Nodes of the tree see what stood in their column (slot), instead of their ancestors (path)."
                if differs
                else "Nodes of the tree see their ancestors (path), as the head was trained."
            )
        kept = f"After each verify the draft KV is kept as {served.kv}, instead of rewritten from true features."
        return kept if differs else "The draft KV is rewritten from true features after each verify (refresh)."
    if factor == WIRING:
        fed = f"The server feeds {served.wiring}"
        return f"{fed}, the head was trained on {ideal.wiring}." if differs else f"{fed}, as the head was trained."
    if factor == FAULT:
        return f"The server runs with {' + '.join(map(str, served.faults))}."
    return _say_configuration(ideal, served, differs)


def _say_configuration(ideal: "ResolvedVariant", served: "ResolvedVariant", differs: bool) -> str:
    shape = f"{served.steps} step{'' if served.steps == 1 else 's'}"
    if served.topk > 1:
        shape += f" of topk {served.topk} with {served.num_draft_tokens} draft tokens"
    if not differs:
        return f"The server drafts {shape}, as training assumed."
    return f"The server drafts {shape}; training assumed a chain of {ideal.steps}."


def _playable(
    ideal: "ResolvedVariant",
    served: "ResolvedVariant",
    factors: "Sequence[Factor]",
    trace: "Trace",
    checkpoint: "Checkpoint",
) -> "tuple[dict[frozenset[str], ResolvedVariant], str]":
    """The variant of every choice of factors, and why some cannot be played (empty: all can).

    Those along the ladder have to be. Raises what ``bind`` raises for them.
    """
    from replay.analysis.ladder.shapley import subsets
    from replay.simulator.binding import bind

    names = [factor.name for factor in factors if factor.differs]
    ladder = {frozenset(names[:count]) for count in range(len(names) + 1)}
    playable: dict[frozenset[str], ResolvedVariant] = {}
    why_not = ""
    for chosen in subsets(names):
        variant = mix(ideal, served, chosen)
        try:
            bind(variant, checkpoint, trace)
        except ReplayError as error:
            if chosen in ladder:
                raise
            why_not = why_not or str(error)
        else:
            playable[chosen] = variant
    if why_not:
        playable = {chosen: variant for chosen, variant in playable.items() if chosen in ladder}
    return playable, why_not
