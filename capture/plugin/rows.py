"""How the tensors of a forward become rows of the spool. Knows no engine.

Shapes: B requests, N nodes of a verify each (1 known token and N - 1 drafted), D = steps + 1 the longest path, K rows
that are kept of T taps of width H (alike.py), M = T*H, V vocabulary, k kept logits.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replay.capture.spool import FEED, LOGITS, SCALE, TAP, Entry
from replay.traces.taps import FINAL

if TYPE_CHECKING:
    import torch

ROWS = ("hidden", "values", "scales")  # those of them of alike.py that stand beside final


def prefill_rows(
    spans: Sequence[tuple[str, int, int, int]],
    forward_rows: int,
    taps: Sequence[str],
    width: int,
    cpu: "Mapping[str, torch.Tensor]",
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a prefill of ``forward_rows`` in all: each of ``spans`` (request, first position, rows, how many of these are
    left out) has logits for its last row only."""
    entries = [
        Entry(rid, "prefill", start, rows, 1, forward_rows=forward_rows, left_out=left_out)
        for rid, start, rows, left_out in spans
    ]
    return entries, _tensors(cpu, taps, width)


def decode_rows(
    rids: Sequence[str], batch: int, taps: Sequence[str], width: int, cpu: "Mapping[str, torch.Tensor]"
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a plain decode of ``batch`` requests: one row for each of ``rids``, at ``starts``, with logits."""
    starts = cpu["starts"].tolist()
    entries = [Entry(rid, "decode", start, 1, 1, batch=batch) for rid, start in zip(rids, starts, strict=True)]
    return entries, _tensors(cpu, taps, width)


def verify_rows(
    rids: Sequence[str],
    members: Sequence[int],
    verify_pass: int,
    taps: Sequence[str],
    width: int,
    cpu: "Mapping[str, torch.Tensor]",
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a verify, the process's number ``verify_pass``, of the requests ``rids``: D rows along the path of each of
    ``members``, of which its ``accept_lens`` [B] count; all have logits."""
    import torch

    depth, lengths = cpu["chosen"].shape[1], cpu["accept_lens"].tolist()
    entries = [_verified(rids, i, verify_pass, lengths[i], cpu) for i in members]
    index_K = torch.cat([torch.arange(at * depth, at * depth + lengths[i]) for at, i in enumerate(members)])
    kept = {name: cpu[name][index_K] for name in ("input_ids", *LOGITS, "final", *ROWS) if name in cpu}
    return entries, _tensors(kept, taps, width)


def _verified(rids: Sequence[str], i: int, verify_pass: int, rows: int, cpu: "Mapping[str, torch.Tensor]") -> Entry:
    parents = () if "retrieve_next_token" not in cpu else tree_parents(
        cpu["retrieve_next_token"][i].tolist(), cpu["retrieve_next_sibling"][i].tolist()
    )  # fmt: skip
    return Entry(
        rids[i],
        "verify",
        int(cpu["anchors"][i]),
        rows,
        rows,
        drafted=cpu["drafted"][i].tolist()[1:],
        parents=parents,
        accepted=rows - 1,
        chosen=cpu["chosen"][i].tolist()[:rows],
        batch=len(cpu["chosen"]),
        batch_row=i,
        verify_pass=verify_pass,
    )


def feed_rows(
    fed: Sequence[tuple[str, Sequence[int]]], cpu: "Mapping[str, torch.Tensor]"
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a draft's prefill: of each request the rows that were kept, in the order of the tensors of FEED."""
    entries = [Entry(rid, "feed", 0, 0, 0, fed=list(rows)) for rid, rows in fed]
    return entries, {name: cpu[name] for name in FEED}


def tree_parents(first_child: Sequence[int], next_sibling: Sequence[int]) -> tuple[int, ...]:
    """The parent of each node but the root (node 0), from each node's first child and next sibling; -1 says none.

    A node that no list names has none: its parent was not kept, and no walk through the tree reaches it. SGLang 0.5.23
    kernels/ops/speculative/spec_tree.py builds the two lists.
    """
    parents = [-1] * len(first_child)
    for node, child in enumerate(first_child):
        while child >= 0:
            parents[child] = node
            child = next_sibling[child]
    return tuple(parents[1:])


def _tensors(cpu: "Mapping[str, torch.Tensor]", taps: Sequence[str], width: int) -> "dict[str, torch.Tensor]":
    """The tensors of spool.py from those of alike.py, ``input_ids`` and the kept logits."""
    made = {name: cpu[name] for name in ("input_ids", *LOGITS)}
    if taps:
        made |= _rounded(cpu, taps, width) if "values" in cpu else _columns(cpu["hidden"], taps, width, TAP)
    return {**made, f"{TAP}{FINAL}": cpu["final"]}


def _rounded(cpu: "Mapping[str, torch.Tensor]", taps: Sequence[str], width: int) -> "dict[str, torch.Tensor]":
    import torch

    values_KM, scales_KT = cpu["values"].view(torch.float8_e4m3fn), cpu["scales"]
    return _columns(values_KM, taps, width, TAP) | {
        f"{SCALE}{tap}": scales_K.clone(memory_format=torch.contiguous_format)
        for tap, scales_K in zip(taps, scales_KT.unbind(1), strict=True)
    }


def _columns(rows_KM: "torch.Tensor", taps: Sequence[str], width: int, kind: str) -> "dict[str, torch.Tensor]":
    """Each tap's columns [K, H]."""
    columns_KH = rows_KM.reshape(-1, len(taps), width).unbind(1)
    return {f"{kind}{tap}": column_KH for tap, column_KH in zip(taps, columns_KH, strict=True)}
