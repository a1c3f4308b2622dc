"""The accept length of a head between two training steps: replayed as it would be served, training left as it is."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter

from replay.analysis.summary import VariantSummary, summarise
from replay.checkpoint.checkpoint import Checkpoint
from replay.engines.wiring import Wiring, parse_wiring
from replay.errors import UsageError
from replay.printable import counted, html_table
from replay.simulator.simulation import simulate
from replay.simulator.variant import Variant, default_steps
from replay.traces.fields import show
from replay.traces.reader import Trace
from replay.training.weights import Weights, head_of

_NAME = "current"


@dataclass(frozen=True, slots=True)
class Score:
    """What a head accepts on a trace. Plain numbers; no tensor is kept.

    ``accept_length`` in tokens a round, ``ci95`` its interval (nan with fewer than two requests); ``positions[j-1]`` =
    rounds with at least j accepted / those with at least j-1, nan where no round got there; ``accepted`` of ``drafted``
    tokens in ``rounds`` of ``requests``. ``wiring``, ``steps`` and ``precision`` are those that it was replayed with,
    ``device`` where, ``seconds`` how long all of it took.
    """

    accept_length: float
    ci95: tuple[float, float]
    positions: tuple[float, ...]
    accepted: int
    drafted: int
    rounds: int
    requests: int
    wiring: Wiring
    steps: int
    precision: str
    device: str
    seconds: float

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The numbers by name, for a logger: nothing for what is not known.

        >>> sorted(replay.score(trace, head, steps=1).metrics("eval_"))[0]
        'eval_accept_length'
        """
        low, high = self.ci95
        named = {"accept_length": self.accept_length, "accept_length_low": low, "accept_length_high": high}
        named |= {f"accept_position_{place}": share for place, share in enumerate(self.positions, start=1)}
        named |= {"accept_rounds": float(self.rounds), "accept_seconds": self.seconds}
        return {f"{prefix}{name}": value for name, value in named.items() if math.isfinite(value)}

    def __repr__(self) -> str:
        low, high = self.ci95
        within = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"
        counts = f"{self.accepted} of {self.drafted} drafted tokens in {counted(self.rounds, 'round')}"
        took = f"{counted(self.requests, 'request')}, {self.seconds:.1f} s"
        return f"Score(accept length {self.accept_length:.3f}{within}, {counts} of {took})"

    def _repr_html_(self) -> str:
        names = [f"position {place}" for place in range(1, len(self.positions) + 1)]
        return html_table(repr(self), names, [["" if math.isnan(one) else f"{one:.1%}" for one in self.positions]])


def score(
    trace: Trace,
    weights: Weights,
    config: object = None,
    *,
    wiring: Wiring | str | None = None,
    steps: int | None = None,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    precision: str | None = None,
    device: str | None = None,
) -> Score:
    """Replay the head that is being trained on ``trace``: the accept length that a server would show with it.

    ``weights``: a module, with what wraps it (DistributedDataParallel, FSDP, torch.compile) and what lies beside the
    head in it; tensors by name; a function that gives these; or a head of ``load_head``. ``config`` is the head's: the
    dictionary of its config.json, its folder, or a Transformers config. ``wiring`` None is the one that the config
    states, ``steps`` None 5 (all of a block), ``precision`` None the target's dtype: as a server loads it, whatever it
    is trained in. ``device`` None is the GPU of the weights, else any GPU, else the CPU.

    Training goes on as if nothing had been: no gradients, no random numbers, no forward of the module, no mode or flag
    that stays changed. The head is copied in its served dtype for the time of the call. Parameters that FSDP divides
    are gathered: then every process has to call this.

    Raises UsageError, WiringError, CheckpointError or TraceError.

    >>> replay.score(trace, tensors, config, steps=3).rounds > 0
    True
    """
    begun = perf_counter()
    if not isinstance(trace, Trace):
        raise UsageError(f"the trace is {show(trace)}; open one by Trace.open")
    with _apart_from_training():
        head = head_of(weights, config, _NAME)
        variant = Variant(
            _NAME,
            wiring=_wiring(wiring, trace),
            steps=default_steps(head) if steps is None else steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            precision=precision,
        )
        place = _device(device, head)
        (summary,) = summarise(simulate(trace, {_NAME: head}, [variant], device=place))
    return _of(summary, place, perf_counter() - begun)


def _of(summary: VariantSummary, device: str, seconds: float) -> Score:
    return Score(
        accept_length=summary.accept_length,
        ci95=summary.accept_length_ci95,
        positions=summary.position_conditional,
        accepted=summary.accepted,
        drafted=summary.drafted,
        rounds=summary.rounds,
        requests=summary.played_requests,
        wiring=Wiring(summary.wiring),
        steps=summary.steps,
        precision=summary.precision,
        device=device,
        seconds=seconds,
    )


def _wiring(typed: Wiring | str | None, trace: Trace) -> Wiring | None:
    if not isinstance(typed, str):
        return typed  # what is none is refused by the variant
    target = trace.header.target
    return parse_wiring(typed, layers=target.layers, architecture=target.architecture)


def _device(asked: str | None, head: Checkpoint) -> str:
    """Where to replay. Raises UsageError for a device that is not there."""
    import torch

    if asked is None:
        trained = next((tensor.device for tensor in head.tensors.values() if tensor.is_cuda), None)
        return str(trained or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        return str(torch.empty(0, device=asked).device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"device {show(asked)} cannot be used here ({said}); try cpu, or leave it out") from error


@contextmanager
def _apart_from_training() -> Iterator[None]:
    """A loop's own defaults set aside while a head is scored: of dtype, device, autocast and gradients."""
    import torch

    trained = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, trained)
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.no_grad())
        yield
