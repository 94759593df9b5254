"""Score functions go all the way: a job of two trainers learns, its files rank alike, answer and resume.

One of each kind of query: matrices of relations, queries that scale candidates, queries that hold matrices.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional import job as commands
from tests.functional.results import metrics
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=24", "negatives.num_uniform=20", "negatives.chunk_size=16", "training.batch_size=48"),
    "evaluation.split=train",
)

LEARNT_MRR = 0.6
"""Of the training triples, which rows that nothing was trained on rank with .13 to .18."""

SMALL_STEPS = ("model.init_scale=0.1", "optimizer.lr=0.03")

CASES = {
    "rescal": (),
    "pairre": SMALL_STEPS,
    "transr_l1": ("model.reciprocal_relations=false",),
}


@pytest.mark.parametrize("score_function", CASES)
def test_training_evaluation_prediction_and_resume(score_function: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (
        f"dataset={toy_dataset(typed=True)}",
        f"output={run}",
        f"model.score_function={score_function}",
        *SETTINGS,
        *CASES[score_function],
    )
    done = commands.train(tmp_path, 2, *settings, "training.num_epochs=30")
    live = metrics(run, "train")["both"]["mrr"]
    assert live > LEARNT_MRR
    done = commands.dglkge("evaluate", str(run), "--split", "train", "--json")
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(live, abs=1e-6)
    asked = ("--head", "town4", "--relation", "lies_in", "--topk", "3", "--known", "keep", "--json")
    done = commands.dglkge("predict", str(run), *asked)
    assert len(json.loads(done.stdout)["answers"]) == 3
    # One process goes on from the files of two.
    done = commands.train_alone(*settings, "training.num_epochs=31")
    assert "resumed: 30 epochs and 0 batches done" in done.stderr
