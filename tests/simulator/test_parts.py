"""A part replayed by itself is the part of the whole's rounds; several traces are the sum of each."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.heads import INVENTED, write_head
from support.trace_maker import changed, make_four, make_header, make_request, write_trace

import replay
from replay.analysis.report.by_group import summarise_by
from replay.errors import TraceError, UsageError
from replay.traces.parts import Part
from replay.traces.rounds import Rounds
from replay.traces.rounds_sets import keep_requests, pool_rounds, take_part

VARIANTS = replay.sweep(draft=["h"], steps=[1, 3], faults=[(), replay.parse_faults("kv.rollback=stale")])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> object:
    return replay.load_head(write_head(tmp_path_factory.mktemp("head") / "draft", INVENTED))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[replay.Trace, replay.Trace]:
    folder = tmp_path_factory.mktemp("traces")
    four = [changed(one, category=name) for one, name in zip(make_four(), ("a", "b", "a", None), strict=True)]
    more = [make_request(f"s{seed}", seed, output=10) for seed in range(3)]
    return tuple(replay.Trace.open(write_trace(folder / name, [rows])) for name, rows in (("one", four), ("two", more)))  # type: ignore


def played(trace: replay.Trace, head: object) -> Rounds:
    return replay.simulate(trace, {"h": head}, VARIANTS)  # type: ignore[dict-item]


def still(rounds: Rounds) -> Rounds:
    """Without what the clock says, and the words on the part."""
    trace = {key: value for key, value in rounds.trace.items() if key != "part"}
    return replace(rounds, trace=trace, variants=tuple(replace(one, seconds=0.0) for one in rounds.variants))


def test_a_part_replayed_is_the_part_of_what_was_replayed(
    traces: tuple[replay.Trace, replay.Trace], head: object
) -> None:
    part = Part(categories=("a",))
    whole, alone = played(traces[0], head), played(traces[0].take(part), head)
    left, right = still(take_part(whole, part)), still(alone)
    assert left.table.equals(right.table)
    assert left.variants == right.variants and left.requests == right.requests and left.trace == right.trace
    assert sum(one.anchors for one in right.variants) > 0
    assert alone.trace["part"] == take_part(whole, part).trace["part"] == "category a (2 of 4)"


def test_sums_by_request_add_up(traces: tuple[replay.Trace, replay.Trace], head: object) -> None:
    for one in played(traces[0], head).variants:
        assert one.by_request is not None
        assert tuple(map(sum, zip(*one.by_request, strict=True))) == (one.anchors, one.anchors_accepted, one.ties)


def test_groups_are_the_summaries_of_their_requests(traces: tuple[replay.Trace, replay.Trace], head: object) -> None:
    rounds = played(traces[0], head)
    groups = summarise_by(rounds, "category")
    assert [(group.name, group.requests) for group in groups] == [("a", 2), ("b", 1), ("none", 1)]
    whole = replay.summarise(rounds)
    for column, summary in enumerate(whole):
        assert sum(group.summaries[column].rounds for group in groups) == summary.rounds
        assert sum(group.summaries[column].accepted for group in groups) == summary.accepted
    with pytest.raises(UsageError, match="'size' was asked for, requests are told apart by category or trace"):
        summarise_by(rounds, "size")


def test_pooled_rounds_are_those_of_each_trace(traces: tuple[replay.Trace, replay.Trace], head: object) -> None:
    apart = {"one": played(traces[0], head), "two": played(traces[1], head)}
    pooled = pool_rounds(apart)
    assert [request.trace for request in pooled.requests] == ["one"] * 4 + ["two"] * 3
    assert [request.request_id for request in pooled.requests] == ["r0", "r1", "r2", "r3", "s0", "s1", "s2"]
    for name, group in zip(("one", "two"), summarise_by(pooled, "trace"), strict=True):
        for mine, theirs in zip(group.summaries, replay.summarise(apart[name]), strict=True):
            assert replace(mine, seconds=0.0) == replace(theirs, seconds=0.0)
    assert pooled.trace["requests"] == 7 and [one["name"] for one in pooled.trace["traces"]] == ["one", "two"]
    twice = pool_rounds({"one": apart["one"], "again": apart["one"]})
    assert [request.request_id for request in twice.requests][::4] == ["one/r0", "again/r0"]
    assert twice.table["request_id"].n_unique() == 8


def test_pooled_rounds_can_be_written(traces: tuple[replay.Trace, replay.Trace], head: object, tmp_path: Path) -> None:
    pooled = pool_rounds({"one": played(traces[0], head), "two": played(traces[1], head)})
    replay.write_rounds(pooled, tmp_path / "r.parquet")
    again = replay.read_rounds(tmp_path / "r.parquet")
    assert again.variants == pooled.variants and again.requests == pooled.requests and again.trace == pooled.trace


def test_rounds_that_cannot_be_told_apart_are_refused(traces: tuple[replay.Trace, replay.Trace], head: object) -> None:
    rounds = played(traces[0], head)
    old = replace(rounds, variants=tuple(replace(one, by_request=None) for one in rounds.variants))
    with pytest.raises(TraceError, match=r"does not say what was counted in each request.*simulate again with -o"):
        keep_requests(old, {"r0"})
    other = replace(rounds, trace={**rounds.trace, "layers": 5})
    with pytest.raises(TraceError, match="of two targets: layers is 4 in one and 5 in two"):
        pool_rounds({"one": rounds, "two": other})
    retrained = replace(rounds, trace={**rounds.trace, "fingerprint": "0" * 64})  # alike in all that a config says
    with pytest.raises(TraceError, match="of two targets: fingerprint is"):
        pool_rounds({"one": rounds, "two": retrained})


def test_rounds_from_before_there_were_fingerprints_go_by_the_name(
    traces: tuple[replay.Trace, replay.Trace], head: object
) -> None:
    rounds = played(traces[0], head)
    before = replace(rounds, trace={key: value for key, value in rounds.trace.items() if key != "fingerprint"})
    assert len(pool_rounds({"one": rounds, "two": before}).requests) == 8
    other = replace(before, trace={**before.trace, "target": "another"})
    with pytest.raises(TraceError, match="of two targets: target is"):
        pool_rounds({"one": before, "two": other})


def test_a_part_of_an_unfinished_trace(head: object, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "u", [make_four()], header=make_header(), finish=False)
    rounds = played(replay.Trace.open(path, allow_incomplete=True).take(Part(limit=2)), head)
    assert rounds.trace["doubts"][0].startswith("The recording of the trace has not ended: what is whole is")
