"""In products of how many rows a server made each row of its draft KV.

Kernels choose their order of summation by the number of rows (bf16 on a CPU with AMX, torch 2.13: up to 32 rows, up to
some hundreds, more), whatever the other rows hold and wherever a row stands. So equality to the last bit with a server
asks for products as large as its own. SGLang 0.5.23 runs a draft extend over batch x verified rows
(speculative/eagle_worker_v2.py ``_draft_extend_for_decode``), a draft prefill over the prompts that came together.
head/products.py runs them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replay.drafting.rows import DraftInput, Piece, Span
from replay.head.products import Execution

if TYPE_CHECKING:
    import polars as pl


def served_spans(rounds: "pl.DataFrame") -> dict[str, list[Span]]:
    """By request, the rows that each of a server's rounds made where it told how many requests it verified together."""
    spans: dict[str, list[Span]] = {}
    told = rounds.filter(rounds["batch"].is_not_null())
    for request_id, anchor, drafted, accepted, batch in told.select(
        "request_id", "anchor", "drafted", "accepted", "batch"
    ).iter_rows():
        spans.setdefault(request_id, []).append((anchor, accepted + 1, batch * (len(drafted) + 1)))
    return spans


def served_sizes(inputs: Sequence[DraftInput], execution: Execution) -> Tensor | None:
    """Sizes of the products that made the rows of all packed requests [R]; None where they do not matter."""
    if execution.product_rows is None:
        return None
    return torch.cat([
        products_of_rows(
            item.rows, item.prompt_tokens, item.spans, item.pieces, item.cached,
            product_rows=execution.product_rows, prefill_rows=execution.prefill_rows,
        )
        for item in inputs
    ])  # fmt: skip


def products_of_rows(
    rows: int,
    prompt_tokens: int,
    spans: Sequence[Span],
    pieces: Sequence[Piece] = (),
    cached: Sequence[Piece] = (),
    *,
    product_rows: int,
    prefill_rows: int | None,
) -> Tensor:
    """The size of each row's product, of a request's first ``rows``; ``product_rows`` stands for all sizes up to it.

    A prompt's rows ran with those of the other requests of their prefill, which ``pieces`` tell. Of rows that
    the server took from its cache ``cached`` tells how many ran together when an earlier request made them, in a
    prefill or a verify.
    """
    sizes_R = torch.full((max(rows, prompt_tokens),), product_rows)
    sizes_R[:prompt_tokens] = prompt_products(prompt_tokens, [*cached, *pieces], prefill_rows)
    for first, count, size in spans:
        sizes_R[first : first + count] = size
    return sizes_R[:rows].clamp_min(product_rows)


def prompt_products(prompt_tokens: int, pieces: Sequence[Piece], prefill_rows: int | None) -> Tensor:
    """The size of each prompt row's product [prompt_tokens]; of rows that no piece holds, as of a prompt by itself."""
    alone = prefill_sizes(prompt_tokens - sum(rows for rows, _ in pieces), prefill_rows)
    counts = [*alone, *(rows for rows, _ in pieces)]
    sizes = [*alone, *(forward for _, forward in pieces)]
    return torch.tensor(sizes, dtype=torch.long).repeat_interleave(torch.tensor(counts, dtype=torch.long))


def prefill_sizes(prompt_tokens: int, prefill_rows: int | None) -> list[int]:
    """The chunks of at most ``prefill_rows`` (SGLang's ``chunked_prefill_size``) of a prompt by itself; None: one."""
    whole, rest = divmod(prompt_tokens, prefill_rows or max(1, prompt_tokens))
    return [*[prefill_rows or prompt_tokens] * whole, *[rest] * (rest > 0)]
