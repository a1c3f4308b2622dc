"""16-bit products on a CPU without instructions for them, held against products of the same numbers in fp64."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from replay import narrow_products
from replay.capture.local.target import use_fast_products
from replay.head.products import Execution, multiply, multiply_heads


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever this CPU has."""
    monkeypatch.setattr(narrow_products, "has_kernels", lambda dtype: dtype.itemsize > 2)
    yield


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def is_rounded(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within half a unit in the last place, and what fp32 sums may add."""
    half = torch.finfo(found.dtype).eps / 2
    return bool(((found.double() - exact).abs() <= half * exact.abs() * 1.01 + 1e-4).all())


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
@pytest.mark.parametrize("outputs", [1, 255, 256, 257, 1030])
def test_is_the_exact_product_rounded_once(dtype: torch.dtype, rows: int, outputs: int) -> None:
    x, weight, bias = some(rows, 48, dtype=dtype), some(outputs, 48, dtype=dtype), some(outputs, dtype=dtype)
    found = narrow_products.linear(x, weight, bias)
    assert found.dtype == dtype and found.shape == (rows, outputs)
    assert rows < 4 or is_rounded(found, exact(x, weight, bias))
    assert rows < 4 or is_rounded(narrow_products.linear(x[None], weight)[0], exact(x, weight))


@pytest.mark.usefixtures("no_kernels")
def test_few_rows_are_torchs_own() -> None:
    x, weight = some(3, 64), some(32, 64)
    assert torch.equal(narrow_products.linear(x, weight), functional.linear(x, weight))


@pytest.mark.usefixtures("no_kernels")
def test_a_head_takes_them_unless_bits_are_a_servers() -> None:
    x, weight = some(40, 64), some(32, 64)
    free, served = Execution(torch.bfloat16), Execution(torch.bfloat16, product_rows=32)
    assert is_rounded(multiply(x, weight, None, free, None), exact(x, weight))
    in_pieces = torch.cat([functional.linear(piece, weight) for piece in x.split(32)])
    assert torch.equal(multiply(x, weight, None, served, None), in_pieces)
    by_head, weights = some(40, 2, 16), some(2, 16, 8)
    found = multiply_heads(by_head, weights, free, None)
    assert is_rounded(found, torch.einsum("rni,nio->rno", by_head.double(), weights.double()))


def test_a_cpu_with_kernels_takes_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_products, "has_kernels", lambda dtype: True)
    x, weight = some(40, 64), some(32, 64)
    assert torch.equal(narrow_products.linear(x, weight), functional.linear(x, weight))


@pytest.fixture
def threads() -> Iterator[None]:
    """As many as before, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("no_kernels", "threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13, 33])
def test_bits_are_the_same_on_any_number_of_threads(dtype: torch.dtype, rows: int) -> None:
    """Each worker has its share of the cores, and rounds as one process does."""
    x, weight, bias = some(rows, 2048, dtype=dtype), some(600, 2048, dtype=dtype), some(600, dtype=dtype)
    by_head, weights = some(rows, 2, 64, dtype=dtype), some(2, 64, 96, dtype=dtype)
    free, narrow, found = Execution(dtype), Execution(torch.bfloat16), list[list[torch.Tensor]]()
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.append([multiply(x, weight, bias, one, None) for one in (free, narrow)])
        found[-1].append(multiply_heads(by_head, weights, free, None))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.usefixtures("no_kernels")
def test_gradients_pass() -> None:
    x, weight = some(8, 16).requires_grad_(), some(300, 16).requires_grad_()
    narrow_products.linear(x, weight).float().sum().backward()
    assert x.grad is not None and is_rounded(x.grad, weight.detach().double().sum(0).expand(8, -1))


@pytest.mark.usefixtures("no_kernels")
def test_a_targets_linear_layers_take_them() -> None:
    class Own(nn.Linear):
        """One that does more than a product is left alone."""

    model = nn.Sequential(nn.Linear(16, 8, dtype=torch.bfloat16), Own(8, 4, dtype=torch.bfloat16)).eval()
    before = model.state_dict()
    use_fast_products(model)
    assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
    x = some(9, 16)
    with torch.inference_mode():
        assert is_rounded(model[0](x), exact(x, model[0].weight, model[0].bias))
    assert list(model.state_dict()) == list(before)
