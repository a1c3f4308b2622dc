"""Rules on tensors: what the engine looks for, what lies there, where lm_head and embedding come from."""

from collections.abc import Iterator

from replay.check.facts import Draft, Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.head_tensors import MOST_LAYERS, TURN, Table, loaded, shapes, transposed_fc
from replay.check.quantization import quantised_parts
from replay.check.sizes import Replaced
from replay.traces.fields import some

_MISSING, _LAYOUT, _OVERWRITTEN = "weights.missing", "weights.layout", "weights.overwritten"
# Judged by rules of their own, or harmless.
_APART = ("input_norm.", "fc_norm.", "d2t", "t2d", "lm_head.", "embed_tokens.")
_HARMLESS = (".rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_ARCHITECTURES = {
    "sglang": ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
    "vllm": ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "Eagle3Speculator",
             "Eagle3DraftModel", "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    "eagle": ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
}  # fmt: skip


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


def sizes(facts: Facts) -> Iterator[Finding]:
    """Sizes that the config must state, and must state in agreement."""
    draft = facts.draft
    config = draft.config
    absent = [one for one in draft.replaced if not draft.stated.has(one.name)]
    none = [name for name in ("num_attention_heads", "intermediate_size", "num_hidden_layers")
            if draft.stated.count(name) == 0]  # fmt: skip
    if absent or none:
        names = [*(one.name for one in absent), *none]
        known = len(names) == 1 and absent and absent[0].found
        yield Finding("config.field-drop", ERROR, f"the config lacks {', '.join(names)}"
                      + "".join(_taken(draft, one) for one in absent[:1]), config.where, names[0],
                      "absent" if absent else "0", str(absent[0].found or "a size") if absent else "a size",
                      f'write "{names[0]}": {absent[0].found}' if known else
                      "copy the fields from the config that the head was trained with")  # fmt: skip
    heads, groups = config.count("num_attention_heads") or 0, config.count("num_key_value_heads") or 1
    if heads % groups and not draft.mla:  # latent attention has no key-value heads
        yield Finding(_LAYOUT, ERROR, f"{heads} attention heads do not divide into {groups} key-value heads",
                      config.where, "num_key_value_heads", str(groups), f"a divisor of {heads}",
                      "write the number that the head was trained with")  # fmt: skip
    yield from _mla_sizes(facts)
    if (config.text("hidden_act") or "silu") != "silu":
        yield Finding("config.field-drop", ERROR, "EAGLE-3 layers compute silu and nothing else", config.where,
                      "hidden_act", config.text("hidden_act") or "", "silu", 'write "hidden_act": "silu"')  # fmt: skip


def _taken(draft: Draft, one: Replaced) -> str:
    """What the engine makes of the first size that is left out."""
    cls = draft.cls.name if draft.cls is not None else "its class"
    taken = "has no default for it" if one.default is None else f"takes {one.default}"
    found = f", and the head has {one.found}" if one.found else ""
    return f": {cls} {taken}{found}" if len(draft.replaced) == 1 else f"; for {one.name} {cls} {taken}{found}"


def _mla_sizes(facts: Facts) -> Iterator[Finding]:
    """models/kimi_k25_eagle3.py: exactly one layer, and a rank for q."""
    draft = facts.draft
    if not draft.mla or facts.server.engine != "sglang":
        return
    stated = draft.stated.count("num_hidden_layers")
    if stated is not None and stated != 1:
        more = any(name.startswith("layers.1.") for name in draft.tensors)
        yield Finding("wiring.multi-layer", ERROR, f"SGLang stops: its class of MLA heads takes exactly one layer, the "
                      f"config says {stated}", draft.stated.where, "num_hidden_layers", str(stated), "1",
                      "serve the head with vLLM, or train one of a single layer" if more else
                      'write "num_hidden_layers": 1')  # fmt: skip
    if draft.stated.has("q_lora_rank") and draft.stated.values["q_lora_rank"] is None:
        yield Finding("config.field-drop", ERROR, "SGLang stops: its class of MLA heads takes no head without "
                      "q_lora_rank", draft.stated.where, "q_lora_rank", "null", "a rank",
                      "write the q_lora_rank that the head was trained with")  # fmt: skip


def names(facts: Facts) -> Iterator[Finding]:
    """Tensors that the engine does not find (they stay random) or drops without a word."""
    draft, engine = facts.draft, facts.server.engine
    table, tensors = shapes(draft, engine), loaded(facts.draft, facts.server.engine)
    if draft.weights.twice:
        yield Finding(_LAYOUT, ERROR, f"two tensors claim the name {some(draft.weights.twice)}", draft.weights.file,
                      draft.weights.twice[0], "twice", "once",
                      "keep one of them and export the head again")  # fmt: skip
    if table is None:
        return
    final = not draft.uses_aux and facts.target.hidden_size == draft.config.count("hidden_size")  # fc is skipped then
    laid_out = quantised_parts(tensors)
    missing = [name for name in table if name not in tensors and name.rpartition(".")[0] not in laid_out
               and not (final and name.startswith("fc."))]  # fmt: skip
    dropped = [
        fact.original
        for name, fact in draft.tensors.items()
        if (name not in table or name not in tensors)
        and not (name.startswith(_APART) and name in tensors)
        and name.rpartition(".")[0] not in laid_out
        and not _is_left_alone(name, draft, engine)
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
        prefixed = draft.mla and any(name.startswith("model.") for name in dropped)
        yield Finding(_MISSING, ERROR, f"{engine} finds no {some(missing)}, so it stays as initialised{also}",
                      draft.weights.file, missing[0], "absent", str(list(table[missing[0]])),
                      "take the leading model. off the tensors' names: SGLang's class of MLA heads adds one" if prefixed
                      else "export the head again with all tensors under the names of its config's "
                      "architecture")  # fmt: skip
    elif dropped:
        stops = "refuses" if engine == "vllm" else "drops"
        yield Finding(_MISSING, ERROR, f"{engine} {stops} {some(dropped)}, which its class does not have"
                      + _why_dropped(dropped), draft.weights.file, dropped[0], "present", "absent",
                      _fix_dropped(dropped, facts))  # fmt: skip


def _is_left_alone(name: str, draft: Draft, engine: str) -> bool:
    """Whether a tensor that the engine does not load is none that it should have loaded."""
    if name.endswith(_HARMLESS):
        return True
    later = draft.mla and name.startswith("layers.") and not name.startswith("layers.0.")
    return engine == "sglang" and (later or (name.endswith("o_proj.bias") and _keeps_bias(draft)))


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
    if table is None:
        return
    table = table | _fusion_norms(facts)
    laid_out = quantised_parts(draft.tensors)
    wrong = [name for name, shape in table.items() if name in draft.tensors and draft.tensors[name].shape != shape
             and name.rpartition(".")[0] not in laid_out]  # fmt: skip
    if "fc.weight" in wrong and transposed_fc(facts):
        wrong.remove("fc.weight")  # the rule on taps says it
    if not wrong:
        return
    first = wrong[0]
    seen, wanted = draft.tensors[first].shape, table[first]
    turned = all(draft.tensors[name].shape == table[name][::-1] for name in wrong)
    what = ("is transposed" if len(wrong) == 1 else "are transposed") if turned else (
        f"{'has' if len(wrong) == 1 else 'have'} another shape than the config calls for")  # fmt: skip
    yield Finding(_LAYOUT, ERROR, f"{some(wrong)} {what}", draft.weights.file, first, str(list(seen)),
                  str(list(wanted)), TURN if turned else _fix_shape(draft, first, seen))  # fmt: skip


def _fusion_norms(facts: Facts) -> Table:
    """Norms in front of fc, where they are there at all."""
    fc, width = facts.draft.tensors.get("fc.weight"), facts.target.hidden_size
    if fc is None or len(fc.shape) != 2 or fc.shape[1] % width:
        return {}
    taps = {f"fc_norm.{tap}.weight": (width,) for tap in range(min(fc.shape[1] // width, MOST_LAYERS))}
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

    untie, tied = 'write "tie_word_embeddings": false', "true" if draft.stated.has("tie_word_embeddings") else "absent"
    if config.flag("tie_word_embeddings"):
        if size not in (None, vocabulary) or "d2t" in tensors:
            yield found(_LAYOUT, "tie_word_embeddings makes the embedding of the whole vocabulary the "
                                 "lm_head of a head "
                        f"that drafts over {size or 'fewer'} "
                        "tokens", "tie_word_embeddings", tied, "false", untie)  # fmt: skip
        elif own is not None:
            yield found(_OVERWRITTEN, "tie_word_embeddings puts the target's embedding in place of the head's own "
                        "lm_head", "tie_word_embeddings", tied, "false", untie)  # fmt: skip
    elif not config.has("draft_vocab_size") and not draft.mla and facts.server.engine == "sglang":
        rows = own.shape[0] if own is not None and own.shape else None
        yield found("config.field-drop", "the config does not have draft_vocab_size and SGLang stops without it",
                    "draft_vocab_size", "absent", rows or "null",
                    f'write "draft_vocab_size": {rows or "null"}')  # fmt: skip
    elif size is None and own is not None:
        absent = "null" if config.has("draft_vocab_size") else "absent"
        rows = own.shape[0] if own.shape else 0
        effect = "the target's lm_head takes the place of the head's own"
        if rows != vocabulary and facts.server.engine == "sglang":
            effect = f"SGLang builds the target's lm_head of {vocabulary} tokens, and stops at the head's own of {rows}"
        yield found(_OVERWRITTEN, f"draft_vocab_size is {absent}, so {effect}", "draft_vocab_size",
                    absent, own.shape[0] if own.shape else "its rows",
                    f'write "draft_vocab_size": {own.shape[0] if own.shape else vocabulary}')  # fmt: skip
    elif size is not None and own is None and "lm_head" not in quantised_parts(tensors):
        yield Finding(_MISSING, ERROR, "the head has no lm_head.weight, so it stays as initialised", draft.weights.file,
                      "lm_head.weight", "absent", f"[{size}, {config.count('hidden_size')}]",
                      'export the head again with it, or write "draft_vocab_size": null where the target\'s was '
                      "trained with")  # fmt: skip
    elif (own is not None and size is not None and own.shape != (size, config.count("hidden_size"))
          and "lm_head" not in quantised_parts(tensors)):  # fmt: skip
        turned = own.shape == (config.count("hidden_size"), size)
        yield Finding(_LAYOUT, ERROR, "lm_head.weight is transposed" if turned else
                      "lm_head.weight has another shape than the config calls for", draft.weights.file,
                      "lm_head.weight", str(list(own.shape)), f"[{size}, {config.count('hidden_size')}]",
                      TURN if turned else
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
