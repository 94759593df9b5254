"""A training process opens each file of its data set once, DGL's own reading and checksums aside."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests import warm
from tests.toy_kg import REPOSITORY, toy_dataset

TRAIN_ALONE = """
import collections, json, sys
from pathlib import Path
opened = []

def note(event, arguments):
    frame = sys._getframe(1) if event == "open" else None
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(("dgl.", "dglkge")):
        frame = frame.f_back
    if frame is not None and frame.f_globals["__name__"].startswith("dglkge"):
        opened.append(str(arguments[0]))

sys.addaudithook(note)
import numpy as np
from dglkge import build_trainer, join_cluster, load_config, remaining_epochs_until
from dglkge.data.partition_layout import load_array
dataset, output, source = sys.argv[1:]
config = load_config(None, [
    f"dataset={dataset}", f"output={output}", f"checkpoint.init_path={source}", "model.dimension=8",
    "training.batch_size=64", "training.progress=never", "training.num_epochs=1", "evaluation.split=test",
])
with join_cluster(config) as cluster:
    trainer = build_trainer(config, cluster)
    for epoch in remaining_epochs_until(1):
        for batch in trainer.batches():
            trainer.step(batch)
    trainer.evaluate("test")
array = Path(output, "one.npy")
np.save(array, np.zeros(3))
load_array(array, (3,), np.float64)
# numpy opens an array several times to map it: that counts as once.
opens_of_array = opened.count(str(array))
counts = collections.Counter(path[len(dataset) + 1:] for path in opened if path.startswith(dataset))
print(json.dumps({name: n / (opens_of_array if name.endswith(".npy") else 1) for name, n in counts.items()}))
"""


def trained(dataset: Path, output: Path, source: Path | str) -> dict[str, float]:
    """Train an epoch in a process alone; return how often dglkge opened each file of the data set."""
    command = [*warm.python(), "-c", TRAIN_ALONE, str(dataset), str(output), str(source)]
    env = {**os.environ, "DGLKGE_NO_VERIFY": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPOSITORY, env=env)
    assert done.returncode == 0, done.stderr
    counts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_a_trainer_opens_its_data_set_once(tmp_path: Path) -> None:
    dataset = toy_dataset()
    trained(dataset, tmp_path / "first", "")
    counts = trained(dataset, tmp_path / "second", tmp_path / "first")
    graph = f"partitions/{json.loads((dataset / 'dataset.json').read_text())['graph_name']}.json"
    expected = {"dataset.json", "relations.tsv", "entities/entity.txt", graph, "partitions/report.json"}
    for split in ("train", "valid", "test"):
        expected |= {f"{split}.npy", f"known_{split}.index"}
    expected |= {f"partitions/part0/{name}.npy" for name in ("triple_ids", "edges")}
    for name in ("entity", "relation"):
        expected |= {f"partitions/node_ids_{name}.npy", f"partitions/original_ids_{name}.npy"}
    assert counts == dict.fromkeys(expected, 1)
