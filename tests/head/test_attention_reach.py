"""Committed rows beyond the reach of all queries are left out of products, and no answer differs."""

import pytest
import torch

from replay.engines.profiles import NUMERICS
from replay.head.attention import FULL_SIGHT, KeyValues, Sight, attend_committed_and_chain

ROWS, FIRST = 900, 400  # so that rows are left out of the first blocks


@pytest.mark.parametrize("chain_rows", [0, 2])
@pytest.mark.parametrize("sight", ["full", "window", "blank", "masked"])
def test_rows_that_nobody_sees_change_no_answer(sight: str, chain_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    queries = ROWS - FIRST
    q = torch.randn(queries, 8, 16, generator=generator)
    k, v = torch.randn(2, ROWS, 2, 16, generator=generator)
    own = KeyValues(*torch.randn(2, chain_rows, queries, 2, 16, generator=generator))
    reach = torch.arange(FIRST + 1, ROWS + 1)
    blank = torch.rand(ROWS, generator=generator) < 0.3
    sights = {
        "full": FULL_SIGHT,
        "window": Sight(reach - 50),
        "blank": Sight(None, blank, reach - 1),
        "masked": Sight(None, blank, reach - 1, masked=True),
    }
    args = (q, KeyValues(k, v), reach, own, NUMERICS["sglang"], sights[sight])
    # Kernels may sum over fewer rows in another order.
    torch.testing.assert_close(
        attend_committed_and_chain(*args, reach.tolist()), attend_committed_and_chain(*args), rtol=1e-5, atol=1e-6
    )


def test_rows_left_out_are_not_read() -> None:
    q, k, v = torch.ones(3, 2, 4), torch.ones(1200, 1, 4), torch.ones(1200, 1, 4)
    k[640:], v[640:] = float("nan"), float("nan")
    none = KeyValues(*torch.empty(2, 0, 3, 1, 4))
    reaches = [600, 610, 620]
    out = attend_committed_and_chain(
        q, KeyValues(k, v), torch.tensor(reaches), none, NUMERICS["sglang"], FULL_SIGHT, reaches
    )
    torch.testing.assert_close(out, torch.ones(3, 8))
