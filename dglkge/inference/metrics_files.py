"""Reads the ranking results in a run's folder: those of the training job and of ``dglkge evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import METRICS_PATTERN
from dglkge.errors import InputError

PROTOCOL = "protocol"
"""Field of every result."""


def read_metrics(path: Path) -> dict[str, Any]:
    """Read a file of results.

    Raises
    ------
    InputError
        If it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is damaged: it holds {type(found).__name__}, expected a JSON object")
    return found


def all_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every ranking result of a run by name.

    A file holds one result, as ``dglkge evaluate`` writes it, or several by split, as a training job does.
    The name is that of the file, and for one of several ``FILE: SPLIT``.

    Raises
    ------
    InputError
        If a file is damaged.
    """
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(METRICS_PATTERN)):
        found = read_metrics(path)
        if PROTOCOL in found:
            results[path.name] = found
            continue
        results.update({f"{path.name}: {split}": result for split, result in found.items()})
    return results
