"""How the tensors of a forward become rows of the spool. Knows no engine.

Shapes: B requests, N nodes of a verify each (1 known token and N - 1 drafted), D = steps + 1 the longest path, K taps
of width H, V vocabulary, k kept logits.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replay.capture.spool import FEED, LOGITS, RID_PREFIX, Entry
from replay.traces.taps import FINAL

if TYPE_CHECKING:
    import torch


def prefill_rows(
    spans: Sequence[tuple[str, int, int]],
    forward_rows: int,
    taps: Sequence[str],
    width: int,
    cpu: "Mapping[str, torch.Tensor]",
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a prefill of ``forward_rows`` in all: each of ``spans`` (request, first position, rows) has logits for its
    last row only."""
    entries = [Entry(rid, "prefill", start, rows, 1, forward_rows=forward_rows) for rid, start, rows in spans]
    return entries, _tensors(cpu, taps, width)


def decode_rows(
    rids: Sequence[str], taps: Sequence[str], width: int, cpu: "Mapping[str, torch.Tensor]"
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a plain decode: one row a request, at ``starts`` [B], with logits."""
    ours = [i for i, rid in enumerate(rids) if rid.startswith(RID_PREFIX)]
    starts = cpu["starts"].tolist()
    entries = [Entry(rids[i], "decode", starts[i], 1, 1) for i in ours]
    kept = {name: tensor[ours] for name, tensor in cpu.items()}
    return entries, _tensors(kept, taps, width)


def verify_rows(
    rids: Sequence[str], verify_pass: int, taps: Sequence[str], width: int, cpu: "Mapping[str, torch.Tensor]"
) -> "tuple[list[Entry], dict[str, torch.Tensor]]":
    """Of a verify, the process's number ``verify_pass``: rows [B*D, .] along the accepted paths, of which
    ``accept_lens`` [B] count; all have logits."""
    import torch

    size, depth = cpu["chosen"].shape
    lengths, anchors = cpu["accept_lens"].tolist(), cpu["anchors"].tolist()
    drafted, chosen = cpu["drafted"].tolist(), cpu["chosen"].tolist()
    entries, places = [], []
    for i in range(min(size, len(rids))):
        if not rids[i].startswith(RID_PREFIX):
            continue
        rows = lengths[i]
        parents = () if "retrieve_next_token" not in cpu else tree_parents(
            cpu["retrieve_next_token"][i].tolist(), cpu["retrieve_next_sibling"][i].tolist()
        )  # fmt: skip
        entries.append(
            Entry(
                rids[i],
                "verify",
                anchors[i],
                rows,
                rows,
                drafted=drafted[i][1:],
                parents=parents,
                accepted=rows - 1,
                chosen=chosen[i][:rows],
                batch=size,
                batch_row=i,
                verify_pass=verify_pass,
            )
        )
        places.append(torch.arange(i * depth, i * depth + rows))
    if not entries:
        return [], {}
    index = torch.cat(places)
    kept = {name: cpu[name][index] for name in ("hidden", "final", "input_ids", *LOGITS)}
    return entries, _tensors(kept, taps, width)


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
    """The tensors of spool.py from ``hidden`` [R, K*H], ``final`` [R, H], ``input_ids`` [R] and the kept logits."""
    columns = cpu["hidden"].reshape(-1, len(taps), width).unbind(1)
    return {
        "input_ids": cpu["input_ids"],
        **{name: cpu[name] for name in LOGITS},
        **{f"tap.{tap}": column for tap, column in zip(taps, columns, strict=True)},
        f"tap.{FINAL}": cpu["final"],
    }
