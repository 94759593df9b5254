"""What machine k gets, never another machine's partition, and what it needs in /dev/shm."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dglkge.config import load_config
from dglkge.data.dataset_files import (
    FORMAT_VERSION,
    SPLITS,
    Field,
    PartSize,
    check_partition,
    read_dataset_size,
)
from dglkge.errors import InputError
from dglkge.launch.arguments import machine_needs, partition_file, script_config
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.synced_site import plan_sync
from dglkge.launch.table_storage import MachineNeeds
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.planning import shared_memory as shared_memory_need
from dglkge.typing import RELATION
from tests import warm
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import fitting_dim
from tests.toy_kg import REPOSITORY, toy_dataset

DATASET = "dataset.json relations.tsv train.npy entities/part0.txt partitions/kg.json".split()
DATASET += ["partitions/node_ids_part1.npy", *(f"partitions/part{part}/edges.npy" for part in (0, 1, 10))]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    names = "jobs/train.py jobs/helper.py jobs/notes.txt my.yaml big.bin package/main.py".split()
    for name in (*names, *(f"data/{name}" for name in DATASET)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    texts = dict.fromkeys((Field.NAME, Field.FINGERPRINT, Field.PART_METHOD), "")
    sizes = {Field.ENTITY_TYPES: {}, Field.SPLITS: dict.fromkeys(SPLITS, 0), Field.EDGE_TYPES: []}
    numbers = {Field.FORMAT_VERSION: FORMAT_VERSION, Field.NUM_RELATIONS: 0, Field.NUM_PARTS: 11}
    description = {**texts, **sizes, **numbers, Field.GRAPH_NAME: "kg", Field.HAS_WEIGHTS: False}
    (folder / "data" / "dataset.json").write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize("part_id", [1, 10])
def test_own_partition_only(here: Path, part_id: int) -> None:
    config = load_config(None, ["dataset=data"])
    command = ["jobs/train.py", "--config=my.yaml"]
    ((folders, names),) = plan_sync(command, config, None, Places(here, Path("/work")), part_id).items()
    edges = f"partitions/part{part_id}/edges.npy"
    expected = [f"data/{name}" for name in DATASET if "/edges.npy" not in name or name == edges]
    assert sorted(names) == sorted(["jobs/helper.py", "jobs/train.py", "my.yaml", *expected])
    assert folders == (str(here), "/work")


def test_modules_and_graphs_of_other_scripts(here: Path) -> None:
    places = Places(here, Path("/work"))
    (names,) = plan_sync(["-m", "package.main", "x"], None, None, places, 0).values()
    assert names == ["package/main.py"]
    files = [{"node_feats": f"p{part}/n.dgl", "part_graph": f"p{part}/g.dgl"} for part in range(2)]
    (here / "ring.json").write_text(json.dumps({"part-0": files[0], "part-1": files[1]}))
    (names,) = plan_sync(["package/main.py"], None, "ring.json", places, 1).values()
    assert sorted(names) == ["p1/g.dgl", "p1/n.dgl", "package/main.py", "ring.json"]


def test_absolute_paths_stay(here: Path, tmp_path: Path) -> None:
    """A file outside goes to the same path; a relative one may not lead out; inside it moves."""
    far = tmp_path / "far.yaml"
    far.touch()
    trees = plan_sync(["package/main.py", str(far)], None, None, Places(here, Path("/w")), 0)
    assert trees[str(tmp_path), str(tmp_path)] == ["far.yaml"]
    with pytest.raises(InputError, match="lies outside of"):
        plan_sync(["package/main.py", "../far.yaml"], None, None, Places(here, Path("/w")), 0)
    places = Places(Path("/here"), Path("/there"))
    assert places.on_machines(Path("a/b")) == Path("/there/a/b")
    assert places.on_machines(Path("/here/a")) == Path("/there/a")
    assert places.on_machines(Path("/hereafter/a")) == Path("/hereafter/a")


def test_configuration_of_a_script(here: Path) -> None:
    """--config and --set as examples/train.py reads them; other and wrong command lines have none."""
    (here / "my.yaml").write_text("model: {dimension: 8}\n")
    config = script_config(["train.py", "--config", "my.yaml", "--other", "--set", "dataset=data"], here)
    assert (config.model.dimension, config.dataset) == (8, "data")
    assert partition_file(config, here) == here / "data" / "partitions" / "kg.json"
    for words in (["--epochs", "3"], ["--set", "no_such_field=3"], ["--config"]):
        assert script_config(["train.py", *words], here) is None


def test_needs_that_are_not_known_here(here: Path) -> None:
    """Where the data set is not here, the launcher does not guess; where tables shall be it knows."""
    places = Places(here, Path("/work"))
    assert partition_file(None, here) is None
    assert machine_needs(None, places, 2, 1, 1) == [MachineNeeds()] * 2
    config = load_config(None, ["dataset=absent", "tables.storage=disk", "tables.folder=here"])
    assert partition_file(config, here) is None
    needs = MachineNeeds(storage="disk", table_folders=("/work/here",))
    assert machine_needs(config, places, 2, 1, 1) == [needs] * 2


def test_a_partition_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    path.write_text('{"num_parts": 2, "part-0": {"part_graph": "g0"}, "part-1": {"part_graph": "g1"}}')
    (tmp_path / "g1").touch()
    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
    assert check_partition(path, 1, 2) == check_partition(path, None, 2) == fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"num_parts": 4}', "{} has 4 partitions and ip_config has 2 machines; each machine holds one"),
        (b'{"num_parts": "2"}', "{} has no 'num_parts'; expected the file that DGL's partitioner wrote"),
        (b'{"num_parts": 2}', "{} names no files of partition 0"),
        (b'{"num_parts": 2, "part-0": {"part_graph": "g0"}}', "partition 0 is not whole: "),
        (b"\xff\xfe\xfd", "{} is cut off or no JSON: "),
        (None, "cannot read {}: No such file"),
    ],
)
def test_partition_files_that_do_not_fit(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "ring.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        check_partition(path, 0, 2)
    assert message.format(path) in str(caught.value)


PAGE = 4096
SERVER = """
import json, os, sys
os.environ["DGL_ROLE"] = "server"
import dglkge  # before dgl
import dgl

def sizes():
    return {entry.name: entry.stat().st_blocks * 512 for entry in os.scandir("/dev/shm") if entry.is_file()}

before, (part, ip_config, part_config) = sizes(), sys.argv[1:]
server = dgl.distributed.DistGraphServer(int(part), ip_config, 1, 1, part_config, graph_format="csc")
print()
print(json.dumps([size for name, size in sizes().items() if name not in before]))
del server  # removes what it has made
"""


@pytest.mark.parametrize("num_parts, typed", [(1, True), (2, False)])
def test_graph_is_what_a_server_of_dgl_makes(tmp_path: Path, num_parts: int, typed: bool) -> None:
    dataset, ip_config = toy_dataset(num_parts, typed), tmp_path / "ip_config.txt"
    size = read_dataset_size(dataset).parts[num_parts - 1]
    graph_name = json.loads((dataset / "dataset.json").read_text())["graph_name"]
    ip_config.write_text("127.0.0.1 30050\n127.0.0.2 30050\n")
    command = [*warm.python(), "-c", SERVER, str(num_parts - 1), str(ip_config)]
    command += [str(dataset / "partitions" / f"{graph_name}.json")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])  # of what a server that is not started puts there
    # So small a graph takes part of a page for each segment: the figure may be off by that much, no more.
    assert abs(sum(sizes) - shared_memory_need.graph_bytes(size)) <= len(sizes) * PAGE


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_row_widths_are_the_models(name: str, reciprocal: bool) -> None:
    dim, reciprocal = fitting_dim(name, 6), reciprocal or name in FORWARD_ONLY
    words = {"score_function": name, "dimension": dim, "reciprocal_relations": reciprocal}
    settings = load_config(None, ["dataset=x", *(f"model.{key}={value}" for key, value in words.items())])
    model = build_model(name, dim, reciprocal)
    for table in ("entity", RELATION):
        assert shared_memory_need.row_width(table, settings) == model.table_width(table)


def test_bytes_by_hand() -> None:
    part = PartSize({"entity": 1000, RELATION: 10}, 5000, has_weights=True)
    settings = load_config(None, ["dataset=x", "model.dimension=8", "optimizer.name=row_adagrad"])
    assert shared_memory_need.table_bytes(part, settings) == 8 * PAGE + 1 * PAGE  # 32,000 and 640 bytes
    assert shared_memory_need.state_bytes(part, settings) == 1 * PAGE + 1 * PAGE  # 4,000 and 40 bytes
    graph = 11 * (8 + 8 + 8 + 4 + 1) + 1010 * (8 + 8 + 1) + 14 * PAGE
    assert shared_memory_need.graph_bytes(part) == graph
    # Source and number of an edge and the start of a node's edges stay where tables are files.
    assert shared_memory_need.graph_bytes(part, shared_memory_need.STRUCTURE) == 11 * 16 + 1010 * 8 + 4 * PAGE


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
    (folder / "partitions" / "report.json").write_text("{}")
    with pytest.raises(InputError, match="no dataset folder.*'parts'"):
        read_dataset_size(folder)
