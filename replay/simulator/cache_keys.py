"""What an entry of the cache (cache.py) is named after, as checksums: all that a replay is made of."""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
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

    from replay.simulator.product_settings import ProductSettings

# What a replay is made by; their sources count as replay's version, so that a checkout's cache never lags behind it.
_PACKAGES = ("replay", "replay.traces", "replay.analysis")

# What narrows the instructions that kernels of products use, or says how exact these are (the guides of oneDNN, MKL,
# CUDA and torch), beside what the CPU has.
_NARROWING = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
# Instructions that products are summed by, in another order each: as Linux calls them for x86 and for ARM.
_INSTRUCTIONS = ("avx", "amx", "fma", "sve", "bf16", "i8mm")
_CPU = Path("/proc/cpuinfo")
# Whose CPU it is, by which MKL chooses its code and oneDNN's is cut into blocks: as Linux says it for x86 and for ARM.
_MAKE = {"vendor_id": "", "cpu family": "family ", "model": "model ", "CPU implementer": "maker ", "CPU part": "part "}
_THREADS = 2  # their place in what ``kernels_of`` gives


def kernels_of(
    device: str, threads: int | None = None, settings: "ProductSettings | None" = None
) -> tuple[str | int, ...]:
    """What rounds differently elsewhere: torch, the CPU and its instructions, what narrows them, which products oneDNN
    then has kernels for, the threads and the settings of products (None: of this process), and a GPU where it runs on
    one."""
    import torch

    from replay.simulator.product_settings import ProductSettings

    on_gpu = torch.device(device).type == "cuda"
    gpu = torch.cuda.get_device_name(device) if on_gpu else ""
    narrowed = (f"{name}={os.environ[name]}" if os.environ.get(name) else "" for name in _NARROWING)
    capability = torch.backends.cpu.get_cpu_capability()
    settings, threads = settings or ProductSettings.here(), threads or torch.get_num_threads()
    products = [*_with_kernels(), *settings.say(on_gpu=on_gpu)]
    if settings.threads != threads and not on_gpu:
        products.append(f"products-of-server's-size-in-threads={settings.threads}")
    return (
        torch.__version__, capability, threads, gpu, *narrowed, cpu_make(), instructions(), " ".join(products),
    )  # fmt: skip


def _with_kernels() -> list[str]:
    """Which products oneDNN has kernels for."""
    import torch

    from replay.narrow_products import has_kernels

    narrow = {"bf16-products": torch.bfloat16, "fp16-products": torch.float16}
    return [name for name, dtype in narrow.items() if has_kernels(dtype)]


@cache
def instructions(told: Path = _CPU) -> str:
    """Those of the CPU that products may be summed by, in sorted order; what the system calls it where none is told.

    torch tells AVX2 from AVX512, and not whether an AVX512 CPU has those for bf16 or AMX.
    """
    flags = next((value for name, value in _told_of_cpu(told) if name in ("flags", "Features")), "")
    return " ".join(sorted(flag for flag in flags.split() if flag.startswith(_INSTRUCTIONS))) or platform.processor()


@cache
def cpu_make(told: Path = _CPU) -> str:
    """Whose CPU it is and which, as ``CPU: AuthenticAMD family 23 model 49``; empty where the system does not tell."""
    found: dict[str, str] = {}
    for name, value in _told_of_cpu(told):
        found.setdefault(name, value)  # of the first core
    words = " ".join(f"{said}{found[name]}" for name, said in _MAKE.items() if name in found)
    return f"CPU: {words}" if words else ""


def _told_of_cpu(told: Path) -> list[tuple[str, str]]:
    """Names and values, core by core; none where the system has no such file."""
    try:
        lines = told.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def say_unlike(one: Iterable[str | int], other: Iterable[str | int]) -> str:
    """In which of the words of ``kernels_of`` two differ; none where one lacks what the other has."""
    pairs = [(_words(a), _words(b)) for a, b in zip(one, other, strict=False) if a != b]
    return ", ".join(f"{_lacking(b, a)} and {_lacking(a, b)}" for a, b in pairs)


def unlike_here(kernels: Sequence[str | int]) -> str:
    """As ``say_unlike``: in what this process, on its CPU with as many threads, differs from one with ``kernels``."""
    return say_unlike(kernels_of("cpu", int(kernels[_THREADS])), kernels)


def _words(said: str | int) -> list[str]:
    """A CPU is one of them, because its numbers say nothing by themselves."""
    return [said] if isinstance(said, str) and said.startswith("CPU: ") else str(said).split()


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


@dataclass
class _Hashed:
    """A head, with its checksum as it was when that was first asked for."""

    checkpoint: Checkpoint

    @cached_property
    def sha256(self) -> str:
        return _sha256_of_head(self.checkpoint)


_NONE: Mapping[int, _Hashed] = {}
_hashed: ContextVar[Mapping[int, _Hashed]] = ContextVar("_hashed", default=_NONE)  # by what ``id`` says of the heads


@contextmanager
def hashed_once(checkpoints: Iterable[Checkpoint]) -> Iterator[None]:
    """While the block runs, ``checkpoint_sha256`` reads each of these heads once at most.

    A block is one command, or one call from Python: until the next one a training loop may change tensors in place,
    which nothing here would notice.
    """
    token = _hashed.set({**{id(one): _Hashed(one) for one in checkpoints}, **_hashed.get()})
    try:
        yield
    finally:
        _hashed.reset(token)


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """Of a head's config and tensors."""
    known = _hashed.get().get(id(checkpoint))
    return _sha256_of_head(checkpoint) if known is None else known.sha256


def _sha256_of_head(checkpoint: Checkpoint) -> str:
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
