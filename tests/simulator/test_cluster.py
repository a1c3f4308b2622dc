"""A Ray cluster of two nodes: its files are those of one process, also where a worker is killed in between."""

import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from support.heads import write_head
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.cli.app import cli
from replay.errors import CheckpointError, UsageError, WorkerError
from replay.faults.table import parse_faults
from replay.simulator.agreement import with_agreement
from replay.simulator.cluster import ClusterWorkers, Needed, Node, _header_sha256, check_alike, lacking, open_cluster
from replay.simulator.connection import AUTO, LOCAL, check_connected
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds

VARIANTS = [
    *replay.sweep(draft=["h"], wiring=[WIRING, replay.Wiring(("3", "5", "6"))], steps=[1, STEPS]),
    replay.Variant("h", WIRING, STEPS, 3, 8),
    replay.Variant("h", WIRING, STEPS, kv="stale"),
    replay.Variant("h", WIRING, STEPS, faults=parse_faults("attn.scale=2")),
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_served(tmp_path_factory.mktemp("cluster"), make_checkpoint())


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return replay.load_head(write_head(tmp_path_factory.mktemp("head") / "h", HEAD))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(address: str, trace: Trace, head: Checkpoint) -> Iterator[ClusterWorkers]:
    with open_cluster(address, trace, {"h": head}, "cpu") as workers:
        yield workers


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 50)


def file_of(rounds: Rounds, folder: Path) -> bytes:
    """The file that is written of it, with the time that it took left out."""
    timeless = replace(rounds, variants=tuple(replace(one, seconds=0.0) for one in rounds.variants))
    write_rounds(timeless, folder / "rounds.parquet", force=True)
    return (folder / "rounds.parquet").read_bytes()


def busy() -> list[int]:
    """Processes of the cluster that do a task of ours."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        if any("ray::_replay" in text for text in one.info["cmdline"] or ()):
            found.append(one.pid)
    return found


def test_two_nodes_write_the_file_of_one_process_also_where_a_worker_is_killed(
    tmp_path: Path, trace: Trace, head: Checkpoint, cluster: ClusterWorkers
) -> None:
    heads, killed = {"h": head}, list[int]()

    def kill(_: object) -> None:
        deadline = time.monotonic() + 5
        while not killed and time.monotonic() < deadline:
            for pid in busy()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    assert cluster.count == 2
    one = with_agreement(replay.simulate(trace, heads, VARIANTS), trace, heads, VARIANTS)
    both = replay.simulate(trace, heads, VARIANTS, workers=cluster, on_event=kill)
    both = with_agreement(both, trace, heads, VARIANTS, workers=cluster)
    assert killed
    assert file_of(both, tmp_path) == file_of(one, tmp_path)


@pytest.fixture
def taken(tmp_path: Path, cluster: ClusterWorkers) -> Iterator[None]:
    """Another program has all cores."""
    ray, free = cluster._ray, tmp_path / "free"

    def hold() -> None:
        deadline = time.monotonic() + 120
        while not free.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    held = [ray.remote(hold).options(num_cpus=1, scheduling_strategy="SPREAD").remote() for _ in range(cluster.count)]
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 0)
    yield
    free.touch()
    ray.get(held)
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cluster.count)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("taken")
def test_nodes_are_looked_at_also_where_others_have_all_cores_and_nobody_is_waited_for_in_vain(
    trace: Trace, head: Checkpoint, address: str, cluster: ClusterWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cluster(address, trace, {"h": head}, "cpu") as other:
        assert other.kernels == cluster.kernels
        assert not other._ray.available_resources().get("CPU", 0)
    with monkeypatch.context() as patch:
        patch.setattr("replay.simulator.cluster._LOOK", 0.0)
        with pytest.raises(WorkerError, match=r"nothing was heard of node \S+ \(\w{8}\), \S+ \(\w{8}\) of the Ray"):
            with open_cluster(address, trace, {"h": head}, "cpu"):
                pass
    monkeypatch.setattr("replay.simulator.cluster._ALONE", 0.0)
    monkeypatch.setattr(ClusterWorkers, "_nodes", lambda _: [])
    with pytest.raises(WorkerError, match=r"no living node .* with 3 tasks left to do; add a node"):
        replay.simulate(trace, {"h": head}, VARIANTS[:1], workers=cluster)
    with pytest.raises(WorkerError, match="no living node of the Ray cluster has a core for tasks"):
        with open_cluster(address, trace, {"h": head}, "cpu"):
            pass


def test_an_address_of_another_cluster_is_refused(trace: Trace, head: Checkpoint, cluster: ClusterWorkers) -> None:
    for other in ("127.0.0.1:1", "local"):
        with pytest.raises(UsageError, match=f"workers of {other} were asked for, and this program is connected to"):
            replay.simulate(trace, {"h": head}, VARIANTS[:1], workers=other)


def test_addresses_of_one_cluster_are_told() -> None:
    for one in ("127.0.0.1:6379", "localhost:6379", "127.0.0.2:6379", AUTO):
        check_connected(one, "127.0.0.1:6379")
    for one in ("127.0.0.1:6380", "192.0.2.1:6379", "no.such.host.invalid:6379", LOCAL):
        with pytest.raises(UsageError):
            check_connected(one, "127.0.0.1:6379")


def test_a_head_in_memory_goes_along(trace: Trace, head: Checkpoint, address: str, cluster: ClusterWorkers) -> None:
    """A program that is connected already stays connected."""
    heads = {"h": replace(head, path=None)}
    one, both = (replay.simulate(trace, heads, VARIANTS[:1], workers=by) for by in (None, address))
    assert both.table.equals(one.table)
    with pytest.raises(CheckpointError, match="changed while it was replayed"):
        with open_cluster(address, trace, {"h": head}, "cpu") as workers:
            job = workers._job
            workers._job = replace(job, heads={"h": replace(job.heads["h"], sha256="other")})
            replay.simulate(trace, {"h": head}, VARIANTS[:1], workers=workers)


def test_what_a_node_lacks_is_named(tmp_path: Path, trace: Trace, head: Checkpoint) -> None:
    needed = Needed(trace.path, _header_sha256(trace.path), (str(head.path),), "cpu")
    assert lacking(needed) == ""
    (tmp_path / "trace.json").write_text("{}")
    for changes, said in (
        ({"trace": tmp_path / "none"}, "has no trace at "),
        ({"trace": tmp_path}, "has another trace at "),
        ({"heads": ("/none",)}, "has no draft head at /none"),
        ({"device": "cuda:77"}, "has no device cuda:77"),
    ):
        assert lacking(replace(needed, **changes)).startswith(said)  # type: ignore[arg-type]


def test_nodes_that_differ_are_refused_by_name() -> None:
    good = Node("", "replay", ("2.13", "AVX512"))
    assert check_alike({"a": good, "b": good}, "replay") == good.kernels
    for node, said in (
        (replace(good, lacks="has no trace at /t"), "node b of the Ray cluster has no trace at /t; put it"),
        (replace(good, program="other"), "node b of the Ray cluster has another replay"),
        (replace(good, kernels=("2.13", "AVX2")), r"nodes a and b .* round differently \(AVX512 and AVX2\)"),
    ):
        with pytest.raises(WorkerError, match=said):
            check_alike({"a": good, "b": node}, "replay")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def typed(trace: Trace, head: Checkpoint, *options: str) -> str:
    result = CliRunner().invoke(cli, ["simulate", str(trace.path), "--draft", str(head.path), *options])
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("wanted", ["", "2", "here", "ray://a:1", "a:0", "a:99999", "a b:1", "auto\n"])
def test_addresses_that_cannot_be_are_refused(trace: Trace, head: Checkpoint, wanted: str) -> None:
    assert "is not the address of a Ray cluster" in typed(trace, head, "--ray", wanted)


def test_a_cluster_that_does_not_answer_is_said_at_once(
    trace: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert "nothing answers at 127.0.0.1:" in typed(trace, head, "--ray", f"127.0.0.1:{free_port()}")

    def init(**_: object) -> None:
        raise ConnectionError("Could not find any; try setting `--address`.\nMore.")

    monkeypatch.setattr("ray.init", init)
    said = typed(trace, head, "--ray", "auto")
    assert "no Ray cluster can be reached at auto (ConnectionError); start one by ray start" in said
    assert "--address" not in said  # an option of ray's, which replay has not
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'eagle-replay[ray]'" in typed(trace, head, "--ray", "auto")


def test_workers_and_a_cluster_exclude_each_other(trace: Trace, head: Checkpoint) -> None:
    assert "type one of them" in typed(trace, head, "--ray", "auto", "--workers", "2")
