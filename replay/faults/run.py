"""Faults of how the head is run: positions, attention, the draft KV, the row from which a round goes on."""

import re
from dataclasses import replace

from replay.checkpoint.rope import Rope
from replay.engines.behaviour import CROSSED, RECORDED
from replay.errors import CheckpointError, UsageError
from replay.faults.change import Change, FaultValueError, Subject, behave, choice, number_of, positive_number

# ---- positions and attention ----


def offset(value: str) -> Change:
    possible = (
        "a number of positions for drafted rows (1), all:N for every row, or stuck[:N], drafted rows all N (default 0) "
        "behind their anchor row"
    )
    if value == "stuck":
        return behave(advance=0)
    scope, _, number = value.rpartition(":")
    if scope not in ("", "all", "stuck"):
        raise FaultValueError("position.offset", value, possible)
    by = number_of("position.offset", number, possible)
    if scope == "stuck":
        return behave(advance=0, drafted_offset=by)
    return behave(offset=by) if scope else behave(drafted_offset=by)


def rope_params(value: str) -> Change:
    name, _, number = value.partition(":")
    if name == "theta" and re.fullmatch(r"\d{1,9}(\.\d+)?([eE]\+?\d)?", number, re.ASCII) and float(number) > 0:
        theta = float(number)
        return lambda subject: subject.configured(rope=replace(subject.config.rope, theta=theta))
    if value == "scaling:none":
        return lambda subject: subject.configured(
            rope=Rope(theta=subject.config.rope.theta, partial_factor=subject.config.rope.partial_factor)
        )
    raise FaultValueError("position.rope-params", value, "theta:NUMBER and scaling:none")


def rope_geometry(value: str) -> Change:
    possible = "interleaved, halves, or partial:FRACTION of each head"
    if value in ("interleaved", "halves"):
        return _other_pairs(value)
    name, _, number = value.partition(":")
    if name != "partial" or re.fullmatch(r"(0?\.\d+|1(\.0*)?)", number, re.ASCII) is None or float(number) == 0:
        raise FaultValueError("position.rope-geometry", value, possible)

    def change(subject: Subject) -> Subject:
        changed = subject.configured(rope=replace(subject.config.rope, partial_factor=float(number)))
        if changed.config.rotary_dim < 2 or changed.config.rotary_dim % 2:
            raise UsageError(
                f"partial:{number} turns {changed.config.rotary_dim} of {changed.config.rotatable} features per head, "
                "an even number of at least 2 was expected; type another fraction"
            )
        return changed

    return change


def _other_pairs(wanted: str) -> Change:
    """RoPE pairs (2i, 2i + 1), ``interleaved``, or (i, i + half), ``halves``, where the head pairs the others."""

    def change(subject: Subject) -> Subject:
        latent = subject.config.latent
        paired = "interleaved" if latent is not None and latent.interleaved else "halves"
        if paired == wanted:
            other = "halves" if wanted == "interleaved" else "interleaved"
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} pairs features as {wanted} already; type "
                f"position.rope-geometry={other}"
            )
        return subject.with_behaviour(other_pairs=True)

    return change


def max_len(value: str) -> Change:
    possible = "config, a number of positions, and either with :dummy"
    number, _, beyond = value.partition(":")
    if beyond not in ("", "dummy"):
        raise FaultValueError("position.max-len", value, possible)
    limit = None if number == "config" else number_of("position.max-len", number, possible, least=1)

    def change(subject: Subject) -> Subject:
        most = limit or subject.config.max_position_embeddings
        return subject.with_behaviour(dummy_from=most) if beyond else subject.with_behaviour(max_position=most)

    return change


def window(value: str) -> Change:
    """A row sees so many rows, itself included: SGLang's ``--speculative-draft-window-size N`` is N + 1 of them (0.5.23
    layers/attention/intel_amx_backend.py ``forward_extend``: sliding_window_size + 1). A smaller window of the head's
    own stays."""
    rows = number_of("attn.window", value, "a number of rows", least=1)

    def change(subject: Subject) -> Subject:
        own = subject.config.window
        return subject.with_behaviour(window=rows if own is None else min(rows, own))

    return change


def scale(value: str) -> Change:
    possible = "a number that multiplies attention scores beside head_dim**-0.5"
    return behave(score_factor=positive_number("attn.scale", value, possible))


# ---- draft KV and state ----


def rollback(value: str) -> Change:
    changes = {
        "stale": behave(rewrite="stale"),
        "accumulate": behave(rewrite="accumulate"),
        "hole": behave(hole="accepted"),
        "full-hole": behave(hole="full"),
    }
    return choice("kv.rollback", value, changes)


def prefix(value: str) -> Change:
    possible = "a number of prompt tokens, with :masked where they take no part instead of being zeros"
    number, _, fill = value.partition(":")
    if fill not in ("", "masked"):
        raise FaultValueError("kv.prefix-reuse", value, possible)
    prefix = number_of("kv.prefix-reuse", number, possible, least=1)
    return behave(blank_prefix=prefix, blank_fill=fill or "zero")


def skip_draft(value: str) -> Change:
    possible = "START:STOP, output tokens between which drafting was paused, with :masked where they take no part"
    parts = value.split(":")
    if len(parts) not in (2, 3) or parts[2:] not in ([], ["masked"]):
        raise FaultValueError("kv.skip-draft", value, possible)
    start, stop = (number_of("kv.skip-draft", part, possible, least=0) for part in parts[:2])
    if start >= stop:
        raise FaultValueError("kv.skip-draft", value, possible)
    return behave(blank_output=(start, stop), blank_fill="masked" if parts[2:] else "zero")


def handoff(value: str) -> Change:
    everything = 1 << 30
    changes = {
        "empty": behave(handoff=True, blank_prefix=everything),
        "hidden": behave(handoff=True),
        "kv": behave(blank_prefix=everything),
    }
    return choice("kv.handoff", value, changes)


def hidden_row(value: str) -> Change:
    rows = ("drafted", "first", "previous", "hidden-only")
    return choice("state.hidden-row", value, {row: behave(next_row=row) for row in rows})


def dropped(value: str) -> Change:
    possible = "attention or mlp, of every layer or with :LAYER from 0"
    block, colon, number = value.partition(":")
    if block not in ("attention", "mlp"):
        raise FaultValueError("state.dropped", value, possible)
    layer = number_of("state.dropped", number, possible, least=0) if colon else None

    def change(subject: Subject) -> Subject:
        layers = subject.config.num_layers
        if layer is not None and layer >= layers:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has layers 0 to {layers - 1}; type another layer than {layer}"
            )
        return subject.with_behaviour(dropped=(*subject.behaviour.dropped, (block, layer)))

    return change


def crossed(value: str) -> Change:
    rows = CROSSED[1:]
    possible = f"{', '.join(rows)}, each with :once where only the first drafting step of a round is handed it"
    row, _, once = value.partition(":")
    if row not in rows or value not in (row, f"{row}:once"):
        raise FaultValueError("state.crossed", value, possible)
    return behave(crossed=row, crossed_once=bool(once))


def noise(value: str) -> Change:
    return behave(noise=positive_number("state.noise", value, "a part of each tap's root mean square, such as 0.1"))


def slot_write(value: str) -> Change:
    return choice("kv.slot-write", value, {chain: behave(chain=chain) for chain in ("overwrite", "unseen")})


def chunk(value: str) -> Change:
    if value == RECORDED:
        return behave(chunk=RECORDED)
    possible = f"a number of tokens, the chunk's, or {RECORDED}, the pieces in the trace"
    return behave(chunk=number_of("kv.chunk-boundary", value, possible, least=1))


def no_kv(value: str) -> Change:
    return choice("kv.none", value, {"alone": behave(alone=True)})


def tree_kv(value: str) -> Change:
    def layout(kind: str) -> Change:
        return lambda subject: replace(subject, tree_kv=kind)

    return choice("tree.parent-kv", value, {kind: layout(kind) for kind in ("slot", "path")})
