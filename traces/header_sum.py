"""The checksum that ``trace.json`` holds of itself: of its bytes, with zeros in place of its digits."""

import hashlib
import re

from replay.errors import TraceCorruptError
from replay.traces.damage import AGAIN_OR_AS_IT_IS

NO_SUM = "0" * 64
_OWN_SUM = re.compile(rb'("header_sha256"\s*:\s*")([0-9a-f]{64})(")')


def with_own_sum(text: str) -> str:
    """``text``, whose ``header_sha256`` is NO_SUM, with its checksum there."""
    own = hashlib.sha256(text.encode()).hexdigest()
    return _OWN_SUM.sub(lambda match: match[1] + own.encode() + match[3], text.encode(), count=1).decode()


def check_own_sum(data: bytes, told: str, source: str) -> None:
    """Raises TraceCorruptError where ``data`` has changed since it was written."""
    blank, places = _OWN_SUM.subn(lambda match: match[1] + NO_SUM.encode() + match[3], data)
    if places != 1 or hashlib.sha256(blank).hexdigest() != told:
        raise TraceCorruptError(
            f"{source} has changed since it was written, its checksum header_sha256 is that of another text: "
            f"{AGAIN_OR_AS_IT_IS}"
        )
