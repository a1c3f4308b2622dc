"""The sample head and the sample prompts that come with replay."""

from pathlib import Path


def sample_head() -> Path:
    """Folder of the draft head for SmolLM2-135M-Instruct that comes with replay."""
    return _samples() / "smollm2-eagle3"


def sample_prompts() -> Path:
    """The prompts that come with replay: our own, of mixed kinds, in the row format of ``replay capture --prompts``."""
    return _samples() / "prompts.jsonl"


def _samples() -> Path:
    import replay.traces

    return Path(replay.traces.__path__[0]) / "samples"
