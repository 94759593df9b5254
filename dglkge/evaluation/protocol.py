"""Protocol of a ranking and its rule for ties. Results are comparable only under equal protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.data.dataset_files import SPLITS
from dglkge.errors import InputError, unknown_name

SHARE_OF_EQUALS_ABOVE = {"optimistic": 0.0, "realistic": 0.5, "pessimistic": 1.0}
"""Share of the candidates of equal score that a rule ranks above the true answer (Berrendorf et al. 2020)."""


def share_of_equals_above(ties: str) -> float:
    """Return the share of a rule for ties; an unknown rule is an InputError."""
    if ties not in SHARE_OF_EQUALS_ABOVE:
        raise unknown_name("rule for ties", ties, SHARE_OF_EQUALS_ABOVE)
    return SHARE_OF_EQUALS_ABOVE[ties]


def ranks(num_greater: np.ndarray, num_equal: np.ndarray, ties: str = "realistic") -> np.ndarray:
    """Return the rank of each true answer; 1 is the best.

    Parameters
    ----------
    num_greater : (n,) int64 array
        Candidates that score higher than the true answer.
    num_equal : (n,) int64 array
        Candidates, other than the true answer, with the same score.
    ties : str
        ``"optimistic"`` ranks the true answer before equal scores, ``"pessimistic"`` behind them,
        ``"realistic"`` in the middle, which is the mean over all orders of the equal ones.

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
    return 1.0 + num_greater + share_of_equals_above(ties) * num_equal


@dataclass(frozen=True)
class Protocol:
    """Settings of a ranking.

    Attributes
    ----------
    split : str
        The triples to rank: a split, e.g. ``"test"``, or the name of a file of triples.
    filtered : bool
        True excludes the other known answers of a query from the candidates (Bordes et al. 2013), False
        includes them (raw).
    num_candidates : int, optional
        Corrupted entities sampled for each query, with replacement; None for all entities of the right type.
        Types with no more entities than that are ranked in full. Full and sampled metrics are not
        comparable.
    ties : str
        ``"realistic"``, ``"optimistic"`` or ``"pessimistic"``; see :func:`dglkge.evaluation.protocol.ranks`.
    batch_size : int
        True answers ranked at once; affects memory and speed, not the result.
    seed : int
        Seed of the sampled candidates.

    Raises
    ------
    InputError
        If a field is out of range.
    """

    split: str = "test"
    filtered: bool = True
    num_candidates: int | None = None
    ties: str = "realistic"
    batch_size: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        share_of_equals_above(self.ties)
        if self.num_candidates is not None and self.num_candidates < 1:
            raise InputError(
                f"the number of candidates must be at least 1 (or none, for all), got {self.num_candidates}"
            )
        if self.batch_size < 1:
            raise InputError(f"the batch size of the evaluation must be at least 1, got {self.batch_size}")

    @property
    def candidates(self) -> str:
        """Name of the candidates: ``"all"`` or ``"sampled N"``."""
        return "all" if self.num_candidates is None else f"sampled {self.num_candidates}"

    def suffix(self, limit: int | None = None) -> str:
        """Return what differs from the default protocol, for the name of a file of results.

        Parameters
        ----------
        limit : int, optional
            Number of the first triples that are ranked; None for all.

        Examples
        --------
        >>> Protocol(filtered=False, num_candidates=100, seed=3).suffix(limit=500)
        '-raw-sampled100-seed3-first500'
        >>> Protocol().suffix()
        ''
        """
        parts = [] if self.filtered else ["raw"]
        parts += [] if self.num_candidates is None else [f"sampled{self.num_candidates}", f"seed{self.seed}"]
        parts += [] if self.ties == Protocol.ties else [self.ties]
        parts += [] if limit is None else [f"first{limit}"]
        return "".join(f"-{part}" for part in parts)

    def describe(self) -> str:
        """Return the protocol in one line."""
        filtering = "filtered" if self.filtered else "raw"
        triples = f"{self.split} split" if self.split in SPLITS else f"triples of {self.split}"
        return f"{triples}, {filtering}, {self.candidates} candidates, {self.ties} ties"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that affect the result, ready for JSON."""
        known: dict[str, Any] = {
            "split": self.split,
            "filtering": "filtered" if self.filtered else "raw",
            "candidates": self.candidates,
            "ties": self.ties,
        }
        if self.num_candidates is not None:
            known["seed"] = self.seed
        return known
