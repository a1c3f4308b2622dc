"""Dumps of trainers become traces: the same texts give the same rounds as a capture does."""

import errno
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.dump_cases import HIDDEN, LAYERS, TAPS, VOCABULARY, imported, make_target
from support.dump_writers import (
    Text,
    loss_masks,
    modelopt,
    rounded,
    run_target,
    specforge,
    stacked,
    target_cache,
)
from support.heads import random_tensors, tiny_config, write_head

import replay
from replay.capture.local.record import capture_local
from replay.capture.options import CaptureOptions
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.errors import CaptureError, OutputError, UsageError
from replay.traces.check import check_trace
from replay.traces.sample_files import sample_head, sample_prompts

SLOTS = (1, 3, 4)  # R indices, as dumped
HEAD = tiny_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, target: Path) -> replay.Trace:
    """Greedy outputs of random prompts, recorded by replay itself."""
    folder = tmp_path_factory.mktemp("captured")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCABULARY, (6 + row,), generator=generator).tolist() for row in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"id": f"{i}", "input_ids": ids}) + "\n"
                                                  for i, ids in enumerate(prompts)))  # fmt: skip
    options = CaptureOptions(str(target), folder / "prompts.jsonl", folder / "trace", taps=TAPS, max_new_tokens=24)
    capture_local(options, lambda _: None)
    return replay.Trace.open(folder / "trace")


def texts_of(trace: replay.Trace) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs, by the number that is their id."""
    found = {}
    for index, record in enumerate(trace.records):
        tokens = trace.read(index, ["final"]).tokens.tolist()
        found[int(record.request_id)] = (tokens[: record.prompt_tokens], tokens[record.prompt_tokens :])
    return [found[number] for number in sorted(found)]


@pytest.fixture(scope="module")
def texts(captured: replay.Trace, target: Path) -> list[Text]:
    return run_target(target, texts_of(captured), torch.float32)


Played = list[tuple[Any, ...]]


def rounds_of(trace: replay.Trace, names: Sequence[str]) -> Played:
    """All rounds by text."""
    tensors = random_tensors(parse_config(HEAD), seed=1)
    head = replay.load_head(write_head(trace.path.parent / "head", HEAD, tensors))
    table = replay.simulate(trace, {"head": head}, [replay.Variant("head", steps=3)]).table
    order = {name: number for number, name in enumerate(names)}
    columns = ("anchor", "drafted", "accepted")
    return sorted((order[row["request_id"]], *(row[name] for name in columns)) for row in table.iter_rows(named=True))


NUMBERED = ["0", "1", "2", "3", "4"]


def test_specforge(tmp_path: Path, target: Path, captured: replay.Trace, texts: list[Text]) -> None:
    for packed in (False, True):
        dump = specforge(tmp_path / f"dump{packed}", texts, SLOTS, packed)
        result = imported(dump, tmp_path / f"trace{packed}", target, taps=TAPS)
        assert (result.form, result.last_state, result.requests) == ("specforge", "after", 5)
        assert result.agreed == result.output_tokens == 5 * 24
        trace = replay.Trace.open(result.path)
        assert trace.taps == ("embed", "1", "3", "4", "final")
        assert rounds_of(trace, [f"data_{n}" for n in NUMBERED]) == rounds_of(captured, NUMBERED)
        assert {finding.severity for finding in check_trace(trace)} == {"note"}


def test_speculators_with_the_masks_of_its_data(
    tmp_path: Path, target: Path, captured: replay.Trace, texts: list[Text]
) -> None:
    masks = loss_masks(tmp_path / "data", texts)
    for last in (0, 1):  # vLLM leaves out the last output token where it generated it
        result = imported(
            stacked(tmp_path / f"dump{last}", texts, SLOTS, last), tmp_path / f"trace{last}", target, taps=TAPS,
            loss_masks=masks,
        )  # fmt: skip
        assert (result.form, result.last_state, result.requests) == ("speculators", "before", 5)
        trace = replay.Trace.open(result.path)
        assert trace.taps == ("embed", "1", "3", "4", "6", "final")
        assert rounds_of(trace, [f"hs_{n}" for n in NUMBERED]) == rounds_of(captured, NUMBERED)
        final = trace.read(0, ["final"]).taps["final"]
        assert torch.allclose(final, texts[0].final[: len(final)], rtol=1e-5, atol=1e-6)
        assert any("made from the state before it" in sentence for sentence in trace.header.missing)


def test_without_masks_all_but_the_first_token_is_output(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    result = imported(stacked(tmp_path / "dump", texts, SLOTS), tmp_path / "trace", target, taps=TAPS)
    assert result.prompt_tokens == 5
    assert result.output_tokens == sum(len(text.tokens) - 1 for text in texts)
    assert any("no loss mask" in sentence for sentence in result.missing)


def test_fp8_states_are_those_that_hs_connectors_gives_its_trainer(
    tmp_path: Path, target: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hs_connectors.transfer import FP8Transfer

    dump = rounded(tmp_path / "dump", texts, (0, *SLOTS), monkeypatch)
    result = imported(
        dump, tmp_path / "trace", target, taps=f"embed,{TAPS}", loss_masks=loss_masks(tmp_path / "m", texts)
    )
    trace = replay.Trace.open(result.path)
    read = FP8Transfer(dump).get_cached(2)
    assert read is not None
    rows = trace.read([r.request_id for r in trace.records].index("hs_2"), ["3", "6"]).taps
    assert torch.equal(rows["3"], read["hidden_states"][:-1, 2])
    assert torch.equal(rows["6"], read["hidden_states"][:-1, 4])
    assert any("fp8" in sentence for sentence in result.missing)
    wrong = f"2,{TAPS}", f"embed,{TAPS.replace('4', '6')}"
    assert imported(dump, tmp_path / "other", target, taps=wrong[0]).requests == 5  # no slot is stated to be known
    with pytest.raises(CaptureError, match="called 6 is not the last state"):
        imported(dump, tmp_path / "wrong", target, taps=wrong[1])


def test_modelopt(tmp_path: Path, target: Path, captured: replay.Trace, texts: list[Text]) -> None:
    result = imported(modelopt(tmp_path / "dump", texts, SLOTS), tmp_path / "trace", target, taps=TAPS)
    assert (result.form, result.last_state) == ("modelopt", "after")
    assert rounds_of(replay.Trace.open(result.path), [f"c{n}" for n in NUMBERED]) == rounds_of(captured, NUMBERED)
    # its vLLM dumper stores the state before the norm under the same name
    raw = [replace(text, final=text.streams[-1]) for text in texts]
    result = imported(modelopt(tmp_path / "raw", raw, SLOTS), tmp_path / "before", target, taps=TAPS)
    assert (result.last_state, result.agreed) == ("before", 5 * 24)


def test_deepspec_says_its_taps(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", torch.bfloat16, tied=True)
    made = run_target(target, [(range(1, 9), range(20, 40)), (range(3, 8), range(50, 60))], torch.bfloat16)
    cache = target_cache(tmp_path / "cache", made, [-1, 0, 2, 3])
    result = imported(cache, tmp_path / "trace", target)
    assert (result.form, result.last_state, result.requests) == ("deepspec", "after", 2)
    trace = replay.Trace.open(result.path)
    assert trace.taps == ("embed", "1", "3", "4", "final")
    rows = trace.read(0, ["3", "final"])
    assert rows.prompt_tokens == 8
    assert torch.equal(rows.taps["3"], made[0].streams[3][:-1])
    assert torch.equal(rows.taps["final"], made[0].final[:-1])
    with pytest.raises(UsageError, match="the dump says embed,1,3,4"):
        imported(cache, tmp_path / "other", target, taps="embed,2,3,4")
    (cache / "shard-00000.bin").write_bytes((cache / "shard-00000.bin").read_bytes()[:-2])
    with pytest.raises(CaptureError, match="text 1 ends beyond the end of shard-00000"):
        imported(cache, tmp_path / "cut", target)
    assert not (tmp_path / "cut").exists()


def test_each_answer_of_a_chat_is_a_request(tmp_path: Path, target: Path) -> None:
    text = run_target(target, [(range(1, 9), range(20, 40))], torch.float32)[0]
    mask = torch.zeros(28, dtype=torch.int64)
    mask[4:9] = mask[15:28] = 1
    dump = specforge(tmp_path / "dump", [replace(text, mask=mask), replace(text, mask=mask * 0)], SLOTS)
    result = imported(dump, tmp_path / "trace", target, taps=TAPS)
    assert (result.texts, result.skipped, result.requests) == (2, 1, 2)
    trace = replay.Trace.open(result.path)
    assert [(r.request_id, r.prompt_tokens, r.output_tokens) for r in trace.records] == [
        ("data_0#1", 4, 5), ("data_0#2", 15, 13),
    ]  # fmt: skip
    assert torch.equal(trace.read(1, ["4"]).taps["4"], text.streams[4][:27])
    assert any("1 of 2 texts" in sentence for sentence in result.missing)


def test_what_an_output_token_costs_is_transformers_loss(tmp_path: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = run_target(target, [(range(1, 9), range(20, 40))], torch.float32)[0]
    result = imported(specforge(tmp_path / "dump", [text], SLOTS), tmp_path / "trace", target, taps=TAPS)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    labels = text.tokens.where(text.mask == 1, -100)
    with torch.inference_mode():
        loss = float(model(text.tokens[None], labels=labels[None]).loss)
    assert math.isclose(result.nats, loss, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("taps", "said"),
    [
        ("1,3,6", "called 6 is not the last state"),
        ("embed,3,4", "called embed is not the embedding"),
        ("1,3", "holds 3 taps beside the last state, --taps names 2"),
        ("1,3,9", "has 6 layers"),
        ("1,3,3", "names 3 twice"),
        ("1,3,final", "found by itself"),
        (None, "does not say which taps it holds"),
    ],
)
def test_taps_that_cannot_be_are_refused(
    tmp_path: Path, target: Path, texts: list[Text], taps: str | None, said: str
) -> None:
    with pytest.raises((CaptureError, UsageError), match=said):
        imported(stacked(tmp_path / "dump", texts, SLOTS), tmp_path / "trace", target, taps=taps)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump"]


def test_slots_that_are_plainly_others_are_refused(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    for slots, said in (((0, 3, 4), "is the embedding of its tokens"), ((1, 6, 4), "is the last state before the norm"),
                        ((1, 3, 3), "has the rows of 4")):  # fmt: skip
        dump = stacked(tmp_path / f"dump{slots}", texts, slots)
        with pytest.raises(CaptureError, match=said):
            imported(dump, tmp_path / "trace", target, taps=TAPS)


def test_a_dump_of_another_target_is_refused(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    """Its last states went through other norm weights; the text, which they predict, tells so."""
    other = make_target(tmp_path / "other", seed=0)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * torch.linspace(0.3, 3, HIDDEN)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CaptureError, match="been through another norm"):
        imported(specforge(tmp_path / "dump", texts, SLOTS), tmp_path / "trace", other, taps=TAPS)


def test_texts_of_both_sides_of_the_norm_are_refused(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    mixed = [texts[0], replace(texts[1], final=texts[1].streams[-1])]
    with pytest.raises(CaptureError, match="the other side of the final norm"):
        imported(modelopt(tmp_path / "dump", mixed, SLOTS), tmp_path / "trace", target, taps=TAPS)


def test_rows_of_another_text_fail_the_self_check(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    """As speculators#279 and vllm#44485: two requests with one's states."""
    swapped = [texts[0], replace(texts[0], tokens=(texts[0].tokens + 1) % VOCABULARY)]
    with pytest.raises(CaptureError, match="fails the self-check"):
        imported(modelopt(tmp_path / "dump", swapped, SLOTS), tmp_path / "trace", target, taps=TAPS)
    assert not (tmp_path / "trace").exists()


def test_the_last_text_fails_and_nothing_is_left(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    dump = specforge(tmp_path / "dump", texts, SLOTS)
    path = dump / "data_4.ckpt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CaptureError, match="cut short"):
        imported(dump, tmp_path / "trace", target, taps=TAPS)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dump"]
    assert imported(dump, tmp_path / "trace", target, taps=TAPS, limit=4).texts == 4


def test_force_replaces_a_trace_and_nothing_else(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    dump, out = specforge(tmp_path / "dump", texts, SLOTS), tmp_path / "trace"
    imported(dump, out, target, taps=TAPS, limit=1)
    with pytest.raises(OutputError, match="type --force"):
        imported(dump, out, target, taps=TAPS)
    assert imported(dump, out, target, taps=TAPS, force=True).requests == 5
    assert len(replay.Trace.open(out).records) == 5
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.txt"):
        imported(dump, out, target, taps=TAPS, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dump", "trace"]


def test_a_target_that_an_import_cannot_hold_is_refused(tmp_path: Path, texts: list[Text]) -> None:
    dump = specforge(tmp_path / "dump", texts, SLOTS)
    target = make_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    for change, said in (({"model_type": "gemma2"}, "gemma2 target"), ({"final_logit_softcapping": 30.0}, "capping"),
                         ({"hidden_size": 64}, "hidden_size"), ({"rms_norm_eps": None}, "rms_norm_eps")):  # fmt: skip
        (target / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CaptureError, match=said):
            imported(dump, tmp_path / "trace", target, taps=TAPS)


def test_the_last_state_may_be_named_too(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    result = imported(stacked(tmp_path / "dump", texts, SLOTS), tmp_path / "trace", target, taps=f"{TAPS},{LAYERS}")
    assert result.taps == ("embed", "1", "3", "4", "6", "final")
    with pytest.raises(UsageError, match="calls the last state 6, the stream before the final norm"):
        imported(specforge(tmp_path / "other", texts, SLOTS), tmp_path / "no", target, taps=f"{TAPS},{LAYERS}")


def test_a_wrapped_target(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    """As Kimi-K2.5 keeps its language part (KimiK25ForConditionalGeneration): a nested config, names with a prefix."""
    config = json.loads((target / "config.json").read_text())
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": config}
    tensors = load_file(target / "model.safetensors")
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    (wrapped / "config.json").write_text(json.dumps(whole))
    save_file({f"language_model.{name}": one for name, one in tensors.items()}, wrapped / "model.safetensors")
    result = imported(specforge(tmp_path / "dump", texts, SLOTS), tmp_path / "trace", wrapped, taps=TAPS)
    assert result.agreed == result.output_tokens
    assert replay.Trace.open(result.path).header.target.architecture == "KimiK25ForConditionalGeneration"


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, target: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = specforge(tmp_path / "dump", texts, SLOTS)

    def full(path: Path, blocks: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("replay.traces.files.write_whole", full)
    with pytest.raises(OutputError, match="No space left on device; nothing is left of it"):
        imported(dump, tmp_path / "trace", target, taps=TAPS)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dump"]


def test_a_text_that_the_target_cannot_read_is_noted(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    """Tokens of another tokenizer."""
    other = [replace(text, tokens=(text.tokens * 7 + 3) % VOCABULARY) for text in texts]
    dump = specforge(tmp_path / "dump", other, SLOTS)
    typed = ["import", str(dump), "-o", str(tmp_path / "trace"), "--target", str(target), "--taps", TAPS]
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 0
    assert "do not belong together" in done.stderr


def test_the_command(tmp_path: Path, target: Path, texts: list[Text]) -> None:
    dump = specforge(tmp_path / "dump", texts, SLOTS)
    typed = ["import", str(dump), "-o", str(tmp_path / "trace"), "--target", str(target), "--taps", "out:0,out:2,out:3"]
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 0, done.output
    assert "5 requests of 5 texts, 120 output tokens, taps embed,1,3,4,final" in done.output
    assert "those after the final norm. 120 of 120 output tokens" in done.output
    assert "missing: verify rounds of a server" in done.output
    again = CliRunner().invoke(cli, typed)
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_a_real_target_and_head(tmp_path: Path, target_dir: Path) -> None:
    """Chats of the demo: what replay captures itself, and SpecForge's and speculators' dumps of the same texts."""
    rows = [row for row in sample_prompts().read_text().splitlines() if len(row) < 230][::8][:4]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    options = CaptureOptions(str(target_dir), tmp_path / "prompts.jsonl", tmp_path / "captured", taps="embed,3,16",
                             dtype="float32", max_new_tokens=16)  # fmt: skip
    capture_local(options, lambda _: None)
    own = replay.Trace.open(options.out)
    tokens = [own.read(index, ["final"]).tokens.tolist() for index in range(4)]
    prompts = [record.prompt_tokens for record in own.records]
    made = run_target(target_dir, [(ids[:n], ids[n:]) for ids, n in zip(tokens, prompts, strict=True)], torch.float32)
    head = {"demo": replay.load_head(sample_head())}
    expected = drafts_of(replay.simulate(own, head, [replay.Variant("demo", steps=4)]).table)
    assert sum(accepted for _, _, accepted in expected) > 10
    masks = loss_masks(tmp_path / "masks", made)
    for dump, more in ((specforge(tmp_path / "a", made, (0, 3, 16)), {}),
                       (stacked(tmp_path / "b", made, (0, 3, 16)), {"loss_masks": masks})):  # fmt: skip
        result = imported(dump, tmp_path / f"trace-{dump.name}", target_dir, taps="embed,3,16", **more)
        assert result.agreed == result.output_tokens
        rounds = replay.simulate(replay.Trace.open(result.path), head, [replay.Variant("demo", steps=4)])
        assert drafts_of(rounds.table) == expected


def drafts_of(table: Any) -> list[tuple[int, list[int], int]]:
    """Anchor, drafted and accepted of each round, texts in their order."""
    return list(zip(*(table[name].to_list() for name in ("anchor", "drafted", "accepted")), strict=True))
