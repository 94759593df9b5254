"""Names and their ids: the row of a name in its vocabulary is its original id."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dglkge.errors import InputError, unknown_name

MAX_NAMES_TO_COMPARE = 5000


class Vocabulary:
    """An ordered list of distinct names.

    Parameters
    ----------
    names : sequence of str
        The name of id 0, 1, 2, ...
    noun : str
        What the names stand for, for error messages, e.g. ``"entity"``.
    """

    def __init__(self, names: Sequence[str], noun: str) -> None:
        self.names = names
        self.noun = noun
        self._ids: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, id_: int) -> str:
        return self.names[id_]

    def __contains__(self, name: object) -> bool:
        return name in self._id_of_name()

    def id(self, name: str) -> int:
        """Return the id of a name.

        Raises
        ------
        InputError
            If nothing has that name; the message shows the nearest known ones.
        """
        id_ = self._id_of_name().get(name)
        if id_ is None:
            raise self._unknown(name)
        return id_

    def ids(self, names: Iterable[str]) -> np.ndarray:
        """Return the ids of names.

        Returns
        -------
        (n,) int64

        Raises
        ------
        InputError
            If nothing has one of the names.
        """
        return np.array([self.id(name) for name in names], dtype=np.int64)

    def save(self, path: Path) -> None:
        """Write one name per line, in UTF-8; the line number, from 0, is the id."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.writelines(name + "\n" for name in self.names)

    @classmethod
    def load(cls, path: Path, noun: str) -> Vocabulary:
        """Read what :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is missing, not UTF-8 or cut off in a line.
        """
        return cls(read_lines(path), noun)

    def _id_of_name(self) -> dict[str, int]:
        if self._ids is None:
            self._ids = {name: id_ for id_, name in enumerate(self.names)}
        return self._ids

    def _unknown(self, name: str) -> InputError:
        if len(self.names) <= MAX_NAMES_TO_COMPARE:
            return unknown_name(self.noun, name, self.names)
        # Comparing with millions of names would take minutes, so only names that begin alike are compared.
        start = name[:3].casefold()
        alike = [known for known in self.names if known[:3].casefold() == start][:MAX_NAMES_TO_COMPARE]
        near = difflib.get_close_matches(name, alike, n=5, cutoff=0.6)
        if near:
            return InputError(f"unknown {self.noun} {name!r}; did you mean {' or '.join(map(repr, near))}?")
        some = ", ".join(repr(known) for known in self.names[:5])
        return InputError(f"unknown {self.noun} {name!r}; {len(self.names)} are known, among them {some}")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file whose every line ends in a newline (only ``\\n`` ends a line).

    Raises
    ------
    InputError
        If the file is missing, not UTF-8 or its last line has no end.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text:
        return []
    if not text.endswith("\n"):
        raise InputError(f"{path} is cut off: its last line has no end")
    return text[:-1].split("\n")
