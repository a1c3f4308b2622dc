"""Variants by what they can share, so that a sweep runs as few passes as it can."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.tree_shape import TreeSize
from replay.engines.wiring import Wiring
from replay.faults.change import Subject
from replay.head.model import Head
from replay.simulator.binding import bind, build_head
from replay.simulator.fit import check_rule, samples_drafts
from replay.simulator.variant import Variant
from replay.traces.reader import Trace
from replay.verify.rules import parse_rule


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that differ in steps, the size of their trees and their rule only: one run at the most steps serves all.

    Groups with one ``stem`` have their first pass in common. ``sampled``: the head samples its drafts, and the run
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


def group_variants(
    variants: Sequence[Variant],
    checkpoints: Mapping[str, Checkpoint],
    trace: Trace,
    device: str,
    *,
    served_products: bool = True,
) -> list[Group]:
    """Resolved variants by what they can share, groups of one stem side by side.

    Raises UsageError, WiringError or CheckpointError before any tensor of the trace is read.
    """
    alike: dict[tuple[Variant, int, str | None, bool], list[int]] = {}
    for place, variant in enumerate(variants):
        rule = parse_rule(variant.verify)
        check_rule(rule, trace)
        sampled = samples_drafts(rule, trace)
        alike.setdefault((_without_drafting(variant), variant.topk, variant.kv, sampled), []).append(place)
    firsts = [variants[members[0]] for members in alike.values()]
    subjects = [bind(first, checkpoints[first.draft], trace) for first in firsts]
    heads: dict[Hashable, Head] = {}
    groups: list[Group] = []
    for (*_, sampled), members, first, subject in zip(alike, alike.values(), firsts, subjects, strict=True):
        assert first.kv is not None
        sizes = tuple(_size(variants[member]) for member in members)
        weights = (replace(_without_drafting(first), wiring=None, faults=(), kv=None), _weights_key(subject))
        if weights not in heads:
            heads[weights] = build_head(
                checkpoints[first.draft], first, trace, device, subject, served_products=served_products
            )
        head = heads[weights].variation(subject.behaviour, subject.config)
        stem = (weights, subject.config, subject.behaviour.of_first_pass(), subject.wiring)
        kv = subject.tree_kv or first.kv
        groups.append(Group(head, subject.wiring, first.topk, kv, sizes, tuple(members), stem, sampled))
    places = {stem: place for place, stem in reversed(list(enumerate(group.stem for group in groups)))}
    return sorted(groups, key=lambda group: places[group.stem])


def _weights_key(subject: Subject) -> Hashable:
    """What tells apart heads whose weights cannot be the same tensors in memory."""
    return (
        id(subject.checkpoint.tensors),
        subject.behaviour.target_lm_head,
        subject.own_embedding,
        subject.precision,
    )


def _without_drafting(variant: Variant) -> Variant:
    """What the head itself depends on: the variant with its chain or tree, and their acceptance, taken away."""
    kv = None if variant.topk > 1 else variant.kv
    return replace(variant, steps=1, topk=1, kv=kv, verify="greedy")


def _size(variant: Variant) -> TreeSize:
    assert variant.num_draft_tokens is not None
    return TreeSize(variant.steps, variant.num_draft_tokens)
