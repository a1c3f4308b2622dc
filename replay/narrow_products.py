"""Products of 16-bit tensors on a CPU that has no instructions for them: taken in fp32 and rounded once.

torch 2.13 then falls back to loops, four to six times as slow as its fp32 products (measured on an AVX2 CPU, from 32
rows on). A native kernel sums in fp32 as well and rounds once, so only the order of the sums differs. Where bits have
to be those of another program on the same CPU, take torch's own product instead.

Suffixes: R rows, I inputs, O outputs, P outputs of a block, N attention heads.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# Up to so many rows torch's own loops are as fast: they read each weight once, as it is.
_FEW_ROWS = 3
# A weight is in fp32 by so many elements at a time, but no fewer outputs: they stay in the caches.
_BLOCK, _LEAST = 1 << 18, 256
# On an AVX2 CPU, MKL as in torch 2.13 sums the rows behind the last four in one order on one thread and in another on
# two, in fp32 products of 5 to 11 rows. In products of whole fours it does not.
_FOUR = 4


@cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for products of this dtype on this CPU (``ONEDNN_MAX_CPU_ISA`` counts)."""
    mkldnn = torch.ops.mkldnn
    asked = {torch.bfloat16: mkldnn._is_mkldnn_bf16_supported, torch.float16: mkldnn._is_mkldnn_fp16_supported}
    return dtype not in asked or bool(torch.backends.mkldnn.is_available() and asked[dtype]())


def linear(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x`` times the transposed weight [..., O], with the same bits on any number of threads."""
    rows = x_RI.numel() // max(1, x_RI.shape[-1])
    if not _is_slow(x_RI.dtype, x_RI.device, rows):
        return functional.linear(x_RI, weight_OI, bias_O)
    wide_RI, step = in_fours(x_RI.flatten(0, -2)).float(), max(_LEAST, _BLOCK // weight_OI.shape[-1])
    blocks = -(-len(weight_OI) // step)
    biases_P = [None] * blocks if bias_O is None else [bias_P.float() for bias_P in bias_O.split(step)]
    outputs_RP = [
        functional.linear(wide_RI, weight_PI.float(), bias_P).to(x_RI.dtype)
        for weight_PI, bias_P in zip(weight_OI.split(step), biases_P, strict=True)
    ]
    out_RO: Tensor = torch.cat(outputs_RP, dim=-1)[:rows].unflatten(0, x_RI.shape[:-1])
    return out_RO


def in_fours(x_RI: Tensor) -> Tensor:
    """``x`` with rows of zeros behind it, so that its rows are whole fours."""
    if not lacks_fours(x_RI):
        return x_RI
    return torch.cat([x_RI, x_RI.new_zeros(-len(x_RI) % _FOUR, *x_RI.shape[1:])])


def lacks_fours(x_RI: Tensor) -> bool:
    """Whether its rows are no whole fours."""
    return len(x_RI) % _FOUR != 0


def multiply_by_head(x_NRI: Tensor, weight_NIO: Tensor) -> Tensor:
    """Each attention head's rows times its own weight [N, R, O]."""
    if not _is_slow(x_NRI.dtype, x_NRI.device, x_NRI.shape[1]):
        return torch.bmm(x_NRI, weight_NIO)
    return torch.bmm(x_NRI.float(), weight_NIO.float()).to(x_NRI.dtype)


def _is_slow(dtype: torch.dtype, device: torch.device, rows: int) -> bool:
    return rows > _FEW_ROWS and device.type == "cpu" and not has_kernels(dtype)
