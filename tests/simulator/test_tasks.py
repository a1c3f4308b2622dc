"""How a sweep is cut into tasks: each pack under each variant once, and in an order in which heads are made seldom."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from support.here import Here
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.head.held import address_of
from replay.simulator import groups
from replay.simulator.binding import resolve
from replay.simulator.cache import open_cache, simulate_cached
from replay.simulator.inputs import plan_packs
from replay.simulator.kept import KeptWorkers
from replay.simulator.tasks import MOST_LAID_OUT, plan_tasks
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds

HEAD = make_checkpoint()
WRONG = replay.Wiring(("3", "5", "6"))
PRECISIONS = ("bf16", "bf16+w8a8")
VARIANTS = replay.sweep(draft=["h"], wiring=[WIRING, WRONG], steps=[1, STEPS], precision=list(PRECISIONS))


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 40)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_served(tmp_path_factory.mktemp("tasks"), HEAD)


def planned(trace: Trace, workers: int) -> list[Any]:
    resolved = [resolve(one, HEAD, trace) for one in VARIANTS]
    return plan_tasks(trace, {"h": HEAD}, resolved, None, workers).tasks


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_request_is_replayed_once_under_each_variant(trace: Trace, workers: int) -> None:
    pairs = [
        (request, member) for task in planned(trace, workers) for request in task.requests for member in task.members
    ]
    assert sorted(pairs) == sorted((one.request_id, member) for one in trace.records for member in range(len(VARIANTS)))


def test_packs_follow_each_other_under_the_same_variants(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all packs at once each lot comes once; one pack at a time each pack has every lot."""
    many, lots = len(list(plan_packs(trace))), len({task.members for task in planned(trace, 1)})
    assert many > 2 and lots == 4
    whole = [members for members, _ in groupby(planned(trace, many), key=lambda task: task.members)]
    assert len(whole) == len(set(whole))
    monkeypatch.setattr("replay.simulator.tasks._EACH", 1)
    narrow = [members for members, _ in groupby(planned(trace, 1), key=lambda task: task.members)]
    assert len(narrow) == many * lots


@pytest.mark.parametrize("heads", [4, 5])
def test_more_heads_than_lie_ready_come_one_after_the_other(trace: Trace, heads: int) -> None:
    """Each of them once for all packs, also where a sweep names them by turns; fewer come again with the next packs."""
    names = [f"h{number}" for number in range(heads)]
    variants = [replay.Variant(name, WIRING, 1, precision=one) for one in PRECISIONS for name in names]
    resolved = [resolve(one, HEAD, trace) for one in variants]
    tasks = plan_tasks(trace, dict.fromkeys(names, HEAD), resolved, None, 1).tasks
    order = [name for name, _ in groupby(task.variants[0].draft for task in tasks)]
    turns = 1 if heads > MOST_LAID_OUT else -(-len(list(plan_packs(trace))) // 4)
    assert order == names * turns and (turns > 1) == (heads == 4)


def test_heads_of_other_tasks_share_their_weights(trace: Trace) -> None:
    """In a worker too; what none of its heads has any more leaves memory."""
    hands = Here(trace, {"h": HEAD})
    precisions = ["bf16", "bf16+kv=fp8", "bf16+layers.0.mlp.down_proj.weight=int8"]
    replay.simulate(trace, {"h": HEAD}, replay.sweep(draft=["h"], wiring=[WIRING], precision=precisions), workers=hands)
    heads = [one.head for one in hands.replayer._made.values()]
    assert len(heads) == 2 and len({*map(id, (one._attention.weights[0] for one in heads))}) == 1
    used = {address for head in heads for address in head.storages}
    stacked = hands.replayer._held._stacks.values()
    assert len(stacked) == 2 and {address_of(one) for one in stacked} <= used


def test_a_head_is_made_once_for_variants_that_share_its_weights(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wirings in two precisions are four lots of tasks; the wirings share a head."""
    made, build = list[str](), groups.build_head

    def count(*given: Any, **named: Any) -> Any:
        made.append(str(given[1].precision))
        return build(*given, **named)

    monkeypatch.setattr(groups, "build_head", count)
    hands = Here(trace, {"h": HEAD}, count=len(list(plan_packs(trace))))
    found = replay.simulate(trace, {"h": HEAD}, VARIANTS, workers=hands)
    assert len({task.members for task in hands.asked}) == 4 and sorted(made) == sorted(PRECISIONS)
    assert found.table.equals(replay.simulate(trace, {"h": HEAD}, VARIANTS).table)


def test_a_worker_lets_go_of_heads_that_no_task_of_late_had(trace: Trace) -> None:
    precisions = ["bf16", "bf16+w8a8", "bf16+int8", "bf16+fp8"]
    hands = Here(trace, {"h": HEAD})
    replay.simulate(trace, {"h": HEAD}, replay.sweep(draft=["h"], wiring=[WIRING], precision=precisions), workers=hands)
    assert 1 <= len(hands.replayer._made) <= 2


def test_tasks_make_the_same_rounds_in_whatever_order_they_end(trace: Trace) -> None:
    hands = Here(trace, {"h": HEAD}, count=3)
    one, other = (replay.simulate(trace, {"h": HEAD}, VARIANTS[:3], workers=by) for by in (None, hands))
    assert one.table.equals(other.table)
    assert [info.by_request for info in one.variants] == [info.by_request for info in other.variants]


def file_of(rounds: Rounds, folder: Path) -> bytes:
    """The file that is written of it, with the time that it took left out."""
    timeless = replace(rounds, variants=tuple(replace(one, seconds=0.0) for one in rounds.variants))
    write_rounds(timeless, folder / "rounds.parquet", force=True)
    return (folder / "rounds.parquet").read_bytes()


@pytest.mark.parametrize(
    ("precision", "factor", "said"),
    [("bf16+kv=fp8_e4m3:scale=0.0146", 1, "clipped to it in fp8_e4m3"), ("fp16", 3000, "down_proj overflowed in fp16")],
)
def test_notes_are_the_same_whoever_replays_what(
    tmp_path: Path, trace: Trace, precision: str, factor: float, said: str
) -> None:
    """What is clipped or overflows does so in a few requests, so that not every task sees it."""
    down = "layers.0.mlp.down_proj.weight"
    heads = {"h": replace(HEAD, tensors={**HEAD.tensors, down: HEAD.tensors[down] * factor})}
    asked = replay.sweep(draft=["h"], wiring=[WIRING], steps=[1, STEPS], precision=[precision, "bf16"])
    alone = replay.simulate(trace, heads, asked)
    assert said in "".join(alone.drafts["h"]["notes"])
    hands = Here(trace, heads)
    kept = open_cache(tmp_path / "c", trace, heads, "cpu", agreement=False)
    assert kept is not None
    found = [
        replay.simulate(trace, heads, asked, workers=by)
        for by in (hands, KeptWorkers(kept, hands), KeptWorkers(kept, hands))
    ]
    found += [simulate_cached(kept, trace, heads, asked, agreement=False) for _ in range(2)]
    made = open_cache(tmp_path / "by workers", trace, heads, "cpu", agreement=False)
    found.append(simulate_cached(made, trace, heads, asked, agreement=False, workers=hands))
    assert {file_of(one, tmp_path) for one in found} == {file_of(alone, tmp_path)}
    plain = [one for one in asked if one.precision == "bf16"]
    found = [simulate_cached(made, trace, heads, plain, agreement=False), replay.simulate(trace, heads, plain)]
    assert {file_of(one, tmp_path) for one in found} == {file_of(found[1], tmp_path)}
    rare = []
    for only in ([one.request_id] for one in trace.records):
        one, other = (replay.simulate(trace, heads, asked[:1], only=only, workers=by) for by in (None, hands))
        assert one.drafts == other.drafts
        rare.append(said in "".join(one.drafts["h"]["notes"]))
    assert {*rare} == {False, True}
