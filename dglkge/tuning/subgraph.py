"""k-cores of a data set, and data set folders of them: the triples between entities of a core.

In the k-core, the largest such subgraph, every entity has at least k triples.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN, VALID
from dglkge.data.text_format import ROLES, TIME, WEIGHT
from dglkge.errors import InputError
from dglkge.partition.entity_types import DEFAULT_TYPE
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options

FEWEST_VALID = 500
"""Valid triples that a subgraph should have; held out of its training triples where a split has fewer."""
MOST_HELD_OUT = 0.05
"""Most training triples that are held out for it."""


class Cores:
    """The k-cores of a data set's training triples.

    Attributes
    ----------
    of_train, of_valid : (n,) int64 array
        For each triple the greatest k of the k-cores that have it.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        # Ids are counted within a type: a type's entities follow those of the types before it.
        types = dataset.entity_types
        sizes = [dataset.num_entities(name) for name in types]
        first = dict(zip(types, np.cumsum([0, *sizes]).tolist()))
        relations = dataset.relations.relations
        self._lhs = np.array([first[relation.lhs] for relation in relations])
        self._rhs = np.array([first[relation.rhs] for relation in relations])
        ends = self._ends(dataset.split(TRAIN))
        core = core_numbers(*ends, sum(sizes))
        self.of_train = triple_cores(*ends, core)
        self.of_valid = triple_cores(*self._ends(dataset.split(VALID)), core)

    def _ends(self, triples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return head and tail of each triple as nodes of one numbering."""
        relation_ids = triples[:, 1]
        return triples[:, 0] + self._lhs[relation_ids], triples[:, 2] + self._rhs[relation_ids]

    def write(self, core: int, folder: Path, seed: int) -> None:
        """Write the data set folder of a k-core, in one partition.

        Its valid triples are those of the data set between entities and with relations of its training
        triples. If they are few, some of its training triples are held out as well, drawn by the seed. If
        nothing is left to rank, InputError.
        """
        chosen = np.flatnonzero(self.of_train >= core)
        train, valid = self._dataset.split(TRAIN)[chosen], self._dataset.split(VALID)[self.of_valid >= core]
        valid = valid[np.isin(valid[:, 1], np.unique(train[:, 1]))]
        missing = min(FEWEST_VALID - len(valid), int(MOST_HELD_OUT * len(train)))
        weights = self._dataset.train_weights()
        weights = None if weights is None else weights[chosen]
        if missing > 0:
            held_out = np.zeros(len(train), dtype=bool)
            held_out[np.random.default_rng(seed).choice(len(train), missing, replace=False)] = True
            valid = np.concatenate([valid, train[held_out]])
            train, weights = train[~held_out], None if weights is None else weights[~held_out]
        if not len(valid):
            raise InputError(
                f"the {core}-core of {self._dataset.path} has {len(train)} training triples and no valid "
                "ones to rank; search with a greater budget or fewer trials"
            )
        types = None
        if self._dataset.entity_types != [DEFAULT_TYPE]:
            types = folder.with_name(folder.name + ".types.tsv")
            types.parent.mkdir(parents=True, exist_ok=True)
            with open(types, "w", encoding="utf-8", newline="") as file:
                for name in self._dataset.entity_types:
                    file.writelines(f"{entity}\t{name}\n" for entity in self._dataset.vocabulary(name).names)
        frames = [self._named(train), self._named(valid)]
        columns = ",".join(frames[0].columns)
        if weights is not None:
            columns += f",{WEIGHT}"
            frames[0][WEIGHT] = weights
            frames[1][WEIGHT] = np.float32(1)
        name = f"{self._dataset.name}_core{core}"
        options = Options(1, "random", seed, entity_types=types, overwrite=True, name=name, progress=False)
        partition_dataframe(frames[0], folder, frames[1], columns=columns, options=options)

    def _named(self, triples: np.ndarray) -> pd.DataFrame:
        """Return triples by name, with their times if they have any."""
        relations = self._dataset.relations
        names = np.empty((len(triples), 4), dtype=object)
        for relation_id in np.unique(triples[:, 1]).tolist():
            relation, rows = relations[relation_id], np.flatnonzero(triples[:, 1] == relation_id)
            heads, tails = self._dataset.vocabulary(relation.lhs), self._dataset.vocabulary(relation.rhs)
            names[rows, 0] = [heads[id_] for id_ in triples[rows, 0].tolist()]
            row, time = divmod(relation_id, relations.num_times)
            names[rows, 1] = relations.timeless[row].name
            names[rows, 3] = relations.times[time] if relations.times else None
            names[rows, 2] = [tails[id_] for id_ in triples[rows, 2].tolist()]
        frame = pd.DataFrame(names, columns=[*ROLES, TIME])
        return frame if relations.times else frame[list(ROLES)]


def core_numbers(heads: np.ndarray, tails: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the core number of each node of a multigraph: the greatest k of the k-cores that have it.

    Nodes of the smallest degree are removed until none is left (Seidman 1983; Matula and Beck 1983). A triple
    counts once at each of its ends. Heads and tails are (n,) int64, as is the result for N nodes.
    """
    degree = np.bincount(heads, minlength=num_nodes) + np.bincount(tails, minlength=num_nodes)
    core = np.zeros(num_nodes, dtype=np.int64)
    alive = degree > 0
    k = 0
    while alive.any():
        k = max(k, int(degree[alive].min()))
        # Removing one node may leave another with too few edges, so a level is repeated until it is stable.
        while (removed := alive & (degree <= k)).any():
            core[removed] = k
            alive &= ~removed
            kept = alive[heads] & alive[tails]
            degree -= np.bincount(heads[~kept], minlength=num_nodes)
            degree -= np.bincount(tails[~kept], minlength=num_nodes)
            heads, tails = heads[kept], tails[kept]
    return core


def triple_cores(heads: np.ndarray, tails: np.ndarray, core: np.ndarray) -> np.ndarray:
    """Return for each triple the greatest k of the k-cores that have both its ends, (n,) int64."""
    return np.minimum(core[heads], core[tails])


def core_shares(cores: np.ndarray) -> np.ndarray:
    """Return the share of the triples in the k-core for k = 0, 1, ... up to the densest one, float64."""
    return np.cumsum(np.bincount(cores)[::-1])[::-1] / len(cores)
