"""Every refusal that needs no target comes before one is loaded, fetched, converted or asked: here that is fatal."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.heads import tiny_config, write_head
from support.report_cases import single as some_rounds
from support.trace_maker import H, V, make_four, make_header, make_weights, write_trace

import replay
from replay.capture.prompts import read_prompts
from replay.capture.target_files import fingerprint_target, stated_layers
from replay.cli.app import cli
from replay.traces.writer import TraceWriter

# What takes long, by where it is called from.
HEAVY = (
    "replay.capture.target_files.open_target",
    "replay.capture.local.target.load_target",
    "replay.capture.demo_target._convert",
    "replay.capture.demo_target._gguf",
    "replay.capture.client.api.ServerApi.call",
    "replay.capture.dumps.record.open_dump_target",
    "replay.capture.plugin.server._start",
    "replay.capture.plugin.launch._check_plugin",
    "replay.checkpoint.checkpoint.read_checkpoint",
    "replay.simulator.cache.simulate_with_notes",
)
CONFIG = tiny_config(hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1]})


@pytest.fixture
def nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HEAVY:
        monkeypatch.setattr(name, lambda *_, name=name, **__: pytest.fail(f"{name} ran before the refusal"))


def refused(*arguments: object) -> str:
    """The one sentence with which the command line refuses."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello"}\n')
    return path


# Each writes a folder, named last.
Typed = Callable[[Path, Path], list[object]]
FOLDERS: dict[str, Typed] = {
    "capture --model": lambda prompts, out: ["capture", "--model", "some/target", "--prompts", prompts, "-o", out],
    "capture --server": lambda prompts, out: ["capture", "--server", "h:1", "--prompts", prompts, "-o", out],
    "import": lambda prompts, out: ["import", prompts, "--target", "t", "-o", out],
    "demo": lambda prompts, out: ["demo", "-o", out],
    "serve": lambda prompts, out: ["serve", "--trace", out, "--", "--model-path", "m"],
}
# And each of these a file.
FILES: dict[str, Typed] = {
    "simulate": lambda rounds, out: ["simulate", rounds, "--draft", "d", "-o", out],
    "report": lambda rounds, out: ["report", rounds, "--html", out],
}


@pytest.fixture(params=list(FOLDERS))
def to_folder(request: pytest.FixtureRequest, prompts: Path) -> Callable[[Path], list[object]]:
    return lambda out: FOLDERS[request.param](prompts, out)


@pytest.fixture(params=list(FILES))
def to_file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], list[object]]:
    rounds = tmp_path / "rounds.parquet"
    replay.write_rounds(some_rounds(), rounds)
    return lambda out: FILES[request.param](rounds, out)


def test_a_list_of_what_takes_long_is_true() -> None:
    """A name that is no more would be patched in vain; monkeypatch refuses it, here by itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in HEAVY:
            patch.setattr(name, None)


@pytest.mark.usefixtures("nothing_heavy")
def test_a_file_where_the_folder_should_be(to_folder: Callable[[Path], list[object]], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert "is a file, a trace is a folder: choose another name" in refused(*to_folder(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.usefixtures("nothing_heavy")
@pytest.mark.parametrize("place", ["/proc/replay-out", "/dev/null/out", "TMP/" + "n" * 300, "TMP/file/out"])
def test_a_place_that_cannot_be_written(to_folder: Callable[[Path], list[object]], tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    assert "cannot write" in refused(*to_folder(Path(place.replace("TMP", str(tmp_path)))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "prompts.jsonl"]


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """A folder that another process writes a trace into, and another server records into."""
    folder = tmp_path / "busy"
    descriptors = []
    for place in (folder, folder / "spool", folder / "trace"):
        place.mkdir()
        descriptors.append(os.open(place / ".lock", os.O_CREAT | os.O_RDWR))
        fcntl.flock(descriptors[-1], fcntl.LOCK_EX)
    yield folder
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.usefixtures("nothing_heavy")
def test_another_writer_is_at_work(to_folder: Callable[[Path], list[object]], busy: Path) -> None:
    assert "another process is writing to" in (said := refused(*to_folder(busy))) or "another server records" in said


@pytest.mark.usefixtures("nothing_heavy")
def test_a_file_that_cannot_be_written(to_file: Callable[[Path], list[object]], tmp_path: Path) -> None:
    assert "cannot be written (" in refused(*to_file(Path("/proc/r.parquet")))
    assert "cannot be written (File name too long)" in refused(*to_file(tmp_path / ("n" * 255)))
    assert "would be taken for a part of the trace" in refused(
        *to_file(write_trace(tmp_path / "trace", [make_four()]) / "rounds.parquet")
    )


@pytest.mark.usefixtures("nothing_heavy")
def test_force_spares_what_the_command_did_not_write(to_file: Callable[[Path], list[object]], tmp_path: Path) -> None:
    """An input above all: the trace's own files, a head, and of a report the rounds themselves."""
    for name, data in (("notes.md", b"mine"), ("model.safetensors", b"\0" * 99), ("empty.parquet", b"")):
        (tmp_path / name).write_bytes(data)
        assert "so --force spares it" in refused(*to_file(tmp_path / name), "--force")
        assert (tmp_path / name).read_bytes() == data
    other = tmp_path / "other.parquet"
    make_four_frame(other)
    assert "so --force spares it" in refused(*to_file(other), "--force")


def make_four_frame(path: Path) -> None:
    import polars as pl

    pl.DataFrame({"a": [1, 2]}).write_parquet(path)


def test_a_report_is_not_written_over_its_rounds_but_over_an_earlier_page(tmp_path: Path) -> None:
    rounds, page = tmp_path / "r.parquet", tmp_path / "r.html"
    replay.write_rounds(some_rounds(), rounds)
    assert "so --force spares it" in refused("report", rounds, "--html", rounds, "--force")
    for more in ((), ("--force",)):
        assert CliRunner().invoke(cli, ["report", str(rounds), "--html", str(page), *more]).exit_code == 0
    assert page.read_bytes().startswith(b"<!DOCTYPE html>")


@pytest.mark.usefixtures("nothing_heavy")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-new-tokens", "9"], "begun with capture.max_new_tokens 8, now it is 9"),
        (["--max-new-tokens", "8", "--top-k", "-1", "--seed", "5"], "begun with capture.seed 0, now it is 5"),
        (["--max-new-tokens", "8", "--top-k", "-1"], "begun with capture.prompts_sha256 0000"),
    ],
)
def test_a_capture_is_not_gone_on_with_otherwise(tmp_path: Path, prompts: Path, more: list[str], said: str) -> None:
    TraceWriter.create(tmp_path / "trace", make_header()).close()
    typed = ["--prompts", prompts, "-o", tmp_path / "trace", "--resume"]
    assert said in refused("capture", "--model", "some/target", *typed, *more)
    assert "begun with engine.name transformers, now it is sglang" in refused(
        "capture", "--server", "h:1", *typed, *more
    )


@pytest.mark.usefixtures("nothing_heavy")
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a plain file" in refused(
        "capture", "--model", "m", "--prompts", tmp_path / "pipe", "-o", tmp_path / "out"
    )


def test_another_target_is_not_loaded_to_go_on(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts.write_text('{"input_ids": [1, 2]}\n')
    monkeypatch.setattr("replay.capture.local.target.load_target", lambda *_, **__: pytest.fail("it was loaded"))
    header = make_header()
    settings = replace(
        header.capture, max_new_tokens=128, top_k=0,
        prompts_sha256=read_prompts(prompts).sha256,
    )  # fmt: skip
    TraceWriter.create(tmp_path / "trace", replace(header, capture=settings, topk=32)).close()
    target = write_target(tmp_path / "target")
    monkeypatch.setattr("replay.capture.target_files.open_target", lambda model: SimpleNamespace(folder=Path(model)))
    typed = ["--model", target, "--prompts", prompts, "-o", tmp_path / "trace", "--resume"]
    assert "begun with target.fingerprint ffff" in refused("capture", *typed)


@pytest.mark.usefixtures("nothing_heavy")
@pytest.mark.parametrize("typed", [["--taps", "1,9"], ["--taps", "1", "--taps-for", "1", "--then-taps", "9"]])
@pytest.mark.parametrize("place", ["top", "text_config", "hub"])
def test_a_tap_beyond_the_target_is_refused_by_its_config_alone(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], place: str
) -> None:
    target, config = tmp_path / "target", {"num_hidden_layers": 4}
    target.mkdir()
    document = {"text_config": config, "vision_config": {"num_hidden_layers": 99}} if place == "text_config" else config
    (target / "config.json").write_text(json.dumps(document))
    if place == "hub":
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(target / "config.json"))
    model = "some/target" if place == "hub" else target
    said = refused("capture", "--model", model, "--prompts", prompts, "-o", tmp_path / "out", *typed)
    assert "tap 9 is R[9], the target has 4 layers" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"num_hidden_layers": "4"}', '{"num_hidden_layers": 0}', '{"text_config": {}}',
             '{"num_hidden_layers": 4, "text_config": {}}', '{"vision_config": {"num_hidden_layers": 4}}'],
)  # fmt: skip
def test_a_config_that_does_not_tell_the_layers_refuses_nothing_early(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert stated_layers(str(tmp_path)) is None


def test_a_server_that_is_not_there_is_said_at_once(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waited"))
    for url in ("127.0.0.1:9", "http://no-such-host.invalid:9"):
        said = refused("capture", "--server", url, "--prompts", prompts, "-o", tmp_path / "out")
        assert (
            "gave no answer" in said
            and "start the server (replay serve starts one that records), or mend --server" in said
        )


def test_a_trace_without_a_whole_request_is_waited_for_or_captured_with_resume(tmp_path: Path) -> None:
    """One with whole requests is replayed as far as these go."""
    with TraceWriter.create(tmp_path / "trace", make_header()) as writer:
        said = refused("simulate", tmp_path / "trace", "--draft", "d")
        assert "holds no whole request yet; wait for one, or capture with --resume" in said
        writer.add(make_four())
        assert "no whole request" not in refused("simulate", tmp_path / "trace", "--draft", "d")
        assert "is being recorded right now, 4 requests are whole so far: wait" in refused(
            "inspect", "--check", tmp_path / "trace"
        )
    said = refused("inspect", "--check", tmp_path / "trace")
    assert "type the capture command again with --resume" in said


def test_a_demo_that_is_interrupted_does_not_name_an_option_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replay.capture.demo_target.smollm2", lambda **_: write_target(tmp_path / "target"))
    files = SimpleNamespace(
        folder=tmp_path, layers=30, name="", tokenizer=None, limits=SimpleNamespace(vocab_size=64),
        config=SimpleNamespace(hidden_size=16, dtype="bfloat16"),
    )  # fmt: skip
    monkeypatch.setattr("replay.capture.target_files.open_target", lambda _: files)
    monkeypatch.setattr("replay.capture.target_check.TransformersCalls", lambda _: nullcontext())
    asked = SimpleNamespace(request_id="1", prompt_ids=[1], max_new_tokens=1, forced_ids=None)
    encoded = SimpleNamespace(requests=(asked,), left_out={}, notes=lambda: ())
    monkeypatch.setattr("replay.capture.local.record.encode_prompts", lambda *_, **__: encoded)
    monkeypatch.setattr("replay.capture.local.record._notes", lambda *_: [])
    monkeypatch.setattr("replay.capture.local.target.load_target", interrupt)
    said = refused("demo", "-q", "-o", tmp_path / "out")
    assert "interrupted while the target was loaded: type the same command" in said and "--resume" not in said


def test_an_accept_length_from_elsewhere_is_read_first_and_a_small_trace_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, trace = write_head(tmp_path / "d", CONFIG), write_trace(tmp_path / "trace", [make_four()[:1]])
    monkeypatch.setattr("replay.diagnosis.diagnose.search", lambda *_: pytest.fail("the search began"))
    typed = ("diagnose", trace, "--draft", draft, "--wiring", "embed,2")
    assert "too wide to hold an observed one against" in refused(*typed, "--observed", "2.5")
    monkeypatch.setattr("replay.traces.reader.Trace.open", lambda *_, **__: pytest.fail("the trace was opened"))
    assert "is no accept length" in refused(*typed, "--observed", "0.5")


# ---- a target that has moved ----


SIZES = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": H, "vocab_size": V, "num_attention_heads": 2,
         "intermediate_size": 8}  # fmt: skip


def write_target(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    save_file({"model.embed_tokens.weight": make_weights()}, folder / "model.safetensors")
    return folder


def test_a_target_that_has_moved_is_named(tmp_path: Path) -> None:
    target, draft = write_target(tmp_path / "was"), write_head(tmp_path / "d", CONFIG)
    header = make_header(target_path=str(target))
    header = replace(header, target=replace(header.target, fingerprint=fingerprint_target(target)))
    trace = write_trace(tmp_path / "trace", [make_four()], header=header, weights=False)
    typed = ["simulate", str(trace), "--draft", str(draft), "--wiring", "embed,2", "--json"]

    def variants(*more: str) -> object:
        done = CliRunner().invoke(cli, [*typed, *more])
        assert done.exit_code == 0, done.output
        return [{**one, "seconds": 0} for one in json.loads(done.stdout)["variants"]]

    before = variants()
    moved = target.rename(tmp_path / "is")
    assert "name the folder of its checkpoint with --target DIR" in refused(*typed)
    assert variants("--target", str(moved)) == before
    assert CliRunner().invoke(cli, ["inspect", str(trace), "--check", "--target", str(moved)]).exit_code == 0
    other = write_target(tmp_path / "other")
    save_file({"model.embed_tokens.weight": torch.zeros(V, H)}, other / "model.safetensors")
    assert "is not the checkpoint of invented that" in refused(*typed, "--target", other)
    assert "is no folder" in refused(*typed, "--target", tmp_path / "nowhere")
