"""How far rounding moves what a variant drafts: the variant along a server's drafts, in two rounding orders.

The noise of a replay is measured against fp32, which stands for exact arithmetic (analysis/followed.py). A replay whose
order is not the server's is measured beside the one in the server's order: each is off by its own error.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from replay.analysis.followed import LEAST_SCALE, Followed, Noise, measure_noise
from replay.checkpoint.checkpoint import Checkpoint
from replay.engines.precision import Precision
from replay.engines.profiles import NUMERICS
from replay.simulator.binding import resolve, target_precision
from replay.simulator.following import follow_server
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.reader import Trace

if TYPE_CHECKING:
    import polars as pl

EXACT = "fp32"


def follow_with_noise(
    trace: Trace,
    checkpoint: Checkpoint,
    variant: Variant | ResolvedVariant,
    rounds: "pl.DataFrame",
    *,
    device: str = "cpu",
    served_products: bool = True,
) -> tuple[Followed, Noise]:
    """The variant along the server's drafts, with the noise scale of rounding as its only scale, and the noise.

    Arguments and errors as of ``follow_server``.
    """
    resolved = resolve(variant, checkpoint, trace)

    def follow(one: ResolvedVariant, scales: Sequence[float] = ()) -> Followed:
        found = follow_server(
            trace, {resolved.draft: checkpoint}, [one], rounds,
            scales=scales, device=device, served_products=served_products,
        )  # fmt: skip
        return found[0]

    noise = noise_between(follow(resolved), *(follow(one) for one in other_orders(resolved, trace)))
    return follow(resolved, (max(noise.scale, LEAST_SCALE),)), noise


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
