"""How many rounds of a server a replay explains: what a rounds file, a report and a diagnosis say of it."""

import math
from dataclasses import dataclass, fields

from replay.traces.fields import Fields

_MOST = 1 << 40  # of any count
_WIDEST = 1e30  # of any number of nats


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rounds of a server against a replay: ``alike``, first parted at a ``near_tie``, ``unexplained``.

    ``noise`` is the largest that was measured, ``noise_scale`` its scale, both in nats; ``largest`` is the largest
    margin of a near tie over that noise (0 where there is none). Of ``tokens`` drafted by the server ``flips`` differ
    from what the replay prefers, ``flips_expected`` is how many rounding flips at that scale. analysis/followed.py
    measures and counts.
    """

    rounds: int
    alike: int
    near_tie: int
    unexplained: int
    noise: float
    noise_scale: float
    largest: float
    tokens: int
    flips: int
    flips_expected: float


def read_agreement(values: Fields) -> Agreement:
    """An object of a rounds file. Raises what ``values`` raises for a field that is none, or is lacking."""
    values.only([field.name for field in fields(Agreement)])
    counts = {
        name: values.integer(name, 0, _MOST)
        for name in ("rounds", "alike", "near_tie", "unexplained", "tokens", "flips")
    }
    nats = {name: values.number(name, 0.0, _WIDEST) for name in ("noise", "noise_scale", "largest", "flips_expected")}
    return Agreement(**counts, **nats)  # type: ignore[arg-type]


def problem(agreement: Agreement) -> str | None:
    """What does not hold together in it, in half a sentence."""
    counted = agreement.alike + agreement.near_tie + agreement.unexplained
    if counted != agreement.rounds:
        return f"{counted} rounds alike, near a tie or unexplained where {agreement.rounds} belong"
    if not 0 <= agreement.flips <= agreement.tokens:
        return f"{agreement.flips} of {agreement.tokens} drafted tokens that differ"
    measured = (agreement.noise, agreement.noise_scale, agreement.largest, agreement.flips_expected)
    if not all(math.isfinite(number) and number >= 0 for number in measured):
        return "a negative or endless noise"
    return None
