"""Switches that Model-Optimizer writes into eagle_config of the heads that it exports: computed, or refused by name.

Source: Model-Optimizer 0.47 torch/speculative/plugins/modeling_eagle.py (the forward) and
torch/export/plugins/hf_spec_configs.py (the fields). Its later layers are plain ones, which norm what enters them by
``input_layernorm``.
"""

from typing import Any

from replay.checkpoint.config_file import Settings

# Only this exporter writes it, always.
_MARK = "next_layer_regular"


def read_switches(eagle: Settings) -> dict[str, Any]:
    """What a head has beside SGLang's fields, by the names of ``HeadConfig``.

    Raises CheckpointError for a value that replay does not compute.
    """
    for key, usual, why in (
        (_MARK, True, "true (with false every layer takes in the embedding again)"),
        ("use_mtp_layernorm", False, "false (with true the head is a multi-token-prediction layer)"),
        ("use_input_layernorm_in_first_layer", True,
         "true (with false its Megatron trainer leaves a norm of layer 0 out, and its Hugging Face trainer does not)"),
    ):  # fmt: skip
        if eagle.flag(key) not in (None, usual):
            raise eagle.refuse(key, why)
    if (eagle.count("parallel_draft_step") or 1) > 1:
        raise eagle.refuse("parallel_draft_step", "1 (more come from Medusa heads beside the layers)")
    later = {"later_norm": "input_layernorm"} if eagle.has(_MARK) else {}
    return {**later, "last_norm": eagle.flag("use_last_layernorm") is not False}
