"""Layer ids as each engine counts them, read as taps. The one reader of these conventions, for whoever has ids.

- ``sglang``: the rule of the target's class in a release (targets/rules.py).
- ``vllm``: 0.32 model_executor/models/interfaces.py and llama.py: id k is R[k]; in layer order, each once.
- ``specforge``: 0.2.0 application/planning.py: three distinct ids from 0 up; id k is the output of layer k, R[k+1].
- ``hf``: Transformers 5 ``hidden_states[k]``: R[k], but the last of its N + 1 is the stream after the final norm; an
  index below 0 counts from the end, as in Python. In the stated order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replay.targets.rules import NEWEST, RELEASES, CaptureRule, NoRule, capture_rule
from replay.traces.taps import FINAL, tap_name

VLLM, SPECFORGE = "vLLM 0.32", "SpecForge 0.2"


@dataclass(frozen=True, slots=True)
class Fed:
    """What ids come to: canonical taps in the order fed, or in half a sentence why none are."""

    taps: tuple[str, ...]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Convention:
    """How one engine counts, by the name that stands before its ids; ``releases`` are those it is known of."""

    name: str
    engine: str
    releases: tuple[str, ...]
    read: Callable[[Sequence[int], str, int, str], Fed]  # ids, architecture, layers, release


def sglang(ids: Sequence[int], architecture: str, layers: int, release: str = NEWEST) -> Fed:
    """In layer order and each once, as the class of the target captures them."""
    return by_rule(ids, capture_rule(architecture, release), layers)


def by_rule(ids: Sequence[int] | None, rule: CaptureRule | NoRule, layers: int) -> Fed:
    """What SGLang feeds under ``rule``, for stated ids or (None) for none."""
    if isinstance(rule, NoRule):
        return Fed((), str(rule))
    if ids is not None and not ids:
        return Fed((), "no layer ids at all are stated")
    if trouble := rule.trouble(ids, layers):
        return Fed((), trouble)
    return Fed(tuple(map(tap_name, rule.capture(ids, layers).fed)))


def vllm(ids: Sequence[int], architecture: str, layers: int, release: str = "") -> Fed:
    """R indices as they stand, in layer order, each once."""
    if not ids or not 0 <= min(ids) <= max(ids) <= layers:
        return Fed((), f"{VLLM} has taps 0 to {layers}, the ids are {list(ids)}")
    return Fed(tuple(map(tap_name, sorted(set(ids)))))


def specforge(ids: Sequence[int], architecture: str, layers: int, release: str = "") -> Fed:
    """Outputs of layers. Their order out of layer order is not told: its backends differ there."""
    if len(ids) != 3 or len(set(ids)) != 3 or min(ids) < 0 or max(ids) >= layers:
        possible = f"three different ids from 0 to {layers - 1}, the embedding has none"
        return Fed((), f"{SPECFORGE} takes {possible}; the ids are {list(ids)}")
    if any(low > high for low, high in pairwise(ids)):
        return Fed((), f"the ids {list(ids)} are out of layer order, and backends of SpecForge order them differently")
    return Fed(tuple(tap_name(index + 1) for index in ids))


def hf(ids: Sequence[int], architecture: str, layers: int, release: str = "") -> Fed:
    """Indices of ``hidden_states``."""
    if not ids or not -layers - 1 <= min(ids) <= max(ids) <= layers:
        return Fed((), f"hidden_states has {layers + 1} entries, 0 to {layers} or -{layers + 1} to -1")
    placed = [index % (layers + 1) for index in ids]
    return Fed(tuple(FINAL if index == layers else tap_name(index) for index in placed))


CONVENTIONS: Mapping[str, Convention] = {
    one.name: one
    for one in (
        Convention("sglang", "SGLang", RELEASES, sglang),
        Convention("vllm", "vLLM", ("0.32",), vllm),
        Convention("specforge", "SpecForge", ("0.2",), specforge),
        Convention("hf", "Transformers", (), hf),
    )
}
