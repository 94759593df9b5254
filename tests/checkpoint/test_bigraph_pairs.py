"""Every operator with every comparator in PyTorch-BigGraph's files: names, shapes, values, and back."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from dglkge.checkpoint import hdf5_format, open_checkpoint, part_files
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.data.dataset import Dataset
from dglkge.formats.bigraph_files import bigraph_config
from dglkge.formats.operators import operator_of, score_function_of
from dglkge.model.functions.bigraph_scores import NAMES
from dglkge.typing import RELATION, Relation
from tests.checkpoint.test_bigraph_reader import names_in_parts, strip
from tests.checkpoint.toy_checkpoint import (
    ONE_PAIR,
    datasets_in,
    same,
    save_toy,
    saved_toy,
    toy_meta,
    toy_tables,
)
from tests.toy_kg import toy_dataset

DIM = 6
STATIC = {
    "none": {},
    "translation": {"translation": (DIM,)},
    "diagonal": {"diagonal": (DIM,)},
    "linear": {"linear_transformation": (DIM, DIM)},
    "affine": {"linear_transformation": (DIM, DIM), "translation": (DIM,)},
    "complex_diagonal": {"real": (DIM // 2,), "imag": (DIM // 2,)},
}
DYNAMIC = {
    "none": {},
    "translation": {"translations": (DIM,)},
    "diagonal": {"diagonals": (DIM,)},
    "linear": {"linear_transformations": (DIM, DIM)},
    "affine": {"linear_transformations": (DIM, DIM), "translations": (DIM,)},
    "complex_diagonal": {"real": (DIM // 2,), "imag": (DIM // 2,)},
}
"""Names and shapes of the parameters of one relation, as PyTorch-BigGraph's operators have them."""


def test_every_pair_has_its_name():
    for name in NAMES:
        config = bigraph_config(toy_meta(name), 1, "/x")
        (operator,) = {relation["operator"] for relation in config["relations"]}
        assert config["bias"] is name.endswith("_bias")
        assert score_function_of(operator, config["comparator"], config["bias"]) == name
        assert name.startswith(f"{operator}_{config['comparator']}")


@pytest.mark.parametrize(
    ("name", "reciprocal"),
    [
        ("none_cos", True),
        ("none_dot_bias", False),
        ("translation_squared_l2", True),
        ("translation_l2_bias", False),
        ("diagonal_cos_bias", True),
        ("diagonal_l2", False),
        ("linear_dot_bias", True),
        ("linear_squared_l2", False),
        ("affine_l2", True),
        ("affine_cos_bias", False),
        ("complex_diagonal_cos", True),
        ("complex_diagonal_squared_l2_bias", False),
    ],
)
def test_files_are_bigraphs(tmp_path, name, reciprocal):
    """Written with the names, shapes and keys of its own checkpoints; read without all that is ours."""
    meta = toy_meta(name, ONE_PAIR, reciprocal, optimizer="row_adagrad")
    tables = toy_tables(meta)
    if name.startswith("none"):
        tables[RELATION].rows[:] = 0
    save_toy(tmp_path, meta, tables, 2)
    declared = operator_of(name)
    config = json.loads((tmp_path / "latest" / "config.json").read_text())
    assert config["comparator"] == declared.comparator and config["bias"] is name.endswith("_bias")
    assert {relation["operator"] for relation in config["relations"]} == {declared.name}
    assert config["dynamic_relations"] is reciprocal and config["dimension"] == DIM
    expected, shapes = {}, []
    for side in ("lhs", "rhs") if reciprocal else ("rhs",):
        for index in (0,) if reciprocal else range(2):
            for piece, shape in (DYNAMIC if reciprocal else STATIC)[declared.name].items():
                path = f"relations/{index}/operator/{side}/{piece}"
                expected[path] = (
                    (2, *shape) if reciprocal else shape, f"{side}_operators.{index}.{piece}"
                )  # fmt: skip
                shapes.append(expected[path][0])
    with h5py.File(tmp_path / "v1" / "model.v1.h5") as file:
        items = datasets_in(file["model"]).items()
        datasets = {path: (item.shape, item.attrs["state_dict_key"]) for path, item in items}
        assert datasets == expected
        assert all(file[f"model/{path}"].dtype == np.float32 for path in datasets)
        state = hdf5_format.read_blob(file["optimizer/state_dict"])["state"]
        assert [tuple(state[number]["sum"].shape) for number in range(len(state))] == shapes
    strip(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.meta.score_function == name and checkpoint.meta.reciprocal is reciprocal
    ids = [int(name.split("-")[1]) for name in names_in_parts(tmp_path, 2)]
    assert same(checkpoint["person"][:], tables["person"].rows[ids])
    assert same(checkpoint[RELATION][:], tables[RELATION].rows)


@pytest.mark.parametrize("reciprocal", [False, True])
def test_files_of_several_operators(tmp_path, reciprocal):
    """The parameters of each relation's own operator; ours are read back, and so are those without ours."""
    operators = ("translation", "affine", "none", "complex_diagonal")
    relations = [Relation(name, "person", "person") for name in "abcd"]
    name = "+".join(operators) + "_cos"
    meta, tables = saved_toy(tmp_path, 2, name, relations, reciprocal, operators=operators)
    config = json.loads((tmp_path / "latest" / "config.json").read_text())
    assert [relation["operator"] for relation in config["relations"]] == list(operators)
    assert config["dynamic_relations"] is False and config["comparator"] == "cos"
    expected = {
        f"relations/{index}/operator/rhs/{piece}": shape
        for index, operator in enumerate(operators)
        for piece, shape in STATIC[operator].items()
    }
    with h5py.File(tmp_path / "v1" / "model.v1.h5") as file:
        shapes = {path: item.shape for path, item in datasets_in(file["model"]).items()}
        state = hdf5_format.read_blob(file["optimizer/state_dict"])["state"]
    assert shapes == expected
    assert [tuple(state[number]["sum"].shape) for number in range(len(state))] == list(expected.values())
    rows = tables[RELATION].rows.numpy()
    assert open_checkpoint(tmp_path)[RELATION][:].numpy().tobytes() == rows.tobytes()
    strip(tmp_path)
    stripped = open_checkpoint(tmp_path)
    assert (stripped.meta.score_function, stripped.meta.operators) == (name, operators)
    tail_rows = rows[:, rows.shape[1] // 2 :] if reciprocal else rows
    assert stripped[RELATION][:].numpy().tobytes() == tail_rows.tobytes()
    with hdf5_format.open_file(tmp_path / "model.v1.h5") as file:
        sums = part_files.read_state(tmp_path, file, RELATION, stripped.meta)["sum"]
    expected_sums = tables[RELATION].state["sum"].numpy()[:, -tail_rows.shape[1] :].copy()
    for row, operator in zip(expected_sums, operators):
        row[sum(int(np.prod(shape)) for shape in STATIC[operator].values()) :] = 0
    np.testing.assert_array_equal(sums, expected_sums)


def test_global_vectors_are_read_into_the_rows(tmp_path):
    """PyTorch-BigGraph's vectors of types; a run that it is converted to has them in its rows."""
    dataset = Dataset.open(toy_dataset())
    meta = toy_meta(
        "affine_cos_bias",
        [Relation(relation.name, relation.lhs, relation.rhs) for relation in dataset.relations.relations],
        reciprocal=False,
        entity_types={"entity": dataset.num_entities("entity")},
        optimizer="row_adagrad",
    )
    tables = toy_tables(meta)
    rows = tables["entity"].rows
    rows.nan_to_num_(posinf=1.0)
    save_toy(tmp_path / "theirs", meta, tables, 2, {"entity": dataset.vocabulary("entity")})
    strip(tmp_path / "theirs")
    shift = np.arange(DIM, dtype=np.float32) / 7
    with h5py.File(tmp_path / "theirs" / "model.v1.h5", "r+") as file:
        file["model/entities/entity/global_embedding"] = shift
    stripped = open_checkpoint(tmp_path / "theirs")
    names = list(dataset.vocabulary("entity").names)
    assert np.array_equal(stripped["entity"][names].numpy(), rows.numpy() + shift)
    convert_to_run(stripped, dataset, tmp_path / "run")
    run = open_checkpoint(tmp_path / "run")
    assert run.meta.score_function == "affine_cos_bias" and run.global_vector("entity") is None
    assert np.array_equal(run["entity"][:].numpy(), rows.numpy() + shift)
    with h5py.File(tmp_path / "theirs" / "model.v1.h5", "r+") as file:
        file["model/entities/entity/global_embedding"][...] = 0
    assert np.array_equal(open_checkpoint(tmp_path / "theirs")["entity"][names].numpy(), rows.numpy())
