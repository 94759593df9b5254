"""Relation rows cut into operator parameters by hand, and put together again."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from dglkge.errors import CheckpointError
from dglkge.formats.bigraph_files import bigraph_attributes, bigraph_config
from dglkge.formats.operators import OPERATORS
from dglkge.formats.relation_parameters import (
    bigraph_row_sums,
    from_parameters,
    is_dynamic,
    operator_of,
    to_bigraph_sums,
    to_parameters,
)
from dglkge.model.functions.bigraph_scores import NAMES
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS, DistMult
from tests.checkpoint.toy_checkpoint import ONE_PAIR, TWO_PAIRS, toy_meta

ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)


def test_every_score_function_has_an_operator():
    """One without keeps its rows whole, which PyTorch-BigGraph cannot use: that is to be a decision."""
    assert ["", *SCORE_FUNCTIONS] == sorted(OPERATORS)  # "" for tables without a model


@pytest.mark.parametrize(
    ("score_function", "relations", "reciprocal"),
    [
        ("complex", ONE_PAIR, True),
        ("complex", TWO_PAIRS, False),
        ("affine_l2", ONE_PAIR, True),
        ("affine_l2", TWO_PAIRS, False),
        ("diagonal_cos", ONE_PAIR, True),
        ("none_cos", TWO_PAIRS, False),
    ],
)
def test_row_sums_of_bigraphs_adagrad(relations, reciprocal, score_function):
    """Its sums laid out as its parameters are, from the squares of the rows themselves."""
    meta = toy_meta(score_function, relations, reciprocal)
    width = build_model(score_function, meta.dim, reciprocal).relation_width
    rows = np.random.default_rng(0).random((len(meta.relations), width), dtype=np.float32)
    if score_function.startswith("none"):
        rows[:] = 0
    parameters = {key: values for _, key, values in to_parameters(rows, meta)}
    kinds = {key.split(".")[-1]: None for key in parameters}  # real before imag, as the modules declare them
    keys = [
        key
        for side in ("lhs", "rhs")
        for index in range(len(meta.relations))
        for kind in kinds
        if (key := f"{side}_operators.{index}.{kind}") in parameters
    ]
    assert len(keys) == len(parameters)
    state = {
        number: {"step": 1, "sum": torch.from_numpy(parameters[key] ** 2)} for number, key in enumerate(keys)
    }
    np.testing.assert_allclose(bigraph_row_sums(state, meta, width), (rows**2).mean(axis=1), rtol=1e-6)
    if state:
        del state[0]
        with pytest.raises(KeyError):
            bigraph_row_sums(state, meta, width)


def test_when_relations_are_dynamic():
    assert is_dynamic(toy_meta(relations=ONE_PAIR, reciprocal=True))
    assert not is_dynamic(toy_meta(relations=ONE_PAIR, reciprocal=False))
    assert not is_dynamic(toy_meta(relations=TWO_PAIRS, reciprocal=True))


BOTH = np.concatenate([ROWS, ROWS + 10], axis=1)
BY_HAND = [
    # The first half of a row asks for tails and so works on the head, lhs.
    (toy_meta("distmult"), ROWS, {"0.lhs.diagonals": [[1, 2], [5, 6]], "0.rhs.diagonals": [[3, 4], [7, 8]]}),
    (
        *(toy_meta("complex"), ROWS),
        {
            "0.lhs.real": [[1], [5]],
            "0.lhs.imag": [[2], [6]],
            "0.rhs.real": [[3], [7]],
            "0.rhs.imag": [[4], [8]],
        },
    ),
    # PyTorch-BigGraph works on the tail: <h r, t> = <h, conj(r) t>.
    (
        *(toy_meta("complex", reciprocal=False), ROWS),
        {"0.rhs.real": [1, 2], "0.rhs.imag": [-3, -4], "1.rhs.real": [5, 6], "1.rhs.imag": [-7, -8]},
    ),
    (
        *(toy_meta("transe_l2", reciprocal=False), ROWS),
        {"0.rhs.translation": [-1, -2, -3, -4], "1.rhs.translation": [-5, -6, -7, -8]},
    ),
    # The tail side of static relations is kept apart, without a key.
    (
        *(toy_meta("distmult", TWO_PAIRS[:2]), ROWS),
        {
            "0.lhs.diagonal": [1, 2],
            "1.lhs.diagonal": [5, 6],
            "0.rhs.diagonal": [3, 4],
            "1.rhs.diagonal": [7, 8],
        },
    ),
    # PyTorch-BigGraph multiplies the tail from the left: h R t = h . (R t).
    (
        *(toy_meta("rescal", reciprocal=False, dim=2), ROWS),
        {
            "0.rhs.linear_transformation": [[1, 2], [3, 4]],
            "1.rhs.linear_transformation": [[5, 6], [7, 8]],
        },
    ),
    # With an operator for each side ours multiplies the entity from the right: h R = R^T h.
    (
        *(toy_meta("rescal", dim=2), BOTH),
        {
            "0.lhs.linear_transformations": [[[1, 3], [2, 4]], [[5, 7], [6, 8]]],
            "0.rhs.linear_transformations": [[[11, 13], [12, 14]], [[15, 17], [16, 18]]],
        },
    ),
    (
        *(toy_meta("affine_l2", reciprocal=False, dim=2), np.arange(12, dtype=np.float32).reshape(2, 6)),
        {
            "0.rhs.linear_transformation": [[0, 1], [2, 3]],
            "0.rhs.translation": [4, 5],
            "1.rhs.linear_transformation": [[6, 7], [8, 9]],
            "1.rhs.translation": [10, 11],
        },
    ),
    (
        *(toy_meta("linear_cos", dim=1), ROWS[:, :2]),
        {"0.lhs.linear_transformations": [[[1]], [[5]]], "0.rhs.linear_transformations": [[[2]], [[6]]]},
    ),
]


@pytest.mark.parametrize(("meta", "rows", "expected"), BY_HAND)
def test_rows_cut_by_hand(meta, rows, expected):
    parameters = {}
    for path, key, values in to_parameters(rows, meta):
        group, index, side, name = re.fullmatch(r"(\w+)/relations/(\d)/operator/(.hs)/(\w+)", path).groups()
        parameters[f"{index}.{side}.{name}"] = values.tolist()
        is_ours = not is_dynamic(meta) and side == "lhs"
        assert group == ("reciprocal" if is_ours else "model")
        assert key == (None if is_ours else f"{side}_operators.{index}.{name}")
    assert parameters == expected


@pytest.mark.parametrize("reciprocal", [True, False])
def test_sums_of_matrices_are_laid_out_as_the_matrices(reciprocal):
    meta = toy_meta("rescal", reciprocal=reciprocal, dim=2)
    rows = BOTH if reciprocal else ROWS
    parameters = [values for _, _, values in to_parameters(rows, meta)]
    sums = to_bigraph_sums(rows, rows.shape[1], meta)
    assert [values.tolist() for values in sums] == [values.tolist() for values in parameters]
    state = {number: {"sum": torch.from_numpy(values.copy())} for number, values in enumerate(sums)}
    np.testing.assert_allclose(bigraph_row_sums(state, meta, rows.shape[1]), rows.mean(axis=1))


@pytest.fixture
def a_new_one(monkeypatch):
    """Register a score function that declares no operator."""
    monkeypatch.setitem(SCORE_FUNCTIONS._members, "a new one", type("New", (DistMult,), {"operator": None}))


@pytest.mark.usefixtures("a_new_one")
@pytest.mark.parametrize("relations", [ONE_PAIR, TWO_PAIRS])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_there_and_back_bit_for_bit(relations, reciprocal):
    """Of every score function, and of every operator with every comparator."""
    for name in [*SCORE_FUNCTIONS, *NAMES, "a new one"]:
        meta = toy_meta(name, relations, reciprocal, dim=2)
        # 8 numbers, or as many as an operator has.
        width = 4 if name == "rescal" and not reciprocal else 8
        if name in NAMES:
            width = build_model(name, meta.dim, reciprocal).relation_width
        bits = np.random.default_rng(0).integers(0, 1 << 32, (len(relations), width), dtype=np.uint32)
        rows = np.zeros_like(bits) if name.startswith("none") else bits
        datasets = {path: values.copy() for path, _, values in to_parameters(rows.view(np.float32), meta)}
        assert from_parameters(datasets, meta, width).tobytes() == rows.tobytes(), name


@pytest.mark.usefixtures("a_new_one")
def test_what_biggraph_lacks_has_a_name_that_it_refuses():
    for score_function in ("transe_l1", "rotate"):
        config = bigraph_config(toy_meta(score_function), 1, "/x")
        assert config["comparator"] not in {"dot", "cos", "l2", "squared_l2"}
    assert operator_of(toy_meta("rotate")).name not in {"none", "translation", "diagonal", "linear", "affine"}
    assert operator_of(toy_meta("a new one")).name == "a new one"


def test_an_unknown_score_function_is_an_error(tmp_path):
    """No silent name: its rows may be cut in another way."""
    with pytest.raises(CheckpointError) as caught:
        operator_of(toy_meta("mine"))
    assert str(caught.value) == (
        "the checkpoint has the unknown score function 'mine'; known: "
        f"{', '.join(map(repr, SCORE_FUNCTIONS))}; "
        "if a module of yours registers it, give that with --import MODULE"
    )
    module = tmp_path / "mine.py"
    module.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    meta = dataclasses.replace(toy_meta("mine"), config={"imports": [str(module), "no such"]})
    with pytest.raises(CheckpointError) as caught:
        list(to_parameters(ROWS, meta))
    assert str(caught.value) == (
        f"the checkpoint has the score function 'mine', trained with {module}, no such; a recorded module "
        f"runs as Python only if you name it: --import {module} --import 'no such', or open_run(..., "
        f"imports={[str(module), 'no such']})"
    )
    assert not (tmp_path / "was_run").exists()


def test_attributes_without_a_training_plan():
    meta = dataclasses.replace(toy_meta(), config={}, progress={})
    attributes = bigraph_attributes(meta, {"dimension": 6})
    assert attributes["config/json"] == '{\n    "dimension": 6\n}'
    assert (attributes["iteration/num_epochs"], attributes["iteration/epoch_idx"]) == (0, 0)
    config = {
        "training": {"num_epochs": 9, "edge_chunks": 4, "edge_sets": ["train", "news"]},
        "checkpoint": {"keep_every_epochs": 5, "init_path": "runs/older/checkpoint"},
        "evaluation": {"held_out": {"fraction": 0.1, "batch_negatives": 20, "uniform_negatives": 30}},
    }
    # 2 epochs of 8 passes, then 6: the one just trained is the second chunk of the second edge set
    meta = toy_meta(config=config, progress={"finished_epochs": 2, "passes_done": 6})
    described = bigraph_config(meta, 1, "/x")
    assert described["num_edge_chunks"] == 4 and described["eval_fraction"] == 0.1
    assert described["init_path"] == "runs/older/checkpoint"
    assert described["checkpoint_preservation_interval"] == 5
    assert (described["eval_num_batch_negs"], described["eval_num_uniform_negs"]) == (20, 30)
    attributes = bigraph_attributes(meta, described)
    del attributes["config/json"]
    assert attributes == {
        "iteration/num_epochs": 9,
        "iteration/epoch_idx": 2,
        "iteration/num_edge_paths": 2,
        "iteration/edge_path_idx": 1,
        "iteration/edge_path": "news",
        "iteration/num_edge_chunks": 4,
        "iteration/edge_chunk_idx": 1,
    }
    later = bigraph_attributes(dataclasses.replace(toy_meta(), progress={"finished_epochs": 12}), {})
    assert (later["iteration/num_epochs"], later["iteration/epoch_idx"]) == (12, 11)
