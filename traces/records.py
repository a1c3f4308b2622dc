"""One record per request: what it was, and where its rows lie. See SPEC.md, sections 4 and 5.

A shard carries the records of its own requests (so that one rename makes a batch of them whole); ``requests.parquet``
gathers all of them when the trace is finished. Both say the same, and a reader checks that they do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replay.errors import TraceCorruptError
from replay.traces.cached import CACHED, Piece

FINISH_REASONS = ("stop", "length", "forced", "abort")
SOURCES = ("generated", "forced")
MAX_TOKENS = 1 << 31
MAX_STEPS = 1 << 12  # of a draft: a histogram has a column for each
MAX_ID = 1024

# Columns that there were not at first: null where a file lacks them, and left out of a shard where null, so
# that what knows nothing of them is written as it always was.
LATER = (
    "server_prefill_rows", "server_prefill_forward_rows", "prefix_requests", "prefix_rows", "taps", "first_row",
    *CACHED,
)  # fmt: skip

# columns that say where a request lies; a shard's own records lack them, since they follow from its order
PLACE = ("shard", "token_start", "row_start", "output_start", "shard_bytes", "shard_sha256")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One row of ``requests.parquet``, in the order of its columns.

    ``token_start``, ``row_start`` and ``output_start`` are the request's first element in the shard's ``tokens``, its
    ``tap.*`` and its logits tensors. Of T = prompt_tokens + output_tokens tokens and T - 1 rows the first ones,
    ``shared``, may be those of earlier requests: ``prefix_rows[i]`` of the one whose number is ``prefix_requests[i]``,
    counting from 0 in the order of the trace. It owns the others, and output_tokens rows of logits.
    ``shard_sha256`` is that of the shard's bytes after its safetensors header. ``taps`` are those that the request has,
    None where it has all of the trace; ``first_row`` the first row that is there of them, None where all are. The two
    ``server_cached_*`` columns say of the rows that came from the server's cache how many forwards of what size made.
    """

    request_id: str
    category: str | None
    shard: str
    token_start: int
    row_start: int
    output_start: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    source: str
    temperature: float
    top_p: float
    top_k: int
    tail_ids: tuple[int, ...]
    server_completion_tokens: int | None
    server_verify_rounds: int | None
    server_histogram: tuple[int, ...] | None
    server_cached_tokens: int | None
    server_prefill_rows: tuple[int, ...] | None
    server_prefill_forward_rows: tuple[int, ...] | None
    prefix_requests: tuple[int, ...] | None
    prefix_rows: tuple[int, ...] | None
    shard_bytes: int
    shard_sha256: str
    taps: tuple[str, ...] | None = None
    first_row: int | None = None
    server_cached_rows: tuple[int, ...] | None = None
    server_cached_forward_rows: tuple[int, ...] | None = None

    @property
    def cached(self) -> tuple[Piece, ...]:
        """Rows of the prompt that came from the server's cache, and of the forward that made them; none: not known."""
        return tuple(zip(self.server_cached_rows or (), self.server_cached_forward_rows or (), strict=True))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces in which the server prefilled the prompt, the first one first; none where that is not known."""
        return tuple(zip(self.server_prefill_rows or (), self.server_prefill_forward_rows or (), strict=True))

    @property
    def tokens(self) -> int:
        """T, the tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def rows(self) -> int:
        """The target's rows: one of every position but the last, those that are left out too."""
        return self.tokens - 1

    @property
    def shared(self) -> int:
        """How many of its first tokens and rows lie with earlier requests."""
        return sum(self.prefix_rows or ())

    @property
    def rows_left_out(self) -> int:
        """How many rows, from the first on, are not in the trace."""
        return self.first_row or 0

    @property
    def stored_rows(self) -> int:
        """How many rows are in the trace, those that lie with earlier requests among them."""
        return self.rows - self.rows_left_out

    @property
    def row_origin(self) -> int:
        """Where row 0 would lie in its shard, if the rows before its own did; below 0 where these are more."""
        return self.row_start - self.shared - self.rows_left_out


def check_distinct(records: Sequence[RequestRecord], where: str) -> None:
    """Raises TraceCorruptError where two records bear one request_id."""
    seen: set[str] = set()
    for record in records:
        if record.request_id in seen:
            raise TraceCorruptError(f"{where} holds the request_id {record.request_id!r} twice")
        seen.add(record.request_id)
