"""Names of the files and JSON fields of a data set folder, its description, checksums and sizes.

The only place that has these names: the partitioner writes them, training and the launcher read them. Sizes
come from the descriptions alone: no array is opened. No numpy: the launcher imports this.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dglkge.errors import InputError, os_errors
from dglkge.typing import RELATION

FORMAT_VERSION = 1
DESCRIPTION = "dataset.json"
PENDING_DESCRIPTION = f".{DESCRIPTION}"
"""Name while the folder is being written: a folder without ``dataset.json`` never loads."""

RELATIONS = "relations.tsv"
TIMES = "times.txt"
"""Times in their order, where triples have one."""
ENTITIES = "entities"
TRAIN_WEIGHTS = "train_weights.npy"
EDGE_SETS = "edge_sets.npy"
"""Number of the edge set of each training triple, where there are several."""
GIVEN_PARTS = "parts.npy"
"""Partition of each node, the relations last, while a data set with given partitions is made."""
NUMERIC_LITERALS = "numeric_literals.tsv"
"""Entity, attribute and value of each numeric literal of RDF, if wanted."""

PARTITIONS = "partitions"
REPORT = "report.json"
PARTITION_LOG = "partition.log"
TRIPLE_IDS = "triple_ids.npy"
EDGES = "edges.npy"
WEIGHTS = "weights.npy"
BUCKET_COUNTS = "bucket_counts.npy"
BUCKETS_OF = "buckets_of.json"
"""What the buckets of a partition were made of."""

TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")

ID_BYTES = 8
WEIGHT_BYTES = 4
TRIPLE_BYTES = 3 * ID_BYTES
"""A triple of a split: head, relation and tail."""
EDGE_ROW_BYTES = 12
"""A triple of a partition's edge table."""
NODE_MAP_BYTES = 2 * ID_BYTES
"""A node in both id maps."""


class Field:
    """Fields of ``dataset.json``, of ``report.json`` and of DGL's description of the partitions."""

    FORMAT_VERSION = "format_version"
    NAME = "name"
    ENTITY_TYPES = "entity_types"
    NUM_RELATIONS = "num_relations"
    NUM_TIMES = "num_times"
    SPLITS = "splits"
    EDGE_TYPES = "edge_types"
    HAS_WEIGHTS = "has_weights"
    FINGERPRINT = "fingerprint"
    UNSEEN = "unseen"
    DUPLICATES = "duplicates"
    GRAPH_NAME = "graph_name"
    NUM_PARTS = "num_parts"
    PART_METHOD = "part_method"
    SEED = "seed"
    IDS = "ids"
    CREATED_BY = "created_by"
    INPUT = "input"
    EDGE_SET_NAMES = "edge_set_names"
    QUALITY = "quality"
    CHECKSUMS = "checksums"

    PARTS = "parts"
    CUT_EDGES = "cut_edges"

    NODE_MAP = "node_map"
    EDGE_MAP = "edge_map"
    EDGE_TYPE_IDS = "etypes"

    @staticmethod
    def part_files(part_id: int) -> str:
        """Return the field of DGL's description that names the files of one partition."""
        return f"part-{part_id}"


# Fields that training reads. Others are for people and for the report.
_REQUIRED: dict[str, type] = {
    **dict.fromkeys((Field.NAME, Field.FINGERPRINT, Field.GRAPH_NAME, Field.PART_METHOD), str),
    **dict.fromkeys((Field.ENTITY_TYPES, Field.SPLITS), dict),
    **dict.fromkeys((Field.NUM_RELATIONS, Field.NUM_PARTS), int),
    Field.EDGE_TYPES: list,
    Field.HAS_WEIGHTS: bool,
}


def vocabulary_path(dataset: Path, entity_type: str) -> Path:
    """Return the path of the names of an entity type."""
    return dataset / ENTITIES / f"{entity_type}.txt"


def split_path(dataset: Path, split: str) -> Path:
    """Return the path of the triples of a split."""
    return dataset / f"{split}.npy"


def candidates_path(dataset: Path, split: str) -> Path:
    """Return the path of the candidates that came with the triples of a split."""
    return dataset / f"candidates_{split}.npy"


def known_index_path(dataset: Path, split: str) -> Path:
    """Return the path of the index of a split's known answers, which its first use makes."""
    return dataset / f"known_{split}.index"


def partial_path(path: Path) -> Path:
    """Return the name of a file while this process writes it; it gets its own when it is complete."""
    return path.with_name(partial_files(path.name).replace("*", str(os.getpid())))


def partial_files(name: str) -> str:
    """Return the shell pattern of what processes of this host write a file to; ``*`` is their number."""
    # Not one name for all: hosts that share a disk may not see each other's locks.
    return f".{name}.{socket.gethostname()}.*.partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name when the block succeeds and it is on the disk; else it is removed."""
    partial = partial_path(path)
    try:
        with open(partial, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def graph_config_path(partitions: Path, graph_name: str) -> Path:
    """Return the path of DGL's description in the folder of the partitions."""
    return partitions / f"{graph_name}.json"


def part_folder(part_id: int) -> str:
    """Return the name of the folder of a partition, which DGL chose."""
    return f"part{part_id}"


def buckets_folder(num_ranges: int, mark: str = "") -> str:
    """Return the name of the folder of a partition's triples by pairs of ranges; some of them have a mark."""
    return f"buckets{num_ranges}{'-' * bool(mark)}{mark}"


def part_of_folder(name: str) -> int | None:
    """Return the partition that a folder's name belongs to; None for any other folder."""
    number = name.removeprefix("part")  # DGL's name, not ours
    return int(number) if number != name and number.isdecimal() else None


def original_ids_file(ntype: str) -> str:
    """Return the name of the map from node ids to original ids."""
    return f"original_ids_{ntype}.npy"


def node_ids_file(ntype: str) -> str:
    """Return the name of the map from original ids to node ids."""
    return f"node_ids_{ntype}.npy"


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises InputError if the file is missing or holds none."""
    try:
        with os_errors(InputError, f"cannot read {path}"):
            content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is cut off or no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


def require_dataset(path: Path) -> None:
    """Raise InputError if a path is a file, missing, or a folder without a description."""
    if path.is_file():
        raise InputError(f"{path} is a file and no dataset folder; dglkge data build makes one of it")
    if not (path / DESCRIPTION).is_file():
        lacks = f"it has no {DESCRIPTION} (dglkge data build makes one)"
        why = lacks if path.is_dir() else "there is no such folder"
        raise InputError(f"{path} is no dataset folder: {why}")


def read_description(dataset: Path) -> dict[str, Any]:
    """Read ``dataset.json``; raises InputError if it is not one, or of another format version."""
    file = dataset / DESCRIPTION
    # The version is checked before any other field: another version may have other fields.
    description = load_json(file)
    version = description.get(Field.FORMAT_VERSION)
    if version is None:
        raise InputError(f"{file} is not of a dglkge dataset: it has no {Field.FORMAT_VERSION}")
    if version != FORMAT_VERSION:
        words = f"has format version {version!r}, this dglkge reads {FORMAT_VERSION}"
        raise InputError(f"{file} {words}: partition again")
    for key, kind in _REQUIRED.items():
        if not isinstance(description.get(key), kind):
            raise InputError(f"{file}: {key} is {description.get(key)!r}, expected {kind.__name__}")
    for split in SPLITS:
        if not isinstance(description[Field.SPLITS].get(split), int):
            raise InputError(f"{file}: {Field.SPLITS} has no number of triples for {split!r}")
    return description


def fingerprint(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files' names, sizes and contents, in the given order, in hex."""
    digest = hashlib.sha256()
    for path in paths:
        # The size goes in too: moving bytes from one file to the next must change the result.
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        for block in blocks_of(path):
            digest.update(block)
    return digest.hexdigest()


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a file."""
    with open(path, "rb", buffering=0) as file:
        while block := file.read(4 << 20):
            yield block


NOT_DATA = (DESCRIPTION, REPORT, PARTITION_LOG)


def file_checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each data file below a folder by relative path, computed in parallel."""
    paths = sorted(path for path in folder.rglob("[!.]*") if path.is_file() and path.name not in NOT_DATA)
    return dict(zip([str(path.relative_to(folder)) for path in paths], _checksums(paths)))


def verify_checksums(folder: Path, checksums: Mapping[str, int]) -> None:
    """Compare the files of a data set with their checksums, in parallel; skip partitions that are not here.

    Raises
    ------
    InputError
        If a file is missing, cannot be read or differs.
    """
    expected = {folder / path: crc32 for path, crc32 in checksums.items()}
    # A partition that is not here is on another machine; a file of the folder itself is missing.
    here = [path for path in expected if part_of_folder(path.parent.name) is None or path.parent.is_dir()]
    for path, crc32 in zip(here, _checksums(here)):
        if crc32 != expected[path]:
            words = f"its CRC-32 is {crc32:08x}, {DESCRIPTION} says {expected[path]:08x}"
            raise InputError(f"{path} is damaged: {words}; copy it again, or partition again")


def _checksums(paths: list[Path]) -> list[int]:
    # zlib releases the GIL while it reads a block.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> int:
    with os_errors(InputError, f"cannot read {path}"):
        return functools.reduce(lambda checksum, block: zlib.crc32(block, checksum), blocks_of(path), 0)


@dataclass(frozen=True)
class PartSize:
    """The size of one partition.

    Attributes
    ----------
    num_rows : mapping of str to int
        Nodes of each node type, relations included, that it owns: the rows of each table.
    num_edges : int
        Training triples that it owns.
    has_weights : bool
    num_graph_edges : int
        Edges of DGL's graph but the relations' self-loops: one of each type, since triples are in the edge
        tables.
    """

    num_rows: Mapping[str, int]
    num_edges: int
    has_weights: bool = False
    num_graph_edges: int = 1


@dataclass(frozen=True)
class DatasetSize:
    """The size of a data set: of its parts (part k lies on machine k), and the triples of each split."""

    parts: tuple[PartSize, ...]
    splits: Mapping[str, int]

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table over all partitions."""
        return {table: sum(part.num_rows[table] for part in self.parts) for table in self.parts[0].num_rows}


def read_dataset_size(dataset: str | Path) -> DatasetSize:
    """Read the sizes of a data set and of its partitions from its descriptions.

    Raises
    ------
    InputError
        If a description is missing or damaged.
    """
    # Not Dataset.open: that maps every array, and a launcher may have none of them on its machine.
    description, partition_file = locate_partitions(dataset)
    graph, report = load_json(partition_file), load_json(Path(dataset) / PARTITIONS / REPORT)
    try:
        rows = {ntype: _lengths(ranges) for ntype, ranges in graph[Field.NODE_MAP].items()}
        loops = f"{RELATION}:"  # prefix of the relations' self-loops, which stand for no triple
        edges = [_lengths(r) for etype, r in graph[Field.EDGE_MAP].items() if not etype.startswith(loops)]
        parts = tuple(
            PartSize(
                {ntype: counts[part] for ntype, counts in rows.items()},
                int(figures["num_edges"]),
                bool(description[Field.HAS_WEIGHTS]),
                sum(counts[part] for counts in edges),
            )
            for part, figures in enumerate(report[Field.PARTS])
        )
        return DatasetSize(parts, {name: int(count) for name, count in description[Field.SPLITS].items()})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{dataset} is no dataset folder of this dglkge: {error!r}") from error


@contextlib.contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Make the parent folders of a path; if the block fails, remove those that it made and that are empty.

    Raises InputError if they cannot be made, or the innermost one is not writable.
    """
    parent = path.absolute().parent
    with os_errors(InputError, f"the parent folder of {path} cannot be made"):
        made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"the parent folder of {path} is not writable")
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def check_partition(path: Path, part_id: int | None, num_machines: int) -> str:
    """Check that DGL's partition file fits the cluster, and that the files of one partition exist.

    Parameters
    ----------
    path : Path
        DGL's partition file, which names the others relative to its own folder.
    part_id : int or None
        None: the files of partitions are not checked.
    num_machines : int
        Each holds one partition.

    Returns
    -------
    str
        Fingerprint of the partition file: partitions of two runs of the partitioner do not fit each other.
    """
    content = load_json(path)
    num_parts = content.get(Field.NUM_PARTS)
    if not isinstance(num_parts, int):
        words = "expected the file that DGL's partitioner wrote"
        raise InputError(f"partition file {path} has no {Field.NUM_PARTS!r}; {words}")
    if num_parts != num_machines:
        counts = f"{num_parts} partitions and ip_config has {num_machines} machines"
        raise InputError(f"partition file {path} has {counts}; each machine holds one partition")
    if part_id is not None:
        files = content.get(Field.part_files(part_id))
        if not isinstance(files, dict):
            raise InputError(f"{path} names no files of partition {part_id}")
        for name in files.values():
            if not (path.parent / str(name)).is_file():
                raise InputError(f"partition {part_id} is not whole: {path.parent / str(name)} is missing")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def locate_partitions(dataset: str | Path) -> tuple[dict[str, Any], Path]:
    """Return the content of ``dataset.json`` and the path of DGL's description of the partitions."""
    folder = Path(dataset)
    description = read_description(folder)
    return description, graph_config_path(folder / PARTITIONS, description[Field.GRAPH_NAME])


def _lengths(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the number of nodes or edges of each partition."""
    return [end - start for start, end in ranges]
