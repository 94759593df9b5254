"""The errors that dglkge raises on purpose, and the exit status of a process that ends with one.

A command turns an :class:`InputError` or a :class:`JobError` into one line on stderr; every other exception
is an internal failure and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

INPUT_ERROR_STATUS = 2
"""Exit status of a command that was given bad input, as argparse has it; nothing is started again."""

FAILURE_STATUS = 1
"""Exit status after any other failure; the launcher may start the job again."""

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C: 128 + SIGINT."""

USERS_TO_MEND = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
"""errno of a wrong path or missing rights: permanent, so a restart of the job would fail the same way."""


MAX_NAMES_TO_COMPARE = 5000
"""Names that an unknown one is compared with."""

MESSAGE_CHARACTERS = 400
"""Of a message of another library: torch's may have pages."""


class DglkgeError(Exception):
    """Base of every error that dglkge raises on purpose."""


class InputError(DglkgeError):
    """Bad input: the message has the field, the value and the allowed values."""


class InputErrors(InputError):
    """Several mistakes at once, a line each; as a text they are one line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class CheckpointError(InputError):
    """A checkpoint is missing, foreign, half-written or does not fit the model."""


class NotReadyError(InputError):
    """A machine cannot take the job now: a port in use, a name without an address, another job's lock.

    Before a restart it may pass by itself, so another attempt is made.
    """


class JobError(DglkgeError):
    """A failure while the job ran that no change of the input would correct."""


class StorageError(JobError):
    """A file could not be written while the job ran: the disk is full, a quota is used up, or it failed."""


@contextlib.contextmanager
def os_errors(kind: type[DglkgeError], action: str, *others: type[Exception]) -> Iterator[None]:
    """Raise a failure of the operating system in the block as an error with a text of ours, and the reason.

    Others are exceptions of a library that are to be raised so, too.

    Examples
    --------
    >>> with os_errors(InputError, "cannot read /none"):
    ...     open("/none")
    Traceback (most recent call last):
    ...
    dglkge.errors.InputError: cannot read /none: No such file or directory
    """
    caught: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except caught as error:
        raise kind(f"{action}: {getattr(error, 'strerror', None) or one_line(error)}") from None


def write_error(action: str, error: OSError) -> DglkgeError:
    """Return the error for a file or folder that cannot be written.

    It is a CheckpointError for a wrong path or missing rights, else a StorageError.

    Examples
    --------
    >>> write_error("cannot write a", OSError(errno.ENOSPC, "No space left on device"))
    StorageError('cannot write a: No space left on device')
    """
    # strerror alone: str(error) would repeat the path of the action. It is None for errors without errno.
    text = f"{action}: {error.strerror or error}"
    return CheckpointError(text) if error.errno in USERS_TO_MEND else StorageError(text)


@contextlib.contextmanager
def write_errors(action: str) -> Iterator[None]:
    """Raise a failure of the operating system in the block as :func:`write_error`."""
    try:
        yield
    except OSError as error:
        raise write_error(action, error) from error


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a process that ends with an exception.

    Examples
    --------
    >>> [exit_status_of(error) for error in (InputError(), JobError(), KeyboardInterrupt(), SystemExit(143))]
    [2, 1, 130, 143]
    """
    if isinstance(error, InputError):
        return INPUT_ERROR_STATUS
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    if isinstance(error, SystemExit):
        # As the interpreter does: None is 0, and a text (sys.exit("message")) is 1.
        return error.code if isinstance(error.code, int) else 0 if error.code is None else FAILURE_STATUS
    return FAILURE_STATUS


def one_line(error: BaseException) -> str:
    """Return an error's text, or else its class, in one line of moderate length."""
    return " ".join(str(error).split())[:MESSAGE_CHARACTERS] or type(error).__name__


def missing_package(user: str, package: str, extra: str, error: ImportError) -> InputError:
    """Return the error for a package of an extra, or of none (""), or one that it needs, that is not there.

    Examples
    --------
    >>> print(missing_package("dglkge tune", "optuna", "tune", ImportError("No module named 'optuna'")))
    dglkge tune needs optuna: pip install 'dglkge[tune]' (No module named 'optuna')
    """
    installed = f"'dglkge[{extra}]'" if extra else package
    return InputError(f"{user} needs {package}: pip install {installed} ({error})")


def import_extra(user: str, module: str, extra: str, package: str = "") -> Any:
    """Import a module of an extra for a user such as a command; the package may have another name than it.

    A module that cannot be imported is an InputError with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(user, package or module.partition(".")[0], extra, error) from None


def unknown_name(noun: str, got: str, known: Iterable[str], limit: int = 5) -> InputError:
    """Return the error for an unknown name, with so many near names, or else known ones.

    It is not raised: the caller writes ``raise``, so that control flow shows there.

    Examples
    --------
    >>> print(unknown_name("loss", "softmx", ["softmax", "logistic"]))
    unknown loss 'softmx'; did you mean 'softmax'? known: 'logistic', 'softmax'
    >>> print(unknown_name("data set", "ulms", ["UMLS"]))
    unknown data set 'ulms'; did you mean 'UMLS'? known: 'UMLS'
    """
    names = list(known)
    if len(names) <= MAX_NAMES_TO_COMPARE:
        names = alike = sorted(names)
    else:
        # Comparing with millions of names would take minutes, so only names that begin alike are compared.
        start = got[:3].casefold()
        alike = [name for name in names if name[:3].casefold() == start][:MAX_NAMES_TO_COMPARE]
    near = difflib.get_close_matches(got, alike, n=limit)
    if not near:
        in_lower = {name.lower(): name for name in alike}
        near = [in_lower[name] for name in difflib.get_close_matches(got.lower(), in_lower, n=limit)]
    message = f"unknown {noun} {got!r}"
    if near:
        message += "; did you mean " + " or ".join(repr(name) for name in near) + "?"
    # Up to 20 names fit on a screen; data sets have thousands of entities, of which `limit` are shown.
    if len(names) <= 20:
        message += " known: " if near else "; known: "
        message += ", ".join(repr(name) for name in names)
    elif not near:
        message += f"; {len(names)} are known, among them " + ", ".join(repr(name) for name in names[:limit])
    return InputError(message)


def require_known(noun: str, got: str, known: Collection[str]) -> None:
    """Raise :func:`unknown_name` for a name that is not known."""
    if got not in known:
        raise unknown_name(noun, got, known)
