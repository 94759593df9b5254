"""The training benchmark: its parts against hand-made input, and one small job from end to end."""

from __future__ import annotations

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
from measuring import our_job, pbg_peer, processes, product_limit, pykeen_peer, run_figures, tables
from tests.examples.scripts import run_script
from tests.toy_kg import toy_dataset

ROLLUP = b"""\
00400000-7ffe1000 ---p 00000000 00:00 0                                  [rollup]
Rss:              884 kB
Pss:              385 kB
Pss_Dirty:         68 kB
Pss_Anon:         301 kB
"""

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


def test_proportional_set_size():
    assert processes.proportional_bytes(ROLLUP) == 385 * 1024
    assert processes.proportional_bytes(b"") == 0


def test_watched_command_counts_its_children(tmp_path):
    """Memory and processor time of a grandchild count; the page cache of files does not."""
    work = "x = bytearray(200_000_000); import time; t = time.process_time()\n"
    work += "while time.process_time() < t + 1.2: pass"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}], check=True); print('done')"
    )
    before = time.time()
    done = processes.run_watched([sys.executable, "-c", parent], tmp_path / "log", 60)
    assert before <= done.started_at <= time.time() and done.seconds >= 1.2
    assert done.peak_bytes > 200_000_000 and done.processor_seconds >= 1.2
    assert all(0 <= seconds <= done.processor_seconds for _, seconds in done.processor_samples)
    known = processes.Finished(0.0, 4.0, 9.0, 1, [(10.0, 1.0), (12.0, 5.0), (14.0, 6.0)])
    assert known.processor_seconds_between(11.0, 13.0) == pytest.approx(2.5)
    assert (tmp_path / "log").read_text() == "done\n"


def test_watched_command_that_fails_or_does_not_end(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3:\nwhy"):
        processes.run_watched([sys.executable, "-c", "print('why'); exit(3)"], tmp_path / "log", 60)
    with pytest.raises(RuntimeError, match="ran for more than 0.1 s"):
        processes.run_watched([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 0.1)


def figures_of(speeds, peak=10**9, mrr=None, processor=2.0):
    """Figures of a run with an epoch of each speed, in edges a second."""
    epochs = [run_figures.Epoch(1000, 1000 / speed, processor) for speed in speeds]
    return run_figures.RunFigures(epochs, sum(e.seconds for e in epochs) + 1, 3.5, peak, 20.0, 30.0, mrr)


def test_figures_of_a_run():
    run = figures_of([10, 100, 50, 20])
    assert run.first_edges_per_second == pytest.approx(10)
    assert run.edges_per_second == pytest.approx(50)  # of 100, 50, 20
    assert run.wall_edges_per_second == pytest.approx(4000 / (100 + 10 + 20 + 50 + 1))
    assert run.processor_seconds_per_million == pytest.approx(2000)
    assert figures_of([10]).edges_per_second == pytest.approx(10)
    assert json.loads(json.dumps(run.to_dict()))["edges_per_second"] == pytest.approx(50)
    runs = [figures_of([speed], mrr=mrr) for speed, mrr in ((10, None), (30, 0.25), (20, 0.75))]
    middle = run_figures.medians(runs)
    assert middle["edges_per_second"] == pytest.approx(20) and middle["mrr"] == pytest.approx(0.5)
    assert run_figures.medians(runs[:1])["mrr"] is None


def test_table_shows_medians_and_ratios():
    runs = {
        "ours": [figures_of([1, 1000 * speed], mrr=0.5) for speed in (60, 50, 90)],
        "pbg": [figures_of([1, 1000 * speed], 2 * 10**9, processor=3.0) for speed in (20, 30, 10)],
    }
    head, rule, row, peer = tables.run_table(runs, "pbg", 10**6, {"ours": [1.2e11, 2e11, 1e11]}).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == peer.count("|")
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:4] == ["ours", "60,000", "3.00×"] and cells[6:8] == ["60", "50%"]
    assert cells[8:10] == ["3.5", "1.00"] and cells[10:13] == ["2000.0", "1.50×", "0.5000"]
    cells = [cell.strip() for cell in peer.split("|")]
    assert cells[1:4] == ["pbg", "20,000", ""] and cells[6:8] == ["", ""] and cells[9] == "2.00"
    columns = {"a": {"gather": 0.001, "score": 0.0025}, "b": {"gather": 0.002, "update": 1.5}}
    assert tables.columns_table("phase", columns, 1e3, 1).splitlines() == [
        "| phase | a | b |",
        "|---|--:|--:|",
        "| gather | 1.0 | 2.0 |",
        "| score | 2.5 |  |",
        "| update |  | 1,500.0 |",
    ]


def test_phases_of_a_batch():
    records = [
        {"epoch": 0, "num_batches": 10, "phase_seconds": {"gather": 99.0}},
        {"epoch": 1, "num_batches": 10},
        {"epoch": 1, "num_batches": 10, "phase_seconds": {"gather": 4.0, "score": 1.0}},
        {"epoch": 2, "num_batches": 10, "phase_seconds": {"gather": 2.0, "score": 3.0}},
    ]
    assert our_job.mean_phases(records, 2) == {"gather": 6.0 / 40, "score": 4.0 / 40}
    assert our_job.mean_phases(records[:1], 1) == {"gather": 9.9}
    assert our_job.mean_phases(records[1:2], 1) == {}


def test_product_limit_is_a_rate():
    assert product_limit.flops_per_positive(1000, 400) == 4_800_000
    rate = product_limit.measure_product_limit(2, 1, 40, 30, 20, "bfloat16", 0.05)
    assert 1e6 < rate < 1e15
    with pytest.raises(RuntimeError, match="matrix products ended with 1"):
        product_limit.measure_product_limit(1, 1, 40, 30, 20, "no_type", 0.05)


def test_peers_take_our_settings(tmp_path):
    """PyKEEN counts complex numbers as one."""
    sets = ["dataset=d", "model.dimension=24", "negatives.num_uniform=77", "training.num_epochs=4"]
    described = pbg_peer.describe(
        load_config(None, [*sets, "optimizer.lr=0.25", "training.batch_size=250"]), tmp_path, 3, 4, ["lr=0.5"]
    )
    assert described["dimension"] == 24 and described["num_uniform_negs"] == 77
    assert described["num_epochs"] == 4 and described["batch_size"] == 250 and described["workers"] == 3
    assert described["entities"] == {"entity": {"num_partitions": 4}} and described["eval_fraction"] == 0
    assert described["relations"][0]["operator"] == "complex_diagonal" and described["comparator"] == "dot"
    assert described["loss_fn"] == "softmax" and described["lr"] == 0.5
    with pytest.raises(InputError, match="no rotate with softmax"):
        pbg_peer.describe(load_config(None, [*sets, "model.score_function=rotate"]), tmp_path, 1, 1, [])
    with pytest.raises(InputError, match="'lr' is no key=value"):
        pbg_peer.describe(load_config(None, sets), tmp_path, 1, 1, ["lr"])
    sets += ["training.batch_size=250"]
    described = pykeen_peer.describe(load_config(None, sets), tmp_path, 2)
    assert described["model"] == "ComplEx" and described["dimension"] == 12
    assert described["num_negatives"] == 77 and described["batch_size"] == 250
    distmult = pykeen_peer.describe(load_config(None, [*sets, "model.score_function=distmult"]), tmp_path, 2)
    assert distmult["dimension"] == 24
    with pytest.raises(InputError, match="got complex with logistic"):
        pykeen_peer.describe(load_config(None, [*sets, "loss.name=logistic"]), tmp_path, 2)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_peer_gets_every_triple_once(tmp_path, num_parts):
    """The buckets, put together again with the ids of the whole, are the train split."""
    dataset = Dataset.open(toy_dataset())
    pbg_peer.export(dataset, tmp_path, num_parts)
    blocks = []
    for lhs in range(num_parts):
        for rhs in range(num_parts):
            with h5py.File(tmp_path / "train" / f"edges_{lhs}_{rhs}.h5") as file:
                assert file.attrs["format_version"] == 1
                head, tail = file["lhs"][:] * num_parts + lhs, file["rhs"][:] * num_parts + rhs
                blocks.append(np.column_stack([head, file["rel"][:], tail]))
    everything = np.concatenate(blocks)
    assert sorted(map(tuple, everything)) == sorted(map(tuple, np.asarray(dataset.split("train"))))
    counts = [
        int((tmp_path / "entities" / f"entity_count_entity_{part}.txt").read_text())
        for part in range(num_parts)
    ]
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
    assert {"training.matmul_dtype=float32", "training.synchronous=false"} <= set(
        training.settings(args, "float32:async")
    )
    for table in training.TABLES:
        training.parse(["--dataset", "d", "--table", table])


def test_a_small_job_from_end_to_end(tmp_path):
    words = ["--dataset", toy_dataset(), "--config", "none", "--trainers", "1", "--mrr"]
    words += ["--epochs", "2", "--dimension", "8", "--negatives", "10", "--matmul_dtypes", "float32"]
    words += ["--json", tmp_path / "figures.json", "--work", tmp_path / "work"]
    done = run_script("benchmarks/training.py", *words, python=[sys.executable])
    report = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    (run,) = report["runs"]["ours, float32"]
    num_triples = len(Dataset.open(toy_dataset()).split("train"))
    assert [epoch["edges"] for epoch in run["epochs"]] == [num_triples] * 2
    marks = list(run["start_marks"].values())
    assert marks == sorted(marks) and 0 < marks[0] and run["first_batch_seconds"] == marks[-1]
    assert 0 < run["mrr"] <= 1 and run["peak_bytes"] > 10**8 and run["processor_seconds"] > 0
    assert "| ours, float32 |" in done.stdout and f"{run['mrr']:.4f}" in done.stdout
