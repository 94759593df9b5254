"""Benchmarks in control groups: tables on a disk and a whole path; arguments, figures, who is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import limited_memory
import out_of_core
from dglkge.errors import InputError
from measuring import disk_traffic, memory_group

MIB = 2**20


def write(folder: Path, rows: np.ndarray, version: int = 1) -> Path:
    (folder / "checkpoint" / f"v{version}").mkdir(parents=True)
    latest = folder / "checkpoint" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(f"v{version}")
    with h5py.File(latest / f"embeddings_entity_0.v{version}.h5", "w") as file:
        file.attrs["config/json"] = str(folder)
        file.create_dataset("embeddings", data=rows)
        file.create_dataset("optimizer/sum", data=rows[:, 0])
    return folder


def test_tables_are_compared_bit_by_bit(tmp_path):
    compare = out_of_core.different_tables
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows[1, 1] = np.nan
    checkpoint = write(tmp_path / "one", rows)
    # An older version does not count.
    write(tmp_path / "other", rows + 1)
    assert compare(checkpoint, write(tmp_path / "other", rows, version=2)) == []
    rows[2, 2] = np.nextafter(rows[2, 2], np.float32(9))
    changed = write(tmp_path / "changed", rows)
    assert compare(checkpoint, changed) == ["embeddings_entity_0:embeddings"]
    assert compare(checkpoint, tmp_path / "none") == ["files ['embeddings_entity_0'] and []"]
    with h5py.File(changed / "checkpoint" / "v1" / "embeddings_entity_0.v1.h5", "a") as file:
        del file["optimizer/sum"]
    assert compare(checkpoint, changed) == ["embeddings_entity_0", "embeddings_entity_0:embeddings"]


def test_the_limit_is_a_share_of_the_tables_and_the_memory_beside_them():
    plan = out_of_core.Plan(table_bytes=800 * MIB, own_bytes=300 * MIB, ranges=None)

    def limit(*words: str) -> int:
        return out_of_core.memory_limit(out_of_core.build_parser().parse_args(["--work", "w", *words]), plan)

    assert limit() == 500 * MIB
    assert limit("--beside", "0") == 200 * MIB
    assert limit("--beside", "1G", "--share", "0.5") == (400 + 1024) * MIB
    assert limit("--limit", "64M") == 64 * MIB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "1"], "--epochs must be at least 2, got 1"),
        (["--share", "1.5"], "--share must be between 0 and 1, got 1.5"),
        (["--beside", "much"], "'much' is no size"),
    ],
)
def test_mistakes_are_errors_before_anything_runs(tmp_path, capsys, words, message):
    assert out_of_core.main(["--work", str(tmp_path / "work"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_the_expiry_of_dirty_pages_is_restored(tmp_path, monkeypatch):
    file = tmp_path / "expiry"
    file.write_text("3000\n")
    monkeypatch.setattr(out_of_core, "EXPIRY", file)
    with out_of_core.expiry(0):
        assert file.read_text() == "3000\n"
    with pytest.raises(KeyError), out_of_core.expiry(3600):
        assert file.read_text() == "360000\n"
        raise KeyError
    assert file.read_text() == "3000\n"


def test_rows_of_the_table():
    ranges = {"num_ranges": 8, "order": "inside_out", "loads": 29, "read_bytes": 3 * 10**9}
    memory = {"limit_bytes": 0, "edges_per_second": 1000.0}
    disk = {"limit_bytes": 10**9, "edges_per_second": 750.0, "peak_group_bytes": 9 * 10**8}
    disk.update(read_bytes=25 * 10**8, written_bytes=35 * 10**8, different_tables=[])
    killed = {"limit_bytes": 10**9, "edges_per_second": 1.0, "different_tables": ["a:b"]}
    figures = {
        "plan": {"table_bytes": 2 * 10**9, "own_bytes": 10**9, "ranges": ranges},
        "disk": "vda (ext4)",
        "runs": {out_of_core.MEMORY: [memory], out_of_core.DISK: [disk, disk], out_of_core.KILLED: [killed]},
        "peer_problem": "killed\nat once",
    }
    lines = out_of_core.report(figures).splitlines()
    assert lines[2:5] == [
        "| in memory | none |  | 1,000 | 1.00 |  |  |  |  |",
        "| on disk, limited | 1.00 | 0.90 | 750 | 0.75 | 2.50 | 3.50 | 3.00 | yes |",
        "| killed and resumed | 1.00 | 0.00 |  |  |  |  |  | no: a:b |",
    ]
    assert {line.count("|") for line in lines[:5]} == {10}
    assert lines[-1] == "PyTorch-BigGraph is left out: killed"


@pytest.fixture
def group():
    """A control group of 64 MiB, if this process may make one."""
    try:
        made = memory_group.MemoryGroup(64 * MIB)
    except InputError as error:
        pytest.skip(str(error))
    with made:
        yield made
    assert not made.path.exists()


def test_a_group_limits_its_processes_and_kills_them_at_the_end(group):
    fill = "x = bytearray(b'x' * 256 * 2**20); print(len(x))"
    done = subprocess.run(
        group.command([sys.executable, "-c", fill]), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9 and not done.stdout
    assert group.out_of_memory_kills() == 1
    assert 32 * MIB < group.peak_bytes() <= 64 * MIB
    sleeper = subprocess.Popen(group.command(["sleep", "600"]))
    while sleeper.pid not in group.processes():
        assert sleeper.poll() is None
    group.kill()
    assert sleeper.wait(10) == -9 and group.processes() == []


def test_bytes_between_two_moments(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("1 0 10 5 1 0 20 5 0 0 0")
    disk = disk_traffic.Disk("disk", "ext4", stat)
    assert disk.counted() == (5120, 10240) and str(disk) == "disk (ext4)"
    with disk_traffic.DiskTraffic(disk) as traffic:
        stat.write_text("1 0 110 5 1 0 20 5 0 0 0")
    moments = [sample[0] for sample in traffic._samples]
    assert traffic.between(moments[0], moments[-1]) == (100 * 512, 0)
    disk = disk_traffic.Disk.of(tmp_path)
    assert disk.file_system != "unknown" and (disk.stat is None or disk.counted()[1] > 0)


def test_the_commands_of_the_path(tmp_path):
    (tmp_path / "test.tsv").write_text("a b\tlikes\tc\nx\ty\tz\n")
    words = ["--input", str(tmp_path), "--work", str(tmp_path), "--set", "model.dimension=8"]
    args = limited_memory.build_parser().parse_args([*words, "--partition-options", "--max_memory 64MB"])
    commands = limited_memory.commands(args, tmp_path / "data", tmp_path / "run", tmp_path / "metrics.json")
    assert list(commands) == ["partition", "train", "evaluate", "predict"]
    assert commands["partition"][-2:] == ["--max_memory", "64MB"]
    assert commands["train"][-4:] == ["--num_trainers", "2", "--set", "model.dimension=8"]
    # Those of the run's own ranking are not there with evaluation.split=none.
    assert commands["evaluate"][-2:] == ["--output", str(tmp_path / "metrics.json")]
    assert commands["predict"][-6:] == ["--head", "a b", "--relation", "likes", "--topk", "5"]


def test_a_folder_without_test_triples_is_refused(tmp_path, capsys):
    assert limited_memory.main(["--input", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert f"{tmp_path} has no test.tsv" in capsys.readouterr().err
    assert limited_memory.main(["--input", str(tmp_path), "--work", str(tmp_path), "--limit", "much"]) == 2
    assert "much" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "ends_well"), [(8 * MIB, True), (400 * MIB, False)])
def test_a_command_that_takes_more_than_the_limit_fails(tmp_path: Path, size, ends_well):
    # In a process of its own, so that the one that is killed is not the one that is waited for.
    child = f"import time; held = bytearray({size}); time.sleep(0.4)"
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
    ]
    try:
        if ends_well:
            usage = limited_memory.run_limited(command, 100 * MIB, tmp_path / "log", 60)
            assert size < usage["peak_group_bytes"] <= 100 * MIB
            return
        with pytest.raises(RuntimeError, match="ended well, but 1 processes were killed by the limit"):
            limited_memory.run_limited(command, 100 * MIB, tmp_path / "log", 60)
        failing = [sys.executable, "-c", f"held = bytearray({size})"]
        with pytest.raises(RuntimeError, match=r"(?s)ended with -9.*the limit killed 1 of its processes"):
            limited_memory.run_limited(failing, 100 * MIB, tmp_path / "log", 60)
    except InputError as error:
        pytest.skip(str(error))
