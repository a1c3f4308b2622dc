"""A variant: everything that determines a replay, and how a sweep spells its members."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.tree_shape import count_candidates
from replay.engines.precision import Precision, parse_precision
from replay.engines.profiles import NUMERICS, EngineProfile, Numerics, engine_profile
from replay.engines.wiring import Wiring
from replay.errors import UsageError
from replay.faults.table import KV_POLICIES, Fault, parse_policy
from replay.traces.fields import show
from replay.traces.rounds import HEALTHY_NAME
from replay.verify.rules import MAX_STEPS, Rule, parse_rule

MAX_TOPK = 64
MAX_DRAFT_TOKENS = 4096
CHAIN_KV, TREE_KVS = "refresh", ("slot", "path")


@dataclass(frozen=True, slots=True)
class Variant:
    """What may differ between two replays of one trace, as somebody asks for it.

    ``draft`` names one of the heads given to ``simulate``. ``wiring`` None means the one that the head states, read
    as ``engine`` reads it; ``precision`` (engines/precision.py) None the target's; ``numerics`` None the engine's.

    ``topk`` 1 drafts chains; more draft trees of ``num_draft_tokens``, the tokens that the target verifies per round,
    the known one included. A chain has steps + 1 whatever is given, as SGLang sets it
    (arg_groups/speculative_hook.py); a tree has no default, there as here.

    ``kv``: committed draft KV comes from true features (``refresh``), unless a policy such as ``stale`` or ``hole:16``
    (``faults.parse_policy``) says otherwise. What a node of a tree sees beyond it has a layout of its own: ``slot``
    whatever stood in its column, ``path`` its ancestors; ``refresh`` or None means the engine's. A chain has one
    column, so that these three are ``refresh`` there. ``faults`` are applied one after the other, ``kv``'s last.

    ``verify`` is an acceptance rule as verify/rules.py spells it.

    A head that drafts blocks drafts ``steps`` tokens by blocks of one more; ``default_steps`` is what fills the block
    it was trained on.
    """

    draft: str
    wiring: Wiring | None = None
    steps: int = 5
    topk: int = 1
    num_draft_tokens: int | None = None
    precision: str | None = None
    numerics: str | None = None
    kv: str | None = None
    verify: str = "greedy"
    engine: str = "sglang"
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for a value that cannot be."""
        _check_types(self)
        profile = engine_profile(self.engine)
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"{self.steps} steps were asked for, possible are 1 to {MAX_STEPS}")
        if not 1 <= self.topk <= MAX_TOPK:
            raise UsageError(f"topk {self.topk} was asked for, possible are 1 (a chain) to {MAX_TOPK}")
        if self.precision is not None:
            parse_precision(self.precision)
        _one_of("numerics", self.numerics, (None, *NUMERICS))
        if policy := policy_fault(self.kv):
            if policy in self.faults:
                raise UsageError(f"kv {self.kv} is the fault {policy}, which was given as well; type one of them")
        rule = parse_rule(self.verify)
        if rule.chains_only and self.topk > 1:
            raise UsageError(
                f"rule {rule} was asked for with topk {self.topk}, it verifies chains; type --topk 1, or another rule"
            )
        draft_tokens(self.topk, self.steps, self.num_draft_tokens)
        kv_layout(self.topk, self.kv, profile)


@dataclass(frozen=True, slots=True)
class ResolvedVariant:
    """A variant in which everything is decided for one head and one trace (binding.py ``resolve``).

    Fields are called as in ``Variant`` and mean the same. ``precision`` names its dtype; ``kv`` is ``refresh`` or a
    policy of a chain, ``slot`` or ``path`` of a tree.
    """

    draft: str
    wiring: Wiring
    steps: int
    topk: int
    num_draft_tokens: int
    precision: Precision
    numerics: Numerics
    kv: str
    verify: Rule
    engine: EngineProfile
    faults: tuple[Fault, ...]

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """The faults, with that of a draft KV policy behind them."""
        policy = policy_fault(self.kv)
        return self.faults if policy is None else (*self.faults, policy)


# What a field may hold, for Python callers whom no type checker has told.
_TEXT, _MAYBE_TEXT = (str,), (str, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "draft": _TEXT, "wiring": (Wiring, type(None)), "steps": (int,), "topk": (int,),
    "num_draft_tokens": (int, type(None)), "precision": _MAYBE_TEXT, "numerics": _MAYBE_TEXT, "kv": _MAYBE_TEXT,
    "verify": _TEXT, "engine": _TEXT, "faults": (tuple,),
}  # fmt: skip


def _check_types(variant: Variant) -> None:
    for name, kinds in _TYPES.items():
        value = getattr(variant, name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UsageError(f"{name} of a variant is {show(value)}, a value of type {wanted} was expected")
    if not all(isinstance(fault, Fault) for fault in variant.faults):
        raise UsageError(f"faults of a variant are {show(variant.faults)}; make them by parse_faults")


def default_steps(checkpoint: Checkpoint) -> int:
    """Steps where nobody says how many: all mask tokens of a block, else 5."""
    block = checkpoint.config.block
    return 5 if block is None else min(MAX_STEPS, max(1, block.size - 1))


def policy_fault(kv: str | None) -> Fault | None:
    """The fault that a draft KV policy is; None where ``kv`` is a layout, which is no fault. Raises UsageError."""
    return None if kv in (None, CHAIN_KV, *TREE_KVS) else parse_policy(str(kv))


def draft_tokens(topk: int, steps: int, wanted: int | None) -> int:
    """Tokens verified a round: those of a chain follow from its steps, those of a tree are given. Raises UsageError."""
    if topk == 1:
        return steps + 1
    most = min(1 + count_candidates(topk, steps), MAX_DRAFT_TOKENS)
    if wanted is None:
        raise UsageError(
            f"topk {topk} drafts trees and the number of draft tokens was not given, possible are 2 to {most} with "
            f"{steps} steps; type the server's with --num-draft-tokens N"
        )
    if not 2 <= wanted <= most:
        raise UsageError(
            f"{wanted} draft tokens were asked for, a tree of topk {topk} and {steps} steps has 2 to {most}, the known "
            "token included; type another --num-draft-tokens"
        )
    return wanted


def kv_layout(topk: int, wanted: str | None, profile: EngineProfile) -> str:
    """The draft KV of a chain or tree where ``wanted`` was typed. Raises UsageError for a policy in trees."""
    if topk == 1:
        return CHAIN_KV if wanted is None or wanted in TREE_KVS else wanted
    if wanted not in (None, CHAIN_KV, *TREE_KVS):
        raise UsageError(
            f"kv {wanted} was asked for in trees of topk {topk}, possible are {', '.join(TREE_KVS)}; type --topk 1 "
            f"for one of {KV_POLICIES}"
        )
    return profile.tree_kv if wanted in (None, CHAIN_KV) else str(wanted)


def _one_of(field: str, value: object, possible: tuple[object, ...], why: str = "") -> None:
    if value not in possible:
        choices = ", ".join(str(choice) for choice in possible if choice is not None)
        raise UsageError(
            f"{field} {value!r} was asked for, possible {'is' if len(possible) == 1 else 'are'} {choices}"
            + (f": {why}" if why else "")
        )


def sweep(**choices: list[object]) -> list[Variant]:
    """Every combination of the given values, a field each: ``sweep(draft=["h"], steps=[1, 3])``.

    Combinations that come to the same variant (a chain under another tree layout) stand there once.
    """
    possible = [field.name for field in fields(Variant)]
    wrong = sorted(set(choices) - set(possible))
    if wrong or "draft" not in choices:
        seen = f"{', '.join(wrong)} is no field of a variant" if wrong else "no draft was given"
        raise UsageError(f"{seen}; a sweep takes draft and any of {', '.join(possible[1:])}")
    for name, given in choices.items():
        if not isinstance(given, list | tuple):
            raise UsageError(f"{name} is {show(given)}; a sweep takes a list of values for each field")
    names = [name for name in possible if name in choices]
    combinations: Iterator[dict[str, Any]] = (
        dict(zip(names, values, strict=True)) for values in product(*(choices[name] for name in names))
    )
    distinct: dict[Hashable, Variant] = {}
    for values in combinations:
        variant = Variant(**values)
        distinct.setdefault(_meaning(variant), variant)
    return list(distinct.values())


def _meaning(variant: Variant) -> Hashable:
    """Equal for two variants that differ in their spelling only."""
    return replace(
        variant,
        num_draft_tokens=draft_tokens(variant.topk, variant.steps, variant.num_draft_tokens),
        precision=None if variant.precision is None else str(parse_precision(variant.precision)),
        kv=kv_layout(variant.topk, variant.kv, engine_profile(variant.engine)),
        verify=str(parse_rule(variant.verify)),
    )


def name_variants(variants: Sequence[ResolvedVariant]) -> list[str]:
    """A short distinct name for each, made of the fields in which they differ."""
    columns = [field.name for field in fields(ResolvedVariant)]
    differing = [name for name in columns if len({getattr(variant, name) for variant in variants}) > 1]
    if not differing:
        differing = ["wiring"]
    if "num_draft_tokens" in differing and all(variant.topk == 1 for variant in variants):
        differing.remove("num_draft_tokens")
    names = [
        " ".join(_spell(name, getattr(variant, name)) for name in differing if not _follows(variant, name))
        for variant in variants
    ]
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[place] = f"{name} #{seen[name]}"
    return names


def _follows(variant: ResolvedVariant, name: str) -> bool:
    """Whether the field says nothing that topk 1 has not said."""
    return (variant.topk == 1 and name == "num_draft_tokens") or (name == "kv" and variant.kv == CHAIN_KV)


def _spell(name: str, value: object) -> str:
    if isinstance(value, EngineProfile | Numerics):
        value = value.name
    if name in ("draft", "wiring", "precision", "numerics"):
        return str(value)
    if isinstance(value, tuple):
        return "+".join(str(fault) for fault in value) or HEALTHY_NAME
    return f"{name}={value}"
