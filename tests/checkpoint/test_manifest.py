"""What a version says about itself, there and back, and the two checks made on it."""

from __future__ import annotations

import dataclasses
import json
import zlib

import pytest

from dglkge.checkpoint.manifest import FileEntry, Manifest, check_same_run
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, Relation
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, toy_meta


def entry(table, part, num_rows):
    """Describe a file of which only the table, the part and the number of rows matter."""
    return FileEntry(f"{table}_{part}", table, part, num_rows, 100, 1, 2, {"embeddings": [num_rows, 6]})


def whole(meta, num_parts=1):
    files = [entry(RELATION, 0, len(meta.relations))]
    for table, count in meta.entity_types.items():
        rest = count - (num_parts - 1)
        files += [entry(table, part, 1 if part else rest) for part in range(num_parts)]
    return files


def test_there_and_back():
    """Bit for bit, and types in their order."""
    meta = toy_meta(relations=TWO_PAIRS, config={"a": [1.5, None, True], "ü": {"b": 1e-300}})
    meta = dataclasses.replace(meta, entity_types=dict(reversed(meta.entity_types.items())))
    manifest = Manifest(12, meta, whole(meta, 3))
    again = Manifest.parse(manifest.to_json().encode(), "here")
    assert again == manifest
    assert list(again.meta.entity_types) == ["film", "person"]
    assert again.meta.relations[1] == Relation("made", "person", "film")
    assert again.to_json() == manifest.to_json()


def test_files_of_a_table_stand_in_the_order_of_parts():
    meta = toy_meta()
    files = [entry("person", part, 1) for part in (10, 2, 0)] + [entry(RELATION, 0, 2)]
    manifest = Manifest(1, meta, files)
    assert [entry.part for entry in manifest.table_files("person")] == [0, 2, 10]
    assert [entry.table for entry in manifest.table_files(RELATION)] == [RELATION]
    assert manifest.table_files("planet") == []


def test_any_changed_letter_is_found():
    text = Manifest(3, toy_meta(), whole(toy_meta())).to_json()
    for place in range(len(text)):
        if not text[place].isspace():  # white space between words says nothing
            changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
            with pytest.raises(CheckpointError, match="^here: "):
                Manifest.parse(changed.encode(), "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.pop("files"), "files"),
        (lambda b: b["meta"].pop("dim"), "meta.dim"),
        (lambda b: b["meta"].update(colour="red"), "meta.colour"),
        (lambda b: b["files"][0].pop("crc32"), "files.0.crc32"),
        (lambda b: b["meta"]["relations"].append({"name": "x"}), "meta.relations.2"),
        (lambda b: b["meta"].update(dim="x"), "meta.dim is 'x': Input should be a valid integer"),
        (lambda b: b["meta"].update(dim=True), "meta.dim is True: Input should be a valid integer"),
        (lambda b: b["meta"].update(seed=-1), "meta.seed is -1: Input should be greater than or equal to 0"),
        (lambda b: b["meta"]["progress"].update(finished_epochs=-1), "progress finished_epochs is -1"),
        (lambda b: b["meta"]["progress"].update(batches_done=1.5), "progress batches_done is 1.5"),
        (lambda b: b["meta"]["progress"].update(global_batch_size=0), "global_batch_size is 0"),
        (lambda b: b["meta"]["progress"].update(epoch_loss=float("nan")), "progress epoch_loss is nan"),
        (lambda b: b["meta"]["entity_types"].update({"../a": 1}), "'../a' is not the name of a file"),
        (lambda b: b["meta"]["relations"][0].update(lhs="robot"), "joins an entity type that there is none"),
        (lambda b: b["files"][0].update(name="/etc/passwd"), "'/etc/passwd' is not the name of a file"),
        (lambda b: b["files"][0].update(part=-1), "files.0.part is -1"),
        (lambda b: b["texts"].append({"name": "..", "size_bytes": 1, "crc32": 2}), "'..' is not the name"),
        (lambda b: b["meta"].update(score_options={"p": None}), "score_options.p.* is None"),
    ],
)
def test_fields_that_are_missing_or_too_many_and_values_out_of_range(change, words):
    """With a right checksum: another program wrote it, or means harm."""
    body = json.loads(Manifest(3, toy_meta(), whole(toy_meta())).to_json())
    del body["crc32"]
    change(body)
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    with pytest.raises(CheckpointError, match=f"here: not a manifest of dglkge, or damaged .*{words}"):
        Manifest.parse(json.dumps(body).encode(), "here")


def test_options_are_read_back_and_compared():
    meta = toy_meta("keci", score_options={"p": 2, "q": 3})
    text = Manifest(3, meta, whole(meta)).to_json()
    assert Manifest.parse(text.encode(), "here").meta.score_options == {"p": 2, "q": 3}
    with pytest.raises(CheckpointError, match=r"has score_options \{'p': 2, 'q': 3\}, this run has \{'p': 1"):
        check_same_run(meta, toy_meta("keci", score_options={"p": 1, "q": 3}))


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"manifest_version": 3}'])
def test_nested_without_end_or_without_a_checksum(content):
    with pytest.raises(CheckpointError, match="here: not a manifest of dglkge, or damaged"):
        Manifest.parse(content, "here")


def test_the_same_run_may_go_on():
    meta = toy_meta()
    later = dataclasses.replace(meta, progress={"finished_epochs": 9}, seed=4, dataset_path="/moved")
    check_same_run(meta, later)
