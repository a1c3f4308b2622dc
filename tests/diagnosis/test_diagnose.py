"""Diagnosis: on servers with a known fault the right name comes first, on healthy ones none is named."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.heads import DEEPSEEK_YARN, LATENT
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

from replay.analysis.diagnosis.document import to_json
from replay.analysis.diagnosis.report import render_diagnosis
from replay.capture.observed import Observed
from replay.diagnosis.diagnose import diagnose_server, served_variant
from replay.engines.wiring import Wiring
from replay.errors import TraceError, UsageError
from replay.faults.table import FAULTS
from replay.simulator.variant import Variant
from replay.traces.reader import Trace

HEADS = {"one": make_checkpoint(0), "another": make_checkpoint(7, rope_theta=500.0)}


def run(trace: Trace, head: str = "one", **options: object) -> object:
    return diagnose_server(trace, HEADS[head], served_variant(trace, "h"), **{"ladder": False, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """The trace of a server with a fault, and which head it has; made once."""

    @cache
    def made(fault: str, head: str, **options: Any) -> Trace:
        return make_served(tmp_path_factory.mktemp("served"), HEADS[head], fault, **options)

    return made


@pytest.fixture(scope="module")
def diagnosed(served: Callable[..., Trace]) -> Callable[..., Any]:
    """What is found on such a trace where nothing else is said; found once."""

    @cache
    def found(fault: str, head: str) -> Any:
        return run(served(fault, head), head)

    return found


@pytest.mark.parametrize("head", HEADS)
def test_a_healthy_server_is_not_accused(diagnosed: Callable[..., Any], head: str) -> None:
    found = diagnosed("none", head)
    assert found.verdict in ("healthy", "head")
    assert found.named is None
    assert found.healthy.evidence.agreeing == found.healthy.evidence.rounds > 30


@pytest.mark.parametrize(
    "fault",
    [
        "wiring.aux-layer-id=1",
        "wiring.recycle-norm=other",
        "kv.rollback=stale",
        "kv.prefix-reuse=4",
        "state.hidden-row=first",
        "state.hidden-row=hidden-only",
        "shift.stale-row=anchor",
        "shift.stale-row=last",
        "state.dropped=mlp",
        "attn.scale=0.353553391",
        "state.dropped=attention",
        "vocab.d2t=absolute",
    ],
)
def test_the_fault_that_a_server_has_comes_first(diagnosed: Callable[..., Any], fault: str) -> None:
    found = diagnosed(fault, "one")
    assert found.verdict == "fault" and found.certainty >= 0.9
    kind = fault.partition("=")[0]
    assert kind in (found.ranked[0].kind, *(name.partition("=")[0] for name in found.undecided))
    best = found.ranked[0].evidence
    assert (best.alike, best.near_tie, best.unexplained) == (best.rounds, 0, 0)
    assert found.healthy.evidence.unexplained > found.healthy.evidence.most
    assert found.fix


@pytest.mark.parametrize("fault", ["state.crossed=pairs", "state.crossed=next:once"])
def test_states_of_other_requests_are_named(tmp_path: Path, fault: str) -> None:
    """Where the trace says who was verified with whom. Its accept length is that of the server's own rounds."""
    trace = make_served(tmp_path, HEADS["one"], fault, together=3)
    found = run(trace, ladder=True)
    assert (found.verdict, found.named, found.undecided) == ("fault", fault, ())
    best = found.ranked[0]
    assert best.evidence.alike == best.evidence.rounds == len(trace.served_rounds())
    assert best.accept_length == pytest.approx(found.served)
    assert found.ladder is not None and "serve one request at a time" in found.fix
    left_out = run(trace, without=("state.crossed",))
    assert left_out.named is None and left_out.verdict == "engine"


def test_a_healthy_server_with_batches_is_not_accused(tmp_path: Path) -> None:
    found = run(make_served(tmp_path, HEADS["one"], together=3))
    assert found.named is None and found.verdict in ("healthy", "head")
    assert {"previous", "first:once"} <= {item.value for item in found.ranked if item.kind == "state.crossed"}


def test_states_of_other_requests_are_not_tried_where_batches_are_not_told(diagnosed: Callable[..., Any]) -> None:
    found = diagnosed("none", "one")
    assert "state.crossed" not in {item.kind for item in found.ranked}


def test_tensors_of_zeros_are_named_by_what_they_do(tmp_path: Path) -> None:
    """What attention computes is multiplied by o_proj: zeros there are attention left out."""
    found = run(make_served(tmp_path, HEADS["one"], "weights.missing=layers.0.self_attn.o_proj:zero"))
    assert (found.verdict, found.named) == ("fault", "state.dropped=attention")


@pytest.mark.parametrize("fault", ["kv.rollback=stale", "wiring.recycle-norm=other"])
def test_what_mending_gains_is_told_at_the_servers_own_anchors(diagnosed: Callable[..., Any], fault: str) -> None:
    found = diagnosed(fault, "one")
    gain, low, high = found.mending
    assert gain == pytest.approx(found.replayed_at_served_anchors - found.served) and low <= gain <= high
    assert f"ending it gains {gain:+.2f} tokens a round" in page(found)


def test_a_small_value_is_found_between_those_that_were_tried(tmp_path: Path) -> None:
    """A scale of attention that is in no list; values next to it that explain as much are said with it."""
    found = run(make_served(tmp_path, HEADS["one"], "attn.scale=0.6", requests=12))
    assert found.verdict == "fault" and found.named is not None and found.named.startswith("attn.scale=")
    low, high = map(float, found.values or (found.named.partition("=")[2],) * 2)
    assert 0.5 < low <= 0.6 * 1.02 and 0.6 * 0.98 <= high < 0.70


@pytest.mark.parametrize("told", [{"speculative_draft_window_size": "5"}, {}])
def test_a_window_is_found_whether_the_server_says_it_or_not(tmp_path: Path, told: dict[str, str]) -> None:
    """The flag counts the rows before the own one; without it, values between the usual ones are tried."""
    found = run(make_served(tmp_path, HEADS["one"], "attn.window=6", **told))
    assert found.named == "attn.window=6"
    assert "--speculative-draft-window-size" in found.fix


def test_the_ladder_ends_at_what_was_served(served: Callable[..., Trace]) -> None:
    found = run(served("wiring.recycle-norm=other", "one"), ladder=True)
    assert found.ladder is not None
    rungs = {rung.name: rung for rung in found.ladder.rungs}
    assert math.isclose(rungs["observed"].accept_length, found.served)
    assert math.isclose(rungs["unexplained"].change, 0.0, abs_tol=1e-9)
    assert rungs["fault"].change < 0
    assert [rung["name"] for rung in to_json(found)["ladder"]] == list(rungs)


def test_two_faults_at_once_are_found_as_a_pair(tmp_path: Path) -> None:
    found = run(make_served(tmp_path, HEADS["one"], "position.offset=1+kv.prefix-reuse=4", requests=16, output=24))
    assert found.verdict == "fault"
    assert set(found.ranked[0].kind.split("+")) == {"position.offset", "kv.prefix-reuse"}


def test_a_fault_of_few_rounds_is_named_where_they_are_no_near_ties(tmp_path: Path) -> None:
    """Only after rounds that took every drafted token is there a hole: few rounds, and margins far beyond rounding."""
    found = run(make_served(tmp_path, HEADS["one"], "kv.rollback=full-hole"))
    assert found.named == "kv.rollback=full-hole"
    assert 0 < found.healthy.evidence.unexplained < 10
    assert found.ranked[0].evidence.alike == found.ranked[0].evidence.rounds


def test_a_server_that_does_something_else_is_an_engine_case(served: Callable[..., Trace]) -> None:
    """Another head's rounds: nothing of the table explains them."""
    found = run(served("none", "another"), "one")
    assert found.verdict == "engine"
    assert found.named is None
    assert found.unknown is not None and found.unknown.probability > 0.9
    assert found.unknown.size is not None and found.unknown.size.share > 0.1
    assert found.profile is not None and [depth.depth for depth in found.profile.depths] == [1, 2, 3]
    assert "Where the server parts from the replay" in page(found)


def test_a_head_made_for_other_taps_is_told_by_what_it_would_accept(served: Callable[..., Trace]) -> None:
    """The replay agrees with the server, which feeds what the config says; the outputs follow the head as wired."""
    found = run(served("wiring.aux-layer-id=1", "one", wiring="3,5,6"))
    assert found.verdict == "fault"
    assert (found.ranked[0].kind, found.named) == ("healthy", f"wiring.aux-layer-id={WIRING}")
    assert f"--wiring {WIRING}" in found.fix
    assert found.expected > found.served
    assert found.expected == pytest.approx(found.gains[0].accept_length)


def test_the_trained_wiring_can_be_said(served: Callable[..., Trace]) -> None:
    found = run(served("wiring.aux-layer-id=1", "one", wiring="3,5,6"), trained=WIRING)
    assert found.named == f"wiring.aux-layer-id={WIRING}"


def test_an_accept_length_alone_is_too_little_to_name_a_fault(tmp_path: Path) -> None:
    """What the draft of the trace's own server was fed is shown, and says nothing of the one that was observed."""
    trace = make_served(tmp_path, HEADS["one"], fed=("2", "zeros", "5"))
    served = run(trace).served
    same = run(trace, observed=Observed(served, "given"))
    assert same.named is None
    assert same.feeding is not None and not any(item.contradicted for item in same.ranked)
    low = run(trace, observed=Observed(1.0, "given"))
    assert low.undecided
    assert low.separate


def test_a_trace_without_a_server_needs_an_observation(tmp_path: Path) -> None:
    make_served(tmp_path, HEADS["one"])
    with pytest.raises(TraceError, match="give --observed"):
        run(Trace.open(tmp_path / "plain"))
    with pytest.raises(UsageError, match="3 steps give at most 4"):
        run(Trace.open(tmp_path / "plain"), observed=Observed(4.5, "given"))
    with pytest.raises(UsageError, match="type --steps 5"):
        run(Trace.open(tmp_path / "plain"), observed=Observed(1.5, "a log", num_steps=5))


def test_too_few_requests_are_no_ground_for_a_number(tmp_path: Path) -> None:
    trace = make_served(tmp_path, HEADS["one"], requests=1)
    with pytest.raises(TraceError, match=r"rounds? of 1 request leave .* open.* capture more prompts"):
        run(trace, observed=Observed(1.5, "given"))


def test_the_served_variant_is_that_of_the_header(served: Callable[..., Trace]) -> None:
    trace = served("none", "one")
    assert served_variant(trace, "h") == Variant("h", WIRING, STEPS)
    given = served_variant(trace, "h", steps=5, wiring=Wiring(("1", "2", "3")))
    assert (given.steps, given.wiring) == (5, Wiring(("1", "2", "3")))


# ---- what the draft was fed ----


def test_a_feed_that_is_as_the_header_says_rules_other_feeds_out(tmp_path: Path) -> None:
    """A server whose fault is another one: no hypothesis of other features or tokens is left."""
    found = run(make_served(tmp_path, HEADS["one"], "kv.rollback=stale", fed=WIRING.taps))
    assert found.verdict == "fault" and "kv.rollback=stale" in (found.named, *found.undecided)
    denied = {item.kind for item in found.ranked if item.contradicted}
    assert denied >= {"wiring.aux-layer-id", "wiring.aux-missing", "shift.alignment"}
    assert not found.healthy.contradicted and found.healthy.borne_out
    assert all(item.contradicted for item in found.ranked if item.kind == "wiring.aux-layer-id")
    document = to_json(found)
    assert [(slot["tap"], slot["shift"], slot["equal"], slot["rows"]) for slot in document["slots"]] == [
        (tap, 0, 18, 18) for tap in WIRING.taps
    ]
    assert document["hypotheses"][0]["contradicted"] is None


@pytest.mark.parametrize(
    ("fault", "fed", "named"),
    [
        ("wiring.aux-missing=1", ("2", "zeros", "5"), "wiring.aux-missing=1"),
        ("wiring.aux-layer-id=2:1", ("2", "4", "6"), "wiring.aux-layer-id=2:1"),
    ],
)
def test_a_feed_that_the_header_denies_names_the_slot(
    tmp_path: Path, fault: str, fed: tuple[str, ...], named: str
) -> None:
    found = run(make_served(tmp_path, HEADS["one"], fault, fed=fed))
    assert found.verdict == "fault" and named in (found.named, *found.undecided)
    slot = 1 if "missing" in fault else 2
    assert found.healthy.contradicted.startswith(f"slot {slot}: ") and found.healthy.contradicted in found.why
    assert [item for item in found.ranked if item.borne_out]
    others = [item for item in found.ranked if item.kind == "shift.alignment"]
    assert others and all(item.contradicted for item in others)


def test_the_page_says_whose_feed_it_is(tmp_path: Path) -> None:
    """Also where another server was observed, of whose draft it says nothing."""
    found = run(make_served(tmp_path, HEADS["one"], fed=WIRING.taps), observed=Observed(1.5, "given"))
    said = page(found)
    assert "What the trace's own server fed its draft, in 6 requests" in said and "slot 0: R[2], bit" in said


def test_a_wiring_that_no_hypothesis_stands_for_is_tried_as_it_was_fed(tmp_path: Path) -> None:
    """Every slot from another layer than the header says: found by its bits, and held against the rounds."""
    trace = make_served(
        tmp_path, HEADS["one"], "wiring.aux-layer-id=0:-1+wiring.aux-layer-id=2:-2", fed=("1", "4", "3")
    )
    found = run(trace)
    assert (found.verdict, found.named) == ("fault", "wiring.aux-layer-id=1,4,3")
    assert found.ranked[0].evidence.agreeing == found.ranked[0].evidence.rounds
    assert f"--wiring {WIRING}" in found.fix


@pytest.mark.parametrize("fault", ["position.offset=all:3", "position.offset=all:3+kv.rollback=stale"])
def test_positions_in_the_feed_are_judged(tmp_path: Path, fault: str) -> None:
    """RoPE hardly knows of an offset that all rows share; the feed does, and nothing that is silent of it is left."""
    found = run(make_served(tmp_path, HEADS["one"], fault, fed=WIRING.taps, fed_offset=3))
    assert found.verdict == "fault" and set(found.named.split("+")) == set(fault.split("+"))
    said = "position: that +3 of its row in 18 of 18 rows, and not that of its row"
    assert found.healthy.contradicted == said
    others = [kind for kind in FAULTS if FAULTS[kind].changes_feed and kind != "position.offset"]
    assert {item.name for item in found.ranked if item.borne_out} == {
        item.name for item in found.ranked
        if "position.offset=all:3" in item.name and not any(f"{kind}=" in item.name for kind in others)
    }  # fmt: skip
    assert "position handling" in found.fix


def test_an_offset_is_tried_where_the_feed_shows_one(tmp_path: Path) -> None:
    """Not where positions are those of their rows, which contradict no offset of drafted rows alone."""
    found = run(make_served(tmp_path, HEADS["one"], "position.offset=1", fed=WIRING.taps))
    assert found.named == "position.offset=1" and found.ranked[0].borne_out
    assert not [item.name for item in found.ranked if "all:" in item.name]


# ---- which accept length is which ----


def page(found: object) -> str:
    console = Console(width=80, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(render_diagnosis(found))
    return " ".join(capture.get().split())


def test_both_accept_lengths_of_a_healthy_replay_say_which_they_are(diagnosed: Callable[..., Any]) -> None:
    found = diagnosed("wiring.recycle-norm=other", "one")
    anchored, walked = found.replayed_at_served_anchors, found.healthy.accept_length
    assert f"gives {anchored:.3f} at the server's own anchors and {walked:.3f} on its own walk" in page(found)
    document = to_json(found)
    assert document["replayed"] == document["replayed_at_served_anchors"] == anchored != walked
    assert document["replayed_own_walk"] == walked == document["expected"]


def test_one_accept_length_is_shown_where_no_rounds_are_known(served: Callable[..., Trace]) -> None:
    found = run(served("none", "one"), observed=Observed(1.5, "given"))
    assert "at the server's own anchors" not in page(found)
    assert to_json(found)["replayed_at_served_anchors"] is None


# ---- latent heads ----

LATENT_HEAD = make_checkpoint(3, **LATENT | {"head_dim": None, "rope_scaling": DEEPSEEK_YARN})


def run_latent(trace: Trace) -> object:
    return diagnose_server(trace, LATENT_HEAD, served_variant(trace, "h"), ladder=False)


def test_a_healthy_server_of_a_latent_head_is_not_accused(tmp_path: Path) -> None:
    found = run_latent(make_served(tmp_path, LATENT_HEAD))
    assert found.verdict in ("healthy", "head") and found.named is None
    assert found.healthy.evidence.agreeing == found.healthy.evidence.rounds > 30


@pytest.mark.parametrize(
    "fault",
    [
        "position.rope-geometry=halves",
        "wiring.norm=skip:kv_a_layernorm",
        "attn.scale=0.685340327",  # YaRN's factor on scores missing
        "attn.scale=1.45912908",  # ... and twice
        "precision.draft-kv=fp8_e5m2",
        "kv.rollback=stale",
    ],
)
def test_a_fault_of_a_latent_head_is_named(tmp_path: Path, fault: str) -> None:
    found = run_latent(make_served(tmp_path, LATENT_HEAD, fault, requests=12))
    assert str(found.named) == fault
