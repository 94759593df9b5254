"""The score adapter of CQD: curves of links for questions of several hops, fitted on a few such questions.

As Arakelyan et al. 2023 ("Adapting neural link predictors for data-efficient complex query answering"): the
score of a link goes through an affine map whose two numbers are affine functions of the relation's row, here
of the side that is asked for; all rows stay. A sigmoid makes a probability of it. It is fitted on
conjunctions of two or three links with and without a negated one, of which one needs a valid triple, by the
log loss of their answers and of other entities. The factor of the score is an exponential: it stays positive.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice, product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dglkge.data.dataset_files import TRAIN, VALID
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Platt
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import RELATION, Side

logger = logging.getLogger(__name__)

KINDS = ((2, 0), (3, 0), (1, 1), (2, 1))
"""Numbers of links and of negated links: 2i, 3i, 2in, 3in."""

MOST_LINKS = 3
POOL = 1 << 15
"""Entities of a type that are tried for a question, at random; all if there are fewer."""

LIKELIEST, OTHERS = 128, 128
"""Entities that are no answers: those of the greatest values, and random ones that count for the rest."""

RIDGES = (10.0, 1.0, 0.1, 0.01)
"""Weights of the squared parameters that are tried."""

TRIED_SHARE = 5
"""One question of so many is for choosing among them."""

STEPS = 40

Curves = dict[tuple[int, Side], Platt]
"""By relation id and side."""


@dataclass
class Examples:
    """Entities of questions as rows: E of up to :data:`MOST_LINKS` links.

    Attributes
    ----------
    scores, groups : (E, L) tensor
        Score of each link; relation and side, -1 for a link that is known or absent.
    signs : (E, L) tensor
        1; -1 for a negated link.
    labels, weights : (E,) tensor
    question : (E,) tensor
    """

    scores: Tensor
    groups: Tensor
    signs: Tensor
    labels: Tensor
    weights: Tensor
    question: Tensor

    def of(self, places: Tensor) -> Examples:
        """Return some rows."""
        return Examples(*(column[places] for column in vars(self).values()))

    def loss(self, slopes: Tensor, offsets: Tensor) -> Tensor:
        """Return the log loss per question of the curves (G,) of all groups."""
        logits = self.signs * (slopes[self.groups] * self.scores + offsets[self.groups])
        log_values = torch.where(self.groups < 0, 0.0, logsigmoid(logits)).sum(1).clamp_max(-1e-12)
        terms = torch.where(self.labels, log_values, torch.log(-torch.expm1(log_values)))
        return -(self.weights * terms).sum() / len(self.question.unique())


class QuestionMaker:
    """Draws questions of one variable from the triples of train and valid.

    Parameters
    ----------
    curve : Platt
        Of all links; it chooses the entities that might be taken for answers.
    """

    def __init__(self, run: TrainedModel, curve: Platt, seed: int) -> None:
        self._run, self._curve, self._draws = run, curve, np.random.default_rng(seed)
        self._known = run.known_triples(splits=(TRAIN,))
        self._true = run.known_triples(splits=(TRAIN, VALID))
        self._valid = run.dataset.split(VALID)
        triples = np.concatenate([run.dataset.split(TRAIN), self._valid])
        relations = run.tables.relations.relations
        self._links: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for type_ in run.tables.entity_types:
            parts = []
            for place, side in enumerate(Side):
                fits = np.array([relation.candidate_type(side) == type_ for relation in relations])
                columns = triples[fits[triples[:, 1]]][:, [side.column, side.anchor_column, 1]]
                parts.append(np.column_stack([columns, np.full(len(columns), place)]))
            links = np.concatenate(parts)
            links = links[np.argsort(links[:, 0], kind="stable")]
            counts = np.arange(len(run.tables.vocabulary(type_)) + 1)
            self._links[type_] = links[:, 1:], np.searchsorted(links[:, 0], counts)

    def draw(self) -> tuple[str, np.ndarray, np.ndarray] | None:
        """Return the type of the answers, links (L, 3: entity, relation, side) and signs; None if unlucky."""
        place = int(self._draws.integers(len(Side)))
        side, triple = list(Side)[place], self._valid[self._draws.integers(len(self._valid))].tolist()
        type_ = self._run.tables.relations[triple[1]].candidate_type(side)
        num_links, num_negated = KINDS[self._draws.integers(len(KINDS))]
        links: list[tuple[int, ...]] = [(triple[side.anchor_column], triple[1], place)]
        num_entities = len(self._run.tables.vocabulary(type_))
        others = [int(self._draws.integers(num_entities)) for _ in range(num_negated)]
        choices, starts = self._links[type_]
        for owner in [triple[side.column]] * (num_links - 1) + others:
            if starts[owner] == starts[owner + 1]:
                return None
            links.append(tuple(choices[self._draws.integers(starts[owner], starts[owner + 1])].tolist()))
        if len(set(links)) < len(links):
            return None
        return type_, np.array(links), np.array([1] * num_links + [-1] * num_negated)

    def examples(self, type_: str, links: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """Return scores, groups, signs, labels and weights of entities; None without an answer."""
        num_entities = len(self._run.tables.vocabulary(type_))
        drawn = self._draws.permutation(num_entities)[:POOL]
        is_negated = signs[:, None] < 0
        both = [self._satisfied(known, links, num_entities) for known in (self._true, self._known)]
        is_known = both[1]
        fulfils, is_proved = ((satisfied != is_negated).all(0) for satisfied in both)
        answers = np.flatnonzero(fulfils & ~(is_known | is_negated).all(0))
        # What a known link excludes needs no probability.
        is_excluded = (is_known & is_negated).any(0)
        negatives = drawn[~(fulfils | is_proved | is_excluded)[drawn]]
        if not len(answers) or not len(negatives):
            return None
        ids = np.concatenate([answers[:LIKELIEST], negatives])
        scores, known = self._scores(type_, links, ids), is_known[:, ids].T
        values = np.where(known, 1.0, self._curve(scores))
        values = np.where(signs > 0, values, 1 - values).prod(1)
        num_answers = len(ids) - len(negatives)
        order = num_answers + np.argsort(-values[num_answers:], kind="stable")
        likeliest, rest = order[:LIKELIEST], self._draws.permutation(order[LIKELIEST:])
        kept = np.concatenate([np.arange(num_answers), likeliest, rest[:OTHERS]])
        weights = np.ones(len(kept))
        weights[num_answers:] = (num_entities - len(answers)) / len(negatives)
        weights[num_answers + len(likeliest) :] *= max(1.0, len(rest) / OTHERS)
        groups = np.where(known[kept], -1, links[:, 1] * len(Side) + links[:, 2])
        padding = ((0, 0), (0, MOST_LINKS - len(links)))
        return (
            np.pad(scores[kept], padding),
            np.pad(groups, padding, constant_values=-1),
            np.pad(np.broadcast_to(signs, groups.shape), padding, constant_values=1),
            np.arange(len(kept)) < num_answers,
            weights,
        )

    def _satisfied(self, known: KnownTriples, links: np.ndarray, num_entities: int) -> np.ndarray:
        """Return which entities each link is known of, (L, N)."""
        is_known = np.zeros((len(links), num_entities), bool)
        for place, side in enumerate(Side):
            side_links = np.flatnonzero(links[:, 2] == place)
            index, ids = known.answers(side, links[side_links, 0], links[side_links, 1])
            is_known[side_links[index], ids] = True
        return is_known

    @torch.no_grad()
    def _scores(self, type_: str, links: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the scores of entities as answers to each link, (n, L)."""
        rows, scores = self._run.tables.gather(type_, torch.from_numpy(ids)).float(), []
        for entity, relation_id, place in links.tolist():
            query = self._run.queries(list(Side)[place], np.array([entity]), relation_id, torch.float32)
            scores.append(self._run.model.compare(query, rows)[0].double().numpy())
        return np.stack(scores, axis=1)


def fit_adapter(run: TrainedModel, curve: Platt, num_questions: int, seed: int = 0) -> Curves:
    """Return the curve of every relation and side.

    Parameters
    ----------
    curve : Platt
        Of all links, where it starts and to which its parameters are shrunk.
    num_questions : int
        Questions that it is fitted on.

    Raises
    ------
    InputError
        If so many questions cannot be made, or the curve falls.
    """
    if curve.slope <= 0:
        raise InputError("the calibrated probability falls with the score: the model tells nothing apart")
    maker = QuestionMaker(run, curve, seed)
    drawn = (maker.draw() for _ in range(100 * num_questions))
    made = (maker.examples(*question) for question in drawn if question is not None)
    parts = list(islice(filter(None, made), num_questions))
    if len(parts) < num_questions:
        raise InputError(f"{num_questions} questions cannot be made of the graph, only {len(parts)}")
    numbers = np.repeat(np.arange(len(parts)), [len(weights) for *_, weights in parts])
    columns = [*map(np.concatenate, zip(*parts)), numbers]
    all_examples = Examples(*map(torch.from_numpy, columns))
    features = _features(run)
    is_tried = all_examples.question % TRIED_SHARE == 0
    fitted, tried = all_examples.of(~is_tried), all_examples.of(is_tried)
    quality = {}
    for ridge in RIDGES if len(parts) >= TRIED_SHARE else RIDGES[:1]:
        slopes, offsets = _curves(_fit(fitted, features, curve, ridge), features, curve)
        quality[ridge] = float(tried.loss(slopes, offsets))
    logger.info("log loss of questions left out, by the adapter's ridge: %s", quality)
    best = _fit(all_examples, features, curve, min(quality, key=quality.__getitem__))
    parameters = (numbers.tolist() for numbers in _curves(best, features, curve))
    return dict(zip(product(range(len(run.tables.relations)), Side), map(Platt, *parameters)))


def _features(run: TrainedModel) -> Tensor:
    """Return the row of each relation and side and a constant, (2 R, D + 1) float64."""
    rows = run.tables.gather(RELATION, torch.arange(len(run.tables.relations))).double()
    features = torch.stack([run.model.direction(rows, side) for side in Side], dim=1).flatten(0, 1)
    features = features / features.norm(dim=1).mean().clamp_min(1e-12)
    return torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], dim=1)


def _curves(parameters: Tensor, features: Tensor, curve: Platt) -> tuple[Tensor, Tensor]:
    """Return slopes and offsets (2 R,) of parameters (D + 1, 2)."""
    changes = features @ parameters
    return curve.slope * changes[:, 0].exp(), curve.offset + changes[:, 1]


def _fit(examples: Examples, features: Tensor, curve: Platt, ridge: float) -> Tensor:
    """Return the parameters (D + 1, 2) of the least loss."""
    parameters = torch.zeros(features.shape[1], 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=STEPS, line_search_fn="strong_wolfe")
    num_questions = len(examples.question.unique())

    def closure() -> float:
        optimizer.zero_grad()
        # The constants are not shrunk.
        penalty = ridge * parameters[:-1].square().sum() / num_questions
        loss = examples.loss(*_curves(parameters, features, curve)) + penalty
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return parameters.detach()
