"""Diagnoses of traces that hold less by choice: taps of the first requests only, rows in fp8."""

import io
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console
from support.less_maker import make_less
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

from replay.analysis.diagnosis.evidence import HISTOGRAM
from replay.analysis.diagnosis.report import render_diagnosis
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.summary import summarise
from replay.capture.observed_number import Observed
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.diagnose import diagnose_server, open_case, served_variant
from replay.diagnosis.elsewhere import agreement_of_all, held_doubts, judge_walks
from replay.diagnosis.observed import count_by_request
from replay.diagnosis.reference import measure
from replay.engines.wiring import Wiring
from replay.errors import TraceError
from replay.faults.table import FAULTS
from replay.simulator.simulation import simulate
from replay.simulator.variant import Variant
from replay.traces.captured import ServerCounters
from replay.traces.copying import captured_request, copy_requests
from replay.traces.header import VERSION
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.rounds import HEALTHY_NAME
from replay.traces.writer import TraceWriter

REQUESTS, FIRST = 8, 4


@pytest.fixture(scope="module")
def head() -> Checkpoint:
    return make_checkpoint()


def run(trace: Trace, head: Checkpoint, *kinds: str, ladder: bool = False) -> Diagnosis:
    """Of these kinds of faults alone: the others take long."""
    without = frozenset(FAULTS) - {*kinds}
    return diagnose_server(trace, head, served_variant(trace, "h"), ladder=ladder, without=without)


def test_a_healthy_server_is_held_against_all_requests(tmp_path: Path, head: Checkpoint) -> None:
    whole = make_served(tmp_path, head, requests=REQUESTS)
    tiered = make_less(tmp_path / "tiered", whole, taps_for=FIRST, then=WIRING.taps)
    found, every = (run(one, head, "attn.scale", ladder=True) for one in (tiered, whole))
    assert found.verdict in ("healthy", "head") and found.agreement == every.agreement
    assert found.agreement is not None and found.agreement.rounds == len(whole.served_rounds())
    assert found.healthy.accept_length == every.healthy.accept_length  # its own walk, over all requests
    assert found.doubts[-1].endswith("Accept lengths on their own walk are of 8.")
    assert found.ladder == every.ladder  # which starts and ends at the same, for all requests
    assert found.doubts[0].startswith("The verdict rests on 4 requests: what is special about them, as a loop")
    assert not any("rests on" in doubt for doubt in every.doubts)  # of eight
    assert found.doubts[-1].startswith("4 of 8 requests have the taps embed, 1, 2, 3, 4, 5, 6, final: hypotheses are")


def test_a_wrong_wiring_is_named_from_the_requests_that_have_its_taps(tmp_path: Path, head: Checkpoint) -> None:
    whole = make_served(tmp_path, head, "wiring.aux-layer-id=1", requests=REQUESTS)
    tiered = make_less(tmp_path / "tiered", whole, taps_for=3, then=WIRING.taps)
    found = run(tiered, head, "wiring.aux-layer-id")
    assert (found.verdict, found.named) == ("fault", "wiring.aux-layer-id=1")
    best = found.ranked[0].evidence
    assert best.alike == best.rounds < len(whole.served_rounds())
    # All that stands beside each other is of the requests that have the taps of what is named.
    first = run(whole.take(Part(limit=3)), head, "wiring.aux-layer-id")
    assert found.healthy.accept_length == found.expected == first.expected != run(whole, head).healthy.accept_length
    assert found.ranked[0].accept_length == first.ranked[0].accept_length and found.served == first.served
    assert found.doubts[-1].endswith("Accept lengths on their own walk are of 3.")


def test_a_fault_of_the_other_requests_leaves_no_healthy_verdict(tmp_path: Path, head: Checkpoint) -> None:
    """Their rounds are those of a server with a fault, the first ones' those of a healthy one."""
    good = make_served(tmp_path / "good", head, requests=REQUESTS)
    bad = make_served(tmp_path / "bad", head, "kv.rollback=stale", requests=REQUESTS)
    first = [record.request_id for record in good.records[:FIRST]]
    rounds = [good.served_rounds().filter(pl.col("request_id").is_in(first))]
    rounds.append(bad.served_rounds().filter(~pl.col("request_id").is_in(first)))
    with TraceWriter.create(tmp_path / "mixed", replace(good.header, weights=None)) as writer:
        writer.write_target_weights(good.embed_weight(), None)
        writer.add_rounds(pl.concat(rounds))
        writer.add([captured_request(good, index) for index in range(REQUESTS)])
        writer.finish()
    tiered = make_less(tmp_path / "tiered", Trace.open(tmp_path / "mixed"), taps_for=FIRST, then=WIRING.taps)
    found = run(tiered, head, "attn.scale")
    assert found.verdict == "undetermined" and found.named is None
    assert "in the others rounding does not explain" in found.why


def test_an_observed_accept_length_is_held_against_as_much_as_was_tried(tmp_path: Path, head: Checkpoint) -> None:
    """Eight requests tell the head's own within 20 %, and one of them does not."""
    whole = make_served(tmp_path, head, requests=REQUESTS)
    tiered = make_less(tmp_path / "tiered", whole, taps_for=1, then=WIRING.taps)
    mend = r"of 1 request leave .* against; record all taps of more requests \(--taps-for"
    seen = Observed(2.4, "typed")
    with pytest.raises(TraceError, match=mend):
        diagnose_server(tiered, head, served_variant(tiered, "h"), observed=seen, without=frozenset(FAULTS))


@pytest.mark.parametrize(("observed", "undecided"), [("all", True), ("first", False)])
def test_an_observed_accept_length_is_held_against_all_requests_too(
    tmp_path: Path, head: Checkpoint, observed: str, undecided: bool
) -> None:
    """The requests with the most taps have outputs that the head drafts well, the others any tokens. Whoever observed
    one of the two lengths asked other prompts than the other half: neither a fault nor health follows."""
    whole = make_served(tmp_path, head, requests=REQUESTS, output=24)
    with TraceWriter.create(tmp_path / "mixed", replace(whole.header, weights=None)) as writer:
        writer.write_target_weights(whole.embed_weight(), None)
        for index in range(REQUESTS):
            one = captured_request(whole, index)
            other = [(7 * place + index) % 64 for place in range(24)]
            writer.add([one if index < FIRST else replace(one, output_ids=other)])
        writer.finish()
    tiered = make_less(tmp_path / "tiered", Trace.open(tmp_path / "mixed"), taps_for=FIRST, then=WIRING.taps)
    lengths = {
        name: summarise(simulate(part, {"h": head}, [Variant("h", WIRING, STEPS)]))[0].accept_length
        for name, part in (("first", tiered.take(Part(limit=FIRST))), ("all", tiered))
    }
    assert lengths["first"] > 1.3 * lengths["all"]
    without, seen = frozenset(FAULTS) - {"attn.scale"}, Observed(round(lengths[observed], 2), "typed")
    found = diagnose_server(tiered, head, served_variant(tiered, "h"), observed=seen, without=without, ladder=False)
    assert (found.verdict, found.named) == ("undetermined", None) and (HEALTHY_NAME in found.undecided)
    said = f"({lengths['first']:.2f}), and it is {'' if undecided else 'not '}what this gives on 8 requests ("
    assert said in found.why
    assert any("whatever its prompts were, is held against these" in doubt for doubt in found.doubts)
    rounds = simulate(tiered, {"h": head}, [Variant("h", WIRING, STEPS)])
    case = open_case(tiered, head, served_variant(tiered, "h"), None, seen)
    again = judge_walks(replace(found, implausible="at an end"), case, rounds, summarise(rounds)[0])
    assert found.implausible is None and (again.why, again.implausible) == (found.why, "at an end")


def test_histograms_of_the_other_requests_leave_no_healthy_verdict(tmp_path: Path, head: Checkpoint) -> None:
    good = make_served(tmp_path / "good", head, requests=REQUESTS)
    bad = make_served(tmp_path / "bad", head, "kv.rollback=stale", requests=REQUESTS)
    for name, others, verdicts in (("alike", good, ("healthy", "head")), ("mixed", bad, ("undetermined",))):
        counted = [count_by_request((good if index < FIRST else others).served_rounds(), STEPS) for index in range(8)]
        with TraceWriter.create(tmp_path / name, replace(good.header, weights=None)) as writer:
            writer.write_target_weights(good.embed_weight(), None)
            for index, told in enumerate(counted):
                one = captured_request(good, index)
                histogram = told[one.request_id]
                writer.add([replace(one, server=ServerCounters(16, sum(histogram), histogram, 0))])
            writer.finish()
        tiered = make_less(tmp_path / f"{name}-tiered", Trace.open(tmp_path / name), taps_for=FIRST, then=WIRING.taps)
        found = run(tiered, head, "attn.scale")
        assert found.healthy.evidence.kind == HISTOGRAM and found.verdict in verdicts
        assert ("in the others rounding does not explain" in found.why) == (name == "mixed")


def test_a_fault_that_shows_in_whole_prompts_alone_is_named_from_these(tmp_path: Path, head: Checkpoint) -> None:
    """Of three requests two have all rows and taps; the third has no row that the fault moves into the window."""
    narrow = replace(head, config=replace(head.config, window=4))
    whole = make_served(tmp_path, narrow, "shift.alignment=features", requests=3)
    less = make_less(tmp_path / "less", whole, taps_for=2, then=WIRING.taps, prompt_rows=4)
    copy_requests([whole.take(Part(limit=2)), less.take(Part(requests=("r2",)))], tmp_path / "both")
    found = run(Trace.open(tmp_path / "both"), narrow, "shift.alignment", ladder=True)
    assert (found.verdict, found.named) == ("fault", "shift.alignment=features")
    assert found.doubts[-1].endswith("Accept lengths on their own walk are of 2.") and found.ladder is not None


def test_requests_that_lack_what_was_served_say_nothing(tmp_path: Path, head: Checkpoint) -> None:
    """Of the requests with fewer taps two have two of the wiring's three, and two the other two: together all."""
    whole = make_served(tmp_path, head, requests=6)
    fewer = [None, None, *[("2", "4", "final")] * 2, *[("4", "5", "final")] * 2]
    with TraceWriter.create(tmp_path / "three", replace(whole.header, weights=None, version=VERSION)) as writer:
        writer.write_target_weights(whole.embed_weight(), None)
        writer.add_rounds(whole.served_rounds())
        for index, taps in enumerate(fewer):
            one = captured_request(whole, index)
            writer.add([one if taps is None else replace(one, taps={tap: one.taps[tap] for tap in taps})])
        writer.finish()
    found = run(Trace.open(tmp_path / "three"), head, "attn.scale")
    first = whole.served_rounds().filter(pl.col("request_id").is_in(["r0", "r1"]))
    assert found.verdict in ("healthy", "head") and found.agreement is not None
    assert found.agreement.rounds == len(first)


def test_faults_that_see_more_rows_of_prompts_leave_it_open(tmp_path: Path, head: Checkpoint) -> None:
    """A head that sees four rows, on a server that makes one with the features of the row before: five rows."""
    narrow = replace(head, config=replace(head.config, window=4))
    whole = make_served(tmp_path, narrow, "shift.alignment=features", requests=3)
    for rows, verdict, named in ((5, "fault", "shift.alignment=features"), (4, "undetermined", None)):
        found = run(make_less(tmp_path / f"{rows}", whole, prompt_rows=rows), narrow, "shift.alignment")
        assert (found.verdict, found.named) == (verdict, named)
        doubt = "Rows of prompts that the trace lacks keep 1 likely fault (shift.alignment=features) from being tried."
        assert (doubt in found.doubts) == (rows == 4)
    assert "1 likely fault could not be: the trace has the last 4 rows of some prompts" in found.why
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_diagnosis(found))
    assert "keep 1 likely fault (shift.alignment=features)" in " ".join(console.export_text().split())


@pytest.mark.parametrize("fault", ["none", "vocab.d2t=absolute"])
def test_rows_in_fp8_accuse_nobody_and_name_what_is_large(tmp_path: Path, head: Checkpoint, fault: str) -> None:
    whole = make_served(tmp_path, head, fault, requests=REQUESTS, fed=WIRING.taps)
    less = make_less(tmp_path / "fp8", whole, rows="fp8")
    found = run(less, head, "vocab.d2t")
    assert found.agreement is None and any("What fp8 moves counts as rounding" in doubt for doubt in found.doubts)
    verdicts = ("healthy", "head") if fault == "none" else ("fault",)
    assert found.verdict in verdicts and found.named == (None if fault == "none" else fault)
    # What the draft was fed is told in fp8 as well, slot by slot.
    assert found.feeding is not None and found.feeding.wiring == WIRING.taps


def test_a_draft_that_is_fed_exact_rows_is_none_of_fp8(tmp_path: Path, head: Checkpoint) -> None:
    less = make_less(tmp_path / "fp8", make_served(tmp_path, head, requests=2), rows="fp8")
    case = open_case(less, head, served_variant(less, "h"), None, None)
    exact = replace(case, served=replace(case.served, wiring=Wiring(("embed", "final", "final"))))
    reference = measure(case)
    for one, rounded in ((case, True), (exact, False)):
        assert any("What fp8 moves" in doubt for doubt in held_doubts(one, 2)) == rounded
        assert (agreement_of_all(one, reference, None) is None) == rounded


def test_states_that_cross_to_a_request_with_fewer_taps_are_named(tmp_path: Path, head: Checkpoint) -> None:
    """Two of three requests of a batch have all taps, and what is tried with them is handed states of the third."""
    whole = make_served(tmp_path, head, "state.crossed=previous", together=3)
    tiered = make_less(tmp_path / "tiered", whole, taps_for=2, then=WIRING.taps)
    found = run(tiered, head, "state.crossed", "wiring.aux-layer-id")
    assert (found.verdict, found.named) == ("fault", "state.crossed=previous")
