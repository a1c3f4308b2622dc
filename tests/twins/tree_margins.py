"""The slow, obvious twin of drafting/tree_margins.py: one anchor, one row at a time, trees as dictionaries of paths.

A path is the tuple of drafted tokens from the known one on. Nothing is cached: every row runs the head over all rows
that it sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isinf, log, nan

import numpy as np
import torch
from torch import Tensor
from twins.trees import committed_rows

from replay.drafting.rows import DraftInput
from replay.drafting.tree_shape import ROOT
from replay.head.model import Head

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TwinNodeMargin:
    """Of one node of a server's tree, as in ``TreeMargins``; NaN and depth 0 where no path leads to it."""

    margin: float
    spread: tuple[float, ...]
    score: float
    depth: int


@dataclass(frozen=True, slots=True)
class TwinTreeMargins:
    """Of one anchor: its nodes, the largest margin of each sort, and at which depths the server had to be followed."""

    nodes: list[TwinNodeMargin]
    alike: bool
    largest: Mapping[str, float]
    forced: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Grown:
    """Cumulative probabilities of the candidates in their order, those that were continued, all probabilities after
    each row, and where the server was followed against the head's own choice."""

    scores: dict[Path, np.float32]
    continued: set[Path]
    after: dict[Path, dict[int, np.float32]]
    forced: set[tuple[str, int]]

    def of_depth(self, depth: int) -> list[Path]:
        return [path for path in self.scores if len(path) == depth]


def tree_margins_at(
    head: Head, item: DraftInput, anchor: int, tokens: Sequence[int], parents: Sequence[int], *, topk: int, steps: int,
    kv: str, scales: Sequence[float],
) -> TwinTreeMargins:  # fmt: skip
    """Of the tree that a server drafted at ``anchor``."""
    paths = _paths(tokens, parents)
    served = [path for path in paths if path is not None]
    along = _grow(head, item, anchor, served, topk, steps, kv)
    alone = _grow(head, item, anchor, [], topk, steps, kv)
    size = sum(token >= 0 for token in tokens)
    own = _with_all_above(set(sorted(alone.scores, key=lambda path: -alone.scores[path])[:size]))
    rows, largest = [], {"proposed": 0.0, "continued": 0.0, "kept": 0.0}
    for path in paths:
        if path is None:
            rows.append(TwinNodeMargin(nan, tuple(nan for _ in scales), nan, 0))
            continue
        short = {
            "proposed": _proposed(along, path, topk),
            "continued": _continued(along, path, topk) if _has_children(path, served) else 0.0,
        }
        score, rivals = _log(along.scores[path]), _rivals(along, path, served)
        short["kept"] = _shortfall(max(rivals, default=-inf), score)
        largest = {name: max(largest[name], short[name]) for name in short}
        spread = tuple(_spread([score, *rivals], scale) for scale in scales)
        rows.append(TwinNodeMargin(max(short.values()), spread, score, len(path)))
    return TwinTreeMargins(rows, own == set(served), largest, frozenset(along.forced))


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path | None]:
    paths: list[Path | None] = []
    for token, parent in zip(tokens, parents, strict=True):
        above = () if parent == ROOT else paths[parent] if parent >= 0 and token >= 0 else None
        paths.append(None if above is None or token < 0 else (*above, token))
    return paths


def _with_all_above(paths: set[Path]) -> set[Path]:
    return {path for path in paths if all(path[:length] in paths for length in range(1, len(path)))}


def _has_children(path: Path, served: list[Path]) -> bool:
    return any(other[:-1] == path for other in served)


def _grow(head: Head, item: DraftInput, anchor: int, served: list[Path], topk: int, steps: int, kv: str) -> _Grown:
    """Candidates that hold every node of ``served``; of the rest those that the head takes by itself."""
    committed = committed_rows(head, item.tokens_T, item.features_RKD, anchor)
    grown = _Grown({}, set(), {}, set())
    feedback, likely = committed.every_token(head)
    _propose(grown, (), np.float32(1), likely, served, topk)
    column_of = {path: 0 for path in grown.scores}  # in which column a candidate was proposed
    columns, feedbacks = [committed] * topk, [feedback] * topk
    chosen = grown.of_depth(1)
    for step in range(1, steps):
        before, states = list(columns), list(feedbacks)
        for column, path in enumerate(chosen):
            grown.continued.add(path)
            history = before[column_of[path] if kv == "path" and step > 1 else column]
            columns[column] = history.then(head.embed(torch.tensor([path[-1]]))[0], states[column_of[path]])
            feedbacks[column], likely = columns[column].every_token(head)
            new = _propose(grown, path, grown.scores[path], likely, served, topk)
            column_of |= {candidate: column for candidate in new}
        chosen = _choose_columns(grown, step + 1, served, topk)
    return grown


def _propose(
    grown: _Grown, path: Path, score: np.float32, likely: list[tuple[int, np.float32]], served: list[Path], topk: int
) -> list[Path]:
    """Tokens after ``path``: the server's children, filled up with the likeliest others; by probability."""
    known = dict(likely)
    grown.after[path] = known
    order = list(known)
    wanted = [other[-1] for other in served if other[:-1] == path]
    others = [token for token in order[:topk] if token not in wanted]
    tokens = wanted + others[: topk - len(wanted)]
    if set(tokens) != set(order[:topk]):
        grown.forced.add(("proposed", len(path) + 1))
    tokens.sort(key=lambda token: -known.get(token, np.float32(0)))
    new = {(*path, token): np.float32(score * known.get(token, np.float32(0))) for token in tokens}
    grown.scores.update(new)
    return list(new)


def _choose_columns(grown: _Grown, depth: int, served: list[Path], topk: int) -> list[Path]:
    order = sorted(grown.of_depth(depth), key=lambda path: -grown.scores[path])
    wanted = [path for path in order if _has_children(path, served)]
    others = [path for path in order[:topk] if path not in wanted]
    columns = wanted + others[: topk - len(wanted)]
    if set(columns) != set(order[:topk]):
        grown.forced.add(("continued", depth))
    return sorted(columns, key=order.index)


def _proposed(grown: _Grown, path: Path, topk: int) -> float:
    """Short of the ``topk``-th best other token after the same parent."""
    known = grown.after[path[:-1]]
    if path[-1] not in known:
        return inf
    others = sorted((chance for token, chance in known.items() if token != path[-1]), reverse=True)
    return _shortfall(_log(others[topk - 1]), _log(known[path[-1]])) if len(others) >= topk else 0.0


def _continued(grown: _Grown, path: Path, topk: int) -> float:
    """Short of the ``topk``-th best other candidate of the same depth."""
    others = sorted((grown.scores[other] for other in grown.of_depth(len(path)) if other != path), reverse=True)
    return _shortfall(_log(others[topk - 1]), _log(grown.scores[path])) if len(others) >= topk else 0.0


def _rivals(grown: _Grown, path: Path, served: list[Path]) -> list[float]:
    """What each candidate that the server did not keep is worth against the node of ``path``."""
    worth = []
    for rival, chance in grown.scores.items():
        if rival in served:
            continue
        parent = rival[:-1]
        if not parent or _has_children(parent, served):
            worth.append(_log(chance))
            continue
        left_out = [grown.scores[other] for other in grown.of_depth(len(parent)) if other not in grown.continued]
        cost = _shortfall(_log(grown.scores[parent]), _log(max(left_out))) if left_out else inf
        worth.append(_log(chance) if cost == inf else min(_log(chance), _log(grown.scores[path]) + cost))
    return worth


def _spread(scores: Sequence[float], scale: float) -> float:
    best = max(scores)
    if isinf(best):  # then all are equally good
        return log(len(scores))
    return log(sum(exp((score - best) / scale) for score in scores))


def _shortfall(better: float, own: float) -> float:
    return better - own if better > own else 0.0


def _log(chance: np.float32) -> float:
    return log(chance) if chance > 0 else -inf


def numbers(margins: TwinTreeMargins) -> Tensor:
    """Margin, score and spreads of each node [N, 2 + Z]."""
    return torch.tensor([(row.margin, row.score, *row.spread) for row in margins.nodes], dtype=torch.float64)
