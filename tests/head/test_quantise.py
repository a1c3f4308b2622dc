"""Formats as arithmetic: equal to the enumerated grids (grids.py), to torch's dtypes and to compressed-tensors."""

from collections.abc import Callable

import pytest
import torch
from support import grids
from torch import Tensor

from replay.engines.precision import Format, parse_format
from replay.head.quantise import quantise, quantise_weight, round_e2m1, round_to_grid

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rows(seed: int = 0, shape: tuple[int, ...] = (5, 80)) -> Tensor:
    """Numbers of very different sizes, a row of zeros and a lonely outlier among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[0])[:, None]
    x[1], x[2, 3] = 0, 900.0
    return x


# ---- grids ----


@pytest.mark.parametrize(("grid", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_the_twins_fp8_grids_are_torchs(grid: str, dtype: torch.dtype) -> None:
    values = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    assert values[: len(grids.GRIDS[grid])].tolist() == grids.GRIDS[grid]
    assert not values[len(grids.GRIDS[grid]) :].isfinite().any()


@pytest.mark.parametrize("grid", ["fp8_e4m3", "fp8_e5m2", "e2m1", "int8", "int4"])
def test_rounding_finds_the_nearest_number_and_the_even_one_of_two(grid: str) -> None:
    values = torch.tensor(grids.GRIDS[grid], dtype=torch.float)
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1]), rows().flatten()])
    x = torch.cat([x, -x, torch.tensor([1e6, -1e6, 1e-12])])
    assert round_to_grid(x, grid).tolist() == [grids.nearest(value, grid) for value in x.tolist()]


def test_nothing_turns_nan_into_a_number() -> None:
    for grid in ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "e2m1"):
        assert round_to_grid(torch.tensor([torch.nan]), grid).isnan().all()


@pytest.mark.parametrize("grid", ["fp8_e4m3", "fp8_e5m2", "int8", "int4", "nvfp4", "mxfp4"])
def test_a_row_with_nan_has_only_nan_under_its_scale(grid: str) -> None:
    x = rows()[:, :16].clone()
    x[0, 3] = torch.nan
    out = quantise(x, Format(grid, "token"))
    assert out[0].isnan().all() and out[1:].isfinite().all()


def test_e2m1_by_hand() -> None:
    """Halfway numbers go to the even code: 0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4."""
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert round_e2m1(x).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert round_e2m1(-x).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]
    assert round_e2m1(torch.tensor(E2M1)).tolist() == E2M1


# ---- formats ----


def by_row(twin: Callable[[list[float]], list[float]]) -> Callable[[list[list[float]]], list[list[float]]]:
    return lambda x: [twin(row) for row in x]


def by_group(size: int, twin: Callable[[list[float]], list[float]]) -> Callable[[list[list[float]]], list[list[float]]]:
    return lambda x: [[value for group in grids.groups(row, size) for value in twin(group)] for row in x]


def whole(twin: Callable[[list[float], float], list[float]]) -> Callable[[list[list[float]]], list[list[float]]]:
    return lambda x: [twin(row, max(abs(value) for row in x for value in row)) for row in x]


TWINS = {
    ("fp8_e4m3", "weight"): whole(lambda row, top: grids.symmetric(row, "fp8_e4m3", top)),
    ("fp8_e5m2", "weight"): whole(lambda row, top: grids.symmetric(row, "fp8_e5m2", top)),
    ("fp8_e4m3:channel", "weight"): by_row(lambda row: grids.symmetric(row, "fp8_e4m3")),
    ("fp8_e4m3:scale=0.25", "weight"): by_row(lambda row: grids.symmetric(row, "fp8_e4m3", fixed=0.25)),
    ("int8", "weight"): by_row(lambda row: grids.symmetric(row, "int8")),
    ("int8:tensor", "weight"): whole(lambda row, top: grids.symmetric(row, "int8", top)),
    ("int8:g32", "weight"): by_group(32, lambda row: grids.symmetric(row, "int8")),
    ("int8:asym", "weight"): by_row(lambda row: grids.affine(row, 8)),
    ("int4:g32", "weight"): by_group(32, lambda row: grids.symmetric(row, "int4")),
    ("int4:g64", "weight"): by_group(64, lambda row: grids.symmetric(row, "int4")),
    ("int4:g128", "weight"): by_group(128, lambda row: grids.symmetric(row, "int4")),
    ("int4:channel", "weight"): by_row(lambda row: grids.symmetric(row, "int4")),
    ("int4:g32:sym7", "weight"): by_group(32, lambda row: grids.symmetric(row, "int4", top=7)),
    ("int4:channel:sym7", "weight"): by_row(lambda row: grids.symmetric(row, "int4", top=7)),
    ("int4:g32:asym", "weight"): by_group(32, lambda row: grids.affine(row, 4)),
    ("nvfp4", "weight"): whole(grids.nvfp4),
    ("mxfp4", "weight"): by_row(grids.mxfp4),
    ("fp8_e4m3", "input"): by_row(lambda row: grids.symmetric(row, "fp8_e4m3")),
    ("int8", "input"): by_row(lambda row: grids.symmetric(row, "int8")),
    ("int4", "input"): by_row(lambda row: grids.symmetric(row, "int4")),
    ("nvfp4", "input"): by_row(lambda row: grids.nvfp4(row, max(map(abs, row)))),
    ("fp8_e4m3", "kv"): by_row(lambda row: grids.symmetric(row, "fp8_e4m3", fixed=1.0)),
    ("fp8_e5m2", "kv"): by_row(lambda row: grids.symmetric(row, "fp8_e5m2", fixed=1.0)),
    ("fp8_e4m3:scale=auto", "kv"): by_row(lambda row: grids.symmetric(row, "fp8_e4m3")),
}


@pytest.mark.parametrize(("text", "role"), TWINS)
def test_a_format_equals_its_twin(text: str, role: str) -> None:
    x = rows()
    assert quantise(x, parse_format(text, role)).tolist() == TWINS[text, role](x.tolist())


@pytest.mark.parametrize(("text", "role"), [key for key in TWINS if key[1] == "weight"])
def test_a_weight_made_in_parts_is_the_same(text: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, form = rows(), parse_format(text, role)
    monkeypatch.setattr("replay.head.quantise._BLOCK", 2 * x.shape[1])
    assert torch.equal(quantise_weight(x, form, torch.float32), quantise(x, form))
    assert torch.equal(quantise_weight(x, form, torch.bfloat16), quantise(x, form).bfloat16())


def test_seven_is_the_largest_number_by_hand() -> None:
    """Under sym7 3.5 and -3.5 are 7 and -7, and nothing is clipped; else they are 7.5, which rounds to 8, and -7.5."""
    x = torch.tensor([[3.5, -3.5, 0.75, -1.25, 0.2]])
    assert quantise(x, parse_format("int4:channel:sym7", "weight")).tolist() == [[3.5, -3.5, 1.0, -1.0, 0.0]]
    scale = torch.tensor(3.5) / 7.5
    whole = torch.tensor([7, -8, 2, -3, 0])
    assert torch.equal(quantise(x, parse_format("int4:channel", "weight"))[0], whole * scale)


def test_a_vector_is_one_row() -> None:
    x, form = rows()[3], parse_format("int4:g32", "weight")
    assert quantise_weight(x, form, torch.float32).tolist() == TWINS["int4:g32", "weight"]([x.tolist()])[0]


@pytest.mark.parametrize("grid", ["fp32", "bf16", "fp16"])
def test_a_dtype_is_torchs_own_cast(grid: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[grid]
    assert torch.equal(quantise(rows() * 1e3, parse_format(grid, "input")), (rows() * 1e3).to(dtype).float())


# Written by compressed-tensors 0.18 (fake_quantize of 32 numbers, torch.randn with seed 3): int in groups of 32,
# symmetric; float in blocks of 16 with e4m3 scales under generate_gparam's.
NUMBERS = [-0.07664429396390915, 0.35988152027130127, -0.7820168137550354, 0.07152773439884186, 0.6648393869400024,
           -0.28678029775619507, 1.6205507516860962, -1.596708059310913, -0.05168096348643303, -0.30597570538520813,
           0.2485017478466034, -0.2225608378648758, 0.9131519198417664, 0.2043411135673523, 0.573984682559967,
           0.41633129119873047, 0.26150116324424744, 0.9311244487762451, -0.5144619941711426, -1.651665449142456,
           1.0460227727890015, 0.5221869945526123, -0.16680915653705597, 0.05303340032696724, 0.5637630224227905,
           2.2565572261810303, 1.8692600727081299, -1.1952342987060547, 0.997922420501709, 0.45918044447898865,
           2.436397075653076, -0.1468081772327423]  # fmt: skip
GOLDENS = {
    "int4:g32": [-0.0, 0.32485294342041016, -0.6497058868408203, 0.0, 0.6497058868408203, -0.32485294342041016,
                 1.6242647171020508, -1.6242647171020508, -0.0, -0.32485294342041016, 0.32485294342041016,
                 -0.32485294342041016, 0.9745588302612305, 0.32485294342041016, 0.6497058868408203,
                 0.32485294342041016, 0.32485294342041016, 0.9745588302612305, -0.6497058868408203,
                 -1.6242647171020508, 0.9745588302612305, 0.6497058868408203, -0.32485294342041016, 0.0,
                 0.6497058868408203, 2.273970603942871, 1.949117660522461, -1.2994117736816406, 0.9745588302612305,
                 0.32485294342041016, 2.273970603942871, -0.0],
    "nvfp4": [-0.1305212676525116, 0.3915638029575348, -0.7831276059150696, 0.1305212676525116, 0.7831276059150696,
              -0.2610425353050232, 1.5662552118301392, -1.5662552118301392, -0.0, -0.2610425353050232,
              0.2610425353050232, -0.2610425353050232, 0.7831276059150696, 0.2610425353050232, 0.5220850706100464,
              0.3915638029575348, 0.20303308963775635, 0.8121323585510254, -0.609099268913269, -1.6242647171020508,
              1.218198537826538, 0.609099268913269, -0.20303308963775635, 0.0, 0.609099268913269, 2.436397075653076,
              1.6242647171020508, -1.218198537826538, 0.8121323585510254, 0.4060661792755127, 2.436397075653076,
              -0.20303308963775635],
}  # fmt: skip


@pytest.mark.parametrize("text", GOLDENS)
def test_compressed_tensors_writes_the_same(text: str) -> None:
    """To the last bit for int4; nvfp4's scale is there the quotient where it is here the product, an ulp apart."""
    out = quantise(torch.tensor([NUMBERS]), parse_format(text, "weight"))[0]
    torch.testing.assert_close(out, torch.tensor(GOLDENS[text]), rtol=0 if text == "int4:g32" else 2.5e-7, atol=0)
