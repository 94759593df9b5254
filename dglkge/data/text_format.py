"""What kind of file holds triples, by its name, and how its lines are split."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from dglkge.errors import InputError

EXTENSIONS = (".tsv", ".txt", ".csv", ".parquet")
_DELIMITER_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "space": " ", "semicolon": ";", "pipe": "|"}


@dataclass(frozen=True)
class TextFormat:
    """How a line of text becomes fields.

    Attributes
    ----------
    delimiter : str
        One character.
    quoted : bool
        Whether fields may stand in double quotes (CSV). Otherwise every character stands for itself.
    """

    delimiter: str
    quoted: bool

    def split(self, line: str) -> list[str]:
        """Return the fields of a line.

        Raises
        ------
        ValueError
            If a quote is never closed.
        """
        if not self.quoted:
            return line.split(self.delimiter)
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True), [""])
        except csv.Error as error:
            raise ValueError(f"bad quotes ({error})") from error


def is_gz(path: Path) -> bool:
    """Tell by its name whether a file is compressed."""
    return path.suffix.lower() == ".gz"


def extension(path: Path) -> str:
    """Return the extension without ``.gz``, in lower case."""
    return path.with_suffix("").suffix.lower() if is_gz(path) else path.suffix.lower()


def parse_delimiter(text: str) -> str:
    """Understand the ``--delimiter`` option: one character, or its name.

    Raises
    ------
    InputError
        If it is anything else.
    """
    delimiter = _DELIMITER_NAMES.get(text, text)
    if len(delimiter) != 1 or delimiter in '"\n\r' or not delimiter.isascii():
        names = ", ".join(name for name in _DELIMITER_NAMES if name.isalpha())
        raise InputError(f"--delimiter {text!r} is not allowed; give one ASCII character, or {names}")
    return delimiter


def text_format(path: Path, delimiter: str | None) -> TextFormat:
    """Return how a text file is split: CSV by commas with quotes, anything else by tabs without.

    Parameters
    ----------
    path : Path
        The file, with or without ``.gz``.
    delimiter : str or None
        What the user says instead of the comma or tab.
    """
    quoted = extension(path) == ".csv"
    return TextFormat(delimiter or ("," if quoted else "\t"), quoted)


def open_binary(raw: BinaryIO, path: Path) -> BinaryIO:
    """Return the uncompressed bytes of an open file."""
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gz(path) else raw
