"""Manifest of a version: the run that it belongs to, and each of its files with size and checksum.

A version is identified by its number and the job that wrote it: version 7 of an abandoned job differs from
version 7 of the job that resumed from version 6 instead. The lineage lists all jobs of a run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from dglkge.checkpoint.layout import MANIFEST_VERSION, POINTER, Progress
from dglkge.errors import CheckpointError
from dglkge.typing import Relation

UNKNOWN_CRC32 = -1
"""Value for an unknown checksum: PyTorch-BigGraph writes none."""

T = TypeVar("T")
MODEL_FIELDS = ("score_function", "score_options", "dim", "reciprocal")
"""What runs must have in common to have the same rows. State that does not fit the optimizer starts anew."""
MOST_SHOWN = 5
"""Limit of the jobs of a lineage in a message: the last ones."""


def _name_of_a_file(name: str) -> str:
    """Refuse a name that would lead out of the folder."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r:.60} is not the name of a file in the folder")
    return name


FileName = Annotated[str, AfterValidator(_name_of_a_file)]
Pointer = Annotated[str, Field(pattern=f"^({POINTER})$")]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Crc32 = Annotated[int, Field(ge=UNKNOWN_CRC32)]


class _Strict:
    """Base of what a manifest holds: a field that is unknown is an error."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta(_Strict):
    """The run that a checkpoint was taken from; rows of other programs have defaults for what they lack.

    Attributes
    ----------
    dataset_fingerprint : str
        Does not depend on how the data set was partitioned.
    entity_types : mapping of str to int
        Number of entities of each type, in the order of types.
    relations : sequence of Relation
        In the order of relation ids.
    progress : mapping
        By :class:`dglkge.checkpoint.layout.Progress`.
    seed : int
        Seed of the order, the negatives and the initial rows.
    score_function : str
        Empty for tables without a model, which have no relations.
    dim : int
        Width of an entity's row.
    reciprocal : bool
        Whether a relation's row has a half for each side.
    optimizer : mapping
        ``name``, ``lr`` and whatever else describes it.
    versions : mapping of str to str
        Versions of dglkge, dgl and torch.
    operators : tuple of str
        Operator of each relation, where they differ; otherwise empty.
    dims : mapping of str to int
        Width of the rows of entity types where it is not ``dim``.
    times : tuple of str
        Times in their order, where triples have them; an id of a relation at a time is
        ``relation * len(times) + time``.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    dataset_name: str
    dataset_path: str = ""
    dataset_fingerprint: str = ""
    entity_types: Mapping[FileName, Count]
    relations: Sequence[Relation]
    progress: Mapping[str, Any]
    seed: Count = 0
    score_function: str
    dim: Positive
    reciprocal: bool
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    score_options: Mapping[str, int | float | str] = field(default_factory=dict)
    operators: tuple[str, ...] = ()
    dims: Mapping[FileName, Positive] = field(default_factory=dict)
    times: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = (Progress.FINISHED_EPOCHS, Progress.BATCHES_DONE, Progress.GLOBAL_BATCH_SIZE)
        for name, value in self.progress.items():
            # Counts are whole numbers; measurements, a summed loss for instance, are not.
            is_measure = name not in counts and isinstance(value, float) and math.isfinite(value)
            least = int(name == Progress.GLOBAL_BATCH_SIZE)
            if not is_measure and (type(value) is not int or value < least):
                raise ValueError(f"progress {name} is {value}, expected a whole number of at least {least}")

    @property
    def relation_pairs(self) -> list[tuple[str, str]]:
        """The distinct (lhs, rhs) pairs of entity types, in the order of their first relation."""
        return list(dict.fromkeys((relation.lhs, relation.rhs) for relation in self.relations))

    def entity_dim(self, entity_type: str) -> int:
        """Return the width of a type's rows."""
        return self.dims.get(entity_type, self.dim)

    def difference(self, other: CheckpointMeta, fields: Sequence[str]) -> str:
        """Return the first field with another value in ``other``, which is this run's, in words; or ""."""
        for name in fields:
            old, new = getattr(self, name), getattr(other, name)
            if old != new:
                return f"{name} {old!r}, this run has {new!r}"
        return ""


@dataclass(frozen=True)
class TextEntry(_Strict):
    """One text file of a version: names, counts or PyTorch-BigGraph's config.json."""

    name: FileName
    size_bytes: Count
    crc32: Count


@dataclass(frozen=True)
class FileEntry(_Strict):
    """One HDF5 file of a version.

    Attributes
    ----------
    table : str
        The entity type, or ``"relation"``.
    part : int
        0 for the relations.
    num_rows : int
        Rows of the table that it holds.
    crc32 : int
        Of the whole file: finds torn and flipped bits at the speed of the disk, and no attacker's.
    ids_crc32 : int
        Of the original ids; equal if a part still has the same rows.
    shapes : mapping of str to list of int
        Shape of each dataset.
    texts : tuple of TextEntry
        PyTorch-BigGraph's names and count of the part's rows.
    """

    name: FileName
    table: str
    part: Count
    num_rows: Count
    size_bytes: Count
    crc32: Crc32
    ids_crc32: Crc32
    shapes: Mapping[str, Sequence[int]]
    texts: tuple[TextEntry, ...] = ()


@dataclass(frozen=True)
class JobVersions:
    """The versions that one job, named by its nonce, added to a run; host and start are for messages."""

    job: str
    first: int
    last: int
    host: str
    since: str

    def describe(self) -> str:
        """Return the versions, host and start of the job as text."""
        number = str(self.first) if self.first == self.last else f"{self.first} to {self.last}"
        return f"{number} by job {self.job[:8]} on {self.host} at {self.since}"


@dataclass(frozen=True)
class Manifest(_Strict):
    """Content of a manifest file: all that belongs to one version.

    Attributes
    ----------
    texts : tuple of TextEntry
        Those that belong to no part.
    run_id : str
        Drawn with the first version of a run, equal for all later ones.
    lineage : tuple of JobVersions
        The jobs that wrote the ancestors of this version; the last one wrote this version.
    state : TextEntry or None
        File of what changes during training beside the tables; None if nothing does.
    kept_as : mapping of str to mapping
        Names of the pointers to this version, and notes on their reason. They are written after publication,
        so the next start can make up for those that a killed job did not write.
    content : bytes
        The file that it was read from: versions with equal ones are the same.
    """

    version: Positive
    meta: CheckpointMeta
    files: Sequence[FileEntry]
    texts: tuple[TextEntry, ...] = ()
    run_id: str = ""
    lineage: tuple[JobVersions, ...] = ()
    state: TextEntry | None = None
    kept_as: Mapping[Pointer, Mapping[str, Any]] = field(default_factory=dict)
    content: bytes = field(default=b"", compare=False, repr=False)

    @property
    def checksum(self) -> str:
        """SHA-256 of the file, 16 hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()[:16]

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
        part_texts = [text for file in self.files for text in file.texts]
        return {text.name: text for text in [*self.texts, *part_texts]}

    @property
    def all_files(self) -> list[FileEntry | TextEntry]:
        """Every file of the version that has a checksum."""
        return [*self.binary_files, *self.all_texts.values()]

    def table_files(self, table: str) -> list[FileEntry]:
        """Return the files of a table, in the order of parts."""
        return sorted((entry for entry in self.files if entry.table == table), key=lambda entry: entry.part)

    def first_id(self, entry: FileEntry) -> int:
        """Return the id of a file's first row where files have none, which then count through the parts."""
        return sum(file.num_rows for file in self.table_files(entry.table)[: entry.part])

    def to_json(self) -> str:
        """Return the content of the file, which :meth:`parse` reads and checks."""
        body = {"manifest_version": MANIFEST_VERSION, **asdict(self)}
        del body["content"]
        return json.dumps({"crc32": _crc32_of(body), **body}, indent=1) + "\n"

    @classmethod
    def parse(cls, content: bytes, where: str) -> Manifest:
        """Read a manifest's file.

        Raises
        ------
        CheckpointError
            If it is not a manifest, was written by a newer dglkge, or was damaged.
        """
        try:
            body = json.loads(content)
            checksum, version = body.pop("crc32"), body.pop("manifest_version")
            # The version comes before the checksum: a newer format may compute the checksum in another way.
            if version != MANIFEST_VERSION:
                raise CheckpointError(f"{where}: version {version}; this dglkge reads {MANIFEST_VERSION}")
            if checksum != _crc32_of({"manifest_version": version, **body}):
                raise CheckpointError(f"{where}: damaged: its checksum does not match its text")
            # Types and ranges too: a file with a right checksum may be hostile.
            manifest = parse(cls, body)
            for relation in manifest.meta.relations:
                if {relation.lhs, relation.rhs} - set(manifest.meta.entity_types):
                    raise ValueError(f"relation {relation.name!r} joins an entity type that there is none of")
            return replace(manifest, content=content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where}: not a manifest of dglkge, or damaged ({error})") from None

    def continues(self, older: Manifest) -> bool:
        """Return whether this version equals another one or descends from it."""
        if older.content == self.content:
            return True
        if older.version >= self.version or not older.lineage:
            return False
        # The older version is an ancestor if this lineage has it among the versions of the job that wrote it.
        # An abandoned job has a shorter range here than in its own lineage.
        last = older.lineage[-1]
        return any(job.job == last.job and job.first <= last.last <= job.last for job in self.lineage)

    def describe(self) -> str:
        """Return the history as text for messages."""
        jobs = "; ".join(job.describe() for job in self.lineage[-MOST_SHOWN:])
        return f"version {self.version} of run {self.run_id[:8]} ({len(self.lineage)} job(s): {jobs})"


def extended(lineage: Sequence[JobVersions], job: JobVersions) -> tuple[JobVersions, ...]:
    """Return a lineage with one more version, that of a job, at its end."""
    # The versions of one job are one entry, so the list grows with restarts and not with versions.
    if lineage and lineage[-1].job == job.job and lineage[-1].last == job.last - 1:
        return (*lineage[:-1], replace(lineage[-1], last=job.last))
    return (*lineage, job)


def _crc32_of(body: Mapping[str, Any]) -> int:
    """Return the checksum of a manifest's fields, which does not depend on their order."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


_adapter = functools.cache(TypeAdapter)


def parse(kind: type[T], body: Mapping[str, Any]) -> T:
    """Return the object of which ``dataclasses.asdict`` made a dict; ValueError names the first bad value."""
    try:
        # From JSON, where lists stand for tuples, and no value is converted to another type.
        value: T = _adapter(kind).validate_json(json.dumps(body), strict=True)  # type: ignore[arg-type]
        return value
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place} is {first['input']!r:.60}: {first['msg']}") from None


def check_same_run(saved: CheckpointMeta, expected: CheckpointMeta) -> None:
    """Refuse to resume from, or to overwrite, a checkpoint of another model or data set."""
    if differs := saved.difference(expected, ("dataset_fingerprint", "dims", *MODEL_FIELDS, "operators")):
        raise CheckpointError(
            f"the checkpoint has {differs}; take another output folder or its configuration"
        )
