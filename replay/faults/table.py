"""Faults: what served heads suffer from, as small named changes of what is replayed. One table, ``FAULTS``.

A fault is spelled KIND or KIND=VALUE (``kv.rollback=stale``); several at once are joined by ``+``. Each kind turns its
value into a change of a ``Subject`` (change.py), before any tensor runs; engines/behaviour.py says what the changed
fields mean, and the twin plays every one of them as well. To add a kind: a function from value to change, and its line
in the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from replay.errors import UsageError
from replay.faults import precision, run, weights, wiring
from replay.faults.change import Change, FaultKind, Subject, set_fields, undone

NONE = "none"
TREE_FAULT = "tree.parent-kv"  # says nothing of chains

_TABLE: Sequence[FaultKind] = (
    FaultKind("wiring.aux-layer-id", "taps are fed from other layers", "N|SLOT:N|default", "1", wiring.aux_layer_id),
    FaultKind("wiring.aux-missing", "a slot of fc is fed zeros", "SLOT|all", "0", wiring.aux_missing),
    FaultKind("wiring.aux-capture-stage", "taps are taken behind a norm", "normed", "normed", wiring.capture_stage),
    FaultKind("wiring.concat-order", "halves of the qkv input, or the taps, are swapped", "qkv|fc", "qkv",
              wiring.concat_order),
    FaultKind("wiring.norm", "a norm is left out, or the residual starts normed", "residual|skip:NORM", "residual",
              wiring.norm),
    FaultKind("wiring.recycle-norm", "the state fed back is on the other side of the final norm", "other|pre|post",
              "other", wiring.recycle_norm),
    FaultKind("wiring.multi-layer", "layers after the first have another norm or no residual",
              "input_layernorm|no-residual", "input_layernorm", wiring.multi_layer),
    FaultKind("shift.alignment", "committed rows pair a token with other features than trained", "token|features",
              "token", wiring.shift),
    FaultKind("position.offset", "drafted rows, or all, stand elsewhere", "N|all:N|stuck[:N]", "1", run.offset),
    FaultKind("position.rope-params", "RoPE turns at another base or without scaling", "theta:X|scaling:none",
              "theta:10000", run.rope_params),
    FaultKind("position.rope-geometry", "RoPE pairs or turns other features", "interleaved|partial:F", "interleaved",
              run.rope_geometry),
    FaultKind("position.max-len", "positions end at a maximum, or drafts do", "config|N[:dummy]", "config",
              run.max_len),
    FaultKind("attn.window", "attention sees the last rows only", "N", "2048", run.window),
    FaultKind("vocab.d2t", "draft ids are read as other tokens", "absolute|identity|offset:N", "absolute", weights.d2t),
    FaultKind("weights.overwritten", "the other side's embedding or lm_head is used", "lm_head|embed:own|embed:target",
              "lm_head", weights.overwritten),
    FaultKind("weights.missing", "a tensor was never loaded", "TENSOR", "lm_head", weights.missing),
    FaultKind("weights.layout", "query, key and value rows are stacked in another order", "qkv-interleaved",
              "qkv-interleaved", weights.layout),
    FaultKind("kv.rollback", "drafted rows stay in the draft KV after verify, or leave a hole",
              "stale|accumulate|hole|full-hole", "stale", run.rollback),
    FaultKind("kv.prefix-reuse", "the first tokens of the prompt left no draft KV", "P[:masked]", None, run.prefix),
    FaultKind("kv.slot-write", "drafted rows overwrite each other or are not seen", "overwrite|unseen", "overwrite",
              run.slot_write),
    FaultKind("kv.chunk-boundary", "the last row of each prompt chunk embeds a predicted token", "N", None, run.chunk),
    FaultKind("kv.skip-draft", "a span of the output left no draft KV", "START:STOP[:masked]", None, run.skip_draft),
    FaultKind("kv.handoff", "decoding starts without the prompt's draft KV or last features", "empty|hidden|kv",
              "empty", run.handoff),
    FaultKind("kv.none", "a draft sees nothing but its own rows", "alone", "alone", run.no_kv),
    FaultKind("state.hidden-row", "the next round goes on from another row than the last accepted one",
              "drafted|first|previous|hidden-only", "drafted", run.hidden_row),
    FaultKind("precision.draft-weights", "the head's weights are quantised", "SCHEME", "fp8", precision.draft_weights),
    FaultKind("precision.draft-kv", "the draft KV is stored in another format", "FORMAT[:scale=S]", "fp8_e4m3",
              precision.draft_kv),
    FaultKind("precision.dtype-cast", "the head runs in another dtype", "fp16|bf16|fp32", "fp16", precision.dtype_cast),
    FaultKind(TREE_FAULT, "nodes of a tree see other rows than trained", "slot|path", "slot", run.tree_kv),
)  # fmt: skip
FAULTS: Mapping[str, FaultKind] = {kind.name: kind for kind in _TABLE}


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
        near = get_close_matches(name, FAULTS, n=3, cutoff=0.5)
        possible = f"nearest are {', '.join(near)}" if near else f"possible are {', '.join(FAULTS)}, or none"
        raise UsageError(f"fault {name!r} is not known, {possible}; type replay faults for the list")
    return FAULTS[name]


def parse_faults(text: str) -> tuple[Fault, ...]:
    """``none``, or faults joined by ``+``, for ``Variant.faults``. Raises UsageError.

    >>> [str(fault) for fault in replay.parse_faults("kv.rollback=stale+position.offset")]
    ['kv.rollback=stale', 'position.offset=1']
    """
    if text.strip() == NONE:
        return ()
    parts = [part.strip() for part in text.split("+")]
    if NONE in parts:
        raise UsageError(f"faults {text!r}: none stands alone; leave it out")
    if "" in parts:
        raise UsageError(f"faults {text!r}: one is empty; type KIND=VALUE, joined by +, or none")
    faults = tuple(_parse(part) for part in parts)
    if len(set(faults)) < len(faults):
        raise UsageError(f"faults {text!r} name one twice; type it once")
    return faults


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
    "full-hole": "kv.rollback=full-hole",
    "none": "kv.none=alone",
    "overwrite": "kv.slot-write=overwrite",
    "unseen": "kv.slot-write=unseen",
    "hole": "kv.prefix-reuse",
    "chunk": "kv.chunk-boundary",
    "window": "attn.window",
    "row": "state.hidden-row",
}
KV_POLICIES = (
    "stale, accumulate, last-hole, full-hole, none, overwrite, unseen, hole:P, chunk:N, window:N, "
    "row:first|previous|drafted|hidden-only"
)


def parse_policy(text: str) -> Fault:
    """A draft KV policy such as ``stale`` or ``hole:16`` as the fault it is. Raises UsageError."""
    name, colon, value = text.partition(":")
    spelled = _POLICIES.get(name)
    if spelled is None or bool(colon) == ("=" in spelled) or bool(value) != bool(colon):
        raise UsageError(f"kv {text!r} was asked for, possible are refresh, {KV_POLICIES}, and in trees slot, path")
    return _parse(spelled if "=" in spelled else f"{spelled}={value}")


def apply_faults(subject: Subject, faults: Sequence[Fault]) -> Subject:
    """The subject with every fault in it, one after the other.

    Raises UsageError, CheckpointError or WiringError for one that does not fit the head, and UsageError where one
    would undo what another before it set: a field of its own, or all of its tensors.
    """
    healthy = subject
    standing: list[tuple[Fault, set[str]]] = []  # of each fault, the fields in which something of it is left
    for fault in faults:
        change, before = fault.change(), replace(subject, said=frozenset())
        subject = change(before)
        names = set_fields(before, subject)
        for earlier, left in standing:
            if met := names & left:
                gone = undone(met, before, subject, change, healthy)
                left -= gone
                _refuse_undone(earlier, fault, gone - subject.checkpoint.tensors.keys() or (set() if left else gone))
        standing.append((fault, names))
    return replace(subject, said=frozenset()) if faults else subject


def _refuse_undone(earlier: Fault, fault: Fault, names: set[str]) -> None:
    if names:
        raise UsageError(
            f"faults {earlier} and {fault} both set {min(names)}, and only the last one's would be played; type one of "
            "them"
        )
