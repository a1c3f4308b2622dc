"""Rounds of an imagined server that drafts for several requests at once, as its twins play them."""

from collections.abc import Generator, Sequence
from itertools import count
from typing import Any

import polars as pl
import torch
from twins.crossed import run_batch
from twins.rounds import Twin
from twins.trees import TwinNode, accept_in_tree, growing

from replay.drafting.rows import DraftInput
from replay.head.model import Head
from replay.traces.server_rounds import served_schema


def served_together(
    names: Sequence[str],
    head: Head,
    items: Sequence[DraftInput],
    crossed: str,
    together: int,
    *,
    steps: int,
    topk: int,
    nodes: int,
) -> pl.DataFrame:
    """Rounds of a server that drafts for so many requests at once, a row each: the next one waits until one has ended.

    ``crossed`` as in state.crossed=CROSSED, empty for none.
    """
    waiting, running = list(range(len(items))), list[int]()
    anchors = [item.prompt_tokens for item in items]
    rows: list[tuple[object, ...]] = []
    numbers = [0] * len(items)
    for verify_pass in count():
        while waiting and len(running) < together:
            running.append(waiting.pop(0))
        if not running:
            return pl.DataFrame(rows, schema=served_schema(), orient="row")
        runs = [_drafting(head, items[one], anchors[one], steps, topk, nodes) for one in running]
        with torch.inference_mode():
            made, _ = run_batch(runs, crossed.removesuffix(":once"), once=crossed.endswith(":once"))
        for row, (one, draft) in enumerate(zip(running, made, strict=True)):
            tree = [node if topk > 1 else TwinNode(node, place - 1) for place, node in enumerate(draft)]
            accepted = accept_in_tree(tree, items[one].tokens_T.tolist()[anchors[one] + 1 :])
            parents = [max(node.parent + 1, -1) for node in tree] if topk > 1 else None
            told = (verify_pass, row)
            drafted = [node.token for node in tree]
            rows.append((names[one], numbers[one], anchors[one], drafted, accepted, parents, len(running), *told))
            anchors[one] += accepted + 1
            numbers[one] += 1
        running = [one for one in running if anchors[one] < len(items[one].tokens_T) - 1]
    raise AssertionError("it counts on")


def _drafting(
    head: Head, item: DraftInput, anchor: int, steps: int, topk: int, nodes: int
) -> Generator[Any, Any, list[Any]]:
    """One round of one request, step by step: target ids of a chain or nodes of a tree."""
    if topk > 1:
        shape = {"topk": topk, "steps": steps, "num_draft_tokens": nodes + 1}
        return growing(head, item.tokens_T, item.features_RKD, anchor, **shape, kv="slot")
    twin = Twin(head, item.tokens_T, item.features_RKD, item.prompt_tokens)
    while twin.anchor < anchor:
        twin.commit(1, 0)
    return twin.drafting(steps)
