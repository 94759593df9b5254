"""A run opened on its files, with and without its data set."""

from __future__ import annotations

import pytest

from dglkge import open_run
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.choices import SEEN, Known
from dglkge.typing import RELATION


def test_without_its_data_set_nothing_is_marked(folder, caplog):
    run = open_run(folder, dataset="/nowhere")
    for question in ({}, {"known": Known.KEEP, "candidates": SEEN}):
        with pytest.raises(InputError, match="/nowhere is no dataset folder"):
            run.predict_tails("person1", "knows", **question)
    assert run.predict_tails("person1", "knows", known=Known.KEEP)["known_from"].isna().all()


def test_one_data_set_is_opened_once(folder, dataset, monkeypatch):
    opened = []
    real = Dataset.open
    monkeypatch.setattr(Dataset, "open", lambda path: opened.append(path) or real(path))
    run = open_run(folder)
    run.predict_tails("person1", "knows")
    run.predict_tails("person2", "knows")
    run.evaluate(Protocol(split="valid"))
    assert opened == [dataset.path]


def test_a_checkpoint_folder_and_its_run_are_the_same(folder):
    for path in (folder, str(folder / "checkpoint")):
        run = open_run(path)
        assert (run.checkpoint.run_folder, run.tables_in_order) == (
            folder,
            ["country", "person", "town", RELATION],
        )
