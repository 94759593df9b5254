"""A trained model opened on its files: prediction, similar entities, ranking, export. No server, no DGL."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dglkge.checkpoint.hdf5_format import OPTIMIZER_GROUP, STATE_BLOB
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, VERSION_FILE, Progress, is_pointer
from dglkge.checkpoint.manifest import UNKNOWN_CRC32
from dglkge.checkpoint.mirror import local_path
from dglkge.checkpoint.reader import Checkpoint, open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS
from dglkge.data.vector_files import Encode, feature_files, open_encoder, read_new_vectors
from dglkge.errors import InputError, require_known
from dglkge.evaluation.metrics import BOTH, Protocol, RankingResult
from dglkge.inference.choices import ALL, BEAM, FAISS
from dglkge.inference.exports import hub
from dglkge.inference.exports.dglke_files import is_dglke, open_dglke
from dglkge.inference.frames import Questions
from dglkge.inference.search import check_k
from dglkge.model.device import open_device
from dglkge.registry import deferred, import_modules
from dglkge.typing import AUTO_DEVICE

if TYPE_CHECKING:
    import pandas as pd

    from dglkge.inference import attributes, bucket_evaluation, fold_in, questions, reasons, rule_scores
    from dglkge.inference.exports import export, torch_models
    from dglkge.inference.links import completion
    from dglkge.inference.logic import Question
else:
    # Imported at first use, with pyarrow and numba: a query needs none of them.
    pd, completion = deferred("pandas"), deferred("dglkge.inference.links.completion")
    attributes, bucket_evaluation, fold_in, questions, reasons, rule_scores = (
        deferred(f"dglkge.inference.{name}")
        for name in ("attributes", "bucket_evaluation", "fold_in", "questions", "reasons", "rule_scores")
    )
    export = deferred("dglkge.inference.exports.export")
    torch_models = deferred("dglkge.inference.exports.torch_models")


def open_run(
    path: str | os.PathLike[str], dataset: str | None = None, verify: bool = True, imports: Iterable[str] = ()
) -> Run:
    """Open a trained model for reading.

    Parameters
    ----------
    path : path
        A run's folder, a checkpoint in it (``checkpoint/``, ``checkpoint/epoch_10``, ``checkpoint/best``), a
        folder that PyTorch-BigGraph or DGL-KE wrote, or one for the Hugging Face hub. Or the URL of a run
        (``checkpoint.storage``) or of a model of the hub (``hf://USER/MODEL@REVISION``, or without the
        revision): it is downloaded to a cache folder first.
    dataset : str, optional
        Folder of the run's data set, if it has moved since training.
    verify : bool
        Compare files with their checksums when they are read.
    imports : iterable of str
        Modules or .py files that register components, imported first. Those that a run has recorded are never
        imported by themselves: whoever wrote the files chose them.

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
    path = local_path(hub.download(os.fspath(path)))
    folder = Path(path)
    is_version = (folder / VERSION_FILE).exists() or is_pointer(folder.name)
    is_checkpoint = is_version or (folder / CHECKPOINT_FOLDER).is_dir()
    if not is_checkpoint and is_dglke(folder):
        return Run(open_dglke(folder), dataset)
    if not is_checkpoint and hub.is_hub_folder(folder):
        return Run(hub.open_hub_folder(folder), dataset)
    return Run(open_checkpoint(path, verify=verify), dataset)


class Run(Questions):
    """A trained model on files: questions, rankings and exports. Get one from :func:`open_run`."""

    def __repr__(self) -> str:
        path, *facts = self._facts()
        return f"Run({path}: {', '.join(facts)})"

    def _repr_html_(self) -> str:
        path, *facts = map(html.escape, self._facts())
        return f"<b>{path}</b><br>{'<br>'.join(facts)}"

    def _facts(self) -> list[str]:
        """Return the folder, and what one wants to know of a model first."""
        tables, meta, counts = self.tables, self.tables.meta, self.tables.meta.entity_types
        is_checkpoint = isinstance(tables, Checkpoint)
        facts = [str(tables.run_folder if isinstance(tables, Checkpoint) else tables.path)]
        facts.append(f"{meta.score_function}, dimension {meta.dim}")
        kinds = ["entities"] if len(counts) == 1 else [f"of type {name}" for name in counts]
        facts += [f"{count:,} {kind}" for count, kind in zip(counts.values(), kinds)]
        facts.append(f"{len(tables.relations):,} relations")
        if is_checkpoint and meta.progress:
            facts.append(f"{meta.progress[Progress.FINISHED_EPOCHS]} epochs")
        metrics = self.metrics.items() if is_checkpoint else ()
        return facts + [f"{split} MRR {result[BOTH]['mrr']:.3f}" for split, result in metrics]

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
            require_known("split", protocol, SPLITS)
            protocol = Protocol(split=protocol)
        split_triples = dataset.split(protocol.split) if triples is None or protocol.given else triples
        triples = split_triples if triples is None else triples
        if protocol.given and not np.array_equal(triples, split_triples[: len(triples)]):
            raise InputError("given candidates belong to the triples of a split, in their order")
        candidates = dataset.candidates(protocol.split)[:, : len(triples)] if protocol.given else None
        # One index over all splits: filtering does not depend on which split has the triple.
        known = self.known_triples(also_known) if protocol.filtered else None
        place = open_device(device, "device")
        return self.rank(protocol, triples, known, place, progress=progress, candidates=candidates)

    def evaluate_buckets(
        self,
        edge_sets: bucket_evaluation.EdgeSets,
        protocol: Protocol | None = None,
        num_ranges: int = 1,
        progress: Callable[[int], object] | None = None,
        also_known: Sequence[np.ndarray] = (),
        device: str = AUTO_DEVICE,
    ) -> Iterator[bucket_evaluation.BucketResult]:
        """Rank edge sets bucket by bucket; yields each result when it is there, then the averages.

        Candidates come from all ranges, so that results do not depend on the buckets: those of an edge set
        are those of :meth:`evaluate` for its triples. Only sampled candidates (``num_candidates``) are drawn
        by a triple's place in its bucket.

        Parameters
        ----------
        edge_sets : str, sequence of str, or mapping of str to (n, 3) int64 array
            Names of splits and of edge sets of the training triples; or triples by a name of your choice, as
            original ids.
        protocol : Protocol, optional
            By default filtered ranking among all entities; its split is not used.
        num_ranges : int
            The ids of each entity type are cut into so many equal ranges; a bucket is a pair of them.
        progress, also_known, device
            As for :meth:`evaluate`.

        Yields
        ------
        (edge set, bucket, RankingResult)
            Of each bucket with triples, in the order of ranges; of the edge set, with bucket None; at the end
            of all edge sets, with edge set None as well.

        Raises
        ------
        InputError
            Before anything is ranked: if a name is unknown, an edge set is empty, ``num_ranges`` is below 1,
            or the protocol has given candidates.
        """
        options: dict[str, Any] = {"progress": progress, "device": open_device(device, "device")}
        asked = (edge_sets, protocol or Protocol(), num_ranges, also_known)
        return bucket_evaluation.evaluate_buckets(self, *asked, **options)

    def complete(
        self,
        relations: Sequence[str] | None = None,
        heads: Sequence[str] | None = None,
        head_types: Sequence[str] | None = None,
        min_probability: float | None = None,
        k: int | None = None,
        candidates: str = ALL,
        held_out: str | None = None,
        limit: int | None = None,
    ) -> pd.DataFrame:
        """Return likely triples that the data set does not have; see also :meth:`complete_to`.

        Every (head, relation, ?) that the entity types allow is asked. The answers are those of comparing
        every triple, unless an index is asked for.

        Parameters
        ----------
        relations : sequence of str, optional
            Names or labels; by default all.
        heads : sequence of str, optional
            By default all entities of the types that a relation has as head.
        head_types : sequence of str, optional
            Only relations with heads of these types.
        min_probability : float, optional
            Least probability, as ``dglkge calibrate`` has fitted them; .5 if ``k`` is not given either.
        k : int, optional
            Most tails of each (head, relation).
        candidates : str
            ``"all"`` entities of the types; ``"seen"``: heads and tails that a triple of the data set has on
            that side of the relation; or ``"faiss"``: tails that an approximate index finds.
        held_out : str, optional
            A split whose triples count as missing; a column says which are from it.
        limit : int, optional
            Only the best of all. Without it the result must fit in memory.

        Returns
        -------
        DataFrame
            head, relation, tail, score, probability (a column only if fitted for this version) and held_out
            (only if asked for); by descending probability, or score where there are none. With ``"faiss"``
            ``frame.attrs["recall"]`` has the recall on a sample of the queries.

        Raises
        ------
        InputError
            If a name is unknown, a number is out of range, there is no data set, or probabilities are needed
            and not fitted.

        Examples
        --------
        ::

            run.complete(relations=["borders"], min_probability=0.9)
            run.complete(heads=["Alice"], k=3)
        """
        question = (relations, heads, head_types, min_probability, k, candidates, held_out)
        plan = completion.plan_completion(self, *question)
        if limit is not None:
            check_k(limit)
        frame: pd.DataFrame = completion.find_links(plan, limit).to_pandas()
        if candidates == FAISS:
            frame.attrs["recall"] = plan.recall
        return frame

    def complete_to(
        self,
        path: str | os.PathLike[str],
        overwrite: bool = False,
        progress: Callable[[int], object] | None = None,
        **question: Any,
    ) -> dict[str, Any]:
        """Write likely triples that the data set does not have to a Parquet file.

        Memory does not grow with the number of triples. An interrupted call leaves ``PATH.parts``; the same
        call goes on from there.

        Parameters
        ----------
        path : path
            The file, with the columns and the order of :meth:`complete`.
        overwrite : bool
            Replace the file if it exists.
        progress : callable, optional
            Called with the number of pairs (head, relation) just searched.
        **question
            What :meth:`complete` takes before ``limit``.

        Returns
        -------
        dict
            path, triples, queries (pairs of head and relation), pairs (of a query and a candidate) and
            least_score (of all relations); with ``held_out`` also the number of its triples, and the
            precision and the recall of the best triples (``curve``).

        Raises
        ------
        InputError
            As :meth:`complete`, or if the file or parts of another question exist.
        """
        plan = completion.plan_completion(self, **question)
        return completion.write_completion(plan, Path(path), overwrite, progress)

    def ask(
        self,
        question: str | Question,
        k: int = 10,
        beam: int = BEAM,
        known_splits: Sequence[str] = SPLITS,
        adapter: bool = True,
    ) -> pd.DataFrame:
        """Answer a question of several hops by the probabilities of its links.

        Parameters
        ----------
        question : str or Question
            A variable and what it fulfils: triples joined by commas (and), ``or``, ``not`` and parentheses;
            or the tree of :mod:`dglkge.inference.logic`.
        k : int
            Number of answers.
        beam : int
            Entities of every other variable that go on, those with the greatest values. With all of them the
            answers are exact.
        known_splits : sequence of str
            Splits whose triples have probability 1; () for none.
        adapter : bool
            Whether to use the curves of ``dglkge calibrate --questions``, if it has fitted some.

        Returns
        -------
        DataFrame
            rank, entity, probability and path: the links that led to the answer, a list of dicts with head,
            relation, tail, probability, known (it is in those splits) and not (it is negated).

        Raises
        ------
        InputError
            If the text is no question, a name is unknown, entity types do not fit, the links form no tree, or
            no probabilities were fitted.

        Examples
        --------
        ::

            run.ask("?city : (Douglas Adams, born in, ?city), not (?city, capital of, England)")
            run.ask("?x : (Alice, knows, ?y), (?y, likes, ?x)")
        """
        answers = questions.Asked(self, question, beam, known_splits, adapter).answer(k)
        return pd.DataFrame(answers, columns=["rank", "entity", "probability", "path"])

    def explain(self, head: str, relation: str, tail: str, k: int = 5) -> dict[str, Any]:
        """Return reasons for a link in the training triples.

        Parameters
        ----------
        head, relation, tail : str
            The link need not be a known one. If it is, it is no reason for itself.
        k : int
            Most reasons of each kind.

        Returns
        -------
        dict
            head, relation, tail, score, probability (None if none was fitted), and three lists of dicts, the
            best first. ``triples``: head, relation, tail, of (``"head"`` or ``"tail"``: the end of the link
            whose row it moves) and influence (orders them; see :mod:`dglkge.inference.reasons`). ``rules``:
            rule (a text), confidence, support, pairs and path (the links from head to tail). ``similar``:
            entity, instead_of (``"head"`` or ``"tail"``) and cosine, of known links that share the other end.

        Raises
        ------
        InputError
            If a name is unknown, ``k`` is less than 1, or there is no data set.

        Examples
        --------
        ::

            pandas.DataFrame(run.explain("Alice", "likes", "Bob")["rules"])
        """
        return self._explainer.reasons(head, relation, tail, k)

    def rules(self, relation: str, k: int = 10, samples: int = 100) -> pd.DataFrame:
        """Return rules that imply a relation, mined from paths of up to three links.

        Parameters
        ----------
        relation : str
            Name or label.
        k : int
            Most rules.
        samples : int
            Training triples of the relation whose paths are followed.

        Returns
        -------
        DataFrame
            rule, confidence (support / (pairs + 5)), support and pairs, on up to 200 sampled entities; by
            descending confidence.

        Raises
        ------
        InputError
            If the name is unknown or ambiguous, ``k`` is less than 1, or there is no data set.
        """
        rules = self._explainer.rules_of(relation, k, samples)
        return pd.DataFrame(rules, columns=list(reasons.RULE_COLUMNS))

    def with_rules(self) -> Run:
        """Return this model with rules beside it, as one ranking.

        The greatest confidence of a rule that leads to a candidate, times a weight of the relation, is added
        to the candidate's score; see :mod:`dglkge.inference.rule_scores`. Rules are mined from the training
        triples and weights chosen on the valid split at the first call, which writes ``rules.json`` to the
        run's folder; later ones read it.

        Returns
        -------
        Run
            Another one, which ranks, predicts and scores with rules, without probabilities; this one stays as
            it is.

        Raises
        ------
        InputError
            If the run is no checkpoint, there is no data set, or its valid split is empty.

        Examples
        --------
        ::

            run = dglkge.open_run("runs/demo").with_rules()
            run.evaluate("test")
            run.predict_tails("Alice", "likes")
        """
        return Run(self.tables, self._dataset_path, self._added, rule_scores.open_rules(self))

    @cached_property
    def _explainer(self) -> reasons.Explainer:
        return reasons.Explainer(self)

    def predict_numbers(self, values: Mapping[str, float], entity_type: str | None = None) -> pd.DataFrame:
        """Predict a number of every entity of a type, such as a year or a population, from those of some.

        Parameters
        ----------
        values : mapping of str to float, or Series
            By name; at least 10.
        entity_type : str, optional
            Needed if several types have the first name.

        Returns
        -------
        DataFrame
            entity, predicted and known (NaN where it was not given), by descending prediction;
            ``frame.attrs`` has ``r2`` and ``mean_error`` of known values that are predicted from others.

        Raises
        ------
        InputError
            If a name is unknown, a value is no finite number, there are fewer than 10, or scikit-learn is
            missing.
        """
        return attributes.predict_numbers(self, dict(values), entity_type)

    def with_new_entities(self, names: Sequence[str], features: Any, entity_type: str | None = None) -> Run:
        """Return this model with further entities, whose rows are their projected features.

        They are candidates and can be asked for, as the entities of the training. Nothing is trained or
        written.

        Parameters
        ----------
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
        type_ = self._type_with_features(entity_type)
        return self._extended(self.checkpoint.with_new_entities({type_: (names, vectors)}))

    def _extended(self, checkpoint: Checkpoint, *added: np.ndarray) -> Run:
        """Return this model with further entities and known triples, and what these do not change."""
        run = Run(checkpoint, self._dataset_path, [*self._added, *added])
        shared = ("dataset", "model", "degrees", "calibration", "_categories", "_encoders")
        vars(run).update({name: value for name, value in vars(self).items() if name in shared})
        if isinstance(self.bonus, rule_scores.RuleScores):
            plain = rule_scores.plain_rules(run)
            run.bonus = replace(self.bonus, graph=plain.graph, counts=plain.counts)
        return run

    def with_new_texts(self, texts: Mapping[str, str], entity_type: str | None = None) -> Run:
        """Return this model with further entities, whose rows are made of texts about them.

        The texts are encoded as those of the entities' vectors, which ``dglkge data vectors`` has written.

        Parameters
        ----------
        texts : mapping of str to str
            By the name of the entity.
        entity_type : str, optional
            Needed where several entity types have features.

        Raises
        ------
        InputError
            As :meth:`with_new_entities`, or if the file of vectors in ``features.files`` is gone or has no
            encoder, or a text has none of its words.

        Examples
        --------
        ::

            run = dglkge.open_run("runs/demo").with_new_texts({"Carol": "a text about Carol"})
            run.predict_tails("Carol", "likes")
        """
        type_ = self._type_with_features(entity_type)
        if type_ not in self._encoders:
            files = (self.checkpoint.config.get("features") or {}).get("files", ())
            files = feature_files(files, self.tables.entity_types, "features.files")
            paths = [file.path for file in files if type_ in file.entity_types]
            if not paths:
                raise InputError(f"entities of type {type_!r} have no vectors in features.files")
            self._encoders[type_] = open_encoder(paths[0])
        vectors = self._encoders[type_](texts.values())
        for name, vector in zip(texts, vectors):
            if not vector.any():
                raise InputError(f"the text about {name!r} has no word that the texts of {type_!r} have")
        return self.with_new_entities(list(texts), vectors, type_)

    @cached_property
    def _encoders(self) -> dict[str, Encode]:
        return {}

    def add_entities(self, triples: pd.DataFrame) -> Run:
        """Return this model with the new entities of triples, whose rows are found from these alone.

        The row of a new entity minimizes the loss and the regularizer of the run over its triples, while all
        other rows stay; see :mod:`dglkge.inference.fold_in`. Nothing is written.

        Parameters
        ----------
        triples : DataFrame
            Columns head, relation and tail, and time where relations have one. They are known triples of the
            result (``known_from`` is ``"added"``).

        Returns
        -------
        Run
            Another one, in which new entities are candidates and can be asked for; this one stays as it is.

        Raises
        ------
        InputError
            If a relation is unknown, a new entity has no clear type or is joined to no known one, or the data
            set cannot be opened.

        Examples
        --------
        ::

            facts = pandas.DataFrame({"head": ["Carol"], "relation": ["likes"], "tail": ["Alice"]})
            run = dglkge.open_run("runs/demo").add_entities(facts)
            run.predict_tails("Carol", "likes")
        """
        checkpoint, added = self._fold_in.with_entities(triples)
        return self._extended(checkpoint, added)

    @cached_property
    def _fold_in(self) -> fold_in.FoldIn:
        return fold_in.FoldIn(self.checkpoint, self.model, self.dataset)

    def add_entities_of(self, dataset: Dataset) -> Run:
        """Return this model with the entities of a data set that it lacks, from their training triples there.

        Raises
        ------
        InputError
            As :meth:`add_entities`.
        """
        triples = fold_in.lacking_triples(self.checkpoint, dataset)
        return self.add_entities(triples) if len(triples) else self

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
        settings = checkpoint.config.get("features") or {}
        columns = (settings.get("entity_column", "name"), settings.get("vector_column", "embedding"))
        new = {}
        for file in feature_files(files, checkpoint.entity_types, "--features"):
            name = self._type_with_features(None) if len(file.entity_types) > 1 else file.entity_types[0]
            names, vectors = read_new_vectors(file.path, checkpoint.vocabulary(name), "", *columns)
            new[name] = names, torch.from_numpy(vectors)
        return self._extended(checkpoint.with_new_entities(new))

    def _type_with_features(self, entity_type: str | None) -> str:
        """Return the entity type of new entities."""
        if entity_type is not None:
            return entity_type
        features = self.checkpoint.features
        if features is None:
            raise InputError(f"{self.tables.path} was trained without features: no new entity has a row")
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
        tables, results, source = tables or self.tables_in_order, {}, self.tables
        if file_format == "huggingface" and isinstance(source, Checkpoint):
            here = source.version
            results = {name: kept for name, kept in self.results.items() if kept.get("version", here) == here}
        options = {"max_rows": max_rows, "metric": metric, "metrics": results}
        return export.export_tables(source, tables, file_format, Path(folder), overwrite, **options)

    def push_to_hub(self, name: str, private: bool = True) -> str:
        """Upload the model to the Hugging Face hub, with names and a model card; ``open_run`` reads it there.

        Parameters
        ----------
        name : str
            ``USER/MODEL``; made if there is none, else it gets a new revision.
        private : bool
            Whether a new one is only yours to see.

        Returns
        -------
        str
            The address of the new revision.

        Raises
        ------
        InputError
            If ``huggingface_hub`` is missing, you are not logged in (``hf auth login``), or the hub refuses.
        """
        return hub.push(lambda folder: self.export("huggingface", folder), name, private)

    def torch_model(self) -> torch_models.TorchModel:
        """Return the model as a module of torch whose rows are parameters.

        Examples
        --------
        ::

            model = run.torch_model()
            scores = model(h, r, t)  # ids (B,); as run.score
            scores.sum().backward()
        """
        return torch_models.TorchModel(self)

    def pykeen_model(self, factory: Any) -> Any:
        """Return the model as one of PyKEEN; see :func:`.exports.torch_models.pykeen_model`."""
        return torch_models.pykeen_model(self, factory)

    def geometric_model(self) -> Any:
        """Return a model of PyTorch Geometric; see :func:`.exports.torch_models.geometric_model`."""
        return torch_models.geometric_model(self)

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
        files = [*checkpoint.manifest.binary_files, *checkpoint.manifest.all_texts.values()]
        num_dense = sum(values.numel() for values in checkpoint.dense_parameters().values())
        # PyTorch-BigGraph writes no checksums, so nothing of its checkpoints can be verified.
        checksums = {entry.name: f"{entry.crc32:08x}" for entry in files if entry.crc32 != UNKNOWN_CRC32}
        return {
            "path": str(checkpoint.path),
            "version": checkpoint.version,
            "verified": verify and len(checksums) == len(files),
            "progress": dict(meta.progress),
            "model": {
                "score_function": meta.score_function,
                "dimension": meta.dim,
                **({"entity_dimensions": dict(meta.dims)} if meta.dims else {}),
                "reciprocal_relations": meta.reciprocal,
                **meta.score_options,
                **({"dense_parameters": num_dense} if num_dense else {}),
            },
            "optimizer": dict(meta.optimizer),
            "dataset": {name: getattr(meta, f"dataset_{name}") for name in ("name", "path", "fingerprint")},
            "seed": meta.seed,
            "versions": dict(meta.versions),
            "tables": [_describe_table(checkpoint, table) for table in self.tables_in_order],
            "files": [
                {"name": entry.name, "size_bytes": entry.size_bytes, "crc32": checksums.get(entry.name)}
                for entry in files
            ],
            "size_bytes": sum(entry.size_bytes for entry in checkpoint.manifest.files),
        }


def model_text(model: Mapping[str, Any]) -> str:
    """Return the model of :meth:`Run.inspect` in words."""
    common = ("score_function", "dimension", "reciprocal_relations")
    options = "".join(f", {name} {value}" for name, value in model.items() if name not in common)
    reciprocal = ", reciprocal relations" if model["reciprocal_relations"] else ""
    return f"{model['score_function']}, dimension {model['dimension']}{options}{reciprocal}"


def _describe_table(checkpoint: Checkpoint, table: str) -> dict[str, Any]:
    """Describe one table of a checkpoint."""
    entries = checkpoint.manifest.table_files(table)
    num_rows, width = checkpoint[table].shape
    paths = [path.split("/", 1) for entry in entries for path in entry.shapes]
    state = {name for group, *rest in paths for name in rest if group == OPTIMIZER_GROUP} - {STATE_BLOB}
    counts = {"num_rows": num_rows, "width": width, "num_parts": len(entries)}
    size_bytes = sum(entry.size_bytes for entry in entries)
    return {"name": table, **counts, "optimizer_state": sorted(state), "size_bytes": size_bytes}
