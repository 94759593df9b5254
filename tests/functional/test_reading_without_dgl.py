"""All commands that read a run work in an environment from which DGL is removed.

Each begins with nothing of dglkge imported. Partition and train run in plain Python in test_wheel.py.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dglkge.cli.main import COMMANDS
from tests import warm
from tests.functional.job import environment, run, train_alone
from tests.toy_kg import ring_triples, toy_dataset, write_splits


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with everything that this one has, but DGL."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    for source in {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}:
        for path in Path(source).iterdir():
            if path.name != "dgl" and not path.name.startswith(("dgl-", "__pycache__")):
                (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, and triples."""
    folder, dataset = tmp_path_factory.mktemp("reading"), toy_dataset(typed=True)
    settings = ["training.num_epochs=2", "model.dimension=16", "evaluation.valid_every_epochs=1"]
    (folder / "dataset").symlink_to(dataset)
    train_alone(f"dataset={dataset}", f"output={folder / 'run'}", *settings)
    write_splits(folder / "triples", ring_triples())
    (folder / "values.tsv").write_text("".join(f"person{number}\t{number}\n" for number in range(12)))
    # As many triples, entities and relations as Nations has, in place of a download.
    (folder / "named" / "Nations").mkdir(parents=True)
    rows = [f"e{i % 14}\tr{i % 55}\te{i // 14 % 14}\n" for i in range(1992)]
    for split, part in (("train", rows[:1592]), ("valid", rows[1592:1791]), ("test", rows[1791:])):
        (folder / "named" / "Nations" / f"{split}.tsv").write_text("".join(part))
    (folder / "run.yaml").write_text(f"dataset: {dataset}\noutput: new\n")
    return folder


COPIES = """
import json, os, runpy, sys
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    words = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in enumerate((os.devnull, "stdout", "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = words
        if words[0] == "-c":
            exec(words[1])
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs a module, or a program after ``-c``, with the words of each line in a copy of itself."""

IMPORTED = "torch numba pandas pyarrow.parquet h5py pydantic rich.progress scipy.sparse".split()
"""Imported once for all copies: what takes longest."""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def copy(python: Path, folder: Path) -> Iterator[Command]:
    """Run Python without DGL."""
    copies = subprocess.Popen(
        [str(python), "-c", COPIES, *IMPORTED],
        cwd=folder, env={**environment(), "DGLKGE_DATA": str(folder / "named")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert copies.stdin is not None and copies.stdout is not None

    def run_copy(*words: str) -> subprocess.CompletedProcess[str]:
        copies.stdin.write(json.dumps(words) + "\n")
        copies.stdin.flush()
        status = int(copies.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, status, out, err)

    yield run_copy
    copies.stdin.close()
    assert copies.wait(timeout=60) == 0


@pytest.fixture
def command(copy: Command) -> Command:
    """Run ``dglkge`` without DGL."""
    return functools.partial(copy, "dglkge")


READING = {
    "data list": [],
    "data get": ["nations"],
    "config show": [],
    "config schema": [],
    "config recipes": [],
    "evaluate": ["run", "--limit", "3"],
    "predict": ["run", "--head", "person0", "--relation", "lives_in"],
    "calibrate": ["run"],
    "complete": ["run", "--output", "missing.parquet", "-k", "1"],
    "ask": ["run", "?x : (person1, knows, ?y), (?y, lives_in, ?x)"],
    "explain": ["run", "--head", "person1", "--relation", "lives_in", "--tail", "town1"],
    "attributes": ["run", "values.tsv"],
    "data vectors": ["values.tsv", "--output", "vectors.parquet"],
    "similar": ["run", "person0"],
    "checkpoint export": ["run", "--format", "npy", "--output", "exported"],
    "data check": ["dataset"],
    "job watch": ["run", "--once"],
    "report": ["run", "--output", "report.html"],
    "checkpoint inspect": ["run"],
    "checkpoint verify": ["run"],
    "checkpoint convert": ["run", "--to", "tsv", "--output", "converted"],
    "plan": ["run.yaml"],
    "job list": [],
}


def test_every_command_has_a_case() -> None:
    """Tests of those that read no run are below."""
    assert {*READING, *TRAINING, "serve", "job stop", "launch"} == set(COMMANDS)


@pytest.mark.parametrize("name", READING)
def test_reading(command: Command, name: str) -> None:
    done = command(*name.split(), *READING[name])
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr


def test_stop_finds_no_job(command: Command) -> None:
    done = command("stop", "run")
    assert done.returncode == 2 and "no job" in done.stderr


def test_serve(python: Path, folder: Path) -> None:
    pytest.importorskip("uvicorn")
    command = [str(python), "-m", "dglkge", "serve", "run", "--port", "0", "--json"]
    server = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(server.stdout.readline())
            assert lines[-1]
        address = json.loads("".join(lines))["url"].rstrip("/")
        with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
            assert json.load(answer)["status"] == "ok"
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode in (0, 143)


def test_python(copy: Command, folder: Path) -> None:
    """The answers are those of an environment with DGL, which is not there."""
    done = copy("-c", "import dglkge, dgl")
    assert done.returncode == 1 and done.stderr.endswith("ModuleNotFoundError: No module named 'dgl'\n")
    program = "import dglkge\nrun = dglkge.open_run('run')\n"
    program += "print(run.predict_tails('person0', 'lives_in', k=3).to_csv())\n"
    without = copy("-c", program)
    assert without.returncode == 0, without.stderr
    assert without.stdout.count("town") == 3
    assert run([*warm.python(), "-c", program], folder=folder).stdout == without.stdout


TRAINING = {
    "data build": ["--input", "triples", "--output", "new"],
    "data extend": ["--dataset", "dataset", "--input", "triples", "--output", "new", "--name", "x"],
    "train": ["run.yaml"],
    "tune": ["run.yaml", "--output", "new"],
}
"""Commands that need DGL."""


def test_what_trains_names_the_extra(command: Command, copy: Command, folder: Path) -> None:
    then = " and dglkge-engine" if sys.version_info >= (3, 13) else ""
    told = f"needs dgl 2.1.0, and it is not installed here: pip install 'dglkge[train]'{then}"
    for name, words in TRAINING.items():
        done = command(*name.split(), *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"dglkge: error: dglkge {name} {told}\n"
    done = copy("dglkge.cli.launch", "some_script.py")
    assert (done.returncode, done.stderr) == (2, f"dglkge-launch: error: dglkge-launch {told}\n")
    done = copy("-c", "import dglkge; dglkge.train('triples', 'complex', output='new')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"dglkge.errors.InputError: dglkge.train {told}"
    assert not (folder / "new").exists()
