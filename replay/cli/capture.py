"""`replay capture`: run prompts through a target, and record a trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.cli.options import PATH, api_key_option, json_option
from replay.cli.progress import show_progress
from replay.cli.terminal import print_json, print_text
from replay.errors import CaptureError, UsageError
from replay.printable import counted, one_line
from replay.traces.fields import count_of, show_name

if TYPE_CHECKING:
    from replay.capture.events import CaptureResult
    from replay.capture.options import CaptureOptions, ServerOptions

# Short and long names of one thing; both are taken everywhere.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@click.command()
@click.option("--model", metavar="PATH_OR_ID", help="Target in this process: a checkpoint folder or a hub id.")
@click.option("--server", metavar="URL", help="Target in a server that records (others: answers only).")
@api_key_option
@click.option(
    "--recording",
    type=PATH,
    metavar="DIR",
    help="Where the server's recording folder is seen from here, if under another name.",
)
@click.option(
    "--prompts",
    required=True,
    type=PATH,
    metavar="FILE.jsonl|-",
    help="Rows with `prompt`, `messages` or `input_ids`; optional `id`, `category`, `response`/`output_ids`. Or rows "
    "of ShareGPT, MT-Bench or an OpenAI batch file; - is standard input.",
)
@click.option("-o", "--output", required=True, type=PATH, metavar="TRACE", help="Folder to write the trace into.")
@click.option(
    "--taps",
    metavar="T",
    help="Taps to record, e.g. embed,3,31,final.  "
    "[default: the engines' default taps with their neighbours, embed and final]",
)
@click.option(
    "--taps-for", type=int, metavar="N", help="All taps of the first N requests only; of the others --then-taps."
)
@click.option(
    "--then-taps",
    metavar="T",
    help="Taps of the requests after --taps-for; final beside them.  [default: what the server's draft is fed]",
)
@click.option(
    "--rows",
    type=click.Choice(["exact", "fp8"]),
    default="exact",
    show_default=True,
    help="How rows are stored: as computed, or in fp8 but for final. Then no replay is exact.",
)
@click.option(
    "--prompt-rows",
    metavar="last:W",
    help="Rows of a prompt to record: the last W, as far as a head with an attention window sees.  [default: all]",
)
@click.option(
    "--server-cache",
    type=click.Choice(["own", "shared"]),
    help="Of a server: each request computes its whole prompt, or takes what earlier ones of this capture began alike "
    "from the server's cache.  [default: own]",
)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Most output tokens per request.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample from this much probability.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Sample from this many tokens; 0 is all.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", *_DTYPES.values(), *_DTYPES]),
    help="Of the target.",
)
@click.option("--device", default="auto", show_default=True, help="Where the target runs, e.g. cpu or cuda.")
@click.option(
    "--concurrency", type=int, help="Most requests in one batch, or in flight.  [default: 64, of a server 16]"
)
@click.option("--raw", is_flag=True, help="Send `prompt` as it stands, without the chat template.")
@click.option(
    "--no-weights",
    is_flag=True,
    help="Leave the target's embedding out of the trace; readers then need the target's checkpoint.",
)
@click.option("--resume", is_flag=True, help="Go on with an unfinished trace.")
@click.option("--force", is_flag=True, help="Replace an existing trace.")
@json_option
def capture(
    model: str | None, server: str | None, api_key: str | None, recording: Path | None, prompts: Path, output: Path,
    taps: str | None, taps_for: int | None, then_taps: str | None, rows: str, prompt_rows: str | None,
    server_cache: str | None,
    max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int, dtype: str,
    device: str, concurrency: int | None, raw: bool, no_weights: bool, resume: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run prompts through a target, in this process or in a server, and record a trace."""
    from replay.analysis.json_document import object_json
    from replay.capture.client.without_plugin import RESPONSES
    from replay.capture.options import CaptureOptions, ServerOptions

    options: CaptureOptions | ServerOptions
    choices: dict[str, Any] = {
        "taps_for": taps_for, "then_taps": then_taps, "rows": rows, "prompt_rows": _last_rows(prompt_rows),
    }  # fmt: skip
    if server is None and server_cache is not None:
        raise UsageError(f"--server-cache {server_cache} is a choice of --server: leave it out, or type --server")
    if model is not None and server is None:
        options = CaptureOptions(
            model=model, prompts=prompts, out=output, taps=taps, **choices, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, raw=raw, dtype=_DTYPES.get(dtype, dtype),
            device=device, concurrency=64 if concurrency is None else concurrency, weights=not no_weights,
            resume=resume, force=force,
        )  # fmt: skip
    elif server is not None and model is None:
        options = ServerOptions(
            server=server, prompts=prompts, out=output, taps=taps, **choices, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, raw=raw,
            concurrency=16 if concurrency is None else concurrency, weights=not no_weights, resume=resume,
            force=force, api_key=api_key, recording=recording, server_cache=server_cache or "own",
        )  # fmt: skip
    else:
        raise click.UsageError("give one of --model and --server")
    result = run_capture(options)
    if as_json:
        print_json({**object_json(result), "taps": list(result.readable_taps) if result.has_trace else []})
    elif result.has_trace:
        print_text(
            f"{result.path}: {counted(result.requests, 'request')} ({result.recorded} recorded now, "
            f"{result.output_tokens} output "
            f"tokens in {result.seconds:.0f} s), taps {','.join(result.readable_taps)}"
        )
    if not result.has_trace:
        raise CaptureError(
            f"{server} does not record, so there is no trace: its {result.requests - len(result.refused)} answers are "
            f"kept in {result.path / RESPONSES}; start it by replay serve for a trace, or give this file to replay "
            "capture --model as --prompts"
        )


def _last_rows(text: str | None) -> int | None:
    """Raises UsageError."""

    if text is None:
        return None
    word, _, number = text.partition(":")
    if word != "last" or not count_of(number):
        raise UsageError(
            f"--prompt-rows {show_name(text)} cannot be: type last:W, W rows from 1 to 999999999, for example last:2048"
        )
    return count_of(number)


def run_capture(options: "CaptureOptions | ServerOptions") -> "CaptureResult":
    """Capture, and show on stderr how far it is: tokens done, rate, time left."""
    from replay.capture.client.capture import capture_server
    from replay.capture.events import CaptureProgress, Event, Loading, Noted, Planned, Sized
    from replay.capture.local.record import capture_local
    from replay.capture.options import CaptureOptions

    with show_progress("preparing the target") as progress:

        def on_event(event: Event) -> None:
            match event:
                case Noted(text):
                    progress.note(one_line(f"note: {text}"))
                case Sized(room):
                    progress.note(one_line(f"{'note' if room.fits else 'warning'}: {room.sentence()}"))
                case Loading():
                    progress.update("loading the target", 0, None, "")
                case Planned():
                    progress.update("recording", 0, event.most_output_tokens, "tokens")
                case CaptureProgress():
                    progress.update(
                        "recording", event.output_tokens, event.output_tokens + event.output_tokens_left, "tokens",
                        also=f"{event.requests_done} of {event.requests} requests safe",
                    )  # fmt: skip
                case _:
                    pass

        if isinstance(options, CaptureOptions):
            return capture_local(options, on_event)
        return capture_server(options, on_event)
