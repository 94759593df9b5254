"""DGL-KE's folders there and back, against its formulas written once more in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.inference.run import open_run
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset

GAMMA = 12.0
HIDDEN = 8
MODELS = {"TransE": "transe_l2", "TransE_l1": "transe_l1", "TransE_l2": "transe_l2", "TransR": "transr_l1"}
MODELS |= {"DistMult": "distmult", "ComplEx": "complex", "RotatE": "rotate", "RESCAL": "rescal"}
MODELS["SimplE"] = "simple"


def scores(model, heads, relations, tails):
    """DGL-KE's score of each triple, ``edge_func`` of its score_fun.py, without gamma."""
    if model.startswith("TransE"):
        return -np.linalg.norm(heads + relations - tails, ord=1 if model.endswith("l1") else 2, axis=-1)
    if model == "DistMult":
        return (heads * relations * tails).sum(-1)
    if model == "RESCAL":
        width = heads.shape[-1]
        matrices = relations.reshape(*relations.shape[:-1], width, width)
        return (heads * (matrices @ tails[..., None])[..., 0]).sum(-1)
    if model == "TransR":
        width = heads.shape[-1]
        matrices = relations[..., width:].reshape(*relations.shape[:-1], width, width)
        first, last = ((rows[..., None, :] @ matrices)[..., 0, :] for rows in (heads, tails))
        return -np.abs(first + relations[..., :width] - last).sum(-1)
    if model == "SimplE":
        (head_i, head_j), (tail_i, tail_j) = np.split(heads, 2, axis=-1), np.split(tails, 2, axis=-1)
        forward, backward = np.split(relations, 2, axis=-1)
        return (head_i * forward * tail_j + tail_i * backward * head_j).sum(-1) / 2
    (re_h, im_h), (re_t, im_t) = np.split(heads, 2, axis=-1), np.split(tails, 2, axis=-1)
    if model == "ComplEx":
        re_r, im_r = np.split(relations, 2, axis=-1)
        products = re_h * re_t * re_r + im_h * im_t * re_r + re_h * im_t * im_r - im_h * re_t * im_r
        return products.sum(-1)
    phases = relations / (((GAMMA + 2.0) / HIDDEN) / np.pi)
    turned = (re_h + 1j * im_h) * np.exp(1j * phases)
    return -np.abs(turned - (re_t + 1j * im_t)).sum(-1)


class Ours:
    """A DGL-KE folder whose rows lie in an order of their own, and what its formulas say of it."""

    def __init__(self, folder, dataset, model, seed=0, config=True, maps=("entities.tsv", "relations.tsv")):
        rng = np.random.default_rng(seed)
        self.dataset, self.model = dataset, model
        wide = 2 * HIDDEN if model == "RotatE" else HIDDEN
        self.entities = rng.normal(size=(dataset.num_entities("entity"), wide)).astype(np.float32)
        width = {"RESCAL": HIDDEN**2, "TransR": HIDDEN + HIDDEN**2}.get(model, HIDDEN)
        self.relations = rng.normal(size=(dataset.num_relations, width)).astype(np.float32)
        # row i of DGL-KE's table belongs to the data set's entity order[i]
        self.order = rng.permutation(len(self.entities))
        self.relation_order = np.roll(np.arange(len(self.relations)), 1)
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"my_ring_{model}_"
        np.save(folder / f"{stem}entity.npy", self.entities[self.order])
        in_order = self.relations[self.relation_order]
        np.save(folder / f"{stem}relation.npy", in_order if model == "RESCAL" else in_order[:, :HIDDEN])
        if model == "TransR":
            np.save(folder / f"{stem}projection.npy", in_order[:, HIDDEN:])
        names = [dataset.vocabulary("entity")[i] for i in self.order]
        labels = [dataset.relations.labels[i] for i in self.relation_order]
        for file, known in zip(maps, (names, labels)):
            lines = [f"{id_}\t{name}\n" for id_, name in enumerate(known)]
            (folder / file).write_text("".join(lines[::-1]), encoding="utf-8")
        if config:
            content = {"model_name": model, "dataset": "my_ring", "hidden_dim": HIDDEN, "gamma": GAMMA}
            content |= {"double_ent": model == "RotatE", "double_rel": False, "delimiter": "\t"}
            content |= {"data_path": "/nowhere", "emp_file": maps[0], "rmap_file": maps[1]}
            (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")

    def scores(self, side, entity, relation):
        """Scores of all tails of a head, or of all heads of a tail, in float64."""
        rows, row = self.entities.astype(np.float64), self.relations[relation].astype(np.float64)
        ends = (rows[entity], rows) if side is Side.TAIL else (rows, rows[entity])
        return scores(self.model, ends[0], row, ends[1])

    def has_rows_of(self, run):
        tables = {"entity": self.entities, RELATION: self.relations}
        checkpoint = open_checkpoint(run)
        return all(np.array_equal(checkpoint[name][:].numpy(), rows) for name, rows in tables.items())


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(scope="module")
def dataset():
    return Dataset.open(toy_dataset())


@pytest.fixture
def convert(call, dataset):
    def make(folder):
        words = ["--from", "dglke", "--to", "run", "--dataset", dataset.path]
        output = folder.with_name(f"run of {folder.name}")
        status, _, err = call("checkpoint", "convert", folder, *words, "--output", output)
        assert status == 0, err
        return output

    return make


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(model, dataset, tmp_path, convert, call):
    """Rows go by the id maps, phases are scaled; DGL-KE scores the exported files as it scored its own."""
    dglke = Ours(tmp_path / "theirs", dataset, model)
    run = convert(tmp_path / "theirs")
    opened, names = open_run(run, str(dataset.path)), dataset.vocabulary("entity")
    assert opened.tables.meta.score_function == MODELS[model]
    assert call("export", run, "--format", "dglke", "--output", tmp_path / "out")[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert MODELS[config["model_name"]] == MODELS[model] and config["hidden_dim"] == HIDDEN
    assert (config["double_ent"], config["double_rel"]) == (model == "RotatE", False)
    assert config["gamma"] == GAMMA
    stem = tmp_path / "out" / f"{config['dataset']}_{config['model_name']}"
    entities, relations = (np.load(f"{stem}_{table}.npy") for table in ("entity", "relation"))
    if model == "TransR":
        relations = np.concatenate([relations, np.load(f"{stem}_projection.npy")], axis=1)
    entities, relations = entities.astype(np.float64), relations.astype(np.float64)
    for file, names_in_order in (("emp_file", names.names), ("rmap_file", dataset.relations.labels.names)):
        lines = (tmp_path / "out" / config[file]).read_text(encoding="utf-8").splitlines()
        assert lines == [f"{id_}\t{name}" for id_, name in enumerate(names_in_order)]
    for head, relation in ((3, 0), (41, 2)):
        label = dataset.relations.labels[relation]
        tails = pytest.approx(dglke.scores(Side.TAIL, head, relation), rel=2e-5, abs=2e-5)
        heads = pytest.approx(dglke.scores(Side.HEAD, head, relation), rel=2e-5, abs=2e-5)
        for expected, frame in (
            (tails, opened.predict_tails(names[head], label, k=len(names), known="keep")),
            (heads, opened.predict_heads(label, names[head], k=len(names), known="keep")),
        ):
            assert frame.set_index("entity")["score"].loc[names.names].to_numpy() == expected
        assert scores(model, entities[head], relations[relation], entities) == tails
    first, second = open_checkpoint(run), open_checkpoint(convert(tmp_path / "out"))
    for table in ("entity", RELATION):
        np.testing.assert_allclose(second[table][:].numpy(), first[table][:].numpy(), rtol=3e-7)


@pytest.mark.parametrize(
    ("maps", "delimiter", "is_swapped"),
    [
        (("entities.dict", "relations.dict"), "\t", False),
        (("entities.tsv", "relations.tsv"), "|", False),
        (("my_nodes.csv", "my_edges.csv"), ",", True),
    ],
)
def test_id_maps_of_other_forms(maps, delimiter, is_swapped, dataset, tmp_path, convert):
    """DGL-KE writes them into ``data_path``, not beside the embeddings."""
    folder, data = tmp_path / "theirs", tmp_path / "data"
    dglke = Ours(folder, dataset, "DistMult", maps=maps)
    data.mkdir()
    edit_config(folder, delimiter=delimiter, data_path=str(data))
    for file in maps:
        rows = [line.split("\t") for line in (folder / file).read_text().splitlines()]
        lines = [delimiter.join(row[::-1] if is_swapped else row) for row in rows]
        (data / file).write_text("\n".join(lines) + "\n")
        (folder / file).unlink()
    assert dglke.has_rows_of(convert(folder))


def test_without_config_or_any_map(dataset, tmp_path, convert, caplog):
    """The file's name gives the model; without maps the order is that of the data set, and that is said."""
    dglke = Ours(tmp_path / "theirs", dataset, "TransE_l1", config=False)
    run = convert(tmp_path / "theirs")
    assert open_checkpoint(run).meta.score_function == "transe_l1" and dglke.has_rows_of(run)
    dglke = Ours(tmp_path / "mapless", dataset, "DistMult", config=False, maps=())
    rows = open_checkpoint(convert(tmp_path / "mapless"))["entity"][:].numpy()
    assert "no id map of the table entity" in caplog.text
    assert np.array_equal(rows, dglke.entities[dglke.order])


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (None, "", "config.json is missing: RotatE's phases are scaled by its gamma"),
        ({"gamma": -2}, "", "config.json: gamma is -2; allowed: a number above -2"),
        ({"hidden_dim": 9}, "", "hidden_dim is 9, but the rows of relations have 8 numbers"),
        ({"model_name": "ComplEx"}, "", "config.json says ComplEx, the file my_ring_RotatE_entity.n"),
        ({"emp_file": "e.tsv"}, "", "config.json names the id map e.tsv, which is neither in"),
        ({"emp_file": "relations.tsv"}, "", "relations.tsv: got ids of 4 rows, expected each of 0 to 59"),
        ({}, "--score-function complex", "the files are DGL-KE's RotatE, --score-function says complex"),
        ({}, "--reciprocal", "DGL-KE has no reciprocal relations; leave --reciprocal out"),
        ({}, "--dataset TYPED", "files have one entity type, the data set has country, person, town"),
    ],
)
def test_what_does_not_fit_is_refused(changes, options, words, dataset, tmp_path, call):
    Ours(tmp_path / "theirs", dataset, "RotatE", config=changes is not None)
    if changes:
        edit_config(tmp_path / "theirs", **changes)
    arguments = ["--from", "dglke", "--to", "run", "--dataset", dataset.path, "--output", tmp_path / "run"]
    arguments += [toy_dataset(typed=True) if word == "TYPED" else word for word in options.split()]
    status, _, err = call("checkpoint", "convert", tmp_path / "theirs", *arguments)
    assert status == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_is_opened_as_it_is(dataset, tmp_path, caplog):
    dglke = Ours(tmp_path / "theirs", dataset, "RotatE")
    run, names = open_run(tmp_path / "theirs"), dataset.vocabulary("entity")
    frame = run.predict_tails(names[3], dataset.relations.labels[1], k=len(names)).set_index("entity")
    expected = pytest.approx(dglke.scores(Side.TAIL, 3, 1), rel=1e-5)
    assert frame["score"].loc[names.names].to_numpy() == expected
    assert frame["score"].is_monotonic_decreasing and frame["known_from"].isna().all()
    assert "was written by DGL-KE, with ids of its own; to use it with a data set: dglkge" in caplog.text
    cosines = dglke.entities @ dglke.entities[3] / np.linalg.norm(dglke.entities, axis=1)
    cosines[3] = -np.inf
    assert run.similar(names[3], k=1)["entity"].tolist() == [names[int(cosines.argmax())]]
    run.export("npy", tmp_path / "out", ["entity"])
    assert np.array_equal(np.load(tmp_path / "out" / "entity.npy"), dglke.entities[dglke.order])
    with pytest.raises(InputError, match="--from dglke --to run --dataset "):
        run.evaluate("test")
    np.save(tmp_path / "theirs" / "my_ring_RotatE_entity.npy", np.zeros((60, HIDDEN), np.float32))
    with pytest.raises(InputError, match="relations have 8 numbers, rotate with entities of 8 needs 4"):
        open_run(tmp_path / "theirs")
