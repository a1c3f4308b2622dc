"""The slow, obvious twin of head/quantise.py: every number of a grid is written out, and the nearest is searched for.

Grids follow the definitions themselves: fp8 from sign, exponent and mantissa bits (OCP 8-bit Floating Point 1.0,
table 1), e2m1 as listed in OCP Microscaling Formats 1.0 (table 5). Scales are fp32 (numpy), distances exact fractions.
"""

from collections.abc import Iterable
from fractions import Fraction
from math import ceil, floor, inf, log2

import numpy as np

F = np.float32


def minifloat(exponent_bits: int, mantissa_bits: int, *, specials: int) -> list[float]:
    """Non-negative numbers of a floating-point grid by their code; the last ``specials`` codes are no numbers."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits) - specials):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        share = mantissa / 2**mantissa_bits
        values.append(2.0 ** (exponent - bias) * (1 + share) if exponent else 2.0 ** (1 - bias) * share)
    return values


GRIDS = {
    "fp8_e4m3": minifloat(4, 3, specials=1),
    "fp8_e5m2": minifloat(5, 2, specials=4),
    "e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "int8": [float(number) for number in range(128)],
    "int4": [float(number) for number in range(9)],
}


def nearest(x: float, grid: str) -> float:
    """The number of the grid that is nearest to ``x``; of two the one with the even code."""
    values = GRIDS[grid]
    distances = [abs(Fraction(abs(float(x))) - Fraction(value)) for value in values]
    best = min(range(len(values)), key=lambda code: (distances[code], code % 2))
    top = values[best] if x < 0 or grid != "int4" else min(values[best], 7.0)
    return -top if x < 0 else top


def symmetric(
    x: Iterable[float], grid: str, largest: float | None = None, fixed: float | None = None, top: float | None = None
) -> list[float]:
    """Numbers under one scale, their largest at ``top`` (None: where the grid has it)."""
    numbers = [F(value) for value in x]
    tops = {"int4": 7.5, "int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
    span = F(max(abs(value) for value in numbers) if largest is None else largest)
    scale = F(fixed) if fixed is not None else span / F(top or tops[grid]) or F(1)
    return [float(F(nearest(value / scale, grid)) * scale) for value in numbers]


def affine(x: Iterable[float], bits: int) -> list[float]:
    """Numbers under one scale and an integer zero."""
    numbers = [F(value) for value in x]
    levels = 2**bits - 1
    scale = (max(numbers) - min(numbers)) / F(levels) or F(1)
    zero = min(max(-half_even(min(numbers) / scale), 0), levels)
    steps = [min(max(half_even(value / scale) + zero, 0), levels) - zero for value in numbers]
    return [float(F(step) * scale) for step in steps]


def half_even(x: float) -> int:
    """The nearest whole number, of two the even one."""
    low, high = floor(x), ceil(x)
    below, above = Fraction(float(x)) - low, high - Fraction(float(x))
    return low if below < above or (below == above and low % 2 == 0) else high


def nvfp4(x: list[float], largest: float) -> list[float]:
    """Numbers in blocks of 16 under one fp32 scale."""
    over = F(largest) / F(6 * 448) or F(1)
    out: list[float] = []
    for start in range(0, len(x), 16):
        block = [F(value) for value in x[start : start + 16]]
        scale = F(nearest(max(map(abs, block)) / F(6) / over, "fp8_e4m3")) * over
        out += [float(F(nearest(value / scale, "e2m1")) * scale) if scale else 0.0 for value in block]
    return out


def mxfp4(x: list[float]) -> list[float]:
    """Numbers in blocks of 32 under powers of two."""
    out: list[float] = []
    for start in range(0, len(x), 32):
        block = x[start : start + 32]
        top = max(map(abs, block))
        scale = 2.0 ** (floor(log2(top)) - 2) if top else 1.0
        out += [nearest(value / scale, "e2m1") * scale for value in block]
    return out


def groups(x: list[float], size: float) -> list[list[float]]:
    """``x`` in runs of ``size``, the last one as short as it comes; inf is one run."""
    return [x] if size == inf else [x[start : start + int(size)] for start in range(0, len(x), int(size))]
