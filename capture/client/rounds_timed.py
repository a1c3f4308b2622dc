"""How long a round takes, out of the stream of one batch: only while all its requests decode, prefill left out.

SGLang (0.5.23, managers/scheduler_components/output_streamer.py) sends each request one chunk after its prefill and one
after each round, and says how often it verified with the last chunk (``spec_verify_ct``). So a request's chunks after
its first are its rounds. Where a server or a slow client joins several rounds in one chunk, the numbers differ; then
tokens still count the rounds of a server that does not draft, and of one that drafts the request tells nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from replay.errors import CaptureError
from replay.traces.fields import Fields, is_integer, parse_json, show

LEAST_ROUNDS = 8  # of a window: with fewer the edges weigh too much
_SPREAD = 2  # by how many rounds requests of one batch may part within a window: its edges
_MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came of ``request`` at ``at`` seconds: its output ``tokens`` so far; ``verifies`` with its last chunk."""

    at: float
    request: int
    tokens: int
    last: bool
    verifies: int | None


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of a round, and rounds and tokens of all requests that were counted in it."""

    seconds: float
    rounds: int
    tokens: int


def read_chunks(lines: Sequence[tuple[float, bytes]], batch: int) -> list[Chunk]:
    """The chunks of a stream of ``/generate``, by time. Raises CaptureError for another form and for an abort."""
    return [
        _chunk(at, line[5:].strip(), batch)
        for at, line in lines
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]"
    ]


def _chunk(at: float, data: bytes, batch: int) -> Chunk:
    document = parse_json(data, "the server's stream", CaptureError)
    if isinstance(document, dict) and "error" in document:
        raise CaptureError(f"the server ends its stream with {show(document['error'])}; see its log")
    chunk = Fields("the server's stream", document, _no_stream)
    meta = chunk.object("meta_info")
    reason = meta.values.get("finish_reason")
    if reason is not None and (not isinstance(reason, dict) or reason.get("type") != "length"):
        raise CaptureError(f"the server ended a request by {show(reason)} before its length; see its log")
    index = chunk.integer("index", 0, batch - 1) if batch > 1 or "index" in chunk.values else 0
    verifies = meta.values.get("spec_verify_ct")
    known = is_integer(verifies, 1, _MOST) and isinstance(verifies, int)
    return Chunk(
        at, index, meta.integer("completion_tokens", 0, _MOST), reason is not None, verifies if known else None
    )


def _no_stream(said: str) -> CaptureError:
    return CaptureError(f"{said}, so it is no SGLang server that replay can time")


def time_rounds(chunks: Sequence[Chunk], batch: int, *, drafts: bool) -> Window:
    """The time of a round while ``batch`` requests decode together: from the first round of the last to begin, to the
    end of the first that is done. Raises CaptureError where they never did so long enough."""
    by_request: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_request[chunk.request].append(chunk)
    if len(by_request) < batch or not all(own[-1].last for own in by_request.values()):
        raise CaptureError(f"the stream ended before all {batch} requests were answered; see the server's log")
    begun = max(own[0].at for own in by_request.values())
    ended = min(own[-1].at for own in by_request.values())
    counted = [found for own in by_request.values() if (found := _counted(own, begun, ended, drafts)) is not None]
    if not counted:
        raise CaptureError(
            "the server sends several rounds at a time, so they cannot be counted; start it with --stream-interval 1, "
            "or type a smaller --batch"
        )
    rounds = [count for _, count, _ in counted]
    if min(rounds) < LEAST_ROUNDS or max(rounds) - min(rounds) > max(_SPREAD, max(rounds) // 5):
        raise CaptureError(
            f"{batch} requests decoded together for {min(rounds)} rounds, and {LEAST_ROUNDS} are needed; type more "
            "--tokens, or a smaller --batch if the server does not run as many at a time"
        )
    seconds = sum(lasted for lasted, _, _ in counted)
    return Window(seconds / sum(rounds), sum(rounds), sum(tokens for _, _, tokens in counted))


def _counted(own: Sequence[Chunk], begun: float, ended: float, drafts: bool) -> tuple[float, int, int] | None:
    """Seconds, rounds and tokens of one request between its edges; None where its chunks are not its rounds."""
    if drafts and own[-1].verifies != len(own) - 1:
        return None
    inside = [place for place, chunk in enumerate(own) if begun < chunk.at <= ended and not chunk.last]
    if len(inside) < 2:
        return 0.0, 0, 0
    first, last = own[inside[0]], own[inside[-1]]
    tokens = last.tokens - first.tokens
    return last.at - first.at, inside[-1] - inside[0] if drafts else tokens, tokens
