"""replay plan: costs against known machines, published tables, bounds, refusals, files of benchmarks, the command.

Published numbers are facts of the threads that are named; nothing here was fitted to them.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.rounds_maker import make_rounds, make_variant

import replay
from replay.analysis.plan.ask import Planned, Question, answer_question, read_costs
from replay.analysis.plan.benchmarks import read_benchmark
from replay.analysis.plan.costs import possible_machines, typed_costs
from replay.analysis.plan.lengths import Length, lengths_of_rounds, with_bounds
from replay.analysis.plan.plan import Row
from replay.analysis.plan.report import answer, doubts
from replay.analysis.plan.schedules import sglang_schedule
from replay.analysis.plan.settings import MOST_STEPS, PLAIN, Load, Setting, make_setting
from replay.analysis.plan.timings import Timing, join_timings, typed_timing
from replay.cli.app import cli
from replay.errors import UsageError
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds
from replay.verify.rules import MAX_STEPS

# A machine that is known: milliseconds by term, no context.
TRUTH = {"pass": 20.0, "row": 0.3, "rest": 4.0, "draft": 1.5, "draft-row": 0.05}
# vllm-project/vllm#20780: Llama 3.1 8B, batch 1, TPOT in ms without speculation, then by K accept length and TPOT.
VLLM_PLAIN = 7.07
VLLM_EAGLE_3 = {2: (2.36, 4.32), 3: (2.79, 4.09), 4: (3.08, 4.05), 5: (3.32, 4.13), 6: (3.46, 4.2), 7: (3.54, 4.29)}
VLLM_EAGLE_1 = {2: (2.1, 4.37), 3: (2.29, 4.29), 4: (2.39, 4.48), 5: (2.43, 4.71), 6: (2.45, 4.94), 7: (2.47, 5.2)}


def truth_ms(setting: Setting, load: Load) -> float:
    """A round of TRUTH, term by term as docs/plan.md has it."""
    rows = load.batch * (setting.steps + 1)
    target = TRUTH["pass"] + TRUTH["row"] * rows
    if not setting.steps:
        return target
    return target + TRUTH["rest"] + setting.steps * (TRUTH["draft"] + TRUTH["draft-row"] * load.batch)


def timed(steps: int, batch: int, accept: float = 1.0) -> Timing:
    setting, load = make_setting(steps), Load(batch)
    return Timing(setting, load, truth_ms(setting, load) / 1000, accept, "made")


def plan(*times: str, **options: object) -> Planned:
    return asked(Question(times=times, **options))  # type: ignore[arg-type]


def asked(question: Question, table: Rounds | None = None) -> Planned:
    return answer_question(question, read_costs(question), table, "rounds")


def row(planned: Planned, steps: int, batch: int = 1) -> Row:
    found = [row for row in planned.plan.rows if (row.setting.steps, row.load.batch) == (steps, batch)]
    assert len(found) == 1
    return found[0]


# ---- costs ----


def test_timings_that_determine_a_machine_predict_what_was_not_timed() -> None:
    seen = [timed(0, 1), timed(0, 32), timed(1, 1, 1.6), timed(5, 1, 2.2), timed(5, 32, 2.2), timed(1, 32, 1.6)]
    asked = [(make_setting(steps), Load(batch)) for steps in (0, 1, 3, 7) for batch in (1, 4, 16, 32)]
    machines = possible_machines(seen, {}, asked)
    for setting, load in asked:
        seconds = machines.seconds(setting, load)
        assert seconds.min() <= truth_ms(setting, load) / 1000 <= seconds.max()
        assert (seconds.min() + seconds.max()) / 2 == pytest.approx(truth_ms(setting, load) / 1000, rel=0.03)
    assert machines.misfit == pytest.approx(0, abs=1e-6)


def test_every_corner_meets_every_timing_within_its_error() -> None:
    seen = [timed(0, 1), timed(5, 1, 2.0), timed(5, 16, 2.0)]
    machines = possible_machines(seen, {}, [(make_setting(3), Load(64))])
    for timing in seen:
        share = machines.seconds(timing.setting, timing.load) / timing.seconds
        assert np.abs(share - 1).max() <= timing.error + 1e-5
    assert (machines.corners >= 0).all()


def test_what_the_timings_leave_open_is_a_wide_range_that_holds_the_truth() -> None:
    """Two timings at batch 1 cannot say how a round grows with the batch."""
    found = row(plan("ms=20.3", f"steps=3,accept=2,ms={truth_ms(make_setting(3), Load(1))}", batch="64"), 3, 64)
    true = truth_ms(make_setting(3), Load(64))
    assert found.round_ms.low <= true <= found.round_ms.high
    assert not found.round_ms.known


@pytest.mark.parametrize("times", [["steps=5,accept=1.8,tok/s=54.8"], ["batch=2,steps=3,accept=2,ms=20"]])
def test_without_a_plain_timing_it_cannot_be_told_whether_it_pays(times: list[str]) -> None:
    """As of the log of a server that drafts."""
    planned = plan(*times, steps="1,2")
    (choice,) = planned.plan.choices
    assert choice.advice == "cannot tell" and choice.measure == PLAIN
    assert all(row.speedup is None and row.setting.speculates for row in planned.plan.rows)
    assert "no timing says what a step without speculation takes" in answer(planned.plan, choice)
    assert json.loads(json.dumps(planned.to_json()["choices"]))


def test_timings_of_different_machines_are_in_doubt() -> None:
    planned = plan("ms=10", "batch=2,ms=10.1", "batch=4,ms=15", "steps=2,accept=2,ms=15", "batch=8,ms=9")
    assert planned.plan.misfit > 0.1
    assert any("No cost model" in doubt for doubt in doubts(planned.plan))


def test_typed_costs_alone_are_the_machine() -> None:
    """The step time that a user fitted by hand in vllm-project/vllm#47277: 37.7 + 35 + 26 k ms."""
    planned = plan(costs=["pass=37.7,rest=35", "draft=26"], lengths=["steps=3,accept=2.4"])
    assert row(planned, 0).round_ms.value == pytest.approx(37.7)
    assert row(planned, 3).round_ms.value == pytest.approx(37.7 + 35 + 3 * 26)
    assert row(planned, 3).break_even.value == pytest.approx((37.7 + 35 + 78) / 37.7)  # type: ignore[union-attr]
    assert planned.plan.choices[0].advice == "do not speculate"


def test_joined_timings_are_the_median_and_trusted_by_their_spread() -> None:
    seconds = [0.010, 0.011, 0.012, 0.013, 0.020]
    joined = join_timings([Timing(PLAIN, Load(4), second, 1.0, "log") for second in seconds])
    assert len(joined) == 1 and joined[0].seconds == 0.012 and joined[0].count == 5
    # Quartiles 0.011 and 0.013: 1.57 x 0.002 / sqrt(5) of 0.012.
    assert joined[0].error == pytest.approx(1.57 * 0.002 / math.sqrt(5) / 0.012)


# ---- published tables: two settings and the time without speculation, then the others ----


@pytest.mark.parametrize("table", [VLLM_EAGLE_3, VLLM_EAGLE_1])
@pytest.mark.parametrize("known", [(2, 7), (3, 7), (2, 5)])
def test_a_published_table_is_predicted_from_two_of_its_settings(
    table: dict[int, tuple[float, float]], known: tuple[int, int]
) -> None:
    times = [f"steps={k},accept={table[k][0]},tpot={table[k][1]}" for k in known]
    others = [k for k in table if k not in known]
    lengths = [f"steps={k},accept={table[k][0]}" for k in others]
    planned = plan(f"tpot={VLLM_PLAIN}", *times, lengths=lengths)
    errors = [abs(row(planned, k).token_ms.value / table[k][1] - 1) for k in others]
    assert np.median(errors) < 0.05
    best = min(table, key=lambda k: table[k][1])
    choice = planned.plan.choices[0]
    assert choice.advice == "speculate"
    assert make_setting(best) in (choice.best.setting, *choice.alike)


def test_the_story_does_not_pay_at_any_depth() -> None:
    """90.0 tok/s without, 54.8 at accept length 1.8 with 5 steps, 46.7 at 1.9 with 15, on eight ranks."""
    story = ("tok/s=90", "steps=5,accept=1.8,tok/s=54.8", "steps=15,accept=1.9,tok/s=46.7")
    planned = plan(*story, steps="1,2,3,4,6,7,8,9,10,11,12,13,14")
    choice = planned.plan.choices[0]
    assert choice.advice == "do not speculate" and choice.alike == ()
    # Arithmetic on paper: 1.8 / 54.8 s a round against 1 / 90 s.
    assert row(planned, 5).break_even.value == pytest.approx(1.8 / 54.8 * 90)  # type: ignore[union-attr]
    assert row(planned, 15).break_even.value == pytest.approx(1.9 / 46.7 * 90)  # type: ignore[union-attr]
    for steps in range(1, 16):
        assert row(planned, steps).speedup.high < 1  # type: ignore[union-attr]
    assert answer(planned.plan, choice).startswith("Batch 1: do not speculate. Without it 90.0 tok/s")


# ---- accept lengths ----


def chain_rounds(*depths: int) -> dict[Setting, Length]:
    """Each request accepts the same run of tokens under every depth, up to the depth."""
    walks = [[3, 0, 5, 1], [2, 2, 0, 4], [5, 5, 1, 0], [0, 1, 0, 2]]
    played = {make_variant(f"k{k}", steps=k): [[min(count, k) for count in walk] for walk in walks] for k in depths}
    return lengths_of_rounds(make_rounds(played), None)


def test_lengths_of_rounds_are_their_means_with_paired_draws() -> None:
    found = chain_rounds(1, 3, 5)
    assert found[make_setting(5)].value == pytest.approx(1 + 31 / 16)
    assert found[make_setting(1)].value == pytest.approx(1 + 11 / 16)
    assert (found[make_setting(1)].draws <= found[make_setting(3)].draws).all()  # the same requests in each draw
    assert found[PLAIN].value == 1


def test_bounds_hold_what_other_depths_accept() -> None:
    """The bounds from one depth, against the same walks cut at every other depth (anchors are the same here)."""
    every = chain_rounds(1, 2, 3, 4, 5)
    for known in range(1, 6):
        length = every[make_setting(known)]
        point = Length(length.value, (length.value, length.value), length.draws, "rounds")
        bounded = with_bounds({make_setting(known): point}, [make_setting(k) for k in range(1, 6)])
        for k in range(1, 6):
            low, high = bounded[make_setting(k)].ci95
            assert low - 1e-9 <= every[make_setting(k)].value <= high + 1e-9, (known, k)


def test_rounds_that_differ_in_more_than_depth_need_a_name() -> None:
    mixed = make_rounds(
        {
            make_variant("a1", steps=1): [[1, 0]],
            make_variant("a3", steps=3): [[3, 0]],
            make_variant("b3", steps=3, wiring=("embed", "2", "16")): [[1, 1]],
        }
    )
    with pytest.raises(UsageError, match="--variant"):
        lengths_of_rounds(mixed, None)
    assert set(lengths_of_rounds(mixed, "a3")) == {PLAIN, make_setting(1), make_setting(3)}
    with pytest.raises(UsageError, match="no variant is called c"):
        lengths_of_rounds(mixed, "c")


def test_settings_that_requests_do_not_tell_apart_are_named_together() -> None:
    """One step and two accept the same here and cost nearly the same."""
    played = {make_variant(f"k{k}", steps=k): [[1, 0, 1]] * 10 + [[0, 1, 1]] * 10 for k in (1, 2)}
    table = make_rounds(played)
    choice = asked(Question(costs=["pass=20,draft=0.001"], batch="1"), table).plan.choices[0]
    assert choice.advice == "speculate"
    assert choice.best.setting.steps == 1 and choice.alike == ()  # two steps cost more for the same, in every draw
    dearer = asked(Question(times=["ms=20", "steps=1,ms=20.5"]), table).plan.choices[0]
    assert {setting.steps for setting in (dearer.best.setting, *dearer.alike)} == {1, 2}


def test_bounded_depths_are_not_told_apart_by_their_middles() -> None:
    """3 and 7 steps are bounded by 5: what is possible at 3 steps beats what is possible at 7."""
    choice = plan(lengths=["steps=5,accept=3"], costs=["pass=30,draft=1.5"], steps="3,7").plan.choices[0]
    assert {setting.steps for setting in (choice.best.setting, *choice.alike)} == {3, 5, 7}


def test_accept_lengths_that_cannot_be_together_leave_no_bound() -> None:
    with pytest.raises(UsageError, match="leave none for 3 steps"):
        plan(lengths=["steps=2,accept=2.9", "steps=5,accept=2"], costs=["pass=30"], steps="3")


def test_a_single_request_tells_no_settings_apart() -> None:
    table = make_rounds({make_variant(f"k{k}", steps=k): [[min(c, k) for c in (3, 0, 5, 1)]] for k in (1, 5)})
    planned = asked(Question(costs=["pass=20,draft=1"]), table)
    assert {row.setting.steps for row in planned.plan.rows if math.isnan(row.accept_length.low)} == {1, 5}
    choice = planned.plan.choices[0]
    assert choice.advice == "cannot tell" and {0, 1, 5} == {s.steps for s in (choice.best.setting, *choice.alike)}
    assert any("1 request" in doubt for doubt in doubts(planned.plan, planned.requests))


def test_chains_and_trees_of_one_sweep_are_planned_together() -> None:
    tree = make_variant("tree", steps=3, topk=2, num_draft_tokens=8, kv="slot")
    table = make_rounds({make_variant("chain", steps=3): [[1, 2], [0, 3]], tree: [[2, 2], [1, 3]]})
    assert set(lengths_of_rounds(table, None)) == {PLAIN, make_setting(3), Setting(3, 2, 8)}


def test_depths_of_a_head_that_drafts_blocks_do_not_bound_each_other() -> None:
    table = make_rounds({make_variant("k3", steps=3): [[1, 2], [0, 3]]})
    table = replace(table, drafts={table.variants[0].draft: {"family": "DFlash"}})
    with pytest.raises(UsageError, match="says nothing of others"):
        asked(Question(costs=["pass=20"], steps="2"), table)


# ---- what is typed ----


@pytest.mark.parametrize(
    ("typed", "seconds", "accept"),
    [
        ("tok/s=90", 1 / 90, 1.0),
        ("batch=8,tok/s=400", 8 / 400, 1.0),
        ("batch=4,steps=3,accept=2.5,tok/s=500", 4 * 2.5 / 500, 2.5),
        ("steps=3,accept=2.5,tpot=4", 2.5 * 0.004, 2.5),
        ("steps=3,ms=30", 0.030, None),
    ],
)
def test_a_typed_timing_is_seconds_of_a_round(typed: str, seconds: float, accept: float | None) -> None:
    found = typed_timing(typed)
    assert found.seconds == pytest.approx(seconds) and found.accept_length == accept


@pytest.mark.parametrize(
    "typed",
    ["", "tok/s", "tok/s=x", "tok/s=-1", "tok/s=0", "tok/s=nan", "tok/s=1e999", "steps=3,tok/s=50", "batch=0,ms=1",
     "batch=1.5,ms=1", "steps=3,accept=9,ms=3", "accept=2,ms=3", "ms=1,ms=2", "ms=1,tok/s=2", "speed=3", "steps=3",
     "steps=2,topk=4,ms=3", "steps=2,topk=4,draft_tokens=1,ms=3"],
)  # fmt: skip
def test_a_timing_that_means_nothing_is_refused(typed: str) -> None:
    with pytest.raises(UsageError):
        typed_timing(typed)


@pytest.mark.parametrize("typed", ["pass", "passes=3", "pass=x", "pass=1,pass=2", ""])
def test_a_cost_that_means_nothing_is_refused(typed: str) -> None:
    with pytest.raises(UsageError):
        typed_costs([typed])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no timing"),
        ({"times": ["tok/s=90"]}, "no accept length"),
        ({"lengths": ["steps=3,accept=2"]}, "no timing"),
        ({"lengths": ["steps=3"], "costs": ["pass=1"]}, "accept=L"),
        ({"costs": ["pass=1"], "lengths": ["steps=3,accept=2"], "batch": "1,x"}, "--batch"),
        ({"costs": ["pass=1"], "lengths": ["steps=3,accept=2"], "steps": "0"}, "--steps"),
        ({"times": ["ms=9,context=10", "ms=8", "steps=3,accept=2,ms=9"], "batch": "1"}, "several contexts"),
        ({"costs": ["pass=1"], "lengths": ["steps=3,accept=2"], "variant": "v"}, "--variant"),
        ({"costs": ["pass=9"], "lengths": ["steps=3,accept=2", "steps=3,accept=2.5"]}, "twice"),
        ({"costs": ["draft=26"], "lengths": ["steps=3,accept=2"]}, "type pass=MS"),
        ({"costs": ["pass=0,draft=0"], "lengths": ["steps=3,accept=2"]}, "type pass=MS"),
        ({"costs": ["pass=1,kv=0.1"], "lengths": ["steps=3,accept=2"]}, "--context"),
        ({"costs": ["pass=100"], "times": ["ms=1"], "lengths": ["steps=3,accept=2"]}, "no server has all"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(Question(**options))  # type: ignore[arg-type]


# ---- files of benchmarks ----


# Lines as SGLang 0.5.23 writes them, metrics_reporter.py; invented numbers.
def decode(running: int, length: float, speed: float) -> str:
    return (
        f"[2026-11-02 10:00:02] Decode batch, #running-req: {running}, #token: 40, token usage: 0.00, accept len: "
        f"{length:.2f}, accept rate: 0.33, cuda graph: True, gen throughput (token/s): {speed:.2f}, #queue-req: 0"
    )


LOG = [
    "[2026-11-02 10:00:00] server_args=ServerArgs(model_path='m', speculative_algorithm='EAGLE3', "
    "speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)",
    "[2026-11-02 10:00:01] Prefill batch, #new-seq: 2, #new-token: 20, #cached-token: 0, token usage: 0.00",
    decode(2, 2.0, 1.0),  # the prefill is in this interval
    decode(2, 2.0, 100.0),
    decode(1, 3.0, 70.0),  # the batch changed in this one
]


def test_a_log_gives_intervals_in_which_nothing_was_prefilled(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("\n".join(LOG))
    found = read_benchmark(str(tmp_path / "server.log"))
    assert [(t.setting, t.load.batch, t.seconds, t.accept_length) for t in found] == [
        (make_setting(3), 2, pytest.approx(2 * 2.0 / 100), 2.0)
    ]


def test_lines_of_bench_speculative(tmp_path: Path) -> None:
    rows = [
        {"batch_size": 1, "steps": 0, "topk": 0, "num_draft_tokens": 0, "acc_length": 1.0, "step_time": 0.010,
         "speed": 100.0, "completion_tokens": 512.0},
        {"batch_size": 4, "steps": 3, "topk": 2, "num_draft_tokens": 8, "acc_length": 2.5, "step_time": 0.020,
         "speed": 125.0, "completion_tokens": 512.0},
    ]  # fmt: skip
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_benchmark(str(path))
    assert [(t.setting, t.load.batch, t.seconds, t.accept_length) for t in found] == [
        (PLAIN, 1, 0.010, 1.0), (Setting(3, 2, 8), 4, 0.020, 2.5),
    ]  # fmt: skip


def test_bench_serving_and_vllm_say_a_token_s_time(tmp_path: Path) -> None:
    sglang = {"mean_tpot_ms": 5.0, "concurrency": 7.9, "max_concurrency": 8, "accept_length": 2.0,
              "server_info": {"speculative_num_steps": 5, "speculative_eagle_topk": 1}}  # fmt: skip
    vllm = {"mean_tpot_ms": 4.0, "max_concurrency": 16, "spec_decode_acceptance_length": 2.5}
    for name, document in (("s.json", sglang), ("v.json", vllm)):
        (tmp_path / name).write_text(json.dumps(document))
    (found,) = read_benchmark(str(tmp_path / "s.json"))
    assert (found.setting, found.load.batch, found.seconds) == (make_setting(5), 8, pytest.approx(0.010))
    with pytest.raises(UsageError, match="steps=N"):
        read_benchmark(str(tmp_path / "v.json"))
    (found,) = read_benchmark(f"{tmp_path / 'v.json'}:steps=3")
    assert (found.setting, found.load.batch, found.seconds) == (make_setting(3), 16, pytest.approx(0.010))


@pytest.mark.parametrize("name", ["run:a=1.json", "v:steps=3", "a=b", "a,b:c=1", "one:more"])
def test_a_file_may_be_called_as_what_is_typed_behind_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"mean_tpot_ms": 4.0, "max_concurrency": 16, "spec_decode_acceptance_length": 2.5}')
    with pytest.raises(UsageError, match=f"does not say how many steps were drafted; type .*{name}:steps=N"):
        read_benchmark(str(path))
    (found,) = read_benchmark(f"{path}:steps=3")
    assert found.setting == make_setting(3)


def test_a_server_that_accepted_another_number_of_tokens_is_said() -> None:
    table = make_rounds({make_variant("v", steps=2): [[2, 1, 2, 1, 2]] * 30})  # 2.6 tokens a round
    times = ("tok/s=90", "steps=2,accept={},tok/s=40")
    said = []
    for accept in ("1.1", "2.6"):
        found = asked(Question(times=(times[0], times[1].format(accept))), table)
        said.append(" ".join(doubts(found.plan, found.requests)))
    assert "accepted 1.10 tokens a round with 2 steps at batch 1, and the replay says 2.60" in said[0]
    assert "With what it accepted it makes 40.0 tok/s there. replay diagnose" in said[0] and "accepted" not in said[1]


def test_a_context_that_costs_nothing_is_said() -> None:
    """Beside a cost of its own it counts."""
    typed = {"lengths": ["steps=3,accept=2"], "context": 1000}
    for costs, said in ((["pass=20,draft=1"], True), (["pass=20,draft=1,kv=0.01"], False)):
        planned = asked(Question(costs=costs, **typed))  # type: ignore[arg-type]
        assert said == any("type --cost kv=MS" in doubt for doubt in doubts(planned.plan)), costs
    assert not any("kv=MS" in doubt for doubt in doubts(plan("batch=1,tok/s=90", **typed).plan))


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, 2]", "{", "hello", '{"mean_tpot_ms": null}'])
def test_a_file_that_says_no_time_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match="says no time of a round"):
        read_benchmark(str(tmp_path / "file"))


# ---- the command ----


def test_a_typed_accept_length_is_not_called_measured(tmp_path: Path) -> None:
    typed = plan(costs=["pass=20,rest=5"], lengths=["steps=3,accept=2.79"])
    assert row(typed, 3).length_source == "typed"
    lines = {"batch_size": 1, "steps": 3, "topk": 1, "num_draft_tokens": 4, "acc_length": 2.5, "step_time": 0.03}
    (tmp_path / "b.jsonl").write_text(json.dumps(lines))
    measured = asked(Question(benches=[str(tmp_path / "b.jsonl")], times=["ms=20"]))
    assert row(measured, 3).length_source == "timing"


def test_the_command_plans_by_batch_and_writes_both_engines_schedules(tmp_path: Path) -> None:
    played = {make_variant(f"k{k}", steps=k): [[min(c, k) for c in (3, 0, 5, 1)]] * 24 for k in (1, 3, 5)}
    path = tmp_path / "rounds.parquet"
    write_rounds(make_rounds(played), path)
    costs = "pass=20,row=0.4,rest=1,draft=1,draft-row=0.02"
    done = CliRunner().invoke(cli, ["plan", str(path), "--cost", costs, "--batch", "1,64,256", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)

    def speed(steps: int, batch: int) -> float:
        """Tokens a millisecond by hand, with L = 1 + mean of min(3, 0, 5, 1; k)."""
        if not steps:
            return batch / (20 + 0.4 * batch)
        length = 1 + sum(min(count, steps) for count in (3, 0, 5, 1)) / 4
        return batch * length / (20 + 0.4 * batch * (steps + 1) + 1 + steps * (1 + 0.02 * batch))

    best = [max((speed(k, batch), k) for k in (0, 1, 3, 5))[1] for batch in (1, 64, 256)]
    assert best == [5, 1, 0]
    assert [choice["best"]["steps"] for choice in found["choices"]] == best
    assert [choice["advice"] for choice in found["choices"]] == ["speculate", "speculate", "do not speculate"]
    sglang = {"1": {"candidate_steps": [5]}, "64": {"candidate_steps": [1]}, "256": {"candidate_steps": [0]}}
    assert json.loads(found["schedules"]["sglang"]) == sglang
    assert json.loads(found["schedules"]["vllm"]) == [[1, 63, 5], [64, 255, 1], [256, 1024, 0]]
    shown = CliRunner().invoke(cli, ["plan", str(path), "--cost", costs, "--batch", "1,64"])
    assert shown.exit_code == 0 and "By batch, for the engines" in shown.stdout


def test_sglang_reads_its_schedule_as_it_was_meant(tmp_path: Path) -> None:
    """SGLang 0.5.23's own class chooses the steps of each batch."""
    path = tmp_path / "adaptive.json"
    path.write_text(sglang_schedule([(1, 5), (64, 1), (256, 0)]))
    asked = (
        "import sys; from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams as Chosen\n"
        "chosen = Chosen(3, sys.argv[1]); print([chosen.get_steps_for_batch(b) for b in (1, 63, 64, 255, 256, 1000)])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", asked, path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[5, 5, 1, 1, 0, 0]"


def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["plan", "--time", "tok/s=90"])
    assert done.exit_code == 1 and done.stderr.startswith("replay: no accept length is known")


def test_a_plan_has_the_depths_of_a_replay() -> None:
    assert MOST_STEPS == MAX_STEPS
    with pytest.raises(UsageError, match="64"):
        replay.plan(times=["batch=1,tok/s=90"], lengths=["steps=1,accept=1.5"], steps="65")
