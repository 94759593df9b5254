"""Configuration schema: each field with its help, default, check and rule for a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional, get_origin, get_type_hints

from dglkge.registry import registry_of
from dglkge.typing import DEVICE_STORAGE, DEVICES, Side

Check = Callable[[Any], Optional[str]]
"""Takes a value; returns None if it is allowed, else a description of the allowed values."""


def at_least(low: float) -> Check:
    """Return a check that a number is at least ``low``."""
    return lambda value: None if value >= low else f"at least {low:g}"


def above(low: float) -> Check:
    """Return a check that a number is greater than ``low``."""
    return lambda value: None if value > low else f"a number above {low:g}"


def at_least_or(special: float, low: float) -> Check:
    """Return a check that a number is a special one or at least ``low``."""
    return lambda value: None if value == special or value >= low else f"{special:g}, or at least {low:g}"


def share_below(high: float) -> Check:
    """Return a check that a number is at least 0 and below ``high``."""
    return lambda value: None if 0 <= value < high else f"at least 0 and below {high:g}"


def one_of(*allowed: Any) -> Check:
    """Return a check that a value is one of a few."""
    return lambda value: None if value in allowed else "one of " + ", ".join(map(str, allowed))


def _is_share(value: float) -> str | None:
    """Check that a share leaves something over."""
    return None if 0 <= value < 1 else "at least 0 and below 1"


def not_empty(value: str) -> str | None:
    """Check that a text is given."""
    return None if value else "a non-empty text"


def data_set_given(value: str) -> str | None:
    """Check that a data set is given."""
    return None if value else "the folder of a data set, which dglkge partition makes of triples"


FIXED = "fixed"
"""The field must have the same value in a resume: another value makes another model."""
UNTIL_FINISHED = "until finished"
"""The field may change while there are epochs left to train; the run's later versions record it."""
FREE = "free"
"""The field may change in every resume: it changes no number of the model."""


def setting(
    default: Any, help: str, check: Check | None = None, resume: str = FIXED, component: str = ""
) -> Any:
    """Declare a field of the configuration.

    Parameters
    ----------
    default : object
    help : str
    check : callable, optional
    resume : str
        Whether the field may change when a run is resumed: :data:`FIXED`, :data:`UNTIL_FINISHED` or
        :data:`FREE`.
    component : str
        For a field that names a component: the noun of its registry (:data:`dglkge.registry.HOMES`). The
        help of the field then lists the registered names.
    """
    metadata = {"help": help, "check": check, "resume": resume, "component": component}
    return dataclasses.field(default=default, metadata=metadata)


def section(of: type, help: str) -> Any:
    """Declare a group of fields."""
    return dataclasses.field(default_factory=of, metadata={"help": help})


@dataclass(frozen=True)
class InitFromConfig:
    """Given vectors as the initial rows of entities."""

    path: str = setting(
        "",
        "file of named vectors (.npy, .parquet, .vec, .txt, .tsv) that entities of a new run start "
        "with, matched by name; entities without one are initialised as usual; empty: none",
    )
    names: str = setting("", "file with a name on each line, of an npy file; empty: x.names.txt beside x.npy")
    entity_column: str = setting("name", "Parquet: column of the names", not_empty)
    vector_column: str = setting("embedding", "Parquet: column of the vectors, lists of numbers", not_empty)
    projection: str = setting(
        "pca",
        "where vectors have another width than dimension: pca (principal axes), or random (Gaussian, seeded)",
        one_of("pca", "random"),
    )
    std: float = setting(
        0.0,
        "root mean square of the vectors' numbers after scaling by one factor; 0: init_scale; -1: no scaling",
        at_least_or(-1, 0),
    )
    frozen: bool = setting(
        False,
        "do not update the rows of entities: only relations are trained; may change in a resume",
        resume=UNTIL_FINISHED,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The score function and the shape of its parameters."""

    score_function: str = setting("complex", "how a triple is scored", component="score function")
    dimension: int = setting(400, "numbers in an entity's row (complex numbers count as two)", at_least(1))
    reciprocal_relations: bool = setting(
        True,
        "a relation row of its own for each side that is predicted (Lacroix et al. 2018); DGL-KE has none: "
        "take false if dglkge export --format dglke is to write the model",
    )
    init_scale: float = setting(1e-3, "standard deviation of the initial rows", above(0))
    p: int = setting(0, "keci: basis vectors of the Clifford algebra with square 1", at_least(0))
    q: int = setting(1, "keci: basis vectors of the Clifford algebra with square -1", at_least(0))
    relation_dimension: int = setting(
        0, "tucker: numbers in a relation's row; 0: as many as in an entity's", at_least(0)
    )
    channels: int = setting(32, "conve, conex: filters of the convolution", at_least(1))
    layers: int = setting(1, "transformer: layers of the encoder", at_least(1))
    heads: int = setting(4, "transformer: heads of the attention", at_least(1))
    entity_dropout: float = setting(
        0.0,
        "share of the numbers of each entity's row that a batch sets to 0; others are divided by 1 - share",
        _is_share,
    )
    relation_dropout: float = setting(0.0, "the same for the rows of relations", _is_share)
    max_norm: float = setting(
        0.0, "greatest length of an entity's row: updates scale longer ones to it; 0: no limit", at_least(0)
    )
    global_vectors: bool = setting(
        False,
        "learn a vector for each entity type that is added to all its rows (PyTorch-BigGraph's global_emb); "
        "takes reciprocal_relations false",
    )
    # Last: `dglkge config` prints sections in the order of their fields.
    init_from: InitFromConfig = section(InitFromConfig, "given vectors as initial rows")


@dataclass(frozen=True)
class LossConfig:
    """The loss of one positive against its negatives."""

    name: str = setting("softmax", "loss of a query", component="loss")
    margin: float = setting(
        1.0,
        "margin of the losses that have one (gamma in DGL-KE; there 6 to 24 is usual)",
        at_least(0),
    )
    adversarial_temperature: float = setting(
        1.0, "factor on the scores in the softmax of a self-adversarial loss's weights", at_least(0)
    )
    adversarial_weights: bool = setting(
        False,
        "weigh the negatives of a query by the softmax of their scores times adversarial_temperature, as the "
        "loss self_adversarial always does (Sun et al. 2019)",
    )
    reduction: str = setting(
        "mean",
        "over the negatives of a query: mean, or sum as in PyTorch-BigGraph's ranking loss",
        one_of("mean", "sum"),
    )
    batch_reduction: str = setting(
        "mean",
        "over the triples (k_vs_all: queries) of a global batch: mean, or sum as in PyTorch-BigGraph",
        one_of("mean", "sum"),
    )
    relation_weights: tuple[str, ...] = setting(
        (),
        "weights of relations, a list of name=weight; others have 1; they multiply the loss and the "
        "regularizer of a triple, as its own weight does",
    )
    confidences: bool = setting(
        False,
        "the weights of the triples are confidences in [0, 1], and the labels of the true answers "
        "(Chen et al. 2019); false: weights multiply losses",
    )


@dataclass(frozen=True)
class RegularizerConfig:
    """The regularizer of the rows of the positives."""

    name: str = setting(
        "auto",
        "penalty on the rows of the positives; auto: dura where the score is an inner product that it is "
        "defined for, else none",
        component="regularizer",
    )
    weight: float = setting(
        -1.0,
        "factor before the regularizer; 0: none is computed; -1: 0.01 where there is a regularizer",
        at_least_or(-1, 0),
    )
    p: float = setting(3.0, "the power of a regularizer that has one", at_least(1))
    entity_ratio: float = setting(1.0, "factor besides weight on the terms of entities", at_least(0))
    relation_ratio: float = setting(1.0, "factor besides weight on the terms of relations", at_least(0))
    product_ratio: float = setting(
        1.0, "dura, ivr: factor besides weight on the terms of products of rows", at_least(0)
    )


@dataclass(frozen=True)
class NegativesConfig:
    """The negatives that each positive is scored against."""

    sampler: str = setting("mixed", "how negatives are drawn", component="negative sampler")
    num_uniform: int = setting(
        1000, "negatives of the right entity type, shared by the positives of a chunk", at_least(1)
    )
    num_for_heads: int = setting(
        -1, "negatives of (?, r, t); -1: num_uniform; 0: heads are not predicted", at_least(-1)
    )
    num_for_tails: int = setting(
        -1,
        "negatives of (h, r, ?); -1: num_uniform; 0: tails are not predicted; both sides share their "
        "negatives where the numbers are equal, and otherwise draw their own",
        at_least(-1),
    )
    global_share: float = setting(
        1.0, "share of them that is uniform over the whole graph; the three shares sum to 1", at_least(0)
    )
    local_share: float = setting(
        0.0, "share that is uniform over the machine's own partition (on one machine: global)", at_least(0)
    )
    in_batch_share: float = setting(
        0.0, "share that is drawn from the entities of the trainer's positives of the chunk", at_least(0)
    )
    chunk_size: int = setting(1000, "positives of a global batch that share their negatives", at_least(1))
    own_entity: bool = setting(
        True, "score the query's own entity as one negative more: (h, r, h) against (h, r, ?)"
    )

    all_entities: bool = setting(
        False,
        "every entity of the type is a negative, without a sampler; training.objective one_vs_all is softmax "
        "or binary cross entropy over the same, at less cost",
    )
    degree_power: float = setting(
        0.0,
        "draw global and local negatives in proportion to this power of their number of training triples "
        "(0.75 in word2vec: Mikolov et al. 2013); 0: uniformly",
        at_least(0),
    )
    mask_known: bool = setting(
        False, "a negative that is a known answer in the training triples does not count"
    )

    @property
    def per_side(self) -> dict[Side, int]:
        """Negatives of a query for each side; 0: the side is not predicted."""
        given = {Side.HEAD: self.num_for_heads, Side.TAIL: self.num_for_tails}
        return {side: self.num_uniform if count < 0 else count for side, count in given.items()}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: str = setting("sparse_adagrad", "update rule of the rows", component="optimizer")
    lr: float = setting(0.1, "learning rate", above(0))
    relation_name: str = setting(
        "",
        "update rule of the relations' rows, for example sparse_adagrad beside row_adagrad for the entities, "
        "as in PyTorch-BigGraph; empty: that of the entities",
    )
    relation_lr: float = setting(0.0, "learning rate of the relations; 0: that of the entities", at_least(0))
    eps: float = setting(
        0.0,
        "number that is added to the root; 0: the rule's own, 1e-10 (Adagrad) or 1e-8 (Adam)",
        at_least(0),
    )
    beta1: float = setting(0.9, "decay of the first moment of Adam", share_below(1))
    beta2: float = setting(0.999, "decay of the second moment of Adam", share_below(1))
    weight_decay: float = setting(
        0.0,
        "multiple of a row that is added to its gradient, as in torch's Adagrad and Adam; rows that a batch "
        "does not touch do not decay",
        at_least(0),
    )
    decoupled_weight_decay: bool = setting(
        False, "multiply a touched row by 1 - lr * weight_decay instead, as torch's AdamW does"
    )
    clip_norm: float = setting(
        0.0,
        "limit of the 2-norm of a batch's gradient, over all rows of all tables and trainers, and dense "
        "parameters; 0: none",
        at_least(0),
    )
    clip_value: float = setting(
        0.0,
        "limit of the size of each number of a row's or dense parameter's gradient, before the norm is "
        "taken; 0: none",
        at_least(0),
    )
    schedule: str = setting(
        "", "class of torch.optim.lr_scheduler that changes the learning rates, e.g. CosineAnnealingLR"
    )
    schedule_options: tuple[str, ...] = setting(
        (), "its options, each a text NAME=VALUE, e.g. [T_max=20, eta_min=0.001]"
    )
    schedule_every: str = setting(
        "epoch",
        "it goes one step further after each epoch, or after each batch; ReduceLROnPlateau after each "
        "ranking of the valid split",
        one_of("epoch", "batch"),
    )
    warmup_batches: int = setting(
        0, "batches in which the learning rates grow linearly to those of the schedule; 0: none", at_least(0)
    )


@dataclass(frozen=True)
class DenseConfig:
    """Dense parameters of score functions with a module: optimizer and place, and the module's precision."""

    optimizer: str = setting("Adam", "class of torch.optim, e.g. Adam, AdamW or SGD", not_empty)
    lr: float = setting(1e-3, "learning rate", above(0))
    options: tuple[str, ...] = setting(
        (), "its options, each a text NAME=VALUE, e.g. [weight_decay=0.01, eps=1e-6]"
    )
    schedule: str = setting(
        "",
        "class of torch.optim.lr_scheduler that changes its learning rate; empty: that of "
        "optimizer.schedule, if there is one",
    )
    schedule_options: tuple[str, ...] = setting(
        (), "its options, each a text NAME=VALUE, e.g. [T_max=20, eta_min=0.001]"
    )
    schedule_every: str = setting(
        "epoch",
        "it goes one step further after each epoch, or after each batch; ReduceLROnPlateau after each "
        "ranking of the valid split",
        one_of("epoch", "batch"),
    )
    sharding: str = setting(
        "replicated",
        "replicated: every trainer holds all of them and the optimizer's state; fsdp: each holds a slice of "
        "both, and gathers the parameters for a batch by FSDP2 (torch 2.6 or later), for the same result",
        one_of("replicated", "fsdp"),
        resume=FREE,
    )
    autocast: str = setting(
        "none",
        "type of the matrix products and convolutions inside the module in training: none (float32), "
        "bfloat16, or float16 with a loss scale, where batches whose gradient overflows are skipped; "
        "parameters, rows, losses and rankings stay as they are",
        one_of("none", "bfloat16", "float16"),
        resume=UNTIL_FINISHED,
    )
    compile: bool = setting(
        False,
        "compile the module by torch.compile for training, which takes a C++ compiler and some seconds when "
        "a job starts",
        resume=UNTIL_FINISHED,
    )


TRIPLE_ORDERS = ("auto", "machine", "global")
"""Orders of the triples on several machines."""


def _are_sizes(value: str) -> str | None:
    """Check that a text has whole numbers above 0."""
    parts = [one.strip() for one in value.split(",")] if value else []
    are_sizes = all(one.isascii() and one.isdigit() and int(one) > 0 for one in parts)
    return None if are_sizes else "whole numbers above 0, separated by commas, e.g. 512,256"


@dataclass(frozen=True)
class FeaturesConfig:
    """Frozen vectors of entities, which a trained projection brings into the model."""

    files: tuple[str, ...] = setting(
        (),
        "files of named vectors (.npy, .parquet, .vec, .txt, .tsv), matched by the entities' names: one for "
        "all entity types, or TYPE=FILE for each type that has vectors; empty: none. A run keeps a copy in "
        "its folder",
    )
    names: str = setting("", "file with a name on each line, of an npy file; empty: x.names.txt beside x.npy")
    entity_column: str = setting("name", "Parquet: column of the names", not_empty)
    vector_column: str = setting("embedding", "Parquet: column of the vectors, lists of numbers", not_empty)
    projection: str = setting(
        "linear",
        "from a vector to a row, of each entity type: linear (a matrix and an offset), or mlp (layers with "
        "an activation between)",
        one_of("linear", "mlp"),
    )
    hidden: str = setting(
        "",
        "mlp: widths of the hidden layers, e.g. 512,256; empty: one as wide as model.dimension",
        _are_sizes,
    )
    activation: str = setting("relu", "mlp: between layers", one_of("relu", "gelu"))
    use: str = setting(
        "added",
        "added: to the trained row of each entity; alone: entities of types with vectors have no trained "
        "rows, and new entities are ranked as these are",
        one_of("added", "alone"),
    )
    dtype: str = setting("float32", "of the numbers in the run's copy", one_of("float32", "float16"))


BUCKET_ORDERS = ("inside_out", "outside_in", "affinity", "random", "hilbert")
"""Walks over the pairs of ranges, see :func:`dglkge.data.range_walk.walk_pairs`."""


MIXED, DIRECTED = "mixed", "directed"
BUCKETS = (MIXED, DIRECTED)
"""What the triples of a bucket are, see :mod:`dglkge.sampling.bucket_batches`."""


@dataclass(frozen=True)
class SamplingConfig:
    """The order of an epoch: by triples alone, by machine, or by pairs of ranges of rows."""

    order: str = setting(
        "auto",
        "order of the triples on several machines: machine (a batch takes a proportional share of each "
        "machine, in its own order and with negatives of its own; cost does not grow with the machines), "
        "global (batches and negatives are the same on any number of machines), auto (machine with sampled "
        "negatives, else global); on one machine they are equal",
        one_of(*TRIPLE_ORDERS),
        resume=UNTIL_FINISHED,
    )
    num_ranges: int = setting(
        1,
        "cut the rows of each entity type on a machine into so many ranges; an epoch walks over pairs of "
        "them, its buckets, and negatives come from the ranges of the pair; for tables larger than memory "
        "(dglkge plan proposes a number); 1: one order of all triples",
        at_least(1),
    )
    buckets: str = setting(
        MIXED,
        "triples of a bucket: mixed (all between two ranges, either way, with a share of those inside each: "
        "ranks better), directed (heads of one range and tails of another, as in PyTorch-BigGraph: half of "
        "the memory where heads and tails are of different types)",
        one_of(*BUCKETS),
    )
    bucket_order: str = setting(
        "inside_out",
        "order of the pairs of ranges: inside_out and outside_in (loads each range the fewest times), "
        "affinity (the next pair shares a range with the last, at random), random, hilbert (a curve)",
        one_of(*BUCKET_ORDERS),
    )

    @property
    def has_directed_buckets(self) -> bool:
        """Whether heads and tails of a bucket are of one range each, and so are their negatives."""
        return self.num_ranges > 1 and self.buckets == DIRECTED


NEGATIVE_SAMPLING = "negative_sampling"
OBJECTIVES = (NEGATIVE_SAMPLING, "one_vs_all", "k_vs_all")


@dataclass(frozen=True)
class TrainingConfig:
    """Epochs, batches, and how trainers work together."""

    objective: str = setting(
        NEGATIVE_SAMPLING,
        "negative_sampling: each answer against sampled negatives; one_vs_all: against all entities of the "
        "type; k_vs_all: all answers of a query at once, a batch being of queries (h, r, ?) and (?, r, t). "
        "The last two take loss.name softmax, or logistic for binary cross entropy, and no negatives",
        one_of(*OBJECTIVES),
    )
    label_smoothing: float = setting(
        0.0,
        "one_vs_all, k_vs_all: share of each label that is spread evenly over all candidates",
        _is_share,
    )
    relation_prediction: float = setting(
        0.0,
        "weight of the loss of (h, ?, t) against all relations (Chen et al. 2021): with sampled negatives a "
        "softmax, in k_vs_all with all relations of the pair at once; 0: none",
        at_least(0),
    )

    num_epochs: int = setting(10, "passes over the training triples", at_least(0), resume=FREE)
    early_stopping_patience: int = setting(
        0,
        "end training after so many rankings of the valid split in a row without a gain in MRR, and restore "
        "the best version at the end; 0: never",
        at_least(0),
        resume=FREE,
    )
    early_stopping_min_gain: float = setting(
        0.0, "smallest gain in valid MRR that counts", at_least(0), resume=FREE
    )
    batch_size: int = setting(
        1000, "triples in a global batch, over all trainers", at_least(1), resume=UNTIL_FINISHED
    )
    kernels: str = setting(
        "auto",
        "auto: compiled loops and gradients written by hand where there are some; reference: autograd and "
        "plain torch and numpy for the loss, the update and the ranking, slower, to compare with",
        one_of("auto", "reference"),
        resume=UNTIL_FINISHED,
    )
    matmul_dtype: str = setting(
        "auto",
        "type of the matmuls that score candidates in training: float32, bfloat16, or auto: the first start "
        "of a run measures if bfloat16 is at least 1.5 times as fast, and its later starts keep that; with "
        "float32 and global negatives the number of trainers changes only the order of sums",
        one_of("auto", "float32", "bfloat16"),
        resume=UNTIL_FINISHED,
    )
    device: str = setting(
        "auto",
        "where losses, gradients and rankings are computed; tables and updates stay in the machine's memory "
        "unless tables.storage is device. "
        "cuda: one GPU for each trainer, given by the launcher; auto: cuda where every trainer has a GPU, "
        "else cpu; cpu_staged: the code of cuda on the CPU, for tests (docs/gpus.md)",
        one_of(*DEVICES),
        resume=FREE,
    )
    compile: bool = setting(
        False,
        "compile scores and losses of sampled negatives by torch.compile; with device cuda or cpu_staged",
        resume=UNTIL_FINISHED,
    )
    synchronous: bool = setting(
        True,
        "trainers wait for one another after each batch; false, on one machine only: they do not (Hogwild), "
        "and runs of several trainers differ from one another",
        resume=UNTIL_FINISHED,
    )
    batch_statistics: bool = setting(
        False,
        "write reg, the regularizer's part of the loss, and violators_lhs and violators_rhs, the mean number "
        "of negatives that score above the true head and the true tail, to stats.jsonl and "
        "training_stats.json",
        resume=FREE,
    )
    profile: bool = setting(
        False,
        "write how long each phase of a batch took, over all trainers, to stats.jsonl once an epoch",
        resume=FREE,
    )
    lookup: str = setting(
        "exchange",
        "selects how remote rows are fetched: by the trainers' own exchange, or by DGL's kvstore",
        one_of("exchange", "kvstore"),
        resume=FREE,
    )
    staleness: int = setting(
        0,
        "1: rows of other machines may be one update old, and travel while the batch before computes",
        one_of(0, 1),
        resume=UNTIL_FINISHED,
    )
    wire: str = setting(
        "float32",
        "type in which rows and gradients travel between machines: float32, or bfloat16 for half the bytes",
        one_of("float32", "bfloat16"),
        resume=UNTIL_FINISHED,
    )
    check_memory: bool = setting(
        True,
        "refuse, before anything is created, a run that does not fit into memory or /dev/shm (dglkge plan)",
        resume=FREE,
    )
    edge_sets: tuple[str, ...] = setting(
        (),
        "names of the data set's edge sets (partition_tools/extend.py), walked in this order in every epoch; "
        "empty: all triples as one set",
    )
    edge_chunks: int = setting(
        1,
        "parts of each edge set in an epoch; if there are several, a version is committed after each",
        at_least(1),
        resume=UNTIL_FINISHED,
    )
    rows: str = setting(
        "all",
        "rows that are trained: all, or touched, which are those in the triples that are trained; others "
        "stay as they are and serve as negatives (see checkpoint.init_path)",
        one_of("all", "touched"),
    )
    loggers: tuple[str, ...] = setting(
        (),
        "a list of trackers of experiments, which get loss, learning rate, speed and metrics; known",
        resume=FREE,
        component="logger",
    )
    progress: str = setting(
        "auto",
        "progress bar: auto (on a terminal), always or never",
        one_of("auto", "always", "never"),
        resume=FREE,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Cadence of checkpoints, and the versions that are kept."""

    every_epochs: int = setting(
        1, "commit after every so many epochs; 0: only after the last", at_least(0), resume=FREE
    )
    every_batches: int = setting(
        0, "commit after every so many batches as well; 0: never", at_least(0), resume=FREE
    )
    every_minutes: float = setting(
        0.0, "commit after every so many minutes as well; 0: never", at_least(0), resume=FREE
    )
    background: bool = setting(
        True,
        "copy the rows and write while training goes on; takes the memory of one copy; not with "
        "tables.storage disk, where training waits",
        resume=FREE,
    )
    keep_every_epochs: int = setting(
        0,
        "keep the version after every so many epochs as checkpoint/epoch_{E}; 0: none",
        at_least(0),
        resume=FREE,
    )
    keep_best: bool = setting(
        False,
        "keep the version with the best valid MRR as checkpoint/best (see valid_every_epochs)",
        resume=FREE,
    )
    fallback: bool = setting(
        False,
        "where the newest version is damaged, go on from the newest good one; reads all its files first",
        resume=FREE,
    )
    storage: str = setting(
        "",
        "URL to which each version is committed as well (s3://bucket/run, file:///disk/run); a folder "
        "without a checkpoint, or with an older one, goes on from there; empty: none",
        resume=FREE,
    )
    init_path: str = setting(
        "",
        "a run or checkpoint, or the URL of one, whose rows a new run starts with, matched by name; "
        "empty: none",
    )


ROW_DTYPES = ("float32", "bfloat16", "float16")
ROUNDINGS = ("stochastic", "nearest")


STORAGES = ("memory", "disk", DEVICE_STORAGE)


@dataclass(frozen=True)
class TablesConfig:
    """Type of the rows of entities, and where a launched job keeps its tables while it trains."""

    dtype: str = setting(
        "float32",
        "type in which rows of entities are stored while they train; bfloat16 and float16 (up to 65504) take "
        "half the memory and half the bytes between machines; relations, optimizer state and checkpoints "
        "stay float32",
        one_of(*ROW_DTYPES),
        resume=UNTIL_FINISHED,
    )
    rounding: str = setting(
        "stochastic",
        "rounding of updated rows of 16 bits: stochastic (the mean is exact; the same in every run and for "
        "any number of trainers), or nearest, which loses steps smaller than half a unit in the last place",
        one_of(*ROUNDINGS),
        resume=UNTIL_FINISHED,
    )

    storage: str = setting(
        "memory",
        "memory: in /dev/shm, or in files where that is too small; disk: in mapped files, for which the page "
        "cache is the memory; device: while a run on one machine trains, rows and optimizer state lie on its "
        "trainers' devices, a share on each, and memory gets them at commits and rankings; it takes "
        "training.device cuda or cpu_staged (docs/gpus.md)",
        one_of(*STORAGES),
        resume=FREE,
    )
    folder: str = setting(
        "",
        "folder of such files, which are removed after the job; empty: the first of $TMPDIR, /tmp and "
        "/var/tmp that has the room",
        resume=FREE,
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """The ranking of the entities."""

    split: str = setting(
        "test", "split ranked after training", one_of("train", "valid", "test", "none"), resume=FREE
    )
    filtered: bool = setting(True, "leave other known answers out of the ranking", resume=FREE)
    num_candidates: int = setting(
        0, "rank against so many sampled entities; 0: all of the type", at_least(0), resume=FREE
    )
    ties: str = setting(
        "realistic", "rank among equal scores", one_of("realistic", "optimistic", "pessimistic"), resume=FREE
    )
    batch_size: int = setting(2048, "queries that a trainer scores at a time", at_least(1), resume=FREE)
    valid_every_epochs: int = setting(
        0, "rank the valid split after every so many epochs; 0: never", at_least(0), resume=FREE
    )
    eval_fraction: float = setting(
        0.0,
        "share of each edge set that is never trained, ranked before and after each pass over a chunk; "
        "0: none",
        _is_share,
    )
    eval_num_batch_negs: int = setting(
        1000, "other answers of so many held-out triples are negatives of each", at_least(1), resume=FREE
    )
    eval_num_uniform_negs: int = setting(
        1000, "uniform negatives of held-out triples", at_least(0), resume=FREE
    )
    max_triples: int = setting(
        0, "rank only the first so many triples of a split; 0: all", at_least(0), resume=FREE
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    dataset: str = setting(
        "", "folder written by dglkge partition or partition.py", data_set_given, resume=FREE
    )
    output: str = setting(
        "runs/default", "folder of the run: checkpoint, statistics, metrics", not_empty, resume=FREE
    )
    seed: int = setting(0, "seed of the order, the negatives and the initial rows", at_least(0))
    imports: tuple[str, ...] = setting(
        (), "modules or .py files of yours that register components, as with --import", resume=FREE
    )
    model: ModelConfig = section(ModelConfig, "score function and dimensions")
    loss: LossConfig = section(LossConfig, "loss")
    regularizer: RegularizerConfig = section(RegularizerConfig, "regularizer")
    sampling: SamplingConfig = section(SamplingConfig, "order of the triples of an epoch")
    negatives: NegativesConfig = section(NegativesConfig, "negatives")
    optimizer: OptimizerConfig = section(OptimizerConfig, "optimizer")
    dense: DenseConfig = section(DenseConfig, "dense parameters")
    features: FeaturesConfig = section(FeaturesConfig, "frozen vectors of entities")
    training: TrainingConfig = section(TrainingConfig, "epochs and batches")
    tables: TablesConfig = section(TablesConfig, "tables during training")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    evaluation: EvaluationConfig = section(EvaluationConfig, "evaluation")

    def is_ordered_by_machine(self, num_machines: int) -> bool:
        """Return whether each machine's triples have an order of their own, without ranges of rows."""
        order = self.sampling.order
        if order == "auto":
            # Against all candidates the order costs next to nothing beside the scores, and exactness is free.
            order = "machine" if self.training.objective == NEGATIVE_SAMPLING else "global"
        return num_machines > 1 and order == "machine" and self.sampling.num_ranges == 1

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dicts and lists, as JSON gives them back."""
        # Lists instead of tuples: refused_changes compares with what JSON gives back.
        found: dict[str, Any] = _with_lists(dataclasses.asdict(self))
        return found


def _with_lists(value: Any) -> Any:
    """Return a nested dict with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _with_lists(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def field_table(of: type = Config, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted key, type, default, help) of every field, in the order of the file.

    The help of a field that names a component ends with the registered names.
    """
    hints = get_type_hints(of)
    for item in dataclasses.fields(of):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from field_table(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            text, component = item.metadata["help"], item.metadata["component"]
            # Registered names are looked up now, not at import: the user's modules may have added some.
            if component:
                text += ": " + ", ".join(registry_of(component))
            yield prefix + item.name, _type_name(kind), item.default, text


def component_fields(of: type = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, noun of the registry) of every field that names a component."""
    hints = get_type_hints(of)
    for item in dataclasses.fields(of):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from component_fields(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        elif item.metadata["component"]:
            yield prefix + item.name, item.metadata["component"]


def _type_name(kind: Any) -> str:
    """Return the name of a field's type, as a YAML file has it."""
    return "list" if get_origin(kind) is tuple else str(kind.__name__)


RENAMED = {"training.products": "training.matmul_dtype"}
"""Former names of fields: files of older runs have them."""


def current_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration, as nested dicts, with the present names of its fields."""
    # Sections are copied: the caller's mapping may be the manifest that is in use.
    renamed = {key: dict(value) if isinstance(value, Mapping) else value for key, value in saved.items()}
    # A present name wins over a former one, if a file has both.
    for old, new in RENAMED.items():
        (section_name, old_name), (_, new_name) = old.split("."), new.split(".")
        fields = renamed.get(section_name)
        if isinstance(fields, dict) and old_name in fields:
            fields.setdefault(new_name, fields.pop(old_name))
    return renamed


def refused_changes(saved: Mapping[str, Any], wanted: Mapping[str, Any], is_finished: bool) -> list[str]:
    """Compare two configurations of one run, as nested dicts; fields that only one of them has are ignored.

    Parameters
    ----------
    saved, wanted : mapping
        The configuration that a version of the run was trained with, and the one to resume with.
    is_finished : bool
        Whether no epoch is left to train.

    Returns
    -------
    list of str
        ``"optimizer.lr was 0.1, is 0.2"`` for each field that may not change.
    """
    changes = []
    saved = current_names(saved)
    for key, resume in _resume_rules(Config, ""):
        old, new = _value(saved, key), _value(wanted, key)
        may_change = resume == FREE or (resume == UNTIL_FINISHED and not is_finished)
        # None: the field is missing on one side, e.g. in a run of an older version.
        if old is not None and new is not None and old != new and not may_change:
            changes.append(f"{key} was {old!r}, is {new!r}")
    return changes


def _resume_rules(of: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, whether it may change in a resume) of every field."""
    hints = get_type_hints(of)
    for item in dataclasses.fields(of):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _resume_rules(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item.metadata["resume"]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None if absent."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def changed_fields(section: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the fields of a section that are not the default; sequences as lists."""
    defaults = type(section)()
    for name, value in vars(section).items():
        if value != getattr(defaults, name):
            yield name, list(value) if isinstance(value, tuple) else value
