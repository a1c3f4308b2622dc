"""Traces that hold less by choice, made of whole ones: the same requests, rounds and weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from replay.capture.kept import Kept
from replay.traces.copying import captured_request
from replay.traces.header import FP8, VERSION, TapInfo
from replay.traces.reader import Trace
from replay.traces.taps import FINAL
from replay.traces.writer import TraceWriter


def make_less(
    folder: Path,
    trace: Trace,
    *,
    taps_for: int | None = None,
    then: Sequence[str] = (),
    rows: str = "exact",
    prompt_rows: int | None = None,
    version: int = VERSION,
) -> Trace:
    """``trace`` as `replay capture` would have written it with these choices."""
    header = trace.header
    taps = tuple(header.taps)
    first = None if taps_for is None else frozenset(record.request_id for record in trace.records[:taps_for])
    kept = Kept(taps, (*then, FINAL), first, prompt_rows, rows)
    infos = {
        name: TapInfo(FP8, info.width) if rows == "fp8" and name != FINAL else info
        for name, info in header.taps.items()
    }
    asked = replace(
        header.capture, taps_for=taps_for, then_taps=tuple(then) if taps_for else (), rows=rows, prompt_rows=prompt_rows
    )
    with TraceWriter.create(folder, replace(header, taps=infos, capture=asked, version=version)) as writer:
        tied = header.target.tie_word_embeddings
        writer.write_target_weights(trace.embed_weight(), None if tied else trace.lm_head_weight())
        if len(rounds := trace.served_rounds()):
            writer.add_rounds(rounds)
        made = [captured_request(trace, index) for index in range(len(trace))]
        writer.add([
            kept.cut(replace(one, taps={tap: one.taps[tap] for tap in taps if tap in kept.taps_of(one.request_id)}))
            for one in made
        ])  # fmt: skip
        writer.finish()
    return Trace.open(folder)
