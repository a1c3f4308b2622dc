"""Dumps of torch.save, a text a file: SpecForge's offline features and Model-Optimizer's hidden states.

Which of the two a file is follows from the names of its tensors:

- SpecForge 0.2.0 (data/preprocessing.py ``OfflineEagle3Dataset.process_data`` and runtime/data_plane/feature_store.py
  ``load_feature_file`` read them): ``input_ids`` [S], ``loss_mask`` [S], ``aux_hidden_state`` [1, S, C],
  ``hidden_state`` [1, S, H], in ``.ckpt`` or ``.ckpt.gz``.
- Model-Optimizer 0.47 (examples/speculative_decoding/collect_hidden_states, all of compute_hidden_states_hf.py,
  _vllm.py and _trtllm.py): ``input_ids`` [S], ``aux_hidden_states`` [S, C], ``hidden_states`` [S, H], perhaps
  ``loss_mask`` [S], in ``.pt``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.capture.dumps.pickled import load_pickled
from replay.capture.dumps.sample import Sample, checked_sample, ids_of, lacking, mask_of, rows_of, widened
from replay.errors import CaptureError

if TYPE_CHECKING:
    from torch import Tensor

SPECFORGE, MODELOPT = "specforge", "modelopt"


@dataclass(frozen=True, slots=True)
class _Names:
    """What a form calls its tensors."""

    slots: str
    last: str


_FORMS = {SPECFORGE: _Names("aux_hidden_state", "hidden_state"), MODELOPT: _Names("aux_hidden_states", "hidden_states")}


def read_saved(path: Path, name: str, form: str) -> Sample:
    """The one text of ``path``, of the form ``specforge`` or ``modelopt``. Raises CaptureError."""
    tensors = _tensors(path, load_pickled(path))
    names = _FORMS[form]
    needed = ["input_ids", names.slots, names.last]
    missing = [one for one in needed if one not in tensors]
    if missing:
        raise _other(path, form, tensors) or lacking(path, form, missing, sorted(tensors))
    where = str(path)
    slots, rounded = widened(rows_of(tensors[names.slots]))
    last, _ = widened(rows_of(tensors[names.last]))
    mask = mask_of(tensors.get("loss_mask"), where)
    return checked_sample(Sample(name, where, ids_of(tensors["input_ids"], where), slots, last, mask, rounded))


def _tensors(path: Path, loaded: object) -> "Mapping[str, Tensor]":
    import torch

    if isinstance(loaded, list):
        raise CaptureError(f"{path} holds a list, as TensorRT-LLM dumps do, which replay does not read")
    if not isinstance(loaded, dict):
        raise CaptureError(f"{path} holds a {type(loaded).__name__}, must be tensors by name")
    return {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, torch.Tensor)}


def _other(path: Path, form: str, tensors: "Mapping[str, Tensor]") -> CaptureError | None:
    """The refusal of a file of another form."""
    if "target_hiddens" in tensors:
        return CaptureError(f"{path} is a dump of AngelSlim, which replay does not read")
    for other, names in _FORMS.items():
        if other != form and {names.slots, names.last} <= set(tensors):
            return CaptureError(f"{path} is a dump of {other}, not of {form}: type --format {other}")
    return None
