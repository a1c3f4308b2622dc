"""What a capture will take, said before it begins; the arithmetic is done here by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.trace_maker import H, K, make_four, make_header, make_weights, write_trace

from replay.capture import size as module
from replay.capture.encode import EncodedRequest
from replay.capture.events import Event, Sized
from replay.capture.kept import Kept
from replay.capture.local.record import _room
from replay.capture.options import CaptureOptions
from replay.capture.plugin.launch import room_notes
from replay.capture.size import Room, RowSize, fewer_taps, spell_bytes

NINE = ("1", "2", "3", "14", "15", "16", "26", "27", "28", "final")  # of 30 layers: defaults 2, 15, 27, and neighbours
Free = Callable[[int], None]


def request(name: str, prompt: int, most: int, forced: list[int] | None = None) -> EncodedRequest:
    return EncodedRequest(name, None, list(range(prompt)), None if forced is None else forced, most)


def expect(folder: Path, size: RowSize, asked: list[EncodedRequest], **more: Any) -> Room:
    """Of a capture that keeps all taps of all requests, where nothing else is said."""
    return module.expect(folder, size, asked, **{"kept": Kept(size.taps), **more})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    def set_free(count: int) -> None:
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=count))

    return set_free


def test_bytes_are_those_of_rows_and_choices(tmp_path: Path, free: Free) -> None:
    """A row: 10 taps of 8 values in 2 bytes, a token of 4: 164. An output token: 3 choices of 8, and 4 more: 28."""
    free(10**12)
    size = RowSize(NINE, 8, 2, 3)
    room = expect(tmp_path, size, [request("a", 10, 5), request("b", 4, 99, forced=[1, 2])], layers=30, beside=1000)
    assert room.needed == 21 * 164 + 7 * 28 + 1000
    assert room.fits and room.sentence().startswith("up to 4.64 kB will be recorded, 1 TB are free in ")


def test_what_is_kept_of_some_requests_alone_is_counted(tmp_path: Path, free: Free) -> None:
    """All ten taps of a, two of b, and of each prompt the last 4 rows; then in a byte a value with a scale of 4."""
    free(10**12)
    size, asked = RowSize(NINE, 8, 2, 3), [request("a", 10, 5), request("b", 4, 2)]
    kept = Kept(NINE, ("2", "final"), frozenset({"a"}), prompt_rows=4)
    tokens = 15 * 4 + 5 * 28 + 6 * 4 + 2 * 28
    assert expect(tmp_path, size, asked, layers=30, kept=kept).needed == tokens + 9 * 160 + 6 * 32
    less = expect(tmp_path, replace(size, rows="fp8"), asked, layers=30, kept=replace(kept, rows="fp8"))
    assert less.needed == tokens + 9 * (9 * 12 + 16) + 6 * (12 + 16)


def test_a_trace_takes_about_what_was_said(tmp_path: Path, free: Free) -> None:
    """A real one: beside the rows there are only headers and the table."""
    free(10**12)
    four = make_four()
    made = [request(one.request_id, len(one.prompt_ids), len(one.output_ids)) for one in four]
    weights = make_weights().numel() * 2
    room = expect(tmp_path / "t", RowSize(("2", "final"), H, 2, K), made, layers=4, beside=weights)
    folder = write_trace(tmp_path / "t", [four], header=make_header())
    tensors = sum(file.stat().st_size for file in folder.glob("*.safetensors")) - headers(folder)
    assert 0 <= room.needed - tensors <= 4 * (2 * H * 2)  # of each request one row fewer, the last token has none


def headers(folder: Path) -> int:
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))


def test_what_does_not_fit_is_said_with_the_taps_to_leave_out(tmp_path: Path, free: Free) -> None:
    size, asked = RowSize(NINE, 1000, 2, 1), [request("a", 1, 99)]
    free(1_500_000)
    room = expect(tmp_path, size, asked, layers=30)
    assert not room.fits and room.fewer == ("embed", "2", "15", "27", "final")
    assert room.needed_by_fewer == 100 * (4 * 2000 + 4) + 99 * 12
    assert "with --taps embed,2,15,27,final it is up to 802 kB; else record fewer prompts" in room.sentence()
    served = expect(tmp_path, size, asked, layers=30, needed_taps=("3", "16"))
    assert served.fewer == ("embed", "2", "3", "15", "16", "27", "final")
    nothing_to_drop = expect(tmp_path, replace(size, taps=("2", "final")), [request("a", 1, 999)], layers=30)
    assert nothing_to_drop.fewer == () and "record fewer prompts or new tokens" in nothing_to_drop.sentence()


def test_what_is_there_already_counts(tmp_path: Path, free: Free) -> None:
    free(1000)
    folder = write_trace(tmp_path / "t", [make_four()])
    there = sum(file.stat().st_size for file in folder.iterdir() if file.name != ".lock")
    size, asked = RowSize(("2", "final"), 16, 2, 4), [request("a", 1000, 100)]
    whole = 1100 * 68 + 100 * 36
    assert expect(folder, size, asked, layers=4).needed == whole - there
    replaced = expect(folder, size, asked, layers=4, replaces=True)
    assert (replaced.needed, replaced.free) == (whole, 1000 + there)


def test_a_target_is_sized_by_its_config(tmp_path: Path, free: Free) -> None:
    free(10**9)
    config = SimpleNamespace(hidden_size=64, dtype="torch.bfloat16", tie_word_embeddings=False)
    files = SimpleNamespace(config=config, layers=30, limits=SimpleNamespace(vocab_size=500))
    options = CaptureOptions(model="m", prompts=tmp_path, out=tmp_path / "out", topk=4)
    asked = [request("a", 5, 5)]
    rows = 10 * (2 * 64 * 2 + 4) + 5 * 36
    assert _room(options, files, Kept(("2", "final")), asked).needed == rows + 2 * 500 * 64 * 2  # type: ignore[arg-type]
    bare = replace(options, weights=False, dtype="float32")
    assert _room(bare, files, Kept(("2", "final")), asked).needed == 10 * (2 * 64 * 4 + 4) + 5 * 36  # type: ignore[arg-type]


def test_a_server_is_told_how_far_the_disk_reaches(tmp_path: Path, free: Free) -> None:
    """9 taps and final of 100 values in 2 bytes, a token, and 2 choices: 2,024 bytes."""
    free(2_024_000)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 30, "hidden_size": 100}}))
    (note,) = room_notes(str(tmp_path), tmp_path / "rec", None, 2)
    assert note == (
        f"an output token takes about 2.02 kB in 16 bits, 2.02 MB are free in {tmp_path / 'rec'}: room for some 1,000 "
        "tokens"
    )
    for damage in ("{", "[]", '{"num_hidden_layers": "x"}'):
        (tmp_path / "config.json").write_text(damage)
        assert room_notes(str(tmp_path), tmp_path / "rec", None, 2) == []
    assert room_notes("org/name", tmp_path / "rec", None, 2) == []


@pytest.mark.parametrize(("count", "said"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (3.21e9, "3.21 GB")])
def test_bytes_are_spelled(count: float, said: str) -> None:
    assert spell_bytes(count) == said


def test_taps_that_are_needed_stay() -> None:
    assert fewer_taps(NINE, 30, ()) == ("2", "15", "27", "final")
    assert fewer_taps(("embed", "7", "final"), 30, ("7",)) == ("embed", "7", "final")


def test_a_warning_comes_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from replay.cli.capture import run_capture

    said: list[str] = []

    def capture(_: object, on_event: Callable[[Event], None]) -> None:
        on_event(Sized(Room(tmp_path, 2000, 1000)))
        on_event(Sized(Room(tmp_path, 1000, 2000)))

    monkeypatch.setattr("replay.cli.progress.Progress.note", lambda _, text: said.append(text))
    monkeypatch.setattr("replay.capture.local.record.capture_local", capture)
    run_capture(CaptureOptions(model="m", prompts=tmp_path, out=tmp_path))
    assert said[0].startswith("warning: up to 2 kB will be recorded, 1 kB are free")
    assert said[1].startswith("note: up to 1 kB will be recorded, 2 kB are free")
