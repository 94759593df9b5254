"""The real PyTorch-BigGraph reads ours and we read its: ``make test-pbg``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dglkge.checkpoint import hdf5_format, layout, part_files
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.formats.bigraph_files import PassCount
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import datasets_in, save_toy, toy_meta, toy_tables
from tests.functional import job as commands
from tests.functional.results import json_lines, losses
from tests.functional.test_training_job import settings
from tests.toy_kg import toy_dataset

pytest.importorskip("torchbiggraph", reason="torchbiggraph is not installed here: run make test-pbg")

ConfigSchema = pytest.importorskip("torchbiggraph.config").ConfigSchema

DIM = 16
NUM_EPOCHS = 6
SEVERAL = "complex_diagonal+translation+affine+diagonal"
"""Operators of the ring's four relations."""


def biggraph(command: str, config: Path, *arguments: str) -> str:
    """Run one of PyTorch-BigGraph's commands; return what it printed."""
    program = Path(sys.executable).parent / f"torchbiggraph_{command}"
    done = commands.run([sys.executable, str(program), str(config), *arguments])
    return done.stdout + done.stderr


def write_config(path: Path, described: dict[str, Any], **changes: Any) -> Path:
    """Write a configuration file of PyTorch-BigGraph: Python that returns a dict."""
    described = {**described, "workers": 1, "eval_fraction": 0, **changes}
    path.write_text(f"def get_torchbiggraph_config():\n    return {described!r}\n", encoding="utf-8")
    return path


def write_edges(folder: Path, triples: np.ndarray, name: str = "edges_0_0.h5") -> str:
    """Write edges as PyTorch-BigGraph's importer does, for a pair of partitions."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / name, "w") as file:
        file.attrs["format_version"] = 1
        for name, column in (("lhs", 0), ("rhs", 2), ("rel", 1)):
            file.create_dataset(name, data=np.ascontiguousarray(triples[:, column]))
    return str(folder)


def write_names(folder: Path, **names: Sequence[str]) -> str:
    """Write lists of names as its importer does, each type in one partition; relations as dynamic ones."""
    folder.mkdir()
    for kind, listed in names.items():
        pattern = "dynamic_rel_{}" if kind == "relations" else f"entity_{{}}_{kind}_0"
        (folder / f"{pattern.format('names')}.json").write_text(json.dumps(listed))
        (folder / f"{pattern.format('count')}.txt").write_text(f"{len(listed)}\n")
    return str(folder)


def described(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / layout.CONFIG_FILE).read_text(encoding="utf-8")))


def train_more(config: Path, folder: Path, edges: str, num_epochs: int, **changes: Any) -> str:
    """Let PyTorch-BigGraph resume from a checkpoint."""
    changes = {"edge_paths": [edges], "num_epochs": num_epochs, **changes}
    return biggraph("train", write_config(config, described(folder), **changes))


def convert(source: Path, dataset: Dataset, run: Path) -> None:
    words = ["checkpoint", "convert", str(source), "--to", "run", "--dataset", str(dataset.path)]
    commands.dglkge(*words, "--output", str(run))


def ranks_alike(model: dict[str, Any], edges: str, run: Path) -> None:
    """Hold PyTorch-BigGraph's figures against ours: raw, against all entities, pessimistic among equals."""
    relations = [{**relation, "all_negs": True} for relation in model["relations"]]
    numbers = {"eval_num_batch_negs": 0, "eval_num_uniform_negs": 0, "num_batch_negs": 0}
    config = write_config(Path(f"{edges}-eval.py"), model, edge_paths=[edges], relations=relations, **numbers)
    line = [line for line in biggraph("eval", config).splitlines() if "pos_rank" in line][-1]
    expected = {name: float(value) for name, value in re.findall(r"(\w+): +([\d.e+-]+)", line)}
    done = commands.dglkge("evaluate", str(run), "--raw", "--ties", "pessimistic", "--json")
    both = json.loads(done.stdout)["both"]
    for name, their_name in (("mr", "pos_rank"), ("mrr", "mrr"), ("hits@1", "r1"), ("hits@10", "r10")):
        assert expected[their_name] == pytest.approx(both[name], rel=2e-4, abs=2e-4), (name, both, expected)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset.open(toy_dataset())


def random_run(tmp_path: Path, dataset: Dataset, score_function: str, reciprocal: bool) -> Path:
    """Write a run with random rows; returns its folder."""
    fields = {"dataset_path": str(dataset.path), "dataset_fingerprint": dataset.fingerprint, "dim": DIM}
    fields["entity_types"] = {"entity": dataset.num_entities("entity")}
    fields["operators"] = SCORE_FUNCTIONS.get(score_function).operators
    meta = toy_meta(
        score_function, dataset.relations.relations, reciprocal, optimizer="row_adagrad", **fields
    )
    names = {"entity": dataset.vocabulary("entity")}
    save_toy(tmp_path / "run" / "checkpoint", meta, toy_tables(meta, finite=True), 1, names)
    return tmp_path / "run"


@pytest.mark.parametrize(("score_function", "reciprocal"), [
    ("complex", True), ("none_cos", False), ("translation_dot", True), ("diagonal_l2", False),
    ("linear_squared_l2", True), ("affine_cos", False), ("complex_diagonal_l2", True),
    ("none_dot_bias", True), ("diagonal_cos_bias", False), ("affine_dot_bias", True),
    ("complex_diagonal_squared_l2_bias", False),
    (f"{SEVERAL}_dot", False), (f"{SEVERAL}_cos", False), (f"{SEVERAL}_l2_bias", False),
])  # fmt: skip
def test_it_evaluates_ours_and_gets_our_figures(score_function, reciprocal, dataset, tmp_path):
    run = random_run(tmp_path, dataset, score_function, reciprocal)
    edges = write_edges(tmp_path / "test", dataset.split("test"))
    ranks_alike(described(run / "checkpoint" / "latest"), edges, run)


@pytest.mark.parametrize("score_function", ["complex", "complex_diagonal+translation+none+diagonal_dot"])
def test_its_export_reads_ours(score_function: str, dataset: Dataset, tmp_path: Path) -> None:
    """Its export fails at matrices, whoever wrote them."""
    run = random_run(tmp_path, dataset, score_function, score_function == "complex")
    edges = write_edges(tmp_path / "train", dataset.split("train"))
    config = write_config(tmp_path / "c.py", described(run / "checkpoint" / "latest"), edge_paths=[edges])
    outputs = [tmp_path / "entities.tsv", tmp_path / "relations.tsv"]
    options = ("--entities-output", "--relation-types-output")
    biggraph("export_to_tsv", config, *(word for pair in zip(options, map(str, outputs)) for word in pair))
    checkpoint = open_checkpoint(run)
    lines, of_relations = ([line.split("\t") for line in path.read_text().splitlines()] for path in outputs)
    assert len(lines) == dataset.num_entities("entity")
    for name, *numbers in lines:
        assert np.allclose(np.array(numbers, float), checkpoint["entity"][name].numpy(), rtol=1e-5, atol=1e-6)
    operators = checkpoint.meta.operators or ["complex_diagonal"] * len(checkpoint.relations)
    with_parameters = {name for name, kind in zip(checkpoint.relations.labels, operators) if kind != "none"}
    assert {name for name, *_ in of_relations} == with_parameters


def check_written(folder: Path, version: int) -> None:
    """Assert what its functional test asserts of a checkpoint that it wrote itself."""
    assert int((folder / "checkpoint_version.txt").read_text().strip()) == version
    text = (folder / "config.json").read_text()
    config = ConfigSchema.from_dict(json.loads(text))
    assert json.loads(text) == config.to_dict()
    assert config.checkpoint_path == str(folder.resolve())

    def check_file(file: h5py.File) -> None:
        assert file.attrs["format_version"] == 1
        assert json.loads(file.attrs["config/json"]) == config.to_dict()
        names = "edge_chunk_idx edge_path edge_path_idx epoch_idx num_edge_chunks num_edge_paths num_epochs"
        fields = sorted(key for key in file.attrs if key.startswith("iteration/"))
        assert fields == [f"iteration/{name}" for name in names.split()]
        state = file["optimizer/state_dict"]
        assert state.dtype == np.dtype("V1") and state.ndim == 1

    with h5py.File(folder / f"model.v{version}.h5") as file:
        check_file(file)
        for parameter in datasets_in(file["model"]).values():
            assert "state_dict_key" in parameter.attrs and np.isfinite(parameter[...]).all()
    for name, entity in config.entities.items():
        for part in range(entity.num_partitions):
            count = int((Path(config.entity_path) / f"entity_count_{name}_{part}.txt").read_text())
            with h5py.File(folder / f"embeddings_{name}_{part}.v{version}.h5") as file:
                check_file(file)
                rows = file["embeddings"]
                assert rows.dtype == np.float32 and rows.shape == (count, config.dimension)
                assert np.isfinite(rows[...]).all() and (np.linalg.norm(rows[...], axis=1) != 0).all()
    for record in json_lines(folder / "training_stats.json"):
        assert {"epoch_idx", "stats"} <= set(record)


def sums_of(run: Path, optimizer: str) -> list[np.ndarray]:
    """Return the sums of row-wise Adagrad, which both keep: of entities, and of relations."""
    if optimizer != "row_adagrad":
        return []
    opened = open_checkpoint(run)
    model = run / "checkpoint" / "latest" / f"model.v{opened.version}.h5"
    with hdf5_format.open_file(model) as file:
        relations = np.asarray(part_files.read_state(model, file, RELATION, opened.meta)["sum"])
    return [opened.state("entity", 0)["sum"].numpy().copy(), relations]


@pytest.mark.parametrize("optimizer", ["sparse_adagrad", "row_adagrad", "sparse_adam"])
def test_assertions_of_its_own_test_and_a_resume(optimizer: str, dataset: Dataset, tmp_path: Path) -> None:
    """Of a run that was trained, and after PyTorch-BigGraph has gone on with it."""
    run = tmp_path / "run"
    more = (f"optimizer.name={optimizer}", "optimizer.lr=0.001", "training.num_epochs=2")
    commands.train_alone(*settings(dataset.path, run, *more, "evaluation.split=none"))
    folder = (run / "checkpoint" / "latest").resolve()
    version = open_checkpoint(run).version
    check_written(folder, version)
    before, sums = open_checkpoint(run)["entity"][:].numpy(), sums_of(run, optimizer)
    assert [record["epoch_idx"] for record in json_lines(folder / "training_stats.json")] == [0, 1]
    edges = write_edges(tmp_path / "train", dataset.split("train"))
    # PyTorch-BigGraph takes its learning rate from the optimizer's state: this one has no effect.
    train_more(tmp_path / "c.py", folder, edges, version + 1, lr=100.0)
    resumed = open_checkpoint(run)
    assert resumed.version == version + 1 and resumed.manifest.meta.dataset_fingerprint == ""
    after = resumed["entity"][:].numpy()
    assert (after != before).any() and np.abs(after - before).max() < 0.5
    for earlier, later in zip(sums, sums_of(run, optimizer)):
        assert (later >= earlier * (1 - 1e-6)).all() and (later > earlier).any()
    done = commands.dglkge("evaluate", str(run), status=2)
    assert f"dglkge checkpoint convert {folder} --to run --dataset DIR" in done.stderr
    convert(folder, dataset, tmp_path / "converted")
    converted = tmp_path / "converted" / "checkpoint" / "latest"
    check_written(converted, 1)
    assert json_lines(converted / "training_stats.json") == json_lines(folder / "training_stats.json") != []


@pytest.mark.parametrize("edge_sets", [(), ("train", "news")])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_passes_are_counted_as_its_trainer_does(edge_sets: tuple[str, ...], num_chunks: int) -> None:
    """Its own arithmetic, for every pass of three epochs."""
    manager = pytest.importorskip("torchbiggraph.train").IterationManager
    paths = list(edge_sets) or ["train"]
    training = {"edge_sets": list(edge_sets), "edge_chunks": num_chunks}
    for epoch in range(3):
        for passes in range(len(paths) * num_chunks):
            progress = {"finished_epochs": epoch, "passes_done": passes}
            count = PassCount.of(toy_meta(config={"training": training}, progress=progress))
            resumed = manager(3, paths, num_chunks, iteration_idx=count.finished)
            assert resumed.epoch_idx == epoch
            assert resumed.edge_path_idx * num_chunks + resumed.edge_chunk_idx == passes
            # It writes a version before it counts the pass.
            writer = manager(3, paths, num_chunks, iteration_idx=max(0, count.finished - 1))
            expected = {**count.attributes(), "iteration/num_epochs": 3}
            assert writer.get_checkpoint_metadata() == expected


def test_records_of_buckets_are_as_its_own(dataset: Dataset, tmp_path: Path) -> None:
    """A run of its own over two partitions has the same fields and numbers; it goes on with one of ours."""
    stats = pytest.importorskip("torchbiggraph.stats").Stats
    run, reference, entity_path = tmp_path / "run", tmp_path / "theirs", tmp_path / "entities"
    more = ("sampling.num_ranges=2", "sampling.buckets=directed", "evaluation.held_out.fraction=0.1")
    more += ("training.batch_statistics=true", "training.num_epochs=2", "evaluation.split=none")
    more += ("optimizer.name=row_adagrad", "optimizer.lr=0.001")
    commands.train_alone(*settings(dataset.path, run, *more))
    entity_path.mkdir()
    triples = np.array(dataset.split("train"))
    half = dataset.num_entities("entity") // 2
    for part, count in enumerate((half, dataset.num_entities("entity") - half)):
        (entity_path / f"entity_count_entity_{part}.txt").write_text(f"{count}\n")
    for lhs, rhs in np.ndindex(2, 2):
        bucket = triples[((triples[:, 0] >= half) == lhs) & ((triples[:, 2] >= half) == rhs)]
        local = bucket - [lhs * half, 0, rhs * half]
        edges = write_edges(tmp_path / "edges", local, f"edges_{lhs}_{rhs}.h5")
    pair = {"lhs": "entity", "rhs": "entity", "operator": "diagonal"}
    relations = [{"name": name, **pair} for name in dataset.relations.labels.names]
    model = {
        "entities": {"entity": {"num_partitions": 2}}, "relations": relations, "dimension": DIM,
        "entity_path": str(entity_path), "edge_paths": [edges], "num_epochs": 2,
        "checkpoint_path": str(reference), "comparator": "dot",
    }  # fmt: skip
    biggraph("train", write_config(tmp_path / "c.py", model, eval_fraction=0.1))
    folders = ((run / "checkpoint" / "latest").resolve(), reference)
    records, expected = (json_lines(folder / "training_stats.json") for folder in folders)
    evaluated = {"eval_stats_before", "eval_stats_after"}
    assert sum(evaluated <= record.keys() for record in records) > len(records) / 2
    # Its later versions count buckets from 0.
    assert [line["index"] for line in records] == [line["index"] - 1 for line in expected]
    for name in ("epoch_idx", "edge_path_idx", "edge_chunk_idx"):
        assert [line[name] for line in records] == [line[name] for line in expected]
    for record, other in zip(records, expected):
        # Held-out triples are drawn from all triples here: a small bucket may have none.
        assert other.keys() - evaluated <= record.keys()
        for name in record.keys() & {"stats", *evaluated}:
            assert stats.from_dict(record[name]).count > 0
            assert other[name]["metrics"].keys() <= record[name]["metrics"].keys()
    edges = write_edges(tmp_path / "train", triples)
    version = open_checkpoint(run).version
    train_more(tmp_path / "d.py", folders[0], edges, version + 1)
    resumed = json_lines(folders[0] / "training_stats.json")
    assert resumed[: len(records)] == records and len(resumed) == len(records) + 1


def test_it_resumes_at_the_epoch_whatever_the_cadence_of_commits_was(dataset, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    more = ("optimizer.name=row_adagrad", "optimizer.lr=0.001", "training.num_epochs=2")
    cadence = ("checkpoint.every_batches=2", "evaluation.split=none")
    commands.train_alone(*settings(dataset.path, run, *more, *cadence))
    assert open_checkpoint(run).version > 2
    done = commands.dglkge("checkpoint", "convert", str(run), "--to", "bigraph", "--output", str(copy))
    assert f"version 2 (the number of finished passes) is in {copy}" in done.stdout
    check_written(copy, 2)
    edges = write_edges(tmp_path / "train", dataset.split("train"))
    epochs = re.findall(r"Starting epoch (\d+) / (\d+)", train_more(tmp_path / "c.py", copy, edges, 4))
    assert epochs == [("3", "4"), ("4", "4")]
    assert open_checkpoint(copy).version == 4
    before, after = (open_checkpoint(folder)["entity"] for folder in (run, copy))
    names = list(dataset.vocabulary("entity").names)
    moved = (before[names] - after[names]).abs().max()
    assert 0 < moved < 0.5


def trained_by_it(source, entity_path, dataset, relabel, **changes):
    """Let PyTorch-BigGraph train a model with ids of its own; return its configuration and edges."""
    model = {
        "entities": {"entity": {"num_partitions": 1}}, "dimension": DIM, "global_emb": False,
        "entity_path": entity_path, "checkpoint_path": str(source), "loss_fn": "softmax", "lr": 0.1,
        **changes,
    }  # fmt: skip
    edges = {}
    for split in ("train", "test"):
        edges[split] = write_edges(source.parent / split, relabel(np.array(dataset.split(split))))
    changes = {"edge_paths": [edges["train"]], "num_epochs": NUM_EPOCHS}
    biggraph("train", write_config(source.parent / "train.py", model, **changes))
    return model, edges


def resumed_by_us(dataset: Dataset, run: Path, num_epochs: int, *more: str) -> None:
    """Go on with a run that was converted."""
    words = settings(dataset.path, run, f"training.num_epochs={num_epochs}", "evaluation.split=none", *more)
    done = commands.train_alone(*words, "optimizer.name=row_adagrad")
    assert "starts anew" not in done.stdout + done.stderr
    assert f"resumed: {NUM_EPOCHS} epochs and 0 batches done" in done.stdout + done.stderr


def test_we_load_evaluate_and_resume_its(dataset: Dataset, tmp_path: Path) -> None:
    """Its order of entities and relations is not ours; rows are matched by name."""
    source, run = tmp_path / "theirs", tmp_path / "run"
    names, relations = list(dataset.vocabulary("entity").names), list(dataset.relations.labels.names)
    generator = np.random.default_rng(0)
    entity_order, relation_order = generator.permutation(len(names)), generator.permutation(len(relations))
    listed = {"entity": [names[i] for i in entity_order], "relations": [relations[i] for i in relation_order]}

    def relabel(triples: np.ndarray) -> np.ndarray:
        orders = (entity_order, relation_order, entity_order)
        return np.stack([np.argsort(order)[ids] for order, ids in zip(orders, triples.T)], axis=1)

    model, edges = trained_by_it(
        *(source, write_names(tmp_path / "entities", **listed), dataset, relabel),
        relations=[{"name": "all", "lhs": "entity", "rhs": "entity", "operator": "complex_diagonal"}],
        dynamic_relations=True,
        comparator="dot",
    )
    refused = commands.train_alone(*settings(dataset.path, source), status=2)
    command = f"checkpoint convert {source} --to run --dataset {dataset.path} --output"
    assert f"dglkge {command} {source}_resumed" in refused.stderr
    convert(source, dataset, run)
    # Our sums of relations are the means of PyTorch-BigGraph's.
    with h5py.File(source / f"model.v{open_checkpoint(source).version}.h5") as file:
        state = hdf5_format.read_blob(file["optimizer/state_dict"])["state"]
    expected = np.concatenate([state[number]["sum"].numpy() for number in range(4)], axis=1).mean(axis=1)
    assert (expected > 0).all()
    with h5py.File(run / "checkpoint" / "v1" / "model.v1.h5") as file:
        np.testing.assert_allclose(file["optimizer/sum"][:][relation_order], expected, rtol=1e-6)
    ranks_alike(model, edges["test"], run)
    resumed_by_us(dataset, run, NUM_EPOCHS + 1)
    assert open_checkpoint(run).progress["finished_epochs"] == NUM_EPOCHS + 1
    more = ("training.num_epochs=1", "optimizer.name=row_adagrad", "evaluation.split=none")
    for name, init in (("anew", ()), ("taken", (f"checkpoint.init_path={source}",))):
        done = commands.train_alone(*settings(dataset.path, tmp_path / name, *more, *init))
        assert "starts anew" not in done.stdout + done.stderr
    goes_on, warm, starts = (losses(tmp_path / name)[0] for name in ("run", "taken", "anew"))
    print(f"loss of the first batch: resumed {goes_on:.3f}, warm start {warm:.3f}, anew {starts:.3f}")
    assert goes_on < 0.8 * starts and warm < 0.8 * starts


def test_several_operators_from_its_training_to_ours_and_back(dataset, tmp_path):
    """It trains four operators; we rank alike, resume, and it ranks what we trained alike."""
    source, run = tmp_path / "theirs", tmp_path / "run"
    names, relations = list(dataset.vocabulary("entity").names), list(dataset.relations.labels.names)
    order = [2, 0, 3, 1]  # its ids of relations are not ours
    operators, pair = dict(zip(relations, SEVERAL.split("+"))), {"lhs": "entity", "rhs": "entity"}

    def relabel(triples: np.ndarray) -> np.ndarray:
        triples[:, 1] = np.argsort(order)[triples[:, 1]]
        return triples

    model, edges = trained_by_it(
        *(source, write_names(tmp_path / "entities", entity=names), dataset, relabel),
        relations=[{**pair, "name": relations[i], "operator": operators[relations[i]]} for i in order],
        comparator="cos",
    )
    convert(source, dataset, run)
    ranks_alike(model, edges["test"], run)
    first = operators[relations[order[0]]]
    named = ", ".join(f"{name}: {operator}" for name, operator in operators.items() if operator != first)
    more = ("optimizer.relations=sparse_adagrad", "regularizer.weight=0", "optimizer.lr=0.01")
    more += (f"model.score_function={open_checkpoint(run).meta.score_function}",)
    more += (f"model.relation_operators={{{named}}}", "model.reciprocal_relations=false")
    resumed_by_us(dataset, run, NUM_EPOCHS + 1, *more)
    edges_of_ours = write_edges(tmp_path / "ours", dataset.split("test"))
    ranks_alike(described(run / "checkpoint" / "latest"), edges_of_ours, run)
