"""Rules on positions: rotary embedding, attention window and maximum length."""

from collections.abc import Iterator, Mapping
from typing import Any

from replay.check.engine_config import DEFAULT_THETA, Rope, context_of
from replay.check.facts import Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.override import rewrites_rope
from replay.traces.fields import show

_PARAMS, _GEOMETRY, _WINDOW, _LENGTH = (
    "position.rope-params", "position.rope-geometry", "attn.window", "position.max-len"
)  # fmt: skip
# What Transformers stops without (modeling_rope_utils.py ``_validate_*_rope_parameters``, 5.19 and 5.24); it fills in
# the original length by itself.
_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_SCALED = (*_NEEDS, "deepseek_yarn")
# SGLang 0.5.23 layers/rotary_embedding/factory.py ``get_rope``; the class of MLA heads makes deepseek_yarn of any.
_BUILT = ("default", "proportional", *_SCALED)
_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor",
            _ORIGINAL)  # fmt: skip
_COMPARED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
OVERRIDE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def _scaling_of(rope: Rope) -> str:
    """``default`` for all that does not scale."""
    return rope.kind if rope.kind in _SCALED else "default"


def _found(facts: Facts, severity: str, what: str, field: str, seen: object, expected: object, fix: str) -> Finding:
    return Finding(_PARAMS, severity, what, facts.draft.stated.where, field, str(seen), str(expected), fix)


def rope(facts: Facts) -> Iterator[Finding]:
    """Theta and scaling: what the engine takes from the config, against the target's."""
    if rewrites_rope(facts.draft.original, facts.draft.stated.values):
        return  # rules_server.override says so
    broken = [*_unbuilt(facts), *_target_unbuilt(facts)]
    yield from broken or list(_class_own(facts)) or (*_theta(facts), *_scaling(facts))


def _unbuilt(facts: Facts) -> Iterator[Finding]:
    """Parameters that the engine stops at. At most one finding."""
    draft, own = facts.draft, facts.draft.rope
    field = own.values.where.rpartition(": ")[2]
    again = "copy the whole rope scaling from the config the head was trained with"
    kind = draft.stated.values.get("model_type")
    if own.by_layer and facts.server.engine == "sglang":
        yield _found(facts, ERROR, "SGLang stops: the config has rope parameters for each kind of layer, as the class "
                     f"of {kind} makes them, and a head has one kind", "model_type", kind, "llama",
                     'write "model_type": "llama"')  # fmt: skip
    elif own.theta is None or own.theta <= 0:
        seen = "null" if own.theta is None else f"{own.theta:g}"
        yield _found(facts, ERROR, f"rope_theta is {seen}, and no rotation can be made of it", "rope_theta", seen,
                     "a positive number", 'write the "rope_theta" that the head was trained with')  # fmt: skip
    elif "mrope_section" in own.values.values:
        return  # models/llama_eagle3.py takes these for unscaled whatever they say
    elif lacks := [key for key in _NEEDS.get(own.kind, ()) if own.values.values.get(key) is None]:
        yield _found(facts, ERROR, f"rope scaling of type {own.kind} lacks {', '.join(lacks)}", field, "absent",
                     lacks[0], again)  # fmt: skip
    elif facts.server.engine == "sglang" and (odd := _unfit(facts)) is not None:
        what, key, expected = odd
        yield _found(facts, ERROR, f"SGLang stops: {what}", f"{field}.{key}",
                     show(own.values.values.get(key)), expected, again)  # fmt: skip


def _unfit(facts: Facts) -> tuple[str, str, str] | None:
    """What of the parameters SGLang cannot build, the field, and what it takes. Seen in SGLang with each of them."""
    draft, own = facts.draft, facts.draft.rope
    values = own.values.values
    for key in _NUMBERS:
        own.values.number(key)  # refuses words
    if "rope_type" in values and values["rope_type"] is None:
        return "rope_type is null", "rope_type", "default, or a type of scaling"
    if _ORIGINAL in values and values[_ORIGINAL] is None and own.kind in ("llama3", "yarn", "longrope"):
        return f"{_ORIGINAL} is null", _ORIGINAL, "a length, or no such field"
    if draft.mla:
        return None  # its class makes deepseek_yarn of any type
    if own.kind not in _BUILT:
        return f"it knows no rope scaling of type {own.kind}", "rope_type", ", ".join(_BUILT)
    if own.kind == "linear" and type(values["factor"]) is int:  # LinearScalingRotaryEmbedding takes it for a list
        return "a linear factor must have a decimal point", "factor", f"{values['factor']}.0"
    config = draft.config
    width = config.count("head_dim") or (config.count("hidden_size") or 0) // (config.count("num_attention_heads") or 1)
    for key in _NEEDS["longrope"] if own.kind == "longrope" else ():
        if not isinstance(values[key], list) or len(values[key]) != width // 2:
            return f"{key} is no list of {width // 2} numbers, half of head_dim", key, f"{width // 2} numbers"
    return None


def _target_unbuilt(facts: Facts) -> Iterator[Finding]:
    """Parameters of the target that its class stops at. At most one finding."""
    target, own = facts.target, facts.target.rope
    lacks = [key for key in _NEEDS.get(own.kind, ()) if own.values.values.get(key) is None]
    if target.cls is not None and target.cls.types and lacks and facts.server.engine == "sglang":
        yield Finding(_PARAMS, ERROR, f"SGLang stops: the target's rope scaling of type {own.kind} lacks "
                      f"{', '.join(lacks)}", target.stated.where, own.values.where.rpartition(": ")[2], "absent",
                      lacks[0], "copy config.json from where the target was published")  # fmt: skip


def _class_own(facts: Facts) -> Iterator[Finding]:
    """What the class of the head's model type rotates by, whatever else the config says. At most one finding."""
    stated, own = facts.draft.stated, facts.draft.rope
    theta = stated.number("rope_theta")
    scaled = _scaling_of(own) != "default"
    if own.implicit and (scaled or (theta is not None and theta != own.theta)):
        by, kind = f"{own.kind} scaling and " if scaled else "", stated.values.get("model_type")
        yield _found(facts, WARNING, f"the class of {kind} rotates by {by}theta {own.theta:g} where the config has no "
                     "rope_parameters", "rope_parameters", "absent", "those of the training "
                     "run", 'write "model_type": "llama", or the rope_parameters that the head was trained '
                     "with")  # fmt: skip


def _theta(facts: Facts) -> Iterator[Finding]:
    """At most one finding."""
    stated, own = facts.draft.stated, facts.draft.rope
    theta, wanted = own.theta or DEFAULT_THETA, facts.target.rope.theta or DEFAULT_THETA
    outer, parameters = stated.number("rope_theta"), stated.inner("rope_parameters").number("rope_theta")
    both = sorted({one for one in (outer, parameters) if one is not None} - {theta})
    same = _scaling_of(own) == _scaling_of(facts.target.rope) != "default"
    if both:
        yield _found(facts, ERROR, f"rope_theta is stated twice, {both[0]:g} and {theta:g}; engines take {theta:g}"
                     if own.stated else f"rope_theta {both[0]:g} stands in rope_parameters, and rope_scaling is there "
                     f"too: engines read the latter alone and take {theta:g}", "rope_parameters", f"{theta:g}",
                     f"{both[0]:g}", "keep the one that the head was trained with, beside rope_type in "
                     "rope_parameters")  # fmt: skip
    elif not own.stated and theta == DEFAULT_THETA != wanted:
        yield _found(facts, WARNING, f"the config states no rope theta, so engines take 10000; the target's is "
                     f"{wanted:g}", "rope_theta", "absent", f"{wanted:g}, or 10000 stated",
                     f'write "rope_theta": {wanted:g}, or 10000 where the head was trained with that')  # fmt: skip
    elif theta != wanted and (theta != DEFAULT_THETA or same):
        yield _found(facts, WARNING, f"rope theta is {theta:g}, neither the target's {wanted:g} nor the 10000 that "
                     "trainers fall to", "rope_theta", f"{theta:g}", f"{wanted:g} or 10000",
                     f'write "rope_theta": {wanted:g}, or 10000; replay the head with each')  # fmt: skip


def _scaling(facts: Facts) -> Iterator[Finding]:
    """At most one finding. Of a target whose layers differ nothing is wanted of a head, which has one kind."""
    own, other = facts.draft.rope, facts.target.rope
    kind, wanted = _scaling_of(own), _scaling_of(other)
    theta, target_theta = own.theta or DEFAULT_THETA, other.theta or DEFAULT_THETA
    factor = own.values.number("factor")
    if kind == "default" and factor is not None and factor != 1:
        yield _found(facts, WARNING, f"the rope scaling states the factor {factor:g} and no type that scales, so "
                     "nothing is scaled", "rope_scaling", own.kind, wanted if wanted != "default" else "linear",
                     "write the rope_type that the head was trained with, or remove the scaling")  # fmt: skip
    elif (
        kind != wanted
        and not other.by_layer
        and (kind != "default" or (theta == target_theta and target_theta != DEFAULT_THETA))
    ):
        yield _found(facts, WARNING, f"rope scaling is {kind}, the target's is {wanted}, with "
                     + ("the same theta" if theta == target_theta else f"theta {theta:g}"), "rope_scaling", kind,
                     wanted, "copy the target's rope scaling where the head was trained with it")  # fmt: skip
    elif kind == wanted != "default":
        for key in _COMPARED:
            mine, theirs = own.values.number(key), other.values.number(key)
            if mine != theirs and theirs is not None:
                yield _found(facts, WARNING, f"rope scaling's {key} is {mine}, the target's {theirs}",
                             f"rope_scaling.{key}", mine, theirs,
                             "copy the target's rope scaling where the head was trained with it")  # fmt: skip
                return


def undecided_theta(facts: Facts) -> bool:
    """Whether the head states the target's theta, and could as well have been trained at the 10000 of its trainer."""
    theta = facts.draft.rope.theta
    return theta == facts.target.rope.theta != DEFAULT_THETA and theta is not None and not facts.draft.mla


def rope_geometry(facts: Facts) -> Iterator[Finding]:
    """Which features of an attention head are rotated, and in which pairs.

    SGLang 0.5.23 models/llama.py reads partial_rotary_factor at the top level alone, and Transformers 5.19, which it
    asks for, leaves it there. Of other engines that is not claimed: either place counts.
    """
    draft, config = facts.draft, facts.draft.config
    heads, hidden = config.count("num_attention_heads") or 1, config.count("hidden_size") or 0
    head_dim = config.count("head_dim") or hidden // heads
    partial = draft.stated.number("partial_rotary_factor")
    if partial is None and facts.server.engine != "sglang":
        partial = draft.rope.values.number("partial_rotary_factor")

    def found(severity: str, what: str, field: str, seen: object, expected: object, fix: str) -> Finding:
        return Finding(_GEOMETRY, severity, what, config.where, field, str(seen), str(expected), fix)

    if draft.mla:
        return
    rotated = int(head_dim * (1.0 if partial is None else partial))
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        yield found(ERROR, f"{rotated} of {head_dim} features of an attention head would be rotated",
                    "partial_rotary_factor" if partial is not None else "head_dim", partial or head_dim,
                    "an even number from 2 to head_dim", "write what the head was trained with")  # fmt: skip
    elif partial is not None and partial != 1:
        theirs = facts.target.stated.number("partial_rotary_factor")
        theirs = facts.target.rope.values.number("partial_rotary_factor") if theirs is None else theirs
        yield found(WARNING, f"the head rotates {partial:g} of each attention head"
                    + (", as the target does" if partial == theirs else "") + "; trainers of Llama heads rotate all of "
                    "it, whatever the config says", "partial_rotary_factor", f"{partial:g}", "1, or absent",
                    "remove partial_rotary_factor where it was copied from the target, or replay the head with "
                    "each")  # fmt: skip
    if config.flag("rope_interleave"):
        yield found(ERROR, "the config says interleaved rotary pairs, engines build neox halves of a Llama head",
                    "rope_interleave", "true", "false", "permute q and k to the neox layout, or remove the field where "
                    "it was copied from the target's config")  # fmt: skip
    if config.flag("rope_is_neox_style") is False:
        yield found(WARNING, "the config asks for interleaved rotary pairs, which no EAGLE-3 trainer makes",
                    "rope_is_neox_style", "false", "true", 'write "rope_is_neox_style": true')  # fmt: skip


def served_length(facts: Facts) -> int:
    """Tokens of context that the server will take: --context-length, or what the target's config gives."""
    arguments: Mapping[str, Any] = facts.server.arguments
    stated = arguments.get("context_length") or arguments.get("max_model_len")
    return stated if type(stated) is int else context_of(facts.target.config, facts.target.rope)


def max_length(facts: Facts) -> Iterator[Finding]:
    """The head's positions against the context that is served."""
    config, served = facts.draft.config, served_length(facts)
    own = context_of(config, facts.draft.rope)
    if own >= served:
        return
    stated = facts.draft.stated.count("max_position_embeddings")
    overridden = facts.server.variable(OVERRIDE)
    stops = facts.server.engine == "sglang" and not overridden and not facts.server.live
    effect = {"sglang": "SGLang stops at start" if stops else f"{OVERRIDE} lets it run on beyond its training",
              "vllm": "vLLM clamps its positions there", "eagle": "it was not trained beyond"}  # fmt: skip
    yield Finding(_LENGTH, ERROR if stops else WARNING, f"the head goes to position {own}"
                  + (" (the default, none is stated)" if stated is None else "") + f", {served} are served: "
                  + effect[facts.server.engine], config.where, "max_position_embeddings", str(stated or "absent"),
                  f"{served} or more", f"start the server with --context-length {own}" if
                  facts.server.engine == "sglang" else f"serve at most {own} tokens, or train the head on "
                                                       "longer ones")  # fmt: skip


def image_positions(facts: Facts) -> Iterator[Finding]:
    """Three-part positions of a target that also sees; SGLang gives them to the head only where its config has them."""
    config = facts.draft.config
    if "mrope_section" in facts.target.rope.values.values and "mrope_section" not in facts.draft.rope.values.values:
        yield Finding("mm.embeds", WARNING, "the target counts image positions in three parts, the head's config says "
                      "nothing of them: text is served alike, image prompts are not", config.where,
                      "rope_scaling.mrope_section", "absent", "the target's",
                      "copy mrope_section from the target's config where the head was trained with it")  # fmt: skip


def window(facts: Facts) -> Iterator[Finding]:
    """A sliding window that the head was trained with, and the one that the engine applies."""
    config, served = facts.draft.config, served_length(facts)
    stated = config.count("sliding_window") if config.flag("use_sliding_window") is not False else None
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list) and kinds and "sliding_attention" not in kinds:
        stated = None
    flag = facts.server.arguments.get("speculative_draft_window_size")
    applied = flag if type(flag) is int and flag > 0 else None
    trained = stated if stated and stated < served else None
    if applied == trained or facts.server.engine != "sglang" or facts.draft.mla:
        return
    if applied is None:
        yield Finding(_WINDOW, WARNING, f"the head was trained with a window of {trained} tokens; SGLang does not read "
                      "it and lets the head attend to all", config.where, "sliding_window", str(trained),
                      "the server's window", f"start the server with --speculative-draft-window-size "
                                             f"{trained}")  # fmt: skip
    elif applied < served:
        yield Finding(_WINDOW, WARNING, f"the server gives the head a window of {applied} tokens, it was trained with "
                      f"{trained or 'none'}", facts.server.where, "speculative_draft_window_size", str(applied),
                      str(trained or "absent"), f"start the server with --speculative-draft-window-size {trained}"
                      if trained else "start the server without --speculative-draft-window-size")  # fmt: skip
