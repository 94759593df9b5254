"""Models on the Hugging Face hub: upload of the folder that the export writes, download by name."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dglkge.errors import InputError, import_extra

HUB_URL = re.compile(r"hf://([^/@]+/[^/@]+)(?:@(.+))?")
"""``hf://USER/MODEL``, with a revision after ``@``."""


@contextlib.contextmanager
def _hub(user: str) -> Iterator[Any]:
    """Provide ``huggingface_hub``; what the hub or the network refuses is an :class:`InputError`."""
    module = import_extra(user, "huggingface_hub", "huggingface")
    try:
        yield module
    except Exception as error:
        # Refusals of the hub and failures of the network are errors of whichever HTTP library it uses.
        is_http = any(base.__name__ == "HTTPError" for base in type(error).__mro__)
        if not is_http and not isinstance(error, (ValueError, OSError)):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{user}: {reason}") from None


def push(write: Callable[[Path], object], name: str, private: bool) -> str:
    """Upload the folder that a function writes; see :meth:`dglkge.inference.run.Run.push_to_hub`."""
    with _hub(f"push_to_hub {name}") as hub, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write(folder)
        hub.create_repo(name, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder).commit_url)


def download(path: str) -> str:
    """Return the folder of a model of the hub in the user's cache; other paths as they are."""
    found = HUB_URL.fullmatch(path)
    if found is None:
        return path
    with _hub(path) as hub:
        return str(hub.snapshot_download(found[1], revision=found[2]))
