"""Protocol of a ranking, ranks under its rule for ties, and their metrics: MR, MRR, Hits@k and AUC.

Metrics are by side, relation and category of relation (1-1 to N-N). Results are comparable only under equal
protocols.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dglkge.data.dataset_files import SPLITS, load_json
from dglkge.errors import InputError, require_known
from dglkge.typing import Side

if TYPE_CHECKING:
    import pandas as pd

SHARE_OF_EQUALS_ABOVE = {"optimistic": 0.0, "realistic": 0.5, "pessimistic": 1.0}
"""Share of the candidates of equal score that a rule ranks above the true answer (Berrendorf et al. 2020)."""


def ranks(num_greater: np.ndarray, num_equal: np.ndarray, ties: str = "realistic") -> np.ndarray:
    """Return the rank of each true answer, from 1: (n,) float64.

    Candidates, other than the true answer, with the same score are behind it (``"optimistic"``), before it
    (``"pessimistic"``) or half of them before it (``"realistic"``), the mean over all their orders.

    Examples
    --------
    >>> ranks(np.array([2]), np.array([3]))
    array([4.5])
    """
    return 1.0 + num_greater + SHARE_OF_EQUALS_ABOVE[ties] * num_equal


@dataclass(frozen=True)
class Protocol:
    """Settings of a ranking.

    Attributes
    ----------
    split : str
        The triples to rank: a split, e.g. ``"test"``, or the name of a file of triples.
    filtered : bool
        True excludes the other known answers of a query from the candidates (Bordes et al. 2013), False
        includes them (raw).
    num_candidates : int, optional
        Corrupted entities sampled for each query, with replacement; None for all entities of the right type.
        Types with no more entities than that are ranked in full. Full and sampled metrics are not
        comparable.
    ties : str
        ``"realistic"``, ``"optimistic"`` or ``"pessimistic"``; see :func:`dglkge.evaluation.metrics.ranks`.
    batch_size : int
        True answers ranked at once; affects memory and speed, not the result.
    seed : int
        Seed of the sampled candidates.
    given : bool
        Rank among the candidates that came with the data set's triples (OGB's), without filtering.

    Raises
    ------
    InputError
        If a field is out of range.
    """

    split: str = "test"
    filtered: bool = True
    num_candidates: int | None = None
    ties: str = "realistic"
    batch_size: int = 8192
    seed: int = 0
    given: bool = False

    def __post_init__(self) -> None:
        require_known("rule for ties", self.ties, SHARE_OF_EQUALS_ABOVE)
        if self.num_candidates is not None and self.num_candidates < 1:
            raise InputError(
                f"the number of candidates must be at least 1 (or none, for all), got {self.num_candidates}"
            )
        if self.given and (self.filtered or self.num_candidates is not None):
            raise InputError("given candidates are ranked as they are: neither filtered nor sampled")
        if self.batch_size < 1:
            raise InputError(f"the batch size of the evaluation must be at least 1, got {self.batch_size}")

    @property
    def candidates(self) -> str:
        """Name of the candidates: ``"all"``, ``"given"`` or ``"sampled N"``."""
        if self.given:
            return "given"
        return "all" if self.num_candidates is None else f"sampled {self.num_candidates}"

    @property
    def filtering(self) -> str:
        """``"filtered"`` or ``"raw"``."""
        return "filtered" if self.filtered else "raw"

    def suffix(self, limit: int | None = None) -> str:
        """Return what differs from the default protocol, for the name of a file of results.

        ``limit`` is the number of the first triples that are ranked, None for all.

        Examples
        --------
        >>> Protocol(filtered=False, num_candidates=100, seed=3).suffix(limit=500)
        '-raw-sampled100-seed3-first500'
        >>> Protocol().suffix()
        ''
        """
        parts = ["given"] if self.given else [] if self.filtered else ["raw"]
        parts += [] if self.num_candidates is None else [f"sampled{self.num_candidates}", f"seed{self.seed}"]
        parts += [] if self.ties == Protocol.ties else [self.ties]
        parts += [] if limit is None else [f"first{limit}"]
        return "".join(f"-{part}" for part in parts)

    def describe(self) -> str:
        """Return the protocol in one line."""
        triples = f"{self.split} split" if self.split in SPLITS else f"triples of {self.split}"
        return f"{triples}, {self.filtering}, {self.candidates} candidates, {self.ties} ties"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that affect the result, ready for JSON."""
        seed = [] if self.num_candidates is None else ["seed"]
        return {name: getattr(self, name) for name in ("split", "filtering", "candidates", "ties", *seed)}


HITS_AT = (1, 3, 10, 50)

FOLLOWED = ("mrr", "auc", *(f"hits@{k}" for k in HITS_AT))
"""Metrics that are greater for a better model."""


@dataclass(frozen=True)
class RankingMetrics:
    """Mean rank, mean reciprocal rank, Hits@k and AUC of a set of queries.

    Attributes
    ----------
    mr : float
        Mean rank.
    mrr : float
        Mean reciprocal rank.
    hits : dict of int to float
        For each k of :data:`HITS_AT`, the share of queries whose rank is at most k.
    auc : float
        Area under the ROC curve: mean over the queries of 1 - (rank - 1) / num_negatives, the share of the
        negatives that score below the true answer. A query without negatives counts 1.
    """

    num_queries: int
    mr: float
    mrr: float
    hits: dict[int, float]
    auc: float

    @classmethod
    def of(cls, ranks: np.ndarray, num_negatives: np.ndarray) -> RankingMetrics:
        """Compute the metrics of ranks (n,) among so many other candidates (n,); n is at least 1."""
        beaten_by = (ranks - 1.0) / np.maximum(num_negatives, 1)
        return cls(
            num_queries=len(ranks),
            mr=float(ranks.mean()),
            mrr=float((1.0 / ranks).mean()),
            hits={k: float((ranks <= k).mean()) for k in HITS_AT},
            auc=float(1.0 - beaten_by.mean()),
        )

    def to_dict(self) -> dict[str, float]:
        """Return the metrics by name: mr, mrr, hits@1 ..., auc, num_queries."""
        hits = {f"hits@{k}": share for k, share in self.hits.items()}
        return {"mr": self.mr, "mrr": self.mrr, **hits, "auc": self.auc, "num_queries": self.num_queries}


SIDES = ("both", "head", "tail")

SHOWN_TIES = ("realistic", "pessimistic")
"""Rules for ties that are shown beside each other: the field's papers use both."""

GROUPS = ("relation", "category", "side")
"""Ways of dividing the queries in a table."""


@dataclass(frozen=True)
class RankingResult:
    """Ranks of both sides of every triple.

    Attributes
    ----------
    relation_labels : sequence of str
        Label of each relation, by relation id.
    relation_ids : (n,) int64 array
        Relation of each triple.
    num_negatives, num_greater, num_equal : mapping of Side to (n,) int64 array
        Other candidates of each triple's head and tail: all, those with a greater score, those with an equal
        one.
    categories : RelationCategories, optional
        Category of each relation.
    loss : float, optional
        Mean loss of a triple in the training's own definition, without its regularizer; of a ranking by a
        training job.
    """

    protocol: Protocol
    relation_labels: Sequence[str]
    relation_ids: np.ndarray
    num_negatives: Mapping[Side, np.ndarray]
    num_greater: Mapping[Side, np.ndarray]
    num_equal: Mapping[Side, np.ndarray]
    categories: RelationCategories | None = None
    loss: float | None = None

    def __repr__(self) -> str:
        both = self.both
        return (
            f"RankingResult({self.protocol.describe()}: {len(self.relation_ids):,} triples, "
            f"MRR {both.mrr:.4f}, Hits@1 {both.hits[1]:.4f}, Hits@10 {both.hits[10]:.4f})"
        )

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(index=False, float_format="{:.4f}".format, border=0)
        return f"{html.escape(self.protocol.describe())}{table}"

    @classmethod
    def joined(cls, results: Sequence[RankingResult], places: np.ndarray | None = None) -> RankingResult:
        """Return the result of all triples of results of the same relations, with the first one's protocol.

        ``places`` (n,) of their triples in the new result; by default they follow each other.
        """
        order = slice(None) if places is None else np.argsort(places, kind="stable")

        def join(arrays: Iterable[np.ndarray]) -> np.ndarray:
            joined: np.ndarray = np.concatenate(list(arrays))[order]
            return joined

        fields: dict[str, Any] = {
            name: {side: join(getattr(result, name)[side] for result in results) for side in Side}
            for name in ("num_negatives", "num_greater", "num_equal")
        }
        fields["relation_ids"] = join(result.relation_ids for result in results)
        return replace(results[0], loss=None, **fields)

    @cached_property
    def ranks(self) -> dict[Side, np.ndarray]:
        """Rank of each triple's true head and of its true tail, (n,) float64 each."""
        greater, equal, ties = self.num_greater, self.num_equal, self.protocol.ties
        return {side: ranks(greater[side], equal[side], ties) for side in Side}

    @property
    def both(self) -> RankingMetrics:
        """Metrics over the queries of both sides."""
        return self.metrics("both")

    @property
    def head(self) -> RankingMetrics:
        """Metrics over the queries (?, r, t)."""
        return self.metrics("head")

    @property
    def tail(self) -> RankingMetrics:
        """Metrics over the queries (h, r, ?)."""
        return self.metrics("tail")

    def metrics(self, sides: str, places: slice | np.ndarray = slice(None)) -> RankingMetrics:
        """Compute the metrics of ``"both"`` sides, ``"head"`` or ``"tail"`` over some of the triples."""
        selected_sides = list(Side) if sides == "both" else [Side(sides)]
        ranks = np.concatenate([self.ranks[side][places] for side in selected_sides])
        num_negatives = np.concatenate([self.num_negatives[side][places] for side in selected_sides])
        return RankingMetrics.of(ranks, num_negatives)

    def by_side(self, places: slice | np.ndarray = slice(None)) -> dict[str, RankingMetrics]:
        """Compute the metrics of both sides, of heads and of tails over some of the triples."""
        return {sides: self.metrics(sides, places) for sides in SIDES}

    def _groups(self, ids: np.ndarray, labels: Sequence[str]) -> dict[str, dict[str, RankingMetrics]]:
        return {labels[id_]: self.by_side(places) for id_, places in places_by_id(ids).items()}

    def per_relation(self) -> dict[str, dict[str, RankingMetrics]]:
        """Compute the metrics of each relation that occurs: label -> both, head, tail -> metrics."""
        return self._groups(self.relation_ids, self.relation_labels)

    def per_category(self) -> dict[str, dict[str, RankingMetrics]]:
        """Compute the metrics of each category that occurs: name -> both, head, tail -> metrics.

        Empty if the categories are not known.
        """
        if self.categories is None:
            return {}
        names = (*CATEGORIES, UNSEEN)
        numbers = np.array([names.index(name) for name in self.categories.names])
        return self._groups(numbers[self.relation_ids], names)

    def with_ties(self, ties: str) -> RankingResult:
        """Return the result of the same ranking under another rule for ties."""
        return replace(self, protocol=replace(self.protocol, ties=ties))

    def to_frame(self, by: str = "side") -> pd.DataFrame:
        """Return the metrics as a data frame.

        Parameters
        ----------
        by : str
            Of :data:`GROUPS`. ``"side"``: a row for both sides, for the heads and for the tails;
            ``"relation"`` and ``"category"``: such rows for each relation or category that occurs.

        Returns
        -------
        DataFrame
            Columns relation or category where asked for, side, mr, mrr, hits@1 ..., auc, num_queries.

        Raises
        ------
        InputError
            If the way of dividing is unknown.
        """
        import pandas as pd

        require_known("way of dividing the queries", by, GROUPS)
        if by == "side":
            groups = {"": self.by_side()}
        else:
            groups = self.per_relation() if by == "relation" else self.per_category()
        rows = [
            {by: label, "side": sides, **metrics.to_dict()}
            for label, by_side in groups.items()
            for sides, metrics in by_side.items()
        ]
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return protocol and metrics, ready for JSON."""
        fields: dict[str, Any] = {
            PROTOCOL: self.protocol.to_dict(),
            "num_triples": len(self.relation_ids),
            BOTH: self.figures(),
            "head": self.head.to_dict(),
            "tail": self.tail.to_dict(),
            "per_relation": _as_dicts(self.per_relation()),
            "ties": _as_dicts({ties: self.with_ties(ties).by_side() for ties in SHOWN_TIES}),
        }
        if self.categories is not None:
            fields["per_category"] = _as_dicts(self.per_category())
            fields["relation_categories"] = self.categories.to_dict(self.relation_labels)
        return fields

    def figures(self) -> dict[str, float]:
        """Return the metrics of both sides by name, and the loss where there is one."""
        return {**self.both.to_dict(), **({} if self.loss is None else {"loss": self.loss})}


def places_by_id(ids: np.ndarray) -> dict[int, np.ndarray]:
    """Return the places of each id in an array (n,), ids ascending."""
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    starts = np.flatnonzero(np.diff(ranked)) + 1
    return dict(zip(ranked[np.r_[0, starts]].tolist(), np.split(order, starts))) if len(ids) else {}


def _as_dicts(groups: Mapping[str, Mapping[str, RankingMetrics]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the metrics of groups, ready for JSON."""
    return {
        label: {sides: metrics.to_dict() for sides, metrics in by_side.items()}
        for label, by_side in groups.items()
    }


DECIMALS = {"mr": 1, "num_queries": 0}
"""Of a table; other metrics have 4."""


def format_table(result: RankingResult, per_relation: bool = False, by: Collection[str] = ()) -> str:
    """Format the metrics as aligned columns under a line with the protocol.

    Parameters
    ----------
    result : RankingResult
        Both sides under the other rules of :data:`SHOWN_TIES` are added.
    per_relation : bool
        As ``"relation"`` in ``by``.
    by : collection of str
        Of :data:`GROUPS`: ``"relation"`` adds one line for each relation (both sides), the most frequent
        first; ``"category"`` one for each category of relations that occurs; ``"side"`` divides each of
        these into head and tail.

    Returns
    -------
    str
        Several lines without a final line end.

    Raises
    ------
    InputError
        If a way of dividing is unknown.
    """
    for way in by:
        require_known("way of dividing the queries", way, GROUPS)
    lines = [(f"{sides} sides" if sides == "both" else sides, result.metrics(sides)) for sides in SIDES]
    other_ties = [ties for ties in SHOWN_TIES if ties != result.protocol.ties]
    lines += [(f"both, {ties} ties", result.with_ties(ties).both) for ties in other_ties]
    groups = list(result.per_category().items()) if "category" in by else []
    if per_relation or "relation" in by:
        groups += sorted(result.per_relation().items(), key=lambda group: -group[1]["both"].num_queries)
    for label, by_side in groups:
        lines.append((label, by_side["both"]))
        if "side" in by:
            lines += [(f"  {label}, {sides}", by_side[sides]) for sides in SIDES[1:]]
    cells = [["", *lines[0][1].to_dict()]]
    for label, metrics in lines:
        figures = (f"{value:.{DECIMALS.get(name, 4)}f}" for name, value in metrics.to_dict().items())
        cells.append([label, *figures])
    widths = [max(map(len, column)) for column in zip(*cells)]
    rows = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return "\n".join([result.protocol.describe(), *rows])


MANY_FROM = 1.5
"""Mean from which a side counts as many (Bordes et al. 2013, section 4.3)."""

CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
UNSEEN = "not in train"
"""In the place of a category: a relation without training triples has no means."""


@dataclass(frozen=True)
class RelationCategories:
    """Category of each relation.

    Attributes
    ----------
    names : sequence of str
        By relation id: one of :data:`CATEGORIES`, or :data:`UNSEEN`. ``1-N`` means one head, many tails.
    tails_per_head, heads_per_tail : (R,) float64 array
        Mean number of distinct tails of a (head, relation) and of heads of a (relation, tail), or NaN.
    """

    names: Sequence[str]
    tails_per_head: np.ndarray
    heads_per_tail: np.ndarray

    def to_dict(self, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return category and means of each relation that has triples, by label, ready for JSON."""
        return {
            labels[id_]: {
                "category": name,
                "tails_per_head": float(self.tails_per_head[id_]),
                "heads_per_tail": float(self.heads_per_tail[id_]),
            }
            for id_, name in enumerate(self.names)
            if name != UNSEEN
        }


def relation_categories(triples: np.ndarray, num_relations: int) -> RelationCategories:
    """Compute the category of each relation from training triples (n, 3); duplicates count once.

    A side is many if its mean is at least :data:`MANY_FROM`: hpt heads of a (relation, tail), tph tails of a
    (head, relation). hpt and tph decide N-N, N-1, 1-N and 1-1 (Bordes et al. 2013, section 4.3; Wang et al.
    2014, section "Link Prediction").

    Examples
    --------
    >>> relation_categories(np.array([[0, 0, 5], [1, 0, 5], [2, 0, 5], [3, 0, 6]]), 1).names
    ['N-1']
    """
    heads, relations, tails = triples.astype(np.int64).T
    # A pair becomes one number, as in KnownTriples, and so does a pair with a tail.
    with_head, pair = np.unique(heads * num_relations + relations, return_inverse=True)
    _, distinct = np.unique(pair * (tails.max(initial=0) + 1) + tails, return_index=True)
    with_tail = np.unique(tails * num_relations + relations)
    counted = (relations[distinct], with_head % num_relations, with_tail % num_relations)
    num_triples, num_heads, num_tails = (np.bincount(ids, minlength=num_relations) for ids in counted)
    with np.errstate(invalid="ignore"):  # 0 / 0 of a relation without triples
        tails_per_head, heads_per_tail = num_triples / num_heads, num_triples / num_tails
    place = 2 * (heads_per_tail >= MANY_FROM).astype(int) + (tails_per_head >= MANY_FROM)
    names = [CATEGORIES[p] if count else UNSEEN for p, count in zip(place.tolist(), num_triples.tolist())]
    return RelationCategories(names, tails_per_head, heads_per_tail)


PROTOCOL = "protocol"
BOTH = "both"
"""Fields of every result: its protocol, and the metrics of both sides."""


def load_results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return every ranking result of some files by name.

    A file holds one result, as ``dglkge evaluate`` writes it, or several by split, as a training job does.
    The name is that of the file, and for one of several ``FILE: SPLIT``. Other JSON files are left out.
    """
    results: dict[str, Any] = {}
    for path in paths:
        content = load_json(path)
        results[path.name] = content
        results |= {f"{path.name}: {split}": result for split, result in content.items()}
    return rankings(results)


def rankings(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return those of some contents that are ranking results."""
    fields = {PROTOCOL, BOTH}
    return {
        name: result for name, result in results.items() if isinstance(result, dict) and fields <= set(result)
    }
