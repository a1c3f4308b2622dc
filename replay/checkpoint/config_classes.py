"""What the class of a ``model_type`` makes of a config.json: defaults, types, and where it looks for what.

A config.json leaves out what its class has a default for, and a class refuses a field of another type. The facts lie in
config_classes.json, which scripts/config_classes.py derives from SGLang 0.5.23 and Transformers 5.24 (what rules need
of them is the same in the 5.19 that SGLang asks for). This room reads them without either package.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

SCALING_FIRST, SCALING_ALONE, PARAMETERS_FIRST, FULL_ATTENTION = "scaling", "alone", "parameters", "full"
_WORDS = {
    "n": "null", "b": "true or false", "i": "a whole number", "f": "a number with a decimal point", "s": "a string",
    "l": "a list of whole numbers", "t": "a list of strings", "d": "an object",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """One class. ``defaults``: of fields that a config may leave out. ``aliases``: other names of such fields.

    - ``types``: field → letters of the JSON types that it takes; a field without an entry takes anything.
    - ``inner``: the field that holds a model's language part; ``inner_class``: the class of that part, unless it
      ``follows`` the part's own model_type. ``flat``: without that field, its fields may stand beside the others.
    - ``rope_order``: which of rope_scaling and rope_parameters wins, that the latter is not read, or that rope_scaling
      goes to the layers of full attention alone. ``raw``: a scaling is left as it stands, without an original length.
    - ``divides``: hidden_size must be a multiple of num_attention_heads.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    inner: str | None = None
    inner_class: str | None = None
    follows: bool = False
    flat: bool = False
    rope_order: str = SCALING_FIRST
    rope_default: Mapping[str, Any] = field(default_factory=dict)
    theta: float | None = None
    raw: bool = False
    divides: bool = False

    def expected(self, name: str) -> str:
        """The types of a field in words, for a message."""
        return " or ".join(_WORDS[letter] for letter in self.types[name])


@cache
def _document() -> dict[str, Any]:
    text = files("replay.checkpoint").joinpath("config_classes.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)  # ours, and installed with us
    return document


def layer_types() -> tuple[str, ...]:
    """The words that Transformers knows for a layer in ``layer_types``."""
    return tuple(_document()["layer_types"])


def is_known(model_type: str) -> bool:
    """Whether SGLang or Transformers has a config class of that model type."""
    document = _document()
    return model_type in document["model_types"] or model_type in document["others"].split()


def class_of(model_type: str | None) -> ConfigClass | None:
    """The config class of a model type; None of one that no language model that SGLang serves has."""
    name = _document()["model_types"].get(model_type)
    return None if name is None else class_called(name)


@cache
def class_called(name: str) -> ConfigClass | None:
    """The config class by its name in Python; None where it is not known."""
    document = _document()
    row = document["classes"].get(name)
    if row is None:
        return None
    rope, (inner, inner_class, *follows) = row.get("rope", {}), row.get("inner", (None, None))
    return ConfigClass(
        name,
        row.get("defaults", {}),
        row.get("aliases", {}),
        {key: document["types"][key] for key in row.get("usual", "").split()} | row.get("types", {}),
        inner,
        inner_class,
        bool(follows),
        row.get("flat", False),
        rope.get("order", SCALING_FIRST),
        rope.get("default", {}),
        rope.get("theta"),
        rope.get("raw", False),
        row.get("divides", False),
    )


def letter_of(value: object) -> str:
    """The letter of a JSON value's type; of a list that is empty or mixed both letters of lists."""
    if isinstance(value, list):
        kinds = {letter_of(item) for item in value}
        return "l" if kinds == {"i"} else "t" if kinds == {"s"} else "lt"
    return {type(None): "n", bool: "b", int: "i", float: "f", str: "s"}.get(type(value), "d")
