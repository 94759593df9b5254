"""``dglkge evaluate --candidates given``: the candidates that a data set came with."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from tests.checkpoint.toy_checkpoint import save_toy_run


@pytest.fixture
def ranked(tmp_path, dataset):
    """A run on a copy of the data set with two candidates for each test triple: the true one and another."""
    shutil.copytree(dataset.path, tmp_path / "data")
    test = dataset.split("test")
    # Country has three entities, the fewest of a type.
    candidates = np.stack([np.stack([test[:, side], (test[:, side] + 1) % 3], axis=1) for side in (0, 2)])
    np.save(tmp_path / "data" / "candidates_test.npy", candidates.astype(np.int32))
    return save_toy_run(tmp_path / "run", Dataset.open(tmp_path / "data"))


def test_the_command_and_python(call, ranked, dataset):
    status, out, err = call("evaluate", ranked, "--candidates", "given", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["protocol"]["candidates"] == "given" and report["protocol"]["filtering"] == "raw"
    assert (ranked / "metrics-test-given.json").is_file()
    run = dglkge.open_run(ranked)
    result = run.evaluate(Protocol(filtered=False, given=True))
    assert result.both.mrr == report["both"]["mrr"]
    # Each is ranked against one other; where that is itself, against none.
    for side, negatives in result.num_negatives.items():
        test = dataset.split("test")[:, side.column]
        assert negatives.tolist() == [int(true != (true + 1) % 3) for true in test]
    status, out, _ = call("evaluate", ranked, "--candidates", "given", "--limit", "3", "--json")
    assert status == 0 and json.loads(out)["num_triples"] == 3


def test_what_has_none(call, ranked, run):
    status, _, err = call("evaluate", run, "--candidates", "given")
    assert status == 2 and "came without candidates, which OGB's have" in err
    status, _, err = call("evaluate", ranked, "--candidates", "given", "--split", "valid")
    assert status == 2 and "the valid triples of " in err and "came without candidates" in err
    opened = dglkge.open_run(ranked)
    with pytest.raises(InputError, match="given candidates belong to the triples of a split, in their order"):
        opened.evaluate(Protocol(filtered=False, given=True), opened.dataset.split("test")[::-1])
