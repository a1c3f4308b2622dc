"""Variants held against the taps of a trace's requests: requests that lack one are left out, and it is said.

A trace of version 2 may have some taps of its first requests only (traces/SPEC.md, section 4).
"""

from collections.abc import Mapping, Sequence

from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.binding import bind
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace


def requests_with_taps(
    trace: Trace, variants: Sequence[ResolvedVariant], checkpoints: Mapping[str, Checkpoint]
) -> Trace:
    """The trace of the requests that have every tap that some variant reads, so that all play the same ones.

    It is ``trace`` itself where all requests have the same taps. Raises WiringError where no request has them all, and
    what ``bind`` raises.
    """
    if len(trace.tiers()) < 2:
        return trace
    wirings = [bind(variant, checkpoints[variant.draft], trace).wiring for variant in dict.fromkeys(variants)]
    return trace.having(tap for wiring in wirings for tap in wiring.taps)


def richest_requests(trace: Trace) -> Trace:
    """The trace of the requests that have the most taps: in them every hypothesis can be told apart."""
    return trace.having(trace.tiers()[0].taps)
