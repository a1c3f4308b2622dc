"""Which tensor pays: every weight and every product's input quantised alone, as variants of one sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.tensor_table import linear_names
from replay.engines.layer_names import fused_name
from replay.engines.precision import Precision, TensorRule, parse_precision, parse_scheme
from replay.errors import UsageError
from replay.simulator.variant import Variant

TOGETHER = "all of these"


def one_by_one(
    variants: Sequence[Variant], scheme: str, checkpoints: Mapping[str, Checkpoint]
) -> tuple[list[Variant], list[str]]:
    """Variants for a ranking, and what each of them but the first quantises.

    The first is the one of ``variants`` as it stands, the last has everything in ``scheme`` at once, fc and lm_head
    too, whatever its engine leaves out. Raises UsageError unless there is exactly one variant.
    """
    if len(variants) != 1:
        raise UsageError(
            f"--rank-precision {scheme} ranks the tensors of one variant, and {len(variants)} were asked for; give "
            "each option once"
        )
    (variant,) = variants
    formats = parse_scheme(scheme)
    names = linear_names(checkpoints[variant.draft].config)
    rules = {f"{name}.weight": TensorRule(name, ("weight",), formats) for name in names if formats.weight}
    products = dict.fromkeys(map(fused_name, names)) if formats.input else {}
    rules |= {f"{product}.input": TensorRule(product, ("input",), formats) for product in products}
    if not rules:
        raise UsageError(f"--rank-precision {scheme} quantises nothing; type e.g. fp8, int8 or w4a16:g128")
    rules[TOGETHER] = TensorRule("*", ("weight", "input"), formats)
    return [variant, *(_with_rule(variant, rule) for rule in rules.values())], list(rules)


def _with_rule(variant: Variant, rule: TensorRule) -> Variant:
    precision = parse_precision(variant.precision) if variant.precision else Precision()
    return replace(variant, precision=str(replace(precision, rules=(*precision.rules, rule))))
