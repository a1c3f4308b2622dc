"""Faults: what served heads suffer from, as small named changes of what is replayed. One table, ``FAULTS``.

A fault is spelled KIND or KIND=VALUE (``kv.rollback=stale``); several at once are joined by ``+``. Each kind turns its
value into a change of a ``Subject`` (change.py), before any tensor runs; engines/behaviour.py says what the changed
fields mean, and the twin plays every one of them as well. CONTRIBUTING.md says how to add a kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from replay.errors import UsageError
from replay.faults import block, precision, run, weights, wiring
from replay.faults.change import NO_REMEDY, Change, FaultKind, FaultValueError, Subject
from replay.faults.joined import called, set_fields, undone
from replay.traces.fields import show

NONE = "none"
TREE_FAULT = "tree.parent-kv"  # says nothing of chains

_TABLE: Sequence[FaultKind] = (
    FaultKind(
        "wiring.aux-layer-id", "taps are fed from other layers", "N|SLOT:N|default", "1", wiring.aux_layer_id,
        reports=13, changes_feed=True, remedy="feed {wiring}: `replay serve --wiring {wiring} -- ...`{ids}"),
    FaultKind(
        "wiring.aux-missing", "a slot of fc is fed zeros", "SLOT|all", "0", wiring.aux_missing,
        reports=5, changes_feed=True,
        remedy="{missing}: see that every layer id fires{never}; compare the fed taps with `replay check`, or serve "
        "with `replay serve --wiring {wiring}`"),
    FaultKind(
        "wiring.aux-capture-stage", "taps are taken behind a norm", "normed", "normed", wiring.capture_stage,
        reports=2, changes_feed=True,
        remedy="take taps from the residual stream before the layer's norm, as `replay serve --wiring {wiring}` does"),
    FaultKind(
        "wiring.concat-order", "halves of the qkv input, or the taps, are swapped", "qkv|fc", "qkv",
        wiring.concat_order, reports=2, changes_feed=True,
        remedy="qkv reads embedding first, then features; fc reads taps in the wiring's order: export the head again, "
        "or serve with `replay serve --wiring {wiring}`"),
    FaultKind(
        "wiring.norm", "a norm is left out or doubled, or the residual starts elsewhere", "residual|twice|skip:NORM",
        "residual",
        wiring.norm, reports=7,
        remedy="state norm_before_fc, fc_norm and norm_before_residual in the draft config as trained; SGLang reads "
        "norm_before_fc inside eagle_config or at the top level, and knows no norm_before_residual"),
    FaultKind(
        "wiring.norm-eps", "norms add another epsilon", "X", "1e-6", wiring.norm_eps,
        reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="write the rms_norm_eps that training used into the draft config"),
    FaultKind(
        "wiring.recycle-norm", "the state fed back is on the other side of the final norm", "other|pre|post", "other",
        wiring.recycle_norm, reports=7,
        remedy="set norm_output in the draft config to what training fed back between steps"),
    FaultKind(
        "wiring.multi-layer", "layers after the first have another norm or no residual", "input_layernorm|no-residual",
        "input_layernorm", wiring.multi_layer, reports=3,
        remedy="serve the head with an engine that applies the norm it was trained with in later layers"),
    FaultKind(
        "shift.alignment", "committed rows pair a token with other features than trained", "token|features", "token",
        wiring.shift, reports=4, changes_feed=True,
        remedy="the draft's input ids must be shifted left by one against the features; update the engine or train "
        "with the same pairing"),
    FaultKind(
        "shift.stale-row", "rows made after a verify get the features of another row", "anchor|previous|first|last",
        "anchor", wiring.stale_row, reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="each row after verify must be fed the features of its own position: update the engine"),
    FaultKind(
        "position.offset", "drafted rows, or all, stand elsewhere", "N|all:N|stuck[:N]", "1", run.offset,
        reports=5, changes_feed=True,
        remedy="row i stands at position i, and drafted tokens at S, S+1, ...: update the engine's position handling"),
    FaultKind(
        "position.rope-params", "RoPE turns at another base or without scaling", "theta:X|scaling:none", "theta:10000",
        run.rope_params, reports=5,
        remedy="write the rope_theta and rope scaling that training used into the draft config"),
    FaultKind(
        "position.rope-geometry", "RoPE pairs or turns other features", "interleaved|halves|partial:F", "interleaved",
        run.rope_geometry, reports=4,
        remedy="write rope_is_neox_style, or rope_interleave of a latent head, and partial_rotary_factor as trained "
        "into the draft config"),
    FaultKind(
        "position.max-len", "positions end at a maximum, or drafts do", "config|N[:dummy]", "config", run.max_len,
        reports=6, changes_feed=True,
        remedy="raise max_position_embeddings of the draft config to the length that is served"),
    FaultKind(
        "attn.window", "attention sees the last rows only", "N", "2048", run.window, reports=5, kv={"window": ""},
        remedy="serve without --speculative-draft-window-size, or with the window that training used"),
    FaultKind(
        "attn.scale", "attention scores are multiplied by another scale", "X", None, run.scale,
        reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="the draft's attention must scale its scores by head_dim**-0.5: see head_dim in the draft config, or "
        "update the engine"),
    FaultKind(
        "vocab.d2t", "draft ids are read as other tokens", "absolute|identity|offset:N", "absolute", weights.d2t,
        reports=8, changes_weights=True,
        remedy="write d2t as offsets (target id = draft id + d2t) and the head's own map"),
    FaultKind(
        "weights.overwritten", "the other side's embedding or lm_head is used", "lm_head|embed:own|embed:target",
        "lm_head", weights.overwritten, reports=1, changes_weights=True,
        remedy="keep the head's own lm_head and embedding: tie_word_embeddings must be false and draft_vocab_size "
        "stated in the draft config"),
    FaultKind(
        "weights.missing", "a tensor was never loaded", "TENSOR[:zero|:noise]", "lm_head", weights.missing,
        reports=9, changes_weights=True,
        remedy="export the head again with {tensor}; SGLang skips names that it does not know in silence: see `replay "
        "check --draft DIR`"),
    FaultKind(
        "weights.layout", "query, key and value rows are stacked in another order", "qkv-interleaved",
        "qkv-interleaved", weights.layout, reports=4, changes_weights=True,
        remedy="split qkv by queries, keys and values, not group by group, when the checkpoint is converted"),
    FaultKind(
        "kv.rollback", "drafted rows stay in the draft KV after verify, or leave a hole",
        "stale|accumulate|hole|full-hole", "stale", run.rollback, reports=6,
        kv={"stale": "stale", "accumulate": "accumulate", "last-hole": "hole", "full-hole": "full-hole"},
        remedy="the draft KV must be rewritten from target features after verify: update the engine or switch its "
        "approximation off"),
    FaultKind(
        "kv.prefix-reuse", "the first tokens of the prompt left no draft KV", "P[:masked]", None, run.prefix,
        reports=8, kv={"hole": ""},
        remedy="serve with --disable-radix-cache to confirm, then update to a version that keys draft KV by lookahead"),
    FaultKind(
        "kv.slot-write", "drafted rows overwrite each other or are not seen", "overwrite|unseen", "overwrite",
        run.slot_write, reports=5, kv={"overwrite": "overwrite", "unseen": "unseen"},
        remedy="update the engine: drafted rows must have a KV slot each, and the attended length must grow by step"),
    FaultKind(
        "kv.chunk-boundary", "the last row of each prompt chunk embeds a predicted token", "N|recorded", None,
        run.chunk, reports=4, kv={"chunk": ""},
        remedy="raise --chunked-prefill-size above the prompts, or update to a version with the tail fix"),
    FaultKind(
        "kv.skip-draft", "a span of the output left no draft KV", "START:STOP[:masked]", None, run.skip_draft,
        reports=2,
        remedy="keep drafting on while requests run, or let the engine fill the draft KV when it resumes"),
    FaultKind(
        "kv.handoff", "decoding starts without the prompt's draft KV or last features", "empty|hidden|kv", "empty",
        run.handoff, reports=4,
        remedy="send the last hidden states and the draft KV along when a request moves from prefill to decode"),
    FaultKind(
        "kv.none", "a draft sees nothing but its own rows", "alone", "alone", run.no_kv,
        reports=1, kv={"none": "alone"},  # no thread has it as its cause; counted as one, so that it is tried
        remedy="the draft sees no committed rows: its KV cache is not written or not read; update the engine"),
    FaultKind(
        "state.hidden-row", "the next round goes on from another row than the last accepted one",
        "drafted|first|previous|hidden-only", "drafted", run.hidden_row, reports=3, kv={"row": ""},
        remedy="the next round must go on from the last accepted token's row: update the engine"),
    FaultKind(
        "state.dropped", "what attention or mlp gives is not added to the stream", "attention[:LAYER]|mlp[:LAYER]",
        "attention", run.dropped, reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="{value} of the head adds nothing to its residual stream: update the engine, or see that the weights of "
        "o_proj and down_proj were loaded"),
    FaultKind(
        "state.crossed", "a step gets another request's state: previous, next, reversed, pairs, first", "ROW[:once]",
        "previous", run.crossed,
        reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="each row of a batch must go on from its own hidden state: see how the engine filters, merges and pads "
        "batches, or update it; serve one request at a time to confirm"),
    FaultKind(
        "state.noise", "features are fed with noise on them", "S", "0.1", run.noise,
        reports=1,  # no thread has it as its cause
        remedy=NO_REMEDY),
    FaultKind(
        "precision.draft-weights", "the head's weights are quantised", "SCHEME", "fp8", precision.draft_weights,
        reports=6, changes_weights=True,
        remedy="serve the draft unquantised (--speculative-draft-model-quantization unquant)"),
    FaultKind(
        "precision.draft-kv", "the draft KV is stored in another format", "FORMAT[:scale=S]", "fp8_e4m3",
        precision.draft_kv, reports=3, changes_weights=True,
        remedy="set --speculative-draft-kv-cache-dtype bf16"),
    FaultKind(
        "precision.dtype-cast", "the head runs in another dtype", "fp16|bf16|fp32", "fp16", precision.dtype_cast,
        reports=2, changes_weights=True,
        remedy="state dtype bfloat16 in the draft config, or serve with --dtype bfloat16"),
    FaultKind(
        "block.attention", "rows of a block see other rows of it than trained", "causal|bidirectional", "causal",
        block.attention, reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="the blocks run {value}, and the head was trained otherwise: see is_causal and layer_types in the draft "
        "config, or update the engine"),
    FaultKind(
        "block.mask-token", "another token stands where a block has masks", "ID", None, block.mask_token,
        reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="write the mask_token_id that training used into dflash_config of the draft config"),
    FaultKind(
        "block.size", "a block has another number of tokens", "N", None, block.size,
        reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="serve with as many draft tokens as the block_size of the draft config"),
    FaultKind(
        "block.late-context", "the newest context rows are missing when a block is drafted", "N", "1",
        block.late_context, reports=1,  # no thread has it as its cause; counted as one, so that it is tried
        remedy="keys and values of all accepted tokens must be written before the next block is drafted: update the "
        "engine"),
    FaultKind(
        TREE_FAULT, "nodes of a tree see other rows than trained", "slot|path", "slot", run.tree_kv, reports=2,
        remedy="serve a chain (--speculative-eagle-topk 1) or an engine that lets nodes see their ancestors"),
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
    if not isinstance(text, str):
        raise UsageError(f"faults are text such as kv.rollback=stale, {show(text)} was given; type KIND=VALUE or none")
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


# Names that ``--kv`` gives to faults of the draft KV: kind, and value (empty: typed behind a colon).
_POLICIES = {name: (kind, value) for kind in _TABLE for name, value in kind.kv.items()}
KV_POLICIES = ", ".join(name if value else f"{name}:{kind.values}" for name, (kind, value) in _POLICIES.items())


def parse_policy(text: str) -> Fault:
    """A draft KV policy such as ``stale`` or ``hole:16`` as the fault it is. Raises UsageError."""
    name, colon, typed = text.partition(":")
    if name not in _POLICIES or bool(colon) == bool(_POLICIES[name][1]) or bool(typed) != bool(colon):
        raise UsageError(f"kv {text!r} was asked for, possible are refresh, {KV_POLICIES}, and in trees slot, path")
    kind, value = _POLICIES[name]
    try:
        return Fault(kind.name, value or typed)
    except FaultValueError as error:
        possible = f"possible values are {error.possible}; type {name}:VALUE"
        raise UsageError(f"kv {text!r} was asked for, {possible}") from None


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
            f"faults {earlier} and {fault} both set {called(min(names))}, and only the last one's would be played; "
            "type one of them"
        )
