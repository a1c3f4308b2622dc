"""Teacher-forced drafts against an obvious twin, and a whole climb on a small trace."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace

import polars as pl
import pytest
import torch
from support.heads import random_tensors, tiny_config
from support.trace_maker import H, V, changed, make_request, write_trace
from twins.rounds import draft_one_round, plain_causal_attention

import replay
from replay.analysis.ladder.ladder import Ladder
from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.checkpoint.config import parse_config
from replay.diagnosis.ladder import COMMON, FIELDS, climb, ideal_variant, list_factors, mix
from replay.engines.wiring import Wiring
from replay.errors import UsageError, WiringError
from replay.faults.table import parse_faults
from replay.head.model import Head
from replay.simulator.binding import build_head, resolve
from replay.simulator.teacher_forced import score_anchors
from replay.simulator.variant import Variant
from replay.traces.reader import Trace

TRAINED = Wiring(("2", "final"))
SWAPPED = Wiring(("final", "2"))
STEPS = 4


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    config = parse_config(
        tiny_config(
            hidden_size=H, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=V, draft_vocab_size=48,
            num_hidden_layers=2, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]},
        )
    )  # fmt: skip
    return check_checkpoint("tiny", config, random_tensors(config))


@pytest.fixture(scope="module")
def trace(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Outputs that follow the head's drafts for a while, so that rounds accept 0 to K tokens; the last is given."""
    requests = [make_request(f"r{seed}", seed, prompt=3 + seed, output=24 - 3 * seed) for seed in range(4)]
    folder = tmp_path_factory.mktemp("climb")
    plain = Trace.open(write_trace(folder / "plain", [requests]))
    head = make_head(plain, checkpoint)
    made = []
    for index, request in enumerate(requests):
        rows = plain.read(index, TRAINED.taps)
        tokens_T, features_RKD = rows.tokens.clone(), torch.cat([rows.taps[tap] for tap in TRAINED.taps], dim=-1)
        anchor, turn = rows.prompt_tokens, index
        while anchor < len(tokens_T) - 1:
            wanted = min((3, STEPS, 0, 1)[turn % 4], len(tokens_T) - 1 - anchor)
            drafted = draft_one_round(head, tokens_T, features_RKD, anchor, STEPS)
            tokens_T[anchor + 1 : anchor + 1 + wanted] = torch.tensor(drafted[:wanted])
            anchor, turn = anchor + wanted + 1, turn + 1
        made.append(changed(request, output_ids=tokens_T[rows.prompt_tokens :].tolist()))
    made[-1] = changed(made[-1], source="forced", finish_reason="forced")
    return Trace.open(write_trace(folder / "trace", [made]))


def make_head(trace: Trace, checkpoint: Checkpoint) -> Head:
    return build_head(checkpoint, resolve(ideal(), checkpoint, trace), trace)


def ideal(steps: int = STEPS) -> Variant:
    return Variant("h", wiring=TRAINED, precision="fp32", steps=steps)


# ---- teacher-forced ----


def answers(trace: Trace, index: int) -> Mapping[int, int]:
    """By place in the text, what the target says there: the output itself, or of a given one its likeliest token."""
    rows = trace.read(index, ())
    said = rows.tokens[rows.prompt_tokens :] if rows.source == "generated" else trace.logits(index)[0][:, 0]
    return {rows.prompt_tokens + place: int(token) for place, token in enumerate(said)}


def twin_counts(head: Head, trace: Trace, index: int) -> list[tuple[int, int, int, int]]:
    """By step the four counts of one request: every anchor and step recomputes all rows so far, nothing is kept."""
    rows = trace.read(index, TRAINED.taps)
    features_RKD = torch.cat([rows.taps[tap] for tap in TRAINED.taps], dim=-1)
    right_answers, known = answers(trace, index), set(head.target_ids_W.tolist())
    counts = torch.zeros(STEPS, 4, dtype=torch.long)
    for anchor in range(rows.prompt_tokens, len(rows.tokens) - 1):
        embeds = [head.embed(rows.tokens[place + 1][None])[0] for place in range(anchor)]
        states = [head.fuse(features_RKD[place][None])[0] for place in range(anchor)]
        so_far = True
        for step in range(STEPS):
            place = anchor + 1 + step
            if place not in right_answers:
                break
            output = head.forward(
                torch.stack(embeds), torch.stack(states), torch.arange(len(embeds)),
                lambda _, q, k, v: plain_causal_attention(q, k, v, head.numerics),
            )  # fmt: skip
            drafted = int(head.target_ids_W[head.logits(output.normed_RE[-1:])[0].argmax()])
            right = drafted == right_answers[place]
            so_far = so_far and right
            counts[step] += torch.tensor([True, right_answers[place] in known, right, so_far])
            embeds.append(head.embed(rows.tokens[place][None])[0])
            states.append(output.feedback_RE[-1])
    return [tuple(row) for row in counts.tolist()]


def test_every_count_equals_the_twins(trace: Trace, checkpoint: Checkpoint) -> None:
    table = score_anchors(trace, checkpoint, ideal())
    head = make_head(trace, checkpoint)
    for index in range(len(trace)):
        rows = table.filter(pl.col("request_id") == f"r{index}").sort("step")
        assert rows.select(pl.exclude("request_id", "step")).rows() == twin_counts(head, trace, index)
    totals = table.group_by("step").agg(pl.exclude("request_id").sum()).sort("step")
    assert totals["right"][STEPS - 1] > totals["right_so_far"][STEPS - 1] > 0


def test_right_from_the_start_is_what_the_walk_of_all_anchors_accepts(trace: Trace, checkpoint: Checkpoint) -> None:
    """Where every step so far was right, the head drafted the text: feeding it one or the other is the same."""
    table = score_anchors(trace, checkpoint, ideal())
    generated = table.filter(pl.col("request_id") != "r3")
    for request_id, counts in generated.group_by("request_id"):
        rows = trace.served_rounds().clear().vstack(_every_anchor(trace, str(request_id[0])))
        rounds = replay.simulate(trace, {"h": checkpoint}, [ideal()], follow=rows)
        assert counts["right_so_far"].sum() == rounds.table["accepted"].sum() > 0


def _every_anchor(trace: Trace, request_id: str) -> pl.DataFrame:
    (record,) = [record for record in trace.records if record.request_id == request_id]
    anchors = range(record.prompt_tokens, record.prompt_tokens + record.output_tokens - 1)
    rows = [(request_id, place, anchor, [0], 0, *[None] * 4) for place, anchor in enumerate(anchors)]
    return pl.DataFrame(rows, schema=trace.served_rounds().schema, orient="row")


def test_packs_change_no_count(trace: Trace, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score_anchors(trace, checkpoint, ideal())
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 30)
    seen: list[int] = []
    assert score_anchors(trace, checkpoint, ideal(), on_event=lambda event: seen.append(event.done)).equals(whole)
    assert seen == [1, 2, 3, 4]


def test_only_chains_over_committed_rows_are_trained(trace: Trace, checkpoint: Checkpoint) -> None:
    for changes in ({"topk": 2, "num_draft_tokens": 4}, {"kv": "stale"}):
        with pytest.raises(UsageError, match="training runs chains"):
            score_anchors(trace, checkpoint, replace(ideal(), **changes))  # type: ignore[arg-type]


# ---- from ideal to served ----

SERVED = {
    "chain": Variant("h", wiring=SWAPPED, steps=3, precision="bf16", numerics="hf"),
    "policy": Variant("h", wiring=TRAINED, steps=STEPS, precision="bf16", kv="stale"),
    "fault": Variant("h", wiring=TRAINED, steps=2, precision="fp32", faults=parse_faults("position.offset=1")),
    "tree": Variant("h", wiring=TRAINED, steps=3, topk=2, num_draft_tokens=6, precision="bf16"),
    "path tree": Variant("h", wiring=TRAINED, steps=3, topk=2, num_draft_tokens=6, precision="bf16", kv="path"),
    "as trained": ideal(),
}


def test_every_field_of_a_variant_belongs_to_a_rung() -> None:
    """A field that is in none would differ between training and server without a rung for it."""
    switched = [field for group in FIELDS.values() for field in group]
    assert sorted([*switched, *COMMON]) == sorted(field.name for field in fields(Variant))


@pytest.mark.parametrize("name", SERVED)
def test_all_factors_together_are_the_served_variant(name: str, trace: Trace, checkpoint: Checkpoint) -> None:
    served = resolve(SERVED[name], checkpoint, trace)
    start = resolve(ideal_variant(served, TRAINED, STEPS), checkpoint, trace)
    factors = list_factors(start, served)
    assert mix(start, served, frozenset(factor.name for factor in factors if factor.differs)) == served
    assert mix(start, served, frozenset()) == start == resolve(ideal(), checkpoint, trace)


def test_which_factors_differ(trace: Trace, checkpoint: Checkpoint) -> None:
    def differing(name: str) -> list[str]:
        served = resolve(SERVED[name], checkpoint, trace)
        start = resolve(ideal_variant(served, TRAINED, STEPS), checkpoint, trace)
        return [factor.name for factor in list_factors(start, served) if factor.differs]

    assert {name: differing(name) for name in SERVED} == {
        "chain": ["precision", "wiring", "configuration"],
        "policy": ["precision", "KV"],
        "fault": ["fault", "configuration"],
        "tree": ["precision", "configuration", "KV"],
        "path tree": ["precision", "configuration"],
        "as trained": [],
    }


def test_a_fault_of_trees_waits_for_the_tree(trace: Trace, checkpoint: Checkpoint) -> None:
    served = resolve(replace(SERVED["tree"], faults=parse_faults("tree.parent-kv=path")), checkpoint, trace)
    start = resolve(ideal_variant(served, TRAINED, STEPS), checkpoint, trace)
    assert mix(start, served, frozenset({"fault"})).faults == ()
    assert mix(start, served, frozenset({"fault", "configuration"})).faults == served.faults
    ladder = climb(trace, checkpoint, served, TRAINED, trained_steps=STEPS, resamples=10)
    assert ladder.rung("fault").verdict == "equal"
    assert ladder.rungs[-3].accept_length > 1


def test_a_tree_without_the_layout_of_its_engine_sees_its_ancestors(trace: Trace, checkpoint: Checkpoint) -> None:
    served = resolve(SERVED["tree"], checkpoint, trace)
    start = ideal_variant(served, TRAINED, STEPS)
    assert (served.kv, mix(start, served, frozenset({"configuration"})).kv) == ("slot", "path")
    assert mix(start, served, frozenset({"KV"})).kv == "refresh"  # a chain has no layout


# ---- the whole climb ----


def spends_the_gap(ladder: Ladder) -> bool:
    changes = math.fsum(rung.change for rung in ladder.rungs if not math.isnan(rung.change))
    gap = ladder.rung("observed").accept_length - ladder.rungs[0].accept_length
    return math.isclose(changes, gap, abs_tol=1e-9)


@pytest.mark.parametrize("name", SERVED)
def test_changes_and_shares_add_up(name: str, trace: Trace, checkpoint: Checkpoint) -> None:
    ladder = climb(trace, checkpoint, SERVED[name], TRAINED, trained_steps=STEPS, observed=1.5, resamples=50)
    assert spends_the_gap(ladder)
    assert ladder.attribution is not None
    shares = math.fsum(share.change for share in ladder.attribution.shares)
    walk, served = ladder.rung("served walk"), ladder.rungs[-3]
    assert math.isclose(shares, served.accept_length - walk.accept_length, abs_tol=1e-9)


def test_levels_are_those_of_plain_replays(trace: Trace, checkpoint: Checkpoint) -> None:
    ladder = climb(trace, checkpoint, SERVED["chain"], TRAINED, trained_steps=STEPS, resamples=50)
    rounds = replay.simulate(trace, {"h": checkpoint}, [ideal(), SERVED["chain"]])
    own = rounds.table.filter(pl.col("request_id") != "r3")
    for rung, info in (("served walk", rounds.variants[0]), ("configuration", rounds.variants[1])):
        accepted = own.filter(pl.col("variant") == info.name)["accepted"]
        assert ladder.rung(rung).accept_length == pytest.approx(1 + accepted.sum() / len(accepted), abs=1e-12)
    assert ladder.rung("own tokens").accept_length > ladder.rung("joint").accept_length  # random text is not followed
    assert math.isnan(ladder.rung("observed").accept_length)


def test_training_depth_is_the_servers_where_it_is_not_given(trace: Trace, checkpoint: Checkpoint) -> None:
    ladder = climb(trace, checkpoint, SERVED["chain"], TRAINED, trained_steps=None, resamples=10)
    assert ladder.rung("configuration").verdict == "equal"
    assert len(ladder.rung("joint").counts.of) == 3  # type: ignore[union-attr]


def test_progress_counts_both_halves(trace: Trace, checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    climb(
        trace, checkpoint, SERVED["as trained"], TRAINED, trained_steps=STEPS, resamples=10,
        on_event=lambda event: seen.append((event.done, event.total)),
    )  # fmt: skip
    assert seen[-1] == (8, 8) and seen == sorted(seen)


def test_another_acceptance_rule_changes_no_rung_and_is_said(trace: Trace, checkpoint: Checkpoint) -> None:
    ladders = [
        climb(trace, checkpoint, replace(ideal(), verify=rule), TRAINED, trained_steps=STEPS, resamples=10)
        for rule in ("greedy", "rejection")
    ]
    levels = [
        [rung.accept_length for rung in ladder.rungs[:3]] + [ladder.rungs[-3].accept_length] for ladder in ladders
    ]
    assert levels[0] == levels[1]
    assert [any("rule rejection" in note for note in ladder.notes) for ladder in ladders] == [False, True]


def test_a_cause_that_only_the_served_wiring_can_have_leaves_the_rungs(trace: Trace, checkpoint: Checkpoint) -> None:
    """Slot 0 two layers on: of embed,2 that is tap 2, which is there; of 2,final it is tap 4, which is not."""
    fault = parse_faults("wiring.aux-layer-id=0:2")
    served = Variant("h", wiring=Wiring(("embed", "2")), steps=STEPS, precision="fp32", faults=fault)
    ladder = climb(trace, checkpoint, served, TRAINED, trained_steps=STEPS, resamples=10)
    assert ladder.attribution is None
    assert any("asks for tap 4" in note for note in ladder.notes)
    assert not math.isnan(ladder.rung("fault").accept_length)


def test_a_trained_wiring_that_the_trace_lacks_is_refused(trace: Trace, checkpoint: Checkpoint) -> None:
    with pytest.raises(WiringError, match=r"asks for tap 3.*capture again"):
        climb(trace, checkpoint, ideal(), Wiring(("2", "3")), trained_steps=STEPS)
