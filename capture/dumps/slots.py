"""Which tap each slot of a dump is: as stated, held against the embedding, the last state and the other slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from replay.capture.dumps.sample import Sample
from replay.capture.dumps.stage import Stage
from replay.capture.dumps.target import DumpTarget
from replay.errors import CaptureError, UsageError
from replay.traces.taps import EMBED, FINAL, tap_name

if TYPE_CHECKING:
    from torch import Tensor

# A value in fp8 e4m3 is at most an eighth of itself from what was rounded, or a step of the smallest numbers; a row is
# scaled so that its largest value is 448.
_FP8_LARGEST, _FP8_STEP, _FP8_REST = 448.0, 2.0**-9, 2.0**-3


@dataclass(frozen=True, slots=True)
class Slots:
    """``names`` of the slots in the dump's order, and in which stage it holds the last state."""

    names: tuple[str, ...]
    stage: Stage

    def stored(self, target: DumpTarget) -> tuple[str, ...]:
        """The taps that the trace stores: a lookup of the embedding is none, the stream before the norm is one."""
        whole = tap_name(target.info.layers)
        beside = [] if self.stage == "after" or whole in self.names else [whole]
        return (*(name for name in self.names if name != EMBED), *beside, FINAL)


def beside_last(sample: Sample, names: tuple[str, ...], target: DumpTarget) -> tuple[str, ...]:
    """``names`` without the last state's, where it was typed too: vLLM's own list of ids ends with it."""
    whole = tap_name(target.info.layers)
    one_more = sample.slots_SC.shape[1] == (len(names) - 1) * target.info.hidden_size
    return names[:-1] if one_more and len(names) > 1 and names[-1] == whole else names


def check_count(sample: Sample, names: Sequence[str], hidden: int, *, typed: bool) -> None:
    """Refuse where the slots are not as many as their names. Raises UsageError, CaptureError."""
    columns = sample.slots_SC.shape[1]
    if sample.last_SH.shape[1] != hidden or columns % hidden:
        raise CaptureError(
            f"{sample.where} holds last states of {sample.last_SH.shape[1]} and taps of {columns} columns, the "
            f"target's hidden size is {hidden}: name the target that the dump is of"
        )
    if columns != hidden * len(names):
        said = f"--taps names {len(names)}" if typed else f"its manifest names {len(names)}"
        raise UsageError(
            f"{sample.where} holds {columns // hidden} taps beside the last state, {said}: type --taps with one name "
            "for each, in the dump's order"
        )


def check_names(names: Sequence[str], layers: int) -> None:
    """Refuse taps that cannot be slots: the last state is found, not stated. Raises UsageError."""
    if FINAL in names:
        raise UsageError(
            f"--taps names {FINAL}, which is found by itself: name only the taps beside the last state, 1 to {layers} "
            f"or {EMBED}"
        )


def split(sample: Sample, slots: Slots, target: DumpTarget) -> "Mapping[str, Tensor]":
    """By tap the rows [S, H] of ``sample``, those of ``final`` made where the dump lacks them.

    Raises CaptureError where a slot is plainly another one than was stated.
    """
    size, whole = target.info.hidden_size, tap_name(target.info.layers)
    parts = dict(zip(slots.names, sample.slots_SC.split(size, dim=1), strict=True))
    if slots.stage == "before":
        _check_last(sample, parts, whole)
        parts.setdefault(whole, sample.last_SH)
    _check_embedding(sample, parts, target)
    _check_distinct(sample, parts)
    final = sample.last_SH if slots.stage == "after" else target.normed(sample.last_SH)
    return {**{name: rows.contiguous() for name, rows in parts.items() if name != EMBED}, FINAL: final.contiguous()}


def _check_last(sample: Sample, parts: "Mapping[str, Tensor]", whole: str) -> None:
    import torch

    for name, rows in parts.items():
        same = torch.equal(rows, sample.last_SH)
        if same and name != whole:
            raise _mislabelled(sample, name, f"is the last state before the norm, which is {whole}")
        if name == whole and not same:
            raise _mislabelled(sample, name, "is not the last state, which is the same place")


def _check_embedding(sample: Sample, parts: "Mapping[str, Tensor]", target: DumpTarget) -> None:
    import torch

    looked_up = torch.nn.functional.embedding(sample.tokens_S[: len(sample.last_SH)], target.embed_VH)
    for name, rows in parts.items():
        if name == EMBED and not _is_embedding(sample, rows, looked_up):
            raise _mislabelled(sample, name, f"is not the embedding of its tokens in {target.info.path}")
        if name != EMBED and not sample.rounded and torch.equal(rows, looked_up.to(rows.dtype)):
            raise _mislabelled(sample, name, "is the embedding of its tokens, which is embed")


def _is_embedding(sample: Sample, rows_SH: "Tensor", looked_up_SH: "Tensor") -> bool:
    """Bit for bit; of fp8 as near as a scale that all slots of a row share leaves it."""
    import torch

    if not sample.rounded:
        return torch.equal(rows_SH, looked_up_SH.to(rows_SH.dtype))
    largest_S = torch.maximum(sample.slots_SC.abs().amax(1), sample.last_SH.abs().amax(1)).float()
    step_S1 = (largest_S / _FP8_LARGEST).clamp_min(1e-12)[:, None] * _FP8_STEP
    wanted = looked_up_SH.float()
    return bool(((rows_SH.float() - wanted).abs() <= torch.maximum(step_S1, _FP8_REST * wanted.abs())).all())


def _check_distinct(sample: Sample, parts: "Mapping[str, Tensor]") -> None:
    import torch

    for (one, a), (other, b) in combinations(parts.items(), 2):
        if torch.equal(a, b):
            raise _mislabelled(sample, one, f"has the rows of {other}")


def _mislabelled(sample: Sample, name: str, what: str) -> CaptureError:
    return CaptureError(f"{sample.where}: the tap called {name} {what}: type --taps in the dump's own order")
