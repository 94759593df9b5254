"""What is said to be needed in /dev/shm against what DGL's own servers, optimizers and tables take there."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import PartSize, read_dataset_size
from dglkge.errors import InputError
from dglkge.launch.arguments import machine_needs
from dglkge.launch.process_plan import Places
from dglkge.model.choices import OPTIMIZERS
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.planning import shared_memory as shared_memory_need
from dglkge.typing import RELATION
from tests import warm
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import fitting_dim
from tests.toy_kg import REPOSITORY, toy_dataset

SERVER = Path(__file__).with_name("segments_of_server.py")
PAGE = 4096


def config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", *settings])


def segments(dataset: Path, part: int, folder: Path) -> dict[str, int]:
    """Return what a server of one part puts in /dev/shm; the graph gets a name of its own."""
    graph_name = json.loads((dataset / "dataset.json").read_text())["graph_name"]
    ip_config = folder / "ip_config.txt"
    ip_config.write_text("127.0.0.1 30050\n127.0.0.2 30050\n")
    command = [*warm.python(), str(SERVER), str(ip_config)]
    command += [str(dataset / "partitions" / f"{graph_name}.json"), str(part)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_parts, typed", [(1, True), (2, False)])
def test_graph_is_what_a_server_of_dgl_makes(tmp_path: Path, num_parts: int, typed: bool) -> None:
    dataset = toy_dataset(num_parts, typed)
    size = read_dataset_size(dataset).parts[num_parts - 1]
    sizes = segments(dataset, num_parts - 1, tmp_path)
    # so small a graph takes part of a page for each segment: the figure may be off by that much, no more
    assert abs(sum(sizes.values()) - shared_memory_need.graph_bytes(size)) <= len(sizes) * PAGE


def test_part_sizes_are_those_of_the_files() -> None:
    dataset = toy_dataset(2, method="metis")
    sizes = read_dataset_size(dataset)
    layout_rows = {"entity": 60, RELATION: 4}
    assert sizes.num_rows == layout_rows
    assert sizes.splits == {"train": 192, "valid": 24, "test": 24}
    # Triples are no edges of DGL's graph: one edge in each partition.
    assert [part.num_graph_edges for part in sizes.parts] == [1, 1]
    assert sum(part.num_edges for part in sizes.parts) == 192


def test_row_widths_are_the_models() -> None:
    for score_function, reciprocal in itertools.product(SCORE_FUNCTIONS, (True, False)):
        dim, reciprocal = fitting_dim(score_function, 6), reciprocal or score_function in FORWARD_ONLY
        settings = config(
            f"model.score_function={score_function}",
            f"model.dimension={dim}",
            f"model.reciprocal_relations={reciprocal}",
        )
        model = build_model(score_function, dim, reciprocal)
        for table in ("entity", RELATION):
            width = shared_memory_need.row_width(table, settings)
            assert width == model.table_width(table), (score_function, reciprocal, table)


def test_state_widths_are_the_optimizers() -> None:
    widths = {"sparse_adagrad": (7,), "row_adagrad": (1,), "sparse_adam": (1, 7, 7)}
    assert widths == {
        name: shared_memory_need.state_widths(7, config(f"optimizer.name={name}")) for name in OPTIMIZERS
    }


def test_bytes_by_hand() -> None:
    part = PartSize({"entity": 1000, RELATION: 10}, 5000, has_weights=True)
    settings = config("model.dimension=8", "optimizer.name=row_adagrad")
    assert shared_memory_need.table_bytes(part, settings) == 8 * PAGE + 1 * PAGE  # 32,000 and 640 bytes
    assert shared_memory_need.state_bytes(part, settings) == 1 * PAGE + 1 * PAGE  # 4,000 and 40 bytes
    graph = 11 * (8 + 8 + 8 + 4 + 1) + 1010 * (8 + 8 + 1) + 14 * PAGE
    assert shared_memory_need.graph_bytes(part) == graph
    # Source and number of an edge and the start of a node's edges stay where tables are files.
    assert shared_memory_need.structure_bytes(part) == 11 * 16 + 1010 * 8 + 4 * PAGE


def test_each_machine_has_its_own_figure() -> None:
    dataset = toy_dataset(2)
    settings = load_config(None, ["model.dimension=4096", f"dataset={dataset}"])
    needs = machine_needs(settings, Places(Path("/"), Path("/")), 2, 1, 1)
    rows = [sum(part.num_rows.values()) for part in read_dataset_size(dataset).parts]
    for need, num_rows in zip(needs, rows, strict=True):
        # A relation's row is two.
        assert need.shared_memory_bytes == pytest.approx(2 * 4 * 4096 * (num_rows + 2), rel=0.1)


def test_damaged_descriptions_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read .*dataset.json"):
        read_dataset_size(tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(toy_dataset(), folder)
    (folder / "partitions" / "report.json").write_text("[]")
    with pytest.raises(InputError, match="report.json holds list"):
        read_dataset_size(folder)
    (folder / "partitions" / "report.json").write_text("{}")
    with pytest.raises(InputError, match="no dataset folder.*'parts'"):
        read_dataset_size(folder)
    (folder / "dataset.json").write_text('{"graph_')
    with pytest.raises(InputError, match="dataset.json is cut off"):
        read_dataset_size(folder)
