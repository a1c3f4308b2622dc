"""Precisions: what ``--precision`` and ``--kv-dtype`` may say, and what that means for each tensor of a head.

A precision is parts joined by ``+``, of which later ones win over earlier ones::

    bf16+w4a16:g128+lm_head=int8+features=fp8_e4m3+kv=fp8_e4m3:scale=0.5

- a dtype (fp32, bf16, fp16): what the head runs in; without one, the target's;
- a scheme, for every linear layer that the engine quantises: ``w4a16:g128``, ``w8a8``, ``int8``, ``fp8``, ``nvfp4``;
- ``NAME=SCHEME``, for the layers that NAME matches, ``NAME.weight=FORMAT`` and ``NAME.input=FORMAT`` for one side only;
- ``weights=FORMAT``, ``activations=FORMAT``: one side of every linear layer that the engine quantises;
- ``features=FORMAT`` (what the target hands over), ``kv=FORMAT`` (draft keys and values as stored), ``logits=DTYPE``.

What a format does to numbers is in head/quantise.py, where it is applied in head/emulation.py.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite

from replay.engines.layer_names import aliases, is_special
from replay.engines.profiles import PRECISIONS
from replay.errors import UsageError

_LONG_DTYPES = {dtype: name for name, dtype in PRECISIONS.items()}
_FAMILIES = {
    **dict.fromkeys(PRECISIONS, "dtype"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), "fp8"),
    **{name: name for name in ("int8", "int4", "nvfp4", "mxfp4")},
}
_ALIASES = {"fp8": "fp8_e4m3", **_LONG_DTYPES}
_GROUPS = ("g32", "g64", "g128")
_FIXED = "scale=S"
# How integers may be fitted to weights other than by default, by grid (head/quantise.py).
_FITS = {"int8": ("asym",), "int4": ("asym", "sym7")}

# By role and family the ways to choose scales; the first is the default. A grid with scales of its own has one way.
# Inputs have no scale per tensor: a server makes it from whatever else is in the batch. ``scale=S`` gives a static one.
_SCALINGS = {
    "weight": {
        "fp8": ("tensor", "channel", _FIXED),
        "int8": ("channel", "tensor", *_GROUPS),
        "int4": ("g128", "g64", "g32", "channel"),
        "nvfp4": ("tensor",),
        "mxfp4": ("block",),
    },
    "input": {
        "fp8": ("token", _FIXED),
        "int8": ("token", _FIXED),
        "int4": ("token", _FIXED),
        "nvfp4": ("token",),
        "mxfp4": ("block",),
    },
    "kv": {
        "fp8": (_FIXED, "scale=auto"),
        "int8": ("scale=auto", _FIXED),
        "int4": ("scale=auto", _FIXED),
        "nvfp4": ("token",),
        "mxfp4": ("block",),
    },
    "logits": {},
}
_SCALINGS["features"] = _SCALINGS["input"]


@dataclass(frozen=True, slots=True)
class Format:
    """A grid of numbers and how its scales are chosen.

    ``scaling``: ``""`` (a dtype: none), ``tensor`` (one scale), ``channel`` (a weight's output row), ``token`` (a row
    of inputs or of one tap's features), ``g32`` and so on (so many inputs of an output row), ``scale=auto`` (each row
    and key-value head its own), ``scale=S`` with ``fixed``, ``block`` (mxfp4 as its standard has it).
    ``fit`` of integers to weights: ``""`` symmetric, ``sym7`` symmetric with the largest at 7, ``asym`` with a zero.
    """

    grid: str
    scaling: str = ""
    fixed: float | None = None
    fit: str = ""

    @property
    def is_dtype(self) -> bool:
        """Whether this is a dtype's own grid, without scales."""
        return _FAMILIES[self.grid] == "dtype"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Formats of a linear layer's weight and input; None leaves them in the dtype that the head runs in."""

    weight: Format | None = None
    input: Format | None = None


@dataclass(frozen=True, slots=True)
class TensorRule:
    """``scheme`` for the ``sides`` (weight, input) of what ``pattern`` matches; "" is all that engines quantise."""

    pattern: str
    sides: tuple[str, ...]
    scheme: Scheme

    def covers(self, name: str, kept: tuple[str, ...]) -> bool:
        """Whether the rule speaks of the layer ``name`` where an engine leaves ``kept`` unquantised."""
        if not self.pattern:
            return name not in kept and not is_special(name)
        if is_special(name) and not any(word in self.pattern for word in ("norm", "embed")):
            return False
        return any(
            fnmatchcase(called, self.pattern) or fnmatchcase(called, f"*.{self.pattern}") for called in aliases(name)
        )

    def __str__(self) -> str:
        if self.sides == ("weight", "input"):
            return f"{self.pattern}={_spell_scheme(self.scheme)}" if self.pattern else _spell_scheme(self.scheme)
        (side,) = self.sides
        chosen = self.scheme.weight if side == "weight" else self.scheme.input
        assert chosen is not None
        scope = {"weight": "weights", "input": "activations"}[side]
        return f"{f'{self.pattern}.{side}' if self.pattern else scope}={_spell_format(chosen, side)}"


@dataclass(frozen=True, slots=True)
class Precision:
    """A parsed ``--precision``; ``str`` gives its one spelling. ``base`` None is the target's dtype."""

    base: str | None = None
    rules: tuple[TensorRule, ...] = ()
    features: Format | None = None
    kv: Format | None = None
    logits: Format | None = None

    def scheme(self, name: str, kept: tuple[str, ...] = ()) -> Scheme:
        """What the layer called ``name`` (``layers.0.mlp.down_proj``) runs in. ``kept`` as in ``TensorRule.covers``."""
        weight = entering = None
        for rule in self.rules:
            if rule.covers(name, kept):
                weight = rule.scheme.weight if "weight" in rule.sides else weight
                entering = rule.scheme.input if "input" in rule.sides else entering
        return Scheme(weight, entering)

    def __str__(self) -> str:
        named = [("features", self.features), ("kv", self.kv), ("logits", self.logits)]
        parts = [*([self.base] if self.base else []), *map(str, self.rules)]
        return "+".join([*parts, *(f"{role}={_spell_format(form, role)}" for role, form in named if form)])


PLAIN = Precision()


def parse_precision(text: str) -> Precision:
    """``bf16+w4a16:g128+lm_head=int8`` as a ``Precision``. Raises UsageError naming the part that cannot be."""
    base: str | None = None
    rules: list[TensorRule] = []
    formats: dict[str, Format] = {}
    for place, part in enumerate(text.split("+")):
        key, equals, value = part.strip().partition("=")
        key, value = key.strip(), value.strip()
        if not equals and _ALIASES.get(key, key) in PRECISIONS:
            if place:
                raise UsageError(f"precision {text!r} names the dtype {key} behind its first part; type it first")
            base = _ALIASES.get(key, key)
        elif key in ("features", "kv", "logits"):
            if key in formats:
                raise UsageError(f"precision {text!r} names {key} twice; type it once")
            formats[key] = parse_format(value, key)
        else:
            rules.append(_parse_rule(key, value) if equals else TensorRule("", ("weight", "input"), parse_scheme(key)))
    if sum(not rule.pattern and len(rule.sides) == 2 for rule in rules) > 1:
        raise UsageError(f"precision {text!r} names two schemes for all layers; type one of them")
    return Precision(base, tuple(rules), formats.get("features"), formats.get("kv"), formats.get("logits"))


def with_kv(precision: str | None, kv: str) -> str | None:
    """The precision with its draft keys and values stored in ``kv`` (``auto``: as the head runs). Raises UsageError."""
    if kv == "auto":
        return precision
    parsed = parse_precision(precision) if precision else Precision()
    if parsed.kv is not None:
        raise UsageError(f"precision {precision} names kv already; leave --kv-dtype away or that part of it")
    return "+".join(filter(None, [str(parsed), f"kv={kv}"]))


def _parse_rule(key: str, value: str) -> TensorRule:
    if not re.fullmatch(r"[\w.*?\[\]!-]+", key):
        raise UsageError(f"precision part {key!r} names no tensor; type e.g. fc=bf16 or *.down_proj=int8")
    if key in ("weights", "activations"):
        key = {"weights": ".weight", "activations": ".input"}[key]
    for side in ("weight", "input"):
        if key.endswith(f".{side}"):
            form = parse_format(value, side)
            return TensorRule(key.removesuffix(f".{side}"), (side,), Scheme(**{side: form}))
    return TensorRule(key, ("weight", "input"), parse_scheme(value))


def parse_scheme(text: str) -> Scheme:
    """Weight and input formats that a name stands for.

    ``wNaM`` has N-bit integer weights and M-bit integer inputs, 16 leaving them as they are. ``fp8``, ``fp8_e5m2``,
    ``nvfp4`` and ``mxfp4`` quantise both sides, as engines run them; ``int8`` and ``int4`` alone the weights. Suffixes
    speak of the weights. Raises UsageError.
    """
    bits = re.fullmatch(r"w(4|8|16)a(4|8|16)((?::.*)?)", text)
    if bits:
        weight, entering, suffix = bits.groups()
        if weight == "16" and suffix:
            raise UsageError(f"precision {text!r} gives a scale to weights that it leaves as they are; drop {suffix}")
        return Scheme(
            None if weight == "16" else parse_format(f"int{weight}{suffix}", "weight", typed=text),
            None if entering == "16" else parse_format(f"int{entering}", "input"),
        )
    if _ALIASES.get(text.partition(":")[0], text.partition(":")[0]) not in _FAMILIES:
        raise UsageError(
            f"precision {text!r} is not known, possible are {', '.join(_FAMILIES)}, w8a8, w4a16:g128 and the like, and "
            "NAME=... for single tensors"
        )
    form = parse_format(text, "weight")
    if form.grid in ("int8", "int4"):
        return Scheme(form, None)
    return Scheme(form, form if form.is_dtype else parse_format(form.grid, "input"))


def parse_format(text: str, role: str, *, typed: str | None = None) -> Format:
    """``int4:g64:asym`` as the Format of a ``role``: weight, input, features, kv or logits.

    Raises UsageError, which names what was ``typed`` where ``text`` was made of that.
    """
    name, *suffixes = text.split(":")
    grid = _ALIASES.get(name, name)
    ways = _SCALINGS[role]
    possible = [known_grid for known_grid, family in _FAMILIES.items() if family == "dtype" or family in ways]
    if grid not in possible:
        raise UsageError(f"precision {name!r} of {_nouns(role)} is not known, possible are {', '.join(possible)}")
    if _FAMILIES[grid] == "dtype":
        if suffixes:
            raise UsageError(f"precision {text!r} of {_nouns(role)}: a dtype takes no scale; type {grid}")
        return Format(grid)
    fits = _FITS.get(grid, ()) if role == "weight" else ()
    fit = next((suffix for suffix in suffixes if suffix in fits), "")
    scalings = list(suffixes)
    if fit:
        scalings.remove(fit)
    scaling, fixed = _parse_scaling(typed or text, scalings, ways[_FAMILIES[grid]], role, () if fit else fits)
    return Format(grid, scaling, fixed, fit)


def _parse_scaling(
    text: str, typed: list[str], possible: tuple[str, ...], role: str, beside: tuple[str, ...] = ()
) -> tuple[str, float | None]:
    """Scaling and fixed scale as ``typed``; ``beside`` is what could have stood there too."""
    if not typed:
        return (possible[0], 1.0) if possible[0] == _FIXED else (possible[0], None)
    if len(typed) == 1 and typed[0] in possible and typed[0] != _FIXED:
        return typed[0], None
    if len(typed) == 1 and _FIXED in possible and typed[0].startswith("scale="):
        fixed = _positive(typed[0].removeprefix("scale="))
        if fixed is not None:
            return _FIXED, fixed
    said = ":" + ":".join(typed)
    raise UsageError(
        f"precision {text!r} of {_nouns(role)}: {said} cannot be, possible are "
        f"{', '.join(':' + way for way in (*possible, *beside))}{' (S a number above 0)' if _FIXED in possible else ''}"
    )


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) and number > 0 else None


def _nouns(role: str) -> str:
    return {"weight": "weights", "input": "inputs", "kv": "keys and values"}.get(role, role)


def _spell_scheme(scheme: Scheme) -> str:
    weight, entering = scheme.weight, scheme.input
    if (weight is None or weight.grid in ("int8", "int4")) and (entering is None or entering.grid in ("int8", "int4")):
        suffix = "" if weight is None else _spell_format(weight, "weight").removeprefix(weight.grid)
        return f"w{_bits(weight)}a{_bits(entering)}{suffix}"
    assert weight is not None
    return _spell_format(weight, "weight")


def _bits(form: Format | None) -> str:
    return "16" if form is None else form.grid.removeprefix("int")


def _spell_format(form: Format, role: str) -> str:
    if form.is_dtype:
        return form.grid
    default, *_ = _SCALINGS[role][_FAMILIES[form.grid]]
    scaling = f"scale={form.fixed:g}" if form.fixed is not None else form.scaling
    # Groups and fixed scales are always said: nobody should have to know the default.
    said = form.scaling != default or form.fixed is not None or scaling in _GROUPS
    return ":".join([form.grid, *([scaling] if said else []), *([form.fit] if form.fit else [])])
