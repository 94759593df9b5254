"""Numbers of entities (a year, a population, a price), predicted by a ridge regression on their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from dglkge.errors import InputError, import_extra
from dglkge.inference.trained_model import TrainedModel

PENALTIES = tuple(10.0**power for power in range(-3, 5))
"""Weights of the squared coefficients; the best by leave-one-out is taken. Rows are standardized."""

FOLDS = 5

LARGEST = 1e150
"""Squares of larger numbers overflow."""


def predict_numbers(run: TrainedModel, values: Mapping[str, float], entity_type: str | None) -> pd.DataFrame:
    """Fit a regression to known values; see :meth:`dglkge.inference.run.Run.predict_numbers`."""
    if len(values) < 2 * FOLDS:
        raise InputError(f"{len(values)} entities have a value; at least {2 * FOLDS} are needed")
    type_ = run.type_of(next(iter(values)), entity_type)
    names = run.tables.vocabulary(type_)
    ids, numbers = names.ids(values), np.array(list(values.values()), np.float64)
    is_allowed = np.abs(numbers) < LARGEST
    if not is_allowed.all():
        name = list(values)[int(np.argmin(is_allowed))]
        raise InputError(f"the value of {name!r} is {values[name]}; expected a number below {LARGEST:g}")
    import_extra("the prediction of numbers", "sklearn", "report", "scikit-learn")
    from sklearn import linear_model, metrics, model_selection, pipeline, preprocessing

    model = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.RidgeCV(PENALTIES))
    rows = run.tables.gather(type_, torch.from_numpy(ids)).double().numpy()
    folds = model_selection.KFold(FOLDS, shuffle=True, random_state=0)
    held_out = model_selection.cross_val_predict(model, rows, numbers, cv=folds)
    model.fit(rows, numbers)
    frame = pd.DataFrame({"entity": list(names.names), "predicted": np.nan, "known": np.nan})
    for shard in run.tables.shards(type_):
        for part, ids_of_part in zip(shard.rows.split(1 << 14), shard.original_ids.split(1 << 14)):
            # A part at a time: the table may not fit in memory.
            frame.loc[ids_of_part.numpy(), "predicted"] = model.predict(part.double().numpy())
    frame.loc[ids, "known"] = numbers
    frame = frame.sort_values("predicted", ascending=False, kind="stable", ignore_index=True)
    frame.attrs["r2"] = float(metrics.r2_score(numbers, held_out))
    frame.attrs["mean_error"] = float(metrics.mean_absolute_error(numbers, held_out))
    return frame


def best_numbers(frame: pd.DataFrame, k: int, least: bool, known: bool) -> dict[str, Any]:
    """Return the k greatest or least predictions, maybe of known values too, and the errors, for JSON."""
    rows = frame if known else frame[frame["known"].isna()]
    best = rows[::-1][:k] if least else rows[:k]
    return {**frame.attrs, "entities": best.astype(object).where(best.notna(), None).to_dict("records")}
