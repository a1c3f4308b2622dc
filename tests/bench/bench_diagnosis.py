"""Benchmark: how often `replay diagnose` is right, on recordings of a real server whose fault is known.

    PYTHONPATH=tests python -P tests/bench/bench_diagnosis.py head FOLDER             # a second head
    PYTHONPATH=tests python -P tests/bench/bench_diagnosis.py record FOLDER           # 20 s a fault
    PYTHONPATH=tests python -P tests/bench/bench_diagnosis.py make FOLDER TRACE       # faults that replay plays itself
    PYTHONPATH=tests python -P tests/bench/bench_diagnosis.py judge FOLDER -o FILE    # a diagnosis of each

Faults are put into an SGLang server on the CPU while it runs (tests/rig/injections); what is recorded already is not
recorded again. ``judge`` takes all recordings below FOLDER. In the environment that ``make test`` makes, and no part of
it.
"""

import json
import re
from functools import partial
from pathlib import Path

import click
from support.calibration_cases import every_case, read_cases, tree_cases
from support.calibration_judge import can_leave_out, judge
from support.calibration_made import FAULTS, ORDERS, make_recordings, perturbed_head
from support.calibration_record import Setting, record_cases
from support.calibration_report import document, figures, render

import replay
from replay.capture.demo_target import smollm2
from replay.traces.sample_files import sample_head

tell = partial(click.echo, err=True)
folder_argument = click.argument("folder", type=click.Path(path_type=Path))
head_option = click.option("--head", type=click.Path(path_type=Path), default=sample_head, help="[default: the sample]")
only_option = click.option("--only", metavar="PATTERN", default="", help="Names that this regular expression finds.")
limit_option = click.option("--limit", type=int, metavar="N", help="So many at most.")


@click.group()
def main() -> None:
    """How often a diagnosis is right."""


@main.command()
@folder_argument
@click.option("--size", default=0.2, help="Noise on each matrix, in its deviations.")
def head(folder: Path, size: float) -> None:
    """Write a head that drafts otherwise than the sample head."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    click.echo(perturbed_head(sample_head(), folder, size=size))


@main.command()
@folder_argument
@head_option
@click.option("--steps", default=5)
@click.option("--topk", default=1)
@click.option("--tree", "nodes", type=int, help="Draft tokens of a tree.")
@click.option("--prompts", default=12)
@click.option("--new-tokens", default=48)
@click.option("--threads", default=1)
@only_option
@limit_option
def record(
    folder: Path, head: Path, steps: int, topk: int, nodes: int | None, prompts: int, new_tokens: int, threads: int,
    only: str, limit: int | None,
) -> None:  # fmt: skip
    """Record a real server under each fault."""
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        smollm2(), head.resolve(), folder.resolve(), steps, topk, nodes or steps + 1, prompts, new_tokens, threads
    )
    cases = [case for case in (every_case() if topk == 1 else tree_cases()) if re.search(only, case.name)]
    _end(record_cases(setting, cases[:limit], tell))


@main.command()
@folder_argument
@click.argument("trace", type=click.Path(path_type=Path))
@head_option
@click.option("--order", type=click.Choice(list(ORDERS)), default="hf", help="Rounding order of the rounds made.")
@only_option
@limit_option
def make(folder: Path, trace: Path, head: Path, order: str, only: str, limit: int | None) -> None:
    """Make recordings by replay: the TRACE of a healthy server, with rounds of each fault."""
    names = [name for name in FAULTS if re.search(only, name)]
    _end(make_recordings(trace, head, folder, order, names[:limit], tell))


@main.command(name="judge")
@folder_argument
@head_option
@click.option("--jobs", type=click.IntRange(1, 1), default=1, help="One: each diagnosis is timed.")
@click.option("--leave-out/--keep", default=True, help="Diagnose faults of the table once more without their kind.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also as JSON.")
@only_option
@limit_option
def judge_all(
    folder: Path, head: Path, jobs: int, leave_out: bool, output: Path | None, only: str, limit: int | None
) -> None:
    """Diagnose each recording below FOLDER and count."""
    if leave_out and not can_leave_out():
        tell("this version of the diagnosis takes no `without`: nothing is left out")
    found = [pair for pair in read_cases(folder) if re.search(only, pair[0].name)][:limit]
    if not found:
        raise click.UsageError(f"{folder} holds no recordings that {only!r} finds; record some first")
    outcomes = []
    for one in judge(found, replay.load_head(head), tell, leave_out=leave_out and can_leave_out()):
        outcomes.append(one)
        if output is not None:  # whatever ends it, what was found is kept
            output.write_text(json.dumps(document(outcomes), indent=1))
    click.echo(render(figures(outcomes)) if outcomes else "every diagnosis was refused")


def _end(problems: list[str]) -> None:
    for problem in problems:
        click.echo(problem)


if __name__ == "__main__":
    main()
