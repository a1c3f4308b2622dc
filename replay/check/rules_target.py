"""Rules on the class that SGLang serves a target with: whether it captures layers for an EAGLE-3 head at all, and
whether its decode graphs capture those that the head asks for. Source: targets/rules.py."""

from collections.abc import Iterator

from replay.check.facts import Facts
from replay.check.finding import ERROR, NOTE, Finding
from replay.check.layer_ids import NESTED, served_rule, spell_taps, stated_ids
from replay.targets.rules import NEWEST, CaptureRule, NoRule, capture_rule, default_graphs, release_of

_COUNT, _AUX = "wiring.aux-missing", "wiring.aux-layer-id"


def target_class(facts: Facts) -> Iterator[Finding]:
    """A class that captures nothing stops the server (SGLang 0.5.23 attention_backend_setup.py
    configure_aux_hidden_state_capture). So does a config that names none (configs/model_config.py)."""
    config, rule = facts.target.config, served_rule(facts.target, facts.server)
    if facts.server.engine != "sglang" or not facts.draft.uses_aux or isinstance(rule, CaptureRule):
        return
    if rule is None:
        yield Finding(_COUNT, ERROR, "SGLang stops: the target's config names no architecture", config.where,
                      "architectures", "absent", "the class of the target",
                      'write its "architectures", as its publisher does')  # fmt: skip
    elif rule.known:
        yield Finding(_COUNT, ERROR, str(rule), config.where, "architectures", rule.architecture,
                      "a class that captures layers", _other(rule))  # fmt: skip
    else:
        yield Finding(_COUNT, NOTE, str(rule), config.where, "architectures", rule.architecture,
                      "a class whose code can be read", "see in the server's own rounds what it feeds: "
                      "replay serve, replay capture and replay diagnose")  # fmt: skip


def _other(rule: NoRule) -> str:
    if isinstance(capture_rule(rule.architecture), CaptureRule):
        return f"serve it with SGLang {NEWEST}"
    return "serve this target without --speculative-algorithm EAGLE3, or take a target that SGLang captures layers of"


def decode_graphs(facts: Facts) -> Iterator[Finding]:
    """SGLang 0.5.9 cuda_graph_runner.py sets the default layers before it captures; the stated ones come after, and
    only prefills see them (model_runner.py). Not where graphs are off or there are none."""
    arguments, release = facts.server.arguments, release_of(facts.server.version)
    rule, ids = served_rule(facts.target, facts.server), stated_ids(facts.draft).nested
    if facts.server.engine != "sglang" or not default_graphs(release) or not isinstance(rule, CaptureRule) or not ids:
        return
    if arguments.get("disable_cuda_graph") or arguments.get("device") == "cpu" or not facts.draft.uses_aux:
        return
    stated, default = (rule.capture(one, facts.target.layers).fed for one in (ids, None))
    if stated != default and not rule.trouble(ids, facts.target.layers):
        yield Finding(_AUX, ERROR, f"{rule.engine} captures its decode graphs with the default layers whatever the "
                      f"ids: verified rounds feed {spell_taps(default)}, prompts {spell_taps(stated)}",
                      facts.draft.config.where, NESTED, str(list(ids)), f"ids that feed {spell_taps(default)}",
                      f"serve it with SGLang {NEWEST}, or start this one with --disable-cuda-graph")  # fmt: skip
