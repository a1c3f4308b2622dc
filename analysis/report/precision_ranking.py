"""Tensors ranked by the accept length that quantising each of them alone costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.gaps import gaps
from replay.analysis.summary import VariantSummary
from replay.analysis.tables import Fitted, column
from replay.traces.rounds import Rounds


@dataclass(frozen=True, slots=True)
class RankedTensor:
    """What one variant of the ranking lost against the reference, over the same requests.

    ``verdict`` is of the variant: ``worse``, ``better``, ``equal`` or ``cannot tell`` (gaps.py). ``lost_ci95`` is
    (nan, nan) where fewer than two requests have a round.
    """

    tensor: str
    precision: str
    accept_length: float
    lost: float
    lost_ci95: tuple[float, float]
    verdict: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """``rows`` by accept length lost, most first; ``together`` has them all at once; ``notes`` are the heads' own."""

    reference: VariantSummary
    rows: tuple[RankedTensor, ...]
    together: RankedTensor
    notes: tuple[str, ...]


def rank_tensors(
    rounds: Rounds,
    summaries: Sequence[VariantSummary],
    tensors: Sequence[str],
    *,
    seed: int = 0,
    resamples: int = DEFAULT_RESAMPLES,
) -> Ranking:
    """The first variant of ``rounds`` against each of the others, which quantise ``tensors``, in their order.

    The last of them quantises all that the others do.
    """
    reference, *others = summaries
    found = gaps(rounds, reference.name, seed=seed, resamples=resamples)
    rows = []
    for tensor, summary in zip(tensors, others, strict=True):
        gap = found[summary.name]
        low, high = gap.ci95
        lost = (-high, -low)
        rows.append(RankedTensor(tensor, summary.precision, summary.accept_length, -gap.difference, lost, gap.verdict))
    together = rows.pop()
    rows.sort(key=lambda row: -row.lost)
    notes = dict.fromkeys(str(note) for told in rounds.drafts.values() for note in told.get("notes", ()))
    return Ranking(reference, tuple(rows), together, tuple(notes))


def render_ranking(ranking: Ranking) -> RenderableType:
    """The answer in a line, a row for each tensor, the notes."""
    reference, rows, together = ranking.reference, (*ranking.rows, ranking.together), ranking.together
    paying = [row for row in ranking.rows if row.verdict == "worse"]
    answer = (
        f"{paying[0].tensor} costs most, {wording.decimal(paying[0].lost)} of the accept length; "
        f"the loss can be told in {len(paying)} of {wording.counted(len(ranking.rows), 'row')}."
        if paying
        else "No tensor alone costs anything that can be told."
    )
    said = (
        f"{answer} Together they cost {wording.decimal(together.lost)} ({together.verdict}).\n"
        f"Unquantised, {reference.precision}: accept length {wording.decimal(reference.accept_length)} over "
        f"{wording.counted(reference.rounds, 'round')} of {wording.counted(reference.requests, 'request')}."
    )
    table = Fitted(
        (column("quantised alone", [row.tensor for row in rows], left=True),),
        (
            (
                column("accept\nlength", [wording.decimal(row.accept_length) for row in rows]),
                column("lost", [wording.decimal(row.lost) for row in rows]),
                column("95 %\ninterval", [wording.interval(row.lost_ci95, 3) for row in rows]),
                column("verdict", [row.verdict for row in rows], left=True),
            ),
        ),
        tuple(row.tensor for row in rows),
    )
    notes = [Text(f"note: {note}") for note in ranking.notes]
    return Group(Text(said), Text(), table, *([Text(), *notes] if notes else []))
