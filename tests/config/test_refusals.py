"""The table of values that do not fit one another: its fields exist, and all refusals come at once."""

from __future__ import annotations

import pytest

from dglkge.config import load_config
from dglkge.config.load import recipe_files
from dglkge.config.refusals import MACHINES, ROWS, refuse
from dglkge.config.schema import fields
from dglkge.errors import InputErrors

KNOWN = {field.key for field in fields()}
OF_MAPS = {f"{section}.schedule.{name}" for section in ("optimizer", "dense") for name in ("name", "every")}


def test_every_row_names_fields_that_exist() -> None:
    """A row about a field that is gone would refuse nothing, and nobody would notice."""
    sections = {key.partition(".")[0] for key in KNOWN}
    for row in ROWS:
        assert row.field in KNOWN | OF_MAPS, row
        for condition in row.conditions:
            assert condition.key in KNOWN | OF_MAPS | {MACHINES} | sections, row
        assert row.reason and row.allowed.words


def test_recipes_and_defaults_are_refused_nothing() -> None:
    for recipe in recipe_files().values():
        refuse(load_config(recipe))
    refuse(load_config(None, ["dataset=d"]), num_machines=3)


def test_all_refusals_come_at_once() -> None:
    words = "dataset=d training.objective=k_vs_all training.edge_sets=[a] training.synchronous=false"
    words += " negatives.mask_known=true training.early_stopping.patience=3"
    config = load_config(None, words.split())
    with pytest.raises(InputErrors) as caught:
        refuse(config, num_machines=2)
    other = "or another value of training.objective"
    assert sorted(caught.value.problems) == [
        "negatives.mask_known is true and training.objective is k_vs_all, which has no sampled negatives; "
        f"allowed: false, {other}",
        "training.early_stopping.patience is 3 and evaluation.valid_every_epochs is 0, and it counts "
        "rankings of the valid split; allowed: null for training.early_stopping, "
        "or another value of evaluation.valid_every_epochs",
        "training.edge_sets is a and training.objective is k_vs_all, whose batches are queries with the "
        f"answers of all triples; allowed: empty, {other}",
        "training.synchronous is false and training.objective is k_vs_all, where every trainer scores the "
        f"queries of all; allowed: true, {other}",
    ]
