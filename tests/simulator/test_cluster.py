"""A Ray cluster of two nodes: its files are those of one process, also where a worker is killed in between."""

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.heads import random_tensors, write_head
from support.s3_server import KEYS, open_store, s3_server
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served
from support.trace_maker import make_four, make_header, make_weights, write_trace

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.errors import CheckpointError, UsageError, WorkerError
from replay.faults.table import parse_faults
from replay.simulator.agreement import with_agreement
from replay.simulator.cache_keys import kernels_of
from replay.simulator.cluster import ClusterWorkers, _check_kernels, _given_gpu, _UnderWay, open_cluster
from replay.simulator.cluster_nodes import (
    THREADS,
    Needed,
    Node,
    Nodes,
    check_alike,
    header_sha256,
    lacking,
    needed_for,
    options_of,
)
from replay.simulator.connection import AUTO, LOCAL, _knock, check_connected
from replay.simulator.product_settings import fp32_products
from replay.simulator.replayer import HeadSource, Job
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


NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server that nodes find, as they do where a cluster is set up for it."""
    with s3_server() as address, pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": address, "REPLAY_CACHE": cache}.items():
            patch.setenv(name, value)
        yield address


@pytest.fixture(scope="module")
def machines(endpoint: str) -> Iterator[Any]:
    """Ray's own: two nodes, one of them with GPUs as far as Ray is told. A lost one is noticed within seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True, head_node_args={**NODE, "_system_config": {"health_check_period_ms": 1000}}
        )
        cluster.add_node(**NODE, num_gpus=2)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def address(machines: Any) -> str:
    return str(machines.address)


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


def busy(node: Any = None) -> list[int]:
    """Processes of the cluster, or of one of its nodes, that do a task of ours."""
    every = psutil.process_iter() if node is None else psutil.Process(raylet_of(node)).children()
    found = []
    for one in every:
        with suppress(psutil.Error):
            if any("ray::_replay" in text for text in one.cmdline()):
                found.append(one.pid)
    return found


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@dataclass
class Killer:
    """Kills one process that does a task, once."""

    killed: list[int] = field(default_factory=list)

    def __call__(self, _: object) -> None:
        deadline = time.monotonic() + 5
        while not self.killed and time.monotonic() < deadline:
            for pid in busy()[:1]:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)


def test_two_nodes_write_the_file_of_one_process_also_where_a_worker_is_killed(
    tmp_path: Path, trace: Trace, head: Checkpoint, cluster: ClusterWorkers
) -> None:
    heads, kill = {"h": head}, Killer()
    assert cluster.count == 2
    one = with_agreement(replay.simulate(trace, heads, VARIANTS), trace, heads, VARIANTS)
    both = replay.simulate(trace, heads, VARIANTS, workers=cluster, on_event=kill)
    both = with_agreement(both, trace, heads, VARIANTS, workers=cluster)
    assert kill.killed
    assert file_of(both, tmp_path) == file_of(one, tmp_path)


def test_a_worker_is_killed_while_trace_and_head_come_from_s3(
    tmp_path: Path, trace: Trace, head: Checkpoint, address: str, cluster: ClusterWorkers, endpoint: str
) -> None:
    store, kill = open_store(endpoint), Killer()
    store.mkdir("runs")
    store.put(f"{trace.path}/", "runs/trace", recursive=True)
    store.put(f"{head.path}/", "runs/h", recursive=True)
    heads = {"h": replay.load_head("s3://runs/h")}
    with open_cluster(address, Trace.open("s3://runs/trace"), heads, "cpu") as workers:
        far = replay.simulate(Trace.open("s3://runs/trace"), heads, VARIANTS, workers=workers, on_event=kill)
    near = replay.simulate(trace, {"h": head}, VARIANTS)
    assert kill.killed and far.trace["path"] == "s3://runs/trace"
    moved = replace(far, trace={**far.trace, "path": str(trace.path)}, drafts=near.drafts)
    assert far.drafts["h"] == {**near.drafts["h"], "path": "s3://runs/h"}
    assert file_of(moved, tmp_path) == file_of(near, tmp_path)


def test_nodes_join_and_one_is_lost_while_tasks_run(
    tmp_path: Path, trace: Trace, head: Checkpoint, machines: Any, address: str, cluster: ClusterWorkers
) -> None:
    """One that is unlike is given no task; one that is like the others is, and loses it with itself."""
    notes, ran, lost, heads = list[str](), list[int](), list[Any](), {"h": head}
    with open_cluster(address, trace, heads, "cpu", notes.append) as workers:
        other = machines.add_node(**NODE, env_vars={"ONEDNN_MAX_CPU_ISA": "AVX2"})
        alike = machines.add_node(**NODE)
        wait_until(lambda: len(workers._nodes.meet()) == 3 and len(notes) == 1)
        assert "a node joined and is given no task: nodes " in notes[0]
        assert (
            f"({other.node_id[:8]}) of the Ray cluster round differently (none and ONEDNN_MAX_CPU_ISA=AVX2" in notes[0]
        )
        assert workers._nodes.slots() == 3

        with held(workers._ray, cluster._nodes.meet() - {alike.node_id}, tmp_path) as free:  # so that it does them all

            def lose(_: object) -> None:
                if not lost:
                    ran.extend(busy(other))
                    wait_until(lambda: bool(busy(alike)))
                    lost.append(machines.remove_node(alike, allow_graceful=False))
                    free.touch()

            many = replay.simulate(trace, heads, VARIANTS, workers=workers, on_event=lose)
        wait_until(lambda: len(workers._nodes.meet()) == 2)
        ran.extend(busy(other))
    machines.remove_node(other)
    assert lost and not ran
    assert notes[1].endswith(f"({alike.node_id[:8]}) of the Ray cluster was lost; what it had to do is done again")
    assert file_of(many, tmp_path) == file_of(replay.simulate(trace, heads, VARIANTS), tmp_path)


def test_tasks_whose_nodes_are_all_lost_go_to_others(
    tmp_path: Path, trace: Trace, head: Checkpoint, cluster: ClusterWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they are handed out for nodes that nobody knows: of one Ray says so, of two it would wait for ever."""
    real, one = Nodes.meet, replay.simulate(trace, {"h": head}, VARIANTS)
    for unknown in (1, 2):
        asked = list[frozenset[str]]()

        def meet(self: Nodes, asked: list[frozenset[str]] = asked, unknown: int = unknown) -> frozenset[str]:
            asked.append(real(self) if asked else frozenset(f"{name}" * 56 for name in range(unknown)))
            return asked[-1]

        monkeypatch.setattr(Nodes, "meet", meet)
        both = replay.simulate(trace, {"h": head}, VARIANTS, workers=cluster)
        assert file_of(both, tmp_path) == file_of(one, tmp_path)
    monkeypatch.setattr(Nodes, "meet", lambda _: frozenset({"0" * 56}))
    with pytest.raises(WorkerError, match=r"the Ray cluster lost a task 4 times \(TaskUnschedulableError\); look at"):
        replay.simulate(trace, {"h": head}, VARIANTS, workers=cluster)


def test_a_task_on_a_gpu_has_one_for_itself(
    trace: Trace, head: Checkpoint, address: str, cluster: ClusterWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is told of GPUs that this machine has not: what is looked at is what a task is given."""
    ray, given = cluster._ray, _given_gpu

    def look(seconds: float) -> tuple[str, object]:
        time.sleep(seconds)
        return given([str(one) for one in ray.get_gpu_ids()]), os.environ.get("CUDA_VISIBLE_DEVICES")

    remote = ray.remote(look).options(**{**options_of("cuda"), "num_cpus": 0})  # the node has one core
    assert sorted(ray.get([remote.remote(2.0), remote.remote(2.0)])) == [("cuda:0", None), ("cuda:1", None)]
    with pytest.raises(WorkerError, match=r"node .* has no device cuda for torch; install one for its GPUs there, or"):
        with open_cluster(address, trace, {"h": head}, "cuda"):
            pass
    like = Node("", "replay", ())
    monkeypatch.setattr(Nodes, "_look_first", lambda self, nodes: (self._alike.add(nodes[0]["NodeID"]), like))
    with open_cluster(address, trace, {"h": head}, "cuda") as workers:
        assert workers.count == 2  # GPUs, not cores
    monkeypatch.setattr(Nodes, "_living", lambda _: [])
    with pytest.raises(WorkerError, match="no living node of the Ray cluster has a GPU for tasks; add a node with"):
        with open_cluster(address, trace, {"h": head}, "cuda"):
            pass
    with pytest.raises(UsageError, match=r"a GPU of its own, and cuda:1 names one; type --device cuda$"):
        with open_cluster(address, trace, {"h": head}, "cuda:1"):
            pass


def test_the_gpu_of_a_task_is_found_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _given_gpu(["3"]) == "cuda:3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert _given_gpu(["3"]) == "cuda:1"
    with pytest.raises(WorkerError, match=r"round differently \(H200 and A100\), so that rounds would depend"):
        _check_kernels(("2.13", "H200"), ("2.13", "A100"))


def test_what_nodes_run_is_sent_to_them_once() -> None:
    """Ray sends each remote function that is made to all nodes; where a task may go is an option of a call."""

    class Fake:
        made, wheres = list[Any](), list[Any]()

        def remote(self, function: Any, *_: Any) -> Any:
            if callable(function):
                self.made.append(function)
                return self
            return len(self.wheres)

        def options(self, **named: Any) -> Any:
            self.wheres.append(named["label_selector"])
            return self

        def hex(self) -> str:
            return ""

    ray, tasks = Fake(), list[Any]([None] * 3)
    under_way = _UnderWay(ray, ray, (), "cpu", tasks)
    for number, node in enumerate("abc", start=1):
        under_way.hand_out(frozenset({node}), number)
    assert len(ray.made) == 1 and ray.wheres == [{"ray.io/node-id": f"in({node})"} for node in "abc"]


@contextmanager
def held(ray: Any, nodes: Iterable[str], folder: Path) -> Iterator[Path]:
    """Another program has the core of each of these nodes, until the file that this gives is there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    free = folder / "free"

    def hold(node: str) -> None:
        (folder / node).touch()
        deadline = time.monotonic() + 300
        while not free.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    pinned = [(node, NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    every = [ray.remote(hold).options(num_cpus=1, scheduling_strategy=where).remote(node) for node, where in pinned]
    wait_until(lambda: all((folder / node).exists() for node, _ in pinned))
    yield free
    free.touch()
    ray.get(every)


@pytest.fixture
def taken(tmp_path: Path, cluster: ClusterWorkers) -> Iterator[None]:
    """Another program has all cores."""
    ray = cluster._ray
    with held(ray, cluster._nodes.meet(), tmp_path):
        wait_until(lambda: ray.available_resources().get("CPU", 0) == 0)
        yield
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cluster.count)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
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
        patch.setattr("replay.simulator.cluster_nodes._LOOK", 0.0)
        with pytest.raises(WorkerError, match=r"nothing was heard of node \S+ \(\w{8}\), \S+ \(\w{8}\) of the Ray"):
            with open_cluster(address, trace, {"h": head}, "cpu"):
                pass
    monkeypatch.setattr("replay.simulator.cluster._ALONE", 0.0)
    monkeypatch.setattr(Nodes, "_living", lambda _: [])
    with pytest.raises(
        WorkerError, match=r"no living node .* has a core any more, with 3 tasks left to do; add a node"
    ):
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
    needed = Needed(trace.path, header_sha256(trace.path), {str(head.path): ""}, "cpu")
    assert lacking(needed) == ""
    (tmp_path / "trace.json").write_text("{}")
    for changes, said in (
        ({"trace": tmp_path / "none"}, "has no trace at "),
        ({"trace": tmp_path}, "has another trace at "),
        ({"heads": {"/none": ""}}, "has no draft head at /none"),
        ({"target": tmp_path / "none"}, "has no target at "),
        ({"device": "cuda:77"}, "has no device cuda:77"),
    ):
        assert lacking(replace(needed, **changes)).startswith(said)  # type: ignore[arg-type]


def job_of(trace: Trace, head: Checkpoint) -> Job:
    return Job(trace, {"h": HeadSource.of(head, None)}, "cpu", THREADS)


@pytest.mark.parametrize("binary", [False, True])
def test_another_head_at_the_same_path_is_named_before_anything_is_replayed(
    tmp_path: Path, trace: Trace, binary: bool
) -> None:
    """However little it differs: in one value at the middle of one tensor, or in its config."""
    folder, tensors = tmp_path / "h", random_tensors(parse_config(HEAD))

    def write(config: dict[str, Any] = HEAD, /, **changed: torch.Tensor) -> Path:
        write_head(folder, config, tensors | changed)
        if binary:
            torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        return folder

    needed = needed_for(job_of(trace, replay.load_head(write())))
    other = f"has another draft head at {folder}; copy this one there"
    assert lacking(needed) == ""
    for name in ("fc.weight", "norm.weight"):
        changed = tensors[name].clone()
        changed.view(-1)[changed.numel() // 2] += 1
        write(**{name: changed})
        assert lacking(needed) == other
    write(HEAD | {"rms_norm_eps": 0.5})
    assert lacking(needed) == other
    write(HEAD | {"transformers_version": "1"})  # which means nothing to a head
    assert lacking(needed) == ""
    for part in folder.glob("*model*"):
        part.unlink()
    assert lacking(needed) == f"has no whole draft head at {folder}; copy this one there"
    assert needed_for(job_of(trace, replay.load_head(write()))) == needed


def write_target(folder: Path, seed: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"model.embed_tokens.weight": make_weights(seed=seed)}, folder / "model.safetensors")


@pytest.mark.parametrize("named", [False, True])
def test_a_target_beside_the_trace_is_the_one_that_is_here(tmp_path: Path, head: Checkpoint, named: bool) -> None:
    target = tmp_path / "target"
    header = make_header(target_path="/nowhere" if named else str(target))
    path = write_trace(tmp_path / "bare", [make_four()], header=header, weights=False)
    job = job_of(Trace.open(path, target=target if named else None), head)
    assert lacking(needed_for(job)).startswith(f"has no target at {target}; ")
    write_target(target, seed=0)
    needed = needed_for(job)
    assert (needed.target, lacking(needed)) == (target, "")
    write_target(target, seed=1)
    other = f"has another target at {target}; put it on a disk that all nodes have at the same path"
    assert lacking(needed) == other
    (target / "model.safetensors").unlink()
    assert lacking(needed) == other
    target.rename(tmp_path / "moved")
    assert lacking(needed).startswith(f"has no target at {target}; ")


def test_a_target_whose_weights_the_trace_holds_is_not_asked_for(tmp_path: Path, head: Checkpoint) -> None:
    write_target(tmp_path / "target", seed=0)
    header = make_header(target_path=str(tmp_path / "target"))
    path = write_trace(tmp_path / "t", [make_four()], header=header)
    assert needed_for(job_of(Trace.open(path), head)).target is None
    named = job_of(Trace.open(path, target=tmp_path / "target"), head)
    assert needed_for(named).target is None  # the trace's own go before it


def test_nodes_take_products_of_fp32_as_this_process(
    tmp_path: Path, trace: Trace, head: Checkpoint, address: str, cluster: ClusterWorkers
) -> None:
    """They are alike however exact theirs were before, and tasks have this one's."""

    @dataclass(frozen=True)
    class Seen(HeadSource):
        def read(self, name: str) -> Checkpoint:
            (tmp_path / str(os.getpid())).write_text(" ".join(fp32_products()))
            return super().read(name)

    plain = kernels_of("cpu", THREADS)
    torch.set_float32_matmul_precision("medium")
    try:
        with open_cluster(address, trace, {"h": head}, "cpu") as workers:
            source = workers._job.heads["h"]
            workers._job = replace(workers._job, heads={"h": Seen(source.path, source.sha256)})
            found = replay.simulate(trace, {"h": head}, VARIANTS[:1], workers=workers)
            assert workers.kernels == kernels_of("cpu", THREADS) != plain == cluster.kernels
        assert found.table.equals(replay.simulate(trace, {"h": head}, VARIANTS[:1]).table)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {one.read_text() for one in tmp_path.iterdir()} == {"bf16 tf32"}


def test_nodes_that_differ_are_refused_by_name() -> None:
    good = Node("", "replay", ("2.13", "AVX512"))
    assert check_alike({"a": good, "b": good}, "replay") == good
    for node, said in (
        (replace(good, lacks="has no trace at /t; put it"), "node b of the Ray cluster has no trace at /t; put it"),
        (replace(good, program="other"), "node b of the Ray cluster has another replay"),
        (replace(good, target="other"), "node b of the Ray cluster has another target than node a; put it"),
        (replace(good, kernels=("2.13", "AVX2")), r"nodes a and b .* round differently \(AVX512 and AVX2\), so"),
        (
            replace(good, kernels=("2.13", "AVX512 amx_bf16 amx_tile")),
            r"round differently \(none and amx_bf16 amx_tile\)",
        ),
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
    nobody = f"127.0.0.1:{free_port()}"
    assert "nothing answers at 127.0.0.1:" in typed(trace, head, "--ray", nobody)
    assert "nothing answers at 127.0.0.1:" in typed(trace, head, "--ray", nobody, "--device", "cuda")  # of its nodes

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


def test_another_program_at_the_address_is_named() -> None:
    """Ray itself would ask it again and again."""

    class Page(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(WorkerError, match=r"what answers at 127.0.0.1:\d+ is no Ray cluster; name the address"):
            _knock("127.0.0.1", server.server_port)  # a program that is connected already asks nobody
        server.shutdown()
