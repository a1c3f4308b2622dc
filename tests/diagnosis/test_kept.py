"""A diagnosis with a cache: the same as one without, and one that was stopped goes on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.heads import invented_checkpoint, write_head
from support.here import Here
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served
from support.trace_maker import make_four, write_trace

from replay.analysis.diagnosis.document import to_json
from replay.capture.observed import Observed
from replay.cli.app import cli
from replay.diagnosis import diagnose, reference
from replay.diagnosis.diagnose import diagnose_server
from replay.engines.wiring import parse_wiring
from replay.errors import UsageError
from replay.faults.table import FAULTS
from replay.simulator import cache as module
from replay.simulator.variant import Variant
from replay.traces.reader import Trace

REST = set(FAULTS) - {"wiring.aux-layer-id", "attn.scale", "weights.zeros"}  # is left out: it only takes time
Counted = dict[str, int]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("kept") / "served"
    return Trace.open(make_served(folder, make_checkpoint(), "wiring.aux-layer-id=1", requests=2, output=8).path)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Variants that were replayed, by the way in which they were."""
    counts = {"simulate_with_notes": 0, "follow_server": 0}

    def count(where: Any, name: str) -> None:
        real = getattr(where, name)

        def counting(trace: Trace, heads: object, variants: list[Any], *more: Any, **named: Any) -> Any:
            counts[name] += len(variants)
            return real(trace, heads, variants, *more, **named)

        monkeypatch.setattr(where, name, counting)

    count(module, "simulate_with_notes")
    count(reference, "follow_server")
    return counts


@pytest.fixture(autouse=True)
def few_wirings(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more than time for them."""
    for room in ("search", "gains"):
        monkeypatch.setattr(f"replay.diagnosis.{room}.wirings", lambda _: [])


def told(trace: Trace, observed: Observed | None, **named: Any) -> str:
    asked: dict[str, Any] = {"observed": observed, "without": REST, "ladder": observed is not None, **named}
    found = diagnose_server(trace, make_checkpoint(), Variant("h", WIRING, STEPS), **asked)
    return json.dumps(to_json(found), sort_keys=True, default=str)


@pytest.mark.parametrize("observed", [None, Observed(1.9, "given")], ids=["drafts", "length"])
def test_a_diagnosis_with_a_cache_is_the_one_without_and_replays_nothing_twice(
    served: Trace, tmp_path: Path, counted: Counted, observed: Observed | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.diagnosis.advice._WIDEST", 10.0)  # two requests would be refused beside a length
    expected = told(served, observed)
    assert told(served, observed, cache=tmp_path / "c") == expected
    assert sum(counted.values()) > 0
    for name in counted:
        counted[name] = 0
    assert told(served, observed, cache=tmp_path / "c") == expected
    assert counted == {"simulate_with_notes": 0, "follow_server": 0}


def test_a_diagnosis_that_was_stopped_goes_on(
    served: Trace, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(diagnose, "conclude", stop)
        with pytest.raises(KeyboardInterrupt):
            told(served, None, cache=tmp_path / "c", ladder=False)
    before = counted["follow_server"]
    assert before > 10
    told(served, None, cache=tmp_path / "c", ladder=False)
    assert counted["follow_server"] - before < before / 4


def test_a_damaged_entry_is_said_once(served: Trace, tmp_path: Path) -> None:
    notes: list[str] = []
    few: dict[str, Any] = {"without": set(FAULTS), "ladder": False, "on_note": notes.append}
    expected = told(served, None, cache=tmp_path / "c", **few)
    assert notes == []
    for path in (tmp_path / "c").rglob("*.npz"):
        path.write_bytes(b"")
    assert told(served, None, cache=tmp_path / "c", **few) == expected
    assert len(notes) == 1 and "npz; what is damaged is replayed again" in notes[0]


def test_what_is_not_kept_and_who_rounds_otherwise_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    head, given = invented_checkpoint(), Observed(1.5, "given")
    folder = write_trace(tmp_path / "t", [make_four()], finish=False)
    trace, served = Trace.open(folder, allow_incomplete=True), Variant("head", parse_wiring("embed,2"), STEPS)
    monkeypatch.setattr(diagnose, "_explain", lambda case, *_: case)
    hands = Here(trace, {"head": head})
    asked: dict[str, Any] = {"observed": given, "on_note": notes.append, "workers": hands}
    case: Any = diagnose_server(trace, head, served, cache=tmp_path / "c", **asked)
    assert case.cache is None
    assert notes == [f"note: the recording of {folder} has not ended, so --cache keeps nothing of it"]
    other = replace(hands, kernels=("0.1", *hands.kernels[1:]))
    diagnose_server(trace, head, served, **(asked | {"workers": other}))
    assert len(notes) == 2 and "and 0.1): the training metric is made here" in notes[1]


def test_the_command_says_what_is_noted(served: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(*_: object, on_note: Callable[[str], None], **__: object) -> None:
        on_note("note: node a was lost")
        raise UsageError("that is all")

    monkeypatch.setattr(diagnose, "diagnose", note)
    head = str(write_head(tmp_path / "head", HEAD))
    done = CliRunner().invoke(cli, ["diagnose", str(served.path), "--draft", head])
    assert done.exit_code == 1 and "note: node a was lost" in done.stderr and "that is all" in done.stderr


def test_a_followed_replay_is_read_as_it_was(served: Trace, tmp_path: Path) -> None:
    from replay.simulator.kept import find_followed, keep_followed, say_followed

    case = diagnose.open_case(served, make_checkpoint(), Variant("h", WIRING, STEPS), None, None)
    heads = {"h": case.checkpoint}
    cache = module.open_cache(tmp_path / "c", served, heads, "cpu", agreement=False)
    assert cache is not None and case.observation.rounds is not None
    (made,) = reference.follow(case, [case.served], case.observation.rounds, (0.1, 0.3))
    asked = say_followed(case.observation.rounds, (0.1, 0.3), True)
    assert find_followed(cache, case.served, asked) is None
    keep_followed(cache, case.served, asked, made)
    read = find_followed(cache, case.served, asked)
    assert read is not None and repr(read) == repr(made)
    assert (read.margin_N.dtype, read.spread_NZ.shape) == (made.margin_N.dtype, made.spread_NZ.shape)
    assert (read.margin_N == made.margin_N).all() and (read.spread_NZ == made.spread_NZ).all()
    assert find_followed(cache, case.served, say_followed(case.observation.rounds, (0.1,), True)) is None
    assert find_followed(cache, replace(case.served, steps=1), asked) is None
    path = cache.place(case.served, asked, ".npz")
    path.write_bytes(path.read_bytes()[:-9])
    assert find_followed(cache, case.served, asked) is None
