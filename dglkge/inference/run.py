"""A trained model opened on its files: prediction, similar entities, ranking, export. No server, no DGL."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dglkge.checkpoint.bigraph import is_bigraph
from dglkge.checkpoint.hdf5_format import OPTIMIZER_GROUP, STATE_BLOB
from dglkge.checkpoint.layout import (
    CHECKPOINT_FOLDER,
    METRICS_PATTERN,
    RUN_CALIBRATION_FILE,
    RUN_METRICS_FILE,
    VERSION_FILE,
    is_pointer,
)
from dglkge.checkpoint.manifest import UNKNOWN_CRC32
from dglkge.checkpoint.mirror import local_path
from dglkge.checkpoint.reader import Checkpoint, open_checkpoint
from dglkge.checkpoint.relation_layout import check_registered
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TRAIN, load_json
from dglkge.data.known_triples import KnownTriples
from dglkge.data.vector_files import feature_files, read_new_vectors
from dglkge.errors import InputError, unknown_name
from dglkge.evaluation.calibration import Calibration, Curve
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import RankingResult, load_results, relation_categories
from dglkge.evaluation.protocol import Protocol
from dglkge.inference.bucket_evaluation import BucketResult, EdgeSets, evaluate_buckets
from dglkge.inference.choices import Known
from dglkge.inference.exports.export import export_tables
from dglkge.inference.imports.dglke_files import DglkeFolder, DglkeTables, Tables, is_dglke
from dglkge.inference.imports.hub_tables import HubTables, is_hub_folder
from dglkge.inference.named_queries import NamedAnswer, NamedQuery, Prediction, resolve
from dglkge.inference.search import Answer, LinkPredictor, LinkQuery, most_similar
from dglkge.model.device import open_device
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.registry import import_modules
from dglkge.typing import AUTO_DEVICE, RELATION, RowShard

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


def _frames() -> ModuleType:
    """Return :mod:`dglkge.inference.frames`, imported at first use: pandas takes half a second."""
    from dglkge.inference import frames

    return frames


def open_run(
    path: str | os.PathLike[str],
    dataset: str | None = None,
    verify: bool = True,
    imports: Iterable[str] = (),
) -> Run:
    """Open a trained model for reading.

    Parameters
    ----------
    path : path
        A run's folder, a checkpoint in it (``checkpoint/``, ``checkpoint/epoch_10``, ``checkpoint/best``), a
        folder that PyTorch-BigGraph or DGL-KE wrote, or one for the Hugging Face hub. Or the URL of a run
        (``checkpoint.storage``): its newest version is downloaded to a cache folder first.
    dataset : str, optional
        Folder of the run's data set, if it has moved since training.
    verify : bool
        Compare files with their checksums when they are read.
    imports : iterable of str
        Modules or .py files that register components, imported first. Those that a run has recorded are never
        imported by themselves: whoever wrote the files chose them.

    Returns
    -------
    Run

    Raises
    ------
    InputError
        If there is no model, or a file of it is missing or damaged.

    Examples
    --------
    ::

        run = dglkge.open_run("runs/demo")
        run.predict_tails("Alice", "likes", k=5)
        run.predict(pandas.DataFrame({"head": ["Alice", "Bob"], "relation": ["likes", "likes"]}))
        run.evaluate("test").to_frame(by="relation")
    """
    import_modules(imports)
    # A run may contain an export in DGL-KE's format, so a checkpoint is looked for first.
    path = local_path(path)
    folder = Path(path)
    is_checkpoint = (
        (folder / VERSION_FILE).exists() or (folder / CHECKPOINT_FOLDER).is_dir() or is_pointer(folder.name)
    )
    if not is_checkpoint and is_dglke(folder):
        return Run(DglkeTables(DglkeFolder.open(folder)), dataset)
    if not is_checkpoint and is_hub_folder(folder):
        return Run(HubTables(folder), dataset)
    return Run(open_checkpoint(path, verify=verify), dataset)


class Run:
    """A trained model on files. Get one from :func:`open_run`.

    Rows are mapped from the files. The data set and the model are opened at first use, once.

    Parameters
    ----------
    tables : Checkpoint or DglkeTables
        Rows and names.
    dataset : str, optional
        Folder of the data set; by default the path that the checkpoint has recorded.

    Attributes
    ----------
    tables : Checkpoint or DglkeTables
    """

    def __init__(self, tables: Tables, dataset: str | None = None) -> None:
        self.tables = tables
        self._dataset_path = dataset

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint.

        Raises
        ------
        InputError
            If the model is a folder of DGL-KE or for the Hugging Face hub, which are none.
        """
        if isinstance(self.tables, Checkpoint):
            return self.tables
        if isinstance(self.tables, HubTables):
            raise InputError(
                f"{self.tables.path} was written by dglkge export --format huggingface and is no checkpoint: "
                "it can be queried and exported"
            )
        raise InputError(
            f"{self.tables.path} was written by DGL-KE and is no checkpoint; {self._conversion()}"
        )

    @property
    def tables_in_order(self) -> list[str]:
        """Names of all tables: the entity types and the relations."""
        return [*self.tables.entity_types, RELATION]

    @cached_property
    def model(self) -> KgeModel:
        """The score function at its dimension."""
        meta = self.tables.meta
        check_registered(meta)
        model = build_model(meta.score_function, meta.dim, meta.reciprocal, options=meta.score_options)
        if model.module is not None:
            model.load_module(self.tables.dense_parameters(), str(self.tables.path))
        return model

    @cached_property
    def dataset(self) -> Dataset:
        """The data set that the model was trained on.

        Raises
        ------
        InputError
            If it is missing or another one, or the model's ids are not those of a data set.
        """
        tables = self.tables
        # Ids of these formats count rows in their own files, and no fingerprint shows which data set they
        # belong to.
        if isinstance(tables, DglkeTables) or (
            isinstance(tables, Checkpoint) and is_bigraph(tables.folder, tables.version)
        ):
            writer = "PyTorch-BigGraph" if isinstance(tables, Checkpoint) else "DGL-KE"
            raise InputError(
                f"{tables.path} was written by {writer}, with ids of its own; {self._conversion()}"
            )
        folder = Path(self._dataset_path or tables.meta.dataset_path)
        if self._dataset_path is None and isinstance(tables, HubTables):
            raise InputError(
                f"{tables.path} does not say where its dataset {tables.meta.dataset_name} is; say it with "
                "--dataset"
            )
        if self._dataset_path is None and not folder.is_dir():
            raise InputError(
                f"the run's dataset {folder} is not there any more; say with --dataset where it is"
            )
        # Ids are positions in vocabularies: with another data set they would silently mean other entities.
        dataset = Dataset.open(folder)
        if dataset.fingerprint != tables.meta.dataset_fingerprint:
            raise InputError(
                f"{folder} is not the dataset of this run ({tables.meta.dataset_name}): its fingerprint is "
                f"{dataset.fingerprint[:12]}, expected {tables.meta.dataset_fingerprint[:12]}"
            )
        return dataset

    def _conversion(self) -> str:
        """Return the command that gives the rows the ids of a data set."""
        path, target = self.tables.path, self._dataset_path or "DIR"
        if isinstance(self.tables, Checkpoint):
            folder, source = self.tables.run_folder, ""
        else:
            folder, source = path, " --from dglke"
        output = folder.with_name(folder.name + "_converted")
        return (
            f"to use it with a data set: dglkge checkpoint convert {path}{source} --to run "
            f"--dataset {target} --output {output}"
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """What the training job measured at its end, by split, as in ``metrics.json``; empty if nothing.

        Raises
        ------
        InputError
            If the file is damaged.
        """
        path = self.checkpoint.run_folder / RUN_METRICS_FILE
        return load_json(path) if path.is_file() else {}

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """All ranking results in the run's folder by name: the training job's and ``dglkge evaluate``'s.

        Each has the fields protocol, num_triples (absent in files of older versions), both, head, tail and
        per_relation; see :func:`dglkge.evaluation.metrics.load_results`.

        Raises
        ------
        InputError
            If a file is damaged.
        """
        return load_results(sorted(self.checkpoint.run_folder.glob(METRICS_PATTERN)))

    def known_triples(self, also_known: Sequence[np.ndarray] = ()) -> KnownTriples:
        """Return an index of the triples of all splits, and of others; built once without others."""
        if also_known:
            return self.dataset.known_triples(SPLITS, also_known)
        return self._known_of_all_splits

    @cached_property
    def _known_of_all_splits(self) -> KnownTriples:
        return self.dataset.known_triples()

    @cached_property
    def _known_by_split(self) -> dict[str, KnownTriples]:
        return {split: self.dataset.known_triples([split]) for split in SPLITS}

    def shards(self, tables: Sequence[str]) -> dict[str, Sequence[RowShard]]:
        """Return all rows of some tables."""
        return {table: self.tables.shards(table) for table in tables}

    def predict_tails(
        self, head: str, relation: str, k: int = 10, known: Known | str | None = None
    ) -> pd.DataFrame:
        """Return the best tails of (head, relation, ?).

        Parameters
        ----------
        head, relation : str
        k : int
            Number of answers.
        known : Known or str, optional
            As in :meth:`answer`.

        Returns
        -------
        DataFrame
            rank, entity, score, probability (NaN unless ``dglkge evaluate --calibrate`` has fitted some for
            this version) and known_from (the first split that has the triple, or None).

        Raises
        ------
        InputError
            If a name is unknown or ambiguous.
        """
        return _frames().predict_one(self, (head, relation, None), k, known)

    def predict_heads(
        self, relation: str, tail: str, k: int = 10, known: Known | str | None = None
    ) -> pd.DataFrame:
        """Return the best heads of (?, relation, tail); see :meth:`predict_tails`."""
        return _frames().predict_one(self, (None, relation, tail), k, known)

    def predict_relations(
        self, head: str, tail: str, k: int = 10, known: Known | str | None = None
    ) -> pd.DataFrame:
        """Return the best relations of (head, ?, tail), by the mean of the scores of both sides.

        As :meth:`predict_tails`, with a column relation instead of entity.
        """
        return _frames().predict_one(self, (head, None, tail), k, known)

    def predict(
        self, queries: pd.DataFrame, k: int = 10, known: Known | str | None = None, strict: bool = False
    ) -> pd.DataFrame:
        """Complete many triples, any one part missing; see :func:`dglkge.inference.frames.predict`."""
        return _frames().predict(self, queries, k, known, strict)

    def score(self, triples: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
        """Score given triples; see :func:`dglkge.inference.frames.score`."""
        return _frames().score(self, triples, strict)

    def similar(self, entity: str, k: int = 10, entity_type: str | None = None) -> pd.DataFrame:
        """Return the entities of the same type whose rows have the greatest cosines with an entity's.

        Returns
        -------
        DataFrame
            rank, entity, cosine; without the entity itself.
        """
        return _frames().similar(self, entity, k, entity_type)

    def embeddings(self, names: Sequence[str] | None = None, entity_type: str | None = None) -> pd.DataFrame:
        """Return the rows of entities by name; see :func:`dglkge.inference.frames.embeddings`."""
        return _frames().embeddings(self, names, entity_type)

    def answer(
        self,
        queries: Sequence[NamedQuery],
        topk: int = 10,
        known: Known | str | None = None,
        probability: bool = False,
    ) -> list[Prediction]:
        """Return the best answers to queries with one entity missing.

        Parameters
        ----------
        queries : sequence of NamedQuery
        topk : int
            Answers to each query; fewer if there are fewer candidates.
        known : Known or str, optional
            Treatment of answers that the data set contains: mark, drop or keep. None marks them if the data
            set can be opened, and otherwise logs a warning and marks none.
        probability : bool
            Give the answers the probabilities that ``dglkge evaluate --calibrate`` has fitted.

        Returns
        -------
        list of Prediction
            One for each query.

        Raises
        ------
        InputError
            If a name is unknown or ambiguous, ``known`` needs a data set that cannot be opened, or there are
            no probabilities of this version.
        """
        tables = self.tables
        resolved = [resolve(query, tables.relations, tables.vocabulary) for query in queries]
        return self.answer_resolved(queries, resolved, topk, known, probability)

    def answer_resolved(
        self,
        queries: Sequence[NamedQuery],
        resolved: Sequence[LinkQuery],
        topk: int = 10,
        known: Known | str | None = None,
        probability: bool = False,
    ) -> list[Prediction]:
        """Return :meth:`answer` of queries whose ids are known already."""
        tables = self.tables
        curve = self.calibration.curve if probability else None
        known, known_triples = self.known_treatment(known)
        relations = [tables.relations[query.relation_id] for query in resolved]
        types = [relation.candidate_type(query.side) for relation, query in zip(relations, resolved)]
        shards = self.shards(sorted(set(types)))  # no other table is read, or compared with its checksum
        predictor = LinkPredictor(self.model, tables.meta.relations, tables, shards, known_triples)
        found = predictor.predict(resolved, topk, known)
        labels = tables.relations.labels
        return [
            Prediction(
                named,
                labels[query.relation_id],
                type_,
                known is Known.MARK,
                self._named(type_, answers, curve),
            )
            for named, query, type_, answers in zip(queries, resolved, types, found)
        ]

    def known_treatment(self, known: Known | str | None) -> tuple[Known, dict[str, KnownTriples]]:
        """Return the treatment of known answers, and the known triples by split that it needs.

        Raises
        ------
        InputError
            If the treatment is unknown, or the data set is needed and cannot be opened.
        """
        if known is not None:
            allowed = [one.value for one in Known]
            if not isinstance(known, Known) and known not in allowed:
                raise unknown_name("treatment of known answers", known, allowed)
            known = Known(known)
        if known is Known.KEEP:
            return known, {}
        try:
            return known or Known.MARK, self._known_by_split
        except InputError as error:
            # The data set of a run may be on another machine; one that was named must be usable.
            if known is not None or self._dataset_path is not None:
                raise
            logger.warning("known answers are not marked: %s", error)
            return Known.KEEP, {}

    def _named(
        self, entity_type: str, answers: Sequence[Answer], curve: Curve | None = None
    ) -> list[NamedAnswer]:
        names = self.tables.vocabulary(entity_type)
        named = [NamedAnswer(names[answer.entity_id], answer.score, answer.known) for answer in answers]
        if curve is None:
            return named
        found = curve(np.array([answer.score for answer in answers])).tolist()
        return [replace(answer, probability=value) for answer, value in zip(named, found)]

    @cached_property
    def calibration(self) -> Calibration:
        """The probabilities that ``dglkge evaluate --calibrate`` has written beside the checkpoint.

        Raises
        ------
        InputError
            If there are none, or they are those of another version.
        """
        checkpoint = self.checkpoint
        path = checkpoint.run_folder / RUN_CALIBRATION_FILE
        found = Calibration.load(path)
        here = (checkpoint.manifest.run_id, checkpoint.version)
        if (found.run_id, found.version) != here:
            raise InputError(
                f"{path} is of version {found.version} of its run, the checkpoint has version "
                f"{checkpoint.version}: fit probabilities again, with dglkge evaluate --calibrate"
            )
        return found

    def nearest(self, entity: str, entity_type: str, topk: int = 10) -> list[NamedAnswer]:
        """Return the entities of a type whose rows have the greatest cosine with an entity's row.

        Parameters
        ----------
        entity : str
        entity_type : str
            As :meth:`type_of` returns it.
        topk : int

        Returns
        -------
        list of NamedAnswer
            The most similar first, without the entity itself.

        Raises
        ------
        InputError
            If a name is unknown, or ``topk`` is less than 1.
        """
        ids = torch.tensor([self.tables.vocabulary(entity_type).id(entity)])
        (answers,) = most_similar(self.tables, self.tables.shards(entity_type), entity_type, ids, topk)
        return self._named(entity_type, answers)

    def type_of(self, entity: str, entity_type: str | None = None) -> str:
        """Return the type of an entity.

        Parameters
        ----------
        entity : str
        entity_type : str, optional
            The type that the user gave, which is only checked.

        Raises
        ------
        InputError
            If the given type is unknown, several types have the name, or none of several types has it. With
            one type an unknown name passes: the vocabulary's own error lists the nearest names.
        """
        types = self.tables.entity_types
        if entity_type is not None:
            if entity_type not in types:
                known = ", ".join(map(repr, types))
                raise InputError(f"unknown entity type {entity_type!r}; known: {known}")
            return entity_type
        found = [known for known in types if entity in self.tables.vocabulary(known)]
        if len(found) > 1:
            raise InputError(
                f"{entity!r} is the name of entities of several types: {', '.join(found)}; say --type"
            )
        if not found and len(types) > 1:
            raise InputError(
                f"no entity of any type is called {entity!r}; say --type to see the nearest names of one of "
                + ", ".join(types)
            )
        return (found or types)[0]

    def evaluate(
        self,
        protocol: Protocol | str,
        triples: np.ndarray | None = None,
        progress: Callable[[int], object] | None = None,
        also_known: Sequence[np.ndarray] = (),
        device: str = AUTO_DEVICE,
    ) -> RankingResult:
        """Rank the head and the tail of every triple among all entities of the right type.

        Parameters
        ----------
        protocol : Protocol or str
            The name of a split stands for filtered ranking of it among all entities, realistic ties.
        triples : (n, 3) int64 array, optional
            Head, relation and tail, original ids; by default the protocol's split.
        progress : callable, optional
            Called with the number of queries just ranked; there are 2 n of them.
        also_known : sequence of (m, 3) int64 array
            True triples that filtered ranking excludes besides those of the splits.
        device : str
            Where scores are computed: ``auto``, ``cpu`` or ``cuda``; the ranks are the same.

        Returns
        -------
        RankingResult
            With the categories of the relations in the training triples.

        Raises
        ------
        InputError
            If the data set cannot be opened, there is nothing to rank, or rows are not finite.
        """
        dataset = self.dataset
        if isinstance(protocol, str):
            if protocol not in SPLITS:
                raise unknown_name("split", protocol, SPLITS)
            protocol = Protocol(split=protocol)
        if triples is None:
            triples = dataset.split(protocol.split)
        # One index over all splits: filtering does not depend on which split has the triple.
        known = self.known_triples(also_known) if protocol.filtered else None
        found = open_device(device, "device")
        evaluator = RankingEvaluator(self.model, self.tables.meta.relations, protocol, device=found)
        shards = self.shards(self.tables.entity_types)
        result = evaluator.evaluate(triples, known, self.tables, shards, progress=progress)
        categories = relation_categories(dataset.split(TRAIN), dataset.num_relations)
        return replace(result, categories=categories)

    def evaluate_buckets(
        self,
        edge_sets: EdgeSets,
        protocol: Protocol | None = None,
        num_ranges: int = 1,
        progress: Callable[[int], object] | None = None,
    ) -> Iterator[BucketResult]:
        """Rank edge sets bucket by bucket: a generator of (edge set, bucket, result), and then of averages.

        See :func:`dglkge.inference.bucket_evaluation.evaluate_buckets`.
        """
        return evaluate_buckets(self, edge_sets, protocol, num_ranges, progress)

    def with_new_entities(self, names: Sequence[str], features: Any, entity_type: str | None = None) -> Run:
        """Return this model with further entities, whose rows are their projected features.

        They are candidates and can be asked for, as the entities of the training. Nothing is trained or
        written.

        Parameters
        ----------
        names : sequence of str
        features : (n, F) array
            Vectors as those that the run was trained with (``features.files``).
        entity_type : str, optional
            Needed where several entity types have features.

        Returns
        -------
        Run
            Another one; this one stays as it is.

        Raises
        ------
        InputError
            If the run has no features, a name is known or repeated, or the vectors have another width.

        Examples
        --------
        ::

            run = dglkge.open_run("runs/demo").with_new_entities(["Carol"], embed(["a text about Carol"]))
            run.predict_tails("Carol", "likes")
        """
        vectors = torch.as_tensor(np.asarray(features, dtype=np.float32))
        of_type = self._type_with_features(entity_type)
        return Run(self.checkpoint.with_new_entities({of_type: (names, vectors)}), self._dataset_path)

    def with_features(self, files: Sequence[str]) -> Run:
        """Return this model with the entities of files of vectors that it does not know.

        Parameters
        ----------
        files : sequence of str
            ``FILE``, or ``TYPE=FILE`` where several entity types have features; in the formats and with the
            columns of ``features.files``.

        Raises
        ------
        InputError
            As :meth:`with_new_entities`, or if a file cannot be read.
        """
        checkpoint = self.checkpoint
        texts = [one if "=" in one else f"{self._type_with_features(None)}={one}" for one in files]
        chosen = checkpoint.config.get("features") or {}
        columns = (chosen.get("entity_column", "name"), chosen.get("vector_column", "embedding"))
        new = {}
        for file in feature_files(texts, checkpoint.entity_types, "--features"):
            (name,) = file.entity_types
            names, vectors = read_new_vectors(file.path, checkpoint.vocabulary(name), "", *columns)
            new[name] = names, torch.from_numpy(vectors)
        return Run(checkpoint.with_new_entities(new), self._dataset_path)

    def _type_with_features(self, entity_type: str | None) -> str:
        """Return the entity type of new entities.

        Raises
        ------
        InputError
            If none is given and several have features, or the run has no features.
        """
        if entity_type is not None:
            return entity_type
        features = self.checkpoint.features
        if features is None:
            raise InputError(
                f"{self.tables.path} was trained without features: it has no rows for new entities"
            )
        if len(features.entity_types) > 1:
            raise InputError(f"give the type of the new entities: {', '.join(features.entity_types)}")
        return features.entity_types[0]

    def export(
        self,
        file_format: str,
        folder: Path,
        tables: Sequence[str] | None = None,
        overwrite: bool = False,
        max_rows: int | None = None,
        metric: str | None = None,
    ) -> list[Path]:
        """Write tables, by default all of them; see :func:`dglkge.inference.exports.export.export_tables`."""
        tables = tables or self.tables_in_order
        results = self._results_of_version() if file_format == "huggingface" else {}
        return export_tables(
            self.tables, tables, file_format, Path(folder), overwrite, max_rows, metric, results
        )

    def _results_of_version(self) -> dict[str, dict[str, Any]]:
        """Return the ranking results but for those of other versions of the checkpoint."""
        if not isinstance(self.tables, Checkpoint):
            return {}
        here = self.tables.version
        return {name: one for name, one in self.results.items() if one.get("version", here) == here}

    def inspect(self, verify: bool = False) -> dict[str, Any]:
        """Describe the checkpoint: version, progress, model, tables and files, ready for JSON.

        Parameters
        ----------
        verify : bool
            Read every file and compare its checksum, those of kept versions (``epoch_E``, ``best``) too.

        Raises
        ------
        CheckpointError
            If a checksum differs.
        InputError
            If there is no checkpoint.
        """
        checkpoint = self.checkpoint
        if verify:
            checkpoint.verify()
            for version in set(checkpoint.versions()) - {checkpoint.version}:
                open_checkpoint(checkpoint.root, version).verify()
        meta = checkpoint.meta
        files = checkpoint.manifest.binary_files
        files += checkpoint.manifest.all_texts.values()
        num_dense = sum(values.numel() for values in checkpoint.dense_parameters().values())
        # PyTorch-BigGraph writes no checksums, so nothing of its checkpoints can be verified.
        with_checksum = [entry for entry in files if entry.crc32 != UNKNOWN_CRC32]
        return {
            "path": str(checkpoint.path),
            "version": checkpoint.version,
            "verified": verify and len(with_checksum) == len(files),
            "progress": dict(meta.progress),
            "model": {
                "score_function": meta.score_function,
                "dimension": meta.dim,
                "reciprocal_relations": meta.reciprocal,
                **meta.score_options,
                **({"dense_parameters": num_dense} if num_dense else {}),
            },
            "optimizer": dict(meta.optimizer),
            "dataset": {
                "name": meta.dataset_name,
                "path": meta.dataset_path,
                "fingerprint": meta.dataset_fingerprint,
            },
            "seed": meta.seed,
            "versions": dict(meta.versions),
            "tables": [_describe_table(checkpoint, table) for table in self.tables_in_order],
            "files": [
                {
                    "name": entry.name,
                    "size_bytes": entry.size_bytes,
                    "crc32": f"{entry.crc32:08x}" if entry in with_checksum else None,
                }
                for entry in files
            ],
            "size_bytes": sum(entry.size_bytes for entry in checkpoint.manifest.files),
        }


def _describe_table(checkpoint: Checkpoint, table: str) -> dict[str, Any]:
    """Describe one table of a checkpoint."""
    entries = checkpoint.manifest.of_table(table)
    num_rows, width = checkpoint[table].shape
    state = {path for entry in entries for path in entry.shapes if path.startswith(OPTIMIZER_GROUP + "/")}
    names = {path.split("/", 1)[1] for path in state} - {STATE_BLOB}
    return {
        "name": table,
        "num_rows": num_rows,
        "width": width,
        "num_parts": len(entries),
        "optimizer_state": sorted(names),
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }
