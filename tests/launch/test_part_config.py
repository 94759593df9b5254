"""DGL's partition file against the cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dglkge.errors import InputError
from dglkge.launch.script_config import check_partition


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
def test_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "ring.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        check_partition(path, 0, 2)
    assert message.format(path) in str(caught.value)
