"""Entity types with rows of several widths, between which relations have matrices that are not square."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import CheckpointError, InputError
from dglkge.formats.bigraph_files import bigraph_config
from dglkge.inference.links.approximate import RowIndex
from dglkge.inference.links.missing_links import LinkSearch
from dglkge.inference.search import LinkQuery
from dglkge.training.building.checks import check_dataset
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset
from tests.training.live import Rows, assert_resumes, dense_rows, opened, ranking, settings, train

DIM = 8
WIDTHS = {"person": 5, "town": DIM, "country": 3}
NARROW = "model.entity_dimensions={person: 5, country: 3}"

Matrices = dict[tuple[int, Side], tuple[torch.Tensor, torch.Tensor]]
"""Matrix and offset by relation and the side that is predicted by acting on the other one."""


def run_settings(folder: Path, name: str, *more: str) -> list[str]:
    """Settings of a run on the typed toy graph: all triples in each step, against all entities."""
    steps = ("training.batch_size=1000", "negatives.chunk_size=1000", "optimizer.lr=0.02")
    score = (f"model.score_function={name}", NARROW, "negatives.name=all_entities", "loss.name=softmax")
    return settings(toy_dataset(typed=True), folder, *score, *steps, "training.num_epochs=4", *more)


def numbers_of(row: torch.Tensor, shape: tuple[int, int], turned: bool) -> list[torch.Tensor]:
    """Return matrix and offset, both views, of a relation's row of one direction."""
    matrix = row[: DIM * DIM].view(DIM, DIM)
    offset = row[DIM * DIM : DIM * DIM + DIM]
    return [(matrix.T if turned else matrix)[: shape[0], : shape[1]], offset[: shape[0]]]


def matrices_of(meta: dglkge.checkpoint.manifest.CheckpointMeta, rows: torch.Tensor) -> Matrices:
    """Return copies of the matrices and offsets of relation rows, and hold that all else is 0."""
    # h R of two directions: the row multiplies from the right.
    turned = meta.score_function == "rescal" and meta.reciprocal
    rest, matrices = rows.detach().clone(), {}
    for id_, relation in enumerate(meta.relations):
        head, tail = WIDTHS[relation.lhs], WIDTHS[relation.rhs]
        halves = rest[id_].chunk(2) if meta.reciprocal else [rest[id_]]
        sides = [(Side.TAIL, (tail, head)), (Side.HEAD, (head, tail))][-len(halves) :]
        for half, (side, shape) in zip(halves, sides):
            views = numbers_of(half, shape, turned)
            matrix, offset = (view.clone() for view in views)
            if meta.operators and meta.operators[id_] == "linear":
                assert not offset.any()
            matrices[id_, side] = matrix.requires_grad_(), offset.requires_grad_()
            for view in views:
                view.zero_()
            if meta.operators:
                half[-1] = 0  # the number of the operator
    assert not rest.any()
    return matrices


def scores(comparator: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the scores (n,) of rows, of which one side may be a single one."""
    if comparator == "dot":
        return (left * right).sum(1)
    if comparator == "cos":
        return functional.cosine_similarity(left, right)
    difference = left - right
    return -difference.square().sum(1) if comparator == "squared_l2" else -difference.norm(dim=1)


def steps_in_float64(run: dglkge.Run, tables: Rows, matrices: Matrices, comparator: str) -> list[float]:
    """Train in place by torch's Adagrad, with matrices of the right shape; return the losses."""
    meta, leaves = run.tables.meta, [tables[name] for name in WIDTHS]
    for (id_, _), numbers in matrices.items():
        operator = meta.operators[id_] if meta.operators else meta.score_function
        leaves += numbers[: 2 if operator.startswith("affine") else 1]
    optimizer = torch.optim.Adagrad(leaves, lr=0.02, eps=1e-10)
    triples, losses = run.dataset.split("train").tolist(), []

    def carried(id_: int, side: Side, rows: torch.Tensor) -> torch.Tensor:
        matrix, offset = matrices[id_, side]
        return rows @ matrix.T + (offset if len(offset) else 0)

    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for h, r, t in triples:
            lhs, rhs = tables[meta.relations[r].lhs], tables[meta.relations[r].rhs]
            for_heads = scores(comparator, carried(r, Side.HEAD, rhs[[t]]), lhs)
            if meta.reciprocal:
                for_tails = scores(comparator, carried(r, Side.TAIL, lhs[[h]]), rhs)
            else:
                for_tails = scores(comparator, lhs[[h]], carried(r, Side.HEAD, rhs))
            loss = loss + functional.cross_entropy(for_tails, torch.tensor(t))
            loss = loss + functional.cross_entropy(for_heads, torch.tensor(h))
        (loss / len(triples)).backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize(("name", "comparator", "more"), [
    ("rescal", "dot", ("training.kernels=reference",)),
    ("linear_cos", "cos", ()),
    ("affine_l2", "l2", ("training.device=cpu_staged",)),
    ("affine_squared_l2", "squared_l2", ()),
    ("linear+affine_dot", "dot", ("model.relation_operators={near: affine, lies_in: affine}",)),
])  # fmt: skip
def test_training_is_that_of_matrices_that_are_not_square(name, comparator, more, reciprocal, tmp_path):
    more = (f"model.reciprocal_relations={str(reciprocal).lower()}", *more)
    with opened(load_config(None, run_settings(tmp_path / "run", name, *more))) as trainer:
        rows = dense_rows(trainer)
        assert {name: rows[name].shape[1] for name in WIDTHS} == WIDTHS
        losses = train(trainer, 4)
        last, live = dense_rows(trainer), ranking(trainer)
    run = dglkge.open_run(tmp_path / "run")
    matrices = matrices_of(run.tables.meta, rows[RELATION])
    np.testing.assert_allclose(losses, steps_in_float64(run, rows, matrices, comparator), rtol=1e-4)
    trained = {name: run.tables[name][:].double() for name in WIDTHS}
    trained |= matrices_of(run.tables.meta, last[RELATION])
    expected = {name: rows[name] for name in WIDTHS} | matrices
    torch.testing.assert_close(trained, expected, rtol=2e-3, atol=2e-4)
    # The files have the blocks alone, and what reads them ranks as the live tables do.
    ranked = run.evaluate("test").to_dict()
    assert {key: ranked[key] for key in live} == live


def test_files_have_the_widths_and_a_resume_changes_no_bit(tmp_path: Path) -> None:
    def opened_run(folder: Path, *more: str):
        return opened(load_config(None, run_settings(folder, "affine_cos", *more)))

    one_row = ("model.reciprocal_relations=false", "training.num_epochs=2")
    assert_resumes(opened_run, tmp_path / "run", lambda trainer: {}, *one_row)
    version = tmp_path / "run" / "checkpoint" / "latest"
    described = json.loads((version / "config.json").read_text())
    assert described["dimension"] == DIM
    widths = {name: entity.get("dimension", DIM) for name, entity in described["entities"].items()}
    assert widths == WIDTHS
    meta = dglkge.open_checkpoint(tmp_path / "run").meta
    with h5py.File(next(version.glob("model.v*.h5"))) as file:
        for id_, relation in enumerate(meta.relations):
            parts = file[f"model/relations/{id_}/operator/rhs"].items()
            head, tail = WIDTHS[relation.lhs], WIDTHS[relation.rhs]
            shapes = {"linear_transformation": (head, tail), "translation": (head,)}
            assert {name: dataset.shape for name, dataset in parts} == shapes
    assert bigraph_config(meta, 1, "x")["entities"]["person"]["dimension"] == 5


@pytest.fixture(scope="module")
def rescal(tmp_path_factory: pytest.TempPathFactory) -> dglkge.Run:
    folder = tmp_path_factory.mktemp("rescal")
    with opened(load_config(None, run_settings(folder, "rescal"))) as trainer:
        train(trainer, 4)
    return dglkge.open_run(folder)


def test_what_reads_a_run_takes_narrow_rows(rescal: dglkge.Run) -> None:
    meta, model = rescal.tables.meta, rescal.model
    ids = {item.name: id_ for id_, item in enumerate(meta.relations)}
    (answers,) = rescal.answer([LinkQuery(Side.TAIL, 3, ids["lives_in"])], k=10)
    matrix, _ = matrices_of(meta, rescal.tables[RELATION][:])[ids["lives_in"], Side.TAIL]
    scored = rescal.tables["town"][:] @ (matrix.detach() @ rescal.tables["person"][3])
    expected = sorted(scored.tolist(), reverse=True)
    assert [answer.score for answer in answers] == pytest.approx(expected, rel=1e-4)
    assert rescal.nearest("person3", "person", 2)
    # Searches that multiply rows themselves: in bfloat16 first, and by an index.
    people = rescal.tables["person"][:]
    query = model.query(people.double(), rescal.tables[RELATION][[ids["knows"]]].double(), Side.TAIL)
    exact = model.compare(query, people.double())
    nobody = torch.empty(0, dtype=torch.long)
    search = LinkSearch(model, query, rescal.max_norm("person"), (nobody, nobody), 0.01, is_narrow=True)
    search.add(torch.arange(len(people)), people)
    pairs = search.take()[["query", "candidate"]].tolist()
    assert len(pairs) > 9 and sorted(pairs) == list(map(tuple, (exact >= 0.01).nonzero().tolist()))
    pytest.importorskip("faiss", reason="faiss is not installed")
    best = RowIndex(rescal.tables, "person").nearest(query.float().numpy(), 1)[:, 0]
    nearly = exact.amax(1) - exact[torch.arange(len(exact)), torch.from_numpy(best)]
    assert float(nearly.max()) < 0.02 * float(exact.abs().max())  # rows of 8 bits


def test_exports_and_modules_have_the_widths(rescal: dglkge.Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows of several widths: person 5, town 8; allowed: one width"):
        rescal.embeddings(["person3", "town4"])
    assert rescal.embeddings(["person3", "person4"]).shape == (2, 5)
    rescal.export("npy", tmp_path / "npy")
    assert np.load(tmp_path / "npy" / "country.npy").shape == (3, 3)
    triples = torch.from_numpy(np.array(rescal.dataset.split("test")))
    expected = rescal.scores(triples.numpy())
    mean = (expected[Side.TAIL] + expected[Side.HEAD]) / 2
    scored = rescal.torch_model()(*triples.T)
    np.testing.assert_allclose(scored.detach().numpy(), mean, rtol=1e-4, atol=1e-6)
    rescal.export("huggingface", tmp_path / "hub")
    hub = dglkge.open_run(tmp_path / "hub", dataset=str(rescal.dataset.path))
    np.testing.assert_array_equal(hub.scores(triples.numpy())[Side.HEAD], expected[Side.HEAD])
    rows = [("person_new", "lives_in", "town3"), ("person_new", "knows", "person3")]
    with pytest.raises(InputError, match="new entities get rows where all have one width"):
        rescal.add_entities(pd.DataFrame(rows, columns=["head", "relation", "tail"]))


MIXED = "model.score_function=diagonal+translation_cos"


@pytest.mark.parametrize(("more", "other", "words"), [
    (("model.score_function=linear_cos", NARROW), "model.entity_dimensions={person: 5}",
     "its rows cannot be taken over"),
    ((MIXED, "model.relation_operators={near: translation, knows: translation}"),
     "model.relation_operators={lies_in: translation, knows: translation}",
     "has the operator diagonal for the relation 'lies_in', this"),
])  # fmt: skip
def test_another_run_takes_rows_of_the_same_widths_and_operators_only(more, other, words, tmp_path):
    base = settings(toy_dataset(typed=True), tmp_path / "first", *more, "training.num_epochs=1")
    with opened(load_config(None, base)) as trainer:
        train(trainer, 1)
        rows = dense_rows(trainer)
    base += [f"output={tmp_path / 'second'}", f"checkpoint.init_path={tmp_path / 'first'}"]
    with opened(load_config(None, base)) as trainer:
        assert all(torch.equal(rows[name], values) for name, values in dense_rows(trainer).items())
    third = load_config(None, [*base, f"output={tmp_path / 'third'}", other])
    with pytest.raises(CheckpointError, match=words), opened(third):
        pass


@pytest.mark.parametrize(("changes", "problem"), [
    (["model.entity_dimensions={peson: 5}"], "unknown entity type of model.entity_dimensions 'peson'"),
    (["model.entity_dimensions={person: 9}"], "model.entity_dimensions has person: 9; allowed: at most"),
    (["model.score_function=linear_dot_bias", "model.entity_dimensions={person: 1}"],
     "model.entity_dimensions has person: 1; allowed: at least 2 (one number is the bias)"),
    (["model.entity_dimensions={person: 5, town: 6, country: 3}"],
     "model.dimension is 8, and all entity types have less; allowed: 6"),
    ([MIXED, "model.relation_operators={near: linear}"],
     "model.relation_operators has near: linear, and model.score_function is diagonal"),
    ([MIXED, "model.relation_operators={nea: diagonal}"],
     "unknown relation 'nea'; did you mean 'near'?"),
])  # fmt: skip
def test_names_and_widths_that_do_not_fit_the_data_set_are_refused(changes: list[str], problem: str) -> None:
    base = [f"dataset={toy_dataset(typed=True)}", "model.dimension=8", "model.score_function=linear_cos"]
    with pytest.raises(InputError) as caught:
        check_dataset(load_config(None, [*base, *changes]), Dataset.open(toy_dataset(typed=True)))
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)
