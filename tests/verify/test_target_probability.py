"""The target's probabilities from what a trace records, against SGLang's own renormalisation of whole distributions."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from rig.inprocess import sglang_module

from replay.verify.target_probability import Bounds, TargetProbability, TargetSampling

V, ROWS = 50, 12
SAMPLINGS = [
    TargetSampling(temperature, top_k, top_p)
    for temperature, top_k, top_p in [
        (1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (0.8, 12, 1.0), (1.0, 0, 0.8), (0.7, 0, 0.95),
        (1.3, 9, 0.6), (1.3, 30, 0.9), (1.0, 1, 1.0),
    ]
]  # fmt: skip


Renormalised = Callable[[int, bool, TargetSampling], np.ndarray]


@pytest.fixture(scope="module")
def renormalised() -> Iterator[Renormalised]:
    """``random_logits`` through SGLang 0.5.23's kernels/ops/sampling/renorm_triton.py in the order of
    ``eagle_sample``, run on the CPU."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    module: Any = sglang_module("kernels.ops.sampling.renorm_triton")

    @cache
    def probabilities(seed: int, rounded: bool, sampling: TargetSampling) -> np.ndarray:
        probs = (random_logits(seed, rounded=rounded) / sampling.temperature).softmax(-1)
        if sampling.top_k > 0:
            probs = module.top_k_renorm_probs_triton(probs, sampling.top_k)
        if sampling.top_p < 1:
            probs = module.top_p_renorm_probs_triton(probs, sampling.top_p)
        found: np.ndarray = probs.double().numpy()
        return found

    with pytest.MonkeyPatch.context() as patch:
        # Functions that a kernel calls were compiled for a GPU when Triton was imported: interpret them too.
        patch.setattr(JITFunction, "__call__", lambda self, *args, **kw: InterpretedFunction(self.fn)(*args, **kw))
        patch.setattr(module, "_prepare_probs", lambda probs: probs.float().contiguous())
        for name in ("_mask_and_partial_sum_kernel", "_normalize_kernel"):
            patch.setattr(module, name, InterpretedFunction(getattr(module, name).fn))
        yield probabilities


def random_logits(seed: int, *, rounded: bool) -> torch.Tensor:
    """Rounded to bf16 they hold ties, as a server's do."""
    logits = 2.5 * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(seed))
    return logits.bfloat16().float() if rounded else logits


def recorded(
    logits: torch.Tensor, k: int, sampling: TargetSampling, *, outside: bool = False
) -> tuple[TargetProbability, torch.Tensor]:
    """What a trace keeps of ``logits``: the top k, with the log-probabilities of whole rows beside it."""
    logprobs = logits.double().log_softmax(-1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    whole = logprobs.numpy()
    lookup = (lambda rows, tokens: whole[rows, tokens]) if outside else None
    return (
        TargetProbability(ids[:, :k].numpy(), values[:, :k].numpy(), sampling, vocab_size=V, outside=lookup),
        ids,
    )


def every(target: TargetProbability) -> Bounds:
    rows, tokens = np.divmod(np.arange(ROWS * V), V)
    found = target.of(rows, tokens)
    return Bounds(found.low.reshape(ROWS, V), found.high.reshape(ROWS, V))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rounded", [True, False])
def test_whole_rows_are_renormalised_as_the_server_does(
    renormalised: Renormalised, sampling: TargetSampling, rounded: bool
) -> None:
    logits = random_logits(0, rounded=rounded)
    found = every(recorded(logits, V, sampling)[0])
    np.testing.assert_array_equal(found.low, found.high)
    np.testing.assert_allclose(found.low, renormalised(0, rounded, sampling), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", [1, 12, 30])
@pytest.mark.parametrize("outside", [False, True])
def test_what_is_not_recorded_stays_within_its_bounds(
    renormalised: Renormalised, sampling: TargetSampling, k: int, outside: bool
) -> None:
    for seed, rounded in ((1, True), (2, False)):
        logits = random_logits(seed, rounded=rounded)
        found = every(recorded(logits, k, sampling, outside=outside)[0])
        exact = renormalised(seed, rounded, sampling)
        assert (found.low <= exact + 2e-6).all()
        assert (exact <= found.high + 2e-6).all()
        if sampling == TargetSampling(1.0) and outside:
            np.testing.assert_allclose(found.high, found.low, rtol=1e-12)


def test_the_bounds_are_narrow_where_the_trace_decides() -> None:
    """At temperature 1 a recorded token is known exactly, and one outside to the last recorded probability."""
    logits = random_logits(3, rounded=False)
    target, ids = recorded(logits, 12, TargetSampling(1.0))
    found = every(target)
    whole = logits.double().softmax(-1).numpy()
    inside = np.zeros((ROWS, V), dtype=bool)
    np.put_along_axis(inside, ids[:, :12].numpy(), True, axis=1)
    np.testing.assert_allclose(found.low[inside], whole[inside], rtol=1e-10)
    np.testing.assert_allclose(found.high[inside], whole[inside], rtol=1e-10)
    last = np.take_along_axis(whole, ids[:, 11:12].numpy(), axis=1)
    mass = 1 - np.where(inside, whole, 0).sum(axis=1, keepdims=True)
    bound = np.broadcast_to(np.minimum(last, mass), whole.shape)
    np.testing.assert_allclose(found.high[~inside], bound[~inside], rtol=1e-9)
    assert (found.low[~inside] == 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_the_tail_at_other_temperatures_is_bounded_by_its_extremes(temperature: float) -> None:
    """Tails of the two extreme shapes, as alike as can be and as concentrated as allowed, touch the bounds."""
    k, head = 10, torch.linspace(0.0, -1.8, 10)
    alike = torch.cat([head, torch.full((40,), -4.0)])
    tight = torch.cat([head, torch.full((20,), -1.8), torch.full((20,), -60.0)])
    for logits in (alike, tight):
        target, _ = recorded(logits.expand(ROWS, V).clone(), k, TargetSampling(temperature))
        exact = (logits.double() / temperature).softmax(-1)[0]
        found = target.of(np.array([0]), np.array([0]))
        assert min(abs(found.low[0] - exact), abs(found.high[0] - exact)) < 1e-6 * exact
        assert found.low[0] <= exact * (1 + 1e-6) and exact <= found.high[0] * (1 + 1e-6)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", [1, 12, 30, V])
def test_entropy_stays_within_its_bounds(renormalised: Renormalised, sampling: TargetSampling, k: int) -> None:
    logits = random_logits(4, rounded=True)
    found = recorded(logits, k, sampling)[0].entropy()
    exact_p = renormalised(4, True, sampling)
    exact = -(exact_p * np.log(np.where(exact_p > 0, exact_p, 1.0))).sum(axis=1)
    assert (found.low <= exact + 1e-5).all()
    assert (exact <= found.high + 1e-5).all()
    if k == V:
        np.testing.assert_allclose(found.high, exact, atol=1e-5)
        np.testing.assert_allclose(found.low, exact, atol=1e-5)
