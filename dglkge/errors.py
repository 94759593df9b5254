"""The errors that dglkge raises on purpose.

A command turns an :class:`InputError` into one line on stderr and exit status 2; every other
exception is an internal failure and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

INPUT_ERROR_STATUS = 2
"""Exit status of a command that was given bad input, as argparse has it."""


class DglkgeError(Exception):
    """Base of every error that dglkge raises on purpose."""


class InputError(DglkgeError):
    """The user can mend this: the message says what was wrong, what was got and what is allowed."""


class CheckpointError(InputError):
    """A checkpoint is missing, foreign, half-written or does not fit the model."""


class JobError(DglkgeError):
    """Something failed while the job ran that no change of the input would mend."""


def unknown_name(noun: str, got: str, known: Iterable[str], limit: int = 5) -> InputError:
    """Build the error for a name that nobody knows.

    Parameters
    ----------
    noun : str
        What the name stands for, e.g. ``"score function"``.
    got : str
        The name as the user wrote it.
    known : iterable of str
        All names that would have been right.
    limit : int
        How many near names to show; where none is near, how many of the known ones.

    Returns
    -------
    InputError
        Not raised, so that the caller's ``raise`` stands where the reader looks for it.

    Examples
    --------
    >>> print(unknown_name("loss", "softmx", ["softmax", "logistic"]))
    unknown loss 'softmx'; did you mean 'softmax'? known: 'logistic', 'softmax'
    """
    names = sorted(known)
    near = difflib.get_close_matches(got, names, n=limit, cutoff=0.6)
    message = f"unknown {noun} {got!r}"
    if near:
        message += "; did you mean " + " or ".join(repr(name) for name in near) + "?"
    if len(names) <= 20:
        message += " known: " if near else "; known: "
        message += ", ".join(repr(name) for name in names)
    elif not near:
        message += f"; {len(names)} are known, among them " + ", ".join(repr(name) for name in names[:limit])
    return InputError(message)
