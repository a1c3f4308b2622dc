"""Every kind of the table has all its parts. A failing test names the kind and the part; CONTRIBUTING.md lists them."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fault_cases import BATCHES_ONLY, BLOCKS_ONLY, CASES, INVISIBLE, TREES_ONLY, healthy_subject

from replay.cli.app import cli
from replay.engines.wiring import Wiring
from replay.faults.change import NO_REMEDY, Subject
from replay.faults.remedies import remedy
from replay.faults.table import FAULTS, apply_faults, parse_faults

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
every_kind = pytest.mark.parametrize("kind", FAULTS)


def cases_of(kind: str) -> list[tuple[Subject, Subject]]:
    """Of each case of a kind the subject before and after."""
    cases: dict[str, Any] = {case: options for case, options in {**CASES, **INVISIBLE}.items() if "+" not in case}
    pairs = []
    for case in [case for case in cases if case.partition("=")[0] == kind]:
        healthy = healthy_subject(cases[case])
        pairs.append((healthy, apply_faults(healthy, parse_faults(case))))
    return pairs


def weights_of(subject: Subject) -> tuple[object, ...]:
    """What makes a head need weights of its own (simulator/groups.py)."""
    behaviour = subject.behaviour
    return id(subject.checkpoint.tensors), behaviour.target_lm_head, subject.own_embedding, subject.precision


def feed_of(subject: Subject) -> tuple[object, ...]:
    """What most committed rows of a draft are fed (diagnosis/feed.py)."""
    behaviour = subject.behaviour
    rows = behaviour.pairing, behaviour.zero_slots, behaviour.unit_taps, behaviour.offset, behaviour.max_position
    return subject.wiring, *rows


@every_kind
def test_a_kind_counts_reports(kind: str) -> None:
    assert FAULTS[kind].reports > 0, "say reports=N: public threads with this cause, 1 where none is counted"


@every_kind
def test_a_kind_has_a_remedy(kind: str) -> None:
    """One sentence, or the explicit statement that there is none; its braces are those that remedies.py fills in."""
    assert FAULTS[kind].remedy, "say remedy=..., or remedy=NO_REMEDY"
    said = remedy(f"{kind}=1", Wiring(("embed", "3", "16")), architecture="LlamaForCausalLM", layers=30)
    assert bool(said) == (FAULTS[kind].remedy != NO_REMEDY) and not re.search("[{}]", said)
    assert not said.endswith(".")  # sentences are joined


@every_kind
def test_a_kind_is_played_by_the_twin(kind: str) -> None:
    tried = {case.partition("=")[0] for case in CASES}
    assert kind in tried | TREES_ONLY | BATCHES_ONLY | BLOCKS_ONLY, "add a case to tests/support/fault_cases.py"


@every_kind
def test_a_kind_says_whether_it_changes_weights(kind: str) -> None:
    changes = any(weights_of(healthy) != weights_of(changed) for healthy, changed in cases_of(kind))
    assert FAULTS[kind].changes_weights == changes, f"say changes_weights={changes}"


@every_kind
def test_a_kind_says_whether_it_changes_the_feed(kind: str) -> None:
    changes = any(feed_of(healthy) != feed_of(changed) for healthy, changed in cases_of(kind))
    assert FAULTS[kind].changes_feed == changes, f"say changes_feed={changes}"


@every_kind
def test_a_kind_takes_its_default(kind: str) -> None:
    default = FAULTS[kind].default
    if default is not None:
        assert [str(fault) for fault in parse_faults(kind)] == [f"{kind}={default}"]


@every_kind
def test_a_kind_is_on_the_page_of_faults(kind: str) -> None:
    """Its group, and what ``--kv`` calls it; the help of ``replay simulate`` has these too."""
    page = PAGE.read_text(encoding="utf-8")
    assert f"| `{kind.partition('.')[0]}.*` |" in page
    help_text = " ".join(CliRunner().invoke(cli, ["simulate", "--help"]).stdout.split())
    for policy, value in FAULTS[kind].kv.items():
        spelled = policy if value else f"{policy}:"
        assert f"`{spelled}" in page and f"{spelled}" in help_text
