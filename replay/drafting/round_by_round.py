"""Rounds in order, many requests side by side: for behaviour under which the draft KV depends on the rounds before.

Where every_anchor.py drafts at every anchor at once, this keeps one growing draft KV per request (slot_kv.py) and plays
round after round: drafts, verify, and what a server leaves in the KV (engines/behaviour.py). What follows the walk is
played only here, and all other behaviour too but states that cross between requests (crossed.py). Slower than
every_anchor.py; the twin is tests/twins/rounds.py.

Suffixes: N requests of a pass, Q rows of each, R rows of all, K steps, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.first_pass import MadeRows, whole_prompts
from replay.drafting.margins import Margins, join_margins, read_margins, served_index, stack_margins
from replay.drafting.next_tokens import next_tokens
from replay.drafting.product_sizes import served_sizes
from replay.drafting.rows import DraftInput, committed_rows, drafted_positions, find_dummies
from replay.drafting.slot_kv import SlotKV, SlotRows
from replay.errors import UsageError
from replay.head.model import Head
from replay.head.products import ProductSizes, group_by_size
from replay.verify.accept import continuations, count_accepted


@dataclass(frozen=True, slots=True)
class WalkedRounds:
    """The rounds of one request: anchors [r], target ids drafted [r, K], ties [r, K], accepted tokens [r].

    ``margins`` [r, K] where a server's own drafts were followed; its tokens are then those that were drafted.
    """

    anchors: tuple[int, ...]
    drafted_RK: Tensor
    tied_RK: Tensor
    accepted: tuple[int, ...]
    margins: Margins | None = None


def walk(
    head: Head,
    inputs: Sequence[DraftInput],
    steps: int,
    tails: Sequence[Tensor] | None = None,
    follow: Sequence[Sequence[int]] | None = None,
    served: Sequence[Tensor] | None = None,
    scales: Sequence[float] = (),
) -> list[WalkedRounds]:
    """Every round of every request, in the order of ``inputs``. ``tails`` as in ``continuations``.

    ``follow`` are the accepted tokens of each request's rounds in another run: the walk then goes as that one went,
    as far as it goes, whatever is drafted here. With ``served`` too, the target ids [r, K] that it drafted in them (-1
    for none), every drafted row embeds what was drafted there, and what is left in the draft KV is made of that; each
    round has ``margins`` with these noise ``scales`` (margins.py).

    Equal to tests/twins/rounds.py up to the rounding of products over other numbers of rows. Raises UsageError for
    states that cross between requests: here they go round by round, and not in the batches of a server.
    """
    if head.behaviour.crosses:
        raise UsageError("a walk has no batches, in which states cross between requests; follow a server's rounds")
    tails = tails or [torch.empty(0, dtype=torch.long) for _ in inputs]
    follow = follow or [() for _ in inputs]
    drafts = [None for _ in inputs] if served is None else served
    requests = [_Request(head, *given) for given in zip(inputs, tails, follow, drafts, strict=True)]
    _Walk(head, [request for request in requests if request.item.anchors and not request.done], steps, scales).run()
    return [request.rounds(steps) for request in requests]


class _Request:
    """One request on its way: its committed rows, where its walk stands, and the rounds so far."""

    def __init__(
        self, head: Head, item: DraftInput, tail: Tensor, follow: Sequence[int], served_RK: Tensor | None
    ) -> None:
        self.item, self._tail, self._follow, self._served_RK = item, tail, tuple(follow), served_RK
        self.rows = committed_rows(item, head.behaviour, head.config.target_hidden_size)
        self.sizes = _sizes(head, item)
        self.state_RE = head.fuse(self.rows.features_RKD, self.sizes)
        self.embed_RE = head.embed(self.rows.ids_R)
        self.anchor = item.prompt_tokens
        self.taken = 0  # accepted tokens that led to the anchor
        self.accepted: list[int] = []
        self._anchors: list[int] = []
        self._drafted: list[Tensor] = []
        self._tied: list[Tensor] = []
        self.margins: list[Margins] = []

    @property
    def served_K(self) -> Tensor | None:
        """What the run that is followed drafted in the round that is to come; None where it is not followed so far."""
        return None if self._served_RK is None else self._served_RK[len(self.accepted)]

    @property
    def done(self) -> bool:
        ended = self.anchor >= len(self.item.tokens_T) - 1
        return ended or (bool(self._follow) and len(self.accepted) >= len(self._follow))

    def play(self, drafted_K: Tensor, tied_K: Tensor) -> None:
        """Verify and note a round, and go on to the next anchor: by what was accepted, here or in the run followed."""
        accepted = self._verify(drafted_K)
        self._anchors.append(self.anchor)
        self._drafted.append(drafted_K)
        self._tied.append(tied_K)
        self.accepted.append(accepted)
        self.taken = self._follow[len(self.accepted) - 1] if self._follow else accepted
        self.anchor += self.taken + 1

    def _verify(self, drafted_K: Tensor) -> int:
        """How many of the drafted tokens the target takes at the anchor."""
        tokens, tail = self.item.tokens_T.numpy(), self._tail.numpy()
        anchors = torch.tensor([self.anchor]).numpy()
        chosen = continuations(tokens, tail, anchors, len(drafted_K))
        return int(count_accepted(drafted_K[None].numpy(), chosen)[0])

    def rounds(self, steps: int) -> WalkedRounds:
        empty = torch.empty((0, steps), dtype=torch.long)
        drafted, tied = (torch.stack(part) if part else empty for part in (self._drafted, self._tied))
        margins = join_margins(self.margins) if self.margins else None
        return WalkedRounds(tuple(self._anchors), drafted, tied.bool(), tuple(self.accepted), margins)


def _sizes(head: Head, item: DraftInput) -> ProductSizes | None:
    """Products over the rows of one request as a server runs them: the prompt whole, the others in few."""
    sizes_R = served_sizes([item], head.execution)
    return None if sizes_R is None else group_by_size(sizes_R.to(head.device))


def _filled(rows: Sequence[int], most: int) -> list[int]:
    """So many rows as ``most``: the last one is repeated."""
    return [*rows, *[rows[-1]] * (most - len(rows))]


class _Walk:
    """All requests of a pack, round by round; a request's lane is its index among them."""

    def __init__(self, head: Head, requests: Sequence[_Request], steps: int, scales: Sequence[float]) -> None:
        self._head, self._behaviour, self._requests, self._steps = head, head.behaviour, requests, steps
        self._scales = scales
        kept = steps if self._behaviour.rewrite == "accumulate" else 1
        slots = max((len(request.item.tokens_T) * kept + steps + 1 for request in requests), default=0)
        self._kv = SlotKV(head, len(requests), slots)
        self._out_NE = torch.zeros((len(requests), head.config.hidden_size), dtype=head.dtype, device=head.device)
        self._feedback_NE = self._out_NE.clone()

    def run(self) -> None:
        """Until every output has ended."""
        for lane, request in enumerate(self._requests):
            prompt = request.item.prompt_tokens
            sizes = None if request.sizes is None else request.sizes.keep(slice(prompt))
            self._commit([lane], [range(prompt)], [None], sizes)
            rows, chunk = self._head.execution.prefill_rows, self._head.behaviour.chunk
            if self._head.of_whole_prompts() and request.item.prefilled_whole(rows, chunk):
                self._end_whole_prompt(lane, sizes)
        running = list(range(len(self._requests)))
        while running:
            running = self._round(running)

    def _end_whole_prompt(self, lane: int, sizes: ProductSizes | None) -> None:
        """The row that the first round drafts from, in the order in which a server prefills a whole prompt."""
        request = self._requests[lane]
        prompt = slice(request.item.prompt_tokens)
        positions_R = request.rows.positions_R[prompt].to(self._head.device)
        made = MadeRows(request.embed_RE[prompt], request.state_RE[prompt], positions_R, sizes)
        last = whole_prompts(self._head, [(request.item, request.rows)], made)
        self._out_NE[lane], self._feedback_NE[lane] = last.normed_RE[0], last.feedback_RE[0]

    def _round(self, running: list[int]) -> list[int]:
        """One round of each running lane; the lanes that go on."""
        drafted_NK, tied_NK = self._draft(running)
        going, ranges, holes = [], [], []
        for lane, drafted_K, tied_K in zip(running, drafted_NK, tied_NK, strict=True):
            request = self._requests[lane]
            anchor = request.anchor
            request.play(drafted_K, tied_K)
            if request.done:
                continue
            kept, first = self._keep(request.taken)
            self._kv.keep(lane, kept)
            going.append(lane)
            ranges.append(range(anchor + first, anchor + request.taken + 1))
            holes.append(anchor + request.taken - 1 if self._leaves_hole(request.taken) else None)
        if going:
            self._commit(going, ranges, holes)
        return going

    def _keep(self, taken: int) -> tuple[int, int]:
        """How many drafted rows stay, and the first row behind the anchor row that is made from true features."""
        if self._behaviour.rewrite == "stale":
            kept = min(taken, self._steps - 1)
            return kept, kept
        return (self._steps - 1 if self._behaviour.rewrite == "accumulate" else 0), 0

    def _leaves_hole(self, taken: int) -> bool:
        """Whether the row of the last accepted drafted token is left blank."""
        least = {"never": self._steps + 1, "accepted": 1, "full": self._steps}[self._behaviour.hole]
        return taken >= least

    def _draft(self, running: list[int]) -> tuple[Tensor, Tensor]:
        """Drafted ids and ties [N, K] on the CPU; the drafted rows lie behind the slots in use."""
        head, behaviour = self._head, self._behaviour
        out_NE, feedback_NE = self._out_NE[running], self._feedback_NE[running]
        anchor_rows_N = torch.tensor([self._requests[lane].anchor - 1 for lane in running])
        served_NK = self._served(running)
        index_NK = None if served_NK is None else served_index(head, served_NK)
        drafted: list[Tensor] = []
        tied: list[Tensor] = []
        read: list[tuple[Tensor, ...]] = []
        passes = self._steps + (behaviour.next_row == "drafted")
        for step in range(passes):
            if step:
                rows = SlotRows(running, anchor_rows_N[:, None] + step, [1] * len(running), step)
                positions_N = drafted_positions(anchor_rows_N, step, behaviour)
                output = head.forward(head.embed(drafted[-1]), feedback_NE, positions_N, self._kv.attend(rows))
                out_NE, feedback_NE = output.normed_RE, output.feedback_RE
            if step < self._steps and served_NK is not None and index_NK is not None:
                read.append(read_margins(head, out_NE, index_NK[:, step], self._scales))
                drafted.append(served_NK[:, step].clamp(min=0))
                tied.append(torch.zeros(len(running), dtype=torch.bool))
            elif step < self._steps:
                ids_N, tied_N = next_tokens(head, out_NE)
                drafted.append(ids_N)
                tied.append(tied_N)
        if behaviour.next_row == "drafted":
            self._out_NE[running], self._feedback_NE[running] = out_NE, feedback_NE
        drafted_NK = torch.stack(drafted, 1).cpu()
        dummy_N = find_dummies(anchor_rows_N, behaviour)
        if served_NK is not None:
            self._note_margins(running, stack_margins(read, served_NK, dummy_N.to(head.device)))
            return served_NK.cpu(), torch.stack(tied, 1).cpu()
        drafted_NK[dummy_N] = 0
        return drafted_NK, torch.stack(tied, 1).cpu()

    def _served(self, running: list[int]) -> Tensor | None:
        """What the run that is followed drafted in this round of each lane [N, K]; None where none is followed."""
        served = [self._requests[lane].served_K for lane in running]
        told = [served_K for served_K in served if served_K is not None]
        return torch.stack(told).to(self._head.device) if told else None

    def _note_margins(self, running: list[int], margins_NK: Margins) -> None:
        for place, lane in enumerate(running):
            self._requests[lane].margins.append(margins_NK.rows(slice(place, place + 1)))

    def _commit(
        self,
        lanes: list[int],
        ranges: Sequence[range],
        holes: Sequence[int | None],
        sizes: ProductSizes | None = None,
    ) -> None:
        """Rows of true features for each lane, and the one among them from which its next round drafts."""
        head = self._head
        counts = [len(rows) for rows in ranges]
        most = max(counts)
        # Shorter ones repeat their last row; what these give is thrown away.
        index_NQ = torch.tensor([_filled(rows, most) for rows in ranges])
        taken = list(zip((self._requests[lane] for lane in lanes), index_NQ, strict=True))
        positions_R = torch.cat([request.rows.positions_R[index_Q] for request, index_Q in taken])
        fed = zip((request for request, _ in taken), self._sources(lanes, ranges, most), strict=True)
        state_RE = torch.cat([request.state_RE[source_Q.to(head.device)] for request, source_Q in fed])
        embed_RE = torch.cat([request.embed_RE[index_Q.to(head.device)] for request, index_Q in taken])
        for lane, rows, hole in zip(lanes, ranges, holes, strict=True):
            self._mark_holes(lane, rows, hole)
        attend = self._kv.attend(SlotRows(lanes, index_NQ, counts, 0))
        output = head.forward(embed_RE, state_RE, positions_R, attend, sizes=sizes)
        for row, (lane, count) in enumerate(zip(lanes, counts, strict=True)):
            self._kv.keep(lane, count)
            request = self._requests[lane]
            first_round = not request.accepted
            if self._behaviour.next_row == "drafted" and not first_round and request.taken < self._steps:
                continue  # the next round goes on from the last drafted row, which is there already
            token_row, state_row = (row * most + chosen for chosen in self._next_rows(count, first_round))
            self._out_NE[lane] = output.normed_RE[token_row]
            self._feedback_NE[lane] = output.feedback_RE[state_row]

    def _sources(self, lanes: list[int], ranges: Sequence[range], most: int) -> Tensor:
        """The rows whose features those of each lane are made from [N, Q]: their own but where they are stale."""
        kind = self._behaviour.stale_rows
        sources = []
        for lane, rows in zip(lanes, ranges, strict=True):
            made = list(rows)
            after_verify = bool(self._requests[lane].accepted)
            if after_verify and kind == "anchor":
                made[-1] -= 1
            elif after_verify and kind == "previous":
                made = [row - 1 for row in made]
            elif after_verify and kind in ("first", "last"):
                made = [made[0 if kind == "first" else -1]] * len(made)
            sources.append(_filled(made, most))
        return torch.tensor(sources)

    def _next_rows(self, count: int, first_round: bool) -> tuple[int, int]:
        """Which of ``count`` rows of true features give the next round's first token, and the state fed on."""
        last, kind = count - 1, "accepted" if first_round else self._behaviour.next_row
        token_row = {"first": 0, "previous": max(0, last - 1)}.get(kind, last)
        return token_row, 0 if kind == "hidden-only" else token_row

    def _mark_holes(self, lane: int, rows: range, hole: int | None) -> None:
        """Note which slots are blank: of those that the pass is about to fill, and of drafted rows that stay."""
        blank_R = self._requests[lane].rows.blank_R
        here_R = torch.zeros(len(rows), dtype=torch.bool) if blank_R is None else blank_R[list(rows)].clone()
        start = self._kv.used(lane)
        if hole is not None and hole in rows:
            here_R[hole - rows[0]] = True
        elif hole is not None:
            self._kv.mark_blank(lane, start - (rows[0] - hole), torch.ones(1, dtype=torch.bool))
        self._kv.mark_blank(lane, start, here_R)
