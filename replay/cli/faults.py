"""`replay faults`: the list that --fault takes."""

import click

from replay.cli.options import json_option
from replay.cli.terminal import print_json


@click.command()
@json_option
def faults(as_json: bool) -> None:
    """List the faults that simulate --fault can replay, with their values."""
    from replay.faults.table import FAULTS

    if as_json:
        told = ("name", "what", "values", "default")
        print_json({"faults": [{name: getattr(kind, name) for name in told} for kind in FAULTS.values()]})
        return
    for kind in FAULTS.values():  # a paragraph each: in a table 80 columns would cut the names
        default = "" if kind.default is None else f"  [default: {kind.default}]"
        click.echo(f"{kind.name}={kind.values}{default}\n    {kind.what}")
