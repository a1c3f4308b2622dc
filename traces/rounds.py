"""The rounds table: what a simulation did, round by round, in one parquet file.

Columns, in this order: ``variant`` (str), ``request_id`` (str), ``round`` (i32, from 0 in each request), ``anchor``
(i32, tokens), ``drafted`` (list of i32, token ids), ``accepted`` (i32, 0..len(drafted), without the bonus token) and
``cut`` (bool: accepted + 1 tokens run past the end of the recorded output). Who the variants and requests are stands as
JSON under the key ``replay`` of the parquet key-value metadata, so that the file needs nothing beside it.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay.printable import counted, html_table
from replay.traces.agreement import Agreement
from replay.traces.fields import some
from replay.traces.given import check_given, check_list

if TYPE_CHECKING:
    import polars as pl

HEALTHY_NAME = "healthy"  # of the hypothesis that nothing is wrong
EXPECTED_COLUMNS = 6  # of ``Expected.sums``

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a rule takes on average, made from probabilities instead of one draw.

    ``sums[request]`` in the order of ``Rounds.requests``: expected rounds and expected accepted tokens, then both again
    with every probability that the trace leaves open at its lower bound, and both at its upper bound. ``exact``: the
    estimate has no error but the choice of the recorded text and what is left open; ``note`` says what it rests on.
    """

    rule: str
    exact: bool
    note: str
    sums: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class VariantSettings:
    """A variant as files and reports spell it."""

    name: str
    draft: str
    wiring: tuple[str, ...]
    steps: int
    topk: int
    num_draft_tokens: int
    precision: str
    numerics: str
    kv: str
    verify: str
    temperature: float
    engine: str
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VariantInfo(VariantSettings):
    """One variant and what belongs to it as a whole.

    ``anchors`` positions were tried in the all-anchors pass and had ``anchors_accepted`` drafted tokens accepted in
    sum; ``ties`` drafted tokens were chosen between exactly equal logits; ``seconds`` is wall-clock time.
    ``expected`` is None under the greedy rule, whose rounds leave nothing to chance, ``agreement`` where the variant
    was not held against a server's own rounds. ``by_request`` has anchors, anchors_accepted and ties of each request in
    the order of ``Rounds.requests``; None in files from before there was it.
    """

    seconds: float
    anchors: int
    anchors_accepted: int
    ties: int
    expected: Expected | None = None
    agreement: Agreement | None = None
    by_request: tuple[tuple[int, int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request of the trace: sizes in tokens, what the server itself reported (None: nothing), where it came from.

    ``observed_histogram[a]`` counts the server's rounds with a accepted tokens. ``source`` is ``generated`` or
    ``forced`` (teacher-forced text), ``temperature`` the one the output was sampled with (0: greedy). ``loop_tokens``
    of the output, in a row, are ``loop_period`` tokens again and again; both are 0 where it does not loop. ``trace``
    names the trace it is of, where there are several. ``tokens_sha256`` is of its token ids, prompt and output, in 32
    bits each, little-endian; None where it was not replayed, and in files from before there was it.
    """

    request_id: str
    category: str | None
    prompt_tokens: int
    output_tokens: int
    observed_rounds: int | None
    observed_histogram: tuple[int, ...] | None
    source: str = "generated"
    temperature: float = 0.0
    loop_tokens: int = 0
    loop_period: int = 0
    trace: str | None = None
    tokens_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Rounds:
    """The table and all that is needed to read it without the trace.

    ``trace`` says which trace it was (path, target, engine, engine_version, taps, dtype, missing ...), ``drafts``
    which heads, by name. Both hold JSON values only.
    """

    table: "pl.DataFrame"
    variants: tuple[VariantInfo, ...]
    requests: tuple[RequestInfo, ...]
    trace: JsonObject
    drafts: JsonObject

    def __post_init__(self) -> None:
        """Raises UsageError for what is no table, or no variants and requests of rounds."""
        import polars as pl

        wanted = "rounds are made by replay.simulate or replay.read_rounds"
        check_given("table", self.table, pl.DataFrame, wanted)
        check_list("variants", self.variants, VariantInfo, wanted)
        check_list("requests", self.requests, RequestInfo, wanted)

    def __repr__(self) -> str:
        names = some([variant.name for variant in self.variants])
        held = f"{counted(len(self.table), 'round')} of {counted(len(self.requests), 'request')}"
        return f"Rounds({held}; variants {names or 'none'})"

    def _repr_html_(self) -> str:
        rows = [
            [name, str(rounds), str(drafted), str(accepted), f"{1 + accepted / rounds:.3f}" if rounds else ""]
            for name, rounds, drafted, accepted in self._counts()
        ]
        return html_table(repr(self), ("variant", "rounds", "drafted", "accepted", "accept length"), rows)

    def _counts(self) -> list[tuple[str, int, int, int]]:
        import polars as pl

        drafted, accepted = pl.col("drafted").list.len().sum(), pl.col("accepted").sum()
        counted = self.table.group_by("variant").agg(pl.len(), drafted.alias("d"), accepted)
        found = {name: counts for name, *counts in counted.iter_rows()}
        return [(one.name, *found.get(one.name, (0, 0, 0))) for one in self.variants]

    def with_requests(self) -> "pl.DataFrame":
        """The table, each round with the facts of its request: category, prompt_tokens, output_tokens, source,
        temperature, loop_tokens and trace.

        >>> rounds.with_requests().columns[7:10]
        ['category', 'prompt_tokens', 'output_tokens']
        """
        import polars as pl

        kinds = {
            "request_id": pl.String(), "category": pl.String(), "prompt_tokens": pl.Int64(),
            "output_tokens": pl.Int64(), "source": pl.String(), "temperature": pl.Float64(),
            "loop_tokens": pl.Int64(), "trace": pl.String(),
        }  # fmt: skip
        facts = pl.DataFrame([[getattr(one, name) for name in kinds] for one in self.requests], kinds, orient="row")
        return self.table.join(facts, on="request_id", how="left", maintain_order="left")


def check_are_rounds(name: str, value: object) -> None:
    """Raises UsageError for what is no Rounds."""
    check_given(name, value, Rounds, "rounds were expected: what replay.simulate or replay.read_rounds returns")


def tokens_sha256(tokens: Sequence[int]) -> str:
    """The checksum of token ids that ``RequestInfo`` keeps.

    >>> tokens_sha256([])[:8]
    'e3b0c442'
    """
    return hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()


def table_schema() -> "dict[str, pl.DataType]":
    """Column names and polars dtypes of the table, in order."""
    import polars as pl

    return {
        "variant": pl.String(),
        "request_id": pl.String(),
        "round": pl.Int32(),
        "anchor": pl.Int32(),
        "drafted": pl.List(pl.Int32),
        "accepted": pl.Int32(),
        "cut": pl.Boolean(),
    }
