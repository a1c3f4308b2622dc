"""Rules on positions: rotary embedding, attention window and maximum length."""

from collections.abc import Iterator, Mapping
from typing import Any

from replay.check.facts import Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.override import rewrites_rope
from replay.checkpoint.config_file import Settings

_PARAMS, _GEOMETRY, _WINDOW, _LENGTH = (
    "position.rope-params", "position.rope-geometry", "attn.window", "position.max-len"
)  # fmt: skip
_DEFAULT_THETA = 10000.0  # of every engine and of most trainers, whatever the config says
_DEFAULT_LENGTH = 2048  # transformers' LlamaConfig
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
OVERRIDE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def _scaling(config: Settings) -> Settings:
    """transformers 5's ``rope_parameters``, or the older ``rope_scaling``."""
    parameters = config.inner("rope_parameters")
    return parameters if parameters.values else config.inner("rope_scaling")


def _theta(config: Settings) -> float | None:
    return (
        config.inner("rope_parameters").number("rope_theta")
        if config.inner("rope_parameters").values
        else config.number("rope_theta")
    )


def _kind(scaling: Settings) -> str:
    return scaling.text("rope_type") or scaling.text("type") or "default"


def _number(config: Settings, key: str) -> float | None:
    inner = _scaling(config).number(key)
    return config.number(key) if inner is None else inner


def rope(facts: Facts) -> Iterator[Finding]:
    """Theta and scaling: what the engine takes from the config, against the target's."""
    draft, target = facts.draft.config, facts.target.config
    if rewrites_rope(facts.draft.original, draft.values):
        return  # rules_server.override says so
    theta, wanted = _theta(draft), _theta(target) or _DEFAULT_THETA
    scaling, other = _scaling(draft), _scaling(target)
    kind, target_kind = _kind(scaling), _kind(other)

    def found(severity: str, what: str, field: str, seen: object, expected: object, fix: str) -> Finding:
        return Finding(_PARAMS, severity, what, draft.where, field, str(seen), str(expected), fix)

    outer = draft.number("rope_theta")
    scale = f"rope_parameters: rope_theta {outer:g}" if outer is not None else ""
    if outer is not None and draft.inner("rope_parameters").values and theta != outer:
        yield found(ERROR, f"rope_theta is stated twice, {outer:g} and in rope_parameters "
                    f"{'not at all' if theta is None else f'{theta:g}'}; engines take the latter", "rope_parameters",
                    theta or "absent", f"{outer:g}",
                    f"keep the one that the head was trained with ({scale})")  # fmt: skip
    elif theta is None and wanted != _DEFAULT_THETA:
        yield found(WARNING, f"the config states no rope theta, so engines take 10000; the target's is {wanted:g}",
                    "rope_theta", "absent", f"{wanted:g}, or 10000 stated",
                    f'write "rope_theta": {wanted:g}, or 10000 where the head was trained with that')  # fmt: skip
    elif theta is not None and theta != wanted and (theta != _DEFAULT_THETA or kind == target_kind != "default"):
        yield found(WARNING, f"rope theta is {theta:g}, neither the target's {wanted:g} nor the 10000 that trainers "
                    "fall to", "rope_theta", f"{theta:g}", f"{wanted:g} or 10000",
                    f'write "rope_theta": {wanted:g}, or 10000; replay the head with each')  # fmt: skip
    lacks = [key for key in _NEEDS.get(kind, ()) if _number(draft, key) is None and key in _NEEDS[kind]]
    if lacks:
        yield found(ERROR, f"rope scaling of type {kind} lacks {', '.join(lacks)}", scaling.where.rpartition(" ")[2],
                    "absent", lacks[0],
                    "copy the whole rope scaling from the config the head was trained with")  # fmt: skip
    elif kind != target_kind and (kind != "default" or (theta == wanted and wanted != _DEFAULT_THETA)):
        yield found(WARNING, f"rope scaling is {kind}, the target's is {target_kind}, with "
                    + ("the same theta" if theta == wanted else f"theta {theta or _DEFAULT_THETA:g}"),
                    "rope_scaling", kind, target_kind,
                    "copy the target's rope scaling where the head was trained with it")  # fmt: skip
    elif kind == target_kind != "default":
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            mine, theirs = _number(draft, key), _number(target, key)
            if mine != theirs and theirs is not None:
                yield found(WARNING, f"rope scaling's {key} is {mine}, the target's {theirs}",
                            f"rope_scaling.{key}", mine, theirs,
                            "copy the target's rope scaling where the head was trained with it")  # fmt: skip
                break


def rope_geometry(facts: Facts) -> Iterator[Finding]:
    """Which features of an attention head are rotated, and in which pairs."""
    draft, config = facts.draft, facts.draft.config
    heads, hidden = config.count("num_attention_heads") or 1, config.count("hidden_size") or 0
    head_dim = config.count("head_dim") or hidden // heads
    partial = _number(config, "partial_rotary_factor")
    wanted = _number(facts.target.config, "partial_rotary_factor") or 1.0

    def found(severity: str, what: str, field: str, seen: object, expected: object, fix: str) -> Finding:
        return Finding(_GEOMETRY, severity, what, config.where, field, str(seen), str(expected), fix)

    if draft.mla:
        return
    rotated = int(head_dim * (1.0 if partial is None else partial))
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        yield found(ERROR, f"{rotated} of {head_dim} features of an attention head would be rotated",
                    "partial_rotary_factor" if partial is not None else "head_dim", partial or head_dim,
                    "an even number from 2 to head_dim", "write what the head was trained with")  # fmt: skip
    elif partial is not None and partial != wanted:
        yield found(WARNING, f"the head rotates {partial:g} of each attention head, the target {wanted:g}; trainers of "
                    "Llama heads rotate all of it", "partial_rotary_factor", f"{partial:g}", f"{wanted:g}",
                    f'write "partial_rotary_factor": {wanted:g}, or replay the head with each')  # fmt: skip
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
    return stated if type(stated) is int else context_of(facts.target.config)


def context_of(config: Settings) -> int:
    """As SGLang 0.5.23 utils/hf_transformers/common.py derives it."""
    scaling = _scaling(config)
    factor = scaling.number("factor") or 1.0
    if _kind(scaling) == "llama3" or scaling.number("original_max_position_embeddings") is not None:
        factor = 1.0
    for key in _LENGTHS:
        if (length := config.count(key)) is not None:
            return int(factor * length)
    return _DEFAULT_LENGTH


def max_length(facts: Facts) -> Iterator[Finding]:
    """The head's positions against the context that is served."""
    config, served = facts.draft.config, served_length(facts)
    own = context_of(config)
    if own >= served:
        return
    stated = config.count("max_position_embeddings")
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
    if "mrope_section" in _scaling(facts.target.config).values and "mrope_section" not in _scaling(config).values:
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
