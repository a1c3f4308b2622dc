"""From one request's drafts to its expected rounds: what the trace knows of p meets the estimators of expectation.py.

Every number is made three times, with the probabilities that the trace leaves open at their middle, their lower and
their upper bound. Tokens outside of the recorded ones get their logit from the recorded final row and the target's
lm_head where both are there; at temperature 1 nothing is left open then.

Suffixes: A anchors, K steps, N drafted nodes, P pairs of an output row and a token, H the target's hidden size.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from replay.errors import TraceError
from replay.traces.reader import Trace
from replay.traces.rounds import EXPECTED_COLUMNS, Expected
from replay.traces.taps import FINAL
from replay.verify.expectation import (
    draw_accepted,
    effective_samples,
    expect_taken,
    expected_walk,
    follow_path,
    keep_probabilities,
)
from replay.verify.rules import MAX_STEPS, Floats, Rule
from replay.verify.target_probability import Bounds, Outside, TargetProbability, TargetSampling

Ints = NDArray[np.int64]

# Pairs whose lm_head rows are in memory at a time.
_BLOCK_PAIRS = 4096


def target_probability(trace: Trace, index: int) -> TargetProbability | None:
    """The target's probabilities in request ``index``; None at temperature 0, where its choice has all of it."""
    record = trace.records[index]
    if record.temperature == 0:
        return None
    ids_RK, logprobs_RK, logsumexp_R = trace.logits(index)
    sampling = TargetSampling(record.temperature, record.top_k, record.top_p)
    return TargetProbability(
        ids_RK.numpy(),
        logprobs_RK.double().numpy(),
        sampling,
        vocab_size=trace.header.target.vocab_size,
        outside=_outside(trace, index, logsumexp_R),
    )


def _outside(trace: Trace, index: int, logsumexp_R: torch.Tensor) -> Outside | None:
    try:
        lm_head_VH = trace.lm_head_weight()
    except TraceError:
        return None
    record = trace.records[index]

    def logprobs(rows_P: Ints, ids_P: Ints) -> Floats:
        final_RH = trace.read(index, [FINAL]).taps[FINAL][record.prompt_tokens - 1 :]
        rows, ids = torch.from_numpy(rows_P), torch.from_numpy(ids_P)
        # Rounded as the target's own lm_head leaves its logits.
        logits = [
            (final_RH[some].float() * lm_head_VH[which].float()).sum(-1).to(final_RH.dtype).float()
            for some, which in zip(rows.split(_BLOCK_PAIRS), ids.split(_BLOCK_PAIRS), strict=True)
        ]
        found: Floats = (torch.cat(logits) - logsumexp_R[rows]).double().numpy()
        return found

    return logprobs


def _three(bounds: Bounds) -> tuple[Floats, Floats, Floats]:
    return (bounds.low + bounds.high) / 2, bounds.low, bounds.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was found of one request: ``sums`` as in ``Expected``, the importance weights [K] of its anchors and their
    squares, and how many emitted tokens are ``impossible``."""

    sums: tuple[float, ...]
    weights_K: Floats
    squares_K: Floats
    impossible: int


class Estimator:
    """Expected rounds of one variant, request by request: ``found`` by id."""

    def __init__(self, rule: Rule, trace: Trace, steps: int, *, draft_vocab_size: int) -> None:
        self._rule, self._trace, self.steps = rule, trace, steps
        self._whole_vocabulary = draft_vocab_size == trace.header.target.vocab_size
        self._index: Mapping[str, int] = {record.request_id: i for i, record in enumerate(trace.records)}
        self.found: dict[str, Estimate] = {}

    def add_walk(self, request_id: str, visited_A: Ints, drafted_AN: Ints, parents_AN: Ints, chosen_AK: Ints) -> None:
        """One request whose drafts follow from the text, at the anchors of its served walk.

        ``visited_A`` counts anchors from the first one; parents and the path's tokens as in ``follow_path``.
        """
        target = target_probability(self._trace, self._index[request_id])
        offers = follow_path(drafted_AN, parents_AN, chosen_AK)
        rows_AN = visited_A[:, None] + offers.depth_AN
        # The target's choice has probability 1 where it is all that is known: at temperature 0, and past the output.
        taken_AN = offers.taken_AN.astype(np.float64)
        p = Bounds(taken_AN, taken_AN.copy())
        entropy = Bounds(np.zeros(chosen_AK.shape), np.zeros(chosen_AK.shape))
        impossible = 0
        if target is not None:
            known_AN = (offers.depth_AN > 0) & (rows_AN < target.rows)
            recorded = target.of(rows_AN[known_AN], drafted_AN[known_AN])
            p.low[known_AN], p.high[known_AN] = recorded.low, recorded.high
            impossible = int((p.high[offers.taken_AN] == 0).sum())
        if target is not None and self._rule.reads_entropy:
            rows_AK = np.minimum(visited_A[:, None] + 1 + np.arange(self.steps), target.rows - 1)
            whole = target.entropy()
            entropy = Bounds(whole.low[rows_AK], whole.high[rows_AK])
        estimates = [expect_taken(self._rule, offers, *pair) for pair in zip(_three(p), _three(entropy), strict=True)]
        rounds = float(len(visited_A))
        sums = tuple(value for one in estimates for value in (rounds, float(one.joint_AK.sum())))
        weights_AK = estimates[0].weights_AK
        self.found[request_id] = Estimate(sums, weights_AK.sum(axis=0), (weights_AK**2).sum(axis=0), impossible)

    def add_path(self, request_id: str, q_AK: Floats, path_AK: Ints) -> Ints:
        """One request whose drafts are sampled; accepted tokens [A] at every anchor in one seeded draw of the coins."""
        steps = q_AK.shape[1]
        target = target_probability(self._trace, self._index[request_id])
        assert target is not None
        rows_AK = np.arange(1, len(q_AK) + 1)[:, None] + np.arange(steps)
        known_AK = path_AK >= 0
        p_AK = Bounds(np.ones(q_AK.shape), np.ones(q_AK.shape))
        recorded = target.of(rows_AK[known_AK], path_AK[known_AK])
        p_AK.low[known_AK], p_AK.high[known_AK] = recorded.low, recorded.high
        impossible = int((p_AK.high[:, 0] == 0).sum())
        kept = [keep_probabilities(q_AK, chance_AK) for chance_AK in _three(p_AK)]
        sums = tuple(value for kept_AK in kept for value in expected_walk(kept_AK))
        self.found[request_id] = Estimate(sums, np.zeros(steps), np.zeros(steps), impossible)
        return draw_accepted(kept[0], coins(request_id, q_AK.shape))

    def expected(self) -> Expected:
        """The sums of all requests of the trace, 0 for those not added, with what they rest on."""
        rule, none = self._rule, (0.0,) * EXPECTED_COLUMNS
        found = [self.found.get(record.request_id) for record in self._trace.records]
        sums = tuple(none if one is None else one.sums for one in found)
        return Expected(str(rule), exact=rule.lossless or self._greedy, note="; ".join(self._notes()), sums=sums)

    def _in_order(self) -> list[Estimate]:
        """In the order of the trace, whatever the order in which they were found."""
        return [self.found[record.request_id] for record in self._trace.records if record.request_id in self.found]

    @property
    def _greedy(self) -> bool:
        """At temperature 0 the target's choice has probability 1, and every rule takes it and nothing else."""
        return all(record.temperature == 0 for record in self._trace.records)

    def _notes(self) -> list[str]:
        rule = self._rule
        notes = []
        if self._greedy:
            notes.append("recorded at temperature 0, where every rule is greedy")
        elif rule.name == "rejection":
            notes.append("exact for the recorded text; the rounds are one seeded draw of the coins along it")
            if not self._whole_vocabulary:
                notes.append("SGLang starts this rule only with a head of the target's whole vocabulary")
        elif rule.lossless:
            notes.append("probabilities at the anchors of the recorded walk, whose rounds are one draw of this rule")
        else:
            weights_K, squares_K = np.zeros(self.steps), np.zeros(self.steps)
            for one in self._in_order():
                weights_K += one.weights_K
                squares_K += one.squares_K
            sizes = effective_samples(weights_K, squares_K)
            notes.append(
                "for the anchors of the recorded text, which the target sampled without this rule: exact at position "
                "1, weighted by importance behind it (effective rounds at positions 1, 2, ...: "
                f"{', '.join(f'{size:.0f}' for size in sizes)}); a server would reach other anchors, and the rounds "
                "are those of target-only"
            )
        if impossible := sum(one.impossible for one in self._in_order()):
            notes.append(
                f"{impossible} emitted tokens have no probability under the recorded temperature, top-k and top-p"
            )
        return notes


def coins(request_id: str, shape: tuple[int, ...]) -> Floats:
    """Random numbers of one request [A, K]: the same for every variant, whatever its steps, and in every run."""
    digest = hashlib.sha256(request_id.encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    numbers: Floats = generator.random((shape[0], MAX_STEPS))[:, : shape[1]]
    return numbers
