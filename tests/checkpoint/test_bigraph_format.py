"""The files are PyTorch-BigGraph's: names, attributes, types, and the scores that it would compute."""

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

from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, Side
from tests.checkpoint.toy_checkpoint import (
    ONE_PAIR,
    TWO_PAIRS,
    ToyTable,
    datasets_in,
    save_toy,
    saved_toy,
    toy_meta,
    toy_tables,
)
from tests.toy_kg import REPOSITORY

ITERATION = {
    "iteration/num_epochs": 9,
    "iteration/epoch_idx": 1,
    "iteration/num_edge_paths": 1,
    "iteration/edge_path_idx": 0,
    "iteration/num_edge_chunks": 1,
    "iteration/edge_chunk_idx": 0,
}


def tree(path):
    """List every dataset of a file but the optimizer's blob, which must be there: path -> (dtype, shape)."""
    with h5py.File(path) as file:
        shapes = {name: (item.dtype.str, item.shape) for name, item in datasets_in(file).items()}
    dtype, shape = shapes.pop("optimizer/state_dict")
    assert dtype == "|V1" and len(shape) == 1 and shape[0] > 0
    return shapes


def blob(path):
    """Read PyTorch-BigGraph's state of an optimizer."""
    with h5py.File(path) as file:
        assert file["optimizer/state_dict"].dtype == np.dtype("V1")
        return torch.load(io.BytesIO(file["optimizer/state_dict"][...].tobytes()), weights_only=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two parts, and its tables."""
    folder, meta = tmp_path_factory.mktemp("saved"), toy_meta()
    tables = toy_tables(meta)
    save_toy(folder, meta, tables, 2)
    return folder, tables


def test_every_file(saved):
    folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_version.txt", "latest", "v1"]
    assert os.readlink(folder / "latest") == "v1"
    assert sorted(path.name for path in (folder / "v1").iterdir()) == [
        "checkpoint_version.txt",
        "config.json",
        "dynamic_rel_count.txt",
        "dynamic_rel_names.json",
        "embeddings_person_0.v1.h5",
        "embeddings_person_1.v1.h5",
        "entity_count_person_0.txt",
        "entity_count_person_1.txt",
        "entity_names_person_0.json",
        "entity_names_person_1.json",
        "manifest.json",
        "model.v1.h5",
        "training_stats.json",
        "vocabulary_person.txt",
    ]
    for path in (folder, folder / "v1"):
        assert (path / "checkpoint_version.txt").read_text() == "1\n"
    assert (folder / "latest" / "entity_count_person_0.txt").read_text() == "12\n"
    assert (folder / "latest" / "dynamic_rel_count.txt").read_text() == "2\n"
    assert json.loads((folder / "latest" / "dynamic_rel_names.json").read_text()) == ["likes", "knows"]
    for name in ("embeddings_person_1.v1.h5", "model.v1.h5"):
        with h5py.File(folder / "v1" / name) as file:
            attributes = dict(file.attrs)
        assert attributes.pop("format_version") == 1
        assert attributes.pop("iteration/edge_path") == "train"
        config = json.loads((folder / "latest" / "config.json").read_text())
        assert json.loads(attributes.pop("config/json")) == config
        assert attributes == ITERATION
        assert all(value.dtype == np.int64 for value in attributes.values())


def test_embeddings_file(saved):
    folder, tables = saved
    all_ids = []
    for part in (0, 1):
        path = folder / "v1" / f"embeddings_person_{part}.v1.h5"
        count = int((folder / "latest" / f"entity_count_person_{part}.txt").read_text())
        assert tree(path) == {
            "embeddings": ("<f4", (count, 6)),
            "original_ids": ("<i8", (count,)),
            "optimizer/sum": ("<f4", (count, 6)),
        }
        with h5py.File(path) as file:
            assert file["embeddings"].chunks is None and file["embeddings"].compression is None
            ids, rows = file["original_ids"][:], file["embeddings"][:]
        assert (np.diff(ids) > 0).all()
        assert rows.tobytes() == tables["person"].rows[ids].numpy().tobytes()
        text = (folder / "latest" / f"entity_names_person_{part}.json").read_text()
        assert text == json.dumps([f"person-{id_}" for id_ in ids], indent=4)
        all_ids += ids.tolist()
    assert sorted(all_ids) == list(range(23))
    names = (folder / "latest" / "vocabulary_person.txt").read_text().splitlines()
    assert names == [f"person-{id_}" for id_ in range(23)]


def test_row_adagrad_has_biggraphs_blob_as_well(tmp_path):
    meta, tables = saved_toy(tmp_path, 2, optimizer="row_adagrad")
    path = tmp_path / "v1" / "embeddings_person_0.v1.h5"
    state = blob(path)
    with h5py.File(path) as file:
        ids, plain = file["original_ids"][:], file["optimizer/sum"][:]
    (group,) = state["param_groups"]
    constants = {"lr_decay": 0, "weight_decay": 0, "eps": 1e-10, "initial_accumulator_value": 0}
    assert group == {"lr": 0.1, "params": [0], **constants}
    assert list(state["state"]) == [0] and list(state["state"][0]) == ["step", "sum"]
    assert torch.equal(state["state"][0]["sum"], tables["person"].state["sum"][ids])
    assert np.array_equal(plain, state["state"][0]["sum"].numpy())


@pytest.mark.parametrize("dynamic", [True, False])
def test_row_adagrads_sums_of_relations_in_the_shapes_of_biggraphs_operators(tmp_path, dynamic):
    """torch's own Adagrad, which PyTorch-BigGraph has for its operators, loads them and goes on."""
    pairs = {} if dynamic else {"reciprocal": False, "relations": TWO_PAIRS}
    meta, tables = saved_toy(tmp_path, 2, optimizer="row_adagrad", **pairs)
    with h5py.File(tmp_path / "v1" / "model.v1.h5") as file:
        keys = {item.attrs["state_dict_key"]: item[...] for item in datasets_in(file["model"]).values()}
    state = blob(tmp_path / "v1" / "model.v1.h5")

    def in_modules_order(key):  # lhs_operators.0.real, lhs_operators.0.imag, ...
        side, index, name = key.split(".")
        return side, int(index), ["real", "imag"].index(name)

    keys = {key: keys[key] for key in sorted(keys, key=in_modules_order)}
    parameters = [torch.nn.Parameter(torch.from_numpy(values)) for values in keys.values()]
    optimizer = torch.optim.Adagrad(parameters, lr=1.0)
    optimizer.load_state_dict(state)
    sums = tables[RELATION].state["sum"]
    for key, parameter in zip(keys, parameters):
        loaded = optimizer.state[parameter]["sum"]
        expected = sums[:, None] if dynamic else sums[int(key.split(".")[1])]
        assert torch.equal(loaded, expected.expand_as(parameter)), key
    assert len(optimizer.state) == len(parameters) == (4 if dynamic else 2 * len(meta.relations))
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    root = (sums[:, None] if dynamic else sums[0]).expand_as(before).add(1).sqrt()
    torch.testing.assert_close(parameters[0].detach(), before - 0.1 / root, equal_nan=True)


DYNAMIC = "model/relations/0/operator"


def biggraph_operate(rows, parameters, score_function):
    """Apply PyTorch-BigGraph's operator to rows (n, D), in float64."""
    if score_function == "complex":
        product = (rows[:, :3] + 1j * rows[:, 3:]) * (parameters["real"] + 1j * parameters["imag"])
        return np.concatenate([product.real, product.imag], axis=1)
    ((name, values),) = parameters.items()
    if name.startswith("linear"):
        # LinearOperator and DynamicLinear: torch.matmul(matrix, row) for each row.
        return np.array([values @ row for row in rows])
    return rows * values if name.startswith("diagonal") else rows + values


def biggraph_compare(lhs, rhs, score_function):
    """Apply PyTorch-BigGraph's comparator: dot or l2."""
    if score_function == "transe_l2":
        return -np.sqrt(((lhs - rhs) ** 2).sum(1))
    return (lhs * rhs).sum(1)


@pytest.mark.parametrize(
    ("score_function", "reciprocal"),
    [
        ("complex", True),
        ("complex", False),
        ("distmult", True),
        ("transe_l2", False),
        ("rescal", True),
        ("rescal", False),
    ],
)
def test_biggraph_computes_our_scores(tmp_path, score_function, reciprocal):
    meta = toy_meta(score_function, ONE_PAIR, reciprocal)
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    save_toy(tmp_path, meta, tables)
    model = build_model(score_function, 6, reciprocal)
    heads, tails = tables["person"].rows[3:8], tables["person"].rows[10:15]
    lhs, rhs = heads.double().numpy(), tails.double().numpy()
    for relation in range(2):
        row = tables[RELATION].rows[relation].expand(5, -1)
        with h5py.File(tmp_path / "v1" / "model.v1.h5") as file:
            for side in (Side.HEAD, Side.TAIL):
                score = model.score(heads, row, tails, side).numpy()
                if reciprocal:
                    # dynamic: tails are ranked by c(lhs(u), v'), heads by c(u', rhs(v))
                    group = file[f"{DYNAMIC}/{'lhs' if side is Side.TAIL else 'rhs'}"]
                    parameters = {name: values[relation].astype(float) for name, values in group.items()}
                else:
                    group = file[f"model/relations/{relation}/operator/rhs"]
                    parameters = {name: values[:].astype(float) for name, values in group.items()}
                pair = [lhs, rhs]
                acts_on = 0 if reciprocal and side is Side.TAIL else 1
                pair[acts_on] = biggraph_operate(pair[acts_on], parameters, score_function)
                expected = biggraph_compare(*pair, score_function)
                np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-5)


def test_config_of_dynamic_relations(saved):
    folder, _ = saved
    relation = {"name": "all", "lhs": "person", "rhs": "person", "operator": "complex_diagonal"}
    expected = {
        "entities": {"person": {"num_partitions": 2, "featurized": False}},
        "relations": [{**relation, "weight": 1.0, "all_negs": False}],
        "dynamic_relations": True,
        "dimension": 6,
        "comparator": "dot",
        "global_emb": False,
        "bias": False,
        "entity_path": str(folder / "v1"),
        "edge_paths": [],
        "checkpoint_path": str(folder / "v1"),
    }
    config = json.loads((folder / "latest" / "config.json").read_text())
    assert {key: config[key] for key in expected} == expected


def test_config_of_static_relations(tmp_path):
    saved_toy(tmp_path, 1, "transe_l2", TWO_PAIRS)
    config = json.loads((tmp_path / "latest" / "config.json").read_text())
    assert config["dynamic_relations"] is False
    assert config["comparator"] == "l2"
    same = {"operator": "translation", "weight": 1.0, "all_negs": False}
    assert config["relations"] == [
        {"name": "likes", "lhs": "person", "rhs": "person", **same},
        {"name": "made", "lhs": "person", "rhs": "film", **same},
        {"name": "likes", "lhs": "person", "rhs": "film", **same},
    ]
    assert json.loads((tmp_path / "latest" / "dynamic_rel_names.json").read_text()) == [
        "likes (person → person)",
        "made",
        "likes (person → film)",
    ]


def test_the_specification_opens_the_files(tmp_path, monkeypatch):
    """The code in the documentation runs as it stands."""
    meta = toy_meta()
    tables = toy_tables(meta)
    for _ in range(7):
        save_toy(tmp_path, meta, tables)
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


CONFIG_KEYS = {
    "entities", "relations", "dimension", "init_scale", "max_norm", "global_emb", "comparator", "bias",
    "loss_fn", "margin", "entity_path", "edge_paths", "checkpoint_path", "init_path",
    "checkpoint_preservation_interval", "num_epochs", "num_edge_chunks", "max_edges_per_chunk",
    "bucket_order", "workers", "batch_size",
    "num_batch_negs", "num_uniform_negs", "disable_lhs_negs", "disable_rhs_negs", "lr", "relation_lr",
    "eval_fraction", "eval_num_batch_negs", "eval_num_uniform_negs", "background_io", "verbose",
    "hogwild_delay", "dynamic_relations", "num_machines", "num_partition_servers", "distributed_init_method",
    "distributed_tree_init_order",
}  # fmt: skip
"""The fields of ConfigSchema in config.py of PyTorch-BigGraph 1.0.0."""


@pytest.mark.parametrize("relations", [ONE_PAIR, TWO_PAIRS])
def test_config_has_every_key_of_its_schema(tmp_path, relations):
    config = {
        "model": {"init_scale": 0.5},
        "loss": {"name": "margin_ranking", "margin": 2.0},
        "negatives": {"num_uniform": 70},
        "training": {"num_epochs": 9, "batch_size": 300},
    }
    saved_toy(tmp_path, relations=relations, config=config)
    written = json.loads((tmp_path / "latest" / "config.json").read_text())
    assert set(written) == CONFIG_KEYS
    for entity in written["entities"].values():
        assert set(entity) == {"num_partitions", "featurized"}
    for relation in written["relations"]:
        assert set(relation) == {"name", "lhs", "rhs", "weight", "operator", "all_negs"}
    assert (written["loss_fn"], written["margin"], written["init_scale"]) == ("ranking", 2.0, 0.5)
    assert (written["num_epochs"], written["batch_size"], written["num_uniform_negs"]) == (9, 300, 70)
    assert written["lr"] == 0.1 and written["checkpoint_path"] == str(tmp_path.resolve() / "v1")


def test_config_has_weights_of_relations_and_sides_that_are_not_trained(tmp_path):
    name = TWO_PAIRS[1].name
    config = {"loss": {"relation_weights": {name: 2.5}}, "negatives": {"num_for_heads": 0}}
    saved_toy(tmp_path, relations=TWO_PAIRS, config=config)
    written = json.loads((tmp_path / "latest" / "config.json").read_text())
    weights = [2.5 if relation.name == name else 1.0 for relation in TWO_PAIRS]
    assert [relation["weight"] for relation in written["relations"]] == weights and 2.5 in weights
    assert written["disable_lhs_negs"] is True and written["disable_rhs_negs"] is False


def test_element_wise_adagrad_has_its_blob(saved):
    """Entities: the mean of each row, of which it keeps one number; relations: the numbers themselves."""
    folder, tables = saved
    for part in (0, 1):
        path = folder / "v1" / f"embeddings_person_{part}.v1.h5"
        with h5py.File(path) as file:
            ids = file["original_ids"][:]
        sums = blob(path)["state"][0]["sum"]
        means = tables["person"].state["sum"].double().numpy()[ids].mean(axis=1)
        np.testing.assert_allclose(sums.numpy(), means, rtol=1e-6)
    state = blob(folder / "v1" / "model.v1.h5")["state"]
    sums = np.concatenate([state[number]["sum"].numpy() for number in range(4)], axis=1)
    assert sums.tobytes() == tables[RELATION].state["sum"].numpy().tobytes()


def test_relations_with_an_optimizer_of_their_own(tmp_path):
    """PyTorch-BigGraph's pair: row-wise Adagrad of entities, element-wise of relations; two rates."""
    meta = toy_meta(optimizer="row_adagrad")
    both = {"name": "row_adagrad", "lr": 0.1, "relation_name": "sparse_adagrad", "relation_lr": 0.02}
    meta = dataclasses.replace(meta, optimizer=both)
    tables = toy_tables(meta)
    wide = torch.rand(tables[RELATION].rows.shape)
    tables[RELATION] = ToyTable(tables[RELATION].rows, {"sum": wide})
    save_toy(tmp_path, meta, tables, 1)
    state = blob(tmp_path / "v1" / "model.v1.h5")
    sums = np.concatenate([state["state"][number]["sum"].numpy() for number in range(4)], axis=1)
    assert sums.tobytes() == wide.numpy().tobytes()
    assert state["param_groups"][0]["lr"] == 0.02
    assert blob(tmp_path / "v1" / "embeddings_person_0.v1.h5")["param_groups"][0]["lr"] == 0.1
    config = json.loads((tmp_path / "latest" / "config.json").read_text())
    assert (config["lr"], config["relation_lr"]) == (0.1, 0.02)
    # Adam of the entities has no sums; the relations' Adagrad has.
    meta = dataclasses.replace(meta, optimizer={**both, "name": "sparse_adam"})
    save_toy(tmp_path / "adam", meta, tables, 1)
    sums = [
        parameter["sum"] for parameter in blob(tmp_path / "adam" / "v1" / "model.v1.h5")["state"].values()
    ]
    assert all(bool((values > 0).any()) for values in sums)
    entities = blob(tmp_path / "adam" / "v1" / "embeddings_person_0.v1.h5")["state"][0]["sum"]
    assert torch.equal(entities, torch.zeros_like(entities))


@pytest.mark.parametrize("optimizer", [{"name": "sparse_adam", "lr": 0.003}, {}])
def test_other_optimizers_have_a_blob_that_starts_anew(tmp_path, optimizer):
    meta = toy_meta(optimizer="sparse_adam")
    tables = toy_tables(meta)
    if not optimizer:
        tables = {name: ToyTable(table.rows, {}) for name, table in tables.items()}
    meta = dataclasses.replace(meta, optimizer=optimizer)
    save_toy(tmp_path, meta, tables, 2)
    for name, shape in (("embeddings_person_0.v1.h5", (12,)), ("model.v1.h5", (2, 3))):
        state = blob(tmp_path / "v1" / name)
        assert state["param_groups"][0]["lr"] == (0.003 if optimizer else 0.01)
        assert all(torch.equal(parameter["sum"], torch.zeros(shape)) for parameter in state["state"].values())
    config = json.loads((tmp_path / "latest" / "config.json").read_text())
    assert config["lr"] == (0.003 if optimizer else 0.01)
