"""The rounds behind the golden reports. Run as a program it writes tests/golden/report-*.txt anew: read them then."""

import io
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from support.rounds_maker import Accepted, make_rounds, make_variant

from replay.analysis.report.peers import peer_metrics, render_peers
from replay.analysis.report.report import render
from replay.analysis.summary import summarise
from replay.traces.agreement import Agreement
from replay.traces.rounds import Rounds

GOLDEN = Path(__file__).parents[1] / "golden"

STORY_TRACE: dict[str, Any] = {
    "path": "traces/story",
    "target": "SmolLM2-135M-Instruct",
    "model_type": "llama",
    "layers": 30,
    "hidden_size": 576,
    "dtype": "bfloat16",
    "engine": "sglang",
    "engine_version": "0.5.23",
    "taps": ["embed", "2", "3", "4", "14", "15", "16", "26", "27", "28", "final"],
    "missing": ["the logits of the prompts", "the server's own rounds"],
    "requests": 24,
    "wirings": {
        "embed,3,16": [
            {"engine": "SGLang 0.5.23", "ids": [-1, 2, 15], "note": ""},
            {"engine": "vLLM 0.32", "ids": [0, 3, 16], "note": ""},
            {"engine": "SpecForge 0.2", "ids": None, "note": "its ids are outputs of layers, the embedding has none"},
        ],
        "3,16,28": [
            {"engine": "SGLang 0.5.23", "ids": [2, 15, 27], "note": ""},
            {"engine": "vLLM 0.32", "ids": [3, 16, 28], "note": ""},
            {"engine": "SpecForge 0.2", "ids": [2, 15, 27], "note": ""},
        ],
    },
}


def _played(rate: float, *, steps: int, requests: int = 24, rounds: int = 30, seed: int = 0) -> Accepted:
    """Accepted counts of a head whose every token is right with ``rate``, from a generator fixed by the seed."""
    rng = random.Random(seed)
    played = []
    for _ in range(requests):
        accepted = []
        for _ in range(rounds):
            count = 0
            while count < steps and rng.random() < rate:
                count += 1
            accepted.append(count)
        played.append(accepted)
    return played


def single() -> Rounds:
    """One variant, enough requests, nothing to doubt."""
    variant = make_variant("story", steps=5, anchors=1700, anchors_accepted=1900)
    return make_rounds({variant: _played(0.55, steps=5, rounds=60)}, trace=STORY_TRACE | {"missing": []})


def doubtful() -> Rounds:
    """One variant and everything there is to doubt."""
    variant = make_variant("story", steps=5, anchors=240, anchors_accepted=420, ties=9, temperature=0.7)
    played = [*_played(0.55, steps=5, requests=6, rounds=8), []]
    observed = [*_played(0.1, steps=5, requests=5, rounds=14, seed=1), [], []]
    return make_rounds(
        {variant: played},
        observed=observed,
        cut_last=True,
        trace=STORY_TRACE,
        source="forced",
        temperature=0.7,
    )


def sweep() -> Rounds:
    """The story: the wiring costs a token a round, precision nothing that can be told; the server ran the wrong one."""
    good = _played(0.55, steps=5)
    near = [row if number else [*row[:-1], (row[-1] + 1) % 6] for number, row in enumerate(good)]
    bad = _played(0.12, steps=5, rounds=50, seed=2)
    right = {"steps": 5, "anchors": 1700, "anchors_accepted": 2100}
    return make_rounds(
        {
            make_variant("right", **right): good,
            make_variant("right float32", precision="float32", **right): near,
            make_variant("right unrefreshed", kv="stale", **right): good,
            make_variant("wrong", wiring=("3", "16", "28"), steps=5): bad,
            make_variant("wrong float32", wiring=("3", "16", "28"), steps=5, precision="float32"): bad,
        },
        observed=bad,
        trace=STORY_TRACE | {"missing": []},
    )


def served() -> Rounds:
    """One variant on a trace whose server's rounds are recorded, replayed on other hardware."""
    rounds = single()
    (variant,) = rounds.variants
    agreement = Agreement(1440, 1385, 55, 0, 0.12, 0.0156, 0.67, 7200, 56, 50.5)
    return replace(rounds, variants=(replace(variant, agreement=agreement),))


def rewired() -> Rounds:
    """A sweep in which no variant explains all rounds of the server, and one drafts in another shape."""
    rounds = sweep()
    counts = ((0, 2, 1198), (0, 2, 1198), None, (1190, 7, 3), (1102, 95, 3))
    agreements = [one and Agreement(1200, *one, 0.12, 0.0156, 0.67, 6000, 90, 41.5) for one in counts]
    pairs = zip(rounds.variants, agreements, strict=True)
    return replace(rounds, variants=tuple(replace(variant, agreement=one) for variant, one in pairs))


def many() -> Rounds:
    """Thirty-two variants of long names that differ in four facts."""
    facts = [
        {"wiring": wiring, "draft": f"heads/{draft}", "steps": steps, "faults": faults}
        for wiring in (("embed", "3", "16"), ("3", "16", "28"))
        for draft in ("epoch-1", "epoch-9")
        for steps in (1, 3, 5, 15)
        for faults in ((), ("wiring.aux-layer-id=+1",))
    ]
    played = {
        make_variant(f"v{number}", **changes): _played(
            0.6 - 0.01 * number, steps=changes["steps"], rounds=12, seed=number
        )
        for number, changes in enumerate(facts)
    }
    return make_rounds(played, trace=STORY_TRACE | {"missing": []})


def nothing() -> Rounds:
    """Requests whose whole output came from prefill."""
    return make_rounds({make_variant("story"): [[], [], []]}, trace=STORY_TRACE | {"missing": []})


CASES = {"single": single, "doubtful": doubtful, "sweep": sweep, "served": served, "rewired": rewired, "many": many,
         "nothing": nothing, "peers": single}  # fmt: skip


@cache
def report(case: str) -> RenderableType:
    """The renderable of one of ``CASES``, made once."""
    rounds = CASES[case]()
    if case == "peers":
        return render_peers(peer_metrics(rounds, rounds.variants[0].name))
    return render(rounds, summarise(rounds))


WIDTHS = (80, 120)


def plain(case: str, width: int) -> str:
    """The report of one of ``CASES`` on a colourless terminal of that width, without the spaces that fill its lines."""
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(report(case))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        for columns in WIDTHS:
            (GOLDEN / f"report-{name}-{columns}.txt").write_text(plain(name, columns), encoding="utf-8")
