"""The rounds file: what was written is read back, and whatever does not hold together is refused in one sentence."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.rounds_maker import make_rounds, make_variant

from replay.errors import OutputError, ReplayError, TraceCorruptError, TraceError, TraceVersionError
from replay.traces.agreement import Agreement
from replay.traces.rounds import Rounds, table_schema
from replay.traces.rounds_file import METADATA_KEY, read_rounds, write_rounds


@pytest.fixture
def rounds() -> Rounds:
    near = make_variant("near", agreement=Agreement(9, 6, 2, 1, 0.125, 0.015625, 0.75, 27, 4, 1.5))
    far = make_variant("far", steps=5, faults=("kv.rollback",), wiring=("3", "final"))
    return make_rounds({near: [[3, 0], [1]], far: [[5], [0, 0]]}, observed=[[3, 0], [1]], category="chat")


def test_what_was_written_is_read_back(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    write_rounds(rounds, path)
    again = read_rounds(path)
    assert again.table.equals(rounds.table)
    assert (again.variants, again.requests) == (rounds.variants, rounds.requests)
    assert (again.trace, again.drafts) == (rounds.trace, rounds.drafts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rounds.parquet"]


def test_other_programs_read_the_documented_columns(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    write_rounds(rounds, path)
    assert pl.read_parquet_schema(path) == {
        "variant": pl.String, "request_id": pl.String, "round": pl.Int32, "anchor": pl.Int32,
        "drafted": pl.List(pl.Int32), "accepted": pl.Int32, "cut": pl.Boolean,
    }  # fmt: skip
    assert list(pl.read_parquet(path).row(2)) == ["near", "r1", 0, 11, [5, 5, 5], 1, False]


def test_no_rounds_at_all_are_a_table_too(tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    write_rounds(make_rounds({make_variant("near"): [[], []]}), path)
    assert read_rounds(path).table.height == 0


def test_a_file_that_exists_is_kept_unless_forced(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already: type --force"):
        write_rounds(rounds, path)
    assert path.read_text() == "mine"
    write_rounds(rounds, path, force=True)
    assert read_rounds(path).table.height == 6


def test_a_write_that_fails_leaves_nothing_behind(rounds: Rounds, tmp_path: Path) -> None:
    folder = tmp_path / "rounds.parquet"
    (folder / "inside").mkdir(parents=True)
    for path in (folder, tmp_path / "absent" / "rounds.parquet"):
        with pytest.raises(OutputError, match=r"cannot be written|is no regular file"):
            write_rounds(rounds, path, force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rounds.parquet"]


def _refused(path: Path, error: type[ReplayError], *said: str) -> None:
    with pytest.raises(error) as caught:
        read_rounds(path)
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    for words in said:
        assert words in message


def test_no_file_a_folder_and_no_parquet_are_refused(rounds: Rounds, tmp_path: Path) -> None:
    _refused(tmp_path / "absent.parquet", TraceError, "does not exist", "replay simulate TRACE -o")
    _refused(tmp_path, TraceError, "is a folder")
    path = tmp_path / "rounds.parquet"
    path.write_text("variant,request_id\n")
    _refused(path, TraceCorruptError, "no readable parquet file")
    write_rounds(rounds, path, force=True)
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        _refused(path, TraceCorruptError, "no readable parquet file")


def test_a_file_from_before_there_was_an_agreement_has_none(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    _rewrite(rounds, path, head=lambda head: [variant.pop("agreement") for variant in head["variants"]])
    assert [variant.agreement for variant in read_rounds(path).variants] == [None, None]


def test_an_agreement_that_does_not_hold_together_is_not_written(rounds: Rounds, tmp_path: Path) -> None:
    near, far = rounds.variants
    assert near.agreement is not None
    for wrong in (replace(near.agreement, noise=math.inf), replace(near.agreement, alike=7)):
        broken = replace(rounds, variants=(replace(near, agreement=wrong), far))
        with pytest.raises(TraceCorruptError, match="variant 'near' has"):
            write_rounds(broken, tmp_path / "rounds.parquet")
    assert list(tmp_path.iterdir()) == []


def test_foreign_parquet_is_refused(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    rounds.table.write_parquet(path)
    _refused(path, TraceVersionError, "not one of rounds")
    for foreign in ("[]", '{"format": "other", "version": 1}'):
        rounds.table.write_parquet(path, metadata={METADATA_KEY: foreign})
        _refused(path, TraceVersionError, "not one of rounds")
    rounds.table.write_parquet(path, metadata={METADATA_KEY: "{"})
    _refused(path, TraceCorruptError, "its metadata is not valid JSON")


Break = Callable[[dict[str, Any]], object]


def _agreed(head: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = head["variants"][0]["agreement"]
    return found


def _rewrite(rounds: Rounds, path: Path, *, head: Break = lambda _: None, table: pl.DataFrame | None = None) -> None:
    """The file of ``rounds`` with its metadata broken in place by ``head``, or with another table."""
    write_rounds(rounds, path)
    metadata = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    head(metadata)
    frame = rounds.table if table is None else table
    frame.write_parquet(path, metadata={METADATA_KEY: json.dumps(metadata)})


@pytest.mark.parametrize(
    ("head", "error", "said"),
    [
        (lambda head: head.update(version=2), TraceVersionError, "version 2, this replay reads version 1"),
        (lambda head: head.pop("version"), TraceVersionError, "version None"),
        (lambda head: head.pop("drafts"), TraceCorruptError, "its metadata lacks the field drafts"),
        (lambda head: head.update(more=1), TraceCorruptError, "its metadata has the field more"),
        (lambda head: head.update(requests={}), TraceCorruptError, "requests is {}, must be a list of objects"),
        (lambda head: head.update(trace=[]), TraceCorruptError, "trace holds [] where a JSON object must stand"),
        (lambda head: head["variants"][1].pop("kv"), TraceCorruptError, "variants[1] lacks the field kv"),
        (lambda head: head["variants"][0].update(steps="3"), TraceCorruptError, "variants[0]: steps is '3'"),
        (lambda head: head["variants"][0].update(steps=True), TraceCorruptError, "variants[0]: steps is True"),
        (lambda head: head["variants"][0].update(wiring=[3]), TraceCorruptError, "variants[0]: wiring is [3]"),
        (
            lambda head: head["requests"][0].update(observed_histogram=[1.5]),
            TraceCorruptError,
            "requests[0]: observed_histogram is [1.5]",
        ),
        (lambda head: _agreed(head).pop("alike"), TraceCorruptError, "variants[0]: agreement lacks the field alike"),
        (lambda head: _agreed(head).update(more=1), TraceCorruptError, "variants[0]: agreement has the field more"),
        (lambda head: _agreed(head).update(flips=-1), TraceCorruptError, "variants[0]: agreement: flips is -1"),
        (lambda head: _agreed(head).update(noise="0"), TraceCorruptError, "variants[0]: agreement: noise is '0'"),
        (lambda head: _agreed(head).update(alike=7), TraceCorruptError, "10 rounds alike, near a tie or unexplained"),
        (lambda head: _agreed(head).update(flips=28), TraceCorruptError, "28 of 27 drafted tokens that differ"),
        (lambda head: head["variants"][1].update(agreement=3), TraceCorruptError, "agreement holds 3"),
        (lambda head: head["requests"].append("r9"), TraceCorruptError, "requests[2] holds 'r9'"),
        (lambda head: head["variants"][1].update(name="near"), TraceCorruptError, "variant 'near' 2 times"),
        (lambda head: head["requests"][1].update(request_id="r0"), TraceCorruptError, "request 'r0' 2 times"),
        (lambda head: head["variants"].pop(), TraceCorruptError, "rounds of variant 'far'"),
        (lambda head: head["requests"].pop(), TraceCorruptError, "rounds of request 'r1'"),
        (lambda head: head["variants"][0].update(steps=2), TraceCorruptError, "more accepted tokens than its variant"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    rounds: Rounds, tmp_path: Path, head: Break, error: type[ReplayError], said: str
) -> None:
    path = tmp_path / "rounds.parquet"
    _rewrite(rounds, path, head=head)
    _refused(path, error, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop("drafted", "cut"), "no column drafted, cut"),
        (lambda table: table.with_columns(more=1), "its columns are"),
        (lambda table: table.select(reversed(table.columns)), "its columns are"),
        (lambda table: table.cast({"anchor": pl.Int64}), "column anchor is Int64 where Int32 belongs"),
        (lambda table: table.cast({"drafted": pl.List(pl.Int64)}), "column drafted is List(Int64)"),
        (lambda table: table.cast({"cut": pl.Int8}), "column cut is Int8"),
        (lambda table: table.with_columns(pl.col("drafted").list.head(2)), "2 of its 6 rounds have more accepted than"),
        (lambda table: table.with_columns(accepted=pl.lit(-1, pl.Int32)), "6 of its 6 rounds have a negative"),
        (lambda table: table.with_columns(round=pl.lit(0, pl.Int32)), "4 of its 6 rounds have a round that stands"),
        (lambda table: table.with_columns(cut=pl.lit(None, pl.Boolean)), "6 of its 6 rounds have an empty cell"),
        (lambda table: table.with_columns(variant=pl.lit(None, pl.String)), "6 of its 6 rounds have an empty cell"),
        (
            lambda table: table.with_columns(drafted=pl.lit([5, None, 5, 5, 5], pl.List(pl.Int32))),
            "6 of its 6 rounds have an empty cell",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    rounds: Rounds, tmp_path: Path, change: Callable[[pl.DataFrame], pl.DataFrame], said: str
) -> None:
    path = tmp_path / "rounds.parquet"
    _rewrite(rounds, path, table=change(rounds.table))
    _refused(path, TraceCorruptError, said)
    with pytest.raises(TraceCorruptError):
        write_rounds(replace(rounds, table=change(rounds.table)), tmp_path / "other.parquet")
    assert not (tmp_path / "other.parquet").exists()


def test_flipped_bytes_are_refused_or_harmless(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    write_rounds(rounds, path)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert read_rounds(path).table.schema == table_schema()
        except TraceError:
            refused += 1
    assert refused > 10
