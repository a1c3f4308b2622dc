"""How faults are spelled: kinds, values, draft KV policies, and the list."""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support.fault_cases import ANY_NUMBER, FROM_ZERO, healthy_subject

from replay.cli.app import cli
from replay.engines.wiring import Wiring
from replay.errors import ReplayError, UsageError
from replay.faults.table import FAULTS, Fault, apply_faults, parse_faults, parse_policy
from replay.simulator.variant import Variant


def test_a_name_without_value_takes_the_usual_one() -> None:
    assert parse_faults("position.offset") == (Fault("position.offset", "1"),)
    with pytest.raises(UsageError, match=r"kv\.prefix-reuse needs a value"):
        parse_faults("kv.prefix-reuse")


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    "value", ["", "x", "-", ":", "1:2:3:4", "nan", "9" * 40, "theta:-1", "partial:2", "0x10", "\u0661"]
)
def test_values_that_mean_nothing_are_refused(kind: str, value: str) -> None:
    if value == "" or (kind == "weights.missing"):
        with pytest.raises(ReplayError):
            apply_faults(healthy_subject({}), parse_faults(f"{kind}={value}xyz"))
        return
    with pytest.raises(UsageError, match=r"possible|type "):
        parse_faults(f"{kind}={value}")


# Words of grammars that stand for no number: a value to type in their stead, "" where no number is in the value.
NO_NUMBERS = {"TENSOR": "", "NORM": "", "SCHEME": "", "FORMAT": "fp8_e4m3"}


def with_number(kind: str, number: int) -> list[str]:
    """Every form of a kind's values that holds a number, by the grammar of the list; of several the last is meant."""
    forms = []
    for form in FAULTS[kind].values.split("|"):
        for spelled in dict.fromkeys((re.sub(r"\[.*\]", "", form), form.replace("[", "").replace("]", ""))):
            words = [word for word in re.findall("[A-Z]+", spelled) if word not in NO_NUMBERS]
            typed = {**NO_NUMBERS, **dict.fromkeys(words, "0"), **dict.fromkeys(words[-1:], str(number))}
            if words:
                forms.append(re.sub("[A-Z]+", lambda word, typed=typed: typed[word[0]], spelled))  # type: ignore[misc]
    return forms


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if with_number(kind, 0)])
def test_numbers_that_mean_nothing_are_refused(kind: str, number: int) -> None:
    taken = kind in ANY_NUMBER or (kind in FROM_ZERO and number == 0)
    for value in with_number(kind, number):
        if taken:
            assert [str(fault) for fault in parse_faults(f"{kind}={value}")] == [f"{kind}={value}"]
        else:
            with pytest.raises(UsageError, match=r"possible|type "):
                parse_faults(f"{kind}={value}")
                pytest.fail(f"refuse {kind}={value}, or name the kind in ANY_NUMBER or FROM_ZERO of fault_cases.py")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("wiring.aux-layer-id=6", r"R\[3\].*possible are R\[0\] to R\[8\]"),
        ("wiring.aux-layer-id=3:1", "slots 0 to 2"),
        ("wiring.aux-missing=3", "slots 0 to 2"),
        ("wiring.multi-layer", "one layer"),
        ("wiring.norm=skip:fc_norm", "no fc_norm to leave out"),
        ("weights.missing=layers.7", "no tensor layers.7; it has"),
        ("weights.overwritten=embed:own", "no embed_tokens"),
        ("position.rope-geometry=partial:0.3", "even number"),
        ("position.rope-geometry=halves", "halves already; type position.rope-geometry=interleaved"),
        ("wiring.norm=skip:kv_a_layernorm", "no kv_a_layernorm"),
        ("wiring.aux-layer-id=0", "is the same with wiring.aux-layer-id=0"),
    ],
)
def test_a_fault_that_does_not_fit_the_head_is_refused(case: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        apply_faults(healthy_subject({}), parse_faults(case))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("wiring.aux-layer-id=1", "wiring final is the same with wiring.aux-layer-id=1"),
        ("wiring.aux-layer-id=0:-1", "wiring final is the same with"),
        ("wiring.concat-order=fc", "wiring final is the same in reverse"),
    ],
)
def test_a_fault_of_taps_changes_nothing_of_the_final_state_alone(case: str, said: str) -> None:
    """As EAGLE-1 heads are fed."""
    subject = replace(healthy_subject({}), wiring=Wiring(("final",)))
    with pytest.raises(ReplayError, match=said):
        apply_faults(subject, parse_faults(case))


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("stale", "kv.rollback=stale"),
        ("hole:16", "kv.prefix-reuse=16"),
        ("hole:16:masked", "kv.prefix-reuse=16:masked"),
        ("chunk:8", "kv.chunk-boundary=8"),
        ("chunk:recorded", "kv.chunk-boundary=recorded"),
        ("window:4", "attn.window=4"),
        ("full-hole", "kv.rollback=full-hole"),
        ("row:first", "state.hidden-row=first"),
        ("none", "kv.none=alone"),
    ],
)
def test_a_kv_policy_is_a_fault(policy: str, fault: str) -> None:
    assert str(parse_policy(policy)) == fault


@pytest.mark.parametrize("policy", ["fresh", "hole", "stale:2", "hole:", "window:-1", ""])
def test_a_kv_policy_that_is_none_is_refused(policy: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(policy)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("hole:-1", "kv 'hole:-1' was asked for, possible values are a number of prompt tokens, with :masked"),
        ("hole:x", "type hole:VALUE"),
        (
            "row:last",
            "kv 'row:last' was asked for, possible values are drafted, first, previous, hidden-only; type row:",
        ),
        ("window:0", "kv 'window:0' was asked for, possible values are a number of rows; type window:VALUE"),
    ],
)
def test_a_value_of_a_kv_policy_is_refused_as_it_was_typed(policy: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        Variant("h", kv=policy)
    assert "fault" not in str(raised.value)


def test_the_list_says_what_a_diagnosis_makes_of_a_kind() -> None:
    done = CliRunner().invoke(cli, ["faults", "--json"])
    kinds = {kind["name"]: kind for kind in json.loads(done.stdout)["faults"]}
    assert list(kinds) == list(FAULTS)
    assert kinds["kv.none"]["reports"] == FAULTS["kv.none"].reports > 0
    assert kinds["kv.none"]["kv"] == {"alone": "none"} and kinds["attn.window"]["kv"] == {"N": "window:N"}
    assert kinds["position.max-len"]["remedy"].startswith("raise max_position_embeddings")
