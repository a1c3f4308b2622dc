"""In which order requests are asked that share a server's cache: two that begin alike never compute this both.

The first of those that begin alike is asked; the others wait until its prompt is computed, and then find it in the
cache. A server would else prefill them together, each by itself.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from replay.capture.encode import EncodedRequest

BLOCK = 16  # tokens; prompts that have fewer more in common are asked together

Digests = tuple[bytes, ...]  # of a prompt, one for each whole block and all before it


class Turns:
    """Gives requests in their order, at most ``most`` in flight, each once what it shares with another is computed."""

    def __init__(self, requests: Sequence[EncodedRequest], most: int) -> None:
        self._most = most
        self._waiting = [(one, tuple(_digests(one.prompt_ids))) for one in requests]
        self._in_flight: set[str] = set()
        self._prefilling: dict[str, Digests] = {}  # by request, what it computes
        self._computing: Counter[bytes] = Counter()
        self._computed: set[bytes] = set()
        self._changed = True

    @property
    def prefilling(self) -> list[str]:
        """Requests that were given and of which it is not known yet that their prompts are computed."""
        return list(self._prefilling)

    def take(self) -> list[EncodedRequest]:
        """Those whose turn it is now."""
        if not self._changed:
            return []
        self._changed = False
        taken, left = [], []
        for one, digests in self._waiting:
            new = tuple(digest for digest in digests if digest not in self._computed)
            if len(self._in_flight) >= self._most or (new and self._computing[new[0]]):
                left.append((one, digests))
                continue
            taken.append(one)
            self._in_flight.add(one.request_id)
            self._prefilling[one.request_id] = new
            self._computing.update(new)
        self._waiting = left
        return taken

    def prefilled(self, request_id: str) -> None:
        """The prompt of this request is computed."""
        digests = self._prefilling.pop(request_id, None)
        if digests is not None:
            self._computing.subtract(digests)
            self._computed.update(digests)
            self._changed = True

    def ended(self, request_id: str) -> None:
        """This request was answered or refused."""
        self.prefilled(request_id)
        if request_id in self._in_flight:
            self._in_flight.discard(request_id)
            self._changed = True


def _digests(prompt: Sequence[int]) -> Iterator[bytes]:
    chain = hashlib.blake2b(digest_size=8)
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        chain.update(repr(prompt[end - BLOCK : end]).encode())
        yield chain.copy().digest()
