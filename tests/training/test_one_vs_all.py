"""Training against all candidates, step by step against a dense float64 loop with torch's own optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.model.kge_model import build_model
from dglkge.model.losses import LOSSES, build_loss
from dglkge.model.score_functions import SCORE_FUNCTIONS, ComplEx
from dglkge.optim.links import UpdateResult
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset
from tests.training.live import assert_epochs_equal, dense_rows, opened, train

BILINEAR = ("rescal", "simple", "quate")
DIM, N3_WEIGHT, RELATION_WEIGHT, SMOOTHING = 8, 0.02, 3.0, 0.1


@pytest.fixture(scope="module", params=[False, True], ids=["one type", "three types"])
def dataset(request: pytest.FixtureRequest) -> Path:
    """A toy data set, in one partition."""
    return toy_dataset(typed=request.param)


def settings(dataset: Path, run: Path, *more: str) -> list[str]:
    """Return the settings of the run."""
    return [
        f"dataset={dataset}",
        f"output={run}",
        f"model.dimension={DIM}",
        "model.init_scale=0.3",
        "regularizer.name=none",
        "training.objective=one_vs_all",
        "training.batch_size=50",
        "training.num_epochs=2",
        "checkpoint.every_epochs=0",
        *more,
    ]


FULL = (
    "regularizer.name=n3",
    f"regularizer.weight={N3_WEIGHT}",
    f"training.relation_prediction={RELATION_WEIGHT}",
    f"training.objective.label_smoothing={SMOOTHING}",
)


def cubes(rows: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """N3 of each row."""
    if not is_complex:
        return rows.abs().pow(3).sum(-1)
    real, imaginary = rows.chunk(2, -1)
    return (real**2 + imaginary**2).pow(1.5).sum(-1)


def pair_scores(score_function: str, h: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Scores of rows that are broadcast against one another, by the formula of each score function."""
    if score_function == "distmult":
        return (h * r * t).sum(-1)
    if score_function == "rescal":
        return (h[..., :, None] * r.unflatten(-1, (DIM, DIM)) * t[..., None, :]).sum((-1, -2))
    if score_function == "simple":
        (h_a, h_b), (r_a, r_b), (t_a, t_b) = (row.chunk(2, -1) for row in (h, r, t))
        return (h_a * r_a * t_b + t_a * r_b * h_b).sum(-1) / 2
    if score_function == "quate":
        (a, b, c, d), w, (p, q, u, v) = (row.chunk(4, -1) for row in (h, r, t))
        norm = sum(part**2 for part in w).sqrt()
        e, f, g, k = (part / norm for part in w)
        real = (a * e - b * f - c * g - d * k) * p + (a * f + b * e + c * k - d * g) * q
        return (real + (a * g - b * k + c * e + d * f) * u + (a * k + b * g - c * f + d * e) * v).sum(-1)
    if score_function in ("pairre", "triplere"):
        first, *middle, last = r.split(DIM, -1)
        h, t = (row / row.norm(dim=-1, keepdim=True) for row in (h, t))
        return -(h * first - t * last + sum(middle)).abs().sum(-1)
    if score_function == "transe_l2":
        return -(h + r - t).norm(dim=-1)
    half = DIM // 2
    first, last = torch.complex(h[..., :half], h[..., half:]), torch.complex(t[..., :half], t[..., half:])
    if score_function == "rotate":
        return -(first * torch.polar(torch.ones_like(r), r) - last).abs().sum(-1)
    return (first * torch.complex(r[..., :half], r[..., half:]) * last.conj()).sum(-1).real


def side_scores(
    score_function: str, given: torch.Tensor, r: torch.Tensor, answer: torch.Tensor, turned: bool
) -> torch.Tensor:
    """Scores of a query's rows; ``turned``: the given entity is the tail of the formula."""
    head, tail = (answer, given) if turned else (given, answer)
    return pair_scores(score_function, head, r, tail)


def candidate_loss(scores: torch.Tensor, answers: torch.Tensor, loss: str, smoothing: float) -> torch.Tensor:
    """Return the loss of each query against all candidates."""
    if loss == "softmax":
        return functional.cross_entropy(scores, answers, reduction="none", label_smoothing=smoothing)
    if loss not in ("logistic", "bce"):
        adding = {"reduction": "sum"} if "reduction" in LOSSES.get(loss).Settings.model_fields else {}
        is_answer = functional.one_hot(answers, scores.shape[1]).bool()
        return build_loss(loss, **adding)(scores[is_answer], scores, is_answer)
    labels = functional.one_hot(answers, scores.shape[1]) * (1 - smoothing) + smoothing / scores.shape[1]
    return functional.binary_cross_entropy_with_logits(scores, labels, reduction="none").sum(1)


def oracle(
    data: Dataset, rows: dict[str, torch.Tensor], batch: EdgeBatch, config: dglkge.Config
) -> torch.Tensor:
    """Return the summed loss of a batch."""
    name, reciprocal = config.model.score_function.name, config.model.reciprocal_relations
    smoothing, loss = config.training.objective.smoothing, config.loss.name
    is_complex = name in ("complex", "rotate")
    triples = np.array(data.split("train"))[batch.triple_ids]
    total = torch.zeros((), dtype=torch.float64)
    width = rows[RELATION].shape[1] // (2 if reciprocal else 1)
    forward, backward = rows[RELATION][:, :width], rows[RELATION][:, -width:]
    # Cut once: the gradient of an index into a table is as large as the table.
    single = {name: table.unbind() for name, table in rows.items()}
    forward_rows, backward_rows = forward.unbind(), backward.unbind()
    for h, r, t in torch.from_numpy(triples.astype(np.int64)):
        lhs, rhs = data.relations.relations[int(r)].lhs, data.relations.relations[int(r)].rhs
        head, tail = single[lhs][h], single[rhs][t]
        for side, answer_type, answer, relations, relation_rows in (
            (Side.TAIL, rhs, t, forward, forward_rows),
            (Side.HEAD, lhs, h, backward, backward_rows),
        ):
            given, true = (head, tail) if side is Side.TAIL else (tail, head)

            turned = side is Side.HEAD and not reciprocal
            of_entities = side_scores(name, given, relation_rows[r], rows[answer_type], turned)[None]
            total = total + candidate_loss(of_entities, answer[None], loss, smoothing).sum()
            if getattr(config.regularizer, "weight", 0):
                factors = [given, true] + ([] if name == "rotate" else [relation_rows[r]])
                total = total + N3_WEIGHT * sum(cubes(x, is_complex) for x in factors)
            if config.training.relation_prediction:
                of_relations = side_scores(name, given, relations, true, turned)[None]
                predicted = candidate_loss(of_relations, r[None], loss, smoothing).sum()
                total = total + RELATION_WEIGHT * predicted
    return total


def compare_with_oracle(dataset: Path, run: Path, *more: str) -> None:
    """Train two epochs by both, from the same rows."""
    config = load_config(None, settings(dataset, run, *more))
    assert_epochs_equal(config, lambda data, _, rows, batch: oracle(data, rows, batch, config))


@pytest.mark.parametrize("more", [(), FULL], ids=["plain", "all options"])
@pytest.mark.parametrize("loss", ["softmax", "logistic"])
def test_complex_equals_a_dense_float64_loop(
    dataset: Path, tmp_path: Path, loss: str, more: tuple[str, ...]
) -> None:
    compare_with_oracle(dataset, tmp_path / "run", f"loss.name={loss}", *more)


@pytest.mark.parametrize("loss", ["margin_ranking", "self_adversarial", "hinge", "squared"])
def test_any_loss_over_all_candidates(dataset: Path, tmp_path: Path, loss: str) -> None:
    weight = f"training.relation_prediction={RELATION_WEIGHT}"
    compare_with_oracle(dataset, tmp_path / "run", f"loss.name={loss}", weight)


@pytest.mark.parametrize("reciprocal", ["true", "false"])
@pytest.mark.parametrize("score_function", ["distmult", "complex", "transe_l2", "rotate", *BILINEAR])
def test_every_kind_of_score_function(tmp_path: Path, score_function: str, reciprocal: str) -> None:
    chosen = (f"model.score_function={score_function}", f"model.reciprocal_relations={reciprocal}")
    compare_with_oracle(toy_dataset(typed=True), tmp_path / "run", *chosen, *FULL)


@pytest.mark.parametrize("reciprocal", ["true", "false"])
@pytest.mark.parametrize("score_function", ["pairre", "triplere"])
def test_wide_queries(tmp_path: Path, score_function: str, reciprocal: str) -> None:
    """Loss and gradients of a batch; Adagrad would turn noise of signs that cancel into whole steps."""
    chosen = (f"model.score_function={score_function}", f"model.reciprocal_relations={reciprocal}")
    config = load_config(None, settings(toy_dataset(typed=True), tmp_path / "run", *chosen, *FULL))
    data = Dataset.open(toy_dataset(typed=True))
    with opened(config) as trainer:
        rows, found = dense_rows(trainer), {}

        def collect(gradients: list, **_: Any) -> UpdateResult:
            found.update(summed(gradients, trainer))
            return UpdateResult(0)

        trainer.optimizer.step_rows = collect
        for _ in dglkge.remaining_epochs_until(1):
            batch = next(iter(trainer.batches()))
            loss = oracle(data, rows, batch, config) / batch.global_size
            loss.backward()
            assert trainer.step(batch) / batch.global_size == pytest.approx(loss.item(), rel=1e-4)
        for name, expected in rows.items():
            original = trainer.tables[name].original_ids
            wanted = expected.grad[original] if expected.grad is not None else 0 * expected.detach()
            np.testing.assert_allclose(found[name], wanted, rtol=1e-3, atol=1e-6, err_msg=name)


def summed(gradients: list, trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of all rows of a table, by node id."""
    totals = {}
    for name, table in trainer.tables.items():
        totals[name] = torch.zeros(len(table), table.dim)
        for embedding, ids, values in gradients:
            if embedding is table.embedding:
                totals[name].index_add_(0, torch.as_tensor(ids), values)
    return totals


@pytest.mark.parametrize("more", [("regularizer.name=lp", "regularizer.weight=0.1"), ()], ids=["lp", "none"])
def test_products_in_bfloat16_are_near(tmp_path: Path, more: tuple[str, ...]) -> None:
    totals = []
    for dtype in ("float32", "bfloat16"):
        run = settings(toy_dataset(), tmp_path / dtype, f"training.matmul_dtype={dtype}", *FULL[2:], *more)
        with opened(load_config(None, run)) as trainer:
            totals.append(train(trainer, 2))
    assert totals[0][-1] != totals[1][-1]
    np.testing.assert_allclose(*totals, rtol=2e-3)


def test_relation_products_are_those_of_the_score_function_that_states_them() -> None:
    class Shifted(ComplEx):
        """A score function of the user's, which operates otherwise."""

        def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
            """Multiply, and add the entity."""
            return super().operate(entity, relation) + entity

    draw = torch.Generator().manual_seed(3)
    given, answer, relations = (torch.randn(num, DIM, generator=draw) for num in (5, 5, 3))
    for score_function in [SCORE_FUNCTIONS.get("distmult")(), SCORE_FUNCTIONS.get("complex")(), Shifted()]:
        query = score_function.relation_query(given, answer)
        assert query.shape[1] == score_function.relation_query_dim(DIM)
        got = score_function.compare_relations(query, relations)
        carried = torch.stack([score_function.operate(given, row.expand_as(given)) for row in relations], 1)
        expected = (carried * answer[:, None]).sum(-1)
        torch.testing.assert_close(got, expected)
    assert build_model("complex", DIM, True).score_function.has_relation_product


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.objective.label_smoothing=0.1"],
            "label_smoothing has no effect here; it is an option of ",
        ),
        (
            ["training.objective={name: one_vs_all, label_smoothing: 0.1}", "loss.name=margin_ranking"],
            "label_smoothing is 0.1 and loss is margin_ranking, which compares pairs of answers and has no",
        ),
        (
            ["training.objective=one_vs_all", "training.synchronous=false"],
            "training.synchronous is false and training.objective is one_vs_all, where every",
        ),
    ],
)
def test_settings_that_do_not_fit_the_objective(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_config(load_config(None, ["dataset=toy", *overrides]))


@pytest.mark.parametrize("score_function", ["complex", "rotate"])
def test_the_reference_equals_a_dense_float64_loop(tmp_path: Path, score_function: str) -> None:
    chosen = (f"model.score_function={score_function}", "training.kernels=reference")
    compare_with_oracle(toy_dataset(), tmp_path / "run", *chosen, *FULL)
