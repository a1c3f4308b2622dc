"""Names of the recorded places in a target's residual stream.

``R[i]`` is the stream before layer i (HF ``hidden_states[i]``, "the output after layer i" counting from 1);
``R[0]`` is the embedding output, ``R[N]`` the stream after the last of N layers, before the final norm;
``final`` is the stream after the final norm. The canonical name of R[0] is ``embed``, of R[i] the decimal i.
"""

import re
from collections.abc import Sequence

from replay.errors import TraceCorruptError, UsageError
from replay.printable import shorten
from replay.traces.fields import Fields

EMBED = "embed"
FINAL = "final"

_TAP = re.compile(r"(?:(in|out):)?(\d{1,4})", re.ASCII)


def parse_tap(text: str, *, layers: int | None = None) -> str:
    """The canonical name of the tap that ``text`` says: ``embed``, ``final``, ``3``, ``in:3`` or ``out:2``.

    ``in:i`` is the input of the 0-based layer i (R[i]); ``out:i`` is its output (R[i+1]), as eagle configs count.
    With ``layers`` the tap must exist in a target of that many layers. Raises UsageError otherwise.
    """
    name = text.strip()
    if name in (EMBED, FINAL):
        return name
    match = _TAP.fullmatch(name)
    if match is None:
        raise UsageError(
            f"{text!r} is not a tap: a tap is an R index (3), 'embed', 'final', or a 0-based layer's "
            "input or output (in:3, out:2); type for example embed,3,31"
        )
    index = int(match[2]) + (match[1] == "out")
    if layers is not None and index > layers:
        raise UsageError(
            f"tap {name} is R[{index}], the target has {layers} layers: possible are embed, 1 to {layers}, and final"
        )
    return tap_name(index)


def parse_taps(text: str, *, layers: int | None = None) -> tuple[str, ...]:
    """Canonical names of a comma-separated list of taps, in its order, repetitions kept. Raises UsageError."""
    if not isinstance(text, str):
        raise UsageError(f"taps are text such as embed,3,31, {shorten(repr(text), 60)} was given")
    if layers is not None and type(layers) is not int:
        raise UsageError(f"layers is {shorten(repr(layers), 60)}, the target's number of layers was expected")
    return tuple(parse_tap(part, layers=layers) for part in text.split(","))


def tap_name(index: int) -> str:
    """The canonical name of R[index]."""
    return EMBED if index == 0 else str(index)


def tap_index(name: str) -> int | None:
    """The R index of a canonical tap name; None for ``final``."""
    if name == FINAL:
        return None
    return 0 if name == EMBED else int(name)


def sort_taps(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct canonical names in the order of the stream: embed, rising R index, final."""
    return tuple(sorted(set(names), key=lambda name: (name == FINAL, tap_index(name) or 0)))


def default_taps(layers: int) -> tuple[str, ...]:
    """Taps that let the usual layer-id faults be told apart later.

    The engines' defaults R[2], R[N//2], R[N-3] (SGLang 0.5.23, vLLM 0.32 and EAGLE agree on these), a neighbour
    on both sides of each, embed and final.
    """
    around = {index + step for index in (2, layers // 2, layers - 3) for step in (-1, 0, 1)}
    return sort_taps([EMBED, FINAL, *(tap_name(index) for index in around if 0 <= index <= layers)])


def canonical_taps(fields: Fields, name: str, layers: int) -> tuple[str, ...]:
    """A list of distinct tap names as they are stored, in the order of the stream. Raises TraceCorruptError."""
    names = fields.texts(name, layers + 2)
    try:
        canonical = sort_taps([parse_tap(tap, layers=layers) for tap in names])
    except UsageError as error:
        raise TraceCorruptError(f"{fields.where}: {name}: {error}") from error
    if canonical != names:
        raise fields.refuse(name, "distinct tap names in the order of the stream")
    return names
