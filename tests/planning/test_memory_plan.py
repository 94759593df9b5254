"""The plan against arrays that are really made and figures by hand: memory, epochs, ranges, defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import TRAIN, DatasetSize, PartSize, read_dataset_size
from dglkge.data.known_triples import open_known_index
from dglkge.evaluation import evaluator, ranking
from dglkge.model.functions import autograd
from dglkge.planning import defaults
from dglkge.planning import memory as memory_plan
from dglkge.planning.defaults import adapted, most_trainers, num_epochs, regularizer_weight
from dglkge.planning.epoch import ROW_PASSES, Rates, epoch_seconds, plan_ranges, propose_ranges, range_budget
from dglkge.planning.memory import MIB, PlannedHost, describe_hosts, plan_memory
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset


def config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", "evaluation.split=none", *settings])


def one_part(num_entities: int = 100_000, num_edges: int = 1_000_000) -> DatasetSize:
    part = PartSize({"entity": num_entities, RELATION: 10}, num_edges)
    return DatasetSize((part,), {"train": num_edges, "valid": 5000, "test": 5000})


def item(size: DatasetSize, name: str, *settings: str, num_trainers: int = 1, num_servers: int = 1) -> int:
    (host,) = plan_memory(config(*settings), size, num_trainers, num_servers)
    return dict(host.memory)[name]


def test_tables_and_state_are_as_large_as_arrays() -> None:
    size, background = one_part(), "checkpoint's background copy"
    rows = np.empty((100_000, 200), np.float32).nbytes
    for optimizer, averaging, copies in (
        ("row_adagrad", "null", 1),
        ("sparse_adagrad", "null", 2),
        ("sparse_adam", "null", 3),
        ("sparse_adam", "2", 4),
    ):
        settings = ("model.dimension=200", f"optimizer.name={optimizer}", f"training.averaging={averaging}")
        (host,) = plan_memory(config(*settings), size, 1, 1)
        memory = dict(host.memory)
        num_bytes = memory["tables"] + memory["optimizer state"]
        assert num_bytes == pytest.approx(copies * rows, rel=0.01)
        assert memory[background] == num_bytes and host.disk_bytes == 2 * num_bytes
        # A copy of tables that were put on a disk would not fit: training waits for the commit.
        for without_copy in ("checkpoint.background=false", "tables.storage=disk"):
            assert item(size, background, *settings, without_copy) == 0


def test_processes_are_counted_and_only_servers_need_shared_memory() -> None:
    (alone,) = plan_memory(config(), one_part(), 1, 0)
    (served,) = plan_memory(config(), one_part(), 3, 2)
    memory = dict(served.memory)
    graph = "graph of DGL's servers"
    assert (alone.shared_memory_bytes, dict(alone.memory)[graph]) == (0, 0)
    assert served.shared_memory_bytes == sum(memory[name] for name in ("tables", "optimizer state", graph))
    assert dict(alone.memory)["tables"] == memory["tables"]
    assert dict(alone.memory)["interpreters and libraries"] == (255 + 175) * MIB
    processes = 3 * 255 + 2 * 183 + 175 + 13 + 32
    assert memory["interpreters and libraries"] == served.base_bytes == processes * MIB
    assert served.memory_bytes == sum(memory.values())
    # Each machine of a cluster.
    hosts = plan_memory(config(), read_dataset_size(toy_dataset(2)), 2, 1)
    assert [host.machine for host in hosts] == [0, 1]
    rows = 4 * 400 * (60 + 2 * 4)
    assert rows <= sum(dict(host.memory)["tables"] for host in hosts) <= rows + 4 * 4096


def test_batch_buffers_by_hand() -> None:
    """Two trainers, 40 triples each, 30 negatives, width 8, relations of both directions 16."""
    settings = config("model.dimension=8", "training.batch_size=80", "negatives.num_uniform=30",
                    "training.matmul_dtype=float32")  # fmt: skip
    assert memory_plan.batch_rows(settings, 2) == (110, 40)
    rows = 2 * 4 * (110 * 8 + 40 * 16)
    products = 4 * (2 * 80 * 8 + 2 * 30 * 8)
    scores = 4 * 80 * 30
    assert memory_plan.batch_bytes(settings, one_part(), 2) == int(1.125 * (rows + products + scores))
    assert memory_plan.exchange_bytes(settings, one_part(), 2) == rows
    distances, smaller = config("model.score_function=transe_l2"), config("negatives.chunk_size=100")
    for more in (distances, smaller):  # autograd keeps more; more negatives in all
        assert memory_plan.batch_bytes(more, one_part(), 1) > memory_plan.batch_bytes(config(), one_part(), 1)
    assert memory_plan.exchange_bytes(settings, one_part(), 1) == 0


@pytest.mark.parametrize("name, width", [("rescal", 100**2), ("tucker", 100)])
def test_rows_of_relations_that_a_group_shares_are_counted_once(name: str, width: int) -> None:
    """Of 10 relations a batch of 4 chunks holds 40 rows, not one for each of its 1,000 triples."""
    configured = config(f"model.score_function={name}", "model.dimension=100", "training.batch_size=1000",
                        "negatives.chunk_size=250", "model.reciprocal_relations=false")  # fmt: skip
    part = PartSize({"entity": 100_000, RELATION: 1000}, 1_000_000)
    few, many = one_part(), dataclasses.replace(one_part(), parts=(part,))

    def added(num_bytes: Callable[..., int], *arguments: int) -> int:
        return num_bytes(configured, many, *arguments) - num_bytes(configured, few, *arguments)

    # Rows and gradients, twice: as they are found, and the copies that autograd reads.
    numbers = 2 * 2 * (1000 - 40) * width
    assert added(memory_plan.batch_bytes, 1) == pytest.approx(1.125 * 4 * numbers, rel=0.01)
    assert added(memory_plan.device_bytes, 0, 1) == pytest.approx(1.125 * 4 * numbers, rel=0.01)
    assert added(memory_plan.exchange_bytes, 4) == 2 * 4 * (250 - 40) * width


def test_sides_with_negatives_of_their_own_have_rows_of_their_own() -> None:
    small = ("model.dimension=8", "training.batch_size=80", "negatives.num_uniform=30",
             "training.matmul_dtype=float32")  # fmt: skip

    def rows(*settings: str) -> int:
        return memory_plan.batch_rows(config(*small, *settings), 1)[0] - 160

    assert rows() == rows("negatives.num_for_heads=30") == rows("negatives.num_for_heads=0") == 30
    assert rows("negatives.num_for_heads=7") == 37
    assert rows("negatives.num_for_heads=7", "negatives.num_for_tails=9") == 16
    both = memory_plan.batch_bytes(config(*small), one_part(), 1)
    tails = memory_plan.batch_bytes(config(*small, "negatives.num_for_heads=0"), one_part(), 1)
    assert both - tails == pytest.approx(1.125 * 4 * 80 * 30, abs=1)
    everything = config("negatives.name=all_entities", "training.batch_size=80", "negatives.num_for_tails=0")
    assert memory_plan.batch_rows(everything, 2, one_part())[0] == 80 + 100_000
    assert memory_plan.negatives_per_side(everything, one_part()) == [100_000]


def test_masks_are_counted_once_and_degrees_for_each_trainer(tmp_path: Path) -> None:
    def known(*settings: str, num_trainers: int = 1) -> int:
        return item(one_part(), "known answers and degrees", *settings, num_trainers=num_trainers)

    # The index, the sort of its largest relation, and a chunk; ranking maps that of the other splits as well.
    masks = (16 + 8 + 64) * 1_000_000
    assert known() == 0 and known("negatives.mask_known=true", num_trainers=2) == masks
    assert known("negatives.mask_known=true", "evaluation.split=test") == masks + 16 * 10_000
    degrees = 100_000 * memory_plan.DEGREE_BYTES
    assert known("negatives.degree_power=1") == degrees
    assert known("negatives.degree_power=1", "negatives.num_for_heads=5") == 2 * degrees
    # The constant against the size of a file of 100,000 triples of one relation.
    triples = np.zeros((100_000, 3), np.int64)
    triples[:, 0] = np.arange(100_000)
    open_known_index(tmp_path, "train", "source", triples, 1)
    size = (tmp_path / "known_train.index").stat().st_size
    assert 0 <= size - memory_plan.KNOWN_TRIPLE_BYTES * 100_000 < 5000


def test_tables_in_files_are_no_memory_that_must_be_free() -> None:
    """New tables are made in place, so nothing is there twice; files are mapped, also by a process alone."""
    tables = 4 * 200 * 100_000
    for num_servers in (0, 1):
        (host,) = plan_memory(config("model.dimension=200"), one_part(), 1, num_servers)
        needed = host.needed_bytes(in_files=True)
        assert tables < host.file_bytes == host.needed_bytes(in_files=False) - needed
        assert needed < host.memory_bytes - host.mapped_bytes - tables
    assert host.file_bytes == host.shared_memory_bytes - host.structure_bytes


def test_candidates_by_hand() -> None:
    """Two trainers own 50,000 rows of 8 numbers each; a batch has 160 queries."""
    settings = ["training.objective=one_vs_all", "model.dimension=8", "training.batch_size=80"]
    narrow = config(*settings, "training.matmul_dtype=bfloat16")
    numbers, chains = 50_000 * 8, memory_plan.CHAIN_BYTES_PER_ROW * 50_000
    queries = memory_plan.QUERY_COPIES * 160 * 8 * 4
    scores, gradients = 2 * 160 * 50_000, 4 * numbers + chains
    expected = int(1.125 * (2 * numbers + queries + scores + gradients))
    assert memory_plan.candidate_bytes(narrow, one_part(), 2) == expected
    wide = config(*settings, "training.matmul_dtype=float32")
    expected = int(1.125 * (queries + 2 * scores + gradients))
    assert memory_plan.candidate_bytes(wide, one_part(), 2) == expected
    assert memory_plan.batch_rows(narrow, 2) == (80, 40)
    many = config(*settings, "training.batch_size=100000")
    # 256 MiB are kept, and the scores of 8,192 rows need memory of their own.
    limit = (256 << 20) + 200_000 * 8192 * 4 + memory_plan.QUERY_COPIES * 200_000 * 8 * 4
    assert memory_plan.candidate_bytes(many, one_part(), 2) == int(1.125 * (limit + gradients))
    with_relations = config(*settings, "training.relation_prediction=4")
    assert memory_plan.candidate_bytes(with_relations, one_part(), 2) > expected
    assert memory_plan.candidate_bytes(config(), one_part(), 2) == 0
    sampled = config(*settings[1:], "training.relation_prediction=4")
    assert 0 < memory_plan.candidate_bytes(sampled, one_part(), 2) < expected


def test_queries_of_the_ranking_are_counted_and_only_when_they_are_more() -> None:
    """Four float64 rows of 400 numbers for each query, no more queries than a batch or the split has."""
    small = ("training.batch_size=10", "evaluation.batch_size=5000")
    ranked = item(one_part(), "batches and ranking", *small, "evaluation.split=test")
    assert item(one_part(), "batches and ranking", *small) < 4 * 8 * 400 * 5000 < ranked
    for setting, num_queries in (("batch_size=10000", 5000), ("batch_size=100", 100), ("max_triples=7", 7)):
        ranking = config("evaluation.split=test", "evaluation.filtered=false", f"evaluation.{setting}")
        num_bytes = memory_plan.ranking_bytes(ranking, one_part(num_edges=10))
        assert num_bytes == memory_plan.RANKING_TILE_BYTES + 4 * 8 * 400 * num_queries


def test_kept_versions_are_on_the_disk_and_every_figure_is_described() -> None:
    def planned(*settings: str) -> PlannedHost:
        (host,) = plan_memory(config("training.num_epochs=10", *settings), one_part(), 1, 1)
        return host

    version = planned().disk_bytes // 2
    assert planned("checkpoint.keep_every_epochs=3").disk_bytes == 5 * version  # two and three kept
    assert planned("checkpoint.keep_best=true").disk_bytes == 3 * version
    text = describe_hosts([planned()])
    assert text.startswith("machine 0:\n  tables ")
    # 100,000 rows of 400 float32
    for words in ("152.6 MiB", "in /dev/shm", "memory, all processes", "disk for the checkpoint"):
        assert words in text


def test_wide_queries_are_counted() -> None:
    """1,000 triples with queries of 64 + 64 * 64 numbers, and relations of two of these, with gradients."""
    wide, narrow = (
        item(one_part(), "batches and ranking", "model.dimension=64", "training.batch_size=1000",
             "negatives.num_uniform=10", f"model.score_function={name}")
        for name in ("transr", "transe_l2")
    )  # fmt: skip
    # Relation rows and their gradients, and autograd's copies of both, are 4 times twice a query.
    more = 4 * 1000 * 2 * 64 * 64 * 4 + 4 * 1000 * 64 * 64 * 4
    assert wide - narrow == pytest.approx(1.125 * more, rel=1e-6)


def test_dense_parameters_are_counted() -> None:
    """A core of 20 x 20 x 5 on each of 3 trainers; values and moments once more for the writer."""

    def dense(*settings: str, num_trainers: int = 1) -> int:
        core = ("model.dimension=20", "model.score_function={name: tucker, relation_dimension: 5}")
        return item(one_part(), "dense parameters", *core, *settings, num_trainers=num_trainers)

    assert item(one_part(), "dense parameters") == 0
    assert dense(num_trainers=3) == 2000 * (3 * 40 + 12)
    # 12 bytes of all during a batch; 32 of a slice; messages of at most all of them; FSDP itself.
    trainer_bytes = 2000 * (12 + 2 * 4) + 667 * 32 + 44 * 2**20
    assert dense("dense.sharding=fsdp", num_trainers=3) == 3 * trainer_bytes + 2000 * 12
    assert dense("dense.sharding=fsdp") == 2000 * (40 + 12)  # one trainer has them all
    more, less = (
        item(one_part(), "batches and ranking", "model.dimension=201", "training.batch_size=100",
             "negatives.num_uniform=10", f"model.score_function={{name: conve, channels: {channels}}}")
        for channels in (8, 4)
    )  # fmt: skip
    # 18 x 18 outputs of each filter, 4 times, of both sides and with gradients.
    assert more - less == pytest.approx(1.125 * 3 * 100 * 4 * 4 * 18 * 18 * 4, rel=1e-6)


def on_device(*settings: str, size: DatasetSize | None = None, num_trainers: int = 1) -> int:
    (host,) = plan_memory(config(*settings), size or one_part(), num_trainers, 1)
    return host.device_bytes


def test_memory_of_a_gpu_has_every_array_of_a_batch() -> None:
    """Negative sampling by hand: rows and gradients twice, scores with their copies, queries."""
    sampled = ("training.batch_size=1000", "negatives.chunk_size=1000", "model.dimension=200")
    sampled += ("negatives.num_uniform=500", "model.reciprocal_relations=true")
    rows = 4 * 4 * ((2 * 1000 + 500) * 200 + 1000 * 400)
    scores, queries = 6 * 4 * 1000 * 2 * 500, 4 * 4 * 1000 * 200
    assert on_device(*sampled) == pytest.approx(1.125 * rows + scores + queries, rel=0.01)
    # Trainers share a batch.
    assert on_device(*sampled, num_trainers=4) < 0.5 * on_device(*sampled)


def test_memory_of_a_gpu_that_holds_tables() -> None:
    """Its share of rows and state of every table, and what is exchanged; objectives copy no row then."""
    held = ("training.device=cuda", "tables.storage=device", "model.dimension=200", "evaluation.split=none")
    sampled = (*held, "training.batch_size=100", "negatives.chunk_size=100", "negatives.num_uniform=50")
    size = one_part(10_000_000)
    shard = 2 * 4 * (10_000_000 * 200 + size.num_rows[RELATION] * 400)
    before = on_device(*sampled, "tables.storage=memory", size=size)
    num_bytes = on_device(*sampled, size=size)
    rows = 4 * 4 * ((2 * 100 + 50) * 200 + 100 * 400)
    # A single trainer draws its batches there.
    edges = 12 * size.splits[TRAIN]
    assert num_bytes == pytest.approx(before + shard + 2 * rows + edges, rel=1e-6)
    assert on_device(*sampled, size=size, num_trainers=4) == pytest.approx(shard / 4, rel=0.01)
    # With one number of state a row, half of it; Adam has two and a step.
    assert on_device(*sampled, "optimizer.name=row_adagrad", size=size) < 0.51 * num_bytes
    assert on_device(*sampled, "optimizer.name=sparse_adam", size=size) > 1.49 * num_bytes
    gradients = 4 * 200 * 10_000_000
    one_vs_all = on_device(*held, "training.objective=one_vs_all", "training.batch_size=10", size=size)
    assert one_vs_all >= shard + gradients


def test_memory_of_a_gpu_bounds_candidates_and_rankings() -> None:
    """Rows of candidates above a limit are copied block by block, and tables that are ranked as well."""
    one_vs_all = ("training.objective=one_vs_all", "training.batch_size=500", "model.dimension=200")
    small, large = on_device(*one_vs_all), on_device(*one_vs_all, size=one_part(10_000_000))
    blocks = memory_plan.AUTOGRAD_SCORES * 4 * memory_plan.DEVICE_BLOCK_NUMBERS
    assert large < small + 2 * memory_plan.KEPT_ROW_BYTES + blocks
    ranked = ("evaluation.split=test", "model.dimension=200", "training.batch_size=100")
    tables = 4 * 200 * 100_000
    tile = 3 * 4 * 8192 * config().evaluation.batch_size
    assert on_device(*ranked) >= tables + tile
    assert on_device(*ranked, size=one_part(10**8)) < 2 * memory_plan.RANKED_ROW_BYTES
    # Limits on a device are those of the ranking.
    assert memory_plan.RANKED_ROW_BYTES == evaluator.RANKED_ROW_BYTES
    assert memory_plan.RANKED_CANDIDATES == ranking.DEVICE_CANDIDATE_TILE
    assert memory_plan.DEVICE_DISTANCE_NUMBERS == autograd.DEVICE_BLOCK_NUMBERS
    # 1,000 triples in one chunk by 1,000 negatives by 200 numbers are more than a block.
    sets = ("model.dimension=200", "negatives.chunk_size=1000", "negatives.num_uniform=1000",
            "training.batch_size=1000")  # fmt: skip
    differences = on_device(*sets, "model.score_function=transe_l1")
    products = on_device(*sets, "model.score_function=distmult")
    assert differences - products == 8 * 2**25


PRODUCT_SECONDS = 1000 * 10 * 20 * 12 / 1e6  # 1,000 triples of 10 negatives of 20 numbers, 12 operations each
ROW_SECONDS = ROW_PASSES * 10 * 80 / 1e6  # a row of 20 numbers in each of 10 batches
FAST_MEMORY, FAST_PRODUCTS = Rates(1e6, 1e30), Rates(1e30, 1e6)


def seconds(rates: Rates, *settings: str, num_parts: int = 1, num_trainers: int = 1) -> float:
    config = load_config(None, ["dataset=x", "training.batch_size=100", "negatives.num_uniform=10",
                                "negatives.chunk_size=100", "model.dimension=20", *settings])  # fmt: skip
    size = DatasetSize((PartSize({"entity": 50, "relation": 2}, 500),) * num_parts, {"train": 1000})
    return epoch_seconds(config, size, num_trainers, rates)


def test_products_alone_and_rows_alone() -> None:
    assert seconds(FAST_MEMORY) == pytest.approx(PRODUCT_SECONDS)
    assert seconds(FAST_MEMORY, num_parts=2) == pytest.approx(PRODUCT_SECONDS / 2)
    assert seconds(FAST_MEMORY, "negatives.num_for_heads=0") == pytest.approx(PRODUCT_SECONDS / 2)
    # Each of 20 numbers of a score is 20 products and sums, and a third of the matmuls is done again.
    projected = seconds(FAST_MEMORY, "model.score_function=transr")
    assert projected == pytest.approx(PRODUCT_SECONDS * 20 * 4 / 3)
    # 2 x 100 entities, 10 negatives of each trainer, and 100 relations of two rows.
    assert seconds(FAST_PRODUCTS) == pytest.approx(ROW_SECONDS * (210 + 200))
    assert seconds(FAST_PRODUCTS, num_trainers=2) == pytest.approx(ROW_SECONDS * (220 + 200))
    # Rows of two relations of 400 numbers each.
    matrices = seconds(FAST_PRODUCTS, "model.score_function=rescal")
    assert matrices == pytest.approx(ROW_SECONDS * (210 + 100 * 40))
    # Distances without products cost memory.
    assert seconds(FAST_PRODUCTS, "model.score_function=rotate") > seconds(FAST_PRODUCTS)


PART = PartSize({"person": 1000, "place": 100, RELATION: 5}, 0)
ONE_TYPE, TWO_TYPES = [("person", "person")], [("person", "person"), ("person", "place")]
ROW_BYTES = 4 * (8 + 8)  # eight numbers and Adagrad's sums


def small_config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", "model.dimension=8", *settings])


def test_four_ranges_fit_at_once() -> None:
    """Those of the pair, the one that comes and the one that goes; one range fewer would not fit."""
    for budget_rows in (999, 400):
        number = propose_ranges(small_config(), PART, ONE_TYPE, budget_rows * ROW_BYTES)
        assert number is not None and 4 * -(-1000 // number) <= budget_rows < 4 * -(-1000 // (number - 1))
    for budget_rows in (15, 11):  # of at most 256 ranges
        assert propose_ranges(small_config(), PART, ONE_TYPE, budget_rows * ROW_BYTES) is None
    assert propose_ranges(small_config(), PART, ONE_TYPE, 1000 * ROW_BYTES) == 1  # everything fits
    assert propose_ranges(small_config(), PART, TWO_TYPES, 1000 * ROW_BYTES) != 1


def test_an_epoch_reads_the_ranges_of_its_loads() -> None:
    """Memory for two ranges: 1 + P (P - 1) / 2 loads of a P-th of the table each."""
    for num_ranges in (2, 5, 10):
        budget = 2 * 1000 // num_ranges * ROW_BYTES
        plan = plan_ranges(small_config(), PART, ONE_TYPE, num_ranges, budget)
        loads = 1 + num_ranges * (num_ranges - 1) // 2
        assert plan.loads == loads
        assert plan.read_bytes == plan.written_bytes == loads * 1000 // num_ranges * ROW_BYTES
        assert plan.table_bytes == 1000 * ROW_BYTES
        everything = plan_ranges(small_config(), PART, ONE_TYPE, num_ranges, 1000 * ROW_BYTES)
        assert (everything.loads, everything.read_bytes) == (num_ranges, 1000 * ROW_BYTES)
        walk = small_config("sampling.bucket_order=random")
        assert plan_ranges(walk, PART, ONE_TYPE, num_ranges, budget).loads >= loads


def test_types_are_counted_apart() -> None:
    """Two ranges of each type, one more of each that comes, and one that goes."""
    for buckets, pair_rows in (("mixed", 4 * 550), ("directed", 500 + 550 + 2 * 550)):
        narrow = small_config("optimizer.name=row_adagrad", f"sampling.buckets={buckets}")
        plan = plan_ranges(narrow, PART, TWO_TYPES, 2, 10**9)
        assert plan.read_bytes == 1100 * 4 * (8 + 1) and plan.loads == 4
        assert plan.pair_bytes == 4 * (8 + 1) * pair_rows
        # And the triples of two buckets, of 20 bytes each: all of the one mixed bucket, or of two in four.
        plan = plan_ranges(narrow, dataclasses.replace(PART, num_edges=1000), TWO_TYPES, 2, 10**9)
        num_triples = {"mixed": 2000, "directed": 500}[buckets]
        assert plan.pair_bytes == 4 * (8 + 1) * pair_rows + 20 * num_triples
    # The budget is what other items leave.
    memory = (("tables", 1000), ("optimizer state", 1000), ("names", 30), ("interpreters and libraries", 70))
    host = PlannedHost(0, memory, 0, 70, 0, 0)
    assert [range_budget(host, total) for total in (500, 50)] == [400, 0]


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Path:
    describe(monkeypatch, num_triples=4_000_000)
    return toy_dataset()


def describe(monkeypatch: pytest.MonkeyPatch, num_triples: int) -> None:
    description = {"splits": {"train": num_triples}, "entity_types": {"person": 4_000, "place": 6_000}}
    monkeypatch.setattr(defaults, "read_description", lambda _: description)


DEFAULTS = {"training.num_epochs": "12", "training.averaging": "4.0", "training.batch_size": "500",
            "optimizer.lr": "0.2", "regularizer.weight": "0.04"}  # fmt: skip


def defaults_of(dataset: Path, *overrides: str) -> dict[str, str]:
    """Return the adapted settings by key; all of them can be loaded."""
    settings = adapted(None, overrides, dataset)
    load_config(None, [*overrides, f"dataset={dataset}", *settings])
    return dict(setting.split("=", 1) for setting in settings)


def test_what_is_not_given_follows_the_size(dataset: Path, tmp_path: Path, monkeypatch) -> None:
    assert defaults_of(dataset) == DEFAULTS
    assert defaults_of(dataset, "model.score_function=distmult", "model.dimension=8") == DEFAULTS
    some = defaults_of(dataset, "training.num_epochs=5", "training={batch_size: 100}", "optimizer.lr=0.1")
    assert some.keys() == {"training.num_epochs", "training.averaging", "regularizer.weight"}
    some = defaults_of(dataset, "training.num_epochs=5", "optimizer.lr=0.1", "regularizer.weight=0")
    assert some.keys() == {"training.batch_size", "training.averaging"}
    assert adapted(str(tmp_path / "my.yaml"), [], dataset) == []
    assert adapted(None, [], tmp_path / "elsewhere") == []
    # Nothing is chosen where the rule was not tried.
    others = (
        "model.score_function=transe_l2 loss.name=bce training.objective=one_vs_all tables.storage=device "
    )
    others += "optimizer.name=sparse_adam regularizer.name=n3 regularizer=none model.global_vectors=true"
    assert [defaults_of(dataset, other) for other in others.split()] == [{}] * 8
    describe(monkeypatch, num_triples=10**7 + 1)  # large graphs
    assert defaults_of(dataset) == {}


def test_epochs_fall_with_the_fourth_root_of_triples_and_weights_grow_with_the_root_of_entities() -> None:
    assert [num_epochs(count) for count in (1600, 16 * 1600, 10**6, 10**7)] == [87, 43, 17, 10]
    weights = [regularizer_weight(count) for count in (14, 135, 2034, 14_541, 40_943, 10**7)]
    assert weights == [0.01, 0.01, 0.018, 0.0482, 0.05, 0.05]


def test_trainers_of_a_batch() -> None:
    for settings, expected in (
        (["training.batch_size=1000"], 2),
        (["training.batch_size=100"], 2),
        (["training.batch_size=1500", "negatives.chunk_size=1500"], 3),
        (["training.batch_size=1000", "negatives.chunk_size=150"], 7),
        (["training.batch_size=10000", "negatives.chunk_size=50"], 8),
        (["training.batch_size=1000", "model.score_function=transe_l1"], 8),
        (["training.batch_size=1000", "training.kernels=reference"], 8),
        (["training.batch_size=1000", "training.objective=one_vs_all"], 8),
    ):
        config = load_config(None, ["dataset=x", "negatives.chunk_size=1000", *settings])
        part = PartSize({"entity": 50, "relation": 2}, 500)
        assert most_trainers(config, DatasetSize((part,), {"train": 1000})) == expected
    # A batch is shared by the machines, and typed graphs have a trainer for each core.
    config = load_config(None, ["dataset=x", "training.batch_size=6000", "negatives.chunk_size=1000"])
    for nodes, expected in (({"a": 50, "relation": 2}, 6), ({"a": 5, "b": 5, "relation": 2}, 8)):
        assert most_trainers(config, DatasetSize((PartSize(nodes, 500),) * 2, {"train": 1})) == expected
