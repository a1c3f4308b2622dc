"""What a process has set for its products: workers round as the process that asks for them only with the same."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from replay.head.products import take_served_products_in

_mkldnn: Any = torch.backends.mkldnn  # torch types its switches as something else
# What torch.set_float32_matmul_precision sets, on the CPU and on GPUs, as torch 2.9 and later say it of each.
_NAMED = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("bf16", "tf32")}
# Switches of torch.backends.cuda.matmul that let a GPU sum less exactly, as torch has them; older ones lack some.
_GPU_SUMS = {
    "allow_bf16_reduced_precision_reduction": True,
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction_split_k": True,
    "allow_fp16_reduced_precision_reduction_split_k": True,
    "allow_fp16_accumulation": False,
}
# How OpenMP's threads wait for each other. Products of a server's size may take more threads than a worker's share, and
# threads that spin keep the cores from those that work.
WAITING = "OMP_WAIT_POLICY"
_SPLIT = "_split_k"  # is set together with what it belongs to


@dataclass(frozen=True, slots=True)
class ProductSettings:
    """``cpu`` and ``gpu``: how exact products of fp32 are there, ieee, tf32 or bf16. ``threads``: in how many a CPU
    takes those products whose bits depend on it (head/products.py). ``onednn``: whether it may take products on the
    CPU. ``gpu_sums``: by name those of torch's switches for sums on GPUs that are not as torch has them.
    """

    cpu: str
    gpu: str
    threads: int
    onednn: bool = True
    gpu_sums: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def here(cls) -> "ProductSettings":
        """Those of this process."""
        sums = ((name, getattr(torch.backends.cuda.matmul, name, usual)) for name, usual in _GPU_SUMS.items())
        others = tuple((name, value) for name, value in sums if value != _GPU_SUMS[name])
        return cls(*fp32_products(), torch.get_num_threads(), _mkldnn.enabled, others)

    def apply(self) -> None:
        """Let this process, a worker with threads of its own, take products so."""
        set_fp32_products((self.cpu, self.gpu))
        take_served_products_in(self.threads)
        if _mkldnn.enabled != self.onednn:
            _mkldnn.enabled = self.onednn
        if self.gpu_sums != ProductSettings.here().gpu_sums:
            _set_gpu_sums(_GPU_SUMS | dict(self.gpu_sums))

    def say(self, *, on_gpu: bool) -> list[str]:
        """A word for each, as far as it counts there."""
        words = [f"fp32-products-on-cpu={self.cpu}"]
        words += [] if self.onednn else ["no-onednn"]
        if on_gpu:
            words += [f"fp32-products-on-gpu={self.gpu}", *(f"{name}={value}" for name, value in self.gpu_sums)]
        return words


def _set_gpu_sums(wanted: Mapping[str, bool]) -> None:
    matmul: Any = torch.backends.cuda.matmul
    for name, value in wanted.items():
        if name.endswith(_SPLIT) or not hasattr(matmul, name):
            continue
        split = hasattr(matmul, name + _SPLIT)
        setattr(matmul, name, (value, wanted[name + _SPLIT]) if split else value)


def waiting() -> str:
    """How the threads of workers wait, which their processes are told when they start."""
    return os.environ.get(WAITING, "PASSIVE")


def fp32_products() -> tuple[str, str]:
    """How exact this process takes products of fp32 on the CPU and on GPUs: ieee, tf32 or bf16.

    A program may set one for both, as by torch.set_float32_matmul_precision, or each by itself; torch then no longer
    says the one.
    """
    if not hasattr(torch.backends.mkldnn, "matmul"):  # before torch 2.9
        return _NAMED[torch.get_float32_matmul_precision()]
    cpu, gpu = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    return _or_exact(cpu), _or_exact(gpu)


def _or_exact(precision: str) -> str:
    return "ieee" if precision == "none" else precision  # where nothing was set


def set_fp32_products(wanted: tuple[str, str]) -> None:
    """Let this process take products of fp32 as ``fp32_products`` said it elsewhere."""
    if wanted == fp32_products():
        return
    nearest = "highest" if wanted[1] == "ieee" else "high"
    torch.set_float32_matmul_precision(next((name for name, both in _NAMED.items() if both == wanted), nearest))
    if hasattr(torch.backends.mkldnn, "matmul") and fp32_products() != wanted:
        torch.backends.mkldnn.matmul.fp32_precision = wanted[0]
