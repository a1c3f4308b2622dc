"""What a test sees of a head's matrix products."""

import pytest
import torch


def products_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product from here on."""
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def spy(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(x))
        return linear(x, *rest)

    monkeypatch.setattr("replay.head.products.functional.linear", spy)
    return seen
