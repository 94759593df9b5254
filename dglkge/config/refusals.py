"""Values of a configuration that do not fit one another: one table, for planning and training alike.

A row reads: where its conditions hold, a field must have an allowed value, for a reason. What a field allows
by itself is declared at the field (``dglkge/config/schema.py``); options of some components only, at these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dglkge.config.schema import Config, DenseConfig
from dglkge.errors import InputErrors
from dglkge.model.choices import ALL_ENTITIES, BIGRAPH_OPTIMIZER, NEGATIVE_SAMPLING, OBJECTIVES
from dglkge.model.losses import LOSSES, PairwiseLoss
from dglkge.model.regularizers import REGULARIZERS, chosen_regularizer
from dglkge.model.score_functions import PHASE, SCORE_FUNCTIONS
from dglkge.settings import ComponentSettings
from dglkge.typing import CUDA_DEVICE, DEVICE_STORAGE, STAGED_CPU_DEVICE

MACHINES = "the number of machines"
"""Stands for a fact of a job in the table."""

_ABSENT = object()


def _words(value: Any) -> str:
    """Return a value as a configuration file has it."""
    if isinstance(value, (tuple, dict)):
        return ", ".join(map(str, value)) or "empty"
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "null"
    return "empty" if value == "" else str(value).lower() if isinstance(value, bool) else str(value)


class Allowed(NamedTuple):
    """Allowed values: a test, and its words in messages."""

    test: Callable[[Any], bool]
    words: str


class When(NamedTuple):
    """A condition on the value of a field; with ``names_component`` on the component that it names."""

    key: str
    test: Callable[[Any], bool]
    names_component: bool = False


class Row(NamedTuple):
    """A refusal: ``field`` takes ``allowed`` only, where all conditions hold. Messages name the first one."""

    field: str
    allowed: Allowed
    reason: str
    conditions: tuple[When, ...]


def only(*values: Any) -> Allowed:
    """Allow some values."""
    return Allowed(lambda value: value in values, ", ".join(map(_words, values)))


ABSENT = Allowed(lambda value: False, "null for {section}")
"""Allows no value of a field that an optional section must have."""


def row(field: str, allowed: Allowed, reason: str, *conditions: When) -> Row:
    """Make a row."""
    return Row(field, allowed, reason, conditions)


def has(key: str, *values: Any) -> When:
    """Condition: a field has one of some values."""
    return When(key, lambda value: value in values)


def is_set(key: str) -> When:
    """Condition: a field is neither empty, nor 0, nor false."""
    return When(key, bool)


def component(key: str, test: Callable[[Any], bool]) -> When:
    """Condition: a component has a fact."""
    return When(key, test, names_component=True)


SCORE = "model.score_function"
OBJECTIVE = "training.objective"
SYNCHRONOUS = "training.synchronous"
COMPILED = "which compiles sampled negatives on a device"
ALL_UPDATE = "whose parameters all trainers update alike"
BY_NUMBER = "sparse_adagrad, sparse_adam"
PADDED = "where relations have rows as wide as the widest operator's, so that no mean of a row is one's own"
NARROWER = (
    "where a relation's matrix has no numbers beyond two narrow rows, so that no mean of a row is its own"
)
QUERIES = "whose batches are queries with the answers of all triples"

phases = component(SCORE, lambda made: made.relation_init == PHASE)
one_operator = component(SCORE, lambda made: not made.operators)
several_operators = component(SCORE, lambda made: bool(made.operators))
widths = is_set("model.entity_dimensions")
has_module = component(SCORE, lambda made: made.has_module)
lacks_module = component(SCORE, lambda made: not made.has_module)
over_all = When(OBJECTIVE, lambda value: value != NEGATIVE_SAMPLING)
by_queries = component(OBJECTIVE, lambda member: member.by_queries)
on_devices = has("tables.storage", DEVICE_STORAGE)
off_devices = has("tables.storage", "memory", "disk")
in_buckets = When("sampling.num_ranges", lambda value: value > 1)
several_machines = When(MACHINES, lambda value: value > 1)
reference = has("training.kernels", "reference")
kvstore = has("training.lookup", "kvstore")
unwatched = has("evaluation.valid_every_epochs", 0)

# fmt: off
ROWS: tuple[Row, ...] = (
    # Score functions
    row("model.relation_dropout", only(0), "whose relations are phases: an angle cannot be scaled", phases),
    row("regularizer.relation_ratio", only(1), "whose relations are phases, and have no penalty", phases),
    row(OBJECTIVE, only(NEGATIVE_SAMPLING), "whose queries hold a matrix, too wide to send to all trainers",
        component(SCORE, lambda made: made.wide_queries)),
    row("training.relation_prediction", only(0), "of which a relation has no parameters to predict it by",
        component(SCORE, lambda made: not made.has_parameters)),
    row("training.relation_prediction", only(0), "whose module would score every pair with every relation",
        component(SCORE, lambda made: made.has_module and not made.has_relation_product)),
    row("model.relation_operators", only({}),
        "which has one operator for all relations; several are named with a + between them", one_operator),
    *(row(field, only(0), "where a number of a relation's row says which operator it has", several_operators)
      for field in ("optimizer.weight_decay", "model.relation_dropout")),
    *(row("optimizer.relations", Allowed(test, BY_NUMBER), reason, condition, *conditions)
      for reason, condition in ((PADDED, several_operators), (NARROWER, widths))
      for test, *conditions in ((lambda name: name != BIGRAPH_OPTIMIZER,),
                                (lambda name: name != "", has("optimizer.name", BIGRAPH_OPTIMIZER)))),
    row("model.entity_dimensions", only({}),
        "whose relations have no matrices to map rows of one width to another; linear_* and affine_* have",
        component(SCORE, lambda made: not made.maps_widths)),
    *(row(field, allowed, "and whatever is added to rows has the width of model.dimension", widths)
      for field, allowed in (("features.files", ABSENT), ("model.init_from.path", ABSENT),
                             ("model.global_vectors", only(False)))),
    row(OBJECTIVE, only(NEGATIVE_SAMPLING), "and all candidates are rows of model.dimension", widths),
    row("training.relation_prediction", only(0), "and relations of other types have matrices of other shapes",
        widths),
    *(row(SYNCHRONOUS, only(True), ALL_UPDATE, condition)
      for condition in (has_module, is_set("model.global_vectors"), is_set("features.files"))),
    *(row(f"dense.{name}", only(field.get_default(call_default_factory=True)),
          "which has no dense parameters, nor are there features", lacks_module, has("features", None))
      for name, field in DenseConfig.model_fields.items()),
    *(row(f"dense.{name}", only(value), "which has no module; projections of features compute in float32",
          lacks_module, is_set("features"))
      for name, value in (("autocast", "none"), ("compile", False))),
    # Global vectors, features, given rows
    row("model.reciprocal_relations", only(False),
        "as in PyTorch-BigGraph, where dynamic relations have no global embedding",
        is_set("model.global_vectors")),
    row("model.global_vectors", only(False),
        "of which a projection has an offset for each entity type already", is_set("features.files")),
    row("model.init_from.path", ABSENT, "where entities with features have no rows of their own",
        has("features.use", "alone")),
    row("checkpoint.init_path", only(""), "and rows start from one of them", is_set("model.init_from.path")),
    # Objectives
    row("training.batch_statistics", only(False), "which has no sampled negatives to count", over_all),
    row("training.objective.label_smoothing", only(0), "which compares pairs of answers and has no labels",
        component("loss", lambda member: issubclass(member, PairwiseLoss))),
    *(row(SYNCHRONOUS, only(True), "where every trainer scores the queries of all", condition)
      for condition in (over_all, is_set("training.relation_prediction"))),
    row("loss.reduction", only("mean"), "which adds the terms of all candidates", over_all),
    row("loss.confidences", only(False), "which does not take it", over_all),
    row("loss.adversarial_weights", only(False), "which weights no negatives over all candidates",
        has("loss", "softmax"), over_all),
    row("loss.relation_weights", only({}), "which takes no weights", by_queries),
    row("training.relation_prediction", only(0), "and its softmax has no label of one answer",
        is_set("loss.confidences")),
    row("loss.reduction", only("mean"), "and the weights of a query's negatives sum to 1",
        is_set("loss.adversarial_weights")),
    row("training.edge_sets", only(()), QUERIES, by_queries),
    row("training.rows", only("all"), QUERIES, by_queries),
    row(OBJECTIVE,
        Allowed(lambda name: not OBJECTIVES.get(name).Settings.by_queries, "negative_sampling, one_vs_all"),
        "which multiplies the rows of a query with that of its answer",
        component("regularizer", lambda made: made.needs_answer)),
    # Negatives
    *(row(f"negatives.{name}", only(value), "which has no sampled negatives", over_all)
      for name, value in (("num_for_heads", -1), ("num_for_tails", -1), ("degree_power", 0),
                          ("mask_known", False))),
    row("negatives.name", Allowed(lambda name: name != ALL_ENTITIES, "mixed"),
        "which has all entities as candidates already", over_all),
    row("negatives.degree_power", only(0),
        "and negatives of the batch are drawn in proportion to their occurrences",
        has("negatives.in_batch_share", 1)),
    row("negatives.num_for_heads", Allowed(lambda value: value != 0, "0 for one of them"),
        "so no side is trained", has("negatives.num_for_tails", 0)),
    # Order of the triples, edge sets
    row("sampling.order", only("auto", "global"), "whose batches are queries in an order of the whole graph",
        by_queries),
    row("sampling.order", only("auto", "machine"), "where every machine walks over ranges of its own",
        in_buckets),
    *(row(field, only(value), "where negatives and batches keep to the ranges of a bucket", in_buckets)
      for field, value in ((OBJECTIVE, NEGATIVE_SAMPLING), ("negatives.name", "mixed"))),
    # Optimizer, schedule, early stopping
    *(row("training.averaging", only(None), "of which no averages are kept", condition)
      for condition in (has_module, is_set("model.global_vectors"), is_set("features.files"), on_devices)),
    row(SYNCHRONOUS, only(True), "which takes the gradients of all", is_set("optimizer.clip_norm")),
    row("optimizer.decoupled_weight_decay", only(False), "so nothing decays",
        has("optimizer.weight_decay", 0)),
    *(row(f"{section}.schedule.name",
          Allowed(lambda value: value != "ReduceLROnPlateau", "at least 1 with it, or another schedule"),
          "and it follows the valid split", unwatched)
      for section in ("optimizer", "dense")),
    *(row(f"{section}.schedule.every", only("epoch"), "which follows the valid split",
          has(f"{section}.schedule.name", "ReduceLROnPlateau"))
      for section in ("optimizer", "dense")),
    row("checkpoint.local", only(True), "so the folder is the only copy", has("checkpoint.storage", "")),
    row("checkpoint.keep_best", only(False), "and the best version is chosen by the valid split", unwatched),
    row("training.early_stopping.patience", ABSENT, "and it counts rankings of the valid split", unwatched),
    # Devices, machines, kernels
    row("training.matmul_dtype", only("float32", "auto"), "which computes in float32",
        has("training.kernels", "reference")),
    row("training.staleness", only(0), "and only lookup exchange reads ahead",
        has("training.lookup", "kvstore")),
    row(OBJECTIVE, only(NEGATIVE_SAMPLING), f"{COMPILED}, and updates with tables.storage device",
        is_set("training.compile"), off_devices),
    row("training.kernels", only("auto"), COMPILED, is_set("training.compile")),
    *(row(field, allowed, "where it is not supported", on_devices)
      for field, allowed in (
          ("training.device", only(CUDA_DEVICE, STAGED_CPU_DEVICE)), ("tables.dtype", only("float32")),
          (SYNCHRONOUS, only(True)), ("training.staleness", only(0)), ("training.rows", only("all")),
          ("model.global_vectors", only(False)), ("features.files", ABSENT), ("sampling.num_ranges", only(1)),
      )),
    row("tables.storage", only("memory", "disk"), "and devices are those of one machine", several_machines),
    *(row(field, only(value), f"which do not wait for one another: {SYNCHRONOUS} is false",
          several_machines, has(SYNCHRONOUS, False))
      for field, value in (
          ("optimizer.clip_value", 0), ("training.staleness", 0), ("sampling.num_ranges", 1),
      )),
)
# fmt: on


def refuse(config: Config, num_machines: int = 1) -> None:
    """Refuse values that do not fit one another, all of them at once."""
    problems = list(dict.fromkeys(problems_of(config, num_machines)))
    if problems:
        raise InputErrors(problems)


def problems_of(config: Config, num_machines: int) -> Iterator[str]:
    """Yield a line for each row that refuses something: field, other field, reason and what is allowed."""
    for refusal in ROWS:
        value = _value(config, refusal.field, num_machines)
        if value is _ABSENT or refusal.allowed.test(value):
            continue
        if all(_holds(config, condition, num_machines) for condition in refusal.conditions):
            key = refusal.conditions[0].key
            allowed = refusal.allowed.words.format(section=refusal.field.rpartition(".")[0])
            allowed += "" if key == MACHINES else f", or another value of {key}"
            other = f"{key} is {_words(_value(config, key, num_machines))}"
            yield f"{refusal.field} is {_words(value)} and {other}, {refusal.reason}; allowed: {allowed}"


def _value(config: Config, key: str, num_machines: int) -> Any:
    """Return the value of a field; the name of a component."""
    if key == MACHINES:
        return num_machines
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, _ABSENT)
    return value.name if isinstance(value, ComponentSettings) else value


def _holds(config: Config, condition: When, num_machines: int) -> bool:
    """Return whether a condition holds; one of a field that is not there does not."""
    if condition.names_component:
        return condition.test(_component(config, condition.key))
    value = _value(config, condition.key, num_machines)
    return value is not _ABSENT and condition.test(value)


def _component(config: Config, key: str) -> Any:
    """Return the component of a field: a score function, or the member of another registry."""
    if key == SCORE:
        settings = config.model.score_function
        return SCORE_FUNCTIONS.get(settings.name)(settings)
    if key == OBJECTIVE:
        return config.training.objective
    if key == "regularizer":
        return REGULARIZERS.get(chosen_regularizer(config.regularizer, config.model.score_function.name).name)
    return LOSSES.get(config.loss.name)
