"""The trace and the head behind a rounds file, opened again: what they add, and what is said where they are gone."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from support.heads import write_head
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served

from replay.analysis.tokens.view import RANKED, UNDRAFTABLE, UNKNOWN, View
from replay.checkpoint.checkpoint import read_checkpoint
from replay.cli.app import cli
from replay.cli.page_tokens import page_tokens
from replay.errors import ReplayError, TraceError, UsageError
from replay.faults.table import parse_faults
from replay.simulator.simulation import simulate
from replay.simulator.tokens import Sources, show_tokens
from replay.simulator.variant import Variant
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds
from replay.traces.rounds_sets import pool_rounds

ONE = Part(requests=("r1",))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path]:
    folder = tmp_path_factory.mktemp("tokens")
    trace = make_served(folder, make_checkpoint(), requests=3, pieces=[None, [(3, 3), (4, 4)]])
    return trace, write_head(folder / "draft", HEAD)


def play(trace: Trace, draft: Path, **changes: object) -> Rounds:
    head = read_checkpoint(draft)
    variants = [Variant("draft", WIRING, STEPS, **changes)]  # type: ignore[arg-type]
    return simulate(trace, {"draft": head}, variants)


def test_what_was_rejected_has_its_reason(served: tuple[Trace, Path]) -> None:
    """Ranks against the rounds themselves: a rejected draft was the likeliest, so the target's choice was not."""
    trace, draft = served
    rounds = play(trace, draft)
    view = show_tokens(rounds, ONE, top=2)
    (request,) = view.requests
    tokens = trace.read(1, ()).tokens.tolist()
    vocabulary = {place + offset for place, offset in enumerate(read_checkpoint(draft).tensors["d2t"].tolist())}
    assert request.pieces == (3, 4) and request.played == len(request.rounds) > 2
    for one in request.rounds:
        assert one.known is not None and one.known.id == tokens[one.anchor]
        after = one.anchor + one.accepted + 1
        assert (one.bonus.id if one.bonus else None) == (tokens[after] if after < len(tokens) else None)
        if one.rejection is not None and one.bonus is not None:
            assert one.rejection.reason == (RANKED if one.bonus.id in vocabulary else UNDRAFTABLE)
            assert (one.rejection.rank or 2) > 1 and one.rejection.target_probability is not None
            assert [one.drafted[one.accepted]] == [one.rejection.top[0].token] and len(one.rejection.top) == 2
    assert [note.split(":")[0] for note in view.notes] == ["texts, token ids stand in their place"]


def test_a_server_with_a_fault_is_read_with_it(served: tuple[Trace, Path]) -> None:
    trace, draft = served
    view = show_tokens(play(trace, draft, faults=parse_faults("position.offset=2+wiring.norm=skip:hidden_norm")), ONE)
    assert any(one.rejection and one.rejection.rank for one in view.requests[0].rounds)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"topk": 2, "num_draft_tokens": 4}, "it drafts trees"),
        ({"kv": "stale"}, "its draft KV depends on the rounds before"),
    ],
)
def test_what_is_not_read_is_said(served: tuple[Trace, Path], changes: dict[str, object], why: str) -> None:
    view = show_tokens(play(*served, **changes), ONE)
    assert any(why in note for note in view.notes)
    reasons = {one.rejection.reason for one in view.requests[0].rounds if one.rejection}
    assert reasons == {UNKNOWN} and all(one.known for one in view.requests[0].rounds)


def gone(rounds: Rounds, **moved: object) -> View:
    return show_tokens(replace(rounds, **moved), ONE)  # type: ignore[arg-type]


def test_what_is_gone_is_said_and_the_rest_is_shown(served: tuple[Trace, Path], tmp_path: Path) -> None:
    rounds = play(*served)
    bare = gone(rounds, trace={**rounds.trace, "path": str(tmp_path / "gone")})
    assert bare.requests[0].rounds[0].bonus is None and "name the trace with --trace" in bare.notes[0]
    headless = gone(rounds, drafts={"draft": {**rounds.drafts["draft"], "path": str(tmp_path / "gone")}})
    assert headless.requests[0].rounds[0].bonus is not None and any("the draft's ranks" in n for n in headless.notes)
    unnamed = gone(rounds, drafts={"draft": {}})
    assert any("name its folder with --draft" in note for note in unnamed.notes)


def test_what_was_typed_is_refused_where_it_is_another(served: tuple[Trace, Path], tmp_path: Path) -> None:
    trace, draft = served
    rounds = play(trace, draft)
    other_head = write_head(tmp_path / "draft", HEAD, dict(make_checkpoint(7).tensors))
    longer = make_served(tmp_path / "longer", make_checkpoint(), requests=2, output=18).path
    spoken = make_served(tmp_path / "spoken", make_checkpoint(5), requests=3).path
    refused: dict[str, Callable[[], View]] = {
        "does not draft what the rounds hold": lambda: show_tokens(rounds, ONE, None, Sources(draft=other_head)),
        "has another text than was simulated": lambda: show_tokens(rounds, ONE, None, Sources(trace=spoken)),
        "is another than was simulated": lambda: show_tokens(rounds, ONE, None, Sources(trace=longer)),
        "none is no folder; give that": lambda: show_tokens(rounds, ONE, None, Sources(target=tmp_path / "none")),
    }
    for why, ask in refused.items():
        with pytest.raises((TraceError, UsageError), match=why):
            ask()
    untyped = gone(rounds, trace={**rounds.trace, "path": str(spoken)})
    assert untyped.requests[0].rounds[0].bonus is None and "has another text" in untyped.notes[0]


def test_requests_of_several_traces_are_found(served: tuple[Trace, Path]) -> None:
    trace, draft = served
    rounds = play(trace, draft)
    both = pool_rounds({"a": rounds, "b": rounds})
    (request,) = show_tokens(both, Part(requests=("b/r1",))).requests
    alone = show_tokens(rounds, ONE).requests[0]
    assert request.rounds == alone.rounds


def test_the_command_asks_for_a_request(served: tuple[Trace, Path], tmp_path: Path) -> None:
    write_rounds(play(*served), path := tmp_path / "r.parquet")
    done = CliRunner().invoke(cli, ["show", str(path)])
    assert done.exit_code == 1 and "holds 3 requests; type --request r0" in done.output
    done = CliRunner().invoke(cli, ["show", str(path), "--category", "invented", "--first-rejected", "--json"])
    document = json.loads(done.stdout)
    assert all(one["accepted"] == 0 for row in document["requests"] for one in row["rounds"])
    done = CliRunner().invoke(cli, ["show", str(path), "--request", "r0", "--variant", "other"])
    assert done.exit_code == 1 and "no variant is called 'other', there are 2,4,5" in done.output


def test_a_page_shows_the_first_requests_and_says_so(
    served: tuple[Trace, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rounds(play(*served), path := tmp_path / "r.parquet")
    monkeypatch.setattr("replay.cli.page_tokens.PAGE_REQUESTS", 2)
    done = CliRunner().invoke(cli, ["report", str(path), "--html", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    data = re.search(r'id="token-data">(.*?)</script>', (tmp_path / "r.html").read_text(), re.DOTALL)
    assert data is not None
    shown = json.loads(data[1])
    assert [one["id"] for one in shown["requests"]] == ["r0", "r1"] and shown["notes"][0].startswith("1 of 3 requests")
    assert any(row[8] and row[8][3] for row in shown["requests"][1]["rounds"])  # a rank


def test_a_page_has_room_for_so_much_and_no_more(served: tuple[Trace, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that do not fit are left out; of one that alone is too long the first rounds are there."""
    rounds = play(*served)
    name = rounds.variants[0].name
    whole = page_tokens(rounds, name, Sources())
    assert [one.request_id for one in whole.requests] == ["r0", "r1", "r2"] and len(whole.notes) == 1  # no tokenizer
    monkeypatch.setattr("replay.cli.page_tokens.PAGE_ROUNDS", 2)
    cut = page_tokens(rounds, name, Sources())
    for one, full in zip(cut.requests, whole.requests, strict=True):
        for row, same in zip(one.rounds, full.rounds[:2], strict=True):
            assert replace(row, rejection=None) == replace(same, rejection=None)
            assert (row.rejection and row.rejection.rank) == (same.rejection and same.rejection.rank)
        assert (one.played, one.accepted) == (full.played, full.accepted)  # what is not shown still counts
    long = next(one for one in whole.requests if one.played > 2)
    assert f"rounds of request {long.request_id} behind the first 2 of {long.played}" in "; ".join(cut.notes)
    monkeypatch.setattr("replay.cli.page_tokens.PAGE_DRAFTED", 1)
    least = page_tokens(rounds, name, Sources())
    assert [one.request_id for one in least.requests] == ["r0"] and least.notes[0].startswith("2 of 3 requests")


def test_rounds_without_a_round_have_nothing_to_show(served: tuple[Trace, Path]) -> None:
    rounds = play(*served)
    with pytest.raises(ReplayError, match="holds no round"):
        show_tokens(replace(rounds, table=rounds.table.filter(pl.lit(False))), ONE)
