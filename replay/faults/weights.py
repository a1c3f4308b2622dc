"""Faults of what the head is made of: its tensors, and the vocabulary map."""

from dataclasses import replace
from typing import TYPE_CHECKING

from replay.errors import CheckpointError
from replay.faults.change import Change, FaultValueError, Subject, choice, number_of

if TYPE_CHECKING:
    import torch


_FILLS = ("zero", "noise")


# ---- vocabulary and weights ----


def d2t(value: str) -> Change:
    name, _, number = value.partition(":")
    if value not in ("absolute", "identity") and name != "offset":
        raise FaultValueError("vocab.d2t", value, "absolute, identity and offset:N")
    by = number_of("vocab.d2t", number, "absolute, identity and offset:N") if name == "offset" else 0

    def change(subject: Subject) -> Subject:
        import torch

        offsets_W = subject.checkpoint.tensors.get("d2t")
        if offsets_W is None:
            raise CheckpointError(f"draft head {subject.checkpoint.name} drafts over the whole vocabulary, without d2t")
        draft_W = torch.arange(len(offsets_W))
        ids_W = {"absolute": offsets_W.long(), "identity": draft_W}.get(value, draft_W + offsets_W.long() + by)
        return subject.with_tensors({"d2t": ids_W % subject.config.vocab_size - draft_W})

    return change


def overwritten(value: str) -> Change:
    def lm_head(subject: Subject) -> Subject:
        if subject.config.lm_head != "own":
            raise CheckpointError(f"draft head {subject.checkpoint.name} has no lm_head of its own to overwrite")
        return subject.with_behaviour(target_lm_head=True)

    def embed(subject: Subject) -> Subject:
        if "embed_tokens.weight" not in subject.checkpoint.tensors:
            raise CheckpointError(f"draft head {subject.checkpoint.name} has no embed_tokens of its own to choose")
        return replace(subject, own_embedding=True)

    def target_embed(subject: Subject) -> Subject:
        kept = {name: tensor for name, tensor in subject.checkpoint.tensors.items() if name != "embed_tokens.weight"}
        if subject.config.vllms:  # read whatever the engine, as long as it is there
            subject = replace(subject, checkpoint=replace(subject.checkpoint, tensors=kept))
        return replace(subject, own_embedding=False)

    changes = {"lm_head": lm_head, "embed:own": embed, "embed:target": target_embed}
    return choice("weights.overwritten", value, changes)


def missing(value: str) -> Change:
    wanted, colon, fill = value.partition(":")
    if not wanted or fill not in (_FILLS if colon else ("",)):
        raise FaultValueError("weights.missing", value, "a tensor of the head, with :zero or :noise for what it holds")

    def change(subject: Subject) -> Subject:
        names = [name for name in subject.checkpoint.tensors if name in (wanted, f"{wanted}.weight")]
        if not names:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has no tensor {wanted}; it has "
                f"{', '.join(sorted(subject.checkpoint.tensors))}"
            )
        return subject.with_tensors(
            {name: _unloaded(name, subject.checkpoint.tensors[name], zero=fill == "zero") for name in names}
        )

    return change


def _unloaded(name: str, tensor: "torch.Tensor", *, zero: bool) -> "torch.Tensor":
    """What a tensor holds that no checkpoint filled: norms 1, biases and maps 0, matrices noise of deviation 0.02 as
    after an initialisation, or ``zero`` as memory is that nobody has used before."""
    import torch

    if name.endswith(".bias") or name in ("d2t", "t2d") or (zero and tensor.ndim > 1):
        return torch.zeros_like(tensor)
    if tensor.ndim == 1:
        return torch.ones_like(tensor)
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    return noise.to(tensor.dtype)


def layout(value: str) -> Change:
    return choice("weights.layout", value, {"qkv-interleaved": _interleave_qkv})


def _interleave_qkv(subject: Subject) -> Subject:
    """Rows that lie group by group (its queries, its key, its value) read as all queries, all keys, all values."""
    import torch

    if subject.config.latent is not None:
        raise CheckpointError(
            f"draft head {subject.checkpoint.name} has latent attention, without rows of q, k and v that could be "
            "stacked; leave weights.layout away"
        )
    config, width = subject.config, subject.config.head_dim
    per_group = config.num_heads // config.num_kv_heads
    changes: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            names = [f"layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            if names[0] not in subject.checkpoint.tensors:
                continue
            q, k, v = (subject.checkpoint.tensors[name] for name in names)
            groups = zip(q.split(per_group * width), k.split(width), v.split(width), strict=True)
            stacked = torch.cat([torch.cat(group) for group in groups])
            changes |= dict(zip(names, stacked.split([len(q), len(k), len(v)]), strict=True))
    return subject.with_tensors(changes)
