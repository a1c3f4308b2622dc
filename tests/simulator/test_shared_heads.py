"""A large head whose bytes workers share: the same head to the last bit, and no copy of what is one product."""

import errno
import fcntl
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import LATENT, random_tensors, target_tables, tiny_config, write_head
from support.here import Here
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import parse_config
from replay.errors import CheckpointError
from replay.head.held import address_of
from replay.head.latent import LatentAttention
from replay.head.model import Head, TargetTables
from replay.simulator import workers
from replay.simulator.cache_keys import checkpoint_sha256
from replay.simulator.replayer import HeadSource, Job, Replayer
from replay.simulator.shared_heads import SharedHead, side_by_side
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds


def shared(head: Checkpoint, folder: Path, place: int = 0) -> SharedHead:
    source = HeadSource.of(head, None)
    assert isinstance(source, HeadSource)
    folder.mkdir(exist_ok=True)
    return SharedHead(source, replace(head, tensors={}), folder, place)


@pytest.fixture
def head(tmp_path: Path) -> Checkpoint:
    return replay.load_head(write_head(tmp_path / "h", HEAD))


def test_it_is_the_head_and_each_tensor_lies_in_a_line_of_memory_as_before(tmp_path: Path, head: Checkpoint) -> None:
    source = shared(head, tmp_path / "store")
    first, again = source.read("h"), source.read("h")
    assert first.config == head.config and first.path == head.path and first.notes == head.notes
    assert checkpoint_sha256(first) == checkpoint_sha256(again) == checkpoint_sha256(head)
    alone = [names[0] for names in side_by_side(head.tensors) if len(names) == 1]
    assert len(alone) > 3
    for name in alone:
        assert first.tensors[name].data_ptr() % 64 == head.tensors[name].data_ptr() % 64


@pytest.mark.parametrize("kind", [{}, LATENT | {"num_attention_heads": 4}], ids=["grouped", "latent"])
def test_a_head_runs_what_lies_in_the_file(tmp_path: Path, kind: dict[str, Any]) -> None:
    """What is one product as well: of all its weights it makes no copy."""
    alone = replay.load_head(write_head(tmp_path / "h", tiny_config(**kind)))
    found = shared(alone, tmp_path / "store").read("h")
    ours, copied = (Head(one, TargetTables(*target_tables(one))) for one in (found, alone))
    start, size = address_of(found.tensors["fc.weight"]), (tmp_path / "store" / "0.tensors").stat().st_size
    for joined, other in zip(stacks(ours), stacks(copied), strict=True):
        assert torch.equal(joined, other) and joined.stride() == other.stride() and joined.data_ptr() % 64 == 0
        assert start <= joined.data_ptr() < start + size
        assert address_of(other) not in {address_of(one) for one in alone.tensors.values()}
    assert {address_of(one) for one in ours._weights.values()} == {start}


def stacks(head: Head) -> list[torch.Tensor]:
    latent = head._attention.weights if isinstance(head._attention, LatentAttention) else None
    attention = [*head._attention.weights] if latent is None else [latent.down_OI]
    return [*attention, *head._parts.gate_up.values()]


def test_a_head_that_changed_is_refused(tmp_path: Path, head: Checkpoint) -> None:
    source = shared(head, tmp_path / "store")
    write_head(tmp_path / "h", HEAD, random_tensors(parse_config(HEAD), seed=1))
    with pytest.raises(CheckpointError, match="changed while it was replayed"):
        source.read("h")
    assert not list((tmp_path / "store").glob("*.json"))


def test_a_few_heads_lie_there_at_a_time(tmp_path: Path, head: Checkpoint) -> None:
    sources = [shared(head, tmp_path / "store", place) for place in range(6)]
    found = [source.read("h") for source in sources]
    assert len(list((tmp_path / "store").glob("*.tensors"))) == len(list((tmp_path / "store").glob("*.json"))) == 4
    assert {checkpoint_sha256(one) for one in (*found, sources[0].read("h"))} == {checkpoint_sha256(head)}


def test_what_a_killed_worker_left_is_written_again(tmp_path: Path, head: Checkpoint) -> None:
    (tmp_path / "store").mkdir()
    for ending in ("tensors", "part"):
        (tmp_path / "store" / f"0.{ending}").write_bytes(b"half")
    assert checkpoint_sha256(shared(head, tmp_path / "store").read("h")) == checkpoint_sha256(head)


def test_without_room_each_worker_reads_it(tmp_path: Path, head: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    found = shared(head, tmp_path / "store").read("h")
    assert checkpoint_sha256(found) == checkpoint_sha256(head) and os.listdir(tmp_path / "store") == ["0.lock"]


@pytest.mark.parametrize("failing", ["write", "map"])
def test_where_no_file_can_be_had_each_worker_reads_it(
    tmp_path: Path, head: Checkpoint, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota is seen when it is reached, whatever the disk has free."""

    def full(_: torch.Tensor) -> bytes:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    from_file, source = torch.UntypedStorage.from_file, shared(head, tmp_path / "store")

    def unmapped(path: str, **named: Any) -> Any:
        if path.startswith(str(source.folder)):
            raise RuntimeError("unable to mmap")
        return from_file(path, **named)

    if failing == "write":
        monkeypatch.setattr("replay.simulator.shared_heads.tensor_bytes", full)
    else:
        monkeypatch.setattr("torch.UntypedStorage.from_file", unmapped)
    assert checkpoint_sha256(source.read("h")) == checkpoint_sha256(head)
    assert not list((tmp_path / "store").glob("*part"))
    monkeypatch.undo()
    assert checkpoint_sha256(source.read("h")) == checkpoint_sha256(head)
    assert sorted(os.listdir(tmp_path / "store")) == ["0.json", "0.lock", "0.tensors"]


def test_a_head_that_is_read_just_now_is_not_removed(tmp_path: Path, head: Checkpoint) -> None:
    """Nor does anybody wait for its reader, who has the lock of this head alone."""
    sources = [shared(head, tmp_path / "store", place) for place in range(6)]
    for source in sources[:4]:
        source.read("h")
    with open(tmp_path / "store" / "0.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for source in sources[4:]:
            source.read("h")
    assert sorted(one.stem for one in (tmp_path / "store").glob("*.json")) == ["0", "2", "3", "4", "5"]


def test_workers_whose_parent_was_killed_remove_its_folder(tmp_path: Path, head: Checkpoint) -> None:
    ended = list[int]()
    shared(head, tmp_path / "store").read("h")
    for _ in range(2):
        workers._end_with(os.getppid() + 1, tmp_path / "store", end=ended.append)
    assert ended == [1, 1] and not (tmp_path / "store").exists()


def test_rounds_are_the_same_and_workers_of_a_machine_take_it(
    tmp_path: Path, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LEAST_BYTES", 0)
    trace = make_served(tmp_path / "trace", make_checkpoint())
    variants = replay.sweep(draft=["h"], wiring=[WIRING], steps=[STEPS], precision=["bf16", "fp32", "bf16+w8a8"])
    with workers.open_workers(2, trace, {"h": head}, "cpu") as two:
        assert isinstance(two._job.heads["h"], SharedHead)
        hands = Here(trace, {"h": head})
        hands.replayer = Replayer(Job(trace, two._job.heads, "cpu", 1))
        one, other = (replay.simulate(trace, {"h": head}, variants, workers=by) for by in (None, hands))
    assert one.drafts == other.drafts and file_of(one, tmp_path) == file_of(other, tmp_path)


def file_of(rounds: Rounds, folder: Path) -> bytes:
    """The file that is written of it, with the time that it took left out."""
    timeless = replace(rounds, variants=tuple(replace(one, seconds=0.0) for one in rounds.variants))
    write_rounds(timeless, folder / "rounds.parquet", force=True)
    return (folder / "rounds.parquet").read_bytes()
