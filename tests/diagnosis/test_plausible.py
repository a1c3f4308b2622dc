"""An accept length at the very end of the scale is said to be there, and nothing is named from it."""

import json
import math
from pathlib import Path

import pytest
from support.heads import write_head
from support.hostile import run
from support.served_maker import HEAD, STEPS, make_checkpoint, make_served

from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH
from replay.capture.observed import Observed
from replay.diagnosis.observed import Observation
from replay.diagnosis.plausible import implausible
from replay.traces.reader import Trace

NOBODY: frozenset[str] = frozenset()


def _length(value: float, rounds: int | None = None) -> Observation:
    return Observation(LENGTH, NOBODY, {}, given=Observed(value, "given", rounds=rounds))


def _counts(kind: str, *histograms: tuple[int, ...]) -> Observation:
    return Observation(kind, NOBODY, {f"r{place}": counts for place, counts in enumerate(histograms)})


ALL, NONE = "every drafted token was accepted", "not one drafted token was accepted"


@pytest.mark.parametrize(
    ("observation", "replayed", "said"),
    [
        (_length(4.0), 2.4, ALL),
        (_length(3.996), 2.4, ALL),
        (_length(3.99), 2.4, None),
        (_length(4.0), 3.97, None),  # the replay comes as near
        (_length(4.0, rounds=5), 2.4, None),  # as luck has it
        (_length(4.0), math.nan, ALL),
        (_length(1.0), 2.4, NONE),
        (_length(1.01), 2.4, None),
        (_length(1.0), 1.03, None),
        (_counts(HISTOGRAM, (0, 0, 0, 10), (0, 0, 0, 30)), 2.4, ALL),
        (_counts(HISTOGRAM, (0, 0, 0, 10), (1, 0, 0, 30)), 2.4, None),
        (_counts(HISTOGRAM, (40, 0, 0, 0)), 2.4, NONE),
        (_counts(DRAFTED, (0, 0, 0, 40)), 2.4, ALL),
        (_counts(DRAFTED, (40, 0, 0, 0)), 2.4, None),  # its tokens say what happened
        (_counts(HISTOGRAM), 2.4, None),
    ],
)
def test_the_ends_of_the_scale(observation: Observation, replayed: float, said: str | None) -> None:
    found = implausible(observation, 3, replayed)
    assert (found is None) == (said is None) and (said or "") in (found or "")


@pytest.mark.parametrize(("given", "said"), [(STEPS + 1.0, ALL), (1.0, NONE)])
def test_it_is_said_first_and_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: float, said: str
) -> None:
    trace = make_served(tmp_path, make_checkpoint())
    head = write_head(tmp_path / "head", {**HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}})
    monkeypatch.setattr(Trace, "doubts", ("rows were mixed up",))
    arguments = ["diagnose", trace.path, "--draft", head, "--observed", given, "--no-ladder"]
    found = json.loads(run(*arguments, "--json", seconds=600).stdout)
    assert (found["verdict"], found["fault"], found["fix"]) == ("undetermined", None, "")
    assert said in found["why"] and found["implausible"] == found["why"] and found["doubts"] == ["rows were mixed up"]
    shown = " ".join(run(*arguments, seconds=600).stdout.split())
    assert shown.index(said) < shown.index("rows were mixed up") < shown.index("Hypotheses, best first")
