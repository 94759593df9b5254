"""Relations scored by one product of heads and tails, for score functions that have one."""

from __future__ import annotations

import torch

from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS, ComplEx

DIM = 8


def test_relation_products_are_those_of_the_score_function_that_states_them() -> None:
    class Shifted(ComplEx):
        """A score function of the user's, which operates otherwise."""

        def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
            """Multiply, and add the entity."""
            return super().operate(entity, relation) + entity

    draw = torch.Generator().manual_seed(3)
    anchor, answer, relations = (torch.randn(num, DIM, generator=draw) for num in (5, 5, 3))
    for score_function in [SCORE_FUNCTIONS.get("distmult")(), SCORE_FUNCTIONS.get("complex")(), Shifted()]:
        query = score_function.relation_query(anchor, answer)
        assert query.shape[1] == score_function.relation_query_dim(DIM)
        got = score_function.compare_relations(query, relations)
        carried = torch.stack([score_function.operate(anchor, row.expand_as(anchor)) for row in relations], 1)
        expected = (carried * answer[:, None]).sum(-1)
        torch.testing.assert_close(got, expected)
    assert build_model("complex", DIM, True).score_function.has_relation_product
