"""Tensors that an engine looks for in a draft head: names, shapes, and the spellings that its class takes.

Sources: SGLang 0.5.23 models/llama_eagle3.py and models/kimi_k25_eagle3.py (``load_weights``), vLLM 0.32
model_executor/models/llama_eagle3.py, SafeAILab/EAGLE eagle/model/cnets.py.
"""

from replay.check.facts import Draft, Facts
from replay.checkpoint.headers import TensorFact

MOST_LAYERS = 256  # a config that asks for millions must not make us count to it
_WHOLE = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
Table = dict[str, tuple[int, ...]]


def shapes(draft: Draft, engine: str) -> Table | None:
    """Name → shape of what the engine looks for, fusion norms, vocabulary and lm_head left out.

    None where the config lacks a size, which is a finding of its own, or the class is not known.
    """
    config = draft.config
    hidden, heads = config.count("hidden_size") or 0, config.count("num_attention_heads")
    inner = config.count("intermediate_size_mlp" if config.text("model_type") == "llama4_text" else "intermediate_size")
    if not heads or not inner:
        return None
    fc = draft.tensors.get("fc.weight")
    groups, head_dim = config.count("num_key_value_heads") or heads, config.count("head_dim") or hidden // heads
    # fc's inputs are judged by the rule on taps
    table: Table = {"fc.weight": (hidden, fc.shape[1] if fc is not None and len(fc.shape) == 2 else 3 * hidden)}
    table["norm.weight"] = (hidden,)
    if config.flag("bias"):
        table["fc.bias"] = (hidden,)
    # SGLang 0.5.23 models/llama_eagle3.py: q, k and v have no bias whatever the config says; o_proj's begins as zero.
    biased = ("q_proj", "k_proj", "v_proj") if engine != "sglang" and config.flag("attention_bias") else ()
    for layer in range(min(config.count("num_hidden_layers") or 1, MOST_LAYERS)):
        inputs = hidden if layer else 2 * hidden
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            table[f"layers.{layer}.{norm}.weight"] = (hidden,)
        matrices = {
            "self_attn.q_proj": (heads * head_dim, inputs), "self_attn.k_proj": (groups * head_dim, inputs),
            "self_attn.v_proj": (groups * head_dim, inputs), "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        for name, shape in matrices.items():
            table[f"layers.{layer}.{name}.weight"] = shape
            if name.endswith(biased) or (name.startswith("mlp.") and config.flag("mlp_bias") and engine != "sglang"):
                table[f"layers.{layer}.{name}.bias"] = shape[:1]
    if draft.mla:
        table = _mla(table, draft) or {}
    if engine == "sglang":
        table = _fused(table, draft)
    if draft.mla:
        return table or None
    if engine == "vllm" and (draft.architecture == "Eagle3Qwen3ForCausalLM" or config.text("model_type") == "qwen3"):
        for norm in ("q_norm", "k_norm"):
            table[f"layers.0.self_attn.{norm}.weight"] = (head_dim,)
    return table


def _mla(table: Table, draft: Draft) -> Table | None:
    """DeepSeek's attention (SGLang 0.5.23 models/kimi_k25_eagle3.py): exactly one layer, qkv input 2 x hidden."""
    config, hidden = draft.config, draft.config.count("hidden_size") or 0
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    sizes = [config.count(name) for name in names]
    if not all(sizes):
        return None
    q_rank, kv_rank, nope, rope, value, heads = (size or 0 for size in sizes)
    first = "layers.0."
    kept = {name: shape for name, shape in table.items()
            if not name.startswith("layers.") or (name.startswith(first) and ".self_attn." not in name)}  # fmt: skip
    attention = {
        "q_a_proj": (q_rank, 2 * hidden), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, 2 * hidden), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank), "o_proj": (hidden, heads * value),
    }  # fmt: skip
    return kept | {f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()}


def _fused(table: Table, draft: Draft) -> Table:
    """With layers that the checkpoint holds in one piece: SGLang loads these too, but for MLA's first projection."""
    for layer in range(min(draft.config.count("num_hidden_layers") or 1, MOST_LAYERS)):
        for whole, parts in _WHOLE.items():
            name = f"layers.{layer}.{whole}.weight"
            names = [f"layers.{layer}.{part}.weight" for part in parts]
            if name in draft.tensors and all(one in table for one in names):
                rows, inputs = sum(table[one][0] for one in names), table[names[0]][1]
                table = {one: shape for one, shape in table.items() if one not in names} | {name: (rows, inputs)}
    return table


def loaded(draft: Draft, engine: str) -> dict[str, TensorFact]:
    """Tensors whose names the engine's class looks at.

    SGLang 0.5.23 models/kimi_k25_eagle3.py puts ``model.`` in front of every name but lm_head's, and takes
    ``midlayer.`` and ``layers.0.``; models/llama_eagle3.py takes the other old names too.
    """
    if not draft.mla or engine != "sglang":
        return dict(draft.tensors)
    return {name: fact for name, fact in draft.tensors.items()
            if not fact.original.startswith(("model.", "aux_norm_")) or name in ("d2t", "t2d")}  # fmt: skip


TURN = "save the transpose in its place: weights are [outputs, inputs]"


def transposed_fc(facts: Facts) -> bool:
    """Whether fc lies there as [inputs, outputs]."""
    fc, hidden, width = (
        facts.draft.tensors.get("fc.weight"),
        facts.draft.config.count("hidden_size"),
        facts.target.hidden_size,
    )
    if fc is None or len(fc.shape) != 2 or fc.shape[0] == fc.shape[1]:
        return False
    return fc.shape[1] == hidden and fc.shape[0] != hidden and fc.shape[0] % width == 0
