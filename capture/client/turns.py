"""In which order requests are asked that share a server's cache, so that those that begin alike compute this once.

The first of those that begin alike is asked; the others wait until its prompt is computed, and then find it in the
cache. A server would else prefill them together, each by itself. This order only saves work: whose rows a request got
is found out by cached_prefixes.py. A server of several replicas has a cache for each, which is not known here.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

from replay.capture.encode import EncodedRequest
from replay.traces.block_digests import digests_by_block

BLOCK = 16  # tokens; prompts with fewer in common, beyond what is computed, are asked together

Digests = tuple[bytes, ...]  # of a prompt, one for each whole block and all before it


class Turns:
    """Gives requests in their order, at most ``most`` in flight, each once what it shares with another is computed."""

    def __init__(self, requests: Sequence[EncodedRequest], most: int) -> None:
        self._most = most
        self._waiting = [(one, _digests(one.prompt_ids)) for one in requests]
        self._in_flight: set[str] = set()
        self._prefilling: dict[str, Digests] = {}  # by request, what it computes
        self._computing: Counter[bytes] = Counter()
        self._computed: set[bytes] = set()
        self._salt = ""
        self._changed = True

    @property
    def prefilling(self) -> list[str]:
        """Requests that were given and of which it is not known yet that their prompts are computed."""
        return list(self._prefilling)

    def under(self, salt: str) -> None:
        """Requests are asked under this salt from now on: what was computed under another one is not in the cache."""
        if salt != self._salt:
            self._salt, self._changed = salt, True
            self._prefilling.clear()
            self._computing.clear()
            self._computed.clear()

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
        self._computed.update(self._no_more(request_id))

    def ended(self, request_id: str, *, computed: bool) -> None:
        """This request was answered, so that its prompt is ``computed``, or it was refused."""
        digests = self._no_more(request_id)
        if computed:
            self._computed.update(digests)
        if request_id in self._in_flight:
            self._in_flight.discard(request_id)
            self._changed = True

    def _no_more(self, request_id: str) -> Digests:
        """What this request was computing, which it does no more."""
        digests = self._prefilling.pop(request_id, ())
        self._computing.subtract(digests)
        self._changed = self._changed or bool(digests)
        return digests


def _digests(prompt: Sequence[int]) -> Digests:
    tokens = array("q", prompt)
    return tuple(digests_by_block(tokens.tobytes(), BLOCK * tokens.itemsize))
