"""Reads the ranking results in a run's folder: those of the training job and of ``dglkge evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import METRICS_PATTERN
from dglkge.errors import InputError

PROTOCOL = "protocol"
BOTH = "both"
"""Fields of every result: its protocol, and the metrics of both sides."""


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


def _is_result(found: Any) -> bool:
    return isinstance(found, dict) and PROTOCOL in found and BOTH in found


def all_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every ranking result of a run by name.

    A file holds one result, as ``dglkge evaluate`` writes it, or several by split, as a training job does.
    The name is that of the file, and for one of several ``FILE: SPLIT``. Other JSON files are left out.

    Raises
    ------
    InputError
        If a file is damaged.
    """
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(METRICS_PATTERN)):
        found = read_metrics(path)
        if _is_result(found):
            results[path.name] = found
            continue
        several = {f"{path.name}: {split}": result for split, result in found.items()}
        results.update({name: one for name, one in several.items() if _is_result(one)})
    return results
