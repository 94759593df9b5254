"""The model, loss and regularizer that a configuration names, and the checks that need no data set.

``dglkge plan`` and training call the same checks, so that neither approves what the other refuses. DGL is not
imported here: a plan does not need it.
"""

from __future__ import annotations

from pathlib import Path

from dglkge.checkpoint.stores import is_url, open_store
from dglkge.config import Config
from dglkge.config.schema import OBJECTIVES, changed_fields
from dglkge.errors import InputError
from dglkge.model.choices import NEGATIVE_SAMPLERS
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import LOSSES, Loss
from dglkge.model.regularizers import (
    REGULARIZERS,
    Regularizer,
    check_regularizer,
    chosen_regularizer,
)
from dglkge.model.score_functions import PHASE, SCORE_FUNCTIONS
from dglkge.sampling.shares import split_count
from dglkge.training.building.dense_optimizer import check_dense
from dglkge.training.building.loss_settings import check_loss_settings, check_negatives
from dglkge.training.building.optimizer_options import check_optimizer
from dglkge.training.early_stopping import check_early_stopping
from dglkge.training.schedule import check_schedule
from dglkge.training.trackers import check_loggers
from dglkge.typing import CUDA_DEVICE, DEVICE_STORAGE, STAGED_CPU_DEVICE

REFERENCE = "reference"
"""``training.kernels`` of the plain path: autograd, torch and numpy, no compiled loop."""

NEGATIVE_SAMPLING, ONE_VS_ALL, K_VS_ALL = OBJECTIVES


def check_config(config: Config) -> None:
    """Refuse values that do not fit each other.

    Raises
    ------
    InputError
        Naming the first of them.
    """
    model = configured_model(config)
    regularizer = configured_regularizer(config, model)
    check_optimizer(config)
    check_schedule(config)
    check_dense(config, model)
    check_early_stopping(config)
    NEGATIVE_SAMPLERS.get(config.negatives.sampler)
    chosen = config.negatives
    split_count(chosen.num_uniform, (chosen.global_share, chosen.local_share, chosen.in_batch_share))
    check_negatives(config)
    check_lookup(config)
    check_kernels(config)
    check_global_vectors(config)
    check_features(config)
    check_objective(config, regularizer)
    check_order(config)
    check_bucket_order(config)
    check_loss_settings(config)
    check_given_vectors(config)
    check_loggers(config.training.loggers)
    check_storage(config)
    check_edge_sets(config)
    check_device_storage(config)
    if config.model.relation_dropout and model.score_function.relation_init == PHASE:
        raise InputError(
            f"model.relation_dropout is {config.model.relation_dropout:g} and model.score_function is "
            f"{config.model.score_function}, whose relations are phases: an angle cannot be scaled; "
            "allowed: 0"
        )


def check_kernels(config: Config) -> None:
    """Refuse matmuls in bfloat16 where the reference computes, which has float32 only.

    Raises
    ------
    InputError
        If they are configured so.
    """
    chosen = config.training
    if chosen.kernels == REFERENCE and chosen.matmul_dtype == "bfloat16":
        raise InputError(
            "training.matmul_dtype is bfloat16 and training.kernels is reference: the reference computes in "
            "float32; allowed with it: float32 or auto"
        )


def check_global_vectors(config: Config) -> None:
    """Refuse global vectors with reciprocal relations, and where trainers do not wait for one another.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    if not config.model.global_vectors:
        return
    if config.model.reciprocal_relations:
        raise InputError(
            "model.global_vectors is true: it takes model.reciprocal_relations false, got true (as in "
            "PyTorch-BigGraph, where dynamic relations have no global embedding)"
        )
    if not config.training.synchronous:
        raise InputError("model.global_vectors is true: it takes training.synchronous true, got false")


def check_features(config: Config) -> None:
    """Refuse settings of ``features`` that have no effect or contradict others.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen = config.features
    if not chosen.files:
        for name, value in changed_fields(chosen):
            raise InputError(f"features.{name} is {value} and features.files is empty")
        return
    if chosen.projection == "linear" and chosen.hidden:
        raise InputError(
            f"features.hidden is {list(chosen.hidden)} and features.projection is linear; allowed: mlp, or "
            "empty"
        )
    if config.model.global_vectors:
        raise InputError(
            "model.global_vectors is true and features.files is given: a projection has an offset for each "
            "entity type already; allowed: false"
        )
    if not config.training.synchronous:
        raise InputError("features.files is given: it takes training.synchronous true, got false")
    if chosen.use == "alone" and config.model.init_from.path:
        raise InputError(
            f"features.use is alone and model.init_from.path is {config.model.init_from.path}: entities with "
            "features have no rows of their own; allowed: added, or an empty path"
        )


def check_given_vectors(config: Config) -> None:
    """Refuse settings of ``model.init_from`` that have no effect or contradict one another.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen = config.model.init_from
    if chosen.path and config.checkpoint.init_path:
        raise InputError(
            f"model.init_from.path is {chosen.path} and checkpoint.init_path is "
            f"{config.checkpoint.init_path}: rows start from one of them; allowed: one of the two empty"
        )
    if chosen.frozen and not chosen.path:
        raise InputError("model.init_from.frozen is true and model.init_from.path is empty; allowed: false")


def check_objective(config: Config, regularizer: Regularizer | None) -> None:
    """Refuse settings that the objective does not have.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen = config.training
    operator = SCORE_FUNCTIONS.get(config.model.score_function.name).operator
    if chosen.relation_prediction and operator is not None and not operator.static:
        raise InputError(
            f"training.relation_prediction is {chosen.relation_prediction:g}: a relation of "
            f"{config.model.score_function} has no parameters to predict it by; allowed: 0"
        )
    if chosen.batch_statistics and chosen.objective != NEGATIVE_SAMPLING:
        raise InputError(
            f"training.batch_statistics is true and training.objective is {chosen.objective}, which has no "
            f"sampled negatives to count; allowed: false, or objective {NEGATIVE_SAMPLING}"
        )
    if chosen.objective == NEGATIVE_SAMPLING:
        if chosen.label_smoothing:
            raise InputError(
                f"training.label_smoothing is {chosen.label_smoothing:g}: it takes training.objective "
                f"one_vs_all, got {chosen.objective}"
            )
        if chosen.relation_prediction and not chosen.synchronous:
            raise InputError(
                f"training.relation_prediction is {chosen.relation_prediction:g}: it takes "
                "training.synchronous true: every trainer scores the queries of all"
            )
        return
    if SCORE_FUNCTIONS.get(config.model.score_function.name).wide_queries:
        fitting = [name for name in SCORE_FUNCTIONS if not SCORE_FUNCTIONS.get(name).wide_queries]
        raise InputError(
            f"model.score_function is {config.model.score_function} and training.objective is "
            f"{chosen.objective}, which sends every query, here with a matrix, to all trainers; allowed: "
            f"objective {NEGATIVE_SAMPLING}, or one of {', '.join(fitting)}"
        )
    if chosen.objective == K_VS_ALL and regularizer is not None and regularizer.needs_answer:
        raise InputError(
            f"regularizer.name {config.regularizer.name} multiplies the rows of a query with that of its "
            "answer: it takes training.objective negative_sampling or one_vs_all, got k_vs_all"
        )
    if not LOSSES.get(config.loss.name).candidate_kind:
        known = [name for name in LOSSES if LOSSES.get(name).candidate_kind]
        raise InputError(
            f"training.objective {chosen.objective} takes loss.name {' or '.join(known)}, "
            f"got {config.loss.name}"
        )
    if not chosen.synchronous:
        raise InputError(
            f"training.objective {chosen.objective} takes training.synchronous true: every trainer scores "
            "the queries of all"
        )


def check_edge_sets(config: Config) -> None:
    """Refuse edge sets and held-out triples where batches are of queries and not of triples.

    Raises
    ------
    InputError
        Naming the field.
    """
    names = config.training.edge_sets
    if len(set(names)) != len(names):
        raise InputError(f"training.edge_sets is {list(names)}: a set occurs twice; expected each once")
    if config.training.objective != K_VS_ALL:
        return
    for field, value, allowed in (
        ("training.edge_sets", list(names), []),
        ("training.rows", config.training.rows, "all"),
        ("evaluation.eval_fraction", config.evaluation.eval_fraction, 0.0),
    ):
        if value != allowed:
            raise InputError(
                f"{field} is {value!r} and training.objective is {K_VS_ALL}, whose batches are queries with "
                f"the answers of all triples; allowed: {allowed!r}, or another objective"
            )


def check_storage(config: Config) -> None:
    """Refuse a URL in place of the run's folder, and one that cannot be opened; nothing is read.

    Raises
    ------
    InputError
        Naming the field.
    """
    if is_url(config.output):
        raise InputError(
            f"output is {config.output!r}; expected a folder of this machine: checkpoint.storage takes the "
            "URL to which versions are committed as well"
        )
    url = config.checkpoint.storage
    if not url:
        return
    try:
        open_store(url)
    except InputError as error:
        raise InputError(f"checkpoint.storage: {error}") from None
    if url.startswith("file:") and Path("/" + url[5:].lstrip("/")).resolve() == Path(config.output).resolve():
        raise InputError(
            f"checkpoint.storage is {url!r}, which is the run's own folder; expected another one"
        )


def check_device_storage(config: Config) -> None:
    """Refuse what needs the tables in the machine's memory while they are on devices.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen, training = config.tables, config.training
    if chosen.storage != DEVICE_STORAGE:
        return
    if training.device not in (CUDA_DEVICE, STAGED_CPU_DEVICE):
        raise InputError(
            f"tables.storage is {DEVICE_STORAGE} and training.device is {training.device}; allowed: "
            f"training.device {CUDA_DEVICE} or {STAGED_CPU_DEVICE}, or another storage"
        )
    for field, value, allowed in (
        ("tables.dtype", chosen.dtype, "float32"),
        ("training.synchronous", training.synchronous, True),
        ("training.staleness", training.staleness, 0),
        ("training.rows", training.rows, "all"),
        ("model.global_vectors", config.model.global_vectors, False),
        ("features.files", tuple(config.features.files), ()),
        ("sampling.num_ranges", config.sampling.num_ranges, 1),
    ):
        if value != allowed:
            raise InputError(
                f"tables.storage is {DEVICE_STORAGE} and {field} is {_as_words(value)}; allowed: "
                f"{_as_words(allowed)}, or storage memory"
            )


def _as_words(value: object) -> str:
    """Return a value of the configuration as a person writes it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_order(config: Config) -> None:
    """Refuse an order of triples where batches have another one.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    order = config.sampling.order
    if order == "machine" and config.training.objective == K_VS_ALL:
        raise InputError(
            f"sampling.order is machine and training.objective is {K_VS_ALL}, whose batches are queries in "
            "an order of the whole graph; allowed: auto, global"
        )
    if order == "global" and config.sampling.num_ranges > 1:
        raise InputError(
            f"sampling.order is global and sampling.num_ranges is {config.sampling.num_ranges}, where every "
            "machine walks over ranges of its own; allowed: auto, machine, or num_ranges 1"
        )


def check_bucket_order(config: Config) -> None:
    """Refuse buckets where a batch reads rows of all ranges.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    if config.sampling.num_ranges == 1:
        return
    needed = (
        ("training.objective", config.training.objective, NEGATIVE_SAMPLING),
        ("negatives.all_entities", config.negatives.all_entities, False),
        ("negatives.sampler", config.negatives.sampler, "mixed"),
    )
    for name, value, allowed in needed:
        if value != allowed:
            raise InputError(
                f"sampling.num_ranges is {config.sampling.num_ranges} and {name} is {str(value).lower()}, "
                f"which does not keep to the ranges of a bucket; allowed: num_ranges 1, or {name} "
                f"{str(allowed).lower()}"
            )


def check_lookup(config: Config) -> None:
    """Refuse stale rows where the kvstore fetches them.

    Raises
    ------
    InputError
        If they are configured so.
    """
    if config.training.lookup == "kvstore" and config.training.staleness:
        raise InputError(
            "training.staleness is 1 and training.lookup is kvstore: only lookup exchange reads ahead"
        )


def check_machines(config: Config, num_machines: int) -> None:
    """Refuse asynchronous training, and tables on devices, on several machines.

    Raises
    ------
    InputError
        If trainers of several machines are configured not to wait for one another, or to hold the tables.
    """
    if config.tables.storage == DEVICE_STORAGE and num_machines > 1:
        raise InputError(
            f"tables.storage is {DEVICE_STORAGE}, for the devices of one machine, got {num_machines} machines"
            "; allowed: memory, disk"
        )
    if not config.training.synchronous and num_machines > 1:
        raise InputError(
            "training.synchronous: false is for trainers that share one machine's memory, "
            f"got {num_machines} machines"
        )


def configured_model(config: Config) -> KgeModel:
    """Make the model.

    Raises
    ------
    InputError
        If the score function is unknown, has no rows of that dimension, lacks an option that is set, or needs
        reciprocal relations.
    """
    chosen = config.model
    made = SCORE_FUNCTIONS.get(chosen.score_function.name)(chosen.score_function)
    return KgeModel(made, chosen.dimension, chosen.reciprocal_relations, config.seed)


def configured_loss(config: Config) -> Loss:
    """Make the loss."""
    return LOSSES.get(config.loss.name)(config.loss)


def configured_regularizer(config: Config, model: KgeModel) -> Regularizer | None:
    """Make the regularizer; None where its weight is 0.

    Raises
    ------
    InputError
        If it is unknown or not defined for the model, a number is out of range or has no effect, or it takes
        no weight and has one.
    """
    score_function = config.model.score_function.name
    chosen = chosen_regularizer(config.regularizer, score_function)
    check_regularizer(chosen.name, score_function)
    made = REGULARIZERS.get(chosen.name)(chosen, model.score_function.complex_valued)
    if made.relation_ratio != 1 and model.score_function.relation_init == PHASE:
        raise InputError(
            f"regularizer.relation_ratio is {made.relation_ratio:g} and model.score_function is "
            f"{score_function}, whose relations are phases, which are not regularized; allowed: 1"
        )
    return made if made.weight else None
