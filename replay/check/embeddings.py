"""Whether a head's embedding is its target's, by a few rows of both."""

import os
import re
from pathlib import Path

from replay.checkpoint.headers import Weights, read_weights
from replay.errors import CheckpointError
from replay.traces.weights import EMBED_NAMES

_EMBED_SAMPLE = 8  # rows of the two embeddings that are compared


def embeddings_agree(head: Weights, hidden_size: int, folder: Path) -> bool | None:
    """Whether rows spread over the head's embedding equal those of the target in ``folder`` within a rounding to bf16.

    None where one of them is not to be had, or the head's are not ``hidden_size`` wide.
    """
    own = head.tensors.get("embed_tokens.weight")
    if own is None or own.shape[1:] != (hidden_size,):
        return None
    where = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not any(os.path.exists(path) for path in where):
        return None
    try:
        theirs = read_weights(folder, whole=False, only=re.compile("|".join(map(re.escape, EMBED_NAMES))))
    except CheckpointError:
        return None  # the target's weights are not what is checked here
    names = [name for name, fact in theirs.tensors.items() if name.endswith("embed_tokens.weight") and fact.shape]
    rows = min(own.shape[0], *(theirs.tensors[name].shape[0] for name in names)) if names else 0
    for row in range(0, rows, max(1, rows // _EMBED_SAMPLE)):
        mine, others = head.row("embed_tokens.weight", row), theirs.row(names[0], row)
        if mine is None or others is None or len(mine) != len(others):
            return None
        scale = max(map(abs, others), default=0.0)
        if any(abs(one - other) > 0.01 * scale for one, other in zip(mine, others, strict=True)):
            return False
    return True if rows else None
