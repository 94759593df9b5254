"""Several trainings in one process, as notebooks and searches do: each as if it were the first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import warm
from tests.functional.job import launch_command, run
from tests.functional.results import datasets
from tests.toy_kg import REPOSITORY, toy_dataset

SCRIPT = str(REPOSITORY / "tests" / "functional" / "repeated_train.py")
ADAM = ("model.dimension=24", "optimizer.name=sparse_adam")


def settings(output: Path, *changes: str, typed: bool = False) -> list[str]:
    return [
        *(f"dataset={toy_dataset(typed=typed)}", f"output={output}", "model.dimension=16"),
        *("training.num_epochs=2", "training.batch_size=50", "training.progress=never"),
        *("negatives.num_uniform=10", *changes),
    ]


def in_one_process(*trainings: list[str]) -> list[str]:
    """Train one after another; return what each printed."""
    done = run([*warm.python(), SCRIPT, *map(json.dumps, trainings)])
    assert done.stderr == ""
    return done.stdout.splitlines()


def tables(output: Path) -> dict[str, bytes]:
    """Return the bits of every array of the newest version, by file and name."""
    arrays = {name: array.tobytes() for name, array in datasets(output).items() if array.dtype.kind == "f"}
    assert any("embeddings" in name for name in arrays)
    return arrays


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fill numba's cache: the process that compiles a loop may round otherwise than those that load it."""
    folder = tmp_path_factory.mktemp("compiled")
    in_one_process(settings(folder / "adagrad"), settings(folder / "adam", *ADAM))


@pytest.mark.usefixtures("in_foreground")
def test_later_trainings_are_as_in_a_fresh_process(tmp_path: Path) -> None:
    """Also after some that did not end well; a run that was stopped goes on from its commit."""
    kinds = {"same": ((), False), "wider": (ADAM, False), "typed": ((), True)}
    fresh = {}
    for name, (changes, typed) in kinds.items():
        output = tmp_path / "fresh" / name
        fresh[name] = (in_one_process(settings(output, *changes, typed=typed)), tables(output))
    later = {
        "raise": ["raise", *settings(tmp_path / "raise")],
        "after raise": settings(tmp_path / "after raise"),
        "interrupt": ["interrupt", *settings(tmp_path / "interrupt")],
        "after interrupt": settings(tmp_path / "after interrupt"),
        "stop": ["signal", *settings(tmp_path / "resumed")],
        "resumed": settings(tmp_path / "resumed"),
        "wider": settings(tmp_path / "wider", *ADAM),
        "typed": settings(tmp_path / "typed", typed=True),
    }
    printed = dict(zip(later, in_one_process(*later.values()), strict=True))
    endings = [printed[name] for name in ("raise", "interrupt", "stop")]
    assert endings == ["ValueError: asked to raise", "KeyboardInterrupt: ", "Preempted: 143"]
    as_fresh = {"after raise": "same", "after interrupt": "same", "wider": "wider", "typed": "typed"}
    for name, kind in as_fresh.items():
        assert ([printed[name]], tables(tmp_path / name)) == fresh[kind], name
    assert sorted(tables(tmp_path / "resumed").values()) == sorted(fresh["same"][1].values())


TWICE = """
import sys, dglkge
config = dglkge.load_config(None, sys.argv[1:])
for _ in range(2):
    with dglkge.join_cluster(config) as cluster:
        print("joined", cluster.world.rank, flush=True)
"""


def test_a_launched_process_joins_once(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    run(launch_command(tmp_path, 2, (), script=(str(script), *settings(tmp_path / "run"))), status=2)
    logs = "".join(path.read_text() for path in tmp_path.glob("logs*/trainer-*.log"))
    assert logs.count("joined") == 2 and "Traceback" not in logs
    assert logs.count("dglkge: error: ") == 1
    assert "error: this process cannot join a second training: a launched process trains once: start " in logs
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("kg")]
