"""A large head whose bytes workers share: the same head to the last bit, and no copy of what is one product."""

import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.heads import random_tensors, write_head
from support.here import Here
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import parse_config
from replay.errors import CheckpointError
from replay.head.parts import stack
from replay.simulator import workers
from replay.simulator.cache_keys import checkpoint_sha256
from replay.simulator.replayer import HeadSource, Job, Replayer
from replay.simulator.shared_heads import SharedHead, side_by_side


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


def test_what_is_one_product_is_not_copied(tmp_path: Path, head: Checkpoint) -> None:
    found = shared(head, tmp_path / "store").read("h")
    for prefix, parts in (("layers.0.self_attn.", "q_k_v"), ("layers.0.mlp.", "gate_up")):
        joined, copied = stack(found.tensors, prefix, parts), stack(head.tensors, prefix, parts)
        assert torch.equal(joined, copied) and joined.shape == copied.shape and joined.stride() == copied.stride()
        first = f"{prefix}{parts.split('_')[0]}_proj.weight"
        assert joined.data_ptr() == found.tensors[first].data_ptr() and joined.data_ptr() % 64 == 0
        assert copied.data_ptr() != head.tensors[first].data_ptr()


def test_tensors_that_do_not_follow_each_other_are_copied() -> None:
    whole = torch.arange(48.0).reshape(12, 4)
    q, k, v = (whole[start : start + 4] for start in (0, 4, 8))
    assert whole.data_ptr() % 64 == 0

    def joined(*tensors: torch.Tensor) -> torch.Tensor:
        return stack({f"{name}_proj.weight": one for name, one in zip("qkv", tensors, strict=True)}, "", "q_k_v")

    assert joined(q, k, v).data_ptr() == whole.data_ptr()
    leaf = whole.clone().requires_grad_()
    for apart in ((q, v, k), (q, k, v.clone()), (k, v, q), (q[:3], k, v), (leaf[:4], leaf[4:8], leaf[8:])):
        assert joined(*apart).data_ptr() not in {one.data_ptr() for one in apart}
        assert torch.equal(joined(*apart), torch.cat(apart))


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
    assert checkpoint_sha256(found) == checkpoint_sha256(head) and os.listdir(tmp_path / "store") == ["lock"]


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
    assert one.table.equals(other.table)
