"""What replay predicts of a server with a latent head is what that server did, round for round, chains and trees.

The head follows the text of a tiny DeepSeek-V3 target, MLA and experts (support/deepseek_target.py). Chains: on two
ranks; the prompts are prefilled whole; the head states layer ids at which SGLang would stop, and is fed what --wiring
says. Trees: the target is Kimi-K2.5's class, its experts are those of INT4; prompts come in pieces.
"""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from support.deepseek_target import write_deepseek, write_follower, write_int4, write_kimi
from support.near_ties import (
    chain_noise,
    follow_chains,
    grow_trees,
    judge_chains,
    judge_trees,
    report_judged,
    tree_noise,
)
from support.served_traces import served_trace
from support.this_cpu import prompts_for

import replay
from replay.analysis.compare.compare import compare_variants
from replay.analysis.compare.pairing import pair_rounds
from replay.analysis.compare.texts import Text
from replay.traces.check import check_trace

PROMPTS, NEW_TOKENS, STEPS = prompts_for(8, 4), 24, 3
TOPK, NUM_DRAFT_TOKENS = 2, 6
WIRING = "embed,2,4"
NEVER_FED = {"eagle_aux_hidden_state_layer_ids": [-1, 1, 3], "use_aux_hidden_state": True}
# Which cores each rank runs on; SGLang asks for this where there are more ranks than NUMA nodes.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
TEXT_ONLY = {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "kimi_text"}
ORDERS: dict[str, dict[str, Any]] = {"by row": {}, "unabsorbed": {"numerics": "hf"}, "fp32": {"precision": "fp32"}}

Served = tuple[replay.Trace, Path]


@pytest.fixture(scope="module")
def deepseek(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("target") / "deepseek", target_dir)


@pytest.fixture(scope="module")
def chains(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("chains")
    head = write_follower(folder / "head", deepseek, eagle_config=NEVER_FED)
    trace = served_trace(
        deepseek, folder, head=head, taps=f"{WIRING},final", wiring=WIRING, steps=STEPS, num_draft_tokens=STEPS + 1,
        prompts=PROMPTS, new_tokens=NEW_TOKENS, extra_args=["--tp-size", "2"], env=TWO_RANKS,
    )  # fmt: skip
    return trace, head


@pytest.fixture(scope="module")
def trees(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Of a head that norms every tap, beside a target that prefills 16 rows at a time."""
    folder = tmp_path_factory.mktemp("trees")
    head = write_follower(folder / "head", deepseek, fc_norm=True)
    kimi = write_kimi(folder / "kimi", write_int4(folder / "int4", deepseek))
    trace = served_trace(
        kimi, folder, head=head, taps=f"{WIRING},final", wiring=WIRING, topk=TOPK, steps=STEPS,
        num_draft_tokens=NUM_DRAFT_TOKENS, prompts=PROMPTS // 2, new_tokens=NEW_TOKENS,
        extra_args=["--chunked-prefill-size", "16"], env=TEXT_ONLY,
    )  # fmt: skip
    return trace, head


def variant(**changes: Any) -> replay.Variant:
    return replay.Variant("latent", replay.parse_wiring(WIRING), steps=STEPS, **changes)


def tree_variant(**changes: Any) -> replay.Variant:
    return variant(topk=TOPK, num_draft_tokens=NUM_DRAFT_TOKENS, **changes)


def test_the_traces_pass_their_check(chains: Served, trees: Served) -> None:
    """Those of two ranks and of Kimi's class too: lm_head(final) gives what was recorded."""
    for trace, _ in (chains, trees):
        assert [finding for finding in check_trace(trace) if finding.severity == "error"] == []
    assert chains[0].header.target.architecture == "DeepseekV3ForCausalLM"
    assert trees[0].header.target.architecture == "KimiK25ForConditionalGeneration"


def test_every_chain_is_the_servers(chains: Served, record_property: Any) -> None:
    trace, head = chains
    with torch.inference_mode():
        followed = {name: follow_chains(trace, head, variant(**order)) for name, order in ORDERS.items()}
    judged = []
    for name, mine in followed.items():
        noise = chain_noise(followed["by row"], followed["unabsorbed" if name == "fp32" else "fp32"])
        judged.append(judge_chains(f"chains of {STEPS}, latent head, order {name}", mine, noise))
    report_judged(record_property, judged)
    assert [str(one) for one in judged if one.unexplained] == []
    accepted = trace.served_rounds()["accepted"].to_list()
    assert judged[0].rounds == len(accepted) and mean(accepted) > 0.5  # there is something to accept


def test_every_tree_is_the_servers(trees: Served, record_property: Any) -> None:
    trace, head = trees
    grown = {name: grow_trees(trace, head, tree_variant(**order)) for name, order in ORDERS.items()}
    judged = []
    for name, mine in grown.items():
        rest = [grown[other] for other in ORDERS if other != name]
        noise = tree_noise(grown["by row"], grown["unabsorbed" if name == "fp32" else "fp32"])
        judged.append(judge_trees(f"trees of {NUM_DRAFT_TOKENS}, latent head, order {name}", trace, mine, noise, *rest))
    report_judged(record_property, judged)
    assert [str(one) for one in judged if one.unexplained] == []
    assert judged[0].rounds > PROMPTS // 2 * NEW_TOKENS / (STEPS + 1)


@pytest.mark.parametrize(
    "fault",
    [
        "position.rope-geometry=halves",
        "wiring.norm=skip:kv_a_layernorm",
        "attn.scale=0.551493",  # YaRN's factor on scores is missing: 1 / (0.1 ln 32 + 1)^2
        "attn.scale=1.81326",  # ... and twice
    ],
)
def test_a_latent_head_run_otherwise_is_told_from_rounding(chains: Served, fault: str) -> None:
    """Its own drafts, fed the server's, part from them by more than rounding explains."""
    trace, head = chains
    with torch.inference_mode():
        sound, fp32, broken = (
            follow_chains(trace, head, variant(**changes))
            for changes in ({}, {"precision": "fp32"}, {"faults": replay.parse_faults(fault)})
        )
    assert judge_chains(f"fault {fault} on a healthy server", broken, chain_noise(sound, fp32)).unexplained > 0


def test_what_the_targets_own_int4_costs_is_told_over_the_same_prompts(chains: Served, trees: Served) -> None:
    """One head on both recordings, that of bf16 experts and that of INT4 ones, by texts and after the same tokens."""
    head, traces = chains[1], (chains[0], trees[0])
    played = [replay.simulate(trace, {"latent": replay.load_head(head)}, [variant()]) for trace in traces]
    tokens = [
        {one.request_id: trace.read(index, ()).tokens.tolist() for index, one in enumerate(trace.records)}
        for trace in traces
    ]
    lengths = {one.request_id: one.prompt_tokens for one in traces[0].records}
    texts = [{name: Text(tuple(text), lengths[name]) for name, text in of.items()} for of in tokens]
    found = compare_variants(pair_rounds(*played, texts=(texts[0], texts[1])))
    assert found.texts is not None and found.texts.requests == PROMPTS // 2 == len(found.only_a)
    walks = [{(row[0], row[1]): row[2] for row in one.table.select("request_id", "anchor", "accepted").iter_rows()}
             for one in played]  # fmt: skip
    met = [key for key in walks[0] if key in walks[1]
           and tokens[0][key[0]][: key[1] + 1] == tokens[1][key[0]][: key[1] + 1]]  # fmt: skip
    anchors = found.pairs[0].anchors
    assert anchors.rounds == len(met) > 0
    assert [anchors.accepted_a, anchors.accepted_b] == [sum(walk[key] for key in met) for walk in walks]
    assert found.texts.common_tokens < found.texts.output_tokens_a  # what INT4 rounds is another target
