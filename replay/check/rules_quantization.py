"""Rules on a quantised head: what its config says against what its tensors are, and what SGLang's classes can load.

Sources: SGLang 0.5.23 configs/model_config.py (``_verify_quantization``), layers/quantization/mxfp4.py and fp8.py,
models/llama_eagle3.py (``fc``) and models/kimi_k25_eagle3.py (``__init__``, ``post_load_weights``).
"""

from collections.abc import Iterator, Mapping

from replay.check.facts import Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.quantization import (
    METHODS,
    Quantisation,
    built_quantised,
    modules,
    quantisation_of,
    quantised_parts,
)
from replay.checkpoint.headers import TensorFact
from replay.traces.fields import show, some

_WEIGHTS = "precision.draft-weights"
_KV_B = "layers.0.self_attn.kv_b_proj"


def quantisation(facts: Facts) -> Iterator[Finding]:
    """The head's own quantisation. At most one finding."""
    found = facts.draft.quantisation
    if facts.server.engine == "sglang" and found is not None:
        for look in (_unread, _bare, _unbuilt):
            if said := list(look(facts, found)):
                yield from said
                return
    yield from _stored(facts)


def target_quantisation(facts: Facts) -> Iterator[Finding]:
    """A method in the target's config that SGLang stops at."""
    for config in {one.where: one for one in (facts.target.outer, facts.target.stated)}.values():
        found = quantisation_of(config, None, config.where)
        if facts.server.engine == "sglang" and found is not None and found.method not in METHODS:
            yield Finding("config.field-drop", ERROR, "SGLang stops: it knows no quantisation called "
                          f"{show(found.method or '')}, which the target's config names", config.where, found.field,
                          show(found.config.get("quant_method")), "a quant_method of SGLang's",
                          "serve a target that is quantised otherwise, or not at all")  # fmt: skip
            return


def _said(found: Quantisation, what: str, expected: str) -> Finding:
    seen = found.config.get("quant_method", found.config.get("quant_algo", dict(found.config)))
    return Finding(_WEIGHTS, ERROR, what, found.where, found.field, show(seen), expected,
                   f"remove {found.field} where it was copied from the target, or export the head quantised that "
                   "way")  # fmt: skip


def _unread(facts: Facts, found: Quantisation) -> Iterator[Finding]:
    """A method that SGLang stops at."""
    if not found.method or found.method not in METHODS:
        yield _said(found, f"SGLang stops: it knows no quantisation called {show(found.method or '')}",
                    "a quant_method of SGLang's, or no such field")  # fmt: skip
    elif found.method == "mxfp4":
        yield _said(found, "SGLang stops: its mxfp4 is for experts, and a head has plain linear layers", "absent")


def _built(facts: Facts, found: Quantisation) -> dict[str, bool | None]:
    """Each linear layer, as the checkpoint calls it: whether SGLang builds it quantised."""
    draft = facts.draft
    if draft.mla and found.method == "modelopt_fp4":  # the class drops it
        return {part: False for _, part in modules(draft)}
    built = {part: built_quantised(found, module) for module, part in modules(draft)}
    return built if draft.mla else {**built, "fc": False}


def _bare(facts: Facts, found: Quantisation) -> Iterator[Finding]:
    """Layers that are built quantised, for which the head has plain tensors without scales."""
    draft = facts.draft
    laid_out, built = quantised_parts(draft.tensors), _built(facts, found)
    bare = [part for part, value in built.items()
            if value and part not in laid_out and f"{part}.weight" in draft.tensors]  # fmt: skip
    if bare:
        yield _said(found, f"SGLang builds {some(bare)} quantised, by {found.method}, and the head has plain weights "
                    "without scales there: they stay as initialised, or do not fit", "absent")  # fmt: skip
    elif built.get(_KV_B):
        yield _said(found, "SGLang stops: its class of MLA heads takes kv_b_proj in floats only",
                    "kv_b_proj left out of the quantisation")  # fmt: skip


def _unbuilt(facts: Facts, found: Quantisation) -> Iterator[Finding]:
    """Layers that lie there quantised and are built plain: packed weights do not fit, and scales are dropped."""
    draft = facts.draft
    built = _built(facts, found)
    lost = [part for part in sorted(quantised_parts(draft.tensors)) if built.get(part) is False]
    if lost:
        effect = (
            "builds it plain, and drops its scale"
            if lost == ["fc"]
            else "builds these plain, and the tensors do not fit"
        )
        if draft.mla and found.method == "modelopt_fp4":
            effect = "stops: its class of MLA heads drops Model-Optimizer's fp4, and packed weights do not fit"
        name = _first(draft.tensors, lost[0])
        yield Finding(_WEIGHTS, ERROR, f"the head has {some(lost)} quantised; SGLang {effect}", draft.weights.file,
                      name, draft.tensors[name].dtype, "BF16", "export these layers unquantised")  # fmt: skip


def _first(tensors: Mapping[str, TensorFact], part: str) -> str:
    """The weight of a layer, or what it has in the place of one."""
    names = [name for name in tensors if name.startswith(f"{part}.")]
    return next((name for name in names if name.endswith("weight")), names[0])


def _stored(facts: Facts) -> Iterator[Finding]:
    """Weights that are stored in less than 16 bits; what the server was told of quantisation is another rule's."""
    draft, arguments = facts.draft, facts.server.arguments
    told = arguments.get("speculative_draft_model_quantization") or arguments.get("quantization")
    if facts.server.engine == "sglang" and isinstance(told, str) and told != "unquant":
        return
    parts = sorted(quantised_parts(draft.tensors))
    if parts:
        states, name = draft.quantisation is not None, _first(draft.tensors, parts[0])
        dtype = draft.tensors[name].dtype
        yield Finding(_WEIGHTS, WARNING if states else ERROR, f"the head's weights are stored as {dtype}"
                      + ("" if states else " and no quantization_config says how"), draft.weights.file, name, dtype,
                      "BF16", "export the head unquantised, or replay it both ways")  # fmt: skip
