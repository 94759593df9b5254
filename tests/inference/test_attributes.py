"""Numbers of entities by regression: those that rows determine, those that they do not, refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import dglkge
from dglkge.errors import InputError

pytest.importorskip("sklearn")


def test_numbers_that_are_linear_in_rows_are_found(folder):
    run = dglkge.open_run(folder)
    names, rows = run.tables.vocabulary("person").names, run.tables["person"][:].double().numpy()
    truth = 3 + rows @ [1.0, -2.0, 0.5, 0.0, 4.0, 1.0]
    known_numbers = pd.Series(truth[:30], names[:30])
    frame = run.predict_numbers(known_numbers)
    assert frame["predicted"].is_monotonic_decreasing and sorted(frame["entity"]) == sorted(names)
    frame = frame.set_index("entity").loc[list(names)]
    assert frame["predicted"].tolist() == pytest.approx(truth, abs=0.05)
    assert frame["known"][:30].tolist() == known_numbers.tolist() and frame["known"][30:].isna().all()
    assert frame.attrs["r2"] > 0.999 and frame.attrs["mean_error"] < 0.05


def test_numbers_that_rows_do_not_determine_are_not_explained(folder):
    run = dglkge.open_run(folder)
    draws = np.random.default_rng(0).normal(size=40)
    frame = run.predict_numbers(dict(zip(run.tables.vocabulary("person").names, draws)))
    assert frame.attrs["r2"] < 0.2
    # What is not determined is predicted by the mean.
    assert frame["predicted"].std() < 0.7 * draws.std()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nobody": 1.0}, "nobody"),
        ({"person1": np.nan}, "the value of 'person1' is nan; expected a finite number"),
        (None, "3 entities have a value; at least 10 are needed"),
    ],
)
def test_refusals(folder, change, words):
    values = {f"person{number}": 1.0 * number for number in range(3 if change is None else 20)}
    with pytest.raises(InputError, match=words):
        dglkge.open_run(folder).predict_numbers({**values, **(change or {})})
