"""Workers: what they do is what one process does, to the last bit, whoever ends in between."""

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from support.heads import random_tensors, write_head
from support.processes import living
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.cli.replaying import FoundNotes, run_simulation
from replay.diagnosis.diagnose import diagnose_server
from replay.errors import CheckpointError, OutputError, UsageError, WorkerError
from replay.faults.table import FAULTS, parse_faults
from replay.simulator.agreement import with_agreement
from replay.simulator.binding import resolve
from replay.simulator.cache_keys import checkpoint_sha256, rows_sha256
from replay.simulator.connection import check_address
from replay.simulator.product_settings import fp32_products
from replay.simulator.progress import ReplayProgress
from replay.simulator.replayer import HeadSource, Job, Replayer, StoredHead
from replay.simulator.tasks import Result, Task, plan_tasks
from replay.simulator.workers import (
    LocalWorkers,
    check_workers,
    devices_of,
    open_workers,
    take_turn,
    threads_of_each,
    use_workers,
)
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds

WRONG = replay.Wiring(("3", "5", "6"))
VARIANTS = [
    *replay.sweep(draft=["h"], wiring=[WIRING, WRONG], steps=[1, STEPS]),
    replay.Variant("h", WIRING, STEPS, 3, 8),
    replay.Variant("h", WIRING, 2, 2, 5, kv="path"),
    replay.Variant("h", WIRING, STEPS, kv="stale"),
    replay.Variant("h", WIRING, STEPS, precision="bf16+w8a8"),
    replay.Variant("h", WIRING, STEPS, faults=parse_faults("attn.scale=2")),
]


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three packs of this small trace, cut where tasks are planned."""
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 50)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_served(tmp_path_factory.mktemp("workers"), make_checkpoint())


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return replay.load_head(write_head(tmp_path_factory.mktemp("head") / "h", HEAD))


@pytest.fixture(scope="module")
def two(trace: Trace, head: Checkpoint) -> Iterator[LocalWorkers]:
    with open_workers(2, trace, {"h": head}, "cpu") as workers:
        yield workers


def processes() -> list[int]:
    """Those of workers."""
    return [one.pid for one in psutil.Process().children() if "resource_tracker" not in " ".join(one.cmdline())]


def file_of(rounds: Rounds, folder: Path) -> bytes:
    """The file that is written of it, with the time that it took left out."""
    timeless = replace(rounds, variants=tuple(replace(one, seconds=0.0) for one in rounds.variants))
    write_rounds(timeless, folder / "rounds.parquet", force=True)
    return (folder / "rounds.parquet").read_bytes()


def test_two_workers_write_the_file_of_one_process_also_where_one_is_killed(
    tmp_path: Path, trace: Trace, head: Checkpoint, two: LocalWorkers
) -> None:
    """Killed while it simulates; whole when it is held against the server."""
    heads, events, killed = {"h": head}, list[ReplayProgress](), list[int]()
    one = with_agreement(replay.simulate(trace, heads, VARIANTS), trace, heads, VARIANTS)
    assert any(info.agreement for info in one.variants)

    def kill(event: ReplayProgress) -> None:
        events.append(event)
        if not killed:
            killed.append(processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    both = replay.simulate(trace, heads, VARIANTS, workers=two, on_event=kill)
    assert killed and not living(killed)
    both = with_agreement(both, trace, heads, VARIANTS, workers=two)
    assert file_of(both, tmp_path) == file_of(one, tmp_path)
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert (events[-1].done, events[-1].part, events[-1].total) == (len(trace), 0, len(trace))


def test_a_part_at_the_servers_anchors_is_the_same(
    tmp_path: Path, trace: Trace, head: Checkpoint, two: LocalWorkers
) -> None:
    """Nobody is killed here."""
    before = processes()
    asked: dict[str, Any] = {"follow": trace.served_rounds(), "only": ["r1", "r2", "r5"], "served_products": False}
    one, both = (replay.simulate(trace, {"h": head}, VARIANTS[:4], workers=by, **asked) for by in (None, two))
    assert file_of(both, tmp_path) == file_of(one, tmp_path)
    assert not before or processes() == before


class Ending:
    """A pool all of whose workers end."""

    def submit(self, *_: object) -> "Future[Result]":
        future: Future[Result] = Future()
        future.set_exception(BrokenProcessPool("gone"))
        return future

    def shutdown(self, **_: object) -> None: ...


def test_workers_that_end_again_and_again_are_given_up(
    trace: Trace, head: Checkpoint, two: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalWorkers, "_open", lambda *_: Ending())
    with pytest.raises(WorkerError, match=r"ended 4 times .* fewer than --workers 2"):
        replay.simulate(trace, {"h": head}, VARIANTS, workers=two)


def test_a_head_that_changes_while_it_is_replayed_is_refused(tmp_path: Path) -> None:
    head = replay.load_head(write_head(tmp_path / "h", HEAD))
    source = HeadSource(str(head.path), checkpoint_sha256(head))
    assert source.read("h").config == head.config
    write_head(tmp_path / "h", HEAD, random_tensors(parse_config(HEAD), seed=1))
    with pytest.raises(CheckpointError, match="changed while it was replayed"):
        source.read("h")


Seen = tuple[object, ...]


class Counting:
    """Workers that are interrupted after some tasks; which were asked for, and which were done."""

    def __init__(self, workers: LocalWorkers, most: int = 1000) -> None:
        self.count, self.kernels, self.workers, self.most = workers.count, workers.kernels, workers, most
        self.asked, self.done = list[Seen](), list[Seen]()

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        told = [(task.variants, task.requests, task.scales, rows_sha256(task.rounds)) for task in tasks]
        self.asked += told
        for place, result in self.workers.replay(tasks):
            if self.most == 0:
                raise KeyboardInterrupt
            self.most -= 1
            yield place, result
            self.done.append(told[place])


def test_a_sweep_that_was_stopped_takes_what_workers_did_from_the_cache(
    tmp_path: Path, trace: Trace, head: Checkpoint, two: LocalWorkers,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Once while it simulates, and once while it is held against the server; and each time it is said."""
    few, heads = VARIANTS[:4], {"h": head}
    expected = file_of(with_agreement(replay.simulate(trace, heads, few), trace, heads, few), tmp_path)

    def sweep(by: Counting) -> Rounds:
        monkeypatch.setattr("replay.simulator.workers.use_workers", lambda *_: nullcontext(by))
        return run_simulation(trace, heads, few, "cpu", cache=tmp_path / "c", workers=2)

    first, last, again = Counting(two, 3), Counting(two), Counting(two)
    with pytest.raises(KeyboardInterrupt):
        sweep(first)
    tasks = len(first.asked)
    second = Counting(two, tasks - 3 + 2)
    with pytest.raises(KeyboardInterrupt):
        sweep(second)
    found = capsys.readouterr().err
    assert found.count("note: ") == 1 and f"note: 3 of {tasks} tasks were replayed before" in found
    assert file_of(sweep(last), tmp_path) == expected
    done = {*first.done, *second.done}
    assert len(done) == tasks + 2 and not done & {*last.asked} and {*first.asked, *second.asked} <= done | {*last.done}
    found = capsys.readouterr().err
    assert f"note: {tasks} of {tasks} tasks were replayed before" in found and "has none" not in found
    assert file_of(sweep(again), tmp_path) == expected
    assert not again.asked and "4 of 4 variants were" in capsys.readouterr().err


def test_a_cache_that_has_neither_variants_nor_tasks_says_so(tmp_path: Path) -> None:
    said = list[str]()
    for fill in (False, True):
        notes = FoundNotes(said.append, tmp_path / "c", 2, by_task=True)
        notes.of_variants(0)
        notes.of_tasks(0, 5)
        notes.of_tasks(0, 4)
        assert len(said) == int(fill)
        (tmp_path / "c" / "ab").mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / "ab" / "x.sha256").touch()
    assert "has none of these variants" in said[0]


def test_a_diagnosis_is_the_same_and_keeps_each_task(
    tmp_path: Path, trace: Trace, head: Checkpoint, two: LocalWorkers
) -> None:
    rest = set(FAULTS) - {"attn.scale", "weights.zeros"}

    def run(by: Any, cache: Path | None) -> Diagnosis:
        return diagnose_server(
            trace, head, replay.Variant("h", WIRING, STEPS), without=rest, workers=by, cache=cache
        )  # fmt: skip

    first, last = Counting(two, 2), Counting(two)
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path / "c")
    assert run(last, tmp_path / "c") == run(None, None)
    assert len(first.done) == 2 and not {*first.done} & {*last.asked}


def test_checksums_are_worked_out_once_for_all_workers_of_a_machine(
    trace: Trace, two: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has other files, which it looks at itself."""

    def look(path: Path, _: int) -> str:
        raise LookupError(path)

    here, there = (pickle.loads(pickle.dumps(one)) for one in (two._job.trace, two._job.trace.absolute()))
    monkeypatch.setattr("replay.traces.verify.sha256_of", look)
    assert here.verifies and len(here.read(0, WIRING.taps).tokens)
    with pytest.raises(LookupError):
        there.read(0, WIRING.taps)


def test_a_worker_holds_the_heads_of_its_last_tasks_alone(trace: Trace) -> None:
    class Held(Checkpoint):
        """One that can be referred to weakly."""

    plain = make_checkpoint()
    held, made = list[Any](), Held(**{item.name: getattr(plain, item.name) for item in fields(plain)})

    class Source:
        def read(self, name: str) -> Checkpoint:
            found = replace(made)
            held.append(weakref.ref(found))
            return found

    heads: Any = {name: Source() for name in "abcdef"}
    replayer = Replayer(Job(trace, heads, "cpu", 1))
    for name in "abcdef":
        planned = plan_tasks(trace, {name: made}, [resolve(replay.Variant(name, WIRING, 1), made, trace)], None, 1)
        replayer.replay(planned.tasks[0])
    gc.collect()
    assert len(held) == 6 and sum(one() is not None for one in held) <= 2


def test_a_worker_takes_products_of_fp32_as_the_process_that_asks_for_it(trace: Trace, head: Checkpoint) -> None:
    """Training scripts ask torch for less exact ones, which another process knows nothing of."""
    plain = fp32_products()
    torch.set_float32_matmul_precision("medium")
    try:
        with open_workers(1, trace, {"h": head}, "cpu") as one:
            found = replay.simulate(trace, {"h": head}, VARIANTS[:1], workers=one)
            assert one._open().submit(fp32_products).result() == ("bf16", "tf32")
        assert found.table.equals(replay.simulate(trace, {"h": head}, VARIANTS[:1]).table)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert fp32_products() == plain


@pytest.mark.parametrize("wanted", [0, -1, True, 1.5, "2", 100000])
def test_numbers_that_cannot_be_are_refused(trace: Trace, head: Checkpoint, wanted: Any) -> None:
    with pytest.raises(UsageError, match="workers"):
        replay.simulate(trace, {"h": head}, VARIANTS[:1], workers=wanted)


def test_what_is_no_number_of_workers_is_not_told_to_type_an_option() -> None:
    """The same sentences stand before those who type a command and those who write Python."""
    with pytest.raises(UsageError, match=r"^workers are True; give a number from 1"):
        check_workers(True)
    with pytest.raises(UsageError, match=r"^'nan' is not the address of a Ray cluster") as caught:
        check_address("nan")
    assert "--ray" not in str(caught.value)


@pytest.mark.parametrize("command", ["simulate", "diagnose"])
@pytest.mark.parametrize("wanted", ["0", "-1", "abc", "1.5", ""])
def test_the_command_line_refuses_them_too(trace: Trace, head: Checkpoint, command: str, wanted: str) -> None:
    result = CliRunner().invoke(cli, [command, str(trace.path), "--draft", str(head.path), "--workers", wanted])
    assert result.exit_code in (1, 2) and not result.stdout
    assert "--workers" in result.stderr or "workers were asked for" in result.stderr


def test_one_worker_is_this_process(trace: Trace, head: Checkpoint) -> None:
    for wanted in (None, 1):
        with use_workers(wanted, trace, {"h": head}, "cpu") as workers:
            assert workers is None
    assert threads_of_each(100000) == 1


def test_a_script_without_a_guard_is_run_once_and_a_head_in_memory_is_replayed(tmp_path: Path, trace: Trace) -> None:
    folder = write_head(tmp_path / "h", HEAD)
    script = tmp_path / "script.py"
    script.write_text(
        "import replay, dataclasses\n"
        "print('begun')\n"
        f"trace, head = replay.Trace.open({str(trace.path)!r}), replay.load_head({str(folder)!r})\n"
        "head = dataclasses.replace(head, path=None)\n"
        f"asked = replay.sweep(draft=['h'], steps=[1, 2], wiring=[replay.Wiring({WIRING.taps!r})])\n"
        "one, two = (replay.simulate(trace, {'h': head}, asked, workers=by).table for by in (None, 2))\n"
        "print(one.equals(two))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("begun\nTrue\n", "", 0)


def test_workers_hold_interrupts_from_their_first_moment_on() -> None:
    """In a new process, where those that tidy up behind workers do not run yet."""
    script = """
import signal
from loky import ProcessPoolExecutor
from replay.simulator.workers import start_workers

def held(_):
    (line,) = (line for line in open("/proc/self/status") if line.startswith("SigBlk"))
    return int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1

pool = ProcessPoolExecutor(2)
with start_workers():
    futures = [pool.submit(held, number) for number in range(4)]
print([future.result() for future in futures])
pool.shutdown(kill_workers=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[1, 1, 1, 1]\n", done.stderr


def test_ctrl_c_ends_all_without_a_traceback(tmp_path: Path, trace: Trace, head: Checkpoint) -> None:
    many = [option for steps in range(1, 65) for option in ("--steps", str(steps))]
    line = [sys.executable, "-Im", "replay", "simulate", str(trace.path), "--draft", str(head.path), "--workers", "2"]
    line += [*many, "--wiring", "2,4,5", "--wiring", "3,4,5", "-o", str(tmp_path / "o")]
    command = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(command.pid).children()) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # two workers, and who tidies up behind them
    os.killpg(command.pid, signal.SIGINT)
    stdout, stderr = command.communicate(timeout=60)
    assert stdout == "" and "interrupted" in stderr and "Traceback" not in stderr
    assert command.returncode == 130 and not (tmp_path / "o").exists()
    assert not living([child.pid for child in children])


def test_workers_take_gpus_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["H200", "H200"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(kinds))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: kinds[number])
    assert [take_turn(tmp_path) for _ in range(3)] == [0, 1, 2]
    assert devices_of("cuda") == ("cuda:0", "cuda:1")
    assert (devices_of("cuda:1"), devices_of("cpu")) == (("cuda:1",), ("cpu",))
    kinds.append("A100")
    with pytest.raises(
        UsageError, match=r"of several kinds \(H200, A100\), which round differently; type --device cud"
    ):
        devices_of("cuda")
    kinds.clear()
    assert devices_of("cuda") == ("cuda",)


def test_a_temporary_folder_that_cannot_be_made_is_said_in_a_sentence(
    tmp_path: Path, trace: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    said = r"^the temporary folder for several workers cannot be written \(.*Not a directory.*\); .* with TMPDIR, or"
    with pytest.raises(OutputError, match=said), open_workers(2, trace, {"h": head}, "cpu"):
        pass


def test_a_temporary_folder_that_is_full_is_said_in_a_sentence(tmp_path: Path, head: Checkpoint) -> None:
    """The kernel itself refuses to write more: a limit on the size of files stands for a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot be written \(.*File too large.*\); .* with TMPDIR, or"):
            StoredHead.store(head, tmp_path / "0.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_what_fails_beside_the_workers_is_not_said_of_their_folder(trace: Trace, head: Checkpoint) -> None:
    with pytest.raises(OSError, match=r"^mine$"), open_workers(2, trace, {"h": head}, "cpu"):
        raise OSError("mine")


def test_there_are_no_more_workers_than_tasks(trace: Trace, head: Checkpoint) -> None:
    """To start one takes seconds; a sweep with more tasks has more of them again."""
    with open_workers(50, trace, {"h": head}, "cpu") as many:
        few = replay.simulate(trace.take(Part(limit=1)), {"h": head}, VARIANTS[:1], workers=many)
        assert len(psutil.Process().children()) < 10 and few.table.height
        more = replay.simulate(trace, {"h": head}, VARIANTS[:2], workers=many)
    assert more.table.equals(replay.simulate(trace, {"h": head}, VARIANTS[:2]).table)


def test_workers_start_where_stderr_is_closed(tmp_path: Path, trace: Trace) -> None:
    folder = write_head(tmp_path / "h", HEAD, random_tensors(parse_config(HEAD)))
    line = f"'{sys.executable}' -Im replay simulate '{trace.path}' --draft '{folder}' --limit 1 --workers 2 2>&-"
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0 and "accept length" in done.stdout
