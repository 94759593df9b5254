"""The benchmarks are scripts: their helpers are found beside them, as when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.toy_kg import REPOSITORY

BENCHMARKS = str(REPOSITORY / "benchmarks")


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    """Import a script of benchmarks, or a helper of theirs, by name."""

    def load(name: str) -> ModuleType:
        sys.path.insert(0, BENCHMARKS)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(BENCHMARKS)

    return load
