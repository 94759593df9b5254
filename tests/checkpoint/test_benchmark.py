"""The benchmark of checkpoints runs, and its figures belong together."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from tests.toy_kg import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "benchmarks" / "checkpoint.py"


def test_figures_belong_together(monkeypatch, tmp_path, capsys):
    output = tmp_path / "figures.json"
    arguments = ["--folder", tmp_path, "--num-rows", "3000", "--dim", "8", "--num-repeats", "1"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--output", str(output)])
    runpy.run_path(str(SCRIPT))["main"]()
    figures, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert figures["table_megabytes"] == figures["copy_megabytes"] == 0.2
    assert figures["write_share_of_plain"] == pytest.approx(
        figures["checkpoint_write_megabytes_per_second"] / figures["plain_write_megabytes_per_second"],
        abs=0.02,
    )
    assert 0 < figures["training_stall_seconds"] <= figures["background_write_seconds"]
    for name, value in figures.items():
        assert f"{name:40} {value}" in shown
    assert list(tmp_path.iterdir()) == [output]  # nothing is left on the disk
