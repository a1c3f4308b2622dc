"""The calibration of diagnoses (bench/bench_diagnosis.py): its names, its counting, and recordings that it makes."""

import importlib
from pathlib import Path

import polars as pl
import pytest
import torch
from rig.injections.attention import View, attend
from rig.injections.faults import HARMLESS, OF_THE_TABLE, OUTSIDE
from support.calibration_cases import (
    HEALTHY,
    OUTSIDE_THE_TABLE,
    SAME_IN_EFFECT,
    TABLE,
    Case,
    every_case,
    read_cases,
    write_case,
)
from support.calibration_judge import LEFT_OUT, Outcome
from support.calibration_made import FAULTS, NOT_MADE, perturbed_head, served_rounds, write_recording
from support.calibration_report import document, figures, render
from support.heads import tiny_config, write_head
from support.served_maker import make_checkpoint, make_served

import replay
from replay.diagnosis.diagnose import served_variant
from replay.errors import ReplayError
from replay.faults.table import FAULTS as KINDS
from replay.faults.table import parse_faults


def test_names_say_what_is_true() -> None:
    """What an injection is called is a fault that replay can play, or none of the table."""
    for name in OF_THE_TABLE:
        (fault,) = parse_faults(name)
        assert str(fault) == name
    for name in [*OUTSIDE, *HARMLESS]:
        with pytest.raises(ReplayError):
            parse_faults(name)
    cases = every_case()
    assert len({case.folder for case in cases}) == len(cases)
    assert {case.group for case in cases} == {HEALTHY, OUTSIDE_THE_TABLE, TABLE}


def test_every_kind_of_the_table_can_be_made() -> None:
    made = {str(fault).partition("=")[0] for text in FAULTS for fault in parse_faults(text)}
    assert made | NOT_MADE == set(KINDS) and not made & NOT_MADE


def outcome(
    group: str, true: str, named: str | None, certainty: float | None, *kinds: str, differing: int = 9
) -> Outcome:
    kind = true.partition("=")[0] if group in (TABLE, LEFT_OUT) else None
    verdict = "fault" if named else "engine" if group != HEALTHY else "healthy"
    return Outcome(f"f/{true}", group, true, kind, verdict, named, certainty, kinds, "v", differing, 10, 2.0)


def test_the_counts_are_those_of_the_outcomes() -> None:
    """Counted on paper."""
    found = figures(
        [
            outcome(TABLE, "kv.rollback=stale", "kv.rollback=stale", 0.9, "kv.rollback"),
            outcome(TABLE, "kv.rollback=hole", "kv.rollback=stale", 0.6, "kv.rollback"),
            outcome(TABLE, "attn.window=8", "kv.none=alone", 0.8, "kv.none", "healthy", "attn.window"),
            outcome(
                TABLE, "kv.none=alone", "kv.none=alone+attn.window=8", 1.0, "kv.none+attn.window", "a", "b", "kv.none"
            ),
            outcome(TABLE, "vocab.d2t=absolute", None, None, "vocab.d2t", differing=0),
            outcome(LEFT_OUT, "kv.rollback=stale", "attn.window=8", 0.5, "attn.window"),
            outcome(OUTSIDE_THE_TABLE, "x.rope-off", None, None, "healthy"),
            outcome(OUTSIDE_THE_TABLE, "x.rope-off", "attn.window=8", None, "attn.window"),
            outcome(HEALTHY, "healthy.a", "attn.window=8", 0.3, "attn.window"),
            outcome(HEALTHY, "healthy.a", None, 0.99, "healthy"),
        ]
    )
    assert (found.table, found.named_right, found.value_right, found.ranked_first, found.among_three) == (5, 2, 1, 3, 4)
    assert len(found.false_in_table) == 2 and len(found.not_named) == 1
    assert found.unseen == ("vocab.d2t=absolute",)
    assert (found.left_out, len(found.false_left_out)) == (1, 1)
    assert (found.outside, len(found.false_outside)) == (2, 1)
    assert (found.healthy, len(found.accused)) == (2, 1)
    assert [(one.said, one.right) for one in found.buckets] == [(1, 0), (2, 1), (1, 0), (1, 1), (1, 0)]
    assert (found.uncertain_said, found.uncertain_right) == (1, 0)
    squares = 0.1**2 + 0.4**2 + 0.8**2 + 1.0**2 + 0.5**2 + 0.3**2
    assert found.brier == pytest.approx(squares / 6)


def test_only_listed_names_are_the_same_in_effect() -> None:
    lost = "x.attention-lost"
    alike, other = "weights.missing=layers.0.self_attn.o_proj", "weights.missing=norm"
    found = [outcome(OUTSIDE_THE_TABLE, lost, name, 0.9, "weights.missing") for name in (alike, other)]
    assert [one.right for one in found] == [True, False]
    assert figures(found).false_outside == figures(found[1:]).false_outside
    for pair in SAME_IN_EFFECT:  # each is a name of an injection outside, and one of the table
        outside, inside = sorted(pair, key=lambda name: name not in OUTSIDE)
        assert outside in OUTSIDE and parse_faults(inside)


def test_what_is_not_counted_is_said() -> None:
    only = [outcome(TABLE, "kv.none=alone", None, None, "healthy", differing=0)]
    assert "nothing was said with a certainty" in render(figures(only))
    assert document(only)["outcomes"][0]["right"] is False


def test_a_made_recording_has_the_text_and_other_rounds(tmp_path: Path) -> None:
    trace, head = make_served(tmp_path, make_checkpoint()), make_checkpoint()
    variant = served_variant(trace, head.name)
    rounds = served_rounds(trace, head, variant).with_columns(accepted=pl.lit(0, dtype=pl.Int32))
    case = Case("kv.none=alone", TABLE)
    write_recording(trace, rounds, tmp_path / case.folder / "trace")
    write_case(tmp_path, case, "a test")
    ((read, path),) = read_cases(tmp_path)
    made = replay.Trace.open(path)
    assert (read, read.kind, read.value) == (case, "kv.none", "alone")
    assert made.served_rounds()["accepted"].sum() == 0 and made.served_rounds().height == rounds.height > 0
    for index in range(len(trace)):
        one, other = trace.read(index, trace.taps), made.read(index, trace.taps)
        assert torch.equal(one.tokens, other.tokens) and one.prompt_tokens == other.prompt_tokens
        assert all(torch.equal(one.taps[tap], other.taps[tap]) for tap in trace.taps)
        assert made.feed(index) is None


def test_a_perturbed_head_is_another_head(tmp_path: Path) -> None:
    source = write_head(tmp_path / "head", tiny_config())
    one = replay.load_head(source)
    other = replay.load_head(perturbed_head(source, tmp_path / "other", size=0.1))
    assert torch.equal(one.tensors["d2t"], other.tensors["d2t"])
    assert not torch.equal(one.tensors["fc.weight"], other.tensors["fc.weight"])
    assert torch.equal(one.tensors["norm.weight"], other.tensors["norm.weight"])


def test_attention_without_a_fault_is_the_rigs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An injection that changes nothing in the attention leaves it bit for bit as it was."""
    kernels = importlib.import_module("rig.sgl_kernel")
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(5, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    seen = torch.ones(5, 5).bool().tril()
    view = View(0, 0, None, k, v, seen, torch.zeros_like(seen))
    assert torch.equal(attend(q, view, 0.3), kernels.attend(q, k, v, 0.3, seen))


def test_a_row_that_is_blank_counts_as_zeros() -> None:
    """Two keys, one of them blank: a score of 0 and a value of 0, by hand."""
    q, k, v = torch.tensor([[[2.0]]]), torch.tensor([[[3.0]], [[1.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    seen = torch.ones(1, 2).bool()
    view = View(0, 1, None, k, v, seen, torch.tensor([[True, False]]))
    weight = torch.tensor(2.0).exp() / (torch.tensor(2.0).exp() + 1)
    torch.testing.assert_close(attend(q, view, 1.0), (7 * weight).view(1, 1, 1))
