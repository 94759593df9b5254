"""Rules beside embeddings as one ranking: the confidence of rules, weighted, is added to the model's scores.

A candidate of a query gets the greatest confidence of a rule that leads to it, times a weight of the query's
relation and side (Meilicke et al. 2021). The weights are chosen on the valid split. Chains are mined from
training triples and kept with the weights beside the checkpoint; rules with constants are counted in the
index of known triples where they are needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from tqdm import tqdm

from dglkge.checkpoint.layout import RUN_RULES_FILE
from dglkge.data.dataset_files import TRAIN, VALID, load_json, replacing
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol, places_by_id
from dglkge.evaluation.queries import Bonus
from dglkge.inference.rules import Confidences, Rule, RuleGraph, mirrored
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import Side

logger = logging.getLogger(__name__)

WEIGHTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
"""Those that are tried."""

PRIOR_RANKS = 30
"""Valid triples with the mean ranks of all that count beside a relation's own when its weight is chosen."""

SAMPLES = 50
"""Training triples of a relation whose paths are followed."""

MOST_RULES = 50
"""Chains of a relation that are measured, those of most of these triples."""

MIN_CONFIDENCE = 0.01

MOST_CANDIDATES = 1 << 10
"""Of a query, those with the greatest confidences; more if several have the least of these."""

MOST_PAIRS = 1 << 20
"""Pairs of a query and a candidate that a chain may lead to; of more, evenly spaced ones."""

DENSE_NUMBERS = 1 << 24
"""Most pairs of queries and candidates that are in memory at a time."""

TRIPLES_AT_A_TIME = 1024
"""Valid triples whose confidences are in memory while all weights are tried."""


RULES = TypeAdapter(list[Rule])


@dataclass(frozen=True)
class RuleScores:
    """What rules add to the scores of a model: a :data:`dglkge.evaluation.queries.Bonus`.

    Attributes
    ----------
    graph : RuleGraph
        The training triples.
    rules : mapping of int to list of Rule
        Chains, by relation id.
    weights : (R, 2) float64 array
        By relation id, for missing heads and tails.
    counts : mapping of str to int
        Entities of each type.
    """

    graph: RuleGraph
    rules: Mapping[int, list[Rule]]
    weights: np.ndarray
    counts: Mapping[str, int]

    def __call__(self, side: Side, anchor_ids: np.ndarray, relation_ids: np.ndarray) -> Confidences:
        """Return the pairs that rules lead to, and what is added to their scores."""
        weights, parts = self.weights[:, list(Side).index(side)], []
        for relation_id in np.unique(relation_ids).tolist():
            if weights[relation_id]:
                places = np.flatnonzero(relation_ids == relation_id)
                query, candidate, confidence = self.confidences(side, relation_id, anchor_ids[places])
                parts.append((places[query], candidate, weights[relation_id] * confidence))
        return _joined(parts)

    def confidences(self, side: Side, relation_id: int, anchors: np.ndarray) -> Confidences:
        """Return the greatest confidence of a rule that leads from anchors (Q,) to each candidate."""
        count = self.counts[self.graph.relations[relation_id].candidate_type(side)]
        step, parts = max(1, DENSE_NUMBERS // max(count, 1)), []
        for start in range(0, len(anchors), step):
            part = anchors[start : start + step]
            dense = np.zeros((len(part), count), np.float32)
            for rule in self.rules[relation_id]:
                steps = rule.steps if side is Side.TAIL else mirrored(rule.steps)
                pairs = self.graph.follow(part, steps, MOST_PAIRS)
                np.maximum.at(dense, pairs, np.float32(rule.confidence))
            for query, candidate, confidence in self.graph.constants(side, relation_id, part):
                np.maximum.at(dense, (query, candidate), confidence.astype(np.float32))
            if count > MOST_CANDIDATES:
                least = np.partition(dense, -MOST_CANDIDATES, axis=1)[:, -MOST_CANDIDATES, None]
                dense[dense < least] = 0
            query, candidate = np.nonzero(dense)
            parts.append((query + start, candidate, dense[query, candidate].astype(np.float64)))
        return _joined(parts)

    def to_dict(self, labels: Vocabulary) -> dict[str, Any]:
        """Return chains, their steps by relation id, and weights of head and tail as JSON, by relation."""
        return {
            label: {"weights": weights.tolist(), "rules": RULES.dump_python(self.rules[id_], mode="json")}
            for id_, (label, weights) in enumerate(zip(labels.names, self.weights))
        }

    def loaded(self, fields: Mapping[str, Any], labels: Vocabulary) -> RuleScores:
        """Return the same graph with chains and weights of :meth:`to_dict`."""
        values = [fields[label] for label in labels.names]
        rules = {id_: RULES.validate_python(value["rules"]) for id_, value in enumerate(values)}
        return replace(self, rules=rules, weights=np.array([value["weights"] for value in values]))


def _joined(parts: Sequence[Confidences]) -> Confidences:
    none = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    query, candidate, confidence = (np.concatenate(columns) for columns in zip(none, *parts))
    return query, candidate, confidence


def open_rules(run: TrainedModel) -> RuleScores:
    """Return the rules of a run's version and their weights, from its folder; else mine and write them."""
    checkpoint, labels = run.checkpoint, run.tables.relations.labels
    path = checkpoint.run_folder / RUN_RULES_FILE
    identity = {"run_id": checkpoint.manifest.run_id, "version": checkpoint.version}
    scores = plain_rules(run)
    if path.is_file():
        fields = load_json(path)
        if {name: fields.get(name) for name in identity} == identity:
            with contextlib.suppress(LookupError, TypeError, ValueError):  # damaged: mined anew
                return scores.loaded(fields["relations"], labels)
    scores = weighted(run, mined(run, scores))
    if run.has_additions:
        return scores
    try:
        with replacing(path) as file:
            fields = {**identity, "relations": scores.to_dict(labels)}
            file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
    except OSError as error:  # e.g. a run of another user
        logger.warning("rules are not kept: cannot write %s: %s", path, error.strerror or error)
    return scores


def plain_rules(run: TrainedModel) -> RuleScores:
    """Return rules with constants only, with weight 0."""
    relations = run.tables.relations.relations
    graph, ids = RuleGraph(run.known_triples(splits=(TRAIN,)), relations), range(len(relations))
    weights = np.zeros((len(relations), len(Side)))
    return RuleScores(graph, {id_: [] for id_ in ids}, weights, run.tables.meta.entity_types)


def mined(run: TrainedModel, scores: RuleScores) -> RuleScores:
    """Return the same with chains that are mined from paths of training triples."""
    train, rules = run.dataset.split(TRAIN), dict(scores.rules)
    groups = places_by_id(train[:, 1]).items()
    for relation_id, places in tqdm(groups, desc="mine rules", unit="relation", disable=None):
        measured = scores.graph.rules(relation_id, train[places], SAMPLES, MOST_RULES)
        rules[relation_id] = [rule for rule in measured if rule.confidence >= MIN_CONFIDENCE]
    return replace(scores, rules=rules)


def weighted(run: TrainedModel, scores: RuleScores) -> RuleScores:
    """Return the same with the weights of the best filtered MRR on the valid split, by relation and side."""
    triples = run.dataset.split(VALID)
    if not len(triples):
        raise InputError(f"weights of rules are chosen on the valid split, and {run.dataset.path} has none")
    triples = triples[np.argsort(triples[:, 1], kind="stable")]
    known = run.known_triples()
    ranks = np.empty((len(WEIGHTS), len(Side), len(triples)))
    starts = range(0, len(triples), TRIPLES_AT_A_TIME)
    unweighted = replace(scores, weights=np.ones_like(scores.weights))
    for start in tqdm(starts, desc="weights", unit="block", disable=None):
        part, kept = slice(start, start + TRIPLES_AT_A_TIME), dict[Any, Confidences]()
        for place, weight in enumerate(WEIGHTS):
            bonus = partial(_tried, unweighted, weight, kept)
            result = run.rank(Protocol(VALID), triples[part], known, bonus=bonus)
            ranks[place, :, part] = [1 / result.ranks[side] for side in Side]
    # Few triples of a relation say little, so the mean of all counts, too.
    overall = ranks.mean((1, 2))
    weights = np.full_like(scores.weights, WEIGHTS[int(overall.argmax())])
    for relation_id in np.unique(triples[:, 1]).tolist():
        sums = ranks[:, :, triples[:, 1] == relation_id].sum(2) + PRIOR_RANKS * overall[:, None]
        weights[relation_id] = np.array(WEIGHTS)[sums.argmax(0)]
    return replace(scores, weights=weights)


def _tried(scores: Bonus, weight: float, kept: dict[Any, Confidences], *asked: Any) -> Confidences:
    """Return confidences, which are computed once for all weights, times a weight."""
    side, anchor_ids, relation_ids = asked
    key = side, anchor_ids.tobytes(), relation_ids.tobytes()
    if key not in kept:
        kept[key] = scores(*asked)
    query, candidate, confidence = kept[key]
    return query, candidate, weight * confidence
