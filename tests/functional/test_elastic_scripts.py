"""``dglkge.elastic`` in scripts of other projects: killed, stopped, resized."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import dglkge
from tests import warm
from tests.functional import job as commands
from tests.functional.results import assert_near
from tests.toy_kg import REPOSITORY

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
PARTITION = """
import sys
from pathlib import Path
import dglkge
import dgl
import torch
torch.manual_seed(5)
dgl.distributed.partition_graph(dgl.rand_graph(60, 300), "own", 1, sys.argv[1])
"""
BATCHES = 4 * 2 * 5 - 1
"""Epochs, loops of an epoch, batches of a loop; one loop is left before its last batch."""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    commands.run([*warm.python(), "-c", PARTITION, str(folder)])
    return folder


def launch(folder: Path, trainers: int, *words: str, status: int = 0, options: Sequence[str] = ()) -> str:
    """Run the script under the launcher; return what it printed."""
    folder.mkdir(exist_ok=True)
    logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
    command = [*warm.python(), "-m", "dglkge.cli.launch", "--ip-config", str(commands.ip_config(folder))]
    command += ["--num-trainers", str(trainers), "--log-dir", str(logs), *options]
    command += ["--part-config", str(folder.parent / "own.json"), SCRIPT, str(folder), *words]
    done = commands.run(command, status)
    return done.stdout + done.stderr


def trained(run: Path) -> dict[str, np.ndarray]:
    """Return every row and the optimizer's state of a run's newest version."""
    arrays = {}
    checkpoint = dglkge.open_checkpoint(run)
    for name in checkpoint.entity_types:
        arrays[name] = checkpoint.part(name, 0)[0].numpy()
        arrays |= {f"{name} {key}": tensor.numpy() for key, tensor in checkpoint.state(name, 0).items()}
    return arrays


def assert_equal(run: Path, other: Path) -> None:
    """Compare two runs bit for bit."""
    assert_near(trained(run), trained(other), 0, 0)


@pytest.fixture(scope="module")
def undisturbed(graph: Path) -> Path:
    """A run of two trainers from the first to the last batch."""
    printed = launch(graph / "undisturbed", 2)
    assert "epochs before: 0 None" in printed and "INFO starting at epoch 0" in printed
    assert len((graph / "undisturbed" / "batches.txt").read_text().splitlines()) == BATCHES
    return graph / "undisturbed"


def test_rows_state_and_widths_are_in_the_checkpoint(undisturbed: Path) -> None:
    rows = trained(undisturbed / "run")
    shapes = {name: values.shape for name, values in rows.items()}
    assert shapes["nodes"] == (60, 4) and shapes["edges"] == (300, 3) and len(shapes) == 6
    with pytest.raises(dglkge.InputError, match="has tables and no model of links"):
        _ = dglkge.open_run(undisturbed / "run").model


def test_a_killed_job_goes_on_by_itself(graph: Path, undisturbed: Path) -> None:
    """Killed in its first batch, before there is a version, and in the second loop of an epoch."""
    folder = graph / "killed"
    folder.mkdir()
    (folder / "order").write_text("0 0 0 kill\n1 1 3 kill\n")
    launch(folder, 2, options=["--max-restarts", "2"])
    assert not (folder / "order").read_text()
    assert_equal(folder / "run", undisturbed / "run")


def test_a_stopped_job_trains_every_batch_once(graph: Path, undisturbed: Path) -> None:
    folder = graph / "stopped"
    folder.mkdir()
    (folder / "order").write_text("1 1 2 stop")
    printed = launch(folder, 2, status=143)
    assert "INFO stopped as asked: 1 epochs and 3 batches done, committed" in printed
    printed = launch(folder, 2)
    assert "INFO resumed: 1 epochs are finished, at batch 3 of its loop 2" in printed
    assert "INFO starting at epoch 1" in printed
    lines = (folder / "batches.txt").read_text()
    assert lines == (undisturbed / "batches.txt").read_text()
    assert_equal(folder / "run", undisturbed / "run")
    # All epochs are finished: nothing is trained, and nothing written.
    assert "INFO epochs until 4 are finished already" in launch(folder, 2)
    assert (folder / "batches.txt").read_text() == lines


def test_epochs_go_on_at_other_sizes_as_adaptdl_has_it(graph: Path) -> None:
    """An open epoch begins anew, as its batches are others; an epoch whose end was committed does not."""
    folder = graph / "resized"
    folder.mkdir()
    (folder / "order").write_text("1 0 2 stop")
    launch(folder, 2, status=143)
    printed = launch(folder, 1, "--leave-in", "2", status=5)
    reason = "seed or number of trainers have changed"
    assert f"WARNING epoch 1, which was open, begins anew: {reason}" in printed
    printed = launch(folder, 2)
    assert "epochs before: 2 None" in printed and "INFO starting at epoch 2" in printed
    epochs = [int(line.split()[0]) for line in (folder / "batches.txt").read_text().splitlines()]
    assert epochs == [0] * 10 + [1] * 3 + [1] * 9 + [2] * 10 + [3] * 10


def test_alone_it_is_elastic_too_with_a_store(graph: Path) -> None:
    """The second run starts with an empty folder each time: what it goes on from is in its store."""
    script = [*warm.python(), SCRIPT]
    folders = [graph / "alone", graph / "alone-killed"]
    for folder in folders:
        folder.mkdir()
    commands.run([*script, str(folders[0]), "--alone"])
    options = ["--options", json.dumps({"storage": f"file://{folders[1]}/store"})]
    for order, status in (("1 0 1 kill", -signal.SIGKILL), ("3 1 1 kill", -signal.SIGKILL), ("", 0)):
        if order:
            (folders[1] / "order").write_text(order)
        commands.run([*script, str(folders[1]), "--alone", *options], status)
        if order:
            shutil.rmtree(folders[1] / "run")
    assert_equal(folders[1] / "run", folders[0] / "run")


def test_without_it_epochs_warn(graph: Path) -> None:
    printed = launch(graph / "without", 1, "--without")
    assert printed.count("WARNING epochs are counted from 0: nothing restores them after a restart") == 1


MISTAKES = {
    "elastic: every epochs is -1; expected a finite number of at least 0": {"every": {"epochs": -1}},
    "elastic: seed is -1; expected a whole number of at least 0, or None": {"seed": -1},
    "elastic: embeddings has a int; allowed: dgl.distributed.DistEmbedding": {"embeddings": [1]},
    "elastic: objects: 'a' is a int without state_dict and load_state_dict": {"objects": {"a": 1}},
    "elastic: the checkpoint is of {'name': 'SparseAdam, RowAdagrad'}, this job has": {"optimizer": "other"},
    "unknown embedding in original_ids 'x'": {"original_ids": {"x": []}},
    "elastic: the checkpoint has the rows of 'nodes' by ids of 1 partitions": {
        "original_ids": {"nodes": list(range(60))}
    },
}


def test_a_mistake_is_one_line(undisturbed: Path) -> None:
    words = ["--alone", "--mistakes", json.dumps(list(MISTAKES.values()))]
    done = commands.run([*warm.python(), SCRIPT, str(undisturbed), *words])
    lines = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    for line, message in zip(lines, MISTAKES, strict=True):
        assert line.startswith(f"refused: {message}")


def test_an_example_that_was_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    example, graph = REPOSITORY / "examples" / "dgl_graphsage", tmp_path / "graph"
    commands.run([*warm.python(), str(example / "make_graph.py"), "--output", str(graph)])
    config = next(graph.glob("*.json"))
    runs = [tmp_path / "run", tmp_path / "killed"]
    for run in runs:
        command = [*commands.PLAIN, "-m", "dglkge.cli.launch", "--num-trainers", "2", "--max-restarts", "2"]
        command += ["--ip-config", str(commands.ip_config(tmp_path)), "--part-config", str(config)]
        command += ["--log-dir", str(tmp_path / f"logs-{run.name}")]
        command += [str(example / "train.py"), "--num-epochs", "4", "--output", str(run)]
        with commands.started(command) as job:
            if run.name == "killed":
                commands.wait_for(run / "checkpoint" / "v2" / "manifest.json", job)
                commands.processes_of(job, "client")[1].kill()
            printed = job.communicate(timeout=commands.TIME_LIMIT_SECONDS)[0]
        assert job.returncode == 0, printed
    assert (tmp_path / "logs-killed" / "attempt-1").is_dir()
    assert_equal(runs[1], runs[0])
