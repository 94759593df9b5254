"""Ranking of triples that are held out of training, against batch and uniform negatives.

The numbers are PyTorch-BigGraph's. Trainers take turns with batches; sums over the trainers give the means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.config.schema import HeldOutConfig
from dglkge.data.dataset_files import TRAIN
from dglkge.kernels.hashing import column_bits, in_range, stream_key
from dglkge.model.kge_model import KgeModel
from dglkge.sampling.triple_order import TripleOrder
from dglkge.training.building.components import configured_loss
from dglkge.training.job import Job
from dglkge.typing import RELATION, Side

METRICS = ("loss", "pos_rank", "mrr", "r1", "r10", "r50", "auc")
"""PyTorch-BigGraph's names; means over both sides."""
VIOLATORS = {Side.HEAD: "violators_lhs", Side.TAIL: "violators_rhs"}
"""Mean number of negatives of a side that score above the true answer."""
_NAMES = (*METRICS, *VIOLATORS.values())

BLOCK_NUMBERS = 1 << 22
"""Queries times candidates times dimension that are compared at a time; ``planning/memory.py`` plans it."""


@dataclass
class HeldOutEvaluator:
    """Ranks the held-out triples of a pass.

    Its uniform negatives are the same in every evaluation, so that numbers before and after compare.

    Attributes
    ----------
    job : Job
        Its trainers take turns with batches.
    settings : HeldOutConfig
    order : TripleOrder
        It names the triples.
    gather : callable
        Returns the rows (n, D) of the original ids (n,) of a table.
    """

    job: Job
    settings: HeldOutConfig
    order: TripleOrder
    gather: Callable[[str, Tensor], Tensor]

    def __post_init__(self) -> None:
        pairs = [(relation.lhs, relation.rhs) for relation in self.job.dataset.relations.relations]
        self._pairs = list(dict.fromkeys(pairs))
        self._pair_of_relation = np.array([self._pairs.index(pair) for pair in pairs], np.int64)
        self._loss = configured_loss(self.job.config)

    @torch.no_grad()
    def evaluate(self, edge_set: int, chunk: int) -> dict[str, Any]:
        """Rank the held-out triples of a chunk of an edge set; a collective.

        Returns
        -------
        dict
            ``count`` triples, and ``metrics`` of PyTorch-BigGraph's names.
        """
        job, size = self.job, self.settings.batch_negatives
        ids = np.sort(self.order.held_out(edge_set, chunk, job.config.training.edge_chunks))
        triples = np.asarray(job.dataset.split(TRAIN)[ids])
        # Batches hold triples of one pair of types, and are the same for any number of trainers.
        batches = []
        for number in range(len(self._pairs)):
            of_pair = triples[self._pair_of_relation[triples[:, 1]] == number]
            batches += [(number, of_pair[start : start + size]) for start in range(0, len(of_pair), size)]
        # Rows are in the host's memory, and a module perhaps on a device.
        model, world = job.model.on_device(torch.device("cpu")), job.cluster.world
        sums = np.zeros(len(_NAMES))
        for place, (number, batch) in enumerate(batches):
            if place % world.world_size == world.rank:
                sums += self._sums(model, self._pairs[number], batch, (edge_set, chunk, place))
        sums = job.cluster.sum(sums)
        count = len(triples)
        return {"count": count, "metrics": dict(zip(_NAMES, (sums / max(count, 1)).tolist()))}

    def _sums(
        self, model: KgeModel, pair: tuple[str, str], batch: np.ndarray, key: tuple[int, int, int]
    ) -> np.ndarray:
        """Return the sums of the metrics over a batch of triples of one pair of entity types."""
        heads, relations, tails = (torch.from_numpy(np.ascontiguousarray(column)) for column in batch.T)
        rows = {Side.HEAD: self.gather(pair[0], heads), Side.TAIL: self.gather(pair[1], tails)}
        relation_rows = self.gather(RELATION, relations)
        found = dict.fromkeys(_NAMES, 0.0)
        for side, anchor_side, answers in ((Side.TAIL, Side.HEAD, tails), (Side.HEAD, Side.TAIL, heads)):
            entity_type = pair[side is Side.TAIL]
            drawn = self._uniform(entity_type, side, key)
            candidates = torch.cat([rows[side], self.gather(entity_type, drawn)])
            query = model.query(rows[anchor_side], relation_rows, side, relations)
            block = max(1, BLOCK_NUMBERS // max(1, len(candidates) * query.shape[1]))
            scores = torch.cat([model.compare_plainly(one, candidates) for one in query.split(block)])
            positive = model.compare_pairs(query, rows[side])
            # A candidate that is the true answer is none of its negatives.
            ignored = answers[:, None] == torch.cat([answers, drawn])[None, :]
            counts = (~ignored).sum(1)
            above = ((scores > positive[:, None]) & ~ignored).sum(1)
            equal = ((scores == positive[:, None]) & ~ignored).sum(1)
            # Pessimistic among equal scores, as PyTorch-BigGraph.
            rank = (above + equal + 1).double()
            below = (counts - above).double() - equal / 2
            values = {
                "loss": self._loss(positive, scores, ignored).double(),
                "pos_rank": rank / 2,
                "mrr": 1 / rank / 2,
                **{f"r{k}": (rank <= k).double() / 2 for k in (1, 10, 50)},
                # The share of negatives below the true answer, one half without any.
                "auc": torch.where(counts > 0, below / counts.clamp(min=1), 0.5) / 2,
                VIOLATORS[side]: above.double(),
            }
            for name, value in values.items():
                found[name] += float(value.sum())
        return np.array([found[name] for name in _NAMES])

    def _uniform(self, entity_type: str, side: Side, key: tuple[int, int, int]) -> Tensor:
        """Draw original ids of a type, uniformly with replacement."""
        stream = stream_key(self.job.config.seed, "held out", entity_type, side.name, *key)
        bits = column_bits(stream, self.settings.uniform_negatives)[0]
        return torch.from_numpy(in_range(bits, self.job.dataset.num_entities(entity_type)))
