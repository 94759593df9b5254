"""Examples and notebooks that a user copies: they run, and the launcher takes the schedulers' options."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dglkge.launch.arguments import parse_arguments
from dglkge.launch.remote.node_place import NodePlace, node_place
from tests import warm
from tests.functional import job
from tests.toy_kg import REPOSITORY

EXAMPLES, TUTORIALS = REPOSITORY / "examples", REPOSITORY / "docs" / "tutorials"
NOTEBOOKS = {"dataframe.ipynb": (), "turtle.ipynb": ("pyoxigraph",)}
"""With the modules that not every installation has."""


def run(folder: Path, name: str, *arguments: object, epochs: int = 3) -> str:
    """Run an example with so many epochs, and return what it prints."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    script = folder / name
    script.write_text(re.sub(r'("training.num_epochs": )\d+', rf"\g<1>{epochs}", text), encoding="utf-8")
    return job.run([*warm.python(), str(script), *map(str, arguments)]).stdout


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two CSV files: the first countries and the next ones."""
    lines = (EXAMPLES / "countries.csv").read_text(encoding="utf-8").splitlines()
    folder = tmp_path_factory.mktemp("facts")
    paths = [folder / "old.csv", folder / "new.csv"]
    for path, part in zip(paths, (lines[1:70], lines[70:90])):
        path.write_text("\n".join([lines[0], *part]), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def trained(facts: list[Path]) -> tuple[Path, str]:
    """The run of the first example, and what it printed."""
    output = facts[0].with_name("run")
    return output, run(output.parent, "csv_to_predictions.py", facts[0], output, epochs=30)


def test_a_csv_becomes_predictions(trained: tuple[Path, str]) -> None:
    printed = trained[1]
    assert float(re.findall(r"^test MRR: (\S+)$", printed, re.MULTILINE)[0]) > 0.1
    assert "(Albania, borders, ?), known answers left out\n" in printed
    relations = printed.partition("(Albania, ?, Greece)\n")[2]
    assert re.search(r"^\d +\d +borders .* (train|valid|test)$", relations, re.MULTILINE)


def test_new_triples_are_trained_on_old_rows(trained: tuple[Path, str], facts: list[Path]) -> None:
    printed = run(facts[0].parent, "warm_start.py", trained[0], facts[1], facts[1].with_name("warm"))
    head, relation, tail = facts[1].read_text(encoding="utf-8").splitlines()[1].split(",")
    assert f"({head}, {relation}, ?); the new triples say {tail}\n" in printed


def test_faiss_gives_the_models_own_order(trained: tuple[Path, str]) -> None:
    pytest.importorskip("faiss")
    import dglkge

    words = (trained[0], trained[0].with_name("index"), "Albania", "borders")
    printed = run(trained[0].parent, "faiss_search.py", *words)
    best = dglkge.open_run(trained[0]).predict_tails("Albania", "borders", k=5)
    assert [line.split(maxsplit=1)[1] for line in printed.splitlines()] == best["entity"].tolist()


def test_an_entity_that_was_not_trained_is_ranked_by_its_text(facts: list[Path]) -> None:
    pytest.importorskip("sklearn")
    printed = run(facts[0].parent, "text_features.py", facts[0], facts[0].with_name("texts"))
    assert re.match(r" +rank +entity +score .*\n0 +1 ", printed) and len(printed.splitlines()) == 6


def test_three_models_are_compared_on_the_valid_split(facts: list[Path]) -> None:
    printed = run(facts[0].parent, "compare_models.py", facts[0], facts[0].with_name("models"))
    valid = dict(re.findall(r"^(complex|distmult|rotate) +(0\.\d+) ", printed, re.MULTILINE))
    best, test = re.findall(r"^(\w+): test MRR (0\.\d+)$", printed, re.MULTILINE)[0]
    assert len(valid) == 3 and 0 < float(test) <= 1
    assert best == max(valid, key=lambda name: float(valid[name]))


def test_both_optimizers_train_the_same_script_and_ours_learns(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "graph"), "--ip-config", str(job.ip_config(tmp_path))]
    done = job.run([*warm.python(), str(EXAMPLES / "dgl_graphsage" / "compare.py"), *words])
    curves = json.loads((tmp_path / "graph" / "curves.json").read_text(encoding="utf-8"))
    sparse, dgl = curves["dglkge"], curves["dgl"]
    assert len(sparse["losses"]) == len(dgl["losses"]) == 10
    assert sparse["losses"][-1] < 0.1 * sparse["losses"][0] and sparse["accuracy"] > 0.95
    for epoch, (mine, other) in enumerate(zip(sparse["losses"], dgl["losses"]), start=1):
        assert f"{epoch:>8}  {mine:>14.4f}  {other:>22.4f}" in done.stdout


def test_examples_are_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.rglob("*"):
        if path.suffix in (".py", ".sh", ".yaml", ".yml", ".sbatch"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name
            top = path.relative_to(EXAMPLES).parts[0]
            assert f"`{top}`" in listed or f"`{top}/`" in listed, path.name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_its_saved_outputs_are_whole(name, tmp_path, monkeypatch):
    """Its kernel, and what that starts, are copies of a process that has imported torch and DGL."""
    assert {path.name for path in TUTORIALS.glob("*.ipynb")} == set(NOTEBOOKS)
    saved = json.loads((TUTORIALS / name).read_text(encoding="utf-8"))
    codes = [cell for cell in saved["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    shown = json.dumps([cell["outputs"] for cell in codes])
    assert "Traceback" not in shown and "/tmp/" not in shown and str(Path.home()) not in shown

    for package in ("nbformat", "nbclient", "ipykernel", *NOTEBOOKS[name]):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import nbclient
    import nbformat

    for variable, value in {**job.environment(), "PYTHONPATH": str(REPOSITORY)}.items():
        monkeypatch.setenv(variable, value)
    # Where the command dglkge is installed; the tests may run without an activated environment.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    shutil.copy(TUTORIALS / name, tmp_path)
    notebook = nbformat.read(tmp_path / name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources)
    client.create_kernel_manager()
    client.km.kernel_spec.argv = [*warm.python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()  # raises at the first cell that fails
    assert (tmp_path / "runs").is_dir()
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    errors = [out for cell in codes for out in cell.outputs if out.get("name") == "stderr"]
    assert not errors, errors


def place(words: list[str], environment: dict[str, str]) -> NodePlace | None:
    """Return where a node program of a job would be; it reads no ip_config.txt."""
    assert words[0] == "dglkge-launch"
    options, script = parse_arguments(words[1:])
    assert Path(script[0]).name == "train.py" and script[1:] == ("--config", "my.yaml")
    assert options.secret_file
    return node_place(options, pytest.fail, {}, environment)


def shell_line(path: Path, beginning: str) -> list[str]:
    """Return the words of the one line of a shell script that begins so, which may be continued."""
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    (line,) = [line for line in lines if line.startswith(beginning)]
    return shlex.split(line.partition("||")[0])


def test_slurm_and_two_machines() -> None:
    words = shell_line(EXAMPLES / "slurm" / "job.sbatch", "srun ")
    slurm = {"SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}
    slurm["SLURM_STEP_NODELIST"] = "cn[07-08]"
    assert place(words[words.index("dglkge-launch") :], slurm) == NodePlace(1, 2, "cn07", 29450)
    options, script = parse_arguments(shell_line(EXAMPLES / "two_machines.sh", "dglkge-launch ")[1:])
    assert options.sync and options.ip_config == "$machines" and (REPOSITORY / script[0]).is_file()


def test_kubernetes_and_docker() -> None:
    """The extra of the Dockerfile exists, and the manifest's script is in the image."""
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((EXAMPLES / "kubernetes" / "jobset.yml").read_text(encoding="utf-8"))["spec"]
    (jobs,) = spec["replicatedJobs"]
    nodes = jobs["template"]["spec"]
    (container,) = nodes["template"]["spec"]["containers"]
    node = place(container["command"], {"JOB_COMPLETION_INDEX": "1"})
    host = f"kge-{jobs['name']}-0-0.{spec['network']['subdomain']}"
    assert node == NodePlace(1, nodes["completions"], host, 29450)
    assert nodes["completions"] == nodes["parallelism"] and nodes["completionMode"] == "Indexed"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in nodes["template"]["spec"]["volumes"]}
    text = (EXAMPLES / "kubernetes" / "Dockerfile").read_text(encoding="utf-8")
    assert "COPY . /opt/dglkge" in text and "/opt/dglkge[train]" in text
    assert "\ntrain = [" in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    services = yaml.safe_load((EXAMPLES / "docker" / "compose.yml").read_text(encoding="utf-8"))["services"]
    places = [place(shlex.split(service["command"]), {}) for service in services.values()]
    assert places == [NodePlace(rank, 2, "node0", 29450) for rank in range(len(services))]
