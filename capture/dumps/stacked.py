"""Dumps in safetensors, a text a file, layers stacked: those of vLLM's connector, which speculators keeps.

``hidden_states`` [S, slots + 1, H] (the last layer is the last state), ``token_ids`` [S], and where the states were
kept in fp8 ``hidden_states_scales`` [S, 1, 1]. Written by vLLM 0.32 distributed/kv_transfer/kv_connector/v1/
example_hidden_states_connector.py ``_write_tensors`` and hs-connectors 0.9.0 fp8_hidden_states_connector.py; read by
speculators 0.9.0 train/data.py ``_get_raw_data`` and hs-connectors 0.9.0 transfer.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from replay.capture.dumps.sample import MOST_BYTES, Sample, checked_sample, ids_of, lacking, widened
from replay.errors import CaptureError, TraceCorruptError
from replay.traces.tensors import Layout, parse_layout

if TYPE_CHECKING:
    from torch import Tensor

_STATES, _TOKENS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"


def read_stacked(path: Path, name: str, form: str) -> Sample:
    """The one text of ``path``, of the form ``speculators`` or ``vllm``. Raises CaptureError."""
    layout = _layout(path)
    missing = [one for one in (_STATES, _TOKENS) if one not in layout.tensors]
    if missing:
        raise lacking(path, form, missing, sorted(layout.tensors))
    shape = layout.tensors[_STATES].shape
    if len(shape) != 3 or shape[1] < 2:
        raise CaptureError(f"{path}: hidden_states is {list(shape)}, must be [tokens, 2 layers or more, hidden size]")
    states_SLH, rounded = _states(path, layout)
    tokens = ids_of(_tensor(path, _TOKENS), str(path))
    slots, last = states_SLH[:, :-1].flatten(1), states_SLH[:, -1]
    return checked_sample(Sample(name, str(path), tokens, slots, last, None, rounded))


def _layout(path: Path) -> Layout:
    try:
        layout = parse_layout(path.resolve())
    except TraceCorruptError as error:
        raise CaptureError(f"{error}: write the dump again") from error
    if layout.size > MOST_BYTES:
        raise CaptureError(f"{path} holds {layout.size} bytes, at most {MOST_BYTES} are possible")
    return layout


def _states(path: Path, layout: Layout) -> "tuple[Tensor, bool]":
    """[S, L, H], fp8 ones times the scale of their token, in bfloat16 as the consumer multiplies them."""
    import torch

    states, rounded = widened(_tensor(path, _STATES))
    if _SCALES not in layout.tensors:
        if rounded:
            raise CaptureError(f"{path} holds fp8 states and no {_SCALES}: write the dump again with its scales")
        return states, False
    scales = _tensor(path, _SCALES)
    if not rounded or scales.shape != (len(states), 1, 1) or scales.dtype is not torch.float32:
        raise CaptureError(
            f"{path}: {_SCALES} is {scales.dtype} {list(scales.shape)} beside {layout.tensors[_STATES].dtype} "
            f"states, must be float32 [{len(states)}, 1, 1] beside F8_E4M3"
        )
    return states * scales.to(torch.bfloat16), True


def _tensor(path: Path, name: str) -> "Tensor":
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path.resolve()), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, TypeError, RuntimeError) as error:
        raise CaptureError(f"{path}: {name} cannot be read ({error}): write the dump again") from error
    return tensor
