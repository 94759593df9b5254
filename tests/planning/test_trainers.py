"""How many trainers share the cores of a machine."""

from __future__ import annotations

import pytest

from dglkge.config import load_config
from dglkge.data.dataset_files import DatasetSize, PartSize
from dglkge.planning.trainers import most_trainers


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["training.batch_size=1000"], 2),
        (["training.batch_size=100"], 2),
        (["training.batch_size=1500", "negatives.chunk_size=1500"], 3),
        (["training.batch_size=1000", "negatives.chunk_size=150"], 7),
        (["training.batch_size=10000", "negatives.chunk_size=50"], 8),
        (["training.batch_size=1000", "model.score_function=transe_l1"], 8),
        (["training.batch_size=1000", "training.kernels=reference"], 8),
        (["training.batch_size=1000", "training.objective=one_vs_all"], 8),
    ],
    ids=str,
)
def test_trainers_of_a_batch(settings: list[str], expected: int) -> None:
    config = load_config(None, ["dataset=x", "negatives.chunk_size=1000", *settings])
    one = PartSize({"entity": 50, "relation": 2}, 500)
    assert most_trainers(config, DatasetSize((one,), 2, {"train": 1000})) == expected


def test_a_batch_is_shared_by_the_machines_and_typed_graphs_have_a_trainer_a_core() -> None:
    config = load_config(None, ["dataset=x", "training.batch_size=6000", "negatives.chunk_size=1000"])
    one, typed = PartSize({"a": 50, "relation": 2}, 500), PartSize({"a": 5, "b": 5, "relation": 2}, 500)
    numbers = [most_trainers(config, DatasetSize((part,) * 2, 2, {"train": 1})) for part in (one, typed)]
    assert numbers == [6, 8]
