"""Conventions of each engine as data: what a server of that kind does with a head, and in which rounding order."""

from dataclasses import dataclass

from replay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Numerics:
    """A rounding order; all orders agree in fp32 up to its own rounding.

    - ``sglang``: SGLang 0.5.23 ``forward_native`` (layers/layernorm.py, rotary_embedding/base.py): a norm takes the
      unrounded fp32 sum of stream and residual and multiplies by its weight before rounding; attention in fp32.
    - ``hf``: Transformers and SpecForge: the sum is rounded first, the norm rounded before its weight multiplies;
      attention scores and probabilities are rounded to the compute dtype.

    ``latent_absorbed``: how a latent head's attention is ordered (head/latent.py); prompts that were prefilled whole
    are unabsorbed in any order (head/model.py ``of_whole_prompts``).

    ``score_factor`` multiplies attention scores beside width**-0.5, the width being that of a key. No order has another
    than 1: the head sets it from its behaviour, its RoPE and its own width (head/model.py), so that whatever attends
    gets all in one.
    """

    name: str
    norm_sums_unrounded: bool
    attention_fp32: bool
    latent_absorbed: bool
    score_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine's conventions.

    No engine quantises lm_head unless asked to, as calibration recipes leave it out; SGLang's ``fc`` is a plain
    ``torch.nn.Linear``, which no ``--quantization`` reaches (models/llama_eagle3.py).

    - ``sglang``: 0.5.23 replaces the head's own embedding by the target's where the widths agree
      (speculative/eagle_worker_v2.py ``init_lm_head``), builds q, k and v without bias (models/llama_eagle3.py), and
      gives each column of a tree its own KV slots (``tree_kv`` slot: eagle_worker_v2.py ``draft_forward``).
    - ``eagle``: SafeAILab/EAGLE ``eagle/model/cnets.py`` uses what the checkpoint has; its tree mask lets a node see
      its true ancestors (``tree_kv`` path).
    """

    name: str
    own_embedding: bool
    reads_layer_ids: bool  # EAGLE's taps are in its code (R[2], R[N//2], R[N-3]), whatever ids a config states
    attention_bias: bool
    numerics: str
    tree_kv: str
    unquantised: tuple[str, ...]  # linear layers that a scheme for all of them leaves as they are


NUMERICS = {
    "sglang": Numerics("sglang", norm_sums_unrounded=True, attention_fp32=True, latent_absorbed=True),
    "hf": Numerics("hf", norm_sums_unrounded=False, attention_fp32=False, latent_absorbed=False),
}
ENGINES = {
    "sglang": EngineProfile(
        "sglang",
        own_embedding=False,
        reads_layer_ids=True,
        attention_bias=False,
        numerics="sglang",
        tree_kv="slot",
        unquantised=("fc", "lm_head"),
    ),
    "eagle": EngineProfile(
        "eagle",
        own_embedding=True,
        reads_layer_ids=False,
        attention_bias=True,
        numerics="hf",
        tree_kv="path",
        unquantised=("lm_head",),
    ),
}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def engine_profile(name: str) -> EngineProfile:
    """The profile called ``name``. Raises UsageError for one that replay does not know."""
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is not known; possible are {', '.join(ENGINES)}")
    return ENGINES[name]


def precision_of_dtype(dtype: str) -> str:
    """``bfloat16`` → ``bf16``; a server loads the draft in the target's dtype. Raises UsageError for others."""
    for precision, name in PRECISIONS.items():
        if name == dtype:
            return precision
    raise UsageError(f"the target ran in {dtype}; say the draft's with --precision {', '.join(PRECISIONS)}")
