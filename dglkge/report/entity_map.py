"""Two-dimensional maps of entities: a sample of rows, projected by scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN
from dglkge.errors import InputError
from dglkge.inference.imports.dglke_files import Tables

METHODS = ("pca", "tsne")
PERPLEXITY = 30
"""Of t-SNE, its usual value; smaller where there are fewer than 91 entities, of which it takes a third."""


def degrees(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the number of training triples of each entity, by type and original id."""
    found = {name: np.zeros(dataset.num_entities(name), np.int64) for name in dataset.entity_types}
    triples = dataset.split(TRAIN)
    # Triples are sorted by the pair of types that they join, and ids count within a type.
    for lhs, rhs, first, end in dataset.edge_types:
        found[lhs] += np.bincount(triples[first:end, 0], minlength=len(found[lhs]))
        found[rhs] += np.bincount(triples[first:end, 2], minlength=len(found[rhs]))
    return found


def chosen_entities(of_entities: Mapping[str, np.ndarray], most: int) -> dict[str, np.ndarray]:
    """Return the ids of the entities with the highest degrees over all types, by type, in descending order.

    Parameters
    ----------
    of_entities : mapping of str to (n,) int64 array
        Degree of each entity, by type.
    most : int
        Entities over all types. Each type has at least one.

    Examples
    --------
    >>> chosen_entities({"a": np.array([1, 9, 3]), "b": np.array([2])}, 3)
    {'a': array([1, 2]), 'b': array([0])}
    """
    types = list(of_entities)
    counts = np.concatenate([of_entities[name] for name in types])
    owner = np.repeat(np.arange(len(types)), [len(of_entities[name]) for name in types])
    best = np.argsort(-counts, kind="stable")[:most]
    taken = np.bincount(owner[best], minlength=len(types))
    return {
        name: np.argsort(-of_entities[name], kind="stable")[: max(1, number)]
        for name, number in zip(types, taken.tolist())
    }


def project(rows: np.ndarray, method: str, seed: int = 0) -> tuple[np.ndarray, list[float]]:
    """Project rows to the plane.

    Parameters
    ----------
    rows : (n, D) float array
    method : str
        Of :data:`METHODS`.
    seed : int
        Of t-SNE.

    Returns
    -------
    points : (n, 2) float64 array
    explained : list of float
        Share of the variance along each axis; empty for t-SNE.

    Raises
    ------
    InputError
        If rows are not finite.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if not np.isfinite(rows).all():
        raise InputError(
            "rows of entities are not finite: the run has diverged; --points 0 leaves the map out"
        )
    rows = rows.astype(np.float64)
    # Equal rows, or one alone, have no direction that PCA could find.
    if len(rows) < 3 or rows.shape[1] < 2 or not rows.var(axis=0).any():
        points = np.zeros((len(rows), 2))
        points[:, : rows.shape[1]] = (rows - rows.mean(axis=0))[:, :2]
        return points, []
    if method == "tsne":
        perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
        return TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(rows), []
    pca = PCA(2, svd_solver="full")
    return pca.fit_transform(rows), pca.explained_variance_ratio_.tolist()


def entity_map(
    tables: Tables, of_entities: Mapping[str, np.ndarray], most: int, method: str
) -> dict[str, Any]:
    """Return the map of a run's entities, ready for JSON.

    Parameters
    ----------
    tables : Checkpoint or DglkeTables
        Rows and names.
    of_entities : mapping of str to (n,) int64 array
        Degree of each entity, by type.
    most : int
        Entities to show: those with the highest degrees.
    method : str
        Of :data:`METHODS`.

    Returns
    -------
    dict
        ``method``, ``explained``, ``num_entities`` and ``types``: by type, ``names``, ``degrees``, ``x``
        and ``y`` of the entities.
    """
    chosen = chosen_entities(of_entities, most)
    rows = [tables.gather(name, torch.from_numpy(ids)).float().numpy() for name, ids in chosen.items()]
    points, explained = project(np.concatenate(rows), method)
    types: dict[str, dict[str, Sequence[Any]]] = {}
    first = 0
    for name, ids in chosen.items():
        of_type = points[first : first + len(ids)]
        first += len(ids)
        vocabulary = tables.vocabulary(name)
        types[name] = {
            "names": [vocabulary[id_] for id_ in ids.tolist()],
            "degrees": of_entities[name][ids].tolist(),
            "x": of_type[:, 0].round(5).tolist(),
            "y": of_type[:, 1].round(5).tolist(),
        }
    return {"method": method, "explained": explained, "num_entities": first, "types": types}
