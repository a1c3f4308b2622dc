"""What a user can get wrong on the command line and in Python: one sentence, exit code 1, nothing lost."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.heads import tiny_checkpoint, tiny_config, write_head
from support.trace_maker import H, V, changed, make_header, make_request, write_trace

import replay
from replay.cli.app import cli
from replay.cli.demo import demo_options
from replay.cli.simulate import simulate
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError, OutputError, UsageError
from replay.faults.table import FAULTS
from replay.simulator.binding import resolve
from replay.simulator.fit import check_fit
from replay.traces.header import TapInfo

CONFIG = tiny_config(hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests of an invented target of four layers, taps 1, 2 and final."""
    header = replace(make_header(), taps={name: TapInfo("bfloat16", H) for name in ("1", "2", "final")})
    requests = []
    for seed in range(3):
        request = make_request(f"r{seed}", seed, output=9)
        rows = torch.randn(request.taps["2"].shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        requests.append(changed(request, taps={**request.taps, "1": rows}))
    return write_trace(tmp_path / "trace", [requests], header=header)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_head(tmp_path / "draft", CONFIG)


def refused(*arguments: object) -> str:
    """The one sentence with which the command line refuses."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_a_trace_can_be_simulated(trace: Path, draft: Path, tmp_path: Path) -> None:
    """So that the refusals below are not those of a broken fixture."""
    out = tmp_path / "r.parquet"
    done = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", str(draft), "--json", "-o", str(out)])
    assert done.exit_code == 0, done.output
    (variant,) = json.loads(done.stdout)["variants"]
    assert variant["wiring"] == ["embed", "1", "2"]
    assert variant["rounds"] == sum(variant["histogram"]) > 0
    assert replay.read_rounds(out).table.height == variant["rounds"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--wiring", "embed,1,3"], "asks for tap 3, the trace has embed, 1, 2, final"),
        (["--wiring", "embed,1"], "the head's fc takes 48 (3 taps)"),
        (["--wiring", "embed,one"], "'one' is not a tap"),
        (["--wiring", "embed,1,9"], "the target has 4 layers"),
        (["--steps", "0"], "0 steps"),
        (["--precision", "fp12"], "possible are fp32, bf16, fp16"),
        (["--engine", "vllm"], "possible are sglang, eagle"),
        (["--temperature", "1"], "capture one with --temperature 1"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
        (["-o", "."], "is a folder; name a file"),
        (["-o", "missing/r.parquet"], "make it first"),
        (["-o", "r.CSV"], "ends in .CSV; type -o r.parquet, or --format csv > r.CSV for the table alone"),
        (["-o", "r.json"], "-o writes rounds as parquet, and r.json ends in .json; type -o r.parquet"),
        (
            ["--observed", "99"],
            "99 was observed, 5 steps give at most 6; type the server's --steps",
        ),
        (["--steps", "1", "--steps", "3", "--observed", "4.1"], "4.1 was observed, 3 steps give at most 4"),
    ],
)
def test_options_that_cannot_be(trace: Path, draft: Path, options: list[str], said: str) -> None:
    assert said in refused("simulate", trace, "--draft", draft, *options)


def test_options_that_say_so_can_be_repeated() -> None:
    said = {option.name for option in simulate.params if "repeat" in (getattr(option, "help", None) or "")}
    assert said >= {"drafts", "wirings", "steps", "rules"}
    assert said <= {option.name for option in simulate.params if getattr(option, "multiple", False)}


def test_no_draft_and_no_trace(trace: Path, draft: Path, tmp_path: Path) -> None:
    assert "add --draft DIR" in refused("simulate", trace)
    assert "is a checkpoint (it holds config.json) and no trace" in refused("simulate", draft, "--draft", draft)
    assert "neither a trace" in refused("inspect", tmp_path)
    assert "does not exist; give the folder" in refused("inspect", tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is a file; give the folder" in refused("inspect", tmp_path / "model.safetensors")
    assert "holds weights, but no config.json" in refused("inspect", tmp_path)
    assert "type replay simulate" in refused("report", tmp_path / "none.parquet")


def test_names_too_long_for_the_file_system(draft: Path) -> None:
    assert "File name too long" in refused("inspect", "x" * 300)


def test_a_rounds_file_is_not_a_pattern(trace: Path, draft: Path, tmp_path: Path) -> None:
    """Square brackets are a glob to polars: the file of this very name has to be read, not its neighbour."""
    for name, steps in (("r[1].parquet", "1"), ("r1.parquet", "3")):
        arguments = ["simulate", str(trace), "--draft", str(draft), "--steps", steps, "-o", str(tmp_path / name)]
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert {len(row) for row in replay.read_rounds(tmp_path / "r[1].parquet").table["drafted"]} == {1}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle3"])
def test_a_head_is_no_target_whatever_it_calls_itself(tmp_path: Path, architecture: str) -> None:
    folder = write_head(tmp_path / "head", {**CONFIG, "architectures": [architecture]})
    done = CliRunner().invoke(cli, ["inspect", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["layer_ids"] == [-1, 0, 1]


SIZES = {"num_hidden_layers": 4, "hidden_size": H, "vocab_size": V}


def write_model(folder: Path, architecture: str, weights: str | None, **config: object) -> Path:
    """A folder of something that is no EAGLE-3 head: it embeds, and has no fc."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    tensors = {"model.embed_tokens.weight": torch.zeros(V, H)}
    if weights == "model.safetensors":
        save_file(tensors, folder / weights)
    elif weights is not None:
        torch.save(tensors, folder / weights)
    return folder


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", None])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [("LlamaForCausalLM", SIZES), ("Qwen3MoeForCausalLM", SIZES),
     ("Mistral3ForConditionalGeneration", {"text_config": SIZES})],
)  # fmt: skip
def test_a_target_is_told_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, config: dict[str, object], weights: str | None
) -> None:
    """With its weights and without; a pytorch_model.bin would have to be loaded whole."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    target = write_model(tmp_path / "target", architecture, weights, **config)
    assert f"is a target model ({architecture}), and inspect takes a trace or a draft head" in refused(
        "inspect", target
    )


def test_a_target_is_no_draft_head(trace: Path, tmp_path: Path) -> None:
    """Once: that its config lacks a field or its tensors a name, as of a broken head."""
    target = write_model(tmp_path / "target", "LlamaForCausalLM", "model.safetensors", **SIZES)
    wanted = f"{target} is a target model (LlamaForCausalLM) and no draft head; give --draft the folder of an EAGLE-3"
    for typed in (("simulate", trace), ("diagnose", trace), ("check", "--target", target)):
        assert wanted in refused(*typed, "--draft", target)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", None])
@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "MedusaModel"])
def test_another_kind_of_draft_is_not_called_a_target(tmp_path: Path, architecture: str, weights: str | None) -> None:
    folder = write_model(tmp_path / "draft", architecture, weights, **SIZES)
    said = refused("inspect", folder)
    assert f"is no EAGLE-3 head (its architecture is {architecture})" in said and "target" not in said


@pytest.mark.parametrize(
    ("weights", "config", "said"),
    [
        (None, CONFIG, "holds no weights"),
        ("model.safetensors", CONFIG, "lacks fc.weight"),
        ("pytorch_model.bin", CONFIG, "lacks fc.weight"),
        (None, SIZES | {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}, "holds no weights"),
    ],
)
def test_a_head_is_no_target_though_its_fc_is_not_there(
    tmp_path: Path, weights: str | None, config: dict[str, object], said: str
) -> None:
    folder = write_model(
        tmp_path / "head", "LlamaForCausalLM", weights, **{**config, "architectures": ["LlamaForCausalLM"]}
    )
    assert said in refused("inspect", folder)


def test_a_head_in_a_torch_file_is_inspected(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", {**CONFIG, "architectures": ["LlamaForCausalLM"]})
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    done = CliRunner().invoke(cli, ["inspect", str(folder), "--json"])
    assert done.exit_code == 0, done.output


def test_findings_keep_to_the_width_of_the_terminal(trace: Path) -> None:
    """So does a path without spaces, which the folder of a test may make longer than a line."""
    done = CliRunner().invoke(cli, ["inspect", str(trace), "--check"])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "lm_head(final) was computed for 27 of 27 output positions" in " ".join(done.stdout.split())


def test_square_brackets_in_a_path_are_shown(draft: Path) -> None:
    odd = draft.rename(draft.with_name("runs[bold]"))
    assert "runs[bold]" in CliRunner().invoke(cli, ["inspect", str(odd)]).stdout.replace("\n", "")


def test_an_existing_file_stays(trace: Path, draft: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert "--force to replace it" in refused("simulate", trace, "--draft", draft, "-o", kept)
    assert kept.read_text() == "mine"


def test_a_sweep_names_its_fields() -> None:
    with pytest.raises(UsageError, match="step is no field of a variant"):
        replay.sweep(draft=["head"], step=[1, 3])
    with pytest.raises(UsageError, match="no draft was given"):
        replay.sweep(steps=[1])


def test_a_variant_of_no_head(trace: Path) -> None:
    with pytest.raises(UsageError, match="no head is called b; there are a"):
        replay.simulate(replay.Trace.open(trace), {"a": tiny_checkpoint()}, [replay.Variant("b")])


def test_stated_wiring_is_read_as_the_engine_reads_it(trace: Path, draft: Path) -> None:
    opened, head = replay.Trace.open(trace), replay.load_head(draft)
    assert resolve(replay.Variant("d"), head, opened).wiring == Wiring(("embed", "1", "2"))
    # EAGLE's taps are in its code: R[2], R[N//2], R[N-3], here of four layers, in layer order and each once.
    assert resolve(replay.Variant("d", engine="eagle"), head, opened).wiring == Wiring(("1", "2"))


def test_a_head_with_fewer_tokens_than_the_target(trace: Path) -> None:
    head = tiny_checkpoint(hidden_size=24, target_hidden_size=H, vocab_size=20, draft_vocab_size=20)
    with pytest.raises(CheckpointError, match="embeds 20 tokens"):
        check_fit(head, Wiring(("embed", "1", "2")), replay.Trace.open(trace))


def test_the_demo_leaves_other_traces_alone(trace: Path) -> None:
    with pytest.raises(OutputError, match="not the demo's trace"):
        demo_options(trace.parent, 200, force=False, tell=print)
    assert replay.Trace.open(trace).header.requests == 3


def test_a_device_or_pipe_is_not_replaced_even_by_force(trace: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    draft = tmp_path / "head-unread"
    done = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", str(draft), "-o", str(pipe), "--force"])
    assert done.exit_code == 1
    assert f"{pipe} is a device or a pipe" in done.stderr
    assert pipe.is_fifo()


def test_an_unknown_fault_names_its_nearest() -> None:
    with pytest.raises(UsageError, match=r"'wiring.multilayer' is not known, nearest are wiring.multi-layer"):
        replay.parse_faults("wiring.multilayer")


def test_the_list_of_faults_fits_80_columns_with_whole_names() -> None:
    done = CliRunner().invoke(cli, ["faults"])
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert {line.partition("=")[0] for line in done.stdout.splitlines()[::2]} == set(FAULTS)
