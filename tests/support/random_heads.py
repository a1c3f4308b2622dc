"""Heads of random weights, one for each option of a config, and requests of random tokens and features for them."""

from dataclasses import replace

import torch
from support.heads import DEEPSEEK_YARN, LATENT, PARALLEL, SPECULATORS, target_tables, tiny_checkpoint

from replay.drafting.rows import DraftInput
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.precision import PLAIN, Precision
from replay.engines.profiles import ENGINES
from replay.head.model import Head, TargetTables
from replay.head.products import Execution

HEADS = {
    "plain": {},
    "two layers": {"num_hidden_layers": 2},
    "three layers": {"num_hidden_layers": 3},
    "every norm": {"fc_norm": True, "norm_output": True, "eagle_config": {"norm_before_fc": True}},
    "whole vocabulary": {"draft_vocab_size": 96},
    "target's lm_head": {"draft_vocab_size": None},
    "tied": {"draft_vocab_size": None, "tie_word_embeddings": True},
    "one tap, wider target": {"target_hidden_size": 20, "num_aux_hidden_states": 1},
    "one tap as wide as the head": {"num_aux_hidden_states": 1},
    "biases": {"bias": True, "attention_bias": True, "mlp_bias": True},
    "no grouping": {"num_key_value_heads": 4, "head_dim": 8},
    "llama3 rope": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                        "original_max_position_embeddings": 16}},
    "yarn rope": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "linear rope, part of each head": {"rope_scaling": {"rope_type": "linear", "factor": 2.0},
                                       "partial_rotary_factor": 0.5},
    "speculators": SPECULATORS,
    "P-EAGLE": PARALLEL,
    "EAGLE-1": {"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None, "eagle_config": None},
    "latent": LATENT | {"rope_parameters": DEEPSEEK_YARN},
    "latent, neox, every norm": LATENT | {"rope_interleave": False, "fc_norm": True, "norm_output": True, "bias": True},
}  # fmt: skip


FP64 = Execution(torch.float64)


def make_head(
    name: str,
    *,
    engine: str = "sglang",
    numerics: str = "sglang",
    execution: Execution = FP64,
    behaviour: Behaviour = HEALTHY,
    precision: Precision = PLAIN,
) -> Head:
    """The same weights whenever it is called with the same name."""
    checkpoint = tiny_checkpoint(**HEADS[name])
    return Head(
        checkpoint,
        TargetTables(*target_tables(checkpoint)),
        profile=replace(ENGINES[engine], numerics=numerics),
        execution=execution,
        behaviour=behaviour,
        precision=precision,
    )


def requests(head: Head, shapes: list[tuple[int, int]]) -> list[DraftInput]:
    generator = torch.Generator().manual_seed(5)
    width = head.config.fc_inputs
    return [
        DraftInput(
            torch.randint(head.config.vocab_size, (prompt + output,), generator=generator),
            torch.randn(prompt + output - 1, width, generator=generator),
            prompt,
        )
        for prompt, output in shapes
    ]
