"""Configuration schema: each field with its help, default, check and rule for a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, get_args, get_origin

from pydantic import BaseModel, Field, PositiveInt
from pydantic.fields import FieldInfo

import dglkge.settings as settings
from dglkge.model import choices, regularizers
from dglkge.model.losses import LossSettings
from dglkge.model.regularizers import RegularizerSettings
from dglkge.model.score_functions import ScoreSettings
from dglkge.registry import registry_of
from dglkge.settings import Component, FreeSettings, Settings, Text, free, help_of, until_finished
from dglkge.typing import Device

DATASET = "the folder of a data set, which dglkge data build makes of triples"
DatasetFolder = Annotated[str, settings.not_empty(DATASET)]

SCORE_FUNCTION = Component("score function", "complex", is_section=False)
LOSS = Component("loss", "softmax")
REGULARIZER = Component("regularizer", regularizers.AUTO, values=regularizers.VALUES)


NEGATIVES = Component("negative sampler", "mixed")
OBJECTIVE = Component("objective", choices.NEGATIVE_SAMPLING, is_section=False)
ROW_TRANSFORM = Component("row transform", choices.NO_TRANSFORM, is_section=False)
RELATION_OPTIMIZER = Component(
    "optimizer", "", False, {"": choices.RelationSettings}, choices.rule_settings(choices.RelationSettings)
)


class OptimizerConfig(choices.OptimizerSettings):
    """The optimizer of the rows, and what differs for those of relations."""

    relations: Annotated[choices.RelationSettings, RELATION_OPTIMIZER] = RELATION_OPTIMIZER.field()
    """update rule of the relations' rows, for example {name: sparse_adagrad, lr: 0.05} beside row_adagrad for
    the entities, as in PyTorch-BigGraph; without a name: that of the entities."""


OPTIMIZER = Component("optimizer", "sparse_adagrad", settings_of=choices.rule_settings(OptimizerConfig))


class VectorsConfig(Settings):
    """Where names and vectors stand in files of them."""

    names: str = ""
    """file with a name on each line, of an npy file; empty: x.names.txt beside x.npy."""
    entity_column: Text = "name"
    """Parquet: column of the names."""
    vector_column: Text = "embedding"
    """Parquet: column of the vectors, lists of numbers."""


class InitFromConfig(VectorsConfig):
    """Given vectors as the initial rows of entities."""

    path: Text
    """file of named vectors (.npy, .parquet, .vec, .txt, .tsv) that entities of a new run start with, matched
    by name; entities without one are initialised as usual."""
    projection: Literal["pca", "random"] = "pca"
    """where vectors are not as wide as dimension: pca (principal axes), or random (Gaussian, seeded)."""
    std: Annotated[float, settings.at_least_or(-1, 0)] = 0.0
    """root mean square of the vectors' numbers, scaled by one factor; 0: init_scale; -1: no scaling."""
    frozen: bool = until_finished(False)
    """do not update the rows of entities: only relations are trained; may change in a resume."""


class ModelConfig(Settings):
    """The score function and the shape of its parameters."""

    score_function: Annotated[ScoreSettings, SCORE_FUNCTION] = SCORE_FUNCTION.field()
    """how a triple is scored."""
    relation_operators: dict[str, str] = {}
    """operators by relation where score_function has several: {born_in: translation}; else the first."""
    dimension: int = Field(400, ge=1)
    """numbers in an entity's row (complex numbers count as two)."""
    entity_dimensions: dict[str, PositiveInt] = {}
    """fewer numbers in the rows of some entity types: {person: 100}; for matrices between two widths."""
    reciprocal_relations: bool = True
    """a relation row of its own for each side that is predicted (Lacroix et al. 2018); DGL-KE has none: take
    false if dglkge checkpoint export --format dglke is to write the model."""
    init_scale: float = Field(1e-3, gt=0)
    """standard deviation of the initial rows."""
    entity_dropout: float = Field(0.0, ge=0, lt=1)
    """share of each entity's row that a batch sets to 0; others are divided by 1 - share."""
    relation_dropout: float = Field(0.0, ge=0, lt=1)
    """the same for the rows of relations."""
    row_transform: Annotated[choices.TransformSettings, ROW_TRANSFORM] = ROW_TRANSFORM.field()
    """change of a batch's rows before they are scored, by an imported module."""
    max_norm: float = Field(0.0, ge=0)
    """greatest length of an entity's row: updates scale longer ones to it; 0: no limit."""
    global_vectors: bool = False
    """learn a vector for each entity type that is added to all its rows (PyTorch-BigGraph's global_emb);
    takes reciprocal_relations false."""
    # Last: `dglkge config` prints sections in the order of their fields.
    init_from: InitFromConfig | None = None
    """given vectors as initial rows; null: none."""


class DenseOptimizer(FreeSettings):
    """A class of ``torch.optim`` with its options."""


class DenseConfig(Settings):
    """Dense parameters of score functions with a module: optimizer and place, and the module's precision."""

    optimizer: DenseOptimizer = DenseOptimizer(name="Adam")
    """class of torch.optim with its options, e.g. {name: AdamW, weight_decay: 0.01}."""
    lr: float = Field(1e-3, gt=0)
    """learning rate."""
    schedule: choices.ScheduleSettings | None = None
    """as optimizer.schedule, of its learning rate; null: that of optimizer.schedule, if there is one."""
    sharding: Literal["replicated", "fsdp"] = free("replicated")
    """replicated: every trainer holds all of them and the optimizer's state; fsdp: each holds a slice of
    both, and gathers the parameters for a batch by FSDP2, for the same result."""
    autocast: Literal["none", "bfloat16", "float16"] = until_finished("none")
    """type of the matrix products and convolutions inside the module in training: none (float32), bfloat16,
    or float16 with a loss scale, where batches whose gradient overflows are skipped; parameters, rows, losses
    and rankings stay as they are."""
    compile: bool = until_finished(False)
    """compile the module for training by torch.compile; takes a C++ compiler, and seconds at each start."""


Sizes = tuple[Annotated[int, Field(gt=0)], ...]


class MlpConfig(Settings):
    """A projection of several layers."""

    hidden: Sizes = ()
    """widths of the hidden layers, a list, e.g. [512, 256]; empty: one as wide as model.dimension."""
    activation: Literal["relu", "gelu"] = "relu"
    """between layers."""


class FeaturesConfig(VectorsConfig):
    """Frozen vectors of entities, which a trained projection brings into the model."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """files of named vectors (.npy, .parquet, .vec, .txt, .tsv), matched by the entities' names: one for all
    entity types, or TYPE=FILE for each type that has vectors. A run keeps a copy in its folder."""
    mlp: MlpConfig | None = None
    """projection from a vector to a row, of each entity type, by layers with an activation between; null:
    linear, by a matrix and an offset."""
    use: Literal["added", "alone"] = "added"
    """added: to the trained row of each entity; alone: entities of types with vectors have no trained rows,
    and new entities are ranked as these are."""
    dtype: Literal["float32", "float16"] = "float32"
    """of the numbers in the run's copy."""


BucketOrder = Literal["inside_out", "outside_in", "affinity", "random", "hilbert"]
BUCKET_ORDERS: tuple[str, ...] = get_args(BucketOrder)
"""Walks over the pairs of ranges, see :func:`dglkge.data.range_walk.walk_pairs`."""


MIXED: Literal["mixed"] = "mixed"
DIRECTED: Literal["directed"] = "directed"
Buckets = Literal["mixed", "directed"]
"""What the triples of a bucket are, see :mod:`dglkge.sampling.bucket_batches`."""


class SamplingConfig(Settings):
    """The order of an epoch: by triples alone, by machine, or by pairs of ranges of rows."""

    order: Literal["auto", "machine", "global"] = until_finished("auto")
    """order of the triples on several machines: machine (a batch takes a proportional share of each machine,
    in its own order and with negatives of its own; cost does not grow with the machines), global (batches and
    negatives are the same on any number of machines), auto (machine with sampled negatives, else global); on
    one machine they are equal."""
    num_ranges: int = Field(1, ge=1)
    """cut the rows of each entity type on a machine into so many ranges; an epoch walks over pairs of them,
    its buckets, and negatives come from the ranges of the pair; for tables larger than memory (dglkge plan
    proposes a number); 1: one order of all triples."""
    buckets: Buckets = MIXED
    """triples of a bucket: mixed (all between two ranges, either way, with a share of those inside each:
    ranks better), directed (heads of one range and tails of another, as in PyTorch-BigGraph: half of the
    memory where heads and tails are of different types)."""
    bucket_order: BucketOrder = "inside_out"
    """order of the pairs of ranges: inside_out and outside_in (loads each range the fewest times), affinity
    (the next pair shares a range with the last, at random), random, hilbert (a curve)."""

    @property
    def has_directed_buckets(self) -> bool:
        """Whether heads and tails of a bucket are of one range each, and so are their negatives."""
        return self.num_ranges > 1 and self.buckets == DIRECTED


DistinctNames = Annotated[
    tuple[str, ...], settings.check(lambda names: len(set(names)) == len(names), "each name once")
]


class EarlyStoppingConfig(Settings):
    """The end of training by the valid split; the best version is restored then."""

    patience: int = free(ge=1)
    """end training after so many rankings of the valid split in a row without a gain, and restore the best
    version."""
    min_gain: float = free(0.0, ge=0)
    """smallest gain in evaluation.metric that counts."""


class TrainingConfig(Settings):
    """Epochs, batches, and how trainers work together."""

    objective: Annotated[choices.ObjectiveSettings, OBJECTIVE] = OBJECTIVE.field()
    """what answers are compared with; one_vs_all and k_vs_all take losses that have a form over all
    candidates, and no negatives."""
    relation_prediction: float = Field(0.0, ge=0)
    """weight of the loss of (h, ?, t) against all relations (Chen et al. 2021), in k_vs_all with all
    relations of the pair at once; 0: none."""

    num_epochs: int = free(10, ge=0)
    """passes over the training triples."""
    early_stopping: EarlyStoppingConfig | None = None
    """end of training by the valid split; null: after num_epochs."""
    averaging: float | None = free(None, ge=0)
    """rank and write the mean of the rows at the ends of the epochs, epoch k with a weight of about k to this
    power, instead of the rows, which go on training beside it (docs/training-control.md); null: the rows
    themselves."""
    batch_size: int = until_finished(1000, ge=1)
    """triples (with k_vs_all queries) in a global batch, over all trainers."""
    kernels: Literal["auto", "reference"] = until_finished("auto")
    """auto: compiled loops and gradients written by hand where there are some; reference: autograd and plain
    torch and numpy for the loss, the update and the ranking, slower, to compare with."""
    matmul_dtype: Literal["auto", "float32", "bfloat16"] = until_finished("auto")
    """type of the matmuls that score candidates in training: float32, bfloat16, or auto: the first start of a
    run measures if bfloat16 is at least 1.5 times as fast, and its later starts keep that; with float32 and
    global negatives the number of trainers changes only the order of sums."""
    device: Device = free("auto")
    """where losses, gradients and rankings are computed; tables and updates stay in the machine's memory
    unless tables.storage is device. cuda: one GPU for each trainer, given by the launcher; auto: cuda where
    every trainer has a GPU, else cpu; cpu_staged: the code of cuda on the CPU, for tests (docs/gpus.md)."""
    compile: bool = until_finished(False)
    """compile scores and losses of sampled negatives by torch.compile, on device cuda or cpu_staged; with
    tables.storage device also queries of all-candidate objectives, and updates of rows."""
    synchronous: bool = until_finished(True)
    """trainers wait for one another after each batch; false: they do not (Hogwild), and runs of several
    trainers differ from one another; gradients for rows of other machines are sent in the background and
    applied on arrival, and rows of theirs are requested up to four batches ahead."""
    max_lag: int = until_finished(100, ge=1)
    """most steps of a trainer ahead of the slowest, with synchronous false on several machines."""
    batch_statistics: bool = free(False)
    """write reg, the regularizer's part of the loss, and violators_lhs and violators_rhs, mean numbers of
    negatives that score above the true head and tail, to stats.jsonl and training_stats.json."""
    profile: bool = free(False)
    """write how long each phase of a batch took, over all trainers, to stats.jsonl once an epoch."""
    lookup: Literal["exchange", "kvstore"] = free("exchange")
    """selects how remote rows are fetched: by the trainers' own exchange, or by DGL's kvstore."""
    staleness: Literal[0, 1] = until_finished(0)
    """1: rows of other machines may be one update old, and travel while the batch before computes."""
    wire: Literal["float32", "bfloat16"] = until_finished("float32")
    """type in which rows and gradients travel between machines; bfloat16: half the bytes."""
    check_memory: bool = free(True)
    """refuse, before anything is created, a run that does not fit into memory or /dev/shm (dglkge plan)."""
    edge_sets: DistinctNames = ()
    """names of edge sets (dglkge data extend), walked in this order in every epoch; empty: all triples."""
    edge_chunks: int = until_finished(1, ge=1)
    """parts of each edge set in an epoch; if there are several, a version is committed after each."""
    rows: Literal["all", "touched"] = "all"
    """rows that are trained: all, or touched, which are those in the triples that are trained; others stay as
    they are and serve as negatives (see checkpoint.init_path)."""
    loggers: DistinctNames = free((), component="logger")
    """a list of trackers, which get loss, learning rate, speed and metrics; known."""
    callbacks: DistinctNames = free((), component="callback")
    """a list of callbacks of yours, called at epochs, batches and commits."""
    progress: Literal["auto", "always", "never"] = free("auto")
    """progress bar: auto (on a terminal), always or never."""


class CheckpointConfig(Settings):
    """Cadence of checkpoints, and the versions that are kept."""

    every_epochs: int = free(1, ge=0)
    """commit after every so many epochs; 0: only after the last."""
    every_batches: int = free(0, ge=0)
    """commit after every so many batches as well; 0: never."""
    every_minutes: float = free(0.0, ge=0)
    """commit after every so many minutes as well; 0: never."""
    background: bool = free(True)
    """copy the rows and write while training goes on; takes the memory of one copy; not with tables.storage
    disk, where training waits."""
    keep_every_epochs: int = free(0, ge=0)
    """keep the version after every so many epochs as checkpoint/epoch_{E}; 0: none."""
    keep_best: bool = free(False)
    """keep the version with the best evaluation.metric of the valid split as checkpoint/best."""
    fallback: bool = free(False)
    """where the newest version is damaged, go on from the newest good one; reads all its files first."""
    storage: str = free("")
    """URL to which each version is committed (s3://bucket/run, file:///disk/run), and from which every start
    goes on; the run's folder is a cache of it; empty: none."""
    local: bool = free(True)
    """keep the rows of versions in the run's folder beside checkpoint.storage; false: only there."""
    store_seconds: float = free(600.0, ge=0)
    """a commit waits so long for a storage out of reach, with warnings; then the job ends."""
    init_path: str = ""
    """a run or checkpoint, or its URL, whose rows a new run starts with, matched by name; empty: none."""


class TablesConfig(Settings):
    """Type of the rows of entities, and where a launched job keeps its tables while it trains."""

    dtype: Literal["float32", "bfloat16", "float16"] = until_finished("float32")
    """type of entities' rows while they train; bfloat16 and float16 (up to 65504) take half the memory and
    half the bytes between machines; relations, optimizer state and checkpoints stay float32."""
    rounding: Literal["stochastic", "nearest"] = until_finished("stochastic")
    """rounding of updated rows of 16 bits: stochastic (the mean is exact; the same in every run and for any
    number of trainers), or nearest, which loses steps smaller than half a unit in the last place."""

    storage: Literal["memory", "disk", "device"] = free("memory")
    """memory: in /dev/shm, or in files where that is too small; disk: in mapped files, for which the page
    cache is the memory; device: while a run on one machine trains, rows and optimizer state lie on its
    trainers' devices, a share on each, and memory gets them at commits and rankings; it takes training.device
    cuda or cpu_staged (docs/gpus.md)."""
    folder: str = free("")
    """folder of such files during the job; empty: the first of $TMPDIR, /tmp and /var/tmp with the room."""


class HeldOutConfig(Settings):
    """Triples that are never trained, ranked before and after each pass over a chunk."""

    fraction: float = Field(gt=0, lt=1)
    """share of each edge set that is held out."""
    batch_negatives: int = free(1000, ge=1)
    """other answers of so many held-out triples are negatives of each."""
    uniform_negatives: int = free(1000, ge=0)
    """uniform negatives of each."""


class EvaluationConfig(Settings):
    """The ranking of the entities."""

    split: Literal["train", "valid", "test", "none"] = free("test")
    """split ranked after training."""
    filtered: bool = free(True)
    """leave other known answers out of the ranking."""
    num_candidates: int = free(0, ge=0)
    """rank against so many sampled entities; 0: all of the type."""
    ties: Literal["realistic", "optimistic", "pessimistic"] = free("realistic")
    """rank among equal scores."""
    batch_size: int = free(2048, ge=1)
    """queries that a trainer scores at a time."""
    valid_every_epochs: int = free(0, ge=0)
    """rank the valid split after every so many epochs; 0: never."""
    metric: Text = "mrr"
    """measure of the valid split that early stopping, checkpoint.keep_best and ReduceLROnPlateau follow, the
    greatest is the best: mrr, auc, hits@1, hits@3, hits@10, hits@50, or what on_ranking of a callback
    returns."""
    held_out: HeldOutConfig | None = None
    """triples that are never trained, and ranked; null: none."""

    @property
    def ranks_splits(self) -> bool:
        """Whether the entities of a split are ranked."""
        return self.split != "none" or self.valid_every_epochs > 0

    @property
    def held_out_fraction(self) -> float:
        """Share of each edge set that is never trained."""
        return self.held_out.fraction if self.held_out is not None else 0.0

    max_triples: int = free(0, ge=0)
    """rank only the first so many triples of a split; 0: all."""


class Config(Settings):
    """The whole configuration of a run."""

    dataset: DatasetFolder = free("")
    """folder written by dglkge data build or partition.py."""
    output: Text = free("runs/default")
    """folder of the run: checkpoint, statistics, metrics."""
    seed: int = Field(0, ge=0)
    """seed of the order, the negatives and the initial rows."""
    imports: tuple[str, ...] = free(())
    """modules or .py files of yours that register components, as with --import."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """score function and dimensions."""
    loss: Annotated[LossSettings, LOSS] = LOSS.field()
    """loss of a query."""
    regularizer: Annotated[RegularizerSettings, REGULARIZER] = REGULARIZER.field()
    """penalty on the rows of the positives; auto: dura where the score is an inner product that it is defined
    for, else none."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """order of the triples of an epoch."""
    negatives: Annotated[choices.NegativeSettings, NEGATIVES] = NEGATIVES.field()
    """how negatives are drawn."""
    optimizer: Annotated[OptimizerConfig, OPTIMIZER] = OPTIMIZER.field()
    """update rule of the rows."""
    dense: DenseConfig = Field(default_factory=DenseConfig)
    """dense parameters."""
    features: FeaturesConfig | None = None
    """frozen vectors of entities; null: none."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """epochs and batches."""
    tables: TablesConfig = Field(default_factory=TablesConfig)
    """tables during training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """checkpoints."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """evaluation."""

    def is_ordered_by_machine(self, num_machines: int) -> bool:
        """Return whether each machine's triples have an order of their own, without ranges of rows."""
        order = self.sampling.order
        if order == "auto":
            # Against all candidates the order costs next to nothing beside the scores, and exactness is free.
            order = "global" if self.training.objective.over_all else "machine"
        return num_machines > 1 and order == "machine" and self.sampling.num_ranges == 1

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dicts and lists, as JSON gives them back."""
        return self.model_dump(mode="json")


class ConfigField(NamedTuple):
    """A field of the configuration.

    Attributes
    ----------
    key, path : str, tuple of str
        Dotted name, and keys of the nested dicts of a saved configuration.
    component : str
        Noun of the registry of which it names members; empty for other fields.
    owners : tuple of str
        Names of the components that have the field; empty for a field that is there in any case.
    is_default : bool
        Whether the default component has it.
    tag : str
        For an option of a component that is named on one line: the key of its name.
    section : str
        The outermost optional section that it is in, dotted.
    is_required : bool
        Whether it must be given in its section, which is optional.
    """

    key: str
    path: tuple[str, ...]
    kind: str
    default: Any
    help: str
    resume: str
    component: str = ""
    owners: tuple[str, ...] = ()
    is_default: bool = True
    tag: str = ""
    section: str = ""
    is_required: bool = False


DECIDED_FIELDS = ("training.matmul_dtype",)
"""Fields of which a run records what ``auto`` has decided: another value than the default is no change."""


def fields(of: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[ConfigField]:
    """Yield every field, in the order of the file; options of components with the members that have them."""
    for name, field in of.model_fields.items():
        yield from _fields_of(field, (*path, name))


def _fields_of(field: FieldInfo, path: tuple[str, ...]) -> Iterator[ConfigField]:
    """Yield a field, or those of the section or component that it is."""
    kind, component = _not_none(field.annotation), settings.component_of(field)
    if component is not None:
        yield from _component_fields(component, field, path)
    elif _is_model(kind) and not issubclass(kind, FreeSettings):
        is_optional = field.default is None
        for inner in fields(kind, path):
            yield inner._replace(is_default=False, section=".".join(path)) if is_optional else inner
    else:
        yield _field(field, path)


def _component_fields(component: Component, field: FieldInfo, path: tuple[str, ...]) -> Iterator[ConfigField]:
    """Yield the tag of a component, and the options of all members."""
    path_of_tag = (*path, settings.TAG)
    key = ".".join(path_of_tag if component.is_section else path)
    yield ConfigField(
        key, path_of_tag, "str", component.default, help_of(field), settings.FIXED, component.noun
    )
    num_members = len(list(component.members()))
    for option, having in component.options().items():
        owners = () if len(having) == num_members else tuple(having)
        for inner in _fields_of(next(iter(having.values())), (*path, option)):
            # One default for all: a person who changes the name in a file that was printed keeps the rest.
            is_one = len({str(other.default) for other in having.values()}) == 1
            is_default = inner.is_default and component.default in having and is_one
            tag = inner.tag or ("" if component.is_section else settings.TAG)
            yield inner._replace(owners=(*owners, *inner.owners), is_default=is_default, tag=tag)


def _field(field: FieldInfo, path: tuple[str, ...]) -> ConfigField:
    """Describe a field that is no component."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    kind, help = _type_name(field.annotation), help_of(field)
    resume, component = str(extra.get("resume", settings.FIXED)), str(extra.get("component", ""))
    return ConfigField(
        ".".join(path), path, kind, default, help, resume, component, is_required=field.is_required()
    )


def field_table() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted key, type, default, help) of every field, in the order of the file.

    The help of a field that names a component ends with the registered names; that of an option that only
    some components have begins with theirs.
    """
    for field in fields():
        # Registered names are looked up now, not at import: the user's modules may have added some.
        members = ", ".join(registry_of(field.component)) if field.component else ""
        owners = ", ".join(field.owners) + ": " if field.owners else ""
        yield field.key, field.kind, field.default, owners + field.help + f": {members}" * bool(members)


def component_fields() -> Iterator[tuple[str, str]]:
    """Yield (dotted key, noun of the registry) of every field that names a component."""
    return ((field.key, field.component) for field in fields() if field.component)


def _is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Tell whether a type is a class of settings; isinstance(list[int], type) is true in Python 3.10."""
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


def _not_none(kind: Any) -> Any:
    """Return X of the type ``X | None``, and any other type as it is."""
    inner = [argument for argument in get_args(kind) if argument is not type(None)]
    return inner[0] if len(inner) < len(get_args(kind)) else kind


def _type_name(kind: Any) -> str:
    """Return the name of a field's type, as a YAML file has it."""
    names = {tuple: "list", dict: "map", Literal: "str"}
    kind = _not_none(kind)
    origin = get_origin(kind)
    if _is_model(kind):
        return "map"
    if origin is Literal:
        return type(get_args(kind)[0]).__name__
    return names.get(origin) or str(getattr(kind, "__name__", kind))


def refused_changes(saved: Mapping[str, Any], now: Mapping[str, Any], is_finished: bool) -> list[str]:
    """Compare two configurations of one run, as nested dicts; fields that only one of them has are ignored.

    Returns ``"optimizer.lr was 0.1, is 0.2"`` for each field that may not change; ``is_finished``: no epoch
    is left to train. An optional section counts by the field that it must have.
    """
    changes, may_change = [], [settings.FREE] if is_finished else [settings.FREE, settings.UNTIL_FINISHED]
    for field in fields():
        old, new = (value_at(config, field.path, _ABSENT) for config in (saved, now))
        is_null_section = field.section and not field.is_required and None in (old, new)
        is_known = _ABSENT not in (old, new) and not is_null_section
        if is_known and old != new and field.resume not in may_change:
            changes.append(f"{field.key} was {old!r}, is {new!r}")
    return changes


_ABSENT = object()


def value_at(config: Mapping[str, Any], path: tuple[str, ...], default: Any = None) -> Any:
    """Return the value at a path of nested dicts, ``default`` if absent, None in a section that is null."""
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping):
            return value if value is default else None
        value = value.get(name, default)
    return value
