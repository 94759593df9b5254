"""A trained model as a module of torch, and as one of PyKEEN or PyTorch Geometric with the same scores."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from dglkge.errors import InputError, import_extra
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import RELATION, Side


class TorchModel(nn.Module):
    """A trained model whose rows are parameters: it can be trained on, moved to a device and saved by torch.

    Parameters
    ----------
    run : TrainedModel
        Its rows are copied.

    Attributes
    ----------
    entities : (n, D) Parameter
        Rows of all entity types, one type after the other.
    relations : (R, relation_width) Parameter
    module : Module or None
        The score function's dense parameters.
    """

    first: Tensor

    def __init__(self, run: TrainedModel) -> None:
        super().__init__()
        tables, types = run.tables, run.tables.entity_types
        rows = [tables[name][:] for name in types]
        # Rows that are narrower than the dimension have zeros at their end.
        wide = [pad(type_rows, (0, run.model.dim - type_rows.shape[1])) for type_rows in rows]
        self.entities = nn.Parameter(torch.cat(wide))
        self.relations = nn.Parameter(tables[RELATION][:])
        self._model = copy.deepcopy(run.model)
        self._num_times = tables.relations.num_times
        self.module = self._model.module
        if self.module is not None:
            self.module.requires_grad_(True)
        first = dict(zip(types, np.cumsum([0, *map(len, rows)]).tolist()))
        ends = [(first[relation.lhs], first[relation.rhs]) for relation in tables.relations.relations]
        self.register_buffer("first", torch.tensor(ends), persistent=False)

    def forward(self, h: Tensor, r: Tensor, t: Tensor, side: Side | None = None) -> Tensor:
        """Return the scores of triples, (B,); higher is better.

        Parameters
        ----------
        h, r, t : (B,) int64 tensor
            Ids of the run: those of the data set, which count from 0 in each entity type
            (``run.tables.vocabulary(type).ids(names)``, ``run.tables.relations.id(name)``).
        side : Side, optional
            The score as an answer to (h, r, ?) for ``Side.TAIL``, to (?, r, t) for ``Side.HEAD``. They differ
            only with reciprocal relations; by default it is their mean, as of ``run.score``.
        """
        heads, tails = self.entities[self.first[r, 0] + h], self.entities[self.first[r, 1] + t]
        if side is None and self._model.reciprocal:
            return (self(h, r, t, Side.HEAD) + self(h, r, t, Side.TAIL)) / 2
        side = side or Side.TAIL
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        rows = self._model.set_times(self.relations[r // self._num_times], r % self._num_times)
        return self._model.compare_pairs(self._model.query(anchors, rows, side, r), answers)


def _complex(rows: Tensor) -> list[Tensor]:
    return [torch.complex(*rows.chunk(2, dim=-1))]


def _pieces(number: int, rows: Tensor) -> list[Tensor]:
    return list(rows.chunk(number, dim=-1))


def _unit(rows: Tensor) -> list[Tensor]:
    return [normalize(rows, dim=-1)]


def _quaternions(rows: Tensor) -> list[Tensor]:
    return [rows.unflatten(-1, (4, -1)).transpose(-1, -2)]


Split = Callable[[Tensor], list[Tensor]]
_whole = partial(_pieces, 1)
PYKEEN: dict[str, tuple[str, dict[str, Any], Split, Split]] = {
    "complex": ("ComplEx", {}, _complex, _complex),
    "distmult": ("DistMult", {}, _whole, _whole),
    "pairre": ("PairRE", {"p": 1}, _unit, partial(_pieces, 2)),
    # PyKEEN's QuatE has the opposite sign, and does not divide by the norm when it scores.
    "quate": ("QuatE", {}, _quaternions, lambda rows: [-normalize(_quaternions(rows)[0], dim=-1)]),
    "rescal": ("RESCAL", {}, _whole, lambda rows: [rows.unflatten(-1, (round(rows.shape[-1] ** 0.5), -1))]),
    "transe_l1": ("TransE", {"p": 1}, _whole, _whole),
    "transe_l2": ("TransE", {"p": 2}, _whole, _whole),
    "triplere": ("TripleRE", {"p": 1, "u": None}, _unit, partial(_pieces, 3)),
}
"""By score function: PyKEEN's interaction with the same scores, its settings, and how rows of entities and of
relations become its representations."""

GEOMETRIC = {"complex": ("ComplEx", 2), "distmult": ("DistMult", 1)}
"""By score function: the class of PyTorch Geometric with the same scores, and its tables for one of ours."""


def pykeen_model(run: TrainedModel, factory: Any) -> Any:
    """Return the model as one of PyKEEN, which its evaluators and training loops take.

    Parameters
    ----------
    run : TrainedModel
        With one entity type and a score function of :data:`PYKEEN`.
    factory : pykeen.triples.TriplesFactory
        The training triples. Rows are matched by its names, not by ids. With reciprocal relations it needs
        ``create_inverse_triples=True``: an inverse relation gets the half of the row that answers (?, r, t).
    """
    import_extra("run.pykeen_model", "pykeen", "pykeen")
    from pykeen.models import ERModel
    from pykeen.nn import Embedding
    from pykeen.nn.init import PretrainedInitializer

    entity_type, (interaction, settings, entity_split, relation_split) = _counterpart(run, "PyKEEN", PYKEEN)
    if run.model.reciprocal and not factory.create_inverse_triples:
        # Without them PyKEEN predicts heads by the half of a relation's row that was trained for tails.
        raise InputError("the run has reciprocal relations, so the factory needs create_inverse_triples=True")
    tables, vocabulary = run.tables, run.tables.vocabulary(entity_type)
    by_id = [sorted(ids, key=ids.get) for ids in (factory.entity_to_id, factory.relation_to_id)]
    entities = tables.gather(entity_type, torch.from_numpy(vocabulary.ids(by_id[0])))
    relations = tables.gather(RELATION, torch.tensor([tables.relations.id(name) for name in by_id[1]]))
    if factory.create_inverse_triples:
        # PyKEEN's order: each relation, and after it its inverse.
        relations = torch.stack(_directions(run, relations), dim=1).flatten(0, 1)

    def representation(rows: Tensor) -> Any:
        # PyKEEN stores complex numbers as pairs of real ones, (n, D / 2, 2); our rows are all real parts and
        # then all imaginary parts.
        stored = torch.view_as_real(rows) if rows.is_complex() else rows.contiguous()
        shape, initializer = tuple(rows.shape[1:]), PretrainedInitializer(stored)
        return Embedding(max_id=len(rows), shape=shape, dtype=rows.dtype, initializer=initializer)

    return ERModel(
        triples_factory=factory,
        interaction=interaction,
        interaction_kwargs=settings,
        entity_representations=[representation(part) for part in entity_split(entities)],
        relation_representations=[representation(part) for part in relation_split(relations)],
    )


def geometric_model(run: TrainedModel) -> Any:
    """Return the model as one of ``torch_geometric.nn.kge``.

    Ids are those of the run. With reciprocal relations there are twice as many: relation r scores (h, r, ?),
    and number of relations + r scores (?, r, t), with t as its head.

    Parameters
    ----------
    run : TrainedModel
        With one entity type and a score function of :data:`GEOMETRIC`.
    """
    import_extra("run.geometric_model", "torch_geometric", "geometric", "torch-geometric")
    from torch_geometric.nn import kge

    entity_type, (name, number) = _counterpart(run, "torch_geometric.nn.kge", GEOMETRIC)
    entities, relations = run.tables[entity_type][:], run.tables[RELATION][:]
    if run.model.reciprocal:
        relations = torch.cat(_directions(run, relations))
    model = getattr(kge, name)(len(entities), len(relations), run.model.dim // number)
    state = {}
    for table, rows in (("node_emb", entities), ("rel_emb", relations)):
        # The second half of complex rows is a table of its own.
        for suffix, half in zip(("", "_im"), rows.chunk(number, dim=-1)):
            state[f"{table}{suffix}.weight"] = half
    model.load_state_dict(state)
    return model


def _directions(run: TrainedModel, relations: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relations, and their inverses."""
    forward = run.model.direction(relations, Side.TAIL)
    if run.model.reciprocal:
        return forward, run.model.direction(relations, Side.HEAD)
    return forward, run.model.score_function.adjoint(forward)


def _counterpart(run: TrainedModel, package: str, models: dict[str, Any]) -> tuple[str, Any]:
    """Return the one entity type, and the entry of the score function."""
    name, types = run.tables.meta.score_function, list(run.tables.entity_types)
    if name not in models or len(types) != 1:
        raise InputError(
            f"{package} has models of one entity type with the scores of {', '.join(models)}; got {name}, "
            f"{', '.join(types)}; run.torch_model() takes any"
        )
    return types[0], models[name]
