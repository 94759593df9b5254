"""What commands print: aligned columns for people, JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.errors import InputError


def print_columns(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "") -> None:
    """Print a table; columns of numbers stand on the right, texts on the left."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [
        bool(rows) and all(_is_number(row[column]) for row in cells[1:]) for column in range(len(header))
    ]
    for row in cells:
        aligned = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right)
        ]
        print((indent + "  ".join(aligned)).rstrip())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON to a file that appears only when it is whole.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def human_bytes(size_bytes: int) -> str:
    """Return a size as people read it, in binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
