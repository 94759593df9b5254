"""Both ways of computing distances."""

from __future__ import annotations

import pytest

from dglkge.model.functions import autograd


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the compiled loops, or what an accelerator takes."""
    if request.param == "torch":
        monkeypatch.setattr(autograd, "_compiled", lambda rows: False)
