"""The slow, obvious twin of simulator/agreement.py: one variant by itself, along the server's drafts once an order."""

from collections.abc import Sequence

import polars as pl

from replay.analysis.followed import LEAST_SCALE, Followed, Noise
from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.binding import resolve
from replay.simulator.following import follow_server
from replay.simulator.rounding import noise_between, other_orders
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.reader import Trace


def follow_with_noise(
    trace: Trace,
    checkpoint: Checkpoint,
    variant: Variant | ResolvedVariant,
    rounds: pl.DataFrame,
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
