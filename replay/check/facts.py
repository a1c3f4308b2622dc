"""What `replay check` knows: configs, tensor headers, small tensors and server arguments. Read, never judged.

Only headers are read of the weights, and the vocabulary map and a few embedding rows byte by byte: neither torch nor
numpy is imported, unless the head is a pytorch_model.bin or its weights are asked for.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.check.server import Server
from replay.checkpoint.config_file import CONFIG, Settings, is_word, read_config
from replay.checkpoint.headers import TensorFact, Weights, read_weights
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError
from replay.traces.header import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from replay.traces.weights import EMBED_NAMES

if TYPE_CHECKING:
    from replay.traces.reader import Trace

_INNER = ("text_config", "language_config", "llm_config")  # where a model that also sees keeps its language part
# What no target is larger than; a trace of it could not be recorded (traces/header.py).
_LARGEST = {"num_hidden_layers": MAX_LAYERS, "hidden_size": MAX_WIDTH, "vocab_size": MAX_VOCAB}
_EMBED_SAMPLE = 8  # rows of the two embeddings that are compared


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft head on disk. ``speculators``: its config is nested the way speculators writes it.

    ``filled``: sizes that the config lacks and that were taken from its tensors or the target, so that rules can go on.
    """

    name: str
    config: Settings
    speculators: bool
    weights: Weights
    filled: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, TensorFact]:
        """Shapes and dtypes by name in SGLang's spelling."""
        return self.weights.tensors

    @property
    def eagle(self) -> Settings:
        """The nested ``eagle_config``."""
        return self.config.inner("eagle_config")

    @property
    def uses_aux(self) -> bool:
        """Whether the config asks for taps at all; without, the target's final state is fed."""
        return self.eagle.flag("use_aux_hidden_state") is not False

    @property
    def architecture(self) -> str | None:
        return _architecture(self.config)

    @property
    def mla(self) -> bool:
        """Whether its attention is DeepSeek's multi-latent one (SGLang 0.5.23 models/kimi_k25_eagle3.py)."""
        return self.architecture in ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Target:
    """A target on disk: its language part's config, and the model types of the whole and of that part."""

    name: str
    config: Settings
    model_types: tuple[str, ...]
    architecture: str | None
    dtype: str | None
    layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything rules look at. ``wiring`` is what the head was trained on, where the user says so.

    ``embed_agrees``: whether sampled rows of the head's embedding equal the target's; None where one of them is not
    to be had. ``emitted``: output tokens of a trace, counted.
    """

    draft: Draft
    target: Target
    server: Server
    wiring: Wiring | None = None
    embed_agrees: bool | None = None
    emitted: Mapping[int, int] | None = None


def read_facts(
    draft: Path,
    target: Path,
    server: Server | None = None,
    *,
    engine: str | None = None,
    wiring: Wiring | None = None,
    emitted: Mapping[int, int] | None = None,
    weights: bool = False,
) -> Facts:
    """Read both folders. ``weights``: read the head's tensors whole, not only their headers.

    Raises CheckpointError for what cannot be read or is no draft head's or target's.
    """
    read_target = read_target_config(target)
    read_draft = _read_draft(draft, read_target, whole=weights)
    return Facts(
        read_draft,
        read_target,
        server or Server(engine or "sglang"),
        wiring,
        _embeddings_agree(read_draft, read_target, target),
        emitted,
    )


def count_emitted(trace: "Trace") -> Counter[int]:
    """How often each token stands in the outputs of a trace."""
    counts: Counter[int] = Counter()
    for index in range(len(trace.records)):
        request = trace.read(index, ())
        counts.update(request.tokens[request.prompt_tokens :].tolist())
    return counts


def _read_draft(folder: Path, target: Target, *, whole: bool) -> Draft:
    document = read_config(folder)
    name = folder.name or str(folder)
    nested = document.get("transformer_layer_config")
    speculators = isinstance(nested, dict)
    # speculators keeps the decoder layer's fields in an object of their own; no name is in both.
    merged = {**nested, **document} if isinstance(nested, dict) else document
    config = Settings(merged, f"{name}/{CONFIG}")
    weights = read_weights(folder, whole=whole)
    norm = weights.tensors.get("norm.weight")
    instead = {
        "hidden_size": norm.shape[0] if norm is not None and norm.shape else target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    filled = tuple(key for key in instead if merged.get(key) is None)
    config = Settings({**merged, **{key: instead[key] for key in filled}}, config.where)
    for key in instead:
        _needed(config, key, "a draft head's", _LARGEST[key])
    return Draft(name, config, speculators, weights, filled)


def read_target_config(folder: Path) -> Target:
    """The target's config; its weights are not needed. Raises CheckpointError."""
    document = read_config(folder)
    name = folder.name or str(folder)
    outer = Settings(document, f"{name}/{CONFIG}")
    config = outer
    for key in _INNER:
        if isinstance(document.get(key), dict):
            config = outer.inner(key)
            break
    types = dict.fromkeys(kind for part in (outer, config) if (kind := part.text("model_type")))
    sizes = (_needed(config, key, "a target's", most) for key, most in _LARGEST.items())
    dtype = stated_dtype(config) or stated_dtype(outer)
    return Target(name, config, tuple(types), _architecture(outer), dtype, *sizes)


def stated_dtype(config: Settings) -> str | None:
    """``bfloat16``, from either of transformers' spellings."""
    value = config.text("dtype") or config.text("torch_dtype")
    return value.removeprefix("torch.") if value else None


def _needed(config: Settings, key: str, whose: str, most: int) -> int:
    value = config.count(key)
    if not value:
        raise CheckpointError(f"{config.where} states no {key}, so it is not {whose}; give another folder")
    if value > most:
        raise config.refuse(key, f"at most {most}")
    return value


def _architecture(config: Settings) -> str | None:
    names = config.values.get("architectures")
    if names is None:
        return None
    if not isinstance(names, list) or not names or not is_word(names[0]):
        raise config.refuse("architectures", "a list of names")
    return str(names[0])


def _embeddings_agree(draft: Draft, target: Target, folder: Path) -> bool | None:
    """Whether rows spread over the head's embedding equal the target's within a rounding to bf16."""
    own = draft.tensors.get("embed_tokens.weight")
    if own is None or own.shape[1:] != (target.hidden_size,):
        return None
    where = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not any(os.path.exists(path) for path in where):
        return None
    try:
        theirs = read_weights(folder, whole=False, only=re.compile("|".join(map(re.escape, EMBED_NAMES))))
    except CheckpointError:
        return None  # the target's weights are not what is checked here
    names = [name for name, fact in theirs.tensors.items() if name.endswith("embed_tokens.weight") and fact.shape]
    rows = min(own.shape[0], *(theirs.tensors[name].shape[0] for name in names)) if names else 0
    for row in range(0, rows, max(1, rows // _EMBED_SAMPLE)):
        mine, others = draft.weights.row("embed_tokens.weight", row), theirs.row(names[0], row)
        if mine is None or others is None or len(mine) != len(others):
            return None
        scale = max(map(abs, others), default=0.0)
        if any(abs(one - other) > 0.01 * scale for one, other in zip(mine, others, strict=True)):
            return False
    return True if rows else None
