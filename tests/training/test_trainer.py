"""A real Trainer trains a head of SpecForge: scores are those of the checkpoints that it saves, and no more changes."""

import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.training_loop import CONFIG, Loop, loop_trace, make_loop, texts

import replay
from replay.traces.reader import Trace

STEPS = 8  # of training


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """The head compiles parts of itself, which takes minutes on a CPU, and says what it does without."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return loop_trace(tmp_path_factory.mktemp("loop") / "trace")


def make_trainer(trace: Trace, folder: Path, loop: Loop | None = None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    loop = loop or make_loop(trace)
    data = texts(trace, loop)
    options = {"save_strategy": "no", "eval_strategy": "no", **more}
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=3e-2, logging_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    return Trainer(loop, arguments, train_dataset=data, eval_dataset=data)


@pytest.fixture(scope="module")
def trained(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A trainer that is done, and its callback. It scores at 3 and 6, evaluates at 2, 4 and so on, and ends at 8."""
    saves = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    best = {"metric_for_best_model": "eval_accept_length"}
    trainer = make_trainer(trace, tmp_path_factory.mktemp("run"), **saves, **best)
    callback = replay.score_training(trainer, trace, CONFIG, every=3, steps=3)
    trainer.train()
    return trainer, callback


def saved_head(trainer: Any, step: int, folder: Path) -> Path:
    """What SpecForge would serve of a checkpoint that the Trainer saved: its head, named as it names it."""
    state = load_file(Path(trainer.args.output_dir) / f"checkpoint-{step}" / "model.safetensors")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name.removeprefix("draft_model."): one for name, one in state.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("step", [2, 3, 4, 6, 8])
def test_a_score_is_that_of_the_saved_checkpoint(
    step: int, trained: tuple[Any, Any], trace: Trace, tmp_path: Path
) -> None:
    trainer, callback = trained
    head = replay.load_head(saved_head(trainer, step, tmp_path / "head"))
    (expected,) = replay.summarise(replay.simulate(trace, {"h": head}, [replay.Variant("h", steps=3)]))
    score = callback.scores[step]
    for name in ("accept_length", "accepted", "drafted", "rounds"):
        assert getattr(score, name) == getattr(expected, name)
    assert score.ci95 == expected.accept_length_ci95
    assert str(score.positions) == str(expected.position_conditional)  # nan is nan
    assert score.precision == expected.precision == "bf16"  # though it trains in fp32
    assert next(trainer.model.parameters()).dtype == torch.float32


def test_the_head_learns_and_the_scores_show_it(trained: tuple[Any, Any]) -> None:
    lengths = [score.accept_length for _, score in sorted(trained[1].scores.items())]
    assert lengths[0] < lengths[-1] and lengths[-1] > 1.3


def test_each_score_is_logged_once_beside_what_was_logged_before(trained: tuple[Any, Any]) -> None:
    trainer, callback = trained
    logged = {name: [row["step"] for row in trainer.state.log_history if name in row]
              for name in ("eval_accept_length", "eval_loss", "loss")}  # fmt: skip
    assert logged == {"eval_accept_length": [2, 3, 4, 6, 8], "eval_loss": [2, 4, 6, 8], "loss": [2, 4, 6, 8]}
    for row in trainer.state.log_history:
        if "eval_accept_length" in row:
            assert {**callback.scores[row["step"]].metrics("eval_"), "step": row["step"], "epoch": row["epoch"]} == row


def test_the_best_checkpoint_is_the_one_with_the_largest_accept_length(trained: tuple[Any, Any]) -> None:
    trainer, callback = trained
    evaluated = {step: callback.scores[step].accept_length for step in (2, 4, 6, 8)}
    best = max(evaluated, key=lambda step: evaluated[step])  # the first of equals
    assert trainer.state.best_metric == evaluated[best] and trainer.state.best_global_step == best


def test_an_evaluation_outside_of_training_scores_the_weights_as_they_are(trace: Trace, tmp_path: Path) -> None:
    trainer = make_trainer(trace, tmp_path)
    callback = replay.score_training(trainer, trace, CONFIG, steps=1)
    trainer.train()
    found = trainer.evaluate()["eval_accept_length"]
    assert found == callback.scores[STEPS].accept_length > 1
    with torch.no_grad():
        trainer.model.draft_model.lm_head.weight.zero_()
    assert trainer.evaluate()["eval_accept_length"] == callback.scores[STEPS].accept_length < found


def test_training_goes_on_as_if_nothing_had_been(trace: Trace, tmp_path: Path) -> None:
    """Bit for bit, dropout and order of the texts included: both draw from the generators that torch has."""
    ends = []
    for scored in (False, True):
        loop = make_loop(trace)
        loop.draft_model.fc.register_forward_hook(lambda module, _, out: torch.dropout(out, 0.3, module.training))
        trainer = make_trainer(trace, tmp_path / str(scored), loop)
        if scored:
            callback = replay.score_training(trainer, trace, CONFIG, every=1, steps=2)
        trainer.train()
        ends.append((loop.state_dict(), [row["loss"] for row in trainer.state.log_history if "loss" in row]))
    assert len(callback.scores) == STEPS
    (plain, losses), (watched, same_losses) = ends
    assert losses == same_losses and len(losses) == STEPS // 2
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_a_score_that_fails_is_one_warning_and_training_ends(trace: Trace, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_accept_length"}
    trainer = make_trainer(trace, tmp_path, **best)
    callback = replay.score_training(trainer, trace, {**CONFIG, "hidden_size": 8}, every=1)
    with pytest.warns(UserWarning, match=r"the head was not scored at step 1: draft head .* has shape") as caught:
        trainer.train()
    assert sum("not scored" in str(one.message) for one in caught) == 1
    assert trainer.state.global_step == STEPS and callback.scores == {} and trainer.state.best_global_step is None
    assert not any("eval_accept_length" in row for row in trainer.state.log_history)
    assert math.isnan(trainer.evaluate()["eval_accept_length"])


def test_another_failure_is_another_warning(trace: Trace, tmp_path: Path) -> None:
    trainer = make_trainer(trace, tmp_path)
    keys = iter(["first", "first", "second", *["second"] * STEPS])
    replay.score_training(trainer, trace, CONFIG, every=1, weights=lambda: {}[next(keys)])
    with pytest.warns(UserWarning, match="not scored") as caught:
        trainer.train()
    said = [str(one.message) for one in caught if "not scored" in str(one.message)]
    assert said == [f"the head was not scored at step {at}: '{key}'" for at, key in ((1, "first"), (3, "second"))]


def test_a_function_of_the_users_may_fail_too_and_strict_raises(trace: Trace, tmp_path: Path) -> None:
    trainer = make_trainer(trace, tmp_path)
    replay.score_training(trainer, trace, CONFIG, every=2, weights=lambda: {}["head"], strict=True)
    with pytest.raises(replay.ReplayError, match="the head was not scored at step 2: 'head'"):
        trainer.train()


def test_without_transformers_it_says_what_to_install(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "replay.training.callback", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(replay.ReplayError, match=r"pip install 'eagle-replay\[local\]'"):
        replay.score_training(None, trace, CONFIG)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"every": 0}, "every is 0"), ({"every": True}, "every is True"), ({"every": 1.5}, "every is 1.5"),
     ({"weights": 3}, "weights is 3"), ({"trainer": "t"}, "the trainer is 't'")],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_training(
    given: dict[str, Any], said: str, trained: tuple[Any, Any], trace: Trace
) -> None:
    with pytest.raises(replay.ReplayError, match=said):
        replay.score_training(**{"trainer": trained[0], "trace": trace, "config": CONFIG, **given})
