"""What every test stands on: the installed package, a plain terminal of known width, and a small real target."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# `capture/` on disk is `replay.capture` in Python: only the installed package is whole. The checkout
# must not hide it.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

# Before torch, rich or a child process reads them.
os.environ.update(
    COLUMNS="80", LINES="24", TERM="dumb", NO_COLOR="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
)
# Workers of pytest-xdist share the cores: two that each spin on all of them are slower than one alone. They inherit
# what the process that starts them has set below.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait for others do not keep their cores from them
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

import pytest  # noqa: E402

# Files that take minutes, longest first: begun first, so that no worker is left with one of them at the end.
LONGEST = (
    "capture/test_sglang_plugin.py",
    "whole/test_predict_chunks.py",
    "diagnosis/test_diagnose.py",
    "whole/test_predict_server.py",
    "whole/test_predict_latent.py",
    "capture/test_rig_server.py",
    "whole/test_predict_crossed.py",
    "whole/test_predict_trees.py",
    "whole/test_decoder.py",
    "simulator/test_workers.py",
    "whole/test_storage.py",
    "simulator/test_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of ``LONGEST`` before all others, which keep their order."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A worker's part that ran in this process leaves nothing of the threads that it was told."""
    yield
    if products := sys.modules.get("replay.head.products"):
        products.take_served_products_in(None)


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """SmolLM2-135M-Instruct as a bf16 checkpoint (30 layers, hidden 576, vocabulary 49,152, tied embedding)."""
    from replay.capture.demo_target import smollm2

    return smollm2()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests measured of a server's rounds (support/near_ties.py), also where they passed."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ())]
    said = [text for one in reports for name, text in one.user_properties if name == "judged"]
    if said:
        terminalreporter.section(f"rounds of real servers on {kernels()}")
        for text in said:
            terminalreporter.write_line(text)


def kernels() -> str:
    """Which kernels torch and oneDNN take here."""
    import torch

    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return torch.backends.cpu.get_cpu_capability() + (f", oneDNN up to {limit}" if limit else "")
