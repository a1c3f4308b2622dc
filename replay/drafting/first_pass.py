"""The first pass: a head over every committed row of many requests at once.

It makes the committed draft KV from true features, as a server holds it after each verify (SGLang 0.5.23
speculative/eagle_worker_v2.py, draft extend), and for each anchor the state from which its first token is drafted. All
that drafts at every anchor starts from here: chains.py, trees.py.

Suffixes as in head/model.py and head/attention.py: R rows of all packed requests, A anchors of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replay.drafting.crossed import BatchRows
from replay.drafting.product_sizes import served_sizes
from replay.drafting.rows import DraftInput, Rows, committed_rows
from replay.head.attention import KeyValues, Sight, attend_committed_and_chain
from replay.head.model import Head, HeadOutput
from replay.head.products import ProductSizes, group_by_size, to_device


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What it leaves behind: the committed draft KV, and for each anchor its row's output and the row's index [A].

    ``logit_sizes`` are those of the products in which a server read logits from these rows; None where they do not
    matter. ``batch_rows`` [A] in which a server drafted at the anchors; None where that was not told of all requests.
    Of a head that drafts blocks the draft KV is the context, and the output the embedding of each anchor's known token.
    """

    attention: "PackedAttention"
    output: HeadOutput
    anchor_rows_A: Tensor
    logit_sizes: ProductSizes | None = None
    batch_rows: BatchRows | None = None


def first_pass(head: Head, inputs: Sequence[DraftInput]) -> FirstPass:
    """One causal pass over every committed row. There must be an anchor in some request.

    A head with ``product_rows`` makes every row in a product as large as the server's (product_sizes.py). Of a head
    that drafts blocks no row sees another here (``_context_pass``).
    """
    parts = [committed_rows(item, head.behaviour, head.config.target_hidden_size) for item in inputs]
    if head.config.block is not None:
        return _context_pass(head, inputs, parts)
    sizes_R = served_sizes(inputs, head.execution)
    sizes = None if sizes_R is None else group_by_size(sizes_R.to(head.device))
    # With sizes all rows go to the end: an anchor's row that ran in a prefill keeps the company that it had there.
    attention = PackedAttention(head, inputs, [part.blank_R for part in parts], anchors_last=sizes is None)
    keep_A = _anchor_rows(inputs, head.device)
    ids_R, positions_R = torch.cat([part.ids_R for part in parts]), torch.cat([part.positions_R for part in parts])
    made = MadeRows(
        head.embed(ids_R),
        head.fuse(torch.cat([part.features_RKD for part in parts]), sizes),
        to_device(positions_R, head.device),
        sizes,
    )
    keep = keep_A if sizes is None else None
    output = head.forward(*made.fields, attention.committed, keep, sizes)
    index_A = to_device(torch.cat([item.anchors_A for item in inputs]), head.device) - 1
    batch_rows = _batch_rows(inputs)
    kept = output if sizes is None else HeadOutput(output.normed_RE[keep_A], output.feedback_RE[keep_A])
    kept = _with_whole_prompts(head, inputs, parts, made, kept)
    logit_sizes = None if sizes is None else _logit_sizes(head, inputs, sizes.sizes_R[keep_A])
    return FirstPass(attention, kept, index_A, logit_sizes, batch_rows)


@dataclass(frozen=True, slots=True)
class MadeRows:
    """What goes into a pass over committed rows: embeddings and states [R, E], positions [R], sizes of products."""

    embeds_RE: Tensor
    state_RE: Tensor
    positions_R: Tensor
    sizes: ProductSizes | None

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors, as ``Head.forward`` takes them."""
        return self.embeds_RE, self.state_RE, self.positions_R

    def keep(self, index_Q: Tensor) -> "MadeRows":
        """Some of them."""
        sizes = None if self.sizes is None else self.sizes.keep(index_Q)
        return MadeRows(self.embeds_RE[index_Q], self.state_RE[index_Q], self.positions_R[index_Q], sizes)


def _with_whole_prompts(
    head: Head, inputs: Sequence[DraftInput], parts: Sequence[Rows], made: MadeRows, kept: HeadOutput
) -> HeadOutput:
    """``kept`` [A, E] with the last rows of prompts that were prefilled whole in the order of these."""
    rows, places, chosen, row, place = [], [], [], 0, 0
    for item, part in zip(inputs, parts, strict=True):
        first_A = (item.anchors_A == item.prompt_tokens).nonzero()[:, 0]
        if len(first_A) and item.prefilled_whole(head.execution.prefill_rows, head.behaviour.chunk):
            rows.append(torch.arange(row, row + item.prompt_tokens))
            places.append(place + first_A)
            chosen.append((item, part))
        row, place = row + item.rows, place + item.anchors
    if not chosen or head.of_whole_prompts() is None:
        return kept
    last = whole_prompts(head, chosen, made.keep(torch.cat(rows).to(head.device)))
    index_N = torch.cat(places).to(head.device)
    return HeadOutput(
        kept.normed_RE.index_copy(0, index_N, last.normed_RE), kept.feedback_RE.index_copy(0, index_N, last.feedback_RE)
    )


def whole_prompts(head: Head, requests: Sequence[tuple[DraftInput, Rows]], made: MadeRows) -> HeadOutput:
    """The last prompt row of each request [N, E], of a prompt prefilled whole; ``made`` holds all their prompt rows."""
    other = head.of_whole_prompts() or head
    ends = [item.prompt_tokens for item, _ in requests]
    inputs = [
        replace(item, tokens_T=item.tokens_T[: end + 2], only=torch.tensor([end]))
        for (item, _), end in zip(requests, ends, strict=True)
    ]
    blanks = [
        None if part.blank_R is None else part.blank_R[:end] for (_, part), end in zip(requests, ends, strict=True)
    ]
    attention = PackedAttention(other, inputs, blanks, anchors_last=True)
    last_N = torch.tensor(ends, device=head.device).cumsum(0) - 1
    return other.forward(*made.fields, attention.committed, last_N, made.sizes)


def _context_pass(head: Head, inputs: Sequence[DraftInput], parts: Sequence[Rows]) -> FirstPass:
    """Keys and values of every committed row from its features alone (SGLang 0.5.23 speculative/dflash_worker_v2.py
    ``_append_target_hidden_to_draft_kv_by_loc``); no CPU server runs such a head, so that sizes of products are any."""
    attention = PackedAttention(head, inputs, [part.blank_R for part in parts], anchors_last=False)
    fused_RE = head.fuse(torch.cat([part.features_RKD for part in parts]))
    for kv in head.context(fused_RE, torch.cat([part.positions_R for part in parts])):
        attention.remember(kv)
    known_A = torch.cat([item.tokens_T.cpu()[item.anchors_A.cpu()] for item in inputs])
    known_AE = head.embed(known_A)
    index_A = to_device(torch.cat([item.anchors_A for item in inputs]), head.device) - 1
    return FirstPass(attention, HeadOutput(known_AE, known_AE), index_A)


def _batch_rows(inputs: Sequence[DraftInput]) -> BatchRows | None:
    told = [item.batch_rows for item in inputs if item.batch_rows is not None]
    return [row for rows in told for row in rows] if len(told) == len(inputs) else None


def _logit_sizes(head: Head, inputs: Sequence[DraftInput], sizes_A: Tensor) -> ProductSizes:
    """A prefill reads logits from last rows only, a draft extend from all of its rows."""
    assert head.execution.product_rows is not None
    after_prompt_A = torch.cat([item.anchors_A == item.prompt_tokens for item in inputs]).to(head.device)
    return group_by_size(sizes_A.masked_fill(after_prompt_A, head.execution.product_rows))


def _anchor_rows(inputs: Sequence[DraftInput], device: torch.device) -> Tensor:
    """Indices of the anchors' rows among all packed rows."""
    rows, start = [], 0
    for item in inputs:
        rows.append(to_device(start - 1 + item.anchors_A, device))
        start += item.rows
    return torch.cat(rows)


@dataclass(frozen=True, slots=True)
class CommittedKV:
    """Of one request the keys and values of its committed rows by layer, how many each anchor sees [A], and which left
    none [R] (None: all left theirs)."""

    kv: Sequence[KeyValues]
    reach_A: Tensor
    blank_R: Tensor | None


class PackedAttention:
    """Attention for rows packed request after request; holds the committed keys and values."""

    def __init__(
        self, head: Head, inputs: Sequence[DraftInput], blanks: Sequence[Tensor | None], *, anchors_last: bool
    ) -> None:
        """``blanks``: of each request, which rows leave no KV.

        ``anchors_last``: in the head's last layer the first pass asks for the anchors' rows only.
        """
        self._head, self._anchors_last = head, anchors_last
        self._rows = [item.rows for item in inputs]
        self._reach_all = [torch.arange(1, rows + 1, device=head.device) for rows in self._rows]
        # Anchor S drafts from row S-1 and sees rows 0..S-1.
        self._reach_anchors = [to_device(item.anchors_A, head.device) for item in inputs]
        self._number_all = [range(1, rows + 1) for rows in self._rows]
        self._number_anchors: list[list[int]] = [item.anchors_A.tolist() for item in inputs]
        self._blanks = [None if blank_R is None else blank_R.to(head.device) for blank_R in blanks]
        self._base: list[KeyValues] = []

    def committed_kv(self, layer: int) -> list[KeyValues]:
        """Keys and values [R, M, H] of each request's committed rows, once the first pass has made them."""
        keys, values = (part.split(self._rows) for part in self._base[layer])
        return [KeyValues(*pair) for pair in zip(keys, values, strict=True)]

    def remember(self, kv: KeyValues) -> None:
        """The keys and values of one more layer, where no row asks for an answer."""
        self._base.append(kv)

    def of_requests(self) -> list[CommittedKV]:
        """What is held, request by request."""
        layers = [self.committed_kv(layer) for layer in range(len(self._base))]
        parts = zip(*layers, strict=True)
        return [CommittedKV(*one) for one in zip(parts, self._reach_anchors, self._blanks, strict=True)]

    def committed(self, layer: int, q: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        """The first pass: remember every row, answer for those that are asked for."""
        self._base.append(KeyValues(k_RMH, v_RMH))
        none = KeyValues(*(part.new_empty((0, len(q), *part.shape[1:])) for part in (k_RMH, v_RMH)))
        some = self._anchors_last and layer == self._head.config.num_layers - 1
        return self._answer(layer, q, none, 0, anchors=some)

    def answer(self, layer: int, q_ANH: Tensor, chain: KeyValues, step: int) -> Tensor:
        """Mixed values for the rows that embed the anchors' drafted token number ``step`` and see J drafted rows."""
        return self._answer(layer, q_ANH, chain, step, anchors=True)

    def _answer(self, layer: int, q: Tensor, chain: KeyValues, step: int, *, anchors: bool) -> Tensor:
        reaches = self._reach_anchors if anchors else self._reach_all
        numbers: Sequence[Sequence[int]] = self._number_anchors if anchors else self._number_all
        counts = [len(reach) for reach in reaches]
        chains = (KeyValues(*pair) for pair in zip(chain.k.split(counts, 1), chain.v.split(counts, 1), strict=True))
        parts = zip(q.split(counts), self.committed_kv(layer), reaches, chains, self._blanks, numbers, strict=True)
        answers = [
            attend_committed_and_chain(
                q, base, reach, own, self._head.numerics, self._sight(reach, blank_R, step), number
            )
            for q, base, reach, own, blank_R, number in parts
        ]
        return torch.cat(answers)

    def _sight(self, reach_A: Tensor, blank_R: Tensor | None, step: int) -> Sight:
        behaviour = self._head.behaviour
        first_A = None
        if behaviour.alone:
            first_A = reach_A - 1
        elif behaviour.window is not None:
            first_A = reach_A + step - behaviour.window
        return Sight(first_A, blank_R, reach_A - 1, behaviour.blank_fill == "masked")
