"""The examples that a user copies: each runs, and is short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.examples.scripts import run_script
from tests.functional.job import ip_config
from tests.toy_kg import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def run(folder: Path, name: str, *arguments: object, epochs: int = 3) -> str:
    """Run an example with so many epochs, and return what it prints."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    script = folder / name
    script.write_text(re.sub(r'("training.num_epochs": )\d+', rf"\g<1>{epochs}", text), encoding="utf-8")
    return run_script(script, *arguments).stdout


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
    words = ["--output", str(tmp_path / "graph"), "--ip-config", str(ip_config(tmp_path))]
    done = run_script("examples/dgl_graphsage/compare.py", *words)
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
