"""A server's rounds held against a replay's: alike, first parted at a near tie, or unexplained.

Two machines round the same head in two orders, so where two drafts are almost equally good they may choose otherwise.
That is told from an error by measuring. The **margin** of a round that parts is by how much the replay preferred its
own draft to the server's, in nats, at the first place where they part; up to there both saw the same. The **noise** is
by how much the same numbers move at most, anywhere in the trace, between two rounding orders of the replay itself. The
margin compares two numbers, each of which the server and the replay have rounded in their own way: it is a near tie up
to twice the noise. The replay in the server's order is judged by what fp32 changes in it. One in another order is
judged by the noise between two of which it is none, or it could not fail.

This is the independent twin of what `replay simulate` counts (simulator/agreement.py, analysis/followed.py): rounds as
dictionaries and loops, the noise in a way of its own. ``count_in_production`` has that count, to hold it against this.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import replay
from replay.drafting.margins import margins_along
from replay.drafting.product_sizes import served_spans
from replay.drafting.rows import DraftInput
from replay.drafting.tree_margins import ServedTrees, tree_margins_along
from replay.drafting.tree_shape import ORPHAN, ROOT, TreeSize
from replay.drafting.trees import Candidates, grow_in_blocks, keep_best
from replay.head.model import Head
from replay.simulator.agreement import with_agreement
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import draft_input, sampled_after_chunks
from replay.simulator.variant import ResolvedVariant
from replay.traces.agreement import Agreement
from replay.traces.taps import FINAL

Anchor = tuple[str, int]  # request id, anchor
Branch = tuple[int, ...]  # drafted tokens from the known one on


@dataclass(frozen=True, slots=True)
class Judged:
    """Rounds by what they are: of each that parts the margin, and up to which one it is a near tie, in nats."""

    what: str
    rounds: int
    alike: int
    parted: tuple[tuple[float, float], ...]

    @property
    def unexplained(self) -> int:
        """Rounds that rounding does not explain."""
        return sum(margin > most for margin, most in self.parted)

    @property
    def largest(self) -> float:
        """The largest margin; 0 where all are alike."""
        return max((margin for margin, _ in self.parted), default=0.0)

    def __str__(self) -> str:
        said = f"{self.what}: {self.alike} of {self.rounds} rounds alike"
        if self.parted:
            near = len(self.parted) - self.unexplained
            share = max(margin / most for margin, most in self.parted)
            said += f", {near} part at a near tie, {self.unexplained} unexplained"
            said += f" (margins up to {self.largest:.3f} nats, {share:.2f} of what is near)"
        return said


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request as a head is to draft it: at the anchors of the server's rounds, which drafted these tokens.

    ``parents`` are those of trees, from the known token (0) as the trace counts them.
    """

    variant: ResolvedVariant
    head: Head
    item: DraftInput
    anchors: list[Anchor]
    drafted: list[list[int]]
    parents: list[list[int]]


def _at_served_anchors(trace: replay.Trace, head_folder: Path, variant: replay.Variant) -> Iterator[ServedRequest]:
    checkpoint = replay.load_head(head_folder)
    resolved = resolve(variant, checkpoint, trace)
    head = build_head(checkpoint, resolved, trace)
    spans = served_spans(trace.served_rounds())
    for index, record in enumerate(trace.records):
        name = record.request_id
        rounds = trace.served_rounds().filter(request_id=name).sort("round")
        chunk = head.behaviour.chunk
        rows = trace.read(index, (*resolved.wiring.taps, *([] if chunk is None else [FINAL])))
        sampled_T = None if chunk is None else sampled_after_chunks(rows, trace, chunk)
        whole = draft_input(rows, resolved.wiring, sampled_T, spans.get(name, ()))
        item = replace(whole, only=torch.tensor(rounds["anchor"].to_list()))
        anchors = [(name, anchor) for anchor in rounds["anchor"].to_list()]
        yield ServedRequest(resolved, head, item, anchors, rounds["drafted"].to_list(), rounds["parents"].to_list())


# ---- trees ----


@dataclass(frozen=True, slots=True)
class Grown:
    """What a replay grew at one anchor: the score (log) of each candidate path, the paths kept, those continued.

    ``drafted`` and ``parents`` are the tree as the trace has it, in order; parents count from the known token (0).
    """

    scores: Mapping[Branch, float]
    kept: frozenset[Branch]
    continued: frozenset[Branch]
    drafted: list[int]
    parents: list[int]


def grow_trees(trace: replay.Trace, head_folder: Path, variant: replay.Variant) -> dict[Anchor, Grown]:
    """The replay's trees at the anchors of the server's own rounds."""
    found: dict[Anchor, Grown] = {}
    for request in _at_served_anchors(trace, head_folder, variant):
        shape = request.variant
        size = TreeSize(shape.steps, shape.num_draft_tokens)
        with torch.inference_mode():
            blocks = grow_in_blocks(request.head, [request.item], topk=shape.topk, steps=shape.steps, kv=shape.kv)
            grown = [one for block in blocks for one in _grown(block, size)]
        found |= dict(zip(request.anchors, grown, strict=True))
    return found


def _grown(block: Candidates, size: TreeSize) -> Iterator[Grown]:
    trees = keep_best(block, size)
    for number, tokens_C in enumerate(block.tokens_AC.tolist()):
        parents_G = block.parents_AG[number].tolist()
        paths: list[Branch] = []
        for place, token in enumerate(tokens_C):
            parent = parents_G[place // block.topk]
            paths.append((token,) if parent == ROOT else (*paths[parent], token))
        scores = {path: _log(score) for path, score in zip(paths, block.scores_AC[number].tolist(), strict=True)}
        drafted, parents = trees.drafted_AN[number].tolist(), trees.parents_AN[number].tolist()
        kept = paths_of(zip(drafted, parents, strict=True))
        continued = frozenset(paths[parent] for parent in parents_G if parent != ROOT)
        yield Grown(scores, kept, continued, drafted, [parent + 1 for parent in parents])


def paths_of(nodes: Any) -> frozenset[Branch]:
    """The paths of a tree's nodes, given as (token, index of its parent or a negative number) from the root outward.

    A node whose parent was left out has none.
    """
    paths: list[Branch | None] = []
    for token, parent in nodes:
        above = () if parent == ROOT else paths[parent] if parent >= 0 else None
        paths.append(None if above is None else (*above, token))
    return frozenset(path for path in paths if path is not None)


def served_paths(row: Mapping[str, Any]) -> frozenset[Branch]:
    """The tree of a row of the server's rounds, whose parents count from the known token (0); -1 has none."""
    orphan = -2  # anything that is neither ROOT nor an index
    parents = [orphan if parent < 0 else parent - 1 for parent in row["parents"]]
    return paths_of((token, parent) for token, parent in zip(row["drafted"], parents, strict=True))


def judge_trees(
    what: str,
    trace: replay.Trace,
    mine: Mapping[Anchor, Grown],
    noise: Mapping[int, float],
    *others: Mapping[Anchor, Grown],
) -> Judged:
    """The server's trees against ``mine``; ``noise`` by depth, ``others`` are these in other rounding orders."""
    alike, parted = 0, []
    for row in trace.served_rounds().iter_rows(named=True):
        anchor = row["request_id"], row["anchor"]
        served = served_paths(row)
        if served == mine[anchor].kept:
            alike += 1
        else:
            margin, depth = tree_margin(served, mine[anchor], [other[anchor] for other in others])
            parted.append((margin, 2 * noise[depth]))
    return Judged(what, len(trace.served_rounds()), alike, tuple(parted))


def tree_noise(mine: Mapping[Anchor, Grown], other: Mapping[Anchor, Grown]) -> dict[int, float]:
    """By depth how far the score of a kept node moves at most between two rounding orders, in nats.

    From the third token on a node may see a stranger's rows (``slot``): it moves more where another one stands there.
    """
    moved: dict[int, list[float]] = {}
    for anchor, grown in mine.items():
        for path in grown.kept & other[anchor].scores.keys():
            moved.setdefault(len(path), []).append(abs(grown.scores[path] - other[anchor].scores[path]))
    return {depth: max(sizes) for depth, sizes in moved.items()}


def tree_margin(served: frozenset[Branch], mine: Grown, others: Sequence[Grown]) -> tuple[float, int]:
    """How far the first of the server's nodes that the replay left out was from being kept, in nats, and its depth.

    It was cut at the end, or its parent was not continued; where it was not among the likeliest after its parent, its
    score is the best of the other rounding orders, and the margin infinite where it has none there either.
    """
    left_out = served - mine.kept
    if not left_out:  # a tree of the server's that lacks nodes: none of its size
        return math.inf, 1
    path = min(left_out, key=lambda one: (len(one), -mine.scores.get(one, -math.inf)))
    parent = path[:-1]
    if path in mine.scores:
        return min(mine.scores[one] for one in mine.kept) - mine.scores[path], len(path)
    if parent and parent not in mine.continued:
        rivals = [mine.scores[one] for one in mine.continued if len(one) == len(parent)]
        return min(rivals) - mine.scores.get(parent, -math.inf), len(parent)
    siblings = [score for one, score in mine.scores.items() if one[:-1] == parent]
    return min(siblings) - max(other.scores.get(path, -math.inf) for other in others), len(path)


def follow_trees(trace: replay.Trace, head_folder: Path, variant: replay.Variant) -> dict[Anchor, tuple[float, bool]]:
    """The replay grown along the server's own trees: the largest margin at each anchor, and whether both are alike."""
    found: dict[Anchor, tuple[float, bool]] = {}
    for request in _at_served_anchors(trace, head_folder, variant):
        shape, parents_AN = request.variant, torch.tensor(request.parents)
        served = ServedTrees(torch.tensor(request.drafted), torch.where(parents_AN < 0, ORPHAN, parents_AN - 1))
        with torch.inference_mode():
            (read,) = tree_margins_along(
                request.head, [request.item], [served], topk=shape.topk, steps=shape.steps, kv=shape.kv, scales=[]
            )
        largest_A = read.margin_AN.nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
        found |= dict(zip(request.anchors, zip(largest_A.tolist(), read.alike_A.tolist(), strict=True), strict=True))
    return found


def _log(score: float) -> float:
    return math.log(score) if score > 0 else -math.inf


# ---- chains ----


@dataclass(frozen=True, slots=True)
class Followed:
    """A replay that follows the server's own drafts: at each anchor [K] what it would draft, and log-probabilities."""

    served: tuple[int, ...]
    preferred: tuple[int, ...]
    margins: tuple[float, ...]
    log_probs: tuple[float, ...]


def follow_chains(trace: replay.Trace, head_folder: Path, variant: replay.Variant) -> dict[Anchor, Followed]:
    """The replay fed what the server drafted, at the anchors of the server's own rounds."""
    found: dict[Anchor, Followed] = {}
    for request in _at_served_anchors(trace, head_folder, variant):
        drafted_AK = torch.tensor(request.drafted)
        with torch.inference_mode():
            (read,) = margins_along(request.head, [request.item], [drafted_AK])
        columns = (drafted_AK, read.preferred_AK, read.margin_AK, read.logit_AK - read.logsumexp_AK)
        for anchor, *parts in zip(request.anchors, *(column.tolist() for column in columns), strict=True):
            found[anchor] = Followed(*map(tuple, parts))
    return found


def judge_chains(what: str, mine: Mapping[Anchor, Followed], noise: float) -> Judged:
    """The server's chains against ``mine``."""
    parted = []
    for one in mine.values():
        step = first_difference(one)
        if step is not None:
            parted.append((one.margins[step], 2 * noise))
    return Judged(what, len(mine), len(mine) - len(parted), tuple(parted))


def first_difference(one: Followed) -> int | None:
    """The first step in which the replay would draft another token than the server; None for none."""
    pairs = enumerate(zip(one.served, one.preferred, strict=True))
    return next((step for step, (served, preferred) in pairs if served != preferred), None)


def chain_noise(mine: Mapping[Anchor, Followed], other: Mapping[Anchor, Followed]) -> float:
    """How far the log-probability of a server's token moves at most between two rounding orders, in nats.

    Of tokens at most as likely as all others together, as one in a near tie is: a certain one hardly moves.
    """
    return max(
        abs(here - there)
        for anchor, one in mine.items()
        for here, there in zip(one.log_probs, other[anchor].log_probs, strict=True)
        if max(here, there) <= math.log(0.5)
    )


# ---- what production says ----


def count_in_production(trace: replay.Trace, head_folder: Path, variants: Sequence[replay.Variant]) -> list[Agreement]:
    """The agreement of each variant as `replay simulate` counts it; all of them must be in the server's shape."""
    heads = {variant.draft: replay.load_head(head_folder) for variant in variants}
    rounds = with_agreement(replay.simulate(trace, heads, variants), trace, heads, variants)
    found = [one.agreement for one in rounds.variants]
    told = [one for one in found if one is not None]
    assert len(told) == len(found)
    return told


# ---- what a test shows of it ----


def report_judged(record_property: Any, judged: Sequence[Judged]) -> None:
    """Leave the sentences for the end of the run (conftest.py), where ``make test-kernels`` is read."""
    for one in judged:
        record_property("judged", str(one))
