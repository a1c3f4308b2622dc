"""Copies of an engine's rows, made on its current stream: the engine writes its next step over what it gave.

Each ``copy_*`` returns copied tensors, and the function of rows.py that turns them into entries once they are on the
CPU; several where requests of a forward keep different rows or taps (alike.py). R rows of a forward, C captured
columns of them, H width, V vocabulary, B requests, N nodes of a verify, D the longest path; requests that no client of
ours asked for are left out here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from replay.capture.plugin.alike import Alike, copy_kept, group_alike, runs_of
from replay.capture.plugin.columns import Columns
from replay.capture.plugin.recorder import summarise_rows
from replay.capture.plugin.rows import decode_rows, feed_rows, prefill_rows, verify_rows
from replay.capture.spool import RID_PREFIX
from replay.errors import CaptureError
from replay.traces.header import TAP_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from replay.capture.plugin.recorder import Build

    Copied = tuple[dict[str, Tensor], Build]

FED_ROWS = 8  # of a request's first prefill: more would not tell more


@dataclass(frozen=True, slots=True)
class TargetForward:
    """What a target's forward gave. Of a prefill there are logits for the last row of each request."""

    hidden_RC: "Tensor"
    final_RH: "Tensor"
    logits_RV: "Tensor"


@dataclass(frozen=True, slots=True)
class HeldVerify:
    """Between a verify's forward and its end: node rows, R = B*N, on the device, which only another forward overwrites.

    The logits are summarised at once, since the verify writes to them.
    """

    hidden_RC: "Tensor"
    final_RH: "Tensor"
    summary: "dict[str, Tensor]"


def copy_prefill(batch: Any, forward: TargetForward, columns: Columns, k: int) -> "list[Copied]":
    """Of a prefill: the rows that each request of ours keeps, and the logits of its last one."""
    spans = list(_spans(batch))
    *_, forward_rows = spans[-1]  # where the last request's rows end
    return [
        _prefill_of(batch, forward, alike, spans, forward_rows, columns.width, k)
        for alike in group_alike([rid for rid, *_ in spans], columns)
    ]


def _prefill_of(
    batch: Any,
    forward: TargetForward,
    alike: Alike,
    spans: "Sequence[tuple[str, int, int, int]]",
    forward_rows: int,
    width: int,
    k: int,
) -> "Copied":
    import torch

    known, pieces = [], []
    for at, member in enumerate(alike.members):
        rid, prefix, begin, end = spans[member]
        left_out = alike.left_out(at, prefix, end - begin)
        known.append((rid, prefix, end - begin, left_out))
        pieces.append(slice(begin + left_out, end))
    whole = [slice(*spans[member][2:]) for member in alike.members]
    tensors = {
        **copy_kept(forward.hidden_RC, forward.final_RH, pieces, alike, width),
        "input_ids": _own(torch.cat([batch.input_ids[place] for place in whole])),
        **summarise_rows(_rows_of(forward.logits_RV, alike), k),
    }
    return tensors, partial(prefill_rows, known, forward_rows, alike.taps, width)


def copy_decode(batch: Any, forward: TargetForward, columns: Columns, k: int) -> "list[Copied]":
    """Of a plain decode: one row a request of ours."""
    made: list[Copied] = []
    for alike in group_alike(batch.rids, columns):
        tensors = {
            **copy_kept(forward.hidden_RC, forward.final_RH, runs_of(alike.members), alike, columns.width),
            "input_ids": _own(_rows_of(batch.input_ids, alike)),
            "starts": _own(_rows_of(batch.positions, alike)),
            **summarise_rows(_rows_of(forward.logits_RV, alike), k),
        }
        rids = [batch.rids[member] for member in alike.members]
        made.append((tensors, partial(decode_rows, rids, len(batch.rids), alike.taps, columns.width)))
    return made


def hold_verify(forward: TargetForward, k: int) -> HeldVerify:
    """Hold the rows of a verify's forward until it is known which of them were accepted."""
    return HeldVerify(forward.hidden_RC, forward.final_RH, summarise_rows(forward.logits_RV, k))


def copy_verify(
    held: HeldVerify, result: Any, batch: Any, columns: Columns, verify_pass: int, sampled: "Tensor | None" = None
) -> "list[Copied]":
    """The accepted rows of a verify, the process's number ``verify_pass``, in the order of their positions."""
    index_BD = _accepted_nodes(result, sampled, batch.spec_info.topk)
    size, depth = index_BD.shape
    nodes = result.speculative_num_draft_tokens
    drafted_BN = batch.spec_info.draft_token.reshape(size, nodes)
    told = {
        "drafted": _own(drafted_BN),
        "chosen": _own(result.next_token_ids.reshape(size, nodes)[:, :depth]),
        "accept_lens": _own(result.accept_lens),
        # new length less what was accepted: batch.seq_lens may have been moved on
        "anchors": _own(result.new_seq_lens - result.accept_lens),
    }
    if batch.spec_info.topk > 1:
        for name in ("retrieve_next_token", "retrieve_next_sibling"):
            told[name] = _own(getattr(batch.spec_info, name).reshape(size, nodes))
    rids = [req.rid for req in batch.reqs][:size]
    made: list[Copied] = []
    for alike in group_alike(rids, columns):
        tensors = told | _verified(held, drafted_BN, index_BD, alike, columns.width)
        build = partial(verify_rows, rids, alike.members, verify_pass, alike.taps, columns.width)
        made.append((tensors, build))
    return made


def _verified(
    held: HeldVerify, drafted_BN: "Tensor", index_BD: "Tensor", alike: Alike, width: int
) -> "dict[str, Tensor]":
    """Rows along the longest paths of the requests of ``alike``, D of each."""
    flat = _rows_of(index_BD, alike).reshape(-1)
    return {
        **copy_kept(held.hidden_RC, held.final_RH, [flat], alike, width),
        **{name: tensor[flat] for name, tensor in held.summary.items()},
        "input_ids": _own(drafted_BN.reshape(-1)[flat]),
    }


def _accepted_nodes(result: Any, sampled: "Tensor | None", topk: int) -> "Tensor":
    """Numbers [B, D] of the accepted nodes among all of a verify, of which each request's accepted ones count.

    Of the result, else as sampling told them (SGLang before 0.5.21); a chain's are its first ones. Raises RuntimeError.
    """
    import torch

    told = getattr(result, "accept_index", None)
    told = sampled if told is None else told
    if told is not None:
        return told.long().clamp(min=0)
    if topk > 1:
        raise RuntimeError("a verify of trees did not tell which nodes it accepted")
    size, nodes = len(result.accept_lens), result.speculative_num_draft_tokens
    return torch.arange(size * nodes, device=result.accept_lens.device).view(size, nodes)


def copy_feed(batch: Any, width: int) -> "Copied | None":
    """Of a draft's prefill: a few rows of each request of ours that begins in it; None where none does.

    Raises CaptureError where the prefill lacks rows, or its features can be no slots.
    """
    import torch

    places, known, end = [], [], 0
    for rid, prefix, begin, end in _spans(batch):
        if prefix or begin == end or not rid.startswith(RID_PREFIX):
            continue  # only of a first piece: of a prompt, or of all tokens so far where the request was put back
        step = -(-(end - begin) // FED_ROWS)  # evenly over the rows, the last one among them
        first = (end - begin - 1) % step
        places.append(slice(begin + first, end, step))
        known.append((rid, range(first, end - begin, step)))
    if not places:
        return None
    features = batch.spec_info.hidden_states
    _check_feed(batch.input_ids, batch.positions, features, end, width)
    tensors = {
        "feed.token": _own(torch.cat([batch.input_ids[place] for place in places])),
        "feed.position": _own(torch.cat([batch.positions[place] for place in places])),
        "feed.features": torch.cat([features[place] for place in places]),
    }
    return tensors, partial(feed_rows, known)


def _check_feed(tokens: "Tensor", positions: "Tensor", features: Any, rows: int, width: int) -> None:
    """Raises CaptureError where a draft's prefill lacks some of its ``rows``, or its features can be no slots.

    Short slices would make a file of rows that disagrees with itself, and the client refuses such a file whole.
    """
    for name, given in (("token ids", tokens), ("positions", positions), ("rows of features", features)):
        if given is None or len(given) < rows:
            raise CaptureError(f"a draft's prefill of {rows} rows had {0 if given is None else len(given)} {name}")
    dtype = str(features.dtype).removeprefix("torch.")
    if features.dim() != 2 or features.shape[1] % width or not features.shape[1] or dtype not in TAP_DTYPES:
        raise CaptureError(
            f"the draft was fed features {dtype} {list(features.shape)}, slots are of {width} features in "
            f"{', '.join(TAP_DTYPES)}"
        )


def _spans(batch: Any) -> Iterator[tuple[str, int, int, int]]:
    """Of each request of a prefill: its id, tokens before this piece, and where its rows begin and end."""
    end = 0
    for rid, length, prefix in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
        begin, end = end, end + int(length)
        yield rid, int(prefix), begin, end


def _rows_of(tensor: "Tensor", alike: Alike) -> "Tensor":
    """What ``tensor`` has for each request, of those of ``alike``; a view where they stand together."""
    import torch

    parts = [tensor[run] for run in runs_of(alike.members)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _own(numbers: "Tensor") -> "Tensor":
    """A copy as int32, made on the current stream."""
    import torch

    return numbers.to(torch.int32, copy=True)
