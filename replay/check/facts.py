"""What `replay check` knows: configs, tensor headers, small tensors and server arguments. Read, never judged.

Only headers are read of the weights, and the vocabulary map and a few embedding rows byte by byte: neither torch nor
numpy is imported, unless the head is a pytorch_model.bin or its weights are asked for.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.check.embeddings import embeddings_agree
from replay.check.engine_config import Rope, filled, language_part, rope_of
from replay.check.override import overridden, override_of
from replay.check.quantization import Quantisation, quantisation_of
from replay.check.server import Server
from replay.check.sizes import Replaced, with_sizes
from replay.checkpoint.config import FAMILY_NAMES
from replay.checkpoint.config_classes import ConfigClass, class_called, class_of
from replay.checkpoint.config_file import CONFIG, Settings, is_word, read_config, read_object
from replay.checkpoint.eagle import is_eagle
from replay.checkpoint.headers import TensorFact, Weights, read_weights
from replay.checkpoint.hub import spoken_name
from replay.checkpoint.nextn import is_nextn
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError
from replay.targets.rules import served_architecture
from replay.traces.header import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH

if TYPE_CHECKING:
    from replay.traces.reader import Trace

_IN_BF16 = ("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration")
_QUANTISATION = "hf_quant_config.json"
_MOST_QUANTISATION = 1 << 24  # bytes
# What no target is larger than; a trace of it could not be recorded (traces/header.py).
_LARGEST = {"num_hidden_layers": MAX_LAYERS, "hidden_size": MAX_WIDTH, "vocab_size": MAX_VOCAB}


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft head on disk. ``speculators``: its config is nested the way speculators writes it.

    ``config`` has the defaults of its class filled in, and sizes from tensors or target where those are wrong, so that
    rules can go on; ``replaced`` names the latter. ``stated`` is what the file says with the server's override, and
    ``original`` what it says without.
    """

    name: str
    config: Settings
    stated: Settings
    cls: ConfigClass | None
    speculators: bool
    weights: Weights
    replaced: tuple[Replaced, ...] = ()
    quantisation: Quantisation | None = None
    original: Mapping[str, Any] = field(default_factory=dict)
    family: str | None = None  # of heads of the final state: eagle or nextn

    @property
    def tensors(self) -> Mapping[str, TensorFact]:
        """Shapes and dtypes by name in SGLang's spelling."""
        return self.weights.tensors

    @property
    def eagle(self) -> Settings:
        """The nested ``eagle_config``."""
        return self.config.inner("eagle_config")

    @property
    def rope(self) -> Rope:
        """Its rotary embedding, as SGLang reads it."""
        return rope_of(self.stated, self.cls)

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
    """A target on disk: its language part's config with the defaults of its class, what the file says of that part, and
    the model types of the whole and of that part.

    ``architecture`` is the class that SGLang takes, None where the config names none.
    """

    name: str
    config: Settings
    stated: Settings
    outer: Settings
    cls: ConfigClass | None
    model_types: tuple[str, ...]
    architecture: str | None
    dtype: str | None
    layers: int
    hidden_size: int
    vocab_size: int

    @property
    def rope(self) -> Rope:
        """Its rotary embedding, as SGLang reads it; that of full attention where layers differ."""
        return rope_of(self.stated, self.cls)

    @property
    def language_type(self) -> str:
        """The model type of the language part, by which SGLang chooses what becomes of fp32."""
        gemma = "gemma" if self.cls is not None and self.cls.name.startswith("Gemma") else ""
        return self.stated.text("model_type") or gemma

    @property
    def runs_in_bf16(self) -> bool:
        """Whether SGLang 0.5.23 serves it, and the head beside it, in bf16 whatever configs and --dtype say.

        arg_groups/model_override_base.py ``MODEL_OVERRIDES`` and arg_groups/model_overrides/gpt_oss.py.
        """
        quantised = self.outer.values.get("quantization_config")
        mxfp4 = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"
        return self.architecture in _IN_BF16 or (mxfp4 and self.architecture == "GptOssForCausalLM")


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
    known = server or Server(engine or "sglang")
    changes = override_of(known)
    read_target = read_target_config(target, changes)
    read_draft = _read_draft(draft, read_target, changes, whole=weights)
    return Facts(
        read_draft,
        read_target,
        known,
        wiring,
        embeddings_agree(read_draft.weights, read_target.hidden_size, target),
        emitted,
    )


def count_emitted(trace: "Trace") -> Counter[int]:
    """How often each token stands in the outputs of a trace."""
    counts: Counter[int] = Counter()
    for index in range(len(trace.records)):
        request = trace.read(index, ())
        counts.update(request.tokens[request.prompt_tokens :].tolist())
    return counts


def _read_draft(folder: Path, target: Target, changes: Mapping[str, Any], *, whole: bool) -> Draft:
    original = read_config(folder)
    document = overridden(original, changes)
    name = spoken_name(folder)
    stated = Settings(_flat(document), f"{name}/{CONFIG}")
    weights = read_weights(folder, whole=whole)
    family = _family_of(document, weights, name, folder)
    # A config without a model type is Llama's to the engines that take it at all.
    cls = _class_of_head(stated)
    config, replaced = with_sizes(stated, cls, weights.tensors, target.hidden_size, target.vocab_size)
    for key in ("hidden_size", "vocab_size"):
        _needed(config, key, "a draft head's", _LARGEST[key])
    speculators = isinstance(document.get("transformer_layer_config"), dict)
    quantisation = quantisation_of(stated, _beside(folder), f"{name}/{_QUANTISATION}")
    return Draft(name, config, stated, cls, speculators, weights, replaced, quantisation, _flat(original), family)


def _family_of(document: Mapping[str, Any], weights: Weights, name: str, folder: Path) -> str | None:
    """The family of a head that is judged by rules of its own; None of one that EAGLE-3's are for.

    Raises CheckpointError for a head of a family without rules, and for one that is of two families.
    """
    if (kind := document.get("speculators_model_type")) in ("peagle", "dflash"):
        raise CheckpointError(
            f"{name} is a {FAMILY_NAMES[kind]} head as speculators writes it, which no class of SGLang's runs, and "
            f"check has no rules for it; type replay inspect {folder}"
        )
    shapes = {fact.original: fact.shape for fact in weights.tensors.values()}
    return "nextn" if is_nextn(document) else "eagle" if is_eagle(document, shapes, f"{name}/{CONFIG}") else None


def _beside(folder: Path) -> dict[str, Any] | None:
    """What Model-Optimizer says of its quantisation in a file of its own."""
    path = folder / _QUANTISATION
    return read_object(path, _MOST_QUANTISATION) if path.exists() else None


def _class_of_head(stated: Settings) -> ConfigClass | None:
    kind = stated.values.get("model_type")
    cls = class_of(kind) if isinstance(kind, str) else None
    if cls is not None and cls.flat and cls.inner_class is not None:
        return class_called(cls.inner_class)
    return cls if cls is not None and cls.inner is None else class_called("LlamaConfig")


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    """speculators keeps the decoder layer's fields in an object of their own; no name is in both."""
    nested = document.get("transformer_layer_config")
    return {**nested, **document} if isinstance(nested, dict) else document


def read_target_config(folder: Path, changes: Mapping[str, Any] | None = None) -> Target:
    """The target's config, with what the server's override ``changes``; its weights are not needed.

    Raises CheckpointError.
    """
    document = overridden(read_config(folder), changes or {})
    name = spoken_name(folder)
    outer = Settings(document, f"{name}/{CONFIG}")
    architecture = _served(outer)
    cls = class_of(outer.text("model_type"))
    # Llava's own classes read the outer config.
    whole = architecture is not None and architecture.startswith("Llava") and architecture.endswith("ForCausalLM")
    stated, cls = (outer, cls) if whole else language_part(outer, cls)
    config = filled(stated, cls)
    types = dict.fromkeys(kind for part in (outer, stated) if (kind := part.text("model_type")))
    sizes = (_needed(config, key, "a target's", most) for key, most in _LARGEST.items())
    return Target(name, config, stated, outer, cls, tuple(types), architecture, target_dtype(outer, stated), *sizes)


def target_dtype(outer: Settings, part: Settings) -> str | None:
    """What a target's config says of its dtype; a language part that says nothing has that of the whole."""
    return stated_dtype(part) or stated_dtype(outer)


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
    return next(iter(_architectures(config)), None)


def _served(config: Settings) -> str | None:
    """The class that SGLang takes for a target; None where its config names none."""
    return served_architecture(_architectures(config))


def _architectures(config: Settings) -> list[str]:
    names = config.values.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not names or not all(map(is_word, names)):
        raise config.refuse("architectures", "a list of names")
    return names
