"""What charts call things: short enough for a phone, and no two of them alike."""

from collections.abc import Sequence
from textwrap import wrap

from replay.printable import one_line, shorten

MOST_LABEL = 56  # characters of a line across a whole chart
_MOST_LINES = 3
_BETWEEN, _FIXED = " · ", "\N{NO-BREAK SPACE}"  # between two facts, and within one


def numbered(names: Sequence[str]) -> list[str]:
    """Each with its place in front, as the table beside the chart has it; one alone needs none."""
    if len(names) == 1:
        return [shorten(one_line(names[0]), MOST_LABEL)]
    return [shorten(f"{place}. {one_line(name)}", MOST_LABEL) for place, name in enumerate(names, 1)]


def distinct(names: Sequence[str], most: int = MOST_LABEL) -> dict[str, str]:
    """A short form of each different name; where two would be alike, with a number behind."""
    short: dict[str, str] = {}
    for name in dict.fromkeys(names):
        said = shorten(one_line(name), most)
        taken, place = said, 2
        while taken in short.values():
            taken, place = f"{said} ({place})", place + 1
        short[name] = taken
    return short


def folded(name: str, width: int) -> str:
    """In up to three lines of ``width`` characters, broken between facts where that does; a longer one loses its
    middle.
    """
    facts = shorten(name, _MOST_LINES * (width - 2)).split(_BETWEEN)
    whole = [fact.replace(" ", _FIXED) for fact in facts]
    lines = wrap(f"{_FIXED}· ".join(whole), width, break_on_hyphens=False)
    if len(lines) > _MOST_LINES:
        lines = wrap(_BETWEEN.join(facts), width, break_on_hyphens=False)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], shorten(" ".join(lines[_MOST_LINES - 1 :]), width)]
    return "\n".join(lines).replace(_FIXED, " ")
