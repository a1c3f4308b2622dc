"""A part of a trace reads what the whole does; a copy of requests holds what they held, bit for bit."""

import errno
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from support.served_maker import make_checkpoint, make_served
from support.trace_maker import changed, make_four, make_header, make_request, write_trace

from replay.errors import OutputError, TraceCorruptError, TraceError, UsageError
from replay.traces import files
from replay.traces.captured import ServerCounters
from replay.traces.check import check_trace
from replay.traces.copying import copy_requests
from replay.traces.parts import Part, choose
from replay.traces.reader import Trace
from replay.traces.stats import trace_stats


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Six requests of a server, with a feed, pieces and rounds."""
    pieces = [[(4, 9), (2, 2)], None]
    return make_served(tmp_path_factory.mktemp("fed"), make_checkpoint(), fed=("3", "zeros", "1"), pieces=pieces)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Six requests of a server that verifies two at a time and says so."""
    return make_served(tmp_path_factory.mktemp("together"), make_checkpoint(), together=2)


def named(*pairs: tuple[str, str | None]) -> list[object]:
    return [changed(make_request(name, place), category=category) for place, (name, category) in enumerate(pairs)]


# ---- what is asked for ----


@pytest.mark.parametrize(
    ("part", "ids"),
    [
        (Part(), "a#1 a#2 b c#1 c#12"),
        (Part(categories=("code",)), "a#1 a#2"),
        (Part(categories=("code", "none")), "a#1 a#2 c#12"),
        (Part(requests=("c#1", "b")), "b c#1"),
        (Part(first_turn=True), "a#1 b c#1"),
        (Part(limit=2), "a#1 a#2"),
        (Part(categories=("math", "none"), first_turn=True, limit=1), "b"),
    ],
)
def test_a_part_is_what_holds_of_all_that_is_asked(part: Part, ids: str, tmp_path: Path) -> None:
    rows = named(("a#1", "code"), ("a#2", "code"), ("b", "math"), ("c#1", "math"), ("c#12", None))
    trace = Trace.open(write_trace(tmp_path / "t", [rows[:2], rows[2:]]))  # type: ignore[list-item]
    taken = trace.take(part)
    assert " ".join(taken.requests["request_id"]) == ids
    assert part.whole == (taken is trace)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Part(categories=("prose",)), "no request is of category 'prose', there are code (1), none (1); type one"),
        (Part(requests=("z",)), "no request is called 'z', there are a, b; type one of these"),
        (Part(categories=("code",), requests=("b",)), "of 2 requests none is left (category code; requests b)"),
    ],
)
def test_a_part_without_requests_is_refused(part: Part, said: str) -> None:
    requests = [one.record(make_header()) for one in named(("a", "code"), ("b", None))]  # type: ignore[attr-defined]
    with pytest.raises(UsageError) as raised:
        choose(part, requests)
    assert said in str(raised.value)


def test_a_limit_that_cannot_be_is_refused_at_once() -> None:
    for limit in (0, -1, True):
        with pytest.raises(UsageError, match=f"a limit of {limit} requests was asked for; type 1 or more"):
            Part(limit=limit)


# ---- what is read ----


def assert_alike(one: Trace, other: Trace, index: int, place: int) -> None:
    """Request ``index`` of one is request ``place`` of the other, but for its name and where it lies."""
    lies = {"request_id": "", "shard": "", "token_start": 0, "row_start": 0, "output_start": 0, "shard_bytes": 0,
            "shard_sha256": ""}  # fmt: skip
    assert replace(one.records[index], **lies) == replace(other.records[place], **lies)  # type: ignore[arg-type]
    mine, theirs = (trace.read(number, trace.taps) for trace, number in ((one, index), (other, place)))
    assert torch.equal(mine.tokens, theirs.tokens) and mine.pieces == theirs.pieces
    for tap in one.taps:
        assert torch.equal(mine.taps[tap], theirs.taps[tap]), tap
    for ours, others in zip(one.logits(index), other.logits(place), strict=True):
        assert torch.equal(ours, others)
    fed, given = one.feed(index), other.feed(place)
    assert (fed is None) == (given is None)
    if fed is not None and given is not None:
        assert torch.equal(fed.features_FW, given.features_FW) and torch.equal(fed.row_F, given.row_F)


def test_a_part_reads_its_own_rows_and_feed(served: Trace) -> None:
    chosen = [4, 1]
    taken = served.take(Part(requests=tuple(served.records[index].request_id for index in chosen)))
    assert len(taken) == 2 and [served.feed(index) is not None for index in chosen] == [True, True]
    for place, index in enumerate(sorted(chosen)):
        assert_alike(served, taken, index, place)
    ids = set(taken.requests["request_id"])
    assert taken.served_rounds().equals(served.served_rounds().filter(pl.col("request_id").is_in(list(ids))))


# ---- what is copied ----


def test_a_subset_holds_what_the_trace_held(served: Trace, tmp_path: Path) -> None:
    taken = served.take(Part(limit=3))
    events: list[tuple[int, int]] = []
    copied = copy_requests([taken], tmp_path / "part", on_event=lambda *event: events.append(event))
    assert events == [(3, 3)]
    assert (copied.requests, copied.traces) == (3, {str(served.path): 3})
    again = Trace.open(tmp_path / "part")
    for index in range(3):
        assert_alike(served, again, index, index)
    assert again.served_rounds().equals(taken.served_rounds())
    assert again.header.target == served.header.target and again.header.engine == served.header.engine


def test_a_copy_passes_the_self_check(tmp_path: Path) -> None:
    trace = Trace.open(write_trace(tmp_path / "t", [make_four()]))
    copy_requests([trace.take(Part(requests=("r1", "r3")))], tmp_path / "part")
    events: list[tuple[int, int]] = []
    findings = list(check_trace(Trace.open(tmp_path / "part"), on_event=lambda *event: events.append(event)))
    assert events == [(1, 2), (2, 2)]
    assert findings and not [finding for finding in findings if finding.severity == "error"]


def test_a_merge_holds_both_and_keeps_their_passes_apart(together: Trace, tmp_path: Path) -> None:
    first, second = together.take(Part(limit=2)), together.take(Part(limit=4))
    with pytest.raises(UsageError, match="2 ids of requests stand in more than one trace"):
        copy_requests([first, second], tmp_path / "both")
    copy_requests([first], tmp_path / "one")
    copy_requests([second], tmp_path / "two")
    parts = [Trace.open(tmp_path / name) for name in ("one", "two")]
    copy_requests(parts, tmp_path / "both", named_by_trace=True)
    both = Trace.open(tmp_path / "both")
    ids = both.requests["request_id"].to_list()
    assert [name.split("/")[0] for name in ids] == ["one"] * 2 + ["two"] * 4
    for place, (part, index) in enumerate([(parts[0], 0), (parts[0], 1), *((parts[1], index) for index in range(4))]):
        assert_alike(part, both, index, place)
    passes = both.served_rounds().with_columns(pl.col("request_id").str.head(3).alias("of"))
    firsts, seconds = (set(rows["verify_pass"]) for _, rows in passes.group_by("of", maintain_order=True))
    assert firsts and seconds and firsts.isdisjoint(seconds)
    assert both.header.missing[-1] == "the one prompt file: it was merged of several"


def test_traces_of_another_kind_are_not_merged(tmp_path: Path) -> None:
    header = make_header()
    other = replace(header, target=replace(header.target, fingerprint="0" * 64))
    hot = replace(header, capture=replace(header.capture, temperature=1.0))
    one = Trace.open(write_trace(tmp_path / "one", [make_four()]))
    for name, changed_header, said in (("t", other, "target.fingerprint"), ("h", hot, "temperature, 0.0 in")):
        strange = Trace.open(write_trace(tmp_path / name, [[make_request("x", 9)]], header=changed_header))
        with pytest.raises(TraceError, match=f"the traces differ in {said}.*or replay each by itself"):
            copy_requests([one, strange], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="is one of the traces that are read"):
        copy_requests([one], one.path, force=True)


def test_a_copy_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The second shard of the source has lost its bytes: the first was copied already."""
    four = make_four()
    source = write_trace(tmp_path / "t", [four[:2], four[2:]])
    shard = sorted(source.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    before = write_trace(tmp_path / "before", [[make_request("x", 9)]])
    for out, force in ((before, True), (tmp_path / "new", False)):
        with pytest.raises(TraceCorruptError, match="has changed since it was written"):
            copy_requests([Trace.open(source).take(Part(limit=4))], out, force=force)
    assert [record.request_id for record in Trace.open(before).records] == ["x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "t"]


def test_a_copy_onto_a_full_disk_advises_no_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Trace.open(write_trace(tmp_path / "t", [make_four()]))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_whole", full)
    with pytest.raises(OutputError, match=r"cannot write .*out: No space left on device; nothing is left of it$"):
        copy_requests([source], tmp_path / "out")


def test_an_unfinished_trace_is_copied_as_far_as_it_is_whole(tmp_path: Path) -> None:
    begun = Trace.open(write_trace(tmp_path / "u", [make_four()[:3]], finish=False), allow_incomplete=True)
    copy_requests([begun], tmp_path / "whole")
    assert len(Trace.open(tmp_path / "whole")) == 3


def test_stats_are_counted_by_category(tmp_path: Path) -> None:
    """Of four requests of 2 to 5 prompt and 12 to 9 output tokens (trace_maker.py); 2 + 2 x 1 accepted in 8 rounds."""
    four = [changed(one, category=name) for one, name in zip(make_four(), ("a", "b", "a", None), strict=True)]
    stats = trace_stats(Trace.open(write_trace(tmp_path / "t", [four])))
    assert [(row.name, row.requests, row.prompt_tokens.total, row.output_tokens.total) for row in stats.categories] == [
        ("a", 2, 6, 22), ("b", 1, 3, 11), ("none", 1, 5, 9),
    ]  # fmt: skip
    assert (stats.all.prompt_tokens.median, stats.all.output_tokens.most) == (3.5, 12)
    assert stats.all.observed_accept_length is None
    told = ServerCounters(completion_tokens=12, verify_rounds=8, histogram=(5, 2, 1), cached_tokens=0)
    counted = [changed(one, server=told) if place < 2 else one for place, one in enumerate(four)]
    seen = trace_stats(Trace.open(write_trace(tmp_path / "counted", [counted]))).all
    assert (seen.observed_requests, seen.observed_rounds, seen.observed_accepted) == (2, 16, 8)
    assert seen.observed_accept_length == 1.5
