"""The command line: parse, call, print. No numbers are made here, and heavy imports wait inside the commands."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay import __version__
from replay.errors import OutputError, ReplayError, UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from replay.analysis.diagnosis import Diagnosis
    from replay.capture.record import CaptureOptions, CaptureResult
    from replay.capture.server_ask import ServerOptions
    from replay.diagnose import Trying
    from replay.traces.rounds import Rounds


# Short and long names of one thing; both are taken everywhere.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# What a write to a full or failing disk ends in.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Refusal(click.ClickException):
    """One sentence on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"replay: {self.message}", err=True)


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ReplayError as error:
            raise _Refusal(str(error)) from error
        except KeyboardInterrupt as error:
            raise _Refusal("interrupted; what was whole before is kept, nothing half is left behind") from error
        except OSError as error:
            if error.filename is None:
                raise
            raise _Refusal(f"{error.filename}: {error.strerror}; name a path that can be read and written") from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="replay")
def cli() -> None:
    """Replay EAGLE-3 draft heads offline: predict a server's accept length, and name what keeps it short.

    capture records what a target did into a trace, simulate runs draft heads on it, report shows the result again.
    """


def main() -> None:
    """Entry point of the ``replay`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not a traceback
    try:
        cli()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would fail again at exit
        _say(f"replay: the output cannot be written ({error.strerror}); make room, or send stdout elsewhere")
        sys.exit(1)


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
_trace_argument = click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")


@cli.command()
@click.option(
    "--trace",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder that the server records into; `capture --server` reads it, and may write its trace there.",
)
@click.option("--taps", metavar="T", help="Taps to record beside those the draft is fed.  [default: as of capture]")
@click.option("--wiring", metavar="W", help="Feed the draft exactly these taps, in this order, e.g. embed,3,16.")
@click.option("--topk", type=click.IntRange(1, 4096), default=32, show_default=True, help="Logits kept of each row.")
@_json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- SGLANG_ARGUMENTS...")
def serve(
    trace: Path, taps: str | None, wiring: str | None, topk: int, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Start a real SGLang server with recording on.

    Everything after -- goes to sglang.launch_server as it stands. With --json the document comes once the server
    answers, and the server goes on.
    """
    from dataclasses import asdict

    from replay.capture.serve import Ready, ServeOptions
    from replay.capture.serve import serve as run

    def on_ready(ready: Ready) -> None:
        _print_json(asdict(ready))
        sys.stdout.flush()

    options = ServeOptions(trace, arguments, taps, wiring, topk)
    sys.exit(run(options, lambda note: _say(f"replay: {note}"), on_ready if as_json else None))


@cli.command()
@click.option("--model", metavar="PATH_OR_ID", help="Target in this process: a checkpoint folder or a hub id.")
@click.option("--server", metavar="URL", help="Target in a server that `replay serve` started (others: answers only).")
@click.option(
    "--api-key", envvar="REPLAY_API_KEY", metavar="KEY", help="Of the server.  [default: $REPLAY_API_KEY, else none]"
)
@click.option(
    "--recording",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the server's recording folder is seen from here, if under another name.",
)
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Rows with `prompt`, `messages` or `input_ids`; optional `id`, `category`, `response`/`output_ids`.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="Folder to write the trace into.",
)
@click.option(
    "--taps",
    metavar="T",
    help="Taps to record, e.g. embed,3,31,final.  "
    "[default: the engines' default taps with their neighbours, embed and final]",
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
@_json_option
def capture(
    model: str | None, server: str | None, api_key: str | None, recording: Path | None, prompts: Path, output: Path,
    taps: str | None, max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int, dtype: str,
    device: str, concurrency: int | None, raw: bool, no_weights: bool, resume: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run prompts through a target, in this process or in a server, and record a trace."""
    from dataclasses import asdict

    from replay.capture.record import CaptureOptions
    from replay.capture.server_ask import ServerOptions

    options: CaptureOptions | ServerOptions
    if model is not None and server is None:
        options = CaptureOptions(
            model=model, prompts=prompts, out=output, taps=taps, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, raw=raw, dtype=_DTYPES.get(dtype, dtype),
            device=device, concurrency=64 if concurrency is None else concurrency, weights=not no_weights,
            resume=resume, force=force,
        )  # fmt: skip
    elif server is not None and model is None:
        options = ServerOptions(
            server=server, prompts=prompts, out=output, taps=taps, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, raw=raw,
            concurrency=16 if concurrency is None else concurrency, weights=not no_weights, resume=resume,
            force=force, api_key=api_key, recording=recording,
        )  # fmt: skip
    else:
        raise click.UsageError("give one of --model and --server")
    result = _capture(options)
    if as_json:
        _print_json({**asdict(result), "path": str(result.path)})
    else:
        click.echo(
            f"{result.path}: {result.requests} requests ({result.recorded} recorded now, {result.output_tokens} output "
            f"tokens in {result.seconds:.0f} s), taps {','.join(result.taps) or 'none'}"
        )


@cli.command()
@_trace_argument
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Draft head's folder; repeat to score several.",
)
@click.option(
    "--wiring",
    "wirings",
    multiple=True,
    metavar="W",
    help="Taps fed to the head, e.g. embed,3,31; repeat "
    "to compare.  [default: what the head states, as the engine reads it]",
)
@click.option(
    "--steps", multiple=True, type=int, metavar="K", help="Drafted tokens per round; repeat to compare.  [default: 5]"
)
@click.option(
    "--topk", multiple=True, type=int, metavar="N", help="Branches per step: 1, a chain; more, a tree.  [default: 1]"
)
@click.option(
    "--num-draft-tokens",
    multiple=True,
    type=int,
    metavar="N",
    help="Tokens verified per round, the known one included: a tree needs it, a chain always has steps + 1, "
    "as in SGLang.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="P",
    help="fp32, bf16 or fp16, and what is quantised in it: w4a16:g128, w8a8, int8, fp8, nvfp4, lm_head=int8, "
    "features=fp8_e4m3, joined by +.  [default: the target's]",
)
@click.option(
    "--kv-dtype",
    "kv_dtypes",
    multiple=True,
    metavar="D",
    help="What draft keys and values are stored in, e.g. fp8_e4m3, fp8_e4m3:scale=0.5 or :scale=auto.  "
    "[default: auto, as the head runs]",
)
@click.option(
    "--rank-precision",
    metavar="P",
    help="Quantise one tensor after the other, e.g. to fp8 or w4a16:g128, and rank them by the accept length lost.",
)
@click.option("--numerics", multiple=True, metavar="N", help="Rounding order: sglang or hf.  [default: the engine's]")
@click.option(
    "--kv",
    "kvs",
    multiple=True,
    metavar="P",
    help="Draft KV: refresh, rewritten from target features after each verify, or a policy: stale, accumulate, "
    "last-hole, full-hole, none, overwrite, unseen, hole:P, chunk:N, window:N, row:WHICH. In trees slot (SGLang: a "
    "node sees what stood in its column) or path (EAGLE: its ancestors).  [default: refresh; in trees the engine's]",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A known fault, or several joined by +, to replay; none is a healthy server. `replay faults` lists them.",
)
@click.option(
    "--verify",
    default="greedy",
    show_default=True,
    metavar="RULE",
    help="Acceptance rule: greedy, or on sampled traces target-only[:single=S,acc=A], rejection or "
    "typical[:epsilon=E,delta=D].",
)
@click.option("--temperature", type=float, metavar="X", help="Must be the one that the trace was recorded at.")
@click.option("--engine", default="sglang", show_default=True, metavar="PROFILE", help="sglang or eagle.")
@click.option("--device", default="cpu", show_default=True, help="Where the head runs, e.g. cpu or cuda.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="ROUNDS.parquet", help="Write every round.")
@click.option("--force", is_flag=True, help="Replace an existing rounds file.")
@_json_option
def simulate(
    trace: Path, drafts: tuple[Path, ...], wirings: tuple[str, ...], steps: tuple[int, ...], topk: tuple[int, ...],
    num_draft_tokens: tuple[int, ...], precisions: tuple[str, ...], kv_dtypes: tuple[str, ...],
    rank_precision: str | None, numerics: tuple[str, ...], kvs: tuple[str, ...], faults: tuple[str, ...], verify: str,
    temperature: float | None, engine: str, device: str, output: Path | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run draft heads on a trace and predict the accept length a server would show.

    Repeated options make a sweep: every combination is replayed on the same trace.
    """
    from replay.faults import parse_faults
    from replay.precision import with_kv
    from replay.traces.reader import Trace
    from replay.traces.rounds import write_rounds
    from replay.variant import sweep
    from replay.weights import read_checkpoint
    from replay.wiring import parse_wiring

    if not drafts:
        raise UsageError("no draft head was given; add --draft DIR, the folder of an EAGLE-3 head")
    if output is not None:
        _refuse_existing(output, force)
    opened = Trace.open(trace)
    _check_temperature(temperature, opened.header.capture.temperature)
    layers = opened.header.target.layers
    checkpoints = {name: read_checkpoint(path) for name, path in _name_drafts(drafts).items()}
    variants = sweep(
        draft=list(checkpoints),
        wiring=[parse_wiring(text, layers=layers) for text in wirings] or [None],
        steps=list(steps or (5,)),
        topk=list(topk or (1,)),
        num_draft_tokens=list(num_draft_tokens) or [None],
        precision=[with_kv(precision, kv) for precision in precisions or (None,) for kv in kv_dtypes or ("auto",)],
        numerics=list(numerics) or [None],
        kv=list(kvs) or [None],
        verify=[verify],
        engine=[engine],
        faults=[parse_faults(text) for text in faults] or [()],
    )
    for wanted in num_draft_tokens:
        for chain_steps in sorted({variant.steps for variant in variants if variant.topk == 1}):
            if wanted != chain_steps + 1:
                _say(f"note: topk 1 with {chain_steps} steps verifies {chain_steps + 1} tokens a round, not "
                     f"{wanted}; SGLang sets it so as well")  # fmt: skip
    ranked = None
    if rank_precision is not None:
        from replay.ranking import one_by_one

        variants, ranked = one_by_one(variants, rank_precision, checkpoints)
    rounds = _simulate(opened, checkpoints, variants, device)
    _show(rounds, as_json) if ranked is None else _show_ranking(rounds, ranked, as_json)
    if output is not None:  # last, so that a full disk loses the file only
        write_rounds(rounds, output, force=force)


@cli.command()
@_json_option
def faults(as_json: bool) -> None:
    """List the faults that simulate --fault can replay, with their values."""
    from dataclasses import asdict

    from replay.faults import FAULTS

    if as_json:
        _print_json([{k: v for k, v in asdict(kind).items() if k != "change"} for kind in FAULTS.values()])
        return
    for kind in FAULTS.values():  # a paragraph each: in a table 80 columns would cut the names
        default = "" if kind.default is None else f"  [default: {kind.default}]"
        click.echo(f"{kind.name}={kind.values}{default}\n    {kind.what}")


@cli.command()
@click.argument("rounds", type=click.Path(path_type=Path), metavar="ROUNDS")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the report as a web page as well.")
@click.option("--peers", is_flag=True, help="Add the metrics of other projects, made from the same rounds.")
@click.option("--force", is_flag=True, help="Replace an existing web page.")
@_json_option
def report(rounds: Path, html: Path | None, peers: bool, force: bool, as_json: bool) -> None:
    """Show the report of a rounds file that simulate -o wrote."""
    from replay.traces.rounds import read_rounds

    if html is not None:
        _refuse_existing(html, force)
    table = read_rounds(rounds)
    _show(table, as_json, peers=peers)
    if html is not None:
        _write_html(table, html, peers)


@cli.command()
@click.argument("rounds_a", type=click.Path(path_type=Path), metavar="ROUNDS_A")
@click.argument("rounds_b", type=click.Path(path_type=Path), metavar="[ROUNDS_B]", required=False)
@click.option("--variant-a", metavar="NAME", help="Variant A.  [default: of one file its first, of two the only one]")
@click.option("--variant-b", metavar="NAME", help="Variant B.  [default: each that is not A]")
@_json_option
def compare(rounds_a: Path, rounds_b: Path | None, variant_a: str | None, variant_b: str | None, as_json: bool) -> None:
    """Compare two variants on the same requests and the same anchors: better, worse, same or cannot tell.

    Of one rounds file every variant is held against the first, of two those of the second against that of the first.
    """
    from replay.analysis.compare import compare as run
    from replay.analysis.compare_report import render_comparison
    from replay.analysis.joined import join
    from replay.traces.rounds import read_rounds

    second = None if rounds_b is None else read_rounds(rounds_b)
    joined = join(read_rounds(rounds_a), second, variant_a=variant_a, variant_b=variant_b)
    comparison = run(joined)
    if as_json:
        _print_json(comparison.to_json())
    else:
        _print(render_comparison(comparison, joined))


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="TRACE|DRAFT")
@click.option(
    "--check",
    is_flag=True,
    help="Check a trace whole: checksums, lengths, finiteness, lm_head(final) against recorded choices.",
)
@_json_option
def inspect(path: Path, check: bool, as_json: bool) -> None:
    """Say what lies in a trace or a draft head's folder."""
    from dataclasses import asdict

    from replay.inspection import draft_facts, kind_of, render_facts, trace_facts
    from replay.traces.reader import Trace

    if kind_of(path) == "draft":
        draft = draft_facts(path)
        return _print_json(asdict(draft)) if as_json else _print(render_facts(draft))
    trace = Trace.open(path, allow_incomplete=not check)
    facts = trace_facts(trace)
    findings = [asdict(finding) for finding in trace.check()] if check else None
    if as_json:
        _print_json({**asdict(facts), **({} if findings is None else {"findings": findings})})
    else:
        _print(render_facts(facts))
        for finding in findings or []:
            click.echo(_spell_finding(finding))
    errors = sum(finding["severity"] == "error" for finding in findings or [])
    if errors:
        raise ReplayError(f"{path} fails its self-check with {errors} errors; capture it again before judging a head")


@cli.command()
@_trace_argument
@click.option("--draft", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Draft head's folder.")
@click.option(
    "--observed",
    metavar="FILE|ACCEPT_LENGTH",
    help="An accept length, or a log, /metrics page, /server_info document or answers that have one.  "
    "[default: what the trace's own server did, round by round]",
)
@click.option("--wiring", metavar="W", help="What the head was trained on, e.g. embed,3,31, if you know it.")
@click.option("--served-wiring", metavar="W", help="What the server feeds.  [default: as the trace or the config says]")
@click.option("--steps", type=int, metavar="K", help="Of the server.  [default: as the trace says, else 5]")
@click.option("--topk", type=int, metavar="N", help="Of the server.  [default: as the trace says, else 1]")
@click.option("--num-draft-tokens", type=int, metavar="N", help="Of the server.  [default: as the trace says]")
@click.option("--precision", metavar="P", help="Of the served head.  [default: the target's]")
@click.option("--engine", metavar="PROFILE", help="sglang or eagle.  [default: sglang]")
@click.option("--ladder/--no-ladder", default=True, help="Show the way from the training metric down to the server.")
@_json_option
def diagnose(
    trace: Path, draft: Path, observed: str | None, wiring: str | None, served_wiring: str | None, steps: int | None,
    topk: int | None, num_draft_tokens: int | None, precision: str | None, engine: str | None, ladder: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Name what keeps a server's accept length short.

    Replays the head under every known fault and holds each against what the server did. Exit code 0 whatever the
    verdict.
    """
    from replay.analysis.diagnosis import to_json
    from replay.analysis.diagnosis_report import render_diagnosis
    from replay.capture.observed import read_observed
    from replay.diagnose import diagnose as run
    from replay.diagnose import served_variant
    from replay.traces.reader import Trace
    from replay.weights import read_checkpoint
    from replay.wiring import parse_wiring

    opened = Trace.open(trace)
    layers = opened.header.target.layers
    checkpoint = read_checkpoint(draft)
    served = served_variant(
        opened, checkpoint.name, steps=steps, topk=topk, num_draft_tokens=num_draft_tokens,
        precision=precision, engine=engine,
        wiring=None if served_wiring is None else parse_wiring(served_wiring, layers=layers),
    )  # fmt: skip
    found = _diagnose(
        lambda on_event: run(
            opened,
            checkpoint,
            served,
            trained=None if wiring is None else parse_wiring(wiring, layers=layers),
            observed=None if observed is None else read_observed(observed),
            ladder=ladder,
            on_event=on_event,
        )
    )
    if as_json:
        _print_json(to_json(found))
    else:
        _print(render_diagnosis(found))


@cli.command()
@click.option("--draft", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Draft head's folder.")
@click.option(
    "--target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Target's folder; its config.json is enough.",
)
@click.option("--server", metavar="URL", help="A running SGLang server, whose arguments in force are read.")
@click.option(
    "--api-key", envvar="REPLAY_API_KEY", metavar="KEY", help="Of the server.  [default: $REPLAY_API_KEY, else none]"
)
@click.option(
    "--server-args",
    metavar="TEXT",
    help='How it is or will be started, in one argument: "VARIABLE=1 --dtype bfloat16 ...".',
)
@click.option(
    "--engine", metavar="PROFILE", help="sglang, vllm or eagle.  [default: as --server-args say, else sglang]"
)
@click.option("--wiring", metavar="W", help="What the head was trained on, e.g. embed,3,31, if you know it.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="TRACE", help="Hold the vocabulary map against its outputs."
)
@click.option("--weights", is_flag=True, help="Read the head's tensors whole: NaN, constants, what fp16 cannot hold.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 even with findings of severity error.")
@_json_option
def check(
    draft: Path, target: Path, server: str | None, api_key: str | None, server_args: str | None, engine: str | None,
    wiring: str | None, trace: Path | None, weights: bool, exit_zero: bool, as_json: bool,
) -> None:  # fmt: skip
    """Hold a draft head, its target and a server's arguments against the known faults, without running anything.

    Reads configs and tensor headers only. Exit code 1 with findings of severity error, 0 with warnings and notes.
    """
    from replay.check import check as run
    from replay.check_report import render_outcome
    from replay.facts import count_emitted, read_facts, read_target_config
    from replay.server_arguments import check_engine, live_server, parse_server_arguments

    if server is not None and server_args is not None:
        raise click.UsageError("give one of --server and --server-args")
    if server is not None and engine not in (None, "sglang"):
        raise click.UsageError("--server asks SGLang servers; give --server-args for another --engine")
    check_engine(engine)
    stated = None if server_args is None else parse_server_arguments(server_args, engine)
    if server is not None:
        stated = live_server(_server_info(server, api_key), server)
    layers = read_target_config(target).layers
    known = None
    if wiring is not None:
        from replay.wiring import parse_wiring

        known = parse_wiring(wiring, layers=layers)
    emitted = None
    if trace is not None:
        from replay.traces.reader import Trace

        emitted = count_emitted(Trace.open(trace))
    facts = read_facts(draft, target, stated, engine=engine, wiring=known, emitted=emitted, weights=weights)
    outcome = run(facts)
    if as_json:
        _print_json(outcome.to_json())
    else:
        _print(render_outcome(outcome, facts))
    if outcome.errors and not exit_zero:
        plural = "s" if outcome.errors > 1 else ""
        raise ReplayError(f"{draft} has {outcome.errors} finding{plural} of severity error; mend what fix says")


@cli.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("replay-demo"),
    show_default=True,
    metavar="DIR",
    help="Folder for the trace and the rounds.",
)
@click.option("--max-new-tokens", type=int, default=200, show_default=True, help="Output tokens per prompt.")
@click.option("--force", is_flag=True, help="Capture again even if the trace is there.")
@_json_option
def demo(output: Path, max_new_tokens: int, force: bool, as_json: bool) -> None:
    """Record a small real target and replay its draft head under right and wrong wirings."""
    from replay.demo import WIRINGS, demo_options, sample_head
    from replay.traces.reader import Trace
    from replay.traces.rounds import write_rounds
    from replay.variant import sweep
    from replay.weights import read_checkpoint
    from replay.wiring import parse_wiring

    options = demo_options(output, max_new_tokens, force=force, tell=_say)
    if options is None:
        _say(f"using the trace in {output / 'trace'} (--force captures it again)")
    else:
        _capture(options)
    trace = Trace.open(output / "trace")
    head = read_checkpoint(sample_head())
    variants = sweep(draft=[head.name], wiring=[parse_wiring(text) for text in WIRINGS], steps=[5])
    rounds = _simulate(trace, {head.name: head}, variants, "cpu")
    write_rounds(rounds, output / "rounds.parquet", force=True)
    _show(rounds, as_json)
    _say(
        f"\nNext, on the same trace:\n  replay simulate {output / 'trace'} --draft {sample_head()} "
        f"--steps 1 --steps 3 --steps 7\n  replay report {output / 'rounds.parquet'} --peers"
    )


# ---- between the commands and the terminal ----


def _server_info(url: str, api_key: str | None) -> object:
    from replay.capture.server_api import TransientError, open_api

    try:
        return open_api(url, api_key, timeout=30.0).call("/server_info")
    except TransientError as error:
        raise UsageError(f"{url} cannot be asked: {error}; see that an SGLang server runs there") from error


def _say(text: str) -> None:
    click.echo(text, err=True)


def _print(renderable: "RenderableType") -> None:
    from rich.console import Console

    Console(soft_wrap=False).print(renderable)


def _print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _show(rounds: "Rounds", as_json: bool, *, peers: bool = False) -> None:
    from dataclasses import asdict

    from replay.analysis.acceptance import summarise, to_json

    summaries = summarise(rounds)
    if as_json:
        document = to_json(rounds, summaries)
        if peers:
            from replay.analysis.peers import peer_metrics

            document["peers"] = [asdict(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
        _print_json(document)
    else:
        _print(_report(rounds, peers))


def _show_ranking(rounds: "Rounds", tensors: list[str], as_json: bool) -> None:
    from replay.analysis.acceptance import summarise, to_json
    from replay.analysis.ranking import rank, render_ranking

    summaries = summarise(rounds)
    ranking = rank(rounds, summaries, tensors)
    if as_json:
        _print_json(
            {**to_json(rounds, summaries), "ranking": [row.to_json() for row in (*ranking.rows, ranking.together)]}
        )
    else:
        _print(render_ranking(ranking))


def _report(rounds: "Rounds", peers: bool) -> "RenderableType":
    from rich.console import Group

    from replay.analysis.acceptance import summarise
    from replay.analysis.report import render

    parts: list[Any] = [render(rounds, summarise(rounds))]
    if peers:
        from replay.analysis.peers import peer_metrics, render_peers

        parts += [render_peers(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
    return Group(*parts)


def _write_html(rounds: "Rounds", path: Path, peers: bool) -> None:
    from rich.console import Console

    from replay.traces.files import write_whole

    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(_report(rounds, peers))
    try:
        write_whole(path, [console.export_html().encode()])
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); choose another --html") from error


def _spell_finding(finding: dict[str, Any]) -> str:
    request = f" {finding['request_id']}:" if finding.get("request_id") else ""
    return f"{finding['severity']}:{request} {finding['what']}"


def _refuse_existing(path: Path, force: bool) -> None:
    """Before the work, so that nothing is lost after it."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if path.exists() and not path.is_file():  # --force would put a file in the place of a device
        raise OutputError(f"{path} is a device or a pipe and would be replaced; name a file")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; type another name, or --force to replace it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder, so {path.name} cannot be written there; make it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path.parent} cannot be written to; name a file in a folder that can")


def _check_temperature(wanted: float | None, recorded: float) -> None:
    if wanted is not None and wanted != recorded:
        raise UsageError(
            f"temperature {wanted:g} was asked for, the trace was recorded at {recorded:g} and is replayed so; "
            f"capture one with --temperature {wanted:g}"
        )


def _name_drafts(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Folder names, or whole paths where two folders are called alike."""
    resolved = list(dict.fromkeys(path.resolve() for path in paths))
    names = [path.name for path in resolved]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, resolved, strict=True)}


@contextmanager
def _progress(console: "Console") -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def _capture(options: "CaptureOptions | ServerOptions") -> "CaptureResult":
    """Capture with a progress bar on stderr: tokens done, rate, time left."""
    from rich.console import Console

    from replay.capture import record, server

    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("preparing target", total=None, rate="")

        def on_event(event: record.Event) -> None:
            match event:
                case record.Noted(text):
                    progress.console.print(f"note: {text}", highlight=False, markup=False)
                case record.Progress():
                    progress.update(
                        task,
                        description=f"{event.requests_done}/{event.requests} requests",
                        total=event.output_tokens + event.output_tokens_left,
                        completed=event.output_tokens,
                        rate=f"tokens, {event.tokens_per_second:.0f}/s",
                    )
                case _:
                    pass

        if isinstance(options, record.CaptureOptions):
            return record.capture_local(options, on_event)
        return server.capture_server(options, on_event)


def _simulate(trace: Any, checkpoints: Any, variants: Any, device: str) -> "Rounds":
    from rich.console import Console

    from replay.simulation import Progress, simulate

    _check_device(device)
    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=None, rate="requests")

        def on_event(event: Progress) -> None:
            progress.update(task, completed=event.done, total=event.total)

        return simulate(trace, checkpoints, variants, device=device, on_event=on_event)


def _diagnose(run: "Callable[[Callable[[Trying], None]], Diagnosis]") -> "Diagnosis":
    from rich.console import Console

    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=None, rate="hypotheses")

        def on_event(event: "Trying") -> None:
            progress.update(task, description=event.stage, completed=event.done, total=event.total)

        return run(on_event)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); try cpu") from error
