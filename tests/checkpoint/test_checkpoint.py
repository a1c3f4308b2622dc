"""Draft checkpoints: strict both ways, every refusal in a sentence that names the field and what was seen."""

import re
from collections.abc import Callable

import pytest
import torch
from support.checkpoint_parts import RICH, assert_same, parts
from support.heads import (
    target_tables,
    tiny_checkpoint,
)

from replay.checkpoint.checkpoint import check_checkpoint
from replay.engines.profiles import ENGINES
from replay.errors import CheckpointError
from replay.head.model import Head, TargetTables

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
