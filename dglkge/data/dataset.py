"""The dataset folder as ``partition_tools/partition.py`` writes it, opened for reading."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.data import dataset_files
from dglkge.data.json_file import load_json
from dglkge.data.partition_layout import PartitionLayout
from dglkge.data.relation_vocabulary import RelationVocabulary
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError

_REQUIRED: dict[str, type] = {
    "name": str,
    "entity_types": dict,
    "num_relations": int,
    "splits": dict,
    "edge_types": list,
    "has_weights": bool,
    "fingerprint": str,
    "graph_name": str,
    "num_parts": int,
    "part_method": str,
}


class Dataset:
    """A dataset folder. Build one with :meth:`Dataset.open`.

    Attributes
    ----------
    path : Path
        The folder.
    description : dict
        The content of ``dataset.json``.
    name : str
        Name of the dataset.
    entity_types : list of str
        The entity types in their fixed order.
    relations : RelationVocabulary
        The relations by original id.
    edge_types : list of (lhs, rhs, first_triple_id, end_triple_id)
        The pairs of entity types that training triples join, and the range of triple ids of each.
    has_weights : bool
        Whether the training triples have weights.
    fingerprint : str
        Hash of the vocabularies and splits; does not depend on the partitioning.
    graph_name, num_parts, part_method
        How the graph was partitioned.
    graph_config_path : Path
        DGL's description of the partitions.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path = path
        self.description = description
        self.name: str = description["name"]
        self.entity_types: list[str] = list(description["entity_types"])
        self.edge_types: list[tuple[str, str, int, int]] = [
            (lhs, rhs, first, end) for lhs, rhs, first, end in description["edge_types"]
        ]
        self.has_weights: bool = description["has_weights"]
        self.fingerprint: str = description["fingerprint"]
        self.graph_name: str = description["graph_name"]
        self.num_parts: int = description["num_parts"]
        self.part_method: str = description["part_method"]
        self.graph_config_path = path / dataset_files.PARTITIONS / f"{self.graph_name}.json"
        self._vocabularies: dict[str, Vocabulary] = {}

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a dataset folder and check that every file is there and has the size it should have.

        Raises
        ------
        InputError
            If the folder is missing, foreign or half-written; the message names the file.
        """
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"{path} is no dataset folder: there is no such folder")
        if not (path / dataset_files.DESCRIPTION).is_file():
            raise InputError(
                f"{path} is no dataset folder: it has no {dataset_files.DESCRIPTION} "
                "(partition_tools/partition.py makes dataset folders)"
            )
        dataset = cls(path, read_description(path))
        dataset.relations  # noqa: B018 -- read now, so that a damaged file is an error here and not in mid-training
        for split in dataset_files.SPLITS:
            dataset.split(split)
        dataset.train_weights()
        for entity_type in dataset.entity_types:
            names_path = dataset_files.vocabulary_path(path, entity_type)
            if not names_path.is_file():
                raise InputError(f"{path} is half-written: {names_path} is missing")
        dataset.layout()
        return dataset

    def num_entities(self, entity_type: str) -> int:
        """Return how many entities a type has."""
        counts: dict[str, int] = self.description["entity_types"]
        return counts[entity_type]

    @property
    def num_relations(self) -> int:
        """How many relations there are."""
        return len(self.relations)

    @cached_property
    def relations(self) -> RelationVocabulary:
        """The relations by original id."""
        path = self.path / dataset_files.RELATIONS
        relations = RelationVocabulary.load(path)
        expected = self.description["num_relations"]
        if len(relations) != expected:
            raise InputError(
                f"{path} has {len(relations)} relations, {dataset_files.DESCRIPTION} says {expected}"
            )
        return relations

    def vocabulary(self, entity_type: str) -> Vocabulary:
        """Return the names of an entity type's entities; read once.

        Raises
        ------
        InputError
            If the type is unknown or its file is damaged.
        """
        if entity_type not in self._vocabularies:
            if entity_type not in self.entity_types:
                known = ", ".join(self.entity_types)
                raise InputError(f"{self.path} has no entity type {entity_type!r}; known: {known}")
            path = dataset_files.vocabulary_path(self.path, entity_type)
            vocabulary = Vocabulary.load(path, noun="entity")
            if len(vocabulary) != self.num_entities(entity_type):
                raise InputError(
                    f"{path} has {len(vocabulary)} names, "
                    f"{dataset_files.DESCRIPTION} says {self.num_entities(entity_type)}"
                )
            self._vocabularies[entity_type] = vocabulary
        return self._vocabularies[entity_type]

    def split(self, name: str) -> np.ndarray:
        """Return the triples of a split.

        Returns
        -------
        (n, 3) int64
            Head, relation and tail as original ids, mapped from the file.
        """
        if name not in dataset_files.SPLITS:
            raise InputError(f"no split is called {name!r}; known: {', '.join(dataset_files.SPLITS)}")
        num_triples: int = self.description["splits"][name]
        return dataset_files.load_array(dataset_files.split_path(self.path, name), (num_triples, 3), np.int64)

    def train_weights(self) -> np.ndarray | None:
        """Return the weights of the training triples, (n,) float32, or None where they have none."""
        if not self.has_weights:
            return None
        num_triples: int = self.description["splits"]["train"]
        return dataset_files.load_array(self.path / dataset_files.TRAIN_WEIGHTS, (num_triples,), np.float32)

    def layout(self) -> PartitionLayout:
        """Open the partitions.

        Raises
        ------
        InputError
            If they are missing, damaged or not those of this dataset.
        """
        layout = PartitionLayout.open(self.path / dataset_files.PARTITIONS, self.graph_name)
        if layout.num_parts != self.num_parts:
            raise InputError(
                f"{self.graph_config_path} describes {layout.num_parts} partitions, "
                f"{dataset_files.DESCRIPTION} says {self.num_parts}"
            )
        return layout


def read_description(path: Path) -> dict[str, Any]:
    """Read and check ``dataset.json``.

    Raises
    ------
    InputError
        If it is not one, or of another format version.
    """
    file = path / dataset_files.DESCRIPTION
    description = load_json(file)
    version = description.get("format_version")
    if version is None:
        raise InputError(f"{file} is not of a dglkge dataset: it has no format_version")
    if version != dataset_files.FORMAT_VERSION:
        raise InputError(
            f"{file} has format version {version!r}, "
            f"this dglkge reads {dataset_files.FORMAT_VERSION}: partition again"
        )
    for key, kind in _REQUIRED.items():
        if not isinstance(description.get(key), kind):
            raise InputError(f"{file}: {key} is {description.get(key)!r}, expected {kind.__name__}")
    for split in dataset_files.SPLITS:
        if not isinstance(description["splits"].get(split), int):
            raise InputError(f"{file}: splits has no number of triples for {split!r}")
    return description
