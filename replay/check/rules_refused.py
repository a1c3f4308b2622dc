"""Arguments that SGLang refuses beside an EAGLE-3 head, each with its own sentence.

Sources: SGLang 0.5.23 arg_groups/validation_hook.py (check_pipeline_parallel_compat, handle_aux_hidden_state_capture),
attention_hook.py, speculative_hook.py, kv_cache_hook.py, lora_hook.py, parallel_hook.py (handle_dwdp), hicache_hook.py,
cuda_graph_hook.py, hisparse_hook.py, model_path_hook.py (handle_load_format), serving_hook.py,
model_loader/loader.py (_initialize_model), speculative/draft_utils.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from replay.check.facts import Facts
from replay.check.finding import ERROR, Finding
from replay.check.server import Server
from replay.check.server_finding import at, flag
from replay.check.speculation import Speculation, attention_dp, page_size, resolve
from replay.traces.fields import show_name

_ARGUMENT = "config.argument"
_RAGGED = "SGLANG_RAGGED_VERIFY_MODE"
_MODES = ("static", "cap-accept", "compact")
# Attention backends by which an EAGLE head can draft (DraftBackendFactory).
_DRAFTING = ("flashinfer", "triton", "intel_amx", "intel_xpu", "aiter", "fa3", "hybrid_linear_attn", "flashmla",
             "trtllm_mha", "trtllm_mla", "cutedsl_mla", "dsa", "nsa", "ascend", "fa4", "dsv4")  # fmt: skip
_RENAMED = {"compressed": "dsv4", "tokenspeed_mla": "cutedsl_mla"}
_DETERMINISTIC = ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton")
_UNIFORM = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # every layer attends to all tokens
# Attention backends of targets that do not run on all (arg_groups/model_hook.py).
_GEMMA = ("triton", "trtllm_mha", "fa4", "ascend", "intel_xpu", "intel_amx", "aiter")
_BACKENDS = {
    "GptOssForCausalLM": ("triton", "fa3", "fa4", "trtllm_mha", "ascend", "intel_amx", "intel_xpu", "aiter"),
    "Llama4ForCausalLM": ("fa3", "triton", "trtllm_mha", "aiter", "ascend", "intel_xpu"),
    "Llama4ForConditionalGeneration": ("fa3", "triton", "trtllm_mha", "aiter", "ascend", "intel_xpu"),
    "Gemma4ForCausalLM": _GEMMA, "Gemma4ForConditionalGeneration": _GEMMA,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA,
}  # fmt: skip
_GRAPHS = {
    "decode": ("backend", "max_bs", "bs"),
    "prefill": ("backend", "max_bs", "bs", "max_context_size", "full_prefill_max_req",
                "full_prefill_prefix_chunk_tokens", "max_seq_len"),
}  # fmt: skip
_GRAPH_BACKENDS = ("full", "breakable", "disabled")
_WITHOUT = "start the server without {flag}"


@dataclass(frozen=True, slots=True)
class _Pair:
    """An argument that ``stands`` beside speculation and must not: ``why``, after "SGLang stops: "."""

    field: str
    stands: Callable[[Server, Speculation], bool]
    why: str
    expected: str = "absent"
    fix: str = _WITHOUT
    fault: str = _ARGUMENT


def _above(field: str, most: int) -> Callable[[Server, Speculation], bool]:
    return lambda server, drafting: (server.integer(field) or most) > most


def _on(field: str) -> Callable[[Server, Speculation], bool]:
    return lambda server, drafting: server.flag(field)


def _is(field: str, *values: str) -> Callable[[Server, Speculation], bool]:
    return lambda server, drafting: server.text(field) in values


def _tree(field: str) -> Callable[[Server, Speculation], bool]:
    return lambda server, drafting: server.flag(field) and drafting.topk is not None and drafting.topk > 1


def _negative(field: str, least: int) -> Callable[[Server, Speculation], bool]:
    return lambda server, drafting: server.integer(field) is not None and (server.integer(field) or 0) < least


_PAIRS = (
    _Pair("pp_size", _above("pp_size", 1), "pipeline parallelism drafts with EAGLE alone, not with EAGLE3", "1",
          "--pp-size 1, with a larger --tp-size"),
    _Pair("attention_backend", _is("attention_backend", "flex_attention"), "flex_attention cannot draft",
          "fa3, flashinfer or triton", "--attention-backend flashinfer"),
    _Pair("dwdp_size", _above("dwdp_size", 1), "--dwdp-size above 1 cannot draft"),
    _Pair("enable_lmcache", _on("enable_lmcache"), "--enable-lmcache cannot draft"),
    _Pair("weight_cache_mode", _is("weight_cache_mode", "daemon", "client"), "the weight cache holds no head", "off",
          "--weight-cache-mode off"),
    _Pair("enable_return_aux_hidden_states",
          lambda server, drafting: server.flag("enable_return_aux_hidden_states")
          and server.text("speculative_draft_model_path") is not None,
          "--enable-return-aux-hidden-states records taps without a head"),
    _Pair("speculative_draft_window_size", _negative("speculative_draft_window_size", 1),
          "the window of the head is not positive", "at least 1", _WITHOUT, "attn.window"),
    _Pair("speculative_draft_sink_size",
          lambda server, drafting: (server.integer("speculative_draft_sink_size") or 0) < 0
          and server.integer("speculative_draft_window_size") is not None,
          "the sink is negative", "at least 0", _WITHOUT, "attn.window"),
    _Pair("speculative_draft_sink_size",
          lambda server, drafting: server.integer("speculative_draft_sink_size") is not None
          and server.integer("speculative_draft_window_size") is None,
          "a sink needs a window", "absent", _WITHOUT, "attn.window"),
    _Pair("enable_unified_memory", _tree("enable_unified_memory"), "--enable-unified-memory verifies no trees",
          "absent", "--speculative-eagle-topk 1"),
    _Pair("enable_linear_replayssm_spec", _tree("enable_linear_replayssm_spec"),
          "--enable-linear-replayssm-spec verifies no trees", "absent", "--speculative-eagle-topk 1"),
    _Pair("enable_hisparse", _tree("enable_hisparse"), "--enable-hisparse verifies no trees", "absent",
          "--speculative-eagle-topk 1"),
    _Pair("speculative_adaptive",
          lambda server, drafting: server.flag("speculative_adaptive")
          and (server.flag("enable_lora") or bool(server.arguments.get("lora_paths"))),
          "LoRA needs a fixed number of steps"),
    _Pair("dcp_size",
          lambda server, drafting: (server.integer("dcp_size") or 1) > 1 and server.flag("enable_hierarchical_cache"),
          "a hierarchical cache with --dcp-size above 1 cannot draft with EAGLE3", "1", "--dcp-size 1"),
    _Pair("attention_backend",
          lambda server, drafting: server.flag("enable_deterministic_inference")
          and server.text("attention_backend") not in (None, *_DETERMINISTIC),
          "this attention backend is not deterministic", " or ".join(_DETERMINISTIC), "--attention-backend fa3"),
    _Pair("enable_two_batch_overlap",
          lambda server, drafting: server.flag("enable_two_batch_overlap") and attention_dp(server) == 1
          and server.text("moe_a2a_backend") in (None, "none"),
          "two-batch overlap needs attention data parallelism or an all-to-all backend"),
    _Pair("disable_cuda_graph_padding",
          lambda server, drafting: server.flag("disable_cuda_graph_padding") and server.flag("enable_torch_compile"),
          "--enable-torch-compile needs padded CUDA graphs"),
    _Pair("cuda_graph_prefill_max_context", _negative("cuda_graph_prefill_max_context", 1),
          "the context of prefill graphs is not positive", "at least 1"),
    _Pair("cuda_graph_config", lambda server, drafting: not _are_graphs(server.arguments.get("cuda_graph_config", {})),
          "--cuda-graph-config holds what no phase of it takes", "decode and prefill, with their backend and sizes"),
    _Pair("page_size", _negative("page_size", 1), "a KV page holds at least one token", "at least 1", "--page-size 1"),
    _Pair("chunked_prefill_size", lambda server, drafting: _splits_pages(server),
          "the prefill's pieces are no whole number of KV pages", "a multiple of --page-size",
          "--chunked-prefill-size 8192"),
    _Pair("served_model_name", lambda server, drafting: ":" in (server.text("served_model_name") or ""),
          "the served model's name holds a colon", "a name without a colon"),
    _Pair("quantize_and_serve", _on("quantize_and_serve"), "--quantize-and-serve is switched off in this version"),
    _Pair("enable_multi_layer_eagle", _on("enable_multi_layer_eagle"),
          "--enable-multi-layer-eagle builds a head for each step, an EAGLE-3 head is one for all"),
)  # fmt: skip


def refused(facts: Facts) -> Iterator[Finding]:
    """Arguments that cannot stand beside the head. One finding each."""
    server = facts.server
    if server.engine != "sglang" or server.live:
        return
    drafting = resolve(server, facts.target.architecture)
    if drafting.algorithm != "EAGLE3":
        return
    for pair in _PAIRS:
        if pair.stands(server, drafting):
            yield at(facts, pair.fault, ERROR, f"SGLang stops: {pair.why}", pair.field, pair.expected,
                     pair.fix.format(flag=flag(pair.field)))  # fmt: skip
    yield from _for_target(facts, drafting)
    yield from _draft_backend(facts)
    yield from _mode(facts)


def _for_target(facts: Facts, drafting: Speculation) -> Iterator[Finding]:
    """What this target's architecture does not take (arg_groups/model_hook.py, kv_cache_hook.py)."""
    server, name = facts.server, facts.target.architecture or ""
    if server.flag("enable_unified_memory") and name in _UNIFORM and drafting.topk == 1:
        yield at(facts, _ARGUMENT, ERROR, "SGLang stops: --enable-unified-memory drafts for targets of mixed "
                 f"attention, not for {name}", "enable_unified_memory", "absent",
                 "start the server without --enable-unified-memory")  # fmt: skip
    known = _BACKENDS.get(name)
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = server.text(field)
        if known is not None and value in _DRAFTING and value not in known:
            yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {name} does not run on {value}", field,
                     " or ".join(known), f"{flag(field)} {known[0]}")  # fmt: skip
            return


def _splits_pages(server: Server) -> bool:
    """Attention's data parallelism divides the pieces first (parallel_hook.py, handle_data_parallelism)."""
    piece, page = (server.integer("chunked_prefill_size") or -1) // max(attention_dp(server), 1), page_size(server)
    return piece > 0 and page > 0 and piece % page != 0 and server.text("disaggregation_mode") != "decode"


def _are_graphs(config: object) -> bool:
    """model_executor/cuda_graph_config.py, parse_cuda_graph_config_arg."""
    if not isinstance(config, dict) or not config.keys() <= _GRAPHS.keys():
        return False
    return all(
        isinstance(phase, dict)
        and phase.keys() <= set(_GRAPHS[name])
        and phase.get("backend", "full") in _GRAPH_BACKENDS
        for name, phase in config.items()
    )


def _mode(facts: Facts) -> Iterator[Finding]:
    """speculative/ragged_verify.py, read_ragged_verify_mode."""
    mode = facts.server.environment.get(_RAGGED)
    if mode is not None and mode not in _MODES:
        yield Finding(_ARGUMENT, ERROR, f"SGLang stops: {_RAGGED} knows {', '.join(_MODES)}", "environment", _RAGGED,
                      show_name(mode), " or ".join(_MODES), f"unset {_RAGGED}")  # fmt: skip


def _draft_backend(facts: Facts) -> Iterator[Finding]:
    """The backend by which the head attends: its own, else that of the target's prefill, and of its decoding."""
    server, own = facts.server, "speculative_draft_attention_backend"
    parts = (own,) if server.text(own) is not None else ("prefill_attention_backend", "decode_attention_backend")
    shared = server.text("attention_backend")
    for field in parts:
        given = server.text(field)
        value = _RENAMED.get(given or shared or "", given or shared)
        if value is not None and value not in (*_DRAFTING, "flex_attention"):
            yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: no EAGLE head can draft with {show_name(value)}",
                     field if given is not None else "attention_backend", "fa3, flashinfer or triton",
                     f"{flag(own)} flashinfer")  # fmt: skip
            return
