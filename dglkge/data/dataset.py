"""A data set folder, which ``partition_tools/partition.py`` wrote, opened for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dglkge.data import dataset_files
from dglkge.data.dataset_files import SPLITS, TRAIN, DatasetSize, Field
from dglkge.data.known_triples import Index, KnownTriples, open_known_index
from dglkge.data.partition_layout import PartitionLayout, load_array
from dglkge.data.vocabulary import MappedNames, RelationVocabulary, Vocabulary, read_lines
from dglkge.errors import InputError
from dglkge.typing import Ids

if TYPE_CHECKING:
    from dglkge.data.quality import NumberedTriples


class Dataset:
    """A data set folder. Build one with :meth:`Dataset.open`.

    Each file is read or mapped once, when it is first needed. Share one object in a process.

    Attributes
    ----------
    path : Path
        The folder.
    description : dict
        The content of ``dataset.json``.
    name : str
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
    graph_name, num_parts, part_method, graph_config_path
        How the graph was partitioned, and DGL's description of the partitions.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path = path
        self.description = description
        self.name: str = description[Field.NAME]
        self.entity_types: list[str] = list(description[Field.ENTITY_TYPES])
        edge_types = description[Field.EDGE_TYPES]
        self.edge_types: list[tuple[str, str, int, int]] = [tuple(edge_type) for edge_type in edge_types]
        self.has_weights: bool = description[Field.HAS_WEIGHTS]
        self.fingerprint: str = description[Field.FINGERPRINT]
        self.graph_name: str = description[Field.GRAPH_NAME]
        self.num_parts: int = description[Field.NUM_PARTS]
        self.part_method: str = description[Field.PART_METHOD]
        self._partitions = path / dataset_files.PARTITIONS
        self.graph_config_path = dataset_files.graph_config_path(self._partitions, self.graph_name)
        self._vocabularies: dict[str, Vocabulary] = {}
        self._splits: dict[str, np.ndarray] = {}
        self._known: dict[str, Index] = {}
        self._layout: PartitionLayout | None = None

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a data set folder and check that every file is there and has the expected size.

        Raises
        ------
        InputError
            If the folder is missing, foreign or half-written; the message names the file.
        """
        path = Path(path)
        dataset_files.require_dataset(path)
        dataset = cls(path, dataset_files.read_description(path))
        # Read now: a damaged file is an error before training starts, not in the middle of it.
        dataset.relations  # noqa: B018
        for split in SPLITS:
            dataset.split(split)
        dataset.train_weights()
        dataset.edge_set_of_triples()
        for entity_type in dataset.entity_types:
            # Only their presence is checked: names are read when a name is looked up, and training needs
            # none.
            names_path = dataset_files.vocabulary_path(path, entity_type)
            if not names_path.is_file():
                raise InputError(f"{path} is half-written: {names_path} is missing")
        dataset.layout()
        return dataset

    def verify(self) -> None:
        """Compare files of this machine with their checksums; raises InputError if one differs or is gone."""
        dataset_files.verify_checksums(self.path, self.description.get(Field.CHECKSUMS, {}))

    def num_entities(self, entity_type: str) -> int:
        """Return the number of entities of a type."""
        return int(self.description[Field.ENTITY_TYPES][entity_type])

    @property
    def num_relations(self) -> int:
        """Number of relations, each counted at every time."""
        return len(self.relations)

    @property
    def num_times(self) -> int:
        """Number of times; 1 where triples have none."""
        return int(self.description.get(Field.NUM_TIMES, 1))

    @cached_property
    def relations(self) -> RelationVocabulary:
        """The relations by original id, at their times where triples have one."""
        path, times_path = self.path / dataset_files.RELATIONS, self.path / dataset_files.TIMES
        times = read_lines(times_path) if Field.NUM_TIMES in self.description else []
        relations = RelationVocabulary.load(path, times)
        _require(path, "has", len(relations.timeless), "relations", self.description[Field.NUM_RELATIONS])
        _require(times_path, "has", relations.num_times, "times", self.num_times)
        return relations

    def vocabulary(self, entity_type: str) -> Vocabulary:
        """Return the names of an entity type's entities; read once."""
        if entity_type not in self._vocabularies:
            if entity_type not in self.entity_types:
                known = ", ".join(self.entity_types)
                raise InputError(f"{self.path} has no entity type {entity_type!r}; known: {known}")
            self._vocabularies[entity_type] = self._names(entity_type, read_lines)
        return self._vocabularies[entity_type]

    def mapped_vocabulary(self, entity_type: str) -> Vocabulary:
        """Return the names of an entity type's entities, each read from the file when it is asked for."""
        return self._names(entity_type, MappedNames)

    def _names(self, entity_type: str, read: Callable[[Path], Sequence[str]]) -> Vocabulary:
        path = dataset_files.vocabulary_path(self.path, entity_type)
        names = read(path)
        _require(path, "has", len(names), "names", self.num_entities(entity_type))
        return Vocabulary(names, "entity")

    def names_of(self, entity_type: str, ids: np.ndarray) -> list[str]:
        """Return the names of entities of original ids (n,); the others of the file are not kept."""
        names = self._vocabularies.get(entity_type) or self.mapped_vocabulary(entity_type)
        return [names[id_] for id_ in ids.tolist()]

    def split(self, name: str) -> np.ndarray:
        """Return the triples of a split as original ids, (n, 3) int64, mapped from the file."""
        if name not in SPLITS:
            raise InputError(f"no split is called {name!r}; known: {', '.join(SPLITS)}")
        if name not in self._splits:
            shape = (self.description[Field.SPLITS][name], 3)
            self._splits[name] = load_array(dataset_files.split_path(self.path, name), shape, np.int64)
        return self._splits[name]

    def known_triples(self, splits: Sequence[str] = SPLITS, also_known: Sequence[Ids] = ()) -> KnownTriples:
        """Return the known answers of some splits, and of more triples (n, 3) of original ids.

        The splits' index is in files of the folder, which the first use makes: 16 bytes a triple, shared by
        all processes of the machine.
        """
        return KnownTriples(also_known, self.num_relations, [partial(self._index, split) for split in splits])

    def _index(self, split: str) -> Index:
        if split not in self._known:
            about = self.fingerprint, self.split(split), self.num_relations
            self._known[split] = open_known_index(self.path, split, *about)
        return self._known[split]

    def candidates(self, split: str) -> np.ndarray:
        """Return the entities that the head and the tail of each triple of a split are ranked among.

        Returns
        -------
        (2, n, K) int32
            Original ids of the heads' and of the tails' types, mapped from the file.
        """
        path = dataset_files.candidates_path(self.path, split)
        if not path.is_file():
            raise InputError(f"the {split} triples of {self.path} came without candidates, which OGB's have")
        return load_array(path, (2, self.description[Field.SPLITS][split], None), np.int32)

    def train_weights(self) -> np.ndarray | None:
        """Return the weights of the training triples, (n,) float32, or None where they have none."""
        return self._train_column(dataset_files.TRAIN_WEIGHTS, np.float32) if self.has_weights else None

    @property
    def edge_set_names(self) -> list[str]:
        """Names of the sets of training triples: ``train``, and those that ``extend.py`` added."""
        return list(self.description.get(Field.EDGE_SET_NAMES, [TRAIN]))

    def edge_set_of_triples(self) -> np.ndarray | None:
        """Return the number of the edge set of each training triple, (n,) int32; None if there is one set."""
        has_sets = len(self.edge_set_names) > 1
        return self._train_column(dataset_files.EDGE_SETS, np.int32) if has_sets else None

    def _train_column(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        """Map a file with a value of each training triple, (n,)."""
        return load_array(self.path / name, (self.description[Field.SPLITS][TRAIN],), dtype)

    def layout(self) -> PartitionLayout:
        """Return the partitions; opened once. Raises InputError if they are not those of this data set."""
        if self._layout is None:
            layout = PartitionLayout.open(self._partitions, self.graph_name, self.num_times)
            # The two files are written by different programs (ours and DGL): a copy may have mixed two data
            # sets.
            _require(self.graph_config_path, "describes", layout.num_parts, "partitions", self.num_parts)
            self._layout = layout
        return self._layout

    def size(self) -> DatasetSize:
        """Return the sizes of the data set and of its partitions."""
        return dataset_files.read_dataset_size(self.path)

    def quality(self) -> dict[str, Any]:
        """Return the figures of the data's quality that partitioning has measured, of leaks and others.

        Returns
        -------
        dict
            docs/data-quality.md explains each field.

        Examples
        --------
        >>> Dataset.open("data/wn18").quality()["leaks"]["test"]["reverse_in_train"]  # doctest: +SKIP
        {'triples': 4698, 'share': 0.9396}
        """
        return dataset_files.load_json(self._partitions / dataset_files.REPORT)[Field.QUALITY]

    def numbered(self) -> NumberedTriples:
        """Return the triples with entities counted over all types, type after type."""
        from dglkge.data.quality import NumberedTriples  # here: its loops import numba

        starts = np.cumsum([0, *map(self.num_entities, self.entity_types)])
        start_of = dict(zip(self.entity_types, starts.tolist()))
        lhs = np.array([start_of[relation.lhs] for relation in self.relations.relations])
        rhs = np.array([start_of[relation.rhs] for relation in self.relations.relations])
        splits = {}
        for split in SPLITS:
            heads, relations, tails = self.split(split).T
            splits[split] = (heads + lhs[relations], relations, tails + rhs[relations])

        def entity_name(number: int) -> str:
            place = int(np.searchsorted(starts, number, side="right")) - 1
            return self.vocabulary(self.entity_types[place])[number - int(starts[place])]

        counts = int(starts[-1]), self.num_relations
        return NumberedTriples(splits, *counts, entity_name, self.relations.labels.__getitem__)


def _require(path: Path, verb: str, count: int, noun: str, expected: int) -> None:
    """Raise InputError if a file does not have the number of things that the description says."""
    if count != expected:
        raise InputError(f"{path} {verb} {count} {noun}, {dataset_files.DESCRIPTION} says {expected}")
