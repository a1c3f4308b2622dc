"""Formats as arithmetic: a tensor in, the same tensor on the format's grid out ("fake quantisation").

Grids and scales, with where they come from:

- fp8: OCP 8-bit floating point, e4m3 (no infinity, 448 is the largest) and e5m2 (57344). Round to nearest even; what
  lies beyond the largest is clipped to it, as torch 2.13's own cast does with e4m3 and quantising kernels do with both.
  scale = largest / the grid's largest.
- int8, int4 symmetric: round(x / scale), int8 with scale = largest / 127 (SGLang 0.5.23 per_token_quant_int8), int4
  with scale = largest / 7.5 clipped to -8..7 (GPTQ; compressed-tensors W4A16 with symmetric groups), under ``sym7``
  with scale = largest / 7 (AutoAWQ awq/quantize/quantizer.py ``pseudo_quantize_tensor`` without zero point; slime
  backends/megatron_utils/kernels/int4_qat, training for int4).
- int8, int4 asymmetric: scale = (max - min) / 255 or 15 and an integer zero within the range (AWQ).
- nvfp4: e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) in blocks of 16, an e4m3 scale for each, and one fp32 scale over them that
  makes the largest block scale 448.
- mxfp4: e2m1 in blocks of 32, a power of two for each: 2^(floor(log2(largest)) - 2) (OCP Microscaling 1.0, 6.3).

Scales other than those of nvfp4 and mxfp4 blocks are fp32. All arithmetic is fp32. Suffixes: O outputs, I inputs.
"""

import torch
from torch import Tensor

from replay.engines.precision import Format
from replay.engines.profiles import PRECISIONS

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.5, "nvfp4": 6.0, "mxfp4": 6.0}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_INTEGERS = {"int8": (-127, 127), "int4": (-8, 7)}
_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32

# Elements of a weight that are worked on at a time: a vocabulary's table in fp32 is large.
_BLOCK = 1 << 24


def quantise(x: Tensor, form: Format, largest: Tensor | None = None) -> Tensor:
    """``x`` [..., I] in fp32, every value on the grid of ``form``.

    Scales span what ``form.scaling`` says, along the last dimension. ``largest`` is the largest magnitude of the whole
    tensor where ``x`` is a part of it. NaN stays NaN; what is infinite stays infinite or becomes NaN, but for fp8.
    """
    x = x.float()
    if form.is_dtype:
        return x.to(getattr(torch, PRECISIONS[form.grid])).float()
    if form.grid == "nvfp4":
        return _nvfp4(x, _span(x, largest, whole=form.scaling == "tensor"))
    if form.grid == "mxfp4":
        return _mxfp4(x)
    if form.fixed is not None:
        return round_to_grid(x / form.fixed, form.grid) * form.fixed
    if form.scaling.startswith("g"):
        blocks = _blocks(x, int(form.scaling[1:]))
        return _unblock(_affine(blocks, form.grid) if form.fit == "asym" else _symmetric(blocks, form), x)
    if form.fit == "asym":
        whole = form.scaling == "tensor"
        return (_affine(x.flatten(), form.grid) if whole else _affine(x, form.grid)).view_as(x)
    return _symmetric(x, form, _span(x, largest, whole=form.scaling == "tensor"))


def quantise_weight(weight_OI: Tensor, form: Format, dtype: torch.dtype, largest: Tensor | None = None) -> Tensor:
    """A weight on the grid of ``form``, in ``dtype``, made some rows at a time. A vector (a norm's) is one row.

    ``largest`` is the largest magnitude under a scale per tensor, where other weights share it.
    """
    if weight_OI.dim() == 1:
        return quantise(weight_OI[None], form)[0].to(dtype)
    if form.fit == "asym" and form.scaling == "tensor":
        return quantise(weight_OI, form).to(dtype)
    rows = max(1, _BLOCK // weight_OI.shape[1])
    if largest is None and form.scaling == "tensor":
        largest = largest_magnitude(weight_OI)
    out_OI = torch.empty(weight_OI.shape, dtype=dtype, device=weight_OI.device)
    for start in range(0, len(weight_OI), rows):
        out_OI[start : start + rows] = quantise(weight_OI[start : start + rows], form, largest).to(dtype)
    return out_OI


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude in ``x`` as fp32, found without a copy of it all."""
    return torch.maximum(x.max(), -x.min()).float()


def round_to_grid(x: Tensor, grid: str) -> Tensor:
    """fp32 ``x`` at the nearest number of the grid, ties to even, clipped to its range."""
    if grid in _FP8:
        return x.clamp(-LARGEST[grid], LARGEST[grid]).to(_FP8[grid]).float()
    if grid in _INTEGERS:
        return x.round().clamp(*_INTEGERS[grid])
    return round_e2m1(x)


def round_e2m1(x: Tensor) -> Tensor:
    """fp32 ``x`` at the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even mantissa."""
    magnitude = x.abs().clamp(max=6.0)
    # Numbers from 2^e to 2^(e+1) are 2^(e-1) apart, those below 1 are 0.5 apart.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.where(x.isnan(), x, ((magnitude / step).round() * step).copysign(x))


def _span(x: Tensor, largest: Tensor | None, *, whole: bool) -> Tensor:
    """The largest magnitude under one scale: of the whole tensor, or of each row [..., 1]."""
    if whole:
        return x.abs().max() if largest is None else largest
    return x.abs().amax(dim=-1, keepdim=True)


def _symmetric(x: Tensor, form: Format, largest: Tensor | None = None) -> Tensor:
    top = 7.0 if form.fit == "sym7" else LARGEST[form.grid]
    scale = _nonzero((_span(x, None, whole=False) if largest is None else largest) / top)
    return round_to_grid(x / scale, form.grid) * scale


def _affine(x: Tensor, grid: str) -> Tensor:
    levels = 255.0 if grid == "int8" else 15.0
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    scale = _nonzero((high - low) / levels)
    zero = (-(low / scale).round()).clamp(0, levels)
    return ((x / scale).round() + zero).clamp(0, levels).sub(zero) * scale


def _nvfp4(x: Tensor, largest: Tensor) -> Tensor:
    blocks = _blocks(x, _NVFP4_BLOCK)
    over = _nonzero(largest / (LARGEST["nvfp4"] * LARGEST["fp8_e4m3"]))
    over = over[..., None] if over.dim() else over
    scale = round_to_grid(blocks.abs().amax(dim=-1, keepdim=True) / LARGEST["nvfp4"] / over, "fp8_e4m3") * over
    return _unblock(torch.where(scale == 0, scale * blocks, round_e2m1(blocks / _nonzero(scale)) * scale), x)


def _mxfp4(x: Tensor) -> Tensor:
    blocks = _blocks(x, _MXFP4_BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 1 - 2).clamp(-127, 127)  # frexp counts from 0.5; 4 = 2^2 is in 4..6
    scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), largest)
    return _unblock(round_e2m1(blocks / scale) * scale, x)


def _nonzero(scale: Tensor) -> Tensor:
    """A scale for what is all zeros is 1: zeros stay zeros."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _blocks(x: Tensor, size: int) -> Tensor:
    """``x`` [..., I] as [..., blocks, size]; a short last block is filled up with its last value."""
    short = -x.shape[-1] % size
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1)
    blocks: Tensor = x.unflatten(-1, (-1, size))
    return blocks


def _unblock(blocks: Tensor, like: Tensor) -> Tensor:
    whole: Tensor = blocks.flatten(-2)
    return whole[..., : like.shape[-1]]
