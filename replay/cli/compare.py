"""`replay compare`: two variants against each other."""

from pathlib import Path

import click

from replay.cli.options import PATH, format_option, json_option, sort_option, top_option
from replay.cli.table_formats import print_table, refuse_two_forms
from replay.cli.terminal import print_json, print_rich


@click.command()
@click.argument("rounds_a", type=PATH, metavar="ROUNDS_A")
@click.argument("rounds_b", type=PATH, metavar="[ROUNDS_B]", required=False)
@click.option("--variant-a", metavar="NAME", help="Variant A.  [default: of one file its first, of two the only one]")
@click.option("--variant-b", metavar="NAME", help="Variant B.  [default: each that is not A]")
@sort_option
@top_option
@format_option
@json_option
def compare(
    rounds_a: Path, rounds_b: Path | None, variant_a: str | None, variant_b: str | None, sort: str | None,
    top: int | None, table_format: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare two variants on the same requests and the same anchors: better, worse, equal or cannot tell.

    Of one rounds file every variant is held against the first, of two those of the second against that of the first.
    """
    from replay.analysis.compare.compare import compare_variants
    from replay.analysis.compare.flat import pair_rows
    from replay.analysis.compare.pairing import pair_rounds
    from replay.analysis.compare.report import render_comparison
    from replay.analysis.view import View
    from replay.traces.rounds import read_rounds

    refuse_two_forms(table_format, as_json)
    second = None if rounds_b is None else read_rounds(rounds_b)
    called = (str(rounds_a), str(rounds_b))
    joined = pair_rounds(read_rounds(rounds_a), second, variant_a=variant_a, variant_b=variant_b, called=called)
    comparison = compare_variants(joined)
    view = View(sort, top)
    if table_format is not None:
        print_table(pair_rows(view.rows(comparison.pairs, lambda pair: pair.b.accept_length)), table_format)
    elif as_json:
        print_json(comparison.to_json())
    else:
        print_rich(render_comparison(comparison, joined, view))
