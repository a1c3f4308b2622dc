"""capture --server-cache shared: prefixes come from a server's cache, and the trace is as whole as without it.

Against the stand-in whose every row is known. The real server is in tests/whole/test_server_cache.py.
"""

import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.fake_server import STEPS, VOCABULARY, FakeServer, fake_server, make_target, next_token
from support.trace_maker import make_header

from replay.capture.asked import Asked, asked_of
from replay.capture.client.cached_prefixes import (
    Held,
    Run,
    UnsureError,
    alike,
    candidates_of,
    forwards_of,
    read_held,
    runs_of,
)
from replay.capture.client.capture import capture_server
from replay.capture.client.join import Recorded
from replay.capture.client.turns import BLOCK, Turns
from replay.capture.encode import EncodedRequest
from replay.capture.events import Event, Noted
from replay.capture.options import ServerOptions
from replay.capture.spool import Entry, read_row_file, row_file_names, write_row_file
from replay.cli.app import cli
from replay.drafting.product_sizes import served_spans
from replay.errors import CaptureError, UsageError
from replay.traces.check import check_trace
from replay.traces.reader import Trace
from replay.traces.taps import FINAL
from replay.traces.writer import TraceWriter

NEW = 9
UNFED = "{} requests without a feed: the server's cache had the first rows"
SYSTEM = [(3 * i * i + i + 1) % VOCABULARY for i in range(40)]


def answer_to(prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(next_token(tokens[-1]))
    return tokens


# four that begin alike, and a second turn: the first one, its answer, and more
PROMPTS = [[*SYSTEM, 1, 2], [*SYSTEM, 5], [*SYSTEM, 5, 6, 7], [7, 8]]
PROMPTS.append([*answer_to(PROMPTS[0]), 4, 4, 1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(FakeServer(make_target(tmp_path / "tiny"), tmp_path / "recording", caches=True)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.capture.client.api._LONGEST_PAUSE", 0.01)


@pytest.fixture
def options(tmp_path: Path, server: FakeServer) -> ServerOptions:
    rows = [{"id": f"r{i}", "input_ids": ids} for i, ids in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ServerOptions(
        server.url, tmp_path / "prompts.jsonl", tmp_path / "trace", max_new_tokens=NEW, concurrency=1, retries=2,
        server_cache="shared",
    )  # fmt: skip


def capture(options: ServerOptions) -> tuple[Trace, list[str]]:
    """The trace, which is sound, and what was noted."""
    events: list[Event] = []
    capture_server(options, events.append)
    trace = Trace.open(options.out)
    assert not [finding for finding in check_trace(trace) if finding.severity == "error"]
    return trace, [event.text for event in events if isinstance(event, Noted)]


def place_of(trace: Trace, name: str) -> int:
    return next(index for index, record in enumerate(trace.records) if record.request_id == name)


def assert_same_rows(one: Trace, other: Trace) -> None:
    assert {record.request_id for record in one.records} == {record.request_id for record in other.records}
    for index, record in enumerate(one.records):
        mine, theirs = one.read(index, ["2", FINAL]), other.read(place_of(other, record.request_id), ["2", FINAL])
        assert torch.equal(mine.tokens, theirs.tokens)
        assert all(torch.equal(mine.taps[tap], theirs.taps[tap]) for tap in ("2", FINAL))


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("shard", [1, 16])  # rows of earlier requests are in the trace, or on their way to it
def test_the_trace_is_that_of_a_server_that_computes_all(
    options: ServerOptions,
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard: int,
    at_once: int,
) -> None:
    monkeypatch.setattr("replay.capture.client.shard.SHARD_REQUESTS", shard)
    shared, notes = capture(replace(options, concurrency=at_once))
    cached = {record.request_id: record.server_cached_tokens or 0 for record in shared.records}
    if at_once == 1:  # after token 5 of r1 comes 6, as in r2
        assert cached == {
            "r0": 0,
            "r1": len(SYSTEM) - 1,
            "r2": len(SYSTEM) + 1,
            "r3": 0,
            "r4": len(PROMPTS[0]) + NEW - 1,
        }
    assert cached["r0"] == cached["r3"] == 0 and min(cached["r1"], cached["r2"], cached["r4"]) >= len(SYSTEM) - 1
    assert notes == [UNFED.format(3)] == [text for text in shared.header.missing if "cache" in text]
    own, _ = capture(replace(options, server_cache="own", out=tmp_path / "own"))
    assert [record.server_cached_tokens for record in own.records] == [0] * len(PROMPTS)
    assert_same_rows(shared, own)


def test_a_server_that_writes_what_is_asked_for_is_asked_for_what_any_request_keeps(
    options: ServerOptions, server: FakeServer, tmp_path: Path
) -> None:
    """r0 keeps all taps and the others only final: rows of both may be taken by each other."""
    server.choosing = True
    tiered = replace(options, concurrency=1, taps_for=1, then_taps="embed")
    shared, notes = capture(replace(tiered, out=tmp_path / "tiered"))
    assert notes == [UNFED.format(3)] and {one.request_id: one.taps for one in shared.records}["r4"] == (FINAL,)
    assert sum((one.server_cached_tokens or 0) > 0 for one in shared.records) == 3
    asked = [asked_of(body["rid"]) for body in server.asked]
    assert asked[0] is None and set(asked[1:]) == {Asked(("2",))}  # the probe first
    own, _ = capture(replace(tiered, server_cache="own", out=tmp_path / "own"))
    for index, record in enumerate(shared.records):
        mine, theirs = shared.read(index, [FINAL]), own.read(place_of(own, record.request_id), [FINAL])
        assert torch.equal(mine.taps[FINAL], theirs.taps[FINAL])


def test_the_trace_tells_what_made_the_cached_rows(options: ServerOptions) -> None:
    """Pieces of the stand-in run beside 3 rows of others; its verifies hold 2 requests of 3 nodes each.

    They accept 0, 2, 1, 0 and 2 tokens of r0, whose last row has no token after it.
    """
    trace, _ = capture(options)
    first, turn = (trace.records[place_of(trace, name)] for name in ("r0", "r4"))
    assert first.cached == () and first.pieces == ((21, 24), (21, 24))
    assert turn.cached == ((21, 24), (21, 24), (1, 6), (3, 6), (2, 6), (1, 6), (1, 6))
    assert sum(rows for rows, _ in turn.pieces) == 4
    made = [size for _, rows, size in served_spans(trace.served_rounds())["r0"] for _ in range(rows)]
    told = [size for rows, size in turn.cached for _ in range(rows)][first.prompt_tokens :]
    assert told == made[: NEW - 1]
    assert trace.read(place_of(trace, "r4"), ()).cached == turn.cached
    other = trace.records[place_of(trace, "r2")]
    assert sum(rows for rows, _ in (*other.cached, *other.pieces)) == other.prompt_tokens


def test_requests_share_a_salt_of_this_capture(options: ServerOptions, server: FakeServer) -> None:
    capture(options)
    capture(replace(options, force=True))
    probes = [body for body in server.asked if body["extra_key"] == body["rid"]]
    salts = {body["extra_key"] for body in server.asked if body not in probes}
    assert len(probes) == 2 and len(salts) == 2, "each capture has a salt of its own, each probe too"


def test_rows_with_other_bits_are_not_guessed(options: ServerOptions, server: FakeServer, tmp_path: Path) -> None:
    """The cache forgot, the second request computed the prefix otherwise: whose rows the third got nobody can say."""
    server.evicts, server.drift = (3,), 0.5  # the probe is the first generation
    trace, notes = capture(options)
    notes = [note for note in notes if "without a feed" not in note]
    assert notes and all("is not sure (" in note for note in notes)
    assert [note for note in notes if "two requests computed its rows from 0 on, and not with the same bits" in note]
    alone = {body["rid"] for body in server.asked if body["extra_key"] == body["rid"]}
    assert len(alone) == 1 + len(notes)
    plain, _ = capture(replace(options, server_cache="own", out=tmp_path / "own"))
    assert_same_rows(trace, plain)
    assert [trace.records[place_of(trace, name)].server_cached_tokens for name in ("r1", "r2")] == [0, 0]


def test_a_server_without_a_cache_shares_nothing(options: ServerOptions, server: FakeServer) -> None:
    """Its second request has other bits, and nobody was given them."""
    server.manifest(details={"speculative_num_steps": str(STEPS), "disable_radix_cache": "true"})
    server.caches, server.evicts, server.drift = False, (3,), 0.5
    trace, notes = capture(options)
    assert notes == ["--server-cache shared changes nothing: the server keeps no prefixes (--disable-radix-cache)"]
    assert all(body["extra_key"] == body["rid"] for body in server.asked) and len(server.asked) == 1 + len(PROMPTS)
    assert [record.cached for record in trace.records] == [()] * len(PROMPTS)


def prompts_alike(options: ServerOptions, count: int) -> ServerOptions:
    """Prompts that have SYSTEM in common and nothing more; no two rows of them are equal by chance."""
    rows = [{"id": f"r{i}", "input_ids": [*SYSTEM, 3 + i, *[15] * i, 1]} for i in range(count)]
    options.prompts.write_text("\n".join(map(json.dumps, rows)))
    return options


def cached_requests(trace: Trace) -> list[str]:
    return sorted(record.request_id for record in trace.records if record.server_cached_tokens)


def test_one_request_that_is_not_sure_does_not_make_all_later_ones_so(
    options: ServerOptions, server: FakeServer
) -> None:
    """r1 computes otherwise what r0 had. What it left under the salt is not known, so r2 computes it under another."""
    server.evicts, server.drift = (3,), 0.5
    trace, notes = capture(prompts_alike(options, 6))
    assert len([note for note in notes if "is not sure (" in note]) <= 2
    assert cached_requests(trace)[-2:] == ["r4", "r5"]


@pytest.mark.parametrize(("busy", "again", "cached"), [(0, {0}, 6), (1, {1, 2, 3}, 3)])
def test_one_try_that_failed_costs_those_in_flight_alone(
    options: ServerOptions, server: FakeServer, busy: int, again: set[int], cached: int
) -> None:
    """Of 8 prompts alike r0 or r1 is answered 503, so its salt is left, and the next one computes anew what all share.

    r0 goes by itself; beside r1 go r2 and r3, which are answered when it is asked again.
    """
    beside, gone, answer = threading.Semaphore(0), threading.Event(), server.answer

    def number_of(body: dict[str, Any]) -> int:
        return len(body["input_ids"]) - len(SYSTEM) - 2

    def troubled(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        number, shares = number_of(body), body["extra_key"] != body["rid"]
        if number == busy and shares:
            assert all(beside.acquire(timeout=20) for _ in range(len(again) - 1))
            return 503, {"error": "busy"}
        if number == busy:
            gone.set()
        elif number in again and shares:
            beside.release()
            assert gone.wait(20)
        return answer(body)

    server.answer = troubled  # type: ignore[method-assign]
    trace, _ = capture(replace(prompts_alike(options, 8), concurrency=3))
    assert cached_requests(trace) == [f"r{number}" for number in range(8 - cached, 8)]
    alone = [number_of(body) for body in server.asked if body["extra_key"] == body["rid"]]
    assert alone[0] == 0 and sorted(alone[1:]) == sorted(again), "the probe, and what was asked again"


def test_the_same_bits_from_several_requests_will_do(
    options: ServerOptions, server: FakeServer, tmp_path: Path
) -> None:
    server.evicts = (3,)
    trace, notes = capture(options)
    assert [note for note in notes if "is not sure" in note] == []
    assert (trace.records[place_of(trace, "r2")].server_cached_tokens or 0) > 0
    said = [text for text in trace.header.missing if "in forwards of other sizes" in text]
    assert said and said[0] in notes
    plain, _ = capture(replace(options, server_cache="own", out=tmp_path / "own"))
    assert_same_rows(trace, plain)


@pytest.mark.parametrize("trouble", ["unavailable", "aborted", "rowless"])
def test_a_try_that_was_given_up_spoils_the_salt(
    options: ServerOptions, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """What it computed is in the cache, and its rows are not known: others ask under another salt.

    Where it was answered without rows, that is noticed later, when others may have taken these from the cache.
    """
    monkeypatch.setattr("replay.capture.client.requests._ROWS_SECONDS", 0.3)
    answer = server.answer

    def troubled(body: dict[str, object]) -> object:
        if len(server.asked) == 2:
            setattr(server, trouble, 1)
        return answer(body)

    server.answer = troubled  # type: ignore[method-assign, assignment]
    trace, _ = capture(options)
    salts = [str(body["extra_key"]) for body in server.asked if body["extra_key"] != body["rid"]]
    again = [body for body in server.asked if body["extra_key"] == body["rid"]]
    if trouble != "rowless":
        assert {salt.rpartition("-")[2] for salt in salts} == {"0", "1"}
    assert len(again) == 2 or (trouble == "rowless" and len(again) > 2), "the probe, and what was tried again by itself"
    plain, _ = capture(replace(options, server_cache="own", out=tmp_path / "own"))
    assert_same_rows(trace, plain)


def test_a_capture_that_is_gone_on_with_takes_another_salt(
    options: ServerOptions, server: FakeServer, tmp_path: Path
) -> None:
    answer = server.answer

    def ending(body: dict[str, object]) -> object:
        server.unavailable = 9 if len(server.asked) == 3 else server.unavailable
        return answer(body)

    server.answer = ending  # type: ignore[method-assign, assignment]
    with pytest.raises(CaptureError, match="--resume"):
        capture(options)
    before, server.unavailable = len(server.asked), 0
    trace, _ = capture(replace(options, resume=True))
    first, second = (
        {body["extra_key"] for body in part if body["extra_key"] != body["rid"]}
        for part in (server.asked[:before], server.asked[before:])
    )
    assert first and second and not first & second
    plain, _ = capture(replace(options, server_cache="own", out=tmp_path / "own"))
    assert_same_rows(trace, plain)


def test_choices_that_keep_no_prefixes_are_refused(options: ServerOptions, server: FakeServer) -> None:
    for changes, said in (({"rows": "fp8"}, "--rows fp8"), ({"prompt_rows": 8}, "--prompt-rows last:8")):
        with pytest.raises(UsageError, match=said):
            capture_server(replace(options, **changes), lambda _: None)
    with pytest.raises(UsageError, match="type one of these"):
        capture_server(replace(options, server_cache="all"), lambda _: None)
    assert server.asked == []


def test_a_target_in_this_process_has_no_server_cache(tmp_path: Path) -> None:
    typed = ["capture", "--model", "m", "--prompts", "p", "-o", str(tmp_path / "t"), "--server-cache", "shared"]
    result = CliRunner().invoke(cli, typed)
    assert result.exit_code != 0 and "--server-cache shared is a choice of --server" in result.output


# ---- whose rows ----


def candidates_row_by_row(held: Sequence[Held], own: Sequence[Run], cached: int, row: int) -> list[Run] | None:
    """The slow twin of ``candidates_of``: the runs that one row may be of, None where there is none."""
    mine = [run for run in own if run.start <= row < run.stop and row >= cached]
    mine = [run for run in mine if run.place == max(it.place for it in mine)]
    border = mine[0].place if mine else own[0].place
    others = [it.run for it in held if it.start <= row < it.stop and it.run.place < border]
    return [*mine, *sorted(others, key=lambda run: run.place)] or None


def test_candidates_are_those_of_each_row_by_itself() -> None:
    draw = random.Random(5)
    unsure = 0
    for _ in range(300):
        cached, tokens = draw.randrange(6), draw.randrange(8, 14)
        cut = draw.randrange(cached + 1, tokens + 1)
        places = [("rows", number) for number in range(20)]
        border = draw.randrange(4, 16)
        edges = [cached, *([cut] if cut < tokens else []), tokens + draw.randrange(3)]
        own = [Run(low, high, 4, places[border + at]) for at, (low, high) in enumerate(pairwise(edges))]
        held = []
        for _ in range(draw.randrange(5)):
            low = draw.randrange(tokens - 1)
            high = draw.randrange(low + 1, tokens + 1)
            held.append(Held("other", low, high, Run(low, high, 4, draw.choice(places))))
        wanted = [candidates_row_by_row(held, own, cached, row) for row in range(tokens)]
        if None in wanted:
            unsure += 1
            with pytest.raises(UnsureError, match=f"row {wanted.index(None)}$"):
                list(candidates_of(held, own, cached, tokens, "mine"))
            continue
        found: list[list[Run]] = []
        for stretch in candidates_of(held, own, cached, tokens, "mine"):
            found += [[it.run for it in stretch]] * (stretch[0].stop - stretch[0].start)
        assert found == wanted
    assert 50 < unsure < 250


def recorded_of(folder: Path, *entries: Entry) -> list[Recorded]:
    """A file of rows whose taps tell their positions, those of the first entry from its ``start`` on."""
    kept = sum(entry.kept for entry in entries)
    tap = (entries[0].start + entries[0].left_out + torch.arange(kept, dtype=torch.float32))[:, None].repeat(1, 2)
    tensors = {
        "input_ids": torch.zeros(sum(entry.rows for entry in entries), dtype=torch.int32),
        "tap.2": tap,
        "logsumexp": torch.zeros(sum(entry.logits for entry in entries)),
    }
    write_row_file(folder, 7, 1, entries, {name: [part] for name, part in tensors.items()})
    file = read_row_file(folder / row_file_names(folder)[0], ("2",), 2)
    return [Recorded(file, index) for index in range(len(entries))]


def test_rows_that_were_left_out_are_of_no_run(tmp_path: Path) -> None:
    (run,) = runs_of(recorded_of(tmp_path, Entry("r", "prefill", 3, 6, 1, forward_rows=8, left_out=2)), 8)
    assert (run.start, run.stop, run.size) == (5, 8, 8)
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        assert read_held(Held("r", 6, 8, run), "2", 6, 8, writer)[:, 0].tolist() == [6, 7]


def test_forwards_are_told_one_by_one_and_not_where_one_is_unknown(tmp_path: Path) -> None:
    """Two decodes of 3 requests are two forwards; a server of an older replay does not say how many it decoded."""
    entries = [
        Entry("r", "prefill", 0, 4, 1, forward_rows=4),
        *(Entry("r", "decode", 4 + i, 1, 1, batch=3) for i in (0, 1)),
    ]
    runs = runs_of(recorded_of(tmp_path, *entries), 9)
    held = [Held("r", low, high, run) for run in runs for low, high in pairwise(range(run.start, run.stop + 1))]
    assert forwards_of(held) == ((4, 4), (1, 3), (1, 3))
    (tmp_path / "old").mkdir()
    old = runs_of(recorded_of(tmp_path / "old", *(replace(entry, batch=0) for entry in entries)), 9)
    assert forwards_of([*held[:4], *(Held("r", run.start, run.stop, run) for run in old[1:])]) == ()


def test_common_tokens_are_counted() -> None:
    draw = random.Random(3)
    for _ in range(200):
        one, other = ([draw.randrange(2) for _ in range(draw.randrange(9))] for _ in range(2))
        common = 0
        while common < min(len(one), len(other)) and one[common] == other[common]:
            common += 1
        assert alike(one, other) == common


# ---- whose turn ----


def request(name: str, prompt: Sequence[int]) -> EncodedRequest:
    return EncodedRequest(name, None, tuple(prompt), None, 4)


def test_the_first_of_those_that_begin_alike_goes_first() -> None:
    system, other = list(range(2 * BLOCK)), list(range(50, 50 + BLOCK))
    asked = [request("a", [*system, 1]), request("b", [*system, 2]), request("c", other), request("d", [*system, 3])]
    turns = Turns(asked, 4)
    assert [one.request_id for one in turns.take()] == ["a", "c"]
    assert turns.take() == [] and sorted(turns.prefilling) == ["a", "c"]
    turns.prefilled("a")
    assert [one.request_id for one in turns.take()] == ["b", "d"]


def test_no_more_go_than_may_be_in_flight() -> None:
    turns = Turns([request(str(i), [i]) for i in range(5)], 2)
    assert [one.request_id for one in turns.take()] == ["0", "1"]
    turns.prefilled("0")
    assert turns.take() == []
    turns.ended("1", computed=True)
    assert [one.request_id for one in turns.take()] == ["2"]


def test_what_is_computed_is_so_under_one_salt_and_not_of_a_refusal() -> None:
    prompts = [request(name, [*range(BLOCK), at]) for at, name in enumerate("abcde")]
    turns = Turns(prompts, 4)
    turns.under("one")
    assert [one.request_id for one in turns.take()] == ["a"]
    turns.ended("a", computed=False)
    assert [one.request_id for one in turns.take()] == ["b"]
    turns.under("one")
    turns.prefilled("b")
    turns.under("two")
    assert [one.request_id for one in turns.take()] == ["c"]
    turns.under("three")
    turns.prefilled("c")  # under another
    assert [one.request_id for one in turns.take()] == ["d"]
    turns.ended("d", computed=True)
    assert [one.request_id for one in turns.take()] == ["e"]


def test_all_go_in_the_end_and_none_computes_what_another_one_does() -> None:
    draw = random.Random(1)
    for _ in range(30):
        blocks = [[draw.randrange(100) for _ in range(BLOCK)] for _ in range(2)]
        prompts = [[*chain(*draw.choices(blocks, k=draw.randrange(1, 4)))] for _ in range(9)]
        turns = Turns([request(str(i), prompt) for i, prompt in enumerate(prompts)], draw.randrange(1, 5))
        gone: list[str] = []
        computed: list[list[int]] = []
        flying: list[str] = []
        while len(gone) < len(prompts):
            for one in turns.take():
                gone.append(one.request_id)
                flying.append(one.request_id)
            assert flying, "somebody goes on"
            new = []
            for name in turns.prefilling:
                known = max((alike(it, prompts[int(name)]) for it in computed), default=0) // BLOCK
                new += [tuple(prompts[int(name)][: (known + 1) * BLOCK])] * (len(prompts[int(name)]) > known * BLOCK)
            assert len(new) == len(set(new))
            done = draw.choice(flying)
            computed.append(prompts[int(done)])
            turns.prefilled(done)
            if draw.random() < 0.7:
                flying.remove(done)
                turns.ended(done, computed=True)
        assert sorted(gone, key=int) == [str(i) for i in range(len(prompts))]
