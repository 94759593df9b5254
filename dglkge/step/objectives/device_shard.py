"""The softmax over all candidates of a shard whose rows lie on a device, where scores are inner products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dglkge.model.full_losses import GREATEST, NO_ANSWERS, TARGET, TOTAL, AnswerScores, Totals
from dglkge.model.negative_terms import IGNORED_SCORE
from dglkge.planning.memory import KEPT_SHARES
from dglkge.step.objectives.shard_objective import Answers, AutogradShard, Floats, ShardNumbers
from dglkge.step.reductions import MOST_COLUMNS, share_scores, sum_by_place


@dataclass(frozen=True)
class Panel:
    """Consecutive rows (w, D) of a shard in the type of the products, with the shares (Q, w) of their scores
    in the sum of powers of the panel, and the logarithm of each query's sum (Q,).
    """

    run: slice
    rows: Tensor
    shares: Tensor
    logs: Tensor


@dataclass
class DeviceSoftmaxShard(AutogradShard):
    """Scores and gradients by three matrix products and one pass over the scores; see :class:`AutogradShard`.

    Shares are those of a panel alone; a query's factor for each panel follows once all are known.
    """

    @torch.no_grad()
    def score(
        self, queries: Tensor, rows: Tensor, answers: Answers, scores: AnswerScores = NO_ANSWERS
    ) -> ShardNumbers:
        self._panels: list[Panel] = []
        if not 0 < len(queries) * len(rows) <= KEPT_SHARES:
            return super().score(queries, rows, answers, scores)
        queries = self._queries = queries.to(rows.device)
        self._rows = rows
        places, query_of = (self._there(torch.from_numpy(one)) for one in (answers.places, answers.query_of))
        keep = 1 - self.objective.label_smoothing
        labels = self._there(torch.from_numpy((keep * answers.shares).astype(np.float32)))
        true = (queries[query_of] * rows[places]).sum(1)
        self._of_answers = places, query_of, labels, true
        operand = queries.to(self._dtype)
        for start in range(0, len(rows), MOST_COLUMNS):
            run = slice(start, min(start + MOST_COLUMNS, len(rows)))
            candidates = rows[run].to(self._dtype)
            powers = operand @ candidates.T
            self._ignore_answers(powers, run)
            self._panels.append(Panel(run, candidates, powers, share_scores(powers)))
        return ShardNumbers(self._numbers().cpu().numpy())

    def _ignore_answers(self, scores: Tensor, run: slice) -> None:
        """Overwrite the scores (Q, w) of answers among the rows of a panel, which are added by themselves."""
        places, query_of, *_ = self._of_answers
        if run != slice(0, len(self._rows)):
            here = (places >= run.start) & (places < run.stop)
            places, query_of = places[here] - run.start, query_of[here]
        scores[query_of, places] = IGNORED_SCORE

    def _numbers(self) -> Tensor:
        """Return the numbers (3, Q) of this shard."""
        _, query_of, labels, true = self._of_answers
        queries, num = self._queries, len(self._queries)
        logs = (
            torch.stack([panel.logs for panel in self._panels]) if self._panels else queries.new_empty(0, num)
        )
        numbers = queries.new_full((3, num), IGNORED_SCORE)
        greatest = numbers[GREATEST].scatter_reduce_(0, query_of, true, "amax")
        if len(logs):
            torch.maximum(greatest, logs.amax(0), out=greatest)
        both = torch.stack([(true - greatest[query_of]).exp(), labels * true], 1)
        powers, targets = sum_by_place(both, query_of, num).T
        numbers[TOTAL] = (logs - greatest).exp().sum(0) + powers
        numbers[TARGET] = targets
        if self.objective.background:
            self._sum_of_rows = self._rows.sum(0)
            numbers[TARGET] += self.objective.background * (queries @ self._sum_of_rows)
        return numbers

    def differentiate(self, totals: Totals, factors: Floats, of_queries: Tensor, of_rows: Tensor) -> None:
        through = self._differentiate if self._panels else super().differentiate
        through(totals, factors, of_queries, of_rows)

    @torch.no_grad()
    def _differentiate(self, totals: Totals, factors: Floats, of_queries: Tensor, of_rows: Tensor) -> None:
        """Write the gradients from shares that are kept."""
        places, query_of, labels, true = self._of_answers
        queries, weights = self._queries, self._there(torch.from_numpy(factors))
        normalizers = self._there(torch.from_numpy(totals.normalizers.astype(np.float32)))
        of_true = weights[query_of] * ((true - normalizers[query_of]).exp() - labels)
        found = sum_by_place(of_true[:, None] * self._rows[places], query_of, len(queries))
        for panel in self._panels:
            scales = (weights * (panel.logs - normalizers).exp())[:, None]
            found += scales * (panel.shares @ panel.rows)
            of_rows[panel.run] = panel.shares.T @ (scales * queries).to(self._dtype)
        of_rows += sum_by_place(of_true[:, None] * queries[query_of], places, len(self._rows))
        if self.objective.background:
            found.addr_(weights, self._sum_of_rows, alpha=-self.objective.background)
            of_rows.sub_(self.objective.background * (weights @ queries))
        of_queries.copy_(found)
        self._panels = []
