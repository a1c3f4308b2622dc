"""A sweep with a cache: its rounds are those of one without, and what was replayed is not replayed again."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.dflash_heads import dflash_checkpoint
from support.heads import tiny_checkpoint, tiny_config, write_head
from support.served_maker import make_checkpoint, make_served
from support.trace_maker import H, V, make_four, make_header, make_requests, make_weights, write_trace

import replay
from replay import narrow_products
from replay.checkpoint.checkpoint import Checkpoint
from replay.cli.app import cli
from replay.cli.replaying import run_simulation
from replay.errors import OutputError, UsageError, WiringError
from replay.narrow_products import has_kernels
from replay.simulator import cache as module
from replay.simulator import cache_keys as keys
from replay.simulator.agreement import with_agreement
from replay.simulator.cache import check_cache_folder, open_cache, simulate_cached
from replay.simulator.cache_files import Entries
from replay.simulator.cache_keys import instructions, kernels_of, trace_sha256
from replay.simulator.variant import Variant
from replay.traces import files
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds

CONFIG = tiny_config(hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1]})


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.open(write_trace(tmp_path / "trace", [make_four()]))


@pytest.fixture
def head(tmp_path: Path) -> Checkpoint:
    return replay.load_head(write_head(tmp_path / "head", CONFIG))


@pytest.fixture
def lots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many variants each replay had."""
    counted: list[int] = []
    real: Callable[..., Any] = module.simulate_with_notes

    def simulate(trace: Trace, checkpoints: object, variants: list[Any], **named: Any) -> Any:
        counted.append(len(variants))
        return real(trace, checkpoints, variants, **named)

    monkeypatch.setattr(module, "simulate_with_notes", simulate)
    return counted


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each tensor that this process reads for a checksum."""
    counted: list[int] = []
    real = keys.tensor_bytes

    def read(tensor: torch.Tensor) -> memoryview:
        counted.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(keys, "tensor_bytes", read)
    return counted


def variants(draft: str = "h") -> list[Variant]:
    """Two wirings, two numbers of steps, a tree and faults: four lots."""
    wirings = [replay.parse_wiring(text, layers=4) for text in ("embed,2", "2,embed")]
    more = [Variant(draft, wirings[0], steps=2, kv="stale"), Variant(draft, wirings[0], 3, 2, 5)]
    more.append(Variant(draft, wirings[0], faults=replay.parse_faults("attn.scale=2")))
    return [*replay.sweep(draft=[draft], wiring=wirings, steps=[1, 3]), *more]


def cached(folder: Path, trace: Trace, head: Checkpoint, asked: list[Variant], name: str = "h", **named: Any) -> Rounds:
    heads = {name: head}
    return simulate_cached(
        open_cache(folder, trace, heads, "cpu", agreement=named.get("agreement", False)), trace, heads, asked,
        **{"agreement": False, **named},
    )  # fmt: skip


def plain(rounds: Rounds) -> tuple[object, ...]:
    """All of it but the time that it took."""
    infos = tuple(replace(info, seconds=0.0) for info in rounds.variants)
    return rounds.table.rows(), infos, rounds.requests, rounds.trace, rounds.drafts


def test_the_rounds_are_those_of_a_run_without(tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int]) -> None:
    asked = variants()
    expected = plain(replay.simulate(trace, {"h": head}, asked))
    assert plain(cached(tmp_path / "c", trace, head, asked)) == expected
    replayed = len(lots)
    assert replayed > 2 and sum(lots) == len(asked)
    assert plain(cached(tmp_path / "c", trace, head, asked)) == expected
    assert len(lots) == replayed


def test_a_head_that_was_moved_is_named_where_it_is(tmp_path: Path, trace: Trace) -> None:
    found = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        head = replay.load_head(write_head(tmp_path / place / "h", CONFIG))
        found.append(cached(tmp_path / "cache", trace, head, variants()).drafts["h"]["path"])
    assert found == [str(tmp_path / "one" / "h"), str(tmp_path / "two" / "h")]


def test_a_head_that_is_changed_in_place_between_two_calls_is_another(
    tmp_path: Path, trace: Trace, head: Checkpoint, hashed: list[int]
) -> None:
    """As a training loop does, also past torch's count of changes; in one call it is read once for the checksum."""
    heads = {"h": replace(head, path=None, tensors={name: one.clone() for name, one in head.tensors.items()})}
    found = []
    for _ in range(2):
        found.append(plain(run_simulation(trace, heads, variants(), "cpu", agreement=False, cache=tmp_path / "c")))
        assert found[-1] == plain(replay.simulate(trace, heads, variants()))
        heads["h"].tensors["fc.weight"].data.neg_()
    assert found[0] != found[1]
    assert len(hashed) == 2 * len(head.tensors)


def test_workers_and_a_cache_read_each_head_once_for_its_checksum(
    tmp_path: Path, trace: Trace, head: Checkpoint, hashed: list[int]
) -> None:
    rounds = run_simulation(
        trace, {"h": head}, variants(), "cpu", agreement=False, cache=tmp_path / "c", workers=2
    )  # fmt: skip
    assert len(hashed) == len(head.tensors)
    assert plain(rounds) == plain(replay.simulate(trace, {"h": head}, variants()))


def test_a_part_of_a_sweep_is_found_in_another(tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int]) -> None:
    """Steps are replayed in one run at the most of them: those that were kept of a longer one are the same."""
    asked = variants()
    cached(tmp_path / "c", trace, head, asked[1::2])
    before = sum(lots)
    assert plain(cached(tmp_path / "c", trace, head, asked)) == plain(replay.simulate(trace, {"h": head}, asked))
    assert sum(lots) - before == len(asked) - before
    assert plain(cached(tmp_path / "c", trace, head, asked[:1])) == plain(
        replay.simulate(trace, {"h": head}, asked[:1])
    )


def test_a_sweep_that_was_stopped_goes_on(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, counting = variants(), module.simulate_with_notes

    def stop(*given: Any, **named: Any) -> Rounds:
        if lots:
            raise KeyboardInterrupt
        return counting(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "simulate_with_notes", stop)
        with pytest.raises(KeyboardInterrupt):
            cached(tmp_path / "c", trace, head, asked)
    done, found = lots[0], []
    assert plain(cached(tmp_path / "c", trace, head, asked, on_found=found.append)) == plain(
        replay.simulate(trace, {"h": head}, asked)
    )
    assert found == [done] and sum(lots) == len(asked)


def test_agreement_is_kept_with_the_rounds(tmp_path: Path, lots: list[int]) -> None:
    served, checkpoint = make_served(tmp_path / "served", make_checkpoint()), make_checkpoint()
    trace = Trace.open(served.path)
    asked = replay.sweep(draft=["h"], wiring=[replay.parse_wiring(text) for text in ("3,5,6", "5,3,6")], steps=[3])
    heads = {"h": checkpoint}
    expected = with_agreement(replay.simulate(trace, heads, asked), trace, heads, asked)
    assert any(info.agreement is not None for info in expected.variants)
    for _ in range(2):
        assert plain(cached(tmp_path / "c", trace, checkpoint, asked, agreement=True)) == plain(expected)
    assert sum(lots) == len(asked)
    cached(tmp_path / "c", trace, checkpoint, asked)  # without the agreement they are other entries
    assert sum(lots) == 2 * len(asked)


def test_a_cache_keeps_its_bound_and_what_was_used_last(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only entries are deleted, and the rounds are those of a run without a cache all the same."""
    folder = tmp_path / "c"
    first = variants()[:1]
    cached(folder, trace, head, first)
    size = sum(path.stat().st_size for path in folder.rglob("*.*"))
    for name in ("ff/notes.parquet", "other/" + "0" * 64 + ".npz", "0" * 64 + ".npz"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(10 * size))
    monkeypatch.setenv("REPLAY_CACHE_GB", f"{3.5 * size / 1e9}")
    for one in variants()[1:]:
        cached(folder, trace, head, first)  # used again and again
        cached(folder, trace, head, [one])
        entries = [path for path in folder.glob("??/*") if path.name != "notes.parquet"]
        assert sum(path.stat().st_size for path in entries) <= 3.5 * size
    assert lots == [1] * len(variants())
    none = simulate_cached(None, trace, {"h": head}, variants(), agreement=False)
    assert plain(cached(folder, trace, head, variants())) == plain(none)
    assert sorted(path.stat().st_size for path in folder.rglob("*.*"))[-3:] == [10 * size] * 3


def test_what_killed_writers_left_counts_and_goes(
    tmp_path: Path, trace: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be somebody's for an hour. The names are those that the writers give."""
    names, real = list[str](), os.replace

    def replaced(source: Path, target: Path) -> None:
        names.append(Path(source).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    cached(tmp_path / "c", trace, head, variants()[:1])
    monkeypatch.setattr(os, "replace", real)
    assert len(names) == 2
    for age, folder in ((3000, tmp_path / "young"), (4000, tmp_path / "old")):
        for name in (*names, "notes.part"):
            (folder / "ab").mkdir(parents=True, exist_ok=True)
            (folder / "ab" / name).write_bytes(bytes(1000))
            then = time.time() - age
            os.utime(folder / "ab" / name, (then, then))
    monkeypatch.setenv("REPLAY_CACHE_GB", f"{1100 / 1e9}")
    for folder, stay in ((tmp_path / "young", [*names, "notes.part"]), (tmp_path / "old", ["notes.part"])):
        (folder / "cd").mkdir()
        entry = folder / "cd" / f"{'0' * 64}.npz"
        entry.write_bytes(bytes(100))
        Entries(folder).count(entry)
        assert sorted(one.name for one in (folder / "ab").iterdir()) == sorted(stay) and entry.exists()


def test_an_entry_that_another_process_deletes_is_replayed_again(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(cached(tmp_path / "c", trace, head, variants()[:2]))
    real = Entries.holds

    def deleted(self: Entries, path: Path) -> bool:
        held = real(self, path)
        path.unlink()
        return held

    with monkeypatch.context() as patch:
        patch.setattr(Entries, "holds", deleted)
        assert plain(cached(tmp_path / "c", trace, head, variants()[:2])) == expected
    Entries(tmp_path / "none", written=0).count(tmp_path / "none" / "gone")
    assert lots == [2, 2]


def test_a_damaged_entry_is_said_once(tmp_path: Path, trace: Trace, head: Checkpoint) -> None:
    notes: list[str] = []
    heads = {"h": head}
    cached(tmp_path / "c", trace, head, variants()[:2])
    for path in (tmp_path / "c").rglob("*.parquet"):
        path.write_bytes(b"")
    cache = open_cache(tmp_path / "c", trace, heads, "cpu", agreement=False, on_note=notes.append)
    simulate_cached(cache, trace, heads, variants()[:2], agreement=False)
    assert len(notes) == 1 and "parquet; what is damaged is replayed again" in notes[0]
    simulate_cached(cache, trace, heads, variants()[:2], agreement=False)
    assert len(notes) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "no sum", "other sum", "swap"])
def test_an_entry_that_is_damaged_is_replayed_again(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int], damage: str
) -> None:
    asked = variants()[:2]
    expected = plain(cached(tmp_path / "c", trace, head, asked))
    first, second = sorted((tmp_path / "c").rglob("*.parquet"))
    data = first.read_bytes()
    match damage:
        case "flip":
            first.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
        case "cut":
            first.write_bytes(data[: len(data) // 2])
        case "empty":
            first.write_bytes(b"")
        case "no sum":
            first.with_suffix(".sha256").unlink()
        case "other sum":
            first.with_suffix(".sha256").write_text("0" * 64)
        case "swap":
            first.write_bytes(second.read_bytes())
    assert plain(cached(tmp_path / "c", trace, head, asked)) == expected
    assert lots == [2, 1]
    assert plain(cached(tmp_path / "c", trace, head, asked)) == expected
    assert lots == [2, 1]


def test_what_a_replay_is_made_of_is_what_it_is_found_by(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, folder = variants()[:1], tmp_path / "c"
    cached(folder, trace, head, asked)
    named = [replace(asked[0], draft="other")]
    again = cached(folder, trace, head, named, name="other")  # a name is nothing that it is made of
    assert len(lots) == 1
    assert (again.variants[0].draft, list(again.drafts)) == ("other", ["other"])

    def differs(case: str, *given: Any) -> None:
        before = len(lots)
        cached(folder, *given)
        assert len(lots) == before + 1, case

    tensors = {**head.tensors, "norm.weight": head.tensors["norm.weight"] + 1}
    differs("tensors", trace, replace(head, tensors=tensors), asked)
    differs("config", trace, replace(head, config=replace(head.config, rms_norm_eps=0.5)), asked)
    other = Trace.open(write_trace(tmp_path / "other", [make_requests(4)]))
    differs("trace", other, head, asked)
    differs("steps", trace, head, [replace(asked[0], steps=2)])
    differs("engine", trace, head, [replace(asked[0], engine="eagle")])
    differs("numerics", trace, head, [replace(asked[0], numerics="hf")])
    monkeypatch.setattr(module, "program_sha256", lambda: "another program")
    differs("program", trace, head, asked)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another kernel")
    differs("kernels", trace, head, asked)


def test_a_lot_that_is_refused_is_so_before_any_is_replayed(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int]
) -> None:
    wrong = Variant("h", replay.parse_wiring("embed,3", layers=4))
    with pytest.raises(WiringError, match="asks for tap 3"):
        cached(tmp_path / "c", trace, head, [*variants(), wrong])
    assert lots == []


def test_each_variant_of_a_lot_is_checked_first(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int]
) -> None:
    """Of one lot the chains fit and the tree does not: its head drafts 40 tokens."""
    one, other = (replay.parse_wiring(text, layers=4) for text in ("embed,2", "2,embed"))
    asked = [Variant("h", one), Variant("h", other), Variant("h", other, 2, 41, 50)]
    with pytest.raises(UsageError, match="topk 41 was asked for"):
        cached(tmp_path / "c", trace, head, asked)
    assert lots == []


def test_what_is_found_is_told_of_the_part_that_is_asked_for(
    tmp_path: Path, trace: Trace, head: Checkpoint, lots: list[int]
) -> None:
    """The first four of four are all of them, and found as such."""
    asked, part = variants()[:1], trace.take(Part(limit=4))
    for one in (part, trace):
        expected = plain(replay.simulate(one, {"h": head}, asked))
        assert plain(cached(tmp_path / "c", one, head, asked)) == expected
    assert lots == [1]


def test_a_wiring_that_two_kinds_of_heads_share_keeps_the_ids_of_both(tmp_path: Path, trace: Trace) -> None:
    sizes = {"hidden_size": H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": V}
    ids = {"mask_token_id": 60, "target_layer_ids": [1]}
    heads = {
        "block": dflash_checkpoint(**sizes, dflash_config=ids),
        "chain": tiny_checkpoint(**CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}),
    }
    asked = [Variant(name, replay.parse_wiring("2", layers=4), steps=2) for name in heads]
    expected = replay.simulate(trace, heads, asked)
    for order in (asked, asked[::-1]):
        kept = open_cache(tmp_path / "c", trace, heads, "cpu", agreement=False)
        found = simulate_cached(kept, trace, heads, order, agreement=False)
        assert found.trace["wirings"] == expected.trace["wirings"]
    assert "DFlash" in str(expected.trace["wirings"]) and "vLLM" in str(expected.trace["wirings"])


def test_weights_outside_of_the_trace_and_the_gpu_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    files = {"model.embed_tokens.weight": target / "a.safetensors", "lm_head.weight": target / "b.safetensors"}
    for name, path in files.items():
        save_file({name: make_weights()}, path)
    index = {"weight_map": {name: path.name for name, path in files.items()}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    header = make_header(tied=False, target_path=str(target))
    trace = Trace.open(write_trace(tmp_path / "t", [make_four()], header=header, weights=False))
    keys = {trace_sha256(trace)}
    for path in files.values():
        os.utime(path, ns=(0, len(keys)))
        keys.add(trace_sha256(trace))
    assert len(keys) == 3
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert len({kernels_of(device) for device in ("cpu", "cuda:0", "cuda:1")}) == 3


def test_kernels_that_an_environment_narrows_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {kernels_of("cpu"), kernels_of("cpu", torch.get_num_threads() + 1)}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert len(found | {kernels_of("cpu")}) == 3


def test_instructions_that_torch_does_not_tell_apart_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AVX512 CPU with and without products of bf16; one that tells nothing is called as the system calls it."""
    found = {kernels_of("cpu")}
    monkeypatch.setattr(keys, "instructions", lambda: "avx512_bf16 of another")
    found.add(kernels_of("cpu"))
    for other in (torch.bfloat16, torch.float16):
        monkeypatch.setattr(narrow_products, "has_kernels", lambda dtype, o=other: has_kernels(dtype) != (dtype == o))
        found.add(kernels_of("cpu"))
    assert len(found) == 4
    (tmp_path / "x86").write_text(
        "model\t: fma\nflags\t: smep sse2 fma avx avx512_bf16 amx_tile avx2\n\nflags\t: avx\n"
    )
    (tmp_path / "arm").write_text("Features\t: fp asimd bf16 sve\n")
    assert instructions(tmp_path / "x86") == "amx_tile avx avx2 avx512_bf16 fma"
    assert instructions(tmp_path / "arm") == "bf16 sve"
    monkeypatch.setattr("platform.processor", lambda: "a CPU")
    assert instructions(tmp_path / "none") == "a CPU"


def test_two_sweeps_may_write_one_entry_at_once(
    tmp_path: Path, trace: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c").mkdir()
    cache = open_cache(tmp_path / "c", trace, {"h": head}, "cpu", agreement=False)
    assert cache is not None
    real, others = os.fsync, [b"other"]

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if others:
            cache.write_bytes(tmp_path / "c" / "entry", others.pop())

    monkeypatch.setattr(os, "fsync", fsync)
    cache.write_bytes(tmp_path / "c" / "entry", b"mine")
    assert [(one.name, one.read_bytes()) for one in (tmp_path / "c").iterdir()] == [("entry", b"mine")]


def test_two_sweeps_that_write_one_entry_leave_it_whole(
    tmp_path: Path, trace: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writes file and checksum after this one took its own file's checksum, and before it writes that."""
    cache = open_cache(tmp_path / "c", trace, {"h": head}, "cpu", agreement=False)
    assert cache is not None
    path = tmp_path / "c" / "ab" / f"{'0' * 64}.npz"
    real, others = files.sha256_of, [b"other"]

    def sha256_of(asked: Path) -> str:
        found = real(asked)
        if others:
            data = others.pop()
            cache.write(path, lambda: cache.write_bytes(path, data))
        return found

    monkeypatch.setattr(files, "sha256_of", sha256_of)
    cache.write(path, lambda: cache.write_bytes(path, b"mine"))
    assert path.read_bytes() == b"other" and not others and cache.entries.holds(path)
    cache.write(path.with_suffix(".parquet"), lambda: None)  # a third process has deleted its file
    assert not cache.entries.holds(path.with_suffix(".parquet"))


def test_an_entry_that_is_being_written_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is there anew, and its checksum comes while this process waits; an old one is damaged at once."""
    said, slept = list[str](), list[float]()
    path = tmp_path / f"{'0' * 64}.npz"
    path.write_bytes(b"new")
    total = path.with_suffix(".sha256")
    total.write_text("0" * 64)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        total.write_text(files.sha256_of(path))

    monkeypatch.setattr(time, "sleep", sleep)
    assert Entries(tmp_path, said.append).holds(path) and slept and not said
    os.utime(path, (0, 0))
    path.with_suffix(".sha256").write_text("0" * 64)
    assert not Entries(tmp_path, said.append).holds(path) and len(slept) == len(said) == 1


def test_a_trace_that_is_recorded_still_is_not_kept(tmp_path: Path, head: Checkpoint) -> None:
    folder = write_trace(tmp_path / "t", [make_four()], finish=False)
    trace = Trace.open(folder, allow_incomplete=True)
    assert open_cache(tmp_path / "c", trace, {"h": head}, "cpu", agreement=False) is None


@pytest.mark.parametrize("command", ["simulate", "diagnose"])
def test_rows_that_are_not_held_against_checksums_are_not_kept(
    tmp_path: Path, trace: Trace, head: Checkpoint, command: str
) -> None:
    """An entry is named after the checksums, and damaged rows would lie under the name of the sound ones."""
    unverified = Trace.open(trace.path, verify=False)
    for one in (unverified, unverified.take(Part(limit=1)), trace.unverified()):
        with pytest.raises(UsageError, match="leave --no-verify or --cache out"):
            open_cache(tmp_path / "c", one, {"h": head}, "cpu", agreement=False)
    typed = [command, str(trace.path), "--draft", str(tmp_path / "head"), "--no-verify"]
    run = CliRunner().invoke(cli, [*typed, "--cache", str(tmp_path / "c")])
    assert run.exit_code == 1 and "leave --no-verify or --cache out" in run.stderr
    assert not (tmp_path / "c").exists()


def test_the_command_keeps_and_finds(tmp_path: Path, trace: Trace) -> None:
    typed = ["simulate", str(trace.path), "--draft", str(tmp_path / "head"), "--steps", "1", "--steps", "2"]
    write_head(tmp_path / "head", CONFIG)
    runs = [CliRunner().invoke(cli, [*typed, "--cache", str(tmp_path / "c")]) for _ in range(2)]
    assert [run.exit_code for run in runs] == [0, 0]
    assert ["replayed before" in runs[0].stderr, "note: 2 of 2 variants" in runs[1].stderr] == [False, True]
    assert runs[0].stdout.splitlines()[:9] == runs[1].stdout.splitlines()[:9]


def test_a_cache_that_cannot_be_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file, a cache is a folder"):
        check_cache_folder(tmp_path / "file")
    with pytest.raises(OutputError, match="cannot write to /proc/cache"):
        check_cache_folder(Path("/proc/cache"))
    missing = CliRunner().invoke(cli, ["simulate", "no-trace", "--draft", "d", "--cache", str(tmp_path / "file")])
    assert "a cache is a folder" in missing.stderr


def test_a_cache_of_another_version_is_said_and_stays(
    tmp_path: Path, trace: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> str:
        typed = ["simulate", str(trace.path), "--draft", str(head.path), "--cache", str(tmp_path / "c")]
        result = CliRunner().invoke(cli, typed)
        assert result.exit_code == 0
        return result.stderr

    assert run() == ""
    before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*.*")}
    monkeypatch.setattr(module, "program_sha256", lambda: "another")
    assert "has none of these variants whole as this version" in run()
    assert "1 of 1 variants were replayed before" in run()
    assert before and all(path.read_bytes() == data for path, data in before.items())
