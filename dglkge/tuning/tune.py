"""A whole search: plan, subgraphs, trials, and the winner's training on the whole graph."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import VALID
from dglkge.errors import InputError
from dglkge.file_lock import try_lock
from dglkge.registry import import_modules
from dglkge.tuning.rungs import Rung, plan_rungs
from dglkge.tuning.search import Job, Outcome, Search, TrialRecord, import_optuna
from dglkge.tuning.space import Space, Value
from dglkge.tuning.subgraph import Cores, core_shares
from dglkge.tuning.trial_process import RUN_FOLDER, Trainer, drop_checkpoint, train, write_config, write_text

TRIALS_FOLDER = "trials"
GRAPHS_FOLDER = "subgraphs"
BEST_FOLDER = "best"
BEST_CONFIG = "best.yaml"
TRIALS_JSON = "trials.json"
TRIALS_TABLE = "trials.tsv"
LOCK_FILE = "tune.lock"


@dataclass(frozen=True)
class TuneResult:
    """Result of a search.

    Attributes
    ----------
    values : dict
        The winner's values of the searched fields.
    config : Path
        Its configuration.
    run : Path
        Its run on the whole graph.
    split : str
        The split that this run has ranked.
    outcome : Outcome
        MRR of that split, and seconds of the training.
    """

    values: dict[str, Value]
    config: Path
    run: Path
    split: str
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        return {
            "values": dict(self.values),
            "config": str(self.config),
            "run": str(self.run),
            "split": self.split,
            "mrr": self.outcome.value,
            "seconds": self.outcome.seconds,
        }


class Tuning:
    """A search over a space, in a folder.

    Parameters
    ----------
    space : Space
    output : Path
        Folder of the search; one that was interrupted is continued.
    trainer : Trainer
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
        self, space: Space, output: Path, trainer: Trainer, check: Callable[[Config], None] = lambda _: None
    ) -> None:
        import_optuna()
        self._space, self._output, self._trainer, self._check = space, output, trainer, check
        self._base = space.configuration({})
        import_modules(self._base.imports)
        check(self._base)
        self._dataset = Dataset.open(self._base.dataset)
        search = space.search
        shares = core_shares(self._cores.of_train).tolist()
        full_epochs = self._base.training.num_epochs
        self.rungs: list[Rung] = plan_rungs(
            search.trials, search.reduction, search.budget, full_epochs, shares
        )

    @cached_property
    def _cores(self) -> Cores:
        return Cores(self._dataset)

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
        return {
            "rungs": rows,
            "cost": sum(rung.cost for rung in self.rungs),
            "budget": self._space.search.budget,
        }

    def run(self, progress: Callable[[int], object] = lambda _: None) -> TuneResult:
        """Run what has not been run: subgraphs, trials, and the winner's training.

        Parameters
        ----------
        progress : callable
            Called with the number of trainings that have just ended.

        Raises
        ------
        InputError
            If another process searches in the folder, or it has another search.
        JobError
            If all trials of a rung fail, or the winner's training does.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        with _locked(self._output / LOCK_FILE):
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
        outcome = train(config, folder, self._trainer, VALID)
        drop_checkpoint(Path(config.output))
        return outcome

    def _train_winner(self, values: dict[str, Value]) -> TuneResult:
        """Write the winning configuration, and train it on the whole graph."""
        folder = self._output / BEST_FOLDER
        split = self._base.evaluation.split if self._base.evaluation.split != "none" else VALID
        config: Config = self._space.configuration(
            values, [f"output={folder / RUN_FOLDER}", f"evaluation.split={split}"]
        )
        write_config(config, self._output / BEST_CONFIG)
        outcome = train(config, folder, self._trainer, split)
        return TuneResult(values, self._output / BEST_CONFIG, Path(config.output), split, outcome)

    def _graph(self, core: int) -> Path:
        """Return the data set folder of a core, written when it is first needed."""
        # All of the graph may be its own 1-core: no copy is needed of it.
        if self.rung_share(core) == 1.0:
            return self._dataset.path
        folder = self._output / GRAPHS_FOLDER / f"core{core}"
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            self._cores.write(core, folder, self._space.search.seed)
        return folder

    def rung_share(self, core: int) -> float:
        """Return the share of the training triples in a core of the plan."""
        return next(rung.share for rung in self.rungs if rung.core == core)

    def _write_trials(self, records: Sequence[TrialRecord], result: TuneResult | None = None) -> None:
        """Write all trials, and the winner if there is one, as JSON and as a table."""
        spent = sum(self.rungs[record.rung].trial_cost for record in records if record.state != "unfinished")
        report: dict[str, Any] = {
            **self.plan(),
            "spent": spent + (result is not None),
            "trials": [record.to_dict() for record in records],
        }
        if result is not None:
            report["best"] = result.to_dict()
        write_text(self._output / TRIALS_JSON, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        keys = [parameter.key for parameter in self._space.parameters]
        table = io.StringIO()
        writer = csv.writer(table, delimiter="\t", lineterminator="\n")
        columns = ("name", "state", "value", "seconds", "share", "num_epochs", "source", "reason")
        writer.writerow([*columns, *keys])
        for record in records:
            fields = record.to_dict()
            writer.writerow([*(fields[name] for name in columns), *(record.values.get(key) for key in keys)])
        write_text(self._output / TRIALS_TABLE, table.getvalue())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a search's folder.

    Raises
    ------
    InputError
        If another process holds it.
    """
    with open(path, "w") as file:
        if not try_lock(file):
            raise InputError(
                f"another dglkge tune runs in {path.parent}; wait for it, or give another --output"
            )
        yield
