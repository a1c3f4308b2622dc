"""Evidence from each token that a server drafted, against a replay that was fed the server's drafts."""

import math

import numpy as np

from replay.analysis.diagnosis.evidence import (
    DRAFTED,
    OUTLIER_TOKENS,
    SHARES,
    Disturbance,
    Evidence,
    log_mean,
    outliers_allowed,
)
from replay.analysis.followed import LEAST_SCALE, Floats, Followed, Noise, judge_rounds

# Rounding is at most so many times what was measured. Two orders on one machine flip as many tokens as the measured
# scale says (docs/accuracy.md); other hardware has the same formats, and other kernels.
_ROUNDING = 2.0


def noise_scales(scale: float) -> tuple[float, ...]:
    """The noise scales at which tokens are judged: a quarter of the measured ``scale``, then twofold up to 1 nat.

    The least is for a server on the replay's own kernels, where hardly anything flips.
    """
    measured = max(scale, LEAST_SCALE)
    found = [measured / 4, measured / 2, measured]
    while found[-1] * 2 < 1:
        found.append(found[-1] * 2)
    return (*found, 1.0) if found[-1] < 1 else tuple(found)


MEASURED = 2  # the measured scale's place among them


def followed_evidence(followed: Followed, noise: Noise, served: float, accept_length: float = math.nan) -> Evidence:
    """A hypothesis whose replay followed the server's drafts, with scales as ``noise_scales`` gives them.

    ``noise`` is what was measured, under the hypothesis itself where it is to be named.
    """
    near_R, unexplained_R = judge_rounds(followed, noise)
    outlier = -math.log(followed.choices)
    most = _ROUNDING * max(noise.scale, LEAST_SCALE) * (1 + 1e-9)
    places = [place for place, scale in enumerate(followed.scales) if scale <= most] or [0]
    exact_ZN = [_mixed(followed, place, OUTLIER_TOKENS, outlier) for place in places]
    exact_N = max(exact_ZN, key=lambda nats_N: float(nats_N.sum()))
    log_likelihood = log_mean([float(nats_N.sum()) for nats_N in exact_ZN])
    disturbance, disturbed_N, disturbed = _disturbed(followed, outlier)
    rounds, unexplained = followed.rounds, int(unexplained_R.sum())
    near = int(near_R.sum())
    return Evidence(
        DRAFTED,
        rounds,
        rounds - near - unexplained,
        near,
        unexplained,
        log_likelihood,
        disturbed,
        outliers_allowed(rounds),
        accept_length,
        served,
        disturbance,
        exact_N,
        disturbed_N,
        followed.request_N,
    )


def _disturbed(followed: Followed, outlier: float) -> tuple[Disturbance, Floats, float]:
    """The disturbance that fits best, its nats [N], and the log-likelihood averaged over all of them."""
    sums, best = [], None
    for place, scale in enumerate(followed.scales):
        for share in SHARES:
            nats_N = _mixed(followed, place, share, outlier)
            sums.append(float(nats_N.sum()))
            if best is None or sums[-1] > best[0]:
                best = sums[-1], Disturbance(scale, share), nats_N
    assert best is not None
    return best[1], best[2], log_mean(sums)


def _mixed(followed: Followed, place: int, share: float, outlier: float) -> Floats:
    """Log-probability of each token [N] at one noise scale, of which a ``share`` is drawn from all tokens alike."""
    told_N = -followed.margin_N / followed.scales[place] - followed.spread_NZ[:, place]
    mixed: Floats = np.logaddexp(math.log1p(-share) + told_N, math.log(share) + outlier)
    return mixed
