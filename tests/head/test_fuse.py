"""Whether features pass through fc is settled by the config, and comes to what SGLang and EAGLE see as they run.

Both compare the features' width with the embedding's (sglang 0.5.23 models/llama_eagle3.py ``LlamaModel.forward``,
SafeAILab/EAGLE eagle/model/cnets.py ``Model.forward``). Widths are worked out here by hand.
"""

import pytest
import torch
from support.heads import target_tables, tiny_checkpoint

from replay.head.model import Head, TargetTables

NO_TAPS = {"eagle_config": {"use_aux_hidden_state": False}}
CASES = {
    "three taps": ({}, 96, False),
    "one tap, as wide as the head": ({"num_aux_hidden_states": 1}, 32, True),
    "two taps, together as wide": ({"num_aux_hidden_states": 2, "target_hidden_size": 16}, 32, True),
    "one tap of a narrower target": ({"num_aux_hidden_states": 1, "target_hidden_size": 16}, 16, False),
    "the final state": (NO_TAPS, 32, True),
    "a wider target's final state": ({**NO_TAPS, "num_aux_hidden_states": 1, "target_hidden_size": 48}, 48, False),
}


@pytest.mark.parametrize("name", CASES)
def test_features_as_wide_as_the_head_are_taken_as_they_stand(name: str) -> None:
    options, width, skips = CASES[name]
    checkpoint = tiny_checkpoint(**options)
    assert (checkpoint.config.features_width, checkpoint.config.skips_fc) == (width, skips)
    head = Head(checkpoint, TargetTables(*target_tables(checkpoint)))
    features_RKD = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    wanted_RE = features_RKD if skips else features_RKD @ checkpoint.tensors["fc.weight"].T
    torch.testing.assert_close(head.fuse(features_RKD), wanted_RE)


def test_norms_before_fc_are_skipped_with_it() -> None:
    checkpoint = tiny_checkpoint(fc_norm=True, eagle_config={"norm_before_fc": True}, num_aux_hidden_states=1)
    head = Head(checkpoint, TargetTables(*target_tables(checkpoint)))
    features_RKD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.fuse(features_RKD), features_RKD)
