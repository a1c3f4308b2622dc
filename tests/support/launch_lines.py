"""Launch lines for one small pair, whose truth SGLang's own code gives (tests/rig/launched.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.check_cases import draft_config, target_config, write
from support.heads import random_tensors

from replay.checkpoint.config import parse_config

# Both configs with all that SGLang needs of them: a model type, an activation, and heads that several GPUs can share.
HEAD = {"model_type": "llama", "hidden_act": "silu", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
        "intermediate_size": 64, "max_position_embeddings": 131072}  # fmt: skip
TARGET = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 64, "rms_norm_eps": 1e-5,
          "hidden_act": "silu", "max_position_embeddings": 131072}  # fmt: skip
PATHS = "--model-path {target} --speculative-draft-model-path {head}"
EAGLE3 = f"{PATHS} --speculative-algorithm EAGLE3"
CHAIN = f"{EAGLE3} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = f"{EAGLE3} --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 48}
WIDE = {"hidden_size": 48, "intermediate_size": 48}
FULL = {"draft_vocab_size": 96}  # a head over the target's whole vocabulary
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 4}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
           "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 128,
           "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}  # fmt: skip
YARN = '{{"rope_scaling": {{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}}}'


@dataclass(frozen=True)
class Launch:
    """``line`` with places for the two folders; ``head`` and ``target`` change the configs."""

    line: str
    head: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The folders of head and target."""
        config = draft_config(**{**HEAD, **self.head})
        tensors = random_tensors(parse_config(config))
        if config["draft_vocab_size"] == config["vocab_size"]:
            tensors.pop("d2t", None)
        return (
            write(folder / "head", config, tensors),
            write(folder / "target", target_config(**{**TARGET, **self.target})),
        )


# SGLang stops at each, in its parser, its resolution, its checks, or where it builds the head.
STOPPED: dict[str, Launch] = {
    # ---- the parser ----
    "steps with a fraction": Launch(EAGLE3 + " --speculative-num-steps 3.5"),
    "steps that are no number": Launch(EAGLE3 + " --speculative-num-steps three"),
    "no value": Launch(EAGLE3 + " --speculative-num-steps"),
    "a flag with a value": Launch(CHAIN + " --trust-remote-code=1"),
    "dtype that is none": Launch(CHAIN + " --dtype int7"),
    "dtype as torch spells it": Launch(CHAIN + " --dtype torch.bfloat16"),
    "dtype in capitals": Launch(CHAIN + " --dtype BF16"),
    "KV dtype of another engine": Launch(CHAIN + " --kv-cache-dtype fp8"),
    "quantisation that is none": Launch(CHAIN + " --quantization int4"),
    "load format that is none": Launch(CHAIN + " --load-format hf"),
    "attention mode that is none": Launch(CHAIN + " --speculative-attention-mode draft"),
    "underscores in a name": Launch(CHAIN + " --tp_size 2"),
    "a slip in a name": Launch(EAGLE3 + " --speculative-nun-steps 3"),
    "an option of vLLM": Launch(CHAIN + " --tensor-parallel 2 --max-model-len 4096"),
    "a name cut too short": Launch(EAGLE3 + " --speculative-num 3"),
    "a name that has become two": Launch(CHAIN + " --cuda-graph-max-bs 16"),
    "a stray word": Launch(CHAIN + " extra"),
    "context with a suffix that is none": Launch(CHAIN + " --context-length 8K"),
    "context with a fraction": Launch(CHAIN + " --context-length 8.5Ki"),
    "window with a fraction": Launch(CHAIN + " --speculative-draft-window-size 1e3"),
    "threshold that is no number": Launch(CHAIN + " --speculative-accept-threshold-single high"),
    # ---- depth ----
    "steps alone": Launch(EAGLE3 + " --speculative-num-steps 3"),
    "steps and tokens without topk": Launch(
        EAGLE3 + " --speculative-num-steps 3 --speculative-num-draft-tokens 4"),
    "topk alone": Launch(EAGLE3 + " --speculative-eagle-topk 4"),
    "tokens alone": Launch(EAGLE3 + " --speculative-num-draft-tokens 4"),
    "adaptive with other steps": Launch(EAGLE3 + " --speculative-adaptive --speculative-num-steps 4"),
    "adaptive dropped beside a tree": Launch(EAGLE3 + " --speculative-adaptive --speculative-eagle-topk 4"),
    "chosen tree on trtllm_mha": Launch(EAGLE3 + " --attention-backend trtllm_mha"),
    "tree on trtllm_mha for decoding": Launch(TREE + " --decode-attention-backend trtllm_mha"),
    "tree with pages on fa4": Launch(TREE + " --page-size 64 --attention-backend fa4"),
    "tree on flashmla, whose pages hold 64": Launch(TREE + " --attention-backend flashmla"),
    # ---- algorithm ----
    "algorithm with a hyphen": Launch(CHAIN + " --speculative-algorithm EAGLE-3"),
    "algorithm of another name": Launch(CHAIN + " --speculative-algorithm MEDUSA"),
    # ---- acceptance ----
    "rejection sampling on a tree": Launch(TREE + " --speculative-use-rejection-sampling", FULL),
    "rejection sampling on the chosen tree": Launch(EAGLE3 + " --speculative-use-rejection-sampling", FULL),
    "rejection sampling with a threshold": Launch(
        CHAIN + " --speculative-use-rejection-sampling --speculative-accept-threshold-acc 0.9", FULL),
    "block verification on the chosen tree": Launch(EAGLE3 + " --speculative-use-block-verification", FULL),
    # ---- what excludes a head ----
    "pipeline parallelism": Launch(CHAIN + " --pp-size 2"),
    "flex attention": Launch(CHAIN + " --attention-backend flex_attention"),
    "LMCache": Launch(CHAIN + " --enable-lmcache"),
    "weight cache": Launch(CHAIN + " --weight-cache-mode client"),
    "capture with a head": Launch(CHAIN + " --enable-return-aux-hidden-states"),
    "negative window": Launch(CHAIN + " --speculative-draft-window-size -4"),
    "window of nothing": Launch(CHAIN + " --speculative-draft-window-size 0"),
    "sink without a window": Launch(CHAIN + " --speculative-draft-sink-size 4"),
    "sink of nothing without a window": Launch(CHAIN + " --speculative-draft-sink-size 0"),
    "negative sink": Launch(CHAIN + " --speculative-draft-window-size 64 --speculative-draft-sink-size -1"),
    "tree in unified memory": Launch(TREE + " --enable-unified-memory"),
    "two-batch overlap": Launch(CHAIN + " --enable-two-batch-overlap"),
    "LoRA with adaptive steps": Launch(
        EAGLE3 + " --speculative-adaptive --enable-lora --lora-paths a=b"),
    "DCP with a hierarchical cache": Launch(CHAIN + " --tp-size 2 --dcp-size 2 --enable-hierarchical-cache"),
    "no deterministic backend": Launch(CHAIN + " --enable-deterministic-inference --attention-backend flashmla"),
    "compiled without padding": Launch(CHAIN + " --disable-cuda-graph-padding --enable-torch-compile"),
    "graphs of another phase": Launch(CHAIN + """ --cuda-graph-config '{{"verify": {{"max_bs": 4}}}}'"""),
    "graphs with another key": Launch(CHAIN + """ --cuda-graph-config '{{"decode": {{"sizes": [1, 2]}}}}'"""),
    "graphs by a backend that is gone": Launch(
        CHAIN + """ --cuda-graph-config '{{"prefill": {{"backend": "tc_piecewise"}}}}'"""),
    "graphs that are a list": Launch(CHAIN + " --cuda-graph-config '[1, 2]'"),
    "graphs for no context": Launch(CHAIN + " --cuda-graph-prefill-max-context 0"),
    "pages of nothing": Launch(CHAIN + " --page-size 0"),
    "pieces that split pages": Launch(CHAIN + " --chunked-prefill-size 100 --page-size 64"),
    "name with a colon": Launch(CHAIN + " --served-model-name llama:8b"),
    "quantise and serve": Launch(CHAIN + " --quantize-and-serve --quantization modelopt_fp4"),
    "verify mode that is none": Launch("SGLANG_RAGGED_VERIFY_MODE=dynamic " + CHAIN),
    "a head for each step": Launch(CHAIN + " --enable-multi-layer-eagle"),
    "prefill coordination with many layers": Launch(
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION=1 " + CHAIN + " --enable-multi-layer-eagle"),
    "unified memory for a plain target": Launch(CHAIN + " --enable-unified-memory"),
    # ---- shares ----
    "more GPUs than heads": Launch(CHAIN + " --tp-size 16"),
    "six heads on eight GPUs": Launch(CHAIN + " --tp-size 8", SIX, WIDE),
    "six heads on four GPUs": Launch(CHAIN + " --tp 4", SIX, WIDE),
    "key-value heads that do not divide": Launch(
        CHAIN + " --tensor-parallel-size 4", SIX | {"num_attention_heads": 12, "num_key_value_heads": 3}, WIDE),
    "three GPUs": Launch(CHAIN + " --tp-size 3"),
    "MLP that does not divide": Launch(CHAIN + " --tp-size 4", {"intermediate_size": 66}),
    "groups of attention that do not divide": Launch(CHAIN + " --tp-size 4 --attn-dp-size 3"),
    "as it was spelled before": Launch(CHAIN + " --tp-size 4 --dp-size 3 --enable-dp-attention"),
    "replicas and groups": Launch(CHAIN + " --tp-size 2 --dp-size 2 --attn-dp-size 2"),
    "no groups": Launch(CHAIN + " --attn-dp-size 0"),
    "no GPUs": Launch(CHAIN + " --tp-size 0"),
    "shares of experts": Launch(CHAIN + " --tp-size 4 --ep-size 3"),
    "nodes that do not divide": Launch(CHAIN + " --tp-size 4 --nnodes 3"),
    "dense layers on three GPUs": Launch(CHAIN + " --tp-size 4 --moe-dense-tp-size 3"),
    # ---- configs ----
    "context beyond the target's": Launch(CHAIN + " --context-length 262144", {"max_position_embeddings": 524288}),
    "context beyond the head's": Launch(CHAIN + " --context-length 65536", {"max_position_embeddings": 8192}),
    "override that is no number": Launch(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=on " + CHAIN, {"max_position_embeddings": 8192}),
    "override that is no JSON": Launch(CHAIN + " --json-model-override-args '{{rope}}'"),
    "override that is no object": Launch(CHAIN + " --json-model-override-args '[1]'"),
    "override of a text config": Launch(
        CHAIN + """ --json-model-override-args '{{"text_config": {{"rope_theta": 5}}}}'"""),
    "head inherits AWQ": Launch(
        CHAIN + " --quantization awq", {},
        {"torch_dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,
                                                           "zero_point": True}}),
    "head inherits GPTQ": Launch(
        CHAIN + " --quantization gptq_marlin", {},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False,
                                 "sym": True}}),
    "head inherits compressed tensors": Launch(CHAIN + " --speculative-draft-model-quantization compressed-tensors"),
    "gpt-oss on FlashInfer": Launch(CHAIN + " --attention-backend flashinfer", {}, GPT_OSS),
    "fp8 in fp32": Launch(CHAIN + " --dtype float32 --speculative-draft-model-quantization fp8"),
    "head told to be ModelOpt": Launch(CHAIN + " --speculative-draft-model-quantization modelopt_mixed"),
}  # fmt: skip

# SGLang starts; what it drafts and computes in is compared.
STARTED: dict[str, Launch] = {
    "nothing chosen, Llama": Launch(EAGLE3),
    "nothing chosen, Qwen 3": Launch(EAGLE3, {}, QWEN),
    "steps and topk 1": Launch(EAGLE3 + " --speculative-num-steps 3 --speculative-eagle-topk 1"),
    "one step of 16 tokens": Launch(
        EAGLE3 + " --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 16"),
    "a tree without more": Launch(TREE),
    "adaptive": Launch(EAGLE3 + " --speculative-adaptive"),
    "adaptive from five steps": Launch(
        EAGLE3 + " --speculative-adaptive --speculative-num-steps 5 --speculative-num-draft-tokens 16"),
    "adaptive dropped beside attention groups": Launch(
        EAGLE3 + " --speculative-adaptive --tp-size 2 --attn-dp-size 2", {}, QWEN),
    "zero steps": Launch(EAGLE3 + " --speculative-num-steps 0 --speculative-eagle-topk 1"),
    "algorithm in small letters": Launch(CHAIN.replace("EAGLE3", "eagle3")),
    "no algorithm": Launch(PATHS + " --speculative-num-steps 3"),
    "algorithm NONE": Launch(CHAIN + " --speculative-algorithm NONE"),
    "algorithm EAGLE": Launch(CHAIN + " --speculative-algorithm EAGLE"),
    "algorithm NEXTN": Launch(CHAIN + " --speculative-algorithm nextn"),
    "algorithm STANDALONE": Launch(CHAIN + " --speculative-algorithm STANDALONE"),
    "algorithm NGRAM": Launch(CHAIN + " --speculative-algorithm NGRAM"),
    "last algorithm counts": Launch(PATHS + " --speculative-algorithm NGRAM --speculative-algorithm EAGLE3"),
    "names cut short": Launch(
        PATHS + " --speculative-algo EAGLE3 --speculative-num-st 2 --speculative-eagle 1 --tp 2"),
    "values behind equal signs": Launch(EAGLE3 + " --speculative-num-steps=4 --speculative-eagle-topk=1 --tp=4"),
    "float16": Launch(CHAIN + " --dtype float16"),
    "half": Launch(CHAIN + " --dtype half"),
    "float32": Launch(CHAIN + " --dtype float32"),
    "context in thousands": Launch(CHAIN + " --context-length 8k"),
    "context in powers of two": Launch(CHAIN + " --context-length 32Ki"),
    "longer than the head, allowed": Launch(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 " + CHAIN, {"max_position_embeddings": 8192}),
    "gpt-oss on Triton": Launch(EAGLE3 + " --attention-backend triton", {}, GPT_OSS),
    "an override of nothing": Launch(CHAIN + " --json-model-override-args '[]'"),
    "YaRN for both": Launch(CHAIN + f" --json-model-override-args '{YARN}'"),
    "YaRN by its old name": Launch(CHAIN + f" --json-model-override-args '{YARN.replace('rope_type', 'type')}'"),
    "YaRN among rope parameters": Launch(
        CHAIN + f" --json-model-override-args '{YARN.replace('rope_scaling', 'rope_parameters')}'"),
    "linear scaling": Launch(
        CHAIN + """ --json-model-override-args '{{"rope_scaling": {{"rope_type": "linear", "factor": 2.0}}}}'"""),
    "theta in the rope parameters": Launch(
        CHAIN + """ --json-model-override-args '{{"rope_parameters": {{"rope_theta": 77.0}}}}'"""),
    "theta beside them": Launch(CHAIN + """ --json-model-override-args '{{"rope_theta": 77.0}}'"""),
    "no rope": Launch(CHAIN + """ --json-model-override-args '{{"rope_scaling": null}}'"""),
    "longer both": Launch(
        CHAIN + """ --json-model-override-args '{{"max_position_embeddings": 262144}}'""",
        {"max_position_embeddings": 8192}),
    "layers of both": Launch(CHAIN + """ --json-model-override-args '{{"num_hidden_layers": 4}}'"""),
    "fp8 for both": Launch(CHAIN + " --quantization fp8"),
    "fp8 for the target": Launch(CHAIN + " --quantization fp8 --speculative-draft-model-quantization unquant"),
    "nvfp4 online": Launch(CHAIN + " --speculative-draft-model-quantization nvfp4_online"),
    "modelopt_fp4": Launch(CHAIN + " --speculative-draft-model-quantization modelopt_fp4"),
    "mxfp8 for the head": Launch(CHAIN + " --speculative-draft-model-quantization mxfp8"),
    "int8 for the head": Launch(CHAIN + " --speculative-draft-model-quantization w8a8_int8"),
    "attention groups": Launch(CHAIN + " --tp-size 16 --attn-dp-size 2", {}, QWEN),
    "heads that groups can share": Launch(
        CHAIN + " --tp-size 12 --attn-dp-size 2", SIX,
        {**WIDE, **QWEN, "num_attention_heads": 12, "num_key_value_heads": 6}),
    "fewer key-value heads than GPUs": Launch(CHAIN + " --tp-size 8", {"num_key_value_heads": 2}),
    "lenient thresholds": Launch(
        CHAIN + " --speculative-accept-threshold-single 0.8 --speculative-accept-threshold-acc 0.9"),
    "EAGLE's token map": Launch(CHAIN + " --speculative-token-map map.pt"),
}  # fmt: skip

# As documents and cookbooks write them; nothing is wrong with any for this pair.
SOUND: tuple[str, ...] = (
    CHAIN,
    TREE,
    EAGLE3,
    f"{EAGLE3} --speculative-num-steps 3 --speculative-eagle-topk 1",
    f"{EAGLE3} --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 "
    "--mem-fraction 0.6",
    f"{EAGLE3} --speculative-num-steps 6 --speculative-eagle-topk 10 --speculative-num-draft-tokens 32 "
    "--mem-fraction-static 0.75 --cuda-graph-max-bs-decode 2 --dtype bfloat16",
    f"{CHAIN} --tp 8 --trust-remote-code --host 0.0.0.0 --port 30000",
    f"{CHAIN} --tp-size 4 --mem-fraction-static 0.85 --max-running-requests 64 --log-level info",
    f"{CHAIN} --context-length 32768 --chunked-prefill-size 8192 --max-prefill-tokens 16k",
    f"{CHAIN} --attention-backend fa3 --page-size 64",
    f"{CHAIN} --attention-backend flashinfer --disable-radix-cache",
    f"{CHAIN} --attention-backend triton --disable-overlap-schedule",
    f"{CHAIN} --attention-backend trtllm_mha --page-size 64",
    f"{CHAIN} --prefill-attention-backend fa4 --decode-attention-backend fa3",
    f"{CHAIN} --attention-backend torch_native --speculative-draft-attention-backend flashinfer",
    f"{TREE} --attention-backend fa3 --page-size 16",
    f"{TREE} --attention-backend flashinfer --speculative-attention-mode decode",
    f"{CHAIN} --enable-mixed-chunk --schedule-policy lpm --schedule-conservativeness 0.3",
    f"{CHAIN} --enable-metrics --enable-request-time-stats-logging --decode-log-interval 10",
    f"{CHAIN} --reasoning-parser qwen3 --tool-call-parser qwen --served-model-name my-model",
    f"{CHAIN} --quantization fp8 --speculative-draft-model-quantization unquant",
    f"{CHAIN} --quantization modelopt_fp4 --kv-cache-dtype bfloat16",
    f"{CHAIN} --kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype bf16",
    f"{CHAIN} --cuda-graph-backend-prefill disabled --cuda-graph-bs-decode 1 2 4 8",
    CHAIN + """ --cuda-graph-config '{{"decode": {{"max_bs": 16}}, "prefill": {{"backend": "disabled"}}}}'""",
    f"{CHAIN} --disable-cuda-graph --skip-server-warmup --random-seed 42",
    f"{CHAIN} --enable-deterministic-inference --attention-backend fa3",
    f"{CHAIN} --tp-size 8 --ep-size 8 --moe-a2a-backend none --enable-eplb",
    f"{CHAIN} --dp-size 2 --tp-size 4",
    f"{CHAIN} --disaggregation-mode decode --disaggregation-transfer-backend nixl",
    f"{CHAIN} --enable-hierarchical-cache --hicache-ratio 2",
    f"{EAGLE3} --speculative-adaptive --speculative-num-steps 3",
    f"{EAGLE3.replace('EAGLE3', 'eagle3')} --speculative-num-steps=3 --speculative-eagle-topk=1",
    f"{CHAIN} --speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1",
    f"{CHAIN} --grammar-backend xgrammar --sampling-backend flashinfer --constrained-json-whitespace-pattern x",
    f"SGLANG_ENABLE_SPEC_V2=1 CUDA_VISIBLE_DEVICES=0,1,2,3 {CHAIN} --tp-size 4",
    f"SGLANG_SIMULATE_ACC_LEN=-1 SGLANG_SIMULATE_ACC_METHOD=multinomial {CHAIN}",
)  # fmt: skip
