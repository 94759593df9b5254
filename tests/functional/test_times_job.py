"""Times by the real commands: a graph that only they explain, filtered ranks, questions, resume, trainers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from dglkge import open_run
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from tests.functional import job as commands
from tests.functional.results import assert_same_training, metrics, parameters, progress
from tests.toy_kg import NUM_ENTITIES, STEPS, TIMES, temporal_dataset, toy_dataset

COMMON = (
    *("model.dimension=32", "model.init_scale=0.01", "training.objective=one_vs_all", "loss.name=softmax"),
    *("optimizer.name=sparse_adagrad", "optimizer.lr=0.1", "training.batch_size=60"),
    *("training.matmul_dtype=float32", "evaluation.batch_size=64"),
)
DENSE = ("dense={optimizer: {name: Adagrad}, lr: 0.1}",)
COLUMNS = ["head", "relation", "tail", "time"]


def settings(output: Path, name: str, *more: str, num_epochs: int = 40, num_parts: int = 1) -> list[str]:
    dataset = temporal_dataset(num_parts)
    return [
        *(f"dataset={dataset}", f"output={output}", f"model.score_function.name={name}", *COMMON),
        *(f"training.num_epochs={num_epochs}", *(DENSE if name in ("tcomplex", "tntcomplex") else ()), *more),
    ]


def query_at(*parts: str) -> pd.DataFrame:
    """Return one query: head, relation, tail and time."""
    return pd.DataFrame([parts], columns=COLUMNS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two trainers."""
    folder = tmp_path_factory.mktemp("times")
    more = ("model.score_function.smoothness=0.0001", "regularizer={name: n3, weight: 0.002}")
    commands.train(folder, 2, *settings(folder / "run", "tntcomplex", *more))
    return folder / "run"


def test_only_times_explain_the_graph(trained, tmp_path):
    """``turn`` turns by another step at each time: without time a true answer has three rivals."""
    commands.train_alone(*settings(tmp_path / "static", "complex"))
    assert metrics(trained)["both"]["mrr"] > 0.95
    assert metrics(tmp_path / "static")["both"]["mrr"] < 0.8


def complex_rows(rows: torch.Tensor) -> np.ndarray:
    real, imaginary = rows.double().numpy().reshape(len(rows), 2, -1).transpose(1, 0, 2)
    return real + 1j * imaginary


def brute_force(run: Path, triples: Sequence[tuple[int, ...]], known: set[tuple[int, ...]]) -> np.ndarray:
    """Return the filtered ranks of heads and tails out of the arrays of the checkpoint, by the formula."""
    checkpoint = open_checkpoint(run)
    entities = complex_rows(checkpoint["entity"].gather(torch.arange(NUM_ENTITIES)))
    stored = checkpoint["relation"].gather(torch.arange(len(checkpoint.meta.relations)))
    times = complex_rows(checkpoint.dense_parameters()["rows"])
    dim, ranks = 2 * entities.shape[1], []
    for head, number, tail in triples:
        row, time = divmod(number, len(times))
        tails = [(head, number, other) for other in range(NUM_ENTITIES)]
        heads = [(other, number, tail) for other in range(NUM_ENTITIES)]
        for half, anchor, answer, all_triples in zip(
            stored[row].chunk(2), (head, tail), (tail, head), (tails, heads)
        ):
            changing, constant = (complex_rows(part[None])[0] for part in (half[:dim], half[dim:-1]))
            scores = (entities[anchor] * (changing * times[time] + constant) * entities.conj()).real.sum(1)
            is_negative = [triple not in known for triple in all_triples]
            ranks.append(1.0 + (scores[is_negative] > scores[answer]).sum())
    return np.array(ranks)


def test_ranks_are_filtered_at_the_time(tmp_path):
    """A fact of another time is a negative, one of the same time is none."""
    run = tmp_path / "run"
    commands.train_alone(*settings(run, "tntcomplex", num_epochs=8))
    dataset = Dataset.open(temporal_dataset())
    known = {tuple(row) for split in ("train", "valid", "test") for row in dataset.split(split).tolist()}
    triples = [tuple(row) for row in dataset.split("test").tolist()]
    expected = brute_force(run, triples, known)
    ranking = open_run(run).evaluate("test").both
    assert (ranking.mr, ranking.mrr) == pytest.approx((expected.mean(), (1 / expected).mean()))
    assert metrics(run)["both"]["mrr"] == pytest.approx(ranking.mrr, abs=1e-6)
    # With the answers of all times filtered out the ranks are others: the test can fail.
    number = len(TIMES)
    always = {(head, n - n % number + time, tail) for head, n, tail in known for time in range(number)}
    assert brute_force(run, triples, always).mean() != pytest.approx(expected.mean())


def test_questions_at_a_time_and_when(trained):
    run = open_run(trained)
    for step, time in zip(STEPS, TIMES):
        tails = run.predict(query_at("e003", "turn", "?", time))
        assert tails["tail"][0] == f"e{3 + step:03d}" and tails["relation"][0] == f"turn @ {time}"
        heads = run.predict_heads(f"turn @ {time}", "e040", k=1)
        assert heads["entity"][0] == f"e{40 - step:03d}"
        when = run.predict_times("e003", "turn", f"e{3 + step:03d}")
        assert when["time"][0] == time and sorted(when["time"]) == list(TIMES)
        assert when["rank"].tolist() == [1, 2, 3, 4] and (np.diff(when["score"]) <= 0).all()
        assert when["known_from"].notna().tolist() == [True, False, False, False]
    # True in a period only.
    scores = run.predict_times("e010", "open", "e021").set_index("time")["score"]
    assert scores[list(TIMES[2:])].min() > scores[list(TIMES[:2])].max()
    # Which relation, of all at a time.
    which = run.predict(query_at("e003", "?", "e010", TIMES[1]))
    assert which["relation"][0] == f"turn @ {TIMES[1]}" and len(which) == 3
    # A score is that of the relation at the time.
    frame = pd.DataFrame([["e003", "turn", "e010", time] for time in TIMES], columns=COLUMNS)
    scores = run.score(frame)["score"].tolist()
    when = run.predict_times("e003", "turn", "e010").set_index("time")["score"]
    assert scores == pytest.approx([when[time] for time in TIMES], abs=1e-9)
    with pytest.raises(InputError, match="relation 'turn' has times, from 2021-03 to 2021-06; say which"):
        run.predict_tails("e003", "turn")
    with pytest.raises(InputError, match="unknown time '2022'"):
        run.predict(query_at("e003", "?", "e010", "2022"), strict=True)


def test_questions_by_the_command(trained, tmp_path):
    def predict(*arguments: str) -> dict:
        return json.loads(commands.dglkge("predict", str(trained), *arguments, "--json", "-k", "2").stdout)

    at = ("--head", "e003", "--relation", "turn", "--time")
    assert predict(*at, TIMES[2])["answers"][0]["name"] == f"e{3 + STEPS[2]:03d}"
    report = predict(*at, "?", "--tail", f"e{3 + STEPS[3]:03d}")
    assert [answer["name"] for answer in report["answers"]][0] == f"turn @ {TIMES[3]}"
    file = tmp_path / "queries.tsv"
    file.write_text(f"e003\tturn\t?\t{TIMES[0]}\ne003\tturn\te004\t?\ne003\tturn\te004\t{TIMES[0]}\n")
    reports = predict("--triples", str(file), "--columns", "hrtT")
    assert reports[0]["answers"][0]["name"] == "e004"
    assert reports[1]["answers"][0]["name"] == f"turn @ {TIMES[0]}"
    assert reports[2]["score"] == pytest.approx(reports[1]["answers"][0]["score"], abs=1e-9)
    done = commands.dglkge("predict", str(trained), "--head", "e003", "--relation", "turn", status=2)
    assert done.stderr.endswith("relation 'turn' has times, from 2021-03 to 2021-06; say which\n")
    # A file of triples is ranked at its times.
    (tmp_path / "true.tsv").write_text(f"e003\tturn\te004\t{TIMES[0]}\n")
    arguments = ("--triples", str(tmp_path / "true.tsv"), "--columns", "hrtT", "--json")
    assert json.loads(commands.dglkge("evaluate", str(trained), *arguments).stdout)["both"]["mrr"] == 1


ON_DEVICE = ("training.device=cpu_staged", "tables.storage=device")
SAMPLED = (
    *("training.objective.name=negative_sampling", "negatives.num_uniform=10", "negatives.chunk_size=20"),
    *("negatives.mask_known=true", "model.relation_dropout=0.2"),
)


@pytest.mark.parametrize(
    ("name", "trainers", "where", "more"),
    [
        ("tcomplex", 3, (), ("model.score_function.smoothness=0.1", "regularizer={name: n3, weight: 0.01}")),
        ("tntcomplex", 2, ON_DEVICE, SAMPLED),
        # Adagrad makes a step of the rounding of numbers that start near 0.
        ("de_simple", 2, ON_DEVICE, ("training.objective.name=k_vs_all", "model.init_scale=0.3")),
    ],
    ids=["one vs all, penalties", "negatives without known ones, dropout, devices", "k vs all, devices"],
)
def test_training_does_not_depend_on_the_trainers(tmp_path, name, trainers, where, more):
    """Nor on a stop: shares are uneven, and the run goes on from its files."""
    alone, run, more = tmp_path / "alone", tmp_path / "run", (*more, "training.relation_prediction=0.5")
    commands.train_alone(*settings(alone, name, *more, num_epochs=4))
    for num_epochs in (2, 4):
        commands.train(tmp_path, trainers, *settings(run, name, *more, *where, num_epochs=num_epochs))
        assert progress(run) == (num_epochs, 0)
    assert name == "de_simple" or parameters(alone)["rows"].shape == (len(TIMES), 32)
    assert_same_training(run, alone)


def test_a_run_goes_on_at_new_times(trained, tmp_path):
    """Rows of old times and their optimizer's state are taken over by name; only new triples are trained."""
    facts = [f"e{i:03d}\tturn\te{i + 17:03d}" for i in range(8)]
    lines = [f"{fact}\t{time}\n" for fact in facts for time in ("2021-02-14", "2021-07-01")]
    (tmp_path / "more.tsv").write_text("".join(lines))
    data, run = tmp_path / "data", tmp_path / "run"
    words = f"data extend --dataset {temporal_dataset()} --name more --columns hrtT -o {data} --input"
    commands.dglkge(*words.split(), f"{tmp_path}/more.tsv")
    more = (f"dataset={data}", f"checkpoint.init_path={trained}", "training.edge_sets=[more]")
    more += ("training.rows=touched", "model.score_function.smoothness=0.0001")
    done = commands.train_alone(*settings(run, "tntcomplex", *more, num_epochs=30))
    assert "relation: 3 rows taken over, 0 new" in done.stdout + done.stderr
    before, after = parameters(trained)["rows"], parameters(run)["rows"]
    assert list(Dataset.open(data).relations.times) == ["2021-02", *TIMES, "2021-07"]
    # No triple of the new edge set is at an old time, but smoothness moves times to their neighbours.
    assert after[1:-1] == pytest.approx(before, abs=0.05) and after.shape == (6, 32)
    grown = open_run(run)
    assert grown.predict_times("e003", "turn", "e020")["time"][0] in ("2021-02", "2021-07")
    assert grown.evaluate("test").both.mrr > 0.8

    refused, old = tmp_path / "refused", tmp_path / "old"
    done = commands.train_alone(*settings(refused, "tntcomplex", *more, "model.dimension=16"), status=None)
    assert "has dim 32, this run has 16" in done.stderr
    # In this model the number of a time counts.
    commands.train_alone(*settings(old, "de_simple", num_epochs=1))
    words = settings(refused, "de_simple", f"dataset={data}", f"checkpoint.init_path={old}")
    told = "has the time '2021-03' as number 0, this run as 1, and de_simple computes"
    assert told in commands.train_alone(*words, status=None).stderr
    words = ("checkpoint", "convert", str(trained), "--to", "run", "--dataset", str(data))
    done = commands.dglkge(*words, "-o", str(tmp_path / "converted"), status=None)
    assert done.returncode and "has other times than" in done.stderr


def test_what_is_refused_of_times(trained, tmp_path):
    checkpoint = open_checkpoint(trained)
    assert checkpoint.meta.times == TIMES
    assert checkpoint.config["model"]["score_function"]["num_times"] == len(TIMES)
    words = settings(tmp_path / "run", "tcomplex", num_parts=2)
    done = commands.train_alone(*words, "model.score_function.num_times=7", status=2)
    assert "model.score_function.num_times is 7, and" in done.stderr and "allowed: 0" in done.stderr
    done = commands.train_alone(*words, f"dataset={toy_dataset()}", status=2)
    assert "model.score_function is tcomplex, and the triples of" in done.stderr
    words = ("export", str(trained), "-o", str(tmp_path / "exported"), "--format", "npy")
    done = commands.dglkge(*words, status=2)
    assert "has relations at 4 times, of which no format has rows" in done.stderr
