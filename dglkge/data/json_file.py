"""Reading a JSON object from a file. No numpy: the launcher reads descriptions of data sets too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dglkge.errors import InputError


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    InputError
        If the file is missing or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is cut off or no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content
