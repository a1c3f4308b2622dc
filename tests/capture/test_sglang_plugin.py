"""Recording a real SGLang server on the CPU rig: drafting a chain, drafting trees, and alone with sampling."""

import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from rig.server import Generated, Server, end_group, start_server
from support.processes import living
from support.spooled import Spooled, counting_spool

from replay.capture.client.capture import capture_server
from replay.capture.events import CaptureResult, Event, Noted
from replay.capture.manifest import read_manifests
from replay.capture.options import ServerOptions
from replay.capture.plugin.columns import Columns
from replay.capture.plugin.live import LiveRecording
from replay.capture.plugin.plugin import Plugin
from replay.capture.plugin.recorder import RowRecorder
from replay.capture.plugin.recording import Recording
from replay.capture.plugin.reporter import Reporter
from replay.capture.spool import SPOOL, launch_folder, row_file_names
from replay.capture.target_files import fingerprint_target
from replay.diagnosis.feed import read_feeding
from replay.errors import CaptureError, WiringError
from replay.traces.check import check_trace
from replay.traces.fp8 import dequantise, quantise
from replay.traces.reader import Trace

TEXTS = (
    "Name the four seasons in order and say which is the coldest.",
    "Write one sentence about a lighthouse.",
    "List the first ten even numbers, separated by commas.",
    "Why is the sky blue? Answer briefly.",
)
NEW_TOKENS = 24
LESS: dict[str, Any] = {"taps_for": 1, "rows": "fp8", "prompt_rows": 20}
CHUNK = 32  # tokens of a prefill at most: the prompts come in several pieces
# topk, steps, verified rows
KINDS = {"chain": (1, 5, 6), "tree": (4, 3, 8)}
# The tree's server has so little KV that it must put requests back, and one prompt is too long for it.
CROWDED = 192
TOO_LONG = {"id": "long", "input_ids": [1 + i for i in range(CROWDED + 1)]}


@dataclass(frozen=True, slots=True)
class Captured:
    """A trace of a real server, and what was told on the way."""

    trace: Trace
    result: CaptureResult
    events: list[Event]
    leftover: list[str]  # files in the spool once the client had gone
    log: str  # of the server
    safe: dict[str, bytes]  # shards that were whole when the `replay serve` of an earlier server was killed
    killed: list[int]  # the processes that this earlier server had,
    outlived: list[int]  # and those that were left of it soon after
    less: Trace | None = None  # what the chain's server gave when it was asked for less,
    spooled: Spooled | None = None  # and what it wrote then


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head that comes with the project."""
    from replay.traces.sample_files import sample_head

    return sample_head()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"q{i}", "prompt": text}) for i, text in enumerate(TEXTS)))
    return path


def options(server: Server, prompt_file: Path, out: Path, **changes: Any) -> ServerOptions:
    return ServerOptions(server.url, prompt_file, out, max_new_tokens=NEW_TOKENS, **changes)


@contextmanager
def aborting(server: Server, spool: Path) -> Iterator[None]:
    """Meanwhile, abort what the server does, once: when a request of the capture is some forwards old."""
    stop = threading.Event()

    def abort() -> None:
        while not stop.wait(0.02):
            if any(len(list(one.glob("rows-*"))) >= 3 for one in spool.glob("*")):
                body = json.dumps({"abort_all": True}).encode()
                asked = urllib.request.Request(
                    f"{server.url}/abort_request", body, {"Content-Type": "application/json"}
                )
                urllib.request.urlopen(asked, timeout=60).close()
                return

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def serving(kind: str, target_dir: Path, draft_dir: Path, folder: Path) -> Iterator[Server]:
    """A server that ``replay serve`` started, as its user would, recording into ``folder``/trace.

    In a folder that holds another ``replay``, as a checkout of this project does; the head's path is relative to it.
    """
    (folder / "replay").mkdir(exist_ok=True)
    (folder / "replay" / "__init__.py").write_text("raise ImportError('this is not the installed package')")
    if not (folder / "draft").exists():
        (folder / "draft").symlink_to(draft_dir)
    topk, steps, rows = KINDS.get(kind, (1, 1, 2))
    extra = ["--chunked-prefill-size", str(CHUNK)]
    if kind == "tree":
        extra += ["--max-total-tokens", str(CROWDED)]
    replay_command = str(Path(sys.executable).with_name("replay"))
    with start_server(
        target_dir, Path("draft") if kind in KINDS else None, log=folder / "server.log", steps=steps, topk=topk,
        num_draft_tokens=rows, extra_args=extra, cwd=folder,
        launcher=(replay_command, "serve", "--trace", "trace", "--taps", "embed,3,16,28", "--"),
    ) as server:  # fmt: skip
        yield server


def capture_until_killed(server: Server, prompts: Path, out: Path) -> dict[str, bytes]:
    """Kill ``replay serve`` (kill -9) once some request is safe; the files that were whole then, by name."""

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not (out / "shard-00000.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        end_group(server.process)  # a group of its own: the server is in another

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.capture.client.shard.SHARD_REQUESTS", 1)
        with pytest.raises(CaptureError, match="--resume"):
            capture_server(options(server, prompts, out, concurrency=1, retries=1), lambda _: None)
    thread.join()
    return {path.name: path.read_bytes() for path in out.glob("shard-*")}


def capture_less(server: Server, prompts: Path, out: Path) -> tuple[Trace, Spooled]:
    """The same prompts, of which less is asked for; and what the server wrote of them."""
    with counting_spool() as spooled:
        capture_server(options(server, prompts, out, concurrency=1, **LESS), lambda _: None)
    return Trace.open(out), spooled


@pytest.fixture(scope="module")
def captured(
    target_dir: Path, draft_dir: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Captured]:
    """Traces by kind of server, each by itself: the chain's is killed in mid-capture, the tree's is crowded."""
    made: dict[str, Captured] = {}

    def of(kind: str) -> Captured:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            trace, asked, safe = folder / "trace", prompts, {}
            killed: list[int] = []
            outlived: list[int] = []
            if kind == "chain":
                with serving(kind, target_dir, draft_dir, folder) as server:
                    killed = [one.pid for one in psutil.Process(server.process.pid).children(recursive=True)]
                    safe = capture_until_killed(server, prompts, trace)
                    outlived = living(killed)
            if kind == "tree":
                asked = folder / "prompts.jsonl"
                asked.write_text(f"{prompts.read_text()}\n{json.dumps(TOO_LONG)}")
            with serving(kind, target_dir, draft_dir, folder) as server:
                server.generate([[1, 2, 3]], rids=["somebody-else"], max_new_tokens=4)
                events: list[Event] = []
                wanted = options(
                    server, asked, trace, temperature=0.0 if kind in KINDS else 0.8,
                    concurrency=4 if kind == "tree" else 1, resume=kind == "chain",
                )  # fmt: skip
                with aborting(server, trace / SPOOL) if kind == "tree" else nullcontext():
                    result = capture_server(wanted, events.append)
                less, spooled = capture_less(server, asked, folder / "less") if kind == "chain" else (None, None)
                time.sleep(0.5)
                launch = max((trace / SPOOL).iterdir(), key=lambda path: path.stat().st_mtime)
                left = row_file_names(launch)
            log = (folder / "server.log").read_text(errors="replace")
            made[kind] = Captured(Trace.open(trace), result, events, left, log, safe, killed, outlived, less, spooled)
        return made[kind]

    return of


@pytest.fixture(scope="module")
def plain(
    target_dir: Path, draft_dir: Path, captured: Callable[[str], Captured],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Generated]:  # fmt: skip
    """Answers of a server that does not record to the prompts of the chain's trace, in the order of its requests."""
    topk, steps, rows = KINDS["chain"]
    trace = captured("chain").trace
    prompts = [trace.read(i, []).tokens[: record.prompt_tokens].tolist() for i, record in enumerate(trace.records)]
    with start_server(
        target_dir, draft_dir, log=tmp_path_factory.mktemp("plain") / "server.log", steps=steps, topk=topk,
        num_draft_tokens=rows, extra_args=["--chunked-prefill-size", str(CHUNK)],
    ) as server:  # fmt: skip
        return server.generate(prompts, max_new_tokens=NEW_TOKENS)


def outputs(trace: Trace) -> list[list[int]]:
    return [trace.read(i, []).tokens[record.prompt_tokens :].tolist() for i, record in enumerate(trace.records)]


def same_rows(one: pl.DataFrame, other: pl.DataFrame, columns: Sequence[str]) -> bool:
    """Whether two tables have the same rows in these columns, in any order."""
    return one.select(columns).sort(columns[:2]).equals(other.select(columns).sort(columns[:2]))


def own_rounds(trace: Trace, request_id: str) -> list[dict[str, Any]]:
    return trace.served_rounds().filter(pl.col("request_id") == request_id).sort("round").to_dicts()


# ---- traces of real servers ----


@pytest.mark.parametrize("kind", ["chain", "tree", "alone"])
def test_trace_passes_its_check(captured: Callable[[str], Captured], kind: str) -> None:
    """Above all: lm_head(final), made anew, is the recorded argmax and (greedy) the token that the server emitted."""
    one = captured(kind)
    assert [finding for finding in check_trace(one.trace) if finding.severity == "error"] == []
    assert len(one.trace) == len(TEXTS)
    assert set(one.trace.taps) == {"embed", "3", "16", "28", "final"} and one.trace.header.embed == "lookup"
    notes = [event.text for event in one.events if isinstance(event, Noted)]
    assert len(notes) == len(one.result.refused) == (kind == "tree")


def test_a_server_that_is_asked_for_less_gives_the_same_rows(captured: Callable[[str], Captured]) -> None:
    """Those of the whole trace cut down: the first request has all taps, the others fewer; fp8; of prompts the end."""
    import torch

    whole, less = captured("chain").trace, captured("chain").less
    assert less is not None and [one for one in check_trace(less) if one.severity == "error"] == []
    assert less.header.version == 2 and outputs(less) == outputs(whole)
    told = ("request_id", "round", "anchor", "drafted", "accepted")
    assert same_rows(less.served_rounds(), whole.served_rounds(), told)
    places = {record.request_id: index for index, record in enumerate(whole.records)}
    for index, record in enumerate(less.records):
        taps = ["3", "16", "final"] if record.taps is not None else ["3", "16", "28", "final"]
        assert (record.taps is None) == (record.request_id == "q0")
        first = record.prompt_tokens - LESS["prompt_rows"]
        assert record.first_row == first > 0
        mine, theirs = less.read(index, taps), whole.read(places[record.request_id], taps)
        for tap in taps:
            rows = theirs.taps[tap][first:]
            rows = rows if tap == "final" else dequantise(*quantise(rows), rows.dtype)
            assert torch.equal(mine.taps[tap][first:], rows)


def test_a_server_that_is_asked_for_less_writes_less(captured: Callable[[str], Captured]) -> None:
    """To the byte what the rows that it wrote take by the choice, and few rows that the trace does not keep."""
    less, spooled = captured("chain").less, captured("chain").spooled
    assert less is not None and spooled is not None
    width = less.header.target.hidden_size
    final, rounded = 2 * width, width + 4
    stored = sum(
        (LESS["prompt_rows"] + record.output_tokens - 1) * (final + (2 if record.taps is not None else 3) * rounded)
        for record in less.records
    )
    assert stored <= spooled.tap_bytes <= 1.2 * stored  # verifies that go beyond the end of an output
    beside = 4 * spooled.rows + spooled.logits * (8 * less.header.topk + 4) + spooled.fed * (8 + 3 * 2 * width)
    assert spooled.tensors == spooled.tap_bytes + beside
    everything = sum((record.tokens - 1) * 5 * 2 * width for record in less.records)
    assert spooled.tap_bytes < everything / 3


def test_a_server_that_was_killed_is_gone_on_with(captured: Callable[[str], Captured]) -> None:
    """What was whole stays byte for byte, the rest is asked of the server that was restarted, and nothing twice."""
    one = captured("chain")
    assert 0 < one.result.recorded < len(TEXTS)
    assert one.safe and one.safe == {name: (one.trace.path / name).read_bytes() for name in one.safe}
    assert sorted(record.request_id for record in one.trace.records) == [f"q{i}" for i in range(len(TEXTS))]


def test_no_process_is_left_of_a_server_whose_launcher_was_killed(captured: Callable[[str], Captured]) -> None:
    """kill -9 of ``replay serve``; it was started in a folder that holds another ``replay``, and recorded there."""
    one = captured("chain")
    assert len(one.killed) >= 4  # HTTP and tokenizer, scheduler, detokenizer, and what keeps them
    assert one.outlived == []


def test_a_crowded_server(captured: Callable[[str], Captured]) -> None:
    """Requests that it put back, aborted or did not take: each of the others stands in the trace once, and whole."""
    one = captured("tree")
    assert "Retract requests" in one.log
    # somebody's, the probe, the prompts; and more, for what was aborted
    assert one.log.count("POST /generate") > 2 + len(TEXTS) + 1
    (name, reason), *others = one.result.refused.items()
    assert (name, others) == ("long", []) and str(CROWDED + 1) in reason
    assert any(f"refused request 'long' ({reason})" in text for text in one.trace.header.missing)
    assert sorted(record.request_id for record in one.trace.records) == [f"q{i}" for i in range(len(TEXTS))]


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_the_server_counted(captured: Callable[[str], Captured], kind: str) -> None:
    topk, steps, nodes = KINDS[kind]
    trace = captured(kind).trace
    for index, record in enumerate(trace.records):
        rounds = own_rounds(trace, record.request_id)
        counted = [0] * (steps + 1)
        for one in rounds:
            counted[one["accepted"]] += 1
        assert record.server_histogram is not None
        assert counted[: len(record.server_histogram)] == list(record.server_histogram)
        assert sum(counted) == record.server_verify_rounds == len(rounds)
        tokens = [*trace.read(index, []).tokens.tolist(), *record.tail_ids]
        anchor = record.prompt_tokens
        for one in rounds:
            # A request that a crowded server put back is prefilled again, which gives it a token without a round.
            assert one["anchor"] - anchor in ((0, 1) if kind == "tree" else (0,))
            anchor = one["anchor"]
            assert len(one["drafted"]) == nodes - 1
            taken = tokens[anchor + 1 : anchor + 1 + one["accepted"]]
            if topk == 1:
                assert one["drafted"][: one["accepted"]] == taken
                after = tokens[anchor + 1 + one["accepted"]]
                assert one["accepted"] == steps or one["drafted"][one["accepted"]] != after
            assert set(taken) <= set(one["drafted"])
            anchor += one["accepted"] + 1
        assert anchor >= record.prompt_tokens + record.output_tokens - (2 if kind == "tree" else 1)


def test_recording_changes_nothing(captured: Callable[[str], Captured], plain: list[Generated]) -> None:
    trace = captured("chain").trace
    assert outputs(trace) == [answer.output_ids for answer in plain]
    assert [list(record.server_histogram or ()) for record in trace.records] == [
        answer.meta_info["spec_correct_drafts_histogram"] for answer in plain
    ]


def test_header_tells_what_ran(captured: Callable[[str], Captured], draft_dir: Path) -> None:
    engine = captured("chain").trace.header.engine
    assert (engine.name, engine.version) == ("sglang", "0.5.23")
    assert engine.details["speculative_num_steps"] == "5"
    assert json.loads(engine.details["draft_config"]) == json.loads((draft_dir / "config.json").read_text())
    assert engine.details["draft_fingerprint"] == fingerprint_target(draft_dir)
    ids = json.loads((draft_dir / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert engine.details["wiring"] == ",".join("embed" if one == -1 else str(one + 1) for one in sorted(ids))


def test_sampled_output_without_a_draft(captured: Callable[[str], Captured]) -> None:
    trace = captured("alone").trace
    assert all(record.temperature == 0.8 and record.server_verify_rounds == 0 for record in trace.records)
    greedy = [trace.logits(index)[0][:, 0].tolist() for index in range(len(trace))]
    assert outputs(trace) != greedy  # so some tokens were drawn that are not the argmax
    assert "verify rounds of a server: it drafts nothing" in trace.header.missing


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_named_by_what_the_draft_was_fed(captured: Callable[[str], Captured], kind: str) -> None:
    """Every slot's tap, bit for bit in all rows, and the sound pairing: also of prompts in pieces (of a chain), and
    where requests were put back or asked for again (of a tree)."""
    trace = captured(kind).trace
    found = read_feeding(trace)
    assert found is not None and found.requests == len(trace) and found.rows == trace.fed_rows
    assert len(trace) < found.rows <= 8 * len(trace)
    assert ",".join(found.wiring or ()) == trace.header.engine.details["wiring"]
    for slot in found.slots:
        assert slot.place is not None and slot.equal[slot.place] == slot.compared[slot.place] == slot.rows
        assert (slot.also, slot.zeros) == ((), 0)
    assert (found.next_token, found.offset, found.at_offset) == (found.rows, 0, found.rows)


def test_a_server_without_a_draft_has_no_feed(captured: Callable[[str], Captured]) -> None:
    assert captured("alone").trace.fed_rows == 0


@pytest.mark.parametrize("kind", ["chain", "alone"])
def test_requests_of_others_are_not_recorded(captured: Callable[[str], Captured], kind: str) -> None:
    """The spool is empty once the client has gone: rows of ``somebody-else`` and of health checks would have stayed."""
    assert captured(kind).leftover == []


# ---- without a server ----


def test_a_model_that_cannot_capture_a_tap_is_named() -> None:
    from types import SimpleNamespace

    from replay.capture.plugin.model import capture_boundaries, capturing_parts

    core = SimpleNamespace(layers=[None] * 4, layers_to_capture=[])
    model = SimpleNamespace(model=core, logits_processor=SimpleNamespace(keep_last_hidden_states=False))
    with pytest.raises(CaptureError, match="no set_dflash_layers_to_capture"):
        capture_boundaries(model, core, [1])
    model.set_dflash_layers_to_capture = lambda ids: setattr(core, "layers_to_capture", [one + 1 for one in ids])
    assert capturing_parts(SimpleNamespace(language_model=model))[0] is core
    with pytest.raises(CaptureError, match=r"R\[4\] cannot be recorded.*1 to 3"):
        capture_boundaries(model, core, [1, 4])
    capture_boundaries(model, core, [0, 3])
    assert core.layers_to_capture == [0, 3]


def test_a_model_that_captures_otherwise_is_left_as_it_was() -> None:
    from types import SimpleNamespace

    from replay.capture.plugin.model import capture_boundaries

    layers = [SimpleNamespace(_is_layer_to_capture=one == 2) for one in range(3)] + [SimpleNamespace()]
    core = SimpleNamespace(layers=layers, layers_to_capture=[2])
    model = SimpleNamespace(model=core, capture_aux_hidden_states=False)

    def verbatim(ids: list[int]) -> None:
        core.layers_to_capture[:] = ids
        model.capture_aux_hidden_states = True
        for one in ids:
            layers[one]._is_layer_to_capture = True

    model.set_dflash_layers_to_capture = verbatim
    with pytest.raises(CaptureError, match=r"captures \[-1, 0\] where \[0, 1\]"):
        capture_boundaries(model, core, [0, 1])
    assert core.layers_to_capture == [2] and model.capture_aux_hidden_states is False
    assert [vars(layer) for layer in layers] == [
        {"_is_layer_to_capture": False}, {"_is_layer_to_capture": False}, {"_is_layer_to_capture": True}, {},
    ]  # fmt: skip


def plugin_of(folder: Path, wiring: str | None = None) -> Plugin:
    recording = Recording(str(folder), "0" * 16, None, wiring, 4)
    return Plugin(recording, Reporter(recording, "0.5.23"))


def recording_to(plugin: Plugin, recorder: Any) -> None:
    """Let ``plugin`` record as one whose target captures R[0] and R[3], of width 2, and whose draft is fed R[3]."""
    plugin.columns = Columns((0, 3), (1,), width=2, vocabulary=16)
    plugin.live = LiveRecording(plugin.columns, 4, recorder)


def told(folder: Path) -> tuple[str, str]:
    """State and reason of the manifest."""
    (manifest,) = read_manifests(launch_folder(folder, "0" * 16))
    return manifest.state, manifest.reason


def runner_of(core: Any, setter: Callable[[list[int]], None], kind: str = "LlamaForCausalLM") -> Any:
    from types import SimpleNamespace

    model = type(kind, (SimpleNamespace,), {})(
        model=core, logits_processor=SimpleNamespace(keep_last_hidden_states=False), set_dflash_layers_to_capture=setter
    )
    config = SimpleNamespace(num_hidden_layers=30, hidden_size=2)
    return SimpleNamespace(
        is_draft_worker=False, model=model, spec_aux_config=SimpleNamespace(eagle_use_aux_hidden_state=True),
        spec_algorithm=SimpleNamespace(is_none=lambda: False, is_eagle3=lambda: True),
        model_config=SimpleNamespace(hf_text_config=config, vocab_size=16),
    )  # fmt: skip


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model's layers, in a process of which SGLang knows no layout."""
    from types import SimpleNamespace

    monkeypatch.setattr("replay.capture.plugin.plugin.layout_problem", lambda: None)
    return SimpleNamespace(layers=[SimpleNamespace() for _ in range(30)], layers_to_capture=[2, 15, 27])


@pytest.mark.parametrize(
    ("arguments", "state", "reason"),
    [
        ({"enable_multi_layer_eagle": True}, "refused", "enable_multi_layer_eagle is set"),
        ({}, "refused", "captures [2]"),
    ],
)
def test_refused_taps_leave_the_model_alone(
    tmp_path: Path, core: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], state: str, reason: str
) -> None:
    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", lambda: arguments)
    plugin = plugin_of(tmp_path)
    plugin.after_attention(None, runner_of(core, lambda _: setattr(core, "layers_to_capture", [2])))
    assert plugin.columns is None and core.layers_to_capture == [2, 15, 27]
    assert told(tmp_path)[0] == state and reason in told(tmp_path)[1]


@pytest.mark.parametrize(
    "error",
    [RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, OSError, AssertionError, ImportError,
     ZeroDivisionError],
)  # fmt: skip
def test_errors_of_ours_end_the_recording_and_not_the_server(
    tmp_path: Path, core: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(*_: Any) -> None:
        raise error("moved")

    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", dict)
    plugin = plugin_of(tmp_path)
    plugin.after_attention(None, runner_of(core, broken))
    assert plugin.columns is None and core.layers_to_capture == [2, 15, 27]
    assert told(tmp_path)[0] == "failed" and error.__name__ in told(tmp_path)[1] and "moved" in told(tmp_path)[1]
    with pytest.raises(error, match="moved"):  # a wiring that was asked for would not be had
        plugin_of(tmp_path, "embed,3,16").after_attention(None, runner_of(core, broken))


@pytest.mark.parametrize(
    ("wiring", "setter", "message"),
    [
        ("embed,3", None, "names 2 taps, the head takes 3"),
        ("embed,3,30", None, r"R\[30\] cannot be recorded"),
        ("embed,3,16", [2], r"captures \[2\]"),
    ],
)
def test_a_wiring_that_cannot_be_had_is_a_wiring_error(
    tmp_path: Path, core: Any, monkeypatch: pytest.MonkeyPatch, wiring: str, setter: list[int] | None, message: str
) -> None:
    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", dict)
    with pytest.raises(WiringError, match=f"--wiring {wiring} cannot be had: .*{message}"):
        plugin_of(tmp_path, wiring).after_attention(
            None, runner_of(core, lambda _: setattr(core, "layers_to_capture", setter))
        )
    assert told(tmp_path)[0] == "refused" and core.layers_to_capture == [2, 15, 27]


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("DeepseekV3ForCausalLM", [-1, 1, 3], "type --wiring embed,2,4 if each id is the output of a layer"),
        ("KimiK25ForConditionalGeneration", [-1, 1, 3], "R[-1, 1, 3] to SGLang's KimiK25"),
        ("DeepseekV3ForCausalLM", [2, 29, 30], "captures R[0] to R[29]"),
        ("LlamaForCausalLM", [3, 16, 31], "type --wiring and as many taps as the head takes"),
    ],
)
def test_ids_at_which_sglang_stops_at_the_first_request_stop_the_server_before(
    tmp_path: Path, core: Any, monkeypatch: pytest.MonkeyPatch, kind: str, given: list[int], reason: str
) -> None:
    """Recorded with --wiring they can be: the same ids, and what is asked for is fed."""
    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", dict)
    core.layers_to_capture = given
    runner = runner_of(core, lambda ids: setattr(core, "layers_to_capture", [one + 1 for one in ids]), kind)
    with pytest.raises(WiringError, match=re.escape(reason)):
        plugin_of(tmp_path).after_attention(None, runner)
    assert told(tmp_path)[0] == "stopped" and reason in told(tmp_path)[1] and core.layers_to_capture == given
    plugin = plugin_of(tmp_path / "fed", "embed,2,4")
    monkeypatch.setattr(plugin, "_begin", lambda *_: None)
    plugin.after_attention(None, runner)
    assert {0, 2, 4} <= set(core.layers_to_capture) <= set(range(30))


def test_ids_that_count_from_the_end_are_served_unrecorded(
    tmp_path: Path, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index below 0 marks a layer there, as in Python, so the server serves."""
    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", dict)
    core.layers_to_capture = [-1, 1, 3]
    plugin_of(tmp_path).after_attention(None, runner_of(core, lambda _: None, "Qwen3MoeForCausalLM"))
    reason = "the head's layer ids count from Qwen3MoeForCausalLM's last layer, which is no tap"
    assert told(tmp_path) == ("refused", reason)


def test_a_manifest_that_cannot_be_written_is_told_to_those_who_ask(tmp_path: Path) -> None:
    from types import SimpleNamespace

    plugin = plugin_of(tmp_path / "file")
    (tmp_path / "file").touch()
    assert plugin.reporter.tell(state="recording") is False
    asked = SimpleNamespace(internal_state={})
    plugin.after_internal_state(asked)
    said = asked.internal_state["replay"]
    assert said["state"] == "failed" and said["reason"].startswith(f"cannot write to {plugin.reporter.folder}: ")
    plugin.failed("the first reason")  # which stays, though it cannot be written either
    plugin.after_internal_state(asked)
    assert asked.internal_state["replay"]["reason"] == "the first reason"


@pytest.mark.parametrize("kind", ["prefill", "decode", "verify", "feed"])
def test_nothing_that_is_recorded_shares_memory_with_the_engine(tmp_path: Path, kind: str) -> None:
    """The engine writes the next step over its buffers: all numbers are int32 already here, so that a view would do."""
    from types import SimpleNamespace

    import torch

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32)

    plugin = plugin_of(tmp_path)
    kept: dict[str, torch.Tensor] = {}
    recording_to(plugin, SimpleNamespace(submit=lambda tensors, _: kept.update(tensors), failure=None))
    full, final, logits = torch.ones(6, 4), torch.ones(6, 2), torch.ones(6, 16)
    spec = SimpleNamespace(
        hidden_states=full,
        topk=2,
        draft_token=numbers(6),
        retrieve_next_token=numbers(2, 3),
        retrieve_next_sibling=numbers(2, 3),
    )
    mode = SimpleNamespace(
        is_idle=lambda: False, is_target_verify=lambda: kind == "verify",
        is_extend=lambda: kind in ("prefill", "feed"),
        is_decode=lambda: kind == "decode",
    )  # fmt: skip
    batch = SimpleNamespace(
        rids=["replay-a"] if kind in ("prefill", "feed") else ["replay-a", "replay-b"], forward_mode=mode,
        input_ids=numbers(6), positions=numbers(6), extend_seq_lens_cpu=[6], extend_prefix_lens_cpu=[0], spec_info=spec,
        reqs=[SimpleNamespace(rid="replay-a"), SimpleNamespace(rid="replay-b")],
    )  # fmt: skip
    given = SimpleNamespace(hidden_states=full, last_hidden_states=final, next_token_logits=logits)
    if kind == "feed":
        plugin.before_forward(SimpleNamespace(is_draft_worker=True), batch)
    else:
        plugin.after_forward(SimpleNamespace(logits_output=given), SimpleNamespace(is_draft_worker=False), batch)
    result = SimpleNamespace(
        accept_index=numbers(2, 2), speculative_num_draft_tokens=3, next_token_ids=numbers(6),
        accept_lens=numbers(2), new_seq_lens=numbers(2),
    )  # fmt: skip
    if kind == "verify":
        plugin.after_verify(result, None, batch)
    engine = [full, final, logits, *(part for one in (batch, spec, result) for part in vars(one).values())]
    theirs = {part.untyped_storage().data_ptr() for part in engine if isinstance(part, torch.Tensor)}
    assert kept and not theirs & {part.untyped_storage().data_ptr() for part in kept.values()}


class Submitted:
    """A recorder that turns what it is given into entries and tensors at once."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.made: list[tuple[Any, Any]] = []

    def submit(self, tensors: Any, build: Callable[[Any], tuple[Any, Any]]) -> None:
        self.made.append(build(tensors))

    def fail(self, reason: str) -> None:
        self.failure = reason


def test_rows_and_passes_of_others_are_counted(tmp_path: Path) -> None:
    """A prefill of 2 + 3 + 1 rows, the first 2 somebody else's; of three verifies the second has no request of ours."""
    from types import SimpleNamespace

    import torch

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32)

    plugin, seen = plugin_of(tmp_path), Submitted()
    recording_to(plugin, seen)
    given = SimpleNamespace(
        hidden_states=torch.ones(6, 4), last_hidden_states=torch.ones(6, 2), next_token_logits=torch.ones(6, 16)
    )
    result = SimpleNamespace(
        accept_index=numbers(3, 2), speculative_num_draft_tokens=2, next_token_ids=numbers(6),
        accept_lens=numbers(3) + 1, new_seq_lens=numbers(3) + 9,
    )  # fmt: skip
    for kind, names in (("prefill", "xab"), ("verify", "axb"), ("verify", "xyz"), ("verify", "xyb")):
        rids = [f"replay-{name}" if name in "ab" else name for name in names]
        mode = SimpleNamespace(
            is_idle=lambda: False, is_target_verify=lambda kind=kind: kind == "verify",
            is_extend=lambda kind=kind: kind == "prefill",
        )  # fmt: skip
        batch = SimpleNamespace(
            rids=rids, reqs=[SimpleNamespace(rid=rid) for rid in rids], forward_mode=mode, input_ids=numbers(6),
            extend_seq_lens_cpu=[2, 3, 1], extend_prefix_lens_cpu=[0, 4, 0],
            spec_info=SimpleNamespace(topk=1, draft_token=numbers(6)),
        )  # fmt: skip
        out = SimpleNamespace(logits_output=SimpleNamespace(**vars(given)))
        plugin.after_forward(out, SimpleNamespace(is_draft_worker=False), batch)
        if kind == "verify":
            plugin.after_verify(result, None, batch)
    entries = [entry for made, _ in seen.made for entry in made]
    assert seen.failure is None
    assert [(one.rid, one.start, one.rows, one.forward_rows) for one in entries[:2]] == [
        ("replay-a", 4, 3, 6), ("replay-b", 0, 1, 6),
    ]  # fmt: skip
    assert [(one.rid, one.verify_pass, one.batch, one.batch_row) for one in entries[2:]] == [
        ("replay-a", 0, 3, 0), ("replay-b", 0, 3, 2), ("replay-b", 2, 3, 2),
    ]  # fmt: skip


def test_few_rows_of_a_prompt_are_kept_as_the_draft_gets_them(tmp_path: Path) -> None:
    """Of a prefill of five requests: two of ours, one of 30 rows and one of a single row; not those of a later piece of
    a prompt, of somebody else, or of no row."""
    from types import SimpleNamespace

    import torch

    plugin, kept = plugin_of(tmp_path), Submitted()
    recording_to(plugin, kept)
    lengths = {"replay-long": (30, 0), "replay-later": (4, 32), "somebody": (3, 0), "replay-none": (0, 0)}
    lengths["replay-short"] = (1, 0)
    rows = sum(length for length, _ in lengths.values())
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True), rids=list(lengths), input_ids=torch.arange(rows) + 100,
        positions=torch.arange(rows) + 7, extend_seq_lens_cpu=[length for length, _ in lengths.values()],
        extend_prefix_lens_cpu=[prefix for _, prefix in lengths.values()],
        spec_info=SimpleNamespace(hidden_states=torch.arange(6.0 * rows).reshape(rows, 6)),
    )  # fmt: skip
    plugin.before_forward(SimpleNamespace(is_draft_worker=False), batch)
    assert kept.made == []  # that is the target
    plugin.before_forward(SimpleNamespace(is_draft_worker=True), batch)
    ((entries, tensors),) = kept.made
    places = [1, 5, 9, 13, 17, 21, 25, 29, 37]
    assert [(entry.rid, entry.fed) for entry in entries] == [("replay-long", places[:8]), ("replay-short", [0])]
    assert tensors["feed.token"].tolist() == [100 + place for place in places]
    assert tensors["feed.position"].tolist() == [7 + place for place in places]
    assert torch.equal(tensors["feed.features"], batch.spec_info.hidden_states[places])
    batch.rids = None  # as in a warm-up
    plugin.before_forward(SimpleNamespace(is_draft_worker=True), batch)
    assert len(kept.made) == 1 and kept.failure is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"features": (5, 6)}, "a draft's prefill of 6 rows had 5 rows of features"),
        ({"tokens": 4}, "a draft's prefill of 6 rows had 4 token ids"),
        ({"positions": 0}, "a draft's prefill of 6 rows had 0 positions"),
        ({"features": (6, 5)}, "the draft was fed features float32 [6, 5], slots are of 2 features in"),
        ({"features": (6, 0)}, "the draft was fed features float32 [6, 0]"),
        ({"features": (6, 3, 2)}, "the draft was fed features float32 [6, 3, 2]"),
        ({"dtype": "float64"}, "the draft was fed features float64 [6, 6]"),
        ({"features": None}, "a draft's prefill of 6 rows had 0 rows of features"),
        ({"lacks": "spec_info"}, "AttributeError"),
        ({"lacks": "positions"}, "AttributeError"),
        ({"lacks": "extend_prefix_lens_cpu"}, "AttributeError"),
    ],
)
def test_a_draft_that_is_not_understood_ends_its_feed_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], why: str
) -> None:
    """Said once, in the log and in the manifest; the target's rows are still recorded, and nothing half is written."""
    from types import SimpleNamespace

    import torch

    plugin, kept = plugin_of(tmp_path), Submitted()
    recording_to(plugin, kept)
    plugin.reporter.tell(state="recording")
    shape = change.get("features", (6, 6))
    features = None if shape is None else torch.ones(shape, dtype=getattr(torch, change.get("dtype", "float32")))
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True), rids=["replay-a", "replay-b"],
        input_ids=torch.arange(change.get("tokens", 6)), positions=torch.arange(change.get("positions", 6)),
        extend_seq_lens_cpu=[4, 2], extend_prefix_lens_cpu=[0, 0], spec_info=SimpleNamespace(hidden_states=features),
    )  # fmt: skip
    if "lacks" in change:
        delattr(batch, change["lacks"])
    for _ in range(2):
        plugin.before_forward(SimpleNamespace(is_draft_worker=True), batch)
    assert plugin.no_feed is not None and kept.made == [] and kept.failure is None
    plugin.no_feed.join()
    (manifest,) = read_manifests(launch_folder(tmp_path, "0" * 16))
    assert manifest.state == "recording" and why in manifest.no_feed
    assert [why in record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [True]


@pytest.mark.parametrize("rids", [5, [7], ["replay-a"]])
def test_a_forward_that_is_not_understood_is_served_unrecorded(tmp_path: Path, rids: Any) -> None:
    from types import SimpleNamespace

    import torch

    plugin = plugin_of(tmp_path)
    recorder = RowRecorder(plugin.reporter.folder, 1, plugin.failed)
    recording_to(plugin, recorder)
    full = torch.arange(12.0).reshape(3, 4)
    logits_output = SimpleNamespace(hidden_states=full, last_hidden_states=full, next_token_logits=torch.ones(3, 16))
    mode = SimpleNamespace()  # without any method
    batch = SimpleNamespace(forward_mode=mode, rids=rids)
    plugin.after_forward(SimpleNamespace(logits_output=logits_output), SimpleNamespace(is_draft_worker=False), batch)
    recorder.close()
    assert torch.equal(logits_output.hidden_states, full[:, 2:])
    assert told(tmp_path)[0] == "failed" and "rows could not be copied" in told(tmp_path)[1]


class CaptureHiddenMode(Enum):
    """As SGLang 0.5.15 model_executor/forward_batch_info.py has it."""

    NULL = 0
    LAST = 1
    FULL = 2


def plain_forward(tmp_path: Path, rid: str, fed: tuple[int, ...] = ()) -> tuple[Any, Any, Submitted]:
    """A decode of one request as SGLang 0.5.15 runs it: it keeps hidden states only where its batch says so.

    Gives the batch, what the forward gave to the server, and what was recorded.
    """
    from types import SimpleNamespace

    import torch

    plugin, kept, runner = plugin_of(tmp_path), Submitted(), SimpleNamespace(is_draft_worker=False)
    recording_to(plugin, kept)
    plugin.columns = plugin.live.columns = Columns((0, 3), fed, width=2, vocabulary=16)  # type: ignore[union-attr]
    batch = SimpleNamespace(
        rids=[rid], capture_hidden_mode=CaptureHiddenMode.NULL, input_ids=torch.tensor([5]),
        positions=torch.tensor([7]), spec_info=None,
        forward_mode=SimpleNamespace(
            is_idle=lambda: False, is_target_verify=lambda: False, is_extend=lambda: False, is_decode=lambda: True
        ),
    )  # fmt: skip
    plugin.ask_for_states(runner, batch)
    full = batch.capture_hidden_mode is CaptureHiddenMode.FULL
    given = SimpleNamespace(
        hidden_states=torch.ones(1, 4) if full else None, last_hidden_states=torch.ones(1, 2),
        next_token_logits=torch.ones(1, 16),
    )  # fmt: skip
    plugin.after_forward(SimpleNamespace(logits_output=given), runner, batch)
    return batch, given, kept


def test_hidden_states_that_only_requests_ask_for_are_asked_for(tmp_path: Path) -> None:
    _, given, kept = plain_forward(tmp_path, "replay-a")
    ((entries, tensors),) = kept.made
    assert (entries[0].rid, entries[0].start, tensors["tap.3"].tolist()) == ("replay-a", 7, [[1.0, 1.0]])
    assert kept.failure is None and given.hidden_states is None  # the server gets what it would get without us


def test_requests_of_others_keep_no_hidden_states(tmp_path: Path) -> None:
    batch, given, kept = plain_forward(tmp_path, "somebody-else")
    assert batch.capture_hidden_mode is CaptureHiddenMode.NULL and given.hidden_states is None
    assert kept.made == [] and kept.failure is None


def test_a_forward_without_the_states_that_were_set_ends_the_recording(tmp_path: Path) -> None:
    """A server that says that it records must not lose rows in silence. With a draft, SGLang asks for them itself."""
    _, _, kept = plain_forward(tmp_path, "replay-a", fed=(1,))
    assert kept.made == []
    assert kept.failure == "SGLang kept no hidden states in a forward whose rows were to be recorded"


@pytest.mark.parametrize("fed", [[1, 2], [2, 0, 1], [3, 3], []])
def test_draft_is_fed_its_columns_in_their_order(tmp_path: Path, fed: list[int]) -> None:
    """The draft gets what its wiring names, as a tensor of its own; without a draft, what SGLang itself returns."""
    from types import SimpleNamespace

    import torch

    plugin = plugin_of(tmp_path)
    plugin.columns = Columns((0, 3, 16, 28), fed, width=2, vocabulary=16)
    full, final = torch.arange(24.0).reshape(3, 8), torch.ones(3, 2)
    out = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=full, last_hidden_states=final))
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
    plugin.after_forward(out, SimpleNamespace(is_draft_worker=False), batch)
    given = out.logits_output.hidden_states
    columns = [full[:, 2 * place : 2 * place + 2] for place in fed]
    assert torch.equal(given, torch.cat(columns, dim=1) if fed else final)
