"""``--json-model-override-args``: one JSON object that SGLang writes into the target's config, and into the head's.

Source: SGLang 0.5.23 utils/hf_transformers/config.py (get_config), which both configs go through.
"""

import json
from collections.abc import Mapping
from typing import Any

from replay.check.server import Server
from replay.errors import UsageError
from replay.traces.fields import parse_json

FIELD = "json_model_override_args"
_ROPE = ("rope_scaling", "rope_parameters")  # two names of one field of Transformers 5
_PARTS = ("text_config", "language_config", "llm_config", "thinker_config", "vision_config", "audio_config")


def override_of(server: Server) -> dict[str, Any]:
    """What the arguments change in a config; empty where they change nothing, or where SGLang stops at them.

    Raises UsageError for JSON that SGLang reads and that is not to be trusted: a key twice, or a depth without end.
    """
    text = server.text(FIELD)
    if text is None or server.engine != "sglang" or not is_read(text):
        return {}
    changes = parse_json(text, f"--{FIELD.replace('_', '-')}", UsageError, constants=True)
    return changes if isinstance(changes, dict) else {}


def is_read(text: str) -> bool:
    """Whether SGLang takes it: an object, or any other JSON that is empty (configs/model_config.py)."""
    try:
        changes = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(changes, dict) or not changes


def overridden(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config after the override.

    A rope object is laid over the one that is there, an inner config is updated (and none is added: SGLang stops),
    anything else replaced. ``rope_theta`` at the top changes nothing: Transformers 5 keeps theta in the rope object.
    """
    result = dict(document)
    for key, value in changes.items():
        if key in _ROPE:
            _lay_over(result, value)
        elif key in _PARTS:
            result |= {key: {**result[key], **value}} if _both(result.get(key), value) else {}
        elif key != "rope_theta":
            result[key] = value
    return result


def _both(inner: Any, value: Any) -> bool:
    return isinstance(inner, dict) and isinstance(value, dict)


def rope_object(document: Mapping[str, Any]) -> dict[str, Any]:
    """The rope object as Transformers 5 makes it of a config: theta and ``rope_type`` in it, however spelled."""
    objects = (document.get(key) for key in reversed(_ROPE))
    stated: dict[str, Any] = next((rope for rope in objects if isinstance(rope, dict) and rope), {})
    rope = {key: value for key, value in stated.items() if key != "type"}
    rope.setdefault("rope_type", stated.get("type", "default"))
    if "rope_theta" not in rope and document.get("rope_theta") is not None:
        rope["rope_theta"] = document["rope_theta"]
    return rope


def rewrites_rope(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two configs rotate otherwise; theta is 10000 where none is stated."""
    default = {"rope_theta": 10000}
    return default | rope_object(before) != default | rope_object(after)


def _lay_over(document: dict[str, Any], value: Any) -> None:
    rope = {**rope_object(document), **value} if isinstance(value, dict) else value
    for key in (*_ROPE, "rope_theta"):
        document.pop(key, None)
    document["rope_parameters"] = rope
