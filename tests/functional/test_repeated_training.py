"""Several trainings in one process, as notebooks and searches do: each as if it were the first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.functional.job import ip_config, run
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


def alone(output: Path, *changes: str, typed: bool = False) -> tuple[list[str], dict[str, bytes]]:
    """Train in a fresh process; return what it printed and its tables."""
    return in_one_process(settings(output, *changes, typed=typed)), tables(output)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fill numba's cache: the process that compiles a loop may round otherwise than those that load it."""
    folder = tmp_path_factory.mktemp("compiled")
    in_one_process(settings(folder / "adagrad"), settings(folder / "adam", *ADAM))


@pytest.fixture(scope="module")
def plain(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, bytes]]:
    """What a training in a fresh process prints, and its tables."""
    return alone(tmp_path_factory.mktemp("plain") / "alone")


def test_later_trainings_are_as_in_a_fresh_process(tmp_path: Path, plain: Any) -> None:
    """The same again, a wider one with another optimizer, and one of another data set."""
    cases = {"same": ((), False), "wider": (ADAM, False), "typed": ((), True)}
    trainings = [settings(tmp_path / name, *changes, typed=typed) for name, (changes, typed) in cases.items()]
    _, *printed = in_one_process(settings(tmp_path / "first"), *trainings)
    for line, (name, (changes, typed)) in zip(printed, cases.items(), strict=True):
        fresh = plain if name == "same" else alone(tmp_path / "alone" / name, *changes, typed=typed)
        assert ([line], tables(tmp_path / name)) == fresh, name


@pytest.mark.parametrize(
    ("event", "told"), [("raise", "ValueError: asked to raise"), ("interrupt", "KeyboardInterrupt: ")]
)
@pytest.mark.usefixtures("in_foreground")
def test_after_a_training_that_did_not_end_well(tmp_path: Path, plain: Any, event: str, told: str) -> None:
    printed = in_one_process([event, *settings(tmp_path / "first")], settings(tmp_path / "second"))
    assert printed[0] == told
    assert (printed[1:], tables(tmp_path / "second")) == plain


@pytest.mark.usefixtures("in_foreground")
def test_the_same_run_goes_on_in_the_same_process(tmp_path: Path, plain: Any) -> None:
    """What was committed counts: Preempted has committed three batches, the rest follows."""
    printed = in_one_process(["signal", *settings(tmp_path / "run")], settings(tmp_path / "run"))
    assert printed[0] == "Preempted: 143"
    assert sorted(tables(tmp_path / "run").values()) == sorted(plain[1].values())


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    script = (
        "import sys, dglkge\n"
        "config = dglkge.load_config(None, sys.argv[1:])\n"
        "def main():\n"
        "    with dglkge.join_cluster(config):\n"
        "        with dglkge.join_cluster(config):\n"
        "            pass\n"
        "sys.exit(dglkge.run_command('nested', main))\n"
    )
    done = run([*warm.python(), "-c", script, *settings(tmp_path / "run")], status=2)
    assert done.stderr == (
        "nested: error: this process cannot join a second training: it trains already: leave the block of "
        "the first join_cluster before, or use processes\n"
    )


def test_a_launched_process_joins_once(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys, dglkge\n"
        "config = dglkge.load_config(None, sys.argv[1:])\n"
        "for _ in range(2):\n"
        "    with dglkge.join_cluster(config) as cluster:\n"
        "        print('joined', cluster.world.rank, flush=True)\n",
        encoding="utf-8",
    )
    command = [*warm.python(), "-m", "dglkge.cli.launch", "--ip_config", str(ip_config(tmp_path))]
    command += ["--num_trainers", "2", "--num_omp_threads", "1", "--log_dir", str(tmp_path / "logs")]
    run([*command, str(script), *settings(tmp_path / "run")], status=2)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("trainer-*.log"))
    assert logs.count("joined") == 2 and "Traceback" not in logs
    assert logs.count("dglkge: error: ") == 1
    assert (
        "dglkge: error: this process cannot join a second training: a launched process trains once: start "
        "the next training as a job of its own\n"
    ) in logs
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("kg")]
