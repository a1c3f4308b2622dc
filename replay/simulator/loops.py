"""Outputs that loop: a target that says the same few tokens again and again, which any head soon drafts right."""

from collections.abc import Sequence

import numpy as np

# A loop repeats at most so many tokens, at least so often, over at least so many tokens and this share of the output.
# Tables, rows of zeros and refrains in ordinary text repeat less, or make up less of it.
MOST_PERIOD = 64
_LEAST_TIMES, _LEAST_TOKENS, _LEAST_SHARE = 4, 16, 0.25


def find_loop(output: Sequence[int]) -> tuple[int, int]:
    """The longest loop in ``output``: how many tokens it covers, and how many it repeats; (0, 0) where there is none.

    >>> find_loop([5, 6, 7] + [1, 2] * 10)
    (20, 2)
    """
    tokens = np.asarray(output)
    best = (0, 0)
    for period in range(1, min(MOST_PERIOD, len(tokens) // _LEAST_TIMES) + 1):
        covered = _longest_run(tokens[period:] == tokens[:-period]) + period
        least = max(_LEAST_TIMES * period, _LEAST_TOKENS, _LEAST_SHARE * len(tokens))
        if covered >= least and covered > best[0]:
            best = (covered, period)
    return best


def _longest_run(same: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> int:
    """How many neighbours in a row are true at most."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    return int((ends[1::2] - ends[::2]).max(initial=0))
