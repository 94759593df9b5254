"""Modules of torch and models of other packages: the scores of the run, and gradients that reach its rows."""

from __future__ import annotations

import copy
import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.errors import InputError
from dglkge.evaluation.queries import score_triples
from dglkge.inference.exports.torch_models import GEOMETRIC, PYKEEN
from dglkge.inference.run import Run
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import ONE_PAIR, TWO_PAIRS, save_toy, toy_meta, toy_tables

TRIPLES = np.array([[0, 0, 1], [3, 1, 2], [22, 0, 22], [4, 1, 0], [7, 1, 4]])


def toy_run(path, score_function, reciprocal=True, relations=ONE_PAIR):
    """Save a run of random rows, and open it; the dense parameters are those at the start of a training."""
    kind = SCORE_FUNCTIONS.get(score_function)()
    dim = 8 if kind.other_dims(6) else 6
    meta = toy_meta(score_function, relations, reciprocal, dim=dim)
    if kind.has_times:
        meta = dataclasses.replace(meta, times=("2001",), score_options={"num_times": 1})
    save_toy(path, meta, toy_tables(meta, finite=True))
    run = Run(open_checkpoint(path))
    if kind.has_module:
        module = build_model(score_function, dim, reciprocal).module
        run.tables.dense_parameters = lambda: dict(copy.deepcopy(module).named_parameters())
    return run


def expected_scores(run):
    return score_triples(run.model, TRIPLES, run.tables.meta.relations, run.tables)


COLUMNS = torch.from_numpy(TRIPLES).unbind(1)


@pytest.mark.parametrize(
    ("score_function", "reciprocal"),
    [
        (name, reciprocal)
        for name in (*SCORE_FUNCTIONS, "affine_dot", "none_cos", "complex_diagonal_l2_bias")
        for reciprocal in (True, False)
        if reciprocal or not SCORE_FUNCTIONS.get(name).needs_reciprocal
    ],
)
def test_a_module_has_the_scores_of_the_run_and_gradients(tmp_path, score_function, reciprocal):
    run = toy_run(tmp_path, score_function, reciprocal, TWO_PAIRS)
    expected, model = expected_scores(run), run.torch_model().double()
    for side in Side:
        assert model(*COLUMNS, side).tolist() == pytest.approx(expected[side].tolist(), rel=1e-12)
    mean = (expected[Side.HEAD] + expected[Side.TAIL]) / 2
    scores = model(*COLUMNS)
    assert scores.tolist() == pytest.approx(mean.tolist(), rel=1e-12)
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        is_used = name != "relations" or run.model.score_function.has_parameters
        assert not is_used or parameter.grad.abs().sum() > 0, name


def test_training_a_module_leaves_the_run_as_it_is(tmp_path):
    run = toy_run(tmp_path, "tucker")
    before, model = expected_scores(run), run.torch_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (-model(*COLUMNS).sum()).backward()
    optimizer.step()
    assert model(*COLUMNS).sum() > torch.from_numpy(before[Side.TAIL]).sum()
    for side in Side:
        assert np.array_equal(expected_scores(run)[side], before[side])
    again = run.torch_model()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(*COLUMNS), model(*COLUMNS))


@pytest.fixture
def factory():
    """Triples by the names of the toy run, in PyKEEN's own order of names."""
    factories = pytest.importorskip("pykeen.triples", reason="needs pykeen").TriplesFactory
    triples = [*TRIPLES.tolist(), *([id_, 0, id_] for id_ in range(23))]
    names = np.array([(f"person-{h}", ONE_PAIR[r].name, f"person-{t}") for h, r, t in triples])
    return lambda inverse: factories.from_labeled_triples(names, create_inverse_triples=inverse)


MODES = {"reciprocal": (True, True), "plain": (False, False), "adjoint": (False, True)}
"""Whether the run has reciprocal relations, and the factory inverse triples."""


@pytest.mark.parametrize(
    ("score_function", "mode"),
    [*product(["complex"], MODES), *zip([name for name in PYKEEN if name != "complex"], [*MODES] * 3)],
)
def test_pykeen_has_the_same_scores(tmp_path, factory, score_function, mode):
    reciprocal, inverse = MODES[mode]
    run, triples = toy_run(tmp_path, score_function, reciprocal), factory(inverse)
    model, expected = run.pykeen_model(triples), expected_scores(run)
    entity, relation = triples.entity_to_id, triples.relation_to_id
    ids = torch.tensor(
        [[entity[f"person-{h}"], relation[ONE_PAIR[r].name], entity[f"person-{t}"]] for h, r, t in TRIPLES]
    )
    assert ids[:, 0].tolist() != TRIPLES[:, 0].tolist()  # names are sorted there
    # As its evaluators ask: all tails of (h, r), all heads of (r, t); the latter by the inverse relation.
    tails = model.predict_t(ids[:, :2]).gather(1, ids[:, 2:])
    heads = model.predict_h(ids[:, 1:]).gather(1, ids[:, :1])
    for scores, side in ((model.predict_hrt(ids), Side.TAIL), (tails, Side.TAIL), (heads, Side.HEAD)):
        assert scores[:, 0].tolist() == pytest.approx(expected[side].tolist(), rel=1e-4, abs=1e-5)


def test_what_other_packages_cannot_take_is_refused(tmp_path, factory):
    with pytest.raises(InputError, match="so the factory needs create_inverse_triples=True"):
        toy_run(tmp_path / "a", "complex").pykeen_model(factory(False))
    with pytest.raises(InputError, match="PyKEEN has models .* of complex, .*; got rotate, person"):
        toy_run(tmp_path / "b", "rotate").pykeen_model(factory(True))
    pytest.importorskip("torch_geometric", reason="needs torch_geometric")
    with pytest.raises(InputError, match="nn.kge has models .* complex, distmult; got complex, person"):
        toy_run(tmp_path / "c", "complex", relations=TWO_PAIRS).geometric_model()


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("score_function", GEOMETRIC)
def test_torch_geometric_has_the_same_scores(tmp_path, score_function, reciprocal):
    pytest.importorskip("torch_geometric", reason="needs torch_geometric")
    run = toy_run(tmp_path, score_function, reciprocal)
    model, expected = run.geometric_model(), expected_scores(run)
    h, r, t = COLUMNS
    assert model(h, r, t).tolist() == pytest.approx(expected[Side.TAIL].tolist(), rel=1e-4, abs=1e-5)
    if reciprocal:
        scores = model(t, r + len(ONE_PAIR), h).tolist()
        assert scores == pytest.approx(expected[Side.HEAD].tolist(), rel=1e-4, abs=1e-5)
