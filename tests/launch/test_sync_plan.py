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
    for name in (
        "jobs/train.py",
        "jobs/helper.py",
        "jobs/notes.txt",
        "my.yaml",
        "big.bin",
        "package/main.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name in DATASET:
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).touch()
    (folder / "data" / "dataset.json").write_text('{"graph_name": "kg"}')
    return folder


def names(files: dict[tuple[str, str], list[str]]) -> list[str]:
    (names,) = files.values()
    return sorted(names)


@pytest.mark.parametrize("part_id", [0, 1, 10])
def test_own_partition_only(here: Path, part_id: int) -> None:
    config = load_config(None, ["dataset=data"])
    command = ["jobs/train.py", "--config=my.yaml"]
    trees = plan_sync(command, config, None, Places(here, Path("/work")), part_id)
    edges = f"partitions/part{part_id}/edges.npy"
    expected = [f"data/{name}" for name in DATASET if "/edges.npy" not in name or name == edges]
    assert names(trees) == sorted(["jobs/helper.py", "jobs/train.py", "my.yaml", *expected])
    assert list(trees) == [(str(here), "/work")]


def test_module(here: Path) -> None:
    trees = plan_sync(["-m", "package.main", "x"], None, None, Places(here, Path("/work")), 0)
    assert names(trees) == ["package/main.py"]


def test_graph_of_another_script(here: Path) -> None:
    files = {part: {"node_feats": f"{part}/n.dgl", "part_graph": f"{part}/g.dgl"} for part in ("p0", "p1")}
    (here / "ring.json").write_text(json.dumps({"part-0": files["p0"], "part-1": files["p1"]}))
    trees = plan_sync(["package/main.py"], None, "ring.json", Places(here, Path("/work")), 1)
    assert names(trees) == ["p1/g.dgl", "p1/n.dgl", "package/main.py", "ring.json"]


def test_absolute_paths_stay(here: Path, tmp_path: Path) -> None:
    """A file outside goes to the same path; a relative one may not lead out."""
    (tmp_path / "far.yaml").touch()
    trees = plan_sync(
        ["package/main.py", str(tmp_path / "far.yaml")], None, None, Places(here, Path("/w")), 0
    )
    assert trees[str(tmp_path), str(tmp_path)] == ["far.yaml"]
    with pytest.raises(InputError, match="lies outside of"):
        plan_sync(["package/main.py", "../far.yaml"], None, None, Places(here, Path("/w")), 0)


def test_places() -> None:
    """Inside, a path moves with the workspace; outside, it stays."""
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
    assert script_config(["train.py", "--epochs", "3"], here) is None
    assert script_config(["train.py", "--set", "no_such_field=3"], here) is None
    assert script_config(["train.py", "--config"], here) is None


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
    """The files of one partition must be there, those of others need not."""
    path = tmp_path / "ring.json"
    path.write_text(
        '{"num_parts": 2, "part-0": {"part_graph": "part0/g"}, "part-1": {"part_graph": "part1/g"}}'
    )
    (tmp_path / "part1").mkdir()
    (tmp_path / "part1" / "g").touch()
    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
    assert check_partition(path, 1, 2) == check_partition(path, None, 2) == fingerprint
    with pytest.raises(InputError, match=r"partition 0 is not whole: .*part0/g is missing"):
        check_partition(path, 0, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"num_parts": 4}', "{} has 4 partitions and ip_config has 2 machines; each machine holds one"),
        (b'{"num_parts": "2"}', "{} has no 'num_parts'; expected the file that DGL's partitioner wrote"),
        (b'{"num_parts": 2}', "{} names no files of partition 0"),
        (b"[2]", "{} holds list, expected a JSON object"),
        (b"{", "{} is cut off or no JSON: "),
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
