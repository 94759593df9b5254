"""Scripts of benchmarks/, one short run each; their formulas are the library's."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bucket_order
import bucket_schedules
import debian_graph
import device
import gpu
import influence
import limited_memory
import out_of_core
import quality
import rules
import start
import stdlib_kg
from dglkge import open_run
from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.partition.make_dataset import Options, partition_triples
from dglkge.training.building.checks import check_config
from dglkge.typing import Side
from measuring import pbg_peer, plain_torch_scores, pykeen_peer
from measuring.run_figures import Epoch, RunFigures
from tests import warm
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.functional.job import run
from tests.model.dense_oracle import DENSE
from tests.toy_kg import REPOSITORY, toy_dataset

DIM = 8
PLAIN = [name for name in SCORE_FUNCTIONS if name not in DENSE and not SCORE_FUNCTIONS.get(name).has_times]
"""Score functions without a module and without times."""


def printed(name: str, *words: object, python: tuple[str, ...] = ()) -> str:
    """Run a benchmark in a process of its own."""
    script = str(REPOSITORY / "benchmarks" / f"{name}.py")
    return run([*warm.python(), *python, script, *map(str, words)]).stdout


def test_packages_of_debian_become_triples():
    text = "Package: a\nDepends: b (>= 1), c | d, missing\nProvides: virtual-a\nTag: role::program\n"
    text += (
        "Maintainer: Ann Example <ann@example.org>\n\nPackage: b\nDepends: a\n\nPackage: c\n\nPackage: d\n"
    )
    assert set(debian_graph.read(text)) == {
        *(("a", "depends", name) for name in "bcd"),
        *(("a", "provides", "virtual-a"), ("a", "maintainer", "maintainer:Ann Example")),
        *(("a", "tag-role", "tag:role::program"), ("b", "depends", "a")),
    }
    triples = [*((f"e{i % 20}", "r", f"e{i // 20}") for i in range(400)), ("lonely", "r", "e1")]
    splits = debian_graph.split(triples, 10, seed=0)
    assert [len(splits[name]) for name in ("train", "valid", "test")] == [391, 5, 5]
    assert sorted(sum(splits.values(), [])) == sorted(triples)


def test_packages_of_the_standard_library_become_triples(tmp_path):
    """Triples fit the schema, and nothing is asked that was not learned."""
    for name in ("asyncio", "email", "unittest"):
        shutil.copytree(Path(os.__file__).with_name(name), tmp_path / "library" / name)
    text = printed("stdlib_kg", "--output", tmp_path, "--source", tmp_path / "library")
    names = ("entity_types", "train", "valid", "test")
    lines = {name: (tmp_path / f"{name}.tsv").read_text("utf-8").splitlines() for name in names}
    rows = {name: [tuple(line.split("\t")) for line in lines[name]] for name in names}
    types, train = dict(rows["entity_types"]), set(rows["train"])
    pairs = {(relation, types[head], types[tail]) for head, relation, tail in train}
    assert pairs == {(name, *pair) for name, ends in stdlib_kg.SCHEMA.items() for pair in ends}
    assert {end for head, _, tail in train for end in (head, tail)} == set(types)
    assert ("asyncio.tasks.Task", "defined_in", "asyncio.tasks") in train.union(rows["valid"], rows["test"])
    assert not train & {*rows["valid"], *rows["test"]} and f"{len(types):,}" in text


def test_the_partition_tool_reads_a_synthetic_graph(tmp_path):
    words = ["--entities", "300", "--relations", "7", "--edges", "2000", "--held-out", "50"]
    printed("synthetic_graph", "--output", tmp_path / "triples", *words, "--format", "parquet")
    partition_triples([tmp_path / "triples"], tmp_path / "dataset", Options(), None)
    dataset = Dataset.open(tmp_path / "dataset")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [1900, 50, 50]
    assert dataset.num_entities("entity") == 300 and len(dataset.relations) == 7
    degrees = np.bincount(dataset.split("train")[:, [0, 2]].ravel())
    assert degrees.max() > 5 * np.median(degrees)


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (out_of_core.main, ["--work", "work", "--epochs", "1"], "--epochs must be at least 2, got 1"),
        (limited_memory.main, ["--work", "work", "--input", "/proc/sys"], "/proc/sys has no test.tsv"),
        (device.main, ["--device", "gpu"], "'gpu' is no device; known: auto, cpu, cuda, cpu_staged"),
    ],
)
def test_mistakes_are_errors_before_anything_runs(tmp_path, monkeypatch, capsys, main, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_that_takes_more_memory_than_the_limit_fails(tmp_path):
    """Also a process that is not the one that is waited for."""
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; x = bytearray({}); {}'])"
    )

    def peak_bytes(size: int) -> float:
        command = [sys.executable, "-c", code.format(size, "time.sleep(0.4)")]
        return limited_memory.run_limited(command, 100 * 2**20, tmp_path / "log", 60)["peak_group_bytes"]

    try:
        assert 8 * 2**20 < peak_bytes(8 * 2**20) <= 100 * 2**20
    except InputError as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match="ended well, but 1 processes were killed by the limit"):
        peak_bytes(400 * 2**20)


def test_orders_and_schedules_of_buckets(capsys):
    """One range comes first; no schedule saves traffic."""
    expected = [(1, ""), (4, "inside_out"), (4, "random"), (8, "inside_out"), (8, "random")]
    assert bucket_order.kinds("4,1,8", "inside_out,random") == expected
    words = ["--entities", "4000", "--edges", "20000", "--ranges", "8", "--batch", "50", "--machines", "2"]
    assert bucket_schedules.main(words) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["same", "rotated heads", "shifted"]
    # Batches cut the same buckets at other places.
    assert [float(line[1]) for line in lines] == pytest.approx([float(lines[0][1])] * 3, rel=0.02)


def test_rules_and_influences_are_measured(tmp_path, capsys, monkeypatch):
    """Nothing is trained again: the rows of removed triples are those of the whole."""
    folder = save_toy_run(tmp_path / "run", Dataset.open(toy_dataset()))
    row = rules.measure(str(folder))
    assert row["both MRR"] == round(open_run(folder).with_rules().evaluate("test").both.mrr, 4)
    assert row["model MRR"] == round(open_run(folder).evaluate("test").both.mrr, 4) < row["rules first MRR"]
    monkeypatch.setattr(influence, "trained", lambda args, work, without: open_run(folder))
    words = ["--triples", str(toy_dataset().parent / "source"), "--recipe", "nations/complex"]
    assert influence.main([*words, "--links", "3", "--reasons", "2"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()[-5:]
    assert [line.split(" | ")[2:4] for line in lines] == [["0.00", "0 of 3"]] * 4


def test_configurations_can_be_trained():
    cases = [settings for settings, _ in device.cases(device.build_parser().parse_args([])).values()]
    for settings in (*cases, gpu.speed_settings("1000"), [*gpu.ON_GPU, *gpu.RANKED]):
        check_config(load_config(None, ["dataset=x", *settings]))
    paths = quality.recipes("")
    configs = [load_config(str(path), []) for path in paths]
    # A folder for the data set, shared by its recipes, and an own one for each run.
    assert [config.dataset for config in configs] == [f"data/{path.parent.name}" for path in paths]
    assert len({config.output for config in configs}) == len(configs) >= 2


def test_short_trainings_are_repeated_and_a_table_goes_on(tmp_path, capsys, monkeypatch):
    """Another seed for what trains in five minutes; runs in the file are not repeated."""
    trained = []

    def train(config, sets, trainers, folder, limit):
        trained.append((config.stem, next(text for text in sets if text.startswith("seed="))))
        ranks = dict.fromkeys(("mrr", "hits@1", "hits@3", "hits@10"), 0.4 + len(trained) / 100)
        metrics = {"test": {"both": ranks, "ties": {"pessimistic": {"both": ranks}}}}
        (folder / "run").mkdir(parents=True)
        (folder / "run" / RUN_METRICS_FILE).write_text(json.dumps(metrics))
        return RunFigures(
            [Epoch(1, 1)], {"complex": 290, "rotate": 310}[config.stem], 1, 10**9, 1, 1, 0.4, {}
        )

    monkeypatch.setattr(quality.our_job, "train", train)
    monkeypatch.setattr(quality, "partition", lambda triples, work: (work / triples.name, 0.0))
    words = ["--table", "--input", str(tmp_path), "--recipes", "wn18/complex,wn18/rotate", "--json"]
    for seeds in ("2", "3"):
        assert quality.main([*words, str(tmp_path / "t.json"), "--seeds", seeds]) == 0
    assert trained == [
        ("complex", "seed=0"),
        ("complex", "seed=1"),
        ("rotate", "seed=0"),
        ("complex", "seed=2"),
    ]
    rows = [line.split(" | ")[3:5] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows == [[".423", ".030"], [".430", ""]]


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", PLAIN)
def test_scores_are_equal(name, side):
    score_function = build_model(name, DIM, True).score_function
    shape = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    entities, candidates = torch.randn(5, DIM, **shape), torch.randn(5, DIM, **shape)
    relation = torch.randn(5, plain_torch_scores.relation_dim(name, DIM), **shape)
    tails = side is Side.TAIL
    expected = score_function.compare_plainly(score_function.query(entities, relation, side), candidates)
    query = plain_torch_scores.queries(name, entities, relation, tails)
    torch.testing.assert_close(plain_torch_scores.compare(name, query, relation, candidates, tails), expected)
    pairs = plain_torch_scores.compare(name, query, relation, candidates.unsqueeze(1), tails)
    torch.testing.assert_close(pairs.squeeze(1), expected.diagonal())


def test_seconds_of_a_start():
    code = "import time; begin = time.process_time()\nwhile time.process_time() - begin < 0.3: pass"
    seconds, processors = start.timed([sys.executable, "-c", code])
    assert 0.3 <= processors <= seconds + 0.1


def test_peers_take_our_settings_and_triples(tmp_path):
    """PyKEEN counts complex numbers as one."""
    config = load_config(None, ["dataset=d", "model.dimension=24", "negatives.num_uniform=77"])
    expected = {"dimension": 24, "num_uniform_negs": 77, "workers": 3, "comparator": "dot", "lr": 0.5}
    described = pbg_peer.describe(config, tmp_path, 3, 4, ["lr=0.5"])
    assert {name: described[name] for name in expected} == expected
    expected = {"model": "ComplEx", "dimension": 12, "num_negatives": 77}
    described = pykeen_peer.describe(config, tmp_path, 2)
    assert {name: described[name] for name in expected} == expected
    dataset = Dataset.open(toy_dataset())
    pbg_peer.export(dataset, tmp_path, 3)
    counts = [int(path.read_text()) for path in (tmp_path / "entities").glob("entity_count_entity_*.txt")]
    assert sum(counts) == dataset.num_entities("entity") and max(counts) - min(counts) <= 1


def test_training_is_measured(tmp_path):
    words = ["--dataset", toy_dataset(), "--config", "none", "--trainers", "1", "--mrr"]
    words += ["--epochs", "2", "--dimension", "8", "--negatives", "10", "--matmul_dtypes", "float32"]
    words += ["--json", tmp_path / "figures.json", "--work", tmp_path / "work"]
    table = printed("training", *words, python=(warm.PLAIN,))
    (figures,) = json.loads((tmp_path / "figures.json").read_text("utf-8"))["runs"]["ours, float32"]
    num_triples = len(Dataset.open(toy_dataset()).split("train"))
    assert [epoch["edges"] for epoch in figures["epochs"]] == [num_triples] * 2
    marks = list(figures["start_marks"].values())
    assert marks == sorted(marks) and 0 < marks[0] and figures["first_batch_seconds"] == marks[-1]
    assert 0 < figures["mrr"] <= 1 and figures["peak_bytes"] > 10**8 and figures["processor_seconds"] > 0
    assert "| ours, float32 |" in table and f"{figures['mrr']:.4f}" in table


def test_growth_is_measured(tmp_path):
    work, figures = tmp_path / "work", tmp_path / "figures.json"
    printed("growth", "partition", "--values", "3000", "--work", work, "--json", figures)
    (row,) = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert row["ours"]["peak_bytes"] > 0 and row["pyarrow"]["seconds"] > 0
    assert len(Dataset.open(work / "dataset-3000").split("test")) == 1000
