"""The requests that a web page shows token by token: as many as leave the page small enough to send round."""

from dataclasses import replace
from typing import TYPE_CHECKING

from replay.printable import counted

if TYPE_CHECKING:
    import polars as pl

    from replay.analysis.tokens.view import View
    from replay.simulator.tokens import Sources
    from replay.traces.rounds import Rounds

PAGE_REQUESTS = 200
PAGE_ROUNDS = 2_000  # of one request
PAGE_DRAFTED = 100_000  # drafted tokens of all requests: some 2 MB


def page_tokens(rounds: "Rounds", variant: str, sources: "Sources") -> "View":
    """The first requests under one variant, and notes where requests or rounds are left out.

    Raises as ``show_tokens``.
    """
    import polars as pl

    from replay.simulator.tokens import show_tokens
    from replay.traces.parts import Part

    own = rounds.table.filter(pl.col("variant") == variant)
    fit = _that_fit(rounds, own)
    shown = replace(rounds, table=own.filter(pl.col("round") < PAGE_ROUNDS))
    view = show_tokens(shown, Part(requests=fit), variant, sources)
    return _with_all_counts(view, own, len(rounds.requests))


def _that_fit(rounds: "Rounds", own: "pl.DataFrame") -> tuple[str, ...]:
    """The first requests whose rounds have room; one at least."""
    import polars as pl

    cut = own.filter(pl.col("round") < PAGE_ROUNDS).group_by("request_id").agg(pl.col("drafted").list.len().sum())
    drafted = dict(cut.iter_rows())
    fit: list[str] = []
    room = PAGE_DRAFTED
    for request in rounds.requests[:PAGE_REQUESTS]:
        room -= drafted.get(request.request_id, 0)
        if fit and room < 0:
            break
        fit.append(request.request_id)
    return tuple(fit)


def _with_all_counts(view: "View", own: "pl.DataFrame", total: int) -> "View":
    """With the counts of every round also where some are not shown, and with notes that say so."""
    import polars as pl

    sums = own.group_by("request_id").agg(pl.len(), pl.col("accepted").cast(pl.Int64).sum())
    counts = {name: (played, accepted) for name, played, accepted in sums.iter_rows()}
    notes = list(view.notes)
    requests = []
    for one in view.requests:
        played, accepted = counts.get(one.request_id, (0, 0))
        if played > PAGE_ROUNDS:
            shown = f"the first {PAGE_ROUNDS:,} of {played:,}"
            notes.append(f"rounds of request {one.request_id} behind {shown}; replay show --request has all")
        requests.append(replace(one, played=played, accepted=accepted))
    if left := total - len(requests):
        more = f"{left:,} of {counted(total, 'request')}; replay show has all, --category or --request choose others"
        notes.insert(0, more)
    return replace(view, requests=tuple(requests), notes=tuple(notes))
