"""Rules on server arguments and on the precision that follows from them. Sources: SGLang 0.5.23 arg_groups/
speculative_hook.py, serving_hook.py, configs/model_config.py, mem_cache/kv_cache_dtype.py, environ.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from replay.check.facts import Facts, stated_dtype
from replay.check.finding import ERROR, NOTE, WARNING, Finding

_STEPS, _RULE, _KV, _WEIGHTS, _CAST = (
    "config.steps", "sampling.accept-rule", "precision.draft-kv", "precision.draft-weights", "precision.dtype-cast"
)  # fmt: skip
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32", "bf16": "bf16",
          "fp16": "fp16", "fp32": "fp32"}  # fmt: skip
_WIDE = ("float64", "double")
_TREE_BACKENDS = ("flashinfer", "fa3", "triton")


def _integer(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    return value if type(value) is int else None


def _at(facts: Facts, fault: str, severity: str, what: str, field: str, expected: object, fix: str) -> Finding:
    seen = facts.server.arguments.get(field)
    return Finding(fault, severity, what, facts.server.where, field, "absent" if seen is None else str(seen),
                   str(expected), fix)  # fmt: skip


def depth(facts: Facts) -> Iterator[Finding]:
    """How many tokens a round really drafts. At most one finding."""
    arguments = facts.server.arguments
    if facts.server.engine != "sglang":
        return
    steps, topk, nodes = (
        _integer(arguments, f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")
    )
    if facts.server.live and "speculative_algorithm" in arguments and not arguments["speculative_algorithm"]:
        yield _at(facts, _STEPS, ERROR, "the server runs without speculation", "speculative_algorithm", "EAGLE3",
                  "start it with --speculative-algorithm EAGLE3")  # fmt: skip
    elif steps is None and (topk is not None or nodes is not None) and not arguments.get("speculative_adaptive"):
        yield _at(facts, _STEPS, ERROR, "SGLang stops: eagle-topk or num-draft-tokens is given without num-steps",
                  "speculative_num_steps", "given as well",
                  "give --speculative-num-steps, --speculative-eagle-topk and "
                  "--speculative-num-draft-tokens, or none of them")  # fmt: skip
    elif steps is not None and (topk is None or nodes is None):
        name = "speculative_eagle_topk" if topk is None else "speculative_num_draft_tokens"
        flags = "--speculative-eagle-topk 1 --speculative-num-draft-tokens"
        yield _at(facts, _STEPS, ERROR, "SGLang stops: num-steps is given without the other two", name, "given as well",
                  f"add {flags} {steps + 1}")  # fmt: skip
    elif steps is not None and topk == 1 and nodes is not None and nodes != steps + 1:
        yield _at(facts, _STEPS, WARNING, f"with topk 1 and {steps} step{'s' if steps != 1 else ''} SGLang verifies "
                  f"{steps + 1} tokens a round, not {nodes}: it drafts {steps}", "speculative_num_steps", nodes - 1,
                  f"--speculative-num-steps {nodes - 1}, or --speculative-num-draft-tokens {steps + 1}")  # fmt: skip
    elif steps is not None and topk is not None and nodes is not None and topk > 1:
        yield from _tree(facts, steps, topk, nodes)
    elif facts.server.live and steps == 1:
        yield _at(facts, _STEPS, NOTE, "the server drafts one token a round, so its accept length is 2 at most",
                  "speculative_num_steps", "what was meant",
                  "start it with --speculative-num-steps and --speculative-num-draft-tokens one above")  # fmt: skip


def _tree(facts: Facts, steps: int, topk: int, nodes: int) -> Iterator[Finding]:
    arguments = facts.server.arguments
    most = 1 + topk + (steps - 1) * topk * topk
    backend = arguments.get("attention_backend")
    page = _integer(arguments, "page_size") or 1
    if nodes - 1 < steps:
        yield _at(facts, _STEPS, WARNING, f"{nodes} tokens a round hold {nodes - 1} drafted ones, so {steps} steps are "
                  f"never all used", "speculative_num_draft_tokens", f"above {steps}",
                  f"--speculative-num-draft-tokens {max(nodes, 4 * steps)}, or --speculative-num-steps "
                  f"{nodes - 1}")  # fmt: skip
    elif nodes > most:
        yield _at(facts, _STEPS, ERROR, f"topk {topk} and {steps} steps make {most} tokens at most, {nodes} are asked "
                  "for", "speculative_num_draft_tokens", f"at most {most}",
                  f"--speculative-num-draft-tokens {most}")  # fmt: skip
    elif backend == "trtllm_mha" or (page > 1 and isinstance(backend, str) and backend not in _TREE_BACKENDS):
        yield _at(facts, _STEPS, ERROR, f"SGLang stops: {backend} verifies no trees" + (f" with page size {page}" if
                  backend != "trtllm_mha" else ""), "attention_backend", " or ".join(_TREE_BACKENDS),
                  "--attention-backend fa3, or --speculative-eagle-topk 1")  # fmt: skip


def algorithm(facts: Facts) -> Iterator[Finding]:
    """Whether the server feeds taps at all."""
    name = facts.server.arguments.get("speculative_algorithm")
    fc = facts.draft.tensors.get("fc.weight")
    if facts.server.engine == "sglang" and isinstance(name, str) and name.upper() in ("EAGLE", "NEXTN"):
        yield _at(facts, "wiring.aux-missing", ERROR, f"the algorithm {name} feeds the target's final state alone"
                  + (f"; fc takes {fc.shape[-1]} features" if fc is not None and fc.shape else ""),
                  "speculative_algorithm", "EAGLE3", "--speculative-algorithm EAGLE3")  # fmt: skip
    for argument in ("load_format", "speculative_draft_load_format"):
        if facts.server.arguments.get(argument) == "dummy":
            yield _at(facts, "weights.missing", ERROR, "the head is loaded with random weights", argument, "auto",
                      f"start the server without --{argument.replace('_', '-')} dummy")  # fmt: skip


def acceptance(facts: Facts) -> Iterator[Finding]:
    """Thresholds, rejection sampling, simulated acceptance."""
    arguments, environment = facts.server.arguments, facts.server.environment
    rejection = arguments.get("speculative_use_rejection_sampling") is True
    simulated = environment.get("SGLANG_SIMULATE_ACC_LEN", "")
    if _positive(simulated):
        yield Finding("metrics.definition", ERROR, f"SGLANG_SIMULATE_ACC_LEN makes up an accept length of {simulated}",
                      "environment", "SGLANG_SIMULATE_ACC_LEN", simulated, "absent",
                      "unset SGLANG_SIMULATE_ACC_LEN and start the server again")  # fmt: skip
    lenient = []
    for name in ("single", "acc"):
        field = f"speculative_accept_threshold_{name}"
        value = arguments.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != 1:
            lenient.append(field)
    if rejection:
        draft, target = facts.draft.config.count("draft_vocab_size"), facts.target.vocab_size
        topk = _integer(arguments, "speculative_eagle_topk")
        field = "speculative_use_rejection_sampling"
        drop = "start the server without --speculative-use-rejection-sampling"
        if draft is not None and draft != target:
            yield _at(facts, _RULE, ERROR, f"SGLang stops: rejection sampling needs one vocabulary, the "
                                           "head drafts over "
                      f"{draft} of {target} tokens", field, "absent", drop)  # fmt: skip
        elif topk is not None and topk != 1:
            yield _at(facts, _RULE, ERROR, f"SGLang stops: rejection sampling works on chains, topk is {topk}", field,
                      "absent", f"{drop}, or with --speculative-eagle-topk 1")  # fmt: skip
        elif lenient:
            yield _at(facts, _RULE, ERROR, "SGLang stops: rejection sampling takes no thresholds", lenient[0], 1.0,
                      f"start the server without --{lenient[0].replace('_', '-')}")  # fmt: skip
    elif lenient:
        yield _at(facts, _RULE, WARNING, "a threshold below 1 accepts tokens that the target would not have sampled: "
                  "accept length rises and the output changes", lenient[0], 1.0,
                  f"start the server without --{lenient[0].replace('_', '-')}")  # fmt: skip
    if arguments.get("speculative_token_map") and facts.server.engine == "sglang":
        yield _at(facts, "vocab.d2t", NOTE, "an EAGLE-3 head brings its own map; SGLang ignores this one",
                  "speculative_token_map", "absent", "start the server without --speculative-token-map")  # fmt: skip


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def draft_precision(facts: Facts) -> Iterator[Finding]:
    """Quantisation that the head inherits, or is told."""
    arguments = facts.server.arguments
    target, own = arguments.get("quantization"), arguments.get("speculative_draft_model_quantization")
    told = arguments.get("_speculative_draft_quantization_explicitly_set")
    inherited = own is None if told is None else told is False
    method = own if isinstance(own, str) else target
    if isinstance(method, str) and method != "unquant" and facts.server.engine == "sglang":
        yield _at(facts, _WEIGHTS, WARNING, f"the head is quantised to {method}"
                  + (", which it inherits from the target's" if inherited else ""),
                  "quantization" if own is None else "speculative_draft_model_quantization", "unquant",
                  "--speculative-draft-model-quantization unquant")  # fmt: skip


def draft_kv(facts: Facts) -> Iterator[Finding]:
    """The dtype of the head's KV cache."""
    arguments = facts.server.arguments
    kept, own = arguments.get("kv_cache_dtype"), arguments.get("speculative_draft_kv_cache_dtype")
    in_force = own if isinstance(own, str) else kept
    low = isinstance(in_force, str) and in_force not in ("auto", "bf16", "bfloat16", "float16", "fp16")
    if low and facts.server.engine == "vllm":
        yield _at(facts, _KV, WARNING, f"the head's KV cache is {in_force} as the target's", "kv_cache_dtype", "auto",
                  "start the server without --kv-cache-dtype")  # fmt: skip
    elif low and facts.server.engine == "sglang":
        yield _at(facts, _KV, WARNING, f"the head's KV cache is {in_force} without calibrated scales"
                  + ("" if own else ", as the target's"), "speculative_draft_kv_cache_dtype" if own else
                  "kv_cache_dtype", "bf16", "--speculative-draft-kv-cache-dtype bf16")  # fmt: skip


def dtype(facts: Facts) -> Iterator[Finding]:
    """What the engine computes the head in, against the target."""
    if facts.server.engine != "sglang":
        return
    stated = facts.server.arguments.get("dtype")
    if facts.target.runs_in_bf16:
        return  # whatever the configs and --dtype say, of the head too
    if isinstance(stated, str) and stated != "auto":
        yield from _beyond_fp16(facts, _SHORT.get(stated, stated))
        return
    draft, own, other = facts.draft.stated, stated_dtype(facts.draft.stated), facts.target.dtype
    seen = _in_force(own, draft.text("model_type") or "")
    wanted = _in_force(other, facts.target.language_type)
    if any(name is not None and name not in _SHORT and name not in _WIDE for name in (own, other)):
        return  # a name that SGLang stops at
    if seen != wanted:
        why = "the config states no dtype" if own is None else f"the config says {own}"
        falls = ", and SGLang takes fp16 for fp32" if own is None or _SHORT.get(own) == "fp32" else ""
        full = {"bf16": "bfloat16", "fp16": "float16"}.get(wanted, wanted)
        yield Finding(_CAST, WARNING, f"{why}{falls}: the head runs in {seen} beside a target in {wanted}", draft.where,
                      "dtype" if draft.has("dtype") else "torch_dtype", own or "absent", full,
                      f'write "torch_dtype": "{full}", or start the server with --dtype {full}')  # fmt: skip
    else:
        yield from _beyond_fp16(facts, seen)


def _beyond_fp16(facts: Facts, dtype: str) -> Iterator[Finding]:
    """Only where the weights were read whole."""
    large = [name for name, extent in (facts.draft.weights.extents or {}).items() if extent.beyond_fp16]
    if large and dtype == "fp16":
        yield Finding(_CAST, ERROR, f"{large[0]} holds numbers that fp16 cannot", facts.draft.weights.file, large[0],
                      "above 65504", "within fp16", "start the server with --dtype bfloat16")  # fmt: skip


def _in_force(stated: str | None, model_type: str) -> str:
    """configs/model_config.py: with --dtype auto, absent is fp32 and fp32 becomes fp16, for Gemma bf16."""
    short = _SHORT.get(stated or "float32", stated or "fp32")
    return short if short != "fp32" else "bf16" if model_type.startswith("gemma") else "fp16"
