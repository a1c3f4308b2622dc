"""The rounds of a server divided by what may matter to it: by request, batch, place and what came before."""

from typing import TYPE_CHECKING

from replay.analysis.diagnosis.breakdown import length_range
from replay.diagnosis.case import Case
from replay.simulator.served_drafts import served_drafts

if TYPE_CHECKING:
    import polars as pl


def round_views(case: Case, rounds: "pl.DataFrame") -> dict[str, list[str]]:
    """For each division the part that every round belongs to [R], in the order in which a replay follows them."""
    views: dict[str, list[str]] = {}
    batches = dict(zip(zip(rounds["request_id"], rounds["anchor"], strict=True), rounds["batch"], strict=True))
    drafts = served_drafts(rounds)
    for number, record in enumerate(case.trace.records):
        if record.request_id not in drafts:
            continue
        played = drafts[record.request_id].before(record.tokens - 1)
        for place, anchor in enumerate(played.anchors):
            batch = batches[record.request_id, anchor]
            before = "the prompt" if not place else _taken(played.accepted[place - 1], len(played.drafted[place - 1]))
            parts = {
                "request": record.request_id,
                "category": record.category or "none",
                "requests verified together": "not recorded" if batch is None else str(batch),
                "cached prompt tokens": "some" if record.server_cached_tokens else "none",
                "prompt length": length_range(record.prompt_tokens),
                "position": length_range(anchor),
                "output position": length_range(anchor - record.prompt_tokens),
                "rounds since the prompt": "0" if not place else "1 to 3" if place < 4 else "more",
                "the round before took": before,
                "request's place in the trace": "early" if 2 * number < len(case.trace) else "late",
            }
            for name, part in parts.items():
                views.setdefault(name, []).append(part)
    return views


def _taken(accepted: int, drafted: int) -> str:
    return "nothing" if not accepted else "everything" if accepted == drafted else "a part"
