"""Heads of the DeepSeek form of multi-token prediction (MTP, NextN): one whole layer of the target's kind, on its own.

Source: SGLang 0.5.23 models/deepseek_nextn.py and models/deepseek_common/deepseek_weight_loader.py, which reads every
tensor of the layer under its number in the target and takes embedding and lm_head from the target;
models/deepseek_v2.py ``DeepseekV2MoE`` for the experts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay.checkpoint.config_file import Settings

ARCHITECTURE = "DeepseekV3ForCausalLMNextN"
_MOST_EXPERTS = 4096
_PLACE = re.compile(r"^model\.layers\.(\d+)\.")
_APART = re.compile(r"^(?:enorm|hnorm|eh_proj|embed_tokens)\.")
# Not in a layer of this name in any head: the target's takes its place.
LM_HEAD = "shared_head.head.weight"
# It chooses experts, and stays in the dtype of the file.
ROUTING_BIAS = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes and routing of the MLP: ``used`` of ``count`` experts of ``width`` each, and shared ones beside them.

    Sigmoid scores with a bias choose ``best_groups`` of ``groups`` and in these the experts; the scores without it
    weigh them, made to sum to 1 where ``normed``, times ``scale``.
    """

    count: int
    used: int
    width: int
    shared: int
    groups: int
    best_groups: int
    normed: bool
    scale: float


def is_nextn(document: Mapping[str, Any]) -> bool:
    """Whether a config is of such a head."""
    architectures = document.get("architectures")
    return isinstance(architectures, list) and architectures[:1] == [ARCHITECTURE]


def plain(config: Settings, architecture: str) -> dict[str, Any]:
    """The fields as ``config.py`` reads those of a latent head. Raises CheckpointError."""
    if config.size("num_nextn_predict_layers", 1) != 1:
        raise config.refuse("num_nextn_predict_layers", "1 (SGLang runs one such layer)")
    return {
        **config.values,
        "architectures": [architecture],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": None,
        "target_hidden_size": None,
        "num_aux_hidden_states": 1,
        "eagle_aux_hidden_state_layer_ids": [0],
        "eagle_config": {"use_aux_hidden_state": False},
        **dict.fromkeys(("bias", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"), False),
    }


def switches(config: Settings) -> dict[str, Any]:
    """What such a head has beside, by the names of ``HeadConfig``. Raises CheckpointError."""
    return {"family": "nextn", "norm_output": True, "experts": _experts(config)}


def _experts(config: Settings) -> Experts:
    """Raises CheckpointError for a routing that replay does not compute."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (config.text(key) or only) != only:
            raise config.refuse(key, only)
    count = config.size("n_routed_experts", most=_MOST_EXPERTS)
    groups = config.size("n_group", 1, most=count)
    found = Experts(
        count=count,
        used=config.size("num_experts_per_tok", most=count),
        width=config.size("moe_intermediate_size"),
        shared=config.size("n_shared_experts", 1, most=_MOST_EXPERTS),
        groups=groups,
        best_groups=config.size("topk_group", 1, most=groups),
        normed=config.flag("norm_topk_prob") is not False,
        scale=config.positive("routed_scaling_factor", 1.0),
    )
    if count % groups or count // groups < 2:
        raise config.refuse("n_group", f"a divisor of {count} that leaves groups of at least 2 experts")
    if found.used > found.best_groups * (count // groups):
        raise config.refuse("num_experts_per_tok", f"at most {found.best_groups * (count // groups)}")
    return found


def tensors(experts: Experts, width: int) -> dict[str, tuple[int, ...]]:
    """Name → shape of the experts' tensors and of what is this family's own; ``width`` is the head's."""
    mlp = "layers.0.mlp."
    table: dict[str, tuple[int, ...]] = {
        "enorm.weight": (width,),
        "hnorm.weight": (width,),
        "eh_proj.weight": (width, 2 * width),
        f"{mlp}gate.weight": (experts.count, width),
        f"{mlp}{ROUTING_BIAS}": (experts.count,),
    }
    sizes = {f"experts.{number}": experts.width for number in range(experts.count)}
    for part, inner in (sizes | {"shared_experts": experts.shared * experts.width}).items():
        table |= {f"{mlp}{part}.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        table[f"{mlp}{part}.down_proj.weight"] = (width, inner)
    return table


def spell(name: str) -> str:
    """A tensor's name without the number that its layer has in the target."""
    inner = _PLACE.sub("", name)
    if inner == name:
        return name
    if _APART.match(inner):
        return inner
    return inner.replace("shared_head.norm.", "norm.") if inner.startswith("shared_head.") else f"layers.0.{inner}"
