"""Faults of the number formats in which the head runs; engines/precision.py has their grammar."""

from dataclasses import replace

from replay.engines.precision import parse_precision, with_kv
from replay.engines.profiles import PRECISIONS
from replay.errors import UsageError
from replay.faults.change import Change, FaultValueError, Subject


def draft_weights(value: str) -> Change:
    """Weights, and where the scheme says so their inputs, in another format."""
    if value in PRECISIONS:
        raise FaultValueError("precision.draft-weights", value, "schemes such as fp8, int8, w8a8, w4a16:g128 and nvfp4")
    parse_precision(value)
    return lambda subject: replace(subject, precision=parse_precision(f"{subject.precision}+{value}"))


def draft_kv(value: str) -> Change:
    """Keys and values of the draft stored in another format."""
    with_kv(None, value)
    parse_precision(f"kv={value}")

    def change(subject: Subject) -> Subject:
        return replace(subject, precision=parse_precision(str(with_kv(str(subject.precision), value))))

    return change


def dtype_cast(value: str) -> Change:
    """The whole head in another dtype than its own."""
    if value not in PRECISIONS:
        raise FaultValueError("precision.dtype-cast", value, ", ".join(PRECISIONS))

    def change(subject: Subject) -> Subject:
        if subject.precision.base == value:
            raise UsageError(f"the head runs in {value} already; type another dtype")
        return replace(subject, precision=replace(subject.precision, base=value))

    return change
