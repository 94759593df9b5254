"""A checkpoint opened on files alone: its manifest, its rows, and kept versions, which outlive newer ones."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zlib

import h5py
import pytest
import torch

from dglkge.checkpoint import storage as storage_module
from dglkge.checkpoint.manager import CheckpointManager, fall_back
from dglkge.checkpoint.manifest import FileEntry, Manifest
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError, InputError
from dglkge.inference.run import open_run
from dglkge.typing import RELATION
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.toy_checkpoint import META


def entry(table, part, num_rows):
    """Describe a file of which only the table, the part and the number of rows matter."""
    return FileEntry(f"{table}_{part}", table, part, num_rows, 100, 1, 2, {"embeddings": [num_rows, 6]})


def text_of(meta):
    """Write a manifest of a run with one file for each table."""
    files = [entry(RELATION, 0, len(meta.relations))]
    files += [entry(table, 0, count) for table, count in meta.entity_types.items()]
    return Manifest(3, meta, files).to_json()


def test_there_and_back():
    """Bit for bit, and types and parts in their order."""
    config = {"a": [1.5, None, True], "ü": {"b": 1e-300}}
    meta = toy.toy_meta("keci", toy.TWO_PAIRS, config=config, score_options={"p": 2, "q": 3})
    meta = dataclasses.replace(meta, entity_types=dict(reversed(meta.entity_types.items())))
    files = [entry("person", part, 7) for part in (10, 2, 0)] + [entry(RELATION, 0, 3), entry("film", 0, 5)]
    manifest = Manifest(12, meta, files)
    again = Manifest.parse(manifest.to_json().encode(), "here")
    assert again == manifest and again.to_json() == manifest.to_json()
    assert list(again.meta.entity_types) == ["film", "person"]
    assert [entry.part for entry in again.table_files("person")] == [0, 2, 10]
    assert [entry.table for entry in again.table_files(RELATION)] == [RELATION]
    assert again.table_files("planet") == []


def test_any_changed_letter_is_found():
    text = text_of(META)
    for place in range(len(text)):
        if not text[place].isspace():  # white space between words says nothing
            changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
            with pytest.raises(CheckpointError, match="^here: "):
                Manifest.parse(changed.encode(), "here")


@pytest.mark.parametrize(("change", "words"), [
    (lambda b: b.pop("files"), "files"),
    (lambda b: b["meta"].update(colour="red"), "meta.colour"),
    (lambda b: b["meta"].update(dim=True), "meta.dim is True: Input should be a valid integer"),
    (lambda b: b["meta"].update(seed=-1), "meta.seed is -1: Input should be greater than or equal to 0"),
    (lambda b: b["meta"]["progress"].update(finished_epochs=-1), "progress finished_epochs is -1"),
    (lambda b: b["meta"]["progress"].update(global_batch_size=0), "global_batch_size is 0"),
    (lambda b: b["meta"]["progress"].update(epoch_loss=float("nan")), "progress epoch_loss is nan"),
    (lambda b: b["meta"]["entity_types"].update({"../a": 1}), "'../a' is not the name of a file"),
    (lambda b: b["meta"]["relations"][0].update(lhs="robot"), "joins an entity type that there is none"),
    (lambda b: b["files"][0].update(name="/etc/passwd"), "'/etc/passwd' is not the name of a file"),
    (lambda b: b["files"][0].update(part=-1), "files.0.part is -1"),
    (lambda b: b["texts"].append({"name": "..", "size_bytes": 1, "crc32": 2}), "'..' is not the name"),
    (lambda b: b["meta"].update(score_options={"p": None}), "score_options.p.* is None"),
])  # fmt: skip
def test_fields_that_are_missing_or_too_many_and_values_out_of_range(change, words):
    """With a right checksum: another program wrote it, or means harm."""
    body = json.loads(text_of(META))
    del body["crc32"]
    change(body)
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    with pytest.raises(CheckpointError, match=f"here: not a manifest of dglkge, or damaged .*{words}"):
        Manifest.parse(json.dumps(body).encode(), "here")


@pytest.mark.parametrize(("content", "words"), [
    (b"[" * 100_000, "not a manifest of dglkge, or damaged"),
    (b"[1, 2]", "not a manifest of dglkge, or damaged"),
    (text_of(META).replace('"seed": 3', '"seed": 4').encode(), "its checksum does not match its text"),
    (text_of(META).replace('version": 3', 'version": 4', 1).encode(), "version 4; this dglkge reads 3"),
])  # fmt: skip
def test_what_is_no_manifest(content, words):
    with pytest.raises(CheckpointError, match=f"here: .*{words}"):
        Manifest.parse(content, "here")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, *toy.saved_toy(folder / "checkpoint", 3, relations=toy.TWO_PAIRS)


def test_run_folder_or_checkpoint_folder(run):
    folder, meta, _ = run
    for path in (folder, str(folder), folder / "checkpoint"):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.path, checkpoint.run_folder) == (folder / "checkpoint", folder)
        assert (checkpoint.meta, checkpoint.version) == (meta, 1)
    assert checkpoint.config == meta.config and checkpoint.progress == meta.progress
    assert checkpoint.entity_types == ["person", "film"]


def test_rows_by_id(run):
    folder, _, tables = run
    people, checkpoint = tables["person"].rows, open_checkpoint(folder)
    table = checkpoint["person"]
    assert table.shape == (23, 6) and len(table) == 23
    for ids in (4, [5, 0, 5], torch.tensor([22, 1]), slice(3, 20, 2)):
        assert toy.same(table[ids], people[ids])
    assert toy.same(table[torch.tensor([22, 1]).numpy()], people[[22, 1]])
    assert table[[]].shape == (0, 6)
    for ids in ([23], [0, -1]):
        with pytest.raises(InputError, match=r"table 'person' has ids 0..22; got "):
            table[ids]
    with pytest.raises(InputError, match="unknown table 'persn'; did you mean 'person'"):
        checkpoint["persn"]
    # What is read may be changed.
    table[[1]].zero_()
    for shard in checkpoint.shards("person"):
        shard.rows.zero_()
    toy.holds(folder, {1: tables})


def test_rows_by_name(run):
    folder, _, tables = run
    checkpoint = open_checkpoint(folder)
    assert checkpoint.vocabulary("film").id("film-3") == 3
    assert checkpoint.vocabulary("film") is checkpoint.vocabulary("film")
    assert checkpoint.vocabulary("relation").id("likes (person → film)") == 2
    assert checkpoint.relations.labels[1] == "made"
    for table, name, ids in [
        ("person", "person-7", 7),
        ("film", ["film-4", "film-0"], [4, 0]),
        (RELATION, "made", 1),
        (RELATION, "likes (person → film)", 2),
    ]:
        assert toy.same(checkpoint[table][name], tables[table].rows[ids])
    with pytest.raises(InputError, match="unknown entity 'person-x'; did you mean 'person-"):
        checkpoint["person"]["person-x"]
    with pytest.raises(InputError, match="joins several pairs of entity types; say which: "):
        checkpoint[RELATION]["likes"]


def test_shards_and_parts_hold_each_row_once(run, tmp_path):
    """A part is the rows of a file, with their optimizer's state by original id."""
    folder, _, tables = run
    checkpoint = open_checkpoint(folder, verify=True)
    for table, whole in tables.items():
        shards, all_ids = checkpoint.shards(table), torch.arange(len(whole.rows))
        assert torch.equal(torch.cat([shard.original_ids for shard in shards]).sort().values, all_ids)
        for number, shard in enumerate(shards):
            ids, places = shard.original_ids, shard.locate(all_ids)
            assert toy.same(shard.rows, whole.rows[ids])
            assert torch.equal((places >= 0).nonzero()[:, 0], ids)
            assert torch.equal(places[places >= 0], torch.arange(len(ids)))
            if table != RELATION:
                rows, part_ids = checkpoint.part(table, number)
                assert torch.equal(part_ids, ids) and toy.same(rows, shard.rows)
                assert torch.equal(checkpoint.state(table, number)["sum"], whole.state["sum"][ids])
    assert len(checkpoint.shards("person")) == 3
    with pytest.raises(InputError, match=r"'person' has the parts 0..2; got 3"):
        checkpoint.part("person", 3)
    with pytest.raises(InputError, match="unknown entity type 'planet'"):
        checkpoint.state("planet", 0)
    toy.saved_toy(tmp_path, 2, num_people=1)
    empty = open_checkpoint(tmp_path).shards("person")[1]
    assert empty.locate(torch.tensor([0, 3])).tolist() == [-1, -1]


def test_operators_of_another_model(tmp_path):
    toy.saved_toy(tmp_path)
    with h5py.File(tmp_path / "v1" / "model.v1.h5", "r+") as file:
        del file["model/relations/0/operator/rhs/imag"]
    with pytest.raises(CheckpointError, match="model.v1.h5: the relations' operators are not those of the"):
        open_checkpoint(tmp_path)[RELATION]


def test_a_version_that_training_drops_is_read_on(tmp_path):
    """What was opened stays readable, checksums among it, after two newer versions."""
    toy.save_seed(tmp_path, 1, num_parts=2)
    checkpoint = open_checkpoint(tmp_path, verify=True)
    for seed in (2, 3):
        toy.save_seed(tmp_path, seed)
    assert not (tmp_path / "v1" / "embeddings_person_0.v1.h5").exists()
    for table, whole in toy.toy_tables(META, 1).items():
        assert toy.same(checkpoint[table][:], whole.rows)
    assert checkpoint.state_shapes("person") == {"sum": (12, 6)}
    assert open_checkpoint(tmp_path).version == 3


@pytest.mark.parametrize("num_saves", [1, 3])
def test_a_version_that_is_dropped_while_it_is_opened(tmp_path, monkeypatch, num_saves):
    """Training publishes between the look at the version file and that at the files."""
    toy.save_seed(tmp_path, 0)
    real, saves = storage_module.read_version, iter(range(1, 1 + num_saves))

    def read_version(folder, version):
        seed = next(saves, None)
        if seed is not None:
            with monkeypatch.context() as undone:
                undone.setattr(storage_module, "read_version", real)
                toy.save_seed(tmp_path, seed)
        return real(folder, version)

    monkeypatch.setattr(storage_module, "read_version", read_version)
    checkpoint = open_checkpoint(tmp_path, verify=True)
    assert checkpoint.version == 1 + num_saves
    assert toy.same(checkpoint["person"][:], toy.toy_tables(META, num_saves)["person"].rows)


def opened(path, seed):
    """Open a checkpoint that is whole and has the tables of a seed."""
    checkpoint = open_checkpoint(path)
    toy.holds(path, {checkpoint.version: toy.toy_tables(META, seed)})
    return checkpoint


def test_a_version_with_a_pointer_stays(tmp_path):
    for seed in (1, 2, 3, 4):
        toy.save_seed(tmp_path / "a", seed, *(["epoch_2"] if seed == 2 else []))
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["checkpoint_version.txt", "epoch_2", "latest", "v2", "v4"]
    run = shutil.move(tmp_path / "a", tmp_path / "b")
    kept = opened(run / "epoch_2", 2)
    assert kept.version == 2 and kept.vocabulary("person")[3] == "person-3"
    assert kept.versions() == [2, 4] and kept.path == run / "epoch_2"
    assert opened(run, 4).version == opened(run / "latest", 4).version == 4
    assert open_checkpoint(run / "latest").root == run
    assert opened(run / "v2", 2).version == open_checkpoint(run, 2).version == 2
    alone = shutil.copytree(run / "v2", tmp_path / "alone")
    assert opened(alone, 2).run_folder == alone


def test_a_pointer_to_other_rows_is_refused(tmp_path):
    """A version of the same number that another job wrote is not the one that was kept."""
    toy.save_seed(tmp_path / "a", 1, "epoch_1")
    toy.save_seed(tmp_path / "b", 2)
    shutil.rmtree(tmp_path / "a" / "v1")
    shutil.copytree(tmp_path / "b" / "v1", tmp_path / "a" / "v1")
    with pytest.raises(CheckpointError, match="epoch_1 names version 1 with the checksum .* another one"):
        open_checkpoint(tmp_path / "a" / "epoch_1")
    (tmp_path / "a" / "epoch_1").write_text("{}")
    with pytest.raises(CheckpointError, match="epoch_1 is missing or damaged"):
        open_checkpoint(tmp_path / "a" / "epoch_1")


def test_inspect_verifies_kept_versions(tmp_path):
    """A flipped bit in any file of a version that only snapshots need is found."""
    for seed in (1, 2):
        toy.save_seed(tmp_path / "checkpoint", seed, *(["epoch_1"] if seed == 1 else []))
    run = open_run(tmp_path)
    assert run.inspect(verify=True)["verified"]
    for name in ("embeddings_person_0.v1.h5", "model.v1.h5"):
        path = tmp_path / "checkpoint" / "v1" / name
        toy.flip(path, -1)
        with pytest.raises(CheckpointError, match=name):
            run.inspect(verify=True)
        toy.flip(path, -1)


def test_what_biggraph_writes_in_place_does_not_reach_another_version(tmp_path):
    """It truncates config.json and appends to training_stats.json when it resumes a run."""
    toy.save_seed(tmp_path, 1, "epoch_1")
    toy.save_seed(tmp_path, 2)
    for name, mode in (("config.json", "r+"), ("training_stats.json", "a")):
        with open(tmp_path / "v2" / name, mode) as file:
            file.truncate(0)
            file.write("{}")
    opened(tmp_path / "epoch_1", 1)
    assert (tmp_path / "v1" / "training_stats.json").read_text() == ""
    with pytest.raises(CheckpointError, match="config.json is damaged: it has 2 bytes"):
        open_checkpoint(tmp_path)


def test_the_best_is_replaced_by_a_better_one_only(tmp_path):
    manager = CheckpointManager(tmp_path)
    kept = []
    for seed, score in enumerate([0.2, 0.5, 0.3, 0.5, 0.6]):
        toy.save_seed(tmp_path, seed)
        assert not manager.keep_best(float("nan"), {})  # also as the first score
        kept.append(manager.keep_best(score, {"finished_epochs": seed + 1}))
    assert kept == [True, True, False, False, True]
    assert opened(tmp_path / "best", 4).version == 5
    note, checksum = manager.storage.read_pointer("best"), manager.storage.stored(5).checksum
    assert note == {"version": 5, "checksum": checksum, "score": 0.6, "finished_epochs": 5}
    toy.save_seed(tmp_path, 9)
    assert {path.name for path in tmp_path.glob("v*")} == {"v5", "v6"}


def test_fallback_takes_the_newest_good_version(tmp_path, caplog):
    for seed in (1, 2, 3):
        toy.save_seed(tmp_path, seed, f"epoch_{seed}")
    toy.flip(tmp_path / "v3" / "model.v3.h5", 3000)
    assert fall_back(CheckpointStorage(tmp_path)) == 2
    assert "model.v3.h5 is damaged: its checksum" in caplog.text and "going on from version 2" in caplog.text
    assert opened(tmp_path, 2)
    assert not (tmp_path / "epoch_3").exists()
    assert open_checkpoint(tmp_path / "damaged_v3" / "epoch_3").version == 3  # still beside its version
    assert toy.save_seed(tmp_path, 4, "epoch_3") == 3
    assert opened(tmp_path, 4) and opened(tmp_path / "epoch_1", 1)
    # A second one keeps what the first has moved aside.
    toy.flip(tmp_path / "v3" / "model.v3.h5", 3000)
    damaged = [(tmp_path / folder / "model.v3.h5").read_bytes() for folder in ("damaged_v3/v3", "v3")]
    assert fall_back(CheckpointStorage(tmp_path)) == 2 and opened(tmp_path, 2)
    for folder, content in zip(("damaged_v3", "damaged_v3_2"), damaged):
        assert (tmp_path / folder / "v3" / "model.v3.h5").read_bytes() == content
        assert (tmp_path / folder / "epoch_3").is_file()


def test_fallback_where_nothing_is_damaged_or_nothing_is_whole(tmp_path):
    assert fall_back(CheckpointStorage(tmp_path)) is None
    toy.save_seed(tmp_path, 1)
    assert fall_back(CheckpointStorage(tmp_path)) is None
    os.truncate(tmp_path / "v1" / "model.v1.h5", 100)
    with pytest.raises(CheckpointError, match="model.v1.h5 is damaged: it has 100 bytes.*no version in the"):
        fall_back(CheckpointStorage(tmp_path))
    assert (tmp_path / "v1" / "model.v1.h5").is_file()
