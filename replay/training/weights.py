"""What a training loop holds of a head → the tensors that its trainer would save, by the names that it saves them by.

Only what wraps a head goes: the names within it are read by ``head_from_tensors``, as strictly as those of a file.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from replay.checkpoint.checkpoint import Checkpoint, head_from_tensors
from replay.checkpoint.config_file import read_config
from replay.errors import CheckpointError, UsageError
from replay.traces.fields import show, some
from replay.traces.files import as_path

if TYPE_CHECKING:
    from torch import Tensor, nn

Tensors: TypeAlias = "Mapping[str, Tensor]"
# A head as a training loop has it: a module, its tensors by name, a function that gives these, or one of load_head.
Weights: TypeAlias = "nn.Module | Tensors | Callable[[], Tensors] | Checkpoint"

# Parts of a name that DistributedDataParallel and DeepSpeed, torch.compile, FSDP and activation checkpoints put in.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Where a larger module keeps the head: SpecForge 0.2.0 (algorithms/eagle3/model.py), Model-Optimizer 0.47
# (torch/speculative/plugins/hf_eagle.py), SafeAILab/EAGLE (eagle/model/ea_model.py).
_MODELOPT = "eagle_module"
_HEADS = ("draft_model", _MODELOPT, "ea_layer")
# What lies beside the head in its own module and is left out when it is saved: the target of SafeAILab/EAGLE
# (eagle/traineagle3/cnets.py), and what speculators 0.9.0 borrows of it (models/eagle3/core.py
# ``_keys_to_ignore_on_save``).
_BESIDE = ("target_model.", "verifier_lm_head.", "verifier_norm.")
_LM_HEAD = "lm_head.weight"


def head_of(weights: Weights, config: object, name: str) -> Checkpoint:
    """The head that ``weights`` are, checked; a mapping of tensors keeps these, and nothing is copied.

    ``config``: the head's config as a dictionary, the path of its folder, or a Transformers config; None beside a
    Checkpoint, which has its own. Raises UsageError or CheckpointError.
    """
    if isinstance(weights, Checkpoint):
        if config is not None:
            raise UsageError("a head of load_head has a config already; leave config out")
        return weights
    return head_from_tensors(_config(config), head_tensors(_state(weights)), name=name)


def _config(config: object) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, type) and callable(stated := getattr(config, "to_dict", None)):
        return dict(stated())
    if config is None:
        raise UsageError(
            "no config was given, and tensors do not say all of a head; give config=, the dictionary of its "
            "config.json or the folder where that lies"
        )
    return read_config(as_path(config))  # refuses what is no path


def _state(weights: object) -> Mapping[str, Any]:
    """Names and tensors as they come."""
    from torch import nn

    if isinstance(weights, nn.Module):
        if any(hasattr(one, "ds_id") for one in weights.parameters()):
            raise UsageError(
                "the module's parameters are divided by DeepSpeed ZeRO-3, so no process has a whole one; give a "
                "function that gathers them, for example lambda: accelerator.get_state_dict(engine)"
            )
        return weights.state_dict()
    given = weights() if callable(weights) and not isinstance(weights, type) else weights
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    raise UsageError(
        f"the weights are {show(given)}; give a module, a mapping from names to tensors, a function that gives one, or "
        "a head of load_head"
    )


def head_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``state`` that are the head's, without what wraps their names, detached and whole.

    Raises CheckpointError where two names come to one.
    """
    plain: dict[str, Any] = {}
    for name, tensor in state.items():
        bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        if bare in plain:
            raise CheckpointError(f"the weights have {bare} twice, once as {name}; give those of one head")
        plain[bare] = tensor
    inner = _inner(plain)
    return {name: _whole(tensor) for name, tensor in inner.items() if not name.startswith(_BESIDE)}


def _inner(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """The head within a larger module; all of it where that is the head. Raises CheckpointError for two heads."""
    places = dict.fromkeys(place for name in plain if (place := _place(name)) is not None)
    if not places:
        return plain
    if len(places) > 1:
        raise CheckpointError(
            f"the weights hold several heads, {some(list(places))}; give the state_dict of the one that is meant"
        )
    (place,) = places
    inner = {name.removeprefix(place): tensor for name, tensor in plain.items() if name.startswith(place)}
    # Model-Optimizer's exporter writes the target's lm_head where the head has none
    # (torch/export/plugins/hf_spec_export.py ``_extract_state_dict``).
    if place.endswith(f"{_MODELOPT}.") and _LM_HEAD not in inner and _LM_HEAD in plain:
        inner[_LM_HEAD] = plain[_LM_HEAD]
    return inner


def _place(name: str) -> str | None:
    """What stands in front of a head's own name, up to and with the part that holds the head."""
    parts = name.split(".")
    for number, part in enumerate(parts[:-1], start=1):
        if part in _HEADS:
            return ".".join([*parts[:number], ""])
    return None


def _whole(tensor: Any) -> Any:
    """Without its history; one that FSDP divides is gathered, for which every process has to come here."""
    gather = getattr(tensor, "full_tensor", None)  # torch.distributed.tensor.DTensor
    whole = gather() if callable(gather) else tensor
    return whole.detach() if hasattr(whole, "detach") else whole  # what is no tensor is refused with its name
