"""`replay time`: how long rounds of a running server take, for `replay plan`."""

from pathlib import Path

import click

from replay.cli.options import PATH, api_key_option, json_option
from replay.cli.progress import show_progress
from replay.cli.terminal import print_json, print_rich, refuse_existing
from replay.errors import OutputError
from replay.printable import one_line


@click.command("time")
@click.option("--server", required=True, metavar="URL", help="A running SGLang server that nobody else asks.")
@api_key_option
@click.option(
    "-o", "--output", required=True, type=PATH, metavar="FILE", help="Timings file, which `replay plan --bench` reads."
)
@click.option(
    "--batch", default="", metavar="N,N", help="Requests at a time.  [default: 1,2,4 to 64, as far as the server runs]"
)
@click.option("--context", default="", metavar="N,N", help="Tokens of context of each.  [default: 512]")
@click.option(
    "--prompts",
    type=PATH,
    metavar="FILE.jsonl",
    help="Texts to ask, joined and cut to the context; as of `replay capture`.  [default: random token ids]",
)
@click.option("--raw", is_flag=True, help="Send `prompt` as it stands, without the chat template.")
@click.option("--tokens", type=int, default=64, show_default=True, metavar="N", help="Output of each request.")
@click.option("--repeats", type=int, default=5, show_default=True, metavar="N", help="How often each is timed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of random token ids.")
@click.option("--allow-recording", is_flag=True, help="Time a server that records, too; it is slower.")
@click.option("--force", is_flag=True, help="Replace an existing timings file.")
@json_option
def time_command(
    server: str, api_key: str | None, output: Path, batch: str, context: str, prompts: Path | None, raw: bool,
    tokens: int, repeats: int, seed: int, allow_recording: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Time the rounds of a running SGLang server, for `replay plan`.

    It asks whole batches and counts only while all their requests decode: prefill is left out. One server has one
    depth; time one that does not speculate too, and give both files to `replay plan`.
    """
    from replay.analysis.plan.ask import listed
    from replay.analysis.plan.measured import measured_json, render_measured
    from replay.capture.client.timed_prompts import TimingOptions
    from replay.capture.client.timing import MOST_BATCH, MOST_CONTEXT, time_server
    from replay.traces.files import write_whole
    from replay.traces.timings import is_timings_file, timings_bytes

    batches = tuple(listed(batch, "--batch", MOST_BATCH)) or None
    contexts = tuple(listed(context, "--context", MOST_CONTEXT)) or None
    options = TimingOptions(
        server, batches, contexts, prompts, raw, tokens, repeats, seed, api_key, allow_recording
    )  # fmt: skip
    refuse_existing(output, force, ours=is_timings_file)
    with show_progress("asking the server") as progress:
        measured = time_server(
            options,
            lambda done, total: progress.update("timing", done, total, "questions"),
            lambda note: progress.note(one_line(f"note: {note}")),
        )
    try:
        write_whole(output, [timings_bytes(measured)])
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror}); choose another -o") from error
    if as_json:
        print_json(measured_json(str(output), measured))
    else:
        print_rich(render_measured(str(output), measured))
