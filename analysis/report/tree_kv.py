"""What a tree's ``slot`` layout of the draft KV costs against ``path``, wherever a sweep holds both.

``slot`` is SGLang's: each column of the tree keeps its own KV slots, so a node whose parent stood in another column
reads a stranger's keys and values. ``path`` is what EAGLE means: a node reads those of its ancestors.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from replay.analysis import wording
from replay.analysis.gaps import Gap, gaps
from replay.analysis.summary import VariantSummary
from replay.traces.rounds import Rounds, VariantInfo

# What two variants that differ in nothing but kv may differ in besides: their name and their results.
_OWN = {"name", "kv", "seconds", "anchors", "anchors_accepted", "ties", "agreement"}


def layout_sentences(
    rounds: Rounds, summaries: Sequence[VariantSummary], *, seed: int, resamples: int
) -> tuple[str, ...]:
    """One sentence for each pair of variants that differ in ``slot`` against ``path`` only."""
    pairs = _pairs(rounds.variants)
    named = {summary.name: summary for summary in summaries}
    facts = wording.varying([named[slot.name] for slot, _ in pairs])
    found = [(slot, _gap(rounds, slot, path, seed=seed, resamples=resamples)) for slot, path in pairs]
    return tuple(
        _sentence(gap, wording.label(named[slot.name], facts)) for slot, gap in found if not math.isnan(gap.difference)
    )


def _pairs(variants: Sequence[VariantInfo]) -> list[tuple[VariantInfo, VariantInfo]]:
    paths = {_alike(variant): variant for variant in variants if variant.kv == "path"}
    slots = [variant for variant in variants if variant.kv == "slot"]
    return [(slot, paths[_alike(slot)]) for slot in slots if _alike(slot) in paths]


def _alike(variant: VariantInfo) -> tuple[object, ...]:
    return tuple(getattr(variant, field.name) for field in fields(variant) if field.name not in _OWN)


def _gap(rounds: Rounds, slot: VariantInfo, path: VariantInfo, *, seed: int, resamples: int) -> Gap:
    table = rounds.table.filter(rounds.table["variant"].is_in([slot.name, path.name]))
    pair = replace(rounds, variants=(path, slot), table=table)
    return gaps(pair, path.name, seed=seed, resamples=resamples)[slot.name]


def _sentence(gap: Gap, which: str) -> str:
    where = f" ({which})" if which else ""
    if gap.verdict == "equal":
        return f"The tree's KV layout slot accepts the same as path{where}."
    low, high = sorted(map(abs, gap.ci95)) if gap.verdict in ("better", "worse") else gap.ci95
    bounds = wording.interval((low, high))
    within = "" if bounds == wording.NOTHING else f", 95 % interval {bounds}"
    if gap.verdict == "cannot tell":
        return (
            f"The tree's KV layout slot against path: {gap.difference:+.3f}{within}, cannot be told from noise{where}."
        )
    does = "costs" if gap.verdict == "worse" else "gains"
    return f"The tree's KV layout slot {does} {wording.decimal(abs(gap.difference))} against path{within}{where}."
