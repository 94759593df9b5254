"""Checkpoints of PyTorch-BigGraph: ours without all that is ours alone, and hand-made faults."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import conversion as by_name
from dglkge.checkpoint import open_checkpoint
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.checkpoint.manifest import MODEL_FIELDS
from dglkge.checkpoint.part_files import read_state
from dglkge.cli.main import main
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError, InputError
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION, Relation
from tests.checkpoint.toy_checkpoint import (
    TWO_PAIRS,
    blank,
    cut,
    same,
    save_toy,
    save_toy_run,
    saved_toy,
    toy_meta,
    toy_names,
    toy_tables,
)
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


def names_in_parts(folder, num_parts):
    return [
        name
        for part in range(num_parts)
        for name in json.loads((folder / f"entity_names_person_{part}.json").read_text())
    ]


@pytest.mark.parametrize("relations, reciprocal", [(None, True), (TWO_PAIRS, False)])
def test_rows_by_name(tmp_path, relations, reciprocal):
    more = {} if relations is None else {"relations": relations}
    meta, tables = saved_toy(tmp_path, 3, reciprocal=reciprocal, optimizer="row_adagrad", **more)
    strip(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.meta.reciprocal is reciprocal and checkpoint.meta.score_function == "complex"
    listed = names_in_parts(tmp_path, 3)
    assert list(checkpoint.vocabulary("person").names) == listed
    ids = [int(name.split("-")[1]) for name in listed]
    assert ids != sorted(ids)
    assert same(checkpoint["person"][:], tables["person"].rows[ids])
    assert same(checkpoint["person"]["person-7"], tables["person"].rows[7])
    assert same(checkpoint[RELATION][:], tables[RELATION].rows)
    model = tmp_path / "model.v1.h5"
    with h5py.File(model) as file:
        sums = np.asarray(read_state(model, file, RELATION, meta)["sum"])
    np.testing.assert_allclose(sums, tables[RELATION].state["sum"].numpy(), rtol=1e-6)
    part = blank(cut("person", tables["person"], 2)[1])
    saved_ids = by_name.saved_entity_ids(checkpoint, "person", toy_names(meta)["person"])
    assert by_name.take_over(checkpoint, part, saved_ids) == len(part.rows)
    assert same(part.rows, tables["person"].rows[part.original_ids])
    assert torch.equal(part.state["sum"], tables["person"].state["sum"][part.original_ids])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"comparator": "hamming"},
            "operator complex_diagonal with comparator hamming; allowed is one of none, translation, "
            "diagonal, linear, affine, complex_diagonal with one of dot, cos, l2, squared_l2",
        ),
        (
            {"entities": {"person": {"num_partitions": 3, "featurized": True}}},
            "featurized entities are not dglkge's; allowed is False",
        ),
        ({"entities": {"person": {"num_partitions": 4}}}, "embeddings_person_3.v1.h5 is missing"),
        ({"dimension": None}, r"config.json is no configuration of PyTorch-BigGraph \(TypeError: "),
        ({"entities": ["person"]}, r"config.json is no configuration of PyTorch-BigGraph \(AttributeError: "),
    ],
)
def test_what_dglkge_cannot_read_is_refused(tmp_path, changes, words):
    saved_toy(tmp_path, 3, optimizer="row_adagrad")
    strip(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_a_run_does_not_write_over_bigraphs_checkpoint(tmp_path):
    meta = toy_meta(optimizer="row_adagrad")
    for folder in (tmp_path / "model", tmp_path / "run" / "checkpoint"):
        save_toy(folder, meta, toy_tables(meta), 2)
        output = tmp_path / folder.relative_to(tmp_path).parts[0]
        config = load_config(None, ["dataset=data/mine", f"output={output}"])
        check_config(config)  # ours
        strip(folder)
        with pytest.raises(InputError) as caught:
            check_config(config)
        assert (
            f"dglkge checkpoint convert {folder} --to run --dataset data/mine --output {output}_resumed,"
            in str(caught.value)
        )
    check_config(load_config(None, ["dataset=data/mine", f"output={tmp_path}/new"]))


def test_added_rows_stay_as_they_are(tmp_path):
    """A warm start: old rows and state keep their values, new ones are not touched."""
    old = toy_meta(num_people=23)
    tables = toy_tables(old)
    save_toy(tmp_path, old, tables, 2)
    new = toy_meta(num_people=30, relations=[*old.relations[1:], Relation("hates", "person", "person")])
    part = blank(cut("person", toy_tables(new, 1)["person"], 2)[0])
    checkpoint = open_checkpoint(tmp_path)
    taken = by_name.take_over(
        checkpoint, part, by_name.saved_entity_ids(checkpoint, "person", toy_names(new)["person"])
    )
    known = part.original_ids < 23
    assert taken == int(known.sum()) and 0 < taken < len(part.rows)
    ids = part.original_ids[known]
    assert same(part.rows[known], tables["person"].rows[ids])
    assert torch.equal(part.state["sum"][known], tables["person"].state["sum"][ids])
    assert not part.rows[~known].any() and not part.state["sum"][~known].any()
    types = by_name.saved_types(checkpoint.entity_types, list(new.entity_types))
    assert by_name.saved_relation_ids(checkpoint, new, types).tolist() == [1, -1]
    for change, words in (
        ({}, ""),
        ({"dim": 8}, "dim 6, this run has 8"),
        ({"reciprocal": False}, "reciprocal True, this run has False"),
    ):
        assert checkpoint.meta.difference(toy_meta(**change), MODEL_FIELDS) == words


def test_a_converted_run_starts_with_a_whole_epoch(tmp_path):
    """Progress within an epoch is a position in the order of triples that another data set does not have."""
    dataset = Dataset.open(toy_dataset())
    convert_to_run(open_checkpoint(save_toy_run(tmp_path / "ours", dataset)), dataset, tmp_path / "run")
    progress = open_checkpoint(tmp_path / "run").progress
    assert (progress["finished_epochs"], progress["batches_done"]) == (2, 0)


def theirs_of_type(folder, dataset, name="all", reciprocal=True, num_parts=2):
    """Write PyTorch-BigGraph's checkpoint of a data set of one type, under another name of the type."""
    meta = toy_meta(
        relations=[Relation(relation.name, name, name) for relation in reversed(dataset.relations.relations)],
        entity_types={name: dataset.num_entities("entity")},
        optimizer="row_adagrad",
        reciprocal=reciprocal,
    )
    tables = toy_tables(meta)
    save_toy(folder, meta, tables, num_parts, {name: dataset.vocabulary("entity")})
    strip(folder)
    return tables


def convert(capsys, *arguments):
    status = main(["checkpoint", "convert", *map(str, arguments), "--to", "run"])
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("words", "reciprocal"), [([], True), (["--type", "all=entity"], False)])
def test_its_usual_type_becomes_ours(words, reciprocal, tmp_path, capsys):
    """Its importers call the one entity type "all"."""
    dataset = Dataset.open(toy_dataset())
    tables = theirs_of_type(tmp_path / "theirs", dataset, reciprocal=reciprocal)
    arguments = [tmp_path / "theirs", "--dataset", dataset.path, "--output", tmp_path / "run", *words]
    status, err = convert(capsys, *arguments)
    assert status == 0, err
    run = open_checkpoint(tmp_path / "run")
    run.verify()
    assert run.entity_types == ["entity"] and run.meta.dataset_fingerprint == dataset.fingerprint
    assert same(run["entity"][:], tables["all"].rows)
    assert same(run[RELATION][:], tables[RELATION].rows.flip(0))
    with h5py.File(tmp_path / "run" / "checkpoint" / "v1" / "embeddings_entity_0.v1.h5") as file:
        assert np.array_equal(file["optimizer/sum"][:], tables["all"].state["sum"].numpy())
    with pytest.raises(CheckpointError, match="holds a checkpoint already; take another folder"):
        convert_to_run(open_checkpoint(tmp_path / "theirs"), dataset, tmp_path / "run")


def test_one_type_of_its_becomes_several_of_ours(tmp_path, capsys):
    typed = Dataset.open(toy_dataset(typed=True))
    names = {kind: list(typed.vocabulary(kind).names) for kind in typed.entity_types}
    everybody = [name for kind in reversed(typed.entity_types) for name in names[kind]]
    labels = [relation.name for relation in typed.relations.relations]
    distinct = sorted(set(labels))
    meta = toy_meta(
        relations=[Relation(name, "all", "all") for name in distinct],
        entity_types={"all": len(everybody)},
        optimizer="row_adagrad",
    )
    tables = toy_tables(meta)
    save_toy(tmp_path / "theirs", meta, tables, 1, {"all": Vocabulary(everybody, "entity")})
    strip(tmp_path / "theirs")
    arguments = [tmp_path / "theirs", "--dataset", typed.path, "--output", tmp_path / "run"]
    status, err = convert(capsys, *arguments)
    assert status == 2 and not (tmp_path / "run").exists()
    assert err == (
        f"dglkge: error: the checkpoint {tmp_path / 'theirs'} has the entity types 'all', the data set has "
        "'country', 'person', 'town': give --type THEIRS=OURS for 'country', 'person', 'town'\n"
    )
    mapped = [word for kind in typed.entity_types for word in ("--type", f"all={kind}")]
    status, err = convert(capsys, *arguments, *mapped)
    assert status == 0, err
    run = open_checkpoint(tmp_path / "run")
    for kind in typed.entity_types:
        rows = tables["all"].rows[[everybody.index(name) for name in names[kind]]]
        assert same(run[kind][:], rows)
    rows = tables[RELATION].rows[[distinct.index(name) for name in labels]]
    assert same(run[RELATION][:], rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--type", "al=entity"],
            "unknown entity type of the checkpoint 'al'; did you mean 'all'? known: 'all'",
        ),
        (["--type", "all=person"], "unknown entity type of the data set 'person'; known: 'entity'"),
        (["--type", "all"], "--type 'all' is not of the form THEIRS=OURS, e.g. all=entity"),
        (
            ["--from", "npy", "--type", "all=entity", "--score-function", "complex"],
            "--type goes with a checkpoint, not with --from",
        ),
    ],
)
def test_wrong_types(words, message, tmp_path, capsys):
    dataset = Dataset.open(toy_dataset())
    theirs_of_type(tmp_path / "theirs", dataset)
    arguments = [tmp_path / "theirs", "--dataset", dataset.path, "--output", tmp_path / "run", *words]
    status, err = convert(capsys, *arguments)
    assert status == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_types_are_for_runs_and_given_once(tmp_path, capsys):
    theirs_of_type(tmp_path / "theirs", Dataset.open(toy_dataset()))
    words = ["checkpoint", "convert", str(tmp_path / "theirs"), "--to", "npy", "--type", "all=entity"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "--type goes with --to run, got --to npy" in capsys.readouterr().err
    with pytest.raises(InputError, match="entity type 'entity' of the data set is given twice"):
        by_name.saved_types(["a", "b"], ["entity"], ["a=entity", "b=entity"])


def test_a_converted_run_keeps_what_was_measured(tmp_path):
    dataset = Dataset.open(toy_dataset())
    theirs_of_type(tmp_path / "theirs", dataset)
    lines = [
        {"epoch_idx": epoch, "index": bucket, "stats": {"count": 5, "metrics": {"loss": 1.5}}}
        for epoch in (0, 1)
        for bucket in (0, 1)
    ]
    (tmp_path / "theirs" / "training_stats.json").write_text(
        "".join(json.dumps(record) + "\n" for record in lines)
    )
    convert_to_run(open_checkpoint(tmp_path / "theirs"), dataset, tmp_path / "run")
    text = (tmp_path / "run" / "checkpoint" / "latest" / "training_stats.json").read_text()
    assert [json.loads(line) for line in text.splitlines()] == lines
    (tmp_path / "theirs" / "training_stats.json").unlink()
    convert_to_run(open_checkpoint(tmp_path / "theirs"), dataset, tmp_path / "again")
    assert (tmp_path / "again" / "checkpoint" / "latest" / "training_stats.json").read_text() == ""


@pytest.mark.parametrize("command", [["evaluate"], ["evaluate", "--dataset", "DATASET"], ["predict"]])
def test_what_it_wrote_is_to_be_converted_first(command, tmp_path, capsys):
    """Also where it resumed one of our runs, and so has neither fingerprint nor path of the data set."""
    dataset = Dataset.open(toy_dataset())
    theirs_of_type(tmp_path / "run" / "checkpoint", dataset, name="entity")
    words = [str(dataset.path) if word == "DATASET" else word for word in command]
    words.insert(1, str(tmp_path / "run"))
    if command == ["predict"]:
        words += ["--head", "e001", "--relation", "turn_7", "--known", "mark"]
    assert main(words) == 2
    err = capsys.readouterr().err
    folder_option = str(dataset.path) if "DATASET" in command else "DIR"
    folder = f"{tmp_path}/run/checkpoint"
    assert err == (
        f"dglkge: error: {folder} was written by PyTorch-BigGraph, with ids of its own; to use it with a "
        f"data set: dglkge checkpoint convert {folder} --to run --dataset {folder_option} "
        f"--output {tmp_path}/run_converted\n"
    )


def test_verify_claims_no_checksums_where_there_are_none(tmp_path, capsys):
    theirs_of_type(tmp_path / "theirs", Dataset.open(toy_dataset()))
    assert main(["checkpoint", "verify", str(tmp_path / "theirs")]) == 0
    out = capsys.readouterr().out
    assert "checksums   none for 3 of 3 files, which PyTorch-BigGraph wrote: not verified" in out
    assert "as they were written" not in out
    assert main(["inspect", str(tmp_path / "theirs"), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] is False
    assert [file["crc32"] for file in report["files"]] == [None] * 3
