"""The choices as the engines take them: steps by batch, ready to paste.

SGLang 0.5.23 (speculative/adaptive_spec_params.py): a JSON file for --speculative-adaptive-config, with the smallest
batch of each range as key and ``candidate_steps``; one candidate fixes the steps. Chains alone. vLLM 0.32:
``num_speculative_tokens_per_batch_size`` of --speculative-config, a list of [first batch, last batch, tokens]. Neither
knows trees here. Between two loads that were planned the choice of the lower one holds.
"""

import json
from collections.abc import Sequence

from replay.analysis.plan.plan import Choice

OPEN_END = 1 << 10  # where the last range of vLLM's list ends, which needs an end


def steps_by_batch(choices: Sequence[Choice]) -> list[tuple[int, int]] | None:
    """(first batch, steps) by rising batch; None where a choice is a tree, unknown, or made twice for one batch."""
    found = sorted((choice.load.batch, choice.best.setting.steps) for choice in choices)
    told = all(choice.advice != "cannot tell" and choice.best.setting.topk == 1 for choice in choices)
    if not told or len({batch for batch, _ in found}) < len(found):
        return None
    return [item for place, item in enumerate(found) if place == 0 or item[1] != found[place - 1][1]]


def sglang_schedule(steps: Sequence[tuple[int, int]]) -> str:
    """The file for --speculative-adaptive-config."""
    return json.dumps({str(batch): {"candidate_steps": [count]} for batch, count in steps})


def vllm_schedule(steps: Sequence[tuple[int, int]]) -> str:
    """The value of num_speculative_tokens_per_batch_size."""
    firsts = [1, *(batch for batch, _ in steps[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), max(OPEN_END, firsts[-1])]
    return json.dumps([[first, last, count] for first, last, (_, count) in zip(firsts, lasts, steps, strict=True)])
