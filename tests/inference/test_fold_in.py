"""Rows of new entities from their triples: the least loss by its definition, types, refusals, a run."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.inference import fold_in, fold_in_loss
from dglkge.inference.fold_in import _EntityTriples
from dglkge.inference.fold_in_loss import better_rows, run_loss
from dglkge.inference.run import Run, open_run
from dglkge.model.kge_model import build_model
from dglkge.partition.extend import extend_dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.toy_kg import TIMES, temporal_dataset, toy_dataset

N3 = {"loss": {"name": "softmax"}, "regularizer": {"name": "n3", "weight": 0.05}}


@pytest.fixture(scope="module")
def plain():
    return Dataset.open(toy_dataset())


def toy_run(folder, dataset, score_function="complex", config=N3, **changes) -> Run:
    return Run(open_checkpoint(save_toy_run(folder, dataset, score_function, config=config, **changes)))


def with_dense_parameters(run, score_function, options=None):
    module = build_model(score_function, 6, reciprocal=True, options=options or {}).module
    run.tables.dense_parameters = lambda: dict(module.named_parameters())


def frame(*triples) -> pd.DataFrame:
    return pd.DataFrame(triples, columns=["head", "relation", "tail"])


TRIPLES = [("new", "turn_1", "e005"), ("e003", "turn_7", "new"), ("new", "turn_1", "e009")]
FACTS = frame(*TRIPLES, ("e050", "turn_13", "new"))


def definition(run: Run, facts: pd.DataFrame, score_function: str):
    """Return the loss of a row of the entity ``new``, from the definitions of ComplEx, DistMult and N3."""
    known, relations = run.tables["entity"][:].double(), run.tables["relation"][:].double()

    def numbers(rows):
        return torch.complex(*rows.chunk(2, -1)) if score_function == "complex" else rows

    def queries(anchor, relation, side):
        relation = numbers(relation)
        return numbers(anchor) * (relation if side == "tail" else relation.conj())

    def scores(query, rows):
        return (query * numbers(rows).conj()).sum(-1).real

    ids = {name: id_ for id_, name in enumerate(run.tables.vocabulary("entity").names)} | {"new": -1}
    labels = run.tables.relations
    known_ids = [(ids[h], labels.id(r), ids[t]) for h, r, t in facts.itertuples(index=False)]
    heads, of, tails = torch.from_numpy(run.dataset.split("train").astype(np.int64)).unbind(1)
    trained = [queries(known[heads], relations[of], "tail"), queries(known[tails], relations[of], "head")]
    powers = [scores(query[:, None], known).logsumexp(1) for query in trained]

    def loss(row):
        total = row.new_zeros(())
        rows = dict(enumerate(known)) | {-1: row}
        for h, r, t in known_ids:
            for side, anchor, answer in (("tail", h, t), ("head", t, h)):
                query = queries(rows[anchor], relations[r], side)
                answers = known if answer >= 0 else torch.cat([known, row[None]])
                total = total + scores(query, answers).logsumexp(0) - scores(query, rows[answer])
                for part in (rows[anchor], relations[r], rows[answer]):
                    total = total + 0.05 * numbers(part).abs().pow(3).sum()
        for query, total_power in zip(trained, powers):
            total = total + torch.logaddexp(total_power, scores(query, row)).sum()
        return total

    return loss


@pytest.mark.parametrize("score_function", ["complex", "distmult"])
def test_the_row_has_the_least_loss_by_definition(tmp_path, plain, monkeypatch, score_function):
    run = toy_run(tmp_path, plain, score_function, reciprocal=False)
    near = run.add_entities(FACTS).tables["entity"]["new"].double()
    monkeypatch.setattr(fold_in_loss, "TOLERANCE", 1e-7)
    best = run.add_entities(FACTS).tables["entity"]["new"].double()
    loss = definition(run, FACTS, score_function)
    row = torch.full((6,), 0.1, dtype=torch.float64, requires_grad=True)  # another start, another way
    for _ in range(30):
        (gradient,) = torch.autograd.grad(loss(row), row)
        hessian = torch.autograd.functional.hessian(loss, row.detach())
        row = (row - 0.7 * torch.linalg.solve(hessian, gradient)).detach().requires_grad_()
    assert gradient.abs().max() < 1e-6
    assert loss(best).item() == pytest.approx(loss(row).item(), abs=1e-3)
    assert best.tolist() == pytest.approx(row.tolist(), abs=5e-3)
    assert loss(near).item() == pytest.approx(loss(row).item(), rel=1e-4)


@pytest.mark.parametrize("score_function", ["rotate", "tucker"])
def test_any_score_function_gives_the_same_row_twice_with_less_loss(tmp_path, plain, score_function):
    config = {"loss": {"name": "self_adversarial", "margin": 6.0}, "regularizer": {"name": "none"}}
    run = toy_run(tmp_path, plain, score_function, config)
    if score_function == "tucker":
        with_dense_parameters(run, score_function)
    more = run.add_entities(FACTS)
    row, triples = more.tables["entity"]["new"], more._added[0]
    assert torch.equal(row, run.add_entities(FACTS).tables["entity"]["new"])
    own_terms = run._fold_in._own_terms("entity", [_EntityTriples(60, triples, 9)])[0]
    terms = [*own_terms, run._fold_in._training_term("entity")]
    rows = torch.stack([row, *run.tables["entity"][:]]).double()
    losses = [float(sum(term(some_row[None]) for term in terms)) for some_row in rows]
    assert losses[0] < np.median(losses[1:])


def test_new_entities_answer_and_are_asked_for(tmp_path, plain):
    run = toy_run(tmp_path, plain)
    more = run.add_entities(FACTS)
    tails = more.predict_tails("new", "turn_1", k=61).set_index("entity")
    assert tails["known_from"].dropna().to_dict() == {"e005": "added", "e009": "added"}
    assert "new" in more.predict_tails("e003", "turn_7", k=61)["entity"].tolist()
    assert more.evaluate("test").to_dict()["both"]["num_queries"] == 2 * len(plain.split("test"))
    assert "new" not in run.tables.vocabulary("entity")
    one_more = more.add_entities(frame(("newer", "turn_1", "new")))
    assert one_more.tables["entity"]["new"].tolist() == more.tables["entity"]["new"].tolist()
    assert "added" in one_more.predict_tails("newer", "turn_1", k=62)["known_from"].tolist()


def test_many_at_once_are_those_found_alone(tmp_path, plain, monkeypatch):
    """Also where a search takes several rounds, and where an entity has more triples than are taken."""
    run = toy_run(tmp_path, plain)
    monkeypatch.setattr(fold_in_loss, "TOLERANCE", 1e-7)
    facts = [FACTS.replace("new", f"new{number}").iloc[: number + 1] for number in range(4)]
    facts.append(frame(*((f"e{number:03d}", "turn_1", "new4") for number in range(40))))
    alone = [run.add_entities(triples).tables["entity"][f"new{place}"] for place, triples in enumerate(facts)]
    monkeypatch.setattr(fold_in_loss, "MAX_STEPS", 8)
    at_once = run.add_entities(pd.concat(facts, ignore_index=True)).tables["entity"]
    for place, row in enumerate(alone):
        assert at_once[f"new{place}"].tolist() == pytest.approx(row.tolist(), abs=5e-3)
    # Of more triples, some that are evenly spaced stand for all.
    monkeypatch.setattr(fold_in, "MAX_SCORES", 20 * 60)
    fewer = run.add_entities(facts[4]).tables["entity"]["new4"]
    assert fewer.tolist() == pytest.approx(alone[4].tolist(), abs=0.5) and not torch.equal(fewer, alone[4])


def test_a_chain_of_new_entities_and_their_types(tmp_path, plain, dataset):
    more = toy_run(tmp_path / "a", plain).add_entities(frame(("a", "turn_1", "e001"), ("a", "turn_7", "b")))
    assert list(more.tables.vocabulary("entity").names[60:]) == ["a", "b"]
    assert more.tables["entity"][["a", "b"]].abs().sum(1).gt(0).all()
    facts = frame(("Ada", "lives_in", "town1"), ("Ada", "near", "town2"), ("town3", "lies_in", "Utopia"))
    more = toy_run(tmp_path / "b", dataset).add_entities(facts)
    assert more.type_of("Ada") == "person" and more.type_of("Utopia") == "country"


def test_times_of_triples(tmp_path):
    """A column of times and names of relations at times are the same."""
    dataset = Dataset.open(temporal_dataset())
    run = toy_run(tmp_path, dataset, "tcomplex", score_options={"num_times": len(TIMES)})
    with_dense_parameters(run, "tcomplex", {"num_times": len(TIMES)})
    times = ["2021-04", "2021-06", "2021-03", "2021-04"]
    facts = FACTS.assign(relation=["turn", "open", "turn", "follow"], time=times)
    labels = facts["relation"] + " @ " + facts["time"]
    more, expected = run.add_entities(facts), run.add_entities(FACTS.assign(relation=labels))
    assert torch.equal(more.tables["entity"]["new"], expected.tables["entity"]["new"])
    assert more.score(facts)["known_from"].tolist() == ["added"] * 4
    assert more.score(facts.assign(time="2021-05"))["known_from"].isna().all()
    for change, words in (({"time": None}, "time is missing"), ({"time": "2022"}, "turn @ 2022")):
        with pytest.raises(InputError, match=f"row 0: .*{words}"):
            run.add_entities(facts.assign(**change))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (frame(("Ada", "near", "town2")), "person or town"),
        (frame(("Ada", "lives_in", "country1")), "none"),
        (frame(("Ada", "lives", "town1")), "row 0: .*lives_in"),
        (frame(("Ada", "knows", "Ada"), ("Bob", "knows", "person1")), "no triple joins the new entity 'Ada'"),
        (frame(("Ada", "lives_in", "town1")).drop(columns="tail"), "no column tail"),
        (frame(("Ada", "lives_in", "town1"), ("Ada", "lives_in", None)), "row 1: .* is missing"),
    ],
)
def test_triples_that_give_no_row_are_refused(tmp_path, dataset, facts, words):
    with pytest.raises(InputError, match=words):
        toy_run(tmp_path, dataset).add_entities(facts)


def test_steps_and_terms_of_the_loss(tmp_path, plain):
    # x - log(x): from 3, the curvature there promises the least loss at -3, which is not a number; halved.
    rows, is_open = better_rows(torch.tensor([[3.0]]), [lambda row: (row - row.log()).sum(1)])
    assert rows.item() == pytest.approx(1, abs=0.01) and not is_open
    # Objectives over all candidates add their terms.
    config = {"loss": {"name": "bce"}, "training": {"objective": {"name": "one_vs_all"}}}
    loss = run_loss(toy_run(tmp_path, plain, config=config).checkpoint)
    assert loss(torch.zeros(1), torch.zeros(1, 9)).item() == pytest.approx(10 * np.log(2))


def test_a_run_on_an_extended_data_set_has_the_rows(tmp_path, plain, call):
    run = toy_run(tmp_path / "run", plain)
    FACTS.to_csv(tmp_path / "more.tsv", sep="\t", header=False, index=False)
    extend_dataset(plain.path, [tmp_path / "more.tsv"], tmp_path / "extended", "more")
    words = ["checkpoint", "convert", tmp_path / "run", "--to", "run", "--fold-in"]
    assert call(*words, "--dataset", tmp_path / "extended", "--output", tmp_path / "grown")[0] == 0
    grown = open_run(tmp_path / "grown")
    expected = run.add_entities(FACTS).tables["entity"]
    assert torch.equal(grown.tables["entity"]["new"], expected["new"])
    assert torch.equal(grown.tables["entity"]["e005"], expected["e005"])
    assert grown.predict_tails("new", "turn_1", k=61)["known_from"].eq("train").sum() == 2
