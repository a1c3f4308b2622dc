"""A real server whose requests go on from each other's states (rig/injections): replay hands on what it did.

Kernels differ from machine to machine, and with them the order of sums: every round is the server's, or it parts from
it at a near tie, whose margin is measured. Replays of other faults leave most rounds unexplained.
"""

from pathlib import Path

import pytest
from rig.injections import INJECTION_VARIABLE
from support.served_traces import served_trace
from support.this_cpu import prompts_for

import replay
from replay.simulator.agreement import with_agreement
from replay.traces.agreement import Agreement
from replay.traces.sample_files import sample_head

NEW_TOKENS, STEPS, TOGETHER = 24, 4, 4
PROMPTS = prompts_for(8, TOGETHER)
FAULTS = ("none", "state.crossed=previous", "state.crossed=next", "state.crossed=previous:once")


@pytest.fixture(scope="module")
def trace(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    """Of a server that hands each request of a batch the states of the one before it."""
    folder = tmp_path_factory.mktemp("served")
    switch = folder / "injection"
    switch.write_text(FAULTS[1])
    return served_trace(
        target_dir, folder, taps="embed,3,16", steps=STEPS, num_draft_tokens=STEPS + 1, prompts=PROMPTS,
        new_tokens=NEW_TOKENS, concurrency=TOGETHER, env={INJECTION_VARIABLE: str(switch)},
    )  # fmt: skip


def agreements(trace: replay.Trace) -> dict[str, Agreement]:
    """By fault the rounds that a replay explains."""
    heads = {"demo": replay.load_head(sample_head())}
    variants = [replay.Variant("demo", steps=STEPS, faults=replay.parse_faults(fault)) for fault in FAULTS]
    rounds = with_agreement(replay.simulate(trace, heads, variants), trace, heads, variants)
    found = [info.agreement for info in rounds.variants]
    return {fault: one for fault, one in zip(FAULTS, found, strict=True) if one is not None}


def test_every_round_is_the_servers(trace: replay.Trace) -> None:
    assert trace.largest_batch == TOGETHER
    found = agreements(trace)
    own = found[FAULTS[1]]
    assert own.rounds == len(trace.served_rounds()) > PROMPTS * NEW_TOKENS / (STEPS + 1)
    assert own.unexplained == 0, own
    assert all(2 * found[other].unexplained > own.rounds for other in FAULTS if other != FAULTS[1])
