"""Numbers of entities (a year, a population, a price), predicted by a ridge regression on their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dglkge.errors import InputError, import_extra
from dglkge.inference.trained_model import TrainedModel
from dglkge.registry import deferred

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = deferred("pandas")

PENALTIES = tuple(10.0**power for power in range(-3, 5))
"""Weights of the squared coefficients; the best by leave-one-out is taken. Rows are standardized."""

FOLDS = 5


def predict_numbers(run: TrainedModel, values: Mapping[str, float], entity_type: str | None) -> pd.DataFrame:
    """Fit a regression to known values; see :meth:`dglkge.inference.run.Run.predict_numbers`."""
    if len(values) < 2 * FOLDS:
        raise InputError(f"{len(values)} entities have a value; at least {2 * FOLDS} are needed")
    type_ = run.type_of(next(iter(values)), entity_type)
    names = run.tables.vocabulary(type_)
    ids, numbers = names.ids(values), np.array(list(values.values()), np.float64)
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
    frame = pd.DataFrame({"entity": list(names.names), "predicted": np.nan, "known": np.nan})
    for shard in run.tables.shards(type_):
        for start in range(0, len(shard.rows), 1 << 14):  # the table may not fit in memory
            part = slice(start, start + (1 << 14))
            predicted = model.predict(shard.rows[part].double().numpy())
            frame.loc[shard.original_ids[part].numpy(), "predicted"] = predicted
    frame.loc[ids, "known"] = numbers
    frame = frame.sort_values("predicted", ascending=False, kind="stable", ignore_index=True)
    frame.attrs["r2"] = float(r2_score(numbers, held_out))
    frame.attrs["mean_error"] = float(mean_absolute_error(numbers, held_out))
    return frame


def best_numbers(frame: pd.DataFrame, k: int, least: bool, known: bool) -> dict[str, Any]:
    """Return the k greatest or least predictions, maybe of known values too, and the errors, for JSON."""
    rows = frame if known else frame[frame["known"].isna()]
    best = rows[::-1][:k] if least else rows[:k]
    return {**frame.attrs, "entities": best.astype(object).where(best.notna(), None).to_dict("records")}
