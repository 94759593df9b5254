"""Categories of relations (1-1, 1-N, N-1, N-N) by the mean numbers of tails of a head and heads of a tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.errors import InputError

MANY_FROM = 1.5
"""Mean from which a side counts as many (Bordes et al. 2013, section 4.3)."""

CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
UNSEEN = "not in train"
"""In the place of a category: a relation without training triples has no means."""


@dataclass(frozen=True)
class RelationCategories:
    """Category of each relation.

    Attributes
    ----------
    names : sequence of str
        By relation id: one of :data:`CATEGORIES`, or :data:`UNSEEN`. ``1-N`` means one head, many tails.
    tails_per_head, heads_per_tail : (R,) float64 array
        Mean number of distinct tails of a (head, relation) and of heads of a (relation, tail); NaN for a
        relation without triples.
    """

    names: Sequence[str]
    tails_per_head: np.ndarray
    heads_per_tail: np.ndarray

    def to_dict(self, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return category and means of each relation that has triples, by label, ready for JSON."""
        return {
            labels[id_]: {
                "category": name,
                "tails_per_head": float(self.tails_per_head[id_]),
                "heads_per_tail": float(self.heads_per_tail[id_]),
            }
            for id_, name in enumerate(self.names)
            if name != UNSEEN
        }


def relation_categories(
    triples: np.ndarray, num_relations: int, many_from: float = MANY_FROM
) -> RelationCategories:
    """Compute the category of each relation.

    A side is many if its mean is at least ``many_from``: hpt heads of a (relation, tail), tph tails of a
    (head, relation). hpt and tph decide N-N, N-1, 1-N and 1-1 (Bordes et al. 2013, section 4.3; Wang et al.
    2014, section "Link Prediction").

    Parameters
    ----------
    triples : (n, 3) int64 array
        Head, relation and tail of the training triples; duplicates count once.
    num_relations : int
        R.
    many_from : float

    Returns
    -------
    RelationCategories

    Raises
    ------
    InputError
        If the limit is less than 1, which no mean is.

    Examples
    --------
    >>> relation_categories(np.array([[0, 0, 5], [1, 0, 5], [2, 0, 5], [3, 0, 6]]), 1).names
    ['N-1']
    """
    if not many_from >= 1:
        raise InputError(f"the mean from which a side is many must be at least 1, got {many_from}")
    # A pair becomes one number, as in KnownTriples; sorted numbers give the distinct ones.
    with_head = triples[:, 0].astype(np.int64) * num_relations + triples[:, 1]
    with_tail = triples[:, 2].astype(np.int64) * num_relations + triples[:, 1]
    order = np.lexsort((triples[:, 2], with_head))
    head, tail = with_head[order], triples[order, 2]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (head[1:] != head[:-1]) | (tail[1:] != tail[:-1])
    num_triples = np.bincount(head[new] % num_relations, minlength=num_relations)
    num_heads = np.bincount(np.unique(with_head) % num_relations, minlength=num_relations)
    num_tails = np.bincount(np.unique(with_tail) % num_relations, minlength=num_relations)
    with np.errstate(invalid="ignore"):  # 0 / 0 of a relation without triples
        tails_per_head, heads_per_tail = num_triples / num_heads, num_triples / num_tails
    place = 2 * (heads_per_tail >= many_from).astype(int) + (tails_per_head >= many_from)
    names = [CATEGORIES[p] if count else UNSEEN for p, count in zip(place.tolist(), num_triples.tolist())]
    return RelationCategories(names, tails_per_head, heads_per_tail)
