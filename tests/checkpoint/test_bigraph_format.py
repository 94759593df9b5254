"""The files are PyTorch-BigGraph's: names, attributes, types; relation rows are cut into its parameters."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import textwrap

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import hdf5_format, part_files
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.errors import CheckpointError
from dglkge.formats import relation_parameters
from dglkge.formats.bigraph_files import bigraph_config
from dglkge.formats.relation_parameters import is_dynamic, operator_of, to_parameters
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS, DistMult
from dglkge.typing import RELATION, Relation
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.test_bigraph_reader import strip, theirs_of_type
from tests.checkpoint.toy_checkpoint import META
from tests.model.score_oracle import BIGRAPH_NAMES
from tests.toy_kg import REPOSITORY, toy_dataset

DIM = 6
STATIC = {
    "none": {},
    "translation": {"translation": (DIM,)},
    "diagonal": {"diagonal": (DIM,)},
    "linear": {"linear_transformation": (DIM, DIM)},
    "affine": {"linear_transformation": (DIM, DIM), "translation": (DIM,)},
    "complex_diagonal": {"real": (DIM // 2,), "imag": (DIM // 2,)},
}
"""Names and shapes of one relation's parameters in PyTorch-BigGraph; dynamic operators have plurals."""


def blob(path):
    with h5py.File(path) as file:
        assert file["optimizer/state_dict"].dtype == np.dtype("V1")
        return torch.load(io.BytesIO(file["optimizer/state_dict"][...].tobytes()), weights_only=True)


def sums_of(path):
    return [parameter["sum"].numpy() for parameter in blob(path)["state"].values()]


def config_of(folder):
    return json.loads((folder / "latest" / "config.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, toy.saved_toy(folder, 2)[1]


def test_every_file(saved):
    folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_version.txt", "latest", "v1"]
    assert os.readlink(folder / "latest") == "v1"
    texts = "checkpoint_version.txt config.json dynamic_rel_count.txt dynamic_rel_names.json manifest.json"
    names = [*texts.split(), "model.v1.h5", "training_stats.json", "vocabulary_person.txt"]
    for part in (0, 1):
        names += [f"embeddings_person_{part}.v1.h5", f"entity_count_person_{part}.txt"]
        names.append(f"entity_names_person_{part}.json")
    assert sorted(path.name for path in (folder / "v1").iterdir()) == sorted(names)
    for path in (folder, folder / "v1"):
        assert (path / "checkpoint_version.txt").read_text() == "1\n"
    assert (folder / "latest" / "dynamic_rel_count.txt").read_text() == "2\n"
    assert json.loads((folder / "latest" / "dynamic_rel_names.json").read_text()) == ["likes", "knows"]
    for name in ("embeddings_person_1.v1.h5", "model.v1.h5"):
        with h5py.File(folder / "v1" / name) as file:
            attributes = dict(file.attrs)
        assert attributes.pop("format_version") == 1
        assert attributes.pop("iteration/edge_path") == "train"
        assert json.loads(attributes.pop("config/json")) == config_of(folder)
        numbers = {"num_epochs": 9, "epoch_idx": 1, "num_edge_paths": 1, "edge_path_idx": 0}
        numbers |= {"num_edge_chunks": 1, "edge_chunk_idx": 0}
        assert attributes == {f"iteration/{name}": number for name, number in numbers.items()}
        assert all(value.dtype == np.int64 for value in attributes.values())


def test_embeddings_file(saved):
    """Rows, names and sums; its blob has the mean of each row's sums, of which it keeps one number."""
    folder, tables = saved
    all_ids = []
    for part in (0, 1):
        path = folder / "v1" / f"embeddings_person_{part}.v1.h5"
        count = int((folder / "latest" / f"entity_count_person_{part}.txt").read_text())
        with h5py.File(path) as file:
            shapes = {name: (item.dtype.str, item.shape) for name, item in toy.datasets_in(file).items()}
            assert file["embeddings"].chunks is None and file["embeddings"].compression is None
            ids, rows = file["original_ids"][:], file["embeddings"][:]
        del shapes["optimizer/state_dict"]
        expected = {"embeddings": ("<f4", (count, 6)), "original_ids": ("<i8", (count,))}
        assert shapes == {**expected, "optimizer/sum": ("<f4", (count, 6))}
        assert (np.diff(ids) > 0).all()
        assert rows.tobytes() == tables["person"].rows[ids].numpy().tobytes()
        text = (folder / "latest" / f"entity_names_person_{part}.json").read_text()
        assert text == json.dumps([f"person-{id_}" for id_ in ids], indent=4)
        means = tables["person"].state["sum"].double().numpy()[ids].mean(axis=1)
        np.testing.assert_allclose(sums_of(path)[0], means, rtol=1e-6)
        all_ids += ids.tolist()
    assert sorted(all_ids) == list(range(23))
    names = (folder / "latest" / "vocabulary_person.txt").read_text().splitlines()
    assert names == [f"person-{id_}" for id_ in range(23)]
    sums = np.concatenate(sums_of(folder / "v1" / "model.v1.h5"), axis=1)
    assert sums.tobytes() == tables[RELATION].state["sum"].numpy().tobytes()


@pytest.mark.parametrize("dynamic", [True, False])
def test_row_adagrad_has_the_sums_of_biggraphs_optimizers(tmp_path, dynamic):
    """torch's own Adagrad, which PyTorch-BigGraph has for its operators, loads them and goes on."""
    pairs = {} if dynamic else {"reciprocal": False, "relations": toy.TWO_PAIRS}
    meta, tables = toy.saved_toy(tmp_path, 2, optimizer="row_adagrad", **pairs)
    path = tmp_path / "v1" / "embeddings_person_0.v1.h5"
    entity_state = blob(path)
    constants = {"lr_decay": 0, "weight_decay": 0, "eps": 1e-10, "initial_accumulator_value": 0}
    assert entity_state["param_groups"] == [{"lr": 0.1, "params": [0], **constants}]
    assert list(entity_state["state"]) == [0] and list(entity_state["state"][0]) == ["step", "sum"]
    with h5py.File(path) as file:
        ids, plain = file["original_ids"][:], file["optimizer/sum"][:]
    assert np.array_equal(plain, tables["person"].state["sum"][ids].numpy())
    assert np.array_equal(plain, sums_of(path)[0])
    with h5py.File(tmp_path / "v1" / "model.v1.h5") as file:
        keys = {item.attrs["state_dict_key"]: item[...] for item in toy.datasets_in(file["model"]).values()}
    # As the modules declare them: lhs_operators.0.real, lhs_operators.0.imag, ...
    names = sorted(keys, key=lambda key: (key[: -len("real")], key.endswith("imag")))
    parameters = [torch.nn.Parameter(torch.from_numpy(keys[name])) for name in names]
    optimizer = torch.optim.Adagrad(parameters, lr=1.0)
    optimizer.load_state_dict(blob(tmp_path / "v1" / "model.v1.h5"))
    sums = tables[RELATION].state["sum"]
    for key, parameter in zip(names, parameters):
        expected = sums[:, None] if dynamic else sums[int(key.split(".")[1])]
        assert torch.equal(optimizer.state[parameter]["sum"], expected.expand_as(parameter)), key
    assert len(optimizer.state) == len(parameters) == (4 if dynamic else 2 * len(meta.relations))
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    root = (sums[:, None] if dynamic else sums[0]).expand_as(before).add(1).sqrt()
    torch.testing.assert_close(parameters[0].detach(), before - 0.1 / root, equal_nan=True)


def test_relations_with_an_optimizer_of_their_own(tmp_path):
    """PyTorch-BigGraph's pair: row-wise Adagrad of entities, element-wise of relations; two rates."""
    both = {"name": "row_adagrad", "lr": 0.1, "relation_name": "sparse_adagrad", "relation_lr": 0.02}
    meta = dataclasses.replace(META, optimizer=both)
    tables = {**toy.toy_tables(meta), RELATION: toy.toy_tables(META)[RELATION]}
    wide = tables[RELATION].state["sum"]
    toy.save_toy(tmp_path, meta, tables)
    paths = [tmp_path / "v1" / name for name in ("model.v1.h5", "embeddings_person_0.v1.h5")]
    assert np.concatenate(sums_of(paths[0]), axis=1).tobytes() == wide.numpy().tobytes()
    assert [blob(path)["param_groups"][0]["lr"] for path in paths] == [0.02, 0.1]
    config = config_of(tmp_path)
    assert (config["lr"], config["relation_lr"]) == (0.1, 0.02)
    # Adam of the entities has no sums; the relations' Adagrad has.
    meta = dataclasses.replace(meta, optimizer={**both, "name": "sparse_adam"})
    toy.save_toy(tmp_path, meta, tables)
    assert all((values > 0).any() for values in sums_of(tmp_path / "v2" / "model.v2.h5"))
    assert not sums_of(tmp_path / "v2" / "embeddings_person_0.v2.h5")[0].any()


@pytest.mark.parametrize("optimizer", [{"name": "sparse_adam", "lr": 0.003}, {}])
def test_other_optimizers_have_a_blob_that_starts_anew(tmp_path, optimizer):
    tables = toy.toy_tables(toy.toy_meta(optimizer="sparse_adam"))
    if not optimizer:
        tables = {name: toy.ToyTable(table.rows, {}) for name, table in tables.items()}
    toy.save_toy(tmp_path, dataclasses.replace(META, optimizer=optimizer), tables, 2)
    rate = 0.003 if optimizer else 0.01
    assert config_of(tmp_path)["lr"] == rate
    for name, shape in (("embeddings_person_0.v1.h5", (12,)), ("model.v1.h5", (2, 3))):
        path = tmp_path / "v1" / name
        assert blob(path)["param_groups"][0]["lr"] == rate
        assert all(np.array_equal(values, np.zeros(shape)) for values in sums_of(path))


def test_the_specification_opens_the_files(tmp_path, monkeypatch):
    """The code in the documentation runs as it stands."""
    for _ in range(7):
        _, tables = toy.saved_toy(tmp_path)
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text().partition("## Format of the files")[2]
    snippets = [textwrap.dedent(block) for block in re.findall(r"(?m)(?:^    .*\n)+", page)]
    code = "\n".join(snippet for snippet in snippets if "h5py.File" in snippet)
    assert code.count("h5py.File") == 2
    monkeypatch.chdir(tmp_path / "v7")
    variables = {"h5py": h5py}
    # Datasets are looked at before their file is closed.
    exec(code.replace('lhs/real"]', 'lhs/real"][:]'), variables)
    assert variables["original_id"] == 12
    assert variables["row"].tobytes() == tables["person"].rows[12].numpy().tobytes()
    assert variables["state"].tobytes() == tables["person"].state["sum"][12].numpy().tobytes()
    assert variables["real"].tobytes() == tables[RELATION].rows[:, :3].contiguous().numpy().tobytes()


CONFIG_KEYS = """
entities relations dimension init_scale max_norm global_emb comparator bias loss_fn margin entity_path
edge_paths checkpoint_path init_path checkpoint_preservation_interval num_epochs num_edge_chunks
max_edges_per_chunk bucket_order workers batch_size num_batch_negs num_uniform_negs disable_lhs_negs
disable_rhs_negs lr relation_lr eval_fraction eval_num_batch_negs eval_num_uniform_negs background_io
verbose hogwild_delay dynamic_relations num_machines num_partition_servers distributed_init_method
distributed_tree_init_order
""".split()
"""The fields of ConfigSchema in config.py of PyTorch-BigGraph 1.0.0."""


@pytest.mark.parametrize("relations", [toy.ONE_PAIR, toy.TWO_PAIRS])
def test_config_has_every_key_of_its_schema(tmp_path, relations):
    config = {
        "model": {"init_scale": 0.5},
        "loss": {"name": "margin_ranking", "margin": 2.0, "relation_weights": {"made": 2.5}},
        "negatives": {"num_uniform": 70, "num_for_heads": 0},
        "training": {"num_epochs": 9, "batch_size": 300, "edge_chunks": 4},
        "checkpoint": {"keep_every_epochs": 5, "init_path": "runs/older/checkpoint"},
        "evaluation": {"held_out": {"fraction": 0.1, "batch_negatives": 20, "uniform_negatives": 30}},
    }
    meta, _ = toy.saved_toy(tmp_path, 2, "transe_l2", relations, config=config)
    written = config_of(tmp_path)
    assert set(written) == set(CONFIG_KEYS)
    if relations is toy.ONE_PAIR:
        names, described = ["likes", "knows"], [("all", "person", "person", 1.0)]
    else:
        names = ["likes (person → person)", "made", "likes (person → film)"]
        described = [("likes", "person", "person", 1.0), ("made", "person", "film", 2.5)]
        described.append(("likes", "person", "film", 1.0))
    expected = {
        "entities": dict.fromkeys(meta.entity_types, {"num_partitions": 2, "featurized": False}),
        "relations": [
            {"name": name, "lhs": lhs, "rhs": rhs, "operator": "translation", "weight": weight}
            for name, lhs, rhs, weight in described
        ],
        "dynamic_relations": relations is toy.ONE_PAIR, "dimension": DIM, "comparator": "l2", "bias": False,
        "global_emb": False, "init_scale": 0.5, "loss_fn": "ranking", "margin": 2.0, "lr": 0.1,
        "num_uniform_negs": 70, "disable_lhs_negs": True, "disable_rhs_negs": False,
        "num_epochs": 9, "batch_size": 300, "num_edge_chunks": 4, "edge_paths": [],
        "entity_path": str(tmp_path.resolve() / "v1"), "checkpoint_path": str(tmp_path.resolve() / "v1"),
        "checkpoint_preservation_interval": 5, "init_path": "runs/older/checkpoint",
        "eval_fraction": 0.1, "eval_num_batch_negs": 20, "eval_num_uniform_negs": 30,
    }  # fmt: skip
    assert not any(relation.pop("all_negs") for relation in written["relations"])
    assert {key: written[key] for key in expected} == expected
    assert json.loads((tmp_path / "latest" / "dynamic_rel_names.json").read_text()) == names


def parameters_of(operators, reciprocal):
    """List PyTorch-BigGraph's parameters of two relations or more: path, shape and key of each."""
    parameters = []
    if len(operators) == 1 and reciprocal:  # dynamic: all relations in one
        for side in ("lhs", "rhs"):
            for piece, shape in STATIC[operators[0]].items():
                name = piece if operators[0] == "complex_diagonal" else f"{piece}s"
                path = f"relations/0/operator/{side}/{name}"
                parameters.append((path, (2, *shape), f"{side}_operators.0.{name}"))
    else:
        for index, operator in enumerate(operators if len(operators) > 1 else operators * 2):
            for piece, shape in STATIC[operator].items():
                path = f"relations/{index}/operator/rhs/{piece}"
                parameters.append((path, shape, f"rhs_operators.{index}.{piece}"))
    return parameters


SEVERAL = ("translation", "affine", "none", "complex_diagonal")


@pytest.mark.parametrize(("operators", "comparator", "reciprocal"), [
    (("none",), "cos", True), (("none",), "dot_bias", False),
    (("translation",), "squared_l2", True), (("translation",), "l2_bias", False),
    (("diagonal",), "cos_bias", True), (("diagonal",), "l2", False),
    (("linear",), "dot_bias", True), (("linear",), "squared_l2", False),
    (("affine",), "l2", True), (("affine",), "cos_bias", False),
    (("complex_diagonal",), "cos", True), (("complex_diagonal",), "squared_l2_bias", False),
    (SEVERAL, "cos", True), (SEVERAL, "cos", False),
])  # fmt: skip
def test_files_have_the_parameters_of_its_operators(tmp_path, operators, comparator, reciprocal):
    """Written with the names, shapes and keys of its own checkpoints; read without all that is ours."""
    is_mixed, name = len(operators) > 1, f"{'+'.join(operators)}_{comparator}"
    relations = [Relation(label, "person", "person") for label in "abcd"[: max(2, len(operators))]]
    meta = toy.toy_meta(name, relations, reciprocal, operators=operators if is_mixed else ())
    tables = toy.toy_tables(meta)
    if operators == ("none",):
        tables[RELATION].rows[:] = 0
    toy.save_toy(tmp_path, meta, tables, 2)
    config = config_of(tmp_path)
    assert config["dynamic_relations"] is (reciprocal and not is_mixed)
    assert {relation["operator"] for relation in config["relations"]} == set(operators)
    assert config["comparator"] == comparator.removesuffix("_bias")
    expected = parameters_of(operators, reciprocal)
    with h5py.File(tmp_path / "v1" / "model.v1.h5") as file:
        items = toy.datasets_in(file["model"]).items()
        written = {(path, item.shape, item.attrs["state_dict_key"]) for path, item in items}
        assert written == set(expected)
        assert all(item.dtype == np.float32 for _, item in items)
    shapes = [values.shape for values in sums_of(tmp_path / "v1" / "model.v1.h5")]
    assert shapes == [shape for _, shape, _ in expected]
    rows = tables[RELATION].rows
    assert toy.same(open_checkpoint(tmp_path)[RELATION][:], rows)
    strip(tmp_path)
    stripped = open_checkpoint(tmp_path)
    assert (stripped.meta.score_function, stripped.meta.operators or operators) == (name, operators)
    # Of several operators PyTorch-BigGraph has those of tails alone.
    width = rows.shape[1] // 2 if is_mixed and reciprocal else rows.shape[1]
    assert toy.same(stripped[RELATION][:], rows[:, -width:])
    if is_mixed:  # their sums stay one for each number
        with hdf5_format.open_file(tmp_path / "model.v1.h5") as file:
            sums = part_files.read_state(tmp_path, file, RELATION, stripped.meta)["sum"]
        expected_sums = tables[RELATION].state["sum"].numpy()[:, -width:].copy()
        for row, operator in zip(expected_sums, operators):
            row[sum(int(np.prod(shape)) for shape in STATIC[operator].values()) :] = 0
        np.testing.assert_array_equal(sums, expected_sums)


def test_global_vectors_are_read_into_the_rows(tmp_path):
    """PyTorch-BigGraph's vectors of types; a run that it is converted to has them in its rows."""
    dataset, theirs = Dataset.open(toy_dataset()), tmp_path / "theirs"
    tables = theirs_of_type(theirs, dataset, "entity", "affine_cos_bias", reciprocal=False)
    rows, names = tables["entity"].rows, list(dataset.vocabulary("entity").names)
    shift = torch.arange(DIM) / 7
    with h5py.File(theirs / "model.v1.h5", "r+") as file:
        file["model/entities/entity/global_embedding"] = shift.numpy()
    stripped = open_checkpoint(theirs)
    assert toy.same(stripped["entity"][names], rows + shift)
    convert_to_run(stripped, dataset, tmp_path / "run")
    run = open_checkpoint(tmp_path / "run")
    assert run.meta.score_function == "affine_cos_bias" and run.global_vector("entity") is None
    assert toy.same(run["entity"][:], rows + shift)
    with h5py.File(theirs / "model.v1.h5", "r+") as file:
        file["model/entities/entity/global_embedding"][...] = 0
    assert torch.equal(open_checkpoint(theirs)["entity"][names], rows)


ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)


@pytest.mark.parametrize(("score_function", "relations", "reciprocal"), [
    ("complex", toy.ONE_PAIR, True), ("complex", toy.TWO_PAIRS, False),
    ("none_cos", toy.TWO_PAIRS, False), ("rescal", toy.ONE_PAIR, True),
    ("affine_l2", toy.ONE_PAIR, True), ("affine_l2", toy.TWO_PAIRS, False),
])  # fmt: skip
def test_sums_of_bigraphs_adagrad(relations, reciprocal, score_function):
    """Laid out as its parameters are, from the squares of the rows themselves; and the mean of each row."""
    meta = toy.toy_meta(score_function, relations, reciprocal)
    width = build_model(score_function, meta.dim, reciprocal).relation_width
    rows = np.random.default_rng(0).random((len(meta.relations), width), dtype=np.float32)
    if score_function.startswith("none"):
        rows[:] = 0
    parameters = {key: values for _, key, values in to_parameters(rows, meta)}
    kinds = {key.split(".")[-1]: None for key in parameters}  # real before imag, as the modules declare them
    keys = [
        key
        for side in ("lhs", "rhs")
        for index in range(len(meta.relations))
        for kind in kinds
        if (key := f"{side}_operators.{index}.{kind}") in parameters
    ]
    assert len(keys) == len(parameters)
    squares = [parameters[key] ** 2 for key in keys]
    sums = relation_parameters.to_bigraph_sums(rows**2, width, meta)
    for values, expected in zip(sums, squares, strict=True):
        assert np.array_equal(values, expected)
    state = {number: {"step": 1, "sum": torch.from_numpy(values)} for number, values in enumerate(squares)}
    means = relation_parameters.bigraph_row_sums(state, meta, width)
    np.testing.assert_allclose(means, (rows**2).mean(axis=1), rtol=1e-6)
    if state:
        del state[0]
        with pytest.raises(KeyError):
            relation_parameters.bigraph_row_sums(state, meta, width)


BOTH = np.concatenate([ROWS, ROWS + 10], axis=1)
TWO_BY_SIX = np.arange(12, dtype=np.float32).reshape(2, 6)
BY_HAND = [
    # The first half of a row asks for tails and so works on the head, lhs.
    (toy.toy_meta("distmult"), ROWS, {
        "0.lhs.diagonals": [[1, 2], [5, 6]], "0.rhs.diagonals": [[3, 4], [7, 8]],
    }),
    (toy.toy_meta("complex"), ROWS, {
        "0.lhs.real": [[1], [5]], "0.lhs.imag": [[2], [6]],
        "0.rhs.real": [[3], [7]], "0.rhs.imag": [[4], [8]],
    }),
    # PyTorch-BigGraph works on the tail: <h r, t> = <h, conj(r) t>.
    (toy.toy_meta("complex", reciprocal=False), ROWS, {
        "0.rhs.real": [1, 2], "0.rhs.imag": [-3, -4], "1.rhs.real": [5, 6], "1.rhs.imag": [-7, -8],
    }),
    (toy.toy_meta("transe_l2", reciprocal=False), ROWS, {
        "0.rhs.translation": [-1, -2, -3, -4], "1.rhs.translation": [-5, -6, -7, -8],
    }),
    # The tail side of static relations is kept apart, without a key.
    (toy.toy_meta("distmult", toy.TWO_PAIRS[:2]), ROWS, {
        "0.lhs.diagonal": [1, 2], "1.lhs.diagonal": [5, 6],
        "0.rhs.diagonal": [3, 4], "1.rhs.diagonal": [7, 8],
    }),
    # PyTorch-BigGraph multiplies the tail from the left: h R t = h . (R t).
    (toy.toy_meta("rescal", reciprocal=False, dim=2), ROWS, {
        "0.rhs.linear_transformation": [[1, 2], [3, 4]], "1.rhs.linear_transformation": [[5, 6], [7, 8]],
    }),
    # With an operator for each side ours multiplies the entity from the right: h R = R^T h.
    (toy.toy_meta("rescal", dim=2), BOTH, {
        "0.lhs.linear_transformations": [[[1, 3], [2, 4]], [[5, 7], [6, 8]]],
        "0.rhs.linear_transformations": [[[11, 13], [12, 14]], [[15, 17], [16, 18]]],
    }),
    (toy.toy_meta("affine_l2", reciprocal=False, dim=2), TWO_BY_SIX, {
        "0.rhs.linear_transformation": [[0, 1], [2, 3]], "0.rhs.translation": [4, 5],
        "1.rhs.linear_transformation": [[6, 7], [8, 9]], "1.rhs.translation": [10, 11],
    }),
    (toy.toy_meta("linear_cos", dim=1), ROWS[:, :2], {
        "0.lhs.linear_transformations": [[[1]], [[5]]], "0.rhs.linear_transformations": [[[2]], [[6]]],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("meta", "rows", "expected"), BY_HAND)
def test_rows_cut_by_hand(meta, rows, expected):
    parameters = {}
    for path, key, values in to_parameters(rows, meta):
        group, index, side, name = re.fullmatch(r"(\w+)/relations/(\d)/operator/(.hs)/(\w+)", path).groups()
        parameters[f"{index}.{side}.{name}"] = values.tolist()
        is_ours = not is_dynamic(meta) and side == "lhs"
        assert group == ("reciprocal" if is_ours else "model")
        assert key == (None if is_ours else f"{side}_operators.{index}.{name}")
    assert parameters == expected


@pytest.fixture
def a_new_one(monkeypatch):
    monkeypatch.setitem(SCORE_FUNCTIONS._members, "a new one", type("New", (DistMult,), {"operator": None}))


@pytest.mark.usefixtures("a_new_one")
@pytest.mark.parametrize("relations", [toy.ONE_PAIR, toy.TWO_PAIRS])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_there_and_back_bit_for_bit(relations, reciprocal):
    """Of every score function, and of every operator with every comparator."""
    for name in [*SCORE_FUNCTIONS, *BIGRAPH_NAMES, "a new one"]:
        meta = toy.toy_meta(name, relations, reciprocal, dim=2)
        # 8 numbers, or as many as an operator has.
        width = 4 if name == "rescal" and not reciprocal else 8
        if name in BIGRAPH_NAMES:
            width = build_model(name, meta.dim, reciprocal).relation_width
        bits = np.random.default_rng(0).integers(0, 1 << 32, (len(relations), width), dtype=np.uint32)
        rows = np.zeros_like(bits) if name.startswith("none") else bits
        datasets = {path: values.copy() for path, _, values in to_parameters(rows.view(np.float32), meta)}
        assert relation_parameters.from_parameters(datasets, meta, width).tobytes() == rows.tobytes(), name


@pytest.mark.usefixtures("a_new_one")
def test_names_of_operators():
    """What PyTorch-BigGraph lacks has a name that it refuses; an unknown function is an error."""
    for score_function in ("transe_l1", "rotate"):
        config = bigraph_config(toy.toy_meta(score_function), 1, "/x")
        assert config["comparator"] not in {"dot", "cos", "l2", "squared_l2"}
    assert operator_of(toy.toy_meta("rotate")).name not in STATIC
    assert operator_of(toy.toy_meta("a new one")).name == "a new one"
    with pytest.raises(CheckpointError, match="unknown score function 'mine'; .*; if a module of yours reg"):
        operator_of(toy.toy_meta("mine"))
