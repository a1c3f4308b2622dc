"""Rules on how drafted tokens are accepted. Sources: SGLang 0.5.23 arg_groups/speculative_hook.py,
speculative/eagle_utils.py and spec_utils.py, sglang/kernels/jit/csrc/speculative/sampling.cuh (what thresholds do)."""

from collections.abc import Iterator

from replay.check.facts import Facts
from replay.check.finding import ERROR, NOTE, WARNING, Finding
from replay.check.server_finding import at, flag
from replay.check.speculation import drafts, resolve

_RULE = "sampling.accept-rule"
_REJECTION, _BLOCK = "speculative_use_rejection_sampling", "speculative_use_block_verification"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_MADE_UP = "SGLANG_SIMULATE_ACC_LEN"


def acceptance(facts: Facts) -> Iterator[Finding]:
    """Thresholds, rejection sampling, simulated acceptance."""
    server = facts.server
    if server.engine == "sglang" and server.variable_number(_MADE_UP, -1.0) > 0:
        length = server.environment[_MADE_UP]
        yield Finding("metrics.definition", ERROR, f"{_MADE_UP} makes up an accept length of {length}",
                      "environment", _MADE_UP, length, "absent",
                      f"unset {_MADE_UP} and start the server again")  # fmt: skip
    if not drafts(server):
        return
    if server.flag(_REJECTION) or server.flag(_BLOCK):
        yield from _rejection(facts, _REJECTION if server.flag(_REJECTION) else _BLOCK)
    else:
        yield from _thresholds(facts)
    if server.arguments.get("speculative_token_map") and server.engine == "sglang":
        yield at(facts, "vocab.d2t", NOTE, "an EAGLE-3 head brings its own map; SGLang ignores this one",
                 "speculative_token_map", "absent", "start the server without --speculative-token-map")  # fmt: skip


def _rejection(facts: Facts, field: str) -> Iterator[Finding]:
    """What rejection sampling does not work with; block verification switches it on."""
    draft, target = facts.draft.config.count("draft_vocab_size"), facts.target.vocab_size
    topk = resolve(facts.server, facts.target.architecture).topk
    drop, what = f"start the server without {flag(field)}", flag(field)
    lenient = [name for name in _THRESHOLDS if facts.server.number(name) not in (None, 1.0)]
    if draft is not None and draft != target:
        yield at(facts, _RULE, ERROR, f"SGLang stops: {what} needs one vocabulary, the head drafts over {draft} of "
                 f"{target} tokens", field, "absent", drop)  # fmt: skip
    elif topk is not None and topk != 1:
        yield at(facts, _RULE, ERROR, f"SGLang stops: {what} works on chains, topk is {topk}", field, "absent",
                 f"{drop}, or with --speculative-num-steps 3 --speculative-eagle-topk 1")  # fmt: skip
    elif lenient:
        yield at(facts, _RULE, ERROR, f"SGLang stops: {what} takes no thresholds", lenient[0], 1.0,
                 f"start the server without {flag(lenient[0])}")  # fmt: skip


def _thresholds(facts: Facts) -> Iterator[Finding]:
    """At most one finding: the first threshold that is not 1."""
    for field in _THRESHOLDS:
        value = facts.server.number(field)
        drop = f"start the server without {flag(field)}"
        if value is not None and not 0 <= value <= 1:
            yield at(facts, _RULE, ERROR, f"{flag(field)} {value:g} is not from 0 to 1: SGLang's kernel refuses it at "
                     "the first sampled request", field, "from 0 to 1", drop)  # fmt: skip
            return
        if value is not None and value != 1:
            yield at(facts, _RULE, WARNING, "a threshold below 1 accepts tokens that the target would not have "
                     "sampled: accept length rises and the output changes", field, 1.0, drop)  # fmt: skip
            return
