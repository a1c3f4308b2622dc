"""docs/json.md against real documents of every command, key by key, both ways; and what no document may hold.

The page's tables are read: a key as ``pairs[].a.rounds``, its type, its meaning. ``<name>`` stands for any key.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import Document, documents, read
from support.rounds_maker import make_rounds, make_variant

from replay.analysis.compare.compare import compare_variants
from replay.analysis.compare.pairing import pair_rounds
from replay.analysis.json_document import OUTCOMES, SCHEMA_VERSION, document, interval_json, json_value
from replay.analysis.report.peers import PeerMetric, peer_metrics
from replay.analysis.summary import summarise, to_json
from replay.cli.app import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
COMMANDS = sorted(cli.commands)
EVERY = "Every document"
SAME = {"report": "simulate", "demo": "simulate"}  # commands that print another's document
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
Key = tuple[str, ...]


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str) -> dict[Key, set[str]]:
    """By key the types that the section gives it; the documents of a trace and of a head share some keys."""
    found: dict[Key, set[str]] = {}
    for key, kind, _ in ROW.findall(sections()[section]):
        found.setdefault(_parts(key), set()).add(kind.strip())
    return found


def _parts(key: str) -> Key:
    return tuple(key.replace("[]", ".[]").split("."))


def page_of(command: str) -> dict[Key, set[str]]:
    """Every key that the page allows in a document of ``command``."""
    return {**rows(EVERY), **(rows(SAME[command]) if command in SAME else {}), **rows(command)}


Printed = Callable[[str], list[Document]]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Documents of a command, made once."""
    return cache(lambda command: documents(command, tmp_path_factory.mktemp(command)))


def walk(value: object, at: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key of a document, those of objects in lists behind ``[]``, with its value."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*at, name), item
            yield from walk(item, (*at, name))
    elif isinstance(value, list):
        for item in value:
            yield from walk(item, (*at, "[]"))


def fits(key: Key, pattern: Key) -> bool:
    return len(key) == len(pattern) and all(
        want == part or (want.startswith("<") and part != "[]") for part, want in zip(key, pattern, strict=True)
    )


@cache
def is_a(kind: str) -> Any:
    """The test of a type that the page names."""
    if kind.endswith(" or null"):
        inner = is_a(kind.removesuffix(" or null"))
        return lambda value: value is None or inner(value)
    if kind.startswith("list of "):
        item = is_a(kind.removeprefix("list of ").removeprefix("(").removesuffix(")"))
        return lambda value: isinstance(value, list) and all(map(item, value))
    return {
        "text": lambda value: isinstance(value, str),
        "integer": lambda value: type(value) is int,
        "number": lambda value: type(value) in (int, float) and math.isfinite(value),
        "boolean": lambda value: isinstance(value, bool),
        "object": lambda value: isinstance(value, dict),
        "interval": lambda value: isinstance(value, list) and [type(end) for end in value] == [float, float],
        "outcome": lambda value: value in OUTCOMES,
    }[kind]


# ---- the page and the documents ----


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_of_a_document_is_on_the_page_with_its_type(command: str, printed: Printed) -> None:
    page = page_of(command)
    for one in printed(command):
        for key, value in walk(one):
            kinds = [kind for pattern, types in page.items() if fits(key, pattern) for kind in types]
            assert kinds, f"{'.'.join(key)} is not on the page"
            assert any(is_a(kind)(value) for kind in kinds), f"{'.'.join(key)} is {value!r}, the page says {kinds}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_on_the_page_is_in_some_document(command: str, printed: Printed) -> None:
    seen = {key for one in printed(command) for key, _ in walk(one)}
    asked = rows(command) | rows(EVERY)
    assert [".".join(pattern) for pattern in asked if not any(fits(key, pattern) for key in seen)] == []


def test_the_page_has_a_section_for_every_command_and_no_other() -> None:
    assert set(sections()) == {"Rules", EVERY, *COMMANDS}
    for command, other in SAME.items():
        assert f"The document is that of [{other}](#{other})" in sections()[command]
    assert all(word in sections()["Rules"] for word in OUTCOMES)


def test_every_row_of_a_table_is_one_that_is_read() -> None:
    """A cell with a bar in it, or a forgotten column, would take its key out of the comparison."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROW.findall(PAGE)) > 200


def test_null_is_explained_wherever_it_may_stand() -> None:
    silent = [
        key for key, kind, meaning in ROW.findall(PAGE)
        if "null" in kind and "null" not in meaning and not meaning.startswith("as of")
    ]  # fmt: skip
    assert silent == []


# ---- what holds of every document ----


@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_begins_with_the_version_of_its_schema(command: str, printed: Printed) -> None:
    for one in printed(command):
        assert next(iter(one.items())) == ("schema_version", SCHEMA_VERSION)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_has_one_vocabulary(command: str, printed: Printed) -> None:
    """An interval is null or two numbers in order; a verdict on two things is one of four words, or null.

    What is unknown in a comparison is an interval; in a diagnosis it is something that no hypothesis says.
    """
    for one in printed(command):
        for key, value in walk(one):
            if key[-1].endswith("ci95") or (key[-1] == "unknown" and command != "diagnose"):
                bounds = value if key[-1].startswith("position") else [value]  # one for each position
                assert all(one is None or (len(one) == 2 and one[0] <= one[1]) for one in bounds), key
            if key[-1] == "verdict" and key != ("verdict",):
                assert value is None or value in OUTCOMES, key
            if key[-1] == "severity":
                assert value in ("error", "warning", "note"), key


def test_peers_of_rounds_without_a_denominator_are_printed(printed: Printed) -> None:
    """Once a traceback: a metric of nothing is nan."""
    values = [value for one in printed("report") for key, value in walk(one) if key[-1] == "values"]
    assert any(None in row for row in values) and any(None not in row for row in values)


# ---- the converter ----


def test_values_are_converted_by_their_kind(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    assert json_value([nan, inf, -inf, 1.5, 2, True, None, "x"]) == [None, None, None, 1.5, 2, True, None, "x"]
    assert json_value({"a": (1, (nan, nan))}) == {"a": [1, [None, None]]}
    assert json_value(tmp_path) == str(tmp_path)
    assert type(json_value(np.float64(0.5))) is float
    assert (interval_json((1.0, 2.0)), interval_json((nan, nan)), interval_json((1.0, inf))) == ([1.0, 2.0], None, None)
    assert document({"b": 1}) == {"schema_version": SCHEMA_VERSION, "b": 1}
    metric = PeerMetric("p", "m", (nan, 1.0), "c", "d")
    assert json_value(metric) == {
        "project": "p",
        "metric": "m",
        "values": [None, 1.0],
        "counts": "c",
        "definition": "d",
    }


@pytest.mark.parametrize("value", [np.int64(1), np.zeros(2), {1: "x"}, {1, 2}, object(), b"x"])
def test_what_is_no_json_is_a_mistake_of_ours(value: object) -> None:
    with pytest.raises(TypeError):
        json_value(value)


def test_two_positions_without_rounds_are_no_interval() -> None:
    """They are nan twice too; only a field that is declared a pair of numbers is an interval."""
    (row,) = summarise(make_rounds({make_variant("two", steps=2): [[]]}))
    converted = json_value(row)
    assert converted["position_joint"] == [None, None] and converted["accept_length_ci95"] is None


def test_a_reader_of_documents_takes_no_nan() -> None:
    with pytest.raises(ValueError, match="NaN"):
        read('{"a": NaN}')


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from("abc"), st.just((math.nan, math.inf))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.sampled_from("abcd"), inner)), max_leaves=12
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from("xyz"), VALUES))
def test_whatever_a_command_knows_its_document_has_no_nan(body: dict[str, Any]) -> None:
    read(json.dumps(document(body), allow_nan=False))


PLAYED = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=3, max_size=3)


@settings(max_examples=15, deadline=None)
@given(PLAYED, PLAYED, st.booleans())
def test_whatever_was_played_a_report_and_a_comparison_have_no_nan(
    one: list[list[int]], other: list[list[int]], seen: bool
) -> None:
    """Requests without rounds, variants without any, one request: where a ratio or an interval is missing."""
    played = {make_variant("a"): one, make_variant("b", kv="b"): other}
    rounds = make_rounds(played, observed=one if seen else None)
    report = {**to_json(rounds, summarise(rounds, resamples=50)), "peers": peer_metrics(rounds, "b")}
    compared = compare_variants(pair_rounds(rounds), resamples=50).to_json()
    for body in (report, compared):
        read(json.dumps(document(body), allow_nan=False))
