"""`replay check`: a head, its target and a server's arguments against the known faults."""

from pathlib import Path

import click

from replay.cli.options import (
    SOURCE,
    api_key_option,
    draft_option,
    json_option,
    no_verify_option,
    open_whole,
    parse_wiring_option,
    trained_wiring_option,
)
from replay.cli.terminal import print_json, print_rich
from replay.errors import ReplayError, UsageError

_WAIT = 4.0  # seconds for a server's arguments


@click.command()
@draft_option
@click.option("--target", required=True, type=SOURCE, metavar="DIR", help="Target's folder; its config.json is enough.")
@click.option("--server", metavar="URL", help="A running SGLang server, whose arguments in force are read.")
@api_key_option
@click.option(
    "--server-args",
    metavar="TEXT",
    help='How it is or will be started, in one argument: "VARIABLE=1 --dtype bfloat16 ...".',
)
@click.option(
    "--engine", metavar="PROFILE", help="sglang, vllm or eagle.  [default: as --server-args say, else sglang]"
)
@click.option(
    "--engine-version",
    metavar="VERSION",
    help="Release of SGLang that serves it, e.g. 0.5.18.  [default: what --server says, else the newest known]",
)
@trained_wiring_option
@click.option("--trace", type=SOURCE, metavar="TRACE", help="Hold the vocabulary map against its outputs.")
@no_verify_option
@click.option("--weights", is_flag=True, help="Read the head's tensors whole: NaN, constants, what fp16 cannot hold.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 even with findings of severity error.")
@json_option
def check(
    draft: Path, target: Path, server: str | None, api_key: str | None, server_args: str | None, engine: str | None,
    engine_version: str | None, wiring: str | None, trace: Path | None, no_verify: bool,
    weights: bool, exit_zero: bool, as_json: bool,
) -> None:  # fmt: skip
    """Hold a draft head, its target and a server's arguments against the known faults, without running anything.

    Reads configs and tensor headers only. Exit code 1 with findings of severity error, 0 with warnings and notes.
    """
    from replay.check import run
    from replay.check.facts import count_emitted, read_facts, read_target_config
    from replay.check.inspection import refuse_target
    from replay.check.report import render_outcome
    from replay.check.server import Server, check_engine, live_server, of_version, parse_server_arguments
    from replay.checkpoint.hub import head_folder

    if server is not None and server_args is not None:
        raise click.UsageError("give one of --server and --server-args")
    if server is not None and engine not in (None, "sglang"):
        raise click.UsageError("--server asks SGLang servers; give --server-args for another --engine")
    if server is not None and engine_version is not None:
        raise click.UsageError("--server tells its version; leave --engine-version out")
    check_engine(engine)
    draft = head_folder(draft)
    refuse_target(draft)
    stated = None if server_args is None else parse_server_arguments(server_args, engine)
    if server is not None:
        stated = live_server(_server_info(server, api_key), server)
    if engine_version is not None:
        stated = of_version(stated or Server(engine or "sglang"), engine_version)
    known = parse_wiring_option(wiring, read_target_config(target))
    emitted = None
    if trace is not None:
        emitted = count_emitted(open_whole(trace, verify=not no_verify))
    facts = read_facts(draft, target, stated, engine=engine, wiring=known, emitted=emitted, weights=weights)
    outcome = run.check(facts)
    if as_json:
        print_json(outcome.to_json())
    else:
        print_rich(render_outcome(outcome, facts))
    if outcome.errors and not exit_zero:
        plural = "s" if outcome.errors > 1 else ""
        raise ReplayError(f"{draft} has {outcome.errors} finding{plural} of severity error; mend what fix says")


def _server_info(url: str, api_key: str | None) -> object:
    from replay.capture.client.api import TransientError, open_api

    try:
        return open_api(url, api_key, timeout=_WAIT).call("/server_info")
    except TransientError as error:
        raise UsageError(
            f"{url} cannot be asked: {error}; see that an SGLang server runs there, or give its arguments with "
            "--server-args"
        ) from error
