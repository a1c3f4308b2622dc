"""What rounds differently is told apart and said in words: whose CPU it is, and how exact products of fp32 are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replay.simulator import cache_keys as keys
from replay.simulator.cache_keys import cpu_make, kernels_of, say_unlike
from replay.simulator.product_settings import ProductSettings, fp32_products, set_fp32_products

EXACT = ("ieee", "ieee")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    assert fp32_products() == EXACT
    yield
    torch.set_float32_matmul_precision("highest")
    assert fp32_products() == EXACT


def test_products_of_less_exact_fp32_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kernels_of("cpu")
    torch.set_float32_matmul_precision("highest")  # what torch does by itself is no other
    assert kernels_of("cpu") == plain
    torch.set_float32_matmul_precision("high")
    high = kernels_of("cpu")
    assert say_unlike(high, plain) == "fp32-products-on-cpu=tf32 and fp32-products-on-cpu=ieee"
    here = replace(ProductSettings.here(), cpu="ieee", gpu="ieee")
    assert kernels_of("cpu", settings=here) == plain
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    gpu = [kernels_of("cuda:0", settings=replace(here, gpu=gpu)) for gpu in ("ieee", "tf32")]
    assert say_unlike(*gpu) == "fp32-products-on-gpu=ieee and fp32-products-on-gpu=tf32"


def test_switches_of_products_go_along_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    here, matmul = ProductSettings.here(), torch.backends.cuda.matmul
    assert here == ProductSettings("ieee", "ieee", torch.get_num_threads())
    plain = kernels_of("cpu")
    try:
        torch.backends.mkldnn.enabled = False
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
        other = ProductSettings.here()
        assert say_unlike(kernels_of("cpu"), plain) == "no-onednn and none"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
        found = say_unlike(kernels_of("cuda:0"), kernels_of("cuda:0", settings=here))
        named = "allow_fp16_reduced_precision_reduction"
        assert found == f"no-onednn {named}=False {named}_split_k=False and none"
        here.apply()
        assert ProductSettings.here() == here
        assert matmul.allow_fp16_reduced_precision_reduction_split_k
        other.apply()
        assert not matmul.allow_fp16_reduced_precision_reduction_split_k
        assert ProductSettings.here() == other != here
    finally:
        here.apply()


def test_threads_of_products_of_a_servers_size_count_where_they_are_others() -> None:
    here = replace(ProductSettings.here(), threads=2)
    assert kernels_of("cpu", 2, here) == kernels_of("cpu", 2, replace(here, threads=2))
    assert say_unlike(kernels_of("cpu", 1, here), kernels_of("cpu", 1, replace(here, threads=3))) == (
        "products-of-server's-size-in-threads=2 and products-of-server's-size-in-threads=3"
    )


@pytest.mark.parametrize("cpu", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize("gpu", ["ieee", "tf32"])
def test_products_are_set_as_they_were_elsewhere(cpu: str, gpu: str) -> None:
    """A program may set each by itself, and torch then refuses to say one name for both."""
    torch.backends.mkldnn.matmul.fp32_precision = cpu
    torch.backends.cuda.matmul.fp32_precision = gpu
    found = fp32_products()
    assert found == (cpu, gpu)
    torch.set_float32_matmul_precision("highest")
    set_fp32_products(found)
    assert fp32_products() == found
    assert torch.backends.cuda.matmul.allow_tf32 == (gpu == "tf32")  # cuBLAS asks for it
    set_fp32_products(EXACT)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_torch_that_has_one_name_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.4 to 2.8."""
    monkeypatch.delattr(type(torch.backends.mkldnn), "matmul")
    for name in ("medium", "high", "highest"):
        torch.set_float32_matmul_precision(name)
        found = fp32_products()
        torch.set_float32_matmul_precision("highest")
        set_fp32_products(found)
        assert torch.get_float32_matmul_precision() == name


@pytest.mark.parametrize(
    "name", ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "DNNL_DEFAULT_FPMATH_MODE"]
)
def test_what_the_environment_says_of_products_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    plain = kernels_of("cpu")
    monkeypatch.setenv(name, "1")
    assert say_unlike(plain, kernels_of("cpu")) == f"none and {name}=1"


def test_another_cpu_is_another_one_also_with_the_same_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (
        "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: CPU @ 2 GHz\nflags\t: avx\n\n"
    )
    amd, intel = tmp_path / "amd", tmp_path / "intel"
    amd.write_text(told.format("AuthenticAMD", 23, 49) + told.format("Other", 1, 1))
    intel.write_text(told.format("GenuineIntel", 6, 85))
    assert cpu_make(amd) == "CPU: AuthenticAMD family 23 model 49"
    found = []
    for make in (cpu_make(amd), cpu_make(intel)):
        monkeypatch.setattr(keys, "cpu_make", lambda make=make: make)
        found.append(kernels_of("cpu"))
    said = "CPU: AuthenticAMD family 23 model 49 and CPU: GenuineIntel family 6 model 85"
    assert say_unlike(*found) == said
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert cpu_make(tmp_path / "arm") == "CPU: maker 0x41 part 0xd40"
    assert cpu_make(tmp_path / "none") == ""
