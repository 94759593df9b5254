"""Projected features: gradients, steps, files, resume, ranking, warm start, new entities and refusals."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import gelu

import dglkge
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import read_dataset_size
from dglkge.data.vector_files import open_encoder, text_vectors, write_vectors
from dglkge.distributed.world import World
from dglkge.errors import CheckpointError, InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.planning.memory import plan_memory
from dglkge.serving.explorer import Explorer
from dglkge.training.building.checks import check_config
from dglkge.training.script import JOB
from dglkge.training.trainer import Trainer
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import flip
from tests.toy_kg import toy_dataset
from tests.training import live
from tests.training.live import ranking, rows_by_node, train

DIM = 8
WIDTHS = {"person": 5, "town": 3}
MISSING = "town3"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write vectors of people and towns, but for one, in an order of their own."""
    folder = tmp_path_factory.mktemp("features")
    dataset = Dataset.open(toy_dataset(typed=True))
    paths = {}
    for name, width in WIDTHS.items():
        random = np.random.default_rng(width)
        names = [entity for entity in sorted(dataset.vocabulary(name).names)[::-1] if entity != MISSING]
        paths[name] = folder / f"{name}.npy"
        np.save(paths[name], random.normal(size=(len(names), width)).astype(np.float32))
        (folder / f"{name}.names.txt").write_text("\n".join(names) + "\n")
    return paths


def vectors_of(files: dict[str, Path], name: str) -> torch.Tensor:
    """Return the vectors of a type by original id, read without the library's code."""
    names = Dataset.open(toy_dataset(typed=True)).vocabulary(name).names
    rows = dict(zip(files[name].with_suffix(".names.txt").read_text().split(), np.load(files[name])))
    return torch.tensor(np.stack([rows.get(entity, np.zeros(WIDTHS[name])) for entity in names])).double()


def settings(files: dict[str, Path], folder: Path, *more: str) -> list[str]:
    pairs = ", ".join(f"{name}={path}" for name, path in files.items())
    usual = ["training.batch_size=20", "optimizer.lr=0.05", "model.score_function=distmult", "dense.lr=0.01"]
    usual += ["training.num_epochs=2", "checkpoint.every_epochs=1", "checkpoint.keep_every_epochs=1"]
    usual += [f"features.files=[{pairs}]"] if files else []
    return live.settings(toy_dataset(typed=True), folder, *usual, *more)


def opened(files: dict[str, Path], folder: Path, *more: str) -> AbstractContextManager[Trainer]:
    return live.opened(load_config(None, settings(files, folder, *more)))


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer._job.dense is not None
    return {name: values.detach().clone() for name, values in trainer._job.dense.module.named_parameters()}


def projected(weights: dict[str, torch.Tensor], name: str, vectors: torch.Tensor, activation=torch.relu):
    rows, number = vectors, 0
    while f"features.{name}.{number}.weight" in weights:
        weight, bias = (weights[f"features.{name}.{number}.{part}"] for part in ("weight", "bias"))
        rows = activation(rows) if number else rows
        rows = rows @ weight.to(rows.dtype).T + bias.to(rows.dtype)
        number += 1
    return rows


MLP = "features.mlp.hidden=[7,6]"


@pytest.mark.parametrize(("objective", "more"), [
    ("one_vs_all", (MLP, "features.mlp.activation=gelu")),
    ("negative_sampling", ()),
    ("negative_sampling", ("features.use=alone",)),
])  # fmt: skip
def test_gradients_and_loss_equal_float64(tmp_path, files, objective, more):
    """DistMult by its formula, autograd in float64 over rows and projections, SGD by its formula."""
    # Every entity of the type is a negative: the same loss without an oracle for the draws.
    negatives = ["negatives.name=all_entities"] if objective == "negative_sampling" else []
    sets = [*more, *negatives, f"training.objective={objective}", "dense.optimizer=SGD"]
    is_alone = "features.use=alone" in more
    with opened(files, tmp_path / "run", *sets, "model.reciprocal_relations=false") as trainer:
        vectors = {name: vectors_of(files, name)[trainer.tables[name].original_ids] for name in files}
        for _ in dglkge.remaining_epochs_until(1):
            for batch in trainer.batches():
                rows = {name: values.double() for name, values in rows_by_node(trainer).items()}
                leaves = {name: part.double().requires_grad_() for name, part in parameters(trainer).items()}
                sums = {name: rows[name] + projected(leaves, name, x, gelu) for name, x in vectors.items()}
                loss = live.loss_against_all(trainer, batch, rows | sums, lambda a, r, side: a * r)
                (loss / batch.global_size).backward()
                assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-5)
                for name, values in parameters(trainer).items():
                    expected = leaves[name].detach() - 0.01 * leaves[name].grad
                    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
                for name in files:
                    # Alone, nothing is trained but the projection.
                    local_rows = trainer.tables[name].local_rows
                    assert torch.equal(local_rows.double(), rows[name]) == is_alone
                    assert not (is_alone and local_rows.any())
        assert batch.index >= 3


@pytest.mark.parametrize("more", [(), (MLP, "features.use=alone", "features.dtype=float16")])
def test_files_resume_ranking_exports_and_conversion(tmp_path, files, more):
    folder = tmp_path / "run"
    state = live.assert_resumes(functools.partial(opened, files), folder, parameters, *more)
    note = json.loads((folder / "features" / "features.json").read_text())
    assert [note["types"][name]["without"] for name in ("person", "town")] == [0, 1]
    with opened(files, folder, *more) as trainer:
        original_ids = {name: table.original_ids.clone() for name, table in trainer.tables.items()}
    checkpoint = open_checkpoint(folder, verify=True)
    checkpoint.verify()
    # A conversion has e + f(x) as rows; a snapshot finds the vectors of its run.
    convert_to_run(checkpoint, Dataset.open(toy_dataset(typed=True)), tmp_path / "converted")
    converted = open_checkpoint(tmp_path / "converted")
    assert converted.features is None and not converted.feature_parameters()
    snapshot = open_checkpoint(folder / "checkpoint" / "epoch_2", verify=True)
    dglkge.open_run(folder).export("npy", tmp_path / "npy")
    for name, ids in original_ids.items():
        expected = state[name].double()
        if name in files:
            x = vectors_of(files, name)
            x = x.half().double() if "features.dtype=float16" in more else x
            expected += projected(state, name, x[ids])
        read = [tables.gather(name, ids) for tables in (checkpoint, converted, snapshot)]
        if name != RELATION:
            read.append(torch.from_numpy(np.load(tmp_path / "npy" / f"{name}.npy"))[ids])
        for rows in read:
            torch.testing.assert_close(rows.double(), expected, rtol=1e-6, atol=1e-6)


def trained(files: dict[str, Path], folder: Path, *more: str) -> Path:
    with opened(files, folder, *more) as trainer:
        train(trainer, 1)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Path:
    return trained(files, tmp_path_factory.mktemp("shared") / "run")


def test_another_run_starts_with_the_rows_as_they_are_scored(tmp_path, files, shared):
    expected = dglkge.open_run(shared).evaluate("test").to_dict()["both"]
    init = f"checkpoint.init_path={shared}"
    for name, sources, more in (("with", files, ()), ("without", {}, ("dense.lr=0.001",))):
        with opened(sources, tmp_path / name, init, *more) as trainer:
            # Without features the rows have the projections in them.
            assert (trainer._job.dense is not None) == bool(sources)
            assert ranking(trainer)["both"] == expected
    with pytest.raises(InputError, match="features.use is 'alone', and 'added' in the checkpoint"):
        with opened(files, tmp_path / "alone", init, "features.use=alone"):
            pass


def test_new_entities(tmp_path: Path, shared: Path, call: Callable) -> None:
    """Ranks and predictions are those of an explicit table; a file's known names are passed over."""
    new, file = tmp_path / "new.npy", tmp_path / "new.tsv"
    vectors = np.random.default_rng(4).normal(size=(3, WIDTHS["person"])).astype(np.float32)
    np.save(new, vectors)
    new.with_suffix(".names.txt").write_text("ada\nperson1\ngrace\n")
    file.write_text("ada\tknows\tperson1\nperson6\tknows\tgrace\nada\tknows\tgrace\n")
    run, names = dglkge.open_run(shared), ["ada", "grace"]
    more, old = run.with_new_entities(names, vectors[[0, 2]], "person"), run.tables["person"]
    x = torch.from_numpy(vectors[[0, 2]]).double()
    rows = projected(run.checkpoint.feature_parameters(), "person", x)
    assert torch.equal(more.tables["person"][names], rows.float())
    table = torch.cat([old[0 : len(old)], rows.float()]).double()
    assert len(more.tables["person"]) == len(table) == len(run.tables["person"]) + 2

    knows = run.dataset.relations.ids_of("knows")[0]
    ada, grace, person1, person6 = more.tables.vocabulary("person").ids([*names, "person1", "person6"])
    triples = np.array([[ada, knows, person1], [person6, knows, grace], [ada, knows, grace]])
    known = np.concatenate([*(run.dataset.split(split) for split in ("train", "valid", "test")), triples])
    for_tails, for_heads = run.tables[RELATION][knows].double().chunk(2)
    ranks = []
    for head, _, tail in triples.tolist():
        for column, answer, anchor, relation in ((0, head, tail, for_heads), (2, tail, head, for_tails)):
            scores = (table * relation * table[anchor]).sum(1)
            is_known = (known[:, 1] == knows) & (known[:, 2 - column] == anchor)
            candidates = np.setdiff1d(np.arange(len(table)), known[is_known, column])
            ranks.append(1 + int((scores[candidates] > scores[answer]).sum()))
    result = more.evaluate(Protocol(split="new"), triples, also_known=[triples]).to_dict()["both"]
    assert result["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert {*names} < set(more.predict_tails("ada", "knows", k=len(table))["entity"])
    assert more.similar("ada", k=3)["entity"].nunique() == 3
    with pytest.raises(InputError, match="'ada'"):
        run.predict_tails("ada", "knows")

    options = ["--features", f"person={new}", "--json"]
    report = json.loads(call("evaluate", shared, "--triples", file, *options)[1])
    assert report["new_entities"] == {"person": 2} and report["both"] == result
    assert (shared / "metrics-triples-new-with-features.json").is_file()
    query = ["predict", shared, "--head", "ada", "--relation", "knows"]
    answers = json.loads(call(*query, *options)[1])["answers"]
    assert [answer["name"] for answer in answers] == more.predict_tails("ada", "knows")["entity"].tolist()
    assert len(json.loads(call("score", shared, "--input", file, *options)[1])) == 3
    for words, features in (
        ("unknown entity type 'people'", f"people={new}"),
        ("nowhere.npy: there is no such file", "person=nowhere.npy"),
    ):
        status, printed, refusal = call(*query, "--features", features)
        assert (status, printed, refusal.count("\n")) == (2, "", 1) and words in refusal


def test_new_entities_from_texts(tmp_path: Path, call: Callable) -> None:
    pytest.importorskip("sklearn")
    names = Dataset.open(toy_dataset(typed=True)).vocabulary("person").names
    texts = {name: f"number {place} of group {place % 4}" for place, name in enumerate(names)}
    vectors, text = tmp_path / "vectors.parquet", "one more of group 3"
    write_vectors(vectors, texts, text_vectors(texts, 6), 6)
    trained({"person": vectors}, tmp_path / "run")
    run = dglkge.open_run(tmp_path / "run")
    expected = run.with_new_entities(["Ann"], open_encoder(vectors)([text]), "person")
    extended = run.with_new_texts({"Ann": text})
    assert torch.equal(extended.tables["person"]["Ann"], expected.tables["person"]["Ann"])
    runs = [run.with_rules().with_new_texts({"Ann": text}), expected.with_rules(), expected]
    scores = [other.predict_heads("knows", "person1", k=50)["score"].tolist() for other in runs]
    assert scores[0] == scores[1] != scores[2]
    tails = expected.predict_tails("Ann", "lives_in", k=3)["entity"].tolist()
    words = ["predict", tmp_path / "run", "--head", "Ann", "--relation", "lives_in", "-k", "3", "--json"]
    answers = json.loads(call(*words, "--about", f"Ann={text}")[1])["answers"]
    assert [answer["name"] for answer in answers] == tails
    queries = [{"head": "Ann", "relation": "lives_in", "tail": None}]
    answer = Explorer(run).unseen("Ann", text=text, queries=queries, k=3)
    assert [match["tail"] for match in answer["results"][0]["answers"]] == tails
    assert answer["type"] == "person"
    assert [match["name"] for match in answer["similar"]] == expected.similar("Ann", 3)["entity"].tolist()
    for about, refusal in (
        (["Ann=one", "Bob"], "--about 'Bob' is not of the form NAME=TEXT"),
        (["Ann=unheard"], "the text about 'Ann' has no word"),
    ):
        status, _, printed = call(*words, *(word for entry in about for word in ("--about", entry)))
        assert status == 2 and refusal in printed
    facts = pd.DataFrame([("Bea", "knows", names[0])], columns=["head", "relation", "tail"])
    both = run.add_entities(facts).with_new_texts({"Ann": text})
    assert both.predict_tails("Bea", "knows", k=len(names) + 2)["known_from"].dropna().tolist() == ["added"]
    assert torch.equal(both.tables["person"]["Ann"], expected.tables["person"]["Ann"])
    vectors.unlink()
    with pytest.raises(InputError, match="cannot read .*vectors.parquet"):
        dglkge.open_run(tmp_path / "run").with_new_texts({"Ann": text})


@pytest.mark.parametrize(("names", "shape", "entity_type", "words"), [
    (["a", "a"], (2, 5), "person", "the new entity 'a' of type 'person' is there already"),
    (["person1"], (1, 5), "person", "the new entity 'person1' of type 'person' is there already"),
    (["a"], (1, 4), "person", r"have shape \(1, 4\), expected \(1, 5\)"),
    (["a"], (1, 5), "country", "unknown entity type with features 'country'"),
    (["a"], (1, 5), "relation", "unknown entity type 'relation'"),
    (["a"], (1, 5), "", "give the type of the new entities: person, town"),
])  # fmt: skip
def test_new_entities_that_are_refused(shared, names, shape, entity_type, words):
    with pytest.raises(InputError, match=words):
        dglkge.open_run(shared).with_new_entities(names, np.zeros(shape, np.float32), entity_type or None)


def test_a_copy_that_trained_nothing_is_made_again(tmp_path: Path, files: dict[str, Path]) -> None:
    """A folder without a checkpoint takes the files of now; one with a checkpoint needs none."""
    folder, source = tmp_path / "run", tmp_path / "person.npy"
    names = files["person"].with_suffix(".names.txt").read_text()
    source.with_suffix(".names.txt").write_text(names)
    for value in (1.0, 2.0):
        np.save(source, np.full((40, 2), value))
        with opened({"person": source}, folder) as trainer:
            if value == 2.0:
                train(trainer, 1)
    source.unlink()
    with opened({"person": source}, folder):
        pass
    assert np.load(folder / "features" / "person.npy").min() == 2
    # Another file than the one that the checkpoint was trained with.
    np.save(source, np.full((40, 2), 3.0))
    (folder / "features" / "features.json").unlink()
    with pytest.raises(CheckpointError, match="was trained with other features"):
        with opened({"person": source}, folder):
            pass
    JOB.restore(0)


def test_damaged_and_missing_vectors(tmp_path: Path, shared: Path) -> None:
    folder = Path(shutil.copytree(shared, tmp_path / "run"))
    path = folder / "features" / "town.npy"
    flip(path, -1)
    with pytest.raises(CheckpointError, match="town.npy is damaged"):
        dglkge.open_run(folder).tables["town"]
    with pytest.raises(CheckpointError, match="town.npy is damaged"):
        open_checkpoint(folder).verify()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read .*town.npy as an npy file"):
        dglkge.open_run(folder).tables["town"]


def test_a_run_goes_on_from_a_url(tmp_path, files, monkeypatch):
    """Another machine, without the source files: vectors come from the URL, and the tables are the same."""
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket, sources = tmp_path / "bucket", tmp_path / "sources"
    shutil.copytree(files["person"].parent, sources)
    files = {name: sources / path.name for name, path in files.items()}
    with opened(files, tmp_path / "alone") as trainer:
        train(trainer, 2)
        expected = {**rows_by_node(trainer), **parameters(trainer)}
    url = f"file://{bucket}"
    with opened(files, tmp_path / "first", f"checkpoint.storage={url}") as trainer:
        train(trainer, 1)
    array = bucket / "features" / "town.npy"
    uploaded = array.stat()
    shutil.rmtree(sources)
    with opened(files, tmp_path / "second", f"checkpoint.storage={url}") as trainer:
        train(trainer, 2)
        live.assert_same_tables({**rows_by_node(trainer), **parameters(trainer)}, expected)
    # Uploaded once: the versions share the file.
    assert array.stat().st_mtime_ns == uploaded.st_mtime_ns and array.stat().st_ino == uploaded.st_ino
    by_url, alone = dglkge.open_run(url).tables["town"], dglkge.open_run(tmp_path / "alone").tables["town"]
    assert torch.equal(by_url[:], alone[:])
    shutil.rmtree(tmp_path / ".cache")
    flip(array, -1)
    with pytest.raises(CheckpointError, match="bucket/features/town.npy is damaged: its checksum is not the"):
        dglkge.open_run(url)
    array.unlink()
    with pytest.raises(CheckpointError, match="bucket/features/town.npy is missing"):
        dglkge.open_run(url)
    array.with_name("features.json").write_text("{}")
    with pytest.raises(CheckpointError, match="bucket/features/features.json is damaged: KeyError"):
        dglkge.open_run(url)


@pytest.mark.parametrize(("sets", "words"), [
    (["features.files=[planet=x.npy]"], "unknown entity type 'planet'"),
    (["features.files=[person=nowhere.npy]"], "cannot read nowhere.npy: there is no such file"),
    (["features.files=[PEOPLE, person=PEOPLE]"], "for the entity type 'person'; allowed: one"),
    (["features.files=[town=PEOPLE]"], "no name is an entity's of type town"),
])  # fmt: skip
def test_refusals(tmp_path: Path, files: dict[str, Path], sets: list[str], words: str) -> None:
    filled = [setting.replace("PEOPLE", str(files["person"])) for setting in sets]
    with pytest.raises(InputError, match=words) as caught:
        config = load_config(None, settings(files, tmp_path / "run", *filled))
        check_config(config, World())
        with live.opened(config):
            pass
    assert "\n" not in str(caught.value)


def test_the_plan_counts_the_vectors(tmp_path: Path, files: dict[str, Path]) -> None:
    size = read_dataset_size(toy_dataset(typed=True))
    sizes = {}
    for dtype in ("float32", "float16"):
        config = load_config(None, settings(files, tmp_path, f"features.dtype={dtype}"))
        (host,) = plan_memory(config, size, 2, 1)
        sizes[dtype] = dict(host.memory)["features, mapped files"]
    assert sizes["float32"] == 4 * (40 * WIDTHS["person"] + 10 * WIDTHS["town"]) == 2 * sizes["float16"]
