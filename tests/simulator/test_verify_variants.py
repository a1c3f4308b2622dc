"""Rules as variants: what a trace can tell and what it cannot, sums by hand, rounds, files and JSON around them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner
from support.heads import INVENTED, invented_checkpoint, write_head
from support.trace_maker import V, changed, make_four, make_header, make_request, make_weights, write_trace
from twins.path_probability import force_one_anchor
from twins.trees import draft_one_tree

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.cli.app import cli
from replay.errors import TraceCorruptError, UsageError
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import draft_input
from replay.simulator.simulation import simulate
from replay.simulator.variant import Variant, sweep
from replay.traces.captured import CapturedRequest
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds, VariantInfo
from replay.traces.rounds_file import METADATA_KEY, read_rounds, write_rounds
from replay.traces.taps import FINAL

HEAT = 2.5  # logits of the invented target are large


def logits_of(request: CapturedRequest) -> torch.Tensor:
    rows = request.taps[FINAL][len(request.prompt_ids) - 1 :]
    return (rows @ make_weights().T).float()


def sampled_request(name: str, seed: int, prompt: int, output: int, **changes: Any) -> CapturedRequest:
    """A request whose output the invented target sampled at HEAT. Its rows do not depend on its tokens."""
    request = make_request(name, seed, prompt=prompt, output=output)
    generator = torch.Generator().manual_seed(seed)
    chosen = (logits_of(request) / HEAT).softmax(-1).multinomial(1, generator=generator)[:, 0]
    return changed(request, output_ids=chosen.tolist(), temperature=HEAT, **changes)


def write(folder: Path, requests: list[CapturedRequest], temperature: float, topk: int = V) -> Trace:
    """Every token's probability is recorded unless ``topk`` says fewer."""
    header = make_header()
    header = replace(header, topk=topk, capture=replace(header.capture, temperature=temperature))
    return Trace.open(write_trace(folder, [[_recorded(request, topk) for request in requests]], header=header))


def _recorded(request: CapturedRequest, topk: int) -> CapturedRequest:
    top = logits_of(request).topk(topk)
    logprobs = top.values - request.logsumexp[:, None]
    return changed(request, topk_ids=top.indices.int(), topk_logprobs=logprobs)


@pytest.fixture
def greedy(tmp_path: Path) -> Trace:
    return write(tmp_path / "greedy", make_four(), 0.0)


@pytest.fixture
def sampled(tmp_path: Path) -> Trace:
    requests = [sampled_request(f"r{seed}", seed, 2 + seed, 30 - seed) for seed in range(4)]
    return write(tmp_path / "sampled", [*requests, sampled_request("short", 9, 3, 1)], HEAT)


@pytest.fixture
def checkpoint() -> Checkpoint:
    return invented_checkpoint()


def play(trace: Trace, checkpoint: Checkpoint, **choices: list[object]) -> Rounds:
    return simulate(trace, {"h": checkpoint}, sweep(draft=["h"], precision=["fp32"], **choices))


def counts(rounds: Rounds, variant: VariantInfo) -> list[tuple[float, float]]:
    """Rounds and accepted tokens of each request in the table."""
    found = []
    for request in rounds.requests:
        rows = rounds.table.filter(pl.col("variant") == variant.name, pl.col("request_id") == request.request_id)
        found.append((float(rows.height), float(rows["accepted"].sum())))
    return found


def test_at_temperature_0_every_rule_is_greedy(greedy: Trace, checkpoint: Checkpoint) -> None:
    rules = ["greedy", "target-only", "rejection", "typical", "target-only:acc=0.5,single=0.2"]
    rounds = play(greedy, checkpoint, steps=[3], verify=rules)
    plain, *others = rounds.variants
    assert plain.expected is None
    table = rounds.table.filter(variant=plain.name).drop("variant")
    for variant in others:
        assert rounds.table.filter(variant=variant.name).drop("variant").equals(table)
        assert variant.expected is not None and variant.expected.exact
        assert "temperature 0" in variant.expected.note
        assert variant.expected.sums == tuple(pair * 3 for pair in counts(rounds, plain))


@pytest.mark.parametrize("verify", ["target-only", "rejection", "typical"])
def test_given_text_is_no_sample(tmp_path: Path, checkpoint: Checkpoint, verify: str) -> None:
    requests = [sampled_request("a", 1, 3, 9), sampled_request("b", 2, 3, 9, source="forced", finish_reason="forced")]
    trace = write(tmp_path / "given", requests, HEAT)
    with pytest.raises(UsageError, match=r"1 of 2 requests .* follow text that was given"):
        play(trace, checkpoint, verify=[verify])


def test_a_mixture_of_temperatures_has_no_sampled_draft(tmp_path: Path, checkpoint: Checkpoint) -> None:
    trace = write(tmp_path / "mixed", [sampled_request("a", 1, 3, 9), make_request("b", 2, output=9)], HEAT)
    for rule in ("rejection", "typical", "target-only:acc=0.5"):
        with pytest.raises(UsageError, match=r"1 of 2 requests .* the others above"):
            play(trace, checkpoint, verify=[rule])
    (variant,) = play(trace, checkpoint, verify=["target-only"]).variants
    assert variant.expected is not None and len(variant.expected.sums) == 2


def test_a_fault_that_follows_the_walk_has_no_sampled_draft(sampled: Trace, checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match=r"follows the walk.*--verify target-only"):
        play(sampled, checkpoint, verify=["rejection"], kv=["stale"])
    rounds = play(sampled, checkpoint, verify=["target-only"], kv=["stale"], steps=[3])
    (variant,) = rounds.variants
    assert variant.expected is not None
    assert [row[0] for row in variant.expected.sums] == [count for count, _ in counts(rounds, variant)]


@pytest.mark.parametrize("acc", [1.0, 0.6])
def test_sums_of_chains_by_hand(tmp_path: Path, checkpoint: Checkpoint, acc: float) -> None:
    """From whole rows of logits, round by round: the shares along what the text matches, weighted by those before."""
    requests = [sampled_request(f"r{seed}", seed, 2 + seed, 90) for seed in range(12)]
    sampled = write(tmp_path / "sampled", requests, HEAT)
    rounds = play(sampled, checkpoint, steps=[4], verify=[f"target-only:acc={acc:g}"])
    (variant,) = rounds.variants
    assert variant.expected is not None
    several = 0
    for number, sums in enumerate(variant.expected.sums):
        p, text, first = whole_rows(sampled, number)
        total = 0.0
        played = rounds.table.filter(request_id=rounds.requests[number].request_id)
        for anchor, drafted in zip(played["anchor"], played["drafted"], strict=True):
            weight = 1.0
            for place, token in enumerate(drafted, start=anchor + 1):
                if place >= len(text):
                    break
                share = min(1.0, p[place - first][token] / acc)
                total += weight * share
                if text[place] != token:
                    break
                weight *= share / p[place - first][token]
                several += 1
        assert sums == pytest.approx((len(played), total) * 3, rel=1e-5, abs=1e-9)
    assert several > 3


def test_sums_of_trees_by_hand(sampled: Trace, checkpoint: Checkpoint) -> None:
    """Of trees grown one by one (trees.py): p of every child of a node that the text runs through."""
    options: dict[str, Any] = {"steps": 3, "topk": 3, "num_draft_tokens": 9, "verify": "target-only"}
    variant = resolve(Variant("h", **options, precision="fp32"), checkpoint, sampled)
    rounds = simulate(sampled, {"h": checkpoint}, [variant])
    head = build_head(checkpoint, variant, sampled)
    expected = rounds.variants[0].expected
    assert variant.wiring is not None and expected is not None
    offered = 0
    for number, sums in enumerate(expected.sums):
        p, text, first = whole_rows(sampled, number)
        item = draft_input(sampled.read(number, variant.wiring.taps), variant.wiring)
        anchors = rounds.table.filter(request_id=rounds.requests[number].request_id)["anchor"].to_list()
        total = 0.0
        for anchor in anchors:
            tree = draft_one_tree(
                head, item.tokens_T, item.features_RKD, anchor, topk=3, steps=3, num_draft_tokens=9, kv="slot"
            )
            node: int | None = -1
            for place in range(anchor + 1, len(text)):
                children = [child for child, one in enumerate(tree) if one.parent == node]
                total += sum(p[place - first][tree[child].token] for child in children)
                offered += len(children)
                node = next((child for child in children if tree[child].token == text[place]), None)
                if node is None:
                    break
        assert sums == pytest.approx((len(anchors), total) * 3, rel=1e-5, abs=1e-9)
    assert offered > 100


def whole_rows(trace: Trace, number: int) -> tuple[np.ndarray, list[int], int]:
    """p [n, V] from the recorded final rows; the text; and the place in it of the token that row 0 chose."""
    rows = trace.read(number, [FINAL])
    logits = (rows.taps[FINAL][rows.prompt_tokens - 1 :] @ make_weights().T).double()
    return (logits / HEAT).softmax(-1).numpy(), rows.tokens.tolist(), rows.prompt_tokens


def test_sums_of_a_sampled_draft_by_hand(sampled: Trace, checkpoint: Checkpoint) -> None:
    """q one anchor at a time, p from whole rows, and every sequence of rounds followed by itself."""
    rounds = play(sampled, checkpoint, steps=[2], verify=["rejection"])
    (info,) = rounds.variants
    variant = resolve(Variant("h", steps=2, precision="fp32"), checkpoint, sampled)
    head = build_head(checkpoint, variant, sampled)
    assert variant.wiring is not None and info.expected is not None
    for number, sums in enumerate(info.expected.sums):
        p, text, first = whole_rows(sampled, number)
        item = draft_input(sampled.read(number, variant.wiring.taps), variant.wiring)
        q = {a: force_one_anchor(head, item, a, HEAT, 2) for a in range(item.prompt_tokens, len(text) - 1)}
        # Rounds and tokens from each anchor on, the last one first.
        later = {len(text) + place: (0.0, 0.0) for place in (-1, 0, 1)}
        for anchor in sorted(q, reverse=True):
            atleast = [1.0]
            for step, place in enumerate(range(anchor + 1, min(anchor + 3, len(text)))):
                atleast.append(atleast[-1] * min(1.0, q[anchor][step] / p[place - first][text[place]]))
            atleast.append(0.0)
            outcomes = [(low - high, later[anchor + 1 + a], a)
                        for a, (low, high) in enumerate(pairwise(atleast))]  # fmt: skip
            later[anchor] = (
                1 + sum(chance * more[0] for chance, more, _ in outcomes),
                sum(chance * (taken + more[1]) for chance, more, taken in outcomes),
            )
        assert sums[:2] == pytest.approx(later.get(item.prompt_tokens, (0.0, 0.0)), rel=1e-5)


def test_a_sampled_draft_is_the_same_alone_and_in_a_sweep(sampled: Trace, checkpoint: Checkpoint) -> None:
    both = play(sampled, checkpoint, steps=[2, 4], verify=["rejection", "target-only"])
    for steps in (2, 4):
        alone = play(sampled, checkpoint, steps=[steps], verify=["rejection"])
        mine = next(one for one in both.variants if (one.steps, one.verify) == (steps, "rejection"))
        assert both.table.filter(variant=mine.name).drop("variant").equals(alone.table.drop("variant"))
        assert alone.variants[0].expected is not None and mine.expected is not None
        np.testing.assert_allclose(mine.expected.sums, alone.variants[0].expected.sums, rtol=1e-6)
        assert mine.ties == 0


def test_what_is_not_recorded_is_reported_as_an_interval(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Of 64 tokens 4 are recorded: the whole rows' value lies between the bounds, which are apart."""
    requests = [sampled_request(f"r{seed}", seed, 2 + seed, 30 - seed) for seed in range(4)]
    whole, few = write(tmp_path / "whole", requests, HEAT), write(tmp_path / "few", requests, HEAT, topk=4)
    for verify in ("target-only", "rejection", "typical"):
        (exact,), (bounded,) = (replay.summarise(play(trace, checkpoint, verify=[verify])) for trace in (whole, few))
        assert exact.expected is not None and bounded.expected is not None
        assert exact.expected.unknown == pytest.approx([exact.expected.accept_length] * 2)
        low, high = bounded.expected.unknown
        assert low < high
        assert low <= exact.expected.accept_length <= high


# ---- files, JSON, report ----


def test_expected_sums_are_written_and_read(sampled: Trace, checkpoint: Checkpoint, tmp_path: Path) -> None:
    rounds = play(sampled, checkpoint, verify=["rejection"])
    path = tmp_path / "rounds.parquet"
    write_rounds(rounds, path)
    assert read_rounds(path).variants == rounds.variants
    assert replay.summarise(read_rounds(path)) == replay.summarise(rounds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sums": [[1.0] * 6]}, "sums of 1 request where 5 belong"),
        ({"sums": [[1.0] * 5] * 5}, "where 5 belong"),
        ({"sums": [[-1.0] * 6] * 5}, "negative or endless"),
        ({"sums": "many"}, r"variants\[0\]: expected"),
        ({"rule": 1}, r"variants\[0\]: expected"),
        ({"more": 1}, r"variants\[0\]: expected"),
    ],
)
def test_expected_sums_that_do_not_fit_are_refused(
    sampled: Trace, checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    rounds = play(sampled, checkpoint, verify=["target-only"])
    path = tmp_path / "rounds.parquet"
    write_rounds(rounds, path)
    head = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    head["variants"][0]["expected"].update(change)
    rounds.table.write_parquet(path, metadata={METADATA_KEY: json.dumps(head)})
    with pytest.raises(TraceCorruptError, match=said):
        read_rounds(path)


def test_rounds_from_before_there_was_an_expectation_are_read(
    greedy: Trace, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    rounds = play(greedy, checkpoint)
    path = tmp_path / "rounds.parquet"
    write_rounds(rounds, path)
    head = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    del head["variants"][0]["expected"]
    rounds.table.write_parquet(path, metadata={METADATA_KEY: json.dumps(head)})
    assert read_rounds(path).variants == rounds.variants


@pytest.fixture
def draft(tmp_path: Path, checkpoint: Checkpoint) -> Path:
    return write_head(tmp_path / "draft", INVENTED, checkpoint.tensors)


def simulated(trace: Trace, draft: Path, *options: str) -> str:
    result = CliRunner().invoke(cli, ["simulate", str(trace.path), "--draft", str(draft), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_json_holds_the_expectation(sampled: Trace, draft: Path) -> None:
    (row,) = json.loads(simulated(sampled, draft, "--verify", "target-only:acc=0.5", "--json"))["variants"]
    assert row["verify"] == "target-only:acc=0.5"
    expected = row["expected"]
    assert list(expected) == ["rule", "accept_length", "accept_length_ci95", "unknown", "exact", "note"]
    assert expected["rule"] == "target-only:acc=0.5" and expected["exact"] is False
    low, high = expected["unknown"]
    assert 1 < low <= expected["accept_length"] <= high
    assert expected["accept_length_ci95"][0] < expected["accept_length"] < expected["accept_length_ci95"][1]
    assert "importance" in expected["note"]


def test_rules_make_a_sweep(sampled: Trace, draft: Path) -> None:
    asked = simulated(sampled, draft, "--verify", "target-only", "--verify", "rejection", "--json")
    rows = json.loads(asked)["variants"]
    assert [row["verify"] for row in rows] == [row["name"].removeprefix("verify=") for row in rows]
    assert {row["verify"] for row in rows} == {"target-only", "rejection"}


def test_a_report_says_that_a_rule_is_greedy_at_temperature_0(greedy: Trace, draft: Path) -> None:
    text = " ".join(simulated(greedy, draft, "--verify", "typical").split())
    assert text.startswith("Accept length") and "Expected under typical, averaged over its coins" in text
    assert "Rule typical: recorded at temperature 0, where every rule is greedy." in text


def test_a_report_says_what_is_expected(sampled: Trace, draft: Path) -> None:
    text = " ".join(simulated(sampled, draft, "--verify", "target-only").split())
    assert "Expected under target-only, averaged over its coins: accept length 1." in text
    text = " ".join(simulated(sampled, draft, "--verify", "typical").split())
    assert text.startswith("As recorded, under target-only: accept length")
    assert "Rule typical: for the anchors of the recorded text" in text
    many = " ".join(simulated(sampled, draft, "--verify", "rejection", "--steps", "1", "--steps", "2").split())
    assert "expected" in many and "Rule rejection: exact for the recorded text" in many
