"""How much of what speculation could give is lost by the head, and how much by the machine."""

from dataclasses import dataclass

from replay.analysis.plan.plan import Choice, Plan, Range, Row
from replay.analysis.plan.settings import Load, Setting


@dataclass(frozen=True, slots=True)
class Share:
    """Of the best depth at one load, times the speed without speculation: as it is, and without either loss.

    ``perfect_head``: with every drafted token accepted. ``free_machine``: with drafting and verifying for free; it is
    the head's accept length.
    """

    load: Load
    setting: Setting
    speedup: Range
    break_even: Range
    perfect_head: Range
    free_machine: Range


def share(plan: Plan, choice: Choice) -> Share | None:
    """None where nothing is drafted, or the time without speculation is not known."""
    row = best_drafting(plan, choice)
    if row is None or row.break_even is None or row.speedup is None:
        return None
    even, most = row.break_even, row.setting.most
    perfect = Range(most / even.value, most / even.high, most / even.low)
    return Share(choice.load, row.setting, row.speedup, even, perfect, row.accept_length)


def best_drafting(plan: Plan, choice: Choice) -> Row | None:
    """The setting that drafts and has the most tokens a second at the load of ``choice``."""
    rows = [row for row in plan.rows if row.load == choice.load and row.setting.speculates]
    told = [row for row in rows if row.tokens_per_second.value == row.tokens_per_second.value]
    return max(told, key=lambda row: row.tokens_per_second.value, default=None)
