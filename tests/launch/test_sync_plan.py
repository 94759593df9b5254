"""What machine k gets: never another machine's partition."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dglkge.config import load_config
from dglkge.data.dataset_files import check_partition
from dglkge.errors import InputError
from dglkge.launch.arguments import machine_needs, partition_file, script_config
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.synced_site import plan_sync
from dglkge.launch.table_storage import MachineNeeds

DATASET = (
    "dataset.json", "relations.tsv", "train.npy", "entities/part0.txt", "partitions/kg.json",
    "partitions/node_ids_part1.npy", "partitions/part0/edges.npy", "partitions/part1/edges.npy",
    "partitions/part10/edges.npy",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    names = "jobs/train.py jobs/helper.py jobs/notes.txt my.yaml big.bin package/main.py".split()
    for name in (*names, *(f"data/{name}" for name in DATASET)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "data" / "dataset.json").write_text('{"graph_name": "kg"}')
    return folder


@pytest.mark.parametrize("part_id", [0, 1, 10])
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
    with pytest.raises(InputError, match=r"partition 0 is not whole: .*/g0 is missing"):
        check_partition(path, 0, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"num_parts": 4}', "{} has 4 partitions and ip_config has 2 machines; each machine holds one"),
        (b'{"num_parts": "2"}', "{} has no 'num_parts'; expected the file that DGL's partitioner wrote"),
        (b'{"num_parts": 2}', "{} names no files of partition 0"),
        (b"[2]", "{} holds list, expected a JSON object"),
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
