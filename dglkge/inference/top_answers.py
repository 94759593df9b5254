"""The best answers so far, while blocks of candidates pass by."""

from __future__ import annotations

import torch


class TopAnswers:
    """Keeps the k best-scored candidates of each query.

    Parameters
    ----------
    num_queries : int
        Q.
    topk : int
        k.
    """

    def __init__(self, num_queries: int, topk: int) -> None:
        self._topk = topk
        self._scores = torch.empty((num_queries, 0))
        self._ids = torch.empty((num_queries, 0), dtype=torch.int64)

    def add(self, scores: torch.Tensor, ids: torch.Tensor) -> None:
        """Let a block of candidates compete.

        Parameters
        ----------
        scores : (Q, n) tensor
            -inf for a candidate that is out of the question.
        ids : (n,) int64 tensor
        """
        best, places = scores.topk(min(self._topk, scores.shape[1]), dim=1)
        all_scores = torch.cat([self._scores, best], dim=1)
        all_ids = torch.cat([self._ids, ids[places]], dim=1)
        # Two stable sorts: by score, and by id among equal scores, whatever the blocks were.
        by_id = all_ids.argsort(dim=1, stable=True)
        by_score = all_scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
        order = by_id.gather(1, by_score)[:, : self._topk]
        self._scores, self._ids = all_scores.gather(1, order), all_ids.gather(1, order)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores (Q, k) in descending order and the ids (Q, k).

        Where fewer than k candidates were in question, the last scores are -inf or k is smaller. Which of
        several candidates with exactly equal scores makes it to place k is not defined.
        """
        return self._scores, self._ids
