"""Rules on heads that read the target's final state alone (EAGLE-1, EAGLE-2 and NextN), judged by these in place of
those of EAGLE-3.

Sources: SGLang 0.5.23 models/llama_eagle.py, models/deepseek_nextn.py, models/deepseek_common/deepseek_weight_loader.py
(``_initialize_nextn_conf``), speculative/eagle_worker_v2.py ``init_lm_head``, arg_groups/speculative_hook.py.
"""

import re
from collections.abc import Iterator, Mapping

from replay.check.facts import Draft, Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.server_finding import at
from replay.check.speculation import resolve
from replay.check.table_findings import of_shapes, unread
from replay.checkpoint import eagle, nextn
from replay.checkpoint.config import FAMILY_NAMES, HeadConfig, parse_config
from replay.checkpoint.headers import TensorFact
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError
from replay.traces.fields import show_name, some
from replay.traces.taps import FINAL

_ALGORITHM, _MANY = "speculative_algorithm", "enable_multi_layer_eagle"
_LAYER = re.compile(r"^model\.layers\.(\d{1,9})\.", re.ASCII)
# Targets under whose algorithm EAGLE SGLang 0.5.23 turns --enable-multi-layer-eagle on (arg_groups/overrides.py and
# model_overrides/); their own heads are several layers, one a step.
MANY_LAYERS = (
    "MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
    "GigaChat35ForCausalLM", "GigaChat35ForCausalLMNextN",
)  # fmt: skip


def reads_final(draft: Draft) -> bool:
    """Whether it is of such a family."""
    return draft.family is not None


def fed_by_sglang() -> str:
    """The tap, whatever the config says."""
    return FINAL


def _config(facts: Facts) -> HeadConfig | None:
    """None where the strict reader refuses it, which ``config`` says."""
    try:
        return _parsed(facts.draft)
    except CheckpointError:
        return None


def _parsed(draft: Draft) -> HeadConfig:
    shapes = {fact.original: fact.shape for fact in draft.tensors.values()}
    return parse_config(draft.stated.values, name=draft.stated.where, shapes=shapes)


def _tensors(draft: Draft) -> Mapping[str, TensorFact]:
    """By the names of their table, but for a copy of the target's lm_head, which DeepSeek ships and nobody reads."""
    if draft.family != "nextn":
        return draft.tensors
    facts = [fact for fact in draft.tensors.values() if not fact.original.endswith(nextn.LM_HEAD)]
    return {nextn.spell(fact.original): fact for fact in facts}


def config(facts: Facts) -> Iterator[Finding]:
    """What a replay refuses: a field that is missing, or one that such a head has not. At most one finding."""
    where = facts.draft.stated.where
    try:
        _parsed(facts.draft)
    except CheckpointError as error:
        yield Finding("config.field-drop", WARNING, f"this config cannot be judged further: {error}", where,
                      "architectures", "another config", "one that replay reads",
                      "state what is missing as the trainer did; a head with more parts is not replayed")  # fmt: skip


def architecture(facts: Facts) -> Iterator[Finding]:
    """SGLang builds a plain Llama, which reads no state, of the architecture that SafeAILab writes."""
    draft = facts.draft
    if draft.family == "eagle" and facts.server.engine == "sglang" and draft.architecture != eagle.ARCHITECTURE:
        yield Finding("config.field-drop", ERROR, f"the config names the architecture {draft.architecture}; SGLang "
                      "builds a plain Llama of it, which reads no state of the target", draft.config.where,
                      "architectures", str(draft.architecture), eagle.ARCHITECTURE,
                      f'write "architectures": ["{eagle.ARCHITECTURE}"]')  # fmt: skip


def fits(facts: Facts) -> Iterator[Finding]:
    """The head is as wide as its target, and takes embedding and lm_head of it. At most one finding."""
    found, target = _config(facts), facts.target
    if found is None:
        return
    where, take = facts.draft.config.where, "take the target that the head was made for"
    if found.hidden_size != target.hidden_size:
        yield Finding("wiring.aux-missing", ERROR, f"the head is {found.hidden_size} wide and reads the final state of "
                      f"a target of {target.hidden_size}", where, "hidden_size", str(found.hidden_size),
                      str(target.hidden_size), take)  # fmt: skip
    elif found.vocab_size != target.vocab_size:
        yield Finding("vocab.d2t", WARNING, f"the head counts {found.vocab_size} tokens and takes embedding and "
                      f"lm_head of a target of {target.vocab_size}", where, "vocab_size", str(found.vocab_size),
                      str(target.vocab_size), take)  # fmt: skip


def wiring(facts: Facts) -> Iterator[Finding]:
    """SGLang feeds the state after the target's final norm, whatever layer ids say."""
    if facts.wiring not in (None, Wiring((FINAL,))):
        yield Finding("wiring.aux-layer-id", ERROR, f"SGLang feeds {FINAL}, the head was trained on {facts.wiring}",
                      facts.draft.config.where, "architectures", str(facts.draft.architecture),
                      "a class that reads taps", "train the head on the state after the final norm, or serve it as an "
                      "EAGLE-3 head")  # fmt: skip


def tensors(facts: Facts) -> Iterator[Finding]:
    """What SGLang would leave as it was initialised, or drop. At most one finding."""
    found, draft = _config(facts), facts.draft
    if found is None or draft.quantisation is not None:
        return
    skipped = list(_skipped(facts))
    yield from skipped or unread(facts, found, _tensors(draft))


def _skipped(facts: Facts) -> Iterator[Finding]:
    """Names under which SGLang does not look."""
    draft = facts.draft
    originals = [fact.original for fact in draft.tensors.values()]
    if facts.server.engine != "sglang":
        return
    if draft.family == "eagle":
        if hidden := [name for name in originals if name.startswith("model.")]:  # the class puts it in front of all
            wanted = hidden[0].removeprefix("model.")
            yield Finding("weights.missing", ERROR, f"SGLang looks for {wanted} and skips {some(hidden)}, so that "
                          "these stay as initialised", draft.weights.file, hidden[0], hidden[0], wanted,
                          "export the head without the leading model.")  # fmt: skip
        return
    layers = draft.config.count("num_hidden_layers") or 1
    place = 0 if layers == 1 else layers
    strange = [name for name in originals if (match := _LAYER.match(name)) is None or int(match[1]) != place]
    if strange:
        yield Finding("weights.missing", ERROR, f"SGLang reads layer {place} alone, one behind the "
                      f"{layers} layers of num_hidden_layers (0 where that is 1), and skips {some(strange)}",
                      draft.weights.file, strange[0], strange[0], f"model.layers.{place}....",
                      "write the num_hidden_layers of the target whose head it is, or name the layer so")  # fmt: skip


def shapes(facts: Facts) -> Iterator[Finding]:
    """A tensor of another shape than the config calls for stops the server. At most one finding."""
    found = _config(facts)
    if found is not None and facts.draft.quantisation is None:
        yield from of_shapes(facts, found, _tensors(facts.draft))


def bias_of_fc(facts: Facts) -> Iterator[Finding]:
    """SGLang's class gives fc a bias in any case: without one in the file it stays as torch initialises it."""
    found = _config(facts)
    if found is None or found.family != "eagle" or found.fc_bias or facts.server.engine != "sglang":
        return
    most = (2 * found.hidden_size) ** -0.5
    yield Finding("weights.missing", WARNING, "SGLang gives fc a bias in any case, and the head has none: it stays as "
                  f"initialised, random up to {most:.2g}", facts.draft.weights.file, "fc.bias", "absent",
                  f"[{found.hidden_size}]", f"save a fc.bias of {found.hidden_size} zeros with the head, and write "
                  '"bias": true')  # fmt: skip


def algorithm(facts: Facts) -> Iterator[Finding]:
    """SGLang feeds such heads under EAGLE and NEXTN. At most one finding."""
    server = facts.server
    if server.engine != "sglang" or server.refused:
        return
    drafting = resolve(server, facts.target.architecture)
    kind = FAMILY_NAMES[facts.draft.family or "eagle"]
    if drafting.algorithm is None and not server.live:
        yield at(facts, "config.steps", ERROR, "the server runs without speculation; the head is never loaded",
                 _ALGORITHM, "EAGLE", "add --speculative-algorithm EAGLE")  # fmt: skip
    elif drafting.known and drafting.algorithm not in (None, "EAGLE"):
        given = show_name(str(server.arguments.get(_ALGORITHM)))
        yield at(facts, "wiring.aux-missing", ERROR, f"the algorithm {given} does not feed the target's final state to "
                 f"a head of the family {kind}", _ALGORITHM, "EAGLE", "--speculative-algorithm EAGLE")  # fmt: skip


def one_for_all_steps(facts: Facts) -> Iterator[Finding]:
    """--enable-multi-layer-eagle builds a class for each step that takes the step's number, and these take none."""
    server, target = facts.server, facts.target.architecture or ""
    if server.engine != "sglang" or server.refused:
        return
    own = server.flag(_MANY)
    if own or target in MANY_LAYERS:
        why = "--enable-multi-layer-eagle" if own else f"beside the target {target} it"
        yield at(facts, "config.argument", ERROR, f"SGLang stops: {why} builds a head for each step, and a head of the "
                 f"family {FAMILY_NAMES[facts.draft.family or 'eagle']} is one for all", _MANY, "absent",
                 "start the server without --enable-multi-layer-eagle" if own else
                 f"serve {target} with the heads that it was published with")  # fmt: skip
