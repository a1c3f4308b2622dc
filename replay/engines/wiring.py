"""Which taps feed the head's fusion layer, and how each engine's config says so.

A wiring is ordered: the head's ``fc`` multiplies the concatenation of the taps in this order. An engine knows
layer ids instead, under a convention of its own; this module is the only place that translates.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replay.engines.conventions import CONVENTIONS, SPECFORGE, VLLM, Convention, Fed, by_rule
from replay.errors import UsageError, WiringError
from replay.printable import shorten
from replay.targets.rules import NEWEST, CaptureRule, NoRule, capture_rule
from replay.traces.given import check_given, check_list
from replay.traces.taps import FINAL, parse_taps, tap_index, tap_name

# Targets that vLLM 0.32 runs by model_executor/models/deepseek_v2.py, which adds the residual of layer 0 before there
# is one: with id 0 its first forward ends in a TypeError.
VLLM_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
VLLM_CRASH = "with id 0, the embedding, its DeepSeek crashes at the first forward"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Ordered canonical tap names, e.g. ``("embed", "3", "16")``."""

    taps: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises UsageError for what is no tuple of texts: a bare text would be read letter by letter."""
        wanted = 'a tuple of taps was expected; pass ("embed", "3") or type replay.parse_wiring("embed,3")'
        check_given("taps", self.taps, tuple, wanted)
        check_list("taps", self.taps, str, wanted)

    def __str__(self) -> str:
        return ",".join(self.taps)


@dataclass(frozen=True, slots=True)
class EngineIds:
    """What to write as layer ids so that one engine feeds a wiring; ``ids`` is None where ``note`` says why not."""

    engine: str
    ids: tuple[int, ...] | None
    note: str


CONFIG = "config"  # typed for what the head states
_MARKED = re.compile(r"([A-Za-z]\w*)(?:@([^:]*))?:(.*)", re.ASCII | re.DOTALL)
_NUMBERS = re.compile(r"\s*[+-]?\d{1,9}\s*(?:,\s*[+-]?\d{1,9}\s*)*", re.ASCII)
_PLACES = ("in", "out")  # of single taps


def parse_wiring(text: str, *, layers: int | None = None, architecture: str | None = None) -> Wiring:
    """Parse taps, ``embed,3,31`` (also ``out:30``, ``in:31``, ``final``), or an engine's layer ids.

    ``sglang:-1,2,15``, ``vllm:0,3,16``, ``specforge:1,14,26`` and ``hf:0,3,16`` are ids as that engine counts them
    (conventions.py), ``sglang@0.5.12:...`` as a release of it does. They need the target's ``layers``, and SGLang's its
    ``architecture`` too. Raises UsageError for a tap or ids that cannot be, WiringError for ids that feed nothing.

    >>> str(replay.parse_wiring("sglang:-1,2,15", layers=30, architecture="LlamaForCausalLM"))
    'embed,3,16'
    """
    if isinstance(text, str) and text.strip() == CONFIG:
        raise UsageError(f"{CONFIG} stands for what a head states; leave the wiring out here, or type taps")
    marked = _MARKED.fullmatch(text.strip()) if isinstance(text, str) else None
    if marked and marked[1] not in _PLACES:
        return _of_engine(text.strip(), _convention(marked[1], marked[2]), marked, layers, architecture)
    if isinstance(text, str) and _NUMBERS.fullmatch(text) and "-" in text:
        raise UsageError(_ids_were_meant(text, layers, architecture))
    return Wiring(parse_taps(text, layers=layers))


def counts_layers(text: str) -> bool:
    """Whether what was typed is no list of taps, but layer ids or what a head states."""
    marked = _MARKED.fullmatch(text.strip())
    ids = _NUMBERS.fullmatch(text) and "-" in text
    return text.strip() == CONFIG or bool(ids) or bool(marked and marked[1] not in _PLACES)


def _convention(name: str, release: str | None) -> Convention:
    found = CONVENTIONS.get(name)
    if found is None:
        raise UsageError(
            f"{shorten(name, 60)!r} is no engine whose layer ids are known, possible are {', '.join(CONVENTIONS)}; "
            "type for example sglang:1,14,26, or taps as embed,3,31"
        )
    if release is not None and release not in found.releases:
        possible = ", ".join(f"{name}@{one}" for one in found.releases) or "no version"
        raise UsageError(
            f"how {found.engine} {shorten(release, 60)!r} counts is not known, possible are {possible}; type one of "
            f"them, {name}: alone, or taps as embed,3,31"
        )
    return found


def _of_engine(
    text: str, convention: Convention, marked: re.Match[str], layers: int | None, architecture: str | None
) -> Wiring:
    if not _NUMBERS.fullmatch(marked[3]):
        raise UsageError(
            f"{shorten(text, 60)!r} has no layer ids after the colon; type whole numbers, for example "
            f"{convention.name}:1,14,26"
        )
    if layers is None or (architecture is None and convention.name == "sglang"):
        raise UsageError(
            f"{shorten(text, 60)!r} is read by the target's number of layers and class, which are not known here; give "
            "layers and architecture, or type taps as embed,3,31"
        )
    fed = _read(convention, marked[3], layers, architecture, marked[2])
    if fed.trouble:
        raise WiringError(f"{shorten(text, 60)} feeds nothing: {fed.trouble}; type other ids, or taps as embed,3,31")
    return Wiring(fed.taps)


def _read(convention: Convention, ids: str, layers: int, architecture: str | None, release: str | None = None) -> Fed:
    numbers = [int(number) for number in ids.split(",")]
    return convention.read(numbers, architecture or "", layers, release or NEWEST)


def _ids_were_meant(text: str, layers: int | None, architecture: str | None) -> str:
    """What a plain -1 probably stands for, in one sentence."""
    plain = re.sub(r"\s", "", text)
    said = f"{plain!r} has numbers below 0, and no tap has: the embedding is embed, and layer ids are typed with their"
    tails = []
    for name in ("sglang", "hf") if layers is not None else ():
        if name == "sglang" and architecture is None:
            continue
        fed = _read(CONVENTIONS[name], plain, layers or 0, architecture)
        if not fed.trouble:
            tails.append(f"{name}:{plain} ({','.join(fed.taps)} of this target)")
    return f"{said} engine; type {' or '.join(tails) or f'sglang:{plain}, where -1 is the embedding, or embed,3,31'}"


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
    fed = by_rule(ids, rule, layers)
    if fed.trouble:
        said = "no layer ids" if ids is None else f"layer ids {list(ids)}"
        asked = sorted(set(rule.capture(ids, layers).asked))
        raise WiringError(
            f"the draft config states {said}, which {rule.engine} reads as R{asked} "
            f"of {architecture}: {fed.trouble}; say the wiring with --wiring"
        )
    return Wiring(fed.taps)


def engine_ids(wiring: Wiring, *, architecture: str, layers: int, release: str = NEWEST) -> tuple[EngineIds, ...]:
    """The layer ids that make each engine feed ``wiring`` from a target of this class, or why none do.

    ``release`` is that of SGLang.
    """
    return tuple(_each_engine(wiring, capture_rule(architecture, release), layers))


def _each_engine(wiring: Wiring, rule: CaptureRule | NoRule, layers: int) -> Iterator[EngineIds]:
    if FINAL in wiring.taps:
        for engine in (rule.engine, VLLM, SPECFORGE):
            yield EngineIds(engine, None, "no id stands for the stream after the final norm")
        return
    indices = [tap_index(name) or 0 for name in wiring.taps]
    rising = all(low < high for low, high in pairwise(indices))
    order = "" if rising else "this engine feeds taps in layer order, each once"
    yield _sglang_ids(indices, order, rule, layers)
    crash = VLLM_CRASH if 0 in indices and rule.architecture in VLLM_DEEPSEEK else ""
    yield EngineIds(VLLM, None if order or crash else tuple(indices), order or crash)
    if 0 in indices:
        yield EngineIds(SPECFORGE, None, "its ids are outputs of layers, so the embedding has none")
    elif len(indices) != 3:
        yield EngineIds(SPECFORGE, None, "its fc takes three taps")
    else:
        yield EngineIds(SPECFORGE, tuple(index - 1 for index in indices), "")


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


def dflash_wiring(ids: Sequence[int], *, layers: int) -> Wiring:
    """The wiring of a DFlash config's ``target_layer_ids``: id k is the output of layer k, R[k+1].

    So say dflash 0.1.0 (``extract_context_feature``) and SGLang 0.5.23 (``set_dflash_layers_to_capture``, as in
    models/qwen3.py). Raises WiringError where the two would feed different taps: SGLang records in layer order and
    each layer once, and nothing of the last layer, behind which Transformers has the final norm already.
    """
    if not all(low < high for low, high in pairwise(ids)):
        raise WiringError(
            f"target_layer_ids {list(ids)} do not rise: SGLang feeds them in layer order and each once, the trainer in "
            "this order; say the wiring with --wiring"
        )
    if ids[-1] >= layers - 1:
        raise WiringError(
            f"target_layer_ids {list(ids)} reach layer {ids[-1]}, and of a target of {layers} layers the outputs of "
            f"layers 0 to {layers - 2} can be fed; say the wiring with --wiring"
        )
    return Wiring(tuple(tap_name(index + 1) for index in ids))


def dflash_ids(wiring: Wiring) -> EngineIds:
    """The ``target_layer_ids`` of a DFlash config that feed ``wiring``, or why none do."""
    engine, indices = "DFlash 0.1, SGLang 0.5.23", [tap_index(name) for name in wiring.taps]
    known = [index for index in indices if index]
    if len(known) < len(indices):
        return EngineIds(engine, None, "its ids are outputs of layers, so the embedding and the final norm have none")
    if not all(low < high for low, high in pairwise(known)):
        return EngineIds(engine, None, "SGLang feeds taps in layer order, each once")
    return EngineIds(engine, tuple(index - 1 for index in known), "")


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
