"""Faults joined: which fields a change sets, which of another's it undoes, and what these fields are called."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from replay.errors import ReplayError
from replay.faults.change import Change, Subject

# Every field that a change can set, tensors aside, in words for people.
_CALLED: Mapping[str, str] = {
    "wiring": "the wiring",
    "precision": "the precision",
    "own_embedding": "whose embedding is read",
    "tree_kv": "what a node of a tree sees",
    "feedback": "the state that is fed back",
    "skip_norms": "the norms that are left out",
    "residual_normed": "where the residual stream starts",
    "state_normed_twice": "how often the state is normed",
    "features_first": "the order of the qkv input",
    "later_norm": "the norm at the entry of later layers",
    "later_residual": "the residual stream of later layers",
    "other_pairs": "the pairs that RoPE turns",
    "target_lm_head": "whose lm_head is used",
    "score_factor": "the scale of attention scores",
    "dropped": "the blocks that are left out",
    "pairing": "the pairing of tokens and features",
    "zero_slots": "the slots that are fed zeros",
    "unit_taps": "the place where taps are taken",
    "chunk": "the size of prompt chunks",
    "handoff": "the features of the last prompt row",
    "noise": "the noise on features",
    "offset": "the positions of all rows",
    "drafted_offset": "the positions of drafted rows",
    "advance": "how far positions go on from step to step",
    "max_position": "the last position",
    "dummy_from": "the position at which drafts end",
    "window": "the attention window",
    "alone": "whether committed rows are seen",
    "blank_prefix": "the prompt rows without draft KV",
    "blank_output": "the output rows without draft KV",
    "blank_fill": "what stands in place of missing draft KV",
    "chain": "the drafted rows that a drafted row sees",
    "crossed": "the row of a batch whose state is handed on",
    "crossed_once": "how often a state of another request is handed on",
    "rewrite": "the draft KV after verify",
    "hole": "the hole that verify leaves in the draft KV",
    "next_row": "the row from which the next round goes on",
    "stale_rows": "the features of rows made after verify",
    "block_size": "how many tokens a block has",
    "mask_token": "the token in place of masks",
    "block_attention": "the rows of its block that a row sees",
    "late_context": "the newest context rows that are missing",
    "rms_norm_eps": "the epsilon of norms",
    "rope.theta": "the base of RoPE",
    "rope.partial_factor": "the part of each head that RoPE turns",
}


def called(name: str) -> str:
    """What people call a field or tensor."""
    return _CALLED.get(name) or ("the scaling of RoPE" if name.startswith("rope.") else f"the tensor {name}")


def set_fields(before: Subject, after: Subject) -> set[str]:
    """Names of what a change has set: fields of the behaviour, of the config and its RoPE, tensors, and the rest."""
    old, new = _flat(before), _flat(after)
    return set(after.said) | {name for name in new if name not in old or new[name] != old[name]}


def undone(names: Iterable[str], before: Subject, after: Subject, change: Change, healthy: Subject) -> set[str]:
    """Those of ``names``, fields that another fault had set, of which a change leaves nothing.

    It then gives there what it gives alone. Where it builds on what it finds it does not: taps are moved, formats and
    skipped norms added, rows of tensors stacked in another order.
    """
    try:
        alone = change(healthy)
    except ReplayError:  # alone it cannot be, so it builds on the other
        return set()
    old, new, single = _flat(before), _flat(after), _flat(alone)
    tensors, lone = after.checkpoint.tensors, alone.checkpoint.tensors
    loaded = {name for name in names if name in tensors and bool((tensors[name] == lone[name]).all())}
    return loaded | {name for name in names if name not in tensors and old[name] != new[name] == single[name]}


def _flat(subject: Subject) -> dict[str, Any]:
    """Every field that a change can set, by name; tensors by identity."""
    behaviour = {item.name: getattr(subject.behaviour, item.name) for item in fields(subject.behaviour)}
    rope = {f"rope.{item.name}": getattr(subject.config.rope, item.name) for item in fields(subject.config.rope)}
    config = {item.name: getattr(subject.config, item.name) for item in fields(subject.config) if item.name != "rope"}
    tensors = {name: id(tensor) for name, tensor in subject.checkpoint.tensors.items()}
    own = {name: getattr(subject, name) for name in ("wiring", "precision", "own_embedding", "tree_kv")}
    return {**tensors, **config, **rope, **behaviour, **own}
