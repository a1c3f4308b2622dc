"""What every test stands on: the installed package, a plain terminal of known width, and a small real target."""

import os
import sys
from pathlib import Path

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
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """SmolLM2-135M-Instruct as a bf16 checkpoint (30 layers, hidden 576, vocabulary 49,152, tied embedding)."""
    from replay.capture.demo_target import smollm2

    return smollm2()
