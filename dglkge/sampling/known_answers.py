"""Known answers among sampled negatives (``negatives.mask_known``): they do not count as negatives.

Of the training triples only: a true triple of another split is not known while a model is trained. Everything
is found by original ids, so it does not depend on how the graph was partitioned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dglkge.data.known_triples import KnownTriples
from dglkge.kernels.softmax import ignore_known
from dglkge.sampling.negatives import find_equal
from dglkge.typing import RELATION, Side

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KnownNegatives:
    """Known answers to queries (B,), and negatives (N,) that they are looked up among.

    Attributes
    ----------
    first, count : (B,) int64
        The answers to query i are ``answers[first[i] : first[i] + count[i]]``.
    answers, negative_ids : (A,) uint32 or int64, and (N,) int64
        Original ids.
    own : (B,) bool
        Whether the query's own entity is a known answer, if it has the type of the answers.
    """

    first: Ids
    count: Ids
    answers: npt.NDArray[np.integer]
    negative_ids: Ids
    own: npt.NDArray[np.bool_]

    def overwrite(
        self, scores: npt.NDArray[Any], ignored: Any, slots: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Write a value in place of the scores, or a mask, (B, N) of known answers.

        ``slots`` (H + N,) is room as in :func:`dglkge.kernels.softmax.ignore_known`.
        """
        num = len(self.negative_ids)
        if slots is None:
            slots = np.empty((2 << num.bit_length()) + num, np.int32)
        ignore_known((self.first, self.count, self.answers), self.negative_ids, ignored, slots, scores)

    def ignore(self, mask: npt.NDArray[np.bool_], plainly: bool) -> None:
        """Set the places (B, N) of known answers to True; ``plainly`` without compiled loops."""
        if not plainly:
            self.overwrite(mask, True)
            return
        for row, (first, count) in enumerate(zip(self.first, self.count)):
            _, columns = find_equal(self.answers[first : first + count].astype(np.int64), self.negative_ids)
            mask[row, columns] = True


@dataclass
class KnownAnswers:
    """Finds the known answers among the training triples to the queries of batches.

    ``original_ids`` has that of every node id, of each entity type and of the relations.
    """

    known: KnownTriples
    original_ids: Mapping[str, Ids]

    def among(
        self, side: Side, anchor_type: str, anchors: Ids, relations: Ids, answer_type: str, negative_ids: Ids
    ) -> KnownNegatives:
        """Return the known answers to queries (B,) for a missing side, to be looked up among negatives (N,).

        All by node ids.
        """
        entities = self.original_ids[anchor_type][anchors]
        relation_ids = self.original_ids[RELATION][relations]
        first, count, answers = self.known.runs(side, entities, relation_ids)
        # Entities are numbered by type: between two types an equal number is another entity, and such queries
        # have no entity of their own to score.
        own = self.known.contain(side, entities, relation_ids, entities)
        return KnownNegatives(first, count, answers, self.original_ids[answer_type][negative_ids], own)
