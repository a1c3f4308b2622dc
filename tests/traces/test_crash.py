"""Whatever ends a writer (kill -9 at any moment, Ctrl-C, a full disk), every finished request is kept, none twice."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.trace_maker import make_alike, make_header, make_request, make_weights, write_trace

from replay.errors import OutputError, TraceIncompleteError
from replay.traces import files
from replay.traces.check import check_trace
from replay.traces.reader import Trace
from replay.traces.writer import TraceWriter

REQUESTS = 4

# A nursery forks one writer per line of its input, so that torch is imported once. "step N" makes the writer kill
# itself with SIGKILL before its Nth open, rename or removal in the trace folder; "time S" kills it after S seconds.
# A writer logs the id of every request whose add() has returned. The nursery answers with the exit status.
NURSERY = """
import os, signal, sys, time
sys.path.append(sys.argv[1])
from pathlib import Path
import polars, torch  # imported, but no pool of threads started, so that forking is safe
from support.trace_maker import make_header, make_alike, make_weights
from replay.traces.writer import TraceWriter

def write(folder, log):
    requests = make_alike(4)
    with TraceWriter.resume(folder, make_header()) as writer:
        writer.write_target_weights(make_weights(), None)
        for start in range(0, 4, 2):
            batch = [request for request in requests[start : start + 2] if request.request_id not in writer.done_ids]
            writer.add(batch)
            os.write(log, "".join(f"{request.request_id} " for request in batch).encode())
        writer.finish()

def suicide(folder, step):
    count = 0
    def watch(event, arguments):
        nonlocal count
        if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(str(folder)):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

for line in sys.stdin:
    folder, log, way, value = line.split()
    child = os.fork()
    if child == 0:
        if way == "step":
            suicide(Path(folder), int(value))
        write(Path(folder), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        os._exit(0)
    if way == "time":
        time.sleep(float(value))
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self.child = child

    def run(self, folder: Path, log: Path, way: str, value: float) -> int:
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(f"{folder} {log} {way} {value}\n")
        self.child.stdin.flush()
        return int(self.child.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    command = [sys.executable, "-I", "-c", NURSERY, str(Path(__file__).parents[1])]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        yield Nursery(child)
        assert child.stdin
        child.stdin.close()


def check_whole(folder: Path, expected: set[str], *, allow_incomplete: bool) -> None:
    """The trace holds at least ``expected``, each request once and bit for bit as it was made."""
    if not (folder / files.HEADER).exists():
        assert not expected
        return
    trace = Trace.open(folder, allow_incomplete=allow_incomplete)
    made = {request.request_id: request for request in make_alike(REQUESTS)}
    ids = [record.request_id for record in trace.records]
    assert len(ids) == len(set(ids)) and set(ids) >= expected
    for index, name in enumerate(ids):
        rows = trace.read(index, ["2", "final"])
        assert rows.tokens.tolist() == [*made[name].prompt_ids, *made[name].output_ids]
        assert all(torch.equal(rows.taps[tap], made[name].taps[tap]) for tap in ("2", "final"))
        assert torch.equal(trace.logits(index)[1], made[name].topk_logprobs)
    shared = {"r2", "r3"} & {*ids[ids.index("r0") + 1 :]} if "r0" in ids else set()
    assert {record.request_id for record in trace.records if record.shared == 70} == shared
    if not allow_incomplete:
        assert [finding for finding in check_trace(trace) if finding.severity == "error"] == []


def resume(folder: Path) -> None:
    with TraceWriter.resume(folder, make_header()) as writer:
        writer.write_target_weights(make_weights(), None)
        writer.add([request for request in make_alike(REQUESTS) if request.request_id not in writer.done_ids])
        writer.finish()


def finished(log: Path) -> set[str]:
    return set(log.read_text().split()) if log.exists() else set()


def test_killed_before_every_step(tmp_path: Path, nursery: Nursery) -> None:
    """Every opening, renaming and removal of a whole recording, finish() included, is once the last thing attempted."""
    killed = 0
    for step in range(1, 200):
        folder, log = tmp_path / str(step), tmp_path / f"{step}.log"
        status = nursery.run(folder, log, "step", step)
        if status == 0:
            break
        assert status == -9
        killed += 1
        check_whole(folder, finished(log), allow_incomplete=True)
        resume(folder)
        check_whole(folder, {f"r{number}" for number in range(REQUESTS)}, allow_incomplete=False)
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert status == 0
    assert killed > 20


def test_killed_at_many_moments(tmp_path: Path, nursery: Nursery) -> None:
    """One recording, killed again and again after a while that grows until it is through."""
    folder, log = tmp_path / "t", tmp_path / "log"
    for number in range(200):
        status = nursery.run(folder, log, "time", 0.004 * (number + 1))
        check_whole(folder, finished(log), allow_incomplete=True)
        if status == 0:
            break
        assert status == -9
    assert status == 0
    check_whole(folder, {f"r{number}" for number in range(REQUESTS)}, allow_incomplete=False)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_kernel_refuses_in_the_middle_of_a_file(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add([make_request("small", 1)])
        with file_size_limit(4096):
            with pytest.raises(OutputError, match=r"File too large; the 1 finished requests are kept: .* --resume"):
                writer.add([make_request("large", 2, prompt=500)])
        assert sorted(os.listdir(tmp_path / "t")) == [".lock", "shard-00000.safetensors", "trace.json"]
        writer.add([make_request("large", 2, prompt=500)])  # room was made
        writer.finish()
    assert Trace.open(tmp_path / "t").requests["request_id"].to_list() == ["small", "large"]


def failing_after(calls: int, error: BaseException) -> object:
    """A stand-in for os.fsync whose last call raises; a full disk often shows only there."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise error
        real(descriptor)

    return fsync


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "t"
    with TraceWriter.create(folder, make_header()) as writer:
        writer.add(make_alike(2))
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", failing_after(0, OSError(number, os.strerror(number))))
            with pytest.raises(OutputError) as caught:
                writer.add([make_request("x", 7)])
        message = f"{os.strerror(number)}; the 2 finished requests are kept: mend this and type --resume"
        assert str(caught.value) == f"cannot write to {folder}: {message}"
        assert sorted(os.listdir(folder)) == [".lock", "shard-00000.safetensors", "trace.json"]


@pytest.mark.parametrize("calls", range(4))
def test_a_full_disk_while_finishing(tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_trace(tmp_path / "t", [make_alike(3)], finish=False)
    with TraceWriter.resume(folder, make_header()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", failing_after(calls, OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(OutputError, match=r"No space left on device; the 3 finished requests are kept"):
                writer.finish()
    if calls < 3:  # the header is there with the third of four syncs
        with pytest.raises(TraceIncompleteError):
            Trace.open(folder)
    with TraceWriter.resume(folder, make_header()) as writer:
        writer.finish()
    check_whole(folder, {"r0", "r1", "r2"}, allow_incomplete=False)


@pytest.mark.parametrize("calls", range(2))
def test_ctrl_c(tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the rename the batch is not there, after it (calls = 1) it is; both ways the writer can go on."""
    folder = tmp_path / "t"
    with TraceWriter.create(folder, make_header()) as writer:
        writer.write_target_weights(make_weights(), None)
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", failing_after(calls, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                writer.add(make_alike(2))
        shards = [name for name in os.listdir(folder) if "shard" in name]
        assert shards == ["shard-00000.safetensors"] * calls
        if calls:
            writer.add(make_alike(4)[2:])
            writer.finish()
        else:
            writer.add(make_alike(4))
            writer.finish()
    check_whole(folder, {"r0", "r1", "r2", "r3"}, allow_incomplete=False)


def test_a_place_that_cannot_be_written() -> None:
    with pytest.raises(OutputError, match=r"cannot write to /proc/replay-trace: "):
        TraceWriter.create(Path("/proc/replay-trace"), make_header())
