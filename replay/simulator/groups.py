"""Variants by what they can share, so that a sweep runs as few passes as it can."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.tree_shape import TreeSize
from replay.engines.wiring import Wiring
from replay.faults.change import Subject
from replay.head.held import Held
from replay.head.model import Head
from replay.simulator.binding import bind, build_head
from replay.simulator.fit import check_rule, samples_drafts
from replay.simulator.variant import CHAIN_KV, ResolvedVariant
from replay.traces.reader import Trace
from replay.traces.taps import FINAL
from replay.verify.rules import Rule


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that differ in steps, the size of their trees and their rule only: one run at the most steps serves all.

    Of a head that drafts blocks only the rule differs: a block of another size is another run.
    Groups with one ``stem`` have their first pass in common: all of them hand states from request to request, or none.
    ``sampled``: the head samples its drafts, and the run
    follows the recorded text (drafting/path_probability.py).
    """

    head: Head
    wiring: Wiring
    topk: int
    kv: str
    sizes: tuple[TreeSize, ...]
    members: tuple[int, ...]
    stem: Hashable
    sampled: bool = False

    @property
    def crosses(self) -> bool:
        """Whether requests are handed states of others of their batch, which then have to be replayed beside them."""
        return self.head.behaviour.crosses


def taps_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """Every tap that some variant reads."""
    taps = dict.fromkeys(tap for group in groups for tap in group.wiring.taps)
    if any(group.head.behaviour.chunk is not None for group in groups):
        taps[FINAL] = None
    return tuple(taps)


@dataclass(frozen=True, slots=True)
class Plan:
    """A group whose head is not made yet: ``first`` of its variants stands for all, with its ``subject``."""

    first: ResolvedVariant
    subject: Subject
    sizes: tuple[TreeSize, ...]
    members: tuple[int, ...]
    stem: Hashable
    sampled: bool

    @property
    def weights(self) -> Hashable:
        """Equal for plans whose heads share their weights."""
        return _weights_key(self.first, self.subject)


@dataclass(frozen=True, slots=True)
class Made:
    """A head, and the subject that it was made of: its tensors are known by where they lie, so they have to stay."""

    subject: Subject
    head: Head


def plan_groups(variants: Sequence[ResolvedVariant], checkpoints: Mapping[str, Checkpoint], trace: Trace) -> list[Plan]:
    """Resolved variants by what they can share, those of the same weights side by side, and of these those of one stem;
    no head is made.

    Raises UsageError, WiringError or CheckpointError before any tensor of the trace is read.
    """
    plans = []
    for (*_, sampled), members in _alike(variants, checkpoints, trace).items():
        first = variants[members[0]]
        subject = bind(first, checkpoints[first.draft], trace)
        behaviour = subject.behaviour
        weights = _weights_key(first, subject)
        stem = (weights, subject.config, behaviour.of_first_pass(), subject.wiring, behaviour.crosses)
        sizes = tuple(_size(variants[member]) for member in members)
        plans.append(Plan(first, subject, sizes, tuple(members), stem, sampled))
    alike: dict[Hashable, dict[Hashable, list[Plan]]] = {}
    for plan in plans:
        alike.setdefault(plan.weights, {}).setdefault(plan.stem, []).append(plan)
    return [plan for stems in alike.values() for stem in stems.values() for plan in stem]


def group_variants(
    variants: Sequence[ResolvedVariant],
    checkpoints: Mapping[str, Checkpoint],
    trace: Trace,
    device: str,
    *,
    served_products: bool = True,
    made: "dict[Hashable, Made] | None" = None,
    held: Held | None = None,
) -> list[Group]:
    """What ``plan_groups`` gives, with heads: those that were ``made`` before, where their weights are the same, and
    new ones, which are put there. These share the weights that they run alike, also with those in ``held``. Raises as
    it does."""
    heads: dict[Hashable, Made] = {} if made is None else made
    held = Held() if held is None else held
    groups: list[Group] = []
    for plan in plan_groups(variants, checkpoints, trace):
        first, subject, weights = plan.first, plan.subject, (plan.weights, served_products)
        if weights not in heads:
            head = build_head(
                checkpoints[first.draft], first, trace, device, subject, served_products=served_products, held=held
            )
            heads[weights] = Made(subject, head)
        head = heads[weights].head.variation(subject.behaviour, subject.config)
        kv = subject.tree_kv or first.kv
        groups.append(
            Group(head, subject.wiring, first.topk, kv, plan.sizes, plan.members, plan.stem, plan.sampled)
        )  # fmt: skip
    return groups


def check_variants(variants: Sequence[ResolvedVariant], checkpoints: Mapping[str, Checkpoint], trace: Trace) -> None:
    """Refuse what ``group_variants`` would refuse of them before it makes heads. Raises as it does."""
    for members in _alike(variants, checkpoints, trace).values():
        first = variants[members[0]]
        bind(first, checkpoints[first.draft], trace)


def _alike(
    variants: Sequence[ResolvedVariant], checkpoints: Mapping[str, Checkpoint], trace: Trace
) -> dict[tuple[ResolvedVariant, int, str, bool], list[int]]:
    """The places of variants that are one group, the last part of the key being ``sampled``. Raises UsageError."""
    alike: dict[tuple[ResolvedVariant, int, str, bool], list[int]] = {}
    for number, variant in enumerate(variants):
        check_rule(variant.verify, trace)
        sampled = samples_drafts(variant.verify, trace)
        block = checkpoints[variant.draft].config.block is not None
        alike.setdefault((without_drafting(variant, block), variant.topk, variant.kv, sampled), []).append(number)
    return alike


def _weights_key(variant: ResolvedVariant, subject: Subject) -> Hashable:
    """What tells apart heads whose weights cannot be the same tensors in memory."""
    return (
        variant.draft,
        variant.engine,
        variant.numerics,
        id(subject.checkpoint.tensors),
        subject.behaviour.target_lm_head,
        subject.own_embedding,
        subject.precision,
    )


def without_drafting(variant: ResolvedVariant, block: bool) -> ResolvedVariant:
    """What the head itself depends on: the variant with its chain or tree, and their acceptance, taken away.

    Of a head that drafts a ``block`` another number of steps is another run.
    """
    kv = CHAIN_KV if variant.topk > 1 else variant.kv
    return replace(variant, steps=variant.steps if block else 1, topk=1, num_draft_tokens=2, kv=kv, verify=Rule())


def _size(variant: ResolvedVariant) -> TreeSize:
    return TreeSize(variant.steps, variant.num_draft_tokens)
