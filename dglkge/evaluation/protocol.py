"""What a ranking was measured against: two results compare only if their protocols are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from dglkge.errors import InputError
from dglkge.evaluation.ranks import check_ties


@dataclass(frozen=True)
class Protocol:
    """How a split is ranked.

    Attributes
    ----------
    split : str
        Which triples, e.g. ``"test"``.
    filtered : bool
        Whether other known answers of a query are left out (Bordes et al. 2013), or compete: raw.
    num_candidates : int, optional
        Corrupted entities drawn for each query, with replacement; None for all entities of the right type.
        Types with no more entities than that are ranked in full. Full and sampled figures do not compare.
    ties : str
        ``"realistic"``, ``"optimistic"`` or ``"pessimistic"``; see :func:`dglkge.evaluation.ranks.ranks`.
    batch_size : int
        True answers ranked at once; changes memory and speed, never a result.
    seed : int
        Seed of the drawn candidates.

    Raises
    ------
    InputError
        If a field is out of range.
    """

    split: str = "test"
    filtered: bool = True
    num_candidates: Optional[int] = None
    ties: str = "realistic"
    batch_size: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        check_ties(self.ties)
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

    def describe(self) -> str:
        """Return the protocol in one line."""
        filtering = "filtered" if self.filtered else "raw"
        return f"{self.split} split, {filtering}, {self.candidates} candidates, {self.ties} ties"

    def to_dict(self) -> dict[str, Any]:
        """Return what a reader of the figures has to know, ready for JSON."""
        known: dict[str, Any] = {
            "split": self.split,
            "filtering": "filtered" if self.filtered else "raw",
            "candidates": self.candidates,
            "ties": self.ties,
        }
        if self.num_candidates is not None:
            known["seed"] = self.seed
        return known
