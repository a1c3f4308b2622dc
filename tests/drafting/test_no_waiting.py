"""What would make a GPU's host wait: no pass asks the device for a number at every step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.random_heads import make_head, requests
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.row_blocks import row_blocks
from replay.drafting.trees import TreeSize, draft_every_tree
from replay.engines.precision import parse_precision
from replay.head.model import Head
from replay.head.products import FP32_ON_CPU, Execution

# Operations whose outcome the host has to know: a number, or how large a tensor is.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "_unique",
    "_unique2",
    "unique_dim",
    "masked_select",
    "is_nonzero",
    "equal",
)


class Waits(TorchDispatchMode):
    """Counts what waits on a GPU, by the operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        masks = name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple)
        if name in WAITING or (masks and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1])):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def waits(head: Head, work: Callable[[Head], object]) -> Counter[str]:
    with Waits() as mode:
        work(head)
    return mode.seen


def chains(steps: int) -> Callable[[Head], object]:
    return lambda head: draft_every_anchor(head, requests(head, [(3, 9), (1, 14)]), steps)


def trees(steps: int) -> Callable[[Head], object]:
    sizes = [TreeSize(steps, 4)]
    return lambda head: draft_every_tree(
        head, requests(head, [(3, 9), (1, 14)]), topk=2, sizes=sizes, kv="slot"
    )  # fmt: skip


def test_what_counts_is_counted() -> None:
    head = make_head("plain", execution=FP32_ON_CPU)
    seen = waits(head, lambda _: (int(torch.ones(2).sum()), torch.ones(2)[torch.tensor([True, False])]))
    assert seen == {"_local_scalar_dense": 1, "index": 1}


@pytest.mark.parametrize("work", [chains, trees])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16+fp8+kv=fp8"])
@pytest.mark.parametrize("name", ["plain", "two layers", "latent"])
def test_more_steps_wait_no_more_often(name: str, precision: str, work: Callable[[int], Any]) -> None:
    chosen = parse_precision(precision)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    head = make_head(name, execution=Execution(dtype), precision=chosen)
    few, many = waits(head, work(2)), waits(head, work(6))
    assert few == many
    assert sum(many.values()) <= 4, "a pack asks for a few numbers at most"


@pytest.mark.parametrize("name", ["plain", "two layers", "latent"])
def test_blocks_of_rows_wait_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass in many blocks asks for no more numbers than one over all rows at once."""
    head = make_head(name, execution=Execution(torch.bfloat16), precision=parse_precision("bf16"))
    whole = waits(head, chains(4))
    monkeypatch.setattr("replay.drafting.row_blocks.BLOCK_ROWS", 4)
    assert len(row_blocks(sum(item.rows for item in requests(head, [(3, 9), (1, 14)])))) > 4
    assert waits(head, chains(4)) == whole
