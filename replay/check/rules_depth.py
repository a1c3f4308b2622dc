"""Rules on how much a round drafts. Sources: SGLang 0.5.23 arg_groups/speculative_hook.py, speculative/
eagle_worker_common.py (_compact_accept_to_front), base_spec_worker.py; run with such numbers on a CPU (tests/rig)."""

from collections.abc import Iterator

from replay.check.facts import Facts
from replay.check.finding import ERROR, NOTE, WARNING, Finding
from replay.check.server_finding import at
from replay.check.speculation import Speculation, resolve, tree_size

_STEPS = "config.steps"
_FIELDS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def depth(facts: Facts) -> Iterator[Finding]:
    """How many tokens a round really drafts. At most one finding."""
    server = facts.server
    if server.engine != "sglang" or server.refused:
        return
    drafting = resolve(server, facts.target.architecture)
    if drafting.stop is not None and drafting.stop.field != "speculative_algorithm":
        stop = drafting.stop
        yield at(facts, _STEPS, ERROR, stop.what, stop.field, stop.expected, stop.fix)
    elif drafting.algorithm not in (None, "EAGLE", "EAGLE3"):
        return
    elif drafting.algorithm is not None:
        yield from _senseless(facts, drafting) or _asked(facts, drafting)


def _senseless(facts: Facts, drafting: Speculation) -> list[Finding]:
    """Numbers below 1."""
    steps, topk, tokens = drafting.steps, drafting.topk, drafting.tokens
    adaptive = facts.server.flag("speculative_adaptive")
    if steps is not None and (steps < 0 or (steps == 0 and not adaptive)):
        effect = "SGLang stops" if steps < 0 else "the head drafts nothing"
        return [at(facts, _STEPS, ERROR, f"with {steps} steps {effect}", _FIELDS[0], "at least 1",
                   "--speculative-num-steps 3 --speculative-eagle-topk 1")]  # fmt: skip
    if topk is not None and topk < 1:
        return [at(facts, _STEPS, ERROR, f"with topk {topk} SGLang dies at the first request", _FIELDS[1],
                   "at least 1", "--speculative-eagle-topk 1")]  # fmt: skip
    if tokens is not None and tokens < 2 and steps:
        return [at(facts, _STEPS, ERROR, f"{tokens} tokens a round leave no room for a drafted one", _FIELDS[2],
                   "at least 2", f"--speculative-num-draft-tokens {steps + 1}")]  # fmt: skip
    return []


def _asked(facts: Facts, drafting: Speculation) -> Iterator[Finding]:
    """What is drafted against what was asked for."""
    steps, topk, tokens = drafting.steps, drafting.topk, drafting.tokens
    asked = facts.server.integer(_FIELDS[2])
    if steps is None or topk is None or tokens is None:
        return
    if topk == 1 and asked is not None and asked != steps + 1:
        yield at(facts, _STEPS, WARNING, f"with topk 1 and {steps} step{'s' if steps != 1 else ''} SGLang verifies "
                 f"{steps + 1} tokens a round, not {asked}: it drafts {steps}", _FIELDS[0], asked - 1,
                 f"--speculative-num-steps {asked - 1}, or --speculative-num-draft-tokens {steps + 1}"
                 if asked > 1 else f"--speculative-num-draft-tokens {steps + 1}")  # fmt: skip
    elif topk > 1:
        yield from _tree(facts, steps, topk, tokens)
    elif facts.server.live and steps == 1:
        yield at(facts, _STEPS, NOTE, "the server drafts one token a round, so its accept length is 2 at most",
                 _FIELDS[0], "what was meant",
                 "start it with --speculative-num-steps and --speculative-num-draft-tokens one above")  # fmt: skip


def _tree(facts: Facts, steps: int, topk: int, tokens: int) -> Iterator[Finding]:
    most = tree_size(steps, topk)
    if tokens - 1 < steps:
        yield at(facts, _STEPS, ERROR, f"{tokens} tokens a round cannot hold a branch of {steps} steps: SGLang dies at "
                 "the first request", _FIELDS[2], f"above {steps}", f"--speculative-num-draft-tokens "
                 f"{min(4 * steps, most)}, or --speculative-num-steps {tokens - 1}")  # fmt: skip
    elif tokens > most:
        yield at(facts, _STEPS, ERROR, f"topk {topk} and {steps} steps make {most} tokens at most, {tokens} are asked "
                 "for", _FIELDS[2], f"at most {most}", f"--speculative-num-draft-tokens {most}")  # fmt: skip
