"""The benchmarks of training and of growth: parts against hand-made input, a small job from end to end."""

from __future__ import annotations

import itertools
import json
import sys
import time

import h5py
import numpy as np
import pytest

import training
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from measuring import pbg_peer, processes, product_limit, pykeen_peer, run_figures
from tests import warm
from tests.examples.scripts import run_script
from tests.toy_kg import toy_dataset

PBG_LOG = """\
2026-01-02 10:00:04,000   [Trainer-0] Starting epoch 1 / 2, edge path 1 / 1, edge chunk 1 / 1
2026-01-02 10:00:14,500   [Trainer-0] ( 0 , 0 ): bucket 1 / 2 : Processed 600 edges in 10.00 s ( 6e-05 M/sec ); io: 0.02 s ( 7 MB/sec )
2026-01-02 10:00:20,500   [Trainer-0] ( 0 , 1 ): bucket 2 / 2 : Processed 400 edges in 6.00 s ( 6e-05 M/sec ); io: 0.02 s ( 7 MB/sec )
no time here
2026-01-02 10:00:21,000   [Trainer-0] Starting epoch 2 / 2, edge path 1 / 1, edge chunk 1 / 1
2026-01-02 10:00:25,000   [Trainer-0] ( 0 , 0 ): bucket 1 / 2 : Processed 600 edges in 3.00 s ( 6e-05 M/sec ); io: 0.02 s ( 7 MB/sec )
2026-01-02 10:00:27,000   [Trainer-0] ( 0 , 1 ): bucket 2 / 2 : Processed 400 edges in 2.00 s ( 6e-05 M/sec ); io: 0.02 s ( 7 MB/sec )
2026-01-02 10:00:29,000   [Trainer-0] Exiting
"""  # noqa: E501

PBG_EVALUATION = """\
2026-01-02 10:00:20,500   [Evaluator] Stats for edge path 1 / 1: pos_rank:  99.1 , mrr:  0.1 , count:  3
2026-01-02 10:00:20,600   [Evaluator] Stats: pos_rank:  250.63 , mrr:  0.28519 , r1:  0.19 , count:  20466
"""


def test_watched_command_counts_its_children(tmp_path):
    """Memory and processor time of a grandchild count; the page cache of files does not."""
    work = "x = bytearray(200_000_000); import time; t = time.process_time()\n"
    work += "while time.process_time() < t + 1.2: pass"
    parent = "import subprocess, sys; print('done')\n"
    parent += f"subprocess.run([sys.executable, '-c', {work!r}], check=True)"
    before = time.time()
    done = processes.run_watched([sys.executable, "-c", parent], tmp_path / "log", 60)
    assert before <= done.started_at <= time.time() and done.seconds >= 1.2
    assert done.peak_bytes > 200_000_000 and done.processor_seconds >= 1.2
    assert all(0 <= seconds <= done.processor_seconds for _, seconds in done.processor_samples)
    assert (tmp_path / "log").read_text() == "done\n"
    known = processes.Finished(0.0, 4.0, 9.0, 1, [(10.0, 1.0), (12.0, 5.0), (14.0, 6.0)])
    assert known.processor_seconds_between(11.0, 13.0) == pytest.approx(2.5)
    with pytest.raises(RuntimeError, match="ended with 3:\nwhy"):
        processes.run_watched([sys.executable, "-c", "print('why'); exit(3)"], tmp_path / "log", 60)
    with pytest.raises(RuntimeError, match="ran for more than 0.1 s"):
        processes.run_watched([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 0.1)


def figures_of(speeds, peak=10**9, mrr=None, processor=2.0):
    """Figures of a run with an epoch of each speed, in edges a second."""
    epochs = [run_figures.Epoch(1000, 1000 / speed, processor) for speed in speeds]
    return run_figures.RunFigures(epochs, sum(e.seconds for e in epochs) + 1, 3.5, peak, 20.0, 30.0, mrr)


def test_figures_of_a_run():
    run = figures_of([10, 100, 50, 20]).to_dict()
    assert run["first_edges_per_second"] == pytest.approx(10)
    assert run["edges_per_second"] == pytest.approx(50)  # of 100, 50, 20
    assert run["wall_edges_per_second"] == pytest.approx(4000 / (100 + 10 + 20 + 50 + 1))
    assert run["processor_seconds_per_million"] == pytest.approx(2000)
    runs = [figures_of([speed], mrr=mrr) for speed, mrr in ((10, None), (30, 0.25), (20, 0.75))]
    middle = run_figures.medians(runs)
    assert middle["edges_per_second"] == pytest.approx(20) and middle["mrr"] == pytest.approx(0.5)


@pytest.mark.usefixtures("warm_executable")
def test_product_limit_is_a_rate():
    assert product_limit.flops_per_positive(1000, 400) == 4_800_000
    rate = product_limit.measure_product_limit(2, 1, 40, 30, 20, "bfloat16", 0.05)
    assert 1e6 < rate < 1e15
    with pytest.raises(RuntimeError, match="matrix products ended with 1"):
        product_limit.measure_product_limit(1, 1, 40, 30, 20, "no_type", 0.05)


def test_peers_take_our_settings(tmp_path):
    """PyKEEN counts complex numbers as one."""
    sets = ["dataset=d", "model.dimension=24", "negatives.num_uniform=77", "training.num_epochs=4"]
    sets += ["training.batch_size=250"]
    config = load_config(None, [*sets, "optimizer.lr=0.25"])
    expected = {
        "dimension": 24,
        "num_uniform_negs": 77,
        "num_epochs": 4,
        "batch_size": 250,
        "workers": 3,
        "entities": {"entity": {"num_partitions": 4}},
        "eval_fraction": 0,
        "comparator": "dot",
        "loss_fn": "softmax",
        "lr": 0.5,
    }
    described = pbg_peer.describe(config, tmp_path, 3, 4, ["lr=0.5"])
    assert {name: described[name] for name in expected} == expected
    assert described["relations"][0]["operator"] == "complex_diagonal"
    with pytest.raises(InputError, match="'lr' is no key=value"):
        pbg_peer.describe(config, tmp_path, 1, 1, ["lr"])
    with pytest.raises(InputError, match="no rotate with softmax"):
        pbg_peer.describe(load_config(None, [*sets, "model.score_function=rotate"]), tmp_path, 1, 1, [])
    expected = {"model": "ComplEx", "dimension": 12, "num_negatives": 77, "batch_size": 250}
    described = pykeen_peer.describe(config, tmp_path, 2)
    assert {name: described[name] for name in expected} == expected
    distmult = load_config(None, [*sets, "model.score_function=distmult"])
    assert pykeen_peer.describe(distmult, tmp_path, 2)["dimension"] == 24
    with pytest.raises(InputError, match="got complex with logistic"):
        pykeen_peer.describe(load_config(None, [*sets, "loss.name=logistic"]), tmp_path, 2)


def test_peer_gets_every_triple_once(tmp_path):
    """The buckets, put together again with the ids of the whole, are the train split."""
    dataset, num_parts = Dataset.open(toy_dataset()), 3
    pbg_peer.export(dataset, tmp_path, num_parts)
    triples, counts = [], []
    for lhs, rhs in itertools.product(range(num_parts), repeat=2):
        with h5py.File(tmp_path / "train" / f"edges_{lhs}_{rhs}.h5") as file:
            assert file.attrs["format_version"] == 1
            heads, tails = file["lhs"][:] * num_parts + lhs, file["rhs"][:] * num_parts + rhs
            triples += zip(heads, file["rel"][:], tails)
    assert sorted(triples) == sorted(map(tuple, np.asarray(dataset.split("train"))))
    for part in range(num_parts):
        counts.append(int((tmp_path / "entities" / f"entity_count_entity_{part}.txt").read_text()))
    assert sum(counts) == dataset.num_entities("entity") and max(counts) - min(counts) <= 1


def test_peer_log():
    started = pbg_peer.timed_lines(PBG_LOG)[0][0] - 4.0
    samples = [(started, 0.0), (started + 100.0, 200.0)]
    run = pbg_peer.figures(processes.Finished(started, 30.0, 50.0, 10**9, samples), PBG_LOG, 0.25)
    assert [(epoch.edges, epoch.seconds) for epoch in run.epochs] == [(1000, 16.0), (1000, 5.0)]
    assert [epoch.processor_seconds for epoch in run.epochs] == pytest.approx([32.0, 10.0], rel=1e-5)
    assert run.edges_per_second == 200 and run.wall_seconds == pytest.approx(25.0)
    assert run.first_batch_seconds == pytest.approx(4.5) and run.mrr == 0.25
    assert pbg_peer.read_mrr(PBG_EVALUATION) == 0.28519


def test_given_options_win_over_a_table():
    args = training.parse(["--dataset", "d", "--table", "fb15k237-400", "--dimension", "100"])
    assert args.dimension == 100 and args.negatives == 1000 and args.epochs == 3
    assert "training.matmul_dtype=bfloat16" in training.settings(args, "bfloat16")
    assert "training.synchronous=false" not in training.settings(args, "bfloat16")
    asynchronous = training.settings(args, "float32:async")
    assert {"training.matmul_dtype=float32", "training.synchronous=false"} <= set(asynchronous)
    for table in training.TABLES:
        training.parse(["--dataset", "d", "--table", table])


def test_a_small_job_from_end_to_end(tmp_path):
    words = ["--dataset", toy_dataset(), "--config", "none", "--trainers", "1", "--mrr"]
    words += ["--epochs", "2", "--dimension", "8", "--negatives", "10", "--matmul_dtypes", "float32"]
    words += ["--json", tmp_path / "figures.json", "--work", tmp_path / "work"]
    done = run_script("benchmarks/training.py", *words, python=[*warm.python(), warm.PLAIN])
    report = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    (run,) = report["runs"]["ours, float32"]
    num_triples = len(Dataset.open(toy_dataset()).split("train"))
    assert [epoch["edges"] for epoch in run["epochs"]] == [num_triples] * 2
    marks = list(run["start_marks"].values())
    assert marks == sorted(marks) and 0 < marks[0] and run["first_batch_seconds"] == marks[-1]
    assert 0 < run["mrr"] <= 1 and run["peak_bytes"] > 10**8 and run["processor_seconds"] > 0
    assert "| ours, float32 |" in done.stdout and f"{run['mrr']:.4f}" in done.stdout


def test_partition_a_small_graph(tmp_path):
    """Beside a plain read of the same file; the graph stays for other tables."""
    work, figures = tmp_path / "work", tmp_path / "figures.json"
    words = ["partition", "--values", "3000", "--work", str(work), "--json", str(figures)]
    done = run_script("benchmarks/growth.py", *words)
    row = [cell.strip() for cell in done.stdout.splitlines()[-1].split("|")[1:-1]]
    assert row[0] == "3,000" and row[2] == "" and float(row[1]) > 0 and row[4].endswith("×")
    (row,) = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert row["ours"]["peak_bytes"] > 0 and row["pyarrow"]["seconds"] > 0
    assert len(Dataset.open(work / "dataset-3000").split("test")) == 1000
    assert (work / "pyarrow.log").read_text() == "1000\n"
