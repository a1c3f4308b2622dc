"""Products run over the rows that were asked for, and sizes stay with the rows that they belong to."""

from dataclasses import replace

import pytest
import torch
from support.products import products_seen
from support.random_heads import FP64, make_head, requests

from replay import narrow_products
from replay.head.attention import KeyValues, attend_committed_and_chain
from replay.head.products import (
    FP32_ON_CPU,
    Execution,
    ProductSizes,
    filled_rows,
    group_by_size,
    take_served_products_in,
)


def test_products_run_in_the_sizes_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("plain", execution=replace(FP64, product_rows=3))
    rows_RE = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = make_head("plain").logits(rows_RE)
    sizes = group_by_size(torch.tensor([5, 3, 5, 3, 3, 5, 3]))
    seen = products_seen(monkeypatch)
    assert torch.allclose(head.logits(rows_RE, sizes), whole)
    assert torch.allclose(head.logits(rows_RE[2:5], sizes.keep(slice(2, 5))), whole[2:5])
    head.logits(rows_RE)
    assert seen == [3, 1, 5, 2, 5, 3, 3, 1]


def test_sizes_go_with_the_rows_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 1 and 4 of 6 are wanted: q, k and v are made of all six, what follows of these two, each in its size."""
    head = make_head("plain", execution=replace(FP64, product_rows=2))
    (item,) = requests(head, [(6, 3)])
    sizes = group_by_size(torch.tensor([5, 5, 5, 5, 2, 2]))
    state_RE, embeds_RE = head.fuse(item.features_RKD[:6]), head.embed(item.tokens_T[1:7])

    def forward(keep_Q: torch.Tensor | None, sizes: ProductSizes | None) -> torch.Tensor:
        reach_A = torch.arange(1, 7) if keep_Q is None else keep_Q + 1

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            none = KeyValues(k.new_empty(0, len(q), *k.shape[1:]), v.new_empty(0, len(q), *v.shape[1:]))
            return attend_committed_and_chain(q, KeyValues(k, v), reach_A, none, head.numerics)

        return head.forward(embeds_RE, state_RE, torch.arange(6), attend, keep_Q, sizes).normed_RE

    whole = forward(None, None)
    seen = products_seen(monkeypatch)
    kept = forward(torch.tensor([1, 4]), sizes)
    assert torch.allclose(kept, whole[[1, 4]])
    assert seen == [2, 5, *[1, 5] * 3]  # q, k and v; then o_proj, gate and up, down_proj


def test_products_of_16_bits_run_over_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a kernel of about a megabyte for each number of rows: 200 packs meet eight an octave, not 200."""
    assert all(rows <= filled_rows(rows) < rows * 9 / 8 + 1 for rows in range(1, 5000))
    assert [filled_rows(rows) for rows in (1, 32, 33, 2047, 2048, 2049)] == [1, 32, 36, 2048, 2048, 2304]
    head = make_head("plain", execution=Execution(torch.bfloat16))
    x_RE = torch.randn(3, head.config.hidden_size).bfloat16()
    monkeypatch.setattr(narrow_products, "has_kernels", lambda _: True)
    alone = head.logits(x_RE)
    seen = products_seen(monkeypatch)
    for rows in range(1000, 1200):
        found = head.logits(torch.cat([x_RE, x_RE.new_ones(rows - 3, x_RE.shape[1])]))
        assert len(found) == rows and torch.allclose(found[:3].float(), alone.float(), rtol=2**-7, atol=2**-7)
    assert set(seen) == {1024, 1152, 1280}


def test_a_worker_takes_products_of_a_servers_size_in_the_threads_of_whoever_asks() -> None:
    """On a CPU with AVX2 they have other bits in one thread than in two, 5 to 11 rows at a time."""
    head = make_head("two layers", execution=replace(FP32_ON_CPU, product_rows=32))
    rows_RE = torch.randn(70, head.config.hidden_size, generator=torch.Generator().manual_seed(0))
    sizes = group_by_size(torch.tensor([5, 33, 40, 6, 11] * 14))
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        asked = [head.logits(rows_RE[:rows]) for rows in (*range(1, 33), 37, 43, 70)]
        by_size = head.logits(rows_RE, sizes)
        torch.set_num_threads(1)
        take_served_products_in(2)
        found = [head.logits(rows_RE[:rows]) for rows in (*range(1, 33), 37, 43, 70)]
        assert torch.get_num_threads() == 1
        assert [torch.equal(one, other) for one, other in zip(found, asked, strict=True)] == [True] * len(asked)
        assert torch.equal(head.logits(rows_RE, sizes), by_size)
    finally:
        take_served_products_in(None)
        torch.set_num_threads(own)
