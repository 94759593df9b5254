"""Stores of checkpoints by URL: a folder, or objects behind fsspec (S3, Google Cloud Storage, Azure, SFTP).

A store needs no rename, no append, no lock and no atomic writes: :mod:`dglkge.checkpoint.mirror` has the
order of writes.

A scheme of your own, in a module that ``--import`` names::

    from dglkge.checkpoint.stores import STORES

    @STORES.register("vault")
    class VaultStore:
        def __init__(self, url: str) -> None: ...
        # and the methods of dglkge.checkpoint.stores.Store
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from dglkge.checkpoint.layout import TEMPORARY_SUFFIX
from dglkge.distributed.leased_folder import sync
from dglkge.errors import CheckpointError, InputError, StorageError, missing_package, one_line, os_errors
from dglkge.registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 15.0
"""Time for which a request that failed is made again, where nothing else is set."""
FIRST_PAUSE_SECONDS = 1.0
"""Between the first two attempts; then twice as long each time, up to the longest."""
LONGEST_PAUSE_SECONDS = 30.0
# boto's own limits, per attempt: without them a silent server would hold a request for minutes.
_S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://?.*")
COPY_BLOCK_BYTES = 8 << 20
_WITH_FOLDERS = ("sftp", "ssh", "hdfs", "smb", "ftp", "webhdfs")


class Store(Protocol):
    """Objects under one URL, by names relative to it with ``/`` between folders.

    Every method raises FileNotFoundError if the named object is absent, and OSError for other failures.

    Attributes
    ----------
    url : str
    num_bytes : int
        Bytes of uploads so far, for the progress of a save; a store may lack it.
    """

    url: str

    def read(self, name: str) -> bytes:
        """Return the content of a small object."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, or replace it."""

    def upload(self, path: Path, name: str) -> None:
        """Write a file as an object, or replace it; returns when it is durable."""

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file."""

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside the store."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of the objects in a folder and below it, by name; empty if it is absent."""

    def remove(self, name: str) -> None:
        """Remove an object."""


def _by_fsspec(scheme: str) -> Callable[[str], Store] | None:
    """Return the constructor of a scheme that fsspec knows, None for any other."""
    import fsspec

    return FsspecStore if scheme != "local" and scheme in fsspec.available_protocols() else None


STORES: Registry[Callable[[str], Store]] = Registry("scheme of a URL", family=_by_fsspec)
"""Constructors of stores by the scheme of the URL; other schemes of fsspec are found too."""


@STORES.register("file")
class FileStore(Store):
    """A folder. Files are written under their own names: it needs no rename.

    Parameters
    ----------
    url : str
        ``file:///mnt/bucket/run``.
    """

    def __init__(self, url: str) -> None:
        self.url, self.num_bytes = url, 0
        self._folder = Path(url.partition(":")[2].removeprefix("//"))
        if not self._folder.is_absolute():
            raise InputError(f"{url!r} is no absolute path; expected file:///folder")

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        self._copy(io.BytesIO(content), name)

    def upload(self, path: Path, name: str) -> None:
        with open(path, "rb") as source:
            self._copy(source, name)

    def _copy(self, source: BinaryIO, name: str) -> None:
        """Write a file in place and flush it."""
        target = self._path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as copy:
            while block := source.read(COPY_BLOCK_BYTES):
                copy.write(block)
                self.num_bytes += len(block)
        sync(target)

    def download(self, name: str, path: Path) -> None:
        shutil.copyfile(self._path(name), path)

    def copy(self, name: str, target: str) -> None:
        self.upload(self._path(name), target)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the finished files in a folder and below it."""

        def check(error: OSError) -> None:
            """Pass over absent and protected folders; after other failures versions would seem to be gone."""
            if not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
                raise error

        sizes = {}
        # Another job may remove files and folders meanwhile.
        for parent, _, names in os.walk(self._path(folder) if folder else self._folder, onerror=check):
            for path in (Path(parent, name) for name in names if not name.endswith(TEMPORARY_SUFFIX)):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        sizes[path.relative_to(self._folder).as_posix()] = path.stat().st_size
        return sizes

    def remove(self, name: str) -> None:
        """Remove a file, and its folder if that is empty then."""
        path = self._path(name)
        path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / name


class FsspecStore(Store):
    """Objects behind a file system of fsspec. Keys and endpoints are those of its packages.

    For S3 these are the variables and files that all tools of Amazon read: ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT_URL``, ``~/.aws/``.

    Parameters
    ----------
    url : str
        ``s3://bucket/run``, for example.

    Raises
    ------
    InputError
        If fsspec or the package of the scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url, self.num_bytes = url.rstrip("/"), 0
        scheme = scheme_of(url)
        package = _PACKAGES.get(scheme, "fsspec")
        options: dict[str, Any] = dict(_S3_OPTIONS) if package == "s3fs" else {}
        try:
            import fsspec

            # A listing must show what another job has written since.
            self._files, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as error:
            extra = "storage" if package in ("fsspec", "s3fs") else ""
            raise missing_package(f"{scheme}://", package, extra, error) from None
        except Exception as error:
            raise InputError(f"{url!r} cannot be opened: {_reason(error)}") from None

    def read(self, name: str) -> bytes:
        return bytes(self._ask("cat_file", self._path(name)))

    def write(self, name: str, content: bytes) -> None:
        self._make_folder(name)
        self._ask("pipe_file", self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        from fsspec.callbacks import Callback

        before = self.num_bytes

        def count(size: int | None, value: int, **_: Any) -> None:
            self.num_bytes = before + value

        self._make_folder(name)
        self._ask("put_file", str(path), self._path(name), callback=Callback(hooks={"count": count}))

    def download(self, name: str, path: Path) -> None:
        self._ask("get_file", self._path(name), str(path))

    def copy(self, name: str, target: str) -> None:
        self._ask("cp_file", self._path(name), self._path(target))

    def sizes(self, folder: str) -> dict[str, int]:
        self._files.invalidate_cache()
        # Some file systems list names with a leading slash that the root lacks, or the other way round.
        root = self._path("").lstrip("/")
        with contextlib.suppress(FileNotFoundError):
            entries = self._ask("find", self._path(folder), detail=True)
            return {path.lstrip("/")[len(root) :]: int(entry["size"]) for path, entry in entries.items()}
        return {}

    def remove(self, name: str) -> None:
        self._ask("rm_file", self._path(name))

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system; many packages have errors of classes of their own."""
        try:
            return getattr(self._files, method)(*arguments, **options)
        except OSError:
            raise
        except Exception as error:
            # botocore's NoCredentialsError and the like: another attempt fails the same way.
            kind = PermissionError if "redentials" in type(error).__name__ else OSError
            raise kind(_reason(error)) from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _make_folder(self, name: str) -> None:
        """Make the folder of an object where the store has folders; in a bucket names are enough."""
        if scheme_of(self.url) in _WITH_FOLDERS:
            self._ask("makedirs", self._path(name).rpartition("/")[0], exist_ok=True)


_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_PACKAGES |= {"sftp": "paramiko", "hdfs": "pyarrow", "memory": "fsspec"}
for _scheme in ("s3", "gs", "az", "abfs", "hdfs", "sftp", "memory"):
    # Registered by name, so that messages list them where fsspec is not installed too.
    STORES.register(_scheme)(FsspecStore)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL of a store, ``scheme://`` or ``file:/``.

    Examples
    --------
    >>> [is_url(text) for text in ("s3://bucket/run", "file:/disk/run", "runs/demo", "runs/a:b")]
    [True, True, False, False]
    """
    return isinstance(path, str) and _URL.fullmatch(path) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in lower case; InputError for a text that is no URL."""
    match = _URL.fullmatch(url)
    if match is None:
        raise InputError(f"{url!r} is no URL; expected scheme://..., for example s3://bucket/run")
    return match[1].lower()


def open_store(url: str) -> Store:
    """Return the store of a URL, or raise InputError. Nothing is read or written yet."""
    return STORES.get(scheme_of(url))(url)


class PatientStore:
    """A store for its user: failures that may pass are tried again, errors have the URL of the object.

    Every method raises StorageError if the store cannot be reached for a time, and CheckpointError without
    the right to an object.

    Parameters
    ----------
    store : Store
    commit_seconds : float, optional
        From the first failure of a request on no attempt begins after this time, inside of
        :meth:`committing`; elsewhere, and by default, after RETRY_SECONDS.
    """

    def __init__(self, store: Store, commit_seconds: float | None = None) -> None:
        self.url = store.url
        self.commit_seconds = commit_seconds
        self._store = store
        self._limit: float | None = None
        self._num_done = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Changes while something is uploaded, or tried again; of users' own stores with each request."""
        return self._num_done, getattr(self._store, "num_bytes", 0)

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Wait for a store that is out of reach as long as a commit may."""
        self._limit = self.commit_seconds
        try:
            yield
        finally:
            self._limit = None

    def at(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return a small object, None if it is absent."""
        with contextlib.suppress(FileNotFoundError):
            return self._ask(f"read {self.at(name)}", self._store.read, name)
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with os_errors(CheckpointError, f"cannot write {self.at(name)}"):
            self._ask(f"write {self.at(name)}", self._store.write, name, content)

    def upload(self, path: Path, name: str) -> None:
        """Write a file as an object."""
        with os_errors(CheckpointError, f"cannot write {self.at(name)} from {path}"):
            self._ask(f"write {self.at(name)}", self._store.upload, path, name)

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file."""
        try:
            self._ask(f"read {self.at(name)}", self._store.download, name, path)
        except FileNotFoundError:
            raise CheckpointError(f"{self.at(name)} is missing") from None

    def copy(self, name: str, target: str) -> bool:
        """Copy an object inside the store; returns False if it is absent."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(f"write {self.at(target)}", self._store.copy, name, target)
            return True
        return False

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of the objects in a folder and below it, by name."""
        return self._ask(f"list {self.url}", self._store.sizes, folder)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(f"remove {self.at(name)}", self._store.remove, name)

    def _ask(self, action: str, method: Callable[..., T], *arguments: Any) -> T:
        """Make a request, and again after a failure that may pass; an absent object is FileNotFoundError."""
        seconds = RETRY_SECONDS if self._limit is None else self._limit
        next_pause, end = FIRST_PAUSE_SECONDS, None
        while True:
            self._num_done += 1
            try:
                return method(*arguments)
            except FileNotFoundError:
                raise
            except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
                raise CheckpointError(f"cannot {action}: {_reason(error)}") from None
            except OSError as error:
                reason, now = _reason(error), time.monotonic()
                end = end or now + seconds
                if end <= now:
                    raise StorageError(f"cannot {action} for {seconds:g} s: {reason}") from None
                logger.warning("cannot %s: %s; it is tried again for %.0f s", action, reason, end - now)
            time.sleep(min(next_pause, end - now))
            next_pause = min(2 * next_pause, LONGEST_PAUSE_SECONDS)


def _reason(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return getattr(error, "strerror", None) or one_line(error)
