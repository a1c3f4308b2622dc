"""Rules on what a config class takes: a model type that it knows, fields of the right type, layers that agree.

Sources: Transformers models/auto/configuration_auto.py (``AutoConfig.from_pretrained``), configuration_utils.py
(``validate_layer_type``, ``__post_init__``), models/*/configuration_*.py and huggingface_hub dataclasses.py
(``strict``), alike in 5.19 and 5.24; SGLang 0.5.23 utils/hf_transformers/config.py and models/llama_eagle3.py.
"""

from collections.abc import Iterator

from replay.check.facts import Facts
from replay.check.finding import ERROR, Finding
from replay.checkpoint.config_classes import ConfigClass, class_of, is_known, layer_types, letter_of
from replay.checkpoint.config_file import Settings
from replay.traces.fields import show

_FAULT = "config.field-drop"
_DTYPES = ("bfloat16", "float16", "half", "float32", "float", "float64", "double")  # what torch and SGLang can run
_LIKELY = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _json(value: object) -> str:
    """A value as it stands in the file."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else show(value)


def _stops(where: Settings, what: str, field: str, expected: str, fix: str) -> Finding:
    seen = _json(where.values[field]) if field in where.values else "absent"
    return Finding(_FAULT, ERROR, f"SGLang stops: {what}", where.where, field, seen, expected, fix)


def model_type(facts: Facts) -> Iterator[Finding]:
    """The fields by which Transformers chooses a config's class and SGLang a model's; a path tells them nothing."""
    if facts.server.engine != "sglang":
        return
    wanted = "deepseek_v3" if facts.draft.mla else "llama"
    draft, target, copied = facts.draft.stated, facts.target.outer, "copy config.json from where it was published"
    yield from _unknown(draft, "head", wanted, f'write "model_type": "{wanted}"')
    yield from _unknown(target, "target", "the target's", copied)
    if (inner := _lacking_part(draft)) is not None:
        kind = draft.values.get("model_type")
        yield Finding(_FAULT, ERROR, f"the class of the head's model_type {kind} keeps layers and heads in {inner}, "
                      "which the config does not have: SGLang sizes the head's KV cache by the class's defaults, or "
                      "stops", draft.where, "model_type", str(kind), wanted,
                      f'write "model_type": "{wanted}"')  # fmt: skip


def _unknown(config: Settings, whose: str, wanted: str, fix: str) -> Iterator[Finding]:
    """At most one finding."""
    kind, remote = config.values.get("model_type"), config.values.get("auto_map", {})
    if remote is None:
        yield _stops(config, f"the {whose}'s auto_map is null", "auto_map", "absent", "remove auto_map")
    elif "text_config" in config.values and not config.values["text_config"] and not _keeps_part(kind):
        yield _stops(config, f"the {whose}'s text_config is there and empty", "text_config", "absent",
                     "remove text_config, or copy it whole")  # fmt: skip
    elif isinstance(remote, dict) and "AutoConfig" in remote:
        return  # the checkpoint brings a class of its own
    elif kind is None:
        yield _stops(config, f"the {whose}'s config names no model_type", "model_type", wanted, fix)
    elif not isinstance(kind, str) or not is_known(kind):
        yield _stops(config, f"neither it nor Transformers knows the {whose}'s model_type {_json(kind)}", "model_type",
                     wanted, fix)  # fmt: skip


def _keeps_part(kind: object) -> bool:
    """Whether the class of a model type has a language part, and so defaults for it."""
    cls = class_of(kind) if isinstance(kind, str) else None
    return cls is not None and cls.inner is not None


def _lacking_part(config: Settings) -> str | None:
    """The field that a model's language part stands in, where the class has one and the config has not."""
    kind = config.values.get("model_type")
    cls = class_of(kind) if isinstance(kind, str) else None
    inner = cls.inner if cls is not None and not cls.flat else None
    return inner if inner is not None and not isinstance(config.values.get(inner), dict) else None


def field_types(facts: Facts) -> Iterator[Finding]:
    """Fields whose value is of a type that the class refuses, in the head's config and in the target's."""
    if facts.server.engine != "sglang":
        return
    draft, target = facts.draft, facts.target
    yield from _mistyped(draft.stated, draft.cls, "head")
    yield from _mistyped(target.outer, class_of(target.outer.text("model_type")), "target")
    if target.stated is not target.outer:
        yield from _mistyped(target.stated, target.cls, "target")
    # models/llama_eagle3.py multiplies by the width as soon as the field is there; the class of MLA heads looks at it.
    if draft.stated.has("target_hidden_size") and not draft.mla and draft.stated.values["target_hidden_size"] is None:
        yield _stops(draft.stated, "target_hidden_size is null, and fc's width is a multiple of it",
                     "target_hidden_size", str(target.hidden_size),
                     f'write "target_hidden_size": {target.hidden_size}')  # fmt: skip


def _mistyped(config: Settings, cls: ConfigClass | None, whose: str) -> Iterator[Finding]:
    types = cls.types if cls is not None else {}
    for name, value in config.values.items():
        # rope_scaling becomes rope_parameters, and nothing is rope_parameters where it is empty
        letters = types.get("rope_parameters" if name == "rope_scaling" and value else name)
        if letters is not None and cls is not None and not set(letter_of(value)) & set(letters):
            expected = cls.expected("rope_parameters" if name == "rope_scaling" else name)
            yield _stops(config, f"the {whose}'s {name} is {_json(value)}, and its class takes {expected}", name,
                         expected, _fix_type(name, value, letters))  # fmt: skip


def _fix_type(name: str, value: object, letters: str) -> str:
    if value is None:
        return f"write the {name} that the model was trained with, or remove the field for the class's default"
    if "f" in letters and type(value) is int:
        return f'write "{name}": {float(value)}'
    return f"write {name} as it stands in the config of the training run"


def layers(facts: Facts) -> Iterator[Finding]:
    """``layer_types`` against the number of layers, and heads that must divide the width."""
    if facts.server.engine != "sglang":
        return
    for config, cls, count, whose in (
        (facts.draft.stated, facts.draft.cls, facts.draft.config.count("num_hidden_layers"), "head"),
        (facts.target.stated, facts.target.cls, facts.target.layers, "target"),
    ):
        if cls is None or not cls.types:
            continue  # a class of SGLang's own, which holds none of this
        yield from _layer_types(config, cls, count, whose)
        yield from _division(config, cls, whose)


def _layer_types(config: Settings, cls: ConfigClass, count: int | None, whose: str) -> Iterator[Finding]:
    kinds = config.values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list) and "layer_types" not in cls.types:  # else a mistyped field
        yield _stops(config, f"the {whose}'s layer_types is {show(kinds)}, no list", "layer_types",
                     "a list with a word for each layer", "remove layer_types")  # fmt: skip
    if not isinstance(kinds, list):
        return
    odd = [kind for kind in kinds if kind not in layer_types()]
    if odd:
        yield _stops(config, f"Transformers knows no layer of the type {show(odd[0])}", "layer_types",
                     "full_attention or sliding_attention", "remove layer_types")  # fmt: skip
    elif count is not None and len(kinds) != count:
        yield _stops(config, f"the {whose}'s layer_types names {len(kinds)} layers, its num_hidden_layers is {count}",
                     "layer_types", f"{count} of them",
                     "remove layer_types where it was copied from another config")  # fmt: skip


def _division(config: Settings, cls: ConfigClass, whose: str) -> Iterator[Finding]:
    sizes = {**cls.defaults, **config.values}
    width, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    if cls.divides and type(width) is int and type(heads) is int and heads > 0 and width % heads:
        yield _stops(config, f"the {whose}'s class wants hidden_size {width} to be a multiple of its {heads} attention "
                     "heads, whatever head_dim says", "num_attention_heads", f"a divisor of {width}",
                     "write a model_type whose class does not ask for it, such as qwen3")  # fmt: skip


def dtypes(facts: Facts) -> Iterator[Finding]:
    """The name of a dtype, which Transformers looks up in torch as it stands."""
    if facts.server.engine != "sglang":
        return
    configs = (facts.draft.stated, facts.target.outer, facts.target.stated)
    for config in {one.where: one for one in configs}.values():
        # Where both are there dtype is the one that is read; of another type than a string, it is a mistyped field.
        name = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
        value = config.values.get(name)
        if value is None or value in _DTYPES or (name == "dtype" and not isinstance(value, str)):
            continue
        short = value.removeprefix("torch.") if isinstance(value, str) else ""
        wanted = _LIKELY.get(short, short if short in _DTYPES else "bfloat16")
        yield _stops(config, f"torch has no floating dtype called {show(value)}", name, wanted,
                     f'write "{name}": "{wanted}"')  # fmt: skip
