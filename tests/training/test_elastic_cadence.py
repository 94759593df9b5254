"""Which cadences :func:`dglkge.elastic` takes."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.training.elastic import _settings_of


def test_units_of_the_cadence() -> None:
    settings = _settings_of({"batches": 3, "minutes": 0.5})
    assert (settings.every_epochs, settings.every_batches, settings.every_minutes) == (0, 3, 0.5)


@pytest.mark.parametrize(
    ("every", "message"),
    [
        ({"batches": 1.5}, "elastic: every batches is 1.5; expected a number of at least 0"),
        ({"minutes": -1}, "elastic: every minutes is -1; expected"),
        ({"epochs": True}, "elastic: every epochs is True; expected"),
        ({"steps": 1}, "unknown unit in every 'steps'"),
    ],
)
def test_what_is_no_cadence(every: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _settings_of(every)
