"""Names of files, there and back."""

from __future__ import annotations

import pytest

from dglkge.checkpoint import layout


@pytest.mark.parametrize(
    "name",
    [
        layout.embeddings_file("person", 0, 12),
        layout.embeddings_file("a_1.v2_b", 10, 12),
        layout.model_file(12),
        layout.manifest_file(12),
        layout.training_state_file(12),
        layout.receipt_file(layout.model_file(12)),
    ],
)
def test_versioned(name):
    assert layout.parse_versioned(name) == layout.VersionedFile(12, temporary=False)
    assert layout.parse_versioned(name + ".tmp") == layout.VersionedFile(12, temporary=True)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint_version.txt",
        "config.json",
        "model.h5",
        "model.v1.h5.bak",
        "my_model.v1.h5",
        "embeddings_person.v1.h5",
        layout.entity_names_file("person", 1),
        layout.vocabulary_file("person"),
    ],
)
def test_not_versioned(name):
    assert layout.parse_versioned(name) is None


def test_names_part():
    assert layout.parse_names_part(layout.entity_names_file("a_7", 3)) == 3
    assert layout.parse_names_part(layout.entity_count_file("person", 11)) == 11
    assert layout.parse_names_part("entity_names.json") is None
    assert layout.parse_names_part("manifest.v3.json") is None
