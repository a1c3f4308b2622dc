"""How far rounding moves what a variant drafts: the variant along a server's drafts, in two rounding orders.

The noise of a replay is measured against fp32, which stands for exact arithmetic (analysis/followed.py). A replay whose
order is not the server's is measured beside the one in the server's order: each is off by its own error.
"""

from dataclasses import replace

from replay.analysis.followed import Followed, Noise, measure_noise
from replay.engines.precision import Precision
from replay.engines.profiles import NUMERICS
from replay.simulator.binding import target_precision
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace

EXACT = "fp32"


def other_orders(variant: ResolvedVariant, trace: Trace) -> list[ResolvedVariant]:
    """The variants beside ``variant`` from which its noise is measured: exact arithmetic, then the server's order.

    A variant in fp32 of a target in fp32 is measured against Transformers' order.
    """
    server = NUMERICS[variant.engine.numerics]
    dtype = target_precision(trace)
    exact = replace(variant, precision=_based(variant.precision, EXACT))
    if variant.precision.base == EXACT == dtype:
        other = next(order for order in NUMERICS.values() if order != variant.numerics)
        return [replace(variant, numerics=other)]
    served = replace(variant, precision=_based(variant.precision, dtype), numerics=server)
    if variant.precision.base == EXACT:
        return [replace(exact, numerics=server), served] if variant.numerics != server else [served]
    return [exact] if served == variant else [exact, served]


def noise_between(variant: Followed, *others: Followed) -> Noise:
    """The noise of a variant from what ``other_orders`` names, followed along the same drafts."""
    exact, *further = others
    return measure_noise(variant, exact, *further)


def _based(precision: Precision, base: str) -> Precision:
    return replace(precision, base=base)
