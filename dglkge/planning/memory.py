"""Memory and disk that a configuration needs on each machine: arithmetic only, nothing is started.

The estimates are the constants below; ``benchmarks/memory_plan.py`` compares
the sum with the peak of a running job (proportional set size of all its processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dglkge.config import Config
from dglkge.data import dataset_files
from dglkge.data.dataset_files import TRAIN, VALID, DatasetSize, PartSize
from dglkge.distributed.jobs import human_bytes as readable
from dglkge.model.choices import NO_TRANSFORM
from dglkge.planning import shared_memory as shared
from dglkge.planning.host import SHARED_MEMORY_FOLDER, HostMemory
from dglkge.registry import registry_of
from dglkge.typing import DEVICE_STORAGE, RELATION, STAGED_CPU_DEVICE

MIB = 2**20
LAUNCHER_BYTES, NODE_PROGRAM_BYTES = 13 * MIB, 32 * MIB
TRAINER_BYTES, SERVER_BYTES, LIBRARY_BYTES = 255 * MIB, 183 * MIB, 175 * MIB
"""Memory of processes before they have any data, and files of the libraries, which all map."""

SERVER_BYTES_PER_EDGE = 30
"""Server heap after loading a partition's graph, apart from shared memory."""

NAME_BYTES = 8
"""Bytes of memory for each name in a mapped file: where it ends."""

KNOWN_TRIPLE_BYTES = 16
"""Bytes of the index of known answers per triple: 8 in each direction, in a file that all trainers map."""

KNOWN_SORT_BYTES, KNOWN_CHUNK_BYTES = 8, 64 * MIB
"""Private memory of the trainer that builds it: per triple of the largest relation, and of a chunk."""

EDGE_BYTES = 12
"""Bytes of an edge on a device that draws its batches."""

SPARE_SHARE = 1.125
"""Buffers are allocated an eighth larger than requested."""

KEPT_SCORE_BYTES = 256 * MIB
"""Limit of the scores against all candidates that a trainer keeps; others are computed twice."""

DEVICE_BLOCK_NUMBERS = 1 << 26
"""Scores against all candidates, or numbers in their place, that a device holds for each operation."""

DEVICE_DISTANCE_NUMBERS = 1 << 25
"""Differences of pairs on a device at a time where no matmul gives a score (``functions/autograd.py``)."""

KEPT_ROW_BYTES = 2**30
"""Limit of the candidates' rows that stay on a device during a step; others are copied twice."""

KEPT_SHARES = 1 << 32
"""Scores of a batch against all candidates up to which a device keeps their shares in the softmax."""

RANKED_ROW_BYTES = 4 * 2**30
"""Limit of the rows that are on a device during a ranking (``evaluation/evaluator.py``)."""

RANKED_CANDIDATES = 8192
"""Candidates that a device ranks at a time (``evaluation/ranking.py``)."""

ROWS_A_PANEL = 8192
"""Candidates that a trainer scores at a time, against the queries of a whole batch."""

QUERY_COPIES = 8
"""Copies of all trainers' queries: messages out and in, operands of matmuls, and gradients likewise."""

QUERY_INDEX_BYTES, PAIR_INDEX_BYTES = 64, 64
"""Bytes per training triple under k_vs_all on each trainer: its two queries and their answers, and its pair
of entities where relations are predicted, while they are sorted."""

OWN_INDEX_BYTES = 40
"""Bytes per training triple of an index that is not mapped from the data set's folder: a copy of the triple
and its two answers."""

DEGREE_BYTES = 48
"""Bytes of ``negatives.degree_power`` per entity: its degree, its weight, three sums and a temporary copy."""

ORDER_ROW_BYTES = 4
"""Bytes of a machine's order per triple, where edge sets or held-out triples leave some of them out."""

TRIPLE_IN_MEMORY_BYTES = 72
"""Bytes of a held-out triple of buckets on each trainer: three ids of 64 bits, and copies to sort them."""

CHAIN_BYTES_PER_ROW = 128
"""Bytes of the optimizer's ids, hash table and chains, per row with a gradient in every batch."""

AUTOGRAD_SCORES = 6
"""Copies of the scores that are alive at once where torch's autograd computes the loss."""

DENSE_BYTES = 40
"""Bytes of a dense parameter on each trainer: value, gradient and two numbers of an optimizer such as Adam in
float32; in float64 the gradient and its sum over the trainers, and a temporary copy of either."""

DENSE_WHOLE_BYTES, DENSE_SLICE_BYTES = 12, 32
"""The same where ``dense.sharding`` is fsdp. Of the whole: value and gradient during a batch, and the memory
that slices are gathered in. Of a trainer's slice: value, gradient, two numbers of the optimizer, in float64
the sum over the trainers, and a temporary copy."""

FSDP_BYTES = 44 * MIB
"""Memory that a trainer takes to import FSDP2 (torch 2.13)."""

DENSE_BLOCK_NUMBERS = 1 << 20
"""Numbers of gradients that are sent to each trainer at a time then (``dense_shards.py``)."""
AUTOCAST_BYTES = 4
"""Bytes of a dense parameter under autocast beside these: its copy of 16 bits and the gradient of that."""

DENSE_STORED_BYTES = 12
"""Bytes of a dense parameter in a version: its value and two numbers of the optimizer."""

MODULE_ROWS = 256
"""Queries that a module computes at a time in a ranking (``model/dense_modules.py``)."""

RANKING_TILE_BYTES = 8 * MIB
"""A tile of scores and a tile of candidates of the ranking."""

RANKED_QUERY_NUMBERS = 4
"""Float64 rows for each query that is ranked: anchors, relations, truths and the query itself."""


HELD_OUT_NUMBERS = 1 << 22
"""Numbers that the ranking of held-out triples compares at a time (``training/statistics/held_out.py``)."""

COMPARED_COPIES = 3
"""Copies of them that are alive at once: a difference, its modulus and what is summed."""

RANKED_WIDE_COPIES = 3
"""Copies of queries that are wider than a row: the queries, by true answer, and in float32."""


class PlannedHost(NamedTuple):
    """Memory and disk that one machine needs.

    Attributes
    ----------
    memory : tuple of (what, bytes)
        Everything in memory, shared memory included; the sum is the peak.
    shared_memory_bytes : int
        The part of it that lies in ``/dev/shm``; 0 for a process alone, whose tables are its own memory.
    base_bytes, mapped_bytes : int
        The parts of it that are interpreters and libraries, and files only mapped, which the system may drop.
    disk_bytes : int
        Files of this machine's share of the checkpoint, while a new version is written beside the old one.
    structure_bytes : int
        The part of what lies in ``/dev/shm`` that stays there where tables are files.
    device_bytes : int
        Memory of a GPU that one trainer takes there, if it has one, without that of CUDA itself.
    file_bytes : int
        The part of the memory that is mapped files where tables are files.
    """

    machine: int
    memory: tuple[tuple[str, int], ...]
    shared_memory_bytes: int
    base_bytes: int
    mapped_bytes: int
    disk_bytes: int
    structure_bytes: int = 0
    device_bytes: int = 0
    file_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Peak of all processes of the job on this machine, in bytes."""
        return sum(num_bytes for _, num_bytes in self.memory)

    def needed_bytes(self, in_files: bool) -> int:
        """Return the memory that must be free: the peak without mapped files.

        The system drops or writes out their pages when memory is short. `in_files`: tables are files.
        """
        return self.memory_bytes - self.mapped_bytes - (self.file_bytes if in_files else 0)


def plan_memory(config: Config, size: DatasetSize, num_trainers: int, num_servers: int) -> list[PlannedHost]:
    """Plan every machine of a job by its number; without servers it is one process alone, and no launcher."""
    machines = range(len(size.parts))
    return [_plan_host(machine, config, size, num_trainers, num_servers) for machine in machines]


def _plan_host(
    machine: int, config: Config, size: DatasetSize, num_trainers: int, num_servers: int
) -> PlannedHost:
    """Plan one machine."""
    part = size.parts[machine]
    table_bytes, state_bytes = shared.table_bytes(part, config), shared.state_bytes(part, config)
    graph_bytes = shared.graph_bytes(part)
    world_size = num_trainers * len(size.parts)
    base_bytes = num_trainers * TRAINER_BYTES + num_servers * SERVER_BYTES + LIBRARY_BYTES
    base_bytes += LAUNCHER_BYTES + NODE_PROGRAM_BYTES if num_servers else 0
    features = features_bytes(config, size)
    mapped = mapped_bytes(part, size) + features
    # The background writer saves a copy of rows and state, so that training can change the originals.
    copy_bytes = table_bytes + state_bytes if saves_in_background(config) else 0
    work = num_trainers * max(batch_bytes(config, size, world_size), held_out_bytes(config))
    work = max(work, num_trainers * ranking_bytes(config, size) + ranked_copy_bytes(config, part))
    on_device = device_bytes(config, size, machine, world_size)
    # The stand-in's device is the host.
    work += num_trainers * on_device if config.training.device == STAGED_CPU_DEVICE else 0
    exchange = num_trainers * exchange_bytes(config, size, world_size)
    dense = shared.dense_numbers(config)
    # One trainer of the job copies what it writes, to memory or to a file that is mapped.
    stored = DENSE_STORED_BYTES * dense * (machine == 0)
    dense_bytes = num_trainers * dense_trainer_bytes(config, dense, world_size) + stored
    known = known_bytes(config, size) + num_trainers * negatives_bytes(config, size)
    # Each figure is a peak by itself, and the sum takes them as simultaneous, except batches and ranking,
    # which never are (`work` is the larger one).
    memory = (
        ("tables", table_bytes),
        ("optimizer state", state_bytes),
        ("graph of DGL's servers", graph_bytes if num_servers else 0),
        ("server heap after loading the graph", num_servers * SERVER_BYTES_PER_EDGE * part.num_graph_edges),
        ("edges and ids, mapped files", mapped - features),
        ("features, mapped files", features),
        ("batches and ranking", work),
        ("exchange between trainers", exchange),
        ("dense parameters", dense_bytes),
        ("rows of edge sets", num_trainers * order_bytes(config, part, len(size.parts))),
        ("known answers and degrees", known),
        ("names", NAME_BYTES * num_entities_of(size)),
        ("checkpoint's background copy", copy_bytes),
        ("interpreters and libraries", base_bytes),
    )
    in_shared_memory = table_bytes + state_bytes + graph_bytes if num_servers else 0
    structure = shared.graph_bytes(part, shared.STRUCTURE) if num_servers else 0
    # A process alone has the graph in memory of its own.
    in_files = in_shared_memory - structure if num_servers else table_bytes + state_bytes
    # The new version is written beside the old one, which is dropped after it is published; others are kept.
    period = config.checkpoint.keep_every_epochs
    versions = 2 + (config.training.num_epochs // period if period else 0) + config.checkpoint.keep_best
    # Files have float32 whatever the type of the tables.
    file_bytes = shared.table_bytes(part, config.changed(tables=config.tables.changed(dtype="float32")))
    disk_bytes = versions * (file_bytes + state_bytes + stored) + features
    # The slices are joined in a file of their own before they are written.
    disk_bytes += stored * (config.dense.sharding == "fsdp")
    return PlannedHost(
        machine, memory, in_shared_memory, base_bytes, mapped, disk_bytes, structure, on_device, in_files
    )


def dense_trainer_bytes(config: Config, count: int, world_size: int) -> int:
    """Return the memory of a trainer for so many dense parameters, their gradients and optimizer's state."""
    casts = AUTOCAST_BYTES * count if config.dense.autocast != "none" else 0
    if config.dense.sharding != "fsdp" or world_size == 1:
        return casts + DENSE_BYTES * count
    if not count:
        return 0
    # A message out and one in.
    messages = 2 * shared.FLOAT_BYTES * min(count, world_size * DENSE_BLOCK_NUMBERS)
    slices = DENSE_SLICE_BYTES * -(-count // world_size)
    return casts + FSDP_BYTES + DENSE_WHOLE_BYTES * count + slices + messages


def saves_in_background(config: Config) -> bool:
    """Return whether versions are written from a copy of rows and state in memory while training goes on.

    Tables on a disk are, where that was chosen, too large for a copy in memory: training waits.
    """
    return config.checkpoint.background and config.tables.storage != "disk"


def batch_rows(config: Config, world_size: int, size: DatasetSize | None = None) -> tuple[int, int]:
    """Return the numbers of rows of entities and of relations that a trainer reads for one batch.

    The size of the data set matters only where the negatives are all entities.
    """
    share = -(-config.training.batch_size // world_size)
    counts = negatives_per_side(config, size)
    # Sides with equally many negatives share them, unless each has those of its range.
    drawn = counts if config.sampling.has_directed_buckets else set(counts)
    num_machines = 1 if size is None else len(size.parts)
    return 2 * share + _num_chunks(config, num_machines) * sum(drawn), share


def batch_row_bytes(config: Config, size: DatasetSize, world_size: int) -> int:
    """Return the bytes of the rows that a trainer holds for one batch, as float32.

    Where a relation's row is a matrix (RESCAL) or is multiplied by a core (TuckER), a group of triples has
    that of each relation once; else there is one for each triple.
    """
    num_entities, num_relations = batch_rows(config, world_size, size)
    if shared.configured_score_function(config).shares_relations:
        # Queries of k_vs_all are in groups by side.
        num_groups = max(2, _num_chunks(config, len(size.parts)))
        num_relations = min(num_relations, num_groups * size.num_rows[RELATION])
    numbers = num_entities * config.model.dimension + num_relations * shared.row_width(RELATION, config)
    return shared.FLOAT_BYTES * numbers


def negatives_per_side(config: Config, size: DatasetSize | None = None) -> list[int]:
    """Return the number of negatives of a query for each side that is trained; none if they are not drawn."""
    counts = [count for count in config.negatives.per_side.values() if count and is_sampled(config)]
    if size is not None and config.negatives.takes_all:
        # The largest type: an upper bound where types differ in size.
        return [max(count for table, count in size.num_rows.items() if table != RELATION)] * len(counts)
    return counts


def is_sampled(config: Config) -> bool:
    """Return whether answers are scored against sampled negatives, not against all candidates."""
    return not config.training.objective.over_all


def num_entities_of(size: DatasetSize | PartSize) -> int:
    """Return the rows of all entity types."""
    return sum(count for table, count in size.num_rows.items() if table != RELATION)


def candidate_rows(config: Config, size: DatasetSize, world_size: int) -> dict[str, int]:
    """Return the rows that one trainer scores against the queries of all, by table; none with negatives."""
    trainers = world_size // len(size.parts)
    scores_relations, scores_entities = config.training.relation_prediction > 0, not is_sampled(config)
    # The largest part, divided among the trainers of its machine.
    return {
        table: -(-max(part.num_rows[table] for part in size.parts) // trainers)
        for table in size.num_rows
        if (scores_relations if table == RELATION else scores_entities)
    }


def candidate_bytes(config: Config, size: DatasetSize, world_size: int) -> int:
    """Return the memory in which one trainer scores its rows against the queries of all trainers."""
    owned = candidate_rows(config, size, world_size)
    if not owned:
        return 0
    rows = sum(owned.values())
    numbers = sum(count * shared.row_width(table, config) for table, count in owned.items())
    # "auto" is not decided yet when a plan is made: float32 is the upper bound.
    number_bytes = 2 if config.training.matmul_dtype == "bfloat16" else shared.FLOAT_BYTES
    operands = numbers * number_bytes if number_bytes < shared.FLOAT_BYTES else 0
    # Dropout changes a copy of the candidates, to which features and global vectors are added, and rows of
    # 16 bits are widened.
    is_copied = drops_rows(config) or config.tables.dtype != "float32"
    is_copied = is_copied or config.model.global_vectors or config.features is not None
    operands += numbers * shared.FLOAT_BYTES if is_copied else 0
    num_queries = num_candidate_queries(config)
    queries = QUERY_COPIES * num_queries * shared.query_dim(config) * shared.FLOAT_BYTES
    scores = num_queries * rows * number_bytes
    # What is above the limit is computed twice, panel by panel, in the memory of one.
    if scores > KEPT_SCORE_BYTES and rows > ROWS_A_PANEL:
        scores = KEPT_SCORE_BYTES + num_queries * ROWS_A_PANEL * number_bytes
    gradients = numbers * shared.FLOAT_BYTES + CHAIN_BYTES_PER_ROW * rows
    index = 0
    if config.training.objective.by_queries:
        # Held-out triples are none of its answers, so that each trainer makes an index of its own.
        index_copy = OWN_INDEX_BYTES if config.evaluation.held_out is not None else 0
        pair_index = PAIR_INDEX_BYTES if RELATION in owned else 0
        index = (QUERY_INDEX_BYTES + pair_index + index_copy) * size.splits[TRAIN]
    return int(SPARE_SHARE * (operands + queries + scores + gradients)) + index


def device_bytes(config: Config, size: DatasetSize, machine: int, world_size: int) -> int:
    """Return the memory of a GPU that a trainer of a machine takes, without that of CUDA itself."""
    dim, num_relations = config.model.dimension, batch_rows(config, world_size, size)[1]
    # Distinct rows, rows by place, and the gradients of both.
    rows = 4 * batch_row_bytes(config, size, world_size)
    counts = negatives_per_side(config, size)
    scores = AUTOGRAD_SCORES * num_relations * sum(counts) * shared.FLOAT_BYTES
    # Queries of both sides and their gradients.
    queries = 4 * num_relations * shared.query_dim(config) * shared.FLOAT_BYTES
    batch = int(SPARE_SHARE * rows) + scores + queries + device_candidate_bytes(config, size, world_size)
    if shared.configured_score_function(config).memory_passes:
        pairs = min(num_relations, config.negatives.chunk_size) * max(counts, default=0)
        # Differences, and half as many moduli and weights each.
        batch += 2 * shared.FLOAT_BYTES * min(DEVICE_DISTANCE_NUMBERS, pairs * dim)
    shard = 0
    if config.tables.storage == DEVICE_STORAGE:
        # Rows that are given to others and that come, and gradients alike; rows and state while they are
        # updated.
        shard = device_shard_bytes(config, size, machine, world_size)
        batch += 2 * rows
        if world_size == 1 and is_sampled(config):
            shard += EDGE_BYTES * size.splits[TRAIN]
    if not config.evaluation.ranks_splits:
        return shard + batch
    tables = dim * shared.FLOAT_BYTES * num_entities_of(size.parts[machine])
    # A row of scores for each true answer of a batch, its copy in their order, and what is compared.
    tile = 3 * shared.FLOAT_BYTES * config.evaluation.batch_size * RANKED_CANDIDATES
    ranked = 8 * RANKED_QUERY_NUMBERS * dim * config.evaluation.batch_size
    return shard + max(batch, min(tables, RANKED_ROW_BYTES) + tile + ranked)


def device_shard_bytes(config: Config, size: DatasetSize, machine: int, world_size: int) -> int:
    """Return the memory of a GPU for the rows and the optimizer state that a trainer holds there."""
    part, trainers = size.parts[machine], world_size // len(size.parts)
    widths = {table: shared.row_width(table, config) for table in part.num_rows}
    return shared.FLOAT_BYTES * sum(
        -(-count // trainers) * (widths[table] + sum(shared.state_widths(widths[table], config, table)))
        for table, count in part.num_rows.items()
    )


def device_candidate_bytes(config: Config, size: DatasetSize, world_size: int) -> int:
    """Return the memory of a GPU in which a trainer scores its rows against the queries of all trainers."""
    num_rows = candidate_rows(config, size, world_size)
    if not num_rows:
        return 0
    num_queries = num_candidate_queries(config)
    numbers = sum(count * shared.row_width(table, config) for table, count in num_rows.items())
    owned = numbers * shared.FLOAT_BYTES
    block = min(num_queries * max(num_rows.values()), DEVICE_BLOCK_NUMBERS) * shared.FLOAT_BYTES
    queries = 2 * num_queries * shared.query_dim(config) * shared.FLOAT_BYTES
    # Gradients of a block's rows are at most as many as its rows. Where tables are on the device, a single
    # trainer copies rows, others for dropout; gradients of all are kept, and their sums.
    rows = 2 * min(owned, KEPT_ROW_BYTES)
    if config.tables.storage == DEVICE_STORAGE:
        num_shares = num_queries * max(num_rows.values())
        queries += num_shares * shared.FLOAT_BYTES if num_shares <= KEPT_SHARES else 0
        rows = 3 * owned
    return rows + queries + AUTOGRAD_SCORES * block


def num_candidate_queries(config: Config) -> int:
    """Return the number of a batch's queries against all candidates: two of a triple for each kind."""
    kinds = int(not is_sampled(config)) + int(config.training.relation_prediction > 0)
    return 2 * kinds * config.training.batch_size


def negatives_bytes(config: Config, size: DatasetSize) -> int:
    """Return the memory in which one trainer keeps what its negatives are drawn and masked by."""
    # Every sampler of a side has its own sums.
    counts = negatives_per_side(config)
    num_samplers = len(counts if config.sampling.has_directed_buckets else set(counts))
    return num_samplers * DEGREE_BYTES * num_entities_of(size) * bool(config.negatives.power)


def known_bytes(config: Config, size: DatasetSize) -> int:
    """Return the memory of the index of known answers, once for a machine, and of building it.

    The relation of most triples may have all of them: what sorting it takes is an upper bound.
    """
    if config.evaluation.ranks_splits and config.evaluation.filtered:
        num_triples, largest = sum(size.splits.values()), max(size.splits.values())
    elif is_sampled(config) and config.negatives.mask_known:
        num_triples = largest = size.splits[TRAIN]
    else:
        return 0
    chunk_bytes = min(KNOWN_CHUNK_BYTES, 64 * largest)
    return KNOWN_TRIPLE_BYTES * num_triples + KNOWN_SORT_BYTES * largest + chunk_bytes


def batch_bytes(config: Config, size: DatasetSize, world_size: int) -> int:
    """Return the working memory of one trainer: rows, their gradients, queries and scores."""
    dim, num_relations = config.model.dimension, batch_rows(config, world_size, size)[1]
    rows = 2 * batch_row_bytes(config, size, world_size)
    # Of the side with more of them, and of both sides together.
    counts = negatives_per_side(config, size)
    num_negatives, num_scored = max(counts, default=0), sum(counts)
    in_chunk = min(num_relations, config.negatives.chunk_size)
    number_bytes = 2 if config.training.matmul_dtype == "bfloat16" else shared.FLOAT_BYTES
    operands = number_bytes * 2 * dim * (2 * in_chunk + num_negatives)
    scores = in_chunk * num_scored * number_bytes
    # Autograd keeps whole score matrices of all chunks until the backward pass, in float32, and rows are
    # copied; compiled loops need one group at a time and read rows in place.
    if not is_compiled(config):
        scores = AUTOGRAD_SCORES * num_relations * num_scored * shared.FLOAT_BYTES
    # Dropout copies them too; queries that torch differentiates are of copies; rows of 16 bits are widened.
    reads_in_place = is_compiled(config) and shared.configured_score_function(config).compiled
    if not reads_in_place or drops_rows(config) or config.tables.dtype != "float32":
        operands += rows
        # Queries that are wider than a row, and their gradients, on both sides.
        operands += 4 * num_relations * (shared.query_dim(config) - dim) * shared.FLOAT_BYTES
        # What a module keeps of the queries of both sides, and the gradients of its last layers.
        operands += 3 * num_relations * shared.query_numbers(config) * shared.FLOAT_BYTES
    return int(SPARE_SHARE * (rows + operands + scores)) + candidate_bytes(config, size, world_size)


def drops_rows(config: Config) -> bool:
    """Return whether batches train copies of rows with some of their numbers dropped or changed."""
    model = config.model
    return model.entity_dropout > 0 or model.relation_dropout > 0 or model.row_transform.name != NO_TRANSFORM


def is_compiled(config: Config) -> bool:
    """Return whether the compiled training step computes the loss, without autograd."""
    made = shared.configured_score_function(config)
    is_product = made.is_product and not made.has_module and not made.shares_relations
    has_loops = (made.compiled or is_product) and registry_of("loss").get(config.loss.name).compiled
    reads_rows = not config.model.global_vectors and config.features is None
    return bool(has_loops) and reads_rows and config.training.kernels == "auto"


def exchange_bytes(config: Config, size: DatasetSize, world_size: int) -> int:
    """Return the memory in which one trainer sends gradients to the others and merges received ones."""
    return 0 if world_size == 1 else 2 * batch_row_bytes(config, size, world_size)


def ranking_bytes(config: Config, size: DatasetSize) -> int:
    """Return the memory that one trainer takes to rank a split."""
    if not config.evaluation.ranks_splits:
        return 0
    num_triples = max(size.splits.get(name, 0) for name in (VALID, config.evaluation.split))
    num_queries = min(config.evaluation.batch_size, config.evaluation.max_triples or num_triples)
    dim = config.model.dimension
    wider = RANKED_WIDE_COPIES * (shared.query_dim(config) - dim)
    queries = 8 * (RANKED_QUERY_NUMBERS * dim + wider) * num_queries
    # A module and its layers for these queries in float64, without gradients.
    at_a_time = min(num_queries, MODULE_ROWS)
    queries += 8 * (shared.dense_numbers(config) + shared.query_numbers(config) * at_a_time)
    return queries + RANKING_TILE_BYTES


def held_out_bytes(config: Config) -> int:
    """Return the memory that one trainer takes to rank held-out triples."""
    settings = config.evaluation.held_out
    if settings is None:
        return 0
    num_queries = settings.batch_negatives
    num_candidates = num_queries + settings.uniform_negatives
    width = shared.query_dim(config)
    compared = COMPARED_COPIES * max(HELD_OUT_NUMBERS, num_candidates * width)
    # Rows of both sides, candidates, and their parts before they are joined; queries and relations.
    rows = (2 * num_queries + 2 * num_candidates) * config.model.dimension
    rows += num_queries * (width + shared.row_width(RELATION, config))
    # Scores and their blocks, what is ignored, and the terms of the loss.
    scores = AUTOGRAD_SCORES * num_queries * num_candidates
    return shared.FLOAT_BYTES * (compared + rows + scores)


def features_bytes(config: Config, size: DatasetSize) -> int:
    """Return the bytes of the vectors of all entities, of which each machine maps one copy."""
    features = config.features
    if features is None:
        return 0
    # Here: few runs have features, and numpy, which nothing else needs here, takes a tenth of a second.
    from dglkge.data.vector_files import feature_files, open_vectors

    entity_types = [table for table in size.num_rows if table != RELATION]
    number_bytes = 2 if features.dtype == "float16" else shared.FLOAT_BYTES
    places = (features.names, features.entity_column, features.vector_column)
    return number_bytes * sum(
        open_vectors(source.path, *places).width * sum(size.num_rows[name] for name in source.entity_types)
        for source in feature_files(features.files, entity_types, "features.files")
        # A resume needs no more than the run's copy; training reports a file that is missing.
        if source.path.is_file()
    )


def ranked_copy_bytes(config: Config, part: PartSize) -> int:
    """Return the copy of the machine's rows, with what is added to them, that its trainers rank against."""
    is_changed = config.features is not None or config.model.global_vectors
    if not is_changed or not config.evaluation.ranks_splits:
        return 0
    return num_entities_of(part) * config.model.dimension * shared.FLOAT_BYTES


def mapped_bytes(part: PartSize, size: DatasetSize) -> int:
    """Return the bytes of the data set's files that trainers map: one copy, in the page cache, for all."""
    # On one machine row i of the edges is triple i: the file of triple ids is mapped but never read.
    edge = dataset_files.EDGE_ROW_BYTES + dataset_files.ID_BYTES * (len(size.parts) > 1)
    edge += dataset_files.WEIGHT_BYTES * part.has_weights
    nodes = dataset_files.NODE_MAP_BYTES * sum(size.num_rows.values())
    return edge * part.num_edges + nodes + dataset_files.TRIPLE_BYTES * sum(size.splits.values())


def describe_hosts(hosts: Sequence[PlannedHost]) -> str:
    """Write the plan as plain text, a line for each figure."""
    lines = []
    for host in hosts:
        figures = {
            **{item: num_bytes for item, num_bytes in host.memory if num_bytes},
            "memory, all processes": host.memory_bytes,
            "of this in /dev/shm": host.shared_memory_bytes,
            "disk for the checkpoint": host.disk_bytes,
        }
        lines.append(f"machine {host.machine}:")
        lines += [f"  {item:32}{readable(num_bytes):>10}" for item, num_bytes in figures.items()]
    return "\n".join(lines)


def _num_chunks(config: Config, num_machines: int) -> int:
    """Return the number of chunks that a trainer may have positives of, each with negatives of its own."""
    num_triples = config.training.batch_size
    if config.is_ordered_by_machine(num_machines):
        num_triples = -(-num_triples // num_machines)
    return -(-num_triples // config.negatives.chunk_size)


def order_bytes(config: Config, part: PartSize, num_machines: int) -> int:
    """Return the memory in which one trainer lists the rows that it trains, where they are not a range.

    With the held-out triples of buckets.
    """
    fraction = config.evaluation.held_out_fraction
    is_listed = bool(config.training.edge_sets) or fraction > 0
    listed = ORDER_ROW_BYTES * part.num_edges * (is_listed and config.is_ordered_by_machine(num_machines))
    in_buckets = config.sampling.num_ranges > 1
    return listed + int(TRIPLE_IN_MEMORY_BYTES * fraction * part.num_edges * in_buckets)


def misfits(
    planned: PlannedHost, there: HostMemory, has_started: bool = False, in_files: bool = False
) -> list[str]:
    """Return the resources that a plan exceeds; mapped files can be dropped from memory and do not count.

    Parameters
    ----------
    has_started : bool
        Whether the processes run already, with their interpreters and libraries loaded.
    in_files : bool
        Whether tables are files: only the graph's structure is then in ``/dev/shm``.
    """
    needed = planned.needed_bytes(in_files) - (planned.base_bytes if has_started else 0)
    shared = planned.structure_bytes if in_files else planned.shared_memory_bytes
    job_note = ""
    if there.claims.memory_bytes or there.claims.shared_memory_bytes:
        job_note = f" beside {there.claims.num_jobs} other job(s) (dglkge job list)"
    return [
        f"{readable(num_bytes)} of {resource} are needed and {readable(free)} are there{job_note}"
        for resource, num_bytes, free in (
            ("memory", needed, there.memory_bytes),
            (SHARED_MEMORY_FOLDER, shared, there.shared_memory_bytes),
        )
        if num_bytes > free
    ]
