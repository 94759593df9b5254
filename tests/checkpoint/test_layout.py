"""Names of files, there and back."""

from __future__ import annotations

import pytest

from dglkge.checkpoint import layout


@pytest.mark.parametrize("version", [1, 12, 10**17])
def test_folders_of_versions(version):
    assert layout.parse_version_folder(layout.version_folder(version)) == version


@pytest.mark.parametrize("name", ["v", "version", "v1.tmp", "vv1", "v-1", "1", "latest", "v" + "9" * 19])
def test_other_folders(name):
    assert layout.parse_version_folder(name) is None


@pytest.mark.parametrize("name", [layout.BEST, layout.epoch_pointer(7)])
def test_pointers(name):
    assert layout.is_pointer(name)


@pytest.mark.parametrize("name", ["best.tmp", "epoch_", "epoch_x", "epoch_1.old", "v7", "latest"])
def test_no_pointers(name):
    assert not layout.is_pointer(name)


def test_temporary_files_of_jobs():
    assert layout.is_temporary_of_a_job(layout.temporary_file("config.json", "0123456789abcdef"))
    for name in ("config.json", "config.json.tmp", "config.json.0123456789abcdeg.tmp", "config.json.012.tmp"):
        assert not layout.is_temporary_of_a_job(name)
