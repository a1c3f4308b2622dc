"""A web server as storage: what it may leave out, how a question to it ends, and whole files in the local cache."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.range_server import range_server
from support.serving import serving
from support.trace_maker import make_header, make_weights

from replay.errors import OutputError, StorageError
from replay.traces import cached_files, object_store
from replay.traces.addresses import place_of, remote_folder
from replay.traces.reader import Trace
from replay.traces.remote import as_source, local_file
from replay.traces.weights import TargetWeights

PAGE = b"<!doctype html><title>Log in</title>"
MANY = 500  # questions, after which the test's server gives up


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("REPLAY_CACHE", str(tmp_path / "cache"))
    object_store.forget_systems()
    yield
    object_store.forget_systems()


def _held() -> int:
    return sum(path.stat().st_size for path in Path(remote_folder()).rglob("*") if path.is_file())


@pytest.mark.parametrize("version", ["ETag", ""])
def test_a_page_for_every_name_is_refused_at_once(version: str) -> None:
    asked = []

    class Login(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Silent."""

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if len(asked) < MANY else 503)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(PAGE)))
            if version:
                self.send_header(version, '"1"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(PAGE)

        do_HEAD = do_GET

    said = "answers every name with text/html, as a login page does, so its files cannot be told; mend the address"
    with serving(Login) as address, pytest.raises(StorageError, match=f"^{address}/trace {said}"):
        Trace.open(f"{address}/trace")
    assert len(asked) < 5


def test_shards_are_asked_for_as_far_as_a_trace_may_have_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(object_store.files, "MAX_SHARDS", 32)
    for name in ("trace.json", *(f"shard-{number:05d}.safetensors" for number in range(64))):
        (tmp_path / name).touch()
    with range_server(tmp_path) as address:
        found = object_store.list_folder(address)
    assert len(found) == 33 and "shard-00031.safetensors" in found


@pytest.mark.parametrize("version", ["ETag", "Content-MD5", "Digest", "Last-Modified"])
def test_a_file_of_the_same_size_is_told_from_the_one_before(tmp_path: Path, version: str) -> None:
    file = tmp_path / "there" / "config.json"
    file.parent.mkdir()
    with range_server(file.parent, version=version) as address:
        for text in ("[1]", "[2]"):
            file.write_text(text)
            os.utime(file, ns=(0, int(text[1])))
            assert Path(os.fspath(as_source(address) / "config.json")).read_text() == text


def test_a_file_without_a_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with range_server(tmp_path, version="") as address:
        said = "comes without an ETag, a checksum or a time of change, so a change of it would not be seen; have its"
        with pytest.raises(StorageError, match=f"^{address}/config.json {said} server send one, or copy it"):
            os.fspath(as_source(address) / "config.json")


@pytest.mark.parametrize("ending", ["Ctrl-C", "a failure"])
def test_a_command_ends_while_a_question_is_under_way(ending: str, tmp_path: Path) -> None:
    """The server says nothing about one file, for which each question waits for half a minute."""
    waits, over = threading.Event(), threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Silent."""

        def do_GET(self) -> None:
            if self.path.endswith("trace.json"):
                waits.set()
                over.wait(120)
            elif ending == "a failure" and self.path.endswith("requests.parquet"):
                waits.wait(60)
                self.send_error(500)
            else:
                self.send_error(404)

        do_HEAD = do_GET

    with serving(Silent) as address:
        line = [sys.executable, "-I", "-m", "replay", "inspect", f"{address}/trace"]
        with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as command:
            try:
                assert waits.wait(60)
                if ending == "Ctrl-C":
                    command.send_signal(signal.SIGINT)
                _, said = command.communicate(timeout=20)  # far from what the question would take
            finally:
                command.kill()
                over.set()
    assert command.returncode != 0 and "Traceback" not in said
    assert ending == "Ctrl-C" or "requests.parquet cannot be read" in said


def test_room_is_made_before_a_file_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whenever a file gets its name, all of it is there, and with what is held beside it the bound is kept."""
    most = []
    real = os.replace

    def measured(source: str, target: str) -> None:
        most.append(_held())
        real(source, target)

    monkeypatch.setenv("REPLAY_CACHE_GB", "0.001")  # 1,000,000 bytes
    monkeypatch.setattr(os, "replace", measured)
    sizes = {"a": 450_000, "b": 450_000, "c": 850_000}
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "config.json").touch()
    for name, size in sizes.items():
        save_file({"x": torch.zeros(size, dtype=torch.uint8)}, folder / f"{name}.safetensors")
    with range_server(folder) as address:
        (folder / object_store._INDEX).write_text(" ".join(f'"{name}.safetensors"' for name in sizes))
        for name in sizes:
            local_file(as_source(address) / f"{name}.safetensors")
    assert 850_000 < max(most) <= 1_000_000


def test_what_another_process_is_fetching_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it from its beginning, and it is not deleted for room."""
    monkeypatch.setenv("REPLAY_CACHE_GB", "0.001")
    folder = Path(remote_folder()) / "https" / "host"
    folder.mkdir(parents=True)
    (folder / "held").write_bytes(bytes(100_000))
    other = folder / "other.1.ab.tmp"
    with open(other, "wb") as file:
        file.truncate(600_000)
    with cached_files.new_file(str(folder / "own"), size=250_000) as own:
        own.write(bytes(250_000))
        assert other.exists() and not (folder / "held").exists()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint of which embedding and lm_head are a part."""
    folder = tmp_path / "target"
    folder.mkdir()
    names = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    save_file({name: make_weights(seed=seed) for seed, name in enumerate(names)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_processes_share_the_memory_of_a_table(target: Path, tmp_path: Path) -> None:
    asked = []
    header = make_header(tied=False)
    near = TargetWeights(tmp_path, header, target, None)
    with range_server(target, on_get=asked.append) as address:
        first = TargetWeights(tmp_path, header, as_source(address), None)
        tables = [first.embed, first.lm_head]
        questions = asked.count("/model.safetensors")
        second = TargetWeights(tmp_path, header, as_source(address), None)
        tables += [second.embed, second.lm_head]
        assert asked.count("/model.safetensors") == questions > 0
    assert all(table.equal(own) for table, own in zip(tables, [near.embed, near.lm_head] * 2, strict=True))
    mapped = re.findall(rf" (\d+) +({remote_folder()}/ranges/\S+)", Path("/proc/self/maps").read_text())
    assert len(mapped) == 4 and len(set(mapped)) == 2
    assert sorted(Path(path).stat().st_size for _, path in mapped) == [first.embed.nbytes] * 4
    tables[0].zero_()  # private
    assert second.embed.equal(near.embed) and TargetWeights(tmp_path, header, target, None).embed.equal(near.embed)


def test_parts_of_a_table_are_fetched_side_by_side(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least four questions are under way together."""
    meeting = threading.Barrier(4, timeout=20)
    real, numbers, parts = cached_files.read_range, itertools.count(), []

    def slow(entry: object_store.Entry, start: int, stop: int) -> bytes:
        parts.append((start, stop))
        if next(numbers) < 4:
            meeting.wait()
        return real(entry, start, stop)

    monkeypatch.setattr(cached_files, "_PART", 300)
    monkeypatch.setattr(cached_files, "read_range", slow)
    near = TargetWeights(tmp_path, make_header(), target, None).embed
    with range_server(target) as address:
        assert TargetWeights(tmp_path, make_header(), as_source(address), None).embed.equal(near)
    assert len(parts) == -(-near.nbytes // 300)


def test_a_table_that_has_changed_or_has_no_room(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with range_server(target) as address:
        weights = TargetWeights(tmp_path, make_header(), as_source(address), None)
        assert weights.can_look_up()
        monkeypatch.setenv("REPLAY_CACHE_GB", "0.0000022")
        with pytest.raises(OutputError, match=r" holds \S+ GB and 2.05e-06 GB of it are needed in one piece, and the"):
            _ = weights.embed
        monkeypatch.delenv("REPLAY_CACHE_GB")
        os.utime(target / "model.safetensors", ns=(0, 1))
        with pytest.raises(StorageError, match="has changed while it was read"):
            _ = weights.embed
    assert not list((Path(remote_folder()) / "ranges").rglob("*-*"))


def test_a_page_for_the_address_above_is_in_nobodys_way(target: Path, tmp_path: Path) -> None:
    """A web server may answer a folder's address with a page, which the cache then has as a file."""
    near = TargetWeights(tmp_path, make_header(), target, None).embed
    with range_server(target.parent) as address:
        above = Path(place_of(f"{address}/{target.name}"))
        above.parent.mkdir(parents=True, exist_ok=True)
        above.write_text("Index of")
        found = TargetWeights(tmp_path, make_header(), as_source(f"{address}/{target.name}"), None).embed
        assert found.equal(near) and above.is_dir()
