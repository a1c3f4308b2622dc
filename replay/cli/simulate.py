"""`replay simulate`: heads on a trace, under every asked variant."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from replay.cli.options import (
    HEADS,
    PATH,
    SOURCE,
    cache_option,
    format_option,
    json_option,
    no_verify_option,
    observed_option,
    open_traces,
    parse_wiring_option,
    part_options,
    read_part,
    read_workers,
    sort_option,
    target_option,
    top_option,
    workers_options,
)
from replay.cli.replaying import check_device, refuse_output, run_simulation, say_unwritten, write_after
from replay.cli.rounds_output import Wanted, by_option, show_ranking, show_rounds, write_html
from replay.cli.sweeping import (
    check_every_trace,
    check_reach,
    check_temperature,
    every_variant,
    name_folders,
    note_chains,
)
from replay.cli.table_formats import refuse_beside, refuse_two_forms
from replay.cli.web_page import refuse_page
from replay.errors import UsageError

_repeated = partial(click.option, multiple=True)  # repeated options make a sweep


@click.command()
@click.argument("traces", type=SOURCE, metavar="TRACE...", nargs=-1, required=True)
@_repeated(
    "--draft",
    "drafts",
    type=HEADS,
    metavar="DIR|ID",
    help="Draft head's folder or hub id, or a quoted pattern, e.g. 'runs/*/checkpoint-*'; repeat for several.",
)
@_repeated(
    "--wiring",
    "wirings",
    metavar="W",
    help="Taps fed to the head, e.g. embed,3,31; or layer ids as an engine counts them, e.g. sglang:-1,2,30, "
    "sglang@0.5.12:..., vllm:..., specforge:..., hf:...; or config, what the head states; repeat to compare.  "
    "[default: config, as the engine reads it]",
)
@_repeated(
    "--steps",
    type=int,
    metavar="K",
    help="Drafted tokens per round; repeat to compare.  [default: 5; of a DFlash head its whole block]",
)
@_repeated("--topk", type=int, metavar="N", help="Branches per step: 1, a chain; more, a tree.  [default: 1]")
@_repeated(
    "--num-draft-tokens",
    type=int,
    metavar="N",
    help="Tokens verified per round, the known one included: a tree needs it, a chain always has steps + 1, "
    "as in SGLang.",
)
@_repeated(
    "--precision",
    "precisions",
    metavar="P",
    help="fp32, bf16 or fp16, and what is quantised in it: w4a16:g128, w8a8, int8, fp8, nvfp4, lm_head=int8, "
    "features=fp8_e4m3, joined by +.  [default: the target's]",
)
@_repeated(
    "--kv-dtype",
    "kv_dtypes",
    metavar="D",
    help="What draft keys and values are stored in, e.g. fp8_e4m3, fp8_e4m3:scale=0.5 or :scale=auto.  "
    "[default: auto, as the head runs]",
)
@click.option(
    "--rank-precision",
    metavar="P",
    help="Quantise one tensor after the other, e.g. to fp8 or w4a16:g128, and rank them by the accept length lost.",
)
@_repeated("--numerics", metavar="N", help="Rounding order: sglang or hf.  [default: the engine's]")
@_repeated(
    "--kv",
    "kvs",
    metavar="P",
    help="Draft KV: refresh, rewritten from target features after each verify, or a policy: stale, accumulate, "
    "last-hole, full-hole, none, overwrite, unseen, hole:P, chunk:N, chunk:recorded, window:N, row:WHICH. In trees "
    "slot (SGLang: a node sees what stood in its column) or path (EAGLE: its ancestors).  [default: refresh; in trees "
    "the engine's]",
)
@_repeated(
    "--fault",
    "faults",
    metavar="NAME[=VALUE]",
    help="A known fault, or several joined by +, to replay; none is a healthy server. `replay faults` lists them.",
)
@_repeated(
    "--verify",
    "rules",
    default=("greedy",),
    show_default=True,
    metavar="RULE",
    help="Acceptance rule: greedy, or on sampled traces target-only[:single=S,acc=A], rejection or "
    "typical[:epsilon=E,delta=D]; repeat to compare.",
)
@click.option("--temperature", type=float, metavar="X", help="Must be the one that the trace was recorded at.")
@click.option("--engine", default="sglang", show_default=True, metavar="PROFILE", help="sglang or eagle.")
@click.option("--device", default="cpu", show_default=True, help="Where the head runs, e.g. cpu or cuda.")
@click.option(
    "--no-agreement",
    is_flag=True,
    help="Leave out how many rounds of the trace's own server each variant explains, which takes two to three times "
    "as long as the simulation itself.",
)
@part_options
@by_option
@observed_option
@target_option
@no_verify_option
@cache_option
@workers_options
@click.option("-o", "--output", type=PATH, metavar="ROUNDS.parquet", help="Write every round.")
@click.option("--html", type=PATH, metavar="FILE", help="Write the report as a web page in one file too.")
@click.option("--force", is_flag=True, help="Replace an existing rounds file or web page.")
@sort_option
@top_option
@format_option
@json_option
def simulate(
    traces: tuple[Path, ...], drafts: tuple[Path | str, ...], wirings: tuple[str, ...], steps: tuple[int, ...],
    topk: tuple[int, ...],
    num_draft_tokens: tuple[int, ...], precisions: tuple[str, ...], kv_dtypes: tuple[str, ...],
    rank_precision: str | None, numerics: tuple[str, ...], kvs: tuple[str, ...], faults: tuple[str, ...],
    rules: tuple[str, ...], temperature: float | None, engine: str, device: str, no_agreement: bool,
    category: tuple[str, ...], request: tuple[str, ...], first_turn: bool, limit: int | None, by: tuple[str, ...],
    observed: str | None, target: Path | None, no_verify: bool, cache: Path | None, workers: int | None,
    ray: str | None, output: Path | None, html: Path | None, force: bool, sort: str | None, top: int | None,
    table_format: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run draft heads on a trace and predict the accept length a server would show.

    Repeated options make a sweep: every combination is replayed on the same trace. Several traces of one target are
    replayed one after the other and counted together and apart.
    """
    from replay.capture.observed import read_observed
    from replay.checkpoint.hub import head_folder
    from replay.cli.drafts import expand_drafts, name_heads, read_drafts
    from replay.engines.precision import with_kv
    from replay.faults.table import parse_faults
    from replay.simulator.binding import check_one_target, distinct
    from replay.simulator.cache import check_cache_folder
    from replay.simulator.variant import sweep
    from replay.traces.rounds_sets import pool_rounds

    heads = expand_drafts(drafts)
    if not heads:
        raise UsageError("no draft head was given; add --draft DIR, the folder of an EAGLE-3 or DFlash head")
    refuse_two_forms(table_format, as_json)
    if rank_precision is not None and (sort or top or table_format):
        raise UsageError("a ranking is sorted by what each tensor costs; leave --sort, --top and --format out")
    for form, typed in (("--rank-precision", rank_precision), ("--format", table_format)):
        if typed is not None:
            refuse_beside(form, by=by, observed=observed)
    if rank_precision is not None:
        refuse_beside("--rank-precision", html=html)
    if output is not None:
        refuse_output(output, force)
    if html is not None and html == output:
        raise UsageError(f"-o and --html both name {html}; type two files")
    refuse_page(html, force)
    if cache is not None:
        check_cache_folder(cache, verify=not no_verify)
    hands = read_workers(workers, ray)
    check_device(device, hands)
    seen = None if observed is None else read_observed(observed)
    part = read_part(category, request, first_turn, limit)
    every = open_traces(name_folders(traces), part, target, verify=not no_verify)
    opened = next(iter(every.values()))
    check_one_target(every)
    for one in every.values():
        check_temperature(temperature, one.header.capture.temperature)
    choices: dict[str, list[Any]] = dict(
        wiring=[parse_wiring_option(text, opened.header.target) for text in wirings] or [None],
        precision=[with_kv(precision, kv) for precision in precisions or (None,) for kv in kv_dtypes or ("auto",)],
        numerics=list(numerics) or [None],
        kv=list(kvs) or [None],
        verify=list(rules),
        engine=[engine],
        faults=[parse_faults(text) for text in faults] or [()],
    )
    sweep(draft=[str(heads[0])], **choices)  # refuses what cannot be before a head is fetched from a hub
    checkpoints = read_drafts(name_heads([head_folder(path) for path in heads]))
    variants = every_variant(checkpoints, steps, topk, num_draft_tokens, choices)
    check_reach(seen, variants)
    if len(wirings) > 1:
        variants = distinct(variants, checkpoints, opened)
    note_chains(num_draft_tokens, {variant.steps for variant in variants if variant.topk == 1})
    ranked = None
    if rank_precision is not None:
        from replay.simulator.precision_ranking import one_by_one

        variants, ranked = one_by_one(variants, rank_precision, checkpoints)
    if len(every) > 1:
        check_every_trace(every.values(), variants, checkpoints)
    agreement = not no_agreement and ranked is None  # a ranking asks what each tensor costs, not what a server did
    apart = {
        name: run_simulation(one, checkpoints, variants, device, agreement=agreement, cache=cache, workers=hands)
        for name, one in every.items()
    }
    rounds = pool_rounds(apart) if len(apart) > 1 else next(iter(apart.values()))
    unwritten = None if output is None else write_after(rounds, output, force)  # first: a reader of stdout may go away
    wanted = Wanted(by=by, observed=seen, sort=sort, top=top, table_format=table_format)
    with say_unwritten(unwritten):
        if ranked is None:
            show_rounds(rounds, as_json, wanted)
        else:
            show_ranking(rounds, ranked, as_json)
        if html is not None:
            from replay.simulator.tokens import Sources

            write_html(rounds, html, wanted, Sources(None, None, target, not no_verify))
