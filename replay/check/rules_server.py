"""Rules on the launch line itself: what SGLang's parser takes, its algorithm, its load format, and what it overrides in
the models' configs. Sources: SGLang 0.5.23 server_args.py, arg_groups/speculative_hook.py, speculative/spec_info.py,
model_loader/loader.py, utils/hf_transformers/config.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from replay.check.engine_config import context_of, filled, rope_of
from replay.check.facts import Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.override import FIELD, is_read, override_of, rewrites_rope, rope_object
from replay.check.rules_positions import OVERRIDE, served_length
from replay.check.server_finding import at, flag
from replay.check.speculation import resolve
from replay.checkpoint.config_file import Settings
from replay.traces.fields import show_name

_ARGUMENT, _STEPS, _TAPS, _WEIGHTS = "config.argument", "config.steps", "wiring.aux-missing", "weights.missing"
_ROPE, _LENGTH = "position.rope-params", "position.max-len"
# Of which fault an argument is that the parser does not take; any other is of the line.
_FAULTS = {
    "speculative_num_steps": _STEPS, "speculative_eagle_topk": _STEPS, "speculative_num_draft_tokens": _STEPS,
    "speculative_accept_threshold_single": "sampling.accept-rule",
    "speculative_accept_threshold_acc": "sampling.accept-rule", "dtype": "precision.dtype-cast",
    "context_length": _LENGTH, "speculative_draft_window_size": "attn.window",
    "quantization": "precision.draft-weights", "speculative_draft_model_quantization": "precision.draft-weights",
    "kv_cache_dtype": "precision.draft-kv", "speculative_draft_kv_cache_dtype": "precision.draft-kv",
}  # fmt: skip
_OTHER_ALGORITHMS = {
    "STANDALONE": "drafts with a whole model of its own, which is fed tokens alone",
    "NGRAM": "drafts from the text alone; the head is never run",
    "DFLASH": "drafts with another kind of head, a block at once",
    "DSPARK": "drafts with another kind of head, a block at once",
    "UNO": "drafts with the target itself; the head is never run",
    "FROZEN_KV_MTP": "drafts with the assistant of a Gemma 4 target",
}
# Fields of a config that a head is built from.
_BUILT_FROM = ("architectures", "hidden_size", "target_hidden_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "draft_vocab_size",
               "tie_word_embeddings", "rms_norm_eps", "hidden_act", "eagle_config", "quantization_config",
               "partial_rotary_factor")  # fmt: skip
_OPTION = "--json-model-override-args"
_INSTEAD = "write the fields into the target's config.json instead"
_FILES = {"pt": "*.pt", "npcache": "*.bin", "safetensors": "*.safetensors", "fastsafetensors": "*.safetensors",
          "instanttensor": "*.safetensors", "mistral": "consolidated*.safetensors"}  # fmt: skip


def launch_line(facts: Facts) -> Iterator[Finding]:
    """What the engine's own parser stops at."""
    for refusal in facts.server.refused:
        fault = _FAULTS.get(refusal.field, _ARGUMENT)
        yield Finding(fault, ERROR, refusal.what, facts.server.where, refusal.field or refusal.seen, refusal.seen,
                      refusal.expected, refusal.fix)  # fmt: skip


def algorithm(facts: Facts) -> Iterator[Finding]:
    """Whether the server feeds taps at all, and to the head's own weights."""
    server, field = facts.server, "speculative_algorithm"
    if server.engine != "sglang" or server.refused:
        return
    drafting = resolve(server, facts.target.architecture)
    name, given = drafting.algorithm, show_name(str(server.arguments.get(field)))
    use = "--speculative-algorithm EAGLE3"
    if drafting.stop is not None and drafting.stop.field == field:
        yield at(facts, _ARGUMENT, ERROR, drafting.stop.what, field, "EAGLE3", use)
    elif name is None and (not server.live or field in server.arguments) and not server.flag(_CAPTURE):
        without = "" if server.live or drafting.known else "without --speculative-algorithm "
        what = f"{without}the server runs without speculation; the head is never loaded"
        yield at(facts, _STEPS, ERROR, what, field, "EAGLE3", f"start it with {use}" if server.live else f"add {use}")
    elif name == "EAGLE":
        fc = facts.draft.tensors.get("fc.weight")
        yield at(facts, _TAPS, ERROR, f"the algorithm {given} feeds the target's final state alone"
                 + (f"; fc takes {fc.shape[-1]} features" if fc is not None and fc.shape else ""), field, "EAGLE3",
                 use)  # fmt: skip
    elif name in _OTHER_ALGORITHMS:
        yield at(facts, _TAPS, ERROR, f"the algorithm {given} {_OTHER_ALGORITHMS[name]}", field, "EAGLE3", use)
    elif name is not None and server.whole and not server.live:
        yield from _draft_path(facts)


_CAPTURE = "enable_return_aux_hidden_states"  # taps of a target without a head: another use of the algorithm's name


def _draft_path(facts: Facts) -> Iterator[Finding]:
    server, field = facts.server, "speculative_draft_model_path"
    path, target = server.text(field), server.text("model_path")
    if path is None and field not in server.arguments and not server.flag(_CAPTURE):
        yield at(facts, _WEIGHTS, ERROR, "without --speculative-draft-model-path SGLang takes the target itself for "
                 "the head", field, "the head's folder", "add --speculative-draft-model-path DIR")  # fmt: skip
    elif path is not None and path == target:
        yield at(facts, _WEIGHTS, ERROR, "the draft model path is the target's own", field, "the head's folder",
                 "--speculative-draft-model-path DIR, with the folder of the head")  # fmt: skip


def load_format(facts: Facts) -> Iterator[Finding]:
    """Which files the head's weights are read from: the draft's own format, else the target's."""
    server = facts.server
    if server.engine != "sglang":
        return
    own = "speculative_draft_load_format"
    field = own if server.text(own) is not None else "load_format"
    value = server.text(field)
    wanted, has = _FILES.get(value or ""), facts.draft.weights.file.rpartition("/")[2]
    kept = "*.bin" if has.endswith(".bin") else "*.safetensors"
    if value == "dummy":
        yield at(facts, _WEIGHTS, ERROR, "the head is loaded with random weights", field, "auto",
                 f"start the server without {flag(field)} dummy")  # fmt: skip
    elif wanted is not None and wanted != kept:
        yield at(facts, _WEIGHTS, ERROR, f"SGLang stops: {flag(field)} {value} reads {wanted}, the head's weights are "
                 f"{has}", field, "auto", f"--{own.replace('_', '-')} auto")  # fmt: skip


def override(facts: Facts) -> Iterator[Finding]:
    """``--json-model-override-args`` goes into the head's config as well. At most one finding."""
    server, text = facts.server, facts.server.text(FIELD)
    if server.engine != "sglang" or text is None:
        return
    changes, before, after = override_of(server), facts.draft.original, facts.draft.stated.values
    rebuilt = [key for key in _BUILT_FROM if key in changes and before.get(key) != after.get(key)]
    inner = changes.get("text_config")
    if not is_read(text):
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {_OPTION} is no JSON object", FIELD, "a JSON object",
                 "write the fields and their values as one JSON object")  # fmt: skip
    elif rebuilt:
        yield at(facts, _ARGUMENT, ERROR, f"{_OPTION} rewrites {', '.join(rebuilt)} of the head too", FIELD,
                 "fields of the target alone", _INSTEAD)  # fmt: skip
    elif isinstance(inner, dict):
        effect = "gives the head the target's sizes too" if "num_attention_heads" in inner else "gives the head a "\
                 "text_config without heads"  # fmt: skip
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {_OPTION} {effect}", FIELD, "no text_config", _INSTEAD)
    else:
        yield from _rope_override(facts, changes)
        yield from _length_override(facts, changes)


def _rope_override(facts: Facts, changes: Mapping[str, Any]) -> Iterator[Finding]:
    stated = next((changes[key] for key in ("rope_scaling", "rope_parameters") if key in changes), None)
    old, new = (rope_object(document) for document in (facts.draft.original, facts.draft.stated.values))
    if isinstance(stated, dict) and "type" in stated and "rope_type" not in stated:
        yield at(facts, _ROPE, WARNING, f'"type" in {_OPTION} scales no rope: SGLang goes by rope_type, which stays '
                 f"{show_name(str(new['rope_type']))}", FIELD, '"rope_type"',
                 f'{_INSTEAD}; "rope_type" here would rewrite the head\'s rope too')  # fmt: skip
    elif rewrites_rope(facts.draft.original, facts.draft.stated.values):
        was, now = (show_name(f"{one['rope_type']}, theta {one.get('rope_theta', 10000)}") for one in (old, new))
        yield at(facts, _ROPE, WARNING, f"{_OPTION} rewrites the head's rope too, from {was} to {now}", FIELD,
                 "the rope that the head was trained with", f"{_INSTEAD}, or train the head with it")  # fmt: skip
    elif "rope_theta" in changes:
        yield at(facts, _ROPE, WARNING, f'"rope_theta" in {_OPTION} changes nothing: SGLang takes theta from '
                 "rope_parameters", FIELD, "rope_parameters", "write it into the target's config.json")  # fmt: skip


def _length_override(facts: Facts, changes: Mapping[str, Any]) -> Iterator[Finding]:
    draft, served = facts.draft, served_length(facts)
    before = Settings(draft.original, draft.config.where)
    own = context_of(filled(before, draft.cls), rope_of(before, draft.cls))
    if "max_position_embeddings" in changes and own < served <= context_of(draft.config, draft.rope):
        yield at(facts, _LENGTH, WARNING, f"{_OPTION} lifts the head's longest position from {own} too: {served} are "
                 "served, beyond its training", FIELD, f"{own} positions",
                 f"start the server with --context-length {own}, or train the head on longer ones")  # fmt: skip


def context(facts: Facts) -> Iterator[Finding]:
    """The context that is asked for against the target's own (configs/model_config.py, _derive_context_length)."""
    server, field = facts.server, "context_length"
    asked, own = server.integer(field), context_of(facts.target.config, facts.target.rope)
    if server.engine != "sglang" or asked is None or server.live:
        return
    if asked < 1:
        yield at(facts, _LENGTH, ERROR, f"SGLang stops: a context of {asked} tokens holds no request", field,
                 "at least 1", f"{flag(field)} {own}")  # fmt: skip
    elif asked > own and not server.variable(OVERRIDE):
        yield at(facts, _LENGTH, ERROR, f"SGLang stops: the target goes to position {own}, {asked} are asked for",
                 field, f"at most {own}", f"{flag(field)} {own}, or {OVERRIDE}=1 before the command")  # fmt: skip
