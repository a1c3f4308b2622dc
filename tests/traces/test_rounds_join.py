"""Rounds of several files as one: what is told apart, what is one, what is refused."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from rich.console import Console
from support.rounds_maker import make_rounds, make_variant

import replay
from replay.analysis import wording
from replay.analysis.compare.pairing import pair_rounds
from replay.analysis.report.by_group import render_groups, summarise_by
from replay.analysis.report.report import assess, lay_out
from replay.analysis.summary import summarise
from replay.cli.app import cli
from replay.errors import ReplayError, TraceError, UsageError
from replay.traces.rounds import Rounds, tokens_sha256
from replay.traces.rounds_file import write_rounds
from replay.traces.rounds_join import FILES, join_rounds, read_joined, short_names
from replay.traces.rounds_sets import keep_requests

PLAYED = [[0, 1], [2], [1, 0, 1]]  # output tokens: 1 + (accepted + 1) of each round


def one(path: str = "/runs/a/draft", *, played: list[list[int]] = PLAYED, **changes: Any) -> Rounds:
    """A file of one variant; its head is called ``draft`` whatever folder it lies in."""
    sums = tuple((9, 4, 1) for _ in played)
    variant = make_variant("embed,3,16", draft="draft", by_request=sums, anchors=9, anchors_accepted=4, **changes)
    made = make_rounds({variant: played})
    return replace(made, drafts={"draft": {"path": path, "notes": [f"seen from {path}"]}})


def test_its_page_has_a_heat_map_and_its_groups_name_the_file() -> None:
    files = {
        name: make_rounds(
            {make_variant(f"steps={steps}", steps=steps, wiring=wiring, by_request=((9, 4, 1),) * 2): [[1], [0, steps]]
             for steps in (1, 3)}
        )
        for name, wiring in (("x", ("embed", "3", "16")), ("y", ("3", "16", "28")))
    }  # fmt: skip
    joined = join_rounds(files)
    console = Console(width=200, file=io.StringIO())
    console.print(render_groups(summarise_by(joined, "trace"), "trace", joined=True))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"{name}: steps={steps}" in said for name in "xy" for steps in (1, 3))
    heat = replay.charts(replace(joined, trace={**joined.trace, "files": list(files)}))["by steps and wiring"]
    assert len(heat.spec["data"]["values"]) == 4


def test_every_variant_has_its_file_in_front_and_its_own_numbers() -> None:
    other = one(steps=5)
    joined = join_rounds({"x": one(), "y": other})
    assert [row.name for row in joined.variants] == ["x: embed,3,16", "y: embed,3,16"]
    for row, alone in zip(summarise(joined), (*summarise(one()), *summarise(other)), strict=True):
        assert (row.accept_length, row.accept_length_ci95, row.histogram) == (
            alone.accept_length, alone.accept_length_ci95, alone.histogram)  # fmt: skip
    assert len(joined.requests) == 3 and len(joined.table) == 2 * 6


def test_a_head_of_two_files_is_one_and_two_heads_of_one_name_are_two() -> None:
    same = join_rounds({"x": one(), "y": one()})
    assert list(same.drafts) == ["draft"] == list({row.draft for row in same.variants})
    apart = join_rounds({"x": one(), "y": one("/runs/b/draft"), "z": one()})
    assert [row.draft for row in apart.variants] == ["draft in a", "draft in b", "draft in a"]
    assert apart.drafts["draft in b"]["path"] == "/runs/b/draft"
    alike = join_rounds({"x": one("/a/run/draft"), "y": one("/b/run/draft")})
    assert [row.draft for row in alike.variants] == ["draft (x)", "draft (y)"]


def test_a_request_of_one_file_has_no_rounds_in_the_other() -> None:
    whole = one()
    joined = join_rounds({"part": keep_requests(whole, {"r1"}), "whole": whole})
    part, full = summarise(joined)
    assert (part.played_requests, full.played_requests, part.requests) == (1, 3, 3)
    assert [row.by_request for row in joined.variants] == [
        ((9, 4, 1), (0, 0, 0), (0, 0, 0)), ((9, 4, 1),) * 3]  # fmt: skip
    assert [request.request_id for request in joined.requests] == ["r1", "r0", "r2"]
    assert summarise(keep_requests(joined, {"r1"}))[1].rounds == 1  # parts of what was joined can be taken


def test_requests_of_two_traces_say_which() -> None:
    first, other = one(), one()
    renamed = {request.request_id: f"other-{request.request_id}" for request in other.requests}
    other = replace(
        other,
        table=other.table.with_columns(request_id=other.table["request_id"].replace(renamed)),
        requests=tuple(replace(request, request_id=renamed[request.request_id]) for request in other.requests),
        trace={**other.trace, "path": "elsewhere"},
    )
    joined = join_rounds({"x": first, "y": other})
    assert [request.trace for request in joined.requests] == ["x"] * 3 + ["y"] * 3
    assert [(told["name"], told["path"]) for told in joined.trace["traces"]] == [
        ("x", str(first.trace.get("path"))), ("y", "elsewhere")]  # fmt: skip


def _with_text(rounds: Rounds, text: str | None, *, path: str, temperature: float) -> Rounds:
    requests = tuple(replace(one, tokens_sha256=text, temperature=temperature) for one in rounds.requests)
    return replace(rounds, requests=requests, trace={**rounds.trace, "path": path})


@pytest.mark.parametrize(
    ("other", "temperature", "path", "said"),
    [
        ("b" * 64, 0.0, "t", "the tokens of request 'r0' in y are not those in a file before it"),
        ("b" * 64, 1.5, "u", "the tokens of request 'r0' in y are not those in a file before it"),
        (None, 1.5, "u", "request 'r0' was sampled"),
        ("a" * 64, 1.5, "u", None),
        (None, 1.5, "t", None),
        (None, 0.0, "u", None),
    ],
)
def test_texts_of_one_length_are_told_apart(other: str | None, temperature: float, path: str, said: str | None) -> None:
    files = {
        "x": _with_text(one(), "a" * 64, path="t", temperature=temperature),
        "y": _with_text(one(steps=5), other, path=path, temperature=temperature),
    }
    if said is None:
        assert {request.tokens_sha256 for request in join_rounds(files).requests} == {"a" * 64}
        return
    with pytest.raises(TraceError, match=said):
        join_rounds(files)
    if other is not None and path == "t":
        with pytest.raises(TraceError, match="the tokens of request 'r0'"):
            pair_rounds(files["x"], files["y"])


def test_the_checksum_is_that_of_the_tokens() -> None:
    """The reference is numpy's spelling of the same bytes."""
    tokens = [0, 7, 151_935, (1 << 31) - 1]
    assert tokens_sha256(tokens) == hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest()


def _called(rounds: Rounds, name: str) -> Rounds:
    variants = (replace(rounds.variants[0], name=name),)
    return replace(rounds, variants=variants, table=rounds.table.with_columns(variant=pl.lit(name)))


def test_a_column_stays_where_names_hold_its_digits_by_chance() -> None:
    """``3`` and ``16`` stand in ``embed,3,16`` too; a name that says ``steps=3`` needs no column."""
    by_chance = join_rounds({"x3": one(steps=3), "y16": one(steps=16)})
    assert wording.joined(summarise(by_chance)) == ("name", "steps")
    told = [_called(one(steps=steps), f"steps={steps}") for steps in (3, 16)]
    spelled = join_rounds(dict(zip("xy", told, strict=True)))
    spelled = replace(spelled, trace={**spelled.trace, FILES: ["x", "y"]})
    report = assess(spelled, summarise(spelled))
    assert report.facts == ("name",)
    console = Console(file=io.StringIO(), width=100)
    console.print(lay_out(report))
    assert "draft tokens" not in console.file.getvalue()  # they differ, as the steps do


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.parquet", "b.parquet"], ["a", "b"]),
        (["x/r.parquet", "y/r.parquet", "z.parquet"], ["x/r", "y/r", "z"]),
        (["r.parquet", "x/r.parquet"], ["r", "x/r"]),
        (["r.parquet", "r.pq"], ["r (1)", "r (2)"]),
    ],
)
def test_files_have_short_names_that_differ(names: list[str], short: list[str]) -> None:
    assert short_names([Path(name) for name in names]) == short


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(one(), trace={"target": "another"}), "two targets: target is"),
        (one(played=[[0, 1], [2], [1]]), "two traces: output tokens of request 'r2' is 3 in y and 6 in a file before"),
    ],
)
def test_what_is_not_of_one_trace_is_refused(other: Rounds, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        join_rounds({"x": one(), "y": other})


def test_report_takes_several_files(tmp_path: Path) -> None:
    paths = [tmp_path / "x.parquet", tmp_path / "y.parquet"]
    for path, rounds in zip(paths, (one(), one("/runs/b/draft", steps=5)), strict=True):
        write_rounds(rounds, path)
    page = tmp_path / "r.html"
    done = CliRunner().invoke(cli, ["report", *map(str, paths), "--html", str(page)])
    assert done.exit_code == 0, done.output
    for text in (done.stdout, page.read_text()):
        assert "x: embed,3,16" in text and "y: embed,3,16" in text and "draft in b" in text and "steps" in text
    assert "All variants: wiring" in done.stdout  # the same in both
    twice = CliRunner().invoke(cli, ["report", str(paths[0]), str(tmp_path / "." / "x.parquet")])
    assert (twice.exit_code, twice.stdout) == (1, "") and "named twice" in twice.stderr
    with pytest.raises(UsageError, match="named twice"):
        read_joined([paths[0], paths[0]])
    with pytest.raises(ReplayError, match=r"gone\.parquet"):
        read_joined([paths[0], tmp_path / "gone.parquet"])


@pytest.mark.parametrize("option", ["--trace", "--draft", "--target"])
def test_a_folder_that_is_not_there_is_refused(option: str, tmp_path: Path) -> None:
    write_rounds(one(), path := tmp_path / "x.parquet")
    for folder in (tmp_path / "gone", path):
        done = CliRunner().invoke(cli, ["report", str(path), option, str(folder)])
        assert (done.exit_code, done.stdout) == (1, "") and f"{option} {folder} is no folder" in done.stderr
