"""`replay faults`: the list that --fault takes."""

from typing import TYPE_CHECKING, Any

import click

from replay.cli.options import format_option, json_option
from replay.cli.table_formats import print_table, refuse_two_forms
from replay.cli.terminal import print_json, print_text

if TYPE_CHECKING:
    from replay.faults.change import FaultKind


@click.command()
@format_option
@json_option
def faults(table_format: str | None, as_json: bool) -> None:
    """List the faults that simulate --fault can replay, with their values."""
    from replay.faults.table import FAULTS

    refuse_two_forms(table_format, as_json)
    if table_format is not None:
        named = ("name", "values", "default", "what")
        print_table([{name: getattr(kind, name) for name in named} for kind in FAULTS.values()], table_format)
        return
    if as_json:
        print_json({"faults": [_document(kind) for kind in FAULTS.values()]})
        return
    for kind in FAULTS.values():  # a paragraph each: in a table 80 columns would cut the names
        default = "" if kind.default is None else f"  [default: {kind.default}]"
        print_text(f"{kind.name}={kind.values}{default}\n    {kind.what}")


def _document(kind: "FaultKind") -> dict[str, Any]:
    """``kv``: what ``--kv`` takes in place of the fault, by the value it stands for."""
    from replay.faults.change import NO_REMEDY

    return {
        "name": kind.name,
        "what": kind.what,
        "values": kind.values,
        "default": kind.default,
        "reports": kind.reports,
        "remedy": "" if kind.remedy == NO_REMEDY else kind.remedy,
        "kv": {value or kind.values: name if value else f"{name}:{kind.values}" for name, value in kind.kv.items()},
    }
