"""EAGLE-1 and EAGLE-2 heads, which are alike: the embedding and the target's final state through fc into Llama layers.

Their config calls itself LlamaForCausalLM, as that of SafeAILab's EAGLE-3 heads does, so tensors tell them apart.
Sources: SafeAILab/EAGLE eagle/model/cnets1.py and ea_model.py (``bias`` is fc's, and true where nobody says otherwise);
SGLang 0.5.23 models/llama_eagle.py, whose class is called LlamaForCausalLMEagle.
"""

from collections.abc import Mapping
from typing import Any

from replay.checkpoint.config_file import Settings
from replay.errors import CheckpointError
from replay.traces.fields import some

ARCHITECTURE = "LlamaForCausalLMEagle"
_SHARED = "LlamaForCausalLM"
Shapes = Mapping[str, tuple[int, ...]]
# Tensors of EAGLE-3 alone, by how their names end.
_OF_EAGLE_3 = ("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")
# Tensors that it has too, and that EAGLE-1 lacks.
_NOT_OF_EAGLE_1 = (
    "layers.0.input_layernorm.weight",
    "midlayer.input_layernorm.weight",
    "d2t",
    "t2d",
    "fc_norm.0.weight",
)


def is_eagle(document: Mapping[str, Any], shapes: Shapes | None, where: str) -> bool:
    """Whether config and tensors are of an EAGLE-1 head. ``shapes`` by the names in the file; None: the config decides.

    Raises CheckpointError where the tensors are of neither family, or of another one than the architecture.
    """
    architectures = document.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if named not in (ARCHITECTURE, _SHARED) or (shapes is None and named == _SHARED):
        return named == ARCHITECTURE
    names = shapes or {}
    third = [name for name in names if name.endswith(_OF_EAGLE_3)]
    either = [name for name in names if name.endswith(_NOT_OF_EAGLE_1) or name in ("norm.weight", "model.norm.weight")]
    if named == ARCHITECTURE and (third or either):
        raise CheckpointError(
            f"{where} names the architecture {named}, an EAGLE-1 or EAGLE-2 head, and the head has "
            f'{some(third + either)} of EAGLE-3; write "architectures": ["LlamaForCausalLMEagle3"], or export it again'
        )
    has_fc = any(name.removeprefix("model.") == "fc.weight" for name in names)
    if has_fc and not third and either:
        raise CheckpointError(
            f"{where} calls itself {_SHARED}, as EAGLE-1, EAGLE-2 and EAGLE-3 heads do, and the head has "
            f"{some(either)} of EAGLE-3, but no hidden_norm; write LlamaForCausalLMEagle3 or {ARCHITECTURE}"
        )
    return named == ARCHITECTURE or (has_fc and not third)


def plain(config: Settings) -> dict[str, Any]:
    """The fields as ``config.py`` reads them. Raises CheckpointError for what such a head does not have."""
    vocabulary = config.size("vocab_size")
    for key in ("draft_vocab_size", "hot_vocab_size"):
        if config.size(key, vocabulary) != vocabulary:
            raise config.refuse(key, f"{vocabulary} (an EAGLE-1 head drafts over the whole vocabulary)")
    width = config.size("hidden_size")
    if config.size("target_hidden_size", width) != width:
        raise config.refuse("target_hidden_size", f"{width} (an EAGLE-1 head is as wide as its target)")
    return {
        **config.values,
        "architectures": ["LlamaForCausalLM"],
        "bias": config.flag("bias") is not False,
        "tie_word_embeddings": False,
        "draft_vocab_size": None,
        "num_aux_hidden_states": 1,
        "eagle_config": {"use_aux_hidden_state": False},
        **dict.fromkeys(("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"), False),
    }


def switches(config: Settings) -> dict[str, Any]:
    """What such a head has beside the usual fields, by the names of ``HeadConfig``.

    SGLang 0.5.23 models/llama.py ``LlamaDecoderLayer`` builds attention with biases for ``attention_bias`` or a
    ``bias`` that is stated, and knows no ``qkv_bias``, which is SafeAILab's (cnets1.py: of q, k and v alone).
    """
    return {
        "family": "eagle",
        "later_norm": "input_layernorm",
        "last_norm": False,
        "builds_bias": bool(config.flag("attention_bias") or config.flag("bias")),
    }
