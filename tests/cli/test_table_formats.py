"""`--format`: the table alone, held against the JSON document of the same rounds."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from support.report_cases import nothing, sweep
from support.rounds_maker import make_rounds, make_variant

from replay.cli.app import cli
from replay.faults.table import FAULTS
from replay.traces.rounds_file import write_rounds


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds") / "rounds.parquet"
    write_rounds(sweep(), path)
    return path


def printed(*arguments: object) -> bytes:
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.stdout_bytes


def rows(text: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.decode())))


def test_csv_of_a_report_has_the_numbers_of_its_document(rounds: Path) -> None:
    found, document = (
        rows(printed("report", rounds, "--format", "csv")),
        json.loads(printed("report", rounds, "--json")),
    )
    for row, variant in zip(found, document["variants"], strict=True):
        assert row["variant"] == variant["name"] and row["wiring"] == ",".join(variant["wiring"])
        assert float(row["accept_length"]) == variant["accept_length"]
        assert [float(row["ci95_low"]), float(row["ci95_high"])] == variant["accept_length_ci95"]
        assert int(row["rounds"]) == variant["rounds"]
        assert (row["best"] == "true") is (variant["name"] in document["best"])
        assert float(row["observed_accept_length"]) == variant["observed"]["accept_length"]
        assert row["expected_accept_length"] == ""
    assert sorted(row["lost"] for row in found)[0] == "0.0"


def test_csv_of_a_comparison_has_the_numbers_of_its_document(rounds: Path) -> None:
    found, document = (
        rows(printed("compare", rounds, "--format", "csv")),
        json.loads(printed("compare", rounds, "--json")),
    )
    for row, pair in zip(found, document["pairs"], strict=True):
        assert (row["a"], row["b"], row["verdict"]) == (pair["a"]["variant"], pair["b"]["variant"], pair["verdict"])
        for key in ("difference", "p_value", "p_holm"):
            assert float(row[key]) == pair[key]


def test_parquet_keeps_types_and_markdown_is_a_table(rounds: Path) -> None:
    frame = pl.read_parquet(io.BytesIO(printed("report", rounds, "--format", "parquet")))
    assert frame.schema["rounds"] == pl.Int64 and frame.schema["accept_length"] == pl.Float64
    assert frame.schema["best"] == pl.Boolean and frame.schema["expected_accept_length"] == pl.Float64
    lines = printed("report", rounds, "--format", "md").decode().splitlines()
    assert len(lines) == 2 + frame.height and len({line.count(" | ") for line in lines}) == 1
    assert lines[0].startswith("| variant | draft | wiring |") and set(lines[1]) == set("| -")


def test_rows_are_sorted_and_cut_as_asked(rounds: Path) -> None:
    found = rows(printed("report", rounds, "--format", "csv", "--sort", "length", "--top", 2))
    assert len(found) == 2 and float(found[0]["accept_length"]) >= float(found[1]["accept_length"])
    assert found[0]["best"] == "true" and found[0]["lost"] == "0.0"


def test_what_is_not_known_is_empty_and_foreign_text_is_harmless(tmp_path: Path) -> None:
    write_rounds(nothing(), tmp_path / "none.parquet")
    (row,) = rows(printed("report", tmp_path / "none.parquet", "--format", "csv"))
    assert (row["accept_length"], row["ci95_low"], row["lost"], row["rounds"]) == ("", "", "", "0")
    named: Any = make_variant('a\x1b[31m|\n,"b', kv="x|y")
    write_rounds(make_rounds({named: [[1], [2]]}), tmp_path / "odd.parquet")
    (row,) = rows(printed("report", tmp_path / "odd.parquet", "--format", "csv"))
    assert row["variant"] == 'a\\x1b[31m|\\n,"b'
    text = printed("report", tmp_path / "odd.parquet", "--format", "md").decode()
    assert len(text.splitlines()) == 3 and "x\\|y" in text


def test_the_list_of_faults_is_a_table_too() -> None:
    assert [row["name"] for row in rows(printed("faults", "--format", "csv"))] == list(FAULTS)


@pytest.mark.parametrize("command", ["report", "compare", "simulate", "faults"])
def test_two_forms_of_one_output_are_refused(command: str, rounds: Path) -> None:
    named = {"faults": [], "simulate": [str(rounds), "--draft", str(rounds)]}.get(command, [str(rounds)])
    done = CliRunner().invoke(cli, [command, *named, "--json", "--format", "csv"])
    assert done.exit_code == 1 and "two forms of one output; type one of them" in done.stderr
