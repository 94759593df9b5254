"""Refusals by torch, by what is installed, and by this process's devices, in all of a configuration at once.

Values that do not fit one another are a table, :mod:`dglkge.config.refusals`. ``dglkge plan`` and training
check the same, so that neither approves what the other refuses; a plan does without DGL.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.bigraph import find_bigraph
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.stores import is_url, open_store
from dglkge.config import Config
from dglkge.config.refusals import problems_of
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import VALID
from dglkge.distributed.world import World
from dglkge.errors import InputError, InputErrors, unknown_name
from dglkge.evaluation.metrics import FOLLOWED
from dglkge.model.device import NARROW_TYPES, autocast_problem, compiler_problem, open_device, problem_of
from dglkge.planning.host import host_memory
from dglkge.planning.memory import describe_hosts, misfits, plan_memory
from dglkge.sampling.negatives import split_count
from dglkge.training.building import components
from dglkge.training.callbacks import CALLBACKS, LOGGERS, Tracker
from dglkge.training.learning_rates import try_schedule
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, STAGED_CPU_DEVICE

logger = logging.getLogger(__name__)


def check_config(config: Config, world: World | None = None) -> None:
    """Refuse a configuration that cannot be trained, whatever the data set.

    Parameters
    ----------
    world : World, optional
        Of the job in which this process trains; without it the devices of this process do not matter.
    """
    model, num_machines = components.configured_model(config), 1 if world is None else world.num_machines
    rows, dense, num_epochs = config.optimizer, config.dense, config.training.num_epochs
    lrs = [rows.lr, rows.relations.lr or rows.lr]
    _raise(
        problems_of(config, num_machines),
        _raised(components.configured_regularizer, config, model),
        _raised(split_count, max(config.negatives.per_side.values()), config.negatives.shares),
        _raised(try_schedule, "optimizer.schedule", rows.schedule, lrs, num_epochs),
        _raised(try_schedule, "dense.schedule", dense.schedule, [dense.lr], num_epochs),
        components.dense_problems(config, model),
        _loggers(config),
        _storage(config),
        () if world is None else _this_process(config),
    )


def check_dataset(config: Config, dataset: Dataset, world: World | None = None) -> None:
    """Refuse, before tables are created, a configuration that does not fit a data set.

    Parameters
    ----------
    world : World, optional
        Without it, the memory of this machine is not compared with the plan.
    """
    _raise(
        _empty_splits(config, dataset),
        _raised(components.relation_weights, config, dataset),
        _raised(components.relation_operators, config, dataset),
        _raised(components.entity_dimensions, config, dataset),
        _raised(components.with_num_times, config, dataset),
        _edge_sets(config, dataset.edge_set_names),
        _confidences(config, dataset) if config.loss.has_confidences else (),
        () if world is None else _memory(config, dataset, world),
    )


def _edge_sets(config: Config, known: Sequence[str]) -> Iterator[str]:
    """Yield edge sets that the data set does not have."""
    for name in config.training.edge_sets:
        if name not in known:
            yield f"training.edge_sets: {unknown_name('edge set', name, known)}"


def _raise(*problems: Iterator[str] | tuple[str, ...]) -> None:
    if lines := list(dict.fromkeys(line for part in problems for line in part)):
        raise InputErrors(lines)


def _raised(check: Callable[..., object], *arguments: Any) -> Iterator[str]:
    """Yield the text of the error that a function raises."""
    try:
        check(*arguments)
    except InputError as error:
        yield str(error)


def _loggers(config: Config) -> Iterator[str]:
    """Yield unknown callbacks, metrics and trackers, and trackers without their package."""
    for name in config.training.callbacks:
        yield from _raised(CALLBACKS.get, name)
    # A callback may bring the metric.
    if not config.training.callbacks and config.evaluation.metric not in FOLLOWED:
        yield str(unknown_name("evaluation.metric", config.evaluation.metric, FOLLOWED, len(FOLLOWED)))
    for name in config.training.loggers:
        yield from _raised(LOGGERS.get, name)
        tracker = LOGGERS.get(name) if name in LOGGERS else Tracker
        if tracker.package and not is_installed(tracker.package):
            source = f"'dglkge[{tracker.extra}]'" if tracker.extra else tracker.package
            yield f"training.loggers has {name}, and {tracker.package} is not installed: pip install {source}"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; nothing is imported."""
    spec = importlib.util.find_spec(package)
    # A folder of that name, such as wandb makes for its runs, is found as a package without a file.
    return spec is not None and spec.origin is not None


def _storage(config: Config) -> Iterator[str]:
    """Yield an output that no run can have, and a storage that cannot be opened."""
    if is_url(config.output):
        reason = "checkpoint.storage takes the URL to which versions are committed as well"
        yield f"output is {config.output!r}; expected a folder of this machine: {reason}"
    output, url = Path(config.output), config.checkpoint.storage
    for folder in (output, output / CHECKPOINT_FOLDER):
        if not is_url(config.output) and find_bigraph(folder) is not None:
            # Its ids are not those of a data set: a run would write over it.
            resumed = output.with_name(output.name + "_resumed")
            convert = f"dglkge checkpoint convert {folder} --to run --dataset {config.dataset}"
            problem = f"{folder} was written by PyTorch-BigGraph, with ids of its own"
            yield f"{problem}; to go on from it: {convert} --output {resumed}, then output={resumed}"
    if url:
        yield from (f"checkpoint.storage: {text}" for text in _raised(open_store, url))
    if url.startswith("file:") and Path("/" + url[5:].lstrip("/")).resolve() == output.resolve():
        yield f"checkpoint.storage is {url!r}, which is the run's own folder; expected another one"


def _this_process(config: Config) -> Iterator[str]:
    """Yield a device, a type or a compiler that is configured and that this process does not have."""
    device, cuda_problem = config.training.device, problem_of(CUDA_DEVICE)
    if problem_of(device):
        yield from _raised(open_device, device, "training.device")
    is_cuda = device in (AUTO_DEVICE, CUDA_DEVICE) and cuda_problem is None
    yield from autocast_problems(config.dense.autocast, CUDA_DEVICE if is_cuda else CPU_DEVICE)
    compiles_module, compiles_loss = config.dense.compile, config.training.compile
    needs_compiler = compiles_module or (compiles_loss and device == STAGED_CPU_DEVICE)
    problem = compiler_problem() if needs_compiler else None
    if problem and compiles_module:
        yield f"dense.compile is true, which takes a C++ compiler, and {problem}; allowed here: false"
    loss = "training.compile is true, which compiles the loss of sampled negatives on a device"
    if compiles_loss and (device == CPU_DEVICE or (device == AUTO_DEVICE and cuda_problem)):
        value = CPU_DEVICE if device == CPU_DEVICE else f"auto, and {cuda_problem}"
        allowed = f"{CUDA_DEVICE} or {STAGED_CPU_DEVICE}; the CPU has compiled loops"
        yield f"{loss}, and training.device is {value}; allowed: {allowed}"
    elif problem and compiles_loss and device == STAGED_CPU_DEVICE:
        yield f"{loss} by a C++ compiler, and {problem}; allowed here: false"


def autocast_problems(name: str, device_type: str) -> Iterator[str]:
    """Yield why a device has no autocast of a type that is configured."""
    problem = autocast_problem(device_type, NARROW_TYPES[name]) if name in NARROW_TYPES else None
    if problem:
        fits = [other for other, dtype in NARROW_TYPES.items() if not autocast_problem(device_type, dtype)]
        yield f"dense.autocast is {name} and {problem}; allowed here: {' or '.join(['none', *fits])}"


def _empty_splits(config: Config, dataset: Dataset) -> Iterator[str]:
    """Yield splits that are to be ranked and have no triples."""
    split, interval = config.evaluation.split, config.evaluation.valid_every_epochs
    for setting, value, name, allowed in (
        ("evaluation.split", split, split, "none"),
        ("evaluation.valid_every_epochs", interval, VALID, 0),
    ):
        if value != allowed and not len(dataset.split(name)):
            problem = f"{setting} is {value}, and {dataset.path} has no {name} triples to rank"
            yield f"{problem}; allowed is {allowed}, or a data set with that split"


def _confidences(config: Config, dataset: Dataset) -> Iterator[str]:
    """Yield weights that are missing, and the largest if it is no confidence."""
    weights = dataset.train_weights()
    if weights is None:
        problem = f"loss.confidences is true, and the triples of {dataset.path} have no weights"
        yield f"{problem}; allowed: false, or a data set with a column of weights"
    elif len(weights) and weights.max() > 1:
        place = int(weights.argmax())
        triple = f"training triple {place} of {dataset.path}"
        problem = f"loss.confidences is true, and {triple} has the weight {weights[place]:g}"
        yield f"{problem}; allowed: weights in [0, 1]"


def _memory(config: Config, dataset: Dataset, world: World) -> Iterator[str]:
    """Yield that the run does not fit into this machine; the plan is logged before."""
    # Imported here: runtime imports DGL, which those who check a configuration alone do without.
    from dglkge.distributed.dgl_import import table_folder
    from dglkge.distributed.runtime import num_servers

    size = dataset.size()
    if not config.training.check_memory or not world.is_machine_leader or world.machine >= len(size.parts):
        return
    # A process alone has no servers: its tables are its own memory.
    servers = num_servers() if world.launched else 0
    planned = plan_memory(config, size, world.trainers_per_machine, servers)[world.machine]
    in_files = bool(table_folder()) or (not world.launched and config.tables.storage == "disk")
    lacking = misfits(planned, host_memory(config.output, world.job), has_started=True, in_files=in_files)
    if lacking:
        logger.error("%s", describe_hosts([planned]))
        problem = f"the configuration does not fit into machine {world.machine}: {'; '.join(lacking)}"
        yield f"{problem} (training.check_memory=false trains all the same)"
