"""The commands that read what lies on disk: report, compare and inspect."""

from pathlib import Path

import click

from replay.cli.options import PATH, json_option
from replay.cli.terminal import print_json, print_rich, refuse_existing, show_rounds, write_html
from replay.errors import ReplayError


@click.command()
@click.argument("rounds", type=PATH, metavar="ROUNDS")
@click.option("--html", type=PATH, metavar="FILE", help="Write the report as a web page as well.")
@click.option("--peers", is_flag=True, help="Add the metrics of other projects, made from the same rounds.")
@click.option("--force", is_flag=True, help="Replace an existing web page.")
@json_option
def report(rounds: Path, html: Path | None, peers: bool, force: bool, as_json: bool) -> None:
    """Show the report of a rounds file that simulate -o wrote."""
    from replay.traces.rounds import read_rounds

    if html is not None:
        refuse_existing(html, force)
    table = read_rounds(rounds)
    show_rounds(table, as_json, peers=peers)
    if html is not None:
        write_html(table, html, peers)


@click.command()
@click.argument("rounds_a", type=PATH, metavar="ROUNDS_A")
@click.argument("rounds_b", type=PATH, metavar="[ROUNDS_B]", required=False)
@click.option("--variant-a", metavar="NAME", help="Variant A.  [default: of one file its first, of two the only one]")
@click.option("--variant-b", metavar="NAME", help="Variant B.  [default: each that is not A]")
@json_option
def compare(rounds_a: Path, rounds_b: Path | None, variant_a: str | None, variant_b: str | None, as_json: bool) -> None:
    """Compare two variants on the same requests and the same anchors: better, worse, same or cannot tell.

    Of one rounds file every variant is held against the first, of two those of the second against that of the first.
    """
    from replay.analysis.compare.compare import compare as run
    from replay.analysis.compare.pairing import join
    from replay.analysis.compare.report import render_comparison
    from replay.traces.rounds import read_rounds

    second = None if rounds_b is None else read_rounds(rounds_b)
    joined = join(read_rounds(rounds_a), second, variant_a=variant_a, variant_b=variant_b)
    comparison = run(joined)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_rich(render_comparison(comparison, joined))


@click.command()
@click.argument("path", type=PATH, metavar="TRACE|DRAFT")
@click.option(
    "--check",
    is_flag=True,
    help="Check a trace whole: checksums, lengths, finiteness, lm_head(final) against recorded choices.",
)
@json_option
def inspect(path: Path, check: bool, as_json: bool) -> None:
    """Say what lies in a trace or a draft head's folder."""
    from dataclasses import asdict

    from replay.check.inspection import draft_facts, kind_of, render_facts, render_findings, trace_facts
    from replay.traces.reader import Trace

    if kind_of(path) == "draft":
        draft = draft_facts(path)
        return print_json(asdict(draft)) if as_json else print_rich(render_facts(draft))
    trace = Trace.open(path, allow_incomplete=not check)
    facts = trace_facts(trace)
    findings = list(trace.check()) if check else []
    if as_json:
        print_json({**asdict(facts), **({"findings": [asdict(finding) for finding in findings]} if check else {})})
    else:
        print_rich(render_facts(facts))
        if findings:
            print_rich(render_findings(findings))
    errors = sum(finding.severity == "error" for finding in findings)
    if errors:
        raise ReplayError(f"{path} fails its self-check with {errors} errors; capture it again before judging a head")
