"""``dglkge data check``: the figures of a data set."""

from __future__ import annotations

import json


def test_table_and_json(call, dataset):
    status, out, err = call("quality", dataset.path, "--json")
    assert (status, err) == (0, "")
    quality = json.loads(out)
    stored = json.loads((dataset.path / "partitions" / "report.json").read_text())["quality"]
    assert quality == stored == dataset.quality()
    status, out, err = call("quality", dataset.path)
    assert (status, err) == (0, "")
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert lines[0] == "quality of the data"
    assert f"triples {' '.join(str(count) for count in quality['triples'].values())}" in lines
    assert lines[-1].startswith(f"connected components of train: {quality['components']['count']}; ")


def test_no_data_set(call, tmp_path):
    status, out, err = call("quality", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith(f"dglkge: error: {tmp_path} is no dataset folder: it has no dataset.json")
