"""Rotary position embedding: frequencies by type, and the rotation of queries and keys.

Shape suffixes as in model.py."""

from math import log, pi

import torch
from torch import Tensor

from replay.checkpoint.rope import Rope


def inverse_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Rotations per position [rotary_dim / 2], fp32.

    ``llama3`` after Llama 3.1 (transformers ``modeling_rope_utils``), ``yarn`` after arXiv 2309.00071.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        wavelength = 2 * pi / inv_freq
        turns = rope.original_max_position / wavelength
        span = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
        smooth = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    if rope.type == "yarn":
        return _yarn_frequencies(rope, rotary_dim, inv_freq)
    return inv_freq


def _yarn_frequencies(rope: Rope, rotary_dim: int, inv_freq: Tensor) -> Tensor:
    def dimension(rotations: float) -> float:
        return rotary_dim * log(rope.original_max_position / (rotations * 2 * pi)) / (2 * log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = float(int(low // 1)), float(-int(-high // 1))
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    high += 0.001 if low == high else 0.0
    interpolated = ((torch.arange(rotary_dim // 2, dtype=torch.float) - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * interpolated + inv_freq * (1 - interpolated)


def rotate(x_RNH: Tensor, cos_RH: Tensor, sin_RH: Tensor) -> Tensor:
    """NeoX rotary embedding of the leading 2 * cos.shape[-1] features, multiplied in x's dtype.

    SGLang 0.5.23 ``RotaryEmbedding.forward_native`` and Transformers do so; SGLang on CUDA keeps cos and sin in fp32.
    """
    half = cos_RH.shape[-1]
    cos, sin = cos_RH[:, None], sin_RH[:, None]
    first, second, rest = x_RNH[..., :half], x_RNH[..., half : 2 * half], x_RNH[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rotate_interleaved(x_RNH: Tensor, cos_RH: Tensor, sin_RH: Tensor) -> Tensor:
    """Rotary embedding of the pairs (2i, 2i + 1), as GPT-J pairs them; other features as they stand."""
    width = 2 * cos_RH.shape[-1]
    cos, sin = cos_RH[:, None], sin_RH[:, None]
    even, odd = x_RNH[..., :width:2], x_RNH[..., 1:width:2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([turned, x_RNH[..., width:]], dim=-1)
