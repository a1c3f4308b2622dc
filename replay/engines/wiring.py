"""Which taps feed the head's fusion layer, and how each engine's config says so.

A wiring is ordered: the head's ``fc`` multiplies the concatenation of the taps in this order. An engine knows
layer ids instead, under a convention of its own; this module is the only place that translates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replay.errors import WiringError
from replay.traces.taps import FINAL, parse_taps, tap_index, tap_name

# Model types whose SGLang class adds 1 to explicit ids only when the first id is 1
# (sglang 0.5.23 models/deepseek_v2.py, glm4_moe_lite.py; sgl-project/sglang#25454).
FIRST_ID_DECIDES = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite"})
# ... and those that take ids verbatim only when the largest equals the number of layers
# (sglang 0.5.23 models/gpt_oss.py; sgl-project/sglang#32334).
LAST_ID_DECIDES = frozenset({"gpt_oss"})
# ... and those that add 1 to their default list too (sglang 0.5.23 models/minimax_m3_vl.py). All others always add 1
# to explicit ids and never to the default.
DEFAULT_PLUS_ONE = frozenset({"minimax_m3_vl"})


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


def sglang_wiring(ids: Sequence[int] | None, *, model_type: str, layers: int) -> Wiring:
    """The wiring that SGLang 0.5.23 feeds for a draft config's ``eagle_config`` layer ids.

    The server records in layer order and once per layer, whatever order the ids are in. Raises WiringError for ids
    that never fire, as the server fails or silently feeds fewer taps then.
    """
    if ids is None:
        default = default_wiring(layers)
        shift = int(model_type in DEFAULT_PLUS_ONE)
        return Wiring(tuple(tap_name((tap_index(tap) or 0) + shift) for tap in default.taps))
    if not ids:
        raise WiringError("the draft config states no layer ids at all; say the wiring with --wiring")
    verbatim = (model_type in FIRST_ID_DECIDES and ids[0] != 1) or (
        model_type in LAST_ID_DECIDES and max(ids) == layers
    )
    boundaries = sorted({index + (not verbatim) for index in ids})
    last = layers if model_type in LAST_ID_DECIDES else layers - 1
    if boundaries[0] < 0 or boundaries[-1] > last:
        raise WiringError(
            f"the draft config states layer ids {list(ids)}, which SGLang reads as R{boundaries} of a {model_type} "
            f"target, where R[0] to R[{last}] can be fed; say the wiring with --wiring"
        )
    return Wiring(tuple(tap_name(index) for index in boundaries))


def engine_ids(wiring: Wiring, *, model_type: str, layers: int) -> tuple[EngineIds, ...]:
    """The layer ids that make each engine feed ``wiring``, or why none do."""
    return tuple(_each_engine(wiring, model_type, layers))


def _each_engine(wiring: Wiring, model_type: str, layers: int) -> Iterator[EngineIds]:
    if FINAL in wiring.taps:
        for engine in ("SGLang 0.5.23", "vLLM 0.32", "SpecForge 0.2"):
            yield EngineIds(engine, None, "no id stands for the stream after the final norm")
        return
    indices = [tap_index(name) or 0 for name in wiring.taps]
    rising = all(low < high for low, high in pairwise(indices))
    order = "" if rising else "this engine feeds taps in layer order, each once"
    yield _sglang_ids(indices, order, model_type, layers)
    yield EngineIds("vLLM 0.32", tuple(indices) if rising else None, order)
    if 0 in indices:
        yield EngineIds("SpecForge 0.2", None, "its ids are outputs of layers, so the embedding has none")
    elif len(indices) != 3:
        yield EngineIds("SpecForge 0.2", None, "its fc takes three taps")
    else:
        yield EngineIds("SpecForge 0.2", tuple(index - 1 for index in indices), "")


def _sglang_ids(indices: list[int], order: str, model_type: str, layers: int) -> EngineIds:
    engine = "SGLang 0.5.23"
    if order:
        return EngineIds(engine, None, order)
    verbatim = tuple(indices)
    # The order of ids is nothing to the server except where the first one decides how all are read.
    swapped = (*verbatim[1::-1], *verbatim[2:])
    for ids in (tuple(index - 1 for index in indices), verbatim, swapped):
        try:
            fed = sglang_wiring(ids, model_type=model_type, layers=layers)
        except WiringError:
            continue
        if [tap_index(name) for name in fed.taps] == indices:
            return EngineIds(engine, ids, "" if ids is not swapped else "in this order: a first id of 1 adds 1 to all")
    return EngineIds(engine, None, f"its {model_type} class has no ids that feed this")


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
