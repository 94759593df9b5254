"""A whole search: plan, subgraphs, trials, and the winner's training on the whole graph."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.config import Config
from dglkge.config.load import write_text
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import VALID
from dglkge.errors import InputError, import_extra
from dglkge.file_lock import try_lock
from dglkge.registry import import_modules
from dglkge.tuning.rungs import plan_rungs
from dglkge.tuning.search import Job, Outcome, Search
from dglkge.tuning.space import Space, Value
from dglkge.tuning.subgraph import Cores, core_shares
from dglkge.tuning.trial_process import RUN_FOLDER, train, write_config

TRIALS_FOLDER = "trials"
GRAPHS_FOLDER = "subgraphs"
BEST_FOLDER = "best"
BEST_CONFIG = "best.yaml"
TRIALS_JSON = "trials.json"
TRIALS_TABLE = "trials.tsv"
LOCK_FILE = "tune.lock"


class Tuning:
    """A search over a space, in a folder; one that was interrupted is continued.

    Parameters
    ----------
    num_trainers : int
        Of each training, as in :func:`dglkge.tuning.trial_process.train`.
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
        shares = core_shares(self._cores.of_train).tolist()
        full_epochs = self._base.training.num_epochs
        self.rungs = plan_rungs(search.trials, search.reduction, search.budget, full_epochs, shares)

    def plan(self) -> dict[str, Any]:
        """Return the plan as JSON has it: rungs, and their cost and the budget in full trainings."""
        rows = [
            {
                "trials": rung.num_trials,
                "core": rung.core,
                "share": round(rung.share, 4),
                "epochs": rung.num_epochs,
                "trial_cost": round(rung.trial_cost, 4),
                "cost": round(rung.cost, 4),
            }
            for rung in self.rungs
        ]
        cost, budget = sum(rung.cost for rung in self.rungs), self._space.search.budget
        return {"rungs": rows, "cost": cost, "budget": budget}

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
                raise InputError(
                    f"another dglkge tune runs in {self._output}; wait for it, or give another --output"
                )
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
        folder = self._output / TRIALS_FOLDER / job.name
        overrides = [
            f"dataset={self._graph(job.rung.core)}",
            f"output={folder / RUN_FOLDER}",
            f"training.num_epochs={job.rung.num_epochs}",
            f"evaluation.split={VALID}",
        ]
        config = self._space.configuration(job.values, overrides)
        self._check(config)  # settings that do not go together cost no process
        outcome = train(config, folder, self._num_trainers, VALID)
        shutil.rmtree(Path(config.output) / CHECKPOINT_FOLDER, ignore_errors=True)  # the rows
        return outcome

    def _train_winner(self, values: dict[str, Value]) -> dict[str, Any]:
        """Write the winning configuration, and train it on the whole graph."""
        folder = self._output / BEST_FOLDER
        split = self._base.evaluation.split if self._base.evaluation.split != "none" else VALID
        overrides = [f"output={folder / RUN_FOLDER}", f"evaluation.split={split}"]
        config = self._space.configuration(values, overrides)
        path = self._output / BEST_CONFIG
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
        folder = self._output / GRAPHS_FOLDER / f"core{core}"
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            self._cores.write(core, folder, self._space.search.seed)
        return folder

    def _write_trials(self, records: list[dict[str, Any]], best: dict[str, Any] | None = None) -> None:
        """Write all trials, and the winner if there is one, as JSON and as a table."""
        ended = [record for record in records if record["state"] != "unfinished"]
        spent = sum(self.rungs[record["rung"]].trial_cost for record in ended) + (best is not None)
        report = {**self.plan(), "spent": spent, "trials": records}
        if best is not None:
            report["best"] = best
        write_text(self._output / TRIALS_JSON, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        keys = [parameter.key for parameter in self._space.parameters]
        table = io.StringIO()
        writer = csv.writer(table, delimiter="\t", lineterminator="\n")
        columns = ("name", "state", "value", "seconds", "share", "num_epochs", "source", "reason")
        writer.writerow([*columns, *keys])
        for record in records:
            writer.writerow([*map(record.get, columns), *map(record["values"].get, keys)])
        write_text(self._output / TRIALS_TABLE, table.getvalue())
