"""What hosts of this folder share, which is nothing; the benchmark of several hosts runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import cluster
from tests import warm


def test_hosts_share_nothing(two_hosts):
    first, second = two_hosts
    first.run(["sh", "-c", "echo mine > note; echo mine > /dev/shm/segment"], check=True)
    assert (first.folder / "note").read_text() == "mine\n"
    assert list(second.folder.iterdir()) == []
    assert not Path("/dev/shm/segment").exists()
    shell = "pwd; ls; ls /dev/shm; ls -d /proc/[0-9]* | wc -l"
    where, number = second.run(["sh", "-c", shell], capture_output=True, text=True).stdout.split()
    assert where == str(second.work) and int(number) < 10
    first.run(["rm", "note", "/dev/shm/segment"], check=True)


@pytest.mark.usefixtures("hosts_can_be_made", "warm_runners")
def test_the_table_of_the_benchmark_compares_the_same_batches(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(warm.COPIED_BUILD, "1")
    output = tmp_path / "figures.json"
    sizes = "--num-entities 300 --num-triples 4000 --dimension 16 --batch-size 256"
    rounds = f"--hosts 2 --rounds 1 --warm 1 --batches 4 --output {output} --systems"
    systems = ["stock DGL", "stock DGL, helped", "exact"]
    monkeypatch.setattr(sys, "argv", ["cluster.py", *sizes.split(), *rounds.split(), *systems])
    assert cluster.main() == 0
    rows = json.loads(output.read_text())
    assert [row["system"] for row in rows] == systems
    assert all(row["num_hosts"] == 2 and row["wall_seconds"] > 0 for row in rows)
    stock, helped, exact = (row["sent_bytes"] for row in rows)
    assert exact > 16 and stock > 2 * helped > 32  # relations come again and again
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[4].split(" | ")[6] == f"{exact / stock:.2f}"
