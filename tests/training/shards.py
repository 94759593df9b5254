"""The mark of tests that train dense parameters in slices."""

from __future__ import annotations

import pytest

from dglkge.training.building.components import has_slices_on_processors

NEEDS_SLICES = pytest.mark.skipif(
    not has_slices_on_processors(), reason="this torch has no FSDP2 on processors"
)
