"""The step logits of what replay runs: ``draft_every_anchor`` with its packed attention.

Only the choice of tokens is tapped, to see the logits and to feed the tokens that a peer insists on.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from replay.drafting import next_tokens
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput
from replay.head.model import Head


def random_request(head: Head, length: int, seed: int = 11) -> DraftInput:
    """One prompt token, so that every row is an anchor's."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(head.config.vocab_size, (length,), generator=generator)
    return DraftInput(tokens_T, torch.randn(length - 1, head.config.features_width, generator=generator), 1)


def replayed_logits(
    monkeypatch: pytest.MonkeyPatch, head: Head, item: DraftInput, steps: int, forced: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Our logits [R, W] of each step; ``forced`` replaces the tokens that we would have drafted."""
    seen: list[Tensor] = []
    choose = next_tokens.choose

    def tap(head: Head, logits_AW: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits_AW)
        ids_A, tied_A = choose(head, logits_AW)
        return (ids_A if forced is None else forced[len(seen) - 1]), tied_A

    with monkeypatch.context() as patch:
        patch.setattr(next_tokens, "choose", tap)
        draft_every_anchor(head, [item], steps)
    return seen
