"""Rounds tables made by hand: accepted counts in, a table that the reader accepts out."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from replay.traces.rounds import RequestInfo, Rounds, VariantInfo, table_schema

PROMPT_TOKENS = 10

Accepted = Sequence[Sequence[int]]  # by request, by round


def make_variant(name: str, **changes: Any) -> VariantInfo:
    """A chain of 3 steps under SGLang's conventions; ``changes`` replace fields."""
    steps = changes.get("steps", 3)
    values: dict[str, Any] = {
        "name": name,
        "draft": "heads/story",
        "wiring": ("embed", "3", "16"),
        "steps": steps,
        "topk": 1,
        "num_draft_tokens": steps + 1,
        "precision": "bfloat16",
        "numerics": "sglang",
        "kv": "refresh",
        "verify": "greedy",
        "temperature": 0.0,
        "engine": "sglang",
        "faults": (),
        "seconds": 1.5,
        "anchors": 0,
        "anchors_accepted": 0,
        "ties": 0,
    }
    return VariantInfo(**values | changes)


def make_rounds(
    played: dict[VariantInfo, Accepted],
    *,
    observed: Accepted | None = None,
    cut_last: bool = False,
    trace: dict[str, Any] | None = None,
    **request: Any,
) -> Rounds:
    """``played[variant][request]`` lists the accepted tokens of its rounds.

    Output lengths are those of the first variant (one token from prefill, then accepted + 1 a round). ``observed``
    gives the server's rounds in the same shape; ``request`` replaces fields of every request.
    """
    first = next(iter(played.values()))
    rows = []
    for variant, requests in played.items():
        for number, accepted in enumerate(requests):
            anchor = PROMPT_TOKENS + 1
            for index, count in enumerate(accepted):
                cut = cut_last and index == len(accepted) - 1
                rows.append((variant.name, f"r{number}", index, anchor, [5] * variant.steps, count, cut))
                anchor += count + 1
    return Rounds(
        table=pl.DataFrame(rows, schema=table_schema(), orient="row"),
        variants=tuple(played),
        requests=tuple(
            RequestInfo(
                **{
                    "request_id": f"r{number}",
                    "category": None,
                    "prompt_tokens": PROMPT_TOKENS,
                    "output_tokens": 1 + sum(accepted) + len(accepted),
                    "observed_rounds": None if observed is None else len(observed[number]),
                    "observed_histogram": None if observed is None else histogram(observed[number]),
                }
                | request
            )
            for number, accepted in enumerate(first)
        ),
        trace={"path": "traces/story", "target": "SmolLM2-135M-Instruct"} if trace is None else trace,
        drafts={"heads/story": {"taps": 3, "dtype": "bfloat16", "notes": ["the head shares the target's embedding"]}},
    )


def histogram(accepted: Sequence[int]) -> tuple[int, ...]:
    """Rounds by accepted tokens, as long as the largest needs."""
    return tuple(list(accepted).count(count) for count in range(max(accepted, default=0) + 1))
