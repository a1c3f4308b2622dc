"""The Python API as a notebook sees it: it says what the commands say, in a short repr and in a table."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.documents import rare_diagnosis
from support.heads import INVENTED, write_head
from support.trace_maker import changed, make_four, write_trace

import replay
from replay.cli.app import cli
from replay.printable import html_table
from replay.traces.rounds import Rounds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    names = ("a", "b<script>", "a", None)
    four = [changed(one, category=name) for one, name in zip(make_four(), names, strict=True)]
    write_trace(folder / "trace", [four])
    write_head(folder / "draft", INVENTED)
    (folder / "target").mkdir()
    sizes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 16,
             "vocab_size": 64, "max_position_embeddings": 256}  # fmt: skip
    (folder / "target" / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module")
def rounds(folder: Path) -> Rounds:
    trace, head = replay.Trace.open(folder / "trace"), replay.load_head(folder / "draft")
    return replay.simulate(trace, {"h": head}, replay.sweep(draft=["h"], steps=[1, 2]))


def printed(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    del found["schema_version"]
    return dict(found)


def test_python_says_what_the_commands_say(folder: Path, rounds: Rounds) -> None:
    from replay.analysis.json_document import object_json

    trace = replay.Trace.open(folder / "trace")
    replay.write_rounds(rounds, folder / "r.parquet")
    assert printed("compare", folder / "r.parquet") == object_json(replay.compare(rounds).to_json())
    checked = replay.check_head(folder / "draft", folder / "target", trace=trace)
    more = ("--draft", folder / "draft", "--target", folder / "target", "--trace", folder / "trace", "--exit-zero")
    assert printed("check", *more) == object_json(checked.to_json())
    for name in ("trace", "draft"):
        assert printed("inspect", folder / name) == object_json(replay.inspect(folder / name))
    assert replay.inspect(trace) == replay.inspect(str(folder / "trace"))


def test_every_object_has_a_short_repr_and_a_table(folder: Path, rounds: Rounds) -> None:
    trace, head = replay.Trace.open(folder / "trace"), replay.load_head(folder / "draft")
    summaries = replay.summarise(rounds)
    shown = [trace, trace.take(replay.Part(limit=2)), rounds, summaries, replay.compare(rounds),
             replay.check_head(folder / "draft", folder / "target"), replay.inspect(folder / "draft")]  # fmt: skip
    for one in (*shown, rare_diagnosis()):
        table = one._repr_html_()
        assert table.startswith("<p>") and table.endswith("</table>") and "<script>" not in table
        assert table.count("<tr>") == table.count("</tr>") > 0
    assert "b&lt;script&gt;" in trace._repr_html_()
    for one in (*shown[:3], shown[4], shown[5], summaries[0], head):
        assert len(repr(one)) < 400 and "\n" not in repr(one)
    assert repr(trace).endswith("4 requests of invented, taps 2,final)")
    assert repr(trace.take(replay.Part(limit=2))).endswith("taps 2,final, the first 2 (2 of 4))")
    assert repr(rare_diagnosis()) == "Diagnosis(engine: nothing explains it)"
    assert repr(head) == "Checkpoint('draft': 1 layer, 2 taps, 48 draft tokens)"


def test_rounds_know_the_facts_of_their_requests(rounds: Rounds) -> None:
    joined = rounds.with_requests()
    assert joined.select(rounds.table.columns).equals(rounds.table)
    facts = {request.request_id: request for request in rounds.requests}
    for row in joined.iter_rows(named=True):
        request = facts[row["request_id"]]
        assert (row["category"], row["prompt_tokens"], row["source"]) == (
            request.category, request.prompt_tokens, request.source,
        )  # fmt: skip


def test_a_table_holds_text_only() -> None:
    assert html_table("a & b\x1b", ("<x>",), [["1"], ["\n"]]) == (
        "<p>a &amp; b\\x1b</p><table><thead><tr><th>&lt;x&gt;</th></tr></thead>"
        "<tbody><tr><td>1</td></tr><tr><td>\\n</td></tr></tbody></table>"
    )


def test_a_checkout_that_hides_the_installed_replay_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the folder replay/ lacks the rooms that lie beside it."""

    def find(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(replay, "import_module", find)
    with pytest.raises(ImportError, match=r"hides the installed replay; run Python in another folder, or type pip"):
        _ = replay.Trace
    monkeypatch.setattr(replay, "_HOMES", {"Trace": "torch"})
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        _ = replay.Trace
