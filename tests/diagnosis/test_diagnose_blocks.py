"""`replay diagnose` of a server whose head drafts blocks: what it did is named, and a healthy one is not accused."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.calibration_made import served_rounds, write_recording
from support.dflash_heads import dflash_checkpoint
from support.served_maker import STEPS, make_checkpoint, make_served
from support.trace_maker import make_header, make_requests, write_trace

from replay.analysis.diagnosis.verdict import Diagnosis
from replay.diagnosis import diagnose as module
from replay.diagnosis.diagnose import diagnose_server, served_variant
from replay.faults.table import parse_faults
from replay.simulator.variant import Variant
from replay.traces.reader import Trace

HEAD = dflash_checkpoint(
    3, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=24, vocab_size=64,
    num_hidden_layers=1, block_size=STEPS + 1, dflash_config={"mask_token_id": 63, "target_layer_ids": [1, 3, 4]},
)  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Requests of an imagined target; whose rounds these are is no matter."""
    return make_served(tmp_path_factory.mktemp("bare"), make_checkpoint(), requests=3, output=10)


def diagnose(bare: Trace, folder: Path, fault: str) -> Diagnosis:
    served = Variant(HEAD.name, steps=STEPS, faults=parse_faults(fault))
    write_recording(bare, served_rounds(bare, HEAD, served), folder)
    trace = Trace.open(folder)
    return diagnose_server(trace, HEAD, served_variant(trace, HEAD.name), ladder=False)


def test_a_healthy_server_is_not_accused(bare: Trace, tmp_path: Path) -> None:
    found = diagnose(bare, tmp_path / "served", "none")
    assert found.verdict in ("healthy", "head") and found.named is None
    assert found.healthy.evidence.agreeing == found.healthy.evidence.rounds > 20


def test_a_fault_is_named(bare: Trace, tmp_path: Path) -> None:
    found = diagnose(bare, tmp_path / "served", "block.attention=causal")
    assert str(found.named) == "block.attention=causal"


@pytest.mark.parametrize(
    ("told", "given", "steps"),
    [
        ({}, {}, 3),
        ({"speculative_num_steps": "2"}, {}, 2),
        ({"speculative_num_steps": "2"}, {"steps": 1}, 1),
        ({"speculative_num_steps": "1", "speculative_num_draft_tokens": "3"}, {}, 2),
        ({"speculative_num_steps": "2", "speculative_eagle_topk": "4", "speculative_num_draft_tokens": "8"},
         {"topk": 1}, 2),
    ],
)  # fmt: skip
def test_steps_are_those_of_the_trace_then_those_of_a_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: dict[str, str], given: dict[str, int], steps: int
) -> None:
    """SGLang 0.5.23 arg_groups/speculative_hook.py ``_handle_dflash`` sets steps to 1 and draft tokens to a block."""
    header = make_header()
    header = replace(header, engine=replace(header.engine, details=told))
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(1)], header=header))
    asked: list[Variant] = []
    monkeypatch.setattr(module, "diagnose_server", lambda trace, head, served, **named: asked.append(served))
    module.diagnose(trace, HEAD, **given)
    assert [(one.steps, one.topk) for one in asked] == [(steps, 1)]
