"""Successive halving over Optuna's studies: promotion, interruption, failures. Trials are functions here."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError, JobError
from dglkge.tuning.search import Outcome, Rung, Search
from dglkge.tuning.space import Parameter, SearchSettings, Space

pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")

SPACE = Space(
    None,
    (),
    (
        Parameter("optimizer.lr", low=0.01, high=1.0, log=True),
        Parameter("model.dimension", low=10, high=80, step=10),
        Parameter("loss.name", choices=("softmax", "logistic")),
        Parameter("negatives.own_entity", choices=(True, False)),
    ),
    SearchSettings(trials=9, reduction=3, seed=5),
)
RUNGS = [Rung(9, 4, 0.2, 1, 10), Rung(3, 2, 0.5, 3, 10), Rung(1, 0, 1.0, 10, 10)]


def quality(values) -> float:
    """Best at lr 0.1 and dimension 80."""
    return 1 - abs(values["optimizer.lr"] - 0.1) - (80 - values["model.dimension"]) / 400


def runner(log):
    def run_trial(job):
        log.append(job)
        return Outcome(quality(job.values), 2.0)

    return run_trial


def test_best_of_each_rung_go_on(tmp_path):
    log, ended = [], []
    found = Search(SPACE, RUNGS, tmp_path).run(runner(log), ended.append)
    assert [(job.rung_index, job.rung) for job in log] == [(0, RUNGS[0])] * 9 + [(1, RUNGS[1])] * 3
    first, second = log[:9], log[9:]
    for job in first:
        values = job.values
        assert 0.01 <= values["optimizer.lr"] <= 1 and values["model.dimension"] in range(10, 81, 10)
        assert values["loss.name"] in ("softmax", "logistic") and type(values["negatives.own_entity"]) is bool
    best = sorted((job.values for job in first), key=quality, reverse=True)
    assert [job.values for job in second] == best[:3]
    assert found == best[0] and sum(ended) == 12
    records = Search(SPACE, RUNGS, tmp_path).records()
    assert [record["value"] for record in records] == [quality(job.values) for job in log]
    assert [record["name"] for record in records][::11] == ["rung0-trial000", "rung1-trial002"]
    assert records[9]["source"] == next(r["name"] for r in records if r["values"] == best[0])
    assert {record["seconds"] for record in records} == {2.0}


def test_same_seed_gives_the_same_first_settings(tmp_path):
    logs = [[], []]
    for log, name in zip(logs, "ab"):
        (tmp_path / name).mkdir()
        Search(SPACE, RUNGS, tmp_path / name).run(runner(log))
    assert [job.values for job in logs[0]] == [job.values for job in logs[1]]


@pytest.mark.parametrize("interrupted_at", [0, 4, 11])
def test_an_interrupted_search_goes_on(tmp_path, interrupted_at):
    log = []

    def run_trial(job):
        log.append(job)
        if len(log) == interrupted_at + 1:
            raise KeyboardInterrupt
        return Outcome(quality(job.values), 1.0)

    with pytest.raises(KeyboardInterrupt):
        Search(SPACE, RUNGS, tmp_path).run(run_trial)
    states = [record["state"] for record in Search(SPACE, RUNGS, tmp_path).records()]
    assert states == ["complete"] * interrupted_at + ["unfinished"]
    ended = []
    found = Search(SPACE, RUNGS, tmp_path).run(runner(log), ended.append)
    # the interrupted trial again, under its name and with its settings; no other twice
    assert log[interrupted_at + 1] == log[interrupted_at]
    names = [job.name for job in log]
    assert len(names) == 13 and len(set(names)) == 12 and sum(ended) == 12
    (tmp_path / "whole").mkdir()
    whole = []
    assert Search(SPACE, RUNGS, tmp_path / "whole").run(runner(whole)) == found
    assert [job.values for job in whole] == [
        job.values for job in log[:interrupted_at] + log[interrupted_at + 1 :]
    ]
    again = []
    assert Search(SPACE, RUNGS, tmp_path).run(runner(again)) == found and again == []


def test_failures_are_left_out(tmp_path):
    log = []

    def run_trial(job):
        log.append(job)
        if job.rung_index == 0 and len(log) % 2 == 0:
            raise JobError("no\nmemory")
        if len(log) == 5:
            return Outcome(float("nan"), 1.0)
        return Outcome(quality(job.values), 1.0)

    search = Search(SPACE, RUNGS, tmp_path)
    found = search.run(run_trial)
    records = search.records()
    assert [record["state"] for record in records[:5]] == ["complete", "failed"] * 2 + ["failed"]
    reasons = [None, "no memory"] * 2 + ["the metric of the valid split is nan"]
    assert [record["reason"] for record in records[:5]] == reasons
    good = [record for record in records if record["state"] == "complete" and record["rung"] == 0]
    assert found == max(good, key=lambda record: record["value"])["values"]


def test_first_failures_end_the_search(tmp_path):
    log = []

    def run_trial(job):
        log.append(job)
        raise InputError("no such field")

    with pytest.raises(JobError, match="the first 3 trials failed; the last one: no such field"):
        Search(SPACE, RUNGS, tmp_path).run(run_trial)
    assert len(log) == 3


def test_equal_settings_are_promoted_once(tmp_path):
    space = Space(None, (), (Parameter("loss.name", choices=("softmax", "logistic")),), SearchSettings(9, 3))
    log = []

    def run_trial(job):
        log.append(job)
        return Outcome(float(job.values["loss.name"] == "softmax"), 1.0)

    assert Search(space, RUNGS, tmp_path).run(run_trial) == {"loss.name": "softmax"}
    assert [job.values["loss.name"] for job in log[9:]] == ["softmax", "logistic"]


def test_another_space_is_refused(tmp_path):
    Search(SPACE, RUNGS, tmp_path)
    for space, rungs in ((SPACE, RUNGS[1:]), (Space("x", (), SPACE.parameters, SPACE.search), RUNGS)):
        with pytest.raises(
            InputError, match="has the trials of another space or plan; give another --output"
        ):
            Search(space, rungs, tmp_path)


def test_no_search_at_all(tmp_path):
    assert Search(SPACE, RUNGS[2:], tmp_path).run(runner([])) == {}
