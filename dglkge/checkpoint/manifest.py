"""What a version says about itself: the run it belongs to, and each of its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dglkge.checkpoint.layout import MANIFEST_VERSION
from dglkge.data.lineage import JobVersions, manifest_crc32, read_lineage
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, Relation

UNKNOWN_CRC32 = -1
"""Stands where there is no checksum: in what PyTorch-BigGraph wrote."""


@dataclass(frozen=True)
class CheckpointMeta:
    """The run that a checkpoint was taken from.

    Attributes
    ----------
    config : dict
        The run's whole configuration.
    dataset_name, dataset_path, dataset_fingerprint : str
        The dataset; the fingerprint does not depend on how it was partitioned.
    entity_types : mapping of str to int
        Number of entities of each type, in the order of types.
    relations : sequence of Relation
        In the order of relation ids.
    progress : mapping
        ``finished_epochs``, ``batches_done`` and ``global_batch_size``.
    seed : int
        Seed of the order, the negatives and the initial rows.
    score_function : str
        Name of the score function.
    dim : int
        Width of an entity's row.
    reciprocal : bool
        Whether a relation's row has a half for each side.
    optimizer : mapping
        ``name``, ``lr`` and whatever else describes it.
    versions : mapping of str to str
        Versions of dglkge, dgl and torch.
    """

    config: Mapping[str, Any]
    dataset_name: str
    dataset_path: str
    dataset_fingerprint: str
    entity_types: Mapping[str, int]
    relations: Sequence[Relation]
    progress: Mapping[str, int]
    seed: int
    score_function: str
    dim: int
    reciprocal: bool
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def relation_pairs(self) -> list[tuple[str, str]]:
        """The distinct (lhs, rhs) pairs of entity types, in the order of their first relation."""
        return list(dict.fromkeys((relation.lhs, relation.rhs) for relation in self.relations))


@dataclass(frozen=True)
class FileEntry:
    """One HDF5 file of a version.

    Attributes
    ----------
    name : str
        Its name in the folder.
    table : str
        The entity type, or ``"relation"``.
    part : int
        The part; 0 for the relations.
    num_rows : int
        Rows of the table that it holds.
    size_bytes, crc32 : int
        Length and CRC-32 of the whole file. CRC-32 finds torn and flipped bits at the speed of the
        disk; it is no protection against someone who means harm.
    ids_crc32 : int
        CRC-32 of the original ids, which tells whether a part still has the same rows.
    shapes : mapping of str to list of int
        Shape of each dataset.
    """

    name: str
    table: str
    part: int
    num_rows: int
    size_bytes: int
    crc32: int
    ids_crc32: int
    shapes: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Manifest:
    """All that belongs to one version.

    Attributes
    ----------
    version : int
    meta : CheckpointMeta
    files : sequence of FileEntry
    run_id : str
        Made with a run's first version, equal for all later ones.
    lineage : sequence of JobVersions
        The jobs that wrote the versions that this one came from; the last wrote this one.
    """

    version: int
    meta: CheckpointMeta
    files: Sequence[FileEntry]
    run_id: str = ""
    lineage: Sequence[JobVersions] = ()

    def of_table(self, table: str) -> list[FileEntry]:
        """Return the files of a table, in the order of parts."""
        return sorted((entry for entry in self.files if entry.table == table), key=lambda entry: entry.part)

    def to_json(self) -> str:
        """Return the manifest as a text that :meth:`from_json` reads and checks."""
        body = {"manifest_version": MANIFEST_VERSION, **dataclasses.asdict(self)}
        return json.dumps({"crc32": manifest_crc32(body), **body}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read a manifest.

        Parameters
        ----------
        text : str
            What the file holds.
        where : str
            The file, for error messages.

        Raises
        ------
        CheckpointError
            If the text is not a manifest, was written by a newer dglkge, or was damaged.
        """
        try:
            body = json.loads(text)
            checksum, version = body.pop("crc32"), body.pop("manifest_version")
            if version > MANIFEST_VERSION:
                raise CheckpointError(
                    f"{where}: manifest version {version}; this dglkge reads up to {MANIFEST_VERSION}"
                )
            if checksum != manifest_crc32({"manifest_version": version, **body}):
                raise CheckpointError(f"{where}: damaged: its checksum does not match its text")
            meta = dict(body["meta"])
            meta["relations"] = [Relation(**relation) for relation in meta["relations"]]
            files = [FileEntry(**entry) for entry in body["files"]]
            run_id, lineage = read_lineage(body)
            return cls(body["version"], CheckpointMeta(**meta), files, run_id, tuple(lineage))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: not a manifest of dglkge, or damaged ({error})") from None


def check_same_run(saved: CheckpointMeta, wanted: CheckpointMeta) -> None:
    """Refuse to go on from, or to write over, a checkpoint of another model or dataset.

    Raises
    ------
    CheckpointError
        Naming the first thing that differs, with both values.
    """
    for name in ("dataset_fingerprint", "score_function", "dim", "reciprocal"):
        old, new = getattr(saved, name), getattr(wanted, name)
        if old != new:
            raise CheckpointError(
                f"the checkpoint has {name} {old!r}, this run has {new!r}; "
                "take another output folder, or the configuration that it was written with"
            )


def check_complete(meta: CheckpointMeta, files: Sequence[FileEntry]) -> None:
    """Check that the written parts are numbered from 0 and hold every row of every table.

    Raises
    ------
    CheckpointError
        Naming the table and what is missing.
    """
    expected = {**meta.entity_types, RELATION: len(meta.relations)}
    for table, count in expected.items():
        entries = [entry for entry in files if entry.table == table]
        parts = sorted(entry.part for entry in entries)
        rows = sum(entry.num_rows for entry in entries)
        if parts != list(range(len(parts))) or rows != count:
            raise CheckpointError(
                f"table {table!r}: parts {parts} with {rows} rows were written; "
                f"expected parts from 0 on with {count} rows in all"
            )
