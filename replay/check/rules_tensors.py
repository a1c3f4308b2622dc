"""Rules on tensors: what the engine looks for, what lies there, where lm_head and embedding come from."""

from collections.abc import Iterator

from replay.check.facts import Draft, Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.traces.fields import some

_MISSING, _LAYOUT, _OVERWRITTEN = "weights.missing", "weights.layout", "weights.overwritten"
# Judged by rules of their own, or harmless.
_APART = ("input_norm.", "fc_norm.", "d2t", "t2d", "lm_head.", "embed_tokens.")
_HARMLESS = (".rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_MOST_LAYERS = 256  # a config that asks for millions must not make us count to it
_ARCHITECTURES = {
    "sglang": ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
    "vllm": ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "Eagle3Speculator",
             "Eagle3DraftModel", "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    "eagle": ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
}  # fmt: skip
Table = dict[str, tuple[int, ...]]


def quantised(draft: Draft) -> bool:
    """Whether the checkpoint is quantised and says so: its tensors are then laid out in a way of their own."""
    return bool(draft.config.values.get("quantization_config"))


def architecture(facts: Facts) -> Iterator[Finding]:
    """The class that the engine builds."""
    draft, known = facts.draft, _ARCHITECTURES[facts.server.engine]
    seen = draft.architecture
    if seen in known:
        return
    wanted = "Eagle3DeepseekV2ForCausalLM" if any(".kv_b_proj." in name for name in draft.tensors) else known[0]
    plain = "builds a plain Llama of it, which reads no taps" if seen == "LlamaForCausalLM" else "does not know it"
    yield Finding("config.field-drop", ERROR, f"the config names the architecture {seen or 'not at all'}; "
                  f"{facts.server.engine} {plain}", draft.config.where, "architectures", str(seen or "absent"), wanted,
                  f'write "architectures": ["{wanted}"]' + (" and convert the nested config to a flat one" if
                  draft.speculators and facts.server.engine == "sglang" else ""))  # fmt: skip


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
    for layer in range(min(config.count("num_hidden_layers") or 1, _MOST_LAYERS)):
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
        return _mla(table, draft)
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
    kept = {
        name: shape for name, shape in table.items() if ".self_attn." not in name and not name.startswith("layers.1")
    }
    attention = {
        "q_a_proj": (q_rank, 2 * hidden), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, 2 * hidden), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank), "o_proj": (hidden, heads * value),
    }  # fmt: skip
    return kept | {f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()}


def sizes(facts: Facts) -> Iterator[Finding]:
    """Sizes that the config must state, and must state in agreement."""
    draft = facts.draft
    config = draft.config
    wanted = ["num_attention_heads", "intermediate_size", "num_hidden_layers"]
    if draft.mla:
        wanted += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    absent = [*draft.filled, *(name for name in wanted if not config.count(name))]
    if absent:
        yield Finding("config.field-drop", ERROR,
                      f"the config lacks {', '.join(absent)}: transformers fills in those of "
                      "Llama 7B", config.where, absent[0],
                      "absent", "a size", "copy the fields from the config that the head was trained with")  # fmt: skip
    heads, groups = config.count("num_attention_heads") or 0, config.count("num_key_value_heads") or 1
    if heads % groups:
        yield Finding(_LAYOUT, ERROR, f"{heads} attention heads do not divide into {groups} key-value heads",
                      config.where, "num_key_value_heads", str(groups), f"a divisor of {heads}",
                      "write the number that the head was trained with")  # fmt: skip
    if (config.text("hidden_act") or "silu") != "silu":
        yield Finding("config.field-drop", ERROR, "EAGLE-3 layers compute silu and nothing else", config.where,
                      "hidden_act", config.text("hidden_act") or "", "silu", 'write "hidden_act": "silu"')  # fmt: skip


def names(facts: Facts) -> Iterator[Finding]:
    """Tensors that the engine does not find (they stay random) or drops without a word."""
    draft, engine = facts.draft, facts.server.engine
    table = shapes(draft, engine)
    if draft.weights.twice:
        yield Finding(_LAYOUT, ERROR, f"two tensors claim the name {some(draft.weights.twice)}", draft.weights.file,
                      draft.weights.twice[0], "twice", "once",
                      "keep one of them and export the head again")  # fmt: skip
    if table is None or quantised(draft):
        return
    final = not draft.uses_aux and facts.target.hidden_size == draft.config.count("hidden_size")  # fc is skipped then
    missing = [name for name in table if name not in draft.tensors and not (final and name.startswith("fc."))]
    dropped = [
        fact.original
        for name, fact in draft.tensors.items()
        if name not in table
        and not name.startswith(_APART)
        and not name.endswith(_HARMLESS)
        and not (engine == "sglang" and name.endswith("o_proj.bias") and _keeps_bias(draft))
    ]
    norms = [name for name in missing if name.endswith("hidden_norm.weight") and not name.startswith("layers.0.")]
    if missing and missing == norms:
        yield Finding("wiring.multi-layer", ERROR,
                      f"SGLang norms the stream of later layers by {some(missing)}, which "
                      "the head lacks: it was made for vLLM, which applies input_layernorm there", draft.weights.file,
                      missing[0], "absent", str(list(table[missing[0]])), "serve the head with vLLM")  # fmt: skip
        missing, dropped = [], [name for name in dropped if "input_layernorm" not in name]
    if missing:
        also = f", and drops {some(dropped)} without a word" if dropped else ""
        yield Finding(_MISSING, ERROR, f"{engine} finds no {some(missing)}, so it stays as initialised{also}",
                      draft.weights.file, missing[0], "absent", str(list(table[missing[0]])),
                      "export the head again with all tensors under the names of its config's "
                      "architecture")  # fmt: skip
    elif dropped:
        stops = "refuses" if engine == "vllm" else "drops"
        yield Finding(_MISSING, ERROR, f"{engine} {stops} {some(dropped)}, which its class does not have"
                      + _why_dropped(dropped), draft.weights.file, dropped[0], "present", "absent",
                      _fix_dropped(dropped, facts))  # fmt: skip


def _keeps_bias(draft: Draft) -> bool:
    return bool(draft.config.flag("attention_bias") or draft.config.flag("bias"))


def _why_dropped(dropped: list[str]) -> str:
    if any("_norm.weight" in name and ".self_attn." in name for name in dropped):
        return ": the head was trained with norms of q and k"
    if any(name.endswith("_proj.bias") for name in dropped):
        return ": the head was trained with biases"
    return ""


def _fix_dropped(dropped: list[str], facts: Facts) -> str:
    if any(".self_attn." in name for name in dropped):
        return "serve the head with an engine that computes these (vLLM), or train one without them"
    if "fc.bias" in dropped:
        return 'write "bias": true'
    layers = {int(name.split(".layers.")[-1].removeprefix("layers.").split(".")[0]) for name in dropped
              if name.removeprefix("model.").startswith("layers.") and
              name.removeprefix("model.").split(".")[1].isdecimal()}  # fmt: skip
    stated = facts.draft.config.count("num_hidden_layers") or 1
    if layers and min(layers) >= stated:
        return f'write "num_hidden_layers": {max(layers) + 1}'
    return "state the matching field in config.json, or export the head without them"


def misshapen(facts: Facts) -> Iterator[Finding]:
    """Tensors of another shape than the config calls for: the server stops at loading them."""
    draft = facts.draft
    table = shapes(draft, facts.server.engine)
    if table is None or quantised(draft):
        return
    table = table | _fusion_norms(facts)
    wrong = [name for name, shape in table.items() if name in draft.tensors and draft.tensors[name].shape != shape]
    if not wrong:
        return
    first = wrong[0]
    seen, wanted = draft.tensors[first].shape, table[first]
    yield Finding(_LAYOUT, ERROR, f"{some(wrong)} {'has' if len(wrong) == 1 else 'have'} another shape "
                                  "than the config "
                  "calls for", draft.weights.file, first, str(list(seen)), str(list(wanted)),
                  _fix_shape(draft, first, seen))  # fmt: skip


def _fusion_norms(facts: Facts) -> Table:
    """Norms in front of fc, where they are there at all."""
    fc, width = facts.draft.tensors.get("fc.weight"), facts.target.hidden_size
    if fc is None or len(fc.shape) != 2 or fc.shape[1] % width:
        return {}
    taps = {f"fc_norm.{tap}.weight": (width,) for tap in range(min(fc.shape[1] // width, _MOST_LAYERS))}
    return {"input_norm.weight": (fc.shape[1],), **taps}


def _fix_shape(draft: Draft, name: str, seen: tuple[int, ...]) -> str:
    heads = draft.config.count("num_attention_heads") or 1
    if name.endswith(("q_proj.weight", "o_proj.weight")) and len(seen) == 2:
        rows = seen[0] if name.endswith("q_proj.weight") else seen[1]
        if rows % heads == 0:
            return f'write "head_dim": {rows // heads}, or the num_attention_heads that the head was trained with'
    if name.endswith("k_proj.weight"):
        return "write the num_key_value_heads that the head was trained with"
    return "copy config.json from where the head was trained, or export the head again"


def lm_head(facts: Facts) -> Iterator[Finding]:
    """Where logits come from: the head's own lm_head, the target's, or the embedding. At most one finding."""
    draft = facts.draft
    config, tensors, vocabulary = draft.config, draft.tensors, draft.config.count("vocab_size") or 0
    own, size = tensors.get("lm_head.weight"), config.count("draft_vocab_size")

    def found(fault: str, what: str, field: str, seen: object, expected: object, fix: str) -> Finding:
        return Finding(fault, ERROR, what, config.where, field, str(seen), str(expected), fix)

    untie = 'write "tie_word_embeddings": false'
    if config.flag("tie_word_embeddings"):
        if size not in (None, vocabulary) or "d2t" in tensors:
            yield found(_LAYOUT, "tie_word_embeddings makes the embedding of the whole vocabulary the "
                                 "lm_head of a head "
                        f"that drafts over {size or 'fewer'} "
                        "tokens", "tie_word_embeddings", "true", "false", untie)  # fmt: skip
        elif own is not None:
            yield found(_OVERWRITTEN, "tie_word_embeddings puts the target's embedding in place of the head's own "
                        "lm_head", "tie_word_embeddings", "true", "false", untie)  # fmt: skip
    elif not config.has("draft_vocab_size") and not draft.mla and facts.server.engine == "sglang":
        rows = own.shape[0] if own is not None and own.shape else None
        yield found("config.field-drop", "the config does not have draft_vocab_size and SGLang stops without it",
                    "draft_vocab_size", "absent", rows or "null",
                    f'write "draft_vocab_size": {rows or "null"}')  # fmt: skip
    elif size is None and own is not None:
        yield found(_OVERWRITTEN, "draft_vocab_size is null, so the target's lm_head takes the place of the head's own",
                    "draft_vocab_size", "null", own.shape[0] if own.shape else "its rows",
                    f'write "draft_vocab_size": {own.shape[0] if own.shape else vocabulary}')  # fmt: skip
    elif size is not None and own is None and not quantised(draft):
        yield Finding(_MISSING, ERROR, "the head has no lm_head.weight, so it stays as initialised", draft.weights.file,
                      "lm_head.weight", "absent", f"[{size}, {config.count('hidden_size')}]",
                      'export the head again with it, or write "draft_vocab_size": null where the target\'s was '
                      "trained with")  # fmt: skip
    elif own is not None and size is not None and own.shape != (size, config.count("hidden_size")):
        yield Finding(_LAYOUT, ERROR, "lm_head.weight has another shape than the config calls for", draft.weights.file,
                      "lm_head.weight", str(list(own.shape)), f"[{size}, {config.count('hidden_size')}]",
                      f'write "draft_vocab_size": {own.shape[0] if own.shape else size}')  # fmt: skip


def embedding(facts: Facts) -> Iterator[Finding]:
    """The head's own embedding, where the engine uses the target's instead."""
    draft, target = facts.draft, facts.target
    own, hidden = draft.tensors.get("embed_tokens.weight"), draft.config.count("hidden_size") or 0
    if own is None:
        if hidden != target.hidden_size and draft.config.count("target_hidden_size") == target.hidden_size:
            yield Finding(_MISSING, ERROR, f"the head is {hidden} wide, the target {target.hidden_size}, "
                                           "so it needs an "
                          "embedding of its own and has none", draft.weights.file, "embed_tokens.weight", "absent",
                          f"[{draft.config.count('vocab_size')}, {hidden}]", "export the head again with "
                                                                             "it")  # fmt: skip
        return
    if own.shape != (draft.config.count("vocab_size"), hidden):
        yield Finding(_LAYOUT, ERROR, "embed_tokens.weight has another shape than the config calls for",
                      draft.weights.file, "embed_tokens.weight", str(list(own.shape)),
                      f"[{draft.config.count('vocab_size')}, {hidden}]", "export the head again")  # fmt: skip
    elif facts.embed_agrees is False and facts.server.engine == "sglang":
        yield Finding(_OVERWRITTEN, WARNING, "the head was trained with an embedding of its own; SGLang replaces it by "
                      "the target's", draft.weights.file, "embed_tokens.weight", "other rows than the target's",
                      "the target's rows", "serve the head with vLLM, or train it on the target's "
                                           "embedding")  # fmt: skip
