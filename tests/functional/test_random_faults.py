"""Random faults on one machine, in a short form: ``benchmarks/faults.py`` has the long one."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest

import fault_sites
from dglkge.data.dataset import Dataset
from fault_sites import BATCH_SIZE, OneMachine
from faults import LIMIT_SECONDS, deal, finish_and_compare, run_damages, run_trials, small_disk
from tests import warm
from tests.toy_kg import toy_dataset

NUM_DAMAGES = 20


@pytest.mark.timeout(600)
def test_a_run_survives_random_faults(tmp_path, monkeypatch):
    """Nothing that was published is lost, and the tables are those of an undisturbed run, bit by bit."""
    random.seed(7)
    monkeypatch.setenv("PYTHONPATH", warm.runners(os.environ)["PYTHONPATH"])
    dataset = toy_dataset()
    num_batches = -(-len(Dataset.open(dataset).split("train")) // BATCH_SIZE)
    with small_disk(tmp_path / "disk", 32 << 20) as folder, small_disk(tmp_path / "logs", 1 << 20) as logs:
        site = OneMachine(folder, logs, dataset, num_batches, LIMIT_SECONDS)
        names = ["all", *(["disk"] if site.can_be_filled() else [])]
        trials = run_trials(site, names)
        trials.append(finish_and_compare(site, tmp_path))
        trials += run_damages(folder / "run" / "checkpoint", NUM_DAMAGES)
    assert len(trials) == len(names) + 1 + NUM_DAMAGES
    assert [(trial.fault, trial.wrong) for trial in trials if trial.wrong] == []
    assert [trial.lost_commits for trial in trials if trial.lost_commits] == []


def test_shared_memory_of_other_jobs_was_not_left(tmp_path, monkeypatch):
    site = OneMachine(tmp_path, tmp_path, tmp_path, 1, LIMIT_SECONDS)
    site.job = SimpleNamespace(pid=-1, poll=lambda: None)
    jobs = [
        SimpleNamespace(job=f"{name}{os.getpid()}", launcher_pid=pid) for name, pid in (("a", -1), ("b", -2))
    ]
    monkeypatch.setattr(fault_sites, "live_jobs", lambda: jobs)
    monkeypatch.setattr(site, "committed", lambda: (1, 1))
    site.wait_for_commits(1, 0)
    paths = [fault_sites.SHARED_MEMORY / f"dglkge-{entry.job}-0~part-0" for entry in jobs]
    for path in paths:
        path.write_bytes(b" ")
    try:
        assert site.segments() == [str(paths[0])]
    finally:
        for path in paths:
            path.unlink()


def test_every_fault_is_dealt_equally_often():
    dealt = deal(OneMachine, 40, can_fill=True)
    counts = {name: dealt.count(name) for name in dealt}
    assert len(counts) >= 10 and max(counts.values()) - min(counts.values()) <= 1
    assert not {"disk", "logs"} & set(deal(OneMachine, 40, can_fill=False))
