"""Precision as a variant: what may be typed, what it does to a head, and that all ways to draft agree under it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.heads import INVENTED, invented_checkpoint, random_tensors, target_tables, tiny_checkpoint, write_head
from support.trace_maker import make_four, write_trace
from torch import Tensor
from torch.nn import functional
from twins.rounds import draft_one_round, replay_request
from twins.server_order import replay_in_order
from twins.trees import draft_one_tree

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.tensor_table import linear_names
from replay.cli.app import cli
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput
from replay.drafting.tree_shape import TreeSize
from replay.drafting.trees import draft_every_tree
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.layer_names import fused_name
from replay.engines.precision import Format, parse_format, parse_precision, with_kv
from replay.engines.profiles import ENGINES
from replay.errors import UsageError
from replay.head.held import Held
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.head.quantise import quantise, quantise_weight
from replay.simulator.fit import check_precision
from replay.simulator.precision_ranking import TOGETHER, one_by_one
from replay.simulator.variant import Variant, sweep

# ---- what may be typed ----


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        ("bfloat16", "bf16"),
        ("fp8", "fp8_e4m3"),
        ("int8", "w8a16"),
        ("int4", "w4a16:g128"),
        ("w4a8", "w4a8:g128"),
        ("w4a16:g32:asym", "w4a16:g32:asym"),
        ("int4:sym7", "w4a16:g128:sym7"),
        ("fc.weight=int4:sym7:channel", "fc.weight=int4:channel:sym7"),
        ("fp8_e5m2:channel", "fp8_e5m2:channel"),
        ("bf16 + nvfp4 + fc = bf16", "bf16+nvfp4+fc=bf16"),
        ("kv=fp8", "kv=fp8_e4m3:scale=1"),
        ("kv=fp8:scale=auto", "kv=fp8_e4m3:scale=auto"),
        ("logits=bf16+features=fp8", "features=fp8_e4m3+logits=bf16"),
        ("weights=int8+activations=fp8", "weights=int8+activations=fp8_e4m3"),
        ("fc.input=fp8:scale=2.0+*.mlp.*=w4a4", "fc.input=fp8_e4m3:scale=2+*.mlp.*=w4a4:g128"),
    ],
)
def test_every_precision_has_one_spelling(typed: str, spelled: str) -> None:
    assert str(parse_precision(typed)) == spelled == str(parse_precision(spelled))
    assert len(sweep(draft=["h"], precision=[typed, spelled])) == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "precision '' is not known, possible are fp32, bf16, fp16, fp8_e4m3"),
        ("w3a16", "'w3a16' is not known"),
        ("fp8+bf16", "names the dtype bf16 behind its first part"),
        ("fp8+int8", "names two schemes"),
        ("kv=fp8+kv=fp8", "names kv twice"),
        (
            "w4a16:g48",
            "precision 'w4a16:g48' of weights: :g48 cannot be, possible are :g128, :g64, :g32, :channel, :asym, :sym7",
        ),
        ("w16a8:g32", "drop :g32"),
        ("nvfp4:g32", ":g32 cannot be, possible are :tensor"),
        ("bf16:g32", "a dtype takes no scale; type bf16"),
        ("kv=fp8:scale=0", "possible are :scale=S, :scale=auto"),
        ("kv=fp8:scale=inf", "possible are :scale=S"),
        ("features=int8:asym", "of features: :asym cannot be"),
        ("w8a16:sym7", ":sym7 cannot be"),
        ("int4:sym7:asym", ":asym cannot be, possible are :g128, :g64, :g32, :channel"),
        ("int4:sym7:sym7", ":sym7 cannot be"),
        ("activations=fp8:tensor", "of inputs: :tensor cannot be, possible are :token, :scale=S"),
        ("logits=int8", "'int8' of logits is not known, possible are fp32, bf16, fp16"),
        ("=int8", "names no tensor"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(typed: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_precision(typed)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_kv_dtype_is_a_part_of_the_precision() -> None:
    assert with_kv("bf16+fp8", "fp8_e4m3:scale=auto") == "bf16+fp8_e4m3+kv=fp8_e4m3:scale=auto"
    assert (with_kv(None, "fp8_e5m2"), with_kv(None, "auto"), with_kv("fp8", "auto")) == ("kv=fp8_e5m2", None, "fp8")
    with pytest.raises(UsageError, match="leave --kv-dtype away"):
        with_kv("kv=fp8", "fp8")


# ---- which tensors it speaks of ----


def covered(text: str, *, engine: str = "sglang", layers: int = 1) -> list[str]:
    precision, kept = parse_precision(text), ENGINES[engine].unquantised
    names = linear_names(tiny_checkpoint(num_hidden_layers=layers).config)
    special = ["embed_tokens", "norm", "layers.0.input_layernorm"]
    return [name for name in (*names, *special) if precision.scheme(name, kept).weight is not None]


ATTENTION = [f"layers.0.self_attn.{part}_proj" for part in "qkvo"]
MLP = [f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]


def test_a_scheme_covers_what_the_engine_quantises() -> None:
    assert covered("fp8") == ATTENTION + MLP
    assert covered("fp8", engine="eagle") == ["fc", *ATTENTION, *MLP]
    assert covered("fp8+fc=int8+lm_head=int8") == ["fc", *ATTENTION, *MLP, "lm_head"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("down_proj=int8", MLP[2:]),
        ("qkv_proj=int8", ATTENTION[:3]),
        ("midlayer.mlp.gate_up_proj=int8", MLP[:2]),
        ("layers.0.mlp.*=int8", MLP),
        ("*=int8", ["fc", *ATTENTION, *MLP, "lm_head"]),
        ("*norm*=int8", ["norm", "layers.0.input_layernorm"]),
        ("embed_tokens=int8", ["embed_tokens"]),
        ("fp8+self_attn.*=w16a16", MLP),
        ("fc.input=int8", []),
    ],
)
def test_a_name_covers_what_it_matches(text: str, names: list[str]) -> None:
    assert covered(text) == names


def test_the_last_part_wins() -> None:
    precision = parse_precision("w8a8+down_proj=w4a16:g32+down_proj.input=fp8")
    scheme = precision.scheme("layers.0.mlp.down_proj")
    assert scheme.weight == parse_format("int4:g32", "weight") and scheme.input == parse_format("fp8", "input")
    assert precision.scheme("layers.0.mlp.up_proj").input == Format("int8", "token")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("down=int8", "down=w8a16 matches no tensor of draft head tiny; it has fc, layers.0.self_attn.q_proj"),
        ("q_proj=fp8", "type qkv_proj=..., or layers.0.self_attn.k_proj.weight=..."),
        ("gate_proj.input=int8", "quantises the inputs of layers.0.mlp.up_proj and of layers.0.mlp.gate_proj differ"),
    ],
)
def test_what_does_not_fit_the_head_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_precision(parse_precision(text), tiny_checkpoint().config, "tiny")
    assert said in str(caught.value)


# ---- what it does to a head ----


def head_in(
    text: str,
    *,
    dtype: torch.dtype = torch.float64,
    checkpoint: Checkpoint | None = None,
    behaviour: Behaviour = HEALTHY,
    **changes: object,
) -> Head:
    checkpoint = checkpoint or tiny_checkpoint(**changes)
    embed_VE, lm_head_VE = target_tables(checkpoint)
    return Head(
        checkpoint,
        TargetTables(embed_VE, lm_head_VE if checkpoint.config.lm_head == "target" else None),
        execution=Execution(dtype),
        behaviour=behaviour,
        precision=parse_precision(text),
    )


def request_for(head: Head, prompt: int = 3, output: int = 9) -> DraftInput:
    generator = torch.Generator().manual_seed(5)
    tokens_T = torch.randint(head.config.vocab_size, (prompt + output,), generator=generator)
    features_RKD = 3 * torch.randn(prompt + output - 1, head.config.fc_inputs, generator=generator)
    return DraftInput(tokens_T, features_RKD, prompt)


def first_logits(head: Head) -> Tensor:
    return head.logits(first_pass(head, [request_for(head)]).output.normed_RE)


@pytest.mark.parametrize("text", ["fp32", "bf16", "fp16"])
def test_a_dtype_alone_changes_no_bit(text: str) -> None:
    """The very tensors go in and out: no rounding, no copy, nothing that could differ."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[text]
    checkpoint = tiny_checkpoint()
    checkpoint = replace(checkpoint, tensors={name: x.to(dtype) for name, x in checkpoint.tensors.items()})
    emulation = head_in(text, dtype=dtype, checkpoint=checkpoint).emulation
    x = torch.ones(2, 32, dtype=dtype)
    weight = checkpoint.tensors["lm_head.weight"]
    assert emulation.weight("lm_head.weight", weight, torch.device("cpu"), Held()) is weight
    for product in map(fused_name, linear_names(checkpoint.config)):
        assert emulation.entering(product, x) is x and emulation.leaving(product, x, x) is x
    assert emulation.stored(x) is emulation.embedding(x) is emulation.features(x) is x


def test_a_format_that_is_the_heads_own_dtype_changes_no_bit() -> None:
    plain = head_in("bf16", dtype=torch.bfloat16)
    same = head_in("bf16+*=bf16+features=bf16+kv=bf16+logits=bf16", dtype=torch.bfloat16)
    assert torch.equal(first_logits(plain), first_logits(same))


WEIGHT_FORMATS = [
    "fp8_e4m3",
    "fp8_e5m2:channel",
    "int8",
    "int4:g32",
    "int4:g32:asym",
    "int4:g32:sym7",
    "nvfp4",
    "mxfp4",
    "fp16",
]


@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_quantised_weights_are_those_of_a_quantised_checkpoint(text: str) -> None:
    """A checkpoint whose tensors were rounded beforehand, run plainly, says the same; q, k, v share their scale."""
    checkpoint, form = tiny_checkpoint(), parse_format(text, "weight")
    names = [f"{name}.weight" for name in linear_names(checkpoint.config)]
    tensors = dict(checkpoint.tensors)
    for product in {fused_name(name.removesuffix(".weight")) for name in names}:
        group = [name for name in names if fused_name(name.removesuffix(".weight")) == product]
        rounded = quantise_weight(torch.cat([tensors[name] for name in group]), form, torch.float32)
        sizes = [len(tensors[name]) for name in group]
        tensors |= dict(zip(group, rounded.split(sizes), strict=True))
    assert not any(torch.equal(tensors[name], checkpoint.tensors[name]) for name in names)
    wanted = first_logits(head_in("fp32", checkpoint=replace(checkpoint, tensors=tensors)))
    assert torch.equal(first_logits(head_in(f"*.weight={text}", checkpoint=checkpoint)), wanted)


def test_quantised_inputs_meet_quantised_weights() -> None:
    head, plain = head_in("*=fp8"), head_in("fp32")
    x = request_for(head).features_RKD
    entering, weight = parse_format("fp8", "input"), parse_format("fp8", "weight")
    wanted = functional.linear(quantise(x, entering).double(), quantise(plain._weights["fc.weight"], weight).double())
    assert torch.equal(head.fuse(x), wanted)
    normed = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).double()
    table = quantise(plain._weights["lm_head.weight"], weight).double()
    assert torch.equal(head.logits(normed), functional.linear(quantise(normed, entering).double(), table))


def test_products_of_two_grids_are_summed_in_fp32_and_rounded_once() -> None:
    head = head_in("bf16+fc=w8a8", dtype=torch.bfloat16)
    x = request_for(head).features_RKD.bfloat16()
    weight = quantise(tiny_checkpoint().tensors["fc.weight"], parse_format("int8", "weight"))
    assert torch.equal(head.fuse(x), (quantise(x, parse_format("int8", "input")) @ weight.T).bfloat16())


def test_features_have_a_scale_for_each_tap() -> None:
    head, plain = head_in("features=fp8"), head_in("fp32")
    x = request_for(head).features_RKD * torch.tensor([1.0, 1e3, 1e-3]).repeat_interleave(32)
    taps = [quantise(tap, parse_format("fp8", "features")) for tap in x.chunk(3, dim=-1)]
    assert torch.equal(head.fuse(x), plain.fuse(torch.cat(taps, dim=-1)))


@pytest.mark.parametrize("text", ["fp8", "fp8_e5m2", "fp8:scale=0.25", "fp8:scale=auto", "int8"])
def test_draft_kv_is_stored_on_the_grid(text: str) -> None:
    head, plain = head_in(f"kv={text}"), head_in("fp32")
    item, form = request_for(head), parse_format(text, "kv")
    ((k, v),) = first_pass(head, [item]).attention.committed_kv(0)
    ((plain_k, plain_v),) = first_pass(plain, [item]).attention.committed_kv(0)
    assert torch.equal(k, quantise(plain_k, form).double()) and torch.equal(v, quantise(plain_v, form).double())
    assert not torch.equal(k, plain_k)


def test_logits_are_rounded_to_what_they_are_said_to_be() -> None:
    normed = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    plain, rounded = head_in("fp32", dtype=torch.float32), head_in("logits=bf16", dtype=torch.float32)
    assert torch.equal(rounded.logits(normed), plain.logits(normed).bfloat16())
    wide = head_in("bf16+logits=fp32", dtype=torch.bfloat16)
    table = tiny_checkpoint().tensors["lm_head.weight"].bfloat16()
    assert torch.equal(wide.logits(normed.bfloat16()), normed.bfloat16().float() @ table.float().T)


def test_norms_and_the_embedding_are_rounded_when_asked_for() -> None:
    head, plain = head_in("embed_tokens=int8+norm=int8"), head_in("fp32")
    ids, form = torch.tensor([3, 90]), parse_format("int8", "weight")
    assert torch.equal(head.embed(ids), quantise(plain.embed(ids), form).double())
    norm = plain._weights["norm.weight"]
    assert torch.equal(head._weights["norm.weight"], quantise_weight(norm, form, torch.float64))
    assert torch.equal(head._weights["layers.0.hidden_norm.weight"], plain._weights["layers.0.hidden_norm.weight"])


# ---- all ways to draft agree ----

PRECISIONS = [
    "*=fp8",
    "*=fp8_e5m2:channel",
    "*=int8",
    "*=w8a8",
    "*=w4a16:g32",
    "*=w4a8:g32:asym",
    "*=nvfp4",
    "*=mxfp4",
    "kv=fp8",
    "kv=fp8_e5m2:scale=auto",
    "features=fp8",
    "logits=bf16",
    "embed_tokens=int8",
    "*=bf16+kv=int8+features=fp16+logits=fp16",
]


@pytest.mark.parametrize("text", PRECISIONS)
def test_every_anchor_rounds_in_order_and_twin_agree_and_differ_from_unquantised(text: str) -> None:
    """In fp64, so that another order of summation flips no rounding to the grid."""
    head = head_in(text, num_hidden_layers=2)
    item = request_for(head)
    (drafts,) = draft_every_anchor(head, [item], 3)
    assert drafts.drafted_AK.tolist() == [
        draft_one_round(head, item.tokens_T, item.features_RKD, anchor, 3) for anchor in range(3, 11)
    ]
    expected = replay_request(head, item.tokens_T, item.features_RKD, 3, 3)
    assert replay_in_order(head, item, 3) == expected
    assert not torch.equal(first_logits(head), first_logits(head_in("fp32", num_hidden_layers=2)))


def test_rounds_in_order_agree_where_drafted_rows_stay_in_the_kv() -> None:
    head = head_in("*=w4a8:g32+kv=fp8", behaviour=Behaviour(rewrite="stale"))
    item = request_for(head)
    (rounds,) = walk(head, [item], 3)
    expected = replay_request(head, item.tokens_T, item.features_RKD, 3, 3)
    assert [tuple(row) for row in rounds.drafted_RK.tolist()] == [played.drafted for played in expected]


@pytest.mark.parametrize("text", ["*=fp8+kv=fp8", "nvfp4"])
def test_trees_agree_with_their_twin(text: str) -> None:
    head = head_in(text)
    item = request_for(head, 2, 5)
    ((trees,),) = draft_every_tree(head, [item], topk=2, sizes=[TreeSize(3, 6)], kv="slot")
    for row, anchor in enumerate(range(2, 6)):
        tree = draft_one_tree(
            head, item.tokens_T, item.features_RKD, anchor, topk=2, steps=3, num_draft_tokens=6, kv="slot"
        )
        assert trees.drafted_AN[row].tolist() == [node.token for node in tree]


# ---- what it says of the numbers ----


def test_what_fp16_cannot_hold_is_told() -> None:
    checkpoint = tiny_checkpoint()
    weight = checkpoint.tensors["fc.weight"].clone()
    weight[0, :2] = 1e6
    tensors = {**checkpoint.tensors, "fc.weight": weight}
    head = head_in("fp16", dtype=torch.float16, checkpoint=replace(checkpoint, tensors=tensors))
    first_logits(head)
    notes = head.emulation.notes()
    assert notes == sorted(notes) and {
        "fp16: values of fc.weight became infinite in fp16",
        "fp16: fc overflowed in fp16: finite rows became infinite or NaN",
        "fp16: rows of logits are not finite (there argmax drafts the first NaN, as in a server)",
    } <= {*notes}
    first_logits(head)
    assert head.emulation.notes() == notes
    head.emulation.forget_passes()
    assert head.emulation.notes() == ["fp16: values of fc.weight became infinite in fp16"]
    sound = head_in("fp16", dtype=torch.float16)
    first_logits(sound)
    assert sound.emulation.notes() == []


def test_nan_is_told_in_every_dtype() -> None:
    checkpoint = tiny_checkpoint()
    tensors = {**checkpoint.tensors, "norm.weight": checkpoint.tensors["norm.weight"] * torch.nan}
    head = head_in("bf16", dtype=torch.bfloat16, checkpoint=replace(checkpoint, tensors=tensors))
    first_logits(head)
    (note,) = head.emulation.notes()
    assert note.startswith("bf16: rows of logits are not finite")


def test_features_and_sums_beyond_fp16_are_told() -> None:
    head = head_in("fp16", dtype=torch.float16)
    x = request_for(head).features_RKD
    x[5] = 6e4
    head.fuse(x)
    assert head.emulation.notes() == ["fp16: fc overflowed in fp16: finite rows became infinite or NaN"]
    x[4, 7] = 1e5
    head.fuse(x)
    assert head.emulation.notes() == [
        "fp16: fc overflowed in fp16: finite rows became infinite or NaN",
        "fp16: the features overflowed in fp16: finite rows became infinite or NaN",
    ]


def test_what_a_fixed_scale_clips_is_told() -> None:
    head, wide = head_in("kv=fp8:scale=0.001"), head_in("kv=fp8:scale=1")
    ((k, v),) = first_pass(head_in("fp32"), [request_for(head)]).attention.committed_kv(0)
    assert 0.448 < max(float(part.abs().max()) for part in (k, v)) < 448
    for one in (head, wide):
        first_pass(one, [request_for(one)])
    (note,) = head.emulation.notes()
    assert note.endswith(": values of keys and values lay beyond 0.448 and were clipped to it in fp8_e4m3")
    assert not wide.emulation.notes()


def test_groups_that_do_not_divide_a_weight_are_told() -> None:
    (note,) = head_in("w4a16:g64").emulation.notes()
    assert "layers.0.self_attn.o_proj.weight 48" in note and "q_proj" not in note


def test_a_borrowed_lm_head_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def counted(weight: Tensor, *rest: object) -> Tensor:
        made.append(tuple(weight.shape))
        return quantise_weight(weight, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("replay.head.emulation.quantise_weight", counted)
    head_in("lm_head=fp8", draft_vocab_size=None)
    assert made == [(96, 32)]


# ---- on the command line ----


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    trace = write_trace(tmp_path / "trace", [make_four()])
    return ["simulate", str(trace), "--draft", str(write_head(tmp_path / "draft", INVENTED))]


def answer(arguments: list[str]) -> dict[str, object]:
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    document: dict[str, object] = json.loads(done.stdout)
    return document


def test_precisions_and_kv_dtypes_make_a_sweep(arguments: list[str]) -> None:
    options = ["--precision", "fp32", "--precision", "fp32+fp8", "--kv-dtype", "auto", "--kv-dtype", "fp8_e4m3"]
    variants = answer([*arguments, *options])["variants"]
    assert [variant["precision"] for variant in variants] == [  # type: ignore[attr-defined]
        "fp32",
        "fp32+kv=fp8_e4m3:scale=1",
        "fp32+fp8_e4m3",
        "fp32+fp8_e4m3+kv=fp8_e4m3:scale=1",
    ]


def test_without_a_dtype_a_precision_runs_in_the_targets(arguments: list[str]) -> None:
    (variant,) = answer([*arguments, "--precision", "w8a8"])["variants"]  # type: ignore[misc]
    assert variant["precision"] == "bf16+w8a8"


def test_a_ranking_quantises_one_tensor_after_the_other(arguments: list[str]) -> None:
    document = answer([*arguments, "--precision", "fp32", "--rank-precision", "w4a8:g32"])
    ranking, variants = document["ranking"], document["variants"]
    linear = ["fc", *ATTENTION, *MLP, "lm_head"]
    inputs = ["fc", "layers.0.self_attn.qkv_proj", ATTENTION[3], "layers.0.mlp.gate_up_proj", MLP[2], "lm_head"]
    wanted = {f"{name}.weight" for name in linear} | {f"{name}.input" for name in inputs} | {TOGETHER}
    assert {row["tensor"] for row in ranking} == wanted and len(ranking) == len(wanted)  # type: ignore[attr-defined]
    lengths = {row["precision"]: row["accept_length"] for row in variants}  # type: ignore[attr-defined]
    for row in ranking:  # type: ignore[attr-defined]
        assert row["lost"] == pytest.approx(lengths["fp32"] - lengths[row["precision"]], abs=1e-12)
    lost = [row["lost"] for row in ranking]  # type: ignore[attr-defined]
    assert lost[:-1] == sorted(lost[:-1], reverse=True)
    assert ranking[-1]["tensor"] == TOGETHER  # type: ignore[index]


def test_a_ranking_is_shown_as_a_table(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, [*arguments, "--rank-precision", "w4a16:g32"])
    assert done.exit_code == 0, done.output
    for said in ("quantised alone", "layers.0.mlp.down_proj.weight", TOGETHER, "Unquantised, bf16: accept length"):
        assert said in done.stdout


def test_a_ranking_of_many_variants_or_of_nothing_is_refused() -> None:
    checkpoints = {"h": tiny_checkpoint()}
    with pytest.raises(UsageError, match="ranks the tensors of one variant, and 2 were asked for"):
        one_by_one([Variant("h"), Variant("h", steps=2)], "fp8", checkpoints)
    with pytest.raises(UsageError, match="quantises nothing"):
        one_by_one([Variant("h")], "w16a16", checkpoints)


def test_overflow_is_told_in_the_json(arguments: list[str], tmp_path: Path) -> None:
    tensors = random_tensors(invented_checkpoint().config)
    tensors["norm.weight"] *= 1e8
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    drafts = answer([*arguments, "--precision", "fp16"])["draft"]
    assert any("norm.weight became infinite in fp16" in note for note in drafts["draft"]["notes"])  # type: ignore[index]
    assert any("rows of logits are not finite" in note for note in drafts["draft"]["notes"])  # type: ignore[index]
