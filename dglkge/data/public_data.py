"""Data sets that have a name: the registry, and their files, downloaded once into the user's cache folder.

``DGLKGE_DATA`` names a mirror (a URL) or a folder instead of the addresses of the registry; ``DGLKGE_CACHE``
another cache folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dglkge.data.dataset_files import SPLITS, blocks_of, parents_of
from dglkge.errors import InputError, StorageError, os_errors, unknown_name

REGISTRY = Path(__file__).with_name("datasets.yaml")
SOURCE_VARIABLE = "DGLKGE_DATA"
CACHE_VARIABLE = "DGLKGE_CACHE"
_ARCHIVES = (".tar.gz", ".zip")


@dataclass(frozen=True)
class PublicData:
    """A data set of the registry.

    Attributes
    ----------
    url : str
        Address of the folder with its files.
    files : mapping of str to str or None
        Names of the files, each with its checksum as ``algorithm:digits``; ``git`` is the id of a Git object.
    counts : mapping of str to int
        Numbers of entities and relations, and of the triples of each split.
    columns : str
        As of ``--columns``, where they are not head, relation and tail.
    """

    name: str
    url: str
    files: Mapping[str, str | None]
    counts: Mapping[str, int]
    licence: str
    citation: str
    columns: str = ""

    @property
    def verified_by(self) -> str:
        """The weakest of what its files are compared with: ``sha256``, ``git`` or ``counts``."""
        kinds = {str(checksum).partition(":")[0] for checksum in self.files.values()}
        return "counts" if "None" in kinds else min(kinds)

    def check_counts(self, entities: int, relations: int, triples: Mapping[str, int], place: Path) -> None:
        """Compare the counts of what was read from a place; raises InputError if one differs."""
        counts = {"entities": entities, "relations": relations, **triples}
        for key, expected in self.counts.items():
            if counts.get(key, 0) != expected:
                noun = f"{key} triples" if key in SPLITS else key
                raise InputError(
                    f"{place} has {counts.get(key, 0):,} {noun}, {self.name} has {expected:,}: another "
                    "version of the data, or a damaged file; remove the folder and get it again"
                )


@cache
def public_data() -> dict[str, PublicData]:
    """Return the data sets of the registry by name."""
    import yaml

    entries = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    return {name: PublicData(name, **entry) for name, entry in entries.items()}


def find_public(name: str) -> PublicData | None:
    """Return the data set of a name, in capitals or not, with or without hyphens; None if there is none."""
    return {_key(entry.name): entry for entry in public_data().values()}.get(_key(name))


def get_public(name: str) -> PublicData:
    """Return the data set of a name; the InputError of an unknown one has the nearest names."""
    entry = find_public(name)
    if entry is None:
        raise unknown_name("data set", name, public_data())
    return entry


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def local_folder(entry: PublicData, progress: bool | None = None) -> Path:
    """Return the folder with the files of a data set, unpacked; they are downloaded if they are not there.

    Progress is shown on stderr, by default where that is a terminal.

    Raises
    ------
    InputError
        If a file cannot be downloaded, or has another checksum.
    StorageError
        If the cache folder cannot be written.
    """
    import pooch

    source = os.environ.get(SOURCE_VARIABLE, "")
    if source and "://" not in source:
        folder = _offline_folder(entry, Path(source))
        if not all((folder / name).is_file() for name in entry.files):
            return folder
        source = str(folder)
    elif source:
        source = f"{source.rstrip('/')}/{entry.name}/"
    target = Path(os.environ.get(CACHE_VARIABLE) or pooch.os_cache("dglkge")) / "datasets" / entry.name
    if not target.is_dir():
        with os_errors(StorageError, f"cannot write {target}"):
            _fill(target, entry, source or entry.url, sys.stderr.isatty() if progress is None else progress)
    return _innermost(target)


def _offline_folder(entry: PublicData, parent: Path) -> Path:
    """Return the data set's folder in the folder that the user names."""
    for folder in sorted(parent.glob("*/")):
        if folder.is_dir() and _key(folder.name) == _key(entry.name):
            return folder
    raise InputError(
        f"{SOURCE_VARIABLE} is {parent}, which has no folder {entry.name}; expected its files there "
        f"({', '.join(entry.files)}), or train, valid and test in any format that is read"
    )


def _fill(target: Path, entry: PublicData, source: str, progress: bool) -> None:
    """Make the folder of a data set; it gets its name when it is complete."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    with (
        parents_of(target),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{entry.name}-") as temporary,
    ):
        files, unpacked = Path(temporary) / "files", Path(temporary) / entry.name
        files.mkdir()
        unpacked.mkdir()
        for name, checksum in entry.files.items():
            if "://" in source:
                _download(entry, source + name, files / name, progress)
            else:
                shutil.copyfile(Path(source) / name, files / name)
            _check(files / name, checksum, source)
            if name.endswith(_ARCHIVES):
                _unpack(files / name, unpacked)
            else:
                (files / name).rename(unpacked / name)
        # Another process may have been faster; its copy is as good.
        if not target.is_dir():
            unpacked.rename(target)


def _download(entry: PublicData, url: str, path: Path, progress: bool) -> None:
    """Download a file; raises InputError if that fails."""
    import pooch

    downloader = pooch.HTTPDownloader(progressbar=progress)
    try:
        pooch.retrieve(url, None, path.name, path.parent, downloader=downloader)
    except OSError as error:
        # One with a number is of the disk; those of requests have none.
        if error.errno is not None:
            raise
        raise InputError(
            f"cannot download {entry.name} from {url} ({_reason(error)}); without a network, put "
            f"{' and '.join(entry.files)} into FOLDER/{entry.name} and set {SOURCE_VARIABLE}=FOLDER, or "
            f"{SOURCE_VARIABLE} to the URL of a mirror"
        ) from error


def _reason(error: Exception) -> str:
    """Return the cause of an error of requests, whose text nests those of other libraries."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    cause = re.search(r"\[Errno -?\d+\] ([\w ]+)", str(error))
    return f"HTTP status {status}" if status is not None else cause[1] if cause else type(error).__name__


def _check(path: Path, checksum: str | None, source: str) -> None:
    """Compare a file with its checksum."""
    if checksum is None:
        return
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new("sha1" if algorithm == "git" else algorithm)
    if algorithm == "git":
        digest.update(f"blob {path.stat().st_size}\0".encode())
    for block in blocks_of(path):
        digest.update(block)
    if digest.hexdigest() != expected:
        raise InputError(
            f"{path.name} of {source} has the {algorithm} checksum {digest.hexdigest()}, expected {expected}"
            ": the download was cut off, or the file is another one"
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive; raises InputError if it is damaged."""
    options: dict[str, Any] = {}
    try:
        if archive.suffix != ".zip":
            # A member of a tar may be a link, a device or outside of the folder. The filter that refuses
            # them is in Python since 3.10.12 and 3.11.4. The reader of zip never goes there.
            if hasattr(tarfile, "data_filter"):
                options["filter"] = "data"
            else:
                with tarfile.open(archive) as members:
                    for member in members:
                        is_inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
                        if not (is_inside and (member.isfile() or member.isdir())):
                            raise ValueError(f"{member.name!r} is no file, or outside the destination")
        shutil.unpack_archive(archive, folder, **options)
    except Exception as error:  # of tarfile, zipfile, zlib, gzip: each has errors of its own
        raise InputError(f"{archive.name} cannot be unpacked: {error}") from error


def _innermost(folder: Path) -> Path:
    """Return the folder below which an archive has its files."""
    entries = [path for path in folder.iterdir() if not path.name.startswith((".", "__"))]
    return _innermost(entries[0]) if len(entries) == 1 and entries[0].is_dir() else folder
