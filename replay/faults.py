"""Faults: what served heads suffer from, as small named changes of what is replayed. One table, ``FAULTS``.

A fault is spelled KIND or KIND=VALUE (``kv.rollback=stale``); several at once are joined by ``+``. Each kind turns its
value into a change of a ``Subject``, before any tensor runs; conduct.py says what the changed fields mean, and the
twin plays every one of them as well. To add a kind: a function from value to change, and its line in the table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.conduct import Conduct
from replay.errors import CheckpointError, UsageError, WiringError
from replay.traces.taps import tap_index, tap_name
from replay.weights import Checkpoint, HeadConfig, Rope
from replay.wiring import Wiring, default_wiring

if TYPE_CHECKING:
    import torch

NONE = "none"
_NORMS = ("input_norm", "fc_norm", "hidden_norm", "input_layernorm", "post_attention_layernorm", "norm")


@dataclass(frozen=True, slots=True)
class Subject:
    """What a fault changes: the taps fed, the head, how the engine runs it, whose embedding it reads (None: as the
    engine does), and how trees lay out their KV. ``layers`` counts the target's."""

    wiring: Wiring
    checkpoint: Checkpoint
    conduct: Conduct
    layers: int
    own_embedding: bool | None = None
    tree_kv: str | None = None

    @property
    def config(self) -> HeadConfig:
        """The head's config."""
        return self.checkpoint.config

    def conducted(self, **changes: object) -> "Subject":
        """With some fields of the conduct replaced."""
        return replace(self, conduct=replace(self.conduct, **changes))  # type: ignore[arg-type]

    def configured(self, **changes: object) -> "Subject":
        """With some fields of the head's config replaced."""
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        return replace(self, checkpoint=replace(self.checkpoint, config=config))

    def with_tensors(self, changes: "Mapping[str, torch.Tensor]") -> "Subject":
        """With some of the head's tensors replaced."""
        tensors = {**self.checkpoint.tensors, **changes}
        return replace(self, checkpoint=replace(self.checkpoint, tensors=tensors))


Change = Callable[[Subject], Subject]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One line of the table. ``values`` is the grammar as help shows it, ``default`` the value of a bare name (None:
    one must be given)."""

    name: str
    what: str
    values: str
    default: str | None
    change: Callable[[str], Change]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind with its value, e.g. ``kv.rollback`` and ``stale``. Raises UsageError for what the table lacks."""

    kind: str
    value: str

    def __post_init__(self) -> None:
        """Raises UsageError."""
        self.change()

    def __str__(self) -> str:
        return f"{self.kind}={self.value}"

    def change(self) -> Change:
        """What it does to a subject."""
        return fault_kind(self.kind).change(self.value)


def fault_kind(name: str) -> FaultKind:
    """The line of the table. Raises UsageError for a name that is not there."""
    if name not in FAULTS:
        raise UsageError(f"fault {name!r} is not known; possible are {', '.join(FAULTS)}, or none")
    return FAULTS[name]


def parse_faults(text: str) -> tuple[Fault, ...]:
    """``none``, or faults joined by ``+``: ``kv.rollback=stale+position.offset=1``. Raises UsageError."""
    if text.strip() == NONE:
        return ()
    return tuple(_parse(part.strip()) for part in text.split("+"))


def _parse(text: str) -> Fault:
    name, _, value = text.partition("=")
    kind = fault_kind(name)
    if not value:
        if kind.default is None:
            raise UsageError(f"fault {name} needs a value; type {name}={kind.values}")
        value = kind.default
    return Fault(name, value)


# Draft KV policies of ``--kv``, as faults.
_POLICIES = {
    "stale": "kv.rollback=stale",
    "accumulate": "kv.rollback=accumulate",
    "last-hole": "kv.rollback=hole",
    "none": "kv.none=alone",
    "overwrite": "kv.slot-write=overwrite",
    "unseen": "kv.slot-write=unseen",
    "hole": "kv.prefix-reuse",
    "chunk": "kv.chunk-boundary",
    "window": "attn.window",
    "row": "state.hidden-row",
}
KV_POLICIES = (
    "stale, accumulate, last-hole, none, overwrite, unseen, hole:P, chunk:N, window:N, row:first|previous|drafted"
)


def parse_policy(text: str) -> Fault:
    """A draft KV policy such as ``stale`` or ``hole:16`` as the fault it is. Raises UsageError."""
    name, _, value = text.partition(":")
    spelled = _POLICIES.get(name)
    if spelled is None or bool(value) == ("=" in spelled):
        raise UsageError(f"kv {text!r} was asked for, possible are refresh, {KV_POLICIES}, and in trees slot, path")
    return _parse(spelled if "=" in spelled else f"{spelled}={value}")


# ---- values ----


def _choice(kind: str, value: str, changes: Mapping[str, Change]) -> Change:
    if value not in changes:
        raise _refuse(kind, value, ", ".join(changes))
    return changes[value]


def _number(kind: str, value: str, possible: str, *, least: int | None = None) -> int:
    if re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII) is None or (least is not None and int(value) < least):
        raise _refuse(kind, value, possible)
    return int(value)


def _refuse(kind: str, value: str, possible: str) -> UsageError:
    return UsageError(f"fault {kind}={value} was asked for, possible values are {possible}; type {kind}=VALUE")


def _conduct(**changes: object) -> Change:
    return lambda subject: subject.conducted(**changes)


# ---- wiring ----


def _aux_layer_id(value: str) -> Change:
    possible = "a number to add to every R index (1, -1), SLOT:N for one slot, or default"
    if value == "default":
        return lambda subject: replace(subject, wiring=default_wiring(subject.layers))
    slot_text, _, shift_text = value.rpartition(":")
    shift = _number("wiring.aux-layer-id", shift_text, possible)
    slot = _number("wiring.aux-layer-id", slot_text, possible, least=0) if slot_text else None

    def change(subject: Subject) -> Subject:
        taps = subject.wiring.taps
        if slot is not None and slot >= len(taps):
            raise UsageError(f"wiring {subject.wiring} has slots 0 to {len(taps) - 1}; type another slot than {slot}")
        moved = [tap if slot not in (None, place) else _moved(tap, shift, subject) for place, tap in enumerate(taps)]
        return replace(subject, wiring=Wiring(tuple(moved)))

    return change


def _moved(tap: str, shift: int, subject: Subject) -> str:
    index = tap_index(tap)
    if index is None:
        return tap  # no id stands for the stream after the final norm
    if not 0 <= index + shift <= subject.layers:
        raise WiringError(
            f"R[{index}] of wiring {subject.wiring} moved by {shift} is R[{index + shift}], possible are R[0] to "
            f"R[{subject.layers}]; type a smaller number"
        )
    return tap_name(index + shift)


def _aux_missing(value: str) -> Change:
    slots = None if value == "all" else (_number("wiring.aux-missing", value, "a slot from 0, or all", least=0),)

    def change(subject: Subject) -> Subject:
        count = len(subject.wiring.taps)
        if slots is not None and slots[0] >= count:
            raise UsageError(f"wiring {subject.wiring} has slots 0 to {count - 1}; type another slot than {slots[0]}")
        return subject.conducted(zero_slots=tuple(range(count)) if slots is None else slots)

    return change


def _capture_stage(value: str) -> Change:
    return _choice("wiring.aux-capture-stage", value, {"normed": _conduct(unit_taps=True)})


def _concat_order(value: str) -> Change:
    def reverse(subject: Subject) -> Subject:
        return replace(subject, wiring=Wiring(subject.wiring.taps[::-1]))

    return _choice("wiring.concat-order", value, {"qkv": _conduct(features_first=True), "fc": reverse})


def _norm(value: str) -> Change:
    def skip(name: str) -> Change:
        def change(subject: Subject) -> Subject:
            has = {"input_norm": subject.config.norm_before_fc, "fc_norm": subject.config.fc_norm}.get(name, True)
            if not has:
                raise CheckpointError(f"draft head {subject.checkpoint.name} has no {name} to leave out; type another")
            return subject.conducted(skip_norms=(*subject.conduct.skip_norms, name))

        return change

    changes: dict[str, Change] = {f"skip:{name}": skip(name) for name in _NORMS}
    return _choice("wiring.norm", value, {"residual": _conduct(residual_normed=True), **changes})


def _recycle_norm(value: str) -> Change:
    def other(subject: Subject) -> Subject:
        return subject.conducted(feedback="pre" if subject.config.norm_output else "post")

    changes = {"other": other, "pre": _conduct(feedback="pre"), "post": _conduct(feedback="post")}
    return _choice("wiring.recycle-norm", value, changes)


def _multi_layer(value: str) -> Change:
    changes = {
        "input_layernorm": _conduct(later_norm="input_layernorm"),
        "no-residual": _conduct(later_residual=False),
    }
    chosen = _choice("wiring.multi-layer", value, changes)

    def change(subject: Subject) -> Subject:
        if subject.config.num_layers < 2:
            raise CheckpointError(f"draft head {subject.checkpoint.name} has one layer; wiring.multi-layer needs more")
        return chosen(subject)

    return change


def _shift(value: str) -> Change:
    changes = {"token": _conduct(pairing="own-token"), "features": _conduct(pairing="earlier-features")}
    return _choice("shift.alignment", value, changes)


# ---- positions and attention ----


def _offset(value: str) -> Change:
    possible = "a number of positions for drafted rows (1), all:N for every row, or stuck"
    if value == "stuck":
        return _conduct(advance=0)
    scope, _, number = value.rpartition(":")
    if scope not in ("", "all"):
        raise _refuse("position.offset", value, possible)
    by = _number("position.offset", number, possible)
    return _conduct(offset=by) if scope else _conduct(drafted_offset=by)


def _rope_params(value: str) -> Change:
    name, _, number = value.partition(":")
    if name == "theta" and re.fullmatch(r"\d{1,9}(\.\d+)?([eE]\+?\d)?", number, re.ASCII) and float(number) > 0:
        theta = float(number)
        return lambda subject: subject.configured(rope=replace(subject.config.rope, theta=theta))
    if value == "scaling:none":
        return lambda subject: subject.configured(
            rope=Rope(theta=subject.config.rope.theta, partial_factor=subject.config.rope.partial_factor)
        )
    raise _refuse("position.rope-params", value, "theta:NUMBER and scaling:none")


def _rope_geometry(value: str) -> Change:
    possible = "interleaved, or partial:FRACTION of each head"
    if value == "interleaved":
        return _conduct(interleaved=True)
    name, _, number = value.partition(":")
    if name != "partial" or re.fullmatch(r"(0?\.\d+|1(\.0*)?)", number, re.ASCII) is None or float(number) == 0:
        raise _refuse("position.rope-geometry", value, possible)

    def change(subject: Subject) -> Subject:
        changed = subject.configured(rope=replace(subject.config.rope, partial_factor=float(number)))
        if changed.config.rotary_dim < 2 or changed.config.rotary_dim % 2:
            raise UsageError(
                f"partial:{number} turns {changed.config.rotary_dim} of {changed.config.head_dim} features per head, "
                "an even number of at least 2 was expected; type another fraction"
            )
        return changed

    return change


def _max_len(value: str) -> Change:
    possible = "config, a number of positions, and either with :dummy"
    number, _, beyond = value.partition(":")
    if beyond not in ("", "dummy"):
        raise _refuse("position.max-len", value, possible)
    limit = None if number == "config" else _number("position.max-len", number, possible, least=1)

    def change(subject: Subject) -> Subject:
        most = limit or subject.config.max_position_embeddings
        return subject.conducted(dummy_from=most) if beyond else subject.conducted(max_position=most)

    return change


def _window(value: str) -> Change:
    return _conduct(window=_number("attn.window", value, "a number of rows", least=1))


# ---- vocabulary and weights ----


def _d2t(value: str) -> Change:
    name, _, number = value.partition(":")
    if value not in ("absolute", "identity") and name != "offset":
        raise _refuse("vocab.d2t", value, "absolute, identity and offset:N")
    by = _number("vocab.d2t", number, "absolute, identity and offset:N") if name == "offset" else 0

    def change(subject: Subject) -> Subject:
        import torch

        offsets_W = subject.checkpoint.tensors.get("d2t")
        if offsets_W is None:
            raise CheckpointError(f"draft head {subject.checkpoint.name} drafts over the whole vocabulary, without d2t")
        draft_W = torch.arange(len(offsets_W))
        ids_W = {"absolute": offsets_W.long(), "identity": draft_W}.get(value, draft_W + offsets_W.long() + by)
        return subject.with_tensors({"d2t": ids_W % subject.config.vocab_size - draft_W})

    return change


def _overwritten(value: str) -> Change:
    def lm_head(subject: Subject) -> Subject:
        if subject.config.lm_head != "own":
            raise CheckpointError(f"draft head {subject.checkpoint.name} has no lm_head of its own to overwrite")
        return subject.conducted(target_lm_head=True)

    def embed(subject: Subject) -> Subject:
        if "embed_tokens.weight" not in subject.checkpoint.tensors:
            raise CheckpointError(f"draft head {subject.checkpoint.name} has no embed_tokens of its own to choose")
        return replace(subject, own_embedding=True)

    def target_embed(subject: Subject) -> Subject:
        return replace(subject, own_embedding=False)

    changes = {"lm_head": lm_head, "embed:own": embed, "embed:target": target_embed}
    return _choice("weights.overwritten", value, changes)


def _missing(value: str) -> Change:
    def change(subject: Subject) -> Subject:
        names = [name for name in subject.checkpoint.tensors if name in (value, f"{value}.weight")]
        if not names:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has no tensor {value}; it has "
                f"{', '.join(sorted(subject.checkpoint.tensors))}"
            )
        return subject.with_tensors({name: _unloaded(name, subject.checkpoint.tensors[name]) for name in names})

    return change


def _unloaded(name: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """What a tensor holds that no checkpoint filled: norms 1, biases and maps 0, matrices noise of deviation 0.02."""
    import torch

    if name.endswith(".bias") or name in ("d2t", "t2d"):
        return torch.zeros_like(tensor)
    if tensor.ndim == 1:
        return torch.ones_like(tensor)
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    return noise.to(tensor.dtype)


def _layout(value: str) -> Change:
    return _choice("weights.layout", value, {"qkv-interleaved": _interleave_qkv})


def _interleave_qkv(subject: Subject) -> Subject:
    """Rows that lie group by group (its queries, its key, its value) read as all queries, all keys, all values."""
    import torch

    config, width = subject.config, subject.config.head_dim
    per_group = config.num_heads // config.num_kv_heads
    changes = {}
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


# ---- draft KV and state ----


def _rollback(value: str) -> Change:
    changes = {
        "stale": _conduct(rewrite="stale"),
        "accumulate": _conduct(rewrite="accumulate"),
        "hole": _conduct(blank_accepted=True),
    }
    return _choice("kv.rollback", value, changes)


def _prefix(value: str) -> Change:
    possible = "a number of prompt tokens, with :masked where they take no part instead of being zeros"
    number, _, fill = value.partition(":")
    if fill not in ("", "masked"):
        raise _refuse("kv.prefix-reuse", value, possible)
    prefix = _number("kv.prefix-reuse", number, possible, least=1)
    return _conduct(blank_prefix=prefix, blank_fill=fill or "zero")


def _skip_draft(value: str) -> Change:
    possible = "START:STOP, output tokens between which drafting was paused, with :masked where they take no part"
    parts = value.split(":")
    if len(parts) not in (2, 3) or parts[2:] not in ([], ["masked"]):
        raise _refuse("kv.skip-draft", value, possible)
    start, stop = (_number("kv.skip-draft", part, possible, least=0) for part in parts[:2])
    if start >= stop:
        raise _refuse("kv.skip-draft", value, possible)
    return _conduct(blank_output=(start, stop), blank_fill="masked" if parts[2:] else "zero")


def _handoff(value: str) -> Change:
    everything = 1 << 30
    changes = {
        "empty": _conduct(handoff=True, blank_prefix=everything),
        "hidden": _conduct(handoff=True),
        "kv": _conduct(blank_prefix=everything),
    }
    return _choice("kv.handoff", value, changes)


def _hidden_row(value: str) -> Change:
    rows = ("drafted", "first", "previous")
    return _choice("state.hidden-row", value, {row: _conduct(next_row=row) for row in rows})


def _slot_write(value: str) -> Change:
    return _choice("kv.slot-write", value, {chain: _conduct(chain=chain) for chain in ("overwrite", "unseen")})


def _chunk(value: str) -> Change:
    return _conduct(chunk=_number("kv.chunk-boundary", value, "a number of tokens, the chunk's", least=1))


def _no_kv(value: str) -> Change:
    return _choice("kv.none", value, {"alone": _conduct(alone=True)})


def _tree_kv(value: str) -> Change:
    def layout(kind: str) -> Change:
        return lambda subject: replace(subject, tree_kv=kind)

    return _choice("tree.parent-kv", value, {kind: layout(kind) for kind in ("slot", "path")})


_TABLE: Sequence[FaultKind] = (
    FaultKind("wiring.aux-layer-id", "taps are fed from other layers", "N|SLOT:N|default", "1", _aux_layer_id),
    FaultKind("wiring.aux-missing", "a slot of fc is fed zeros", "SLOT|all", "0", _aux_missing),
    FaultKind("wiring.aux-capture-stage", "taps are taken behind a norm", "normed", "normed", _capture_stage),
    FaultKind("wiring.concat-order", "halves of the qkv input, or the taps, are swapped", "qkv|fc", "qkv", _concat_order),
    FaultKind("wiring.norm", "a norm is left out, or the residual starts normed", "residual|skip:NORM", "residual", _norm),
    FaultKind("wiring.recycle-norm", "the state fed back is on the other side of the final norm", "other|pre|post",
              "other", _recycle_norm),
    FaultKind("wiring.multi-layer", "layers after the first have another norm or no residual",
              "input_layernorm|no-residual", "input_layernorm", _multi_layer),
    FaultKind("shift.alignment", "committed rows pair a token with other features than trained", "token|features",
              "token", _shift),
    FaultKind("position.offset", "drafted rows, or all, stand elsewhere", "N|all:N|stuck", "1", _offset),
    FaultKind("position.rope-params", "RoPE turns at another base or without scaling", "theta:X|scaling:none",
              "theta:10000", _rope_params),
    FaultKind("position.rope-geometry", "RoPE pairs or turns other features", "interleaved|partial:F", "interleaved",
              _rope_geometry),
    FaultKind("position.max-len", "positions end at a maximum, or drafts do", "config|N[:dummy]", "config", _max_len),
    FaultKind("attn.window", "attention sees the last rows only", "N", "2048", _window),
    FaultKind("vocab.d2t", "draft ids are read as other tokens", "absolute|identity|offset:N", "absolute", _d2t),
    FaultKind("weights.overwritten", "the other side's embedding or lm_head is used", "lm_head|embed:own|embed:target",
              "lm_head", _overwritten),
    FaultKind("weights.missing", "a tensor was never loaded", "TENSOR", "lm_head", _missing),
    FaultKind("weights.layout", "query, key and value rows are stacked in another order", "qkv-interleaved",
              "qkv-interleaved", _layout),
    FaultKind("kv.rollback", "drafted rows stay in the draft KV after verify, or leave a hole",
              "stale|accumulate|hole", "stale", _rollback),
    FaultKind("kv.prefix-reuse", "the first tokens of the prompt left no draft KV", "P[:masked]", None, _prefix),
    FaultKind("kv.slot-write", "drafted rows overwrite each other or are not seen", "overwrite|unseen", "overwrite",
              _slot_write),
    FaultKind("kv.chunk-boundary", "the last row of each prompt chunk embeds a predicted token", "N", None, _chunk),
    FaultKind("kv.skip-draft", "a span of the output left no draft KV", "START:STOP[:masked]", None, _skip_draft),
    FaultKind("kv.handoff", "decoding starts without the prompt's draft KV or last features", "empty|hidden|kv", "empty",
              _handoff),
    FaultKind("kv.none", "a draft sees nothing but its own rows", "alone", "alone", _no_kv),
    FaultKind("state.hidden-row", "the next round goes on from another row than the last accepted one",
              "drafted|first|previous", "drafted", _hidden_row),
    FaultKind("tree.parent-kv", "nodes of a tree see other rows than trained", "slot|path", "slot", _tree_kv),
)  # fmt: skip
FAULTS: Mapping[str, FaultKind] = {kind.name: kind for kind in _TABLE}


def apply_faults(subject: Subject, faults: Sequence[Fault]) -> Subject:
    """The subject with every fault in it, one after the other. Raises UsageError, CheckpointError or WiringError."""
    for fault in faults:
        subject = fault.change()(subject)
    return subject
