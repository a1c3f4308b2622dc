"""`replay compare`: two variants against each other."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import (
    SOURCE,
    format_option,
    json_option,
    no_verify_option,
    part_options,
    read_part,
    sort_option,
    top_option,
)
from replay.cli.table_formats import print_table, refuse_two_forms
from replay.cli.terminal import print_json, print_rich
from replay.cli.web_page import page_options, refuse_page, write_page_file
from replay.errors import TraceError, UsageError

if TYPE_CHECKING:
    from replay.analysis.compare.texts import Texts
    from replay.traces.rounds import Rounds


@click.command()
@click.argument("rounds_a", type=SOURCE, metavar="ROUNDS_A")
@click.argument("rounds_b", type=SOURCE, metavar="[ROUNDS_B]", required=False)
@click.option("--variant-a", metavar="NAME", help="Variant A.  [default: of one file its first, of two the only one]")
@click.option("--variant-b", metavar="NAME", help="Variant B.  [default: each that is not A]")
@click.option("--trace-a", type=SOURCE, metavar="TRACE", help="Trace of ROUNDS_A, if ROUNDS_B is of another recording.")
@click.option("--trace-b", type=SOURCE, metavar="TRACE", help="Trace of ROUNDS_B, recorded of the same prompts.")
@no_verify_option
@part_options
@page_options
@sort_option
@top_option
@format_option
@json_option
def compare(
    rounds_a: Path, rounds_b: Path | None, variant_a: str | None, variant_b: str | None, trace_a: Path | None,
    trace_b: Path | None, no_verify: bool, category: tuple[str, ...], request: tuple[str, ...], first_turn: bool,
    limit: int | None, html: Path | None, force: bool, sort: str | None, top: int | None, table_format: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare two variants on the same requests and the same anchors: better, worse, equal or cannot tell.

    Of one rounds file every variant is held against the first, of two those of the second against that of the first.
    Two recordings of the same prompts, as of a target in bf16 and in INT4, are compared with --trace-a and --trace-b.
    """
    from replay.analysis.compare.compare import compare_variants
    from replay.analysis.compare.flat import pair_rows
    from replay.analysis.compare.pairing import pair_rounds
    from replay.analysis.compare.report import render_comparison
    from replay.analysis.view import View
    from replay.traces.rounds_file import read_rounds
    from replay.traces.rounds_sets import take_part

    refuse_two_forms(table_format, as_json)
    refuse_page(html, force)
    if (trace_a is None) != (trace_b is None) or (trace_a is not None and rounds_b is None):
        raise UsageError(
            "--trace-a and --trace-b name the traces of two rounds files; type both, after ROUNDS_A and ROUNDS_B, or "
            "neither"
        )
    part = read_part(category, request, first_turn, limit)
    first = take_part(read_rounds(rounds_a), part)
    second = None if rounds_b is None else take_part(read_rounds(rounds_b), part)
    called = (str(rounds_a), str(rounds_b))
    texts = None
    if trace_a is not None and trace_b is not None and second is not None:
        texts = _texts(trace_a, first, called[0], not no_verify), _texts(trace_b, second, called[1], not no_verify)
    joined = pair_rounds(first, second, variant_a=variant_a, variant_b=variant_b, called=called, texts=texts)
    comparison = compare_variants(joined)
    view = View(sort, top)
    if table_format is not None:
        print_table(pair_rows(view.rows(comparison.pairs, lambda pair: pair.b.accept_length)), table_format)
    elif as_json:
        print_json(comparison.to_json())
    else:
        print_rich(render_comparison(comparison, joined, view))
    if html is not None:
        from replay.analysis.page.compared import write_comparison

        shown = render_comparison(comparison, joined, view)
        write_page_file(html, lambda text: write_comparison(comparison, text), shown)


def _texts(path: Path, rounds: "Rounds", called: str, verify: bool) -> "Texts":
    """The tokens of every request of the trace that ``rounds`` were simulated on. Raises TraceError for another one."""
    from replay.analysis.compare.texts import Text
    from replay.simulator.results import describe_trace
    from replay.traces.reader import Trace

    trace = Trace.open(path, verify=verify)
    said = describe_trace(trace)
    for fact in ("target", "dtype", "engine", "engine_version"):
        if said[fact] != rounds.trace.get(fact):
            raise TraceError(
                f"{path} is a trace of {fact.replace('_', ' ')} {said[fact]!r}, {called} was simulated on one of "
                f"{rounds.trace.get(fact)!r}; name the trace of each rounds file"
            )
    rows = (trace.read(index, ()) for index in range(len(trace.records)))
    return {one.request_id: Text(tuple(one.tokens.tolist()), one.prompt_tokens) for one in rows}
