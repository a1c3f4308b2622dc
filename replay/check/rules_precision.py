"""Rules on the numbers that the head is computed in. Sources: SGLang 0.5.23 configs/model_config.py,
mem_cache/kv_cache_dtype.py, arg_groups/serving_hook.py (handle_missing_default_values), model_loader/weight_utils.py
(get_quant_config) and layers/quantization/."""

from collections.abc import Iterator

from replay.check.facts import Facts, stated_dtype
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.server_finding import at
from replay.check.speculation import drafts
from replay.traces.fields import show_name

_KV, _WEIGHTS, _CAST = "precision.draft-kv", "precision.draft-weights", "precision.dtype-cast"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32", "bf16": "bf16",
          "fp16": "fp16", "fp32": "fp32"}  # fmt: skip
_FULL = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WIDE = ("float64", "double")
# What becomes of a head that is not quantised, under each method of --speculative-draft-model-quantization, which
# falls back to --quantization. tests/check/test_engine.py builds one under each.
STOPS = ("auto-round", "awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin", "mlx_q4", "mlx_q8",
         "modelopt_mixed", "modelslim", "moe_wna16", "mxfp_w4a8", "petit_nvfp4", "quark")  # fmt: skip
SPARES = ("modelopt_fp4", "mxfp4", "nvfp4_online", "unquant")  # experts alone are quantised, and a head has none
MISREADS = ("gguf", "w4afp8", "w8a8_int8")  # its weights are taken for ones that are quantised already
_NO_FP32 = ("fp8", "mxfp8", "w8a8_fp8")
_OWN, _SHARED = "speculative_draft_model_quantization", "quantization"


def draft_precision(facts: Facts) -> Iterator[Finding]:
    """Quantisation that the head inherits, or is told."""
    server, draft = facts.server, facts.draft
    states = bool(draft.config.values.get("quantization_config") or draft.config.values.get("compression_config"))
    method = show_name(server.text(_OWN) or server.text(_SHARED) or "") or None
    if method is not None and not states and server.engine == "sglang" and drafts(server):
        yield from _told(facts, method)


def _told(facts: Facts, method: str) -> Iterator[Finding]:
    """A head whose own config says nothing of quantisation."""
    told = facts.server.arguments.get("_speculative_draft_quantization_explicitly_set")
    inherited = facts.server.text(_OWN) is None if told is None else told is False
    field = _SHARED if facts.server.text(_OWN) is None else _OWN
    why = ", which it inherits from the target's" if inherited else ""
    fix = "--speculative-draft-model-quantization unquant"
    if method in SPARES or (told is True and facts.server.text(_OWN) is None):  # a server in force says unquant so
        return
    if method in STOPS:
        yield at(facts, _WEIGHTS, ERROR, f"SGLang stops: the head is not quantised to {method}{why}", field, "unquant",
                 fix)  # fmt: skip
    elif method in MISREADS:
        yield at(facts, _WEIGHTS, ERROR, f"the head's weights are taken for weights in {method}{why}; they are not",
                 field, "unquant", fix)  # fmt: skip
    elif _SHORT.get(facts.server.text("dtype") or "") == "fp32" and method in _NO_FP32:
        yield at(facts, _WEIGHTS, ERROR, f"SGLang stops: {method} computes in no fp32, and the head is quantised to it"
                 f"{why}", field, "unquant", fix)  # fmt: skip
    else:
        yield at(facts, _WEIGHTS, WARNING, f"the head is quantised to {method}{why}", field, "unquant", fix)


def draft_kv(facts: Facts) -> Iterator[Finding]:
    """The dtype of the head's KV cache."""
    server = facts.server
    own, kept = "speculative_draft_kv_cache_dtype", "kv_cache_dtype"
    field = own if server.text(own) is not None else kept
    in_force = show_name(server.text(field) or "auto")
    low = in_force not in ("auto", "bf16", "bfloat16", "float16", "fp16") and drafts(server)
    if low and server.engine == "vllm":
        yield at(facts, _KV, WARNING, f"the head's KV cache is {in_force} as the target's", kept, "auto",
                 "start the server without --kv-cache-dtype")  # fmt: skip
    elif low and server.engine == "sglang":
        yield at(facts, _KV, WARNING, f"the head's KV cache is {in_force} without calibrated scales"
                 + ("" if field == own else ", as the target's"), field, "bf16",
                 "--speculative-draft-kv-cache-dtype bf16")  # fmt: skip


def dtype(facts: Facts) -> Iterator[Finding]:
    """What the engine computes the head in, against the target."""
    if facts.server.engine != "sglang":
        return
    if facts.target.runs_in_bf16:
        return  # whatever the configs and --dtype say, of the head too
    stated = facts.server.text("dtype")
    draft, own, other = facts.draft.stated, stated_dtype(facts.draft.stated), facts.target.dtype
    seen = _in_force(own, draft.text("model_type") or "")
    wanted = _in_force(other, facts.target.language_type)
    odd = any(name is not None and name not in _SHORT and name not in _WIDE for name in (own, other))
    if stated is not None and stated != "auto":
        yield from _told_dtype(facts, _SHORT.get(stated, stated), own, other)
    elif odd:
        return  # a name that SGLang stops at
    elif seen != wanted:
        why = "the config states no dtype" if own is None else f"the config says {own}"
        falls = ", and SGLang takes fp16 for fp32" if own is None or _SHORT.get(own) == "fp32" else ""
        full = _FULL.get(wanted, wanted)
        yield Finding(_CAST, WARNING, f"{why}{falls}: the head runs in {seen} beside a target in {wanted}", draft.where,
                      "dtype" if draft.has("dtype") else "torch_dtype", own or "absent", full,
                      f'write "torch_dtype": "{full}", or start the server with --dtype {full}')  # fmt: skip
    else:
        yield from _beyond_fp16(facts, seen)


def _told_dtype(facts: Facts, used: str, own: str | None, other: str | None) -> Iterator[Finding]:
    """--dtype holds for head and target alike, whatever their configs say."""
    beyond = list(_beyond_fp16(facts, used))
    saved = [name for name, dtype in (("head", own), ("target", other)) if _SHORT.get(dtype or "") == "bf16"]
    if beyond or used != "fp16" or not saved or facts.target.config.values.get("quantization_config"):
        yield from beyond
        return
    yield at(facts, _CAST, WARNING, f"--dtype computes head and target in fp16, the {' and the '.join(saved)} "
             f"{'were' if len(saved) > 1 else 'was'} saved in bf16", "dtype", "bfloat16", "--dtype bfloat16, or start "
             "the server without --dtype")  # fmt: skip


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
