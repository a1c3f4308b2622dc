"""Rounds in order, many requests side by side: for behaviour under which the draft KV depends on the rounds before.

Where every_anchor.py computes every anchor at once, this keeps one growing draft KV per request and plays round after
round: drafts, verify, and what the engine leaves in the KV (engines/behaviour.py). Any behaviour can be played here,
and what follows the walk only here. Slower than every_anchor.py; the twin is tests/twins/rounds.py.

Suffixes: N requests of the pack that are still running, Q rows of each in one pass, C slots of the draft KV,
K steps, E head width; M, G, H as in head/attention.py.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.every_anchor import seen_from
from replay.drafting.first_pass import served_sizes
from replay.drafting.next_tokens import next_tokens
from replay.drafting.rows import DraftInput, Rows, committed_rows, drafted_positions
from replay.head.attention import attend_to_slots
from replay.head.model import Head, HeadOutput
from replay.verify.accept import continuations, count_accepted


@dataclass(frozen=True, slots=True)
class WalkedRounds:
    """The rounds of one request: anchors [r], target ids drafted [r, K], ties [r, K], accepted tokens [r]."""

    anchors: tuple[int, ...]
    drafted_RK: Tensor
    tied_RK: Tensor
    accepted: tuple[int, ...]


class _Request:
    """One request on its way: its committed rows, where its walk stands, and how many slots it has filled."""

    def __init__(
        self,
        item: DraftInput,
        tail: Tensor,
        rows: Rows,
        state_RE: Tensor,
        embed_RE: Tensor,
        follow: Sequence[int] = (),
    ) -> None:
        self.item, self.tail, self.rows, self.follow = item, tail, rows, tuple(follow)
        self.state_RE, self.embed_RE = state_RE, embed_RE
        self.anchor = item.prompt_tokens
        self.used = 0
        self.anchors: list[int] = []
        self.drafted: list[Tensor] = []
        self.tied: list[Tensor] = []
        self.accepted: list[int] = []
        self.taken = 0

    @property
    def done(self) -> bool:
        ended = self.anchor >= len(self.item.tokens_T) - 1
        return ended or (bool(self.follow) and len(self.accepted) >= len(self.follow))

    def advance(self, accepted: int) -> int:
        """Go on to the next round; the accepted tokens that led there, here or in the run that is followed."""
        taken = self.follow[len(self.accepted) - 1] if self.follow else accepted
        self.anchor += taken + 1
        self.taken = taken
        return taken

    def verify(self, drafted_K: Tensor) -> int:
        """How many of the drafted tokens the target takes at the anchor."""
        tokens, tail = self.item.tokens_T.numpy(), self.tail.numpy()
        anchors = torch.tensor([self.anchor]).numpy()
        chosen = continuations(tokens, tail, anchors, len(drafted_K))
        return int(count_accepted(drafted_K[None].numpy(), chosen)[0])


class _SlotKV:
    """The draft KV of a pack: slots in the order in which rows were made; the last one takes what nobody reads."""

    def __init__(self, head: Head, requests: int, slots: int) -> None:
        shape = (requests, slots + 1, head.config.num_kv_heads, head.config.head_dim)
        layers = range(head.config.num_layers)
        self.keys = [torch.zeros(shape, dtype=head.dtype, device=head.device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=head.dtype, device=head.device) for _ in layers]
        self.index_NC = torch.full(shape[:2], -1, device=head.device)
        self.blank_NC = torch.zeros(shape[:2], dtype=torch.bool, device=head.device)


def walk(
    head: Head,
    inputs: Sequence[DraftInput],
    steps: int,
    tails: Sequence[Tensor] | None = None,
    follow: Sequence[Sequence[int]] | None = None,
) -> list[WalkedRounds]:
    """Every round of every request, in the order of ``inputs``. ``tails`` as in ``continuations``.

    ``follow`` are the accepted tokens of each request's rounds in another run: the walk then goes as that one went,
    as far as it goes, whatever is drafted here.

    Equal to tests/twins/rounds.py up to the rounding of products over other numbers of rows.
    """
    tails = tails or [torch.empty(0, dtype=torch.long) for _ in inputs]
    follow = follow or [() for _ in inputs]
    requests = []
    for item, tail, lead in zip(inputs, tails, follow, strict=True):
        rows = committed_rows(item, head.behaviour, head.config.target_hidden_size)
        with _served(head, item, item.rows):
            state_RE = head.fuse(rows.features_RKD)
        requests.append(_Request(item, tail, rows, state_RE, head.embed(rows.ids_R), lead))
    _Walk(head, [request for request in requests if request.item.anchors and not request.done], steps).run()
    return [_rounds(request, steps) for request in requests]


def _served(head: Head, item: DraftInput, rows: int) -> AbstractContextManager[None]:
    """Products over the first ``rows`` rows of a request as a server runs them: the prompt whole, the others in few."""
    if head.product_rows is None:
        return nullcontext()
    return head.products_like(served_sizes(head, item, head.product_rows)[:rows])


def _rounds(request: _Request, steps: int) -> WalkedRounds:
    empty = torch.empty((0, steps), dtype=torch.long)
    drafted, tied = (torch.stack(part) if part else empty for part in (request.drafted, request.tied))
    return WalkedRounds(tuple(request.anchors), drafted, tied.bool(), tuple(request.accepted))


class _Walk:
    """All requests of a pack, round by round."""

    def __init__(self, head: Head, requests: Sequence[_Request], steps: int) -> None:
        self._head, self._behaviour, self._requests, self._steps = head, head.behaviour, requests, steps
        kept = steps if self._behaviour.rewrite == "accumulate" else 1
        slots = max((len(item.item.tokens_T) * kept + steps + 1 for item in requests), default=0)
        self._kv = _SlotKV(head, len(requests), slots)
        self._out_NE = torch.zeros((len(requests), head.config.hidden_size), dtype=head.dtype, device=head.device)
        self._feedback_NE = self._out_NE.clone()

    def run(self) -> None:
        """Until every output has ended."""
        for place, request in enumerate(self._requests):
            with _served(self._head, request.item, request.item.prompt_tokens):
                self._commit([place], [range(request.item.prompt_tokens)], [None])
        running = list(range(len(self._requests)))
        while running:
            running = self._round(running)

    def _round(self, running: list[int]) -> list[int]:
        drafted_NK, tied_NK = self._draft(running)
        going, ranges, holes = [], [], []
        for row, place in enumerate(running):
            request = self._requests[place]
            accepted = request.verify(drafted_NK[row])
            request.anchors.append(request.anchor)
            request.drafted.append(drafted_NK[row])
            request.tied.append(tied_NK[row])
            request.accepted.append(accepted)
            anchor = request.anchor
            accepted = request.advance(accepted)
            if request.done:
                continue
            kept, first = self._keep(accepted)
            request.used += kept
            going.append(place)
            ranges.append(range(anchor + first, anchor + accepted + 1))
            holes.append(anchor + accepted - 1 if self._leaves_hole(accepted) else None)
        if going:
            self._commit(going, ranges, holes)
        return going

    def _keep(self, accepted: int) -> tuple[int, int]:
        """How many drafted rows stay, and the first row behind the anchor row that is made from true features."""
        if self._behaviour.rewrite == "stale":
            kept = min(accepted, self._steps - 1)
            return kept, kept
        return (self._steps - 1 if self._behaviour.rewrite == "accumulate" else 0), 0

    def _leaves_hole(self, accepted: int) -> bool:
        """Whether the row of the last accepted drafted token is left blank."""
        least = {"never": self._steps + 1, "accepted": 1, "full": self._steps}[self._behaviour.hole]
        return accepted >= least

    def _draft(self, running: list[int]) -> tuple[Tensor, Tensor]:
        """Drafted ids and ties [N, K] on the CPU; the drafted rows lie behind the slots in use."""
        head, behaviour = self._head, self._behaviour
        out_NE, feedback_NE = self._out_NE[running], self._feedback_NE[running]
        anchor_rows_N = torch.tensor([self._requests[place].anchor - 1 for place in running])
        drafted: list[Tensor] = []
        tied: list[Tensor] = []
        passes = self._steps + (behaviour.next_row == "drafted")
        for step in range(passes):
            if step:
                positions = drafted_positions(anchor_rows_N, step, behaviour)
                rows = _Pass(running, anchor_rows_N[:, None] + step, [1] * len(running), step)
                output = self._pass(rows, head.embed(drafted[-1]), feedback_NE, positions)
                out_NE, feedback_NE = output.normed_RE, output.feedback_RE
            if step < self._steps:
                ids_N, tied_N = next_tokens(head, out_NE)
                drafted.append(ids_N)
                tied.append(tied_N)
        if behaviour.next_row == "drafted":
            self._out_NE[running], self._feedback_NE[running] = out_NE, feedback_NE
        drafted_NK, tied_NK = torch.stack(drafted, 1).cpu(), torch.stack(tied, 1).cpu()
        if behaviour.dummy_from is not None:
            drafted_NK[anchor_rows_N >= behaviour.dummy_from] = 0
        return drafted_NK, tied_NK

    def _commit(self, places: list[int], ranges: Sequence[range], holes: Sequence[int | None]) -> None:
        """Rows of true features for each request, and the one among them from which its next round drafts."""
        head = self._head
        counts = [len(rows) for rows in ranges]
        most = max(counts)
        # Shorter ones repeat their last row; what these give is thrown away.
        index_NQ = torch.tensor([[*rows, *[rows[-1]] * (most - len(rows))] for rows in ranges])
        taken = list(zip((self._requests[place] for place in places), index_NQ, strict=True))
        positions_R = torch.cat([request.rows.positions_R[index_Q] for request, index_Q in taken])
        state_RE = torch.cat([request.state_RE[index_Q.to(head.device)] for request, index_Q in taken])
        embed_RE = torch.cat([request.embed_RE[index_Q.to(head.device)] for request, index_Q in taken])
        self._mark_holes(places, ranges, holes, index_NQ)
        output = self._pass(_Pass(places, index_NQ, counts, 0), embed_RE, state_RE, positions_R)
        for row, (place, count) in enumerate(zip(places, counts, strict=True)):
            request = self._requests[place]
            request.used += count
            first_round = not request.accepted
            if self._behaviour.next_row == "drafted" and not first_round and request.taken < self._steps:
                continue  # the next round goes on from the last drafted row, which is there already
            token_row, state_row = (row * most + chosen for chosen in self._next_rows(count, first_round))
            self._out_NE[place] = output.normed_RE[token_row]
            self._feedback_NE[place] = output.feedback_RE[state_row]

    def _next_rows(self, count: int, first_round: bool) -> tuple[int, int]:
        """Which of ``count`` rows of true features give the next round's first token, and the state fed on."""
        last, kind = count - 1, "accepted" if first_round else self._behaviour.next_row
        token_row = {"first": 0, "previous": max(0, last - 1)}.get(kind, last)
        return token_row, 0 if kind == "hidden-only" else token_row

    def _mark_holes(
        self, places: list[int], ranges: Sequence[range], holes: Sequence[int | None], index_NQ: Tensor
    ) -> None:
        """Note which slots are blank: of those that the pass is about to fill, and of drafted rows that stay."""
        for place, rows, hole in zip(places, ranges, holes, strict=True):
            request = self._requests[place]
            start, stop = request.used, request.used + len(rows)
            blank_R = request.rows.blank_R
            here = torch.zeros(len(rows), dtype=torch.bool) if blank_R is None else blank_R[list(rows)].clone()
            if hole is not None and hole in rows:
                here[hole - rows[0]] = True
            elif hole is not None:
                self._kv.blank_NC[place, start - (rows[0] - hole)] = True
            self._kv.blank_NC[place, start:stop] = here.to(self._head.device)

    def _pass(self, rows: "_Pass", embed_RE: Tensor, state_RE: Tensor, positions_R: Tensor) -> HeadOutput:
        """The head over rows of several requests; keys and values go into the slots behind those in use."""
        kv, behaviour = self._kv, self._behaviour
        device = self._head.device
        places = torch.tensor(rows.places, device=device)
        used_N1 = torch.tensor([self._requests[place].used for place in rows.places], device=device)[:, None]
        queries = rows.index_NQ.shape[1]
        offset_Q = torch.arange(queries, device=device)
        slots_NQ = used_N1 + offset_Q + max(0, rows.step - 1)
        index_NQ = rows.index_NQ.to(device)
        valid_NQ = offset_Q < torch.tensor(rows.counts, device=device)[:, None]
        written_NQ = torch.where(valid_NQ, slots_NQ, kv.index_NC.shape[1] - 1)
        kv.index_NC[places[:, None], written_NQ] = index_NQ
        if rows.step:
            kv.blank_NC[places[:, None], written_NQ] = False
        seen_NQC, blank_NQC = self._sight(rows.step, places, used_N1, slots_NQ, index_NQ)

        def attend(layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
            kv.keys[layer][places[:, None], written_NQ] = k_RMH.unflatten(0, (-1, queries))
            kv.values[layer][places[:, None], written_NQ] = v_RMH.unflatten(0, (-1, queries))
            return attend_to_slots(
                q_RNH.unflatten(0, (-1, queries)), kv.keys[layer][places], kv.values[layer][places], seen_NQC,
                blank_NQC, fp32=self._head.numerics.attention_fp32, masked=behaviour.blank_fill == "masked",
            ).flatten(0, 1)  # fmt: skip

        return self._head.forward(embed_RE, state_RE, positions_R, attend)

    def _sight(
        self, step: int, places: Tensor, used_N1: Tensor, slots_NQ: Tensor, index_NQ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which slots each row sees [N, Q, C], and which of these are blank to it."""
        kv, behaviour = self._kv, self._behaviour
        slot_C = torch.arange(kv.index_NC.shape[1], device=slots_NQ.device)
        # Committed rows are their own anchor rows; drafted ones have it in the last slot in use.
        own_NQ1 = (slots_NQ if step == 0 else used_N1 - 1)[..., None]
        seen_NQC = slot_C <= slots_NQ[..., None]
        if step:
            hidden = seen_from(behaviour, step)
            drafted_NQC = slot_C > own_NQ1
            seen_NQC &= ~drafted_NQC | (slot_C >= used_N1[..., None] + hidden)
        if behaviour.alone:
            seen_NQC &= slot_C >= own_NQ1
        if behaviour.window is not None:
            seen_NQC &= kv.index_NC[places][:, None] > index_NQ[..., None] - behaviour.window
        return seen_NQC, kv.blank_NC[places][:, None] & (slot_C != own_NQ1)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Rows of one pass: requests by place, row indices [N, Q], how many of each are real, and their step (0: true)."""

    places: list[int]
    index_NQ: Tensor
    counts: list[int]
    step: int
