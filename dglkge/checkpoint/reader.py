"""A checkpoint opened on files alone: no server, no trainer; rows are mapped and read on demand."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import torch

from dglkge.checkpoint import bigraph, hdf5_format, layout
from dglkge.checkpoint.features import RECORD, open_features, record_path
from dglkge.checkpoint.hdf5_format import DENSE_GROUP, dense_parameters, dense_path
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest
from dglkge.checkpoint.mirror import local_path
from dglkge.checkpoint.part_files import read_relations, read_state
from dglkge.checkpoint.storage import CheckpointStorage, check_files, read_version
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import CheckpointError, InputError, os_errors, require_known, unknown_name
from dglkge.formats.bigraph_files import read_entity_names
from dglkge.formats.relation_parameters import global_vector_path
from dglkge.model.dense_modules import PREFIX, ProjectedFeatures, projections_of
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.typing import RELATION, RowShard

Key = int | str | slice | Sequence[int] | Sequence[str] | np.ndarray | torch.Tensor


@dataclass(frozen=True)
class FileShard:
    """The rows (n, D) of one file, mapped, by ascending original id (n,)."""

    original_ids: torch.Tensor
    rows: torch.Tensor

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the place of each original id (m,) among the rows, -1 where it is not here."""
        if not len(self.original_ids):
            return torch.full_like(ids, -1)
        # searchsorted returns len() for ids behind the last one; the clamp makes the comparison below safe.
        places = torch.searchsorted(self.original_ids, ids).clamp_(max=len(self.original_ids) - 1)
        return torch.where(self.original_ids[places] == ids, places, -1)


class CheckpointTable:
    """Rows of one table, by original id or by name.

    Parameters
    ----------
    name : str
        The entity type, or ``"relation"``.
    shards : sequence of FileShard
        Its rows.
    name_to_id : callable
        Looks up a name's id, or raises InputError.

    Examples
    --------
    ::

        table = open_checkpoint("runs/demo")["entity"]
        table.shape            # (number of entities, D)
        table[7], table["Alice"]   # (D,) each
        table[[7, 8]], table[["Alice", "Bob"]], table[7:9]   # (2, D) each
    """

    def __init__(self, name: str, shards: Sequence[FileShard], name_to_id: Callable[[str], int]) -> None:
        self.name = name
        self.shards = shards
        self._name_to_id = name_to_id

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and their width."""
        return len(self), self.shards[0].rows.shape[1]

    def __len__(self) -> int:
        return sum(len(shard.original_ids) for shard in self.shards)

    def __getitem__(self, key: Key) -> torch.Tensor:
        """Return a copy of the rows of ids or names: (D,) for one, (n, D) for several; else InputError."""
        if isinstance(key, (int, str, np.integer)):
            keys: Any = [key]
            return self[keys][0]
        if isinstance(key, slice):
            key = torch.arange(*key.indices(len(self)))
        if not isinstance(key, torch.Tensor):
            ids = [self._name_to_id(item) if isinstance(item, str) else int(item) for item in key]
            key = torch.tensor(ids)
        return self.gather(key.long())

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows (n, D) of original ids (n,); InputError if one is out of range."""
        count, width = self.shape
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
            got = f"{int(ids.min())}..{int(ids.max())}"
            raise InputError(f"table {self.name!r} has ids 0..{count - 1}; got {got}")
        # Each shard fills the rows that it holds, so ids may come in any order and from any shard.
        rows = torch.empty((len(ids), width), dtype=self.shards[0].rows.dtype)
        for shard in self.shards:
            places = shard.locate(ids)
            here = (places >= 0).nonzero().squeeze(1)
            rows[here] = shard.rows[places[here]]
        return rows


OPEN_ATTEMPTS = 10
"""Attempts to open the newest version: training may remove a version while it is being opened."""


def open_checkpoint(
    path: str | os.PathLike[str], version: int | None = None, verify: bool = False
) -> Checkpoint:
    """Open a version of a checkpoint, ours or PyTorch-BigGraph's.

    Its files are held open, so that training may write newer versions and drop this one.

    Parameters
    ----------
    path : path
        A run's folder, the ``checkpoint`` folder in it, the folder of a version or the pointer to one there
        (``checkpoint/v7``, ``checkpoint/best``); or the URL of one (``s3://bucket/run``).
    version : int, optional
        By default that of the pointer, or the newest.
    verify : bool
        Compare files with their checksums: text files now, those of a table at its first access,
        which reads the whole table once. :meth:`Checkpoint.verify` compares all at once.

    Returns
    -------
    Checkpoint

    Raises
    ------
    CheckpointError
        If there is none, or anything of it is missing or damaged.

    Examples
    --------
    ::

        checkpoint = open_checkpoint("runs/demo")
        rows = checkpoint["entity"][["Alice", "Bob"]]   # (2, D) float32; ids will do as well
    """
    place = checkpoint_place(path, version)
    # A pointer to a version lies beside those of the newest one.
    storage = CheckpointStorage(place.parent if place.is_file() else place)
    attempts = OPEN_ATTEMPTS
    while True:
        # A failure counts only if the version file has not changed: else training dropped the files that were
        # being opened, and the next attempt opens its successor.
        before = storage.version_text()
        attempts -= 1
        try:
            return _open(storage, place, version, verify)
        except CheckpointError:
            if not attempts or storage.version_text() == before:
                raise


def _open(storage: CheckpointStorage, place: Path, version: int | None, verify: bool) -> Checkpoint:
    if version is not None:
        manifest: Manifest | None = storage.stored(version)
    elif place.is_file():
        manifest = storage.kept(place.name)
    elif (bigraph_version := bigraph.find_bigraph(place)) is not None:
        return Checkpoint(bigraph_version[0], bigraph.read_manifest(*bigraph_version))
    elif (place / layout.MANIFEST_FILE).is_file():
        # The folder of one version; it may have been copied to another place.
        number = layout.parse_version(storage.version_text() or "")
        return Checkpoint(place, read_version(place, number or 0), verify)
    else:
        manifest = storage.published()
    if manifest is None:
        raise CheckpointError(f"{storage.path} holds no checkpoint: no version of it was ever completed")
    return Checkpoint(storage.folder(manifest.version).path, manifest, verify, place)


def checkpoint_place(path: str | os.PathLike[str], version: int | None = None) -> Path:
    """Return the checkpoint's folder of a run, or the path itself where it is one, or a pointer in it."""
    place = Path(local_path(path, version))
    if not place.exists():
        raise CheckpointError(f"{place} does not exist; expected the folder of a run")
    if place.is_file() and layout.is_pointer(place.name):
        return place
    if not place.is_dir():
        raise CheckpointError(f"{place} is not a folder; expected the folder of a run")
    inner = place / layout.CHECKPOINT_FOLDER
    # A run's folder has no version file of its own, so a folder that has one is the checkpoint even if it
    # contains a folder of that name.
    return inner if inner.is_dir() and not (place / layout.VERSION_FILE).exists() else place


class TablesByName:
    """Tables of a model on files: entity types and ``"relation"``. Subclasses open them."""

    _tables: dict[str, CheckpointTable]

    def __getitem__(self, table: str) -> CheckpointTable:
        """Return a table: an entity type, or ``"relation"``; InputError if there is no such table."""
        if table not in self._tables:
            self._tables[table] = self._open(table)
        return self._tables[table]

    def _open(self, table: str) -> CheckpointTable:
        """Open a table that is not in memory yet."""
        raise unknown_name("table", table, self._tables)

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table."""
        return self[table].gather(ids)

    def shards(self, table: str) -> Sequence[RowShard]:
        """Return all rows of a table, as one shard for each file."""
        return self[table].shards


class Checkpoint(TablesByName):
    """One version of a checkpoint, for reading. Get one from :func:`open_checkpoint`.

    It is a :class:`dglkge.typing.RowSource`: it can be evaluated and queried like live tables.

    Parameters
    ----------
    folder : Path
        Of the version's files.
    manifest : Manifest
        Of the version to read.
    verify : bool
        Whether to compare what is read with its checksum.
    path : Path, optional
        What was opened, for messages: the checkpoint's folder, or a pointer in it.

    Attributes
    ----------
    folder, path : Path
    root : Path
        The checkpoint's folder, around those of versions; else that of the files.
    run_folder : Path
        The folder of the run: the one around ``checkpoint/``, or the checkpoint's own.
    meta : CheckpointMeta
        The run that it was taken from.
    config, progress : mapping
        The run's configuration; its finished epochs, batches done, and others.
    entity_types : list of str
        In their order.
    version : int
    """

    def __init__(
        self, folder: Path, manifest: Manifest, verify: bool = False, path: Path | None = None
    ) -> None:
        self.folder = folder
        self.path = path or folder
        self.manifest = manifest
        is_version = folder.name == layout.LATEST_LINK or layout.parse_version_folder(folder.name) is not None
        self.root = folder.parent if is_version else folder
        self.run_folder = self.root.parent if self.root.name == layout.CHECKPOINT_FOLDER else self.root
        self.meta: CheckpointMeta = manifest.meta
        self.config, self.progress = self.meta.config, self.meta.progress
        self.entity_types = list(self.meta.entity_types)
        self.version = manifest.version
        self._tables: dict[str, CheckpointTable] = {}
        self._vocabularies: dict[str, Vocabulary] = {}
        self._verify = verify
        self._new: dict[str, torch.Tensor] = {}
        self._opened_by: Checkpoint | None = None
        # Files of rows and of the state of training: training may remove their names.
        self._files: dict[str, BinaryIO] = {}
        with contextlib.ExitStack() as stack:
            for path in (folder / entry.name for entry in manifest.binary_files):
                with os_errors(CheckpointError, f"cannot read {path}"):
                    self._files[path.name] = stack.enter_context(open(path, "rb", buffering=0))
            # finalize and not __del__: it also runs at exit, and holds the files but not the checkpoint.
            # Mapped pages stay valid.
            weakref.finalize(self, stack.pop_all().close)
        if verify:
            check_files(folder, manifest.all_texts.values())

    def versions(self) -> list[int]:
        """Return the complete versions of the checkpoint, in ascending order."""
        storage = CheckpointStorage(self.root)
        folders = {version: storage.folder(version).path for version in storage.versions()}
        complete = [version for version in folders if (folders[version] / layout.MANIFEST_FILE).is_file()]
        return complete or [self.version]

    def part(self, entity_type: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows (n, D) of a part of an entity type, and their original ids (n,).

        Both are mapped from the file, as it is: without global vectors and projected features.
        """
        return self._map(self._part(entity_type, k))

    def state(self, entity_type: str, k: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state of a part's rows by name, a row each."""
        with self._open_state(self._part(entity_type, k)) as state:
            return {name: torch.from_numpy(np.asarray(values[()])) for name, values in state.items()}

    def _map(self, entry: FileEntry) -> tuple[torch.Tensor, torch.Tensor]:
        """Map the rows of a file and their original ids."""
        raw = self._files[entry.name]
        with self._open_file(entry) as file:
            rows = hdf5_format.map_rows(raw, file[hdf5_format.EMBEDDINGS])
            ids = hdf5_format.original_ids(raw, file, self.manifest.first_id(entry))
        return torch.from_numpy(rows), torch.from_numpy(ids)

    def _open_file(self, entry: FileEntry) -> contextlib.AbstractContextManager[h5py.File]:
        return hdf5_format.open_file(self.folder / entry.name, self._files[entry.name])

    def open_model(self) -> contextlib.AbstractContextManager[h5py.File]:
        """Open the file of the relations and of all that belongs to the whole model."""
        return self._open_file(self.manifest.table_files(RELATION)[0])

    @contextlib.contextmanager
    def _open_state(self, entry: FileEntry) -> Iterator[Mapping[str, h5py.Dataset | np.ndarray]]:
        """Open the optimizer's state of a file."""
        with self._open_file(entry) as file:
            yield read_state(self.folder / entry.name, file, entry.table, self.meta)

    def _part(self, entity_type: str, k: int) -> FileEntry:
        """Return the entry of a part, the file of which is compared with its checksum where wanted."""
        require_known("entity type", entity_type, self.entity_types)
        entries = self.manifest.table_files(entity_type)
        if not 0 <= k < len(entries):
            raise InputError(f"{entity_type!r} has the parts 0..{len(entries) - 1}; got {k}")
        if self._verify:
            check_files(self.folder, [entries[k]], opened=self._files)
        return entries[k]

    @cached_property
    def relations(self) -> RelationVocabulary:
        """The relations by id, with their names; at their times where triples have them."""
        return RelationVocabulary(self.meta.relations, self.meta.times)

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table; of a relation at a time with that."""
        num_times = len(self.meta.times)
        if table != RELATION or not num_times:
            return super().gather(table, ids)
        return self._frame.set_times(super().gather(table, ids // num_times), ids % num_times)

    @cached_property
    def _frame(self) -> KgeModel:
        """The model without its dense parameters: it knows where a row has its time."""
        meta = self.meta
        return build_model(meta.score_function, meta.dim, meta.reciprocal, meta.score_options)

    def vocabulary(self, entity_type: str) -> Vocabulary:
        """Return the names of an entity type, where none were saved the ids; or of the relations."""
        require_known("table", entity_type, [*self.entity_types, RELATION])
        if entity_type == RELATION:
            return self.relations.labels
        if entity_type not in self._vocabularies:
            path = self.folder / layout.vocabulary_file(entity_type)
            count = self.manifest.meta.entity_types[entity_type]
            names = None
            # A vocabulary that the manifest does not list is no part of this version.
            if path.name in self.manifest.all_texts:
                names = Vocabulary.load(path, "entity")
            elif bigraph.is_bigraph(self.folder, self.version):
                num_parts = len(self.manifest.table_files(entity_type))
                names = read_entity_names(self.folder, self.meta.config, entity_type, num_parts)
            if names is None:
                names = Vocabulary(list(map(str, range(count))), "entity")
            if len(names) != count:
                raise CheckpointError(f"{path} has {len(names)} names, expected {count}")
            self._vocabularies[entity_type] = names
        return self._vocabularies[entity_type]

    def _open(self, table: str) -> CheckpointTable:
        """Map the rows of a table.

        With a global vector or projected features they are copies in memory, to which these are added.
        """
        require_known("table", table, [*self.entity_types, RELATION])
        entries = self.manifest.table_files(table)
        if self._verify:
            check_files(self.folder, entries, opened=self._files)
        if table == RELATION:
            # Rows are put together from operator parameters.
            with self.open_model() as file:
                rows = torch.from_numpy(read_relations(self.folder / entries[0].name, file, self.meta))
            shard = FileShard(torch.arange(len(rows)), rows)
            return CheckpointTable(table, [shard], RelationVocabulary(self.meta.relations).id)
        shift, features = self.global_vector(table), self.features
        shards = []
        for entry in entries:
            rows, ids = self._map(entry)
            if shift is not None:
                rows = rows + torch.from_numpy(shift)
            if features is not None and table in features.entity_types:
                rows = features.scored(table, ids).add_(rows)
            shards.append(FileShard(ids, rows))
        if table in self._new:
            stop, rows = self.meta.entity_types[table], self._new[table]
            shards.append(FileShard(torch.arange(stop - len(rows), stop), rows))
        # The vocabulary is read only when a name is looked up.
        return CheckpointTable(table, shards, lambda name: self.vocabulary(table).id(name))

    def global_vector(self, entity_type: str) -> np.ndarray | None:
        """Return the vector (D,) that the model adds to all rows of a type; None where it adds none.

        The tables of this class have it in their rows already; the files have not.
        """
        with self.open_model() as file:
            dataset = file.get(global_vector_path(entity_type))
            vector = np.zeros(0) if dataset is None else dataset[...]
        return vector if vector.any() else None

    def dense_parameters(self) -> dict[str, torch.Tensor]:
        """Return the dense parameters of the score function's module by name; none where it has none."""
        return {name: values for name, values in self._parameters().items() if not name.startswith(PREFIX)}

    def feature_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the projections of features by name; none without features."""
        return {name: values for name, values in self._parameters().items() if name.startswith(PREFIX)}

    def _parameters(self) -> dict[str, torch.Tensor]:
        with self.open_model() as file:
            return dense_parameters(file)

    @cached_property
    def features(self) -> ProjectedFeatures | None:
        """Features of the entities, which the model adds to their rows; None where it has none.

        The tables of this class have them in their rows already; the files have not.
        """
        return self._open_features(self._verify)

    def _open_features(self, verify: bool) -> ProjectedFeatures | None:
        if not (parameters := self.feature_parameters()):
            return None
        mlp = (self.meta.config.get("features") or {}).get("mlp") or {}
        activation = mlp.get("activation", "relu")
        projections = projections_of(parameters, self.meta.dim, activation, str(self.path))
        with self.open_model() as file:
            records = {name: file[record_path(name)][...].tolist() for name in projections.widths}
        vectors = open_features(self.run_folder / layout.FEATURES_FOLDER, records, verify)
        return ProjectedFeatures(projections, vectors)

    def with_new_entities(self, new: Mapping[str, tuple[Sequence[str], torch.Tensor]]) -> Checkpoint:
        """Return this checkpoint with further entities, whose rows are their projected features.

        As :meth:`with_new_rows`, from features (m, F) in the place of rows.
        """
        features = self.features
        if features is None:
            raise InputError(f"{self.path} was trained without features: it has no rows for new entities")
        rows = {}
        for name, (names, vectors) in new.items():
            require_known("entity type", name, self.entity_types)
            require_known("entity type with features", name, features.entity_types)
            self._check_new(name, names, vectors, features.projections.widths[name], "features")
            with torch.no_grad():
                rows[name] = names, features.projections.project(name, vectors.double()).float()
        return self.with_new_rows(rows)

    def with_new_rows(self, new: Mapping[str, tuple[Sequence[str], torch.Tensor]]) -> Checkpoint:
        """Return this checkpoint with further entities and given rows.

        Parameters
        ----------
        new : mapping of str to (names, (m, D) tensor)
            By entity type. Their ids follow the last one of the type.

        Raises
        ------
        InputError
            If a type is unknown, a name is known or repeated, or rows have another width.
        """
        counts, rows = dict(self.meta.entity_types), dict(self._new)
        for name, (names, made) in new.items():
            require_known("entity type", name, self.entity_types)
            self._check_new(name, names, made, self.meta.entity_dim(name), "rows")
            rows[name] = torch.cat([rows.get(name, made[:0]), made]).float()
            counts[name] += len(names)
        other = copy.copy(self)
        # The files are closed with the checkpoint that opened them.
        other._opened_by = self
        other.meta = replace(self.meta, entity_types=counts)
        more = {name: self.vocabulary(name).extended(names) for name, (names, _) in new.items()}
        other._new, other._tables, other._vocabularies = rows, {}, {**self._vocabularies, **more}
        return other

    def _check_new(
        self, table: str, names: Sequence[str], values: torch.Tensor, width: int, noun: str
    ) -> None:
        """Refuse new entities with a known or repeated name, or numbers of another shape."""
        if values.shape != (len(names), width):
            raise InputError(
                f"the {noun} of {len(names)} new entities of type {table!r} have shape "
                f"{tuple(values.shape)}, expected {(len(names), width)}"
            )
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"the {noun} of new entities of type {table!r} are not all finite")
        known = self.vocabulary(table)
        for name, count in Counter(names).items():
            if name in known or count > 1:
                raise InputError(f"the new entity {name!r} of type {table!r} is there already; allowed: once")

    def dense_tensors(self) -> dict[str, torch.Tensor]:
        """Return the dense parameters, without those of features, and their optimizer's state, by dataset."""
        with self.open_model() as file:
            paths = [path for path in hdf5_format.shapes(file) if path.startswith(f"{DENSE_GROUP}/")]
            paths = [path for path in paths if not path.startswith(dense_path(RECORD))]
            own = [path for path in paths if f"/{PREFIX}" not in path]
            return {path: torch.from_numpy(np.asarray(file[path][()])) for path in own}

    def state_shapes(self, table: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of optimizer state in a table's first file, by name."""
        with self._open_state(self.manifest.table_files(table)[0]) as state:
            return {name: tuple(values.shape) for name, values in state.items()}

    def verify(self) -> None:
        """Compare every file with its checksum; CheckpointError names the first damaged one."""
        check_files(self.folder, self.manifest.all_files, opened=self._files)
        self._open_features(verify=True)
