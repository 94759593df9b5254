"""What the tests of the sources share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract import source_tree


@pytest.fixture(scope="package", autouse=True)
def forget_sources() -> Iterator[None]:
    """Free the syntax trees of all files after the last of these tests."""
    yield
    source_tree.sources.cache_clear()
    source_tree.sources_of.cache_clear()
