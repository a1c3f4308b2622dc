"""Rules on what feeds the head: layer ids, number and width of taps, norms around the fusion layer, feedback."""

import re
from collections.abc import Callable, Iterator, Sequence

from replay.check.facts import Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.head_tensors import TURN, transposed_fc
from replay.check.layer_ids import (
    INNER,
    NESTED,
    SGLANG_OLD,
    TOP,
    VLLM_1,
    VLLM_2,
    engine_in_force,
    indices_of,
    readings,
    served_rule,
    spell_taps,
    stated_ids,
    wiring_of,
)
from replay.engines.wiring import default_wiring, engine_ids
from replay.targets.rules import BEFORE_25454, NEWEST, CaptureRule, has_table, release_of

_AUX, _COUNT, _NORM, _RECYCLE = "wiring.aux-layer-id", "wiring.aux-missing", "wiring.norm", "wiring.recycle-norm"
_Found = Callable[[str, str, str, object, str], Finding]


def layer_ids(facts: Facts) -> Iterator[Finding]:
    """At most one finding: the first that explains why the head is fed other taps than it was trained on."""
    if not facts.draft.uses_aux:
        return
    draft, target = facts.draft, facts.target
    ids, all_readings = stated_ids(draft), readings(draft, target, facts.server)
    fed = all_readings[engine_in_force(facts.server)]
    default = indices_of(default_wiring(target.layers))
    trained = indices_of(facts.wiring) if facts.wiring else None
    intended = trained or _intended(facts)

    def found(severity: str, what: str, field: str, seen: object, expected: str) -> Finding:
        return Finding(_AUX, severity, what, draft.config.where, field, str(seen), expected, _fix(facts, intended))

    if facts.server.engine == "sglang" and not isinstance(served_rule(target, facts.server), CaptureRule):
        return  # no ids help: another rule says so
    if fed.taps is None:
        yield found(ERROR, f"{fed.engine} cannot feed the stated layer ids: {fed.failure}", fed.field or NESTED,
                    _seen(ids.top if fed.field == TOP else ids.nested),
                    f"ids that fire in a target of {target.layers} layers")  # fmt: skip
    elif trained is not None:
        if fed.taps != trained:
            yield found(ERROR, f"{fed.engine} feeds {fed}, the head was trained on {spell_taps(trained)}",
                        fed.field or NESTED, _seen(ids.nested if fed.field in (None, NESTED) else ids.top),
                        f"ids that feed {spell_taps(trained)}")  # fmt: skip
    elif ids.nested is None and intended is None and draft.eagle.values:
        yield found(WARNING, f"eagle_config is there and states no layer ids, so {fed.engine} feeds its default {fed}",
                    NESTED, "null" if draft.eagle.has("eagle_aux_hidden_state_layer_ids") else "absent",
                    "the ids of the training run, were they the default's or not")  # fmt: skip
    elif facts.server.engine == "eagle":
        if intended is not None and intended != default:
            yield found(ERROR, f"EAGLE feeds {fed} whatever the config says, its ids mean {spell_taps(intended)}",
                        NESTED, _seen(ids.nested or ids.top), spell_taps(default))  # fmt: skip
    elif facts.server.engine == "vllm":
        yield from _vllm(facts, found)
    elif ids.nested is None and intended is not None and intended != fed.taps:
        field, seen = (TOP, ids.top) if ids.top else (INNER, ids.inner)
        yield found(ERROR, f"SGLang does not read layer ids in this field and feeds its default {fed}, the ids mean "
                    f"{spell_taps(intended)}", field, list(seen or ()), f"ids in {NESTED}")  # fmt: skip
    elif ids.nested is not None:
        yield from _nested(facts, found)


def _nested(facts: Facts, found: _Found) -> Iterator[Finding]:
    """Ids where SGLang reads them."""
    target, rule = facts.target, served_rule(facts.target, facts.server)
    ids, all_readings = stated_ids(facts.draft), readings(facts.draft, facts.target, facts.server)
    nested = ids.nested or ()
    fed, default = all_readings[engine_in_force(facts.server)].taps or (), indices_of(default_wiring(target.layers))
    assert isinstance(rule, CaptureRule)  # of another class no ids are read
    by_first = rule.first_decides
    # the one list out of order that means something: another id than 1 first, so that none is added
    swapped = by_first and len(nested) > 1 and nested[1] == 1 and [1, nested[0], *nested[2:]] == sorted(nested)
    if rule.capture(nested, target.layers).wrapped:
        yield found(ERROR, f"an id below -1 marks a layer counted from the end: {rule.engine} feeds {spell_taps(fed)}",
                    NESTED, list(nested), "ids from -1 up")  # fmt: skip
    elif len(set(nested)) != len(nested):
        yield found(ERROR, f"ids stand twice: SGLang feeds each layer once, so {len(fed)} taps and not {len(nested)}",
                    NESTED, list(nested), "each id once")  # fmt: skip
    elif list(nested) != sorted(nested) and not swapped:
        yield found(ERROR, f"ids out of order: SGLang feeds {spell_taps(fed)} in layer order, a head trained in the "
                    "stated order reads each tap in another's place", NESTED, list(nested), "rising ids")  # fmt: skip
    elif nested == default and fed != default:
        yield found(WARNING, f"these ids are the default taps as vLLM and EAGLE count them; SGLang adds 1 for "
                    f"{rule.architecture} and feeds {spell_taps(fed)}", NESTED, list(nested),
                    str([index - 1 for index in default]))  # fmt: skip
    elif nested[0] == 0 and fed[0] == 1:
        yield found(WARNING, f"id 0 is the output of the first layer to SGLang, which feeds {spell_taps(fed)}; the "
                    "embedding, which other engines call 0, is -1 here", NESTED, list(nested),
                    "-1 for the embedding, or the wiring said with --wiring")  # fmt: skip
    elif ids.top is not None and tuple(sorted(ids.top)) != fed:
        yield found(WARNING, f"two lists of layer ids disagree: SGLang reads {list(nested)} here as {spell_taps(fed)}, "
                    f"vLLM reads {TOP} {list(ids.top)} as {spell_taps(sorted(ids.top))}", NESTED, list(nested),
                    "two lists that mean the same taps")  # fmt: skip
    elif _between(facts.server.version) and all_readings[SGLANG_OLD].taps != fed:
        yield found(WARNING, f"SGLang {facts.server.version} may read these ids in an older way: until {BEFORE_25454} "
                    f"they feed {all_readings[SGLANG_OLD]}, in {NEWEST} {spell_taps(fed)}", NESTED, list(nested),
                    f"ids that both read alike, or {NEWEST}")  # fmt: skip
    elif by_first and nested[0] not in (0, 1) and fed != default and not swapped:
        yield found(WARNING, f"SGLang takes these ids of {rule.architecture} verbatim, {spell_taps(fed)}; SpecForge "
                    f"and Model-Optimizer mean {spell_taps([index + 1 for index in nested])} by them", NESTED,
                    list(nested), "the wiring said with --wiring, to decide")  # fmt: skip


def _vllm(facts: Facts, found: _Found) -> Iterator[Finding]:
    ids, all_readings = stated_ids(facts.draft), readings(facts.draft, facts.target)
    one, two, default = all_readings[VLLM_1], all_readings[VLLM_2], indices_of(default_wiring(facts.target.layers))
    listed = ids.top or ids.nested or ids.inner
    if listed is None:
        return
    if list(listed) != sorted(set(listed)):
        yield found(ERROR, f"vLLM feeds {one}: in layer order, each once", one.field or TOP,
                    list(listed), "rising ids, each once")  # fmt: skip
    elif tuple(listed) == tuple(index - 1 for index in default) != default:
        yield found(WARNING, f"these ids are the default taps as SGLang and SpecForge count them; vLLM feeds {one}",
                    one.field or TOP, list(listed), str(list(default)))  # fmt: skip
    elif one.taps != two.taps:
        yield found(WARNING, f"vLLM's V1 runner feeds {one}, its V2 runner does not read this field and feeds {two}",
                    one.field or TOP, list(listed), f"ids in {TOP}")  # fmt: skip


def _intended(facts: Facts) -> tuple[int, ...] | None:
    """What ids in fields of the vLLM kind mean; None where they stand only in the field of two meanings."""
    ids = stated_ids(facts.draft)
    if ids.nested is not None and not facts.draft.speculators:
        return None
    verbatim = ids.top or ids.inner
    return tuple(sorted(set(verbatim))) if verbatim and 0 <= min(verbatim) <= max(verbatim) <= 1 << 16 else None


def _fix(facts: Facts, wanted: Sequence[int] | None) -> str:
    """Ids to type for the engine that serves."""
    if wanted is None or min(wanted) < 0:
        return (
            f"find the wiring the head was trained on, run replay check again with --wiring, and write "
            "the ids it names "
            f"as {NESTED}"
        )
    release = release_of(facts.server.version)
    engine = "vLLM 0.32" if facts.server.engine == "vllm" else f"SGLang {release}"
    field = TOP if facts.server.engine == "vllm" else NESTED
    named = facts.target.architecture or ""
    for one in engine_ids(wiring_of(wanted), architecture=named, layers=facts.target.layers, release=release):
        if one.engine == engine and one.ids is not None:
            note = f" ({one.note})" if one.note else ""
            folder, _, name = field.rpartition(".")
            return f'write "{name}": {list(one.ids)} in {folder or "config.json"}{note}'
    if facts.server.engine == "eagle":
        return "EAGLE's taps are in its code (eagle/model/); serve the head with SGLang or vLLM"
    return "no ids make this engine feed these taps; serve with replay serve --wiring " + str(wiring_of(wanted))


def _seen(ids: tuple[int, ...] | None) -> str:
    return "absent" if ids is None else str(list(ids))


def _between(version: str | None) -> bool:
    """Whether a stated version is older than the newest table and has none of its own."""
    if version is None or has_table(version):
        return False
    parts, newest = (tuple(int(part) for part in re.findall(r"\d+", text, re.ASCII)[:3]) for text in (version, NEWEST))
    return bool(parts) and parts < newest


def taps(facts: Facts) -> Iterator[Finding]:
    """fc's input width against what is fed: taps x the target's width. At most one finding."""
    draft, target = facts.draft, facts.target
    fc = draft.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or fc.dtype not in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        return  # packed, so that its shape says nothing of its inputs
    inputs, width = fc.shape[1], target.hidden_size
    hidden = draft.config.count("hidden_size") or 0
    stated_width = draft.config.count("target_hidden_size")
    ids = stated_ids(draft).nested or (stated_ids(draft).top if draft.mla else None)
    stated_taps = draft.config.count("num_aux_hidden_states") or (len(ids) if ids else 3)
    reading = engine_in_force(facts.server) if facts.server.engine == "sglang" else VLLM_1
    fed = readings(draft, target, facts.server)[reading].taps

    def found(
        what: str, file: str, field: str, seen: object, expected: object, fix: str, fault: str = _COUNT
    ) -> Finding:
        return Finding(fault, ERROR, what, file, field, str(seen), str(expected), fix)

    config, weights = draft.config.where, draft.weights.file
    if transposed_fc(facts):
        yield found(f"fc.weight is transposed: it is [{fc.shape[0]}, {hidden}]", weights, "fc.weight", list(fc.shape),
                    list(fc.shape[::-1]), TURN, "weights.layout")  # fmt: skip
    elif draft.stated.has("target_hidden_size") and stated_width is None and not draft.mla:
        return  # the rule on types of fields says it
    elif not facts.draft.uses_aux:
        if inputs != width or inputs == hidden:
            yield found(f"use_aux_hidden_state is false, so the final state of width {width} is fed"
                        + (" and SGLang skips fc" if width == hidden else "") + f"; fc takes {inputs}", config,
                        "eagle_config.use_aux_hidden_state", "false", "true",
                        'write "use_aux_hidden_state": true in eagle_config')  # fmt: skip
    elif stated_width is None and hidden != width:
        yield found(f"the head is {hidden} wide, the target {width}, and the config does not say so", config,
                    "target_hidden_size", "absent", width, f'write "target_hidden_size": {width}',
                    "config.field-drop")  # fmt: skip
    elif stated_width is not None and stated_width != width:
        yield found(f"the config says the target is {stated_width} wide, it is {width}", config, "target_hidden_size",
                    stated_width, width, f'write "target_hidden_size": {width}'
                    if inputs % width == 0 else "take a head that was made for this target")  # fmt: skip
    elif inputs % width:
        yield found(f"fc takes {inputs} features, no whole number of taps of width {width}", weights, "fc.weight",
                    list(fc.shape), f"a multiple of {width} inputs",
                    "take a head that was made for this target")  # fmt: skip
    elif fed is not None and len(fed) != inputs // width and len(ids or ()) != inputs // width:  # else ids stand twice
        yield found(f"{len(fed)} taps are fed, fc takes {inputs // width} of width {width}", config,
                    NESTED if ids else "eagle_config", _seen(ids), f"{inputs // width} layer ids",
                    f"write the {inputs // width} layer ids that the head was trained on as {NESTED}")  # fmt: skip
    elif stated_taps * width != inputs:
        # models/kimi_k25_eagle3.py counts the ids, speculative/eagle_utils.py lays out graphs by this field
        makes = "lays out the buffers of SGLang's graphs for" if draft.mla and ids else "makes fc take"
        yield found(f"the config {makes} {stated_taps} taps, it takes {inputs // width}", config,
                    "num_aux_hidden_states", draft.config.values.get("num_aux_hidden_states", "absent"),
                    inputs // width, f'write "num_aux_hidden_states": {inputs // width}')  # fmt: skip
    elif inputs == hidden and facts.server.engine != "vllm":
        yield found("one tap as wide as the head: SGLang and EAGLE go by the width and skip fc", weights, "fc.weight",
                    list(fc.shape), "more than one tap",
                    "serve it with vLLM, or train a head on several taps")  # fmt: skip


def norms(facts: Facts) -> Iterator[Finding]:
    """Norms before the fusion layer and inside the first layer: flags against tensors, and what an engine lacks."""
    yield from _norm_before_fc(facts)
    yield from _norms_of_taps(facts)
    yield from _norms_of_training(facts)


def _of_norm(
    facts: Facts, what: str, field: str, seen: object, expected: object, fix: str, severity: str = ERROR
) -> Finding:
    return Finding(_NORM, severity, what, facts.draft.config.where, field, _json(seen), _json(expected), fix)


def _norm_before_fc(facts: Facts) -> Iterator[Finding]:
    draft = facts.draft
    nested, flat = draft.eagle.flag("norm_before_fc"), draft.config.flag("norm_before_fc")
    in_force = bool(flat) if facts.server.engine == "vllm" or nested is None else nested
    has = "input_norm.weight" in draft.tensors
    field = "eagle_config.norm_before_fc" if nested is not None else "norm_before_fc"
    stated = nested if nested is not None else flat
    if draft.mla and facts.server.engine == "sglang":
        if has or in_force:
            effect = " and drops input_norm.weight" if has else ", which the config says the head was trained with"
            yield _of_norm(facts, f"SGLang's class of MLA heads has no norm before fc{effect}", field, stated, False,
                           "train the head without norm_before_fc, or with fc_norm",
                           ERROR if has else WARNING)  # fmt: skip
    elif has != in_force:
        yield _of_norm(facts, "the head has input_norm.weight, which is dropped in silence" if has else
                       "norm_before_fc is on and there is no input_norm.weight: a norm the head never had is applied",
                       field, stated, has, f'write "norm_before_fc": {_json(has)}'
                       + ("" if nested is None else " in eagle_config"))  # fmt: skip


def _norms_of_taps(facts: Facts) -> Iterator[Finding]:
    top, tensors = facts.draft.config, facts.draft.tensors
    count = sum(name.startswith("fc_norm.") for name in tensors)
    on = bool(top.flag("fc_norm") or top.flag("use_aux_norm"))
    fc = tensors.get("fc.weight")
    wanted = fc.shape[1] // facts.target.hidden_size if fc is not None and len(fc.shape) == 2 else count
    if on and count and count != wanted:
        yield _of_norm(facts, f"the head has {count} fc_norm tensors and fc takes {wanted} taps", "fc_norm", count,
                       wanted, "export the head again with a norm for each tap")  # fmt: skip
    elif on != bool(count):
        hidden_in = " (eagle_config.fc_norm is read by nobody)" if facts.draft.eagle.flag("fc_norm") else ""
        yield _of_norm(facts, f"the head has {count} fc_norm tensors, which are dropped in silence{hidden_in}" if count
                       else "fc_norm is on and there is no fc_norm tensor: norms the head never had are applied",
                       "fc_norm", on, bool(count), f'write "fc_norm": {_json(bool(count))}')  # fmt: skip


def _norms_of_training(facts: Facts) -> Iterator[Finding]:
    """What the head was trained with and no engine, or not this one, computes."""
    top, eagle = facts.draft.config, facts.draft.eagle
    residual = top.flag("norm_before_residual") or eagle.flag("norm_before_residual")
    if residual and facts.server.engine != "vllm":
        yield _of_norm(facts, "the head was trained with the residual taken after hidden_norm; SGLang and EAGLE take "
                       "it before", "norm_before_residual", True, False, "serve it with vLLM, or train the head with "
                       "norm_before_residual false", WARNING)  # fmt: skip
    for flag, usual in (("use_input_layernorm_in_first_layer", True), ("use_last_layernorm", True),
                        ("use_mtp_layernorm", False)):  # fmt: skip
        if (value := eagle.flag(flag)) is not None and value != usual:
            yield _of_norm(facts, f"Model-Optimizer trained the head with {flag} {_json(value)}; engines compute it as "
                           f"{_json(usual)}", f"eagle_config.{flag}", value, usual,
                           f"train the head with {flag} {_json(usual)}")  # fmt: skip


def feedback(facts: Facts) -> Iterator[Finding]:
    """norm_output: whether the normed state is fed to the next step."""
    draft = facts.draft
    top, nested = draft.config.flag("norm_output"), draft.eagle.flag("norm_output")
    if nested is not None and nested != bool(top):
        yield Finding(_RECYCLE, ERROR, f"eagle_config.norm_output is {_json(nested)} and read by nobody; the state fed "
                      f"to the next step is taken {'after' if top else 'before'} the norm", draft.config.where,
                      "eagle_config.norm_output", _json(nested), _json(bool(top)),
                      f'write "norm_output": {_json(nested)} at the top level')  # fmt: skip
    elif top and facts.server.engine == "eagle":
        yield Finding(_RECYCLE, ERROR, "norm_output is true; EAGLE always feeds back the state before the norm",
                      draft.config.where, "norm_output", "true", "false",
                      "serve the head with SGLang or vLLM")  # fmt: skip


def _json(value: object) -> str:
    """As it stands in a config.json."""
    words = {"True": "true", "False": "false", "None": "absent"}
    return words.get(str(value), str(value))
