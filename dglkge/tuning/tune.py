"""A whole search: plan, subgraphs, trials in child processes, and the winner's training on all triples.

Subgraphs are k-cores of a data set: in the k-core, the largest such subgraph, every entity has at least k
triples.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, RUN_METRICS_FILE
from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN, VALID
from dglkge.data.text_format import ROLES, TIME, WEIGHT
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import InputError, JobError, import_extra
from dglkge.evaluation.metrics import places_by_id
from dglkge.file_lock import try_lock
from dglkge.launch import ALONE
from dglkge.partition.entity_types import DEFAULT_TYPE
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.registry import import_modules
from dglkge.tuning.search import Job, Outcome, Search, plan_rungs
from dglkge.tuning.space import Space, Value

STOP_SECONDS = 120.0
"""Time for a child to commit and exit after SIGTERM, before SIGKILL."""


def train(config: Config, folder: Path, num_trainers: int, split: str) -> Outcome:
    """Train a configuration, whose output is in a folder, in a child process to its end.

    A run in the folder that was interrupted is resumed. On any exception, KeyboardInterrupt included, the
    child has ended before this returns: SIGTERM lets it commit. The result has the ``evaluation.metric`` of a
    split.

    Parameters
    ----------
    num_trainers : int
        Trainers under dglkge-launch; 0 for one process without servers.

    Raises
    ------
    JobError
        If the child fails; the message has the last line of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log_path = folder / "trial.yaml", folder / "trial.log"
    write_config(config, path)
    command = [sys.executable]
    if num_trainers > 0:
        command += ["-m", "dglkge.cli.launch", *ALONE]
        command += ["--num_trainers", str(num_trainers), "--log_dir", str(folder / "logs")]
    command += ["-m", "dglkge.cli.training_script", "--config", str(path)]
    start = time.monotonic()
    with open(log_path, "ab") as log:
        # In a session of its own: Ctrl-C signals this process only, which then stops the child once.
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        child = subprocess.Popen(command, **streams, start_new_session=True)
        try:
            status = child.wait()
        finally:
            child.terminate()  # nothing happens if it has ended
            try:
                child.wait(STOP_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                # Its session is its own, so the group has the child and what it started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    seconds = time.monotonic() - start
    if status != 0:
        text = log_path.read_text(encoding="utf-8", errors="replace").strip()
        reason = text.split("\n")[-1] or "nothing was logged"
        raise JobError(f"the training ended with status {status}: {reason}; see {log_path}")
    return Outcome(read_metric(Path(config.output), split, config.evaluation.metric), seconds)


def read_metric(run: Path, split: str, metric: str) -> float:
    """Return a metric of both sides that a run has written for a split; JobError if there is none."""
    path = run / RUN_METRICS_FILE
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))[split]["both"][metric])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(f"{path} has no {metric} of the {split} split ({error!r})") from None


def write_config(config: Config, path: Path) -> None:
    """Write the fields that differ from their defaults as YAML, atomically."""
    fields = config.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    LeasedFolder(path.parent).write_text(path.name, text)


BEST_FOLDER, LOCK_FILE = "best", "tune.lock"


class Tuning:
    """A search over a space, in a folder; one that was interrupted is continued.

    Parameters
    ----------
    num_trainers : int
        Of each training, as in :func:`dglkge.tuning.tune.train`.
    check : callable
        Raises InputError for a configuration that training would refuse.

    Attributes
    ----------
    rungs : list of Rung
        The plan, the winner's full training last.

    Raises
    ------
    InputError
        If Optuna or the data set is missing, the base is refused, or the budget is too small. Nothing is
        created.
    """

    def __init__(
        self, space: Space, output: Path, num_trainers: int, check: Callable[[Config], None]
    ) -> None:
        import_extra("dglkge tune", "optuna", "tune")
        self._space, self._output, self._num_trainers, self._check = space, output, num_trainers, check
        self._base = space.configuration({})
        import_modules(self._base.imports)
        check(self._base)
        self._dataset, search = Dataset.open(self._base.dataset), space.search
        self._cores = Cores(self._dataset)
        shares = core_shares(self._cores.train_cores).tolist()
        full_epochs = self._base.training.num_epochs
        self.rungs = plan_rungs(search.trials, search.reduction, search.budget, full_epochs, shares)

    def plan(self) -> dict[str, Any]:
        """Return the plan as JSON has it: rungs, and their cost and the budget in full trainings."""
        cost, budget = sum(rung.cost for rung in self.rungs), self._space.search.budget
        return {"rungs": [rung.described() for rung in self.rungs], "cost": cost, "budget": budget}

    def run(self, progress: Callable[[int], object]) -> dict[str, Any]:
        """Run what has not been run: subgraphs, trials, and the winner's training.

        Returns the winner's values, configuration, run, and metric and seconds of that, as JSON has them;
        ``progress`` is called with the number of trainings that have just ended.

        Raises
        ------
        InputError
            If another process searches in the folder, or it has another search.
        JobError
            If all trials of a rung fail, or the winner's training does.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        with open(self._output / LOCK_FILE, "w") as file:
            if not try_lock(file):
                problem = f"another dglkge tune runs in {self._output}"
                raise InputError(f"{problem}; wait for it, or give another --output")
            search = Search(self._space, self.rungs, self._output)

            def ended(count: int) -> None:
                self._write_trials(search.records())
                progress(count)

            try:
                values = search.run(self._train_trial, ended)
            finally:
                self._write_trials(search.records())
            result = self._train_winner(values)
            progress(1)
            self._write_trials(search.records(), result)
            return result

    def _train_trial(self, job: Job) -> Outcome:
        """Train a trial on its rung's subgraph, and rank the valid split."""
        folder = self._output / "trials" / job.name
        overrides = [f"dataset={self._graph(job.rung.core)}", f"training.num_epochs={job.rung.num_epochs}"]
        overrides += [f"output={folder / 'run'}", f"evaluation.split={VALID}"]
        config = self._space.configuration(job.values, overrides)
        self._check(config)  # settings that do not go together cost no process
        outcome = train(config, folder, self._num_trainers, VALID)
        shutil.rmtree(Path(config.output) / CHECKPOINT_FOLDER, ignore_errors=True)  # the rows
        return outcome

    def _train_winner(self, values: dict[str, Value]) -> dict[str, Any]:
        """Write the winning configuration, and train it on the whole graph."""
        folder = self._output / BEST_FOLDER
        split = self._base.evaluation.split if self._base.evaluation.split != "none" else VALID
        overrides = [f"output={folder / 'run'}", f"evaluation.split={split}"]
        config = self._space.configuration(values, overrides)
        path = self._output / "best.yaml"
        write_config(config, path)
        value, seconds = train(config, folder, self._num_trainers, split)
        places = {"config": str(path), "run": str(Path(config.output))}
        measured = {"metric": config.evaluation.metric, "value": value, "seconds": seconds}
        return {"values": values, **places, "split": split, **measured}

    def _graph(self, core: int) -> Path:
        """Return the data set folder of a core, written when it is first needed."""
        # All of the graph may be its own 1-core: no copy is needed of it.
        if any(rung.core == core and rung.share == 1.0 for rung in self.rungs):
            return self._dataset.path
        folder = self._output / "subgraphs" / f"core{core}"
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            self._cores.write(core, folder, self._space.search.seed)
        return folder

    def _write_trials(self, records: list[dict[str, Any]], best: dict[str, Any] | None = None) -> None:
        """Write all trials, and the winner if there is one, as JSON and as a table."""
        ended = [record for record in records if record["state"] != "unfinished"]
        spent = sum(self.rungs[record["rung"]].trial_cost for record in ended) + (best is not None)
        report = {**self.plan(), "spent": spent, "trials": records} | ({} if best is None else {"best": best})
        folder = LeasedFolder(self._output)
        folder.write_text("trials.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        keys = [parameter.key for parameter in self._space.parameters]
        columns = ("name", "state", "value", "seconds", "share", "num_epochs", "source", "reason")
        rows = [[*map(record.get, columns), *map(record["values"].get, keys)] for record in records]
        table = pd.DataFrame(rows, columns=[*columns, *keys], dtype=object)
        folder.write_text("trials.tsv", table.to_csv(sep="\t", index=False))


FEWEST_VALID = 500
"""Valid triples that a subgraph should have; held out of its training triples where a split has fewer."""
MOST_HELD_OUT = 0.05
"""Most training triples that are held out for it."""


class Cores:
    """The k-cores of a data set's training triples.

    Attributes
    ----------
    train_cores, valid_cores : (n,) int64 array
        For each triple the greatest k of the k-cores that have it.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, graph = dataset, dataset.numbered()
        heads, _, tails = graph.splits[TRAIN]
        core = core_numbers(heads, tails, graph.num_entities)
        self.train_cores = triple_cores(heads, tails, core)
        heads, _, tails = graph.splits[VALID]
        self.valid_cores = triple_cores(heads, tails, core)

    def write(self, core: int, folder: Path, seed: int) -> None:
        """Write the data set folder of a k-core, in one partition.

        Its valid triples are those of the data set between entities and with relations of its training
        triples. If they are few, some of its training triples are held out as well, drawn by the seed. If
        nothing is left to rank, InputError.
        """
        train, kept = self._dataset.split(TRAIN), np.flatnonzero(self.train_cores >= core)
        valid = self._dataset.split(VALID)[self.valid_cores >= core]
        valid = valid[np.isin(valid[:, 1], np.unique(train[kept, 1]))]
        missing = min(FEWEST_VALID - len(valid), int(MOST_HELD_OUT * len(kept)))
        if missing > 0:
            held_out = np.zeros(len(kept), dtype=bool)
            held_out[np.random.default_rng(seed).choice(len(kept), missing, replace=False)] = True
            valid, kept = np.concatenate([valid, train[kept[held_out]]]), kept[~held_out]
        if not len(valid):
            problem = f"the {core}-core of {self._dataset.path} has {len(kept)} training triples"
            remedy = "search with a greater budget or fewer trials"
            raise InputError(f"{problem} and no valid ones to rank; {remedy}")
        types = None
        if self._dataset.entity_types != [DEFAULT_TYPE]:
            types = folder.with_name(folder.name + ".types.tsv")
            types.parent.mkdir(parents=True, exist_ok=True)
            with open(types, "w", encoding="utf-8", newline="") as file:
                for name in self._dataset.entity_types:
                    file.writelines(f"{entity}\t{name}\n" for entity in self._dataset.vocabulary(name).names)
        frames = [self._named(train[kept]), self._named(valid)]
        weights = self._dataset.train_weights()
        if weights is not None:
            frames[0][WEIGHT], frames[1][WEIGHT] = weights[kept], np.float32(1)
        columns = ",".join(frames[0].columns)
        name = f"{self._dataset.name}_core{core}"
        options = Options(1, "random", seed, entity_types=types, overwrite=True, name=name, progress=False)
        partition_dataframe(frames[0], folder, frames[1], columns=columns, options=options)

    def _named(self, triples: np.ndarray) -> pd.DataFrame:
        """Return triples by name, with their times if they have any."""
        relations = self._dataset.relations
        names = np.empty((len(triples), 4), dtype=object)
        for relation_id, rows in places_by_id(triples[:, 1]).items():
            relation = relations[relation_id]
            heads, tails = self._dataset.vocabulary(relation.lhs), self._dataset.vocabulary(relation.rhs)
            names[rows, 0] = [heads[id_] for id_ in triples[rows, 0].tolist()]
            row, time = divmod(relation_id, relations.num_times)
            names[rows, 1] = relations.timeless[row].name
            names[rows, 3] = relations.times[time] if relations.times else None
            names[rows, 2] = [tails[id_] for id_ in triples[rows, 2].tolist()]
        frame = pd.DataFrame(names, columns=[*ROLES, TIME])
        return frame if relations.times else frame[list(ROLES)]


def core_numbers(heads: np.ndarray, tails: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the core number of each node of a multigraph: the greatest k of the k-cores that have it.

    Nodes of the smallest degree are removed until none is left (Seidman 1983; Matula and Beck 1983). A triple
    counts once at each of its ends. Heads and tails are (n,) int64, as is the result for N nodes.
    """
    degree = np.bincount(heads, minlength=num_nodes) + np.bincount(tails, minlength=num_nodes)
    core = np.zeros(num_nodes, dtype=np.int64)
    alive = degree > 0
    k = 0
    while alive.any():
        k = max(k, int(degree[alive].min()))
        # Removing one node may leave another with too few edges, so a level is repeated until it is stable.
        while (removed := alive & (degree <= k)).any():
            core[removed] = k
            alive &= ~removed
            kept = alive[heads] & alive[tails]
            degree -= np.bincount(heads[~kept], minlength=num_nodes)
            degree -= np.bincount(tails[~kept], minlength=num_nodes)
            heads, tails = heads[kept], tails[kept]
    return core


def triple_cores(heads: np.ndarray, tails: np.ndarray, core: np.ndarray) -> np.ndarray:
    """Return for each triple the greatest k of the k-cores that have both its ends, (n,) int64."""
    return np.minimum(core[heads], core[tails])


def core_shares(cores: np.ndarray) -> np.ndarray:
    """Return the share of the triples in the k-core for k = 0, 1, ... up to the densest one, float64."""
    return np.cumsum(np.bincount(cores)[::-1])[::-1] / len(cores)
