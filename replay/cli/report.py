"""`replay report`: a rounds file again, on the terminal, as JSON or as a web page."""

from pathlib import Path

import click

from replay.cli.options import (
    SOURCE,
    format_option,
    json_option,
    part_options,
    read_part,
    sort_option,
    source_options,
    top_option,
)
from replay.cli.rounds_output import Wanted, by_option, show_rounds, write_html
from replay.cli.table_formats import refuse_beside, refuse_two_forms
from replay.cli.web_page import page_options, refuse_page
from replay.errors import UsageError


@click.command()
@click.argument("rounds", type=SOURCE, nargs=-1, required=True, metavar="ROUNDS...")
@click.option("--peers", is_flag=True, help="Add the metrics of other projects, made from the same rounds.")
@by_option
@part_options
@source_options
@page_options
@sort_option
@top_option
@format_option
@json_option
def report(
    rounds: tuple[Path, ...], html: Path | None, peers: bool, by: tuple[str, ...], category: tuple[str, ...],
    request: tuple[str, ...], first_turn: bool, limit: int | None, force: bool, sort: str | None, top: int | None,
    table_format: str | None, trace: Path | None, draft: Path | None, target: Path | None, no_verify: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Show the report of a rounds file that simulate -o wrote, or of several as one."""
    from replay.traces.rounds_join import read_joined
    from replay.traces.rounds_sets import take_part

    refuse_two_forms(table_format, as_json)
    if table_format is not None:
        refuse_beside("--format", peers=peers, by=by)
    refuse_page(html, force)
    for option, folder in (("--trace", trace), ("--draft", draft), ("--target", target)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{option} {folder} is no folder; name one that is there, or leave {option} out")
    table = take_part(read_joined(rounds), read_part(category, request, first_turn, limit))
    wanted = Wanted(peers=peers, by=by, sort=sort, top=top, table_format=table_format)
    show_rounds(table, as_json, wanted)
    if html is not None:
        from replay.simulator.tokens import Sources

        write_html(table, html, wanted, Sources(trace, draft, target, not no_verify))
