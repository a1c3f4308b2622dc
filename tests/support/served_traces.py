"""Traces of a real server that drafts with the sample head or another one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rig.server import start_server

import replay
from replay.capture.client.capture import capture_server
from replay.capture.options import ServerOptions
from replay.capture.plugin.by_environment import TAPS, WIRING
from replay.capture.plugin.launch import ServeOptions, prepare
from replay.capture.plugin.recording import RECORD_VARIABLE
from replay.traces.sample_files import sample_head, sample_prompts


def served_trace(
    target_dir: Path, folder: Path, *, taps: str, wiring: str | None = None, topk: int = 1, steps: int,
    num_draft_tokens: int, prompts: int, new_tokens: int, concurrency: int = 1, extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None, head: Path | None = None, by_variables: bool = False,
) -> replay.Trace:  # fmt: skip
    """Some prompts of the demo, captured into ``folder`` from a server started for them, as by `replay serve`.

    ``by_variables``: the server's launcher gets the variables that a user sets, not what `replay serve` makes of them.
    ``wiring`` None: what the head states. ``concurrency`` requests are asked for at a time.
    """
    asked, head = folder / "prompts.jsonl", head or sample_head()
    asked.write_text("\n".join(sample_prompts().read_text().splitlines()[1::6][:prompts]))
    arguments = ["--model-path", str(target_dir), "--speculative-algorithm", "EAGLE3",
                 "--speculative-draft-model-path", str(head)]  # fmt: skip
    if by_variables:
        recording = {RECORD_VARIABLE: str(folder / "trace"), TAPS: taps, WIRING: wiring or ""}
    else:
        made = prepare(ServeOptions(folder / "trace", arguments, taps=taps, wiring=wiring), {})
        recording = {RECORD_VARIABLE: made.environment[RECORD_VARIABLE]}
    with start_server(
        target_dir, head, log=folder / "log", steps=steps, topk=topk, num_draft_tokens=num_draft_tokens,
        env={**recording, **(env or {})}, extra_args=extra_args,
    ) as server:  # fmt: skip
        options = ServerOptions(server.url, asked, folder / "trace", max_new_tokens=new_tokens, concurrency=concurrency)
        capture_server(options, lambda _: None)
    return replay.Trace.open(folder / "trace")
