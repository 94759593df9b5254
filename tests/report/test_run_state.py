"""Curves and times from the lines of training."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.report import plots
from dglkge.report.run_state import MOST_POINTS, learning_curves, read_lines, thinned
from tests.report.toy_report import stats_lines


def test_batches_that_were_trained_again_replace_the_earlier_ones():
    curves = learning_curves(stats_lines())
    assert curves["loss"] == [[0.5, 7.0], [1.0, 6.0], [1.5, 4.0], [2.0, 3.0], [2.5, 2.0], [3.0, 1.0]]
    # 6 s of each epoch, and 3 s of the one that was begun twice.
    assert curves["seconds"] == 3 * 6.0 + 3.0
    assert [epoch["epoch"] for epoch in curves["epochs"]] == [1, 2, 3]
    assert {epoch["trainer_memory_bytes"] for epoch in curves["epochs"]} == {2**30}
    assert curves["phase_seconds"] == {"score": 3.0, "loss": 9.0}


def test_the_last_ranking_of_an_epoch_counts():
    lines = [*stats_lines(), {"epoch": 1, "valid": {"mrr": 0.9, "num_queries": 20}}]
    assert learning_curves(lines)["valid"] == {"mrr": [[1.0, 0.1], [2.0, 0.9], [3.0, pytest.approx(0.3)]]}


def test_a_torn_line_is_skipped(runs):
    assert read_lines(runs.first / "stats.jsonl") == stats_lines()
    assert read_lines(runs.second / "stats.jsonl") == []
    assert learning_curves([])["loss"] == [] and learning_curves([])["seconds"] == 0


def test_a_long_curve_keeps_its_mean_and_its_end():
    values = np.arange(10 * MOST_POINTS, dtype=float)
    points = thinned(values, values)
    assert len(points) == MOST_POINTS and points[-1][0] == values[-1]
    assert np.mean([value for _, value in points]) == pytest.approx(values.mean())


def test_train_and_valid_loss_are_in_one_picture():
    lines = [*stats_lines(), {"epoch": 2, "valid": {"mrr": 0.5, "loss": 2.5, "num_queries": 20}}]
    run = {"label": "a", "training": learning_curves(lines)}
    traces = plots.curves([run], "loss", "loss")["data"]
    assert [(trace["name"], trace["y"][-1]) for trace in traces] == [("a, train", 1.0), ("a, valid", 2.5)]
    assert [trace["name"] for trace in plots.curves([run], "valid", "MRR")["data"]] == ["a"]
    assert plots.is_log_better([run], "loss") is False


def test_buckets_of_the_last_epoch():
    """A bucket that was trained again replaces the record of the earlier time."""
    records = [{"index": number, "seconds": 1.0} for number in (4, 5)]
    lines = [{"epoch": 0, "bucket_record": {"index": 0, "seconds": 1.0}}]
    lines += [{"epoch": 1, "bucket_record": record} for record in [{"index": 5, "seconds": 9.0}, *records]]
    assert learning_curves([*stats_lines(), *lines])["buckets"] == records
