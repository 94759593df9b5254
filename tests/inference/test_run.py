"""A run opened on its files: names, known answers, and folders of other programs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dglkge import open_run
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.choices import Known
from dglkge.typing import RELATION


def test_without_its_data_set_nothing_is_marked(folder, caplog):
    run = open_run(folder, dataset="/nowhere")
    with pytest.raises(InputError, match="/nowhere is no dataset folder"):
        run.predict_tails("person1", "knows")
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


def write_dglke(folder, config, **tables):
    folder.mkdir()
    for table, rows in tables.items():
        np.save(folder / f"mine_{config.get('model_name', 'DistMult')}_{table}.npy", rows)
    if config:
        (folder / "config.json").write_text(json.dumps({"dataset": "mine", **config}))
    (folder / "entities.tsv").write_text("".join(f"{id_}\te{id_}\n" for id_ in range(len(tables["entity"]))))
    (folder / "relations.tsv").write_text(
        "".join(f"{id_}\tr{id_}\n" for id_ in range(len(tables["relation"])))
    )
    return folder


def test_a_folder_of_dglke(tmp_path, caplog):
    """RotatE's score by its formula, with DGL-KE's scale of the phases."""
    rng = np.random.default_rng(0)
    entities = rng.normal(size=(20, 8)).astype(np.float32)
    relations = rng.normal(size=(3, 4)).astype(np.float32)
    config = {"model_name": "RotatE", "gamma": 12.0, "hidden_dim": 4}
    run = open_run(write_dglke(tmp_path / "theirs", config, entity=entities, relation=relations))
    frame = run.predict_tails("e3", "r1", k=20)
    points = entities[:, :4] + 1j * entities[:, 4:]
    turned = points[3] * np.exp(1j * relations[1] / ((12.0 + 2.0) / 4 / np.pi))
    wanted = -np.abs(turned - points).sum(1)
    assert frame["entity"].tolist() == [f"e{id_}" for id_ in np.argsort(-wanted)]
    assert frame["score"].tolist() == pytest.approx(np.sort(wanted)[::-1].tolist(), rel=1e-5)
    assert frame["known_from"].isna().all()
    assert "was written by DGL-KE, with ids of its own; to use it with a data set: dglkge checkpoint" in (
        caplog.text
    )
    cosines = torch.nn.functional.cosine_similarity(
        torch.from_numpy(entities), torch.from_numpy(entities[3:4])
    )
    cosines[3] = -2
    assert run.similar("e3", k=1)["entity"].tolist() == [f"e{int(cosines.argmax())}"]
    (written,) = [path for path in run.export("npy", tmp_path / "out", ["entity"]) if path.suffix == ".npy"]
    assert np.array_equal(np.load(written), entities)


def test_what_a_folder_of_dglke_does_not_have(tmp_path):
    rows = {"entity": np.zeros((4, 6), np.float32), "relation": np.zeros((2, 6), np.float32)}
    run = open_run(write_dglke(tmp_path / "theirs", {"model_name": "DistMult"}, **rows), dataset="data/mine")
    words = (
        rf"dglkge checkpoint convert {tmp_path}/theirs --from dglke --to run --dataset data/mine --output "
        rf"{tmp_path}/theirs_converted"
    )
    for ask in (run.inspect, lambda: run.evaluate(Protocol())):
        with pytest.raises(InputError, match=words):
            ask()
    with pytest.raises(InputError, match="unknown table 'person'; known: 'entity', 'relation'"):
        run.nearest("e1", "person")
    narrow = {**rows, "relation": np.zeros((2, 5), np.float32)}
    with pytest.raises(
        InputError, match="rows of relations have 5 numbers, distmult with entities of 6 needs 6"
    ):
        open_run(write_dglke(tmp_path / "narrow", {"model_name": "DistMult"}, **narrow))
