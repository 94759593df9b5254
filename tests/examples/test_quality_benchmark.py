"""Recipes that ship: their files are valid, their names are found, and their row of the table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.training.building.components import configured_loss, configured_model, configured_regularizer

SIDES = {"mrr": 0.35678, "hits@1": 0.25, "hits@3": 0.4, "hits@10": 0.5}


def test_every_recipe_is_a_valid_configuration(benchmark_module):
    quality = benchmark_module("quality")
    paths = quality.recipes("")
    assert len(paths) >= 2
    for path in paths:
        config = load_config(str(path), [])
        model = configured_model(config)
        assert model.dim == config.model.dimension
        configured_loss(config)
        configured_regularizer(config, model)
        # One folder for the data set, shared by its recipes, and an own one for the run.
        assert config.dataset == f"data/{path.parent.name}", path
    runs = [load_config(str(path), []).output for path in paths]
    assert len(set(runs)) == len(runs)


def test_recipes_are_found_by_name(benchmark_module):
    quality = benchmark_module("quality")
    (path,) = quality.recipes("fb15k237/complex")
    assert path.parts[-3:] == ("recipes", "fb15k237", "complex.yaml")
    with pytest.raises(
        InputError, match=r"unknown recipe 'fb15k237/complx'; did you mean 'fb15k237/complex'"
    ):
        quality.recipes("fb15k237/complx")


def test_row_of_a_recipe(benchmark_module):
    quality = benchmark_module("quality")
    (path,) = quality.recipes("fb15k237/complex")
    run = SimpleNamespace(wall_seconds=123.4, peak_bytes=1.26e9)
    metrics = {"both": SIDES, "ties": {"pessimistic": {"both": {**SIDES, "mrr": 0.3}}}}
    row = quality.recipe_row("FB15k-237", path, run, metrics)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["FB15k-237", "`fb15k237/complex.yaml`"]
    assert cells[3:10] == [".357", ".250", ".400", ".500", ".300", "123", "1.3"]
    assert len(cells) == len(quality.TABLE_HEADER.splitlines()[0].strip("|").split("|"))
    assert ".388" in cells[-1]
