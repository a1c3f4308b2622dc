"""Every default hypothesis on traces that hold less in several ways at once: the rounds of the whole trace, or none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.less_maker import make_less
from support.served_maker import WIRING, make_checkpoint, make_served

from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.case import Case
from replay.diagnosis.diagnose import diagnose_server, open_case, served_variant
from replay.diagnosis.hypotheses import singles, unseen, wirings
from replay.simulator.simulation import simulate
from replay.traces.fp8 import dequantise, quantise
from replay.traces.parts import Part
from replay.traces.reader import Trace

WINDOW, REQUESTS, FIRST = 4, 3, 2
# Together they have every two of: taps of the first requests alone, fp8, last rows of prompts, batches of a server.
COMBINED = [
    {"taps_for": FIRST, "then": WIRING.taps, "rows": "exact", "prompt_rows": WINDOW, "together": 3},
    {"taps_for": FIRST, "then": WIRING.taps, "rows": "fp8", "prompt_rows": None, "together": 0},
    {"taps_for": None, "then": (), "rows": "fp8", "prompt_rows": WINDOW, "together": 3},
]


@pytest.fixture(scope="module")
def head() -> Checkpoint:
    return replace(made := make_checkpoint(), config=replace(made.config, window=WINDOW))


def traces(
    folder: Path, head: Checkpoint, combined: dict[str, object], fault: str = "none", output: int = 6
) -> tuple[Trace, Trace]:
    """A trace, and the same with less."""
    choices = {name: value for name, value in combined.items() if name != "together"}
    whole = make_served(folder, head, fault, requests=REQUESTS, output=output, together=combined["together"])  # type: ignore[arg-type]
    return whole, make_less(folder / "less", whole, **choices)  # type: ignore[arg-type]


def open_healthy(trace: Trace, head: Checkpoint) -> Case:
    return open_case(trace, head, served_variant(trace, "h"), None, None)


@pytest.mark.parametrize("combined", COMBINED, ids=str)
def test_what_is_tried_is_played_on_the_rows_that_are_there(
    tmp_path: Path, head: Checkpoint, combined: dict[str, object]
) -> None:
    """Exact rows give the rounds of the whole trace; rows in fp8 those of a whole one that was put into fp8."""
    whole, less = traces(tmp_path, head, combined)
    if combined["rows"] == "fp8":
        whole = make_less(tmp_path / "rounded", whole, rows="fp8")
    case = open_healthy(less, head)
    tried = [one.variant for one in (*singles(case), *wirings(case)[:5])]
    assert len(tried) > 60 and len(case.trace) == (FIRST if combined["taps_for"] else REQUESTS)
    ours, theirs = (
        simulate(trace, {"h": head}, tried, served_products=False)
        for trace in (case.trace, whole.take(Part(limit=len(case.trace))))
    )
    assert ours.table.equals(theirs.table)
    # What is not tried is said: it is what the whole trace shows and this one cannot.
    every = {one.name for one in singles(open_healthy(whole, head))}
    assert every - {one.name for one in singles(case)} == set(unseen(case))
    assert bool(unseen(case)) == bool(combined["prompt_rows"])


def test_a_row_in_fp8_is_the_one_that_is_replayed(tmp_path: Path, head: Checkpoint) -> None:
    whole, less = traces(tmp_path, head, COMBINED[2])
    first = less.records[0].rows_left_out
    rows, exact = less.read(0, ["2"]).taps["2"], whole.read(0, ["2"]).taps["2"]
    assert first and torch.equal(rows[first:], dequantise(*quantise(exact[first:]), torch.float32))


@pytest.mark.parametrize(("fault", "verdicts"), [("none", ("healthy", "head")), ("wiring.aux-layer-id=1", ("fault",))])
def test_all_default_hypotheses_accuse_nobody_and_name_what_is_there(
    tmp_path: Path, head: Checkpoint, fault: str, verdicts: tuple[str, ...]
) -> None:
    _, less = traces(tmp_path, head, {**COMBINED[0], "rows": "fp8", "together": 0}, fault, 8)
    found = diagnose_server(less, head, served_variant(less, "h"), ladder=False)
    assert found.verdict in verdicts and found.named == (None if fault == "none" else fault)
    assert found.agreement is None and any("keep" in doubt and "from being tried" in doubt for doubt in found.doubts)
