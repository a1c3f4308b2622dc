"""Rows of a prompt that a server took from its cache: which forwards of earlier requests had made them.

See SPEC.md, section 4.
"""

from collections.abc import Sequence

CACHED = ("server_cached_rows", "server_cached_forward_rows")  # columns of requests.parquet

Piece = tuple[int, int]  # rows of one piece of a prompt, and of the forward in which a server prefilled it


def cached_problem(
    rows: Sequence[int] | None, forward: Sequence[int] | None, pieces: Sequence[Piece], prompt_tokens: int
) -> str | None:
    """Why these cannot be the rows of a prompt that came from a cache, before its ``pieces``; None where they can."""
    if rows is None and forward is None:
        return None
    if not rows or not forward or len(rows) != len(forward):
        return (
            f"server_cached_rows holds {len(rows or ())} numbers, server_cached_forward_rows {len(forward or ())}, "
            "both must be null or hold as many, one at least"
        )
    small = next(((own, whole) for own, whole in zip(rows, forward, strict=True) if not 0 < own <= whole), None)
    if small is not None:
        return f"server_cached_rows holds {small[0]} rows that a forward of {small[1]} made"
    prefilled = sum(own for own, _ in pieces)
    if sum(rows) + prefilled != prompt_tokens:
        return (
            f"server_cached_rows adds up to {sum(rows)} and its pieces to {prefilled}, the prompt has {prompt_tokens} "
            "tokens"
        )
    return None
