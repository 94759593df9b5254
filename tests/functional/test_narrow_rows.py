"""Jobs whose entities' rows are stored in 16 bits: they learn, resume bit by bit, and share memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from tests.functional import job as commands
from tests.functional.results import assert_near as assert_equal
from tests.functional.results import datasets, losses, metrics, tables
from tests.functional.simulated_hosts import CHECKED_TRAIN, train_on_hosts
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "negatives.num_uniform=20", "negatives.chunk_size=25"),
    *("training.batch_size=50", "training.matmul_dtype=float32", "tables.dtype=bfloat16"),
)


def settings(output: Path, *more: str) -> tuple[str, ...]:
    return (f"dataset={toy_dataset()}", f"output={output}", *SETTINGS, *more)


def rows(run: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in tables(run).items()}


def fits(values: torch.Tensor) -> bool:
    """Return whether every number has 16 bits."""
    return torch.equal(values, values.to(torch.bfloat16).float())


def assert_near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Hold two runs equal but for sums in another order, which may turn the rounding of a few numbers.

    Such a number is off by a unit in the last place, 2**-7 of it, and what is trained after it by as little.
    """
    assert float((left["entity"] == right["entity"]).float().mean()) > 0.9
    for name, values in left.items():
        torch.testing.assert_close(values, right[name], rtol=0.02, atol=0.002, msg=name)


def test_a_killed_job_goes_on_bit_by_bit(tmp_path: Path) -> None:
    printed = commands.kill_and_resume(tmp_path, settings)
    assert ["resumed: " in text for text in printed] == [True, False]
    whole = rows(tmp_path / "whole")
    assert_equal(datasets(tmp_path / "killed"), datasets(tmp_path / "whole"), 0, 0)
    assert fits(whole["entity"]) and not fits(whole["relation"])
    reported = losses(tmp_path / "whole")
    assert reported[-1] < reported[0]
    # The live tables were ranked, and these are the files.
    done = commands.dglkge("evaluate", str(tmp_path / "whole"), "--json")
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(tmp_path / "whole")["both"]["mrr"])
    # The random bits do not depend on the number of trainers.
    epochs = open_checkpoint(tmp_path / "whole").meta.progress["finished_epochs"]
    commands.train_alone(*settings(tmp_path / "alone", f"training.num_epochs={epochs}"))
    alone = rows(tmp_path / "alone")
    assert_near(alone, whole)


def test_two_hosts_send_rows_as_they_are_stored(tmp_path: Path) -> None:
    """The script compares every row that the exchange brings with DGL's kvstore, also in 16 bits."""
    more = ("training.num_epochs=3", "evaluation.split=test", "sampling.order=global")
    dataset = toy_dataset(2, method="random")
    logs = train_on_hosts(
        tmp_path / "job", dataset, 1, f"output={tmp_path / 'hosts'}", *SETTINGS, *more, script=CHECKED_TRAIN
    )
    assert all(re.search(r"compared \d{3,} rows", log) for log in logs), logs
    commands.train_alone(*settings(tmp_path / "alone", *more))
    hosts, alone = rows(tmp_path / "hosts"), rows(tmp_path / "alone")
    assert fits(hosts["entity"]) and fits(alone["entity"])
    assert_near(alone, hosts)
    assert losses(tmp_path / "hosts") == pytest.approx(losses(tmp_path / "alone"), rel=0.02)
