"""The two ends of a target's stream, where SGLang itself hands neither on. Imports no engine.

SGLang 0.5.23 keeps the final hidden states where it is told to, and captures R[0] in every class. Releases before it
keep no final states, and up to 0.5.21 models/llama.py and others stop where R[0] is asked for: nothing was added to the
stream yet. There what comes to the first layer and what comes to the door of ``LogitsProcessor.forward`` are joined to
the captured columns, inside the forward, so that graphs hold them as well.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replay.errors import CaptureError

if TYPE_CHECKING:
    from torch import Tensor


def keeps_final(processor: Any) -> bool:
    """Whether the logits processor can be told to keep final states. Raises CaptureError if it has no door either."""
    if hasattr(processor, "keep_last_hidden_states"):
        return True
    _parameters(processor, "hidden_states", "aux_hidden_states")
    return False


class Joined:
    """Joins the ends of the stream to what the target captures: R[0] before it, the final states after it.

    ``problem``: why the rows of some forward could not be joined; empty while all could.
    """

    def __init__(self, core: Any, processor: Any) -> None:
        """Look at the first layer of ``core`` and the door of ``processor``; nothing is changed before ``begin``.

        Raises CaptureError where they are not what this needs, and what an engine's own classes raise.
        """
        self.problem = ""
        self._first: Tensor | None = None
        first = core.layers[0]
        self._entry = first, _parameters(first, "hidden_states")
        self._door = processor, _parameters(processor, "hidden_states")

    def begin(self) -> None:
        """Join the ends from the next forward on."""
        _wrap(*self._entry, self._enter)
        _wrap(*self._door, self._leave)

    def _enter(self, given: dict[str, Any]) -> None:
        if self._first is not None:
            self.problem = "the target's layers run more than once in a forward, so R[0] is not told from later inputs"
        self._first = given["hidden_states"].clone()  # the layer adds to it in place

    def _leave(self, given: dict[str, Any]) -> None:
        first, self._first = self._first, None
        captured = given.get("aux_hidden_states")
        if captured is not None and len(captured):
            given["aux_hidden_states"] = self._join(first, captured, given["hidden_states"])

    def _join(self, first: "Tensor | None", captured: Any, final: "Tensor") -> Any:
        """All columns, packed or in a list as they came; zeros stand for an end that does not fit, and ``problem``."""
        import torch

        packed = isinstance(captured, torch.Tensor)
        parts = [captured] if packed else list(captured)
        like = parts[0][..., : final.shape[-1]]
        ends = []
        for name, end in (("R[0]", first), ("the final states", final)):
            if end is None or end.shape != like.shape or end.dtype != like.dtype:
                self.problem = f"a forward gave {name} of other rows than it captured"
                end = torch.zeros_like(like)
            ends.append(end)
        every = [ends[0], *parts, ends[1]]
        return torch.cat(every, dim=-1) if packed else every


def _parameters(owner: Any, *wanted: str) -> list[str]:
    """The names of what ``owner.forward`` takes. Raises CaptureError where one of ``wanted`` is not among them."""
    forward = getattr(owner, "forward", None)
    names = [] if forward is None else list(inspect.signature(forward).parameters)
    lacking = [name for name in wanted if name not in names]
    if lacking:
        raise CaptureError(f"{type(owner).__name__}.forward takes no {', '.join(lacking)}")
    return names


def _wrap(owner: Any, names: list[str], before: Callable[[dict[str, Any]], None]) -> None:
    """Let ``before`` see, and change, what ``owner.forward`` is given by name."""
    original = owner.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        before(given)
        return original(**given)

    owner.forward = forward
