"""What to type against the fault that a diagnosis named: the remedy of its kind (table.py), its braces filled in."""

from replay.engines.wiring import Wiring, dflash_ids, engine_ids
from replay.faults.change import NO_REMEDY
from replay.faults.table import fault_kind
from replay.targets.rules import CaptureRule, capture_rule
from replay.traces.taps import tap_index

# What is typed otherwise where the head drafts blocks, which no recording server feeds.
_OF_BLOCKS = {
    "wiring.aux-layer-id": "write dflash_config.target_layer_ids {ids} into the draft config, which feeds {wiring}",
    "wiring.aux-missing": "{missing}: see that every id of dflash_config.target_layer_ids, {ids}, fires{never}",
    "wiring.aux-capture-stage": "take taps from the residual stream behind the layer, before any norm",
    "wiring.concat-order": "fc reads taps in the order of dflash_config.target_layer_ids, {ids}: export the head again",
    "wiring.norm": "see that the engine applies hidden_norm behind fc and the norms of queries and keys",
}


def remedy(name: str, wiring: Wiring, *, architecture: str, layers: int, blocks: bool = False) -> str:
    """What to do against ``name``, KIND=VALUE or several joined by ``+``; empty where nothing is known.

    ``wiring`` is the one to serve, on a target of ``architecture`` with so many ``layers``; ``blocks`` whether its head
    drafts blocks. A remedy may hold
    ``{wiring}``; ``{value}``; ``{tensor}``, which one a value names; ``{ids}``, what to write for each engine that can
    feed the wiring; ``{missing}``, the taps of the slots that ``value`` names; ``{never}``, that one of these has no
    layer id that fires.
    """
    ids = str(list(dflash_ids(wiring).ids or ())) if blocks else _say_ids(wiring, architecture, layers)
    sentences = []
    for part in name.split("+"):
        kind, _, value = part.partition("=")
        template = (_OF_BLOCKS if blocks else {}).get(kind) or fault_kind(kind).remedy
        if template != NO_REMEDY:
            missing, never = _say_missing(value, wiring, architecture, layers)
            tensor = value.partition(":")[0]
            sentences.append(
                template.format(wiring=wiring, value=value, tensor=tensor, ids=ids, missing=missing, never=never)
            )
    return "; then ".join(sentences)


def _say_ids(wiring: Wiring, architecture: str, layers: int) -> str:
    said = [one for one in engine_ids(wiring, architecture=architecture, layers=layers) if one.ids is not None]
    ids = "; ".join(f"{one.engine}: eagle_aux_hidden_state_layer_ids {list(one.ids or ())}" for one in said)
    return f", or write for {ids}" if ids else ""


def _say_missing(value: str, wiring: Wiring, architecture: str, layers: int) -> tuple[str, str]:
    """The taps of a slot, given by its number, or of ``all``; and whether their layer ids can fire at all."""
    if value == "all":
        taps, said = wiring.taps, f"all taps are missing, {wiring}"
    elif value.isdecimal() and int(value) < len(wiring.taps):
        taps = (wiring.taps[int(value)],)
        said = f"tap {taps[0]} is missing from slot {value}"
    else:
        return "", ""
    rule = capture_rule(architecture)
    silent = isinstance(rule, CaptureRule) and not rule.last and any(tap_index(tap) == layers for tap in taps)
    return said, " (in SGLang the last layer's never does)" if silent else ""
