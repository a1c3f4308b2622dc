"""replay compare: numbers against arithmetic on paper and an obvious loop, refusals, the command against the API."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from rich.console import Console
from support.rounds_maker import make_rounds, make_variant

from replay.analysis.compare.compare import Comparison, Pair, compare_variants
from replay.analysis.compare.doubts import doubts
from replay.analysis.compare.pairing import PairedRounds, pair_rounds
from replay.analysis.compare.report import answer, render_comparison
from replay.analysis.json_document import document
from replay.analysis.p_values import holm, two_sided
from replay.analysis.page.compared import write_comparison
from replay.analysis.view import View
from replay.cli.app import cli
from replay.errors import ReplayError, TraceError, UsageError
from replay.traces.rounds import Rounds, table_schema
from replay.traces.rounds_file import write_rounds

TRACE = {"path": "traces/story", "target": "tiny", "model_type": "llama", "layers": 4, "engine": "sglang"}


def one(variant: str, walks: dict[str, list[tuple[int, list[int], int]]], *, steps: int = 3, **facts: Any) -> Rounds:
    """``walks[request]`` lists (anchor, drafted, accepted)."""
    frame = make_rounds({make_variant(variant, steps=steps, **facts): [[0]] * len(walks)}, trace=TRACE)
    rows = [
        (variant, name, place, anchor, drafted, accepted, False)
        for name, walk in walks.items()
        for place, (anchor, drafted, accepted) in enumerate(walk)
    ]
    requests = tuple(
        replace(frame.requests[0], request_id=name, category="odd" if int(name[1:]) % 2 else "even", output_tokens=9)
        for name in walks
    )
    return replace(frame, table=pl.DataFrame(rows, schema=table_schema(), orient="row"), requests=requests)


# Outputs 1 2 3 ... at positions 11 12 13 ...: token = position - 10. A drafted 9 is wrong.
A = {
    "r1": [(10, [1, 2, 9], 2), (13, [4, 9, 9], 1), (15, [9, 9, 9], 0)],
    "r2": [(10, [9, 9, 9], 0), (11, [2, 3, 4], 3)],
}
B = {
    "r1": [(10, [1, 2, 3], 3), (14, [5, 9, 9], 1)],
    "r2": [(10, [9, 2, 9], 0), (11, [2, 9, 4], 1), (13, [4, 5, 9], 2)],
}


def paired(a: Rounds, b: Rounds, **options: Any) -> Pair:
    [pair] = compare_variants(pair_rounds(a, b), **options).pairs
    return pair


def test_numbers_made_on_paper() -> None:
    pair = paired(one("a", A), one("b", B))
    assert (pair.a.rounds, pair.a.accepted, pair.a.drafted, pair.a.accept_length) == (5, 6, 15, 11 / 5)
    assert (pair.b.rounds, pair.b.accepted, pair.b.drafted, pair.b.accept_length) == (5, 7, 15, 12 / 5)
    assert pair.difference == pytest.approx(1 / 5)
    # r1 twice: 6/3 -> 6/2, r2 twice: 5/2 -> 6/3, both: 11/5 -> 12/5.
    assert pair.ci95 == (pytest.approx(-0.5), pytest.approx(1.0))
    assert pair.verdict == "cannot tell"
    common = pair.anchors  # r1 at 10, r2 at 10 and 11
    assert (common.rounds, common.share_a, common.share_b) == (3, 3 / 5, 3 / 5)
    assert (common.accepted_a, common.accepted_b, common.a_more, common.equal, common.b_more) == (5, 4, 1, 1, 1)
    assert common.joint == ((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0))
    assert [(row.accepted_a, row.reached_a) for row in common.positions] == [(2, 3), (2, 2), (1, 2)]
    assert [(row.accepted_b, row.reached_b) for row in common.positions] == [(2, 3), (1, 2), (1, 1)]
    assert common.drafts is not None
    assert (common.drafts.parted, common.drafts.alike) == ((0, 2, 1), 0)
    assert (common.drafts.tokens_equal, common.drafts.tokens_different) == (6, 3)
    assert [(row.category, row.requests, row.difference) for row in pair.categories] == [
        ("odd", 1, 1.0),
        ("even", 1, -0.5),
    ]
    assert [(row.request_id, row.rounds_a, row.rounds_b) for row in pair.most_different] == [
        ("r1", 3, 2),
        ("r2", 2, 3),
    ]


def _walks(rng: random.Random, requests: int, rate: float) -> dict[str, list[tuple[int, list[int], int]]]:
    """Walks over outputs whose token at a position is the position."""
    walks = {}
    for number in range(requests):
        walk, anchor = [], 10
        while anchor < 60:
            drafted = [anchor + 1 + j if rng.random() < rate else -(1 + rng.randrange(2)) for j in range(3)]
            accepted = next((j for j in range(3) if drafted[j] < 0), 3)
            walk.append((anchor, drafted, accepted))
            anchor += accepted + 1
        walks[f"r{number}"] = walk
    return walks


@pytest.mark.parametrize("seed", range(5))
def test_an_obvious_loop_counts_the_same(seed: int) -> None:
    rng = random.Random(seed)
    a, b = _walks(rng, 6, 0.6), _walks(rng, 6, 0.4)
    pair = paired(one("a", a), one("b", b), seed=seed, resamples=300)
    met = [(x, y) for name in a for x in a[name] for y in b[name] if x[0] == y[0]]
    common = pair.anchors
    assert common.rounds == len(met)
    for i in range(4):
        for j in range(4):
            assert common.joint[i][j] == sum(x[2] == i and y[2] == j for x, y in met)
    assert common.drafts is not None
    tokens = [(m == n) for x, y in met for m, n in zip(x[1], y[1], strict=True)]
    assert (common.drafts.tokens_equal, common.drafts.tokens_different) == (sum(tokens), tokens.count(False))
    for place in range(3):
        assert common.drafts.parted[place] == sum(
            x[1][:place] == y[1][:place] and x[1][place] != y[1][place] for x, y in met
        )
    # The bootstrap again, one resample at a time: the same requests for both, sums before ratios.
    names, draws = list(a), np.random.default_rng(seed)
    lengths = {name: [[x[2] + 1 for x in walks[name]] for walks in (a, b)] for name in names}
    samples = []
    for _ in range(300):
        drawn = [names[int(place)] for place in draws.integers(6, size=6)]
        both = [[tokens for name in drawn for tokens in lengths[name][side]] for side in (0, 1)]
        samples.append(np.mean(both[1]) - np.mean(both[0]))
    assert pair.ci95 == pytest.approx(tuple(np.quantile(samples, [0.025, 0.975])))

    # The p value again: how far a little more of one request moves the difference, as a numeric derivative.
    def moved(name: str, more: float) -> float:
        weights = {other: 1 + more * (other == name) for other in names}
        one, two = (
            sum(weights[n] * sum(lengths[n][side]) for n in names)
            / sum(weights[n] * len(lengths[n][side]) for n in names)
            for side in (0, 1)
        )
        return two - one

    parts = [6 * (moved(name, 1e-5) - moved(name, -1e-5)) / 2e-5 for name in names]
    t = moved("", 0) / (np.std(parts, ddof=1) / 6**0.5)
    assert pair.p_value == pytest.approx(max(two_sided(t, 5), 2 / 2**6), rel=1e-6)


def test_swapping_the_two_flips_every_sign() -> None:
    rng = random.Random(7)
    a, b = one("a", _walks(rng, 8, 0.7)), one("b", _walks(rng, 8, 0.3))
    there, back = paired(a, b), paired(b, a)
    assert (there.verdict, back.verdict) == ("worse", "better")
    assert there.difference == -back.difference
    assert there.ci95 == pytest.approx((-back.ci95[1], -back.ci95[0]))
    assert there.p_value == back.p_value and there.within_1_percent is back.within_1_percent is False
    assert there.anchors.difference == -back.anchors.difference
    assert (there.anchors.a_more, there.anchors.b_more) == (back.anchors.b_more, back.anchors.a_more)
    assert np.array_equal(there.anchors.joint, np.transpose(back.anchors.joint))
    assert there.anchors.drafts == back.anchors.drafts


def test_a_file_against_itself_is_the_same() -> None:
    rounds = one("a", _walks(random.Random(1), 4, 0.5))
    pair = paired(rounds, rounds)
    assert (pair.verdict, pair.ci95, pair.p_value, pair.within_1_percent) == ("equal", (0.0, 0.0), 1.0, True)
    assert pair.anchors.share_a == pair.anchors.share_b == 1.0 and pair.anchors.equal == pair.a.rounds
    assert pair.anchors.drafts is not None and pair.anchors.drafts.tokens_different == 0
    assert pair.most_different == ()


def test_holm_on_paper() -> None:
    """Sorted 0.01, 0.02, 0.04 times 3, 2, 1, never falling: 0.03, 0.04, 0.04; nan counts for none."""
    found = holm({"x": 0.04, "none": float("nan"), "y": 0.01, "z": 0.02})
    assert (found["y"], found["z"], found["x"]) == (pytest.approx(0.03), pytest.approx(0.04), pytest.approx(0.04))
    assert np.isnan(found["none"])


def _several(differing: int) -> Comparison:
    """One variant that is a little better and others equal to the first, all in one file."""
    base = [[1, 2, 0], [0, 1, 1], [2, 2, 1], [1, 1, 1], [0, 0, 1], [3, 0, 1]]
    better = [[*row[:-1], row[-1] + 1] for row in base[:4]] + base[4:]
    played = {make_variant("first"): base, make_variant("more", kv="x"): better}
    mixed = [[1, 2, 0], [0, 1, 2], [2, 2, 0], [1, 1, 1], [0, 0, 1], [3, 0, 1]]
    for number in range(differing):
        played[make_variant(f"other {number}", kv=str(number))] = mixed
    return compare_variants(pair_rounds(make_rounds(played, trace=TRACE)))


def test_many_comparisons_ask_for_more() -> None:
    alone, among = _several(0).pairs[0], _several(40).pairs[0]
    assert alone.ci95 == among.ci95 and alone.ci95[0] > 0
    assert (alone.verdict, among.verdict) == ("better", "cannot tell")
    assert among.p_holm == pytest.approx(min(1.0, 41 * among.p_value))
    assert answer(_several(40)) == "41 variants against first: 41 cannot tell."


def _table(several: int, view: View) -> list[str]:
    """The lines of a report on so many variants that accept ever more, at full width."""
    played = {make_variant(f"v{place}", kv=str(place)): [[place % 4], [place % 3]] for place in range(several)}
    joined = pair_rounds(make_rounds(played, trace=TRACE))
    console = Console(width=500, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(render_comparison(compare_variants(joined, resamples=100), joined, view))
    return [line.rstrip() for line in capture.get().splitlines()]


def _rows(lines: list[str]) -> list[tuple[str, float]]:
    """Of each row of the first table the variant and its accept length."""
    found = [re.match(r"(?:A|B\d+) +(v\d+) +(\d\.\d{3}) ", line) for line in lines]
    return [(one[1], float(one[2])) for one in found if one]


def test_the_rows_of_many_variants_are_sorted_and_cut_as_asked() -> None:
    short = _rows(_table(5, View()))
    assert [name for name, _ in short] == [f"v{place}" for place in range(5)]
    lines = _table(20, View())
    a, *others = _rows(lines)
    assert a[0] == "v0" and len(others) == 19
    assert [length for _, length in others] == sorted((length for _, length in others), reverse=True)
    assert lines[-1] == lines[0]
    typed = _table(20, View(sort="typed", top=3))
    assert [name for name, _ in _rows(typed)] == ["v0", "v1", "v2", "v3"]
    assert "16 more variants are not shown" in typed and typed[-1] != typed[0]


def test_a_p_value_is_never_shown_as_0() -> None:
    played = {make_variant("a"): [[0, 1], [1, 0], [1, 1]] * 8, make_variant("b", kv="b"): [[3, 3], [3, 2], [2, 3]] * 8}
    played[make_variant("c", kv="c")] = [[0, 1], [1, 1], [1, 0]] * 8
    text = shown(pair_rounds(make_rounds(played, trace=TRACE)))
    assert "< 0.001 better" in text and " 0.000 " not in text.split("verdict")[1].split("rounds")[0]


def test_requests_of_one_file_only_are_left_out_and_named() -> None:
    comparison = compare_variants(pair_rounds(one("a", A), one("b", {"r1": B["r1"], "r7": B["r2"]})))
    assert (comparison.requests, comparison.only_a, comparison.only_b) == (1, ("r2",), ("r7",))
    assert comparison.pairs[0].a.rounds == 3 and comparison.pairs[0].b.rounds == 2
    assert any("the first rounds only (r2)" in doubt for doubt in doubts(comparison))


def test_trees_are_compared_without_their_tokens() -> None:
    tree = one("b", {"r1": [(10, [1, 9, 2, 9, 9], 2)], "r2": [(10, [9] * 5, 0)]}, topk=2, num_draft_tokens=6)
    pair = paired(one("a", A), tree)
    assert pair.anchors.drafts is None and pair.anchors.rounds == 2
    assert pair.a.rounds == 5 and pair.b.rounds == 2


def _refusals() -> dict[str, tuple[type[ReplayError], str, Rounds, Rounds | None, dict[str, str]]]:
    a, b = one("a", A), one("b", B)
    longer = replace(b, requests=(replace(b.requests[0], prompt_tokens=11), b.requests[1]))
    other = {"r1": [(10, [1, 7, 3], 3), (14, [5, 9, 9], 1)], "r2": B["r2"]}
    two = make_rounds({make_variant("x"): [[1], [2]], make_variant("y", kv="y"): [[1], [2]]}, trace=TRACE)
    big = replace(b, trace={**TRACE, "target": "big"})
    told = "emitted token 2 at position 12 of request 'r1' in the first and 7"
    several = "the first rounds file has 2 variants, 'x', 'y'; type one of them after --variant-a"
    return {
        "target": (TraceError, "target is 'tiny' in the first and 'big'", a, big, {}),
        "prompt": (TraceError, "prompt tokens of request 'r1' is 10 in the first and 11", a, longer, {}),
        "tokens": (TraceError, told, a, one("b", other), {}),
        "requests": (UsageError, "no request is in both", a, one("b", {"r8": B["r1"]}), {}),
        "alone": (UsageError, "has one variant, two are needed", a, None, {}),
        "which": (UsageError, several, two, b, {}),
        "unknown": (
            UsageError,
            "the second rounds file has no variant 'c', it has 'b'; type one of them after --variant-b",
            a,
            b,
            {"variant_b": "c"},
        ),
    }


@pytest.mark.parametrize("case", _refusals())
def test_what_cannot_be_compared_is_refused(case: str) -> None:
    kind, said, first, second, names = _refusals()[case]
    with pytest.raises(kind, match=said):
        pair_rounds(first, second, **names)


def test_the_command_names_the_file_that_it_asks_about(tmp_path: Path) -> None:
    several = make_rounds({make_variant("x"): [[1], [2]], make_variant("y", kv="y"): [[1], [2]]}, trace=TRACE)
    write_rounds(several, tmp_path / "several.parquet")
    write_rounds(one("b", B), tmp_path / "single.parquet")
    several_path, single = (str(tmp_path / f"{name}.parquet") for name in ("several", "single"))
    for typed, said in (
        ((several_path, single), f"{several_path} has 2 variants, 'x', 'y'; type one of them after --variant-a"),
        ((single, several_path, "--variant-b", "z"), f"{several_path} has no variant 'z', it has 'x', 'y'; type one"),
        ((single,), f"{single} has one variant, two are needed to compare"),
    ):
        done = CliRunner().invoke(cli, ["compare", *typed])
        assert done.exit_code == 1 and done.stderr.startswith(f"replay: {said}")


def test_the_command_says_what_the_api_says(tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(3):
        rounds = [one(name, _walks(rng, rng.randint(2, 5), rng.random())) for name in "ab"]
        paths = [tmp_path / f"{name}.parquet" for name in "ab"]
        for item, path in zip(rounds, paths, strict=True):
            write_rounds(item, path, force=True)
        done = CliRunner().invoke(cli, ["compare", *map(str, paths), "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout) == document(
            compare_variants(pair_rounds(*rounds)).to_json()
        )
        assert CliRunner().invoke(cli, ["compare", *map(str, paths)]).exit_code == 0
    same = CliRunner().invoke(cli, ["compare", str(paths[0]), str(paths[0])])
    assert same.exit_code == 0 and same.stdout.startswith("B (a) accepts the same as A (a)")


@pytest.mark.parametrize(
    ("drafts", "paths", "named"),
    [
        (("epoch-1", "epoch-9"), ("/a/epoch-1", "/a/epoch-9"), ("epoch-1 · x", "epoch-9 · y")),
        (("draft", "draft"), ("/a/draft", "/b/draft"), ("draft in a · x", "draft in b · y")),
        (("draft", "draft"), ("/a/draft", "/a/draft"), ("x", "y")),
    ],
)
def test_heads_of_two_files_are_told_apart(
    drafts: tuple[str, str], paths: tuple[str, str], named: tuple[str, str]
) -> None:
    """Two variants of other wirings: their names alone would not say that the heads are others too."""
    files = [
        replace(
            make_rounds({make_variant(name, draft=draft): [[0, 1], [2]]}, trace=TRACE), drafts={draft: {"path": path}}
        )
        for name, draft, path in zip("xy", drafts, paths, strict=True)
    ]
    comparison = compare_variants(joined := pair_rounds(*files))
    (pair,) = comparison.pairs
    assert (pair.a.variant, pair.b.variant) == named and named[1] in shown(joined)
    assert named[1] in write_comparison(comparison, "")


def test_the_steps_of_two_files_are_named_where_no_name_says_them() -> None:
    """Each file has one depth, so its names, made by itself, tell its wirings alone."""
    wirings = {"embed,3,16": ("embed", "3", "16"), "3,16,28": ("3", "16", "28")}

    def file(steps: int, *named: str, **more: Any) -> Rounds:
        variants = [make_variant(name, steps=steps, wiring=wirings[name.split()[0]], **more) for name in named]
        return make_rounds({variant: [[0, 1], [1]] for variant in variants}, trace=TRACE)

    def names(*files: Rounds) -> list[str]:
        pairs = compare_variants(pair_rounds(*files)).pairs
        return [pairs[0].a.variant, *(pair.b.variant for pair in pairs)]

    told = names(file(3, "embed,3,16"), file(5, "3,16,28", "embed,3,16"))
    assert told[1] == "3,16,28 steps=5" and all(
        name.startswith(f"embed,3,16 steps={steps}") for name, steps in ((told[0], 3), (told[2], 5))
    )
    assert names(file(3, "embed,3,16"), file(3, "3,16,28")) == ["embed,3,16", "3,16,28"]
    assert names(file(3, "embed,3,16"), file(5, "3,16,28 steps=5")) == ["embed,3,16 steps=3", "3,16,28 steps=5"]


def test_a_report_says_which_is_which() -> None:
    """The letters of the table are those of the provenance, and two files say which of them it was."""
    a, b = one("x", A), one("x", B)
    [pair] = compare_variants(joined := pair_rounds(a, b)).pairs
    assert (pair.a.variant, pair.b.variant) == ("x", "x")  # their own names, as in the files
    assert {name: joined.shown[name] for name in ("A", "B")} == {"A": "x", "B": "x"}
    text = shown(joined)
    assert "B (x) cannot be told from A (x)" in text
    assert "A x · first file" in text and "B x · second file" in text
    three = {make_variant(name, kv=name): [[1], [place]] for place, name in enumerate("uvw")}
    text = shown(pair_rounds(make_rounds(three, trace=TRACE)))
    for named in ("A u", "B1 v", "B2 w"):
        assert text.count(f" {named} ") == 3  # in two tables and the provenance
    assert " file " not in text


def test_one_name_for_two_variants_is_told_apart() -> None:
    """Files name their variants each by itself: what differs is added, and nothing to a name that has no double."""
    sound = make_rounds({make_variant("x"): [[1], [2]]}, trace=TRACE)
    played = {
        make_variant("x", faults=("kv.rollback=stale", "position.offset=1")): [[1], [2]],
        make_variant("y", kv="slot"): [[1], [2]],
    }
    [first, second] = compare_variants(pair_rounds(sound, make_rounds(played, trace=TRACE))).pairs
    assert first.a.variant == "x no fault" and first.b.variant == "x kv.rollback=stale+position.offset=1"
    assert second.b.variant == "y"


def shown(joined: PairedRounds) -> str:
    """The report at 80 columns, white space folded."""
    console = Console(width=80, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(render_comparison(compare_variants(joined), joined))
    return " ".join(capture.get().split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_report_fits_the_terminal(width: int) -> None:
    rng = random.Random(5)
    joined = pair_rounds(one("a", _walks(rng, 5, 0.6)), one("b", _walks(rng, 5, 0.5)))
    console = Console(width=width, color_system=None, record=True, quiet=False, file=None, _environ={})
    with console.capture() as capture:
        console.print(render_comparison(compare_variants(joined), joined))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for part in ("The same anchors", "By category", "Requests that differ most", "Doubts", "Provenance"):
        assert part in text
