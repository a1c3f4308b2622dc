"""What is timed and planned: a setting of a server at one batch, and the words in which people type it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from replay.errors import UsageError

MOST_BATCH = 1 << 16
MOST_STEPS = 64  # as of a replay (replay/verify/rules.py)
MOST_NODES = 1 << 16
MOST_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """How a server drafts. ``steps`` 0: it does not, and each round is one plain step with one token.

    ``num_draft_tokens`` are the rows that one request brings into a verify, the root included.
    """

    steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return self.steps > 0

    @property
    def most(self) -> int:
        """The largest accept length: every step accepted, and the bonus token."""
        return self.steps + 1

    @property
    def spelled(self) -> str:
        """``no speculation``, ``1 step``, ``5 steps, topk 4, 16 draft tokens``."""
        if not self.speculates:
            return "no speculation"
        steps = f"{self.steps} step" + ("" if self.steps == 1 else "s")
        return steps if self.topk == 1 else f"{steps}, topk {self.topk}, {self.num_draft_tokens} draft tokens"


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """What runs at a time: requests in a batch, and tokens of context of each (None: not told)."""

    batch: int = 1
    context: int | None = None

    @property
    def spelled(self) -> str:
        """``batch 8`` or ``batch 8, context 2000``."""
        return f"batch {self.batch}" + ("" if self.context is None else f", context {self.context}")


PLAIN = Setting()


def make_setting(steps: int, topk: int = 1, num_draft_tokens: int | None = None) -> Setting:
    """A setting that a server takes.

    A chain verifies steps + 1 rows of each request (SGLang 0.5.23 server_args.py sets speculative_num_draft_tokens to
    that where topk is 1). Raises UsageError for a tree without its size, and for one that cannot be.
    """
    if steps == 0:
        return PLAIN
    if topk == 1:
        return Setting(steps, 1, steps + 1)
    if num_draft_tokens is None:
        raise UsageError(f"a tree with topk {topk} needs its size; add draft_tokens=N")
    if num_draft_tokens < 2:
        raise UsageError(f"a tree of {num_draft_tokens} draft tokens drafts nothing; type draft_tokens=2 or more")
    return Setting(steps, topk, num_draft_tokens)


def read_pairs(text: str, option: str, known: Mapping[str, str]) -> dict[str, float]:
    """``batch=1,steps=5,ms=32`` as a mapping from names to finite numbers.

    ``known`` maps each name that may be typed to its one spelling here. Raises UsageError naming the word, for an
    unknown name, one that is there twice and a value that is no number.
    """
    found: dict[str, float] = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in known:
            raise UsageError(f"{option} has {word.strip()!r}; possible are NAME=NUMBER with {', '.join(known)}")
        if known[name] in found:
            raise UsageError(f"{option} says {name} twice in {text!r}; type it once")
        found[known[name]] = _number(value, f"{option} {name}")
    return found


def _number(text: str, what: str) -> float:
    # float() takes "1_0" and "infinity" too, which nobody means here.
    if not re.fullmatch(r"\d{1,15}(\.\d{0,15})?|\.\d{1,15}", text.strip(), re.ASCII):
        raise UsageError(f"{what} is {text!r}; type a number such as 90 or 0.5")
    number = float(text)
    if not math.isfinite(number):
        raise UsageError(f"{what} is {text!r}; type a finite number")
    return number


def whole(found: Mapping[str, float], name: str, default: int, low: int, high: int) -> int:
    """The whole number behind ``name``. Raises UsageError where it is none between ``low`` and ``high``."""
    value = found.get(name, default)
    if value != int(value) or not low <= value <= high:
        raise UsageError(f"{name} is {value:g}; possible are whole numbers from {low} to {high}")
    return int(value)
