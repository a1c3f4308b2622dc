"""Timings of a server: how long one round takes at a setting and a load, and who says so.

A round is one draft and one verify, or one plain step. Every request of the batch gets accept length tokens from it, so
tokens a second of the whole batch = batch x accept length / seconds of a round. This is how a throughput that somebody
measured becomes seconds here. Prefill, queueing and sampling on the host between rounds are part of it where the
measurement had them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from replay.analysis.plan.settings import (
    MOST_BATCH,
    MOST_CONTEXT,
    MOST_NODES,
    MOST_STEPS,
    PLAIN,
    Load,
    Setting,
    make_setting,
    read_pairs,
    whole,
)
from replay.errors import UsageError
from replay.printable import shorten

# By how much a single timing is trusted: throughput of a server repeats to about this share.
TRUST = 0.02
TYPED = "typed"  # the source of what was typed

_NAMES = {
    "batch": "batch",
    "context": "context",
    "steps": "steps",
    "topk": "topk",
    "draft_tokens": "draft_tokens",
    "accept": "accept",
    "tok/s": "tok/s",
    "ms": "ms",
    "tpot": "tpot",
}


@dataclass(frozen=True, slots=True)
class Server:
    """What a timings file says of the server that was timed."""

    model: str
    engine: str
    recording: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a round, with the share by which they may be off, and the accept length that was seen there.

    ``accept_length`` is None where nobody said it; ``count`` measurements stand behind it; ``source`` in words.
    ``servers`` are those that were timed, where a file says it.
    """

    setting: Setting
    load: Load
    seconds: float
    accept_length: float | None
    source: str
    error: float = TRUST
    count: int = 1
    servers: tuple[Server, ...] = ()


def typed_timing(text: str) -> Timing:
    """What was typed after --time, such as ``batch=1,steps=5,accept=1.8,tok/s=54.8`` or ``batch=8,steps=3,ms=21``.

    tok/s counts the output tokens of all requests of the batch; ms are those of one round; tpot are milliseconds
    between two tokens of one request. Raises UsageError for what is missing, twice or no timing of a server.
    """
    found = read_pairs(text, "--time", _NAMES)
    setting = _setting(found)
    context = whole(found, "context", 0, 1, MOST_CONTEXT) if "context" in found else None
    load = Load(whole(found, "batch", 1, 1, MOST_BATCH), context)
    accept = check_accept(setting, found.get("accept"))
    return Timing(setting, load, _seconds(text, found, load, accept), accept, TYPED)


def typed_length(text: str) -> Timing:
    """What was typed after --length, such as ``steps=3,accept=2.79``: a setting's accept length, without a time.

    Raises UsageError for what is missing, twice or no accept length.
    """
    names = {name: name for name in ("steps", "topk", "draft_tokens", "accept")}
    found = read_pairs(text, "--length", names)
    setting = _setting(found)
    if not setting.speculates or "accept" not in found:
        raise UsageError(f"--length {text!r} needs steps=N and accept=L")
    return Timing(setting, Load(), math.nan, check_accept(setting, found["accept"]), TYPED)


def _setting(found: Mapping[str, float]) -> Setting:
    return make_setting(
        whole(found, "steps", 0, 0, MOST_STEPS),
        whole(found, "topk", 1, 1, MOST_NODES),
        whole(found, "draft_tokens", 0, 2, MOST_NODES) if "draft_tokens" in found else None,
    )


def _seconds(text: str, found: Mapping[str, float], load: Load, accept: float | None) -> float:
    """Seconds of a round, from the one of three numbers that was typed."""
    told = [name for name in ("tok/s", "ms", "tpot") if name in found]
    if len(told) != 1:
        raise UsageError(
            f"--time {text!r} needs one of tok/s=N (of the whole batch), ms=N (of one round) and tpot=N (ms between "
            "two tokens of a request)"
        )
    number = _positive(found[told[0]], told[0])
    if told[0] == "ms":
        return number / 1000
    if accept is None:
        raise UsageError(
            f"--time {text!r} has {told[0]} without accept=L, so a round's time is not known; add accept=L"
        )
    return number * accept / 1000 if told[0] == "tpot" else round_seconds(load, accept, number)


def check_accept(setting: Setting, accept: float | None) -> float | None:
    """The accept length of ``setting``: 1 without speculation. Raises UsageError for one that cannot be."""
    if not setting.speculates:
        if accept not in (None, 1):
            raise UsageError(f"accept length {accept:g} without speculation; it is 1 there, leave accept out")
        return 1.0
    if accept is not None and not 1 <= accept <= setting.most:
        raise UsageError(
            f"accept length {accept:g} with {setting.spelled}; possible is 1 to {setting.most}, bonus token included"
        )
    return accept


def round_seconds(load: Load, accept_length: float, tokens_per_second: float) -> float:
    """Seconds of a round from the tokens a second of the whole batch."""
    return load.batch * accept_length / tokens_per_second


def _positive(number: float, what: str) -> float:
    if number <= 0:
        raise UsageError(f"{what} is {number:g}; type a number above 0")
    return number


def join_timings(timings: Sequence[Timing]) -> list[Timing]:
    """One timing for each setting and load: the median, with the error that the spread leaves.

    Half the width of the notch of a box plot, 1.57 IQR / sqrt(n) (McGill, Tukey and Larsen, Variations of Box Plots,
    The American Statistician 32, 1978), and never less than the least error of the timings joined.
    """
    grouped: dict[tuple[Setting, Load], list[Timing]] = defaultdict(list)
    for timing in timings:
        grouped[timing.setting, timing.load].append(timing)
    return [_joined(same) for _, same in sorted(grouped.items(), key=lambda item: _order(item[0]))]


def refuse_two_models(timings: Sequence[Timing]) -> None:
    """Raises UsageError where timings are of servers with different targets."""
    models = dict.fromkeys(server.model for timing in timings for server in timing.servers)
    if len(models) > 1:
        first, second, *_ = models
        raise UsageError(
            f"the timings are of two models ({shorten(first, 200)} and {shorten(second, 200)}); leave out the --bench "
            "of one, or type its rounds as --time if both are one model"
        )


def _order(key: tuple[Setting, Load]) -> tuple[int, int, Setting]:
    setting, load = key
    return load.batch, load.context or 0, setting


def _joined(same: Sequence[Timing]) -> Timing:
    if len(same) == 1:
        return same[0]
    middle = median(timing.seconds for timing in same)
    low, _, high = quantiles([timing.seconds for timing in same], n=4, method="inclusive")
    notch = 1.57 * (high - low) / math.sqrt(len(same)) / middle
    told = [timing.accept_length for timing in same if timing.accept_length is not None]
    return replace(
        same[0],
        seconds=middle,
        accept_length=sum(told) / len(told) if told else None,
        source=" and ".join(dict.fromkeys(timing.source for timing in same)),
        error=max(min(timing.error for timing in same), notch),
        count=sum(timing.count for timing in same),
        servers=tuple(dict.fromkeys(server for timing in same for server in timing.servers)),
    )


def plain_timing(timings: Sequence[Timing], load: Load) -> Timing | None:
    """The timing without speculation at ``load``; None where there is none."""
    return next((timing for timing in timings if timing.setting == PLAIN and timing.load == load), None)
