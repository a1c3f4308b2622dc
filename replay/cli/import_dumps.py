"""`replay import`: hidden states that a trainer stored, made into a trace."""

from pathlib import Path

import click

from replay.capture.dumps.find import FORMATS
from replay.cli.options import PATH, json_option
from replay.cli.progress import show_progress
from replay.cli.terminal import print_json, say
from replay.printable import counted


@click.command("import")
@click.argument("dumps", nargs=-1, required=True, type=PATH, metavar="DUMP...")
@click.option("-o", "--output", required=True, type=PATH, metavar="TRACE", help="Folder to write the trace into.")
@click.option(
    "--target", required=True, type=PATH, metavar="DIR", help="The target's checkpoint: embedding, norm and lm_head."
)
@click.option(
    "--format", "form", default="auto", show_default=True, type=click.Choice(FORMATS), help="Who wrote the dump."
)
@click.option(
    "--taps", metavar="T", help="The dump's taps beside the last state, in its order, e.g. 2,16,29.  [default: its own]"
)
@click.option(
    "--loss-masks", type=PATH, metavar="PATH", help="Rows with `input_ids` and `loss_mask`, where the dump has none."
)
@click.option("--limit", type=int, metavar="N", help="Import the first N texts.")
@click.option("--topk", type=int, default=32, show_default=True, help="The target's best tokens that are kept a place.")
@click.option(
    "--no-weights",
    is_flag=True,
    help="Leave the target's embedding out of the trace; readers then need the target's checkpoint.",
)
@click.option("--force", is_flag=True, help="Replace an existing trace.")
@json_option
def import_dumps(
    dumps: tuple[Path, ...], output: Path, target: Path, form: str, taps: str | None, loss_masks: Path | None,
    limit: int | None, topk: int, no_weights: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Make a trace of hidden states that a trainer stored."""
    from replay.analysis.json_document import object_json
    from replay.capture.dumps.record import ImportOptions
    from replay.capture.dumps.record import import_dumps as run_import

    options = ImportOptions(dumps, output, target, form, taps, loss_masks, limit, topk, not no_weights, force)
    with show_progress("reading the dump") as progress:
        result = run_import(options, lambda done, total: progress.update("importing", done, total, "texts"))
    if result.nats > result.blind:
        say(
            f"note: an output token costs {result.nats:.2f} nats, a blind guess {result.blind:.2f}: unless the target "
            "has random weights, dump and target do not belong together"
        )
    if as_json:
        print_json(object_json(result))
        return
    tokens, agreed = result.output_tokens, result.agreed
    click.echo(
        f"{result.path}: {counted(result.requests, 'request')} of {counted(result.texts, 'text')}, {tokens} "
        f"output tokens, taps "
        f"{','.join(result.taps)}\n"
        f"The last states are those {result.last_state} the final norm. {agreed} of {tokens} output tokens "
        f"are the target's first choice; one costs {result.nats:.2f} nats.\n"
        + "".join(f"missing: {what}\n" for what in result.missing),
        nl=False,
    )
