"""A server that keeps its prefix cache while it is recorded: the trace is whole, and predicts what this server did.

As in test_predict_server.py: every round is the server's, or it parts from it at a near tie.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cached_traces import CachingServer, Recording, Row, caching_server
from support.near_ties import Judged, chain_noise, count_in_production, follow_chains, judge_chains, report_judged

import replay
from replay.capture.events import Noted
from replay.capture.target_files import open_target
from replay.drafting.product_sizes import served_spans
from replay.traces.check import check_trace
from replay.traces.reader import Trace
from replay.traces.sample_files import sample_head, sample_prompts
from replay.traces.taps import FINAL

STEPS = 5
NEW_TOKENS = 12
SYSTEM = 200  # tokens of it
CHUNK = 128  # tokens of a prefill at most
ALIKE = 3  # prompts that begin with it
UNFED = f"{ALIKE} requests without a feed: the server's cache had the first rows"  # all but one, and the second turn
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Recorded:
    """Prompts of one server, each computed by itself, and with what they share computed once; then a turn more."""

    own: Recording
    shared: Recording


def variant(**changes: Any) -> replay.Variant:
    return replay.Variant("demo", replay.parse_wiring("embed,3,16"), steps=STEPS, **changes)


@pytest.fixture(scope="module")
def recorded(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    with caching_server(
        target_dir, tmp_path_factory.mktemp("cached"), STEPS, "--chunked-prefill-size", str(CHUNK)
    ) as server:
        yield record(server, target_dir)


def record(server: CachingServer, target_dir: Path) -> Recorded:
    """A conversation of two turns, and prompts with a system prompt in common between its turns."""
    tokenizer = open_target(target_dir).tokenizer
    first = tokenizer(ASKED.format("Write one sentence about a lighthouse."))["input_ids"]
    text = tokenizer(sample_prompts().read_text())["input_ids"]
    rows: list[Row] = [{"id": "turn1", "input_ids": first}]
    ends = [
        text[start : start + 20 + at] for at, start in enumerate(range(SYSTEM + 100, SYSTEM + 100 + 40 * ALIKE, 40))
    ]
    rows += [{"id": f"s{at}", "input_ids": [*text[:SYSTEM], *end]} for at, end in enumerate(ends)]
    asked = {"max_new_tokens": NEW_TOKENS, "concurrency": 2}
    own = server.record("own", rows, **asked)
    place = next(index for index, one in enumerate(own.trace.records) if one.request_id == "turn1")
    more = tokenizer("<|im_end|>\n" + ASKED.format("Write one about a bridge."))["input_ids"]
    rows.append({"id": "turn2", "input_ids": [*own.trace.read(place, ()).tokens.tolist(), *more]})
    return Recorded(own, server.record("shared", rows, **asked, server_cache="shared"))


def cached_tokens(trace: Trace) -> dict[str, int]:
    return {record.request_id: record.server_cached_tokens or 0 for record in trace.records}


def judge(trace: Trace, what: str) -> Judged:
    mine = follow_chains(trace, sample_head(), variant())
    return judge_chains(what, mine, chain_noise(mine, follow_chains(trace, sample_head(), variant(precision="fp32"))))


def test_the_prefix_cache_is_hit(recorded: Recorded) -> None:
    """But for the last row in common, whose draft's row embeds the next token."""
    assert set(cached_tokens(recorded.own.trace).values()) == {0}
    cached = cached_tokens(recorded.shared.trace)
    assert [cached[f"s{at}"] >= SYSTEM - 1 for at in range(ALIKE)] == [False, True, True]
    first = next(one for one in recorded.shared.trace.records if one.request_id == "turn1")
    assert first.prompt_tokens <= cached["turn2"] < first.tokens
    assert recorded.shared.spooled < 0.6 * recorded.own.spooled
    assert [event.text for event in recorded.shared.events if isinstance(event, Noted)] == [UNFED]


def test_the_trace_is_whole(recorded: Recorded) -> None:
    trace = recorded.shared.trace
    assert [finding for finding in check_trace(trace) if finding.severity != "note"] == []
    assert [text for text in trace.header.missing if "cache" in text] == [UNFED]
    for record in trace.records:
        assert sum(rows for rows, _ in (*record.cached, *record.pieces)) == record.prompt_tokens
        assert sum(rows for rows, _ in record.cached) == record.server_cached_tokens
    first, turn = (next(it for it in trace.records if it.request_id == name) for name in ("turn1", "turn2"))
    told = [size for rows, size in turn.cached for _ in range(rows)][first.prompt_tokens :]
    made = [size for _, rows, size in served_spans(trace.served_rounds())["turn1"] for _ in range(rows)]
    assert told and told == made[: len(told)], "rows of the first turn's output are those of its verifies"


def test_cached_rows_are_bit_for_bit_those_that_were_computed(recorded: Recorded) -> None:
    """They are stored once: of the requests of the system prompt one stores it."""
    trace = recorded.shared.trace
    places = {record.request_id: index for index, record in enumerate(trace.records)}
    first = trace.read(places["s0"], ["3", FINAL])
    for at in range(1, ALIKE):
        other = trace.read(places[f"s{at}"], ["3", FINAL])
        assert all(torch.equal(first.taps[tap][: SYSTEM - 1], other.taps[tap][: SYSTEM - 1]) for tap in ("3", FINAL))
    stored = [record.shared for record in trace.records if record.request_id.startswith("s")]
    assert sorted(rows >= SYSTEM - 1 for rows in stored) == [False, True, True]


def test_every_round_is_the_servers(recorded: Recorded, record_property: Any) -> None:
    judged = [judge(recorded.own.trace, "each by itself"), judge(recorded.shared.trace, "prefixes from the cache")]
    report_judged(record_property, judged)
    assert [str(one) for one in judged if one.unexplained] == []
    assert [one.rounds for one in judged] == [len(it.trace.served_rounds()) for it in (recorded.own, recorded.shared)]
    (found,) = count_in_production(recorded.shared.trace, sample_head(), [variant()])
    assert (found.rounds, found.alike, found.unexplained) == (judged[1].rounds, judged[1].alike, 0)
