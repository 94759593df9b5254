"""Manifest of a version: the run that it belongs to, and each of its files with size and checksum."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dglkge.checkpoint.layout import MANIFEST_VERSION, Progress, is_pointer
from dglkge.checkpoint.lineage import JobVersions, manifest_crc32, read_lineage
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, Relation

UNKNOWN_CRC32 = -1
"""Value for an unknown checksum: PyTorch-BigGraph writes none."""


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
        Of an open epoch ``passes_done`` counts the passes that have ended, if there are several in an epoch;
        ``validation_pending`` is 1 where the valid split is yet to be ranked after the last finished epoch.
        ``order_mark`` is a checksum of the order of an open epoch, where that depends on the partitions.
        ``ended_after`` is the number of epochs after which training ended, if the version is an earlier one
        that was restored as the best.
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
    score_options : mapping of str to number or str
        Options of the score function, if it has any.
    """

    config: Mapping[str, Any]
    dataset_name: str
    dataset_path: str
    dataset_fingerprint: str
    entity_types: Mapping[str, int]
    relations: Sequence[Relation]
    progress: Mapping[str, Any]
    seed: int
    score_function: str
    dim: int
    reciprocal: bool
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    score_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def relation_pairs(self) -> list[tuple[str, str]]:
        """The distinct (lhs, rhs) pairs of entity types, in the order of their first relation."""
        return list(dict.fromkeys((relation.lhs, relation.rhs) for relation in self.relations))


@dataclass(frozen=True)
class TextEntry:
    """One text file of a version: names, counts or PyTorch-BigGraph's config.json.

    Attributes
    ----------
    name : str
    size_bytes, crc32 : int
    """

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class FileEntry:
    """One HDF5 file of a version.

    Attributes
    ----------
    name : str
        Its name in the folder of the version.
    table : str
        The entity type, or ``"relation"``.
    part : int
        The part; 0 for the relations.
    num_rows : int
        Rows of the table that it holds.
    size_bytes, crc32 : int
        Length and CRC-32 of the whole file. CRC-32 finds torn and flipped bits at the speed of the
        disk; it is no protection against an attacker.
    ids_crc32 : int
        CRC-32 of the original ids; equal if a part still has the same rows.
    shapes : mapping of str to list of int
        Shape of each dataset.
    texts : sequence of TextEntry
        PyTorch-BigGraph's names and count of the part's rows.
    """

    name: str
    table: str
    part: int
    num_rows: int
    size_bytes: int
    crc32: int
    ids_crc32: int
    shapes: Mapping[str, Sequence[int]]
    texts: Sequence[TextEntry] = ()

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> FileEntry:
        """Return the entry of which ``dataclasses.asdict`` made a dict."""
        texts = tuple(TextEntry(**text) for text in body.get("texts", ()))
        return cls(**{**body, "texts": texts})


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest file: all that belongs to one version.

    Attributes
    ----------
    version : int
    meta : CheckpointMeta
    files : sequence of FileEntry
    texts : sequence of TextEntry
        Those that belong to no part.
    run_id : str
        Drawn with the first version of a run, equal for all later ones.
    lineage : sequence of JobVersions
        The jobs that wrote the ancestors of this version; the last one wrote this version.
    state : TextEntry or None
        File of what changes during training beside the tables; None if nothing does.
    kept_as : mapping of str to mapping
        Names of the pointers to this version, and notes on their reason. They are written after publication,
        so the next start can make up for those that a killed job did not write.
    """

    version: int
    meta: CheckpointMeta
    files: Sequence[FileEntry]
    texts: Sequence[TextEntry] = ()
    run_id: str = ""
    lineage: Sequence[JobVersions] = ()
    state: TextEntry | None = None
    kept_as: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the rows and of the state of training."""
        return sum(entry.size_bytes for entry in self.binary_files)

    @property
    def binary_files(self) -> list[FileEntry | TextEntry]:
        """Files of rows, and of the state of training if there is one."""
        return [*self.files, *([] if self.state is None else [self.state])]

    @property
    def all_texts(self) -> dict[str, TextEntry]:
        """Every text file of the version by name."""
        return {
            text.name: text for text in [*self.texts, *(one for file in self.files for one in file.texts)]
        }

    def of_table(self, table: str) -> list[FileEntry]:
        """Return the files of a table, in the order of parts."""
        return sorted((entry for entry in self.files if entry.table == table), key=lambda entry: entry.part)

    def to_json(self) -> str:
        """Return the manifest as a text that :meth:`from_json` reads and checks."""
        body = {"manifest_version": MANIFEST_VERSION, **dataclasses.asdict(self)}
        # sort_keys in manifest_crc32 makes the checksum independent of the order of fields in the file.
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
            # The version comes before the checksum: a newer format may compute the checksum in another way.
            if version != MANIFEST_VERSION:
                raise CheckpointError(
                    f"{where}: manifest version {version}; this dglkge reads {MANIFEST_VERSION}"
                )
            if checksum != manifest_crc32({"manifest_version": version, **body}):
                raise CheckpointError(f"{where}: damaged: its checksum does not match its text")
            meta = dict(body["meta"])
            meta["relations"] = [Relation(**relation) for relation in meta["relations"]]
            files = [FileEntry.from_dict(entry) for entry in body["files"]]
            texts = tuple(TextEntry(**text) for text in body["texts"])
            run_id, lineage = read_lineage(body)
            state = None if body["state"] is None else TextEntry(**body["state"])
            run, kept_as = CheckpointMeta(**meta), body["kept_as"]
            manifest = cls(body["version"], run, files, texts, run_id, tuple(lineage), state, kept_as)
            _check_values(manifest)
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where}: not a manifest of dglkge, or damaged ({error})") from None


def check_same_run(saved: CheckpointMeta, wanted: CheckpointMeta) -> None:
    """Refuse to resume from, or to overwrite, a checkpoint of another model or data set.

    Raises
    ------
    CheckpointError
        Naming the first thing that differs, with both values.
    """
    # The optimizer is not compared: restore logs state that does not fit, and lets it start anew.
    for name in ("dataset_fingerprint", "score_function", "score_options", "dim", "reciprocal"):
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


def _check_values(manifest: Manifest) -> None:
    """Check the type and the range of each value: a file with a right checksum may be hostile.

    Raises
    ------
    ValueError
        Naming the value.
    """
    meta = manifest.meta
    _check_number("version", manifest.version, 1)
    texts = ("dataset_name", "dataset_path", "dataset_fingerprint", "score_function")
    _check_types({name: getattr(meta, name) for name in texts}, str)
    _check_types({name: getattr(meta, name) for name in ("config", "optimizer", "versions")}, dict)
    _check_types({"progress": meta.progress, "entity_types": meta.entity_types}, dict)
    _check_types({"score_options": meta.score_options, "kept_as": manifest.kept_as}, dict)
    _check_types(dict(manifest.kept_as), dict)
    for name in manifest.kept_as:
        if not is_pointer(name):
            raise ValueError(f"{name!r:.60} is not the name of a version that is kept")
    for name, value in meta.score_options.items():
        if not isinstance(value, (int, float, str)):
            raise ValueError(f"score option {name} is {value!r:.60}, expected a number or a text")
    _check_types({"reciprocal": meta.reciprocal}, bool)
    _check_number("dim", meta.dim, 1)
    _check_number("seed", meta.seed, 0)
    for name, value in meta.progress.items():
        # Counts of epochs and batches are whole numbers; measurements, a summed loss for instance, are not.
        if isinstance(value, float) and math.isfinite(value):
            continue
        _check_number(f"progress {name}", value, 1 if name == Progress.GLOBAL_BATCH_SIZE else 0)
    for name in (Progress.FINISHED_EPOCHS, Progress.BATCHES_DONE, Progress.GLOBAL_BATCH_SIZE):
        if name in meta.progress:
            _check_types({f"progress {name}": meta.progress[name]}, int)
    for name, count in meta.entity_types.items():
        _check_name(name)
        _check_number(f"number of {name}", count, 0)
    for relation in meta.relations:
        _check_types({"relation": relation.name, "lhs": relation.lhs, "rhs": relation.rhs}, str)
        if {relation.lhs, relation.rhs} - set(meta.entity_types):
            raise ValueError(f"relation {relation.name!r} joins an entity type that there is none of")
    for entry in manifest.files:
        _check_name(entry.name)
        _check_types({"table": entry.table}, str)
        _check_types({"shapes": entry.shapes}, dict)
        for name in ("part", "num_rows", "size_bytes"):
            _check_number(f"{name} of {entry.name}", getattr(entry, name), 0)
        for name in ("crc32", "ids_crc32"):
            _check_number(f"{name} of {entry.name}", getattr(entry, name), UNKNOWN_CRC32)
    state = [] if manifest.state is None else [manifest.state]
    for text in [*manifest.all_texts.values(), *state]:
        _check_name(text.name)
        _check_number(f"size of {text.name}", text.size_bytes, 0)
        _check_number(f"crc32 of {text.name}", text.crc32, 0)


def _check_types(values: Mapping[str, Any], kind: type) -> None:
    for name, value in values.items():
        # ``type`` and not isinstance: bool is a subclass of int, and true would pass as the number 1.
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r:.60}, expected {kind.__name__}")


def _check_number(name: str, value: Any, low: int) -> None:
    if type(value) is not int or value < low:
        raise ValueError(f"{name} is {value!r:.60}, expected a whole number of at least {low}")


def _check_name(name: Any) -> None:
    """Refuse a name that would lead out of the folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r:.60} is not the name of a file in the folder")
