"""Finished requests on their way to the trace: several are written together, so that shards are not too small."""

import time
from typing import TYPE_CHECKING

from replay.capture.client.asking import Answered
from replay.capture.client.join import JoinedRequest
from replay.capture.client.passes import PassNumbers
from replay.capture.client.served import ServedRound
from replay.capture.options import ServerOptions
from replay.traces.captured import CapturedRequest

if TYPE_CHECKING:
    import polars as pl

    from replay.traces.writer import TraceWriter

SHARD_REQUESTS = 16  # finished requests are written when they are so many,
_SHARD_BYTES = 1 << 28  # or so large,
_SHARD_SECONDS = 5.0  # or when the first of them is so old


class NextShard:
    """Requests with their rows, and the rounds in which a server made them; ``rids`` are their ids in the spool."""

    def __init__(self, options: ServerOptions, passes: PassNumbers) -> None:
        self.options, self.passes = options, passes
        self.rids: list[str] = []
        self._requests: list[CapturedRequest] = []
        self._joined: list[tuple[str, JoinedRequest]] = []
        self._bytes = 0
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def is_full(self) -> bool:
        """Whether it is to be written now."""
        return bool(self) and (
            len(self) >= SHARD_REQUESTS
            or self._bytes >= _SHARD_BYTES
            or time.monotonic() - self._since >= _SHARD_SECONDS
        )

    def add(self, one: Answered, joined: JoinedRequest) -> None:
        """Take in an answered request and its rows."""
        self._requests.append(_captured(one, joined, self.options))
        self._joined.append((one.request.request_id, joined))
        self.rids.append(one.rid)
        self._bytes += sum(tap.nbytes for tap in self._requests[-1].taps.values())
        self._since = self._since or time.monotonic()

    def write(self, writer: "TraceWriter") -> None:
        """Add them to the trace, rounds first. Raises OutputError."""
        if any(joined.rounds for _, joined in self._joined):
            writer.add_rounds(self._rounds())
        writer.add(self._requests)

    def _rounds(self) -> "pl.DataFrame":
        """The table of served rounds (SPEC.md, section 6)."""
        from polars import DataFrame

        from replay.traces.server_rounds import served_schema

        rows = [
            (name, number, *_columns(one, self.passes.number(joined.pid, one.verify_pass)))
            for name, joined in self._joined
            for number, one in enumerate(joined.rounds)
        ]
        return DataFrame(rows, schema=served_schema(), orient="row")


def _columns(one: ServedRound, verify_pass: int | None) -> tuple[object, ...]:
    row = None if verify_pass is None else one.batch_row
    drafted, parents = list(one.drafted), list(one.parents) or None
    return one.anchor, drafted, one.accepted, parents, one.batch, verify_pass, row


def _captured(one: Answered, joined: JoinedRequest, options: ServerOptions) -> CapturedRequest:
    request, answer = one.request, one.answer
    return CapturedRequest(
        request_id=request.request_id,
        category=request.category,
        prompt_ids=list(request.prompt_ids),
        output_ids=list(answer.output_ids),
        finish_reason=answer.finish_reason,
        source="generated",
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        taps=joined.taps,
        topk_ids=joined.topk_ids,
        topk_logprobs=joined.topk_logprobs,
        logsumexp=joined.logsumexp,
        tail_ids=list(joined.tail_ids),
        server=answer.counters,
        feed=joined.feed,
        pieces=joined.pieces,
        cached=joined.cached,
        first_row=joined.first_row,
        scales=joined.scales,
    )
