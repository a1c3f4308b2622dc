"""Kinds of fault whose value is a number on a scale: finer values around one that was tried, and the roundest one.

A list of likely values holds a few numbers only (likely_values.py). Where one of them explains a server better than the
others, the true one may lie beside it: ``neighbours`` says what to try next, closer with each step. What is found then
has an interval; people wrote a round number, and ``rounded`` says which.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import ceil, floor, log2, log10

from replay.errors import UsageError
from replay.faults.table import Fault

_OFFSET, _SCALE, _SPAN = "position.offset", "attn.scale", "kv.skip-draft"
# Kinds whose values begin with a number of tokens, with words behind a colon or without.
_TOKENS = ("attn.window", "position.max-len", "kv.prefix-reuse")
# By kind the number among the words of its values, and the ratio of the first step.
_GEOMETRIC: Mapping[str, tuple[str, float]] = {
    "position.rope-params": ("theta:", 10.0),
    "wiring.norm-eps": ("", 10.0),
    _SCALE: ("", 2.0),
}
_FIRST_OFFSET = 4  # positions that the first step goes
_FIRST_END = 16  # output tokens by which the first step moves an end of a span
_DIGITS, _LAST_STEP = 4, 8  # significant digits of a proposed number, which still part the last step's from its own
_MOST_DIGITS = 17  # of any number: a double has no more
_FARTHEST = Decimal(10) ** 6  # from the best value: an interval may be open on one side


def number_in(kind: str, value: str) -> float | None:
    """The number on a scale that is in a value of a kind; None where there is none (``scaling:none``).

    ``stuck`` of ``position.offset`` is its 0.
    """
    if kind == _OFFSET:
        return float(value.rpartition(":")[2]) if value != "stuck" else 0.0
    if kind in _TOKENS:
        return float(value.partition(":")[0])
    prefix, _ = _GEOMETRIC.get(kind, ("\0", 0.0))
    return float(value.removeprefix(prefix)) if re.fullmatch(re.escape(prefix) + r"[\d.eE+-]+", value) else None


def put_number(kind: str, value: str, number: str) -> str:
    """``value`` with another number on its scale, as ``number_in`` finds it."""
    if kind in _TOKENS:
        _, colon, words = value.partition(":")
        return number + colon + words
    if kind != _OFFSET:
        return f"{_GEOMETRIC[kind][0]}{number}" if kind in _GEOMETRIC else number
    scope = "stuck" if value == "stuck" else value.rpartition(":")[0]
    if scope == "stuck" and number == "0":
        return "stuck"
    return f"{scope}:{number}" if scope else number


def neighbours(kind: str, value: str, step: int) -> tuple[str, ...]:
    """The values below and above ``value`` at a distance that halves with each ``step`` (0, 1, ...).

    A base of RoPE, an epsilon and a scale lie on a geometric grid: of 10, of its square root, of that one's, and so on
    (a scale's: of 2). Numbers of tokens and offsets are integers: half of the number away, a quarter and so on; 4
    positions, 2 and 1.
    Of a span of tokens each end moves, and both: by 16 tokens, 8 and so on. Empty for other kinds and values, and from
    the step on at which no other value is left. One that would be no fault, an offset of 0 or a scale of 1, is left
    out, and so is what the kind does not take.
    """
    if kind == _SPAN:
        return _moved_spans(value, _FIRST_END >> step)
    number = number_in(kind, value)
    if number is None:
        return ()
    if kind in _GEOMETRIC:
        ratio = _GEOMETRIC[kind][1] ** (0.5**step)
        around = [spelled(number / ratio), spelled(number * ratio)] if step <= _LAST_STEP else []
    else:
        by = (_FIRST_OFFSET if kind == _OFFSET else max(1, int(number) // 2)) >> step
        around = [str(int(number) - by), str(int(number) + by)] if by else []
    proposed = [put_number(kind, value, text) for text in around]
    nothing = ("1",) if kind == _SCALE else ("0", "all:0")
    return tuple(text for text in proposed if text not in nothing and _takes(kind, text))


def _moved_spans(value: str, by: int) -> tuple[str, ...]:
    """START:STOP with one end or both up to ``by`` tokens away, and the same span filled the other way."""
    if not by:
        return ()
    start, stop, *fill = value.split(":")
    ends = ((int(start) + one * by, int(stop) + other * by) for one in (0, -1, 1) for other in (0, -1, 1))
    proposed = [":".join((str(max(0, one)), str(other), *fill)) for one, other in ends]
    proposed.append(f"{start}:{stop}" if fill else f"{value}:masked")
    return tuple(text for text in dict.fromkeys(proposed) if text != value and _takes(_SPAN, text))


def rounded(kind: str, low: float, best: float, high: float) -> str:
    """The roundest number from ``low`` to ``high``, as text without the words of the kind's grammar (``put_number``).

    A power of ten, or of two for a number of tokens or a scale; else the one of fewest significant digits. Of several
    the one nearest to ``best``: by ratio, offsets by distance. No offset is 0 where another one is possible. Where an
    interval of integers holds none, the nearest to ``best`` is said. ``kind`` is one that has ``neighbours``, and
    low <= best <= high, above 0 but for offsets; ``low`` may be 0 and ``high`` infinite.
    """
    assert low <= best <= high and (kind == _OFFSET or best > 0)
    if kind == _OFFSET:
        return _round_offset(low, best, high)
    if kind in _TOKENS:
        return _round_tokens(low, best, high)
    assert kind in _GEOMETRIC
    middle = _exact(best)
    bounds = max(_exact(low), middle / _FARTHEST), min(_exact(high), middle * _FARTHEST)
    if kind == _SCALE and (powers := list(_powers_of_two(*bounds))):
        return _text(_nearest(powers, middle))
    for digits in range(_MOST_DIGITS + 1):
        if found := list(_with_digits(digits, *bounds)):
            return _text(_nearest(found, middle))
    return spelled(best, _MOST_DIGITS)


def spelled(number: float, digits: int = _DIGITS) -> str:
    """A positive number with so many significant digits at most, as values of faults are typed: 31620, 1e-6, 2.5e9."""
    return _text(Decimal(f"{number:.{digits - 1}e}"))


def _round_tokens(low: float, best: float, high: float) -> str:
    first, last = max(1, ceil(low)), floor(min(high, best * float(_FARTHEST)))
    if last < first:
        return str(max(1, round(best)))
    if powers := list(_powers_of_two(Decimal(first), Decimal(last))):
        return _text(_nearest(powers, _exact(best)))
    return str(_fewest_digits(range(first, last + 1), best))


def _round_offset(low: float, best: float, high: float) -> str:
    inside = range(ceil(max(low, best - 1000)), floor(min(high, best + 1000)) + 1)
    return str(_fewest_digits([number for number in inside if number] or inside or [round(best)], best))


def _nearest(numbers: list[Decimal], middle: Decimal) -> Decimal:
    return min(numbers, key=lambda number: max(number / middle, middle / number))


def _powers_of_two(low: Decimal, high: Decimal) -> Iterator[Decimal]:
    for exponent in range(floor(log2(low)) - 1, ceil(log2(high)) + 1):
        if low <= (power := Decimal(2) ** exponent) <= high:
            yield power


def _fewest_digits(numbers: "range | list[int]", best: float) -> int:
    return min(numbers, key=lambda number: (len(str(abs(number)).rstrip("0")), abs(number - best)))


def _with_digits(digits: int, low: Decimal, high: Decimal) -> Iterator[Decimal]:
    """Numbers of so many significant digits from ``low`` to ``high``; 0 digits are powers of ten.

    It is asked for more digits where there is none of fewer, so that few are there.
    """
    for exponent in range(floor(log10(low)) - 1, floor(log10(high)) + 2):
        unit = Decimal(10) ** (exponent - max(0, digits - 1))
        most = 1 if digits == 0 else 10**digits - 1
        first, last = max(ceil(low / unit), 10 ** max(0, digits - 1)), min(floor(high / unit), most)
        yield from (count * unit for count in range(first, last + 1))


def _takes(kind: str, value: str) -> bool:
    try:
        Fault(kind, value)
    except UsageError:
        return False
    return True


def _exact(number: float) -> Decimal:
    return Decimal(repr(number))


def _text(number: Decimal) -> str:
    """In digits from 0.001 to below 1e9, else with an exponent."""
    exponent = number.adjusted()
    if -4 < exponent < 9:
        return f"{number.normalize():f}"
    return f"{number.scaleb(-exponent).normalize():f}e{exponent}"
