"""What the plugin needs of an SGLang, looked for in the installed one and in copies of its parts that were moved."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig.inprocess import sglang_module

from replay.capture.manifest import Manifest, read_manifests
from replay.capture.plugin import hooks, seams
from replay.capture.plugin.columns import Columns
from replay.capture.plugin.copy_rows import HeldVerify, copy_verify
from replay.capture.plugin.joined import Joined, keeps_final
from replay.capture.plugin.plugin import Plugin
from replay.capture.plugin.recording import RECORD_VARIABLE, TRIED, Recording
from replay.capture.plugin.reporter import Reporter
from replay.capture.plugin.server_state import states_problem
from replay.capture.spool import launch_folder
from replay.errors import CaptureError, WiringError

NEEDED = [name for name, seam in seams.SEAMS.items() if not seam.without]
UNTRIED = "9.9.9"


@pytest.fixture(autouse=True)
def loaded() -> None:
    """Every module that holds a seam; the real ones."""
    for seam in seams.SEAMS.values():
        for way in seam.ways:
            sglang_module(way.module.removeprefix("sglang."))


def move(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take every way of a seam away: what it names is there under another name."""
    for way in seams.SEAMS[name].ways:
        if way.problem() is None:
            owner, last = way.owner()
            monkeypatch.setattr(owner, f"moved_{last}", getattr(owner, last), raising=False)
            monkeypatch.delattr(owner, last)


def test_installed_sglang_has_every_seam() -> None:
    found = seams.find_seams(sglang_module("version").__version__)
    assert found.problem is None and found.lacking == {} and found.notes == ()
    assert found.ways.keys() == seams.SEAMS.keys()


def test_another_version_is_recorded_with_a_line() -> None:
    found = seams.find_seams(UNTRIED)
    assert found.problem is None
    assert found.notes == (f"SGLang 9.9.9 has not been tried; recording was tried with {', '.join(TRIED)}",)


@pytest.mark.parametrize("name", NEEDED)
def test_a_seam_that_moved_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    move(monkeypatch, name)
    found = seams.find_seams(UNTRIED)
    assert found.problem is not None and found.problem.startswith("SGLang 9.9.9 has no ")
    first = seams.SEAMS[name].ways[0]
    assert first.name in found.problem and first.module in found.problem


@pytest.mark.parametrize("name", [name for name in seams.SEAMS if name not in NEEDED])
def test_a_seam_that_need_not_be_is_named_and_the_rest_recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    move(monkeypatch, name)
    found = seams.find_seams(TRIED[-1])
    assert found.problem is None
    (note,) = found.notes
    assert note == found.lacking[name] and note.endswith(f", so {seams.SEAMS[name].without} cannot be recorded")


@pytest.mark.parametrize("name", [name for name, seam in seams.SEAMS.items() if len(seam.ways) > 1])
def test_a_second_way_serves_where_the_first_is_gone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first, second, *_ = seams.SEAMS[name].ways
    assert seams.find_seams(TRIED[-1]).ways[name] == first
    monkeypatch.setattr(seams.Place, "problem", lambda place: "gone" if place == first else None)
    assert seams.find_seams(TRIED[-1]).ways[name] == second


def test_a_parameter_that_was_renamed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = sglang_module("srt.model_executor.model_runner").ModelRunner
    monkeypatch.setattr(runner, "forward", lambda self, work: None)
    problem = seams.find_seams(UNTRIED).problem
    assert problem is not None and "ModelRunner.forward(forward_batch) in sglang.srt.model_exec" in problem


# ---- the start of a scheduler, on an SGLang with moved parts ----


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], Manifest]:
    """Runs what runs before a scheduler loads its model, with a wiring or without; gives the manifest."""
    for name in (seams.STATE, seams.TAPS, seams.FORWARD, seams.VERIFY):  # hooks are taken out again
        owner, last = seams.SEAMS[name].ways[0].owner()
        monkeypatch.setattr(owner, last, getattr(owner, last))

    def started(wiring: str | None) -> Manifest:
        recording = Recording(str(tmp_path), "0" * 16, None, wiring, 4)
        monkeypatch.setenv(RECORD_VARIABLE, recording.to_json())
        hooks._install(SimpleNamespace())
        (manifest,) = read_manifests(launch_folder(tmp_path, "0" * 16))
        return manifest

    return started


def test_a_moved_class_leaves_the_server_as_it_is(
    start: Callable[[str | None], Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = sglang_module("srt.model_executor.model_runner").ModelRunner
    before = runner.forward
    scheduler = sglang_module("srt.managers.scheduler").Scheduler
    monkeypatch.setattr(scheduler, "get_internal_state", lambda self, recv_req: SimpleNamespace(internal_state={}))
    move(monkeypatch, seams.TAPS)
    manifest = start(None)
    assert manifest.state == "refused" and "ModelRunner.init_attention_backends" in manifest.reason
    assert runner.forward is before  # it computes as it would without us
    told = scheduler.get_internal_state(None, None).internal_state["replay"]  # what clients are answered
    assert (told["state"], told["reason"]) == ("refused", manifest.reason)


def test_a_wiring_that_cannot_be_had_still_stops_the_server(
    start: Callable[[str | None], Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    move(monkeypatch, seams.TAPS)
    with pytest.raises(WiringError, match=r"--wiring embed,3,16 cannot be had: SGLang .* has no ModelRunner.init_att"):
        start("embed,3,16")


def test_a_moved_feed_is_recorded_without_it(
    start: Callable[[str | None], Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    move(monkeypatch, seams.FEED)
    manifest = start(None)
    assert manifest.state == "loading" and manifest.no_feed in manifest.notes
    assert "no EagleDraftExtendInput in sglang.srt.speculative.eagle_info" in manifest.no_feed


@pytest.mark.parametrize(("name", "flag"), [("pp_size", "--pp-size 2"), ("attn_cp_size", "--attn-cp-size 2")])
def test_a_layout_that_cannot_be_recorded_is_served_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, flag: str
) -> None:
    """Asked once the model is there: before it, SGLang 0.5.15 to 0.5.18 knows no layout."""
    parallel = SimpleNamespace(**({"pp_size": 1, "attn_cp_size": 1} | {name: 2}))
    monkeypatch.setattr(sglang_module("srt.runtime_context"), "get_parallel", lambda: parallel)
    recording = Recording(str(tmp_path), "0" * 16, None, None, 4)
    alone = SimpleNamespace(is_draft_worker=False, spec_algorithm=SimpleNamespace(is_none=lambda: True))
    Plugin(recording, Reporter(recording, TRIED[-1])).after_attention(None, alone)
    (manifest,) = read_manifests(launch_folder(tmp_path, "0" * 16))
    assert manifest.state == "refused" and f"{flag} was seen, recording works with" in manifest.reason


def test_a_server_that_keeps_last_states_only_is_served_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"return_hidden_states_mode": "last", "enable_return_hidden_states": True}  # as SGLang resolves it
    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", lambda: arguments)
    alone, drafting = (
        SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda none=none: none)) for none in (True, False)
    )
    assert states_problem(alone) == "--return-hidden-states-mode last was seen, recording works with full"
    assert states_problem(drafting) is None  # a verify keeps all of them
    arguments["return_hidden_states_mode"] = "full"
    assert states_problem(alone) is None


def test_a_moved_verify_records_no_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    move(monkeypatch, seams.VERIFY)
    recording = Recording(str(tmp_path), "0" * 16, None, None, 4)
    plugin = Plugin(recording, Reporter(recording, TRIED[-1]), seams.find_seams(TRIED[-1]))
    drafting = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False))
    alone = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: True))
    monkeypatch.setattr("replay.capture.plugin.plugin.resolved_arguments", dict)
    assert "EAGLEWorkerV2.verify" in str(plugin._lacks(drafting)) and plugin._lacks(alone) is None


# ---- the ways of earlier releases ----


class Door(torch.nn.Module):
    """Takes and packs as SGLang 0.5.15 to 0.5.22 layers/logits_processor.py ``LogitsProcessor.forward``."""

    def forward(self, input_ids: Any, hidden_states: Any, lm_head: Any, metadata: Any, aux_hidden_states: Any) -> Any:
        packed = aux_hidden_states if isinstance(aux_hidden_states, torch.Tensor) else torch.cat(aux_hidden_states, -1)
        return packed, hidden_states


class Layer(torch.nn.Module):
    """Adds to its input in place, as fused norms do."""

    def forward(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.add_(5)


def joined() -> tuple[Joined, Any, Door]:
    core, processor = SimpleNamespace(layers=[Layer(), Layer()]), Door()
    assert keeps_final(processor) is False
    made = Joined(core, processor)
    assert "forward" not in vars(processor)  # it only looks
    made.begin()
    return made, core, processor


@pytest.mark.parametrize("packed", [False, True])
def test_ends_of_the_stream_are_joined_where_they_are_not_handed_on(packed: bool) -> None:
    made, core, processor = joined()
    aux, final = [torch.ones(3, 2), torch.ones(3, 2) * 2], torch.ones(3, 2) * 9
    core.layers[0](None, torch.zeros(3, 2))
    given, untouched = processor(None, final, None, None, torch.cat(aux, -1) if packed else aux)
    assert torch.equal(given, torch.cat([torch.zeros(3, 2), *aux, final], -1)) and untouched is final
    columns = Columns((0, 3, 5), (0, 2), width=2, vocabulary=16, joined=True)
    assert columns.are_all_in(given) and not columns.are_all_in(given[:, :6]) and made.problem == ""
    hidden, last = columns.apart(given, None)
    assert last is not None and torch.equal(last, final)
    assert torch.equal(columns.fed_of(hidden), torch.cat([torch.zeros(3, 2), aux[1]], -1))
    whole = Columns((0, 3, 5), (0, 1, 2), width=2, vocabulary=16, joined=True).fed_of(hidden)
    assert whole.is_contiguous() and torch.equal(whole, given[:, :6])


@pytest.mark.parametrize("final", [torch.ones(2, 2), torch.ones(3, 2, dtype=torch.bfloat16)])
def test_ends_that_do_not_fit_keep_the_width_and_are_told(final: torch.Tensor) -> None:
    made, core, processor = joined()
    core.layers[0](None, torch.zeros(3, 2))
    given, _ = processor(None, final, None, None, [torch.ones(3, 2)])
    assert given.shape == (3, 6) and made.problem == "a forward gave the final states of other rows than it captured"


def test_a_stream_that_passed_no_first_layer_is_told() -> None:
    made, _, processor = joined()
    processor(None, torch.ones(3, 2), None, None, [torch.ones(3, 2)])
    assert made.problem.startswith("a forward gave R[0] of other rows")


def test_layers_that_run_twice_are_told() -> None:
    made, core, processor = joined()
    for _ in range(2):
        core.layers[0](None, torch.zeros(3, 2))
    processor(None, torch.ones(3, 2), None, None, [torch.ones(3, 2)])
    assert "run more than once in a forward" in made.problem


@pytest.mark.parametrize("error", [RuntimeError, OSError, AssertionError, ValueError, SystemError])
def test_a_module_that_cannot_be_imported_for_any_reason_is_not_there(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(name: str) -> Any:
        raise error("no driver")

    monkeypatch.setattr("replay.capture.plugin.seams.importlib.import_module", broken)
    said = seams.Place("sglang.srt.speculative.eagle_info", "EagleDraftExtendInput").problem()
    assert said == f"EagleDraftExtendInput in sglang.srt.speculative.eagle_info ({error.__name__})"


def test_what_goes_wrong_while_hooks_are_put_leaves_the_server_unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise AssertionError("moved")

    monkeypatch.setattr(hooks, "_hook", broken)
    monkeypatch.setattr(hooks, "_after", lambda *_: None)
    monkeypatch.setattr("replay.capture.plugin.server_state.simulation_problem", lambda: None)
    for wiring in (None, "embed,3,16"):
        recording = Recording(str(tmp_path / str(wiring)), "0" * 16, None, wiring, 4)
        monkeypatch.setenv(RECORD_VARIABLE, recording.to_json())
        if wiring is None:
            hooks._install(None)
        else:
            with pytest.raises(WiringError, match="the plugin could not be set up: AssertionError: moved"):
                hooks._install(None)
        (manifest,) = read_manifests(launch_folder(tmp_path / str(wiring), "0" * 16))
        assert manifest.state == "refused" and "could not be set up" in manifest.reason


def test_a_model_without_a_first_layer_to_join_keeps_what_it_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.5.23: nothing may be captured beside what the draft is fed where no one cuts it back."""
    core = SimpleNamespace(layers=[SimpleNamespace() for _ in range(30)], layers_to_capture=[2, 15, 27])
    model = type("LlamaForCausalLM", (SimpleNamespace,), {})(
        model=core, logits_processor=Door(),
        set_dflash_layers_to_capture=lambda ids: setattr(core, "layers_to_capture", [one + 1 for one in ids]),
    )  # fmt: skip
    config = SimpleNamespace(num_hidden_layers=30, hidden_size=2)
    runner = SimpleNamespace(
        is_draft_worker=False, model=model, spec_aux_config=SimpleNamespace(eagle_use_aux_hidden_state=True),
        spec_algorithm=SimpleNamespace(is_none=lambda: False, is_eagle3=lambda: True),
        model_config=SimpleNamespace(hf_text_config=config, vocab_size=16),
    )  # fmt: skip
    monkeypatch.setattr("replay.capture.plugin.server_state.resolved_arguments", dict)
    monkeypatch.setattr("replay.capture.plugin.plugin.layout_problem", lambda: None)
    plugin = Plugin(
        Recording(str(tmp_path), "0" * 16, None, None, 4),
        Reporter(Recording(str(tmp_path), "0" * 16, None, None, 4), "0.5.22"),
    )
    plugin.after_attention(None, runner)
    (manifest,) = read_manifests(launch_folder(tmp_path, "0" * 16))
    assert manifest.state == "refused" and "SimpleNamespace.forward takes no hidden_states" in manifest.reason
    assert plugin.columns is None and core.layers_to_capture == [2, 15, 27]


def test_a_result_that_takes_no_more_fields_is_left_as_it_is(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path), "0" * 16, None, None, 4)
    plugin = Plugin(recording, Reporter(recording, "0.5.23"))
    plugin.after_internal_state(SimpleNamespace(internal_state=()))
    plugin.after_internal_state(object())
    plugin.after_forward(object(), SimpleNamespace(is_draft_worker=False), None)


def test_what_is_not_captured_is_left_alone() -> None:
    made, _, processor = joined()
    with pytest.raises(TypeError):  # as without us
        processor(None, torch.ones(3, 2), None, None, None)
    assert made.problem == ""


def test_parts_without_a_door_are_named_and_left_alone() -> None:
    with pytest.raises(CaptureError, match=r"SimpleNamespace.forward takes no hidden_states, aux_hidden_states"):
        keeps_final(SimpleNamespace())
    processor = Door()
    with pytest.raises(CaptureError, match=r"SimpleNamespace.forward takes no hidden_states"):
        Joined(SimpleNamespace(layers=[SimpleNamespace()]), processor)
    assert "forward" not in vars(processor)


def verified(topk: int, told: Any, sampled: Any) -> dict[str, torch.Tensor]:
    """What is copied of a verify of two requests with three nodes each."""
    rows = torch.arange(6.0)[:, None]
    held = HeldVerify(rows, rows, {})
    result = SimpleNamespace(
        speculative_num_draft_tokens=3, next_token_ids=torch.arange(6), accept_lens=torch.tensor([2, 1]),
        new_seq_lens=torch.tensor([9, 9]), **({} if told is None else {"accept_index": told}),
    )  # fmt: skip
    tree = torch.full((2, 3), -1)
    spec = SimpleNamespace(topk=topk, draft_token=torch.arange(6), retrieve_next_token=tree, retrieve_next_sibling=tree)
    batch = SimpleNamespace(spec_info=spec, reqs=[SimpleNamespace(rid="replay-a")] * 2)
    ((tensors, _),) = copy_verify(held, result, batch, Columns((0,), (0,), 1, 16), 0, sampled)
    return tensors


def test_accepted_nodes_are_told_by_the_result_by_sampling_or_by_a_chain() -> None:
    nodes = torch.tensor([[0, 2, -1], [3, -1, -1]])
    assert torch.equal(verified(4, nodes, None)["hidden"], verified(4, None, nodes)["hidden"])
    chain = verified(1, None, None)["hidden"].flatten().tolist()
    assert chain == [0, 1, 2, 3, 4, 5]  # of which the first ``accept_lens`` of each three count
    with pytest.raises(RuntimeError, match="did not tell which nodes"):
        verified(4, None, None)


def test_what_sampling_tells_is_kept_for_one_verify(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path), "0" * 16, None, None, 4)
    plugin = Plugin(recording, Reporter(recording, "0.5.18"))
    seen: list[Any] = []
    plugin.live = SimpleNamespace(record_verify=lambda *given: seen.append(given[2]))  # type: ignore[assignment]
    for sampled in (("predict", "lengths", "nodes"), None):
        if sampled:
            plugin.after_sample(sampled)
        plugin.after_verify(None, None, None)
    assert seen == ["nodes", None]


def test_a_manifest_of_before_has_no_notes() -> None:
    text = Manifest("0" * 16, 1, "host", "recording", True).to_json()
    assert Manifest.from_json(text.replace('"notes": [],', ""), "m").notes == ()
