"""What holds in all tests of checkpoints."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL spares the page cache, so nothing here depends on it being written out."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
