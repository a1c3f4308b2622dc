"""How much the tests ask of real servers, by what this CPU can do."""

import torch

from replay.narrow_products import has_kernels

_SLOWER = 2.5  # so much less is asked there


def prompts_for(many: int, least: int = 2) -> int:
    """``many``, or fewer on a CPU without kernels for bf16: torch runs a server's products in loops there, three
    to nine times as slow as products in fp32. What a test says of each round stays as it is.
    """
    return many if has_kernels(torch.bfloat16) else max(least, round(many / _SLOWER))
