"""DGL's partition file against the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.errors import InputError
from dglkge.launch.script_config import check_part, check_part_config


def test_fitting(tmp_path: Path) -> None:
    """One partition for each machine is right."""
    path = tmp_path / "ring.json"
    path.write_text('{"num_parts": 2}')
    check_part_config(path, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"num_parts": 4}',
            "has 4 partitions and ip_config has 2 machines; each machine holds one partition",
        ),
        (b'{"num_parts": "2"}', "has no 'num_parts'; expected the file that DGL's partitioner wrote"),
        (b"{}", "has no 'num_parts'"),
        (b"[2]", "has no 'num_parts'"),
        (b"{", "is no JSON file: "),
        (b"\xff\xfe\xfd", "is no JSON file: "),
    ],
)
def test_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Each error names the file."""
    path = tmp_path / "ring.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        check_part_config(path, 2)
    assert str(caught.value).startswith(f"partition file {path} ")
    assert message in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    """A missing file is named with the reason."""
    with pytest.raises(InputError, match=r"cannot read partition file .*absent\.json: No such file"):
        check_part_config(tmp_path / "absent.json", 1)


def test_own_partition(tmp_path: Path) -> None:
    """The files of one partition must be there, those of others need not."""
    path = tmp_path / "ring.json"
    path.write_text(
        '{"num_parts": 2, "part-0": {"part_graph": "part0/g"}, "part-1": {"part_graph": "part1/g"}}'
    )
    (tmp_path / "part1").mkdir()
    (tmp_path / "part1" / "g").touch()
    check_part(path, 1)
    with pytest.raises(InputError, match=r"partition 0 is not whole: .*part0/g is missing"):
        check_part(path, 0)
    with pytest.raises(InputError, match=r"names no files of partition 2"):
        check_part(path, 2)
