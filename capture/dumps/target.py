"""What a dump lacks and its target's checkpoint has: sizes, embedding, lm_head and the final norm. No layer is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.target_files import fingerprint_target
from replay.errors import CaptureError, TraceError
from replay.traces.fields import Fields, read_json
from replay.traces.header import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, TargetInfo
from replay.traces.tensors import map_rows
from replay.traces.weights import EMBED_NAMES, LM_HEAD_NAMES, find_tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NORM_NAMES = ("model.norm.weight", "language_model.model.norm.weight")
_BIASES = ("model.norm.bias", "language_model.model.norm.bias", "lm_head.bias", "language_model.lm_head.bias")
_INNER = ("text_config", "language_config", "llm_config")  # where a model that also sees keeps its language part
_MOST_CONFIG = 1 << 24
# Fields by which a target scales or caps what a trace takes as it stands, and the value at which they do nothing.
_SCALING: Mapping[str, float | None] = {
    "final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "embedding_multiplier": 1.0,
    "scale_emb": 1.0, "lm_head_multiplier": 1.0, "dim_model_base": None,
}  # fmt: skip
# Targets that add 1 to the weight of a norm, or scale the embedding without a field that says so.
_UNLIKE = ("gemma", "qwen3_next", "qwen3_5", "cohere", "gpt_neox", "gpt2")


@dataclass(frozen=True, slots=True)
class DumpTarget:
    """``embed_VH`` and ``lm_head_VH`` (None where tied) as in the checkpoint, mapped; ``norm_H`` with its epsilon.

    ``output_VH`` are the rows that make logits, in the dtype in which they are multiplied.
    """

    info: TargetInfo
    embed_VH: "Tensor"
    lm_head_VH: "Tensor | None"
    norm_H: "Tensor"
    eps: float
    output_VH: "Tensor"

    def multiplying(self, dtype: "torch.dtype") -> "DumpTarget":
        """Itself for states in ``dtype``: where the checkpoint has another, products are made in float32."""
        return self if self.output_VH.dtype == dtype else replace(self, output_VH=self.output_VH.float())

    def normed(self, rows_SH: "Tensor") -> "Tensor":
        """The final norm of ``rows_SH``, rounded as LlamaRMSNorm does (Transformers 5.24,
        models/llama/modeling_llama.py)."""
        import torch

        wide = rows_SH.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.norm_H.to(rows_SH.dtype) * scaled.to(rows_SH.dtype)


def open_dump_target(folder: Path) -> DumpTarget:
    """Read config.json and the headers of the checkpoint in ``folder``; the weights are mapped.

    Raises CaptureError where something is missing, or where the logits are not lm_head(final).
    """
    if not (folder / "config.json").is_file():
        raise CaptureError(f"{folder} holds no config.json: --target takes the folder of the target's checkpoint")
    config = folder / "config.json"
    whole = Fields(str(config), read_json(config, _MOST_CONFIG, _refuse, follow=True), _refuse)
    text = next((whole.object(name) for name in _INNER if isinstance(whole.values.get(name), dict)), whole)
    _check_plain(text, folder)
    embed, lm_head, norm = (_weight(folder, names) for names in (EMBED_NAMES, LM_HEAD_NAMES, NORM_NAMES))
    if embed is None or norm is None:
        raise CaptureError(
            f"{folder} holds no {EMBED_NAMES[0] if embed is None else NORM_NAMES[0]}: --target takes the folder of the "
            "target's checkpoint, in safetensors"
        )
    tied = _is_tied(whole, text, lm_head is not None, folder)
    info = _info(folder, whole, text, embed, tied)
    if tuple(norm.shape) != (info.hidden_size,) or (not tied and lm_head is not None and lm_head.shape != embed.shape):
        raise CaptureError(f"{folder}: the final norm or lm_head does not fit the embedding {list(embed.shape)}")
    eps = text.number("rms_norm_eps", 0.0, 1.0)
    own = None if tied else lm_head
    return DumpTarget(info, embed, own, norm, eps, embed if own is None else own)


def _refuse(said: str) -> CaptureError:
    return CaptureError(f"{said}: --target takes the folder of the target's checkpoint")


def _check_plain(text: Fields, folder: Path) -> None:
    """Refuse targets whose logits are not lm_head(final), or whose norm or embedding is another."""
    kind = str(text.values.get("model_type", ""))
    unlike = next((name for name in _UNLIKE if kind.startswith(name)), None)
    if unlike is not None:
        raise CaptureError(
            f"{folder} is a {kind} target, whose norms or embedding are not those that an import computes: record it "
            "with replay capture"
        )
    for name, idle in _SCALING.items():
        if text.values.get(name) not in (None, idle):
            raise CaptureError(
                f"{folder}: {name} is {text.values[name]!r}, so logits are not lm_head(final), or the embedding is "
                "scaled: record this target with replay capture"
            )
    if find_tensor(folder, _BIASES) is not None:
        raise CaptureError(f"{folder} has a bias in its norm or lm_head, which a trace cannot hold")


def _weight(folder: Path, names: tuple[str, ...]) -> "Tensor | None":
    try:
        found = find_tensor(folder, names)
        return None if found is None else map_rows(*found)
    except TraceError as error:
        raise CaptureError(f"{error}: --target takes the folder of the target's checkpoint") from error


def _is_tied(whole: Fields, text: Fields, own: bool, folder: Path) -> bool:
    said = [one.values.get("tie_word_embeddings") for one in (text, whole)]
    if not own and False in said:
        raise CaptureError(f"{folder} holds no {LM_HEAD_NAMES[0]}, and its config says it is not tied")
    return not own or True in said


def _info(folder: Path, whole: Fields, text: Fields, embed_VH: "Tensor", tied: bool) -> TargetInfo:
    context: Any = text.values.get("max_position_embeddings")
    names = whole.values.get("architectures")
    rows, width = embed_VH.shape
    if width != text.integer("hidden_size", 1, MAX_WIDTH) or rows > MAX_VOCAB:
        raise CaptureError(f"{folder}: the embedding is {[rows, width]}, the config's hidden_size is another")
    return TargetInfo(
        name=folder.resolve().name,
        path=str(folder.resolve()),
        architecture=str(names[0]) if isinstance(names, list) and names else "unknown",
        model_type=str(text.values.get("model_type", "unknown")),
        layers=text.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=width,
        vocab_size=rows,
        dtype=_name(embed_VH.dtype),
        tie_word_embeddings=tied,
        max_position_embeddings=context if isinstance(context, int) else None,
        fingerprint=fingerprint_target(folder),
    )


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")
