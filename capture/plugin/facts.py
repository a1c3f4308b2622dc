"""What a recording server says of its target and of itself, as the trace's header keeps it. Imports no engine."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay.capture.target_files import fingerprint_target
from replay.errors import CaptureError
from replay.traces.fields import parse_json

# server arguments that decide numbers or rounds; others stay where they are (some are secrets)
ARGUMENTS = (
    "device", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size", "ep_size", "pp_size",
    "enable_dp_attention", "attention_backend", "page_size", "chunked_prefill_size", "enable_mixed_chunk",
    "disable_radix_cache", "disable_overlap_schedule", "disable_cuda_graph", "max_running_requests", "context_length",
    "enable_deterministic_inference", "enable_fp32_lm_head", "random_seed", "tokenizer_path", "served_model_name",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
    "speculative_use_rejection_sampling", "speculative_attention_mode", "speculative_draft_attention_backend",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "speculative_draft_window_size",
    "speculative_adaptive", "model_path", "revision",
)  # fmt: skip
_SECRET = ("key", "password", "token", "secret", "salt")
_NOT_SECRET = ("--speculative-num-draft-tokens", "--max-total-tokens", "--speculative-token-map", "--tokenizer-path")
_SECRET_OPTIONS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")  # argparse takes beginnings of them
_LEAST = ("--ap", "--ad", "--ssl-keyfile-p")  # shorter ones it refuses, being ambiguous


def target_info(
    config: Any, architecture: str, model_path: str, hidden_size: int, vocab_size: int, dtype: str
) -> dict[str, Any]:
    """The fields of traces.header.TargetInfo, from the target's (text) config."""
    context = getattr(config, "max_position_embeddings", None)
    folder = _folder(config, model_path)
    return {
        "name": Path(model_path).name if Path(model_path).is_dir() else model_path,
        "path": model_path if folder is None else str(folder),
        "architecture": architecture,
        "model_type": str(getattr(config, "model_type", "")),
        "layers": int(config.num_hidden_layers),
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "max_position_embeddings": None if context is None else int(context),
        "fingerprint": _fingerprint(config, model_path, folder),
    }


def _folder(config: Any, model_path: str) -> Path | None:
    """Where the checkpoint lies: the folder that was typed, or the hub id's snapshot that the server loaded."""
    if Path(model_path).is_dir():
        return Path(model_path).resolve()
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(model_path, revision=getattr(config, "_commit_hash", None), local_files_only=True)
        )
    except (ImportError, OSError, ValueError):  # no hub id, or in no cache of this process
        return None


def _fingerprint(config: Any, model_path: str, folder: Path | None) -> str:
    """Of the checkpoint where it lies in a folder; else of the name and config alone."""
    if folder is not None:
        try:
            return fingerprint_target(folder)
        except (CaptureError, OSError):
            pass  # another kind of weights: the config must do
    return hashlib.sha256(f"{model_path}\n{config.to_json_string()}".encode()).hexdigest()


def server_url(arguments: Mapping[str, Any]) -> str:
    """Where a server with these (resolved) arguments is asked, from the machine it runs on; SGLang's own defaults."""
    scheme = "https" if arguments.get("ssl_certfile") else "http"
    host = str(arguments.get("host") or "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    port = arguments.get("port") or 30000
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_details(arguments: Mapping[str, Any], typed: Sequence[str], versions: Mapping[str, str]) -> dict[str, str]:
    """What is kept of resolved ``arguments``, of those ``typed``, of the draft's config and of ``versions``."""
    details = dict(versions)
    details["launch_arguments"] = " ".join(without_secrets(typed))
    for name in ARGUMENTS:
        value = arguments.get(name)
        if value is not None:
            details[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    draft = arguments.get("speculative_draft_model_path")
    if isinstance(draft, str):
        path = Path(draft) / "config.json"
        try:
            details["draft_config"] = json.dumps(parse_json(path.read_bytes(), str(path), ValueError))
        except (OSError, ValueError):
            details["draft_config"] = ""  # a hub id, or no JSON; the server has read it somehow
        try:
            details["draft_fingerprint"] = fingerprint_target(Path(draft))  # a head may be replaced under its name
        except (CaptureError, OSError):
            pass
    return details


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the value of every option that sounds secret replaced by ***."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        secret = _is_secret(option)
        if secret and equals:
            shown.append(f"{option}=***")
        else:
            shown.append("***" if hide and not argument.startswith("--") else argument)
        hide = secret and not equals
    return shown


def _is_secret(option: str) -> bool:
    if option.startswith(_LEAST) and any(full.startswith(option) for full in _SECRET_OPTIONS):
        return True
    return option.startswith("--") and option not in _NOT_SECRET and any(word in option.lower() for word in _SECRET)
