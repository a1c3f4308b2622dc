"""Accept lengths of settings: replayed, measured, or bounded by those of other depths.

A chain of k steps takes the first k tokens of a longer one; the blocks of a DFlash head do not. Let L be the accept
length of the longer chain with K steps. The share of rounds with at least j accepted falls with j. So over the same
anchors the shorter chain's accept length lies between 1 + (L - 1) k / K and the smaller of L and k + 1. A longer chain
lies between L and L + (K' - K)(L - 1) / K. Served rounds start elsewhere under another depth; that moves these bounds
by what the walk's choice of anchors does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replay.analysis import wording
from replay.analysis.bootstrap import DEFAULT_RESAMPLES, Floats
from replay.analysis.counts import ACCEPTED, ROUNDS, length_interval, lengths, per_request, stacked_sums
from replay.analysis.plan.settings import PLAIN, Setting
from replay.analysis.plan.timings import TYPED, Timing
from replay.errors import UsageError
from replay.traces.rounds import Rounds, VariantInfo

# Facts of a variant that may differ between the depths of one plan. ``kv`` may where it is what a healthy chain or tree
# has (simulator/variant.py).
_DEPTH = ("steps", "topk", "num_draft_tokens")
_HEALTHY_KV = ("refresh", "slot", "path")
DFLASH = "DFlash"  # what the drafts of a rounds file call the family that drafts blocks


@dataclass(frozen=True, slots=True)
class Length:
    """The accept length of one setting: its value, its interval, and draws [D] of it where requests were resampled.

    The interval is (nan, nan) where rounds of one request alone are known. ``draws`` of all settings with the source
    ``rounds`` come from the same resampled requests, so they may be compared draw by draw. Other sources are
    ``timing`` (measured with one), ``typed`` and ``bounds``; of ``bounds`` the value is the middle.
    """

    value: float
    ci95: tuple[float, float]
    draws: Floats
    source: str


def lengths_of_rounds(rounds: Rounds, variant: str | None, *, seed: int = 0) -> dict[Setting, Length]:
    """By setting the accept length of the variants that differ in depth alone from ``variant`` (None: from the first).

    Raises UsageError where no variant has that name, where variants differ in more and none was named, and where none
    has a round.
    """
    chosen = _same_but_depth(rounds, variant)
    counts = per_request(rounds)
    played = [counts[info.name] for info in chosen]
    if not all(rows[:, ROUNDS].any() for rows in played):
        raise UsageError("a variant of these rounds has no round, so no accept length; simulate longer outputs")
    sums = stacked_sums(played, seed=seed, resamples=DEFAULT_RESAMPLES)
    found = {PLAIN: Length(1.0, (1.0, 1.0), np.ones(1), "rounds")}
    for info, rows, drawn in zip(chosen, played, sums, strict=True):
        total = rows.sum(axis=0)
        draws = lengths(drawn)
        draws = draws[np.isfinite(draws)]
        setting = Setting(info.steps, info.topk, info.num_draft_tokens)
        value = float((total[ACCEPTED] + total[ROUNDS]) / total[ROUNDS])
        found[setting] = Length(value, length_interval(draws, rows[:, ROUNDS] > 0), draws, "rounds")
    return found


def _same_but_depth(rounds: Rounds, variant: str | None) -> list[VariantInfo]:
    first = next((info for info in rounds.variants if info.name == (variant or rounds.variants[0].name)), None)
    if first is None:
        names = wording.listed([info.name for info in rounds.variants[:8]])
        raise UsageError(f"no variant is called {variant}; these rounds have {names}")
    facts = [name for name in wording.FACTS if name not in _DEPTH]
    same = [info for info in rounds.variants if all(_fact(info, name) == _fact(first, name) for name in facts)]
    if variant is None and len(same) < len(rounds.variants):
        other = next(info.name for info in rounds.variants if info not in same)
        raise UsageError(
            f"these rounds hold variants that differ in more than depth ({first.name} and {other}); name one of them "
            "with --variant, and its other depths come along"
        )
    return same


def _fact(info: VariantInfo, name: str) -> object:
    value: object = getattr(info, name)
    return _HEALTHY_KV if name == "kv" and value in _HEALTHY_KV else value


def drafts_blocks(rounds: Rounds, variant: str | None) -> bool:
    """Whether the planned variants' head drafts blocks, of which a shorter one is no beginning of a longer one."""
    head = rounds.drafts.get(_same_but_depth(rounds, variant)[0].draft)
    return isinstance(head, dict) and head.get("family") == DFLASH


def lengths_of_timings(timings: Sequence[Timing]) -> dict[Setting, Length]:
    """By setting the accept length that was typed or came with the timings, averaged over loads; no interval."""
    told: dict[Setting, list[float]] = {PLAIN: [1.0]}
    typed: set[Setting] = set()
    for timing in timings:
        if timing.accept_length is not None and timing.setting.speculates:
            told.setdefault(timing.setting, []).append(timing.accept_length)
            typed |= {timing.setting} if TYPED in timing.source.split(" and ") else set()
    return {
        setting: _fixed(sum(values) / len(values), "typed" if setting in typed else "timing")
        for setting, values in told.items()
    }


def _fixed(value: float, source: str) -> Length:
    return Length(value, (value, value), np.array([value]), source)


def with_bounds(known: Mapping[Setting, Length], asked: Sequence[Setting]) -> dict[Setting, Length]:
    """``known``, and for each chain of ``asked`` that is not there what the known chains leave possible."""
    found = dict(known)
    chains = {setting.steps: length for setting, length in known.items() if setting.speculates and setting.topk == 1}
    for setting in asked:
        if setting not in found and setting.topk == 1 and chains:
            low, high = _bounds(setting.steps, chains)
            found[setting] = Length((low + high) / 2, (low, high), np.array([low, high]), "bounds")
    return found


def _bounds(steps: int, chains: Mapping[int, Length]) -> tuple[float, float]:
    """Raises UsageError where what is known of other depths cannot be true together."""
    low, high = 1.0, steps + 1.0
    for other, length in chains.items():
        least, most = (length.value if math.isnan(end) else end for end in length.ci95)
        if other > steps:
            low, high = max(low, 1 + (least - 1) * steps / other), min(high, most)
        else:
            low, high = max(low, least), min(high, most + (steps - other) * (most - 1) / other)
    if low > high:
        told = wording.listed([f"{length.value:.3g} with {k}" for k, length in sorted(chains.items())])
        raise UsageError(
            f"the accept lengths ({told} steps) leave none for {steps} steps, since more steps accept no less; check "
            f"them, or leave {steps} out of --steps"
        )
    return low, high
