"""A whole job in a container's or scheduler's surroundings, and what its records say about it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from dglkge.cli.main import main
from tests.functional.job import TIME_LIMIT_SECONDS, TRAIN, ip_config, sets
from tests.launch.test_any_machine import NEW_PIDS
from tests.toy_kg import REPOSITORY, toy_dataset

SETTINGS = (
    "model.dimension=8",
    "training.batch_size=48",
    "training.num_epochs=2",
    "evaluation.valid_every_epochs=1",
)


def starter() -> list[str]:
    """Return words that make a command process 1 of its own, where the kernel allows it; else none."""
    command = [shutil.which("unshare") or "/bin/false", *NEW_PIDS]
    return [] if subprocess.run([*command, "/bin/true"], capture_output=True).returncode else command


def test_a_job_trains_where_little_is_there(tmp_path: Path, capsys) -> None:
    """Spaces and letters of other scripts in all paths, home read-only, no program on the path (no compiler),
    256 open files, the C locale, no standard input; the launcher is process 1 where that can be made."""
    folder = tmp_path / "Größe 1 данные"
    folder.mkdir()
    shutil.copytree(toy_dataset(), folder / "ein Datensatz é")
    places = (f"dataset={folder / 'ein Datensatz é'}", f"output={folder / 'ein Lauf ü'}")
    variables = {"PATH": "/none", "HOME": "/proc", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *("/bin/sh", "-c", 'ulimit -n 256; exec "$@" 0<&-', "sh", *starter()),
            *(sys.executable, "-m", "dglkge.cli.launch", "--ip_config", str(ip_config(folder))),
            *("--num_trainers", "2", "--log_dir", str(folder / "die Logs"), "--log_format", "json"),
            *(TRAIN, *sets((*places, *SETTINGS))),
        ],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        encoding="utf-8",
        timeout=TIME_LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert {"trainer 0", "launcher"} <= {line["process"] for line in lines}
    # What it records: memory of every process, the servers among them, and where the logs are.
    assert main(["watch", str(folder / "ein Lauf ü"), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["state"] == "finished" and state["progress"]["epochs_done"] == 2.0
    assert set(state["processes"]) == {"trainer 0", "trainer 1", "server 0"}
    for numbers in state["processes"].values():
        # The interpreter with torch and DGL; and less than this machine could have.
        assert 50 * 2**20 < numbers["memory_bytes"] < 2**36
        assert 0 < numbers["shared_bytes"] < numbers["memory_bytes"]
    assert state["valid"]["last"]["epoch"] == 2 and 0 < state["test"]["mrr"] <= 1
    assert state["logs"] and Path(state["logs"]).samefile(folder / "die Logs")
    messages = [event["message"] for event in state["events"]]
    assert any(text.startswith("all processes ended well") for text in messages), messages
    assert any(text.startswith("epoch 2: valid MRR ") for text in messages), messages
