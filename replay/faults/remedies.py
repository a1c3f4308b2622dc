"""What to type against each kind of fault, for the engine that showed it."""

from collections.abc import Mapping

from replay.engines.wiring import Wiring, engine_ids

# One sentence for each kind: what to change, and where.
_REMEDIES: Mapping[str, str] = {
    "wiring.aux-missing": "see that every layer id fires: the last layer's never does in SGLang; compare the fed taps "
    "with `replay check`, or serve with `replay serve --wiring {wiring}`",
    "wiring.aux-capture-stage": "take taps from the residual stream before the layer's norm, as `replay serve --wiring "
    "{wiring}` does",
    "wiring.concat-order": "qkv reads embedding first, then features; fc reads taps in the wiring's order: export the "
    "head again, or serve with `replay serve --wiring {wiring}`",
    "wiring.norm": "state norm_before_fc, fc_norm and norm_before_residual in the draft config as trained; "
    "SGLang reads norm_before_fc inside eagle_config or at the top level, and knows no norm_before_residual",
    "wiring.recycle-norm": "set norm_output in the draft config to what training fed back between steps",
    "wiring.multi-layer": "serve the head with an engine that applies the norm it was trained with in later layers",
    "shift.alignment": "the draft's input ids must be shifted left by one against the features; update the engine or "
    "train with the same pairing",
    "position.offset": "drafted tokens stand at S, S+1, ...: update the engine's position handling",
    "position.rope-params": "write the rope_theta and rope scaling that training used into the draft config",
    "position.rope-geometry": "write rope_is_neox_style and partial_rotary_factor as trained into the draft config",
    "position.max-len": "raise max_position_embeddings of the draft config to the length that is served",
    "attn.window": "serve without --speculative-draft-window-size, or with the window that training used",
    "vocab.d2t": "write d2t as offsets (target id = draft id + d2t) and the head's own map",
    "weights.overwritten": "keep the head's own lm_head and embedding: tie_word_embeddings must be false and "
    "draft_vocab_size stated in the draft config",
    "weights.missing": "export the head again with {value}; SGLang skips names that it does not know in silence: see "
    "`replay check --draft DIR`",
    "weights.layout": "split qkv by queries, keys and values, not group by group, when the checkpoint is converted",
    "kv.rollback": "the draft KV must be rewritten from target features after verify: update the engine or switch its "
    "approximation off",
    "kv.prefix-reuse": "serve with --disable-radix-cache to confirm, then update to a version that keys draft KV by "
    "lookahead",
    "kv.slot-write": "update the engine: drafted rows must have a KV slot each, and the attended length must grow by "
    "step",
    "kv.chunk-boundary": "raise --chunked-prefill-size above the prompts, or update to a version with the tail fix",
    "kv.skip-draft": "keep drafting on while requests run, or let the engine fill the draft KV when it resumes",
    "kv.handoff": "send the last hidden states and the draft KV along when a request moves from prefill to decode",
    "kv.none": "the draft sees no committed rows: its KV cache is not written or not read; update the engine",
    "state.hidden-row": "the next round must go on from the last accepted token's row: update the engine",
    "tree.parent-kv": "serve a chain (--speculative-eagle-topk 1) or an engine that lets nodes see their ancestors",
    "precision.draft-weights": "serve the draft unquantised (--speculative-draft-model-quantization unquant)",
    "precision.draft-kv": "set --speculative-draft-kv-cache-dtype bf16",
    "precision.dtype-cast": "state dtype bfloat16 in the draft config, or serve with --dtype bfloat16",
}


def remedy(kind: str, value: str, wiring: Wiring, *, model_type: str, layers: int) -> str:
    """What to do against ``kind=value``; ``wiring`` is the one to serve. Joined kinds give joined sentences."""
    parts = [part for part in kind.split("+") if part]
    sentences = [_remedy(part, value, wiring, model_type, layers) for part in parts]
    return "; then ".join(sentence for sentence in sentences if sentence)


def _remedy(kind: str, value: str, wiring: Wiring, model_type: str, layers: int) -> str:
    if kind == "wiring.aux-layer-id":
        said = [one for one in engine_ids(wiring, model_type=model_type, layers=layers) if one.ids is not None]
        ids = "; ".join(f"{one.engine}: eagle_aux_hidden_state_layer_ids {list(one.ids or ())}" for one in said)
        return f"feed {wiring}: `replay serve --wiring {wiring} -- ...`" + (f", or write for {ids}" if ids else "")
    return _REMEDIES.get(kind, "").format(wiring=wiring, value=value)
