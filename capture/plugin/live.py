"""A recording that runs: made once the taps are set and the manifest says so, in the process that writes its rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from replay.capture.plugin.columns import Columns
from replay.capture.plugin.copy_rows import (
    HeldVerify,
    TargetForward,
    copy_decode,
    copy_feed,
    copy_prefill,
    copy_verify,
    hold_verify,
)
from replay.capture.plugin.recorder import RowRecorder
from replay.capture.spool import RID_PREFIX
from replay.errors import ReplayError

if TYPE_CHECKING:
    from torch import Tensor

    from replay.capture.plugin.copy_rows import Copied

# What our own code, or an engine's that it calls, may raise on shapes or fields that it does not foresee: this ends
# recording, never the server.
UNFORESEEN = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, OSError, AssertionError, ImportError,
    ArithmeticError,
)  # fmt: skip


def in_words(error: Exception) -> str:
    """An error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['?'])[0]}"


def ask_for_states(batch: Any) -> bool:
    """Let a forward keep all hidden states where it would keep none and has rows to record; whether it would not have.

    Raises what is UNFORESEEN.
    """
    mode: Any = getattr(batch, "capture_hidden_mode", None)
    if getattr(mode, "name", "") != "NULL" or not _has_rows(batch):
        return False
    batch.capture_hidden_mode = type(mode).FULL
    return True


def _has_rows(batch: Any) -> bool:
    """Whether a target's forward has rows to record: those of requests of ours."""
    ours = any(rid.startswith(RID_PREFIX) for rid in batch.rids or ())
    return ours and not batch.forward_mode.is_idle()


class LiveRecording:
    """Hands the rows of a server's forwards to ``recorder``, ``k`` logits of each; no more once that has failed."""

    def __init__(self, columns: Columns, k: int, recorder: RowRecorder) -> None:
        self.columns, self.k, self.recorder = columns, k, recorder
        self._held: HeldVerify | None = None  # whose forward has run and whose result is not there yet
        self._verify_passes = 0  # that this process has run, whoever's requests were in them

    @property
    def goes_on(self) -> bool:
        """Whether rows are still recorded."""
        return self.recorder.failure is None

    def record_forward(self, batch: Any, hidden_RC: "Tensor", final: "Tensor | None", logits: "Tensor | None") -> None:
        """Copy the rows of a target's forward where requests of ours are in it; of a verify, hold them."""
        self._held = None
        if not self.goes_on:
            return
        with self._guarded():
            if _has_rows(batch):
                self._record(batch, self._whole(hidden_RC, final, logits))

    def miss_forward(self, batch: Any, hidden: "Tensor | None") -> None:
        """End the recording where a forward with rows to record gave other hidden states than were set, or none."""
        self._held = None
        if not self.goes_on:
            return
        with self._guarded():
            if _has_rows(batch):
                kept = "no hidden states" if hidden is None else f"hidden states of {hidden.shape[-1]} features"
                self.recorder.fail(f"SGLang kept {kept} in a forward whose rows were to be recorded")

    def _whole(self, hidden_RC: "Tensor", final: "Tensor | None", logits: "Tensor | None") -> TargetForward:
        if final is None or logits is None or logits.shape[-1] != self.columns.vocabulary:
            seen = "none" if logits is None else str(list(logits.shape))
            raise RuntimeError(f"a forward gave no final hidden states or no full logits (logits: {seen})")
        return TargetForward(hidden_RC, final, logits)

    def _record(self, batch: Any, forward: TargetForward) -> None:
        mode = batch.forward_mode
        if mode.is_target_verify():
            self._held = hold_verify(forward, self.k)
        elif mode.is_extend():
            self._submit(copy_prefill(batch, forward, self.columns, self.k))
        elif mode.is_decode():
            self._submit(copy_decode(batch, forward, self.columns, self.k))

    def _submit(self, parts: "list[Copied]") -> None:
        for tensors, build in parts:
            self.recorder.submit(tensors, build)

    def record_verify(self, result: Any, batch: Any, sampled: "Tensor | None" = None) -> None:
        """Copy the accepted rows of the verify whose forward was held; ``sampled``: its nodes as sampling told them."""
        held, self._held = self._held, None
        number = self._verify_passes
        self._verify_passes += 1
        if held is None:
            return
        with self._guarded():
            if not batch.forward_mode.is_idle():
                self._submit(copy_verify(held, result, batch, self.columns, number, sampled))

    def record_feed(self, batch: Any) -> None:
        """Copy a few rows of what the draft is fed in a prefill. Raises CaptureError, and what is UNFORESEEN."""
        if not (self.goes_on and batch.rids and batch.forward_mode.is_extend()):
            return
        copied = copy_feed(batch, self.columns.width)
        if copied is not None:
            self.recorder.submit(*copied)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Rows that cannot be copied (no memory, an unforeseen shape) end the recording, not the server."""
        try:
            yield
        except (ReplayError, *UNFORESEEN) as error:
            self.recorder.fail(f"a forward's rows could not be copied: {in_words(error)}")
