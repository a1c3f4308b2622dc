"""How much the tests ask of real servers, by what this CPU can do."""

import torch

from replay.narrow_products import has_kernels

_SLOWER = 2.5  # so much less is asked where products of bf16 are five to ten times as slow


def prompts_for(many: int, least: int = 2) -> int:
    """``many``, or fewer on a CPU without kernels for bf16: torch runs a server's products in loops there, and what
    takes a minute elsewhere takes ten. What a test says of each round stays as it is.
    """
    return many if has_kernels(torch.bfloat16) else max(least, round(many / _SLOWER))
