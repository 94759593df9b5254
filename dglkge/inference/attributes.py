"""Numbers of entities (a year, a population, a price), predicted by a ridge regression on their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dglkge.errors import InputError, import_extra
from dglkge.inference.trained_model import TrainedModel

if TYPE_CHECKING:
    import pandas as pd

PENALTIES = tuple(10.0**power for power in range(-3, 5))
"""Weights of the squared coefficients; the best by leave-one-out is taken. Rows are standardized."""

FOLDS = 5


@dataclass(frozen=True)
class Attribute:
    """A number of every entity of a type.

    Attributes
    ----------
    entity_type : str
    predicted : (N,) float64 array
        By id.
    known : (N,) float64 array
        The given values; NaN where there is none.
    r2, mean_error : float
        Of the known values, each predicted from four fifths of the others: share of their variance that is
        explained, and mean absolute error.
    """

    entity_type: str
    predicted: np.ndarray
    known: np.ndarray
    r2: float
    mean_error: float


def predict_attribute(
    run: TrainedModel, values: Mapping[str, float], entity_type: str | None = None
) -> Attribute:
    """Fit a regression to known values, and predict every entity of their type.

    Raises
    ------
    InputError
        If a name is unknown, a value is no finite number, there are fewer than 10, or scikit-learn is
        missing.
    """
    if len(values) < 2 * FOLDS:
        raise InputError(f"{len(values)} entities have a value; at least {2 * FOLDS} are needed")
    type_ = run.type_of(next(iter(values)), entity_type)
    ids = run.tables.vocabulary(type_).ids(values)
    numbers = np.array(list(values.values()), np.float64)
    if not np.isfinite(numbers).all():
        name = list(values)[int(np.argmin(np.isfinite(numbers)))]
        raise InputError(f"the value of {name!r} is {values[name]}; expected a finite number")
    import_extra("the prediction of numbers", "sklearn", "report", "scikit-learn")
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics import mean_absolute_error, r2_score
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), RidgeCV(PENALTIES))
    rows = run.tables.gather(type_, torch.from_numpy(ids)).double().numpy()
    held_out = cross_val_predict(model, rows, numbers, cv=KFold(FOLDS, shuffle=True, random_state=0))
    model.fit(rows, numbers)
    predicted = np.empty(len(run.tables.vocabulary(type_)))
    for shard in run.tables.shards(type_):
        for start in range(0, len(shard.rows), 1 << 14):  # the table may not fit in memory
            part = slice(start, start + (1 << 14))
            predicted[shard.original_ids[part].numpy()] = model.predict(shard.rows[part].double().numpy())
    known = np.full(len(predicted), np.nan)
    known[ids] = numbers
    return Attribute(
        type_,
        predicted,
        known,
        float(r2_score(numbers, held_out)),
        float(mean_absolute_error(numbers, held_out)),
    )


def best_numbers(frame: pd.DataFrame, k: int, least: bool, known: bool) -> dict[str, Any]:
    """Return the first rows of :meth:`dglkge.inference.run.Run.predict_numbers` and its errors, for JSON.

    Parameters
    ----------
    frame : DataFrame
    k : int
        Number of rows.
    least : bool
        Those with the smallest numbers.
    known : bool
        Also those with a given value.
    """
    rows = frame if known else frame[frame["known"].isna()]
    best = rows[::-1][:k] if least else rows[:k]
    return {**frame.attrs, "entities": best.astype(object).where(best.notna(), None).to_dict("records")}
