"""Requests in flight: threads that ask for one after another, each until it is answered or refused."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replay.capture.asked import Asked
from replay.capture.client.answers import generate
from replay.capture.client.api import RefusedError, ServerApi, TransientError
from replay.capture.client.cached_prefixes import CachedPrefixes
from replay.capture.client.join import Answer
from replay.capture.client.spool_reader import rid_of
from replay.capture.encode import EncodedRequest
from replay.capture.options import ServerOptions

AskedOf = Callable[[EncodedRequest], Asked]

_POLL_SECONDS = 0.05
_IDLE_SECONDS = 1.0  # after which a thread looks whether it is still wanted


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its answer, which came at ``since`` (time.monotonic) under the id ``rid``."""

    request: EncodedRequest
    rid: str
    attempt: int  # how often it had been asked for and answered before
    answer: Answer
    since: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that the server does not take, and why."""

    request: EncodedRequest
    reason: str


class Asker:
    """Asks a server in the name of ``client``; each try of a request has an id of its own (spool_reader.rid_of)."""

    def __init__(
        self,
        api: ServerApi,
        options: ServerOptions,
        client: str,
        *,
        logprobs: bool,
        prefixes: CachedPrefixes | None = None,  # where requests share the server's cache
    ) -> None:
        self.api, self.options, self.client, self.logprobs, self.prefixes = api, options, client, logprobs, prefixes
        self._tasks: queue.SimpleQueue[tuple[EncodedRequest, int]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answered | Refused | BaseException] = queue.SimpleQueue()
        self._stopped = False
        self._asked: AskedOf | None = None

    def start(self, requests: Sequence[EncodedRequest], asked: AskedOf | None = None) -> None:
        """Ask for all ``requests``, ``options.concurrency`` at a time."""
        for request in requests:
            self.ask(request, 0)
        self.stand_by(len(requests), asked)

    def stand_by(self, requests: int, asked: AskedOf | None = None) -> None:
        """Be ready for so many ``requests``, ``options.concurrency`` at a time; ``asked``: for which of their rows."""
        self._asked = asked
        for _ in range(min(self.options.concurrency, requests)):
            threading.Thread(target=self._work, name="replay-request", daemon=True).start()

    def ask(self, request: EncodedRequest, attempt: int) -> None:
        """Ask for one more, or for one again."""
        self._tasks.put((request, attempt))

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True

    def new_answers(self) -> list[Answered | Refused]:
        """Those that have come; waits a little for the first. Raises what ended a request for good."""
        answers: list[Answered | Refused] = []
        try:
            one = self._answers.get(timeout=_POLL_SECONDS)
            while True:
                if isinstance(one, BaseException):
                    raise one
                answers.append(one)
                one = self._answers.get_nowait()
        except queue.Empty:
            return answers

    def _work(self) -> None:
        """A thread's life: one request after another, until there shall be no more."""
        while not self._stopped:
            try:
                request, attempt = self._tasks.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                continue
            try:
                self._answers.put(self._answered(request, attempt))
            except RefusedError as error:
                self._answers.put(Refused(request, error.reason))
            except BaseException as error:  # handed to the gathering thread, which raises it
                self._answers.put(error)

    def _answered(self, request: EncodedRequest, attempt: int) -> Answered:
        tag = secrets.token_hex(6) + ("" if self._asked is None else self._asked(request).spell())
        rid = ""

        def once(again: int) -> Answer:
            nonlocal rid
            rid = rid_of(self.client, tag, again)
            salt = None if self.prefixes is None else self.prefixes.salt_for(request, rid, attempt + again)
            try:
                return generate(self.api, request, rid, self.options, logprobs=self.logprobs, salt=salt)
            except TransientError:
                if self.prefixes is not None:  # it may have computed rows, and nobody knows which
                    self.prefixes.spoil(rid)
                raise

        answer = self.api.patiently(once)
        return Answered(request, rid, attempt, answer, time.monotonic())
