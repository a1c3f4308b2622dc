"""Where an SGLang model keeps what it captures of its residual stream, and how to set it. Imports no engine.

SGLang 0.5.23: the decoder captures R[i] for every i of ``layers_to_capture``, in rising order whatever the list's, and
``set_dflash_layers_to_capture`` takes 0-based layer ids, each one less than its R index, in every model file that
has it (``set_eagle3_layers_to_capture`` differs by file).
"""

from collections.abc import Sequence
from typing import Any

from replay.errors import CaptureError, WiringError
from replay.targets.rules import NEWEST, NoRule, capture_rule, recorded_to
from replay.traces.taps import tap_name

_ABSENT = object()


def capturing_parts(model: Any) -> tuple[Any, Any]:
    """The module that holds ``layers_to_capture``, and the logits processor, of a text model or one that also sees."""
    for outer in (model, getattr(model, "language_model", None)):
        core, processor = getattr(outer, "model", None), getattr(outer, "logits_processor", None)
        if hasattr(core, "layers_to_capture") and processor is not None:
            return core, processor
    raise CaptureError(
        f"{type(model).__name__} holds no layers_to_capture, so SGLang cannot record its residual stream"
    )


class NeverFed(WiringError):
    """The head's own layer ids ask for places that the target never captures, so no request would get an answer."""


def check_fed(kind: str, given: Sequence[int], layers: int, release: str = NEWEST) -> None:
    """Refuse ``given`` R indices of which a target of class ``kind`` captures too few. Raises NeverFed, CaptureError.

    SGLang 0.5.23 starts with them and stops at the first request: the target's class counts what it captured
    (layers/aux_hidden_states.py), or the head's fc gets fewer features than it takes.
    """
    rule = capture_rule(kind, release)
    if isinstance(rule, NoRule):
        return
    never = [index for index in given if not 0 <= index <= rule.highest(layers)]
    if never and rule.wraps:
        raise CaptureError(f"the head's layer ids count from {kind}'s last layer, which is no tap")
    if never:
        meant = [index + 1 for index in given]
        fits = all(0 <= index <= rule.highest(layers) for index in meant)
        wiring = ",".join(map(tap_name, meant)) if fits else "and as many taps as the head takes"
        raise NeverFed(
            f"the head's layer ids are R{list(given)} to SGLang's {kind}, which captures R[0] to "
            f"R[{rule.highest(layers)}], so that the server would stop at its first request; type --wiring {wiring}"
            + (" if each id is the output of a layer" if fits else "")
        )


def capture_boundaries(model: Any, core: Any, boundaries: Sequence[int], release: str = NEWEST) -> None:
    """Let ``model`` capture exactly ``boundaries`` (R indices, rising). Where it raises, the model is as it was.

    Raises CaptureError for a model or boundaries that cannot be, and what the model itself raises.
    """
    if not hasattr(model, "set_dflash_layers_to_capture"):
        raise CaptureError(f"{type(model).__name__} has no set_dflash_layers_to_capture, so its taps cannot be chosen")
    last = recorded_to(type(model).__name__, len(core.layers), release)
    if boundaries[-1] > last:
        raise CaptureError(
            f"R[{boundaries[-1]}] cannot be recorded by SGLang's {type(model).__name__}: possible are embed, 1 to "
            f"{last}, and final"
        )
    before = _capture_state(model, core)
    try:
        model.set_dflash_layers_to_capture([boundary - 1 for boundary in boundaries])
        if sorted(core.layers_to_capture) != list(boundaries):
            raise CaptureError(
                f"{type(model).__name__} captures {sorted(core.layers_to_capture)} where {list(boundaries)} were asked "
                "for"
            )
    except BaseException:  # whatever it was: the server may go on, and as it would without us
        _restore(before)
        raise


def _capture_state(model: Any, core: Any) -> list[tuple[Any, str, Any]]:
    """Owner, name and value of all that setting the layers may change: the list, the switch, a flag of each layer."""
    owners = [(layer, "_is_layer_to_capture") for layer in core.layers]
    owners += [(one, "capture_aux_hidden_states") for one in (model, getattr(model, "language_model", None), core)]
    flags = [(owner, name, getattr(owner, name, _ABSENT)) for owner, name in owners if owner is not None]
    return [(core, "layers_to_capture", list(core.layers_to_capture)), *flags]


def _restore(state: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in state:
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)
