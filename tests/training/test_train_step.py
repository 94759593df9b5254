"""Training steps against a dense float64 loop written out by hand, with torch's own Adagrad."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.distributed.dgl_compat import request_timeout_seconds, set_request_timeout
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.negatives import UniformNegatives
from dglkge.training.building import tables
from dglkge.training.building.checks import check_config
from dglkge.training.building.tables import build_optimizer
from dglkge.training.cadence import reports_apart
from dglkge.training.trainer import Trainer
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset
from tests.training.live import Rows, assert_epochs_equal, chunks_of, opened, rows_by_node, train

DIM, NUM_NEGATIVES, CHUNK, BATCH, WEIGHT = 8, 12, 20, 50, 0.01


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
        f"negatives.num_uniform={NUM_NEGATIVES}",
        f"negatives.chunk_size={CHUNK}",
        f"training.batch_size={BATCH}",
        "training.num_epochs=3",
        "checkpoint.every_epochs=0",
        *more,
    ]


def complex_score(query: torch.Tensor, relation: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Re(<query * relation, conj(candidate)>), with complex numbers (Trouillon et al. 2016)."""
    half = DIM // 2
    q, r, c = (torch.complex(row[..., :half], row[..., half:]) for row in (query, relation, candidate))
    return (q * r * c.conj()).sum(-1).real


def cube_of_moduli(row: torch.Tensor) -> torch.Tensor:
    """N3 of one row."""
    half = DIM // 2
    return (row[:half] ** 2 + row[half:] ** 2).pow(1.5).sum()


def oracle_batch(data: Dataset, rows: Rows, batch: EdgeBatch) -> torch.Tensor:
    """Return the summed loss of a global batch: each truth among its chunk's negatives and its own entity."""
    original = {name: np.arange(data.num_entities(name)) for name in data.entity_types}
    sampler = UniformNegatives(NUM_NEGATIVES, original, seed=0)
    # Cut once: the gradient of an index into a table is as large as the table.
    rows = {name: table.unbind() for name, table in rows.items()}
    total = torch.zeros((), dtype=torch.float64)
    for triple_id, chunk in zip(batch.triple_ids, chunks_of(batch)):
        h, r, t = (int(x) for x in data.split("train")[triple_id])
        relation = data.relations.relations[r]
        both = rows[RELATION][r]
        for anchor, truth, row, anchor_type, truth_type in (
            (h, t, both[:DIM], relation.lhs, relation.rhs),
            (t, h, both[DIM:], relation.rhs, relation.lhs),
        ):
            query = rows[anchor_type][anchor]
            candidates = [int(c) for c in sampler.sample(truth_type, batch.epoch, batch.index, int(chunk))]
            if anchor_type == truth_type:
                candidates.append(anchor)
            others = [rows[truth_type][c] for c in candidates if c != truth]
            scores = complex_score(query, row, torch.stack([rows[truth_type][truth], *others]))
            total = total - torch.log_softmax(scores, 0)[0]
            total = total + WEIGHT * sum(cube_of_moduli(x) for x in (query, row, rows[truth_type][truth]))
    return total


def test_three_epochs_equal_a_dense_float64_loop(dataset: Path, tmp_path: Path) -> None:
    more = ("regularizer.name=n3", f"regularizer.weight={WEIGHT}")
    config = load_config(None, settings(dataset, tmp_path / "run", *more))
    assert_epochs_equal(
        config, lambda data, _, *rows_and_batch: oracle_batch(data, *rows_and_batch), 3, rel=1e-4
    )


LOSSES = ("logistic", "margin_ranking", "self_adversarial")
NAMES = [name for name in SCORE_FUNCTIONS if name != "complex"]


# A loss sees nothing but scores: each score function has one of the losses, one of them has all.
@pytest.mark.parametrize(
    ("score_function", "loss"),
    [
        *((name, LOSSES[number % len(LOSSES)]) for number, name in enumerate(NAMES)),
        *(("rotate", loss) for loss in LOSSES if loss != LOSSES[NAMES.index("rotate") % len(LOSSES)]),
    ],
)
def test_every_score_function_and_every_loss_learns(
    dataset: Path, tmp_path: Path, score_function: str, loss: str
) -> None:
    optimizer = "sparse_adam" if loss == "logistic" else "row_adagrad"
    more = (
        f"model.score_function={score_function}",
        f"loss.name={loss}",
        *(["loss.margin=2"] if loss in ("margin_ranking", "hinge", "self_adversarial") else []),
        "optimizer.lr=0.05",
    )
    config = load_config(None, settings(dataset, tmp_path / "run", *more, f"optimizer.name={optimizer}"))
    totals = []
    with opened(config) as trainer:
        for _ in dglkge.remaining_epochs_until(3):
            totals.append(sum(trainer.step(batch) for batch in trainer.batches()))
    assert totals[-1] < totals[0]


def test_weights_multiply_losses(dataset: Path, tmp_path: Path) -> None:
    config = load_config(None, settings(dataset, tmp_path / "run"))
    with opened(config) as trainer:
        for _ in dglkge.remaining_epochs_until(1):
            batch = next(iter(trainer.batches()))
            before = {name: trainer.tables[name].local_rows.clone() for name in trainer.tables}
            heavy = type(batch)(**{**vars(batch), "weights": np.zeros(len(batch), np.float32)})
            assert trainer.step(heavy) == 0.0
            for name, rows in before.items():
                assert torch.equal(rows, trainer.tables[name].local_rows)
            half = type(batch)(**{**vars(batch), "weights": np.full(len(batch), 0.5, np.float32)})
            whole = type(batch)(**{**vars(batch), "weights": np.ones(len(batch), np.float32)})
            losses = []
            for weighted in (half, whole):
                for name, rows in before.items():
                    trainer.tables[name].local_rows.copy_(rows)
                losses.append(trainer.step(weighted))
            assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)


def test_batches_outside_an_epoch_are_refused(dataset: Path, tmp_path: Path) -> None:
    config = load_config(None, settings(dataset, tmp_path / "run"))
    with opened(config) as trainer:
        with pytest.raises(RuntimeError, match="must run inside 'for epoch in remaining_epochs_until"):
            next(iter(trainer.batches()))


def test_a_step_tells_that_a_trainer_was_asked_to_stop(dataset: Path, tmp_path: Path) -> None:
    config = load_config(None, settings(dataset, tmp_path / "run"))
    with opened(config) as trainer:
        trained = []
        with pytest.raises(SystemExit) as left:
            for _ in dglkge.remaining_epochs_until(1):
                for batch in trainer.batches():
                    if batch.index == 1:
                        trainer.cluster.stop._note(signal.SIGTERM, None)
                    trainer.step(batch)
                    trained.append(batch.index)
        assert left.value.code == 143 and trained == [0, 1]


@pytest.mark.parametrize("synchronous", ["true", "false"])
def test_commits_by_the_clock_take_no_message_of_their_own(
    synchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts sums over trainers with and without the clock; a due commit comes with a step or a report."""
    sums: list[int] = []
    own_sum = Cluster.sum
    monkeypatch.setattr(Cluster, "sum", lambda self, values: sums.append(1) or own_sum(self, values))
    places: list[int] = []
    commit = Trainer._commit

    def noted(trainer: Trainer) -> None:
        places.append(trainer._position.batches_done)
        commit(trainer)

    monkeypatch.setattr(Trainer, "_commit", noted)
    counts, commits = [], []
    # In the last case each look at the clock finds it a minute later.
    for minutes, clock in (
        (0, itertools.repeat(0)),
        (1000, itertools.repeat(0)),
        (1, itertools.count(0, 61)),
    ):
        more = ("training.batch_size=4", f"training.synchronous={synchronous}", "checkpoint.background=false")
        run = settings(toy_dataset(), tmp_path / str(minutes), *more, f"checkpoint.every_minutes={minutes}")
        config = load_config(None, run)
        with opened(config) as trainer:
            monkeypatch.setattr(trainer._cadence, "_clock", clock.__next__)
            trainer._cadence.committed()
            sums.clear()
            places.clear()
            train(trainer, 1)
            counts.append(len(sums))
            commits.append([place for place in places if place])
            num_batches = len(trainer._edge_batches)
    every = 1 if synchronous == "true" else reports_apart(num_batches)
    assert (every > 1) == (synchronous == "false") and num_batches > 2 * every
    assert commits == [[], [], list(range(every, num_batches, every))]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("optimizer", ["sparse_adagrad", "sparse_adam"])
def test_a_process_alone_keeps_tables_in_files(dataset: Path, tmp_path: Path, optimizer: str) -> None:
    """Rows and state are mapped from a folder that goes with the job; rows are those of memory."""
    rows: list[dict[str, torch.Tensor]] = []
    files = tmp_path / "files"
    for storage in ("memory", "disk"):
        more = (f"tables.storage={storage}", f"tables.folder={files}", f"optimizer.name={optimizer}")
        config = load_config(None, settings(dataset, tmp_path / storage, *more))
        with opened(config) as trainer:
            train(trainer, 2)
            rows.append(rows_by_node(trainer))
            places = Path("/proc/self/maps").read_text()
            tensors = [table.local_rows for table in trainer.tables.values()]
            states = [trainer.optimizer.state_tensors(table.embedding) for table in trainer.tables.values()]
            num_tensors = len(tensors) + sum(len(state) for state in states)
            assert places.count(str(files)) == (num_tensors if storage == "disk" else 0)
            del tensors, states
    assert not list(files.iterdir())
    for name, of_memory in rows[0].items():
        assert torch.equal(of_memory, rows[1][name])


def test_alone_it_does_not_matter_whether_trainers_wait(dataset: Path, tmp_path: Path) -> None:
    totals = []
    for synchronous in ("true", "false"):
        more = (f"training.synchronous={synchronous}", "checkpoint.every_batches=2")
        config = load_config(None, settings(dataset, tmp_path / synchronous, *more))
        with opened(config) as trainer:
            totals.append(train(trainer, 2))
    assert totals[0] == totals[1]


def test_trainers_of_several_machines_must_wait() -> None:
    config = load_config(None, ["dataset=toy", "training.synchronous=false"])
    words = "synchronous is false and the number of machines is 2, .*; allowed: true"
    with pytest.raises(InputError, match=words):
        check_config(config, World(0, 2))


def test_the_limit_of_waiting_reaches_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of one machine wait for each other in its exchange, and not longer than anywhere else."""
    monkeypatch.setattr(tables, "SparseOptimizer", lambda params, rule, lr, **options: options)
    before = request_timeout_seconds()
    set_request_timeout(7.5)
    try:
        options = build_optimizer(load_config(None, ["dataset=toy"]), [], num_machines=1)
    finally:
        set_request_timeout(before)
    assert options["timeout_seconds"] == 7.5
