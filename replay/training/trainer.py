"""Scores of the head that a Transformers Trainer trains."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replay.engines.wiring import Wiring
from replay.errors import UsageError
from replay.traces.reader import Trace
from replay.training.score import Score, score
from replay.training.weights import Tensors

if TYPE_CHECKING:
    from replay.training.callback import ScoreCallback


def score_training(
    trainer: Any,
    trace: Trace,
    config: object,
    *,
    every: int = 500,
    weights: "Callable[[], Tensors] | None" = None,
    wiring: Wiring | str | None = None,
    steps: int | None = None,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    strict: bool = False,
) -> "ScoreCallback":
    """Score the head of a ``transformers.Trainer`` every so many training steps, at the last one and when it evaluates.

    The metrics are ``eval_accept_length``, ``eval_accept_length_low`` and ``_high`` (the 95 % interval),
    ``eval_accept_position_1`` and so on, ``eval_accept_rounds`` and ``eval_accept_seconds``. They go where the
    trainer's own go, and ``metric_for_best_model="eval_accept_length"`` works. The callback that is added has
    ``scores`` by step.

    Process 0 scores; the others wait. ``weights`` is a function that gives the head's tensors and is called on every
    process; None takes what the trainer would save. The other arguments are those of ``score``. What keeps a head from
    being scored is a warning, once, and training goes on; with ``strict`` it is raised.

    Raises UsageError where Transformers is not installed or what is given cannot be. An example that runs is in
    docs/python.md.
    """
    try:
        from replay.training.callback import add_callback
    except ImportError as error:
        raise UsageError(
            f"a Trainer needs Transformers, which cannot be imported ({error}): type pip install 'eagle-replay[local]'"
        ) from error

    def take(tensors: Any) -> Score:
        return score(
            trace, tensors, config, wiring=wiring, steps=steps, topk=topk, num_draft_tokens=num_draft_tokens,
            precision=precision, device=device,
        )  # fmt: skip

    callback: ScoreCallback = add_callback(trainer, take, weights, every=every, strict=strict)
    return callback
