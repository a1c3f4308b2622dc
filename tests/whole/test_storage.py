"""Traces and heads in object storage, read from a real S3 server (moto's) and a web server as from a folder."""

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner, Result
from support.heads import random_tensors, write_head
from support.range_server import range_server
from support.s3_server import KEYS, open_store, s3_server
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.errors import OutputError, ReplayError, StorageError, UsageError
from replay.traces import cache_locks, object_store, sectors
from replay.traces.addresses import remote_folder
from replay.traces.parts import Part
from replay.traces.ranges import sha256_of
from replay.traces.reader import Trace
from replay.traces.remote import RemotePath, as_source, local_file
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import METADATA_KEY, read_rounds, write_rounds

SHARD = "shard-00000.safetensors"
FETCHES = """
import sys
from replay.traces.remote import as_source, local_file
print("ready", flush=True)
sys.stdin.readline()
local_file(as_source(sys.argv[1]) / "model.safetensors")
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace and a head, as folders of this machine."""
    folder = tmp_path_factory.mktemp("local")
    made = make_served(folder, make_checkpoint())
    made.path.rename(folder / "trace")
    return write_head(folder / "head", HEAD, random_tensors(parse_config(HEAD))).parent


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str) -> Iterator[None]:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "REPLAY_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    object_store.forget_systems()
    yield
    object_store.forget_systems()


@pytest.fixture(scope="module")
def store(endpoint: str) -> Any:
    return open_store(endpoint)


@pytest.fixture
def there(store: Any, local: Path, tmp_path: Path) -> str:
    """The address under which trace and head lie, of this test alone."""
    bucket = re.sub("[^a-z0-9]", "-", tmp_path.name.lower()).strip("-")[:50]
    store.mkdir(bucket)
    store.put(f"{local}/", f"{bucket}/runs", recursive=True)
    return f"s3://{bucket}/runs"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """File and bytes of every range that is asked for; sectors are so small that the files here have many."""
    found = []
    real = sectors.read_range

    def counted(entry: object_store.Entry, start: int, stop: int) -> bytes:
        found.append((entry.address.rpartition("/")[2], stop - start))
        return real(entry, start, stop)

    monkeypatch.setattr(sectors, "HEAD", 512)
    monkeypatch.setattr(sectors, "SECTOR", 1024)
    monkeypatch.setattr(sectors, "read_range", counted)
    return found


def _simulate(trace: Path | str, head: Path | str, **options: Any) -> Rounds:
    checkpoint = replay.load_head(head)
    variants = replay.sweep(draft=[checkpoint.name], wiring=[WIRING], steps=[1, STEPS])
    return replay.simulate(Trace.open(trace), {checkpoint.name: checkpoint}, variants, **options)


def _file(rounds: Rounds, path: Path) -> tuple[dict[str, Any], pl.DataFrame]:
    """What the written file holds, but for where trace and head lay and how many seconds it took."""
    write_rounds(rounds, path)
    head = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    for told in (head["trace"], *head["drafts"].values()):
        assert told.pop("path")
    for variant in head["variants"]:
        variant.pop("seconds")
    return head, pl.read_parquet(path)


def _same(one: tuple[dict[str, Any], pl.DataFrame], other: tuple[dict[str, Any], pl.DataFrame]) -> bool:
    return one[0] == other[0] and one[1].equals(other[1])


def _run(*line: str) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in line])


def test_rounds_are_those_of_folders(local: Path, there: str, tmp_path: Path) -> None:
    here = _file(_simulate(local / "trace", local / "head"), tmp_path / "here.parquet")
    far = _simulate(f"{there}/trace", f"{there}/head")
    assert far.trace["path"] == f"{there}/trace"
    assert _same(_file(far, tmp_path / "far.parquet"), here)


def test_workers_open_it_themselves(local: Path, there: str, tmp_path: Path) -> None:
    here = _file(_simulate(local / "trace", local / "head"), tmp_path / "here.parquet")
    far = _file(_simulate(f"{there}/trace", f"{there}/head", workers=2), tmp_path / "far.parquet")
    assert _same(far, here)


def test_what_is_kept_is_kept_for_these_versions(local: Path, there: str, store: Any, tmp_path: Path) -> None:
    line = ("simulate", f"{there}/trace", "--draft", f"{there}/head", "--wiring", str(WIRING), "--steps", "2")
    line += ("--cache", str(tmp_path / "kept"), "--limit", "2")
    first, again = _run(*line), _run(*line)
    assert first.exit_code == 0 and "were replayed before" not in first.stderr
    assert "1 of 1 variants were replayed before" in again.stderr
    data = bytearray((local / "trace" / SHARD).read_bytes())
    data[-1] ^= 1
    store.pipe(f"{there}/trace/{SHARD}", bytes(data))
    assert "were replayed before" not in _run(*line).stderr


def test_a_part_of_the_requests_fetches_its_ranges_alone(
    local: Path, there: str, fetched: list[tuple[str, int]]
) -> None:
    trace = Trace.open(f"{there}/trace")
    head = sum(size for name, size in fetched if name == SHARD)
    assert head < trace.layouts[0].data_start + 1024
    fetched.clear()
    far, near = trace.take(Part(requests=("r3",))).read(0, ["2"]), Trace.open(local / "trace").read(3, ["2"])
    assert far.tokens.equal(near.tokens) and far.taps["2"].equal(near.taps["2"])
    wanted = near.taps["2"].nbytes + 4 * len(near.tokens)
    rows = sum(size for _, size in fetched)
    assert wanted < rows < wanted + 4 * 1024 < (local / "trace" / SHARD).stat().st_size / 4
    fetched.clear()
    assert trace.read(3, ["2"]).taps["2"].equal(near.taps["2"]) and fetched == []  # out of the cache
    assert trace.tap_rows(5, "4", [9, 2, 3]).equal(Trace.open(local / "trace").tap_rows(5, "4", [9, 2, 3]))
    assert 0 < sum(size for _, size in fetched) <= 4 * 1024


def test_the_cache_keeps_its_bound(
    local: Path, there: str, fetched: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAY_CACHE_GB", "0.00002")  # 20,000 bytes
    trace, near = Trace.open(f"{there}/trace"), Trace.open(local / "trace")
    for index in range(len(near)):
        assert all(rows.equal(near.read(index, [tap]).taps[tap])
                   for tap, rows in trace.read(index, near.header.taps).taps.items())  # fmt: skip
        held = sum(path.stat().st_size for path in Path(remote_folder()).rglob("*") if path.is_file())
        assert held <= 20_000
    assert sum(size for _, size in fetched) > 60_000


def test_a_head_that_the_cache_cannot_hold_is_refused_before_it_is_fetched(
    local: Path, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (local / "head" / "model.safetensors").stat().st_size
    monkeypatch.setenv("REPLAY_CACHE_GB", f"{size * 1.05 / 1e9}")  # a tenth of it stays free
    with pytest.raises(
        OutputError, match=rf"^{there}/head/model.safetensors holds .* set REPLAY_CACHE_GB to "
    ) as error:
        replay.load_head(f"{there}/head")
    assert sum(path.stat().st_size for path in Path(remote_folder()).rglob("*") if path.is_file()) < size
    monkeypatch.setenv("REPLAY_CACHE_GB", str(error.value).split()[-3])
    near, far = (replay.load_head(f"{place}/head").tensors for place in (local, there))
    assert all(tensor.equal(far[name]) for name, tensor in near.items())
    monkeypatch.setenv("REPLAY_CACHE_GB", "0.0000001")
    with pytest.raises(
        OutputError, match=rf"^{there}/trace/trace.json holds .* the local cache keeps 9e-08 GB at most"
    ):
        Trace.open(f"{there}/trace")


def test_a_damaged_sector_is_fetched_again(local: Path, there: str, fetched: list[tuple[str, int]]) -> None:
    path = as_source(f"{there}/trace") / SHARD
    right = sha256_of(local / "trace" / SHARD)
    assert sha256_of(path) == right
    kept = sorted((Path(remote_folder()) / "sectors").rglob("0*"))
    for sector, damage in zip(kept, (b"", b"x" * 516, bytes(1028)), strict=False):
        sector.write_bytes(damage)
    fetched.clear()
    assert sha256_of(path) == right
    assert 1 <= len(fetched) <= 3


def test_an_object_gone_in_the_middle(
    local: Path, there: str, store: Any, fetched: list[tuple[str, int]], tmp_path: Path
) -> None:
    trace = Trace.open(f"{there}/trace")
    store.rm(f"{there}/trace/{SHARD}")
    with pytest.raises(StorageError, match=rf"^{there}/trace/{SHARD} is not there, or not any more; mend the address"):
        trace.read(0, ["2"])
    out = tmp_path / "rounds.parquet"
    result = _run("simulate", f"{there}/trace", "--draft", f"{there}/head", "-o", str(out))
    assert result.exit_code == 1 and not out.exists()


def test_an_object_changed_in_the_middle(local: Path, there: str, store: Any, fetched: list[tuple[str, int]]) -> None:
    trace = Trace.open(f"{there}/trace")
    data = bytearray((local / "trace" / SHARD).read_bytes())
    data[-1] ^= 1
    store.pipe(f"{there}/trace/{SHARD}", bytes(data))
    with pytest.raises(StorageError, match="has changed while it was read; wait until it is written"):
        trace.read(0, ["2"])
    Trace.open(f"{there}/trace")  # seen anew
    with pytest.raises(StorageError, match="has changed since it was opened; begin anew"):
        trace.read(0, ["2"])


def test_without_keys(there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    result = _run("inspect", f"{there}/trace")
    assert result.exit_code == 1
    assert result.stderr == (
        f"replay: {there}/trace takes keys and none were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
        "AWS_PROFILE, or FSSPEC_S3_ANON=true for a public one\n"
    )


def test_a_storage_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError, match=r"^the storage of s3://some/trace cannot be reached; look at the network"):
        Trace.open("s3://some/trace")


@pytest.mark.parametrize("place", ["some-bucket-nobody-made/trace", "{}/nothing"])
def test_what_is_not_there(there: str, place: str) -> None:
    address = f"s3://{place}".replace("s3://{}", there)
    with pytest.raises(StorageError, match=rf"^{address} is not there"):
        Trace.open(address)


def test_what_may_not_be_read(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What S3 answers to keys without rights: s3fs makes PermissionError of it."""
    from s3fs import S3FileSystem

    def refused(*args: object, **options: object) -> None:
        raise PermissionError("Access Denied by a-very-secret-key")

    monkeypatch.setattr(S3FileSystem, "ls", refused)
    with pytest.raises(StorageError) as error:
        Trace.open(f"{there}/trace")
    assert str(error.value).startswith(f"{there}/trace may not be read with the keys that were found, or without any")
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(error.value)


def test_a_storage_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match=r"^gs:// takes the package gcsfs; type pip install 'eagle-replay\[gs\]'$"):
        Trace.open("gs://bucket/trace")


def test_a_cache_that_cannot_be_written(there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REPLAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        OutputError, match=r"^the local cache \S+/file/remote cannot be written \(Not a directory\); make"
    ):
        Trace.open(f"{there}/trace")


def test_a_full_cache(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself refuses to write more: a limit on the size of files stands for a full disk."""
    import resource
    import signal

    source = as_source(f"{there}/trace")
    os.path.isdir(source)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(
            OutputError, match=r"cannot be written \(File too large\); make room there, or name another"
        ):
            Trace.open(source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(Path(remote_folder()).rglob("*.tmp"))
    assert len(Trace.open(source)) == 6


@pytest.mark.parametrize("text", ["abc", "0", "-1", "nan", "inf"])
def test_a_bound_that_cannot_be(there: str, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("REPLAY_CACHE_GB", text)
    with pytest.raises(UsageError, match=rf"^REPLAY_CACHE_GB is {text}; set a number of GB above 0, such as 20$"):
        Trace.open(f"{there}/trace")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ftp://host/trace", "is of no storage that replay reads"),
        ("s3://", "names no place; type it as s3://BUCKET/FOLDER"),
        ("s3://bucket//trace", "names no place"),
        ("s3://bucket/../trace", "names no place"),
        ("s3://bucket/trace?versionId=secret", "holds more than a place"),
        ("https://name:secret@host/trace", "holds more than a place"),
        ("s3://bucket/runs/*", "is a pattern, which --draft of replay simulate alone takes"),
    ],
)
def test_addresses_that_name_no_place(address: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        Trace.open(address)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        ("simulate", "s3://b/t", "--draft", "s3://b/d", "-o", "s3://b/r"),
        ("simulate", "s3://b/t", "--draft", "s3://b/d", "--cache", "s3://b/c"),
        ("trace", "subset", "s3://b/t", "-o", "gs://b/t"),
        ("report", "s3://b/r", "--html", "s3://b/p"),
    ],
)
def test_nothing_is_written_elsewhere(line: tuple[str, ...]) -> None:
    result = _run(*line)
    assert result.exit_code == 1
    assert re.fullmatch(
        r"replay: an address \((s3|gs)://\.\.\.\) was given where a path of this machine belongs; .*\n", result.stderr
    )
    with pytest.raises(UsageError, match="an address"):
        write_rounds(Rounds(pl.DataFrame(), (), (), {}, {}), Path("s3://b/r"))


def test_every_command_reads_it(local: Path, there: str, store: Any, tmp_path: Path) -> None:
    rounds = tmp_path / "rounds.parquet"
    steps = ("--wiring", str(WIRING), "--steps", str(STEPS))
    done = _run("simulate", f"{there}/trace", "--draft", f"{there}/head", *steps, "-o", str(rounds))
    assert done.exit_code == 0, done.stderr
    store.put(str(rounds), f"{there}/rounds.parquet")
    for line in (
        ("inspect", f"{there}/trace", "--json"),
        ("inspect", f"{there}/trace", "--check"),
        ("inspect", f"{there}/head"),
        ("show", str(rounds), "--request", "r0"),
        ("show", f"{there}/rounds.parquet", "--request", "r0"),
        ("report", f"{there}/rounds.parquet"),
        ("compare", f"{there}/rounds.parquet", str(rounds)),
        ("trace", "stats", f"{there}/trace"),
        ("trace", "subset", f"{there}/trace", "--limit", "2", "-o", str(tmp_path / "two")),
    ):
        result = _run(*line)
        assert "/cache/remote/" not in result.output
        if line[0] == "inspect":  # with --check it finds the same in this invented trace
            near = _run(*(word.replace(there, str(local)) for word in line))
            far = (result.exit_code, result.output.replace(there, str(local)))
            assert "".join(far[1].split()) == "".join(near.output.split()) and far[0] == near.exit_code
            continue
        assert result.exit_code == 0, (line, result.stderr, result.exception)
        if line[0] == "show":
            assert (
                "rank" in result.stdout and "--trace" not in result.stdout
            )  # trace and head were found where the rounds say
    assert Trace.open(tmp_path / "two").read(1, ["2"]).tokens.equal(Trace.open(local / "trace").read(1, []).tokens)
    assert read_rounds(f"{there}/rounds.parquet").table.equals(read_rounds(rounds).table)  # type: ignore[arg-type]


def test_a_pattern_of_addresses_is_the_pattern_of_folders(local: Path, there: str, store: Any, tmp_path: Path) -> None:
    """The same heads in the same order under the same names, and so the same curve by training step."""
    folder = tmp_path / "trained"
    for run, step in (("a", 500), ("a", 1000), ("b", 500)):
        shutil.copytree(local / "head", folder / run / f"checkpoint-{step}")
    (folder / "a" / "checkpoint-9.txt").touch()  # a file is no head
    store.put(f"{folder}/", f"{there}/trained", recursive=True)
    pages = []
    for place, trace in ((folder, local / "trace"), (f"{there}/trained", f"{there}/trace")):
        line = ("simulate", str(trace), "--draft", f"{place}/*/checkpoint-*", "--wiring", str(WIRING), "--steps", "2")
        result = _run(*line, "--limit", "2", "--no-agreement", "--json")
        assert result.exit_code == 0, result.stderr
        pages.append(json.loads(result.stdout))
    names = [list(page["draft"]) for page in pages]
    assert names[0] == names[1] == ["a:checkpoint-500", "checkpoint-1000", "b:checkpoint-500"]
    steps = [[one["step"] for one in page["draft"].values()] for page in pages]
    assert steps[0] == steps[1] == [500, 1000, 500]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("{}/none-*", "--draft {}/none-* matches no folder; type the pattern of checkpoints' folders"),
        ("s3://some-bucket-nobody-made/a*", "s3://some-bucket-nobody-made/a* is not there, or not any more; mend"),
        ("s3://b*/heads", "s3://b*/heads is a pattern of buckets, which are not listed; type one of them"),
        ("http://127.0.0.1:9/h*", "http://127.0.0.1:9/h* is a pattern, and a web server lists no folders; type each"),
    ],
)
def test_a_pattern_that_nothing_has(there: str, pattern: str, said: str) -> None:
    result = _run("simulate", f"{there}/trace", "--draft", pattern.format(there))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(f"replay: {said.format(there)}")


def test_a_web_server_without_lists(local: Path, tmp_path: Path) -> None:
    with range_server(local) as address:
        here = _file(_simulate(local / "trace", local / "head"), tmp_path / "here.parquet")
        assert _same(_file(_simulate(f"{address}/trace", f"{address}/head"), tmp_path / "far.parquet"), here)
        with pytest.raises(StorageError, match="/nothing is not there"):
            Trace.open(f"{address}/nothing")


def test_a_web_server_without_ranges(local: Path) -> None:
    with range_server(local, ranges=False) as address, pytest.raises(StorageError, match="has to give ranges of a"):
        Trace.open(f"{address}/trace")


def test_another_machine_has_its_own_local_cache(
    local: Path, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_source(f"{there}/trace")
    sent = pickle.dumps((path, path / SHARD, Trace.open(path)))
    monkeypatch.setenv("REPLAY_CACHE", str(tmp_path / "other"))
    folder, shard, trace = pickle.loads(sent)
    assert (str(folder), str(shard)) == (f"{there}/trace", f"{there}/trace/{SHARD}")
    near = Trace.open(local / "trace").read(1, ["2"])
    assert trace.read(1, ["2"]).taps["2"].equal(near.taps["2"])
    assert os.fspath(folder).startswith(str(tmp_path / "other")) and os.path.isdir(folder)


def test_a_path_says_its_address_and_is_one(there: str) -> None:
    path = as_source(Path(f"{there}/trace"))  # with one slash, as paths have it
    assert isinstance(path, RemotePath) and str(path) == f"{there}/trace" == f"{path}"
    assert str(path / SHARD) == f"{there}/trace/{SHARD}" and path.name == "trace" and path.is_dir()
    assert str(path.resolve() / "x") == f"{there}/trace/x" and not (path / "x").exists()
    assert (path / SHARD).stat().st_size == 0  # who reads it as a plain file sees that it is none
    with pytest.raises(ReplayError, match="a path was expected"):
        as_source(3)


def test_ranges_are_fetched_side_by_side(local: Path, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four taps and the tokens of a request lie in five places: at least four questions are under way together."""
    trace, near = Trace.open(f"{there}/trace"), Trace.open(local / "trace")
    monkeypatch.setattr(sectors, "HEAD", 64)
    monkeypatch.setattr(sectors, "SECTOR", 256)
    meeting = threading.Barrier(4, timeout=20)
    real, asked = sectors.read_range, []

    def slow(entry: object_store.Entry, start: int, stop: int) -> bytes:
        asked.append((start, stop))
        if len(asked) <= 4:
            meeting.wait()
        return real(entry, start, stop)

    monkeypatch.setattr(sectors, "read_range", slow)
    read = trace.read(4, ["1", "3", "5", "final"])
    assert all(rows.equal(near.read(4, [tap]).taps[tap]) for tap, rows in read.taps.items())
    assert len(set(asked)) == len(asked)  # and no range twice


def test_processes_that_want_a_whole_file_at_once_fetch_it_once(local: Path) -> None:
    """One is in the midst of it for a second. The others list the folder meanwhile, and wait."""
    asked = []

    def slow(path: str) -> None:
        asked.append(path)
        time.sleep(1.0 if path.endswith("model.safetensors") else 0.0)

    with range_server(local, on_get=slow) as address:
        os.path.isdir(as_source(f"{address}/head"))
        line = [sys.executable, "-I", "-c", FETCHES, f"{address}/head"]
        started = [subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        for one in started:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        for one in started:
            one.communicate(timeout=60)
        whole = local_file(as_source(f"{address}/head") / "model.safetensors")
    assert [one.returncode for one in started] == [0, 0, 0]
    assert asked.count("/head/model.safetensors") == 1
    assert Path(os.fspath(whole)).read_bytes() == (local / "head" / "model.safetensors").read_bytes()


def test_threads_that_want_a_whole_file_at_once_fetch_it_once(local: Path) -> None:
    asked = []

    def slow(path: str) -> None:
        asked.append(path)
        time.sleep(0.3)

    def fetch() -> None:
        together.wait()
        local_file(path)

    with range_server(local, on_get=slow) as address:
        path = as_source(f"{address}/head") / "model.safetensors"
        os.path.isdir(path.parent)
        together = threading.Barrier(4, timeout=20)
        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert asked.count("/head/model.safetensors") == 1
    assert Path(os.fspath(path)).read_bytes() == (local / "head" / "model.safetensors").read_bytes()


def test_a_disk_without_locks_has_files_all_the_same(local: Path, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_locks.fcntl, "flock", refused)
    path = local_file(as_source(f"{there}/head") / "model.safetensors")
    assert Path(os.fspath(path)).read_bytes() == (local / "head" / "model.safetensors").read_bytes()


def test_a_lock_that_is_held_is_not_cleaned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_CACHE_GB", "0.000001")  # 1,000 bytes
    locks, more = Path(remote_folder()) / "locks", os.path.join(remote_folder(), "sectors", "more")
    with cache_locks.alone(object_store.Entry("s3://some/file", 5, "1")):
        (lock,) = locks.iterdir()
        sectors.write_file(more, [bytes(2000)])
        assert lock.exists() and not os.path.exists(more)
    sectors.write_file(more, [bytes(2000)])
    assert not lock.exists()


def test_what_another_process_is_writing_is_left_where_a_folder_is_listed_anew(there: str) -> None:
    folder = Path(os.fspath(as_source(f"{there}/head")))
    written, left = folder / "model.safetensors.1.ab.tmp", folder / "model.safetensors.2.cd.tmp"
    written.touch()
    left.touch()
    os.utime(left, (time.time() - 7200,) * 2)  # of a process that was killed long ago
    stamped = folder / "model.safetensors.3.ef.tmp"
    stamped.touch()
    os.utime(stamped, ns=(0, 1000))  # and of one that gives it its name now
    os.fspath(as_source(f"{there}/head"))
    assert written.exists() and stamped.exists() and not left.exists()


@pytest.mark.parametrize("error", [StorageError("it is gone"), KeyboardInterrupt()])
def test_what_waits_is_not_asked_any_more_after_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Also where an earlier question takes long."""
    asked: list[list[int]] = []
    slow: list[bool] = []
    ended = threading.Event()

    def failing(_: object_store.Entry, run: list[int]) -> None:
        asked.append(run)
        if len(asked) == 20:
            raise error
        if len(asked) == 1:
            slow.append(ended.wait(20))
        time.sleep(0.02)

    monkeypatch.setattr(sectors, "_keep", failing)
    monkeypatch.setattr(sectors, "HEAD", 16)
    monkeypatch.setattr(sectors, "SECTOR", 64)
    entry = object_store.Entry("s3://some/file", 1000 * 256, "1")
    with pytest.raises(type(error)):
        sectors.fetch_ahead((entry, number * 256 + 64, number * 256 + 65) for number in range(1000))
    assert len(asked) < 100 and slow == []
    ended.set()


def test_no_rows_fetch_nothing(there: str, fetched: list[tuple[str, int]]) -> None:
    trace = Trace.open(f"{there}/trace")
    some = trace.tap_rows(5, "4", [9])
    fetched.clear()
    none = trace.tap_rows(4, "4", [])
    assert fetched == []
    assert none.shape == (0, some.shape[1]) and none.dtype == some.dtype
