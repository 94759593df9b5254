"""The model of a configuration and its choices."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from dglkge import optim
from dglkge.errors import InputError
from dglkge.model.choices import NEGATIVE_SAMPLERS, OBJECTIVES, OPTIMIZERS, state_widths
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS, ComplEx
from dglkge.sampling.negatives import AllNegatives, MixedNegatives
from dglkge.typing import RELATION, Side
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.regularizer_by_name import build_regularizer
from tests.model.score_oracle import fitting_dim, float64_score

NAMES = sorted(SCORE_FUNCTIONS)
DIM = 6


def draw(name: str, reciprocal: bool, num_rows: int = 5):
    model = build_model(name, fitting_dim(name, DIM), reciprocal)
    random = torch.Generator().manual_seed(4)
    widths = (model.dim, model.relation_width, model.dim)
    rows = [torch.randn(num_rows, width, generator=random, dtype=torch.float64) for width in widths]
    model.set_times(rows[1], torch.zeros(num_rows))
    return model, *rows


def check_matrix(model, heads, relations, tails, side) -> torch.Tensor:
    """Return the scores of triples; matrix and pairs give the same ones."""
    anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
    query = model.query(anchors, relations, side)
    scores = model.score(heads, relations, tails, side)
    for answer_scores in (model.compare(query, answers).diagonal(), model.compare_pairs(query, answers)):
        torch.testing.assert_close(answer_scores, scores, rtol=1e-6, atol=1e-6)
    return scores


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(FORWARD_ONLY)))
def test_one_row_serves_both_sides_with_one_score(name):
    model, *rows = draw(name, reciprocal=False)
    expected = [float64_score(name, *(row.tolist() for row in triple)) for triple in zip(*rows)]
    for side in Side:
        scores = check_matrix(model, *rows, side)
        torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_reciprocal_rows_operate_forwards_on_the_entity_given(name):
    model, heads, relations, tails = draw(name, reciprocal=True)
    halves = relations.chunk(2, dim=1)
    for side, half, anchors, answers in (
        (Side.TAIL, halves[0], heads, tails),
        (Side.HEAD, halves[1], tails, heads),
    ):
        with torch.no_grad():
            scores = check_matrix(model, heads, relations, tails, side).tolist()
        triples = zip(anchors.tolist(), half.tolist(), answers.tolist())
        assert scores == pytest.approx([float64_score(name, *triple) for triple in triples])


@pytest.mark.parametrize(
    "name, reciprocal, width",
    [("complex", False, 6), ("complex", True, 12), ("rotate", False, 3), ("rotate", True, 6)],
)
def test_widths(name, reciprocal, width):
    model = build_model(name, DIM, reciprocal)
    widths = (model.relation_width, model.table_width(RELATION), model.table_width("person"))
    assert widths == (width, width, DIM)


@pytest.mark.parametrize("side, first", [(Side.TAIL, 0), (Side.HEAD, 6)])
def test_direction(side, first):
    rows = torch.arange(24.0).reshape(2, 12)
    assert torch.equal(build_model("complex", DIM, True).direction(rows, side), rows[:, first : first + 6])
    assert build_model("distmult", 12, False).direction(rows, side) is rows


def test_a_penalty_leaves_phases_alone():
    """Weighted N3 of the factors of each query, by hand."""
    model, heads, relations, tails = draw("rotate", True)
    regularizer = build_regularizer("n3", 0.1, complex_valued=True)
    penalties = regularizer.query_penalties(model, heads, relations, tails, Side.TAIL)
    rows = [torch.complex(*row.chunk(2, dim=1)).abs() for row in (heads, tails)]
    torch.testing.assert_close(penalties, 0.1 * sum(row.pow(3).sum(1) for row in rows))


def test_initial_rows_of_entities_and_relations():
    model = build_model("complex", 50, reciprocal=True)
    entities = model.initial_rows("person", torch.arange(400), seed=1, scale=0.01)
    relations = model.initial_rows(RELATION, torch.arange(300), seed=1, scale=0.01)
    assert entities.shape == (400, 50) and relations.shape == (300, 100)
    for rows in (entities, relations):
        assert rows.dtype == torch.float32
        assert float(rows.std()) == pytest.approx(0.01, rel=0.03)
    uniform = model.initial_rows("person", torch.arange(400), seed=1, scale=0.01, distribution="uniform")
    assert float(uniform.abs().max()) <= 0.01
    assert float(uniform.std()) == pytest.approx(0.01 / 3**0.5, rel=0.03)


def test_initial_phases_fill_the_circle_whatever_the_scale():
    model = build_model("rotate", 40, reciprocal=True)
    phases = model.initial_rows(RELATION, torch.arange(500), seed=1, scale=1e-3)
    assert phases.shape == (500, 40)
    assert 3.13 < float(phases.max()) <= math.pi + 1e-6 and -3.13 > float(phases.min()) >= -math.pi - 1e-6
    entities = model.initial_rows("person", torch.arange(500), seed=1, scale=1e-3)
    assert float(entities.abs().max()) < 0.01


def test_building():
    with pytest.raises(InputError, match="unknown distribution 'gauss'; known: 'normal', 'uniform'"):
        build_model("complex", 4, False).initial_rows("person", torch.arange(3), 1, 1.0, distribution="gauss")
    assert isinstance(build_model("complex", 4, True).score_function, ComplEx)
    assert KgeModel(ComplEx(), 4, False).dim == 4
    with pytest.raises(InputError, match="unknown score function 'complx'"):
        build_model("complx", 4, True)
    with pytest.raises(InputError, match="must be even"):
        KgeModel(ComplEx(), 3, False)


@pytest.mark.parametrize(
    ("name", "rule", "widths"),
    [
        ("sparse_adagrad", optim.Adagrad, (7,)),
        ("row_adagrad", optim.RowWiseAdagrad, (1,)),
        ("sparse_adam", optim.Adam, (1, 7, 7)),
    ],
)
def test_optimizers(name, rule, widths):
    assert OPTIMIZERS.get(name) is rule
    assert state_widths(name, 7) == widths


def test_all_rules_are_registered():
    exported = [getattr(optim, name) for name in optim.__all__]
    rules = [rule for rule in exported if issubclass(rule, optim.UpdateRule) and rule is not optim.UpdateRule]
    assert {rule for _, rule in OPTIMIZERS.items()} == set(rules)


def test_facts_of_optimizers_need_neither_torch_nor_dgl():
    """The launcher and ``dglkge plan`` read them."""
    program = "import sys; from dglkge.model.choices import state_widths; state_widths('sparse_adam', 7); "
    program += "print(*{'torch', 'dgl', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_negative_samplers():
    classes = {name: NEGATIVE_SAMPLERS.get(name).load() for name in NEGATIVE_SAMPLERS}
    assert classes == {"all_entities": AllNegatives, "mixed": MixedNegatives}


def test_labels_are_smoothed_where_there_are_labels_of_all_candidates() -> None:
    options = {name: list(OBJECTIVES.get(name).Settings.model_fields) for name in OBJECTIVES}
    assert options == {
        "negative_sampling": ["name"],
        "one_vs_all": ["name", "label_smoothing"],
        "k_vs_all": ["name", "label_smoothing"],
    }


def test_all_entities_is_a_sampler_without_counts():
    choice = NEGATIVE_SAMPLERS.get("all_entities")
    settings = choice.Settings(name="all_entities", num_for_heads=0)
    assert settings.takes_all
    assert [bool(count) for count in settings.per_side.values()] == [False, True]
    assert "degree_power" not in choice.Settings.model_fields
