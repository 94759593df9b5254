"""Makes a data set folder of triples. ``partition_tools/partition.py`` and :func:`dglkge.train` call this."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from dglkge import __version__
from dglkge.checkpoint.layout import RUN_CONFIG_FILE
from dglkge.data import dataset_files
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID, Field, parents_of
from dglkge.data.quality import BUCKET_BYTES, Leaks, NumberedTriples, Quality, measure_quality
from dglkge.data.text_format import parse_columns
from dglkge.errors import InputError
from dglkge.kernels.hashing import GOLDEN_GAMMA, split_mix
from dglkge.partition.dataset_writer import finish_dataset, staged, write_triples
from dglkge.partition.entity_types import TypedIds, assign_ids, types_of_entities
from dglkge.partition.ingest import IdTriples, Place, available_cores, column_order_advice
from dglkge.partition.options import AUTO_SPLIT, DATASET_FOLDER, DEFAULT_SPLIT, IMPLIED, Options
from dglkge.partition.report import show_line
from dglkge.partition.rows import CollectedRows, pieces
from dglkge.partition.sources import read_source
from dglkge.typing import RELATION

METIS_TRIPLE_BYTES = 250
"""Peak of METIS for each triple. Measured were 240 with 10^6 triples and 230 with 10^7, in four partitions:
``growth.py partition --partition_options "--num_parts 4"`` less the same with ``--method random``."""

MIN_TO_SPLIT = 20
"""Triples below which nothing is split by default: a twentieth is less than one."""

_RELATED = "an inverse, symmetric or duplicate relation"

logger = logging.getLogger(__name__)


def partition_triples(
    source: Any, output: Path, options: Options | None = None, valid: Any = None, test: Any = None
) -> dict[str, Any]:
    """Partition the triples of a source.

    Parameters
    ----------
    source : object
        As of :func:`dglkge.partition.sources.read_source`. Of paths: one folder, or up to three files for
        train, valid and test; with ``options.split`` any number of files of one set of triples. Their format
        is found out (see docs/inputs.md).
    output : Path
        The data set folder to make.
    options : Options, optional
    valid, test : object, optional
        Further splits of an object.

    Returns
    -------
    dict
        The content of ``partitions/report.json``.

    Raises
    ------
    InputError
        If the input is wrong; the message names file and line, or split and row.
    """
    options = options or Options()
    with staged(output, options.overwrite) as folder, ThreadPoolExecutor(1) as beside:
        reading = read_source(source, folder, options, valid=valid, test=test)
        triples, parts = reading.triples, reading.parts
        integer_ids = reading.integer_ids or options.integer_ids
        if reading.candidates and (options.drop_leaks or isinstance(options.split, tuple)):
            raise InputError("the input has candidates for each triple to rank: its splits stay as they are")
        num_parts, part_method = options.num_parts, options.method
        if parts is not None:
            num_parts, part_method = int(parts.max()) + 1, reading.part_method
            if options.num_parts not in (1, num_parts):
                fault = f"the input has {num_parts} partitions, which are kept"
                raise InputError(f"{fault}; --num-parts is {options.num_parts}")
        # From here on only `triples` holds them: they may be replaced.
        del reading.triples
        fractions = _fractions(triples, options, reading.notes)
        input_figures, advice = {**reading.figures, "notes": reading.notes}, None
        if reading.columns is not None and not triples.times:
            names = () if integer_ids else (triples.entities, triples.relations)
            advice = column_order_advice(triples.splits, reading.columns, *names)
        if advice:
            logger.warning(advice)
        if fractions is not None:
            triples = split_by_hash(triples, fractions, options.seed, folder)
        types, type_of = reading.types or types_of_entities(options, triples.entities)
        ids = assign_ids(triples, types, type_of)
        for noun, count in {**ids.num_entities(), RELATION: len(ids.relation_keys)}.items():
            # DGL cannot store a partition without a node of some type.
            if num_parts > count:
                kind = "relations" if noun == RELATION else f"entities of type {noun!r}"
                fault = f"{num_parts} partitions are more than there are {kind} ({count})"
                raise InputError(f"{fault}: every partition must own at least one")
        num_workers = options.num_workers or available_cores()
        bucket_bytes = BUCKET_BYTES if options.max_memory is None else options.max_memory // 2
        if num_parts > 1 and part_method == "metis" and parts is None:
            needed = metis_memory(len(triples.splits[TRAIN]), options.max_memory)
            show_line(options.progress, f"METIS will need about {needed / 1e9:.1f} GB")
        show_line(options.progress, "measuring the quality of the data")
        measure = partial(measure_triples, ids=ids, bucket_bytes=bucket_bytes, num_workers=num_workers)
        dropped: dict[str, int] = {}
        if options.drop_leaks:
            triples, dropped = drop_leaks(triples, measure(triples).leaks, options.drop_leaks)
        quality = beside.submit(measure, triples)
        if options.strict_splits is not None:
            # A split and dropping change the numbers of the rows.
            in_order = triples.in_order and not (fractions or options.drop_leaks)
            place = reading.place if in_order else None
            check_leaks(triples, quality.result(), options.strict_splits, place)
        # Beside the measurement, which leaves cores idle in parts.
        weights = {dataset_files.TRAIN_WEIGHTS: triples.weights[TRAIN]} if TRAIN in triples.weights else {}
        named = ids.vocabularies(triples.entities)
        description = write_triples(folder, named, ids.relations, triples.splits, weights, ids.original_ids)
        reading.write_side_files(folder, triples.entities)
        for split, array in reading.candidates.items():
            np.save(dataset_files.candidates_path(folder, split), np.asarray(array, np.int32))
        if parts is not None:
            # Type after type; relations have none yet.
            flat = np.append(parts[np.argsort(type_of, kind="stable")], np.full(len(ids.relation_keys), -1))
            np.save(folder / dataset_files.GIVEN_PARTS, flat)
        measured = quality.result().report
        # The child needs the memory. It reads the triples from the files that were written.
        del reading, triples, ids, type_of, measure, quality, weights
        show_line(options.progress, f"partitioning into {num_parts} ({part_method})")
        name = options.name or output.absolute().name
        description |= {
            Field.NAME: name,
            # DGL makes file names of the graph's name.
            Field.GRAPH_NAME: re.sub(r"[^A-Za-z0-9_-]", "_", name),
            Field.NUM_PARTS: num_parts,
            Field.PART_METHOD: part_method,
            Field.SEED: options.seed,
            Field.IDS: "integers" if integer_ids else "names",
            Field.CREATED_BY: f"dglkge {__version__}",
            Field.INPUT: input_figures,
        }
        facts = {Field.INPUT: input_figures, "warnings": [advice] if advice else [], "dropped_leaks": dropped}
        job = {"num_workers": num_workers, "has_parts": parts is not None}
        return finish_dataset(folder, description, measured, facts, **job)


def dataset_of_run(
    source: Any, run: Path, options: Options, overwrite: bool = False, **splits: Any
) -> tuple[Path, list[str]]:
    """Return the data set of a source in a run's folder, made if it is not one already, and notes for people.

    Parameters
    ----------
    source : object
        As of :func:`dglkge.partition.sources.read_source`.
    overwrite : bool
        Remove the run that the folder has, once the triples have proved to be good.
    **splits
        ``valid`` and ``test`` of :func:`partition_triples`.

    Raises
    ------
    InputError
        If the input is wrong, or the folder has a run of other triples.
    """
    made = (run / DATASET_FOLDER).absolute()
    # Beside the run's folder, on the same disk: wrong triples leave it as it was.
    beside: dict[str, Any] = {"dir": made.parent.parent, "prefix": f".{run.name}-"}
    with parents_of(run), tempfile.TemporaryDirectory(**beside) as temporary:
        new = Path(temporary) / DATASET_FOLDER
        figures = partition_triples(source, new, options, **splits)
        if overwrite and run.exists():
            shutil.rmtree(run)
        elif made.exists() and not (run / RUN_CONFIG_FILE).is_file():
            # Of a call that failed before it trained.
            shutil.rmtree(made)
        if not made.exists():
            run.mkdir(exist_ok=True)
            new.rename(made)
        # The same triples in the same splits: the run goes on. The maker is deterministic.
        elif Dataset.open(made).fingerprint != Dataset.open(new).fingerprint:
            raise InputError(
                f"{run} has a run of other triples or splits; give overwrite=True or another output"
            )
    return made, figures[Field.INPUT]["notes"]


def partition_dataframe(
    train: pd.DataFrame,
    output: str | Path,
    valid: pd.DataFrame | None = None,
    test: pd.DataFrame | None = None,
    columns: str = "head,relation,tail",
    options: Options | None = None,
) -> dict[str, Any]:
    """Partition the triples of data frames; see :func:`partition_triples`.

    Parameters
    ----------
    train : DataFrame
        One triple per row.
    output : str or Path
        The data set folder to make.
    valid, test : DataFrame, optional
        Further splits, with the same columns.
    columns : str
        The columns' names, as for ``--columns``: ``"subject,predicate,object"``, or
        ``"head=subject,relation=predicate,tail=object,weight=score"``.
    options : Options, optional
        Its ``columns`` are ignored.

    Examples
    --------
    >>> frame = pd.DataFrame({"head": ["Rome"], "relation": ["capital_of"], "tail": ["Italy"]})
    >>> figures = partition_dataframe(frame, "data/capitals")  # doctest: +SKIP
    """
    options = replace(options or Options(), columns=parse_columns(columns))
    return partition_triples(train, Path(output), options, valid, test)


def metis_memory(num_triples: int, max_memory: int | None) -> int:
    """Return the bytes that METIS needs; more than the limit, by default what is free, are an InputError."""
    needed = METIS_TRIPLE_BYTES * num_triples
    where = "--max-memory" if max_memory else "the machine's free memory"
    limit = max_memory or psutil.virtual_memory().available
    if needed > limit:
        fault = f"METIS needs about {needed / 1e9:.1f} GB for {num_triples:,} triples"
        raise InputError(f"{fault}, {where} is {limit / 1e9:.1f} GB: give --method ldg or random")
    return needed


def _fractions(triples: IdTriples, options: Options, notes: list[str]) -> tuple[float, float, float] | None:
    """Return the shares of the splits to make, None if they are the input's; notes the default."""
    is_one_set = set(triples.splits) == {TRAIN}
    if isinstance(options.split, tuple):
        if not is_one_set:
            raise InputError(f"--split needs one set of triples, got {', '.join(triples.splits)}")
        return None if options.split[0] == 1 else options.split
    if options.split != AUTO_SPLIT or not is_one_set:
        return None
    if len(triples.splits[TRAIN]) < MIN_TO_SPLIT:
        notes.append(f"{len(triples.splits[TRAIN])} triples are too few to split: all are for training")
        return None
    notes.append("one set of triples, split 90/5/5 by a hash; --split 1 keeps all of them for training")
    return DEFAULT_SPLIT


def split_by_hash(
    triples: IdTriples, fractions: tuple[float, float, float], seed: int, folder: Path | None = None
) -> IdTriples:
    """Distribute triples of the one split ``"train"`` over train, valid and test.

    Temporary files are in the folder; without one the triples are in memory.

    Raises
    ------
    InputError
        If no triple falls into train.
    """
    arrays = [kind[TRAIN] for kind in (triples.splits, triples.weights) if kind]
    bounds = np.cumsum(fractions)[:2]
    kept = [{split: CollectedRows(folder) for split in SPLITS} for _ in arrays]
    for _, blocks in pieces(*arrays):
        # The upper 53 bits, which float64 represents exactly: a uniform number in [0, 1).
        position = (hash_triples(blocks[0], seed) >> np.uint64(11)).astype(np.float64) / 2.0**53
        # By hash and not by drawing: the split does not depend on the order of the triples, and duplicates
        # stay together.
        split_of = np.searchsorted(bounds, position, side="right")
        for place, split in enumerate(SPLITS):
            for rows, block in zip(kept, blocks):
                rows[split].append(block[split_of == place])
    splits, *weights = [{split: rows.array() for split, rows in kind.items()} for kind in kept]
    if len(splits[TRAIN]) == 0:
        raise InputError(f"--split {fractions}: no triple is left to train on out of {len(arrays[0])}")
    return replace(triples, splits=splits, weights=weights[0] if weights else {})


def hash_triples(triples: np.ndarray, seed: int) -> np.ndarray:
    """Return a hash of each triple, (n,) uint64: SplitMix64 (Steele et al. 2014) over seed and ids."""
    state = np.full(len(triples), seed, dtype=np.uint64)
    for column in range(3):
        state = split_mix((state ^ triples[:, column].astype(np.uint64)) + GOLDEN_GAMMA)
    return state


def measure_triples(triples: IdTriples, ids: TypedIds, bucket_bytes: int, num_workers: int) -> Quality:
    """Measure the quality of triples that are not written yet, with so much memory and so many threads."""
    splits = {}
    for split in SPLITS:
        rows = triples.splits.get(split, np.zeros((0, 3), dtype=np.int32))
        splits[split] = (rows[:, 0], ids.relation_ids(rows), rows[:, 2])
    names = triples.entities.__getitem__, ids.relations.labels.__getitem__
    numbered = NumberedTriples(splits, len(triples.entities), len(ids.relations), *names)
    return measure_quality(numbered, bucket_bytes, num_workers)


def drop_leaks(triples: IdTriples, leaks: dict[str, Leaks], which: str) -> tuple[IdTriples, dict[str, int]]:
    """Drop the triples of valid and test that train gives away; returns how many of each, too.

    ``which`` is ``"exact"`` for triples that stand in train, ``"implied"`` also for those that train implies.
    """
    splits, weights, dropped = dict(triples.splits), dict(triples.weights), {}
    for split, marks in leaks.items():
        keep = ~(marks["in_train"] | (marks["implied"] & (which == IMPLIED)))
        dropped[split] = len(keep) - int(keep.sum())
        for arrays in (splits, weights):
            if split in arrays:
                arrays[split] = arrays[split][keep]
    return replace(triples, splits=splits, weights=weights), dropped


def check_leaks(triples: IdTriples, quality: Quality, max_implied: float, place: Place | None) -> None:
    """Check that train gives away no triple of valid and test, and implies at most a share of a split.

    ``place`` returns where a row of a split stands in the input; None if that is not known.

    Raises
    ------
    InputError
        If there are leaks: their numbers and an example.
    """
    figures = quality.report["leaks"]
    implied = f"a share of {max_implied:g}; --drop-leaks implied leaves them out"
    for leak, allowed, words, advice in (
        ("in_train", 0.0, "stand in train too", "refuses this; --drop-leaks exact leaves them out"),
        ("implied", max_implied, f"follow from train by {_RELATED}", f"allows {implied}"),
    ):
        leaking = [split for split in (VALID, TEST) if figures[split][leak]["share"] > allowed]
        if not leaking:
            continue
        counts = " and ".join(
            f"{figures[split][leak]['triples']:,} of {quality.report['triples'][split]:,} {split} triples "
            f"({figures[split][leak]['share']:.1%})"
            for split in leaking
        )
        split, row = leaking[0], int(quality.leaks[leaking[0]][leak].argmax())
        head, relation, tail = triples.splits[split][row].tolist()
        relation, time = divmod(relation, triples.num_times)
        names = [triples.entities[head], triples.relations[relation], triples.entities[tail]]
        names += triples.times[time : time + 1]
        example = f"{place(split, row) if place else split}: {' '.join(map(repr, names))}"
        if place and leak == "in_train":
            again = (triples.splits[TRAIN] == triples.splits[split][row]).all(axis=1)
            example += f", also {place(TRAIN, int(again.argmax()))}"
        raise InputError(f"{counts} {words}, e.g. {example}: --strict-splits {advice}")
