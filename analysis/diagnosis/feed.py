"""What a draft was really fed, slot by slot: the counts that replay/diagnosis/feed.py makes, judged and said.

A place is a tap and a shift: row i holds the tap of row i + shift.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from replay.analysis.json_document import JsonObject
from replay.printable import counted
from replay.traces.taps import tap_index

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot number ``slot`` of the head's ``fc``, in ``rows`` rows: ``zeros`` of them hold nothing but zeros, ``broken``
    of them NaN or Inf.

    ``equal`` of the ``compared`` rows have the bits of a place; rows that have no such neighbour are not compared.
    ``nearest`` is the place with the highest mean ``cosine``, which says something of a slot that equals none and that
    is not ``zeroed``; None (and NaN) where the trace has none of these rows of prompts, so that nothing was compared.
    """

    slot: int
    rows: int
    zeros: int
    equal: Mapping[Place, int]
    compared: Mapping[Place, int]
    nearest: Place | None
    cosine: float
    broken: int = 0

    @property
    def place(self) -> Place | None:
        """The place that most rows equal, of several the one of the row itself; None where no row equals any."""
        best = max(self.equal, key=lambda place: self.equal[place])
        return best if self.equal[best] else None

    @property
    def zeroed(self) -> bool:
        """Whether most rows hold zeros, to which nothing is near."""
        return 2 * self.zeros > self.rows

    @property
    def spoiled(self) -> bool:
        """Whether most rows hold NaN or Inf."""
        return 2 * self.broken > self.rows

    @property
    def also(self) -> tuple[Place, ...]:
        """Other places that as many rows equal: which of them was fed cannot be told."""
        place = self.place
        return tuple(one for one in self.equal if place and one != place and self.equal[one] == self.equal[place])

    @property
    def told(self) -> bool:
        """Whether more than half of the rows show what it was fed: a place, zeros, NaN or Inf."""
        place = self.place
        return self.zeroed or self.spoiled or (place is not None and 2 * self.equal[place] > self.compared[place])

    def holds(self, tap: str, shift: int) -> bool:
        """Whether at least half of the rows that could be compared have the bits of this place."""
        return 2 * self.equal.get((tap, shift), 0) >= self.compared.get((tap, shift), 0) > 0


@dataclass(frozen=True, slots=True)
class Feeding:
    """What the draft was fed in ``rows`` rows of ``requests`` requests: its slots, its tokens, its positions.

    ``next_token`` rows i embedded x[i+1], as EAGLE-3 heads are trained; ``own_token`` x[i] (a row may count for both).
    ``at_offset`` rows stood ``offset`` positions after their row, which is the commonest distance; ``positions`` counts
    rows by row and position.
    """

    requests: int
    rows: int
    slots: tuple[Slot, ...]
    next_token: int
    own_token: int
    offset: int
    at_offset: int
    positions: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def wiring(self) -> tuple[str, ...] | None:
        """The taps that were fed, in order; None where a slot was fed something else or another row's."""
        places = [slot.place if slot.told and not (slot.zeroed or slot.spoiled) else None for slot in self.slots]
        return tuple(place[0] for place in places if place) if all(p and not p[1] for p in places) else None


@dataclass(frozen=True, slots=True)
class Fed:
    """What a variant feeds its draft: taps in order, of the row that is ``shift`` away; ``zeros`` slots of none;
    ``unrecorded``: features that are no tap; ``own_token``: row i embeds x[i], not x[i+1]; ``offset``: row i stands at
    i + offset, from ``max_position`` on at the last position before it (None: there is no last)."""

    taps: tuple[str, ...]
    shift: int = 0
    zeros: tuple[int, ...] = ()
    unrecorded: bool = False
    own_token: bool = False
    offset: int = 0
    max_position: int | None = None

    def position(self, row: int) -> int:
        """Where a row stands."""
        stands = row + self.offset
        return stands if self.max_position is None else min(stands, self.max_position - 1)


# ---- judge ----


def contradiction(feeding: Feeding, fed: Fed) -> str:
    """Why the feed cannot come from what ``fed`` says, in half a sentence; empty where it can.

    Only what the rows show to be otherwise counts, in more than half of them: a fault may spare or strike single rows,
    and a slot with the bits of no recorded tap may hold one that was cast on the way.
    """
    if len(fed.taps) != len(feeding.slots):
        return f"the draft was fed {len(feeding.slots)} slots, not {len(fed.taps)}"
    told = (_against_slot(slot, tap, fed) for slot, tap in zip(feeding.slots, fed.taps, strict=True))
    return next(filter(None, told), "") or _against_tokens(feeding, fed) or _against_positions(feeding, fed)


def _against_slot(slot: Slot, tap: str, fed: Fed) -> str:
    if slot.slot in fed.zeros:
        return f"{say_slot(slot)}, and no zeros" if 2 * slot.zeros < slot.rows else ""
    if fed.unrecorded:
        return say_slot(slot) if slot.told else ""
    denied = slot.told and not slot.holds(tap, fed.shift)
    return f"{say_slot(slot)}, and not {_say_place((tap, fed.shift))}" if denied else ""


def _against_tokens(feeding: Feeding, fed: Fed) -> str:
    wanted = feeding.own_token if fed.own_token else feeding.next_token
    if 2 * wanted >= feeding.rows:
        return ""
    return f"{_say_tokens(feeding)}, and not {'x[i]' if fed.own_token else 'x[i+1]'}"


def _against_positions(feeding: Feeding, fed: Fed) -> str:
    elsewhere = sum(count for (row, position), count in feeding.positions.items() if position != fed.position(row))
    if 2 * elsewhere <= feeding.rows:
        return ""
    end = "" if fed.max_position is None else f" and {fed.max_position - 1} at most"
    return f"{_say_positions(feeding)}, and not {_say_offset(fed.offset)} its row{end}"


def borne_out(feeding: Feeding, fed: Fed) -> bool:
    """Whether slots, tokens and positions show what ``fed`` says, rather than merely not contradict it."""
    return not contradiction(feeding, fed) and all(slot.told for slot in feeding.slots)


# ---- say ----


def lines(feeding: Feeding) -> Iterator[str]:
    """A sentence for each slot, which says what to do where it is not identified; one each for tokens and positions."""
    for slot in feeding.slots:
        named = slot.zeroed or slot.spoiled or slot.place is not None
        more = "more taps: `replay serve --taps ...`" if slot.nearest else "more rows of prompts (--prompt-rows)"
        yield say_slot(slot) + ("" if named else f"; to name it, record {more}")
    yield _say_tokens(feeding)
    yield _say_positions(feeding)


def say_slot(slot: Slot) -> str:
    """``slot 1: R[3], bit for bit in 64 of 64 rows``."""
    place = slot.place
    if slot.zeroed:
        said = f"slot {slot.slot}: zeros in {slot.zeros} of {counted(slot.rows, 'row')}"
    elif slot.spoiled:
        return f"slot {slot.slot}: NaN or Inf in {slot.broken} of {counted(slot.rows, 'row')}"
    elif slot.nearest is None:
        said = f"slot {slot.slot}: not compared, the trace lacks the {counted(slot.rows, 'row')} that were seen"
    elif place is None:
        near = (
            f"nearest is {_say_place(slot.nearest)} with cosine {slot.cosine:.3f}" if math.isfinite(slot.cosine) else ""
        )
        return f"slot {slot.slot}: not identified, no recorded tap has its bits" + (f"; {near}" if near else "")
    else:
        rows = counted(slot.compared[place], "row")
        said = f"slot {slot.slot}: {_say_place(place)}, bit for bit in {slot.equal[place]} of {rows}"
    if slot.broken:
        said += f", NaN or Inf in {slot.broken} of {slot.rows}"
    if slot.also:
        said += f"; cannot be told from {', '.join(map(_say_place, slot.also))}, whose bits are the same"
    return said


def _say_place(place: Place) -> str:
    tap, shift = place
    index = tap_index(tap)
    name = tap if not index else f"R[{index}]"
    return name if not shift else f"{name} of the row {'before' if shift < 0 else 'after'}"


def _say_tokens(feeding: Feeding) -> str:
    return f"token: row i embeds x[i+1] in {feeding.next_token} of {counted(feeding.rows, 'row')}" + (
        f", x[i] in {feeding.own_token}" if feeding.own_token > feeding.next_token else ""
    )


def _say_positions(feeding: Feeding) -> str:
    return f"position: {_say_offset(feeding.offset)} its row in {feeding.at_offset} of {counted(feeding.rows, 'row')}"


def _say_offset(offset: int) -> str:
    return f"that {offset:+d} of" if offset else "that of"


def feeding_json(feeding: Feeding | None) -> JsonObject:
    """``slots`` and ``fed`` of ``replay diagnose --json``; empty and null where nothing was recorded."""
    if feeding is None:
        return {"slots": [], "fed": None}
    return {
        "slots": [_slot_json(slot) for slot in feeding.slots],
        "fed": {
            "requests": feeding.requests,
            "rows": feeding.rows,
            "next_token": feeding.next_token,
            "own_token": feeding.own_token,
            "offset": feeding.offset,
            "at_offset": feeding.at_offset,
        },
    }


def _slot_json(slot: Slot) -> JsonObject:
    place = slot.place
    tap, shift = slot.nearest or (None, None)
    near = {"tap": tap, "shift": shift, "cosine": slot.cosine}
    return {
        "slot": slot.slot,
        "tap": place[0] if place else None,
        "shift": place[1] if place else None,
        "rows": slot.compared[place] if place else slot.rows,
        "equal": slot.equal[place] if place else 0,
        "zeros": slot.zeros,
        "broken": slot.broken,
        "also": [{"tap": tap, "shift": shift} for tap, shift in slot.also],
        "nearest": near if place is None and not slot.zeroed and math.isfinite(slot.cosine) else None,
    }
