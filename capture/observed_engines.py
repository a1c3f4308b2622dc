"""Accept lengths as other engines than SGLang print them, each by its own definition, which ``source`` says.

- vLLM (v1/spec_decode/metrics.py, 0.9 to 0.32): a log line's mean acceptance length is 1 + accepted / drafts of its
  interval. /metrics counts drafts, accepted tokens, and accepted tokens by position since the start; position j counts
  drafts whose token j was accepted, which all before it then were.
- TensorRT-LLM: iteration statistics (cpp/include/tensorrt_llm/executor/types.h, SpecDecodingStats; its own
  tests/integration/defs/accuracy: accepted + requests over requests), as /metrics of trtllm-serve gives them; and
  avg_decoded_tokens_per_iter of an answer's choices (batch_manager/llmRequest.h): generated tokens / iterations.
- llama.cpp (common/speculative.cpp, common_speculative_print_stats): drafts and accepted tokens since the start. Its
  "draft acceptance rate" is accepted / drafted and says no number of rounds, so it gives no accept length.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from replay.capture.observed_number import Observed
from replay.printable import counted
from replay.traces.fields import is_number

_LARGEST = 1 << 53  # of a count
_MOST_POSITIONS = 1 << 12
_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
_MEAN = re.compile(rf"Mean acceptance length: {_NUMBER}", re.ASCII)
_ACCEPTED = re.compile(r"Accepted: (\d{1,15}) tokens", re.ASCII)
_DRAFTED = re.compile(r"Drafted: (\d{1,15}) tokens", re.ASCII)
_RATES = re.compile(r"Per-position acceptance rate: (\d\.\d{3}(?:, \d\.\d{3}){0,99})", re.ASCII)
_POSITION = re.compile(r'(?:^|,)position="(\d{1,4})"', re.ASCII)
_STATISTICS = re.compile(r"statistics +([\w-]{1,60}):", re.ASCII)
_DRAFTS = re.compile(r"#gen drafts = +?(\d{1,15})\b", re.ASCII)
_TAKEN = re.compile(r"#acc tokens = +?(\d{1,15})\b", re.ASCII)
_VLLM = "vllm:spec_decode_num_"


def vllm_log(lines: Iterable[str]) -> Observed | None:
    """Over a log's intervals, each weighed by its drafts: drafted tokens / tokens of a draft; None without a line.

    An interval that says no tokens of a draft, as one of nothing accepted without rates, has as many as the others.
    """
    intervals = [found for line in lines if (found := _vllm_interval(line)) is not None]
    told = [(drafted, drafts) for _, drafted, drafts, _ in intervals if drafts]
    if not told:  # means of 1.00 alone
        drafts_of_token = 1.0
    else:
        drafts_of_token = sum(drafts for _, drafts in told) / sum(drafted for drafted, _ in told)
    accepted = sum(taken for taken, *_ in intervals)
    all_drafts = sum(drafts or drafted * drafts_of_token for _, drafted, drafts, _ in intervals)
    if not all_drafts:
        return None
    steps = {positions for *_, positions in intervals if positions}
    source = f"{counted(len(intervals), 'log line')} of vLLM, 1 + accepted / drafts, weighed by drafts"
    return Observed(1 + accepted / all_drafts, source, num_steps=steps.pop() if len(steps) == 1 else None)


def _vllm_interval(line: str) -> tuple[int, int, float | None, int | None] | None:
    """Accepted and drafted tokens of a line, its drafts and their tokens where it says them; None for another line."""
    if "SpecDecoding metrics: " not in line:
        return None
    mean, taken, drafted, rates = (pattern.search(line) for pattern in (_MEAN, _ACCEPTED, _DRAFTED, _RATES))
    if not (mean and taken and drafted and int(drafted[1])):
        return None
    if rates:
        positions = rates[1].count(",") + 1
        return int(taken[1]), int(drafted[1]), int(drafted[1]) / positions, positions
    says = int(taken[1]) and float(mean[1]) > 1
    return int(taken[1]), int(drafted[1]), int(taken[1]) / (float(mean[1]) - 1) if says else None, None


def vllm_metrics(samples: Iterable[tuple[str, str, float]]) -> Observed | None:
    """From the samples (name, labels, value) of a /metrics page; None where nothing was drafted.

    Engines and models of one page are added up.
    """
    sums = {"drafts": 0.0, "accepted_tokens": 0.0}
    at_position: dict[int, float] = {}
    for name, labels, value in samples:
        key = name.removeprefix(_VLLM).removesuffix("_total")
        if not name.startswith(_VLLM) or not 0 <= value <= _LARGEST:
            continue
        if key in sums:
            sums[key] += value
        elif key == "accepted_tokens_per_pos" and (found := _POSITION.search(labels)):
            place = int(found[1])
            if place < _MOST_POSITIONS:
                at_position[place] = at_position.get(place, 0.0) + value
    drafts, accepted = (int(sums[key]) for key in ("drafts", "accepted_tokens"))
    if not drafts:
        return None
    histogram = _histogram(drafts, at_position)
    source = "counters vllm:spec_decode_num_... of /metrics, 1 + accepted / drafts since the server started"
    return Observed(1 + accepted / drafts, source, drafts, histogram, len(at_position) or None)


def _histogram(drafts: int, at_position: Mapping[int, float]) -> tuple[int, ...] | None:
    """Rounds by accepted tokens; None where positions lack or do not fall."""
    if sorted(at_position) != list(range(len(at_position))) or not at_position:
        return None
    reached = [drafts, *(int(at_position[place]) for place in range(len(at_position))), 0]
    counts = tuple(before - after for before, after in pairwise(reached))
    return counts if all(count >= 0 for count in counts) else None


def tensorrt_statistics(iterations: Sequence[object]) -> Observed | None:
    """From TensorRT-LLM's iteration statistics; None where none of them drafted."""
    accepted = rounds = 0
    for one in iterations:
        told = one.get("specDecodingStats") if isinstance(one, dict) else None
        if isinstance(told, dict) and _count(told.get("numDraftTokens")):
            accepted += _count(told.get("numAcceptedTokens"))
            rounds += _count(told.get("numRequestsWithDraftTokens"))
    if not rounds:
        return None
    source = "specDecodingStats of TensorRT-LLM, 1 + accepted / requests with drafts, over all iterations"
    return Observed(1 + accepted / rounds, source, rounds)


def tensorrt_answers(answers: Iterable[object]) -> Observed | None:
    """From OpenAI answers of trtllm-serve with one choice each, weighed by iterations; None without the number."""
    tokens, iterations, told = 0, 0.0, 0
    for answer in answers:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            continue
        mean = choices[0].get("avg_decoded_tokens_per_iter")
        made = _count(usage.get("completion_tokens")) if isinstance(usage, dict) else 0
        if isinstance(mean, int | float) and is_number(mean, 1, 1e6) and made:
            tokens, iterations, told = tokens + made, iterations + made / mean, told + 1
    if not iterations:
        return None
    source = (
        f"avg_decoded_tokens_per_iter of {counted(told, 'answer')} of TensorRT-LLM, generated tokens / decoding "
        "iterations, the prefill's among them"
    )
    return Observed(tokens / iterations, source)


def llama_log(lines: Iterable[str]) -> Observed | None:
    """From the last statistics line of each kind of draft in a llama.cpp log; None without one."""
    last: dict[str, tuple[int, int]] = {}
    for line in lines:
        kind = _STATISTICS.search(line)
        drafts, taken = (_DRAFTS.search(line), _TAKEN.search(line)) if kind else (None, None)
        if kind and drafts and taken:
            last[kind[1]] = (int(drafts[1]), int(taken[1]))
    drafts_in_all = sum(drafts for drafts, _ in last.values())
    if not drafts_in_all:
        return None
    mean = 1 + sum(taken for _, taken in last.values()) / drafts_in_all
    source = "statistics lines of llama.cpp, 1 + accepted tokens / drafts since the server started"
    return Observed(mean, source, drafts_in_all)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= _LARGEST else 0
