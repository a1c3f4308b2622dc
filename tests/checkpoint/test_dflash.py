"""DFlash heads on disk: what z-lab's own package writes is read, what would run otherwise is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dflash_heads import HEADS, MASK, SIZE, SLIDING, dflash_checkpoint, dflash_config, dflash_peer
from support.heads import write_head

from replay.checkpoint.checkpoint import check_checkpoint, load_head
from replay.checkpoint.config import parse_config
from replay.checkpoint.dflash import Block, spread_layer_ids
from replay.engines.wiring import dflash_ids, dflash_wiring, parse_wiring
from replay.errors import CheckpointError, WiringError


@pytest.mark.parametrize("name", HEADS)
def test_what_the_trainers_package_writes_is_read(name: str, tmp_path: Path) -> None:
    """Config and tensors as ``save_pretrained`` of dflash 0.1.0 leaves them, in fp32."""
    checkpoint = dflash_checkpoint(**HEADS[name])
    dflash_peer(dflash_config(**HEADS[name]), checkpoint).save_pretrained(tmp_path)
    read = load_head(tmp_path)
    for field in ("layer_ids", "num_taps", "block", "rms_norm_eps", "rope", "num_kv_heads", "head_dim", "lm_head"):
        assert getattr(read.config, field) == getattr(checkpoint.config, field), field
    assert read.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(read.tensors[key], checkpoint.tensors[key]) for key in read.tensors)


def test_a_block_is_read_from_either_place() -> None:
    for changes in ({}, {"block_size": None, "dflash_config": {"mask_token_id": MASK, "block_size": SIZE}}):
        block = parse_config(dflash_config(**changes)).block
        assert block == Block(SIZE, MASK, (False, False), (None, None))
    assert parse_config(dflash_config(**SLIDING)).block == Block(SIZE, MASK, (True, False), (4, None))
    assert parse_config(dflash_config(block_size=None)).block == Block(16, MASK, (False, False), (None, None))


def test_layers_are_spread_as_the_trainers_package_does() -> None:
    from dflash.model import build_target_layer_ids

    for target in range(4, 70):
        for draft in range(1, 9):
            assert list(spread_layer_ids(target, draft)) == build_target_layer_ids(target, draft)


def test_names_may_begin_with_model(tmp_path: Path) -> None:
    checkpoint = dflash_checkpoint()
    folder = write_head(tmp_path / "head", dflash_config())
    save_file({f"model.{name}": tensor for name, tensor in checkpoint.tensors.items()}, folder / "model.safetensors")
    assert load_head(folder).tensors.keys() == checkpoint.tensors.keys()


@pytest.mark.parametrize(
    ("added", "gone", "message"),
    [
        ("lm_head.weight", "", "has lm_head.weight, which its config does not call for"),
        ("embed_tokens.weight", "", "has embed_tokens.weight, which"),
        ("layers.0.hidden_norm.weight", "", "has layers.0.hidden_norm.weight, which"),
        ("layers.0.self_attn.q_proj.bias", "", "has layers.0.self_attn.q_proj.bias, which"),
        ("", "layers.1.self_attn.k_norm.weight", "lacks layers.1.self_attn.k_norm.weight"),
        ("", "hidden_norm.weight", "lacks hidden_norm.weight"),
    ],
)
def test_a_tensor_too_many_or_too_few_is_refused(added: str, gone: str, message: str) -> None:
    checkpoint = dflash_checkpoint()
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != gone}
    if added:
        tensors[added] = torch.ones(96, 32)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint("blocks", checkpoint.config, tensors)


def test_fc_of_another_number_of_taps_is_refused() -> None:
    checkpoint = dflash_checkpoint()
    config = parse_config(dflash_config(dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2]}))
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[32, 96\], its config calls for \[32, 64\]"):
        check_checkpoint("blocks", config, checkpoint.tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is None, a token from 0 to 95"),
        ({"dflash_config": {"mask_token_id": 96}}, "dflash_config: mask_token_id is 96, a token from 0 to 95"),
        ({"block_size": 0}, "block_size is 0, an integer from 1"),
        ({"head_dim": None}, "has no head_dim"),
        ({"num_key_value_heads": None}, "has no num_key_value_heads"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, r"target_layer_ids is \[\], a list"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1]}}, r"target_layer_ids is \[-1\], a list"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": None}, "has no num_target_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*, a list of 2 of full_attention and sliding_attention"),
        (SLIDING | {"use_sliding_window": False}, "use_sliding_window is False, true"),
        (SLIDING | {"layer_types": None}, "layer_types is None, a list of 2"),
        (SLIDING | {"sliding_window": None}, "has no sliding_window"),
        ({"draft_vocab_size": 40, "tie_word_embeddings": False}, "draft_vocab_size is 40, nothing"),
        ({"rope_scaling": {"rope_type": "default", "rope_dim": 6}}, "rope_scaling: rope_dim is 6, 12, the head_dim"),
        ({"rope_parameters": {"rope_type": "default", "rope_dim": 6}}, "rope_parameters: rope_dim is 6, 12"),
        ({"is_neox_style": False}, "is_neox_style is False, true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', replay computes silu only"),
        *(
            ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], key: value}}, f"{key} is .*, nothing")
            for key, value in (("conv_kernel_size", 4), ("selector_rank", 8), ("projector_type", "domino"),
                               ("output_multiplier", 0.5), ("final_logit_softcapping", 30.0),
                               ("attention_sink_bias", True), ("markov_rank", 4))
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_no_server_runs_so_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(dflash_config(**changes))


def test_a_rope_that_says_what_is_so_anyway_is_read() -> None:
    stated = dflash_config(rope_scaling={"rope_type": "default", "rope_dim": 12}, is_neox_style=True)
    assert parse_config(stated) == parse_config(dflash_config())


def test_a_trained_mask_embedding_is_refused_unread(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", dflash_config())
    (folder / "mask_embedding.pt").write_bytes(b"\x80\x04no pickle is ever loaded")
    with pytest.raises(CheckpointError, match=r"holds mask_embedding.pt, a trained embedding"):
        load_head(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_ids_are_outputs_of_layers() -> None:
    assert dflash_wiring((1, 9, 17), layers=36) == parse_wiring("2,10,18")
    assert dflash_ids(parse_wiring("2,10,18")).ids == (1, 9, 17)
    for taps in ("embed,2", "2,final", "10,2"):
        assert dflash_ids(parse_wiring(taps)).ids is None
    with pytest.raises(WiringError, match=r"reach layer 35, .* outputs of layers 0 to 34"):
        dflash_wiring((1, 35), layers=36)
    for ids in ((9, 1), (1, 1)):
        with pytest.raises(WiringError, match="do not rise"):
            dflash_wiring(ids, layers=36)
