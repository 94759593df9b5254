"""The device path (``training.device``) with the CPU in the place of a GPU, against the path of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.test_reference import trained

STAGED = "training.device=cpu_staged"

CASES = (
    "",
    "negatives.mask_known=true loss.name=self_adversarial model.score_function=rotate",
    "model.reciprocal_relations=false regularizer.name=n3 regularizer.weight=0.1",
    "model.score_function=rescal regularizer.name=dura regularizer.weight=0.1",
    "model.entity_dropout=0.2 model.relation_dropout=0.1",
    "model.global_vectors=true model.reciprocal_relations=false",
    "negatives.all_entities=true negatives.own_entity=false",
)


@pytest.mark.parametrize("case", CASES)
def test_trains_the_tables_of_the_cpu_bit_by_bit(case: str, tmp_path: Path) -> None:
    """Several steps of both sides, all types, every copy there and back; with the same arithmetic."""
    losses, tables, _ = trained(tmp_path, "reference", *case.split())
    staged_losses, staged_tables, _ = trained(tmp_path / "staged", "reference", STAGED, *case.split())
    # Masks multiply the sum of a row's gradients and not each, and a type's gradient is the sum of such sums.
    is_exact = "dropout" not in case and "global" not in case
    assert len(losses) > 5 and (staged_losses == losses or not is_exact)
    np.testing.assert_allclose(staged_losses, losses, rtol=1e-6)
    for name, rows in tables.items():
        np.testing.assert_allclose(staged_tables[name], rows, rtol=1e-5, atol=1e-6, err_msg=name)
        assert (staged_tables[name] == rows).all() or not is_exact, name
