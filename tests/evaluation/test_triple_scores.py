"""Scores of triples from both sides, against the scalar formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.errors import InputError
from dglkge.evaluation.queries import score_triples
from dglkge.typing import Side
from tests.evaluation.memory_rows import MemoryRows
from tests.evaluation.toy_world import RELATIONS, toy_world
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import ORACLES


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_equals_the_formula(name):
    for reciprocal in (True,) if name in FORWARD_ONLY else (False, True):
        world = toy_world(name, reciprocal, seed=4)
        found = score_triples(world.model, world.known, RELATIONS, MemoryRows(world.tables), batch_size=7)
        for side in Side:
            expected = [world.score(triple, side) for triple in world.known]
            assert found[side].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_nothing_and_not_finite():
    world = toy_world("distmult", False)
    rows = MemoryRows(world.tables)
    none = score_triples(world.model, np.zeros((0, 3), np.int64), RELATIONS, rows)
    assert [len(scores) for scores in none.values()] == [0, 0]
    world.tables["person"].fill_(torch.inf)
    with pytest.raises(InputError, match="a score is not finite"):
        score_triples(world.model, world.known, RELATIONS, rows)
