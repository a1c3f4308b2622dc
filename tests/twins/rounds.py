"""The slow, obvious twin of ``draft_every_anchor`` and ``walk``: one request, one round, one token at a time.

No cache, no batching: every drafted token recomputes the head over all rows so far. Rows are a list; each notes when it
is made which rows it sees. Tests hold both functions equal to it, whatever the behaviour (engines/behaviour.py).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from replay.engines.profiles import Numerics
from replay.head.model import Head, HeadOutput


@dataclass(frozen=True, slots=True)
class TwinRound:
    """One round: committed tokens at its start, target ids drafted, how many the target took."""

    anchor: int
    drafted: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class TwinRow:
    """One input row of the head: ``sees`` and ``sees_zeros`` are slots in the list of rows, its own too."""

    index: int
    position: int
    embed_E: Tensor
    state_E: Tensor
    blank: bool
    sees: tuple[int, ...]
    sees_zeros: tuple[int, ...]


def plain_attention(
    q_RNH: Tensor,
    k_RMH: Tensor,
    v_RMH: Tensor,
    seen_RR: Tensor,
    zeros_RR: Tensor,
    numerics: Numerics,
    score_factor: float = 1.0,
    head_width: int | None = None,
) -> Tensor:
    """Mixed values [R, N*H], head by head: row i sees the rows that ``seen_RR[i]`` marks, as zeros where marked so."""
    dtype = q_RNH.dtype
    if numerics.attention_fp32:
        q_RNH, k_RMH, v_RMH = q_RNH.float(), k_RMH.float(), v_RMH.float()
    width = head_width or q_RNH.shape[2]
    heads = q_RNH.shape[1]
    group = heads // k_RMH.shape[1]
    out_RNH = q_RNH.new_empty((*q_RNH.shape[:2], v_RMH.shape[2]))
    for head in range(heads):
        q, k, v = q_RNH[:, head], k_RMH[:, head // group], v_RMH[:, head // group]
        scores_RR = q @ k.T / sqrt(width) * score_factor
        scores_RR = scores_RR.masked_fill(zeros_RR, 0.0).masked_fill(~seen_RR, float("-inf"))
        weights_RR = scores_RR.float().softmax(-1).to(q.dtype).masked_fill(zeros_RR, 0.0)
        out_RNH[:, head] = weights_RR @ v
    return out_RNH.flatten(1).to(dtype)


def plain_causal_attention(q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor, numerics: Numerics) -> Tensor:
    """Mixed values [R, N*H] where row i sees rows 0..i."""
    seen_RR = torch.ones(len(q_RNH), len(q_RNH), dtype=torch.bool).tril()
    return plain_attention(q_RNH, k_RMH, v_RMH, seen_RR, torch.zeros_like(seen_RR), numerics, numerics.score_factor)


class Twin:
    """One request under a head's behaviour: its rows, and the rounds that they lead to."""

    def __init__(self, head: Head, tokens_T: Tensor, features_RKD: Tensor, prompt_tokens: int,
                 sampled_T: Tensor | None = None, piece_rows: Sequence[int] = ()) -> None:  # fmt: skip
        """Prefill: a row for each prompt token; ``piece_rows`` are the rows of the pieces in which it came."""
        self._head, self._behaviour = head, head.behaviour
        self._tokens, self._features, self._prompt = tokens_T, features_RKD, prompt_tokens
        self._sampled, self._piece_rows = sampled_T, piece_rows
        self.rows: list[TwinRow] = []
        self.anchor = prompt_tokens
        self._next_row = self._next_state = prompt_tokens - 1
        self._continued: HeadOutput | None = None
        self.logits: list[Tensor] = []
        for index in range(prompt_tokens):
            self.rows.append(self._true_row(index))

    def _true_row(self, index: int, blank: bool = False, fed_from: int | None = None) -> TwinRow:
        """A committed row: the features of its position or of the row ``fed_from``, as behaviour makes them."""
        behaviour = self._behaviour
        token = index if behaviour.pairing == "own-token" else index + 1
        last_prompt_row = self._prompt - 1
        embedded = self._tokens[token]
        if index < last_prompt_row and self._ends_chunk(index):
            assert self._sampled is not None
            embedded = self._sampled[index]
        features = self._features_of(index if fed_from is None else fed_from)
        output_token = index + 1 - self._prompt
        blank = blank or index < min(behaviour.blank_prefix, last_prompt_row)
        blank = blank or behaviour.blank_output[0] <= output_token < behaviour.blank_output[1]
        state = self._head.fuse(features[None])[0]
        return self._row(index, self._shifted(index), embedded, state, blank, drafted=0)

    def _features_of(self, index: int) -> Tensor:
        """What the row of ``index`` is fed where nothing is stale."""
        behaviour = self._behaviour
        source = index - 1 if behaviour.pairing == "earlier-features" else index
        features = self._features[source].clone() if source >= 0 else torch.zeros_like(self._features[0])
        generator = torch.Generator().manual_seed(index * 2**32 + int(self._tokens[index + 1]))
        noise = torch.randn(len(features), generator=generator)
        width = self._head.config.target_hidden_size
        for slot in range(len(features) // width):
            inside = slice(slot * width, (slot + 1) * width)
            part = features[inside]
            if behaviour.unit_taps:
                size = part.float().pow(2).mean().sqrt().clamp_min(1e-6)
                part.copy_((part.float() / size).to(part.dtype))
            if behaviour.noise:
                rms = sqrt(sum(value * value for value in part.tolist()) / width)
                part.copy_((part.float() + behaviour.noise * rms * noise[inside]).to(part.dtype))
            if slot in behaviour.zero_slots:
                part.zero_()
        if behaviour.handoff and index == self._prompt - 1:
            features = torch.zeros_like(features)
        return features

    def _ends_chunk(self, index: int) -> bool:
        """Whether a prompt row is the last of a chunk that is played."""
        chunk = self._behaviour.chunk
        if chunk is None:
            return False
        if chunk != "recorded":
            return (index + 1) % chunk == 0
        row = self._prompt
        for rows in reversed(self._piece_rows):  # from the prompt's end back, since rows before the first were cached
            if index == row - 1:
                return True
            row -= rows
        return False

    def _drafted_row(self, step: int, token: int, state_E: Tensor) -> TwinRow:
        """The row that embeds the drafted token number ``step``."""
        index = self.anchor - 1 + step
        behaviour = self._behaviour
        position = self._shifted(self.anchor - 1 + step * behaviour.advance + behaviour.drafted_offset)
        config = self._head.config
        if config.mask_token is not None:
            token, state_E = config.mask_token, self._head.fuse(self._head._weights["mask_hidden"].flatten()[None])[0]
        return self._row(index, position, torch.tensor(token), state_E, False, drafted=step)

    def _row(self, index: int, position: int, token: Tensor, state: Tensor, blank: bool, *, drafted: int) -> TwinRow:
        here = len(self.rows)
        own = here - drafted  # the row itself, or the anchor row of the round
        behaviour = self._behaviour
        sees, zeros = [], []
        for slot, row in enumerate(self.rows):
            near = behaviour.window is None or row.index > index - behaviour.window
            if slot > own:
                seen = near and behaviour.chain == "grow"
            else:
                seen = near and (not behaviour.alone or slot == own)
            empty = row.blank and slot != own
            if seen and not (empty and behaviour.blank_fill == "masked"):
                sees.append(slot)
                if empty:
                    zeros.append(slot)
        if not (drafted and behaviour.chain == "unseen"):
            sees.append(here)
        embed = self._head.embed(token[None])[0]
        return TwinRow(index, position, embed, state, blank, tuple(sees), tuple(zeros))

    def _shifted(self, position: int) -> int:
        position += self._behaviour.offset
        limit = self._behaviour.max_position
        return position if limit is None else min(position, limit - 1)

    def _run(self) -> HeadOutput:
        """The head over all rows."""
        count = len(self.rows)
        seen, zeros = torch.zeros(count, count, dtype=torch.bool), torch.zeros(count, count, dtype=torch.bool)
        for slot, row in enumerate(self.rows):
            seen[slot, list(row.sees)] = True
            zeros[slot, list(row.sees_zeros)] = True
        config, numerics = self._head.config, self._head.numerics
        return self._head.forward(
            torch.stack([row.embed_E for row in self.rows]),
            torch.stack([row.state_E for row in self.rows]),
            torch.tensor([row.position for row in self.rows]),
            lambda _, q, k, v: plain_attention(
                q,
                k,
                v,
                seen,
                zeros,
                numerics,
                self._behaviour.score_factor * config.rope.score_factor,
                config.head_dim,
            ),
        )

    def draft(self, steps: int, fed: Sequence[int] = ()) -> list[int]:
        """Target ids drafted from the anchor; drafted rows stay until ``commit``, ``logits`` of each step until then.

        Rows embed what another run drafted where that is ``fed``.
        """
        run = self.drafting(steps, fed)
        try:
            state_E = next(run)
            while True:
                state_E = run.send(state_E)
        except StopIteration as ended:
            drafted: list[int] = ended.value
            return drafted

    def drafting(self, steps: int, fed: Sequence[int] = ()) -> Generator[Tensor, Tensor, list[int]]:
        """``draft``, which gives the state that it made before each further row and goes on from the one it is sent."""
        head, drafted = self._head, list[int]()
        self.logits = []
        if self._continued is None:
            output, slot, state = self._run(), self._next_row, self._next_state
        else:
            output, slot, state = self._continued, -1, -1
        continues = self._behaviour.next_row == "drafted"
        for step in range(1, steps + 1):
            logits_W = head.logits(output.normed_RE[slot][None])[0]
            self.logits.append(logits_W)
            drafted.append(int(head.target_ids_W[int(logits_W.argmax())]))
            if step < steps or continues:
                handed_E = yield output.feedback_RE[state]
                self.rows.append(self._drafted_row(step, fed[step - 1] if fed else drafted[-1], handed_E))
                output, slot, state = self._run(), -1, -1
        self._continued = output if continues else None
        if self._behaviour.dummy_from is not None and self.anchor - 1 >= self._behaviour.dummy_from:
            return [0] * steps
        return drafted

    def commit(self, steps: int, accepted: int) -> None:
        """Verify took ``accepted`` tokens: what becomes of the rows, and from which one the next round drafts."""
        behaviour, anchor = self._behaviour, self.anchor
        base = len(self.rows) - (steps - 1) - (behaviour.next_row == "drafted")
        kept = {"refresh": 0, "stale": min(accepted, steps - 1), "accumulate": steps - 1}[behaviour.rewrite]
        self.rows = self.rows[: base + kept]
        holed = {"never": False, "accepted": accepted > 0, "full": accepted == steps}[behaviour.hole]
        hole = anchor + accepted - 1 if holed else None
        if behaviour.rewrite == "stale":
            self.rows = [
                replace(row, blank=True) if slot >= base and row.index == hole else row
                for slot, row in enumerate(self.rows)
            ]
        first = anchor + (kept if behaviour.rewrite == "stale" else 0)
        written = len(self.rows)
        for index in range(first, anchor + accepted + 1):
            newest = index == anchor + accepted
            others = {"first": first, "last": anchor + accepted, "anchor": index - newest, "previous": index - 1}
            fed_from = others.get(behaviour.stale_rows)
            self.rows.append(self._true_row(index, blank=index == hole, fed_from=fed_from))
        last = len(self.rows) - 1
        self._next_row = {"first": written, "previous": max(written, last - 1)}.get(behaviour.next_row, last)
        self._next_state = written if behaviour.next_row == "hidden-only" else self._next_row
        if accepted == steps:
            self._continued = None
        self.anchor += accepted + 1


def draft_one_round(
    head: Head,
    tokens_T: Tensor,
    features_RKD: Tensor,
    anchor: int,
    steps: int,
    *,
    prompt_tokens: int | None = None,
    sampled_T: Tensor | None = None,
    piece_rows: Sequence[int] = (),
) -> list[int]:
    """The target ids that ``head`` drafts when ``anchor`` tokens are committed and token x[anchor] is known.

    ``prompt_tokens`` of these are the prompt (None: all), which matters only to behaviour that speaks of it.
    """
    prompt_tokens = anchor if prompt_tokens is None else prompt_tokens
    twin = Twin(head, tokens_T, features_RKD, prompt_tokens, sampled_T, piece_rows)
    while twin.anchor < anchor:
        twin.commit(1, 0)  # one token after the other, as if nothing were ever accepted
    return twin.draft(steps)


def replay_request(
    head: Head,
    tokens_T: Tensor,
    features_RKD: Tensor,
    prompt_tokens: int,
    steps: int,
    tail: tuple[int, ...] = (),
    sampled_T: Tensor | None = None,
    piece_rows: Sequence[int] = (),
) -> list[TwinRound]:
    """The served walk of one request: draft, compare with what the target chose, jump, until the output ends."""
    chosen = [int(token) for token in tokens_T] + list(tail)
    rounds: list[TwinRound] = []
    if prompt_tokens >= len(tokens_T) - 1:
        return rounds
    twin = Twin(head, tokens_T, features_RKD, prompt_tokens, sampled_T, piece_rows)
    while twin.anchor < len(tokens_T) - 1:
        drafted = twin.draft(steps)
        anchor, accepted = twin.anchor, 0
        while accepted < steps and anchor + 1 + accepted < len(chosen):
            if drafted[accepted] != chosen[anchor + 1 + accepted]:
                break
            accepted += 1
        rounds.append(TwinRound(anchor, tuple(drafted), accepted))
        if anchor + accepted + 1 >= len(tokens_T) - 1:
            break
        twin.commit(steps, accepted)
    return rounds
