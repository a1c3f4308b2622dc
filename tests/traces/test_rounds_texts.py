"""Rounds of several files: whether they are of one text, and which columns tell their variants apart."""

import hashlib
import io
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console
from support.rounds_maker import make_rounds, make_variant

from replay.analysis import wording
from replay.analysis.compare.pairing import pair_rounds
from replay.analysis.report.report import assess, lay_out
from replay.analysis.summary import summarise
from replay.errors import TraceError
from replay.traces.rounds import Rounds, tokens_sha256
from replay.traces.rounds_join import FILES, join_rounds


def one(**changes: Any) -> Rounds:
    """A file of one variant."""
    return make_rounds({make_variant("embed,3,16", draft="draft", **changes): [[0, 1], [2], [1, 0, 1]]})


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
