"""Timings out of /metrics pages, the text that Prometheus reads: what a server counted between two of them.

One page counts since the server's start, over every batch that ever ran, so it says no time of a round. If
nothing was prefilled and nothing ended between two pages, one batch decoded all the time. Any other interval is left
out, and the first reason is said if none is left.

- SGLang 0.5.23 (observability/metrics_collector.py): ``inter_token_latency_seconds`` counts each output token, with its
  share of the time since the chunk before; ``realtime_tokens_total`` counts prefilled rows as they are prefilled. A
  round lasts seconds of a token x accept length. That is a gauge, as the number of requests is, and gauges move with
  the server's log: it has to have logged between the pages, which ``gen_throughput`` tells.
- vLLM (v1/metrics/stats.py, v1/spec_decode/metrics.py, 0.9 to 0.32): ``inter_token_latency_seconds`` observes once for
  a round or once for each of its tokens, by version; its sum is the same. ``spec_decode_num_drafts`` counts requests'
  rounds; without drafting each token is one.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from replay.analysis.plan.settings import MOST_BATCH, MOST_NODES, MOST_STEPS, PLAIN, Load, Setting, make_setting, whole
from replay.analysis.plan.timings import TRUST, Timing
from replay.errors import UsageError
from replay.printable import counted

_SAMPLE = re.compile(
    r'(?P<name>(?:sglang|vllm):[a-zA-Z0-9_:]{1,200})(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+'
    r"(?P<value>[0-9.eE+-]{1,40})(?:\s+-?\d{1,20})?",
    re.ASCII,
)
_MODE = re.compile(r'(?:^|,)mode="(\w{1,40})"', re.ASCII)
_PRIORITY = re.compile(r'(?:^|,)priority="[^"]', re.ASCII)
_ENGINE = re.compile(r'(?:^|,)(?:engine|dp_rank|tp_rank|pp_rank|model_name)="[^"]{0,4096}"')
_RUNNING = (("sglang", "running_reqs"), ("vllm", "requests_running"))  # how their gauges end
ROUNDED = 0.005  # half of the last digit of an accept length as servers print it
_UNEVEN = 0.02  # share by which rounds may fail to be tokens less accepted: requests that ran without a draft
_WAY = (
    "give --bench EARLIER,LATER with two pages of one steady load, or the address of the page, or time it: replay time"
)

Page = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Left:
    """Why an interval says nothing; ``early``: it may yet, with a later end."""

    reason: str
    early: bool = False


def is_page(text: str) -> bool:
    """Whether it is a /metrics page of SGLang or vLLM."""
    return bool(_SAMPLE.search(text[: 1 << 20])) and text.lstrip().startswith(
        ("#", "sglang:", "vllm:", "python_", "process_")
    )


def read_page(text: str, called: str) -> Page:
    """Values by name without ``_total``, by mode where it has one. Raises UsageError for a page of several servers."""
    page: dict[str, float] = defaultdict(float)
    servers: dict[str, set[str]] = defaultdict(set)
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match is None or (value := _number(match["value"])) is None:
            continue
        labels, name = match["labels"] or "", match["name"].removesuffix("_total")
        if name == "sglang:num_running_reqs" and _PRIORITY.search(labels):
            continue  # its sum over priorities stands beside them
        mode = _MODE.search(labels)
        page[name + (f":{mode[1]}" if mode else "")] += value
        servers[name].add(",".join(sorted(found.strip(",") for found in _ENGINE.findall(labels))))
    if max((len(servers[f"{engine}:num_{word}"]) for engine, word in _RUNNING), default=0) > 1:
        raise UsageError(f"{called} is a page of several servers or models; give one of one server and one rank")
    return page


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def timings_of_pages(texts: Sequence[str], called: str, said: Mapping[str, float]) -> list[Timing]:
    """A timing for each interval between two pages, earlier first, in which one batch decoded all the time.

    ``said`` goes before what the pages say of the setting. Raises UsageError where there is none.
    """
    if "batch" in said:
        raise UsageError(f"{called} says itself how many requests run; leave batch out")
    if len(texts) < 2:
        raise UsageError(f"{called} is one page, which counts since the server started, over every batch; {_WAY}")
    pages = [read_page(text, called) for text in texts]
    timings: list[Timing] = []
    reasons: list[str] = []
    before = pages[0]
    for after in pages[1:]:
        found = _interval(before, after, called, said)
        if isinstance(found, Timing):
            timings.append(found)
        else:
            reasons.append(found.reason)
        if isinstance(found, Timing) or not found.early:
            before = after
    if not timings:
        raise UsageError(f"{called} says no time of a round, since {reasons[0]}; {_WAY}")
    return timings


def _interval(before: Page, after: Page, called: str, said: Mapping[str, float]) -> Timing | _Left:
    engine, word = next(((name, word) for name, word in _RUNNING if f"{name}:num_{word}" in after), ("", ""))
    if not engine:
        return _Left("it has no number of running requests")
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    running = [page.get(f"{engine}:num_{word}", 0.0) for page in (before, after)]
    if engine == "vllm" and running[0] != running[1]:
        return _Left(f"{running[0]:g} requests ran at its beginning and {running[1]:g} at its end")
    if not 1 <= running[1] <= MOST_BATCH or running[1] != int(running[1]):
        return _Left(f"{running[1]:g} requests ran at its end")
    if any(grown.get(f"{engine}:{name}", 0) < 0 for name in ("inter_token_latency_seconds_sum", "generation_tokens")):
        return _Left("its counters fall: the server was restarted, or the later page comes first")
    ended = sum(grown.get(f"{engine}:{name}", 0) for name in ("num_requests", "request_success"))
    prefilled = _prefilled(engine, grown)
    if prefilled or ended:
        done = f"{counted(int(prefilled), 'token')} prefilled in it and {counted(int(ended), 'request')} ended"
        return _Left(f"it has {done}, so its times are mixed")
    batch = Load(int(running[1]))
    return (
        _sglang(before, after, grown, batch, called, said) if engine == "sglang" else _vllm(grown, batch, called, said)
    )


def _prefilled(engine: str, grown: Page) -> float:
    live = [grown[name] for name in grown if name.startswith("sglang:realtime_tokens:prefill")]
    return sum(live) if live else grown.get(f"{engine}:prompt_tokens", 0)


def _sglang(
    before: Page, after: Page, grown: Page, load: Load, called: str, said: Mapping[str, float]
) -> Timing | _Left:
    seconds, tokens = (grown.get(f"sglang:inter_token_latency_seconds_{name}", 0) for name in ("sum", "count"))
    if tokens <= 0 or seconds <= 0:
        return _Left("no token came in it", early=True)
    if grown.get("sglang:gen_throughput", 1.0) == 0:  # of the server's log, as the gauges are
        return _Left("the server logged no decode in it, so that its gauges may be old", early=True)
    lengths = [page.get("sglang:spec_accept_length", 0.0) for page in (before, after)]
    drafts = any(after.get(f"sglang:{name}", 0) > 0 for name in ("spec_accept_length", "spec_verify_calls"))
    if not drafts:
        return Timing(PLAIN, load, seconds / tokens, 1.0, f"metrics {called}")
    if not all(length >= 1 for length in lengths):
        return _Left("its server drafts and has not said its accept length yet")
    told = {name: int(after.get(f"sglang:spec_num_{name}", 0)) for name in ("steps", "draft_tokens")}
    setting = _setting(told, said, called)
    accept = _possible(setting, lengths[1], called)
    error = max(TRUST, abs(lengths[1] - lengths[0]) / accept)
    return Timing(setting, load, seconds / tokens * accept, accept, f"metrics {called}", error)


def _vllm(grown: Page, load: Load, called: str, said: Mapping[str, float]) -> Timing | _Left:
    names = ("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum")
    seconds = next((grown[f"vllm:{name}"] for name in names if f"vllm:{name}" in grown), 0.0)
    tokens = grown.get("vllm:generation_tokens", 0)
    drafts, drafted, accepted = (
        grown.get(f"vllm:spec_decode_num_{name}", 0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if tokens <= 0 or seconds <= 0:
        return _Left("no token came in it")
    if not drafts:
        return Timing(PLAIN, load, seconds / tokens, 1.0, f"metrics {called}")
    if abs(tokens - accepted - drafts) > max(_UNEVEN * drafts, load.batch):
        return _Left(f"{tokens - accepted:g} rounds ran in it and {drafts:g} of them drafted")
    steps = drafted / drafts
    if abs(steps - round(steps)) > _UNEVEN:
        return _Left(f"its rounds drafted {steps:.2f} tokens on average, so not all the same number")
    setting = _setting({"steps": round(steps)}, said, called)
    accept = _possible(setting, 1 + accepted / drafts, called)
    return Timing(setting, load, seconds / drafts, accept, f"metrics {called}")


def _setting(told: Mapping[str, int], said: Mapping[str, float], called: str) -> Setting:
    """As the pages say, else as typed. Raises UsageError where neither does, and where they contradict each other."""
    for name, least in (("steps", 1), ("draft_tokens", 2)):
        if name in said and told.get(name, 0) not in (0, whole(said, name, 0, least, MOST_NODES)):
            raise UsageError(
                f"{called} says that its server drafted {name}={told[name]}, and {name}={said[name]:g} was typed; "
                f"leave {name} out, or see to the page"
            )
    steps = whole(said, "steps", told.get("steps", 0), 1 if "steps" in said else 0, MOST_STEPS)
    if not steps:
        raise UsageError(f"{called} does not say how many steps were drafted; type {called}:steps=N")
    nodes = whole(said, "draft_tokens", told.get("draft_tokens", 0), 0, MOST_NODES)
    topk = whole(said, "topk", 1, 1, MOST_NODES)
    if "topk" not in said and nodes and nodes != steps + 1:
        raise UsageError(f"{called} drafts a tree of {nodes} tokens and does not say its topk; type {called}:topk=N")
    return make_setting(steps, topk, nodes or None)


def _possible(setting: Setting, accept: float, called: str) -> float:
    """``accept`` without what rounding added to it. Raises UsageError for more than the steps can give."""
    if accept > setting.most + ROUNDED:
        raise UsageError(
            f"{called} has accept length {accept:g}, and {setting.spelled} accept {setting.most} at most; give pages "
            f"of one server with one setting, or type the steps that it drafted as {called}:steps=N"
        )
    return min(accept, float(setting.most))
