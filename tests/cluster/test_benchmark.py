"""The benchmark of several hosts runs, and its figures belong together."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import psutil
import pytest

import cluster
import cluster_trainer
from tests import warm

SIZES = ["--num-entities", "300", "--num-triples", "4000", "--dimension", "16", "--batch-size", "256"]


def test_the_table_compares_the_same_batches_on_two_hosts(hosts_can_be_made, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", warm.runners(os.environ)["PYTHONPATH"])
    monkeypatch.setenv(warm.COPIED_BUILD, "1")
    output = tmp_path / "figures.json"
    options = ["--hosts", "2", "--systems", "stock DGL", "stock DGL, helped", "exact", "--rounds", "1"]
    options += ["--warm", "1", "--batches", "4"]
    monkeypatch.setattr(sys, "argv", ["cluster.py", *SIZES, *options, "--output", str(output)])
    assert cluster.main() == 0
    stock, helped, exact = json.loads(output.read_text())
    systems = [row["system"] for row in (stock, helped, exact)]
    assert systems == ["stock DGL", "stock DGL, helped", "exact"]
    for row in (stock, helped, exact):
        assert row["num_hosts"] == 2 and row["wall_seconds"] > 0
        assert row["sent_bytes"] > 16  # at least a row of 16 numbers for every fourth edge
    assert stock["sent_bytes"] > 2 * helped["sent_bytes"]  # relations come again and again
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[4].split(" | ")[6] == f"{exact['sent_bytes'] / stock['sent_bytes']:.2f}"


def test_processor_time_is_counted_in_less_than_ticks():
    command = [sys.executable, "-c", "import sys\nfor _ in sys.stdin: print(sum(range(100_000)), flush=True)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        seconds = [cluster_trainer.process_cpu_seconds(process.pid)]
        for _ in range(5):
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            seconds.append(cluster_trainer.process_cpu_seconds(process.pid))
        process.stdin.close()
        process.wait()
        # A sum takes about a millisecond.
        assert all(1e-4 < after - before < 1 for before, after in zip(seconds, seconds[1:]))
        with pytest.raises(psutil.NoSuchProcess):
            cluster_trainer.process_cpu_seconds(process.pid)


def test_a_row_is_compared_with_stock_and_with_itself_on_one_host():
    alone = cluster.Row("exact", 1, 1, 0.0, 2e-5, 0.1)
    crowded = cluster.Row("exact", 1, 4, 0.0, 2.5e-5, 0.1)
    stock = cluster.Row("stock DGL", 4, 4, 4000.0, 9e-5, 0.4)
    row = cluster.Row("exact", 4, 4, 1000.0, 3e-5, 0.1)
    helped = cluster.Row("stock DGL, helped", 4, 4, 2000.0, 5e-5, 0.2)
    everything = (alone, crowded, stock, helped, row)
    rows = {(row.system, row.num_hosts, row.num_trainers): row for row in everything}
    expected = "| exact | 4 | 4 | 1,000 | 30.0 | 100 | 0.25 | 0.50 | 4.0 | 2.0 | 1.50 | 1.20 |"
    assert cluster.describe(row, rows) == expected
    assert cluster.describe(stock, rows) == "| stock DGL | 4 | 4 | 4,000 | 90.0 | 400 |  |  |  |  |  |  |"


def test_medians_layouts_and_batches():
    figures = [(3, 1, 9), (1, 2, 8), (2, 7, 7)]
    runs = [cluster.Row("exact", 4, 4, sent, cpu, wall) for sent, cpu, wall in figures]
    assert cluster.median(runs) == cluster.Row("exact", 4, 4, 2, 2, 8)
    assert cluster.layouts([1, 2], "exact") == [(1, 1), (1, 2), (2, 2)]
    assert cluster.layouts([1, 2], "bfloat16 wire") == [(1, 1), (2, 2)]
    assert cluster.layouts([2], "stock DGL") == [(2, 2)]
    assert cluster.layouts([4], "machine order") == [(4, 4)]
    assert cluster.layouts([1, 4], "machine order") == [(1, 1), (1, 4), (4, 4)]
    arguments = argparse.Namespace(batch_size=1000, batch_per_trainer=None)
    assert cluster.batch_sizes(4, arguments) == (1000, 1000)
    arguments.batch_per_trainer = 300
    assert [cluster.batch_sizes(num, arguments) for num in (1, 4)] == [(300, 300), (1200, 300)]
