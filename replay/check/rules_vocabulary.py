"""Rules on the vocabulary map: target id = draft id + d2t[draft id]."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from replay.check.facts import Facts
from replay.check.finding import ERROR, NOTE, WARNING, Finding

_FAULT = "vocab.d2t"
_REBUILD = "rebuild d2t from the t2d and token counts of the training run, and export the head again"
_STRAY = 0.1  # of draft ids that may lead out of the vocabulary before the whole map is read otherwise
_LEAST_COVERAGE, _BAD_COVERAGE = 0.9, 0.5  # of a trace's emitted tokens


def vocabulary_map(facts: Facts) -> Iterator[Finding]:
    """d2t: there, of the right kind, in range, rising, and an offset. At most one finding."""
    if "d2t" not in facts.draft.tensors:
        yield from _absent(facts)
        return
    unusable = list(_unusable(facts))
    yield from unusable or _targets(facts, facts.draft.weights.d2t or ())


def _found(facts: Facts, what: str, seen: object, expected: object, fix: str = _REBUILD) -> Finding:
    return Finding(_FAULT, ERROR, what, facts.draft.weights.file, "d2t", str(seen), str(expected), fix)


def _sizes(facts: Facts) -> tuple[int, int | None]:
    """Tokens of the head's whole vocabulary and of its drafts (None: not said)."""
    config = facts.draft.config
    return config.count("vocab_size") or 0, config.count("draft_vocab_size")


def _absent(facts: Facts) -> Iterator[Finding]:
    vocabulary, size = _sizes(facts)
    if size is not None and size < vocabulary:
        yield _found(facts, f"the head drafts over {size} of {vocabulary} tokens and has no map from them, so draft "
                     "ids are taken for target ids", "absent", f"[{size}] integers")  # fmt: skip


def _unusable(facts: Facts) -> Iterator[Finding]:
    """A map that is of the wrong type, or as long as no vocabulary of the head. At most one finding."""
    draft, (_, size) = facts.draft, _sizes(facts)
    tensor, values = draft.tensors["d2t"], draft.weights.d2t
    if values is None:
        yield _found(facts, f"d2t is {tensor.dtype} of shape {list(tensor.shape)}",
                     f"{tensor.dtype} {list(tensor.shape)}", "a vector of int64")  # fmt: skip
    elif tensor.dtype in ("BOOL", "U8", "I8", "I16"):
        yield _found(facts, f"d2t is {tensor.dtype}, which cannot hold offsets into {facts.target.vocab_size} tokens",
                     tensor.dtype, "I64")  # fmt: skip
    elif size is None:
        yield Finding(_FAULT, ERROR, "the head has a map but draft_vocab_size is null, so its lm_head is the "
                      "target's, over other tokens", draft.config.where, "draft_vocab_size", "null",
                      str(len(values)), f'write "draft_vocab_size": {len(values)}')  # fmt: skip
    elif len(values) != size:
        yield _found(facts, f"d2t maps {len(values)} draft ids, the head has {size}", len(values), size)


def _targets(facts: Facts, values: Sequence[int]) -> Iterator[Finding]:
    """The target ids that a readable map leads to. At most one finding."""
    ids = [row + offset for row, offset in enumerate(values)]
    vocabulary, _ = _sizes(facts)
    if not any(values) and len(values) < vocabulary:
        yield from _zero(facts, len(values))
    elif _holds_target_ids(facts, values, ids):
        yield _found(facts, "d2t holds target ids and not offsets: engines add the draft id to them",
                     f"{values[0]} to {values[-1]}, rising", "offsets: target id - draft id",
                     "subtract the draft ids: d2t - arange(len(d2t))")  # fmt: skip
    elif not _in_range(ids, facts.target.vocab_size):
        yield from _outside(facts, ids)
    elif not _rises(ids):
        yield _falling(facts, ids)
    else:
        yield from _against_mask(facts, ids)


def _zero(facts: Facts, size: int) -> Iterator[Finding]:
    """Zeros map draft ids to themselves; t2d may say that this is meant."""
    t2d = facts.draft.weights.t2d
    if t2d is None or sum(map(bool, t2d)) != size or sum(map(bool, t2d[:size])) != size:
        yield _found(facts, f"d2t is zero throughout: it maps the {size} draft ids to the first {size} target ids",
                     "all zero", "offsets")  # fmt: skip
    else:
        yield Finding(_FAULT, NOTE, f"d2t is zero throughout and t2d agrees: the head drafts the first {size} target "
                      "ids, and none of the later ones however often they stand in text", facts.draft.weights.file,
                      "d2t", "all zero", "the most frequent tokens of the target's own output",
                      "choose the draft vocabulary by counts, unless this was meant")  # fmt: skip


def _holds_target_ids(facts: Facts, values: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether ``values`` would be a map as they are, and is a worse one, or one that t2d denies, as offsets.

    A few ids outside of the vocabulary do not tell: a map of offsets whose last rows are damaged has those too.
    """
    size, t2d = facts.target.vocab_size, facts.draft.weights.t2d
    if not _in_range(values, size) or not _rises(values):
        return False
    if t2d is not None and len(t2d) == size:
        return _marks(t2d, values) and not _marks(t2d, ids)
    return _strays(ids, size) > _STRAY * len(ids) or not _rises(ids)


def _strays(ids: Sequence[int], vocabulary: int) -> int:
    return sum(not 0 <= index < vocabulary for index in ids)


def _outside(facts: Facts, ids: Sequence[int]) -> Iterator[Finding]:
    size = facts.target.vocab_size
    row = next(row for row, index in enumerate(ids) if not 0 <= index < size)
    strays = _strays(ids, size)
    more = f", and {strays - 1} more likewise" if strays > 1 else ""
    why = "; the others are in range, so these rows are damaged" if strays <= _STRAY * len(ids) else ""
    yield _found(facts, f"d2t maps draft id {row} to target id {ids[row]}, outside of the {size} tokens of the "
                 f"target{more}{why}", ids[row], f"0 to {size - 1}")  # fmt: skip


def _falling(facts: Facts, ids: Sequence[int]) -> Finding:
    row = next(row for row, (low, high) in enumerate(pairwise(ids)) if low >= high)
    twice = len(ids) - len(set(ids))
    return _found(facts, f"d2t does not rise: draft ids {row} and {row + 1} map to {ids[row]} and {ids[row + 1]}"
                  + (f"; {twice} target ids are mapped to twice" if twice else ""),
                  f"{ids[row]}, {ids[row + 1]}", "strictly rising target ids")  # fmt: skip


def _in_range(ids: Sequence[int], vocabulary: int) -> bool:
    return bool(ids) and min(ids) >= 0 and max(ids) < vocabulary


def _rises(ids: Sequence[int]) -> bool:
    return all(low < high for low, high in pairwise(ids))


def _marks(mask: Sequence[int], ids: Sequence[int]) -> bool:
    return min(ids) >= 0 and max(ids) < len(mask) and all(mask[index] for index in ids)


def _against_mask(facts: Facts, ids: Sequence[int]) -> Iterator[Finding]:
    """t2d, the training side's mask of the same tokens; engines do not use it."""
    draft = facts.draft
    tensor, mask = draft.tensors.get("t2d"), draft.weights.t2d
    if tensor is None:
        return

    def found(what: str, seen: object, expected: object, severity: str = WARNING) -> Finding:
        return Finding(_FAULT, severity, what + "; engines use d2t", draft.weights.file, "t2d", str(seen),
                       str(expected),
                       "find out which of the two the head was trained with: the other is from another "
                       "run")  # fmt: skip

    if mask is None:
        yield found(f"t2d is {tensor.dtype} of shape {list(tensor.shape)}", tensor.dtype, "a vector of BOOL")
        return
    vocabulary = draft.config.count("vocab_size") or 0
    if len(mask) not in (vocabulary, facts.target.vocab_size):
        yield found(f"t2d marks tokens of a vocabulary of {len(mask)}", len(mask), vocabulary)
        return
    marked = sum(map(bool, mask))
    if marked != len(ids):
        yield found(f"t2d marks {marked} tokens, d2t maps {len(ids)}", marked, len(ids))
    elif any(index >= len(mask) or not mask[index] for index in ids):
        odd = [index for index in ids if index >= len(mask) or not mask[index]]
        yield found(f"t2d does not mark {len(odd)} of the {len(ids)} tokens that d2t maps to", odd[0], "marked",
                    ERROR if 2 * len(odd) > len(ids) else WARNING)  # fmt: skip


def vocabulary_size(facts: Facts) -> Iterator[Finding]:
    """The two configs' vocabularies."""
    draft, target = facts.draft, facts.target
    vocabulary, size = draft.config.count("vocab_size") or 0, draft.config.count("draft_vocab_size")
    if size is not None and size > vocabulary:
        yield Finding(_FAULT, ERROR, f"the head drafts over {size} tokens of a vocabulary of {vocabulary}",
                      draft.config.where, "draft_vocab_size", str(size), f"at most {vocabulary}",
                      "write the sizes that the head was trained with")  # fmt: skip
    elif vocabulary != target.vocab_size:
        yield Finding(_FAULT, WARNING, f"the head counts {vocabulary} tokens, the target {target.vocab_size}: it was "
                      "made for another tokenizer or another padding", draft.config.where, "vocab_size",
                      str(vocabulary), str(target.vocab_size),
                      f'write "vocab_size": {target.vocab_size} where only the padding differs, else take a head made '
                      "for this target")  # fmt: skip


def coverage(facts: Facts) -> Iterator[Finding]:
    """How much of what a trace emitted the head can draft at all: a ceiling on acceptance."""
    values, emitted = facts.draft.weights.d2t, facts.emitted
    size = facts.draft.config.count("draft_vocab_size")
    total = sum(emitted.values()) if emitted else 0
    if not emitted or not total or values is None or size is None or len(values) != size:
        return
    known = {row + offset for row, offset in enumerate(values)}
    share = sum(count for token, count in emitted.items() if token in known) / total
    if share < _LEAST_COVERAGE:
        yield Finding(_FAULT, ERROR if share < _BAD_COVERAGE else WARNING,
                      f"the head can draft {share:.1%} of the {total} tokens that the trace emitted, "
                      "whatever it learned",
                      facts.draft.weights.file, "d2t", f"{share:.3f}", f"{_LEAST_COVERAGE} or more",
                      "train a head with a draft vocabulary chosen from this target's own outputs")  # fmt: skip
