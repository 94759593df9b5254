"""Search spaces, plans within the budget, successive halving over Optuna's studies; trials are functions."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.errors import InputError, JobError
from dglkge.tuning.search import Outcome, Rung, Search, choose_fidelity, plan_rungs
from dglkge.tuning.space import Parameter, SearchSettings, Space, load_space

LR = Parameter("optimizer.lr", low=0.01, high=1.0, log=True)
GOOD = """
set: {dataset: data/x, model: {dimension: 200}, training.num_epochs: 12}
space:
  optimizer.lr: {low: 1e-2, high: 1.0, log: true}
  model.dimension: {low: 100, high: 400, step: 100}
  loss.name: [softmax, self_adversarial]
  regularizer.weight: [0, 1e-3, 0.1]
  negatives.own_entity: [true, false]
search: {trials: 20, budget: 2.5}
"""


def load(tmp_path, text, overrides=()):
    (tmp_path / "space.yaml").write_text(text)
    return load_space(tmp_path / "space.yaml", overrides)


def test_numbers_are_read_as_those_of_a_configuration(tmp_path):
    """A text in quotes is none, and 0100 is a hundred; YAML 1.1 takes it for 64, and 12:30 for 750."""
    space = load(tmp_path, "set: {dataset: '2024', output: infinity}\nspace: {model.dimension: [0100, 1_0]}")
    assert space.parameters[0].choices == (100, 10)
    config = space.configuration({})
    assert (config.dataset, config.output) == ("2024", "infinity")
    with pytest.raises(InputError, match="optimizer.lr is 12:30; allowed: a number"):
        load(tmp_path, "set: {dataset: x}\nspace: {optimizer.lr: [12:30]}")


def test_every_kind_of_parameter(tmp_path):
    space = load(tmp_path, GOOD, ["seed=3"])
    assert space.config is None and space.search == SearchSettings(20, 4, 2.5, 0)
    assert space.parameters == (
        LR,
        Parameter("model.dimension", low=100, high=400, step=100),
        Parameter("loss.name", choices=("softmax", "self_adversarial")),
        Parameter("regularizer.weight", choices=(0, 0.001, 0.1)),
        Parameter("negatives.own_entity", choices=(True, False)),
    )
    assert [parameter.is_whole for parameter in space.parameters[:2]] == [False, True]
    values = {"optimizer.lr": 1.5e-05, "negatives.own_entity": False, "regularizer.weight": 0}
    config = space.configuration(values, ["training.num_epochs=2"])
    assert (config.dataset, config.model.dimension, config.seed) == ("data/x", 200, 3)
    assert (config.optimizer.lr, config.training.num_epochs) == (1.5e-05, 2)
    assert config.negatives.own_entity is False
    (tmp_path / "base.yaml").write_text("dataset: data/y\nmodel: {dimension: 50}\n")
    space = load(tmp_path, f"config: {tmp_path}/base.yaml\nspace: {{optimizer.lr: [0.1]}}")
    config = space.configuration({"optimizer.lr": 0.1})
    assert (config.dataset, config.model.dimension) == ("data/y", 50) and space.search == SearchSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "expected 'key: value' lines"),
        ("spaces: {}", "unknown key 'spaces'; did you mean 'space'?"),
        ("set: {dataset: x}", "space is not given"),
        ("space: {}", "space is {}; allowed: at least 1"),
        ("space: {optimiser.lr: [1]}", "unknown field 'optimiser.lr'; did you mean 'optimizer.lr'"),
        ("space: {training.num_epochs: [1]}", "training.num_epochs cannot be searched"),
        ("space: {optimizer.lr: []}", "is []; allowed: at least 1"),
        ("space: {optimizer.lr: [0.1, 0.1]}", "allowed: each value once"),
        ("space: {optimizer.lr: {low: 1}}", "optimizer.lr: high is not given"),
        ("space: {optimizer.lr: {low: 1, high: 1}}", "allowed: low below high"),
        ("space: {optimizer.lr: {low: 0, high: 1, log: true}}", "with log a low above 0"),
        ("space: {optimizer.lr: {low: 1, high: 2, log: true, step: 1}}", "without log a step above 0"),
        ("space: {optimizer.lr: {low: -1, high: 2}}", "optimizer.lr is -1; allowed: a number above 0"),
        ("space: {loss.name: [softmax]}\nset: {dataset: x, model.dimension: x}", "dimension is 'x'; allowed"),
        ("space: {optimizer.lr: [1]}\nsearch: {trial: 3}", "unknown key 'trial'; did you mean 'trials'"),
        ("space: {optimizer.lr: [1]}\nsearch: {seed: -1}", "seed is -1; allowed: at least 0"),
        ("config: /no.yaml\nspace: {optimizer.lr: [1]}", "cannot read the configuration /no.yaml"),
    ],
)
def test_mistakes_in_a_space(tmp_path, text, words):
    if text.startswith("space: {") and "set:" not in text:
        text = f"set: {{dataset: x}}\n{text}"
    with pytest.raises(InputError, match=re.escape(words)):
        load(tmp_path, text)


some_shares = st.lists(st.floats(0.001, 1), max_size=12).map(lambda rest: [1.0, *sorted(rest, reverse=True)])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(2, 6), st.floats(1, 10), st.integers(1, 300), some_shares)
def test_plans_keep_the_budget(num_trials, reduction, budget, full_epochs, shares):
    try:
        rungs = plan_rungs(num_trials, reduction, budget, full_epochs, shares)
    except InputError as error:
        assert "is too small for a search" in str(error) and num_trials > 1
        return
    costs = [rung.num_trials * rung.share * rung.num_epochs / full_epochs for rung in rungs]
    assert sum(costs) <= budget + 1e-6 and rungs[0].num_trials <= num_trials
    assert rungs[-1] == Rung(1, 0, 1.0, full_epochs, full_epochs)
    for rung, after in zip(rungs, rungs[1:]):
        assert after is rungs[-1] or rung.num_trials > after.num_trials <= rung.num_trials // reduction
        assert rung.share == shares[rung.core] and 1 <= rung.num_epochs <= full_epochs
        assert rung.cost <= (budget - 1) / (len(rungs) - 1) * 2 + 1e-6


def test_plan_by_hand():
    """Two full trainings for 16 + 4 trials: 1/16 and 1/4 each, so a fourth and a half of graph and epochs."""
    shares = [1.0, 1.0, 0.8, 0.5, 0.25, 0.1]
    rungs = plan_rungs(16, 4, 3, 40, shares)
    assert rungs == [Rung(16, 4, 0.25, 10, 40), Rung(4, 3, 0.5, 20, 40), Rung(1, 0, 1.0, 40, 40)]
    assert [rung.cost for rung in rungs] == [1, 1, 1]
    assert plan_rungs(1, 4, 1, 7, shares) == [Rung(1, 0, 1.0, 7, 7)]
    # One epoch on the densest core is a tenth of a training of two epochs: few trials.
    first, *rest = plan_rungs(64, 4, 2, 2, [1.0, 0.2])
    assert (first.num_trials, first.num_epochs) == (3, 1)
    assert first.cost + sum(rung.cost for rung in rest) <= 2


@settings(max_examples=100, deadline=None)
@given(cost=st.floats(0.001, 2), full_epochs=st.integers(1, 100), shares=some_shares)
def test_fidelity_against_all_choices(cost, full_epochs, shares):
    rungs = choose_fidelity(5, cost, full_epochs, shares)
    target = math.sqrt(min(cost, 1))
    affordable = [share for share in shares if share / full_epochs <= cost + 1e-9]
    if rungs is None:
        assert not [share for share in shares if share / full_epochs <= cost]
        return
    nearest = min(max(share / target, target / share) for share in affordable)
    assert max(rungs.share / target, target / rungs.share) <= nearest + 1e-9
    assert rungs.trial_cost <= cost + 1e-6
    more = rungs.share * (rungs.num_epochs + 1) / full_epochs
    assert rungs.num_epochs == full_epochs or more > cost


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((9, 1, 3, 10), "the reduction must be at least 2, got 1"),
        ((9, 4, 3, 0), "training.num_epochs must be at least 1 for a search, got 0"),
        ((9, 4, 1, 10), "a budget of 1 full trainings is too small for a search over 9 trials: the winner's"),
    ],
)
def test_impossible_plans(arguments, words):
    with pytest.raises(InputError, match=words):
        plan_rungs(*arguments, [1.0, 0.5])


pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")

DIMENSION = Parameter("model.dimension", low=10, high=80, step=10)
LOSS = Parameter("loss.name", choices=("softmax", "logistic"))
PARAMETERS = (LR, DIMENSION, LOSS, Parameter("negatives.own_entity", choices=(True, False)))
SPACE = Space(None, (), PARAMETERS, SearchSettings(trials=9, reduction=3, seed=5))
RUNGS = [Rung(9, 4, 0.2, 1, 10), Rung(3, 2, 0.5, 3, 10), Rung(1, 0, 1.0, 10, 10)]


def quality(values) -> float:
    return 1 - abs(values["optimizer.lr"] - 0.1) - (80 - values["model.dimension"]) / 400


def runner(log, errors=None, value=quality):
    """Return a function of trials; some, by number from 0, fail."""

    def run_trial(job):
        log.append(job)
        if errors and len(log) - 1 in errors:
            raise errors[len(log) - 1]
        return Outcome(value(job.values), 2.0)

    return run_trial


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SimpleNamespace:
    """A search without an interruption."""
    log, ended, folder = [], [], tmp_path_factory.mktemp("whole")
    best_settings = Search(SPACE, RUNGS, folder).run(runner(log), ended.append)
    records = Search(SPACE, RUNGS, folder).records()
    return SimpleNamespace(log=log, ended=ended, best_settings=best_settings, records=records)


def test_best_of_each_rung_go_on(whole):
    first, second, records = whole.log[:9], whole.log[9:], whole.records
    assert [(job.rung_index, job.rung) for job in first + second] == [(0, RUNGS[0])] * 9 + [(1, RUNGS[1])] * 3
    for values in (job.values for job in first):
        assert 0.01 <= values["optimizer.lr"] <= 1 and values["model.dimension"] in range(10, 81, 10)
        assert values["loss.name"] in ("softmax", "logistic") and type(values["negatives.own_entity"]) is bool
    best = sorted((job.values for job in first), key=quality, reverse=True)
    assert [job.values for job in second] == best[:3]
    assert whole.best_settings == best[0] and sum(whole.ended) == 12
    assert [record["value"] for record in records] == [quality(job.values) for job in whole.log]
    assert [record["name"] for record in records][::11] == ["rung0-trial000", "rung1-trial002"]
    assert records[9]["source"] == next(r["name"] for r in records if r["values"] == best[0])
    assert {record["seconds"] for record in records} == {2.0}


@pytest.mark.parametrize("interrupted_at", [0, 4, 11])
def test_an_interrupted_search_goes_on(tmp_path, whole, interrupted_at):
    log, ended = [], []
    with pytest.raises(KeyboardInterrupt):
        Search(SPACE, RUNGS, tmp_path).run(runner(log, {interrupted_at: KeyboardInterrupt()}))
    states = [record["state"] for record in Search(SPACE, RUNGS, tmp_path).records()]
    assert states == ["complete"] * interrupted_at + ["unfinished"]
    best_settings = Search(SPACE, RUNGS, tmp_path).run(runner(log), ended.append)
    # the interrupted trial again, under its name and with its settings; no other twice
    assert log[interrupted_at + 1] == log[interrupted_at]
    names = [job.name for job in log]
    assert len(names) == 13 and len(set(names)) == 12 and sum(ended) == 12
    # The same seed gives the same settings without an interruption; a search that has ended does nothing.
    del log[interrupted_at]
    assert best_settings == whole.best_settings
    assert [job.values for job in whole.log] == [job.values for job in log]
    assert Search(SPACE, RUNGS, tmp_path).run(runner(log)) == best_settings and len(log) == 12


def test_failures_are_left_out(tmp_path):
    log, error = [], JobError("no\nmemory")

    def value(values):
        return math.nan if len(log) == 5 else quality(values)

    search = Search(SPACE, RUNGS, tmp_path)
    best_settings = search.run(runner(log, dict.fromkeys((1, 3, 5, 7), error), value))
    records = search.records()
    assert [record["state"] for record in records[:5]] == ["complete", "failed"] * 2 + ["failed"]
    reasons = [None, "no memory"] * 2 + ["the metric of the valid split is nan"]
    assert [record["reason"] for record in records[:5]] == reasons
    good = [record for record in records if record["state"] == "complete" and record["rung"] == 0]
    assert best_settings == max(good, key=lambda record: record["value"])["values"]


def test_first_failures_end_the_search(tmp_path):
    log, error = [], InputError("no such field")
    with pytest.raises(JobError, match="the first 3 trials failed; the last one: no such field"):
        Search(SPACE, RUNGS, tmp_path).run(runner(log, dict.fromkeys(range(9), error)))
    assert len(log) == 3


def test_equal_settings_are_promoted_once(tmp_path):
    space, log = Space(None, (), (LOSS,), SearchSettings(9, 3)), []
    run_trial = runner(log, value=lambda values: float(values["loss.name"] == "softmax"))
    assert Search(space, RUNGS, tmp_path).run(run_trial) == {"loss.name": "softmax"}
    assert [job.values["loss.name"] for job in log[9:]] == ["softmax", "logistic"]


def test_another_space_is_refused_and_no_search_is_needed(tmp_path):
    Search(SPACE, RUNGS, tmp_path)
    for space, rungs in ((SPACE, RUNGS[1:]), (Space("x", (), SPACE.parameters, SPACE.search), RUNGS)):
        with pytest.raises(InputError, match="trials of another space or plan; give another --output"):
            Search(space, rungs, tmp_path)
    (tmp_path / "none").mkdir()
    assert Search(SPACE, RUNGS[2:], tmp_path / "none").run(runner([])) == {}
