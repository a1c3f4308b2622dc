"""The slow, obvious twin of ``draft_every_anchor`` for heads that draft blocks: one anchor, one row at a time.

Every context row is made by itself, and made anew for each anchor. Each row of a block lists what it sees.
"""

import torch
from torch import Tensor
from twins.rounds import Twin, TwinRow

from replay.drafting.rows import DraftInput
from replay.head.model import Head


def draft_one_block(head: Head, item: DraftInput, anchor: int, steps: int) -> tuple[list[int], Tensor]:
    """Target ids drafted at the anchor, and the logits [steps, W] that they were chosen by."""
    behaviour, block = head.behaviour, head.config.block
    assert block is not None
    twin = Twin(head, item.tokens_T, item.features_RKD, item.prompt_tokens)
    context = [twin._true_row(index) for index in range(anchor)]
    size = behaviour.block_size or steps + 1
    mask = block.mask_token if behaviour.mask_token is None else behaviour.mask_token
    ids_B = torch.tensor([int(item.tokens_T[anchor]), *[mask] * (size - 1)])
    positions = [anchor - 1 + (row + 1) * behaviour.advance + behaviour.drafted_offset for row in range(size)]
    positions_B = torch.tensor([twin._shifted(position) for position in positions])
    attend = _Attend(head, context, size)
    output = head.forward(head.embed(ids_B), head.embed(ids_B), positions_B, attend)
    logits_SW = torch.stack([head.logits(output.normed_RE[step][None])[0] for step in range(1, steps + 1)])
    dummy = behaviour.dummy_from is not None and anchor - 1 >= behaviour.dummy_from
    return [0 if dummy else int(logits_W.argmax()) for logits_W in logits_SW], logits_SW


class _Attend:
    """The rows of one block over its context and itself."""

    def __init__(self, head: Head, context: list[TwinRow], size: int) -> None:
        self._head, self._context, self._size = head, context, size

    def __call__(self, layer: int, q_BNH: Tensor, k_BMH: Tensor, v_BMH: Tensor) -> Tensor:
        committed = [self._committed(layer, row) for row in self._context]
        rows = [self._row(layer, row, q_BNH[row], committed, k_BMH, v_BMH) for row in range(self._size)]
        return torch.stack(rows)

    def _row(
        self,
        layer: int,
        row: int,
        q_NH: Tensor,
        committed: list[tuple[Tensor, Tensor]],
        k_BMH: Tensor,
        v_BMH: Tensor,
    ) -> Tensor:
        numerics, dtype = self._head.numerics, q_NH.dtype
        seen = [one for index, one in enumerate(committed) if self._sees(layer, row, index)]
        seen += [(k_BMH[other], v_BMH[other]) for other in range(self._size) if self._sees_row(layer, row, other)]
        k_SMH, v_SMH = (torch.stack(part) for part in zip(*seen, strict=True))
        if numerics.attention_fp32:
            q_NH, k_SMH, v_SMH = q_NH.float(), k_SMH.float(), v_SMH.float()
        group, mixed = len(q_NH) // k_SMH.shape[1], []
        for number, q_H in enumerate(q_NH):
            scores_S = k_SMH[:, number // group] @ q_H * q_NH.shape[1] ** -0.5 * numerics.score_factor
            mixed.append(scores_S.float().softmax(0).to(q_H.dtype) @ v_SMH[:, number // group])
        return torch.cat(mixed).to(dtype)

    def _committed(self, layer: int, row: TwinRow) -> tuple[Tensor, Tensor]:
        """Key and value of one context row; zeros where it left none."""
        rotation = self._head._rotation(torch.tensor([row.position]))
        _, k_1MH, v_1MH = self._head._attention.project(
            layer, row.state_E[None], rotation, None, self._head._parts.norm
        )
        return (torch.zeros_like(k_1MH[0]), torch.zeros_like(v_1MH[0])) if row.blank else (k_1MH[0], v_1MH[0])

    def _sees(self, layer: int, row: int, index: int) -> bool:
        """Whether a row of the block sees the context row of ``index``."""
        behaviour, block, anchor = self._head.behaviour, self._head.config.block, len(self._context)
        assert block is not None
        if behaviour.alone or (self._context[index].blank and behaviour.blank_fill == "masked"):
            return False
        if index >= anchor - behaviour.late_context:
            return False
        if behaviour.window is not None and index < anchor - behaviour.window:
            return False
        window = block.windows[layer]
        if block.from_anchor:
            return window is None or anchor - index <= window
        return window is None or anchor + row - index < window

    def _sees_row(self, layer: int, row: int, other: int) -> bool:
        block, kind = self._head.config.block, self._head.behaviour.block_attention
        assert block is not None
        window = block.windows[layer]
        if window is not None and not block.from_anchor and abs(row - other) >= window:
            return False
        causal = block.causal[layer] if kind is None else kind == "causal"
        return other <= row or not causal
