"""A job compares its data set with the checksums before servers read it, unless it is told not to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.functional import job as commands
from tests.toy_kg import toy_dataset


@pytest.mark.parametrize("launched", [True, False])
def test_a_flipped_bit_is_one_line(tmp_path: Path, launched: bool) -> None:
    dataset = Path(shutil.copytree(toy_dataset(), tmp_path / "dataset"))
    path = dataset / "partitions" / "part0" / "edges.npy"
    content = bytearray(path.read_bytes())
    content[-12] ^= 1  # a head, which stays a valid id
    path.write_bytes(content)
    settings = (f"dataset={dataset}", f"output={tmp_path / 'run'}", "training.num_epochs=1")
    message = f"{path} is damaged: its CRC-32 is"
    if not launched:
        assert message in commands.train_alone(*settings, status=2).stderr
        return
    command = commands.launch_command(tmp_path, 1, settings)
    done = commands.run(command, status=2)
    assert message in done.stdout + done.stderr
    commands.run(command, DGLKGE_NO_VERIFY="1")
