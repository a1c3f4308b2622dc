"""Heads by hub id, out of a cache that is laid out as the hub's: nothing is fetched in these tests."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import INVENTED, write_head
from support.trace_maker import make_four, write_trace

import replay
from replay.checkpoint.hub import head_folder, spoken_name
from replay.cli.app import cli
from replay.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with org/head, its files links to blobs as huggingface_hub makes them; the network is off."""
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE  # conftest.py
    root = tmp_path / "hub"
    entry = root / "models--org--head"
    snapshot = entry / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    for file in sorted(write_head(tmp_path / "made", INVENTED).iterdir()):
        shutil.move(file, entry / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.chdir(tmp_path)
    return root


def test_a_head_comes_out_of_the_cache(cache: Path) -> None:
    snapshot = cache / "models--org--head" / "snapshots" / COMMIT
    for typed in ("org/head", f"org/head@{COMMIT}", "org/head@main"):
        assert head_folder(Path(typed)) == snapshot
    head = replay.load_head("org/head")
    assert (head.name, spoken_name(snapshot)) == ("head", "head")
    assert head.config.num_taps == 2


def test_a_folder_goes_before_the_hub(cache: Path) -> None:
    Path("org").mkdir()
    here = write_head(Path("org/head"), INVENTED)
    assert head_folder(Path("org/head")) == here
    for path in ("head", "/org/head", "a/b/c", "./org/../x"):
        assert head_folder(Path(path)) == Path(path)


def test_a_command_takes_a_hub_id(cache: Path, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", [make_four()])
    done = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", "org/head", "--steps", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert '"head": {' in done.stdout


@pytest.mark.parametrize("lost", ["all", "weights"])
def test_what_the_cache_lacks_is_said_with_the_network_off(lost: str, cache: Path, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", [make_four()])
    typed = "org/other"
    if lost == "weights":
        typed = "org/head"
        (cache / "models--org--head" / "blobs" / "model.safetensors").unlink()
    done = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", typed])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    if lost == "all":
        assert line.startswith(f"replay: {typed} is no folder here and not in the hub's cache {cache}, and HF_HUB")
        assert line.endswith("unset that, or give --draft a folder")


def test_other_failures_of_the_hub_are_told_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub names them; the constant stands for a machine with a network."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for kind, said in (
        (errors.RepositoryNotFoundError, "neither a folder here nor a model on the hub that you may read"),
        (errors.GatedRepoError, "is gated on the hub"),
        (ConnectionError, "the hub cannot be reached (no route); fetch it where there is a network"),
    ):

        def fail(name: str, *, local_files_only: bool = False, kind: type[Exception] = kind, **_: object) -> str:
            if local_files_only:
                raise errors.LocalEntryNotFoundError("not there")
            raise kind.__new__(kind, "no route") if kind is not ConnectionError else ConnectionError("no route")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(CheckpointError) as raised:
            head_folder(Path("org/other"))
        assert said in str(raised.value)


def test_a_server_that_was_started_by_a_hub_id_names_the_snapshot_that_it_loaded(cache: Path, tmp_path: Path) -> None:
    """So that --target and a trace of the same checkpoint's folder agree with it."""
    from types import SimpleNamespace

    from replay.capture.plugin.facts import target_info
    from replay.capture.target_files import fingerprint_target

    snapshot = cache / "models--org--head" / "snapshots" / COMMIT
    config = SimpleNamespace(num_hidden_layers=4, _commit_hash=COMMIT, to_json_string=lambda: "{}")
    told = target_info(config, "LlamaForCausalLM", "org/head", 16, 64, "bfloat16")
    assert (told["name"], told["path"]) == ("org/head", str(snapshot))
    assert told["fingerprint"] == fingerprint_target(snapshot)
    other = target_info(config, "LlamaForCausalLM", "org/nothing", 16, 64, "bfloat16")
    assert other["path"] == "org/nothing" and other["fingerprint"] != told["fingerprint"]
