"""Config fields of heads with DeepSeek's attention (MLA): their draft KV is one latent and one rope key a row."""

from dataclasses import dataclass

from replay.checkpoint.config_file import Settings

# Fields that such a head's class in SGLang 0.5.23 (models/kimi_k25_eagle3.py) never reads.
_UNREAD = ("norm_before_fc", "norm_before_residual", "attention_bias", "mlp_bias")
_MOST_TAPS = 256


@dataclass(frozen=True, slots=True)
class Latent:
    """Widths in elements: ranks of queries and of the latent, and parts of each attention head.

    ``nope`` features of a query or key are not rotated, ``rope`` are; a value has ``value``. ``interleaved``: RoPE
    pairs the features 2i and 2i + 1.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool


def read_latent(config: Settings) -> Latent:
    """The sizes that the class needs. Raises CheckpointError for one that is missing, and for what it does not run."""
    if config.size("num_hidden_layers") != 1:
        raise config.refuse("num_hidden_layers", "1 (a latent head has one layer)")
    for place in (config, config.inner("eagle_config")):
        for key in _UNREAD:
            if place.flag(key):
                raise place.refuse(key, "false (SGLang does not read it of a latent head)")
    return Latent(
        q_rank=config.size("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"),
        nope=config.size("qk_nope_head_dim"),
        rope=config.size("qk_rope_head_dim"),
        value=config.size("v_head_dim"),
        interleaved=config.flag("rope_interleave") is not False,
    )


def read_latent_taps(config: Settings) -> int:
    """How many taps fc reads: the layer ids of eagle_config, else those at the top level, else 3.

    Raises CheckpointError where num_aux_hidden_states, which SGLang does not read here, says otherwise.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    inner = config.inner("eagle_config").ids(key)
    ids = config.ids(key) if inner is None else inner
    taps = 3 if ids is None else len(ids)
    if config.size("num_aux_hidden_states", taps, most=_MOST_TAPS) != taps:
        raise config.refuse("num_aux_hidden_states", f"{taps} (SGLang counts {key})")
    return taps
