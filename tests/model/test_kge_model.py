"""First rows of entities and relations; optimizers, samplers and objectives by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge import optim
from dglkge.errors import InputError
from dglkge.model import initializers
from dglkge.model.choices import NEGATIVE_SAMPLERS, OBJECTIVES, OPTIMIZERS
from dglkge.model.functions.comparators import Dot
from dglkge.model.initializers import normal_rows, uniform_rows
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.score_functions import ScoreFunction
from dglkge.sampling.negatives import AllNegatives, MixedNegatives
from dglkge.typing import RELATION


def first_rows(name: str, dim: int, reciprocal: bool, scale: float, num: int = 500, table: str = RELATION):
    rows = build_model(name, dim, reciprocal).initial_rows(table, torch.arange(num), seed=1, scale=scale)
    assert rows.dtype == torch.float32
    return rows


def test_rows_start_from_the_distribution():
    for table, shape in (("person", (400, 50)), (RELATION, (400, 100))):
        rows = first_rows("complex", 50, True, 0.01, 400, table)
        assert rows.shape == shape and float(rows.std()) == pytest.approx(0.01, rel=0.03)


def test_phases_fill_the_circle_whatever_the_scale():
    phases = first_rows("rotate", 40, True, 1e-3)
    assert phases.shape == (500, 40)
    assert 3.13 < float(phases.max()) <= math.pi + 1e-6 and -3.13 > float(phases.min()) >= -math.pi - 1e-6
    assert float(first_rows("rotate", 40, True, 1e-3, table="person").abs().max()) < 0.01


@pytest.mark.parametrize("reciprocal", [False, True])
def test_relations_start_as_unit_quaternions_and_near_the_identity(reciprocal):
    sides = 2 if reciprocal else 1
    parts = first_rows("quate", 40, reciprocal, 1e-3, 300).reshape(-1, 4, 10)
    torch.testing.assert_close(parts.norm(dim=1), torch.ones(300 * sides, 10))
    # Uniform on the sphere: means 0, and mean squares 1 / 4, of every part.
    torch.testing.assert_close(parts.mean((0, 2)), torch.zeros(4), rtol=0, atol=0.03)
    torch.testing.assert_close(parts.square().mean((0, 2)), torch.full((4,), 0.25), rtol=0, atol=0.02)
    assert float(first_rows("quate", 40, reciprocal, 1e-3, table="person").abs().max()) < 0.01
    matrices = first_rows("transr", 6, reciprocal, 1e-2, 50).reshape(-1, 42)
    assert torch.equal(matrices[:, 6:], torch.eye(6).reshape(1, -1).expand(50 * sides, -1))
    assert float(matrices[:, :6].std()) == pytest.approx(1e-2, rel=0.1)
    for name, width in (("pairre", 12), ("triplere", 18)):
        rows = first_rows(name, 6, reciprocal, 1e-2, 50).reshape(50 * sides, width)
        scalings = torch.cat([rows[:, :6], rows[:, -6:]])
        assert float(scalings.mean()) == pytest.approx(1, abs=1e-3)
        assert float(scalings.std()) == pytest.approx(1e-2, rel=0.1)
        if name == "triplere":
            assert float(rows[:, 6:12].mean()) == pytest.approx(0, abs=2e-3)


def test_choices_are_the_classes():
    exported = [getattr(optim, name) for name in optim.__all__]
    rules = [rule for rule in exported if issubclass(rule, optim.UpdateRule) and rule is not optim.UpdateRule]
    assert {rule for _, rule in OPTIMIZERS.items()} == set(rules)
    samplers = {name: NEGATIVE_SAMPLERS.get(name).load() for name in NEGATIVE_SAMPLERS}
    assert samplers == {"all_entities": AllNegatives, "mixed": MixedNegatives}
    smoothed = {name: "label_smoothing" in OBJECTIVES.get(name).Settings.model_fields for name in OBJECTIVES}
    assert smoothed == {"negative_sampling": False, "one_vs_all": True, "k_vs_all": True}


DRAWS = [normal_rows, uniform_rows]
IDS = st.lists(st.integers(0, 2**40), max_size=30)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DRAWS), st.integers(1, 9), IDS, st.integers(0, 30), st.integers(-(2**63), 2**63 - 1))
def test_same_in_any_split_and_blocks(draw, dim, ids, cut, seed):
    ids = np.array(ids, dtype=np.int64)
    whole = draw(ids, dim, seed, "person", 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initializers, "BLOCK_PAIRS", 12)
        parts = [draw(part, dim, seed, "person", 1.0) for part in (ids[:cut], ids[cut:])]
    one_by_one = [draw(ids[i : i + 1], dim, seed, "person", 1.0) for i in range(len(ids))]
    assert whole.shape == (len(ids), dim) and whole.dtype == np.float32
    assert np.array_equal(whole, np.concatenate(parts))
    assert np.array_equal(whole, np.concatenate([np.empty((0, dim), np.float32), *one_by_one]))


@pytest.mark.parametrize("draw", DRAWS)
def test_seed_table_id_and_column_all_matter(draw):
    ids = np.arange(50)
    base = draw(ids, 8, 1, "person", 1.0)
    for other_ids, seed, table in ((ids, 2, "person"), (ids, 1, "town"), (ids + 50, 1, "person")):
        assert not np.isclose(base, draw(other_ids, 8, seed, table, 1.0)).any()
    assert len(np.unique(base)) == base.size
    # Wider rows start with the narrower.
    assert np.array_equal(draw(ids, 9, 1, "person", 1.0)[:, :5], draw(ids, 5, 1, "person", 1.0))


def test_moments_of_the_normal_and_the_uniform():
    rows, uniform = (draw(np.arange(5000), 200, 3, "person", 2.0).astype(np.float64) / 2 for draw in DRAWS)
    for (power, moment), tolerance in zip(enumerate((0, 1, 0, 3), 1), (0.004, 0.006, 0.02, 0.05)):
        assert (rows**power).mean() == pytest.approx(moment, abs=tolerance)
    assert (np.abs(rows) < 1.959964).mean() == pytest.approx(0.95, abs=0.001)
    assert 4.3 < np.abs(rows).max() < 6.8
    assert 0.99995 < np.abs(uniform).max() <= 1 and abs(uniform.mean()) < 0.0025
    assert uniform.var() == pytest.approx(1 / 3, abs=0.0015)
    counts, _ = np.histogram(uniform, bins=20, range=(-1, 1))
    assert np.abs(counts / uniform.size - 0.05).max() < 0.001


@pytest.mark.parametrize("draw", DRAWS)
def test_neighbours_are_uncorrelated(draw):
    """Neighbouring ids, neighbouring columns, and the two columns that share their bits."""
    rows = draw(np.arange(4000), 50, 7, "person", 1.0).astype(np.float64)
    rows /= rows.std()
    for first, second in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1]), (rows[:, ::2], rows[:, 1::2])):
        assert abs((first * second).mean()) < 0.01
        assert abs((first**2 * second**2).mean() - 1) < 0.02


def test_a_score_function_with_no_way_back_needs_reciprocal_relations():
    class OneWay(Dot, ScoreFunction):
        def operate(self, entity, relation):
            return entity * relation

    assert KgeModel(OneWay(), 4, reciprocal=True).relation_width == 8
    with pytest.raises(InputError, match="OneWay computes queries from heads only; allowed: true"):
        KgeModel(OneWay(), 4, reciprocal=False)
