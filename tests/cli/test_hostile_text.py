"""Text that others wrote, on a terminal: visible where it would act, bounded where it would flood, never markup."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.check_cases import Case, draft_config, sound_tensors, target_config, write, write_case
from support.heads import INVENTED, write_head
from support.hostile import run
from support.trace_maker import changed, make_header, make_request, write_trace

import replay
from replay.errors import ReplayError
from replay.printable import MOST_SENTENCE, json_text, lines, one_line, shorten

ACTS = "\x1b[31mred\x1b]0;title\x07\r\x9b2J\u202e[bold]x[/bold] :smile:"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\r\x9b2J\u202e[bold]x[/bold] :smile:"
FLOOD = "x" * 200_000


def test_what_a_terminal_acts_on_is_escaped_and_other_scripts_are_not() -> None:
    assert one_line(ACTS) == SHOWN
    assert one_line("a\nb\tc") == r"a\nb\tc" and lines("a\nb\tc\x1b") == "a\nb\tc\\x1b"
    for text in ("naïve", "日本語", "العربية", "👩\u200d👩\u200d👧", "ক\u200cষ", "\U0001f600"):
        assert one_line(text) == lines(text) == text
    assert one_line("\udcff \ud800\U000e0041") == r"\udcff \ud800\U000e0041"


def test_a_long_text_loses_its_middle() -> None:
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde...jk"
    assert len(one_line("\x1b" * 10_000, 100)) == 100


def test_json_keeps_its_values() -> None:
    value = {ACTS: ["\x7f\x85\u2028\ufeff\U000e0041", "日本語 \\u202e"]}
    text = json_text(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value and not re.search("[\x7f-\x9f\u202e\u2028\ufeff]", text)


@pytest.mark.parametrize("text", [ACTS, FLOOD, "two\nlines"])
def test_every_refusal_is_one_bounded_line(text: str) -> None:
    said = str(ReplayError(f"{text} was seen"))
    assert said.isprintable() and len(said) <= MOST_SENTENCE and said.endswith(" was seen")


# ---- heads and targets ----


@pytest.mark.parametrize("text", [ACTS, FLOOD])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: {"architectures": [text]}, lambda text: {"torch_dtype": text}, lambda text: {"model_type": text},
        lambda text: {"hidden_act": text}, lambda text: {"rope_scaling": {"rope_type": text, "factor": 2.0}},
        lambda text: {text: text}, lambda text: {"eagle_config": {text: [text]}},
        lambda text: {"quantization_config": {"quant_method": text}},
    ],
)  # fmt: skip
def test_a_config_prints_nothing_raw(tmp_path: Path, change: Any, text: str) -> None:
    draft = write(tmp_path / "draft", draft_config(**change(text)), sound_tensors())
    target = write(tmp_path / "target", target_config(**change(text)))
    sound = write(tmp_path / "sound", target_config())
    run("inspect", draft)
    run("check", "--draft", draft, "--target", sound)
    run("check", "--draft", draft, "--target", target)
    run("check", "--draft", draft, "--target", target, "--json")


@pytest.mark.parametrize("text", [ACTS, "n" * 100_000, "layers." + "9" * 5000 + ".x", "", "[bold]x"])
def test_a_tensor_name_prints_nothing_raw(tmp_path: Path, text: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[text] = tensors.pop("norm.weight")

    draft, target = write_case(tmp_path, Case(change=rename))
    found = run("check", "--draft", draft, "--target", target)
    assert found.code == 1 and "weights.missing" in found.stdout
    assert "lacks norm.weight" in run("inspect", draft).refusal
    if "[bold]" in text:
        assert "[bold]x" in found.stdout


def test_a_name_of_a_folder_prints_nothing_raw(tmp_path: Path) -> None:
    (tmp_path / "runs\x1b[31m\n[bold]").mkdir()
    folder = tmp_path / "runs\x1b[31m\n[bold]" / "head"
    write_head(folder, INVENTED)
    shown = run("inspect", folder).stdout.replace("\n", "")
    assert r"runs\x1b[31m\n[bold]" in shown
    assert r"runs\x1b[31m\n[bold]/nothing does not exist" in run("inspect", folder.with_name("nothing")).refusal


@pytest.mark.parametrize("typed", [["\x1b[31m"], ["--\x1b[31m"], ["simulate", "t", "--steps", ACTS], ["x" * 50_000]])
def test_what_was_typed_wrongly_prints_nothing_raw(typed: list[str]) -> None:
    assert run(*typed).code == 2


# ---- traces and rounds ----


@pytest.mark.parametrize("text", [ACTS, "x" * 1000])
def test_a_trace_and_its_rounds_print_nothing_raw(tmp_path: Path, text: str) -> None:
    header = make_header()
    target = replace(header.target, name=text, model_type="llama", path=f"/nowhere/{text}")
    header = replace(
        header, target=target, missing=(text, *["y" * 5000] * 50), engine=replace(header.engine, version=text)
    )
    requests = [changed(make_request(f"{text}{seed}", seed, output=9), category=text) for seed in range(3)]
    trace = write_trace(tmp_path / "trace", [requests], header=header)
    head, rounds = write_head(tmp_path / "head", INVENTED), tmp_path / "r.parquet"
    run("inspect", trace)
    run("inspect", trace, "--check")
    shown = run("simulate", trace, "--draft", head, "-o", rounds).stdout
    assert "and 43 more" in " ".join(shown.split())
    assert replay.read_rounds(rounds).requests[0].request_id == f"{text}0"
    for arguments in (["report", rounds, "--peers"], ["compare", rounds, rounds]):
        run(*arguments)
    document = run("report", rounds, "--json").stdout
    assert json.loads(document)["trace"]["target"] == text


def test_a_web_page_has_no_markup_of_others(tmp_path: Path) -> None:
    header = replace(make_header(), missing=("<script>alert(1)</script>[bold]x[/bold]\x1b[31m",))
    trace = write_trace(tmp_path / "trace", [[make_request("r0", 0, output=9)]], header=header)
    head, rounds = write_head(tmp_path / "head", INVENTED), tmp_path / "r.parquet"
    run("simulate", trace, "--draft", head, "-o", rounds)
    run("report", rounds, "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "[bold]x[/bold]" in page and "\x1b" not in page
