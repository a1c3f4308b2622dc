"""The columns of the hidden states that a target's forward captures, and those among them that its draft is fed.

R rows, K captured boundaries of width H, F of them fed to the draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.traces.taps import tap_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """``boundaries``: the K captured R indices, rising. ``fed``: places among them, in the draft's order; () without.

    Made once the target captures them: from then on every forward must be cut back, on every rank.
    """

    boundaries: Sequence[int]
    fed: Sequence[int]
    width: int
    vocabulary: int
    joined: bool = False  # whether the final states stand after the K boundaries, in H columns more (joined.py)

    @property
    def taps(self) -> list[str]:
        """The captured boundaries' canonical names."""
        return [tap_name(boundary) for boundary in self.boundaries]

    def are_all_in(self, hidden_RC: "Tensor | None") -> bool:
        """Whether these are a forward's captured states [R, K*H]; a draft's own or none are not."""
        return hidden_RC is not None and hidden_RC.shape[-1] == (len(self.boundaries) + self.joined) * self.width

    def apart(self, hidden_RC: "Tensor", final_RH: "Tensor | None") -> "tuple[Tensor, Tensor | None]":
        """Captured states [R, K*H] and final ones [R, H], ``final_RH`` unless they stand among the columns."""
        columns = len(self.boundaries) * self.width
        if not self.joined:
            return hidden_RC, final_RH
        return hidden_RC[:, :columns], hidden_RC[:, columns:]

    def fed_of(self, hidden_RC: "Tensor") -> "Tensor":
        """What the draft is fed [R, F*H], of all that was captured [R, K*H]: a tensor of its own, as without us."""
        if list(self.fed) == list(range(len(self.boundaries))) and hidden_RC.is_contiguous():
            return hidden_RC
        import torch

        # Slices, not a list of indices: that would be copied to the device, and the forward would wait for it.
        return torch.cat([hidden_RC[:, place * self.width : (place + 1) * self.width] for place in self.fed], dim=-1)
