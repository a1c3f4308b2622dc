"""What replay predicts of a server with a latent head is what that server did, round for round, chains and trees.

The target is a tiny DeepSeek-V3 (MLA and experts), the head follows its text (support/deepseek_target.py). Prompts of
the chains are prefilled whole, those of the trees in pieces.
"""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from support.deepseek_target import write_deepseek, write_follower
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

import replay

PROMPTS, NEW_TOKENS, STEPS = 8, 24, 3
TOPK, NUM_DRAFT_TOKENS = 2, 6
WIRING = "embed,2,4"
ORDERS: dict[str, dict[str, Any]] = {"absorbed": {}, "unabsorbed": {"numerics": "hf"}, "fp32": {"precision": "fp32"}}

Served = tuple[replay.Trace, Path]


@pytest.fixture(scope="module")
def deepseek(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("target") / "deepseek", target_dir)


@pytest.fixture(scope="module")
def chains(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("chains")
    head = write_follower(folder / "head", deepseek)
    trace = served_trace(
        deepseek, folder, head=head, taps=f"{WIRING},final", wiring=WIRING, steps=STEPS, num_draft_tokens=STEPS + 1,
        prompts=PROMPTS, new_tokens=NEW_TOKENS,
    )  # fmt: skip
    return trace, head


@pytest.fixture(scope="module")
def trees(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Of a head that norms every tap, beside a target that prefills 16 rows at a time."""
    folder = tmp_path_factory.mktemp("trees")
    head = write_follower(folder / "head", deepseek, fc_norm=True)
    trace = served_trace(
        deepseek, folder, head=head, taps=f"{WIRING},final", wiring=WIRING, topk=TOPK, steps=STEPS,
        num_draft_tokens=NUM_DRAFT_TOKENS, prompts=PROMPTS // 2, new_tokens=NEW_TOKENS,
        extra_args=["--chunked-prefill-size", "16"],
    )  # fmt: skip
    return trace, head


def variant(**changes: Any) -> replay.Variant:
    return replay.Variant("latent", replay.parse_wiring(WIRING), steps=STEPS, **changes)


def tree_variant(**changes: Any) -> replay.Variant:
    return variant(topk=TOPK, num_draft_tokens=NUM_DRAFT_TOKENS, **changes)


def test_every_chain_is_the_servers(chains: Served, record_property: Any) -> None:
    trace, head = chains
    with torch.inference_mode():
        followed = {name: follow_chains(trace, head, variant(**order)) for name, order in ORDERS.items()}
    judged = []
    for name, mine in followed.items():
        noise = chain_noise(followed["absorbed"], followed["unabsorbed" if name == "fp32" else "fp32"])
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
        noise = tree_noise(grown["absorbed"], grown["unabsorbed" if name == "fp32" else "fp32"])
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
