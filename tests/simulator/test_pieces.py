"""Prompts that a server cut where its trace says: the fault at these places, and what is refused."""

from pathlib import Path

import pytest
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.diagnosis.diagnose import open_case, served_variant
from replay.diagnosis.likely_values import LIKELY_VALUES
from replay.errors import UsageError

# Prompts of 6, 7 and 8 tokens; of the last one the first two came from a cache.
CUT = [[(1, 6), (3, 3), (2, 5)], [(7, 9)], [(2, 2), (4, 4)]]
CHUNK = "kv.chunk-boundary"


def drafted(trace: replay.Trace, fault: str) -> list[list[int]]:
    """What is drafted at the anchors of the server's rounds."""
    variant = replay.Variant("h", WIRING, STEPS, faults=replay.parse_faults(fault))
    table = replay.simulate(trace, {"h": make_checkpoint()}, [variant], follow=trace.served_rounds()).table
    return table.sort("request_id", "round")["drafted"].to_list()  # type: ignore[no-any-return]


def served(trace: replay.Trace) -> list[list[int]]:
    return trace.served_rounds().sort("request_id", "round")["drafted"].to_list()


def likely(trace: replay.Trace) -> list[str]:
    head = make_checkpoint()
    return list(LIKELY_VALUES[CHUNK](open_case(trace, head, served_variant(trace, "h"), None, None)))


def test_the_fault_cuts_prompts_where_the_trace_says(tmp_path: Path) -> None:
    """The server is the twin; neither a healthy replay nor chunks of one size draft what it drafted."""
    trace = make_served(tmp_path, make_checkpoint(), f"{CHUNK}=recorded", requests=3, pieces=CUT)
    assert drafted(trace, f"{CHUNK}=recorded") == served(trace)
    assert served(trace) not in [drafted(trace, fault) for fault in ("none", f"{CHUNK}=2", f"{CHUNK}=3", f"{CHUNK}=4")]


def test_pieces_of_one_size_are_chunks_of_that_size(tmp_path: Path) -> None:
    pieces = [[(3, 3), (3, 6)], [(3, 3), (3, 3), (1, 8)], [(3, 3), (3, 3), (2, 2)]]
    trace = make_served(tmp_path, make_checkpoint(), f"{CHUNK}=3", requests=3, pieces=pieces)
    assert drafted(trace, f"{CHUNK}=recorded") == drafted(trace, f"{CHUNK}=3") == served(trace)
    assert served(trace) != drafted(trace, "none")


def test_a_trace_that_does_not_say_is_refused(tmp_path: Path) -> None:
    trace = make_served(tmp_path, make_checkpoint(), requests=3, pieces=CUT[:2])
    with pytest.raises(UsageError, match=r"does not say of 1 of 3 requests in what pieces .* type kv.chunk-boundary=N"):
        drafted(trace, f"{CHUNK}=recorded")
    assert "recorded" not in likely(trace)


def test_where_prompts_were_cut_is_tried_first(tmp_path: Path) -> None:
    cut = make_served(tmp_path / "cut", make_checkpoint(), requests=3, pieces=CUT, chunked_prefill_size="4")
    assert likely(cut) == ["recorded", "4"]
    whole = [[(6, 6)], [(7, 9)], [(8, 8)]]
    uncut = make_served(tmp_path / "uncut", make_checkpoint(), requests=3, pieces=whole, chunked_prefill_size="4")
    assert likely(uncut) == ["4"]
