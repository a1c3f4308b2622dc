"""A callback of Transformers' Trainer that scores the head every so many steps. Importing it imports Transformers.

Read in transformers 4.56.2 and 5.24.0: ``Trainer.log`` (trainer.py) is the way to ``state.log_history`` and to every
logger, and ends with ``CallbackHandler.on_log``, which sets ``control.should_log`` to false (trainer_callback.py);
``Trainer.evaluate`` logs its metrics, then hands the same dictionary to ``on_evaluate``, and ``_determine_best_metric``
reads it on every process.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from replay.errors import ReplayError, UsageError
from replay.printable import one_line
from replay.traces.fields import show
from replay.training.score import Score

PREFIX = "eval_"
_ACCEPT_LENGTH = f"{PREFIX}accept_length"


class ScoreCallback(TrainerCallback):
    """``scores`` holds what was found so far, by step; those of process 0 alone.

    ``take`` makes a score of the tensors that ``gather`` gives. Every process gathers, process 0 scores, and all raise
    or go on together.
    """

    def __init__(
        self,
        trainer: Trainer,
        take: Callable[[Any], Score],
        gather: Callable[[], Any],
        *,
        every: int,
        strict: bool,
    ) -> None:
        self.scores: dict[int, Score] = {}
        self._trainer, self._take, self._gather = trainer, take, gather
        self._every, self._strict = every, strict
        self._said = ""  # of the last warning
        self._training = False
        self._metrics: dict[str, float] | None = None  # of the weights as they are; None where not scored

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """From here on the weights change in steps alone."""
        self._training, self._metrics = True, None

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The weights are about to change."""
        self._metrics = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Score every so many steps and after the last one."""
        if state.global_step % self._every == 0 or state.global_step >= state.max_steps:
            self._score(state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Put the score among the metrics of the evaluation; nan stands where there is none."""
        if not self._training:
            self._metrics = None
        given["metrics"] |= {_ACCEPT_LENGTH: math.nan, **self._score(state, control)}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """From here on anybody may change the weights."""
        self._training = False

    def _score(self, state: TrainerState, control: TrainerControl) -> dict[str, float]:
        """The metrics of the weights as they are, scored and logged once. With ``strict`` raises what went wrong."""
        if self._metrics is None:
            self._metrics, said = _shared(*self._tried(state))
            if said:
                self._refuse(said, state)
            if self._metrics:
                should_log = control.should_log  # the loss of this step may be yet to be logged
                self._trainer.log(dict(self._metrics))
                control.should_log = should_log
        return self._metrics

    def _tried(self, state: TrainerState) -> tuple[dict[str, float], str]:
        """The metrics, and what kept them from being made."""
        try:
            gathered = self._gather()
            if not state.is_world_process_zero:
                return {}, ""
            found = self.scores[state.global_step] = self._take(gathered)
        except Exception as error:  # memory, drivers, a function of the user's: a training of days goes on
            return {}, str(error) or type(error).__name__
        return found.metrics(PREFIX), ""

    def _refuse(self, said: str, state: TrainerState) -> None:
        sentence = f"the head was not scored at step {state.global_step}: {said}"
        if self._strict:
            raise ReplayError(sentence)
        if said != self._said and state.is_world_process_zero:
            warnings.warn(one_line(sentence), stacklevel=2)
        self._said = said


def _shared(metrics: dict[str, float], said: str) -> tuple[dict[str, float], str]:
    """What process 0 found, in every process: all of them choose the best checkpoint."""
    held: list[Any] = [metrics, said]
    broadcast_object_list(held)
    return held[0], held[1]


def add_callback(trainer: object, take: Callable[[Any], Score], gather: Any, *, every: int, strict: bool) -> Any:
    """A ``ScoreCallback`` in front of the trainer's others, so that early stopping finds its metric.

    Raises UsageError for what is no Trainer, or ``every`` that is no number of steps.
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(f"the trainer is {show(trainer)}; give a transformers.Trainer")
    if type(every) is not int or every < 1:
        raise UsageError(f"every is {show(every)}; give a number of training steps from 1")
    if gather is not None and not callable(gather):
        raise UsageError(f"weights is {show(gather)}; give a function that gives tensors by name, or leave it out")
    callback = ScoreCallback(trainer, take, gather or _gathering(trainer), every=every, strict=strict)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


def _gathering(trainer: Any) -> Callable[[], Any]:
    """What the trainer would save: views of a plain model's tensors, whole copies of what is divided."""
    return lambda: trainer.accelerator.get_state_dict(trainer.model_wrapped)
