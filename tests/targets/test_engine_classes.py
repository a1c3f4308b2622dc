"""The rules of targets held against SGLang's own code: its setters and forwards run on stand-ins without weights."""

import pytest
from rig.capture_run import SETTER, captured, registry
from support.target_tables import shipped

from replay.targets.rules import NEWEST, CaptureRule, NoRule, capture_rule

LAYERS = 8
IDS = [None, [1, 3, 5], [2, 4, 6], [-1, 2, 5], [0, 3, 5], [1, 3, 7], [3, 5, 8], [-2, 2, 5], [2, 2, 5], [5, 1, 3], [9],
       [-12, 1], []]  # fmt: skip
TABLE = shipped(NEWEST)
# Drafts stand in the table as SGLang's registry has them; nobody serves one as a target.
RULES = [rule for name in TABLE.names
         if isinstance(rule := capture_rule(name), CaptureRule) and not name.endswith(("Eagle", "Eagle3"))]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.architecture)
def test_a_class_captures_what_its_rule_says(rule: CaptureRule) -> None:
    assert rule.architecture in registry()
    for ids in IDS:
        expected = rule.capture(ids, LAYERS)
        if expected.stops:
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                captured(rule, ids, LAYERS)
        else:
            assert captured(rule, ids, LAYERS) == list(expected.fed), ids


def test_a_class_without_the_method_has_no_rule() -> None:
    """SGLang stops at such a target (model_runner_components/attention_backend_setup.py). Of what cannot be imported
    here the table alone knows, and of what it calls unknown nobody does."""
    found = {name: hasattr(kind, SETTER) for name, kind in registry().items() if name not in TABLE.unknown}
    said = {name: isinstance(capture_rule(name), CaptureRule) for name in found}
    assert {name for name in found if found[name] != said[name]} == set()
    assert len(found) > 250


def test_the_table_has_every_class_of_the_registry_and_no_other() -> None:
    assert set(registry()) <= set(TABLE.names)
    for name in TABLE.names:
        rule = capture_rule(name)
        assert isinstance(rule, CaptureRule) or rule.registered


def test_another_name_is_of_no_class() -> None:
    rule = capture_rule("NoSuchForCausalLM")
    assert isinstance(rule, NoRule) and rule.known and not rule.registered
