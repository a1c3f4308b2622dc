"""Rows in fp8 with a scale each: one byte a value, and less exact. See SPEC.md, section 5.

R rows of width W. The numbers are those of OCP's 8-bit floating point (E4M3, largest finite number 448); a row is
scaled so that its largest value is 448.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
_OTHER_GRID = 1.37  # of no power of two, so that the numbers of both grids fall together nowhere near all


def quantise(rows_RW: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """The values [R, W] in float8_e4m3fn and the scales [R] in float32; ``rows_RW`` is finite and of any float dtype.

    A row of zeros has the scale 1.
    """
    import torch

    wide_RW = rows_RW.float()
    scale_R = wide_RW.abs().amax(1) / LARGEST
    # A row of tiny numbers, whose scale float32 cannot hold, becomes zeros.
    scale_R = torch.where(scale_R < torch.finfo(torch.float32).tiny, torch.ones_like(scale_R), scale_R)
    return (wide_RW / scale_R[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale_R


def dequantise(values_RW: "torch.Tensor", scale_R: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """What such rows say [R, W], each product rounded once to ``dtype``."""
    return (values_RW.float() * scale_R[:, None]).to(dtype)


def shake(rows_RW: "torch.Tensor") -> "torch.Tensor":
    """Rows that were dequantised, rounded once more on another grid: about as far from ``rows_RW`` as these are from
    those that were quantised."""
    import torch

    wide_RW = rows_RW.float()
    scale_R = quantise(rows_RW)[1] * _OTHER_GRID
    values_RW = (wide_RW / scale_R[:, None]).to(torch.float8_e4m3fn)
    return dequantise(values_RW, scale_R, rows_RW.dtype)
