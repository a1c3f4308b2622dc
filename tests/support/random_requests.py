"""Requests of random tokens and features, for heads of random weights."""

import torch

from replay.drafting.rows import DraftInput
from replay.head.model import Head


def requests(head: Head, shapes: list[tuple[int, int]]) -> list[DraftInput]:
    generator = torch.Generator().manual_seed(5)
    width = head.config.fc_inputs
    return [
        DraftInput(
            torch.randint(head.config.vocab_size, (prompt + output,), generator=generator),
            torch.randn(prompt + output - 1, width, generator=generator),
            prompt,
        )
        for prompt, output in shapes
    ]
