"""A part of a trace's requests, as somebody asks for it: some categories, some requests, first turns, the first few."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Protocol

from replay.errors import UsageError
from replay.traces.fields import show, some
from replay.traces.given import check_given, check_list

NO_CATEGORY = "none"  # how requests without a category are asked for
# What `replay import` calls the answers of one text: NAME#1, NAME#2 and on (capture/dumps/border.py)
_LATER_TURN = re.compile(r".+#(?:[2-9]|[1-9]\d+)", re.ASCII | re.DOTALL)


class Named(Protocol):
    """A request as far as a part goes by it."""

    @property
    def request_id(self) -> str: ...

    @property
    def category(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Which requests are asked for: what holds of all that is given, and of these the first ``limit``.

    ``categories``: those of one of these (``none``: without one). ``requests``: those of these ids. ``first_turn``: of
    requests called NAME#1, NAME#2 and on, as `replay import` calls the answers of one text, the first alone.
    """

    categories: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    first_turn: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a value that cannot be; a bare text would be read letter by letter."""
        check_list("categories", self.categories, str, 'names of categories were expected; pass ("math",)')
        check_list("requests", self.requests, str, 'ids of requests were expected; pass ("request-1",)')
        check_given("first_turn", self.first_turn, bool, "True or False was expected")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise UsageError(f"a limit of {show(self.limit)} requests was asked for; type 1 or more")

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return not (self.categories or self.requests or self.first_turn or self.limit is not None)

    def __str__(self) -> str:
        said = [f"category {', '.join(self.categories)}"] * bool(self.categories)
        said += [f"requests {some(list(self.requests))}"] * bool(self.requests)
        said += ["first turns"] * self.first_turn + ([] if self.limit is None else [f"the first {self.limit}"])
        return "; ".join(said)


def check_part(value: object) -> None:
    """Raises UsageError for what is no Part."""
    check_given("part", value, Part, "a part was expected; make one by replay.Part(limit=20)")


def say_part(part: Part, kept: int, total: int, before: str = "") -> str:
    """A part in words, with its requests: ``category math (3 of 9)``; one of a part says that of ``before`` first."""
    said = f"{part} ({kept} of {total})"
    return f"{before}; of these {said}" if before else said


def parts_told(trace: Mapping[str, Any]) -> tuple[str, ...]:
    """What the ``trace`` of a rounds file says of parts: that of each of several traces, then that of all together."""
    told = trace.get("traces")
    several = [one for one in (told if isinstance(told, list) else []) if isinstance(one, Mapping) and one.get("part")]
    own = (str(trace["part"]),) if trace.get("part") else ()
    return (*(f"{one.get('name')}: {one['part']}" for one in several), *own)


def choose(part: Part, requests: Sequence[Named]) -> frozenset[str]:
    """The ids of the requests that ``part`` asks for, one at least.

    Raises UsageError for a category or an id that none has, and where nothing is left.
    """
    _check_known(part, requests)
    kept = _kept(part, requests)
    if not kept:
        raise UsageError(f"of {len(requests)} requests none is left ({part}); ask for less at once")
    return frozenset(kept)


def choose_of_each(part: Part, traces: Mapping[str, Sequence[Named]]) -> dict[str, Part]:
    """What ``part`` asks of each of several traces, by its name: what holds of one at least, and the limit of each.

    Traces of which nothing is left are left out. Raises UsageError for a category or an id that none has, and where
    nothing is left of any.
    """
    every = [request for requests in traces.values() for request in requests]
    _check_known(part, every)
    parts = {name: within for name, requests in traces.items() if (within := _within(part, requests)) is not None}
    if not parts:
        raise UsageError(f"of {len(every)} requests none is left ({part}); ask for less at once")
    return parts


def _within(part: Part, requests: Sequence[Named]) -> Part | None:
    """``part`` without categories and ids that none of ``requests`` has; None where nothing is left."""
    kept = set(_kept(part, requests))
    if not kept:
        return None
    there = {_category(request) for request in requests}
    ids = {request.request_id for request in requests} if part.requests else set()
    return replace(
        part,
        categories=tuple(name for name in part.categories if name in there),
        requests=tuple(name for name in part.requests if name in ids),
    )


def _kept(part: Part, requests: Sequence[Named]) -> list[str]:
    return [
        request.request_id
        for request in requests
        if (not part.categories or _category(request) in part.categories)
        and (not part.requests or request.request_id in part.requests)
        and not (part.first_turn and _LATER_TURN.fullmatch(request.request_id))
    ][: part.limit]


def _check_known(part: Part, requests: Sequence[Named]) -> None:
    counts = Counter(map(_category, requests))
    for category in part.categories:
        if category not in counts:
            if not counts:
                raise UsageError(f"no request is of category {show(category)}: none is whole yet; wait for one")
            near = get_close_matches(category.lower(), counts, 1)
            names = [*near, *sorted(name for name in counts if name not in near)]
            there = some([f"{name} ({counts[name]})" for name in names])
            raise UsageError(f"no request is of category {show(category)}, there are {there}; type one of these")
    ids = {request.request_id for request in requests} if part.requests else set()
    for name in part.requests:
        if name not in ids:
            there = some([request.request_id for request in requests])
            raise UsageError(f"no request is called {show(name)}, there are {there}; type one of these")


def _category(request: Named) -> str:
    return request.category or NO_CATEGORY
