"""Draft checkpoints: strict both ways, every refusal in a sentence that names the field and what was seen."""

import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.heads import (
    DEEPSEEK_YARN,
    LATENT,
    random_tensors,
    target_tables,
    tiny_checkpoint,
    tiny_config,
    write_head,
)
from torch import Tensor
from twins.rounds import plain_causal_attention

import replay
from replay.checkpoint.checkpoint import check_checkpoint, read_checkpoint
from replay.checkpoint.config import HeadConfig, parse_config
from replay.checkpoint.config_file import read_config
from replay.engines.profiles import ENGINES
from replay.errors import CheckpointError
from replay.head.model import Head, TargetTables

Tensors = dict[str, Tensor]
RICH = {
    "fc_norm": True,
    "bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 2]},
}


def parts(**changes: Any) -> tuple[HeadConfig, Tensors]:
    config = parse_config(tiny_config(**changes))
    return config, random_tensors(config)


def write_tiny(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    return write_head(folder, tiny_config(**changes), tensors)


def assert_same(left: Any, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in right)


# ---- tensors ----


def test_each_missing_tensor_is_named() -> None:
    config, tensors = parts(**RICH)
    for key in tensors:
        rest = {name: tensor for name, tensor in tensors.items() if name != key}
        with pytest.raises(CheckpointError, match=rf"draft head h lacks {re.escape(key)}, which its config calls for"):
            check_checkpoint("h", config, rest)


def test_each_misshapen_tensor_is_named_with_both_shapes() -> None:
    config, tensors = parts(**RICH)
    for key, tensor in tensors.items():
        wrong = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
        match = re.escape(f"{key} has shape {list(wrong.shape)}, its config calls for {list(tensor.shape)}")
        with pytest.raises(CheckpointError, match=match):
            check_checkpoint("h", config, tensors | {key: wrong})


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_each_tensor_with_one_non_finite_value_is_named(poison: float) -> None:
    config, tensors = parts(**RICH)
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            wrong = tensor.clone()
            wrong.view(-1)[-1] = poison
            with pytest.raises(CheckpointError, match=re.escape(f"{key} holds NaN or Inf")):
                check_checkpoint("h", config, tensors | {key: wrong})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])
def test_weights_of_another_type_are_refused(dtype: torch.dtype) -> None:
    config, tensors = parts()
    match = f"fc.weight is {dtype}, possible are float32, float16 and bfloat16"
    with pytest.raises(CheckpointError, match=match):
        check_checkpoint("h", config, tensors | {"fc.weight": tensors["fc.weight"].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_three_weight_types_are_kept_as_they_are(dtype: torch.dtype) -> None:
    config, tensors = parts()
    cast = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    assert check_checkpoint("h", config, cast).tensors["fc.weight"].dtype == dtype


def test_unexpected_tensors_are_named_and_counted() -> None:
    config, tensors = parts()
    extra = {f"layers.0.self_attn.{part}_norm.weight": torch.ones(12) for part in "qk"}
    with pytest.raises(CheckpointError, match=r"h has layers.0.self_attn.q_norm.weight, layers.0.self_attn.k_norm.w"):
        check_checkpoint("h", config, tensors | extra)
    with pytest.raises(CheckpointError, match=r"has x0, x1, x2, x3 and 5 more, which its config does not call for"):
        check_checkpoint("h", config, tensors | {f"x{index}": torch.ones(1) for index in range(9)})


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("bias", "fc.bias"),
        ("attention_bias", "layers.0.self_attn.q_proj.bias"),
        ("mlp_bias", "layers.0.mlp.gate_proj.bias"),
        ("fc_norm", "fc_norm.0.weight"),
        ("norm_before_fc", "input_norm.weight"),
    ],
)
def test_a_flag_and_its_tensors_go_together(field: str, tensor: str) -> None:
    plain, plain_tensors = parts()
    flagged, flagged_tensors = parts(**{field: True})
    assert tensor in check_checkpoint("h", flagged, flagged_tensors).tensors
    with pytest.raises(CheckpointError, match=rf"has .*{re.escape(tensor)}.*state the matching field in config.json"):
        check_checkpoint("h", plain, flagged_tensors)
    with pytest.raises(CheckpointError, match=rf"lacks .*{re.escape(tensor)}"):
        check_checkpoint("h", flagged, plain_tensors)


def test_missing_and_unexpected_are_told_together() -> None:
    config, tensors = parts()
    tensors["head.weight"] = tensors.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight.* \(it has the unexpected head.weight\)"):
        check_checkpoint("h", config, tensors)


@pytest.mark.parametrize(
    "spell",
    [
        lambda key: "model." + key,
        lambda key: key.replace("layers.0.", "midlayer."),
        lambda key: "model." + key.replace("layers.0.", "midlayer."),
        lambda key: key.replace("fc_norm.0", "aux_norm_low").replace("fc_norm.1", "aux_norm_mid")
        .replace("fc_norm.2", "aux_norm_high"),
    ],
)  # fmt: skip
def test_every_spelling_gives_the_same_head(spell: Callable[[str], str]) -> None:
    config, tensors = parts(fc_norm=True)
    spelled = {spell(key): tensor for key, tensor in tensors.items()}
    assert spelled.keys() != tensors.keys()
    assert_same(check_checkpoint("h", config, spelled).tensors, tensors)


def test_two_spellings_of_one_tensor_are_refused() -> None:
    config, tensors = parts()
    with pytest.raises(CheckpointError, match=r"has the tensor norm.weight twice, once as model.norm.weight"):
        check_checkpoint("h", config, tensors | {"model.norm.weight": torch.ones(32)})


@pytest.mark.parametrize("key", ["fc.weight", "lm_head.weight", "layers.0.self_attn.q_proj.weight"])
def test_a_prefix_written_twice_is_refused(key: str) -> None:
    """SGLang 0.5.23 models/llama_eagle3.py finds no parameter of such a name and goes on without the tensor."""
    config, tensors = parts()
    twice = {f"model.model.{name}" if name == key else name: tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=rf"lacks {re.escape(key)}, .* unexpected model\.{re.escape(key)}"):
        check_checkpoint("h", config, twice)


def test_deliberate_drops_may_be_there() -> None:
    """SGLang 0.5.23 replaces embed_tokens by the target's; t2d is the trainer's; inv_freq is derived."""
    config, tensors = parts()
    ids_W = torch.arange(40) + tensors["d2t"]
    extra = {
        "embed_tokens.weight": torch.zeros(96, 32),
        "t2d": torch.zeros(96, dtype=torch.bool).index_fill(0, ids_W, True),
        "midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(6),
    }
    assert check_checkpoint("h", config, tensors | extra).notes == ()


# ---- the vocabulary map ----


def test_absolute_ids_in_d2t_leave_the_vocabulary_and_are_refused() -> None:
    config, tensors = parts()
    absolute_W = torch.arange(40) + tensors["d2t"]
    first = next(row for row in range(40) if row + int(absolute_W[row]) >= 96)
    match = rf"d2t maps draft id {first} to target id {first + int(absolute_W[first])}, outside of the vocabulary of 96"
    with pytest.raises(CheckpointError, match=match + r" \(\d+ such rows\); d2t must hold offsets"):
        check_checkpoint("h", config, tensors | {"d2t": absolute_W})


@pytest.mark.parametrize(("row", "offset", "target"), [(0, -1, -1), (39, 57, 96), (5, -(2**62), 5 - 2**62)])
def test_an_offset_out_of_the_vocabulary_is_refused(row: int, offset: int, target: int) -> None:
    config, tensors = parts()
    d2t_W = torch.zeros(40, dtype=torch.long)
    d2t_W[row] = offset
    with pytest.raises(CheckpointError, match=rf"maps draft id {row} to target id {target}, .* \(1 such rows\)"):
        check_checkpoint("h", config, tensors | {"d2t": d2t_W})


def test_the_last_target_id_is_in_the_vocabulary() -> None:
    config, tensors = parts()
    d2t_W = torch.full((40,), 56)
    assert check_checkpoint("h", config, tensors | {"d2t": d2t_W}).notes == ()


def test_duplicates_and_a_t2d_that_disagrees_are_noted() -> None:
    config, tensors = parts()
    d2t_W = torch.zeros(40, dtype=torch.long)
    d2t_W[1] = -1
    checked = check_checkpoint("h", config, tensors | {"d2t": d2t_W, "t2d": torch.ones(96, dtype=torch.bool)})
    assert checked.notes == (
        "d2t maps 1 draft ids to target ids that another draft id has already",
        "t2d disagrees with d2t; engines use d2t",
    )


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_narrow_integers_in_d2t_draft_the_same_tokens(dtype: torch.dtype) -> None:
    wide = tiny_checkpoint()
    narrow = check_checkpoint("h", wide.config, {**wide.tensors, "d2t": wide.tensors["d2t"].to(dtype)})
    embed_VE, _ = target_tables(wide)
    ids = [Head(checkpoint, TargetTables(embed_VE)).target_ids_W for checkpoint in (wide, narrow)]
    assert torch.equal(*ids) and torch.equal(ids[0], torch.arange(40) + wide.tensors["d2t"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_d2t_that_is_not_of_integers_is_refused(dtype: torch.dtype) -> None:
    config, tensors = parts()
    with pytest.raises(CheckpointError, match=f"d2t is {dtype}, integers were expected"):
        check_checkpoint("h", config, tensors | {"d2t": tensors["d2t"].to(dtype)})


# ---- lm_head and embedding ----


def test_lm_head_is_own_the_target_s_or_the_embedding() -> None:
    own, borrowed = tiny_checkpoint(), tiny_checkpoint(draft_vocab_size=None)
    tied = tiny_checkpoint(draft_vocab_size=None, tie_word_embeddings=True)
    assert [item.config.lm_head for item in (own, borrowed, tied)] == ["own", "target", "embed"]
    assert "lm_head.weight" in own.tensors and "d2t" in own.tensors
    assert not {"lm_head.weight", "d2t"} & {*borrowed.tensors, *tied.tensors}
    embed_VE, lm_head_VE = target_tables(own)
    x_RE = torch.eye(32)
    for checkpoint, table_WE in ((own, own.tensors["lm_head.weight"]), (borrowed, lm_head_VE), (tied, embed_VE)):
        head = Head(checkpoint, TargetTables(embed_VE, lm_head_VE))
        assert torch.equal(head.logits(x_RE), table_WE.T)
    untold = Head(borrowed, TargetTables(embed_VE))  # a tied target has no lm_head of its own
    assert torch.equal(untold.logits(x_RE), embed_VE.T)


def test_a_borrowed_lm_head_is_the_target_s_even_where_the_embedding_is_the_head_s_own() -> None:
    plain = tiny_checkpoint(draft_vocab_size=None)
    embed_VE, _ = target_tables(plain)
    checkpoint = check_checkpoint("h", plain.config, {**plain.tensors, "embed_tokens.weight": embed_VE + 1})
    head = Head(checkpoint, TargetTables(embed_VE), profile=ENGINES["eagle"])
    assert torch.equal(head.logits(torch.eye(32)), embed_VE.T)
    assert torch.equal(head.embed(torch.arange(96)), embed_VE + 1)


def test_the_engine_decides_whose_embedding_is_used() -> None:
    config, tensors = parts()
    own_VE = torch.full((96, 32), 3.0)
    checkpoint = check_checkpoint("h", config, tensors | {"embed_tokens.weight": own_VE})
    target_VE, _ = target_tables(checkpoint)
    sglang, eagle = (Head(checkpoint, TargetTables(target_VE), profile=ENGINES[name]) for name in ("sglang", "eagle"))
    assert torch.equal(sglang.embed(torch.tensor([7])), target_VE[7:8])
    assert torch.equal(eagle.embed(torch.tensor([7])), own_VE[7:8])
    assert sglang.notes == ["sglang replaces the head's own embed_tokens by the target's"] and eagle.notes == []


def test_a_head_of_another_target_is_refused() -> None:
    checkpoint, borrowed = tiny_checkpoint(), tiny_checkpoint(draft_vocab_size=None)
    with pytest.raises(CheckpointError, match="uses the target's embedding, and none was given"):
        Head(checkpoint, TargetTables(None))
    with pytest.raises(CheckpointError, match="tiny is 32 wide, the target's embedding 33"):
        Head(checkpoint, TargetTables(torch.zeros(96, 33)))
    with pytest.raises(CheckpointError, match=r"drafts token \d+, the embedding has 50 rows"):
        Head(checkpoint, TargetTables(torch.zeros(50, 32)))
    with pytest.raises(CheckpointError, match="borrows an lm_head of 96 x 32, the target's is 97 x 32"):
        Head(borrowed, TargetTables(torch.zeros(96, 32), torch.zeros(97, 32)))


# ---- files ----


def test_a_folder_of_safetensors_is_read(tmp_path: Path) -> None:
    config, tensors = parts()
    checkpoint = replay.load_head(write_tiny(tmp_path / "head", tensors))
    assert checkpoint.name == "head" and checkpoint.config == config
    assert_same(checkpoint.tensors, tensors)


def split(folder: Path, tensors: Tensors) -> Path:
    """Two shards and their index, without model.safetensors."""
    write_tiny(folder, tensors)
    (folder / "model.safetensors").unlink()
    keys = list(tensors)
    shards = {"model-00001-of-00002.safetensors": keys[:5], "model-00002-of-00002.safetensors": keys[5:]}
    for shard, held in shards.items():
        save_file({key: tensors[key] for key in held}, folder / shard)
    index = {"metadata": {}, "weight_map": {key: shard for shard, held in shards.items() for key in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_joined(tmp_path: Path) -> None:
    _, tensors = parts()
    assert_same(read_checkpoint(split(tmp_path, tensors)).tensors, tensors)


def test_a_missing_shard_and_a_tensor_in_two_shards_are_refused(tmp_path: Path) -> None:
    _, tensors = parts()
    split(tmp_path, tensors)
    save_file({key: tensors[key] for key in list(tensors)[4:]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"holds {re.escape(list(tensors)[4])} again after another shard"):
        read_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot open .*model-00001-of-00002.safetensors: No such file .*; copy or"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\x00.safetensors", "x.bin", 5, None],
)
def test_shard_names_cannot_lead_out_of_the_folder(tmp_path: Path, shard: Any) -> None:
    _, tensors = parts()
    save_file(tensors, tmp_path / "outside.safetensors")
    folder = write_tiny(tmp_path / "head", tensors)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"names the shard {re.escape(repr(shard))}, the plain name of a"):
        read_checkpoint(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100_000, "\xff"])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    write_tiny(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=r"model.safetensors.index.json .*[;,] (or )?copy or export the checkpoint again"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_truncated_safetensors_are_refused(tmp_path: Path, cut: int) -> None:
    write_tiny(tmp_path, parts()[1])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors.* is truncated.*; copy or export"):
        read_checkpoint(tmp_path)


def with_binary(folder: Path, content: bytes) -> Path:
    write_tiny(folder, {})
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_model_bin_is_read(tmp_path: Path, zipped: bool) -> None:
    _, tensors = parts()
    torch.save(tensors, tmp_path / "saved", _use_new_zipfile_serialization=zipped)
    folder = with_binary(tmp_path / "head", (tmp_path / "saved").read_bytes())
    assert_same(read_checkpoint(folder).tensors, tensors)


class Malice:
    """Unpickling this touches a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path, by: str) -> None:
    _, tensors = parts()
    mark = tmp_path / "ran"
    document = {**tensors, "fc.weight": Malice(mark)}
    if by == "torch":
        torch.save(document, tmp_path / "saved")
    else:
        (tmp_path / "saved").write_bytes(pickle.dumps(document))
    folder = with_binary(tmp_path / "head", (tmp_path / "saved").read_bytes())
    with pytest.raises(CheckpointError, match=r"is not a plain dictionary of tensors: .*; copy it again") as caught:
        read_checkpoint(folder)
    assert "weights_only" not in str(caught.value)
    assert not mark.exists()
    if by == "torch":  # ... and it was armed
        torch.load(tmp_path / "saved", weights_only=False)
        assert mark.exists()


@pytest.mark.parametrize(
    "document", [[torch.ones(1)], {"state_dict": {"fc.weight": torch.ones(1)}}, {"epoch": 3}, {3: torch.ones(1)}]
)
def test_a_binary_that_is_no_dictionary_of_tensors_is_refused(tmp_path: Path, document: Any) -> None:
    torch.save(document, tmp_path / "saved")
    folder = with_binary(tmp_path / "head", (tmp_path / "saved").read_bytes())
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is not a plain dictionary of tensors; convert it"):
        read_checkpoint(folder)


GARBAGE = {
    "empty": b"",
    "text": b"version https://git-lfs.github.com/spec/v1\n",
    "zip header": b"PK\x03\x04" + bytes(40),
    "pickled list": pickle.dumps([1, 2]),
    "pickle without an end": pickle.dumps({"a": 1})[:-1],
    "old magic number": pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2),
    "opcode without stack": b"\x80\x02\x85.",
    "unknown memo": b"\x80\x02h\x07.",
    "noise": struct.pack("<40I", *(2654435761 * i % 2**32 for i in range(40))),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    folder = with_binary(tmp_path / "head", GARBAGE[name])
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is not a plain dictionary of tensors"):
        read_checkpoint(folder)


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config.json; give the folder of a checkpoint"):
        read_config(tmp_path)
    write_tiny(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights: looked for model.safetensors, model.safetensors.ind"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json is a file; give the folder that holds a checkpoint's"):
        read_checkpoint(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"hidden_size": }'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json (is not valid JSON|holds .+, a JSON object was expected)"):
        read_config(tmp_path)


# ---- config ----


def test_tensors_in_memory_are_checked_as_those_on_disk() -> None:
    _, tensors = parts()
    assert replay.head_from_tensors(tiny_config(), tensors).name == "in-memory head"
    del tensors["fc.weight"]
    with pytest.raises(CheckpointError, match=r"draft head step 5 lacks fc.weight"):
        replay.head_from_tensors(tiny_config(), tensors, name="step 5")


def test_what_a_config_leaves_out_is_what_sglang_takes() -> None:
    """sglang 0.5.23 models/llama_eagle3.py over transformers' LlamaConfig."""
    bare = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "draft_vocab_size")
    config = parse_config({key: tiny_config()[key] for key in bare})
    assert (config.num_kv_heads, config.head_dim, config.num_layers, config.num_taps) == (4, 8, 1, 3)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.target_hidden_size) == (1e-6, 2048, 32)
    assert (config.rope.theta, config.rope.type) == (10000.0, "default")
    flags = (config.fc_bias, config.attention_bias, config.mlp_bias, config.norm_before_fc, config.fc_norm)
    assert not any((*flags, config.norm_output)) and config.layer_ids is None


@pytest.mark.parametrize("spelling", [{"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}])
def test_norm_before_fc_may_stand_in_both_places(spelling: dict[str, Any]) -> None:
    assert parse_config(tiny_config(**spelling)).norm_before_fc


def test_other_spellings_of_flags() -> None:
    assert parse_config(tiny_config(use_aux_norm=True)).fc_norm
    assert parse_config(tiny_config(qkv_bias=True)).attention_bias
    assert parse_config(tiny_config(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert parse_config(tiny_config(dtype="float16", torch_dtype="bfloat16")).dtype == "float16"


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16,
             "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_both_spellings_of_rope_are_one_rope(kind: str) -> None:
    old_type = {"type" if key == "rope_type" else key: value for key, value in ROPES[kind].items()}
    new = parse_config(tiny_config(rope_theta=None, rope_parameters={"rope_theta": 5e5, **ROPES[kind]})).rope
    for scaling in (ROPES[kind], old_type):
        assert parse_config(tiny_config(rope_theta=5e5, rope_scaling=scaling)).rope == new
    assert new.type == kind and new.theta == 5e5
    plain = parse_config(tiny_config(rope_theta=5e5)).rope
    assert (new == plain) == (kind == "default")


def test_partial_rotary_factor_counts_at_the_top_level_alone() -> None:
    """Seen in SGLang 0.5.23 with the Transformers 5.19 that it asks for: rotary_dim 6 and 12 of 12."""
    outer = parse_config(tiny_config(partial_rotary_factor=0.5))
    inner = parse_config(tiny_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}))
    assert (outer.rotary_dim, inner.rotary_dim) == (6, 12)


def test_rope_scaling_takes_the_place_of_rope_parameters() -> None:
    """... with their theta; tests/check/test_engine_agrees.py holds SGLang to it."""
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    both = parse_config(tiny_config(rope_theta=None, rope_scaling=ROPES["linear"], rope_parameters=parameters)).rope
    assert (both.type, both.theta) == ("linear", 10000.0)
    outer = parse_config(tiny_config(rope_theta=7e4, rope_parameters={"rope_type": "default"})).rope
    assert outer.theta == 7e4


def test_the_original_length_is_filled_in() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0}
    assert parse_config(tiny_config(rope_scaling=rope)).rope.original_max_position == 256
    assert parse_config(tiny_config(rope_scaling=rope | {"original_max_position_embeddings": 64},
                                    original_max_position_embeddings=32)).rope.original_max_position == 32  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config has no hidden_size, an integer from 1 to 2147483647 was expected; add it"),
        ({"hidden_size": 0}, "hidden_size is 0, an integer from 1 to"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0, an integer"),
        ({"hidden_size": "32"}, "hidden_size is '32', an integer"),
        ({"hidden_size": True}, "hidden_size is True, an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, an integer from 1 to 256 was expected"),
        ({"num_aux_hidden_states": 10**9}, "num_aux_hidden_states is 1000000000, an integer from 1 to 256"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, a positive number was expected"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, a positive number"),
        ({"rope_theta": 10**400}, r"rope_theta is 10*\.\.\., a positive number"),
        ({"fc_norm": "true"}, "fc_norm is 'true', true or false was expected"),
        ({"bias": 1}, "bias is 1, true or false"),
        ({"eagle_config": []}, r"eagle_config is \[\], an object was expected"),
        ({"eagle_config": {"norm_before_fc": 1}}, "eagle_config: norm_before_fc is 1, true or false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, r"layer_ids is \[\], a list of layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "layer_ids is 3, a list of layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "2"]}}, r"layer_ids is \[1, '2'\], a list"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True]}}, r"layer_ids is \[True\], a list"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architecture \['Qwen3ForCausalLM'\], replay reads heads of"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architecture 'LlamaForCausalLMEagle3', replay reads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', replay computes silu only"),
        ({"draft_vocab_size": 97}, "draft_vocab_size 97 is above vocab_size 96"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true with draft_vocab_size 40 of 96; a server would"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 key-value heads"),
        ({"head_dim": 7}, "7 of 7 features per attention head would be rotated, an even number from 2 to head_dim"),
        ({"partial_rotary_factor": 2.0}, "24 of 12 features per attention head would be rotated"),
        ({"dtype": 16}, "dtype is 16, a string was expected"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is false, replay computes the neox layout only"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', an object was expected"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope', replay computes default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\], replay computes"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor, a positive number was expected; add it"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0, a positive number"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
         "rope_parameters has no factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64}},
         "rope_parameters has no low_freq_factor"),
        ({"rope_parameters": {**ROPES["yarn"], "truncate": 0}}, "rope_parameters: truncate is 0, true or false"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_names_the_field_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(tiny_config(**changes))


# ---- latent heads, as SGLang 0.5.23 models/kimi_k25_eagle3.py reads them ----


def test_a_latent_head_has_the_tensors_of_its_class() -> None:
    """Shapes worked by hand from the class: 4 heads of 10 + 8 and 6, ranks 20 and 24, 32 wide."""
    _, tensors = parts(**LATENT)
    attention = {name: tuple(tensors[name].shape) for name in tensors if ".self_attn." in name}
    short = {name.removeprefix("layers.0.self_attn.").removesuffix(".weight"): attention[name] for name in attention}
    assert short == {
        "q_a_proj": (20, 64), "q_a_layernorm": (20,), "q_b_proj": (72, 20), "kv_a_proj_with_mqa": (32, 64),
        "kv_a_layernorm": (24,), "kv_b_proj": (64, 24), "o_proj": (32, 24),
    }  # fmt: skip


def test_a_latent_head_is_read_in_both_of_its_spellings(tmp_path: Path) -> None:
    _, tensors = parts(**LATENT)
    midlayer = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    for number, spelled in enumerate((tensors, midlayer)):
        folder = write_tiny(tmp_path / str(number), spelled, **LATENT)
        assert_same(read_checkpoint(folder).tensors, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {f"model.{name}": tensor for name, tensor in found.items()},
         "a server skips every name that begins with model.; export it as fc.weight"),
        (lambda found: found | {"aux_norm_low.weight": torch.ones(32)}, "has aux_norm_low.weight, which its config"),
        (lambda found: {k: v for k, v in found.items() if "kv_a_proj" not in k}, "lacks .*kv_a_proj_with_mqa.weight"),
        (lambda found: found | {"layers.0.self_attn.q_a_proj.bias": torch.ones(20)}, "has .*q_a_proj.bias"),
    ],
)  # fmt: skip
def test_a_tensor_that_a_server_skips_in_a_latent_head_is_refused(
    change: Callable[[Tensors], Tensors], message: str
) -> None:
    config, tensors = parts(**LATENT)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint("h", config, change(tensors))


@pytest.mark.parametrize(
    ("changes", "taps", "layer_ids"),
    [
        ({}, 3, (-1, 0, 2)),
        ({"eagle_config": None}, 3, None),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2]}, 2, None),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, 3, (-1, 0, 2)),
    ],
    ids=str,
)
def test_top_level_ids_count_taps_and_choose_none(
    changes: dict[str, Any], taps: int, layer_ids: tuple[int, ...] | None
) -> None:
    config, _ = parts(**LATENT | changes)
    assert (config.num_taps, config.layer_ids) == (taps, layer_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "config has no q_lora_rank, an integer"),
        ({"v_head_dim": 0}, "v_head_dim is 0, an integer from 1"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers is 2, 1 \(a latent head has one layer\) was expected"),
        ({"num_hidden_layers": None}, "config has no num_hidden_layers"),
        ({"qk_rope_head_dim": 7}, "7 of 7 features per attention head would be rotated"),
        ({"norm_before_residual": True}, r"norm_before_residual is True, false \(SGLang does not"),
        ({"eagle_config": {"norm_before_fc": True}}, r"eagle_config: norm_before_fc is True, false \(SGLang"),
        ({"num_aux_hidden_states": 4}, r"num_aux_hidden_states is 4, 3 \(SGLang counts"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear', a latent head runs default or yarn"),
        ({"rope_scaling": DEEPSEEK_YARN | {"factor": None}}, "rope_scaling has no factor"),
        (
            {"rope_scaling": DEEPSEEK_YARN | {"extrapolation_factor": 0.5}},
            "extrapolation_factor is 0.5, 1 was expected",
        ),
    ],
    ids=str,
)
def test_a_latent_config_that_no_server_runs_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(tiny_config(**LATENT | changes))


# ---- nothing is read and then ignored ----


def outputs(config: HeadConfig, tensors: Tensors, engine: str = "eagle") -> tuple[Tensor, Tensor]:
    """Logits and feedback of ten rows."""
    checkpoint = check_checkpoint("h", config, tensors)
    embed_VE, lm_head_VE = target_tables(checkpoint)
    head = Head(checkpoint, TargetTables(embed_VE, lm_head_VE), profile=ENGINES[engine])
    generator = torch.Generator().manual_seed(2)
    features_RKD = torch.randn(10, config.fc_inputs, generator=generator)
    ids_R = torch.randint(config.vocab_size, (10,), generator=generator)
    output = head.forward(
        head.embed(ids_R),
        head.fuse(features_RKD),
        torch.arange(10),
        lambda _, q, k, v: plain_causal_attention(q, k, v, head.numerics),
    )
    return head.logits(output.normed_RE), output.feedback_RE


RICH_LATENT = LATENT | {"rope_scaling": DEEPSEEK_YARN, "fc_norm": True, "bias": True}

# `d2t` moves target ids and not logits; it is tested above. SGLang 0.5.23 loads `input_layernorm` of the layers after
# the first and never runs it (models/llama_eagle3.py: only layer 0 embeds), so neither does replay.
UNUSED = {"d2t", "layers.1.input_layernorm.weight"}


@pytest.mark.parametrize("options", [RICH, {"num_hidden_layers": 2}, {"target_hidden_size": 20}, RICH_LATENT], ids=str)
def test_every_tensor_moves_the_logits(options: dict[str, Any]) -> None:
    config, tensors = parts(**options)
    before, _ = outputs(config, tensors)
    still = set()
    for key, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9))
        moved = tensor + 0.1 * noise if tensor.is_floating_point() else tensor
        after, _ = outputs(config, tensors | {key: moved})
        if not (before - after).abs().max() > 1e-4:
            still.add(key)
    assert still == UNUSED & tensors.keys()


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({}, {"rms_norm_eps": 0.1}),
        ({}, {"rope_theta": 50.0}),
        ({}, {"partial_rotary_factor": 0.5}),
        *[({}, {"rope_scaling": ROPES[kind]}) for kind in ("linear", "llama3", "yarn")],
        ({"rope_scaling": ROPES["llama3"]}, {"rope_scaling": ROPES["llama3"] | {"low_freq_factor": 2.0}}),
        ({"rope_scaling": ROPES["llama3"]}, {"rope_scaling": ROPES["llama3"] | {"high_freq_factor": 40.0}}),
        ({"rope_scaling": ROPES["llama3"]}, {"rope_scaling": ROPES["llama3"] | {"factor": 2.0}}),
        ({"rope_scaling": ROPES["llama3"]},
         {"rope_scaling": ROPES["llama3"] | {"original_max_position_embeddings": 99}}),
        *[({"rope_scaling": ROPES["yarn"]}, {"rope_scaling": ROPES["yarn"] | change})
          for change in ({"factor": 2.0}, {"beta_fast": 2.0}, {"beta_slow": 8.0}, {"truncate": True}, {"mscale": 2.0},
                         {"mscale_all_dim": 2.0}, {"attention_factor": 1.5}, {"attn_factor": 1.5},
                         {"original_max_position_embeddings": 99})],
        (LATENT, {"rope_interleave": False}),
        (LATENT, {"rope_scaling": DEEPSEEK_YARN}),
        *[(RICH_LATENT, {"rope_scaling": DEEPSEEK_YARN | change})
          for change in ({"factor": 2.0}, {"beta_fast": 2.0}, {"beta_slow": 8.0}, {"mscale": 2.0}, {"rope_theta": 50.0},
                         {"mscale_all_dim": 2.0}, {"attn_factor": 1.5}, {"apply_yarn_scaling": False},
                         {"apply_scale": False}, {"original_max_position_embeddings": 999})],
    ],
    ids=str,
)  # fmt: skip
def test_every_number_of_a_config_moves_the_logits(base: dict[str, Any], changes: dict[str, Any]) -> None:
    config, tensors = parts(**base)
    other, _ = parts(**(base | changes))
    assert (outputs(config, tensors)[0] - outputs(other, tensors)[0]).abs().max() > 1e-4


def test_norm_output_moves_the_feedback_and_not_the_logits() -> None:
    config, tensors = parts()
    normed, _ = parts(norm_output=True)
    logits, feedback = outputs(config, tensors)
    same_logits, normed_feedback = outputs(normed, tensors)
    assert torch.equal(logits, same_logits) and (feedback - normed_feedback).abs().max() > 0.1


def test_each_tap_meets_its_own_norm() -> None:
    """Swapping two taps' norms is another head: the order of ``fc_norm.{i}`` is that of the wiring."""
    config, tensors = parts(fc_norm=True)
    swapped = tensors | {
        "fc_norm.0.weight": tensors["fc_norm.2.weight"],
        "fc_norm.2.weight": tensors["fc_norm.0.weight"],
    }
    assert (outputs(config, tensors)[0] - outputs(config, swapped)[0]).abs().max() > 1e-3


def test_sglang_builds_q_k_and_v_without_bias_and_says_so() -> None:
    """tests/head/test_engine_heads.py asks SGLang's class itself, which keeps the bias of o_proj."""
    config, tensors = parts(attention_bias=True)
    zeroed = {key: part * 0 if key.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) else part
              for key, part in tensors.items()}  # fmt: skip
    assert torch.equal(outputs(config, tensors, "sglang")[0], outputs(config, zeroed, "sglang")[0])
    assert not torch.equal(outputs(config, tensors, "eagle")[0], outputs(config, zeroed, "eagle")[0])
    checkpoint = check_checkpoint("h", config, tensors)
    head = Head(checkpoint, TargetTables(target_tables(checkpoint)[0]))
    assert head.notes == ["sglang builds q, k and v without the bias that this head has"]
