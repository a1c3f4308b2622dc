"""The draft KV of requests that run side by side: slots in the order in which rows were made, blank ones among them.

round_by_round.py plays rounds on it. Behaviour (engines/behaviour.py) says what a row sees of the slots.

Suffixes: N requests of one pass, Q rows of each, R rows of all (N x Q), C slots of the draft KV; M, H as in
head/attention.py. A request's lane is its row in the draft KV, whoever is still running.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.chains import seen_from
from replay.head.attention import KeyValues, attend_to_slots
from replay.head.model import Attend, Head


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of one pass: lanes of their requests [N], row indices [N, Q], how many of each are real, and their step.

    Step 0 are rows of true features; those of step 1, 2, ... embed a drafted token.
    """

    lanes: Sequence[int]
    index_NQ: Tensor
    counts: Sequence[int]
    step: int


class SlotKV:
    """Keys and values, lane by lane; behind the last slot of each lane is one more, which nobody reads."""

    def __init__(self, head: Head, lanes: int, slots: int) -> None:
        cached, rows = head.cached, (lanes, slots + 1)
        shapes = [(*rows, cached.heads, width) for width in (cached.key, cached.value)]
        self._head, self._behaviour = head, head.behaviour
        self._layers = [
            KeyValues(*(torch.zeros(shape, dtype=head.dtype, device=head.device) for shape in shapes))
            for _ in range(head.config.num_layers)
        ]
        self._index_NC = torch.full(rows, -1, device=head.device)
        self._blank_NC = torch.zeros(rows, dtype=torch.bool, device=head.device)
        self._used = [0] * lanes

    def used(self, lane: int) -> int:
        """Slots of a lane that hold something; rows of step 0 go behind these, drafted rows further on."""
        return self._used[lane]

    def keep(self, lane: int, rows: int) -> None:
        """So many more rows of a lane stay where they are."""
        self._used[lane] += rows

    def mark_blank(self, lane: int, first: int, blank_R: Tensor) -> None:
        """Which slots from ``first`` on are blank."""
        self._blank_NC[lane, first : first + len(blank_R)] = blank_R.to(self._head.device)

    def attend(self, rows: SlotRows) -> Attend:
        """Attention of the rows of a pass, whose keys and values go into the slots behind those in use."""
        device = self._head.device
        lanes_N = torch.tensor(rows.lanes, device=device)
        used_N1 = torch.tensor([self._used[lane] for lane in rows.lanes], device=device)[:, None]
        queries = rows.index_NQ.shape[1]
        offset_Q = torch.arange(queries, device=device)
        slots_NQ = used_N1 + offset_Q + max(0, rows.step - 1)
        index_NQ = rows.index_NQ.to(device)
        valid_NQ = offset_Q < torch.tensor(rows.counts, device=device)[:, None]
        written_NQ = torch.where(valid_NQ, slots_NQ, self._index_NC.shape[1] - 1)
        self._index_NC[lanes_N[:, None], written_NQ] = index_NQ
        if rows.step:
            self._blank_NC[lanes_N[:, None], written_NQ] = False
        seen_NQC, blank_NQC = self._sight(rows.step, lanes_N, used_N1, slots_NQ, index_NQ)

        def attend(layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
            keys_NCMH, values_NCMH = self._layers[layer]
            keys_NCMH[lanes_N[:, None], written_NQ] = k_RMH.unflatten(0, (-1, queries))
            values_NCMH[lanes_N[:, None], written_NQ] = v_RMH.unflatten(0, (-1, queries))
            return attend_to_slots(
                q_RNH.unflatten(0, (-1, queries)), KeyValues(keys_NCMH[lanes_N], values_NCMH[lanes_N]), seen_NQC,
                blank_NQC, self._head.numerics, masked=self._behaviour.blank_fill == "masked",
            ).flatten(0, 1)  # fmt: skip

        return attend

    def _sight(
        self, step: int, lanes_N: Tensor, used_N1: Tensor, slots_NQ: Tensor, index_NQ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which slots each row sees [N, Q, C], and which of these are blank to it."""
        behaviour = self._behaviour
        slot_C = torch.arange(self._index_NC.shape[1], device=slots_NQ.device)
        # Committed rows are their own anchor rows; drafted ones have it in the last slot in use.
        own_NQ1 = (slots_NQ if step == 0 else used_N1 - 1)[..., None]
        seen_NQC = slot_C <= slots_NQ[..., None]
        if step:
            drafted_NQC = slot_C > own_NQ1
            seen_NQC &= ~drafted_NQC | (slot_C >= used_N1[..., None] + seen_from(behaviour, step))
        if behaviour.alone:
            seen_NQC &= slot_C >= own_NQ1
        if behaviour.window is not None:
            seen_NQC &= self._index_NC[lanes_N][:, None] > index_NQ[..., None] - behaviour.window
        return seen_NQC, self._blank_NC[lanes_N][:, None] & (slot_C != own_NQ1)
