"""From counts of better and of equal candidates to a rank."""

from __future__ import annotations

import numpy as np

from dglkge.errors import unknown_name

SHARE_OF_EQUALS_ABOVE = {"optimistic": 0.0, "realistic": 0.5, "pessimistic": 1.0}
"""Share of the candidates equal to the true answer that each rule puts above it (Berrendorf et al. 2020)."""


def check_ties(ties: str) -> None:
    """Refuse a rule for ties that nobody knows.

    Raises
    ------
    InputError
        If the rule is unknown; the message lists the known ones.
    """
    if ties not in SHARE_OF_EQUALS_ABOVE:
        raise unknown_name("rule for ties", ties, SHARE_OF_EQUALS_ABOVE)


def ranks(num_greater: np.ndarray, num_equal: np.ndarray, ties: str = "realistic") -> np.ndarray:
    """Return the rank of each true answer; 1 is the best.

    Parameters
    ----------
    num_greater : (n,) int64 array
        Candidates that score higher than the true answer.
    num_equal : (n,) int64 array
        Candidates, other than the true answer, that score the same.
    ties : str
        ``"optimistic"`` puts the true answer before its equals, ``"pessimistic"`` behind them,
        ``"realistic"`` in the middle: the mean over all orders of the equals.

    Returns
    -------
    (n,) float64 array

    Raises
    ------
    InputError
        If the rule for ties is unknown.

    Examples
    --------
    >>> ranks(np.array([2]), np.array([3]))
    array([4.5])
    """
    check_ties(ties)
    return 1.0 + num_greater + SHARE_OF_EQUALS_ABOVE[ties] * num_equal
