"""The metadata of a rounds file, as variants and requests: each field checked for type and size."""

import math
from dataclasses import fields

from replay.errors import UsageError
from replay.traces.agreement import read_agreement
from replay.traces.fields import Fields, is_number
from replay.traces.rounds import Expected, RequestInfo, VariantInfo
from replay.traces.taps import parse_tap

_MOST = 1 << 40  # of any count
_MOST_STEPS = 1 << 12  # a table of counts has a column for each
_MOST_WORDS = 256  # taps or faults of a variant
_MOST_NAME = 4096  # characters of a name


def variant_info(values: Fields) -> VariantInfo:
    """One of ``variants``. Raises what ``values`` raises for a field that is none, or is lacking."""
    values.only([field.name for field in fields(VariantInfo)])
    return VariantInfo(
        name=values.text("name", _MOST_NAME),
        draft=values.text("draft", _MOST_NAME),
        wiring=tuple(_tap(values, tap) for tap in values.texts("wiring", _MOST_WORDS)),
        steps=values.integer("steps", 0, _MOST_STEPS),
        topk=values.integer("topk", 0, _MOST),
        num_draft_tokens=values.integer("num_draft_tokens", 0, _MOST),
        precision=values.text("precision"),
        numerics=values.text("numerics"),
        kv=values.text("kv"),
        verify=values.text("verify"),
        temperature=values.number("temperature", 0.0, 1e6),
        engine=values.text("engine"),
        faults=values.texts("faults", _MOST_WORDS),
        seconds=values.number("seconds", 0.0, 1e12),
        anchors=values.integer("anchors", 0, _MOST),
        anchors_accepted=values.integer("anchors_accepted", 0, _MOST),
        ties=values.integer("ties", 0, _MOST),
        # files from before there were these are of the same version
        expected=_expected(values.object("expected")) if values.values.get("expected") is not None else None,
        agreement=read_agreement(values.object("agreement")) if values.values.get("agreement") is not None else None,
        by_request=_by_request(values) if values.values.get("by_request") is not None else None,
    )


def _by_request(values: Fields) -> tuple[tuple[int, int, int], ...]:
    rows = values.get("by_request")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 3 and all(type(item) is int and 0 <= item <= _MOST for item in row)
        for row in rows
    ):
        raise values.refuse("by_request", "a list of three counts for each request")
    return tuple((row[0], row[1], row[2]) for row in rows)


def _tap(values: Fields, name: str) -> str:
    try:
        return parse_tap(name)
    except UsageError as error:
        raise values.refuse("wiring", "a list of taps, such as embed, 3 and 16") from error


def _expected(values: Fields) -> Expected:
    values.only([field.name for field in fields(Expected)])
    rows = values.get("sums")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(is_number(item, -math.inf, math.inf) for item in row) for row in rows
    ):
        raise values.refuse("sums", "a list of lists of numbers")
    sums = tuple(tuple(map(float, row)) for row in rows)
    return Expected(values.text("rule"), values.flag("exact"), values.text("note"), sums)


def request_info(values: Fields) -> RequestInfo:
    """One of ``requests``. Raises as ``variant_info``."""
    values.only([field.name for field in fields(RequestInfo)])
    return RequestInfo(
        request_id=values.text("request_id"),
        category=values.optional_text("category"),
        prompt_tokens=values.integer("prompt_tokens", 0, _MOST),
        output_tokens=values.integer("output_tokens", 0, _MOST),
        observed_rounds=values.optional_integer("observed_rounds", 0, _MOST),
        observed_histogram=values.optional_integers("observed_histogram", 0, _MOST, _MOST_STEPS + 1),
        source=values.text("source"),
        temperature=values.number("temperature", 0.0, 1e6),
        # files from before there were these are of the same version
        loop_tokens=values.integer("loop_tokens", 0, _MOST) if "loop_tokens" in values.values else 0,
        loop_period=values.integer("loop_period", 0, _MOST) if "loop_period" in values.values else 0,
        trace=values.optional_text("trace") if "trace" in values.values else None,
        tokens_sha256=values.optional_sha256("tokens_sha256") if "tokens_sha256" in values.values else None,
    )
