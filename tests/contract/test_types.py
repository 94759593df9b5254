"""Types: what ``make lint`` holds too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.contract.source_tree import ROOT


@pytest.mark.timeout(900)
def test_mypy_finds_nothing() -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed here: it belongs to the extra dev")
    cache = [] if os.access(ROOT, os.W_OK) else ["--cache-dir", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *cache], cwd=ROOT, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr
