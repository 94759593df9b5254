"""Given vectors of entities, text embeddings for instance: the initial rows of a new run, or frozen features.

``model.init_from``: every trainer matches the names of its own shard with those of the file, and reads the
vectors of these only. What all of them need, principal axes and one factor, rank 0 computes from the used
vectors in the order of the file. Rows therefore do not depend on partitions and the number of trainers.

``features``: the vectors are copied to the run's folder by original id, and mapped by all trainers. One
process of each disk writes the copy, before anything is trained; a resume takes the copy that is there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dglkge.checkpoint import layout
from dglkge.checkpoint.features import open_features, parse_note, record_path
from dglkge.checkpoint.storage import file_crc32
from dglkge.config import Config
from dglkge.config.schema import FeaturesConfig, VectorsConfig
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import new_array
from dglkge.data.vector_files import FeatureFile, VectorFile, feature_files, open_vectors
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster
from dglkge.embeddings.table_set import TableSet
from dglkge.errors import CheckpointError, InputError
from dglkge.kernels.rules import limit_norms
from dglkge.model.dense_modules import FeatureProjections, ProjectedFeatures
from dglkge.model.initializers import normal_rows
from dglkge.typing import Doubles, Ids

logger = logging.getLogger(__name__)

PCA = "pca"
RANDOM_TABLE = "model.init_from"
"""Name under which the numbers of a random projection are drawn: no entity type can have it."""
SMALLEST_SHARE = 1e-12
"""Axes with less than this share of the widest one's variance are rounding errors."""
AS_GIVEN = -1
"""``model.init_from.std`` of vectors that keep their scale."""
PASSES = 4
"""How often the slowest trainer reads the file; the timeouts of barriers allow for it."""


class Change(NamedTuple):
    """Change of given vectors to initial numbers: ``(x - mean) @ matrix * factor``.

    Attributes
    ----------
    matrix : (W, K) array or None
        None: numbers are taken as they are. K may be less than the model's dimension: the other numbers of a
        row stay as they were initialised.
    explained : float or None
        Share of the variance that principal axes keep.
    """

    factor: float
    mean: Doubles | None = None
    matrix: Doubles | None = None
    explained: float | None = None

    def __call__(self, rows: Doubles) -> Doubles:
        """Return initial numbers (b, K) of vectors (b, W)."""
        centred = rows if self.mean is None else rows - self.mean
        turned = centred if self.matrix is None else centred @ self.matrix
        return turned * self.factor


def match_names(
    file: VectorFile, dataset: Dataset, ids: Mapping[str, Ids], has_bar: bool = False
) -> tuple[int, dict[str, tuple[Ids, Ids]]]:
    """Match the names of a file with those of entities, by original ids (n,) of each type.

    Returns the number of vectors and, by type, the numbers of those that entities have, ascending, and the
    place of each among the ids.
    """
    # Entities whose names the format makes equal have one key.
    keys = {name: list(map(file.key, dataset.names_of(name, ids[name]))) for name in ids}
    number_of = dict.fromkeys(itertools.chain(*keys.values()), -1)
    count = 0
    names = tqdm(file.names(), desc=f"names of {file.path.name}", unit="row", disable=not has_bar)
    for count, name in enumerate(names, 1):
        key = file.key(name)
        known = number_of.get(key)
        if known is None:
            continue
        if known >= 0:
            here, there = file.place(count - 1), file.place(known)
            raise InputError(f"{here}: the name {key!r} stands at {there} already; allowed is once")
        number_of[key] = count - 1
    matches = {}
    for name, keys_of_type in keys.items():
        numbers = np.array([number_of[key] for key in keys_of_type], np.int64)
        places = np.flatnonzero(numbers >= 0)
        order = places[np.argsort(numbers[places], kind="stable")]
        matches[name] = numbers[order], order
    return count, matches


def nothing_matches(file: VectorFile, dataset: Dataset, entity_types: Sequence[str]) -> InputError:
    """Build the error for a file without a name of an entity."""
    first = next(iter(file.names()))
    known = next(iter(dataset.names_of(entity_types[0], np.array([0]))))
    problem = f"{file.path}: no name is an entity's of type {' or '.join(entity_types)}"
    return InputError(f"{problem}: the file begins with {first!r}, the data set with {known!r}")


def fill_from_vectors(
    dataset: Dataset, config: Config, cluster: Cluster, tables: TableSet, records: LeasedFolder
) -> None:
    """Fill the entity tables of a new run from the configured file, where there is one; a collective.

    Rows without a vector stay as they are. Rank 0 writes what was done to ``init_from.json``.
    """
    settings, world = config.model.init_from, cluster.world
    if settings is None:
        return
    path, has_bar = Path(settings.path), world.wants_bar(config.training.progress)
    turn = world.local_rank, world.trainers_per_machine
    shards = {name: tables[name].shard(*turn) for name in tables.entity_types}
    ids = {name: shard.original_ids.numpy() for name, shard in shards.items()}

    def match() -> tuple[VectorFile, int, dict[str, tuple[Ids, Ids]]]:
        file = _opened(settings, path)
        return file, *match_names(file, dataset, ids, has_bar)

    file, num_vectors, matches = together(cluster, path, match)
    sizes = set(cluster.gather_texts(json.dumps([num_vectors, file.width])))
    if len(sizes) > 1:
        raise InputError(f"{path} has {' or '.join(sorted(sizes))} rows and columns, by the machine")
    num_matched = cluster.sum(np.array([len(places) for _, places in matches.values()], dtype=np.int64))
    if not num_matched.any():
        raise nothing_matches(file, dataset, tables.entity_types)
    used = np.zeros(num_vectors, dtype=np.int32)
    for numbers, _ in matches.values():
        used[numbers] = 1
    used_here = np.flatnonzero(used)
    change = _shared_change(config, cluster, file, np.flatnonzero(cluster.sum(used)), has_bar)

    def fill() -> None:
        for some, rows in file.rows(used_here):
            changed = change(rows).astype(np.float32)
            for name, (numbers, places) in matches.items():
                first, end = np.searchsorted(numbers, [some[0], some[-1] + 1])
                mine, shard = torch.from_numpy(places[first:end]), shards[name]
                # A copy: rows of 16 bits are rounded once, after both changes.
                target = shard.rows[mine].float().numpy()
                target[:, : changed.shape[1]] = changed[np.searchsorted(some, numbers[first:end])]
                if config.model.max_norm:
                    limit_norms(target, config.model.max_norm)
                shard.rows[mine] = torch.from_numpy(target).to(shard.rows.dtype)

    # Its barrier comes before the first batch, which reads rows of all trainers.
    together(cluster, path, fill)
    if world.rank == 0:
        totals = map(dataset.num_entities, shards)
        pairs = [(matched, total - matched) for matched, total in zip(num_matched.tolist(), totals)]
        report = _report(config, file, dict(zip(shards, pairs)), change)
        records.write_json(layout.RUN_VECTORS_FILE, {"vectors": num_vectors, **report})


def _report(
    config: Config, file: VectorFile, counts: Mapping[str, tuple[int, int]], change: Change
) -> dict[str, Any]:
    """Log and return how many entities of each type have a vector or none, and the change of vectors."""
    settings: Any = config.model.init_from
    for name, (matched, missing) in counts.items():
        logger.info("vectors of %s: %s: %d entities matched, %d missing", file.path, name, matched, missing)
        if missing and settings.frozen:
            text = "%s: %d rows without a vector stay random: model.init_from.frozen is true"
            logger.warning(text, name, missing)
    projection = "none" if change.matrix is None else settings.projection
    kept = "" if change.explained is None else f"; {change.explained:.1%} of the variance kept"
    logger.info(
        "vectors of %s: %d numbers each, %d in the model; projection %s, factor %.4g%s",
        *(file.path, file.width, config.model.dimension, projection, change.factor, kept),
    )
    sizes = {"width": file.width, "dimension": config.model.dimension}
    changed = {"projection": projection, "variance_kept": change.explained, "factor": change.factor}
    types = {name: dict(zip(("matched", "missing"), pair)) for name, pair in counts.items()}
    return {"path": str(file.path), **sizes, **changed, "frozen": settings.frozen, "entity_types": types}


def together(cluster: Cluster, path: Path, work: Callable[[], Any]) -> Any:
    """Return the result of a function; if it fails on one trainer, all raise its error. A collective."""
    # The barrier's timeout allows for reading; that of the exchange after it is fixed.
    return cluster.agree(work, PASSES * path.stat().st_size if path.exists() else 1)


def _shared_change(config: Config, cluster: Cluster, file: VectorFile, used: Ids, has_bar: bool) -> Change:
    """Return the change of vectors, which rank 0 computes from all that are used; a collective."""
    is_first = cluster.world.rank == 0
    computed: Change | None = together(
        cluster, file.path, lambda: _change(config, file, used, has_bar) if is_first else None
    )
    # JSON has every float exactly.
    facts = computed and (computed.factor, computed.explained, np.shape(computed.matrix))  # type: ignore[arg-type]
    factor, explained, shape = json.loads(cluster.gather_texts(json.dumps(facts))[0])
    if explained is None:
        return Change(factor, None, _random_matrix(config, file.width))
    # A sum in which the other trainers have zeros: the exact numbers of rank 0.
    axes = np.zeros((shape[1] + 1, file.width))
    if computed is not None:
        axes[0], axes[1:] = computed.mean, computed.matrix.T  # type: ignore[union-attr]
    axes = cluster.sum(axes)
    return Change(factor, axes[0], np.ascontiguousarray(axes[1:].T), explained)


def _change(config: Config, file: VectorFile, used: Ids, has_bar: bool) -> Change:
    """Compute the change of vectors from all that are used."""
    settings: Any = config.model.init_from
    blocks, dim = _checked_rows(file, used, has_bar), config.model.dimension
    mean = explained = matrix = None
    if file.width != dim and settings.projection == PCA:
        mean, matrix, variances, explained = principal_axes(blocks, dim)
        size = math.sqrt(variances.mean()) if len(variances) else 0.0
    else:
        matrix = _random_matrix(config, file.width)
        plain = Change(1.0, None, matrix)
        squares = sum(float(np.square(plain(rows)).sum()) for rows in blocks)
        size = math.sqrt(squares / len(used) / dim)
    if not size:
        problem = "the vectors of the entities are all equal or 0: they tell nothing apart"
        raise InputError(f"{file.path}: {problem}")
    std = settings.std or config.model.init_scale
    return Change(1.0 if std == AS_GIVEN else std / size, mean, matrix, explained)


def _random_matrix(config: Config, width: int) -> Doubles | None:
    """Return a Gaussian projection (W, D) that keeps lengths on average; None where none is needed."""
    dim = config.model.dimension
    if width == dim:
        return None
    rows = normal_rows(np.arange(width), dim, config.seed, RANDOM_TABLE, 1 / math.sqrt(dim))
    return rows.astype(np.float64)


def principal_axes(blocks: Iterable[Doubles], dim: int) -> tuple[Doubles, Doubles, Doubles, float]:
    """Return the axes of largest variance: exactly, from the covariance (Pearson 1901), in one pass.

    Parameters
    ----------
    blocks : iterable of (b, W) arrays
        All vectors.
    dim : int
        Most axes; fewer are returned where the vectors have no more.

    Returns
    -------
    mean : (W,) array
    axes : (W, K) array
        Columns of length 1, by falling variance. The largest number of each is positive, so that the same
        vectors give the same signs.
    variances : (K,) array
    explained : float
        Share of the whole variance.
    """
    blocks = iter(blocks)
    first = next(blocks)
    # Sums around a vector of the set: around 0 a large mean would cost digits.
    origin, width, count = first[0].copy(), first.shape[1], 0
    total, products = np.zeros(width), np.zeros((width, width))
    for rows in itertools.chain([first], blocks):
        shifted = rows - origin
        count += len(rows)
        total += shifted.sum(axis=0)
        products += shifted.T @ shifted
    centre = total / count
    values, vectors = np.linalg.eigh(products / count - np.outer(centre, centre))
    # eigh has rising values.
    values, vectors = values[::-1].clip(0), vectors[:, ::-1]
    num_axes = min(dim, int((values > values[0] * SMALLEST_SHARE).sum()))
    axes = vectors[:, :num_axes]
    largest = np.abs(axes).argmax(axis=0)
    axes = axes * np.sign(axes[largest, np.arange(num_axes)])
    whole, kept = values.sum(), values[:num_axes]
    return origin + centre, axes, kept, float(kept.sum() / whole) if whole else 0.0


def require_finite(
    file: VectorFile, numbers: Ids, rows: np.ndarray, is_finite: np.ndarray, allowed: str
) -> None:
    """Raise InputError for the first vector that has a number which is not finite."""
    for row, column in np.argwhere(~is_finite)[:1].tolist():
        problem = f"{file.place(int(numbers[row]))}: the vector has {rows[row, column]:g}"
        raise InputError(f"{problem}; allowed: {allowed}")


def _checked_rows(file: VectorFile, used: Ids, has_bar: bool) -> Iterator[Doubles]:
    """Yield the used vectors in blocks."""
    with tqdm(total=len(used), desc=f"vectors of {file.path.name}", unit="row", disable=not has_bar) as bar:
        for numbers, rows in file.rows(used):
            require_finite(file, numbers, rows, np.isfinite(rows), "finite")
            yield rows
            bar.update(len(rows))


class RunFeatures(ProjectedFeatures):
    """Features of the entities of a run, and the records of their files, which every version has.

    Attributes
    ----------
    records : dict of str to list of int
        By entity type: rows, numbers in each, and CRC-32 of the file.
    untrained_types : list of str
        Entity types without trained rows.
    """

    is_collective = False

    def __init__(self, projections: FeatureProjections, vectors: Any, records: Any, are_alone: bool) -> None:
        super().__init__(projections, vectors)
        self.records: dict[str, list[int]] = records
        self.untrained_types = self.entity_types if are_alone else []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the records by dataset of a model file."""
        return {record_path(name): torch.tensor(record) for name, record in self.records.items()}

    def load_state_dict(self, state: h5py.File) -> None:
        """Compare the records with those of a model file."""
        for name, record in self.records.items():
            path = record_path(name)
            saved = state[path][...].tolist() if path in state else None
            if saved != record:
                problem = f"{state.filename} was trained with other features: rows, numbers and checksum"
                raise CheckpointError(f"{problem} {saved}, this run's folder has {record}")


def build_features(config: Config, cluster: Cluster, dataset: Dataset) -> RunFeatures | None:
    """Return the features of a run and their untrained projections; None without features. A collective."""
    settings, world = config.features, cluster.world
    if settings is None:
        return None
    folder = Path(config.output) / layout.FEATURES_FOLDER
    note = folder / layout.FEATURES_NOTE_FILE
    files = feature_files(settings.files, dataset.entity_types, "features.files")
    # The barrier's limit allows for reading the largest of the files.
    largest = max((file.path for file in files), key=lambda path: path.stat().st_size if path.exists() else 0)

    def copy() -> None:
        if world.is_disk_leader and not _is_kept(config.output, settings, files, note):
            written = LeasedFolder(folder)
            written.make()
            with written.writing():
                _write(settings, dataset, files, written, world.rank == 0)

    together(cluster, largest, copy)
    records, vectors = together(cluster, largest, lambda: _open(folder, note))
    if len(set(cluster.gather_texts(json.dumps(records, sort_keys=True)))) > 1:
        raise InputError(f"{largest}: features.files are different files on the machines of the job")
    widths = {name: width for name, (_, width, _) in records.items()}
    dim, mlp = config.model.dimension, settings.mlp
    layers = ((), "relu") if mlp is None else (mlp.hidden or (dim,), mlp.activation)
    made = FeatureProjections(widths, dim, *layers, config.seed)
    return RunFeatures(made, vectors, records, settings.use == "alone")


def _is_kept(output: str, settings: FeaturesConfig, files: list[FeatureFile], note: Path) -> bool:
    """Return whether the copy in the run's folder is taken as it is.

    That of a run with a checkpoint is: the checkpoint has its checksum. One that a start left which trained
    nothing may be of other files, and is taken only where these are not there (any more).
    """
    if note.is_file() and (Path(output) / layout.CHECKPOINT_FOLDER / layout.VERSION_FILE).is_file():
        return True
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        is_same = json.loads(note.read_text(encoding="utf-8"))["files"] == list(settings.files)
        return is_same and not all(file.path.is_file() for file in files)
    return False


def _open(folder: Path, note: Path) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
    """Open the run's copy."""
    try:
        records = parse_note(note.read_bytes(), note)
        return records, open_features(folder, records)
    except (OSError, CheckpointError) as error:
        raise InputError(f"{error}; remove {note} to copy the files anew") from None


def _opened(settings: VectorsConfig, path: Path) -> VectorFile:
    return open_vectors(path, settings.names, settings.entity_column, settings.vector_column)


def _write(
    settings: FeaturesConfig, dataset: Dataset, files: list[FeatureFile], folder: LeasedFolder, reports: bool
) -> None:
    """Copy the vectors of all entities to the run's folder; the note comes last."""
    types: dict[str, Any] = {}
    for source in files:
        file = _opened(settings, source.path)
        ids = {name: np.arange(dataset.num_entities(name)) for name in source.entity_types}
        _, matches = match_names(file, dataset, ids)
        if not any(len(numbers) for numbers, _ in matches.values()):
            raise nothing_matches(file, dataset, source.entity_types)
        for name, matched in matches.items():
            count, shape = len(matched[0]), (len(ids[name]), file.width)
            if not count:
                continue
            target = folder.path / layout.features_array(name)
            crc32 = _write_type(target, file, matched, shape, settings.dtype)
            counts = {"with_vector": count, "without": shape[0] - count}
            types[name] = {"path": str(source.path), "shape": list(shape), **counts, "crc32": crc32}
            if reports:
                text = "features of %s from %s: %d numbers each; %d entities with a vector, %d without"
                logger.info(text + " (theirs is 0)", name, source.path, file.width, *counts.values())
    described = {"files": list(settings.files), "dtype": settings.dtype, "types": types}
    folder.write_json(layout.FEATURES_NOTE_FILE, described)


def _write_type(
    target: Path, file: VectorFile, matched: tuple[Ids, Ids], shape: tuple[int, int], dtype: str
) -> int:
    """Write the vectors of one entity type, 0 where there is none; returns the file's CRC-32."""
    numbers, places = matched
    temporary = target.with_name(target.name + layout.TEMPORARY_SUFFIX)
    written = new_array(temporary, shape, np.dtype(dtype))
    # Entities whose names a format makes equal share a vector: numbers may repeat.
    for some, rows in file.rows(np.unique(numbers)):
        with np.errstate(over="ignore"):
            narrowed = rows.astype(dtype)
        require_finite(file, some, rows, np.isfinite(narrowed), f"finite numbers of {dtype}")
        first, end = np.searchsorted(numbers, [some[0], some[-1] + 1])
        written[places[first:end]] = narrowed[np.searchsorted(some, numbers[first:end])]
    written.flush()
    del written
    os.replace(temporary, target)
    return file_crc32(target)
