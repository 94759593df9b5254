"""Scores of all possible triples of a run, each computed alone in float64, and names of triples."""

from __future__ import annotations

import numpy as np

from dglkge.typing import RELATION, Side


def all_scores(run) -> dict[tuple[int, Side], np.ndarray]:
    """Return scores (heads, tails) by relation and side."""
    scores = {}
    for id_, relation in enumerate(run.tables.relations.relations):
        heads, tails = (run.tables[type_][:].double() for type_ in (relation.lhs, relation.rhs))
        row = run.tables[RELATION][:].double()[id_ : id_ + 1]
        for side in Side:
            rows = [run.model.score(head[None], row, tails, side).numpy() for head in heads]
            scores[id_, side] = np.stack(rows)
    return scores


def known_pairs(run, splits) -> dict[int, np.ndarray]:
    """Return by relation whether a split has a triple: (heads, tails) bool."""
    known = {}
    for id_, relation in enumerate(run.tables.relations.relations):
        types = run.tables.vocabulary(relation.lhs), run.tables.vocabulary(relation.rhs)
        known[id_] = np.zeros((len(types[0]), len(types[1])), bool)
    for split in splits:
        for head, relation_id, tail in run.dataset.split(split).tolist():
            known[relation_id][head, tail] = True
    return known


def names_of(dataset, triple) -> tuple[str, str, str]:
    head, relation_id, tail = (int(part) for part in triple)
    relation, label = dataset.relations[relation_id], dataset.relations.labels[relation_id]
    return dataset.vocabulary(relation.lhs)[head], label, dataset.vocabulary(relation.rhs)[tail]
