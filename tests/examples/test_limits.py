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
    limits = {"": 500, "--beside 0": 200, "--beside 1G --share 0.5": 400 + 1024, "--limit 64M": 64}
    for words, expected in limits.items():
        args = out_of_core.build_parser().parse_args(["--work", "w", *words.split()])
        assert out_of_core.memory_limit(args, plan) == expected * MIB


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (out_of_core.main, ["--epochs", "1"], "--epochs must be at least 2, got 1"),
        (out_of_core.main, ["--share", "1.5"], "--share must be between 0 and 1, got 1.5"),
        (out_of_core.main, ["--beside", "much"], "'much' is no size"),
        (limited_memory.main, ["--input", "/proc/sys"], "/proc/sys has no test.tsv"),
        (limited_memory.main, ["--input", "/proc/sys", "--limit", "much"], "much"),
    ],
)
def test_mistakes_are_errors_before_anything_runs(tmp_path, capsys, main, words, message):
    assert main(["--work", str(tmp_path / "work"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_the_expiry_of_dirty_pages_is_restored(tmp_path, monkeypatch):
    file = tmp_path / "expiry"
    file.write_text("3000\n")
    monkeypatch.setattr(out_of_core, "EXPIRY", file)
    with pytest.raises(KeyError), out_of_core.expiry(3600):
        assert file.read_text() == "360000\n"
        raise KeyError
    assert file.read_text() == "3000\n"


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


def test_a_command_that_takes_more_than_the_limit_fails(group, tmp_path):
    """In a process of its own, too, which is not the one that is waited for."""

    def run(size: int, program: str) -> dict[str, float]:
        command = [
            sys.executable,
            "-c",
            program.format(f"import time; x = bytearray({size}); time.sleep(0.4)"),
        ]
        return limited_memory.run_limited(command, 100 * MIB, tmp_path / "log", 60)

    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    assert 8 * MIB < run(8 * MIB, child)["peak_group_bytes"] <= 100 * MIB
    with pytest.raises(RuntimeError, match="ended well, but 1 processes were killed by the limit"):
        run(400 * MIB, child)
    with pytest.raises(RuntimeError, match=r"(?s)ended with -9.*the limit killed 1 of its processes"):
        run(400 * MIB, "{}")
