"""States that cross between requests, from traces that hold less by choice: what a neighbour lacks is not known."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from support.less_maker import make_less
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.analysis.followed import Followed
from replay.diagnosis.diagnose import open_case
from replay.diagnosis.hypotheses import singles
from replay.faults.table import FAULTS, parse_faults
from replay.simulator.following import follow_server
from replay.simulator.replayer import HeadSource, Job, Replayer, StoredHead
from replay.simulator.tasks import Result, Task
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.copying import copy_requests
from replay.traces.parts import Part
from replay.traces.reader import Trace

HEAD = make_checkpoint()
NARROW = replace(HEAD, config=replace(HEAD.config, window=4))
OTHER = replay.Wiring(("1", "4", "5"))
TWO = ("r0", "r1")


class Inline:
    """Workers in this process: each replays with the trace as it comes out of a pickle."""

    count = 2
    kernels: tuple[str | int, ...] = ()

    def __init__(self, trace: Trace, folder: Path) -> None:
        heads: dict[str, HeadSource | StoredHead] = {"h": StoredHead.store(HEAD, folder / "head")}
        self._job = pickle.loads(pickle.dumps(Job(trace, heads, "cpu", 1)))

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        for place, task in enumerate(tasks):
            yield place, Replayer(self._job).replay(task)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of a server that verifies r0, r1 and r2 together, then r3, r4 and r5; prompts of 6, 7, 8, 9, 6 and 7 tokens."""
    return make_served(tmp_path_factory.mktemp("whole"), HEAD, "state.crossed=previous", together=3)


def crossed(trace: Trace, wiring: replay.Wiring = WIRING) -> list[ResolvedVariant]:
    """As a diagnosis tries them."""
    without = frozenset(FAULTS) - {"state.crossed"}
    case = open_case(trace, HEAD, Variant("h", wiring, STEPS), None, None, without)
    return [item.variant for item in singles(case)[1:]]


def assert_same(one: Followed, other: Followed) -> None:
    for field in fields(Followed):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize(
    ("less", "wiring"),
    [
        pytest.param({"taps_for": 2, "then": WIRING.taps}, OTHER, id="taps"),
        pytest.param({"prompt_rows": 7}, WIRING, id="prompt rows"),
        pytest.param({"taps_for": 2, "then": WIRING.taps, "rows": "fp8"}, OTHER, id="fp8"),
    ],
)
def test_neighbours_that_lack_something_are_as_those_of_another_trace(
    tmp_path: Path, whole: Trace, less: dict[str, object], wiring: replay.Wiring
) -> None:
    """A copy of the two requests alone has no neighbours of theirs."""
    part = make_less(tmp_path / "less", whole, **less).take(Part(requests=TWO))  # type: ignore[arg-type]
    copy_requests([part], tmp_path / "alone")
    alone = Trace.open(tmp_path / "alone")
    variants, heads, rounds = crossed(part, wiring), {"h": HEAD}, part.served_rounds()
    expected = follow_server(alone, heads, variants, alone.served_rounds(), scales=(1.0,))
    found = follow_server(part, heads, variants, rounds, scales=(1.0,))
    told = follow_server(part, heads, variants, rounds, scales=(1.0,), workers=Inline(part, tmp_path))
    assert len(variants) > 5 and rounds.height > 5
    for one, same, worked in zip(expected, found, told, strict=True):
        assert_same(one, same)
        assert_same(one, worked)
    played = [replay.simulate(trace, heads, variants).table for trace in (alone, part)]
    assert played[0].equals(played[1]) and len(played[0])


def test_neighbours_that_have_enough_are_looked_at(tmp_path: Path, whole: Trace) -> None:
    """Those with the taps of the wiring, and of a head with a window those with so many rows of their prompts."""
    tiered = make_less(tmp_path / "tiered", whole, taps_for=2, then=WIRING.taps).take(Part(requests=TWO))
    cut = make_less(tmp_path / "cut", whole, prompt_rows=4).take(Part(requests=TWO))
    every = whole.take(Part(requests=TWO))
    fault = Variant("h", WIRING, STEPS, faults=parse_faults("state.crossed=previous"))
    for trace, head in ((tiered, HEAD), (cut, NARROW)):
        rounds = trace.served_rounds()
        (one,), (other,) = (follow_server(of, {"h": head}, [fault], rounds) for of in (trace, every))
        assert np.array_equal(one.alike_R, other.alike_R) and np.array_equal(one.margin_N, other.margin_N)
        assert np.isfinite(one.log_prob_N).all()


def test_neighbours_in_fp8_are_rounded_once_more_too(tmp_path: Path, whole: Trace) -> None:
    part = make_less(tmp_path / "fp8", whole, rows="fp8").take(Part(requests=TWO))
    stored, shaken = part.whole.read(2, ["2"]).taps["2"], part.shaken().whole.read(2, ["2"]).taps["2"]
    assert not stored.equal(shaken)
    everyone = make_less(tmp_path / "all", whole, rows="fp8")
    assert everyone.whole is everyone and not everyone.shaken().whole.read(2, ["2"]).taps["2"].equal(stored)
