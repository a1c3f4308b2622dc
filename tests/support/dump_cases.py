"""A small Llama to dump, and an import as a test types it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from replay.capture.dumps.record import ImportOptions, ImportResult, import_dumps

LAYERS, HIDDEN, VOCABULARY = 6, 32, 96
TAPS = "1,3,4"


def make_target(folder: Path, dtype: torch.dtype = torch.float32, *, tied: bool = False, seed: int = 0) -> Path:
    """A small Llama whose greedy text is no constant, with norms whose weights differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.4,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
    model.to(dtype).save_pretrained(folder)
    return folder


def imported(dumps: Path | Sequence[Path], out: Path, target: Path, **more: Any) -> ImportResult:
    return import_dumps(ImportOptions([dumps] if isinstance(dumps, Path) else dumps, out, target, **more))
