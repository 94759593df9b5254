"""Plans a search within a budget, and runs it with Optuna, which keeps the trials in a SQLite file.

Rungs say how many trials train how many epochs on how large a part of the graph: successive halving over the
size of the subgraph and the epochs together (GraSH: Kochsiek, Niesel and Gemulla 2022, section 4). Costs are
in full trainings: share of the training triples times share of the epochs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dglkge.errors import DglkgeError, InputError, JobError, import_extra
from dglkge.tuning.space import Parameter, Space, Value

ROUNDING = 1e-9
"""Added before a quotient is rounded down: 3 / 0.1 must give 30 epochs of a tenth."""


@dataclass(frozen=True)
class Rung:
    """Trials of equal cost; the best of them go on to the next rung.

    Attributes
    ----------
    core : int
        k of the k-core that they train on; 0 for the whole graph.
    share : float
        Share of the training triples in it.
    """

    num_trials: int
    core: int
    share: float
    num_epochs: int
    full_epochs: int

    @property
    def trial_cost(self) -> float:
        """Cost of one trial, in full trainings."""
        return self.share * self.num_epochs / self.full_epochs

    @property
    def cost(self) -> float:
        """Cost of all trials, in full trainings."""
        return self.num_trials * self.trial_cost

    def described(self) -> dict[str, Any]:
        """Return the rung as tables and JSON have it."""
        trials, share = {"trials": self.num_trials, "core": self.core}, {"share": round(self.share, 4)}
        costs = {"trial_cost": round(self.trial_cost, 4), "cost": round(self.cost, 4)}
        return {**trials, **share, "epochs": self.num_epochs, **costs}


def plan_rungs(
    num_trials: int, reduction: int, budget: float, full_epochs: int, shares: Sequence[float]
) -> list[Rung]:
    """Plan the rungs of a search.

    The last rung is one full training of the winner. The others share the rest of the budget equally, and a
    trial's cost is divided evenly between graph and epochs: each is reduced to about its square root. The
    first rung has fewer trials than wanted, if one epoch on the densest core costs too much.

    Parameters
    ----------
    num_trials : int
        Of the first rung.
    reduction : int
        Of this many trials the best goes on.
    budget : float
        Most cost of all rungs, in full trainings.
    full_epochs : int
        Epochs of a full training.
    shares : sequence of float
        Share of the training triples in the k-core, for k = 0, 1, ...; the first is 1.

    Raises
    ------
    InputError
        If a number is out of range, or the budget is too small for a search.
    """
    for requirement, least, number in (
        ("the number of trials must be at least 1", 1, num_trials),
        ("the reduction must be at least 2", 2, reduction),
        ("training.num_epochs must be at least 1 for a search", 1, full_epochs),
        ("the budget must be at least 1 full training", 1, budget),
    ):
        if not number >= least:
            raise InputError(f"{requirement}, got {number:g}")
    final = Rung(1, 0, 1.0, full_epochs, full_epochs)
    counts = []
    while num_trials > 1:
        counts.append(num_trials)
        num_trials //= reduction
    rungs: list[Rung] = []
    for count in counts:
        rung_budget = (budget - 1) / len(counts)
        # A rung that could not have all its trials leaves fewer for the next.
        if rungs:
            count = min(count, rungs[-1].num_trials // reduction)
        if count < 2:
            break
        # The most trials that can be paid, two at least.
        plans = (choose_fidelity(n, rung_budget / n, full_epochs, shares) for n in range(count, 1, -1))
        rung = next(filter(None, plans), None)
        if rung is None:
            needed = 1 + len(counts) * 2 * min(share for share in shares if share > 0) / full_epochs
            problem = f"a budget of {budget:g} full trainings is too small for a search"
            costs = f"the winner's own training costs 1, and two trials a rung need at least {needed:.2f}"
            raise InputError(f"{problem} over {counts[0]} trials: {costs}")
        rungs.append(rung)
    return [*rungs, final]


def choose_fidelity(
    num_trials: int, trial_cost: float, full_epochs: int, shares: Sequence[float]
) -> Rung | None:
    """Choose the core and the epochs of trials of a given cost.

    The core has the share of triples nearest to the square root of the cost, by their ratio, among those on
    which at least one epoch can be paid; None if there is none. Epochs are as many as the cost allows.
    """
    target = math.sqrt(min(trial_cost, 1.0))
    rungs = []
    for core, share in enumerate(shares):
        num_epochs = math.floor(trial_cost * full_epochs / share + ROUNDING) if share > 0 else 0
        if num_epochs >= 1:
            rungs.append(Rung(num_trials, core, share, min(full_epochs, num_epochs), full_epochs))
    return min(rungs, key=lambda rung: abs(math.log(rung.share / target)), default=None)


STUDY_FILE = "study.db"
SOURCE, REASON, SECONDS = "source", "reason", "seconds"
"""Attributes of a trial in the study."""

MOST_FIRST_FAILURES = 3
"""A search whose first trials all fail ends: their reason is the space's or the machine's, not bad luck."""


class Job(NamedTuple):
    """One training of a search; its name is the same when the trial is resumed."""

    rung_index: int
    rung: Rung
    name: str
    values: Mapping[str, Value]


class Outcome(NamedTuple):
    """``evaluation.metric`` of a split after a training, and its seconds."""

    value: float
    seconds: float


RunTrial = Callable[[Job], Outcome]


class Search:
    """A search in a folder, which goes on where it was interrupted.

    The last rung, of the winner's full training, is no part of it.

    Raises
    ------
    InputError
        If the folder has another search, or Optuna is missing.
    """

    def __init__(self, space: Space, rungs: Sequence[Rung], folder: Path) -> None:
        self._optuna: Any = import_extra("dglkge tune", "optuna", "tune")
        optuna = self._optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._rungs, self._seed = rungs[:-1], space.search.seed
        self._distributions = {axis.key: _distribution(optuna, axis) for axis in space.parameters}
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder.absolute() / STUDY_FILE}")
        plan = json.dumps([asdict(space), [asdict(rung) for rung in rungs]], sort_keys=True)
        # A study for each rung: only trials of equal cost are comparable.
        self._studies: list[Any] = []
        for index in range(len(self._rungs)):
            options = {"storage": storage, "direction": "maximize", "load_if_exists": True}
            study = optuna.create_study(study_name=f"rung{index}", **options)
            if study.user_attrs.setdefault("plan", plan) != plan:
                problem = f"{folder / STUDY_FILE} has the trials of another space or plan"
                raise InputError(f"{problem}; give another --output, or remove that folder")
            study.set_user_attr("plan", plan)
            self._studies.append(study)

    def run(
        self, run_trial: RunTrial, progress: Callable[[int], object] = lambda _: None
    ) -> dict[str, Value]:
        """Run all trials that have not ended; return the settings of the best trial of the last rung.

        Parameters
        ----------
        run_trial : callable
            Trains and returns the result; raises InputError or JobError if the trial fails.
        progress : callable
            Called with the number of trials that have just ended, those of an earlier run included.

        Raises
        ------
        JobError
            If all trials of a rung fail, or the first ones of the search.
        """
        promoted: list[Any] = []
        for index, rung in enumerate(self._rungs):
            study = self._studies[index]
            enqueued = {trial.user_attrs.get(SOURCE) for trial in study.trials}
            for source in promoted[: rung.num_trials]:
                if source.number not in enqueued:
                    study.enqueue_trial(source.params, user_attrs={SOURCE: source.number})
            num_trials = min(rung.num_trials, len(promoted)) if index else rung.num_trials
            done = sum(trial.state.is_finished() for trial in study.trials)
            progress(done)
            for _ in range(num_trials - done):
                self._run(index, rung, self._next(study), run_trial)
                progress(1)
            promoted = self._best_first(index)
            if not promoted:
                reasons = (trial.user_attrs[REASON] for trial in study.trials if REASON in trial.user_attrs)
                raise JobError(f"all trials of rung {index} failed; the first one: {next(reasons, None)}")
        return dict(promoted[0].params) if promoted else {}

    def records(self) -> list[dict[str, Any]]:
        """Return all trials as the tables have them, by rung, in the order in which they were started.

        ``source`` is the trial of the rung before with the same settings, ``reason`` that of a failure.
        """
        records = []
        for index, (rung, study) in enumerate(zip(self._rungs, self._studies)):
            for trial in (trial for trial in study.trials if trial.state.name != "WAITING"):
                source, seconds, reason = map(trial.user_attrs.get, (SOURCE, SECONDS, REASON))
                state = {"COMPLETE": "complete", "FAIL": "failed"}.get(trial.state.name, "unfinished")
                value = trial.value if state == "complete" else None
                earlier = None if source is None else trial_name(index - 1, source)
                place = {"name": trial_name(index, trial.number), "rung": index, "source": earlier}
                result = {"state": state, "value": value, "seconds": seconds}
                cost = {name: getattr(rung, name) for name in ("core", "share", "num_epochs")}
                records.append({**place, **result, **cost, "values": dict(trial.params), "reason": reason})
        return records

    def _next(self, study: Any) -> Any:
        """Return the trial to run: an unfinished one, the next that is enqueued, or one of new settings."""
        unfinished = [trial for trial in study.trials if trial.state.name == "RUNNING"]
        if unfinished:
            return unfinished[0]
        # A sampler for each trial, seeded by its number: an interrupted search samples what it would have.
        seed = np.random.SeedSequence([self._seed, len(study.trials)]).generate_state(1)[0]
        study.sampler = self._optuna.samplers.TPESampler(seed=int(seed))
        number = study.ask(fixed_distributions=self._distributions).number
        return study.trials[number]  # read after it was stored

    def _run(self, index: int, rung: Rung, trial: Any, run_trial: RunTrial) -> None:
        """Run one trial and store its result."""
        study = self._studies[index]
        storage, id_ = study._storage, trial._trial_id
        try:
            outcome = run_trial(Job(index, rung, trial_name(index, trial.number), dict(trial.params)))
            if not math.isfinite(outcome.value):
                raise JobError(f"the metric of the valid split is {outcome.value}")
        except DglkgeError as error:
            reason = " ".join(str(error).split())
            storage.set_trial_user_attr(id_, REASON, reason)
            study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            states = [trial.state.name for trial in self._studies[0].trials]
            if states == ["FAIL"] * MOST_FIRST_FAILURES:
                raise JobError(f"the first {len(states)} trials failed; the last one: {reason}") from None
            return
        storage.set_trial_user_attr(id_, SECONDS, outcome.seconds)
        study.tell(trial.number, outcome.value)

    def _best_first(self, index: int) -> list[Any]:
        """Return the complete trials of a rung, the best first, each of several equal settings once."""
        complete = [trial for trial in self._studies[index].trials if trial.state.name == "COMPLETE"]
        complete.sort(key=lambda trial: (-trial.value, trial.number))
        by_settings: dict[str, Any] = {}
        for trial in complete:
            by_settings.setdefault(json.dumps(trial.params, sort_keys=True), trial)
        return list(by_settings.values())


def trial_name(rung_index: int, number: int) -> str:
    """Return the name of a trial, and of its folder."""
    return f"rung{rung_index}-trial{number:03d}"


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    """Return Optuna's form of a parameter."""
    kinds, ends, log = optuna.distributions, (parameter.low, parameter.high), parameter.log
    if parameter.choices is not None:
        return kinds.CategoricalDistribution(parameter.choices)
    if parameter.is_whole:
        return kinds.IntDistribution(*ends, log=log, step=int(parameter.step or 1))
    return kinds.FloatDistribution(*ends, log=log, step=parameter.step)
