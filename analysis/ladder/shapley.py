"""Shares of a whole that do not depend on the order in which its causes are switched on."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import factorial

import numpy as np

from replay.analysis.bootstrap import Floats


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """Every choice of ``names``, smaller ones first."""
    return [frozenset(chosen) for size in range(len(names) + 1) for chosen in combinations(names, size)]


def shapley(values: Mapping[frozenset[str], Floats], names: Sequence[str]) -> dict[str, Floats]:
    """What each of ``names`` adds, averaged over all orders of adding them; elementwise over arrays of equal shape.

    ``values`` has the value of every choice of names. The shares add up to that of all of them minus that of none.
    Lloyd S. Shapley, A Value for n-Person Games (1953); exact, 2^n values.
    """
    count = len(names)
    shares: dict[str, Floats] = {}
    for name in names:
        others = [other for other in names if other != name]
        share = np.zeros_like(values[frozenset()])
        for before in subsets(others):
            orders = factorial(len(before)) * factorial(count - len(before) - 1)
            share = share + (values[before | {name}] - values[before]) * (orders / factorial(count))
        shares[name] = share
    return shares
