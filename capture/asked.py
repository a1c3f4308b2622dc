"""What a client keeps of a request's rows, spelled in the request's id: the server copies and writes no more than that.

In the id, since it comes with the request to whichever process runs it, and comes again when that process is started
anew. A plugin that does not know the spelling takes it for a part of the name and hands everything over; an id without
it asks for everything. Nothing here is ever guessed: an id that is spelled otherwise asks for everything too.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from replay.capture.spool import RID_PREFIX
from replay.traces.header import ROWS
from replay.traces.taps import FINAL

_MOST = 4096  # characters of an id that is looked at
_KNOWN = 1 << 12  # ids that are looked at once and not in every forward
_RID = re.compile(
    rf"{RID_PREFIX}[0-9a-f]{{16}}-[0-9a-z]+\.(?P<taps>[0-9a-z]+(?:_[0-9a-z]+)*|)\.(?P<rows>{'|'.join(ROWS)})"
    r"\.(?P<first>[0-9]{1,9})-[0-9]+",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Of a request the rows from ``first_row`` on, in ``taps`` of the stream and always in ``final``.

    ``taps`` are canonical names; ``rounded``: all of them but ``final`` in fp8.
    """

    taps: tuple[str, ...]
    rounded: bool = False
    first_row: int = 0

    def spell(self) -> str:
        """The end of a request's name in its id (client/spool_reader.py ``rid_of``)."""
        return f".{'_'.join(self.taps)}.{ROWS[self.rounded]}.{self.first_row}"


def asked_of(rid: str) -> Asked | None:
    """What the id of a request asks for; None: everything."""
    return _parse(rid) if len(rid) <= _MOST else None  # a longer one is not remembered either


@lru_cache(_KNOWN)
def _parse(rid: str) -> Asked | None:
    match = _RID.fullmatch(rid)
    if match is None:
        return None
    taps = tuple(match["taps"].split("_")) if match["taps"] else ()
    if len(set(taps)) < len(taps) or FINAL in taps:
        return None
    return Asked(taps, match["rows"] == ROWS[True], int(match["first"]))
