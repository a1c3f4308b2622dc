"""A draft head's config.json → HeadConfig: typed, complete, and refused by field where replay does not compute it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from replay.checkpoint import eagle, modelopt, nextn, speculators, speculators_dflash
from replay.checkpoint.config_file import Settings
from replay.checkpoint.dflash import Block, read_block, read_layer_ids
from replay.checkpoint.latent import Latent, read_latent, read_latent_taps
from replay.checkpoint.rope import Rope, read_latent_rope, read_rope
from replay.errors import CheckpointError
from replay.traces.fields import show, some

LATENT_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
BLOCK_ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM", LATENT_ARCHITECTURE, BLOCK_ARCHITECTURE,
    *speculators.ARCHITECTURES, *speculators.PARALLEL, "DFlashSpeculator", eagle.ARCHITECTURE, nextn.ARCHITECTURE,
)  # fmt: skip
# What families are called where people read of them.
FAMILY_NAMES = {
    "eagle3": "EAGLE-3", "eagle": "EAGLE-1 or EAGLE-2", "nextn": "NextN", "dflash": "DFlash", "peagle": "P-EAGLE",
}  # fmt: skip
# What stands in for the target's features in the drafted rows of a P-EAGLE head.
MASK_HIDDEN = "mask_hidden"
# More layers or taps than any head has: a config that asks for millions must not make us count to it.
_MOST = 256


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Everything about a draft head that its config states. Widths in elements."""

    hidden_size: int
    target_hidden_size: int
    num_taps: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int  # equals vocab_size where the head drafts over the whole vocabulary
    lm_head: str  # "own", "target" (draft_vocab_size is null) or "embed" (tied)
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    fc_bias: bool
    attention_bias: bool  # of q, k and v
    mlp_bias: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layer_ids: tuple[int, ...] | None  # eagle_config.eagle_aux_hidden_state_layer_ids, as stated
    dtype: str | None
    use_aux_hidden_state: bool = True  # false: the target's final state is fed instead of taps on the way
    family: str = "eagle3"  # how features, embedding and layers are joined (head/families.py)
    norm_before_residual: bool = False  # the stream starts from the normed state
    qk_norm: bool = False  # queries and keys are normed, head by head
    later_norm: str = "hidden_norm"  # at the entry of layers after the first, whose other norm nobody reads
    last_norm: bool = True  # in front of lm_head
    window: int | None = None  # rows that a row sees, itself included
    vllms: bool = False  # vLLM alone loads it: its ids are R indices, its embedding and biases are read
    mask_token: int | None = None  # of a head whose drafted rows all embed it, beside the state of mask_hidden
    experts: nextn.Experts | None = None  # of a layer whose MLP is a mixture of them
    latent: Latent | None = None  # sizes of a head whose draft KV is a latent and a rope key, which has no q, k, v
    output_bias: bool = False  # of o_proj
    builds_bias: bool = False  # SGLang builds all four of an EAGLE-1 head with biases
    block: Block | None = None  # of a head that drafts a block of mask tokens in one pass

    @property
    def fc_inputs(self) -> int:
        """Features of the target that ``fc`` takes in."""
        return self.num_taps * self.target_hidden_size

    @property
    def features_width(self) -> int:
        """Features that a row is fed: those of ``fc``, or the final state's where it takes the place of taps.

        A final state that is not as wide as the head goes through ``fc`` as taps do.
        """
        final_fits = not self.use_aux_hidden_state and self.target_hidden_size == self.hidden_size
        return self.target_hidden_size if final_fits else self.fc_inputs

    @property
    def skips_fc(self) -> bool:
        """Whether features are as wide as the head, which then takes them as they stand: no fc, no norm before it.

        SGLang 0.5.23 (models/llama_eagle3.py ``LlamaModel.forward``) and SafeAILab/EAGLE (eagle/model/cnets.py
        ``Model.forward``) compare the widths as they run. Config and wiring tell it beforehand: a wiring whose features
        are not ``features_width`` wide is refused (simulator/fit.py).
        """
        return self.block is None and self.features_width == self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Features of each attention head that are rotated: its leading ones, or the rope part of a latent head's."""
        return int(self.rotatable * self.rope.partial_factor)

    @property
    def rotatable(self) -> int:
        """Features of each attention head that RoPE may turn."""
        return self.head_dim if self.latent is None else self.latent.rope


def parse_config(
    document: Mapping[str, Any], *, name: str = "config", shapes: eagle.Shapes | None = None
) -> HeadConfig:
    """Read a draft config as SGLang 0.5.23 does, defaults of its class included.

    models/llama_eagle3.py and LlamaConfig, models/kimi_k25_eagle3.py for a latent head, models/dflash.py for DFlash. A
    config of another dialect is read as its own program does (speculators.py), and ``shapes`` of its tensors by the
    names in the file tell families whose configs look alike (eagle.py); None: the config alone is read.

    Raises CheckpointError for another architecture, a wrong type, or what replay does not compute.
    """
    if speculators_dflash.is_speculators_dflash(document):
        plain = _parse_plain(Settings(speculators_dflash.flattened(document, name, BLOCK_ARCHITECTURE), name))
        return replace(plain, **speculators_dflash.switches(document, name, plain.block, plain.vocab_size))
    if speculators.is_speculators(document):
        plain = _parse_plain(Settings(speculators.flattened(document, name), name))
        return replace(plain, lm_head="own", **speculators.switches(document, name))
    if nextn.is_nextn(document):
        config = Settings(document, name)
        plain = _parse_plain(Settings(nextn.plain(config, LATENT_ARCHITECTURE), name))
        return replace(plain, **nextn.switches(config))
    if eagle.is_eagle(document, shapes, name):
        config = Settings(document, name)
        return replace(_parse_plain(Settings(eagle.plain(config), name)), **eagle.switches(config))
    _check_parallel(document, shapes, name)
    return _parse_plain(Settings(document, name))


def _parse_plain(config: Settings) -> HeadConfig:
    """A config whose fields are at the top level."""
    name, kind = config.where, _check_kind(config)
    latent = kind == LATENT_ARCHITECTURE
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    vocab_size = config.size("vocab_size")
    tied = bool(config.flag("tie_word_embeddings"))
    draft_vocab_size = config.size("draft_vocab_size", vocab_size)
    _check_vocabulary(name, tied, draft_vocab_size, vocab_size)
    inner = config.inner("eagle_config")
    norm_before_fc, layer_ids = inner.flag("norm_before_fc"), _layer_ids(inner)
    found = HeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=config.size("target_hidden_size", hidden_size),
        num_taps=config.size("num_aux_hidden_states", len(layer_ids) if layer_ids else 3, most=_MOST),
        intermediate_size=config.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=config.size("head_dim", max(1, hidden_size // num_heads)),
        num_layers=config.size("num_hidden_layers", 1, most=_MOST),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        lm_head="embed" if tied else "target" if config.count("draft_vocab_size") is None else "own",
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=Rope() if latent else read_rope(config),
        max_position_embeddings=config.size("max_position_embeddings", 2048),
        fc_bias=bool(config.flag("bias")),
        attention_bias=bool(config.flag("attention_bias") or config.flag("qkv_bias")),
        output_bias=bool(config.flag("attention_bias")),
        mlp_bias=bool(config.flag("mlp_bias")),
        norm_before_fc=bool(config.flag("norm_before_fc") if norm_before_fc is None else norm_before_fc),
        fc_norm=bool(config.flag("fc_norm") or config.flag("use_aux_norm")),
        norm_output=bool(config.flag("norm_output")),
        use_aux_hidden_state=inner.flag("use_aux_hidden_state") is not False,
        layer_ids=layer_ids,
        dtype=config.text("dtype") or config.text("torch_dtype"),
    )
    found = replace(found, **modelopt.read_switches(inner))
    if latent:
        found = _as_latent(config, found)
    elif kind == BLOCK_ARCHITECTURE:
        found = _as_block(config, found)
    _check_attention(name, found)
    return found


def _check_parallel(document: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None, name: str) -> None:
    """Raises CheckpointError for a P-EAGLE head that is not of speculators.

    vLLM tells it by these fields and this tensor (v1/spec_decode, models/llama_eagle3.py), and reads layer ids of such
    a config in its own way; SGLang 0.5.23 drops the tensor and drafts token by token.
    """
    told = [key for key in ("pard_token", "ptd_token_id") if document.get(key) is not None]
    told += [key for key in shapes or () if key.endswith(MASK_HIDDEN)]
    if told:
        raise CheckpointError(
            f"{name}: {some(told)} is of a P-EAGLE head as vLLM alone reads it, and replay reads P-EAGLE heads as "
            "speculators writes them (speculators_model_type peagle); save it by speculators"
        )


def _as_latent(config: Settings, found: HeadConfig) -> HeadConfig:
    """The fields that SGLang 0.5.23 models/kimi_k25_eagle3.py reads in another way than models/llama_eagle3.py.

    Layer ids at the top level count taps; which layers are captured comes from eagle_config alone
    (model_executor/model_runner_components/spec_aux_hidden_state.py).
    """
    latent = read_latent(config)
    return replace(
        found,
        num_taps=read_latent_taps(config),
        num_kv_heads=found.num_heads,
        head_dim=latent.nope + latent.rope,
        rope=read_latent_rope(config),
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        latent=latent,
    )


def _as_block(config: Settings, found: HeadConfig) -> HeadConfig:
    """The fields of a DFlash head, which borrows the target's embedding and lm_head (SGLang 0.5.23 models/dflash.py).

    Sizes that Transformers' Qwen3Config would fill in with its own have to be stated.
    """
    ids = read_layer_ids(config)
    return replace(
        found,
        target_hidden_size=found.hidden_size,
        num_taps=len(ids),
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim"),
        num_layers=config.size("num_hidden_layers", most=_MOST),
        lm_head="target",
        max_position_embeddings=config.size("max_position_embeddings", 32768),
        attention_bias=bool(config.flag("attention_bias")),
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        use_aux_hidden_state=True,
        layer_ids=ids,
        family="dflash",
        qk_norm=True,
        block=read_block(config),
    )


def _check_kind(config: Settings) -> str:
    """The architecture. Raises CheckpointError for one that replay does not know."""
    architectures = config.values.get("architectures") or [ARCHITECTURES[0]]
    if not isinstance(architectures, list) or architectures[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{config.where}: architecture {show(architectures)}, replay reads heads of the kinds "
            f"{', '.join(ARCHITECTURES)}; give one of these"
        )
    if config.values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{config.where}: hidden_act is {show(config.values['hidden_act'])}, replay computes silu only"
        )
    return str(architectures[0])


def _check_vocabulary(name: str, tied: bool, draft_vocab_size: int, vocab_size: int) -> None:
    if draft_vocab_size > vocab_size:
        raise CheckpointError(f"{name}: draft_vocab_size {draft_vocab_size} is above vocab_size {vocab_size}")
    if tied and draft_vocab_size != vocab_size:
        raise CheckpointError(
            f"{name}: tie_word_embeddings is true with draft_vocab_size {draft_vocab_size} of {vocab_size}; a server "
            "would use the embedding as lm_head and drop the head's own: set tie_word_embeddings to false"
        )


def _check_attention(name: str, config: HeadConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{name}: {config.num_heads} attention heads do not divide into {config.num_kv_heads} key-value heads"
        )
    if config.rotary_dim < 2 or config.rotary_dim % 2 or config.rotary_dim > config.rotatable:
        raise CheckpointError(
            f"{name}: {config.rotary_dim} of {config.rotatable} features per attention head would be rotated, "
            "an even number from 2 to head_dim was expected"
        )


def _layer_ids(eagle: Settings) -> tuple[int, ...] | None:
    ids = eagle.ids("eagle_aux_hidden_state_layer_ids")
    if ids == ():
        raise eagle.refuse("eagle_aux_hidden_state_layer_ids", "a list of layer ids, such as [2, 15]")
    return ids
