"""Checksums: what has changed is refused when it is read, and what was found whole is remembered."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import tiny_config, write_head
from support.trace_maker import H, V, make_four, make_header, write_trace

from replay.capture import demo_target
from replay.cli.app import cli
from replay.errors import OutputError, TraceCorruptError
from replay.traces import addresses, files, verify
from replay.traces.header import TraceHeader
from replay.traces.reader import Trace
from replay.traces.writer import TraceWriter

SHARD = "shard-00000.safetensors"
GOLDEN = Path(__file__).parents[1] / "golden" / "trace-v1"
CONFIG = tiny_config(hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1]})
HOUR = 3600 * 10**9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace whose memory lies in a folder of its own."""
    monkeypatch.setenv("REPLAY_CACHE", str(tmp_path / "cache"))
    return write_trace(tmp_path / "t", [make_four()[:2], make_four()[2:]])


def flip(path: Path, place: int = -7) -> None:
    """Another bit, the last but a few of the data."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def edit(folder: Path, seen: str, now: str) -> None:
    text = (folder / "trace.json").read_text()
    assert text.count(seen) == 1
    (folder / "trace.json").write_text(text.replace(seen, now))


@pytest.mark.parametrize("name", [SHARD, "shard-00001.safetensors", "target.safetensors"])
def test_a_flipped_bit_is_refused_unless_one_asks_for_it(folder: Path, tmp_path: Path, name: str) -> None:
    draft = write_head(tmp_path / "d", CONFIG)
    flip(folder / name)
    typed = ["simulate", str(folder), "--draft", str(draft), "--wiring", "embed,2"]
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 1 and done.stdout == ""
    assert f"{name} has changed since it was written" in done.stderr and "--no-verify" in done.stderr
    assert CliRunner().invoke(cli, [*typed, "--no-verify"]).exit_code == 0
    found = CliRunner().invoke(cli, ["inspect", str(folder), "--check"])
    assert found.exit_code == 1 and "has changed since it was written" in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("seen", "now"),
    [('"temperature": 0.0', '"temperature": 1.0'), ('"layers": 4', '"layers": 5'), ("prefill logits", "nothing"),
     ('"seed": 0,', '"seed":  0,')],
)  # fmt: skip
def test_an_edited_header_is_refused_unless_one_asks_for_it(folder: Path, seen: str, now: str) -> None:
    edit(folder, seen, now)
    with pytest.raises(TraceCorruptError, match=r"trace.json has changed since it was written.*--no-verify"):
        Trace.open(folder)
    Trace.open(folder, verify=False)


def test_exchanged_taps_are_refused(folder: Path) -> None:
    """Their places exchanged, nothing else: neither the data's checksum nor any shape says a word."""
    data = (folder / SHARD).read_bytes()
    places = re.findall(rb'"data_offsets":\[\d+,\d+\]', data)
    wide = [place for place in places if data.index(place) > data.index(b'"tap.2"')][:2]
    swapped = data.replace(wide[0], b"#" * len(wide[0])).replace(wide[1], wide[0]).replace(b"#" * len(wide[0]), wide[1])
    assert len(swapped) == len(data) and swapped != data
    (folder / SHARD).write_bytes(swapped)
    Trace.open(folder, verify=False).read(0, ["2"])
    with pytest.raises(TraceCorruptError, match=r"the headers of the shards of .* have changed"):
        Trace.open(folder)


def test_the_checksum_of_the_header_is_what_the_specification_says(folder: Path) -> None:
    text = (folder / "trace.json").read_bytes()
    own = json.loads(text)["header_sha256"]
    assert hashlib.sha256(text.replace(own.encode(), b"0" * 64)).hexdigest() == own
    heads = []
    for shard in (SHARD, "shard-00001.safetensors"):
        data = (folder / shard).read_bytes()
        heads.append(hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest())
    assert json.loads(text)["shard_headers_sha256"] == hashlib.sha256("".join(heads).encode()).hexdigest()


def test_a_name_in_a_text_is_not_taken_for_the_checksum() -> None:
    tricky = '"header_sha256": "' + "a" * 64 + '"'
    text = make_header().to_json().replace("prefill logits", json.dumps(tricky)[1:-1])
    header = TraceHeader.from_json(text, verify=False)
    again = TraceHeader.from_json(header.to_json())
    assert again == header and again.missing == (tricky,)


def test_one_that_is_recorded_still_has_a_checksum(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add(make_four())
        Trace.open(tmp_path / "t", allow_incomplete=True)
        edit(tmp_path / "t", '"top_k": -1', '"top_k": 5')
        with pytest.raises(TraceCorruptError, match="has changed since it was written"):
            Trace.open(tmp_path / "t", allow_incomplete=True)


def test_a_trace_of_an_earlier_replay_is_read_and_what_it_lacks_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.open(GOLDEN)
    assert trace.header.uncovered and trace.read(0, ["final"]).taps
    for more in ((), ("--check",)):
        done = CliRunner().invoke(cli, ["inspect", str(GOLDEN), *more])
        assert done.exit_code == 0
        assert "a checksum of trace.json: an earlier replay wrote it" in " ".join(done.stdout.split())


# ---- what is remembered ----


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which files were read for their checksum, of a trace whose every file is large and old."""
    names: list[str] = []
    real: Callable[[Path, int], str] = files.sha256_of

    def counted(path: Path, start: int = 0) -> str:
        names.append(path.name)
        return real(path, start)

    monkeypatch.setattr(files, "sha256_of", counted)
    monkeypatch.setattr(verify, "LARGE", 1)
    monkeypatch.setattr(verify, "_FRESH", -HOUR)
    return names


def read_all(folder: Path) -> None:
    trace = Trace.open(folder)
    for index in range(len(trace)):
        trace.read(index, ["embed", "final"])
        trace.logits(index)


def test_every_file_is_read_once_and_remembered(folder: Path, hashed: list[str]) -> None:
    read_all(folder)
    assert sorted(hashed) == [SHARD, "shard-00001.safetensors", "target.safetensors"]
    read_all(folder)
    assert len(hashed) == 3
    assert Trace.open(folder).rows_of_many("final", {0: [0]}).shape == (1, H)
    assert len(hashed) == 3


def test_whatever_changes_a_file_makes_it_read_again(folder: Path, hashed: list[str]) -> None:
    """Also where its size and time are those of before, as after a copy that keeps them."""
    read_all(folder)
    before = (folder / SHARD).stat()
    flip(folder / SHARD)
    os.utime(folder / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / SHARD).stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(TraceCorruptError, match="has changed since it was written"):
        read_all(folder)


def test_only_the_rows_that_are_read_are_verified(folder: Path, hashed: list[str]) -> None:
    flip(folder / "shard-00001.safetensors")
    Trace.open(folder).read(0, ["final"])
    assert hashed == [SHARD]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"shard-00000.safetensors": [1, 2]}', b"\xff\0"])
def test_a_damaged_memory_is_no_memory(folder: Path, hashed: list[str], damage: bytes, tmp_path: Path) -> None:
    read_all(folder)
    (memory,) = (tmp_path / "cache" / "verified").iterdir()
    memory.write_bytes(damage)
    read_all(folder)
    assert len(hashed) == 6
    read_all(folder)
    assert len(hashed) == 6


def test_a_home_that_cannot_be_written_costs_time_only(
    folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAY_CACHE", "/proc/replay")
    read_all(folder)
    read_all(folder)
    assert len(hashed) == 6


def test_small_or_fresh_files_are_not_remembered(
    folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(verify, "LARGE", 1 << 24)
        read_all(folder)
    monkeypatch.setattr(verify, "_FRESH", HOUR)
    read_all(folder)
    assert len(hashed) == 6 and not (tmp_path / "cache").exists()


def test_every_command_that_advises_no_verify_takes_it(folder: Path, tmp_path: Path) -> None:
    edit(folder, '"temperature": 0.0', '"temperature": 0.5')
    for typed in (["inspect", folder], ["trace", "stats", folder], ["trace", "subset", folder, "-o", tmp_path / "s"],
                  ["trace", "merge", folder, "-o", tmp_path / "m"]):  # fmt: skip
        words = [str(word) for word in typed]
        refused = CliRunner().invoke(cli, words)
        assert refused.exit_code == 1 and "--no-verify" in refused.stderr, words
        assert CliRunner().invoke(cli, [*words, "--no-verify"]).exit_code == 0, words
    for name in ("compare", "report", "show", "simulate", "diagnose", "check", "plan"):
        assert any("--no-verify" in option.opts for option in cli.commands[name].params), name


def test_a_head_takes_no_options_of_a_trace(tmp_path: Path) -> None:
    head = write_head(tmp_path / "d", CONFIG)
    done = CliRunner().invoke(cli, ["inspect", str(head), "--check", "--target", "/nosuch"])
    assert done.exit_code == 1 and "is a draft head, and --check, --target is for a trace" in done.stderr


def test_a_user_without_a_home_opens_traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a uid of none of its users; the demo alone has to have a place."""

    def nowhere(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(verify, "LARGE", 1)
    monkeypatch.delenv("REPLAY_CACHE")
    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    monkeypatch.setattr(verify, "_FRESH", 0)
    assert addresses.cache_folder() is None
    assert len(Trace.open(folder).read(0, ["2"]).taps) == 1
    with pytest.raises(OutputError, match="you have no home; set REPLAY_CACHE"):
        demo_target.smollm2()
