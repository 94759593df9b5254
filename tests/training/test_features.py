"""Projected features: gradients, steps, files, resume, ranking, warm start, new entities and refusals."""

from __future__ import annotations

import functools
import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.checkpoint import open_checkpoint
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.cli.main import main
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import read_dataset_size
from dglkge.data.vector_files import open_encoder, text_vectors, write_vectors
from dglkge.distributed.world import World
from dglkge.errors import CheckpointError, InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.model.dense_modules import ProjectedFeatures
from dglkge.planning.memory import plan_memory
from dglkge.serving.explorer import Explorer
from dglkge.training.building.checks import check_config
from dglkge.training.script import JOB
from dglkge.training.trainer import Trainer
from dglkge.typing import RELATION
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
    return [
        *(f"dataset={toy_dataset(typed=True)}", f"output={folder}", f"model.dimension={DIM}"),
        *([f"features.files=[{pairs}]"] if files else []),
        *("regularizer.name=none", "model.init_scale=0.3", "training.batch_size=20", "optimizer.lr=0.05"),
        *("model.score_function=distmult", "dense.lr=0.01", "training.matmul_dtype=float32", *more),
    ]


def opened(files: dict[str, Path], folder: Path, *more: str) -> AbstractContextManager[Trainer]:
    return live.opened(load_config(None, settings(files, folder, *more)))


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer._job.dense is not None
    return {name: values.detach().clone() for name, values in trainer._job.dense.module.named_parameters()}


def projected(
    weights: dict[str, torch.Tensor], name: str, vectors: torch.Tensor, activation: str = ""
) -> torch.Tensor:
    """Compute f(x) by its formula."""
    rows, number = vectors, 0
    while f"features.{name}.{number}.weight" in weights:
        if number:
            rows = torch.relu(rows) if activation == "relu" else torch.nn.functional.gelu(rows)
        weight, bias = (weights[f"features.{name}.{number}.{part}"] for part in ("weight", "bias"))
        rows = rows @ weight.to(rows.dtype).T + bias.to(rows.dtype)
        number += 1
    return rows


MLP = ("features.mlp.hidden=[7,6]", "features.mlp.activation=gelu")


@pytest.mark.parametrize(
    ("objective", "more"),
    [("one_vs_all", MLP), ("negative_sampling", ()), ("negative_sampling", ("features.use=alone",))],
)
def test_gradients_and_loss_equal_float64(tmp_path, files, objective, more):
    """DistMult by its formula, autograd in float64 over rows and projections, SGD by its formula."""
    sets = (
        *more,
        f"training.objective={objective}",
        "dense.optimizer=SGD",
        "model.reciprocal_relations=false",
    )
    if objective == "negative_sampling":
        # Every entity of the type is a negative: the same loss without an oracle for the draws.
        sets = (*sets, "negatives.name=all_entities")
    with opened(files, tmp_path / "run", *sets) as trainer:
        num_steps = 0
        for _ in dglkge.remaining_epochs_until(1):
            for batch in trainer.batches():
                rows = {name: values.double() for name, values in rows_by_node(trainer).items()}
                before = parameters(trainer)
                leaves = {name: values.double().requires_grad_() for name, values in before.items()}
                full = dict(rows)
                for name in files:
                    x = vectors_of(files, name)[trainer.tables[name].original_ids]
                    full[name] = rows[name] + projected(leaves, name, x)
                loss = live.loss_against_all(trainer, batch, full, lambda anchors, r, side: anchors * r)
                (loss / batch.global_size).backward()
                assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-5)
                for name, now in parameters(trainer).items():
                    gradient = leaves[name].grad
                    assert gradient is not None
                    expected = leaves[name].detach() - 0.01 * gradient
                    torch.testing.assert_close(now.double(), expected, rtol=1e-5, atol=1e-6)
                for name in files:
                    # Alone, nothing is trained but the projection.
                    changed = not torch.equal(trainer.tables[name].local_rows.double(), rows[name])
                    assert changed != ("features.use=alone" in more)
                num_steps += 1
        assert num_steps > 3
        if "features.use=alone" in more:
            assert not any(trainer.tables[name].local_rows.any() for name in files)


@pytest.mark.parametrize("objective", ["one_vs_all", "k_vs_all"])
def test_all_candidates_are_projected_once_a_batch(tmp_path, files, objective, monkeypatch):
    """Also where queries of both sides have them as candidates, and the regularizer takes the answers."""
    sizes: dict[str, list[int]] = {name: [] for name in files}
    rows = ProjectedFeatures.rows

    def noted(self: ProjectedFeatures, name: str, ids: torch.Tensor) -> torch.Tensor:
        sizes[name].append(len(ids))
        return rows(self, name, ids)

    more = ("regularizer.name=n3", "regularizer.weight=0.1", f"training.objective={objective}")
    with opened(files, tmp_path / "run", *more) as trainer:
        monkeypatch.setattr(ProjectedFeatures, "rows", noted)
        num_batches = len(trainer._edge_batches)
        train(trainer, 1)
        for name, counts in sizes.items():
            assert 0 < counts.count(len(trainer.tables[name])) <= num_batches


@pytest.mark.parametrize("more", [(), (*MLP, "features.use=alone", "features.dtype=float16")])
def test_files_resume_and_ranking(tmp_path: Path, files: dict[str, Path], more: tuple[str, ...]) -> None:
    sets = (*more, "negatives.num_uniform=12", "training.num_epochs=2")
    folder = tmp_path / "run"

    def look_at_files(half_way: dict[str, torch.Tensor]) -> None:
        with h5py.File(folder / "checkpoint" / "v1" / "model.v1.h5") as file:
            for name in (path for path in half_way if path.startswith("features.")):
                assert np.array_equal(file[f"dense/parameters/{name}"][...], half_way[name].numpy())

    rows = live.assert_resumes(
        functools.partial(opened, files), folder, parameters, *sets, after_one=look_at_files
    )
    weights = {name: rows.pop(name) for name in [path for path in rows if path.startswith("features.")]}
    note = json.loads((folder / "features" / "features.json").read_text())
    assert note["types"]["town"]["without"] == 1 and note["types"]["person"]["without"] == 0
    with opened(files, folder, *sets) as trainer:
        original = {name: table.original_ids.clone() for name, table in trainer.tables.items()}
    checkpoint = open_checkpoint(folder, verify=True)
    checkpoint.verify()
    for name in rows:
        expected = rows[name].double()
        if name in files:
            x = vectors_of(files, name)
            x = x.half().double() if "features.dtype=float16" in more else x
            expected = expected + projected(weights, name, x[original[name]], "gelu")
        torch.testing.assert_close(
            checkpoint.gather(name, original[name]).double(), expected, rtol=1e-6, atol=1e-6
        )


def trained(files: dict[str, Path], folder: Path, *more: str) -> Path:
    with opened(files, folder, "training.num_epochs=1", "negatives.num_uniform=12", *more) as trainer:
        train(trainer, 1)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Path:
    return trained(files, tmp_path_factory.mktemp("shared") / "run")


def test_another_run_starts_with_the_rows_as_they_are_scored(tmp_path, files, shared):
    run = shared
    expected = dglkge.open_run(run).evaluate("test").to_dict()["both"]
    init = f"checkpoint.init_path={run}"
    for name, sources in (("with", files), ("without", {})):
        more = () if sources else ("dense.lr=0.001",)
        with opened(sources, tmp_path / name, init, *more) as trainer:
            # Without features the rows have the projections in them.
            assert (trainer._job.dense is not None) == bool(sources)
            assert ranking(trainer)["both"] == expected
    with pytest.raises(InputError, match="features.use is 'alone', and 'added' in the checkpoint"):
        with opened(files, tmp_path / "alone", init, "features.use=alone"):
            pass


def test_converted_and_snapshot(tmp_path: Path, files: dict[str, Path]) -> None:
    """A conversion has e + f(x) as rows; a snapshot finds the vectors of its run."""
    run = trained(files, tmp_path / "run", "checkpoint.keep_every_epochs=1", "features.use=alone")
    expected = open_checkpoint(run)
    dataset = Dataset.open(toy_dataset(typed=True))
    convert_to_run(expected, dataset, tmp_path / "converted")
    converted = open_checkpoint(tmp_path / "converted")
    assert converted.features is None and not converted.feature_parameters()
    snapshot = open_checkpoint(run / "checkpoint" / "epoch_1", verify=True)
    assert snapshot.features is not None
    for name in ("person", "town", "country"):
        ids = torch.arange(len(expected[name]))
        torch.testing.assert_close(
            converted.gather(name, ids), expected.gather(name, ids), rtol=1e-6, atol=1e-7
        )
        assert torch.equal(snapshot.gather(name, ids), expected.gather(name, ids))


def test_new_entities(shared: Path) -> None:
    """Ranks and predictions among old and new entities equal those of an explicit table."""
    run = dglkge.open_run(shared)
    vectors = np.random.default_rng(9).normal(size=(4, WIDTHS["person"])).astype(np.float32)
    names = [f"newcomer{number}" for number in range(4)]
    more = run.with_new_entities(names, vectors, "person")
    old = run.tables["person"]
    assert len(more.tables["person"]) == len(old) + 4 and len(run.tables["person"]) == len(old)
    parameters = run.checkpoint.feature_parameters()
    rows = projected(parameters, "person", torch.from_numpy(vectors).double()).float()
    assert torch.equal(more.tables["person"][names], rows)
    table = torch.cat([old[0 : len(old)], rows])
    # The best friends of a newcomer, and a triple between two of them.
    relations = run.dataset.relations
    knows = relations.ids_of("knows")[0]
    triples = np.array([[len(old) + 1, knows, 5], [6, knows, len(old) + 2]])
    known = np.concatenate([*(run.dataset.split(split) for split in ("train", "valid", "test")), triples])
    result = more.evaluate(Protocol(split="new"), triples, also_known=[triples])
    relation = run.tables[RELATION][knows].double()
    halves = relation.chunk(2)  # reciprocal: tails by the first half, heads by the second
    ranks = []
    for head, _, tail in triples.tolist():
        for anchor, answer, half, column in ((tail, head, halves[1], 0), (head, tail, halves[0], 2)):
            scores = (table.double() * half * table[anchor].double()).sum(1)
            same = known[(known[:, 1] == knows) & (known[:, 2 - column] == anchor)][:, column]
            candidates = np.setdiff1d(np.arange(len(table)), same)
            ranks.append(1 + int((scores[candidates] > scores[answer]).sum()))
    assert result.to_dict()["both"]["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
    predicted = more.predict_tails("newcomer1", "knows", k=len(table))
    assert set(names) < set(predicted["entity"])
    with pytest.raises(InputError, match="'newcomer1'"):
        run.predict_tails("newcomer1", "knows")
    assert more.similar("newcomer1", k=3)["entity"].nunique() == 3


def test_new_entities_from_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By Python, the command and REST: the rows of vectors that are encoded as the trained ones."""
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
    with_rules = [run.with_rules().with_new_texts({"Ann": text}), expected.with_rules()]
    scores = [ruled.predict_heads("knows", "person1", k=50)["score"].tolist() for ruled in with_rules]
    assert scores[0] == scores[1] != expected.predict_heads("knows", "person1", k=50)["score"].tolist()
    tails = expected.predict_tails("Ann", "lives_in", k=3)["entity"].tolist()
    words = ["predict", str(tmp_path / "run"), "--head", "Ann", "--relation", "lives_in", "-k", "3", "--json"]
    assert main([*words, "--about", f"Ann={text}"]) == 0
    assert [answer["name"] for answer in json.loads(capsys.readouterr().out)["answers"]] == tails
    answer = Explorer(run).unseen(
        "Ann", text=text, queries=[{"head": "Ann", "relation": "lives_in", "tail": None}], k=3
    )
    assert [match["tail"] for match in answer["results"][0]["answers"]] == tails
    assert answer["type"] == "person"
    assert [match["name"] for match in answer["similar"]] == expected.similar("Ann", 3)["entity"].tolist()
    for about, refusal in (
        (["Ann=one", "Bob"], "--about 'Bob' is not of the form NAME=TEXT"),
        (["=one"], "--about '=one' is not of the form NAME=TEXT"),
        (["Ann=one", "Ann=more"], "--about gives the entity 'Ann' twice"),
        (["Ann=unheard"], "the text about 'Ann' has no word"),
    ):
        assert main([*words, *(part for entry in about for part in ("--about", entry))]) == 2
        assert refusal in capsys.readouterr().err
    facts = pd.DataFrame([("Bea", "knows", names[0])], columns=["head", "relation", "tail"])
    both = run.add_entities(facts).with_new_texts({"Ann": text})
    assert both.predict_tails("Bea", "knows", k=len(names) + 2)["known_from"].dropna().tolist() == ["added"]
    assert torch.equal(both.tables["person"]["Ann"], expected.tables["person"]["Ann"])
    vectors.unlink()
    with pytest.raises(InputError, match="cannot read .*vectors.parquet"):
        dglkge.open_run(tmp_path / "run").with_new_texts({"Ann": text})


@pytest.mark.parametrize(
    ("names", "shape", "entity_type", "words"),
    [
        (["a", "a"], (2, 5), "person", "the new entity 'a' of type 'person' is there already"),
        (["person1"], (1, 5), "person", "the new entity 'person1' of type 'person' is there already"),
        (["a"], (1, 4), "person", r"have shape \(1, 4\), expected \(1, 5\)"),
        (["a"], (1, 5), "country", "unknown entity type with features 'country'"),
        (["a"], (1, 5), "", "give the type of the new entities: person, town"),
        (["a"], (1, 5), "persons", "'persons'"),
    ],
)
def test_new_entities_that_are_refused(shared, names, shape, entity_type, words):
    with pytest.raises(InputError, match=words):
        dglkge.open_run(shared).with_new_entities(names, np.zeros(shape, np.float32), entity_type or None)


def test_a_copy_that_trained_nothing_is_made_again(tmp_path: Path, files: dict[str, Path]) -> None:
    """A folder without a checkpoint takes the files of now; one with a checkpoint needs none."""
    folder, source = tmp_path / "run", tmp_path / "person.npy"
    names = files["person"].with_suffix(".names.txt").read_text()
    source.with_suffix(".names.txt").write_text(names)
    sets = ("training.num_epochs=2", "negatives.num_uniform=12")
    for value in (1.0, 2.0):
        np.save(source, np.full((40, 2), value))
        with opened({"person": source}, folder, *sets) as trainer:
            if value == 2.0:
                train(trainer, 1)
    source.unlink()
    with opened({"person": source}, folder, *sets):
        pass
    assert np.load(folder / "features" / "person.npy").min() == 2
    # Another file than the one that the checkpoint was trained with.
    np.save(source, np.full((40, 2), 3.0))
    (folder / "features" / "features.json").unlink()
    with pytest.raises(CheckpointError, match="was trained with other features"):
        with opened({"person": source}, folder, *sets):
            pass
    JOB.restore(0)


def test_damaged_and_missing_vectors(tmp_path: Path, shared: Path) -> None:
    folder = Path(shutil.copytree(shared, tmp_path / "run"))
    path = folder / "features" / "town.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="town.npy is damaged"):
        dglkge.open_run(folder).tables["town"]
    with pytest.raises(CheckpointError, match="town.npy is damaged"):
        open_checkpoint(folder).verify()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read the features .*town.npy"):
        dglkge.open_run(folder).tables["town"]


def test_a_run_goes_on_from_a_url(tmp_path, files, monkeypatch):
    """Another machine, without the source files: vectors come from the URL, and the tables are the same."""
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket, sources = tmp_path / "bucket", tmp_path / "sources"
    shutil.copytree(files["person"].parent, sources)
    files = {name: sources / path.name for name, path in files.items()}
    sets, url = ("training.num_epochs=2", "negatives.num_uniform=12"), f"file://{bucket}"
    with opened(files, tmp_path / "alone", *sets) as trainer:
        train(trainer, 2)
        expected = rows_by_node(trainer), parameters(trainer)
    stored = f"checkpoint.storage={url}"
    with opened(files, tmp_path / "first", *sets, stored) as trainer:
        train(trainer, 1)
    array = bucket / "features" / "town.npy"
    uploaded = array.stat()
    shutil.rmtree(sources)
    with opened(files, tmp_path / "second", *sets, stored) as trainer:
        train(trainer, 2)
        got = rows_by_node(trainer), parameters(trainer)
    for part, other in zip(expected, got, strict=True):
        assert part.keys() == other.keys()
        assert all(torch.equal(rows, other[name]) for name, rows in part.items())
    # Uploaded once: the versions share the file.
    assert array.stat().st_mtime_ns == uploaded.st_mtime_ns and array.stat().st_ino == uploaded.st_ino
    by_url, alone = dglkge.open_run(url).tables["town"], dglkge.open_run(tmp_path / "alone").tables["town"]
    assert torch.equal(by_url[:], alone[:])
    shutil.rmtree(tmp_path / ".cache")
    whole = array.read_bytes()
    array.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="bucket/features/town.npy is damaged: its checksum is not the"):
        dglkge.open_run(url)
    array.unlink()
    with pytest.raises(CheckpointError, match="bucket/features/town.npy is missing"):
        dglkge.open_run(url)
    note = array.with_name("features.json")
    note.write_text("{}")
    with pytest.raises(CheckpointError, match="bucket/features/features.json is damaged: KeyError"):
        dglkge.open_run(url)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["features.files=[planet=x.npy]"], "unknown entity type 'planet'"),
        (["features.files=[person=nowhere.npy]"], "cannot read nowhere.npy: there is no such file"),
        (["features.files=[PEOPLE, person=PEOPLE]"], "for the entity type 'person'; allowed: one"),
        (["features.files=[town=PEOPLE]"], "no name is an entity's of type town"),
    ],
)
def test_refusals(tmp_path: Path, files: dict[str, Path], sets: list[str], words: str) -> None:
    filled = [setting.replace("PEOPLE", str(files["person"])) for setting in sets]
    with pytest.raises(InputError, match=words) as caught:
        config = load_config(None, settings(files, tmp_path / "run", *filled))
        check_config(config, World())
        with live.opened(config):
            pass
    assert "\n" not in str(caught.value)


def test_commands_with_new_entities(tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands give what Python gives; a file's known names are passed over."""
    folder = shared
    new, triples = tmp_path / "new.npy", tmp_path / "new.tsv"
    vectors = np.random.default_rng(4).normal(size=(3, WIDTHS["person"])).astype(np.float32)
    np.save(new, vectors)
    new.with_suffix(".names.txt").write_text("ada\nperson1\ngrace\n")
    triples.write_text("ada\tknows\tperson1\ngrace\tlives_in\ttown1\nada\tknows\tgrace\n")
    options = ["--features", f"person={new}"]
    more = dglkge.open_run(folder).with_new_entities(["ada", "grace"], vectors[[0, 2]], "person")

    assert main(["evaluate", str(folder), "--triples", str(triples), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["new_entities"] == {"person": 2}
    assert (folder / "metrics-triples-new-with-features.json").is_file()
    ids = more.tables.vocabulary("person").ids(["ada", "person1", "grace"])
    knows, lives_in = (more.dataset.relations.ids_of(name)[0] for name in ("knows", "lives_in"))
    town = more.tables.vocabulary("town").id("town1")
    queries = np.array([[ids[0], knows, ids[1]], [ids[2], lives_in, town], [ids[0], knows, ids[2]]])
    expected = more.evaluate(Protocol(split="new"), queries, also_known=[queries]).to_dict()
    assert report["both"] == expected["both"]

    assert main(["predict", str(folder), "--head", "ada", "--relation", "knows", *options, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [answer["name"] for answer in answers] == more.predict_tails("ada", "knows")["entity"].tolist()
    assert main(["score", str(folder), "--input", str(triples), *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3

    for words, arguments in (
        ("give the type of the new entities: person, town", ["--features", str(new)]),
        ("unknown entity type 'people'", ["--features", f"people={new}"]),
        ("expected (3, 3)", ["--features", f"town={new}"]),
        ("nowhere.npy: there is no such file", ["--features", "person=nowhere.npy"]),
    ):
        assert main(["predict", str(folder), "--head", "ada", "--relation", "knows", *arguments]) == 2
        caught = capsys.readouterr()
        assert words in caught.err and caught.err.count("\n") == 1 and not caught.out


def test_a_run_without_features_has_no_rows_for_new_entities(tmp_path: Path) -> None:
    run = dglkge.open_run(trained({}, tmp_path / "run", "dense.lr=0.001"))
    with pytest.raises(InputError, match="was trained without features"):
        run.with_new_entities(["ada"], np.zeros((1, 3)), "person")
    # Rows that are given are no matter of features.
    more = run.checkpoint.with_new_rows({"person": (["ada"], torch.ones(1, DIM))})
    assert torch.equal(more["person"]["ada"], torch.ones(DIM)) and len(run.tables["person"]) == 40


def test_exports_have_the_sum(tmp_path: Path, files: dict[str, Path], shared: Path) -> None:
    run = dglkge.open_run(shared)
    run.export("npy", tmp_path / "npy")
    for name in ("person", "country"):
        with h5py.File(next((shared / "checkpoint" / "latest").glob(f"embeddings_{name}_0.v*.h5"))) as file:
            stored = torch.from_numpy(file["embeddings"][...]).double()
        exported = torch.from_numpy(np.load(tmp_path / "npy" / f"{name}.npy")).double()
        if name in files:
            stored += projected(run.checkpoint.feature_parameters(), name, vectors_of(files, name))
        torch.testing.assert_close(exported, stored, rtol=1e-6, atol=1e-6)


def test_the_plan_counts_the_vectors(tmp_path: Path, files: dict[str, Path]) -> None:
    size = read_dataset_size(toy_dataset(typed=True))
    sizes = {}
    for dtype in ("float32", "float16"):
        config = load_config(None, settings(files, tmp_path, f"features.dtype={dtype}"))
        (host,) = plan_memory(config, size, 2, 1)
        sizes[dtype] = dict(host.memory)["features, mapped files"]
    assert sizes["float32"] == 4 * (40 * WIDTHS["person"] + 10 * WIDTHS["town"]) == 2 * sizes["float16"]
