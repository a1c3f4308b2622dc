"""What a request gives a draft: its anchors, and its committed rows as a server makes them.

Healthy: row i embeds x[i+1], takes the features of position i and stands at position i (SGLang 0.5.23
speculative/eagle_worker_v2.py ``_draft_extend_for_prefill``, ``_draft_extend_for_decode``). Behaviour
(engines/behaviour.py) says otherwise. Suffixes: T tokens of the request, R rows, A anchors, K taps, D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from replay.drafting.crossed import BatchRows
from replay.drafting.features import JoinedTaps, fed_features
from replay.engines.behaviour import RECORDED, Behaviour, Chunk

# First row, rows, and rows of the product that made them.
Span = tuple[int, int, int]
# Rows of one piece of a prompt, and rows of the forward in which a server prefilled it.
Piece = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DraftInput:
    """One request: its tokens [T] and the features [>= T-2, K*D] of its rows, taps joined in wiring order, at once or
    row by row when they are asked for.

    ``sampled_T`` is what the target would choose after each of its prompt positions, needed for ``Behaviour.chunk``
    only. ``only`` names the anchors to draft at, rising (None: every one). ``spans``: in products of how many rows a
    server made its rows, where it told (product_sizes.py). ``pieces`` in which it prefilled the prompt, none where it
    did not tell; prompt rows before the first one came from a cache: ``cached`` says how many of them each forward made
    and of how many rows it was, where that is known. ``batch_rows`` in which each anchor's round ran (None: not told),
    needed for ``Behaviour.crossed`` only.
    """

    tokens_T: Tensor
    features_RKD: Tensor | JoinedTaps
    prompt_tokens: int
    sampled_T: Tensor | None = None
    only: Tensor | None = None
    spans: Sequence[Span] = ()
    pieces: Sequence[Piece] = ()
    batch_rows: BatchRows | None = None
    cached: Sequence[Piece] = ()

    @property
    def rows(self) -> int:
        """Rows a draft ever reads: the last output token starts no round, so neither its row nor the one before."""
        return max(0, len(self.tokens_T) - 2)

    @property
    def anchors_A(self) -> Tensor:
        """The anchors S, each drafting from row S-1: prompt_tokens .. T-2, or those asked for."""
        return torch.arange(self.prompt_tokens, len(self.tokens_T) - 1) if self.only is None else self.only

    @property
    def anchors(self) -> int:
        """How many these are."""
        return len(self.anchors_A)

    def prefilled_whole(self, prefill_rows: int | None, chunk: Chunk | None = None) -> bool:
        """Whether one forward prefilled the whole prompt, nothing of it being cached.

        Where ``pieces`` do not tell: whether a server that prefills ``prefill_rows`` at once would (None: it is not
        known, and counts as no). Never where the prompt came in more than one ``chunk``.
        """
        if chunk is not None and len(chunk_ends(self.prompt_tokens, chunk, self.pieces)):
            return False
        first = self.pieces[0][0] if self.pieces else prefill_rows or 0
        return first >= self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """Committed rows [R] of a request, as ``behaviour`` makes them: token ids, positions, features of taps of
    ``tap_width``, and which leave no KV behind (None: all do)."""

    ids_R: Tensor
    positions_R: Tensor
    blank_R: Tensor | None
    item: DraftInput
    behaviour: Behaviour
    tap_width: int

    def first(self, rows: int) -> "Rows":
        """The first of them."""
        blank_R = None if self.blank_R is None else self.blank_R[:rows]
        return replace(self, ids_R=self.ids_R[:rows], positions_R=self.positions_R[:rows], blank_R=blank_R)

    @property
    def features_RKD(self) -> Tensor:
        """Those of all rows."""
        return self.features(range(len(self.ids_R)))

    def features(self, rows: range) -> Tensor:
        """Those of some rows [R, K*D]."""
        item = self.item
        return fed_features(
            item.features_RKD, item.tokens_T, item.prompt_tokens, self.behaviour, self.tap_width, rows
        )  # fmt: skip


def committed_rows(item: DraftInput, behaviour: Behaviour, tap_width: int) -> Rows:
    """Every committed row of a request whose features join taps of ``tap_width``."""
    index_R = torch.arange(item.rows)
    return Rows(
        _ids(item, behaviour, index_R),
        shift_positions(index_R, behaviour),
        _blanks(item, behaviour, index_R),
        item,
        behaviour,
        tap_width,
    )


def shift_positions(position_R: Tensor, behaviour: Behaviour) -> Tensor:
    """Positions of rows that stand at ``position_R`` where all is well."""
    shifted_R = position_R + behaviour.offset
    return shifted_R if behaviour.max_position is None else shifted_R.clamp_max(behaviour.max_position - 1)


def drafted_positions(anchor_rows_A: Tensor, step: int, behaviour: Behaviour) -> Tensor:
    """Positions of the drafted rows of ``step`` (1, 2, ...), given their anchors' rows."""
    return shift_positions(anchor_rows_A + step * behaviour.advance + behaviour.drafted_offset, behaviour)


def find_dummies(anchor_rows_A: Tensor, behaviour: Behaviour) -> Tensor:
    """Which anchors draft token 0 at every step, whatever the head says."""
    if behaviour.dummy_from is None:
        return torch.zeros_like(anchor_rows_A, dtype=torch.bool)
    return anchor_rows_A >= behaviour.dummy_from


def chunk_ends(prompt_tokens: int, chunk: Chunk, pieces: Sequence[Piece]) -> Sequence[int]:
    """The last rows of all chunks of a prompt but the final one, whose next token is the first of the output."""
    if chunk != RECORDED:
        return range(chunk - 1, prompt_tokens - 1, chunk)
    sizes = [rows for rows, _ in pieces]
    first = prompt_tokens - sum(sizes)
    return [first + end - 1 for end in accumulate(sizes[:-1])]


def _ids(item: DraftInput, behaviour: Behaviour, index_R: Tensor) -> Tensor:
    first = 0 if behaviour.pairing == "own-token" else 1
    ids_R = item.tokens_T[first : first + item.rows]
    if behaviour.chunk is not None and item.sampled_T is not None:
        ends = [end for end in chunk_ends(item.prompt_tokens, behaviour.chunk, item.pieces) if end < item.rows]
        ends_E = torch.tensor(ends, dtype=torch.long)
        ids_R = ids_R.index_copy(0, ends_E, item.sampled_T[ends_E])
    return ids_R


def _blanks(item: DraftInput, behaviour: Behaviour, index_R: Tensor) -> Tensor | None:
    if behaviour.blank_prefix == 0 and behaviour.blank_output == (0, 0):
        return None
    last = item.prompt_tokens - 1
    start, stop = behaviour.blank_output
    # Row i embeds token x[i+1]: output token t has the row of index prompt_tokens + t - 1.
    return (index_R < min(behaviour.blank_prefix, last)) | ((index_R >= last + start) & (index_R < last + stop))
