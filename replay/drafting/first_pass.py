"""The first pass: a head over every committed row of many requests at once.

It makes the committed draft KV from true features, as a server holds it after each verify (SGLang 0.5.23
speculative/eagle_worker_v2.py, draft extend), and for each anchor the state from which its first token is drafted. All
that drafts at every anchor starts from here: chains.py, trees.py.

Suffixes as in head/model.py and head/attention.py: R rows of all packed requests, A anchors of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replay.drafting.crossed import BatchRows
from replay.drafting.packed_attention import PackedAttention
from replay.drafting.product_sizes import served_sizes
from replay.drafting.row_blocks import overlaps, row_blocks
from replay.drafting.rows import DraftInput, Rows, committed_rows
from replay.head.model import Head, HeadOutput
from replay.head.products import ProductSizes, group_by_size, to_device


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What it leaves behind: the committed draft KV, and for each anchor its row's output and the row's index [A].

    ``logit_sizes`` are those of the products in which a server read logits from these rows; None where they do not
    matter. ``batch_rows`` [A] in which a server drafted at the anchors; None where that was not told of all requests.
    Of a head that drafts blocks the draft KV is the context, and the output the embedding of each anchor's known token.
    """

    attention: PackedAttention
    output: HeadOutput
    anchor_rows_A: Tensor
    logit_sizes: ProductSizes | None = None
    batch_rows: BatchRows | None = None


def first_pass(head: Head, inputs: Sequence[DraftInput]) -> FirstPass:
    """One causal pass over every committed row. There must be an anchor in some request.

    Rows go in blocks (row_blocks.py): of those of a long request nothing is held but keys and values, and what anchors
    draft from. A head with ``product_rows`` makes every row in a product as large as the server's (product_sizes.py),
    all at once. Of a head that drafts blocks no row sees another here (``_context_pass``).
    """
    parts = [committed_rows(item, head.behaviour, head.config.target_hidden_size) for item in inputs]
    if head.config.block is not None:
        return _context_pass(head, inputs, parts)
    sizes_R, rows = served_sizes(inputs, head.execution), range(sum(item.rows for item in inputs))
    sizes = None if sizes_R is None else group_by_size(sizes_R.to(head.device))
    # With sizes all rows go to the end: an anchor's row that ran in a prefill keeps the company that it had there.
    attention = PackedAttention(head, inputs, [part.blank_R for part in parts], anchors_last=sizes is None)
    blocks = row_blocks(len(rows)) if sizes is None else [rows]
    source = PackedRows(head, parts, sizes)
    made = source(rows) if len(blocks) == 1 else None
    output = _run(head, source if made is None else as_made(made), attention, blocks, anchors=sizes is None)
    keep_A = attention.anchor_rows(rows)
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


# What makes a block of rows ready for a pass.
RowSource = Callable[[range], MadeRows]


def as_made(made: MadeRows) -> RowSource:
    """Rows that are there already, for a pass of one block."""
    return lambda _: made


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Committed rows of requests, one after the other: a block of them is fused when a pass comes to it."""

    head: Head
    parts: Sequence[Rows]
    sizes: ProductSizes | None = None

    def __call__(self, block: range) -> MadeRows:
        """The rows of a block; with ``sizes`` there is one block."""
        part = list(overlaps([len(rows.ids_R) for rows in self.parts], block))
        ids_R = torch.cat([self.parts[number].ids_R[rows.start : rows.stop] for number, rows in part])
        return MadeRows(self.head.embed(ids_R), self.fuse(block), self.positions(block), self.sizes)

    def fuse(self, block: range) -> Tensor:
        """Their states [R, E]."""
        part = overlaps([len(rows.ids_R) for rows in self.parts], block)
        features = [self.parts[number].features(rows) for number, rows in part]
        return self.head.fuse(features[0] if len(features) == 1 else torch.cat(features), self.sizes)

    def positions(self, block: range) -> Tensor:
        """Their positions [R], on the device."""
        positions_R = torch.cat([rows.positions_R for rows in self.parts])[block.start : block.stop]
        return to_device(positions_R, self.head.device)


def _run(
    head: Head, source: RowSource, attention: PackedAttention, blocks: Sequence[range], *, anchors: bool
) -> HeadOutput:
    """The output of every row, or of the ``anchors``' rows alone, block after block."""
    outputs = []
    for block in blocks:
        made = source(block)
        keep_A = attention.anchor_rows(block) if anchors else None
        outputs.append(head.forward(*made.fields, attention.committed(block), keep_A, made.sizes))
    return join_outputs(outputs)


def join_outputs(outputs: Sequence[HeadOutput]) -> HeadOutput:
    """Those of blocks, one after the other."""
    if len(outputs) == 1:
        return outputs[0]
    normed = torch.cat([one.normed_RE for one in outputs])
    same = all(one.feedback_RE is one.normed_RE for one in outputs)
    return HeadOutput(normed, normed if same else torch.cat([one.feedback_RE for one in outputs]))


def _with_whole_prompts(
    head: Head, inputs: Sequence[DraftInput], parts: Sequence[Rows], made: MadeRows | None, kept: HeadOutput
) -> HeadOutput:
    """``kept`` [A, E] with the last rows of prompts that were prefilled whole in the order of these.

    ``made`` holds all rows; where it is None, those of these prompts are made once more, block by block.
    """
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
    last = whole_prompts(head, chosen, None if made is None else made.keep(torch.cat(rows).to(head.device)))
    index_N = torch.cat(places).to(head.device)
    return HeadOutput(
        kept.normed_RE.index_copy(0, index_N, last.normed_RE), kept.feedback_RE.index_copy(0, index_N, last.feedback_RE)
    )


def whole_prompts(head: Head, requests: Sequence[tuple[DraftInput, Rows]], made: MadeRows | None) -> HeadOutput:
    """The last prompt row of each request [N, E], of a prompt prefilled whole.

    ``made`` holds all their prompt rows; where it is None they are made here, block by block.
    """
    other = head.of_whole_prompts() or head
    inputs = [
        replace(item, tokens_T=item.tokens_T[: item.prompt_tokens + 2], only=torch.tensor([item.prompt_tokens]))
        for item, _ in requests
    ]
    prompts = [part.first(item.prompt_tokens) for item, part in requests]
    attention = PackedAttention(other, inputs, [part.blank_R for part in prompts], anchors_last=True)
    rows = sum(item.prompt_tokens for item, _ in requests)
    if made is not None:
        return _run(other, as_made(made), attention, [range(rows)], anchors=True)
    return _run(other, PackedRows(other, prompts), attention, row_blocks(rows), anchors=True)


def _context_pass(head: Head, inputs: Sequence[DraftInput], parts: Sequence[Rows]) -> FirstPass:
    """Keys and values of every committed row from its features alone (SGLang 0.5.23 speculative/dflash_worker_v2.py
    ``_append_target_hidden_to_draft_kv_by_loc``); no CPU server runs such a head, so that sizes of products are any."""
    attention = PackedAttention(head, inputs, [part.blank_R for part in parts], anchors_last=False)
    source = PackedRows(head, parts)
    for block in row_blocks(sum(item.rows for item in inputs)):
        for layer, kv in enumerate(head.context(source.fuse(block), source.positions(block))):
            attention.remember(layer, block, kv)
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
