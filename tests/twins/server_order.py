"""Rounds in a server's own order: one draft KV that grows and is rewritten as the server does it, row for row.

Where drafting/every_anchor.py drafts at every anchor at once, this walks: prefill, then per round one row for each
drafted token and an extend of K+1 rows after verify (SGLang 0.5.23 speculative/eagle_worker_v2.py
``_draft_extend_for_prefill``, ``draft_forward``, ``_draft_extend_for_decode``). Products therefore run over as many
rows as the server's do for one request at a time, which is what equality to the last bit can depend on: tests hold it
against a real server's rounds, drafted token for drafted token. ``replay simulate`` uses drafting/every_anchor.py.
Slower than drafting/every_anchor.py, faster than rounds.py.

Suffixes as in head/model.py and head/attention.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from twins.rounds import TwinRound

from replay.drafting.next_tokens import choose
from replay.drafting.product_sizes import prefill_sizes
from replay.drafting.rows import DraftInput
from replay.head.attention import KeyValues, attend_committed_and_chain
from replay.head.model import Head, HeadOutput
from replay.head.products import group_by_size


@dataclass(slots=True)
class _DraftKV:
    """Keys and values of one request, layer by layer; rows from ``written`` on are free to be overwritten."""

    keys: list[Tensor]
    values: list[Tensor]
    written: int = 0

    def append(self, layer: int, k_RMH: Tensor, v_RMH: Tensor) -> KeyValues:
        """Write rows behind the first ``written`` ones; all rows up to these."""
        stop = self.written + len(k_RMH)
        self.keys[layer][self.written : stop] = k_RMH
        self.values[layer][self.written : stop] = v_RMH
        return KeyValues(self.keys[layer][:stop], self.values[layer][:stop])


class OrderedRequest:
    """One request on its way through the rounds: call ``round`` until ``done``."""

    def __init__(self, head: Head, item: DraftInput, steps: int, tail: Tensor | None = None) -> None:
        """Prefill: every prompt row from true features, the last paired with the first output token."""
        self._head, self._item, self._steps = head, item, steps
        self._chosen = torch.cat([item.tokens_T, torch.empty(0, dtype=torch.long) if tail is None else tail])
        config = head.config
        rows, cached = len(item.tokens_T) + steps + 1, head.cached
        shapes = [(rows, cached.heads, width) for width in (cached.key, cached.value) for _ in range(config.num_layers)]
        empty = [torch.empty(shape, dtype=head.dtype, device=head.device) for shape in shapes]
        self._kv = _DraftKV(empty[: config.num_layers], empty[config.num_layers :])
        self.anchor = item.prompt_tokens
        self._products = {first: size for first, _, size in item.spans}
        self._size = 0  # of the product that logits of the next first draft come from, where it is not their own
        if not self.done:
            whole = [(size, size) for size in prefill_sizes(self.anchor, head.execution.prefill_rows)]
            counts, products = torch.tensor(item.pieces or whole).unbind(1)
            sizes = products.repeat_interleave(counts)
            self._last = self._extend(item.tokens_T[1 : self.anchor + 1], self.anchor, self.anchor - 1, sizes)

    @property
    def done(self) -> bool:
        """Whether the output has ended."""
        return self.anchor >= len(self._item.tokens_T) - 1

    def round(self) -> TwinRound:
        """Draft, verify against what the target chose, rewrite the draft KV from true features."""
        drafted = self._draft()
        chosen = self._chosen[self.anchor + 1 : self.anchor + 1 + self._steps].tolist()
        accepted = 0
        while accepted < len(chosen) and drafted[accepted] == chosen[accepted]:
            accepted += 1
        played = TwinRound(self.anchor, tuple(drafted), accepted)
        start = self.anchor
        self.anchor += accepted + 1
        if not self.done:
            # The server rewrites K+1 rows; those behind the accepted ones are garbage that nothing reads.
            following = self._item.tokens_T[start + 1 : self.anchor + 1]
            padding = torch.zeros(self._steps - accepted, dtype=torch.long)
            self._size = self._products.get(start, 0)
            sizes = torch.full((self._steps + 1,), max(self._size, self._steps + 1))
            self._last = self._extend(torch.cat([following, padding]), accepted + 1, accepted, sizes)
        return played

    def _draft(self) -> list[int]:
        output = self._last
        drafted: list[int] = []
        for step in range(self._steps):
            if step:
                embeds = self._head.embed(torch.tensor(drafted[-1:]))
                positions = torch.tensor([self.anchor + step - 1])
                output = self._head.forward(embeds, output.feedback_RE, positions, self._attend)
                self._kv.written += 1
            sizes = group_by_size(torch.tensor([self._size])) if self._size and not step else None
            ids, _ = choose(self._head, self._head.logits(output.normed_RE, sizes))
            drafted.append(int(ids))
        self._kv.written = self.anchor
        return drafted

    def _extend(self, following: Tensor, true_rows: int, last: int, sizes_R: Tensor) -> HeadOutput:
        """Rows of true features (then of zeros) behind the written ones; the output of row ``last`` among them.

        ``sizes_R`` of the product that each row is made in.
        """
        start = self._kv.written
        features = self._item.features_RKD[start : start + true_rows]
        padding = features.new_zeros((len(following) - true_rows, features.shape[1]))
        positions = torch.arange(start, start + len(following))
        sizes = group_by_size(sizes_R)
        state = self._head.fuse(torch.cat([features, padding]), sizes)
        output = self._head.forward(self._head.embed(following), state, positions, self._attend, sizes=sizes)
        self._kv.written = start + true_rows
        return HeadOutput(output.normed_RE[last : last + 1], output.feedback_RE[last : last + 1])

    def _attend(self, layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        rows = self._kv.append(layer, k_RMH, v_RMH)
        reach = torch.arange(self._kv.written + 1, self._kv.written + 1 + len(q_RNH), device=self._head.device)
        none = KeyValues(*(part.new_empty((0, len(q_RNH), *part.shape[1:])) for part in (k_RMH, v_RMH)))
        return attend_committed_and_chain(q_RNH, rows, reach, none, self._head.numerics)


def replay_in_order(head: Head, item: DraftInput, steps: int, tail: Tensor | None = None) -> list[TwinRound]:
    """Every round of one request, in order. Equal to rounds.py; see the module's head for what it is for."""
    request = OrderedRequest(head, item, steps, tail)
    rounds = []
    while not request.done:
        rounds.append(request.round())
    return rounds
