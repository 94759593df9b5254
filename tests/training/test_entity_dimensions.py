"""Entity types with rows of several widths, between which relations have matrices that are not square."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

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


def run_settings(folder: Path, name: str, reciprocal: bool, *more: str) -> list[str]:
    """Settings of a run on the typed toy graph: all triples in each step, against all entities."""
    mode = f"model.reciprocal_relations={str(reciprocal).lower()}"
    steps = ("training.batch_size=1000", "negatives.chunk_size=1000", "optimizer.lr=0.02")
    score = (f"model.score_function={name}", NARROW, "negatives.name=all_entities", "loss.name=softmax")
    return settings(toy_dataset(typed=True), folder, *score, mode, *steps, "training.num_epochs=4", *more)


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
        return torch.nn.functional.cosine_similarity(left, right)
    if comparator == "squared_l2":
        return -(left - right).square().sum(1)
    return -(left - right).norm(dim=1)


def steps_in_float64(run: dglkge.Run, tables: Rows, matrices: Matrices, comparator: str) -> list[float]:
    """Train in place by torch's Adagrad, with matrices of the right shape; return the losses."""
    meta = run.tables.meta
    has_offset = [
        (meta.operators or [meta.score_function] * 9)[id_].startswith("affine") for id_, _ in matrices
    ]
    used = [numbers[: 1 + has] for numbers, has in zip(matrices.values(), has_offset)]
    leaves = [tables[name] for name in WIDTHS] + [number for numbers in used for number in numbers]
    optimizer = torch.optim.Adagrad(leaves, lr=0.02, eps=1e-10)
    triples, losses = torch.from_numpy(np.array(run.dataset.split("train"))), []

    def carried(id_: int, side: Side, rows: torch.Tensor) -> torch.Tensor:
        matrix, offset = matrices[id_, side]
        operated = rows @ matrix.T
        return operated + offset if len(offset) else operated

    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for h, r, t in triples.tolist():
            lhs, rhs = tables[meta.relations[r].lhs], tables[meta.relations[r].rhs]
            heads, tails = lhs[h : h + 1], rhs[t : t + 1]
            for_heads = scores(comparator, carried(r, Side.HEAD, tails), lhs)
            for_tails = (
                scores(comparator, carried(r, Side.TAIL, heads), rhs)
                if meta.reciprocal
                else scores(comparator, heads, carried(r, Side.HEAD, rhs))
            )
            for found, answer in ((for_tails, t), (for_heads, h)):
                loss = loss + torch.nn.functional.cross_entropy(found[None], torch.tensor([answer]))
        (loss / len(triples)).backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize(
    ("name", "comparator", "more"),
    [
        ("rescal", "dot", ("training.kernels=reference",)),
        ("linear_cos", "cos", ()),
        ("affine_l2", "l2", ("training.device=cpu_staged",)),
        ("affine_squared_l2", "squared_l2", ()),
        ("linear+affine_dot", "dot", ("model.relation_operators={near: affine, lies_in: affine}",)),
    ],
)
def test_training_is_that_of_matrices_that_are_not_square(
    name: str, comparator: str, more: tuple[str, ...], reciprocal: bool, tmp_path: Path
) -> None:
    with opened(load_config(None, run_settings(tmp_path / "run", name, reciprocal, *more))) as trainer:
        rows = dense_rows(trainer)
        assert {name: rows[name].shape[1] for name in WIDTHS} == WIDTHS
        losses = train(trainer, 4)
        last, live = dense_rows(trainer), ranking(trainer)
    run = dglkge.open_run(tmp_path / "run")
    meta = run.tables.meta
    matrices = matrices_of(meta, rows[RELATION])
    expected = steps_in_float64(run, rows, matrices, comparator)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for table in WIDTHS:
        wanted = rows[table].detach().numpy()
        np.testing.assert_allclose(run.tables[table][:].numpy(), wanted, rtol=2e-3, atol=2e-4)
    for key, numbers in matrices_of(meta, last[RELATION]).items():
        for number, wanted in zip(numbers, matrices[key]):
            np.testing.assert_allclose(
                number.detach().numpy(), wanted.detach().numpy(), rtol=2e-3, atol=2e-4, err_msg=str(key)
            )
    # The files have the blocks alone, and what reads them ranks as the live tables do.
    ranked = run.evaluate("test").to_dict()
    assert {key: ranked[key] for key in live} == live


def test_files_have_the_widths_and_a_resume_changes_no_bit(tmp_path: Path) -> None:
    def opened_run(folder: Path, *more: str):
        return opened(
            load_config(None, run_settings(folder, "affine_cos", False, "training.num_epochs=2", *more))
        )

    assert_resumes(opened_run, tmp_path / "run", lambda trainer: {})
    version = tmp_path / "run" / "checkpoint" / "latest"
    described = json.loads((version / "config.json").read_text())
    assert described["dimension"] == DIM
    assert {name: entity.get("dimension") for name, entity in described["entities"].items()} == {
        "person": 5,
        "town": None,
        "country": 3,
    }
    meta = dglkge.open_checkpoint(tmp_path / "run").meta
    with h5py.File(version / f"model.v{dglkge.open_checkpoint(tmp_path / 'run').version}.h5") as file:
        for id_, relation in enumerate(meta.relations):
            shapes = {
                name: dataset.shape for name, dataset in file[f"model/relations/{id_}/operator/rhs"].items()
            }
            head, tail = WIDTHS[relation.lhs], WIDTHS[relation.rhs]
            assert shapes == {"linear_transformation": (head, tail), "translation": (head,)}
    assert bigraph_config(meta, 1, "x")["entities"]["person"]["dimension"] == 5


def test_what_reads_a_run_takes_narrow_rows(tmp_path: Path) -> None:
    with opened(load_config(None, run_settings(tmp_path / "run", "rescal", True))) as trainer:
        train(trainer, 4)
    run = dglkge.open_run(tmp_path / "run")
    meta = run.tables.meta
    relation = next(id_ for id_, item in enumerate(meta.relations) if item.name == "lives_in")
    (answers,) = run.answer([LinkQuery(Side.TAIL, 3, relation)], k=10)
    matrix, _ = matrices_of(meta, run.tables[RELATION][:])[relation, Side.TAIL]
    scored = run.tables["town"][:] @ (matrix.detach() @ run.tables["person"][3])
    assert [answer.score for answer in answers] == pytest.approx(
        sorted(scored.tolist(), reverse=True), rel=1e-4
    )
    assert run.nearest("person3", "person", 2)
    # Searches that multiply rows themselves: in bfloat16 first, and by an index.
    people = run.tables["person"][:]
    knows = next(id_ for id_, item in enumerate(meta.relations) if item.name == "knows")
    query = run.model.query(people.double(), run.tables[RELATION][[knows]].double(), Side.TAIL)
    exact = run.model.compare(query, people.double())
    nobody = torch.empty(0, dtype=torch.long)
    search = LinkSearch(run.model, query, run.max_norm("person"), (nobody, nobody), 0.01, is_narrow=True)
    search.add(torch.arange(len(people)), people)
    pairs = search.take()
    assert len(pairs) > 9
    assert {tuple(pair) for pair in pairs[["query", "candidate"]].tolist()} == {
        tuple(pair) for pair in (exact >= 0.01).nonzero().tolist()
    }
    pytest.importorskip("faiss", reason="faiss is not installed")
    index = RowIndex("test", run.tables, "person")
    best = index.nearest(query.float().numpy(), 1)[:, 0]
    nearly = exact.amax(1) - exact[torch.arange(len(exact)), torch.from_numpy(best)]
    assert float(nearly.max()) < 0.02 * float(exact.abs().max())  # rows of 8 bits


def test_exports_and_modules_have_the_widths(tmp_path: Path) -> None:
    with opened(load_config(None, run_settings(tmp_path / "run", "rescal", True))) as trainer:
        train(trainer, 4)
    run = dglkge.open_run(tmp_path / "run")
    with pytest.raises(InputError, match="rows of several widths: person 5, town 8; allowed: one width"):
        run.embeddings(["person3", "town4"])
    assert run.embeddings(["person3", "person4"]).shape == (2, 5)
    run.export("npy", tmp_path / "npy")
    assert np.load(tmp_path / "npy" / "country.npy").shape == (3, 3)
    triples = torch.from_numpy(np.array(run.dataset.split("test")))
    module = run.torch_model()
    expected = run.scores(triples.numpy())
    mean = (expected[Side.TAIL] + expected[Side.HEAD]) / 2
    np.testing.assert_allclose(module(*triples.T).detach().numpy(), mean, rtol=1e-4, atol=1e-6)
    run.export("huggingface", tmp_path / "hub")
    hub = dglkge.open_run(tmp_path / "hub", dataset=str(run.dataset.path))
    np.testing.assert_array_equal(hub.scores(triples.numpy())[Side.HEAD], expected[Side.HEAD])
    rows = [("person_new", "lives_in", "town3"), ("person_new", "knows", "person3")]
    with pytest.raises(InputError, match="new entities get rows where all have one width"):
        run.add_entities(pd.DataFrame(rows, columns=["head", "relation", "tail"]))


def test_another_run_takes_rows_of_the_same_widths_only(tmp_path: Path) -> None:
    base = run_settings(tmp_path / "first", "linear_cos", False, "training.num_epochs=1")
    with opened(load_config(None, base)) as trainer:
        train(trainer, 1)
        rows = dense_rows(trainer)
    init = f"checkpoint.init_path={tmp_path / 'first'}"
    with opened(load_config(None, [*base, init, f"output={tmp_path / 'second'}"])) as trainer:
        assert all(torch.equal(rows[name], values) for name, values in dense_rows(trainer).items())
    other = "model.entity_dimensions={person: 5}"
    with pytest.raises(CheckpointError, match="its rows cannot be taken over"):
        with opened(load_config(None, [*base, init, other, f"output={tmp_path / 'third'}"])):
            pass
    with pytest.raises(CheckpointError, match="take another output folder"):
        with opened(load_config(None, [*base, other])):
            pass


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["model.entity_dimensions={peson: 5}"], "unknown entity type of model.entity_dimensions 'peson'"),
        (
            ["model.entity_dimensions={person: 9}"],
            "model.entity_dimensions has person: 9; allowed: at most 8",
        ),
        (
            ["model.score_function=linear_dot_bias", "model.entity_dimensions={person: 1}"],
            "model.entity_dimensions has person: 1; allowed: at least 2 (one number is the bias)",
        ),
        (
            ["model.entity_dimensions={person: 5, town: 6, country: 3}"],
            "model.dimension is 8, and all entity types have less; allowed: 6",
        ),
    ],
)
def test_widths_that_do_not_fit_the_data_set_are_refused(changes: list[str], problem: str) -> None:
    base = [f"dataset={toy_dataset(typed=True)}", "model.dimension=8", "model.score_function=linear_cos"]
    with pytest.raises(InputError) as caught:
        check_dataset(load_config(None, [*base, *changes]), Dataset.open(toy_dataset(typed=True)))
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)
