"""The GraphSAGE example: the same script with DGL's optimizer and with ours, two trainers each."""

from __future__ import annotations

import json
from pathlib import Path

from tests.examples.scripts import run_script
from tests.functional.job import ip_config


def test_both_optimizers_train_the_same_script_and_ours_learns(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "graph"), "--ip-config", str(ip_config(tmp_path))]
    done = run_script("examples/dgl_graphsage/compare.py", *words)
    curves = json.loads((tmp_path / "graph" / "curves.json").read_text(encoding="utf-8"))
    sparse, dgl = curves["dglkge"], curves["dgl"]
    assert len(sparse["losses"]) == len(dgl["losses"]) == 10
    assert sparse["losses"][-1] < 0.1 * sparse["losses"][0] and sparse["accuracy"] > 0.95
    for epoch, (mine, other) in enumerate(zip(sparse["losses"], dgl["losses"]), start=1):
        assert f"{epoch:>8}  {mine:>14.4f}  {other:>22.4f}" in done.stdout
