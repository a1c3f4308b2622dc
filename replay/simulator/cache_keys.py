"""What an entry of the cache (cache.py) is named after, as checksums: all that a replay is made of."""

import hashlib
import os
import platform
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import TraceError
from replay.traces import files
from replay.traces.reader import Trace
from replay.traces.tensors import tensor_bytes
from replay.traces.weights import find_weight

if TYPE_CHECKING:
    import polars as pl

# What a replay is made by; their sources count as replay's version, so that a checkout's cache never lags behind it.
_PACKAGES = ("replay", "replay.traces", "replay.analysis")


# What narrows the instructions that kernels of products use (oneDNN's and MKL's guides), beside what the CPU has.
_NARROWING = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
)  # fmt: skip
# Instructions that products are summed by, in another order each: as Linux calls them for x86 and for ARM.
_INSTRUCTIONS = ("avx", "amx", "fma", "sve", "bf16", "i8mm")
_CPU = Path("/proc/cpuinfo")


def kernels_of(device: str, threads: int | None = None) -> tuple[str | int, ...]:
    """What rounds differently elsewhere: torch, the CPU's instructions, what narrows them, which products oneDNN then
    has kernels for, the threads (None: of this process), and a GPU where it runs on one."""
    import torch

    from replay.narrow_products import has_kernels

    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    narrowed = (os.environ.get(name, "") for name in _NARROWING)
    capability = torch.backends.cpu.get_cpu_capability()
    narrow = {"bf16-products": torch.bfloat16, "fp16-products": torch.float16}
    native = " ".join(name for name, dtype in narrow.items() if has_kernels(dtype))
    return torch.__version__, capability, threads or torch.get_num_threads(), gpu, *narrowed, instructions(), native


@cache
def instructions(told: Path = _CPU) -> str:
    """Those of the CPU that products may be summed by, in sorted order; what the system calls it where none is told.

    torch tells AVX2 from AVX512, and not whether an AVX512 CPU has those for bf16 or AMX.
    """
    try:
        lines = told.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(sorted(flag for flag in flags.split() if flag.startswith(_INSTRUCTIONS))) or platform.processor()


def say_unlike(one: Iterable[str | int], other: Iterable[str | int]) -> str:
    """In which of the words of ``kernels_of`` two differ; none where one lacks what the other has."""
    pairs = [(str(a).split(), str(b).split()) for a, b in zip(one, other, strict=False) if a != b]
    return ", ".join(f"{_lacking(b, a)} and {_lacking(a, b)}" for a, b in pairs)


def _lacking(words: list[str], of: list[str]) -> str:
    return " ".join(word for word in of if word not in words) or "none"


def rows_sha256(table: "pl.DataFrame | None") -> str:
    """Of the rows of a table; empty for none."""
    return "" if table is None else sha256_of_parts(repr(row).encode() for row in table.iter_rows())


def trace_sha256(trace: Trace) -> str:
    """Of trace.json, which holds the checksums of all else, and of which requests are open.

    Where the target's weights lie elsewhere, of those files' sizes and times as well, and of shards in a storage, whose
    rows are held against no checksum, of their versions. Raises TraceError.
    """
    said = [files.read_small(trace.path / files.HEADER, 1 << 24)]
    said += [record.request_id.encode() for record in trace.records]
    said += [f"{one.size} {one.version}".encode() for one in trace.layouts if one.version]
    said += [_outside(trace, which).encode() for which in ("embed", "lm_head")]
    return sha256_of_parts(said)


def _outside(trace: Trace, which: str) -> str:
    """Name, size and time of the file beside the trace that holds a weight; empty where there is none.

    Who needs one that is not there is refused when it is read.
    """
    if trace.header.weights is not None:
        return ""
    try:
        layout, _ = find_weight(trace.path, trace.header, which, trace.target_folder)
    except TraceError:
        return ""
    told = os.stat(layout.path)
    return f"{layout.path.name} {told.st_size} {told.st_mtime_ns}"


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """Of a head's config and tensors."""
    said: list[bytes | memoryview] = [repr(checkpoint.config).encode(), repr(checkpoint.notes).encode()]
    for name, tensor in sorted(checkpoint.tensors.items()):
        said += [f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), tensor_bytes(tensor)]
    return sha256_of_parts(said)


def program_sha256() -> str:
    """Of replay's version and sources."""
    folders = [Path(str(import_module(name).__file__)).parent for name in _PACKAGES]
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    return sha256_of_parts([replay.__version__.encode(), *(path.read_bytes() for path in paths)])


def sha256_of_parts(parts: Iterable[bytes | memoryview]) -> str:
    """Of all parts, each by itself first, so that where one ends counts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
