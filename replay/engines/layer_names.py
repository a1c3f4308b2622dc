"""What layers of a head are called: alone, in the products that servers fuse, and in checkpoints of one layer."""

import re


def fused_name(name: str) -> str:
    """The product that servers run the layer in: q, k and v are one ``qkv_proj``, gate and up one ``gate_up_proj``,
    and what goes down to the ranks of a latent head one ``fused_qkv_a_proj_with_mqa``."""
    name = re.sub(r"(?<=\.)(q_a_proj|kv_a_proj_with_mqa)$", "fused_qkv_a_proj_with_mqa", name)
    return re.sub(r"(?<=\.)[qkv]_proj$", "qkv_proj", re.sub(r"(?<=\.)(gate|up)_proj$", "gate_up_proj", name))


def is_special(name: str) -> bool:
    """Norms and the embedding, which are quantised only where a rule asks for them by name."""
    return "norm" in name or name == "embed_tokens"


def aliases(name: str) -> list[str]:
    """The layer's own name and its servers' fused one; checkpoints of one layer call it ``midlayer``."""
    names = list(dict.fromkeys([name, fused_name(name)]))
    return names + [
        f"midlayer.{called.removeprefix('layers.0.')}" for called in names if called.startswith("layers.0.")
    ]
