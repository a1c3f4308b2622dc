"""Whatever a Python caller passes, a public name works or raises a ReplayError of one sentence.

Each argument of each public function in turn is something else than it takes, the others being right.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.heads import INVENTED, write_head
from support.trace_maker import make_four, write_trace

import replay

_ODD = [None, "x", [], 3, -1, b"x", [None], {3: 3}]
_TIMES = ["batch=1,tok/s=90", "batch=1,steps=3,accept=2.1,tok/s=110"]
_UNTOUCHED = {"workers"}  # would start processes; tests/simulator/test_workers.py has its refusals
Call = tuple[Callable[..., object], Mapping[str, Any]]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Call]:
    """Public names, each with arguments that are right."""
    folder = tmp_path_factory.mktemp("refusals")
    write_trace(folder / "trace", [make_four()[:2]])
    draft = write_head(folder / "draft", INVENTED)
    (folder / "p.jsonl").write_text('{"input_ids": [1, 2]}')
    trace, head = replay.Trace.open(folder / "trace"), replay.load_head(draft)
    variants = replay.sweep(draft=["h"], steps=[1])
    rounds = replay.simulate(trace, {"h": head}, variants)
    config, parts = json.loads((draft / "config.json").read_text()), {"part": replay.Part(limit=1)}
    capture = {"prompts": folder / "p.jsonl", "out": folder / "out"}

    def record(**options: Any) -> object:
        return replay.capture_local(replay.CaptureOptions(**options), print)

    return {
        "CaptureOptions": (record, {"model": str(folder / "none"), **capture}),
        "Part": (lambda **given: trace.take(replay.Part(**given)), {}),
        "Rounds": (replay.Rounds, {name: getattr(rounds, name) for name in replay.Rounds.__slots__}),
        "Trace": (replay.Trace.open, {"path": folder / "trace"}),
        "Variant": (replay.Variant, {"draft": "h"}),
        "Wiring": (replay.Wiring, {"taps": ("embed", "3")}),
        "capture_engine": (replay.capture_engine, {"engine": None, **capture}),
        "capture_local": (replay.capture_local, {"options": None, "on_event": print}),
        "charts": (replay.charts, {"found": rounds}),
        "check_head": (replay.check_head, {"draft": draft, "target": folder / "none"}),
        "compare": (replay.compare, {"first": rounds, "second": rounds}),
        "diagnose": (replay.diagnose, {"trace": trace, "head": head, "observed": "none", "steps": 1, "ladder": False}),
        "head_from_tensors": (replay.head_from_tensors, {"config": config, "tensors": dict(head.tensors)}),
        "inspect": (replay.inspect, {"path": draft}),
        "load_head": (replay.load_head, {"folder": draft}),
        "parse_faults": (replay.parse_faults, {"text": "none"}),
        "parse_wiring": (replay.parse_wiring, {"text": "embed,3"}),
        "plan": (replay.plan, {"times": _TIMES}),
        "pool_rounds": (replay.pool_rounds, {"apart": {"a": rounds}}),
        "read_rounds": (replay.read_rounds, {"path": folder / "r.parquet"}),
        "render": (replay.render, {"rounds": rounds, "summaries": replay.summarise(rounds)}),
        "score": (replay.score, {"trace": trace, "weights": head, "config": config, "steps": 1}),
        "score_training": (replay.score_training, {"trainer": None, "trace": trace, "config": config}),
        "simulate": (replay.simulate, {"trace": trace, "checkpoints": {"h": head}, "variants": variants}),
        "summarise": (replay.summarise, {"rounds": rounds, "resamples": 2}),
        "summarise_by": (replay.summarise_by, {"rounds": rounds, "what": "category"}),
        "sweep": (replay.sweep, {"draft": ["h"], "steps": [1], "wiring": [None]}),
        "take_part": (replay.take_part, {"rounds": rounds, **parts}),
        "write_rounds": (replay.write_rounds, {"rounds": rounds, "path": folder / "w.parquet", "force": True}),
    }


def arguments(function: Callable[..., object], good: Mapping[str, Any]) -> list[str]:
    """Those that it names, and those of ``good``."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]
    return list(dict.fromkeys([*named, *good]))


@pytest.mark.parametrize("name", sorted(set(replay.__all__) - {"ReplayError"}))
def test_a_wrong_argument_is_refused_in_one_sentence(
    name: str, calls: dict[str, Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path that is taken is one from here
    function, good = calls[name]
    more = {"CaptureOptions": replay.CaptureOptions, "Part": replay.Part}.get(name, function)
    refused = 0
    for argument in sorted(set(arguments(more, good)) - _UNTOUCHED):
        for value in _ODD:
            try:
                function(**{**good, argument: value})
            except replay.ReplayError as error:
                refused += 1
                assert str(error) and "\n" not in str(error) and len(str(error)) < 1000, (argument, value)
    assert refused >= (3 if name == "parse_faults" else 5)


def test_a_bare_text_is_no_list(calls: dict[str, Call]) -> None:
    """Its letters would be read as names."""
    trace = calls["simulate"][1]["trace"]
    for wrong in (
        lambda: replay.Part(categories="math"),  # type: ignore[arg-type]
        lambda: replay.Part(requests="r-1"),  # type: ignore[arg-type]
        lambda: replay.Wiring("embed,3"),  # type: ignore[arg-type]
        lambda: replay.plan(times="batch=1,tok/s=90"),
        lambda: replay.plan(costs="pass=20,draft=1"),
        lambda: replay.simulate(trace, calls["simulate"][1]["checkpoints"], calls["simulate"][1]["variants"], only="r"),
        lambda: replay.sweep(draft="h"),
    ):
        with pytest.raises(replay.ReplayError, match=r"expected|takes a list"):
            wrong()


def test_a_chart_that_is_not_there_is_said(calls: dict[str, Call]) -> None:
    charts = replay.charts(calls["charts"][1]["found"])
    assert charts[-1] is charts[len(charts) - 1] and charts[0].heading == "Accept length"
    for key, said in ((99, f"chart 99 was asked for; there are {len(charts)}"), (None, "expected"), ("z", "no chart")):
        with pytest.raises(replay.ReplayError, match=said):
            _ = charts[key]  # type: ignore[call-overload]


def test_rounds_of_unlike_variants_are_not_pooled(calls: dict[str, Call]) -> None:
    trace, heads, one = calls["simulate"][1].values()
    rounds = replay.simulate(trace, heads, one)
    two = replay.simulate(trace, heads, replay.sweep(draft=["h"], steps=[1, 2]))
    with pytest.raises(replay.ReplayError, match="monday has 1 variant and tuesday has 2; replay each by itself"):
        replay.pool_rounds({"monday": rounds, "tuesday": two})
    with pytest.raises(replay.ReplayError, match="apart is empty"):
        replay.pool_rounds({})
    with pytest.raises(replay.ReplayError, match="not of these rounds"):
        replay.render(rounds, replay.summarise(two))
