"""`replay show`: the rounds of requests, token by token."""

from pathlib import Path

import click

from replay.cli.options import SOURCE, json_option, part_options, read_part, source_options
from replay.cli.terminal import print_json, print_rich
from replay.errors import UsageError


@click.command()
@click.argument("rounds", type=SOURCE, metavar="ROUNDS")
@part_options
@click.option("--variant", metavar="NAME", help="The variant to show.  [default: that of the largest accept length]")
@click.option("--first-rejected", is_flag=True, help="Only rounds whose first drafted token was rejected.")
@click.option(
    "--top",
    type=click.IntRange(0, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="How many of the draft's likeliest tokens are shown where it was rejected.",
)
@source_options
@json_option
def show(
    rounds: Path, category: tuple[str, ...], request: tuple[str, ...], first_turn: bool, limit: int | None,
    variant: str | None, first_rejected: bool, top: int, trace: Path | None, draft: Path | None, target: Path | None,
    no_verify: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show requests of a rounds file token by token: what was drafted, accepted and rejected, and why.

    The trace and the head that the file names are read again for the target's choices and the draft's ranks.
    """
    from replay.analysis.json_document import object_json
    from replay.analysis.tokens.report import render_view
    from replay.simulator.tokens import Sources, show_tokens
    from replay.traces.rounds_file import read_rounds

    table, part = read_rounds(rounds), read_part(category, request, first_turn, limit)
    if part.whole and len(table.requests) > 1:
        raise UsageError(
            f"{rounds} holds {len(table.requests)} requests; type --request {table.requests[0].request_id}, or "
            "--category or --limit for several"
        )
    sources = Sources(trace, draft, target, not no_verify)
    view = show_tokens(table, part, variant, sources, top=top, first_rejected=first_rejected)
    if as_json:
        print_json(object_json(view))
    else:
        print_rich(render_view(view))
