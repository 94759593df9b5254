"""Names of files."""

from __future__ import annotations

from dglkge.checkpoint import layout


def test_names_there_and_back():
    for version in (1, 12, 10**17):
        assert layout.parse_version_folder(layout.version_folder(version)) == version
    for name in ("v", "version", "v1.tmp", "vv1", "v-1", "1", "latest", "v" + "9" * 19):
        assert layout.parse_version_folder(name) is None
    assert layout.is_pointer(layout.BEST) and layout.is_pointer(layout.epoch_pointer(7))
    for name in ("best.tmp", "epoch_", "epoch_x", "epoch_1.old", "v7", "latest"):
        assert not layout.is_pointer(name)
    assert layout.is_temporary_of_a_job(layout.temporary_file("config.json", "0123456789abcdef"))
    for name in ("config.json", "config.json.tmp", "config.json.0123456789abcdeg.tmp", "config.json.012.tmp"):
        assert not layout.is_temporary_of_a_job(name)
