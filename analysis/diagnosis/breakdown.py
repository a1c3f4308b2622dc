"""Where a server parts from its replay, and which further observation would tell more."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from replay.analysis.diagnosis.evidence import DRAFTED, LENGTH
from replay.analysis.followed import Followed, Noise, judge_rounds
from replay.analysis.json_document import JsonObject, json_value
from replay.printable import counted

_WIDTH = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Stratum:
    """A part of the server's rounds: ``agreeing`` of them the healthy replay explains.

    ``ci95`` is that of the share it leaves unexplained (Wilson's); ``information`` in bits is what the whole division
    ``by`` tells of it, the same for all of its parts.
    """

    by: str
    value: str
    rounds: int
    agreeing: int
    information: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Depth:
    """The drafted tokens of one depth (1 the first): how many margins are beyond rounding, and their median size."""

    depth: int
    tokens: int
    unexplained: int
    differing: int
    median_margin: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a server parts from the healthy replay: ``depths``, and ``strata``, the most telling division first."""

    depths: tuple[Depth, ...]
    strata: tuple[Stratum, ...]


def profile(followed: Followed, noise: Noise, views: Mapping[str, Sequence[str]]) -> Profile:
    """The profile of a replay along a server's drafts.

    ``views`` divide its rounds: for each name the value of every round [R]. Those that tell nothing are left out.
    """
    _, unexplained_R = judge_rounds(followed, noise)
    beyond_N = followed.margin_N > noise.limit(followed.depth_N)
    depths = []
    for depth in range(1, int(followed.depth_N.max(initial=0)) + 1):
        here_N = followed.depth_N == depth
        margins = followed.margin_N[here_N & ~followed.same_N]
        median = float(np.median(margins)) if len(margins) else math.nan
        depths.append(Depth(depth, int(here_N.sum()), int((here_N & beyond_N).sum()), len(margins), median))
    strata = [part for by, values in views.items() for part in _divide(by, values, unexplained_R)]
    return Profile(tuple(depths), tuple(sorted(strata, key=lambda part: -part.information)))


def _divide(by: str, values: Sequence[str], unexplained_R: "np.typing.NDArray[np.bool_]") -> list[Stratum]:
    """The parts of one division, none where it tells nothing: mutual information less its bias (Miller, 1955)."""
    total = len(unexplained_R)
    counts = {value: (sum(1 for one in values if one == value), 0) for value in dict.fromkeys(values)}
    for value, unexplained in zip(values, unexplained_R, strict=True):
        rounds, so_far = counts[value]
        counts[value] = rounds, so_far + int(unexplained)
    if len(counts) < 2:
        return []
    inside = sum(rounds / total * _entropy(count / rounds) for rounds, count in counts.values())
    bias = (len(counts) - 1) / (2 * total * math.log(2))
    information = _entropy(float(unexplained_R.mean())) - inside - bias
    if information <= 0:
        return []
    return [
        Stratum(by, value, rounds, rounds - count, information, wilson(count, rounds))
        for value, (rounds, count) in counts.items()
    ]


def _entropy(share: float) -> float:
    """Of a coin, in bits."""
    return -sum(part * math.log2(part) for part in (share, 1 - share) if part > 0)


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927)."""
    if not total:
        return math.nan, math.nan
    share, square = count / total, _WIDTH**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _WIDTH / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def say_profile(found: Profile) -> Iterator[str]:
    """Whether the difference is there from the first token on, and where it is rare or frequent."""
    told = [depth for depth in found.depths if depth.tokens]
    if any(depth.unexplained for depth in told):
        shares = [depth.unexplained / depth.tokens for depth in told]
        first, last = shares[0], shares[-1]
        if first == 0 and max(shares) > 0:
            start = next(depth.depth for depth in told if depth.unexplained)
            yield f"not in the first drafted token: it begins at token {start}, with what is fed back or kept in the KV"
        elif last > 1.5 * first:
            yield f"from the first drafted token on ({first:.0%}), and it grows with depth ({last:.0%} of the last)"
        else:
            yield f"from the first drafted token on ({first:.0%}), and not more with depth ({last:.0%} of the last)"
    seen: set[str] = set()
    for part in found.strata:
        if part.by in seen:
            continue
        seen.add(part.by)
        parts = sorted(
            (one for one in found.strata if one.by == part.by), key=lambda one: -(1 - one.agreeing / one.rounds)
        )
        most, least = parts[0], parts[-1]
        yield (
            f"{part.by}: {1 - most.agreeing / most.rounds:.0%} of {counted(most.rounds, 'round')} with {most.value}, "
            f"{1 - least.agreeing / least.rounds:.0%} of {least.rounds} with {least.value} "
            f"({part.information:.3f} bits)"
        )


def profile_json(found: Profile | None) -> JsonObject:
    """``depths`` and ``strata`` of the document; empty where nothing was profiled."""
    none: JsonObject = {"depths": [], "strata": []}
    return none if found is None else json_value(found)


def separate(kind: str, verdict: str, names: Sequence[str], *, gains: bool, steps: int) -> Iterator[str]:
    """Which further observation would tell apart what was not told apart.

    ``kind`` of evidence, ``names`` of the hypotheses that were not told apart, ``gains``: what accepts more is not told
    apart either; on a server of so many ``steps``.
    """
    if verdict == "engine" and kind == DRAFTED:
        yield "the same prompts one at a time (--concurrency 1): what depends on the batch then goes"
        yield "the same server without its draft options (graphs, overlap, quantisation, radix cache), one at a time"
    if not names and verdict != "undetermined":
        return
    if gains:
        yield "say with --wiring what the head was trained on, if its config or its trainer tells"
        yield "more requests: what the head accepts under these variants lies within noise"
        return
    if kind == LENGTH:
        yield "an accept length alone tells few faults apart: capture from the server itself, which counts rounds"
    if kind != DRAFTED:
        yield "start the server with `replay serve`, which records what it drafts round by round"
        return
    told = " ".join(names)
    if "weights.missing" in told:
        yield "the server's log from its start: which of the draft's tensors it did not load"
    if "position." in told or "attn." in told or "kv." in told:
        yield "longer prompts and outputs: positions, windows and draft KV show more the longer the context"
    if steps < 3:
        yield "more steps: what is fed back between steps shows from the second token on"
    yield "more requests: at these anchors the replays draft the same tokens"


def length_range(tokens: int) -> str:
    """A range of lengths, by powers of four: ``0-63``, ``64-255``, ..."""
    low, high = 0, 64
    while tokens >= high:
        low, high = high, high * 4
    return f"{low}-{high - 1}"
