"""DGL-KE's folders there and back, against its formulas written once more in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.cli.main import main
from dglkge.data.dataset import Dataset
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset

GAMMA = 12.0
HIDDEN = 8
MODELS = {
    "TransE": "transe_l2",
    "TransE_l1": "transe_l1",
    "TransE_l2": "transe_l2",
    "DistMult": "distmult",
    "ComplEx": "complex",
    "RotatE": "rotate",
    "RESCAL": "rescal",
    "SimplE": "simple",
    "TransR": "transr_l1",
}


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
            content = {
                "model_name": model,
                "dataset": "my_ring",
                "hidden_dim": HIDDEN,
                "gamma": GAMMA,
                "double_ent": model == "RotatE",
                "double_rel": False,
                "delimiter": "\t",
                "data_path": "/nowhere",
                "emp_file": maps[0] if maps else None,
                "rmap_file": maps[1] if maps else None,
            }
            (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")

    def tail_scores(self, head, relation):
        heads, relations = self.entities[head].astype(np.float64), self.relations[relation].astype(np.float64)
        return scores(self.model, heads, relations, self.entities.astype(np.float64))

    def head_scores(self, relation, tail):
        tails, relations = self.entities[tail].astype(np.float64), self.relations[relation].astype(np.float64)
        return scores(self.model, self.entities.astype(np.float64), relations, tails)

    def mrr(self, split="test"):
        """Filtered, both sides, ties at their mean."""
        known = np.concatenate([self.dataset.split(name) for name in ("train", "valid", "test")])
        ranks = []
        for head, relation, tail in self.dataset.split(split).tolist():
            for of_side, answer, given, fixed in (
                (self.tail_scores(head, relation), tail, 0, head),
                (self.head_scores(relation, tail), head, 2, tail),
            ):
                fits = known[(known[:, 1] == relation) & (known[:, given] == fixed)][:, 2 - given]
                others = np.setdiff1d(np.arange(len(of_side)), fits)
                better = (of_side[others] > of_side[answer]).sum()
                equal = (of_side[others] == of_side[answer]).sum()
                ranks.append(1 + better + equal / 2)
        return float(np.mean(1 / np.array(ranks)))


@pytest.fixture(scope="module")
def dataset():
    return Dataset.open(toy_dataset())


def convert(capsys, folder, dataset, output, *more):
    arguments = ["checkpoint", "convert", folder, "--from", "dglke", "--to", "run"]
    arguments += ["--dataset", dataset.path, "--output", output, *more]
    status = main([str(one) for one in arguments])
    return status, capsys.readouterr().err


def evaluate(capsys, run, dataset):
    status = main(["evaluate", str(run), "--dataset", str(dataset.path), "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out)["both"]["mrr"]


def tails(capsys, run, dataset, head, relation):
    """Return name to score for every tail."""
    names = dataset.vocabulary("entity")
    words = ["predict", str(run), "--head", names[head], "--relation", dataset.relations.labels[relation]]
    status = main([*words, "--topk", str(len(names)), "--known", "keep", "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return {one["name"]: one["score"] for one in json.loads(printed.out)["answers"]}


@pytest.mark.parametrize("model", MODELS)
def test_scores_and_mrr_are_those_of_dglke(model, dataset, tmp_path, capsys):
    """The model is read from the files, the phases are scaled, and rows go by the id maps."""
    theirs = Ours(tmp_path / "theirs", dataset, model)
    status, err = convert(capsys, tmp_path / "theirs", dataset, tmp_path / "run")
    assert status == 0, err
    assert open_checkpoint(tmp_path / "run").meta.score_function == MODELS[model]
    assert evaluate(capsys, tmp_path / "run", dataset) == pytest.approx(theirs.mrr(), abs=1e-6)
    for head, relation in ((3, 0), (41, 2)):
        got = tails(capsys, tmp_path / "run", dataset, head, relation)
        wanted = theirs.tail_scores(head, relation)
        names = dataset.vocabulary("entity")
        assert [got[name] for name in names.names] == pytest.approx(wanted.tolist(), rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "TransE"])
def test_export_inverts_the_import(model, dataset, tmp_path, capsys):
    """DGL-KE scores the exported files as it scored its own."""
    theirs = Ours(tmp_path / "theirs", dataset, model)
    assert convert(capsys, tmp_path / "theirs", dataset, tmp_path / "run")[0] == 0
    words = ["export", str(tmp_path / "run"), "--format", "dglke", "--output", str(tmp_path / "out")]
    assert main(words) == 0
    capsys.readouterr()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_name"] == model
    assert config["hidden_dim"] == HIDDEN
    assert (config["double_ent"], config["double_rel"]) == (model == "RotatE", False)
    stem = f"{config['dataset']}_{model}_"
    entities = np.load(tmp_path / "out" / f"{stem}entity.npy").astype(np.float64)
    relations = np.load(tmp_path / "out" / f"{stem}relation.npy").astype(np.float64)
    if model == "TransR":
        matrices = np.load(tmp_path / "out" / f"{stem}projection.npy").astype(np.float64)
        relations = np.concatenate([relations, matrices], axis=1)
    assert config["gamma"] == GAMMA
    for file, names in (
        (config["emp_file"], dataset.vocabulary("entity").names),
        (config["rmap_file"], dataset.relations.labels.names),
    ):
        lines = (tmp_path / "out" / file).read_text(encoding="utf-8").splitlines()
        assert lines == [f"{id_}\t{name}" for id_, name in enumerate(names)]
    for head, relation in ((3, 0), (41, 2)):
        again = scores(model, entities[head], relations[relation], entities)
        assert again == pytest.approx(theirs.tail_scores(head, relation), rel=2e-5, abs=2e-5)
    status, err = convert(capsys, tmp_path / "out", dataset, tmp_path / "back")
    assert status == 0, err
    first, second = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "back")
    for table in ("entity", RELATION):
        np.testing.assert_allclose(second[table][:].numpy(), first[table][:].numpy(), rtol=3e-7)


@pytest.mark.parametrize(
    ("maps", "delimiter", "swapped"),
    [
        (("entities.dict", "relations.dict"), "\t", False),
        (("entities.tsv", "relations.tsv"), "|", False),
        (("my_nodes.csv", "my_edges.csv"), ",", True),
    ],
)
def test_id_maps_of_other_forms(maps, delimiter, swapped, dataset, tmp_path, capsys):
    """Built-in data sets' names, another delimiter, and the two columns in the other order."""
    folder = tmp_path / "theirs"
    theirs = Ours(folder, dataset, "DistMult", maps=maps)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "delimiter": delimiter}))
    for file in maps:
        rows = [line.split("\t") for line in (folder / file).read_text().splitlines()]
        lines = [delimiter.join(row[::-1] if swapped else row) for row in rows]
        (folder / file).write_text("\n".join(lines) + "\n")
    status, err = convert(capsys, folder, dataset, tmp_path / "run")
    assert status == 0, err
    assert evaluate(capsys, tmp_path / "run", dataset) == pytest.approx(theirs.mrr(), abs=1e-6)


def test_id_maps_are_found_where_the_data_lies(dataset, tmp_path, capsys):
    """DGL-KE writes them into ``data_path``, not beside the embeddings."""
    theirs = Ours(tmp_path / "theirs", dataset, "ComplEx")
    data = tmp_path / "data"
    data.mkdir()
    for file in ("entities.tsv", "relations.tsv"):
        (tmp_path / "theirs" / file).rename(data / file)
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "data_path": str(data)}))
    status, err = convert(capsys, tmp_path / "theirs", dataset, tmp_path / "run")
    assert status == 0, err
    assert evaluate(capsys, tmp_path / "run", dataset) == pytest.approx(theirs.mrr(), abs=1e-6)


def test_without_config_the_files_name_gives_the_model(dataset, tmp_path, capsys):
    theirs = Ours(tmp_path / "theirs", dataset, "TransE_l1", config=False)
    status, err = convert(capsys, tmp_path / "theirs", dataset, tmp_path / "run")
    assert status == 0, err
    assert open_checkpoint(tmp_path / "run").meta.score_function == "transe_l1"
    assert evaluate(capsys, tmp_path / "run", dataset) == pytest.approx(theirs.mrr(), abs=1e-6)


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut_map(folder, dataset):
    path = folder / "entities.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def rename_model(folder, dataset):
    for table in ("entity", "relation"):
        (folder / f"my_ring_RotatE_{table}.npy").rename(folder / f"my_ring_ConvE_{table}.npy")
    edit_config(folder, model_name="ConvE")


@pytest.mark.parametrize(
    ("damage", "more", "words"),
    [
        (
            lambda folder, dataset: (folder / "config.json").unlink(),
            [],
            "config.json is missing: RotatE's phases are scaled by its gamma",
        ),
        (
            lambda folder, dataset: edit_config(folder, gamma="twelve"),
            [],
            "config.json: gamma is 'twelve'; allowed: a number",
        ),
        (
            lambda folder, dataset: edit_config(folder, gamma=-2),
            [],
            "config.json: gamma is -2; allowed: a number above -2",
        ),
        (
            lambda folder, dataset: edit_config(folder, hidden_dim=9),
            [],
            "config.json: hidden_dim is 9, but the rows of relations have 8 numbers",
        ),
        (
            lambda folder, dataset: edit_config(folder, model_name="ComplEx"),
            [],
            "config.json says ComplEx, the file my_ring_RotatE_entity.npy says RotatE",
        ),
        (
            lambda folder, dataset: (folder / "entities.tsv").unlink(),
            [],
            "config.json names the id map entities.tsv, which is neither in",
        ),
        (cut_map, [], "entities.tsv: got ids of 59 rows, expected each of 0 to 59 once"),
        (
            rename_model,
            [],
            "dglkge has no DGL-KE model 'ConvE'; known: TransE, TransE_l1, TransE_l2, DistMult",
        ),
        (
            lambda folder, dataset: None,
            ["--score-function", "complex"],
            "the files are DGL-KE's RotatE, --score-function says complex",
        ),
        (
            lambda folder, dataset: None,
            ["--reciprocal"],
            "DGL-KE has no reciprocal relations; leave --reciprocal out",
        ),
        (
            lambda folder, dataset: np.save(
                folder / "my_ring_RotatE_entity.npy", np.zeros((60, HIDDEN), np.float32)
            ),
            [],
            "rows of relations have 8 numbers, rotate with entities of 8 needs 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(damage, more, words, dataset, tmp_path, capsys):
    Ours(tmp_path / "theirs", dataset, "RotatE")
    damage(tmp_path / "theirs", dataset)
    status, err = convert(capsys, tmp_path / "theirs", dataset, tmp_path / "run", *more)
    assert status == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_several_entity_types_are_refused(tmp_path, capsys):
    Ours(tmp_path / "theirs", Dataset.open(toy_dataset()), "DistMult")
    typed = Dataset.open(toy_dataset(typed=True))
    status, err = convert(capsys, tmp_path / "theirs", typed, tmp_path / "run")
    assert status == 2
    assert "DGL-KE's files have one entity type, the data set has country, person, town" in err


def test_without_any_map_the_order_is_that_of_the_data_set_and_is_said(dataset, tmp_path, capsys, caplog):
    theirs = Ours(tmp_path / "theirs", dataset, "DistMult", config=False, maps=())
    names = dataset.vocabulary("entity").names
    status, err = convert(capsys, tmp_path / "theirs", dataset, tmp_path / "run")
    assert status == 0, err
    assert "no id map of the table entity" in caplog.text
    rows = open_checkpoint(tmp_path / "run")["entity"][:].numpy()
    assert len(names) == len(rows)
    assert np.array_equal(rows, theirs.entities[theirs.order])
