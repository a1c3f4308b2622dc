"""A capture's requests: asked for, their rows gathered from the spool, joined, and written to the trace."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from replay.capture.client.answers import generate
from replay.capture.client.api import ServerApi
from replay.capture.client.asking import Answered, Asker, Refused
from replay.capture.client.cached_prefixes import CachedPrefixes, UnsureError
from replay.capture.client.facts import ServerFacts
from replay.capture.client.join import NO_PREFIX, JoinedRequest, first_missing, join
from replay.capture.client.passes import PassNumbers
from replay.capture.client.served import histogram_of, lacks_feed, same_histogram
from replay.capture.client.shard import NextShard
from replay.capture.client.spool_reader import SpoolReader, rid_of
from replay.capture.client.turns import Turns
from replay.capture.client.watch import RecordingStoppedError, RecordingWatch
from replay.capture.encode import EncodedRequest
from replay.capture.events import CaptureProgress, CaptureResult, Event, Finished, Noted, Planned
from replay.capture.kept import Kept
from replay.capture.options import SHARED, ServerOptions
from replay.errors import CaptureError, OutputError, TraceCorruptError
from replay.printable import counted

if TYPE_CHECKING:
    from replay.traces.writer import TraceWriter

_ROWS_SECONDS = 30.0  # how long rows may come after the answer
_FEED_SECONDS = 5.0  # how long what the draft was fed may come after the answer; other requests do not wait for it
_POLL_SECONDS = 0.05
_TELL_SECONDS = 1.0  # between two tellings of how far it is
_ATTEMPTS = 3  # for a request whose rows do not come whole
PROBE_TOKENS = 64  # of the first prompt, with which the way of the rows is tried
# Sentences of the header's ``missing`` begin so; a resumed capture says them anew.
_REFUSED = "the server refused request "
_STOPPED = "the requests that were not finished when the server stopped recording"


class ServerClient:
    """Gathers the rows of requests and writes them; everything but the asking happens in one thread."""

    def __init__(
        self,
        options: ServerOptions,
        api: ServerApi,
        facts: ServerFacts,
        spool: SpoolReader,
        on_event: Callable[[Event], None],
    ) -> None:
        self.options, self.api, self.facts, self.spool, self.on_event = options, api, facts, spool, on_event
        shares = options.server_cache == SHARED and facts.keeps_prefixes
        self.prefixes = CachedPrefixes(spool, facts.drafts) if shares else None
        self.turns: Turns | None = None
        self.asker = Asker(api, options, spool.client, logprobs=False, prefixes=self.prefixes)
        self.refused: dict[str, str] = {}
        self.watch = RecordingWatch(api, spool.folder, facts.no_feed)
        self.started = self.told = time.monotonic()
        self.output_tokens = self.most_left = self.differing = self.cached = self.unfed = 0
        self.begun_cached = 0  # requests without a feed, because the server had their first rows

    def probe(self, request: EncodedRequest) -> JoinedRequest:
        """Rows of a short prompt, all the way: the server, its plugin, the folder and this process work together."""
        short = replace(request, prompt_ids=request.prompt_ids[:PROBE_TOKENS], max_new_tokens=1)
        rid = partial(rid_of, self.spool.client, "probe")
        answer = self.api.patiently(
            lambda attempt: generate(self.api, short, rid(attempt), self.options, logprobs=False)
        )
        deadline = time.monotonic() + _ROWS_SECONDS
        tokens = len(short.prompt_ids) + len(answer.output_ids)
        while time.monotonic() < deadline:
            self.spool.poll()
            for attempt in range(self.options.retries + 1):
                recorded = self.spool.rows(rid(attempt))
                if first_missing(recorded, tokens - 1) is None:
                    joined = join("the probe", short.prompt_ids, answer.output_ids, recorded, self.facts.taps)
                    self.spool.drop([rid(attempt)])
                    return joined
            self.watch.check()
            time.sleep(_POLL_SECONDS)
        raise CaptureError(
            f"{self.api.url} answers, but no rows of it came into {self.spool.folder} within {_ROWS_SECONDS:.0f} s: "
            f"see its log{_also(self.spool.problems)}"
        )

    def run(self, requests: Sequence[EncodedRequest], writer: "TraceWriter", kept: Kept) -> CaptureResult:
        """Everything that is not in the trace yet; completes it."""
        done = writer.done_ids
        todo = [one for one in requests if one.request_id not in done]
        self.most_left = sum(one.max_new_tokens for one in todo)
        prompt_tokens = sum(len(one.prompt_ids) for one in todo)
        self.on_event(Planned(len(requests), len(done), prompt_tokens, self.most_left))
        self._start(todo, kept)
        try:
            self._gather(todo, len(requests), writer, kept)
        except KeyboardInterrupt:
            raise CaptureError(
                f"interrupted: {len(writer.done_ids)} of {counted(len(requests), 'request')} are safe in "
                f"{self.options.out}; type "
                "the same command with --resume to go on"
            ) from None
        except RecordingStoppedError as error:
            self._note_end(writer, f"{_STOPPED} ({error.reason})")
            raise
        finally:
            self.asker.stop()
        if self.refused and not writer.done_ids:
            first = next(iter(self.refused.values()))
            raise CaptureError(f"{self.api.url} refused all {len(self.refused)} requests, the first: {first}")
        self._note_doubts(writer)
        writer.finish()
        seconds = time.monotonic() - self.started
        result = CaptureResult(
            self.options.out, len(requests), len(todo) - len(self.refused), prompt_tokens, self.output_tokens, seconds,
            kept.taps, writer.header.embed, dict(self.refused),
        )  # fmt: skip
        self.on_event(Finished(result))
        return result

    def _start(self, todo: Sequence[EncodedRequest], kept: Kept) -> None:
        """Ask for all; where they share a cache, for each in its turn, and for rows that any other may need."""
        if self.prefixes is None:
            if self.options.server_cache == SHARED:
                note = f"--server-cache {SHARED} changes nothing: the server keeps no prefixes (--disable-radix-cache)"
                self.on_event(Noted(note))
            self.asker.start(todo, kept.asked)
            return
        self.turns = Turns(todo, self.options.concurrency)
        self.asker.stand_by(len(todo), lambda _: kept.asked_by_any())

    def _ask_more(self) -> None:
        """Ask for those whose turn it is, if they have turns."""
        if self.turns is None or self.prefixes is None:
            return
        self.turns.under(self.prefixes.salt)
        for request_id in self.turns.prefilling:
            if self.prefixes.has_prompt(request_id):
                self.turns.prefilled(request_id)
        for request in self.turns.take():
            self.asker.ask(request, 0)

    def _gather(self, todo: Sequence[EncodedRequest], requests: int, writer: "TraceWriter", kept: Kept) -> None:
        """Until each of ``todo`` is in the trace or refused; what is whole is kept, whatever ends it."""
        waiting: list[Answered] = []
        passes = PassNumbers(writer.next_verify_pass(), sum(one.writer for one in self.facts.manifests))
        shard = NextShard(self.options, passes)
        left = len(todo)
        try:
            while left:
                self._ask_more()
                left -= self._take_answers(waiting)
                self.spool.poll()
                for one in list(waiting):
                    if self._is_whole(one, kept):
                        left -= self._finish(one, shard, kept, writer)
                    elif time.monotonic() - one.since > _ROWS_SECONDS:
                        self.watch.check()
                        self._again(one, f"the rows of request {one.request.request_id!r} did not come whole")
                    else:
                        continue
                    waiting.remove(one)
                if time.monotonic() - self.told > _TELL_SECONDS:
                    self._tell(writer, requests, self.spool.output_tokens(shard.rids))
                if shard.is_full or (shard and not left):
                    self._write(shard, writer, requests)
                    shard = NextShard(self.options, passes)
                if waiting and time.monotonic() - waiting[0].since > 1:
                    self.watch.check()
        finally:
            if shard:
                self._write(shard, writer, requests)

    def _take_answers(self, waiting: list[Answered]) -> int:
        """Put new answers among those whose rows are ``waiting``; how many requests were refused instead."""
        refused = 0
        for one in self.asker.new_answers():
            if self.turns is not None:
                self.turns.ended(one.request.request_id, computed=isinstance(one, Answered))
            if self.prefixes is not None and isinstance(one, Answered):
                self.prefixes.answered(one.rid, one.answer.output_ids)
            if isinstance(one, Refused):
                self._refuse(one)
                refused += 1
            else:
                waiting.append(one)
        return refused

    def _first_row(self, one: Answered, kept: Kept) -> int:
        """The first row that the server was asked for."""
        return 0 if self.prefixes is not None else kept.first_row(len(one.request.prompt_ids))

    def _is_whole(self, one: Answered, kept: Kept) -> bool:
        """Whether all its rows are there, and what the draft was fed with it, which is waited for only so long."""
        recorded = self.spool.rows(one.rid)
        tokens = len(one.request.prompt_ids) + len(one.answer.output_ids)
        if first_missing(recorded, tokens - 1, self._first_row(one, kept), self._cached(one)) is not None:
            return False
        if not self.facts.drafts or self.watch.no_feed or time.monotonic() - one.since > _FEED_SECONDS:
            return True
        return not lacks_feed([it.entry for it in recorded])

    def _cached(self, one: Answered) -> int:
        """How many rows the server took from its cache, of which an earlier request of this capture has them."""
        shares = self.prefixes is not None and self.prefixes.shares(one.rid)
        return one.answer.counters.cached_tokens if shares else 0

    def _finish(self, one: Answered, shard: NextShard, kept: Kept, writer: "TraceWriter") -> bool:
        """Take in its rows; False where it is asked again instead."""
        request, answer, cached = one.request, one.answer, self._cached(one)
        name = f"request {request.request_id!r}"
        try:
            taps = kept.taps_of(request.request_id)
            first_row = self._first_row(one, kept)
            prefix = NO_PREFIX if self.prefixes is None else self.prefixes.take(one.rid, cached, taps, writer)
            recorded = self.spool.rows(one.rid)
            joined = join(name, request.prompt_ids, answer.output_ids, recorded, taps, first_row, prefix)
        except UnsureError as error:
            self._again(one, f"which rows the server cached of {name} is not sure ({error})")
            return False
        except TraceCorruptError:
            self.watch.check()  # rows that vanish while they are read are those of a restarted server
            raise
        if not same_histogram(histogram_of(joined.rounds), answer.counters.histogram):
            self.differing += 1
        self.cached += answer.counters.cached_tokens > cached
        if self.facts.drafts and joined.feed is None:
            self.begun_cached, self.unfed = self.begun_cached + (cached > 0), self.unfed + (cached == 0)
        shard.add(one, joined)
        self.output_tokens += len(answer.output_ids)
        self.most_left -= request.max_new_tokens
        return True

    def _refuse(self, one: Refused) -> None:
        """Leave a request out; the others go on."""
        self.refused[one.request.request_id] = one.reason
        self.most_left -= one.request.max_new_tokens
        self.on_event(Noted(f"{_REFUSED}{one.request.request_id!r} ({one.reason}); the trace goes on without it"))

    def _again(self, one: Answered, why: str) -> None:
        """Ask for a request anew; others take nothing that this try may have left in the server's cache."""
        if self.prefixes is not None:
            self.prefixes.spoil(one.rid)
        self._drop([one.rid], stored=False)
        if one.attempt + 1 == _ATTEMPTS:
            raise CaptureError(
                f"{why}, at the last of {_ATTEMPTS} tries: see the server's log{_also(self.spool.problems)}; type the "
                "same command with --resume to go on"
            )
        self.on_event(Noted(f"{why}; asking again"))
        self.asker.ask(one.request, one.attempt + 1)

    def _write(self, shard: NextShard, writer: "TraceWriter", requests: int) -> None:
        shard.write(writer)
        self._drop(shard.rids, stored=True)
        self._tell(writer, requests, 0)

    def _drop(self, rids: Sequence[str], *, stored: bool) -> None:
        if self.prefixes is not None:
            for rid in rids:
                self.prefixes.leave(rid, stored)
        self.spool.drop(rids)

    def _tell(self, writer: "TraceWriter", requests: int, under_way: int) -> None:
        """How far it is; ``under_way``: tokens of requests that are not answered yet."""
        self.told = time.monotonic()
        seconds, under_way = self.told - self.started, min(under_way, self.most_left)
        tokens, left = self.output_tokens + under_way, self.most_left - under_way
        rate = tokens / seconds if seconds > 0 else 0.0
        self.on_event(CaptureProgress(len(writer.done_ids), requests, tokens, left, seconds, rate))

    def _note_end(self, writer: "TraceWriter", sentence: str) -> None:
        try:
            writer.set_missing([*self._lasting(writer), sentence])
        except OutputError:
            pass  # what ended the capture is told anyway, and matters more

    def _note_doubts(self, writer: "TraceWriter") -> None:
        doubts = []
        if self.differing:
            doubts.append(
                f"{counted(self.differing, 'request')} whose recorded rounds differ from the histogram the server "
                "counted for them"
            )
        if self.cached:
            doubts.append(f"{counted(self.cached, 'request')} of which the server took a prefix from its cache")
        if self.prefixes is not None and self.prefixes.unlike:
            doubts.append(
                f"{counted(self.prefixes.unlike, 'request')} whose cached rows several requests had computed, with the "
                "same bits, in forwards of other sizes"
            )
        if self.unfed:
            why = f" ({self.watch.no_feed})" if self.watch.no_feed else ""
            doubts.append(f"{counted(self.unfed, 'request')} of which it was not recorded what the draft was fed{why}")
        if self.begun_cached:
            without = counted(self.begun_cached, "request")
            doubts.append(f"{without} without a feed: the server's cache had the first rows")
        doubts += [note for note in self.facts.notes if note not in writer.header.missing]
        for text in doubts:
            self.on_event(Noted(text))
        refused = [f"{_REFUSED}{name!r} ({reason})" for name, reason in self.refused.items()]
        missing = (*self._lasting(writer), *refused, *doubts)
        if missing != writer.header.missing:
            writer.set_missing(missing)

    def _lasting(self, writer: "TraceWriter") -> list[str]:
        """What was said to be missing, but for what this run says anew."""
        return [text for text in writer.header.missing if not text.startswith((_REFUSED, _STOPPED))]


def _also(problems: Sequence[str]) -> str:
    return f" ({len(problems)} files were refused, the first: {problems[0]})" if problems else ""
