"""Checkpoints of PyTorch-BigGraph: ours without all that is ours alone, and copies for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import conversion
from dglkge.checkpoint.conversion import convert_to_run, copy_for_bigraph
from dglkge.checkpoint.part_files import read_state
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError, InputError
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION, Relation
from tests.checkpoint import toy_checkpoint as toy
from tests.toy_kg import toy_dataset


def strip(folder, version=1):
    """Make PyTorch-BigGraph's folder of ours: without what it does not write."""
    (folder / "latest").unlink()
    for path in (folder / f"v{version}").iterdir():
        path.replace(folder / path.name)
    (folder / f"v{version}").rmdir()
    for path in [*folder.glob("manifest*"), *folder.glob("vocabulary_*")]:
        path.unlink()
    for path in folder.glob("*.h5"):
        with h5py.File(path, "r+") as file:
            for name in ("original_ids", "optimizer/sum"):
                if name in file:
                    del file[name]


def records_of(folder):
    return [json.loads(line) for line in (folder / "training_stats.json").read_text().splitlines()]


def write_records(folder, records):
    (folder / "training_stats.json").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("relations, reciprocal", [(toy.ONE_PAIR, True), (toy.TWO_PAIRS, False)])
def test_rows_by_name(tmp_path, relations, reciprocal):
    meta, tables = toy.saved_toy(tmp_path, 3, "complex", relations, reciprocal, optimizer="row_adagrad")
    strip(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.meta.reciprocal is reciprocal and checkpoint.meta.score_function == "complex"
    lists = [json.loads((tmp_path / f"entity_names_person_{part}.json").read_text()) for part in range(3)]
    listed = list(itertools.chain(*lists))
    assert list(checkpoint.vocabulary("person").names) == listed
    ids = [int(name.split("-")[1]) for name in listed]
    assert ids != sorted(ids)
    assert toy.same(checkpoint["person"][:], tables["person"].rows[ids])
    assert toy.same(checkpoint["person"]["person-7"], tables["person"].rows[7])
    assert toy.same(checkpoint[RELATION][:], tables[RELATION].rows)
    model = tmp_path / "model.v1.h5"
    with h5py.File(model) as file:
        sums = np.asarray(read_state(model, file, RELATION, meta)["sum"])
    np.testing.assert_allclose(sums, tables[RELATION].state["sum"].numpy(), rtol=1e-6)


@pytest.mark.parametrize("is_stripped", [False, True])
def test_a_warm_start_leaves_added_rows_as_they_are(tmp_path, is_stripped):
    """Old rows and state keep their values, also those that PyTorch-BigGraph has written."""
    old, tables = toy.saved_toy(tmp_path, 2, num_people=23, optimizer="row_adagrad")
    if is_stripped:
        strip(tmp_path)
    more = {"num_people": 30, "optimizer": "row_adagrad"}
    new = toy.toy_meta(relations=[*old.relations[1:], Relation("hates", "person", "person")], **more)
    part = toy.blank(toy.cut("person", toy.toy_tables(new, 1)["person"], 2)[0])
    checkpoint = open_checkpoint(tmp_path)
    saved_ids = conversion.saved_entity_ids(checkpoint, "person", toy.toy_names(new)["person"])
    known = part.original_ids < 23
    assert conversion.take_over(checkpoint, part, saved_ids) == int(known.sum())
    assert known.any() and not known.all()
    ids = part.original_ids[known]
    assert toy.same(part.rows[known], tables["person"].rows[ids])
    assert torch.equal(part.state["sum"][known], tables["person"].state["sum"][ids])
    assert not part.rows[~known].any() and not part.state["sum"][~known].any()
    types = conversion.saved_types(checkpoint.entity_types, list(new.entity_types))
    assert conversion.saved_relation_ids(checkpoint, new, types).tolist() == [1, -1]


@pytest.mark.parametrize(("changes", "words"), [
    ({"comparator": "hamming"}, "complex_diagonal with comparator hamming; allowed is one of none, tr"),
    ({"entities": {"person": {"featurized": True}}}, "featurized entities are not dglkge's; allowed is"),
    ({"entities": {"person": {"num_partitions": 4}}}, "embeddings_person_3.v1.h5 is missing"),
    ({"dimension": None}, r"config.json is no configuration of PyTorch-BigGraph \(TypeError: "),
])  # fmt: skip
def test_what_dglkge_cannot_read_is_refused(tmp_path, changes, words):
    toy.saved_toy(tmp_path, 3, optimizer="row_adagrad")
    strip(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_a_run_does_not_write_over_bigraphs_checkpoint(tmp_path):
    for folder in (tmp_path / "model", tmp_path / "run" / "checkpoint"):
        toy.saved_toy(folder, 2, optimizer="row_adagrad")
        output = tmp_path / folder.relative_to(tmp_path).parts[0]
        config = load_config(None, ["dataset=data/mine", f"output={output}"])
        check_config(config)  # ours
        strip(folder)
        with pytest.raises(InputError) as caught:
            check_config(config)
        command = f"checkpoint convert {folder} --to run --dataset data/mine --output {output}_resumed,"
        assert command in str(caught.value)
    check_config(load_config(None, ["dataset=data/mine", f"output={tmp_path}/new"]))


def theirs_of_type(folder, dataset, name="all", score_function="complex", reciprocal=True):
    """Write PyTorch-BigGraph's checkpoint of a data set of one type, under another name of the type."""
    meta = toy.toy_meta(
        score_function,
        [Relation(relation.name, name, name) for relation in reversed(dataset.relations.relations)],
        reciprocal,
        entity_types={name: dataset.num_entities("entity")},
        optimizer="row_adagrad",
    )
    tables = toy.toy_tables(meta, finite=True)
    toy.save_toy(folder, meta, tables, 2, {name: dataset.vocabulary("entity")})
    strip(folder)
    return tables


@pytest.fixture
def theirs(tmp_path):
    return tmp_path / "theirs"


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def dataset():
    return Dataset.open(toy_dataset())


@pytest.mark.parametrize(("words", "reciprocal"), [([], True), (["--type", "all=entity"], False)])
def test_its_usual_type_becomes_ours(words, reciprocal, dataset, theirs, run, call):
    """Its importers call the one entity type "all"."""
    tables = theirs_of_type(theirs, dataset, reciprocal=reciprocal)
    stats = {"count": 5, "metrics": {"loss": 1.5}}
    records = [{"epoch_idx": epoch, "index": bucket, "stats": stats} for epoch, bucket in np.ndindex(2, 2)]
    write_records(theirs, records)
    convert = ["checkpoint", "convert", theirs, "--dataset", dataset.path, "--to", "run", "--output"]
    status, _, err = call(*convert, run, *words)
    assert status == 0, err
    opened = open_checkpoint(run, verify=True)
    assert opened.entity_types == ["entity"] and opened.meta.dataset_fingerprint == dataset.fingerprint
    assert toy.same(opened["entity"][:], tables["all"].rows)
    assert toy.same(opened[RELATION][:], tables[RELATION].rows.flip(0))
    assert torch.equal(opened.state("entity", 0)["sum"], tables["all"].state["sum"])
    assert records_of(run / "checkpoint" / "latest") == records
    with pytest.raises(CheckpointError, match="holds a checkpoint already; take another folder"):
        convert_to_run(open_checkpoint(theirs), dataset, run)
    (theirs / "training_stats.json").unlink()
    assert call(*convert, f"{run}_again", *words)[0] == 0
    assert records_of(Path(f"{run}_again") / "checkpoint" / "latest") == []


def test_a_converted_run_starts_with_a_whole_epoch(tmp_path, dataset, run):
    """Progress within an epoch is a position in the order of triples that another data set does not have."""
    convert_to_run(open_checkpoint(toy.save_toy_run(tmp_path / "ours", dataset)), dataset, run)
    progress = open_checkpoint(run).progress
    assert (progress["finished_epochs"], progress["batches_done"]) == (2, 0)


def test_one_type_of_its_becomes_several_of_ours(theirs, run, call):
    typed = Dataset.open(toy_dataset(typed=True))
    names = {kind: list(typed.vocabulary(kind).names) for kind in typed.entity_types}
    everybody = [name for kind in reversed(typed.entity_types) for name in names[kind]]
    labels = [relation.name for relation in typed.relations.relations]
    distinct = sorted(set(labels))
    relations = [Relation(name, "all", "all") for name in distinct]
    meta = toy.toy_meta(relations=relations, entity_types={"all": len(everybody)}, optimizer="row_adagrad")
    tables = toy.toy_tables(meta)
    toy.save_toy(theirs, meta, tables, 1, {"all": Vocabulary(everybody, "entity")})
    strip(theirs)
    convert = ["checkpoint", "convert", theirs, "--dataset", typed.path, "--to", "run", "--output", run]
    status, _, err = call(*convert)
    assert status == 2 and not run.exists()
    assert "has the entity types 'all', the data set has 'country', 'person', 'town': give --" in err
    status, _, err = call(*convert, *(f"--type=all={kind}" for kind in typed.entity_types))
    assert status == 0, err
    opened = open_checkpoint(run)
    for kind in typed.entity_types:
        assert toy.same(opened[kind][:], tables["all"].rows[[everybody.index(name) for name in names[kind]]])
    assert toy.same(opened[RELATION][:], tables[RELATION].rows[[distinct.index(name) for name in labels]])


def test_entity_types_of_several_widths(theirs, run):
    typed = Dataset.open(toy_dataset(typed=True))
    types = {kind: typed.num_entities(kind) for kind in typed.entity_types}
    fields = {"reciprocal": False, "entity_types": types, "dims": {"person": 4}}
    meta = toy.toy_meta("affine_cos", typed.relations.relations, **fields)
    tables = toy.toy_tables(meta, finite=True)
    for row, relation in zip(tables[RELATION].rows, meta.relations):
        head, tail = (fields["dims"].get(kind, 6) for kind in (relation.lhs, relation.rhs))
        matrix, offset = row[:36].view(6, 6), row[36:]
        for beyond in (matrix[head:], matrix[:, tail:], offset[head:]):
            beyond.zero_()
    toy.save_toy(theirs, meta, tables, 2, {kind: typed.vocabulary(kind) for kind in types})
    strip(theirs)
    convert_to_run(open_checkpoint(theirs), typed, run)
    converted = open_checkpoint(run)
    assert converted.meta.dims == {"person": 4}
    assert all(toy.same(converted[table][:], whole.rows) for table, whole in tables.items())


def test_wrong_types(dataset, theirs, run, call):
    theirs_of_type(theirs, dataset)
    to_run = ["--to", "run", "--dataset", dataset.path]
    npy = ["--from", "npy", "--type", "all=entity", "--score-function", "complex"]
    for words, message in [
        ([*to_run, "--type", "al=entity"], "unknown entity type of the checkpoint 'al'; did you mean 'all'?"),
        ([*to_run, "--type", "all=person"], "unknown entity type of the data set 'person'; known: 'entity'"),
        ([*to_run, "--type", "all"], "--type 'all' is not of the form THEIRS=OURS, e.g. all=entity"),
        ([*to_run, *npy], "--type goes with a checkpoint, not with --from"),
    ]:
        status, _, err = call("checkpoint", "convert", theirs, "--output", run, *words)
        assert status == 2 and message in err and err.count("\n") == 1
        assert not run.exists()
    with pytest.raises(InputError, match="entity type 'entity' of the data set is given twice"):
        conversion.saved_types(["a", "b"], ["entity"], ["a=entity", "b=entity"])


@pytest.mark.parametrize("command", [["evaluate"], ["evaluate", "--dataset", "DATASET"], ["predict"]])
def test_what_it_wrote_is_to_be_converted_first(command, dataset, run, call):
    """Also where it resumed one of our runs, and so has neither fingerprint nor path of the data set."""
    folder = run / "checkpoint"
    theirs_of_type(folder, dataset, name="entity")
    words = [dataset.path if word == "DATASET" else word for word in command]
    if command == ["predict"]:
        words += ["--head", "e001", "--relation", "turn_7", "--known", "mark"]
    status, _, err = call(words[0], run, *words[1:])
    assert status == 2 and err == (
        f"dglkge: error: {folder} was written by PyTorch-BigGraph, with ids of its own; to use it with a "
        f"data set: dglkge checkpoint convert {folder} --to run "
        f"--dataset {dataset.path if 'DATASET' in command else 'DIR'} --output {run}_converted\n"
    )


def test_verify_claims_no_checksums_where_there_are_none(dataset, theirs, call):
    theirs_of_type(theirs, dataset)
    status, out, _ = call("checkpoint", "verify", theirs)
    assert status == 0 and "as they were written" not in out
    assert "checksums   none for 3 of 3 files, which PyTorch-BigGraph wrote: not verified" in out
    report = json.loads(call("inspect", theirs, "--verify", "--json")[1])
    assert report["verified"] is False and [file["crc32"] for file in report["files"]] == [None] * 3


def trained(folder, training, finished, passes=0, versions=1):
    """Save a run at some point of its training, after so many commits."""
    progress = {"finished_epochs": finished, "batches_done": 17, "global_batch_size": 100}
    if passes:
        progress["passes_done"] = passes
    fields = {"config": {"training": training}, "progress": progress, "optimizer": "row_adagrad"}
    for _ in range(versions):
        toy.saved_toy(folder / "checkpoint", 2, **fields)
    return open_checkpoint(folder)


def iteration(path, *names):
    with h5py.File(path) as file:
        return tuple(file.attrs[f"iteration/{name}"] for name in names)


@pytest.mark.parametrize(("versions", "training", "finished", "passes", "place", "trained_pass"), [
    (5, {}, 3, 0, (3, 0, 0), (3, 2, 0, "train", 0)),
    (3, {"num_epochs": 9}, 1, 0, (1, 0, 0), (9, 0, 0, "train", 0)),
    (2, {"edge_chunks": 2, "edge_sets": ["train", "news"]}, 2, 3, (2, 1, 1), (2, 2, 1, "news", 0)),
    (1, {"edge_sets": ["train", "news"]}, 0, 1, (0, 1, 0), (0, 0, 0, "train", 0)),
])  # fmt: skip
def test_it_resumes_at_the_pass_whatever_the_cadence_was(
    tmp_path, versions, training, finished, passes, place, trained_pass
):
    """The version of the copy is the number of passes; its trainer's arithmetic finds the place."""
    original, folder = trained(tmp_path / "run", training, finished, passes, versions), tmp_path / "copy"
    assert original.version == versions
    version = copy_for_bigraph(original, folder)
    assert int((folder / "checkpoint_version.txt").read_text()) == version
    num_chunks = json.loads((folder / "config.json").read_text())["num_edge_chunks"]
    (num_paths,) = iteration(folder / f"model.v{version}.h5", "num_edge_paths")
    epoch_and_path = divmod(version // num_chunks, num_paths)
    assert (*epoch_and_path, version % num_chunks) == place
    names = ("num_epochs", "epoch_idx", "edge_path_idx", "edge_path", "edge_chunk_idx")
    assert iteration(folder / f"embeddings_person_1.v{version}.h5", *names) == trained_pass


def test_a_copy_has_rows_and_state_by_name_and_the_records_of_its_passes(tmp_path):
    original, folder = trained(tmp_path / "run", {"edge_chunks": 2}, 1, 1), tmp_path / "copy"
    place = {"edge_path_idx": 0, "stats": {"count": 1, "metrics": {}}}
    records = [{"epoch_idx": epoch, "edge_chunk_idx": chunk, **place} for epoch, chunk in np.ndindex(3, 2)]
    latest = tmp_path / "run" / "checkpoint" / "latest"
    write_records(latest, records)
    assert copy_for_bigraph(original, folder) == 3
    assert records_of(folder) == records[:3]
    copy = open_checkpoint(folder)
    assert copy.version == 3 and copy.meta.progress["finished_epochs"] == 1
    names = list(original.vocabulary("person").names)
    assert list(copy.vocabulary("person").names) != names  # part after part, by row
    assert toy.same(copy["person"][names], original["person"][names])
    assert toy.same(copy[RELATION][:], original[RELATION][:])
    for part in (0, 1):
        with (
            h5py.File(latest / f"embeddings_person_{part}.v1.h5") as old,
            h5py.File(folder / f"embeddings_person_{part}.v3.h5") as new,
        ):
            assert sorted(new) == ["embeddings", "optimizer"] and list(new["optimizer"]) == ["state_dict"]
            state = [file["optimizer/state_dict"][...].tobytes() for file in (old, new)]
            assert state[0] == state[1]
            assert json.loads(new.attrs["config/json"])["checkpoint_path"] == str(folder)
        for name in (f"entity_count_person_{part}.txt", f"entity_names_person_{part}.json"):
            assert (folder / name).read_text() == (latest / name).read_text()
    assert not list(tmp_path.glob(".copy*"))


def test_refusals_of_a_copy_leave_nothing(tmp_path, monkeypatch):
    run = trained(tmp_path / "run", {}, 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    copy_for_bigraph(run, tmp_path / "theirs")
    for source, name, kind, words in [
        (trained(tmp_path / "new", {}, 0), "copy", CheckpointError, "has no finished pass"),
        (run, "full", InputError, "full exists and is no empty folder"),
        (run, "here", InputError, "here is the current folder"),
        (open_checkpoint(tmp_path / "theirs"), "copy", InputError, "was written by PyTorch-BigGraph"),
    ]:
        with pytest.raises(kind, match=words):
            copy_for_bigraph(source, tmp_path / name)
    toy.flip(tmp_path / "run" / "checkpoint" / "v1" / "embeddings_person_0.v1.h5")
    with pytest.raises(CheckpointError, match=r"embeddings_person_0.v1.h5 is damaged"):
        copy_for_bigraph(open_checkpoint(tmp_path / "run"), tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "here", "new", "run", "theirs"]
