"""Records a real server once for each case of a calibration; one server runs for all cases that start it alike."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rig.injections import ACTIVE_SUFFIX, INJECTION_VARIABLE, NONE
from rig.server import Server, ServerError, start_server
from support.calibration_cases import Case, write_case

from replay.capture.client.capture import capture_server
from replay.capture.options import ServerOptions
from replay.capture.plugin.launch import ServeOptions, prepare
from replay.capture.plugin.recording import RECORD_VARIABLE
from replay.errors import ReplayError
from replay.traces.sample_files import sample_prompts

# What hypotheses replay: the wiring's neighbours, SGLang's default layers with theirs, and the last layers.
TAPS = "embed,1,2,3,4,14,15,16,17,26,27,28"
DONE = "trace/requests.parquet"  # there in a complete trace only
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all recordings of a folder have in common."""

    target: Path
    head: Path
    folder: Path
    steps: int = 5
    topk: int = 1
    num_draft_tokens: int = 6
    prompts: int = 12
    new_tokens: int = 48
    threads: int = 1


def record_cases(setting: Setting, cases: Sequence[Case], tell: Tell) -> list[str]:
    """Record what is not there yet; the sentences say what could not be."""
    todo = [case for case in cases if not is_recorded(setting.folder, case)]
    for case in cases:
        if case not in todo:
            write_case(setting.folder, case, how(setting))
    tell(f"{len(cases) - len(todo)} of {len(cases)} recordings are there")
    problems: list[str] = []
    for _, group in groupby(todo, key=lambda case: (case.arguments, case.wiring)):
        left = list(group)
        while left:  # an injection can end the server: the others go on with a new one
            left = _record_group(setting, left, tell, problems)
    return problems


def how(setting: Setting) -> str:
    """How recordings of a setting come about, in words."""
    shape = f"chains of {setting.steps}" if setting.topk == 1 else f"trees of {setting.num_draft_tokens}"
    return f"an SGLang server on a CPU, {shape}, head {setting.head.name}"


def is_recorded(folder: Path, case: Case) -> bool:
    """Whether a finished trace of the case lies in its folder."""
    return (folder / case.folder / DONE).exists()


def _record_group(setting: Setting, cases: list[Case], tell: Tell, problems: list[str]) -> list[Case]:
    """Record with one server; what is left once it has ended."""
    place = setting.folder / "server"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    switch, started = place / "injection", time.monotonic()
    arguments = ["--model-path", str(setting.target), "--speculative-algorithm", "EAGLE3",
                 "--speculative-draft-model-path", str(setting.head), *cases[0].arguments]  # fmt: skip
    made = prepare(ServeOptions(place / "recording", arguments, taps=TAPS, wiring=cases[0].wiring), {})
    environment = {RECORD_VARIABLE: made.environment[RECORD_VARIABLE], INJECTION_VARIABLE: str(switch)}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait leave the core to the one that works
    with start_server(
        setting.target, setting.head, log=place / "log", steps=setting.steps, topk=setting.topk,
        num_draft_tokens=setting.num_draft_tokens, extra_args=cases[0].arguments, env=environment,
        threads=setting.threads,
    ) as server:  # fmt: skip
        tell(f"a server is ready after {time.monotonic() - started:.0f} s")
        for number, case in enumerate(cases, start=1):
            try:
                _record(setting, case, server, switch, tell)
            except (ReplayError, ServerError) as error:
                shutil.copy(place / "log", setting.folder / f"{case.folder}.log")
                problems.append(f"{case.name}: {str(error).splitlines()[0]}")
                tell(problems[-1])
                return cases[number:]
    return []


def _record(setting: Setting, case: Case, server: Server, switch: Path, tell: Tell) -> None:
    started, folder = time.monotonic(), setting.folder / case.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    asked = folder / "prompts.jsonl"
    asked.write_text("\n".join(sample_prompts().read_text().splitlines()[case.first_prompt :: 6][: setting.prompts]))
    switch.write_text(case.injection)  # read before the next prefill; nothing is in flight
    options = ServerOptions(
        server.url, asked, folder / "trace", max_new_tokens=setting.new_tokens, concurrency=case.concurrency, retries=1
    )
    capture_server(options, lambda _: None)
    said = switch.with_name(switch.name + ACTIVE_SUFFIX)
    active = said.read_text() if said.exists() else NONE
    if active != case.injection:
        shutil.rmtree(folder / "trace")
        raise ServerError(f"{case.injection} was asked for, {active} was active")
    share_weights(setting.folder, folder / "trace" / "target.safetensors")
    write_case(setting.folder, case, how(setting))
    tell(f"{case.name}: {time.monotonic() - started:.0f} s")


def share_weights(folder: Path, weights: Path) -> None:
    """One copy of the target's weights for all recordings: a hard link wherever the bytes are those of the first."""
    first = folder / "target.safetensors"
    if not first.exists():
        os.link(weights, first)
    elif first.read_bytes() == weights.read_bytes():
        weights.unlink()
        os.link(first, weights)
