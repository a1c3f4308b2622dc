"""Which taps each engine and version feeds for the layer ids that a draft's config states, and where it looks for them.

One list of ids means different taps to different engines, and one engine's field for them is another's blind spot.
Sources: SGLang 0.5.23 model_executor/model_runner_components/spec_aux_hidden_state.py, and the rule of each class
(targets/rules.py); vLLM 0.32 v1/worker/gpu_model_runner.py and v1/worker/gpu/spec_decode/eagle/eagle3_utils.py;
SpecForge 0.2; SafeAILab/EAGLE eagle/model/.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replay.check.facts import Draft, Target
from replay.check.server import Server
from replay.engines.conventions import SPECFORGE, Fed, by_rule, specforge, vllm
from replay.engines.wiring import VLLM_CRASH, VLLM_DEEPSEEK, Wiring, default_wiring
from replay.targets.rules import BEFORE_25454, NEWEST, CaptureRule, NoRule, capture_rule, release_of
from replay.traces.taps import tap_index, tap_name

SGLANG, SGLANG_OLD = f"SGLang {NEWEST}", "SGLang before #25454"
VLLM_1, VLLM_2 = "vLLM 0.32 (V1 runner)", "vLLM 0.32 (V2 runner)"
EAGLE = "EAGLE"
NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
TOP = "eagle_aux_hidden_state_layer_ids"
INNER = "eagle_config.layer_ids"


@dataclass(frozen=True, slots=True)
class StatedIds:
    """Layer ids in each of the fields where somebody writes or reads them."""

    nested: tuple[int, ...] | None
    top: tuple[int, ...] | None
    inner: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What one engine feeds: R indices in the order fed, None where it fails; ``field`` it read, None: its default."""

    engine: str
    taps: tuple[int, ...] | None
    field: str | None
    failure: str = ""

    def __str__(self) -> str:
        return self.failure if self.taps is None else spell_taps(self.taps)


def stated_ids(draft: Draft) -> StatedIds:
    """Raises CheckpointError where one is no list of whole numbers."""
    return StatedIds(
        draft.eagle.ids("eagle_aux_hidden_state_layer_ids"),
        draft.config.ids("eagle_aux_hidden_state_layer_ids"),
        draft.eagle.ids("layer_ids"),
    )


def served_rule(target: Target, server: Server, release: str | None = None) -> CaptureRule | NoRule | None:
    """How SGLang reads ids of this target, in ``release``, else in the server's; None where no class is named."""
    of = release or release_of(server.version)
    if target.architecture is None:
        return None
    if server.environment.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return NoRule(target.architecture, of, known=False, registered=True)
    instead = {"transformers": "TransformersForCausalLM", "mindspore": "MindSporeForCausalLM"}
    return capture_rule(instead.get(str(server.arguments.get("model_impl")).lower(), target.architecture), of)


def engine_in_force(server: Server) -> str:
    """The reading that counts for this server, by its name in ``readings``."""
    served = f"SGLang {release_of(server.version)}"
    return {"sglang": served, "vllm": VLLM_1, "eagle": EAGLE}[server.engine]


def readings(draft: Draft, target: Target, server: Server | None = None) -> dict[str, Reading]:
    """What every engine feeds this head from this target, by engine."""
    server = server or Server()
    ids, layers = stated_ids(draft), target.layers
    default = indices_of(default_wiring(layers))
    crashes = target.architecture in VLLM_DEEPSEEK
    verbatim = _verbatim(
        VLLM_1, layers, (ids.top, TOP), (ids.nested, NESTED), (ids.inner, INNER), default=default, crashes=crashes
    )
    releases = dict.fromkeys((NEWEST, release_of(server.version)))
    listed = [
        *(_sglang(f"SGLang {one}", ids.nested, served_rule(target, server, one), layers) for one in releases),
        _sglang(SGLANG_OLD, ids.nested, served_rule(target, server, BEFORE_25454), layers),
        verbatim,
        _verbatim(VLLM_2, layers, (ids.top, TOP), (ids.inner, INNER), default=default, crashes=crashes),
        Reading(EAGLE, default, None),
        _specforge(ids.nested, layers, default),
    ]  # fmt: skip
    return {reading.engine: reading for reading in listed}


def indices_of(wiring: Wiring) -> tuple[int, ...]:
    """R indices of a wiring; -1 stands for ``final``, which no ids give."""
    return tuple(-1 if (index := tap_index(name)) is None else index for name in wiring.taps)


def spell_taps(indices: Sequence[int]) -> str:
    """``R[2,15,27]``."""
    return f"R[{','.join(map(str, indices))}]"


def wiring_of(indices: Sequence[int]) -> Wiring:
    """The wiring of R indices."""
    return Wiring(tuple(tap_name(index) for index in indices))


def _sglang(engine: str, ids: tuple[int, ...] | None, rule: CaptureRule | NoRule | None, layers: int) -> Reading:
    field = None if ids is None else NESTED
    if rule is None:
        return Reading(engine, None, field, "the target's config names no architecture")
    return _reading(engine, by_rule(ids, rule, layers), field)


def _verbatim(
    engine: str, layers: int, *fields: tuple[tuple[int, ...] | None, str], default: tuple[int, ...], crashes: bool
) -> Reading:
    """vLLM: the first field that states ids; ``crashes``: id 0 cannot be fed."""
    for ids, field in fields:
        if ids and crashes and 0 in ids:
            return Reading(engine, None, field, VLLM_CRASH)
        if ids:
            return _reading(engine, vllm(ids, "", layers), field)
    return Reading(engine, default, None)


def _specforge(ids: tuple[int, ...] | None, layers: int, default: tuple[int, ...]) -> Reading:
    return _reading(SPECFORGE, specforge(ids, "", layers), NESTED) if ids else Reading(SPECFORGE, default, None)


def _reading(engine: str, fed: Fed, field: str | None) -> Reading:
    return Reading(engine, None if fed.trouble else indices_of(Wiring(fed.taps)), field, fed.trouble)
