"""Write the table of SGLang's server options anew: replay/check/sglang_options.json, from the SGLang that is installed.

    PYTHONPATH=tests/rig python scripts/sglang_options.py > replay/check/sglang_options.json

`replay check` reads launch lines by this table. tests/check/test_options.py holds it against the installed SGLang.
"""

import argparse
import json
import sys
from typing import Any

_KINDS = {
    "int": "int",
    "float": "float",
    "human_readable_int": "count",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
}


def options() -> dict[str, Any]:
    """What SGLang's own parser takes: version, and each option's names, field, kind, nargs and choices.

    ``yaml`` is false where a file of ``--config`` must not hold it (utils/server_args_config_parser.py).
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {"sglang": __version__, "options": [_row(action) for action in parser._actions]}


def _row(action: argparse.Action) -> dict[str, Any]:
    switch = isinstance(action, argparse.BooleanOptionalAction)
    stored = isinstance(action, argparse._StoreTrueAction | argparse._StoreAction) or action.nargs is None
    row = {
        "names": list(action.option_strings),
        "field": action.dest,
        "kind": "switch" if switch else "flag" if action.nargs == 0 else _KINDS.get(_type_name(action), "text"),
        "nargs": action.nargs if isinstance(action.nargs, str) else None,
        "choices": sorted(action.choices) if action.choices else None,
        "yaml": None if stored else False,
    }
    return {key: value for key, value in row.items() if value is not None}


def _type_name(action: argparse.Action) -> str:
    return getattr(action.type, "__name__", "str")


def main() -> None:
    """One option a line, so that a change is seen."""
    table = options()
    rows = ",\n".join(json.dumps(row) for row in table["options"])
    sys.stdout.write(f'{{"sglang": {json.dumps(table["sglang"])}, "options": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
