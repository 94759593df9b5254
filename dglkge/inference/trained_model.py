"""A trained model opened on its files: its parts, answers to queries, rankings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dglkge.checkpoint.layout import METRICS_PATTERN, RUN_CALIBRATION_FILE, RUN_METRICS_FILE
from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TRAIN, load_json
from dglkge.data.known_triples import KnownTriples
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError, require_known
from dglkge.evaluation.calibration import Calibration
from dglkge.evaluation.metrics import Protocol, RankingResult, load_results, relation_categories
from dglkge.evaluation.queries import Bonus, score_triples
from dglkge.formats.relation_parameters import registered_score_function
from dglkge.inference import search
from dglkge.inference.choices import ALL, CANDIDATES, SEEN, Known
from dglkge.inference.search import Answer, LinkQuery
from dglkge.inference.whole_tables import Tables
from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.registry import deferred
from dglkge.typing import RELATION, Side

if TYPE_CHECKING:
    from dglkge.evaluation import evaluator
    from dglkge.inference.links import missing_links
else:
    # Imported at first use: their loops import numba, which one query does not need.
    evaluator = deferred("dglkge.evaluation.evaluator")
    missing_links = deferred("dglkge.inference.links.missing_links")

logger = logging.getLogger(__name__)

Arrays = Sequence[np.ndarray]

ADDED = "added"
"""``known_from`` of triples that :meth:`dglkge.inference.run.Run.add_entities` was given."""


class UnknownEntityError(InputError):
    """No entity has that name."""


class TrainedModel:
    """The parts of a trained model on files, its answers to queries and its rankings.

    Rows are mapped from the files. The data set and the model are opened at first use, once.

    Parameters
    ----------
    tables : Checkpoint or WholeTables
        Rows and names.
    dataset : str, optional
        Folder of the data set; by default the path that the checkpoint has recorded.
    added : sequence of (n, 3) int64 array
        Known triples beside those of the data set.
    bonus : Bonus, optional
        What is added to the scores of answers and of whole triples.
    """

    def __init__(
        self, tables: Tables, dataset: str | None = None, added: Arrays = (), bonus: Bonus | None = None
    ) -> None:
        self.tables, self.bonus = tables, bonus
        self._dataset_path, self._added = dataset, added
        self._max_norms: dict[str, float] = {}
        self._known_of_splits: dict[tuple[str, ...], KnownTriples] = {}

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint."""
        if isinstance(self.tables, Checkpoint):
            return self.tables
        writer = "dglkge checkpoint export --format huggingface" if self._is_from_hub else "DGL-KE"
        advice = "it can be queried and exported" if self._is_from_hub else self._advice()
        raise InputError(f"{self.tables.path} was written by {writer} and is no checkpoint; {advice}")

    @property
    def _is_from_hub(self) -> bool:
        from dglkge.inference.exports.hub import is_hub_folder  # here: it imports this module's tables

        return is_hub_folder(self.tables.path)

    @property
    def tables_in_order(self) -> list[str]:
        """Names of all tables: the entity types and the relations."""
        return [*self.tables.entity_types, RELATION]

    @cached_property
    def model(self) -> KgeModel:
        """The score function at its dimension."""
        meta, name = self.tables.meta, registered_score_function(self.tables.meta)
        model = build_model(name, meta.dim, meta.reciprocal, options=meta.score_options)
        if model.module is not None:
            model.load_module(self.tables.dense_parameters(), str(self.tables.path))
        return model

    @cached_property
    def dataset(self) -> Dataset:
        """The data set that the model was trained on."""
        tables, meta, name = self.tables, self.tables.meta, self.tables.meta.dataset_name
        # Ids of other programs count rows in their own files, and no fingerprint shows which data set they
        # belong to.
        if not meta.dataset_fingerprint and not self._is_from_hub:
            writer = "PyTorch-BigGraph" if isinstance(tables, Checkpoint) else "DGL-KE"
            raise InputError(f"{tables.path} was written by {writer}, with ids of its own; {self._advice()}")
        folder = self._dataset_path or meta.dataset_path
        if not folder:
            raise InputError(f"{tables.path} does not say where its dataset {name} is; say it with --dataset")
        if self._dataset_path is None and not Path(folder).is_dir():
            raise InputError(
                f"the run's dataset {folder} is not there any more; say with --dataset where it is"
            )
        # Ids are positions in vocabularies: with another data set they would silently mean other entities.
        dataset = Dataset.open(folder)
        if dataset.fingerprint != meta.dataset_fingerprint:
            raise InputError(
                f"{folder} is not the dataset of this run ({name}): its fingerprint is "
                f"{dataset.fingerprint[:12]}, expected {meta.dataset_fingerprint[:12]}"
            )
        return dataset

    def _advice(self) -> str:
        """Return the command that gives the rows the ids of a data set."""
        folder, source = self.tables.path, " --from dglke"
        if isinstance(self.tables, Checkpoint):
            folder, source = self.tables.run_folder, ""
        return (
            f"to use it with a data set: dglkge checkpoint convert {self.tables.path}{source} --to run "
            f"--dataset {self._dataset_path or 'DIR'} --output {folder}_converted"
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """What the training job measured at its end, by split, as in ``metrics.json``; empty if nothing."""
        path = self.checkpoint.run_folder / RUN_METRICS_FILE
        return load_json(path) if path.is_file() else {}

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """All ranking results in the run's folder by name: the training job's and ``dglkge evaluate``'s.

        See :func:`dglkge.evaluation.metrics.load_results`.
        """
        return load_results(sorted(self.checkpoint.run_folder.glob(METRICS_PATTERN)))

    @property
    def has_additions(self) -> bool:
        """Whether there are entities or triples that the version does not have."""
        trained = self.checkpoint.manifest.meta.entity_types
        return bool(self._added) or self.tables.meta.entity_types != trained

    def known_triples(self, also_known: Arrays = (), splits: tuple[str, ...] = SPLITS) -> KnownTriples:
        """Return an index of the triples of splits, added entities and others; built once without others."""
        # Nothing is read or built yet: an index is at its first query.
        known = self.dataset.known_triples(splits, [*self._added, *also_known])
        return known if also_known else self._known_of_splits.setdefault(splits, known)

    @cached_property
    def _known_by_split(self) -> dict[str, KnownTriples]:
        known = {split: self.dataset.known_triples([split]) for split in SPLITS}
        added = KnownTriples(self._added, self.dataset.num_relations)
        return {**known, ADDED: added} if self._added else known

    @cached_property
    def degrees(self) -> dict[str, np.ndarray]:
        """Number of training triples of each entity, by type and original id."""
        from dglkge.sampling.negatives import count_degrees  # here: its loops import numba

        types = [(relation.lhs, relation.rhs) for relation in self.dataset.relations.relations]
        num_entities = {name: self.dataset.num_entities(name) for name in self.dataset.entity_types}
        return count_degrees(self.dataset.split(TRAIN), types, num_entities)

    def scores(self, triples: np.ndarray) -> dict[Side, np.ndarray]:
        """Score triples (n, 3), original ids; see :func:`dglkge.evaluation.queries.score_triples`."""
        return score_triples(self.model, triples, self.tables.relations.relations, self.tables, self.bonus)

    def rank(
        self,
        protocol: Protocol,
        triples: np.ndarray,
        known: KnownTriples | None,
        device: ComputeDevice = HOST,
        bonus: Bonus | None = None,
        **options: Any,
    ) -> RankingResult:
        """Rank triples, with the categories of relations; see :meth:`.RankingEvaluator.evaluate`."""
        tables = self.tables
        shards = {name: tables.shards(name) for name in tables.entity_types}
        scored = (self.model, tables.relations.relations, protocol)
        ranker = evaluator.RankingEvaluator(*scored, device=device, bonus=bonus or self.bonus)
        result = ranker.evaluate(triples, known, tables, shards, **options)
        return replace(result, categories=self._categories)

    @cached_property
    def _categories(self) -> Any:
        return relation_categories(self.dataset.split(TRAIN), self.dataset.num_relations)

    def max_norm(self, table: str) -> float:
        """Return the greatest Euclidean norm of a type's rows, which are read once."""
        from dglkge.evaluation.ranking import RankedShard  # here: its loops import numba

        if table not in self._max_norms:
            shards = [RankedShard(part) for part in self.tables.shards(table) if len(part.rows)]
            self._max_norms[table] = max((shard.max_norm for shard in shards), default=0.0)
        return self._max_norms[table]

    @cached_property
    def likely_candidates(self) -> missing_links.LikelyCandidates:
        """Search for the candidates above a limit."""
        return missing_links.LikelyCandidates(self.model, self.tables, self.max_norm)

    def link_query(self, side: Side, entity: str, relation: str) -> LinkQuery:
        """Look up the names of a query with one side missing.

        A relation's name may join several pairs of entity types. It then stands for the one pair whose type
        on the given side has the entity.
        """
        relations, vocabulary = self.tables.relations, self.tables.vocabulary
        # Relations of one name are tried first by the given entity: users rarely give the types' names.
        ids = relations.ids_of(relation)
        fitting = [id_ for id_ in ids if entity in vocabulary(relations[id_].anchor_type(side))]
        # Otherwise the vocabulary decides; its error lists the labels, which name the types.
        relation_id = fitting[0] if len(fitting) == 1 else relations.id(relation)
        return LinkQuery(side, vocabulary(relations[relation_id].anchor_type(side)).id(entity), relation_id)

    @torch.no_grad()
    def answer(
        self, queries: Sequence[LinkQuery], k: int = 10, known: str | None = None, candidates: str = ALL
    ) -> list[list[Answer]]:
        """Return the best answers to each query, the best first, equal scores in the order of ids.

        The arguments are those of :meth:`.Questions.predict`.
        """
        search.check_k(k)
        require_known("choice of candidates", candidates, CANDIDATES)
        treatment, known_triples = self.known_treatment(known)
        answers: list[list[Answer]] = [[] for _ in queries]
        # One matmul needs queries of one side, against candidates of one type.
        groups: dict[tuple[Side, str, str], list[int]] = {}
        for place, (side, _, relation_id) in enumerate(queries):
            relation = self.tables.relations[relation_id]
            key = (side, relation.anchor_type(side), relation.candidate_type(side))
            groups.setdefault(key, []).append(place)
        for (side, anchor_type, candidate_type), places in groups.items():
            for start in range(0, len(places), search.QUERIES_AT_A_TIME):
                batch = places[start : start + search.QUERIES_AT_A_TIME]
                entity_ids = np.array([queries[place].entity_id for place in batch])
                relation_ids = np.array([queries[place].relation_id for place in batch])
                keys = torch.from_numpy(relation_ids)
                anchors = self.tables.gather(anchor_type, torch.from_numpy(entity_ids))
                query_rows = self.model.query(anchors, self.tables.gather(RELATION, keys), side, keys)
                seen = search.seen_candidates(self._known_by_split, side, keys) if candidates == SEEN else []
                split_of, added = dict[tuple[int, int], str](), []
                for split, triples in known_triples.items():
                    index, ids = triples.answers(side, entity_ids, relation_ids)
                    if treatment is Known.DROP:
                        added.append((index, ids, np.full(len(ids), -np.inf)))
                    else:
                        # The first of several splits.
                        split_of = dict.fromkeys(zip(index.tolist(), ids.tolist()), split) | split_of
                if self.bonus is not None:
                    added.append(self.bonus(side, entity_ids, relation_ids))
                best, shards = search.TopAnswers(len(batch), k), self.tables.shards(candidate_type)
                for shard, block in search.candidate_blocks(len(batch), shards):
                    scores = self.model.compare(query_rows, shard.rows[block])
                    search.adjust(scores, shard, block.start, added, seen)
                    best.add(scores, shard.original_ids[block])
                for row, (place, scored) in enumerate(zip(batch, best.result())):
                    answers[place] = [Answer(id_, score, split_of.get((row, id_))) for id_, score in scored]
        return answers

    def known_treatment(self, known: str | None) -> tuple[Known, dict[str, KnownTriples]]:
        """Return the treatment of known answers, and the known triples by split that it needs."""
        if known is not None:
            require_known("treatment of known answers", known, [treatment.value for treatment in Known])
        if known == Known.KEEP:
            return Known.KEEP, {}
        try:
            return Known(known or Known.MARK), self._known_by_split
        except InputError as error:
            # The data set of a run may be on another machine; one that was named must be usable.
            if known is not None or self._dataset_path is not None:
                raise
            logger.warning("known answers are not marked: %s", error)
            return Known.KEEP, {}

    @cached_property
    def calibration(self) -> Calibration:
        """The probabilities that ``dglkge calibrate`` has written beside the checkpoint."""
        if self.bonus is not None:
            raise InputError("probabilities are fitted to scores of the model alone: ask without rules")
        path, version = self.checkpoint.run_folder / RUN_CALIBRATION_FILE, self.checkpoint.version
        calibration = Calibration.load(path)
        if (calibration.run_id, calibration.version) != (self.checkpoint.manifest.run_id, version):
            raise InputError(
                f"{path} is of version {calibration.version} of its run, the checkpoint has version "
                f"{version}: fit probabilities again, with dglkge calibrate"
            )
        return calibration

    @property
    def calibration_if_any(self) -> Calibration | None:
        """The same; None if none was fitted for this version."""
        with contextlib.suppress(InputError):
            return self.calibration
        return None

    def queries(self, side: Side, ids: np.ndarray, relation_id: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the queries (n, Dq) of a relation for a side, of the entities given (n,)."""
        anchor_type, keys = self.tables.relations[relation_id].anchor_type(side), torch.tensor([relation_id])
        anchors = self.tables.gather(anchor_type, torch.from_numpy(ids)).to(dtype)
        relation = self.tables.gather(RELATION, keys).to(dtype).expand(len(ids), -1)
        return self.model.query(anchors, relation, side, keys.expand(len(ids)))

    def named_triple(self, head: int, relation_id: int, tail: int) -> dict[str, str]:
        """Return the names of a triple by role; the relation's is its label."""
        relation, vocabulary = self.tables.relations[relation_id], self.tables.vocabulary
        label = self.tables.relations.labels[relation_id]
        return dict(zip(ROLES, (vocabulary(relation.lhs)[head], label, vocabulary(relation.rhs)[tail])))

    def nearest(self, entity: str, entity_type: str, k: int = 10) -> list[tuple[str, float]]:
        """Return the entities of a type whose rows have the greatest cosines with an entity's, and these."""
        names = self.tables.vocabulary(entity_type)
        (answers,) = search.most_similar(self.tables, entity_type, torch.tensor([names.id(entity)]), k)
        return [(names[id_], cosine) for id_, cosine in answers]

    def type_of(self, entity: str, entity_type: str | None = None) -> str:
        """Return the type of an entity, or the one that the user gave, which is only checked."""
        types = self.tables.entity_types
        if entity_type is not None:
            require_known("entity type", entity_type, types)
            return entity_type
        fitting = [name for name in types if entity in self.tables.vocabulary(name)]
        if len(fitting) > 1:
            shown = ", ".join(fitting)
            raise InputError(
                f"{entity!r} is the name of entities of several types: {shown}; say which by the type"
            )
        if not fitting and len(types) > 1:
            raise UnknownEntityError(
                f"no entity of any type is called {entity!r}; with a type the nearest names are shown: "
                + ", ".join(types)
            )
        return (fitting or types)[0]
