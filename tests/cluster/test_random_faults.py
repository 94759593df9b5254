"""Random faults on two hosts with a disk each, which change places: the short form of ``faults.py``."""

from __future__ import annotations

import random

import pytest

from dglkge.data.dataset import Dataset
from fault_sites import BATCH_SIZE, TwoDisks
from faults import LIMIT_SECONDS, run_trials
from tests.toy_kg import toy_dataset

pytestmark = pytest.mark.usefixtures("warm_runners")


@pytest.mark.timeout(600)
def test_reordered_hosts_lose_nothing_that_was_published(two_hosts, tmp_path):
    """One start with the launcher killed, one with the first machine's processes killed."""
    random.seed(3)
    dataset = toy_dataset(2)
    num_batches = -(-len(Dataset.open(dataset).split("train")) // BATCH_SIZE)
    site = TwoDisks(tmp_path, dataset, num_batches, LIMIT_SECONDS, two_hosts)
    trials = run_trials(site, ["launcher", "host"])
    assert [(trial.fault, trial.wrong, trial.lost_commits) for trial in trials] == [
        ("kill -9 of the launcher", "", 0),
        ("kill -9 of all on a host", "", 0),
    ]
