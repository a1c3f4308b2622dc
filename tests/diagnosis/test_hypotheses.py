"""What is tried: values for every kind of fault, and the odds that each has beforehand."""

import dataclasses
import math
from pathlib import Path

import pytest
from support.served_maker import make_checkpoint, make_served

from replay.diagnosis.case import Case
from replay.diagnosis.diagnose import open_case, served_variant
from replay.diagnosis.hypotheses import share_of, singles, wirings
from replay.diagnosis.likely_values import CANNOT_BE_GUESSED, LIKELY_VALUES
from replay.faults.table import FAULTS, TREE_FAULT, Fault


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case in which every kind has something to try: positions end early, a window and chunks are stated, requests
    are verified together."""
    head = make_checkpoint(0, max_position_embeddings=8)
    told = {"chunked_prefill_size": "4", "speculative_draft_window_size": "5"}
    trace = make_served(tmp_path_factory.mktemp("case"), head, requests=2, together=2, **told)
    return open_case(trace, head, served_variant(trace, "h"), None, None)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kind_has_likely_values(kind: str, case: Case) -> None:
    """Each of them one that the kind takes; or the explicit statement that they cannot be guessed."""
    assert kind in LIKELY_VALUES, "add an entry to replay/diagnosis/likely_values.py"
    tree = dataclasses.replace(case, served=dataclasses.replace(case.served, topk=2, kv="slot"))
    values = list(LIKELY_VALUES[kind](tree if kind == TREE_FAULT else case))
    assert bool(values) == (LIKELY_VALUES[kind] is not CANNOT_BE_GUESSED)
    assert [str(Fault(kind, value)) for value in values] == [f"{kind}={value}" for value in values]


def test_values_are_of_kinds_that_there_are() -> None:
    assert set(LIKELY_VALUES) <= set(FAULTS)


def test_states_of_others_are_tried_as_the_batches_allow(tmp_path: Path) -> None:
    """None without a batch of two; in batches of two there is one other row; two steps hand a state over once."""
    head = make_checkpoint(0)
    found: dict[tuple[int, int], list[str]] = {}
    for together in (0, 1, 2, 3):
        trace = make_served(tmp_path / str(together), head, requests=4, together=together)
        for steps in (1, 2, 3):
            case = open_case(trace, head, served_variant(trace, "h", steps=steps), None, None)
            found[together, steps] = [item.value for item in singles(case) if item.kind == "state.crossed"]
    assert all(not values for (together, steps), values in found.items() if together < 2 or steps < 2)
    assert found[2, 2] == ["previous", "first"]
    assert found[2, 3] == ["previous", "previous:once", "first", "first:once"]
    assert found[3, 2] == ["previous", "next", "reversed", "pairs", "first"]
    assert len(found[3, 3]) == 10


def test_all_kinds_together_are_as_likely_as_the_healthy_server() -> None:
    assert math.isclose(sum(map(share_of, FAULTS)), 0.5)


def test_the_values_of_a_kind_share_its_odds(case: Case) -> None:
    found = singles(case)
    assert math.isclose(found[0].log_prior, math.log(0.5))
    for kind in {item.kind for item in found[1:]}:
        assert math.isclose(sum(math.exp(item.log_prior) for item in found if item.kind == kind), share_of(kind))


def test_other_wirings_share_the_odds_of_layer_ids_by_their_place(case: Case) -> None:
    """The same share as that of single faults, falling with the place, by hand: 1/4, 1/9, 1/16 of it and so on."""
    priors = [math.exp(item.log_prior) / share_of("wiring.aux-layer-id") for item in wirings(case)]
    roots = [1 / math.sqrt(prior) for prior in priors]
    assert all(math.isclose(root, round(root)) and root > 1.5 for root in roots)
    assert roots == sorted(roots) and len(set(map(round, roots))) == len(roots) > 10
    assert sum(priors) < 1
