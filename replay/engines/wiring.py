"""Which taps feed the head's fusion layer, and how each engine's config says so.

A wiring is ordered: the head's ``fc`` multiplies the concatenation of the taps in this order. An engine knows
layer ids instead, under a convention of its own; this module is the only place that translates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replay.errors import WiringError
from replay.targets.rules import NEWEST, CaptureRule, NoRule, capture_rule
from replay.traces.taps import FINAL, parse_taps, tap_index, tap_name

# Targets that vLLM 0.32 runs by model_executor/models/deepseek_v2.py, which adds the residual of layer 0 before there
# is one: with id 0 its first forward ends in a TypeError.
VLLM_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
VLLM_CRASH = "with id 0, the embedding, its DeepSeek crashes at the first forward"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Ordered canonical tap names, e.g. ``("embed", "3", "16")``."""

    taps: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(self.taps)


@dataclass(frozen=True, slots=True)
class EngineIds:
    """What to write as layer ids so that one engine feeds a wiring; ``ids`` is None where ``note`` says why not."""

    engine: str
    ids: tuple[int, ...] | None
    note: str


def parse_wiring(text: str, *, layers: int | None = None) -> Wiring:
    """Parse ``embed,3,31`` (also ``out:30``, ``in:31``, ``final``). Raises UsageError for a tap that cannot be."""
    return Wiring(parse_taps(text, layers=layers))


def default_wiring(layers: int) -> Wiring:
    """What EAGLE, SGLang 0.5.23 and vLLM 0.32 feed when no ids are stated: R[2], R[N//2], R[N-3].

    In layer order and each once, so targets of fewer than 8 layers may feed fewer than three taps.
    """
    fed = {2, layers // 2, layers - 3} & set(range(layers))
    return Wiring(tuple(tap_name(index) for index in sorted(fed)))


def indices_wiring(ids: Sequence[int] | None, *, layers: int) -> Wiring:
    """The wiring that vLLM 0.32 feeds for layer ids: R indices, in layer order and each once.

    Raises WiringError for an id that no layer of the target has. Source: model_executor/models/interfaces.py.
    """
    if not ids:
        return default_wiring(layers)
    if not 0 <= min(ids) <= max(ids) <= layers:
        raise WiringError(
            f"the draft config states layer ids {list(ids)}, which are R indices, and the target has R[0] to "
            f"R[{layers}]; say the wiring with --wiring"
        )
    return Wiring(tuple(tap_name(index) for index in sorted(set(ids))))


def sglang_wiring(ids: Sequence[int] | None, *, architecture: str, layers: int, release: str = NEWEST) -> Wiring:
    """The wiring that SGLang feeds for a draft config's ``eagle_config`` layer ids, from a target of this class.

    The server records in layer order and once per layer, whatever order the ids are in. Raises WiringError for ids
    that do not all fire, as the server fails or silently feeds fewer taps then, and for a class of which nothing is
    captured or known. Source: the rule of the class (targets/rules.py).
    """
    rule = capture_rule(architecture, release)
    if isinstance(rule, NoRule):
        raise WiringError(f"{rule}; say the wiring with --wiring")
    if ids is not None and not ids:
        raise WiringError("the draft config states no layer ids at all; say the wiring with --wiring")
    captured = rule.capture(ids, layers)
    if trouble := rule.trouble(ids, layers):
        said = "no layer ids" if ids is None else f"layer ids {list(ids)}"
        raise WiringError(
            f"the draft config states {said}, which {rule.engine} reads as R{sorted(set(captured.asked))} of "
            f"{architecture}: {trouble}; say the wiring with --wiring"
        )
    return Wiring(tuple(tap_name(index) for index in captured.fed))


def engine_ids(wiring: Wiring, *, architecture: str, layers: int, release: str = NEWEST) -> tuple[EngineIds, ...]:
    """The layer ids that make each engine feed ``wiring`` from a target of this class, or why none do.

    ``release`` is that of SGLang.
    """
    return tuple(_each_engine(wiring, capture_rule(architecture, release), layers))


def _each_engine(wiring: Wiring, rule: CaptureRule | NoRule, layers: int) -> Iterator[EngineIds]:
    if FINAL in wiring.taps:
        for engine in (rule.engine, "vLLM 0.32", "SpecForge 0.2"):
            yield EngineIds(engine, None, "no id stands for the stream after the final norm")
        return
    indices = [tap_index(name) or 0 for name in wiring.taps]
    rising = all(low < high for low, high in pairwise(indices))
    order = "" if rising else "this engine feeds taps in layer order, each once"
    yield _sglang_ids(indices, order, rule, layers)
    crash = VLLM_CRASH if 0 in indices and rule.architecture in VLLM_DEEPSEEK else ""
    yield EngineIds("vLLM 0.32", None if order or crash else tuple(indices), order or crash)
    if 0 in indices:
        yield EngineIds("SpecForge 0.2", None, "its ids are outputs of layers, so the embedding has none")
    elif len(indices) != 3:
        yield EngineIds("SpecForge 0.2", None, "its fc takes three taps")
    else:
        yield EngineIds("SpecForge 0.2", tuple(index - 1 for index in indices), "")


def _sglang_ids(indices: list[int], order: str, rule: CaptureRule | NoRule, layers: int) -> EngineIds:
    if order or isinstance(rule, NoRule):
        return EngineIds(rule.engine, None, order or str(rule))
    verbatim = tuple(indices)
    # The order of ids is nothing to the server except where the first one decides how all are read.
    swapped = (*verbatim[1::-1], *verbatim[2:])
    for ids in (tuple(index - 1 for index in indices), verbatim, swapped):
        captured = rule.capture(ids, layers)
        if list(captured.fed) == indices and not rule.trouble(ids, layers) and not captured.wrapped:
            note = "" if ids is not swapped else "in this order: a first id of 1 adds 1 to all"
            return EngineIds(rule.engine, ids, note)
    return EngineIds(rule.engine, None, f"its {rule.architecture} has no ids that feed this")


def check_wiring(wiring: Wiring, *, available: Sequence[str], hidden_size: int, fc_inputs: int) -> None:
    """Refuse a wiring that the trace (``available`` taps of ``hidden_size``) or the head (``fc_inputs``) cannot take.

    Reads names and sizes only, so that it can stand before any tensor is touched. Raises WiringError.
    """
    missing = [tap for tap in wiring.taps if tap not in available]
    if missing:
        raise WiringError(
            f"wiring {wiring} asks for tap {', '.join(missing)}, the trace has {', '.join(available)}; "
            f"capture again with --taps {','.join(dict.fromkeys((*available, *wiring.taps)))}"
        )
    width = len(wiring.taps) * hidden_size
    if width != fc_inputs:
        taps = f"{fc_inputs // hidden_size} taps" if fc_inputs % hidden_size == 0 else "no whole number of them"
        raise WiringError(
            f"wiring {wiring} gives {len(wiring.taps)} taps x {hidden_size} = {width} features, the head's fc takes "
            f"{fc_inputs} ({taps}); give --wiring as many taps as the head was trained on, "
            "or a head made for this target"
        )
