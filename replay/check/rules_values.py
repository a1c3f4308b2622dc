"""Rules on the numbers in the head's tensors: sampled always, read whole when asked."""

from collections.abc import Iterator

from replay.check.facts import Facts
from replay.check.finding import ERROR, Finding
from replay.traces.fields import some

_MISSING = "weights.missing"


def sampled(facts: Facts) -> Iterator[Finding]:
    """What two small samples of each tensor show: NaN, and nothing but zeros."""
    weights = facts.draft.weights
    if weights.extents is not None:
        return  # the rule on whole weights says it better
    blank = [name for name in weights.blank if not name.endswith((".bias", "embed_tokens.weight"))]
    for odd, what, expected in (
        (list(weights.unfinite), "holds NaN or Inf", "finite numbers"),
        (blank, "is zero where it was looked at, so it was never trained or not saved", "trained weights"),
    ):
        if odd:
            yield Finding(_MISSING, ERROR, f"{some(odd)} {what}", weights.file, odd[0], what, expected,
                          "export the head again from its training checkpoint")  # fmt: skip


def whole(facts: Facts) -> Iterator[Finding]:
    """Read whole: NaN, zeros, constants, and what fp16 cannot hold."""
    draft = facts.draft
    extents = draft.weights.extents or {}
    unfinite = [name for name, extent in extents.items() if extent.unfinite]
    zero = [name for name, extent in extents.items() if extent.constant and name.endswith("_proj.weight")]
    zero += [name for name in ("fc.weight", "lm_head.weight") if name in extents and extents[name].constant]
    silent = [name for name, extent in extents.items() if "norm" in name and extent.constant and not extent.largest]
    for names_, what, expected in (
        (unfinite, "holds NaN or Inf", "finite numbers"),
        (zero, "holds one number throughout, so it was never trained or not saved", "trained weights"),
        (silent, "is zero throughout, so nothing passes", "trained weights"),
    ):
        if names_:
            yield Finding(_MISSING, ERROR, f"{some(names_)} {what}", draft.weights.file, names_[0], what, expected,
                          "export the head again from its training checkpoint")  # fmt: skip
