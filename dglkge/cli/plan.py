"""``dglkge plan``: memory, shared memory, disk and time of a configuration on each machine."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dglkge.cli.common import CONFIG, command, config_words, option, print_columns, print_text
from dglkge.config import Config, load_config
from dglkge.data.dataset_files import DatasetSize, Field, locate_partitions, read_dataset_size
from dglkge.distributed.addresses import read_ip_config
from dglkge.distributed.jobs import human_bytes, parse_bytes
from dglkge.errors import InputError
from dglkge.launch.machine import usable_cores, usable_gpus
from dglkge.planning import epoch
from dglkge.planning.defaults import adapted, describe, most_trainers
from dglkge.planning.host import HostMemory, host_memory
from dglkge.planning.memory import PlannedHost, misfits, plan_memory
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE

DOES_NOT_FIT_STATUS = 2
MEASURED_SECONDS = 0.3
PRODUCT_ROWS, COPY_BYTES = 1000, 2**26


@command(
    *CONFIG,
    option("--ip-config FILE", "the machines; without it one for each partition"),
    option("--num-trainers", "on each machine (default: as dglkge-launch)", type=int),
    option("--num-servers", "on each machine; 0: none, one process alone", default=1),
    option("--max-memory SIZE", "memory for ranges of tables on a disk, as 16G (default: what is free)"),
    status=lambda report: DOES_NOT_FIT_STATUS if report["problems"] else 0,
)
def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Estimate what training a configuration needs on each machine: tables, optimizer state, edges,
    buffers, libraries, /dev/shm, disk for the checkpoint, and the time of an epoch. Nothing is started. For
    tables larger than memory it proposes sampling.num_ranges, and predicts what an epoch reads and writes.
    Exit status 2 if it does not fit into this machine or cannot be trained.

    Examples
    --------
      dglkge plan --recipe fb15k237/complex --num-trainers 2
      dglkge plan runs/mine                                    what a run needs
      dglkge plan data/mine model.dimension=200                the defaults on a data set
      dglkge plan my.yaml model.dimension=200 --ip-config ip_config.txt --json
      dglkge plan large.yaml --max-memory 16G sampling.bucket_order=hilbert
    """
    # Here: --help does without torch.
    from dglkge.config.refusals import refuse
    from dglkge.data.dataset import Dataset
    from dglkge.training.building.checks import check_config, check_dataset

    file, words = config_words(args)
    config = load_config(file, words, args.imports)
    defaults = adapted(file, words, Path(config.dataset))
    config = load_config(file, [*words, *defaults], args.imports)
    # Mistakes in the configuration first: the measurement below takes a second.
    check_config(config)
    check_dataset(config, Dataset.open(Path(config.dataset)))
    size = read_dataset_size(config.dataset)
    num_machines = len(size.parts if args.ip_config is None else read_ip_config(args.ip_config))
    if num_machines != len(size.parts):
        raise InputError(
            f"{args.ip_config} has {num_machines} machines and {config.dataset} has {len(size.parts)} "
            "partitions; each machine holds one partition"
        )
    refuse(config, num_machines)
    device = config.training.device
    gpus = usable_gpus() if device in (AUTO_DEVICE, CUDA_DEVICE) else ()
    num_trainers = args.num_trainers
    if num_trainers is None:
        num_trainers = len(gpus) or min(most_trainers(config, size), usable_cores())
        num_trainers = num_trainers if args.num_servers else 1
    if num_trainers < 1 or args.num_servers < 0 or (args.num_servers == 0 and num_trainers > 1):
        raise InputError("--num-trainers must be at least 1, and 1 where --num-servers is 0")
    hosts = plan_memory(config, size, num_trainers, args.num_servers)
    there = host_memory(config.output)
    ranges = plan_walks(args, config, size, hosts, there)
    seconds = epoch.epoch_seconds(config, size, num_trainers, measure_rates(config))

    # Every machine of the plan is compared with this one, as the others' resources are not known here.
    problems, problems_in_files = (
        [f"machine {host.machine}: {text}" for host in hosts for text in misfits(host, there, in_files=files)]
        for files in (False, True)
    )
    # The launcher puts tables into files where /dev/shm is too small.
    in_files = config.tables.storage == "disk" or (bool(problems) and not problems_in_files)
    problems = problems_in_files if in_files else problems
    has_gpus = len(gpus) >= num_trainers
    if device == CUDA_DEVICE and not has_gpus:
        here = f"{len(gpus)} GPU(s) here"
        problems.append(f"training.device is cuda, for {num_trainers} trainer(s) a machine: {here}")
    on_device = device not in (AUTO_DEVICE, CPU_DEVICE) or (device == AUTO_DEVICE and has_gpus)
    machines = [_machine(host, in_files) for host in hosts]
    for machine, walk in zip(machines, ranges or []):
        machine["ranges"] = walk and dataclasses.asdict(walk)
    free = there._asdict()
    claims = dataclasses.asdict(free.pop("claims"))
    return {
        "machines": machines,
        "this_machine": {**free, "other_jobs": claims.pop("num_jobs"), "planned_by_other_jobs": claims},
        "chosen": defaults,
        "num_epochs": config.training.num_epochs,
        "epoch_seconds": float(f"{seconds:.3g}"),
        "on_device": on_device,
        "tables_in_files": in_files,
        "problems": problems,
    }


def plan_walks(
    args: argparse.Namespace, config: Config, size: DatasetSize, hosts: list[PlannedHost], there: HostMemory
) -> list[epoch.RangePlan | None] | None:
    """Plan each machine's walk over its ranges (None: no number fits); None if no walk is needed."""
    memory = there.memory_bytes if args.max_memory is None else parse_bytes(args.max_memory)
    num_ranges = config.sampling.num_ranges
    fits = all(host.needed_bytes(in_files=False) <= memory for host in hosts)
    if args.max_memory is None and num_ranges == 1 and fits:
        return None
    description, _ = locate_partitions(config.dataset)
    types = [(lhs, rhs) for lhs, rhs, *_ in description[Field.EDGE_TYPES]]
    parts = list(zip(size.parts, (epoch.range_budget(host, memory) for host in hosts)))
    proposed = [epoch.propose_ranges(config, part, types, budget) for part, budget in parts]
    # One number for all machines: that of the machine that needs the most.
    common = num_ranges if num_ranges > 1 else max(number or epoch.MOST_RANGES for number in proposed)
    return [
        None if num_ranges == 1 and number is None else epoch.plan_ranges(config, part, types, common, budget)
        for (part, budget), number in zip(parts, proposed)
    ]


def _describe_walk(machine: int, walk: Mapping[str, Any] | None) -> str:
    """Return the line about the ranges of a machine."""
    if walk is None:
        return f"ranges, machine {machine}: no number of them fits into the memory that is left for tables"
    sizes = {name: human_bytes(value) for name, value in walk.items() if name.endswith("_bytes")}
    return (
        f"ranges, machine {machine}: with tables on a disk and {sizes['budget_bytes']} for "
        f"{sizes['table_bytes']} of rows and state, sampling.num_ranges={walk['num_ranges']} needs "
        f"{sizes['pair_bytes']} at a time; an epoch ({walk['order']}) loads {walk['loads']} ranges, "
        f"reads {sizes['read_bytes']} and writes {sizes['written_bytes']}"
    )


def measure_rates(config: Config) -> epoch.Rates:
    """Measure this machine for about a second: matmuls in the run's type, and a copy."""
    import torch  # here: a configuration with mistakes is refused without loading it

    dtype = config.training.matmul_dtype
    # "auto" measures both types at the first start of a run; the estimate takes the faster one.
    may_be_narrow = dtype == "auto" and config.training.kernels == "auto"
    dim = config.model.dimension
    products = []
    for name in ("float32", "bfloat16") if may_be_narrow else (dtype,):
        queries, candidates = torch.randn(2, PRODUCT_ROWS, dim).to(getattr(torch, name, torch.float32))
        products.append(_seconds_of(functools.partial(torch.matmul, queries, candidates.T)))
    source, target = torch.ones(2, COPY_BYTES // 4)
    copy = _seconds_of(lambda: target.copy_(source))
    # A multiplication and an addition for each of rows x rows x dim; a copy reads and writes each byte.
    return epoch.Rates(2 * PRODUCT_ROWS**2 * dim / min(products), 2 * COPY_BYTES / copy)


def _seconds_of(work: Callable[[], Any]) -> float:
    """Return the shortest time of some repetitions: other work on the machine only adds to it."""
    work()  # the first call allocates and starts threads
    once = timeit.timeit(work, number=1)
    return min([once, *timeit.repeat(work, number=1, repeat=int(MEASURED_SECONDS / once))])


def _machine(host: PlannedHost, in_files: bool) -> dict[str, Any]:
    """Return a machine of the plan as JSON has it."""
    return {
        "machine": host.machine,
        "memory": dict(host.memory),
        "memory_bytes": host.memory_bytes,
        "needed_memory_bytes": host.needed_bytes(in_files),
        "shared_memory_bytes": host.structure_bytes if in_files else host.shared_memory_bytes,
        "checkpoint_disk_bytes": host.disk_bytes,
        "file_bytes": host.file_bytes,
        "device_bytes_of_a_trainer": host.device_bytes,
    }


TOTALS = {
    "memory, without mapped files": ("needed_memory_bytes", "memory_bytes"),
    "of this in /dev/shm": ("shared_memory_bytes", "shared_memory_bytes"),
    "disk for the checkpoint": ("checkpoint_disk_bytes", "disk_bytes"),
    "GPU memory of each trainer": ("device_bytes_of_a_trainer", ""),
}
"""Rows of the table: the field of a machine of the plan, and that of this machine."""


@plan.shows
def _print_plan(report: dict[str, Any], _args: argparse.Namespace) -> None:
    """Print a column for each machine of the plan, and one for the free resources of this machine."""
    machines, there = report["machines"], report["this_machine"]
    on_device, in_files = report["on_device"], report["tables_in_files"]
    rows = [
        [item, *(human_bytes(machine["memory"][item]) for machine in machines), ""]
        for item in machines[0]["memory"]
        if any(machine["memory"][item] for machine in machines)
    ]
    for item, (planned, here) in TOTALS.items():
        if here or on_device:
            free = human_bytes(there[here]) if here else ""
            rows.append([item, *(human_bytes(machine[planned]) for machine in machines), free])
    print_columns(["", *(f"machine {machine['machine']}" for machine in machines), "here now"], rows)
    if there["other_jobs"]:
        planned = there["planned_by_other_jobs"]
        memory, segments = (human_bytes(planned[name]) for name in ("memory_bytes", "shared_memory_bytes"))
        print_text(
            f"{there['other_jobs']} other job(s) run here (dglkge job list); 'here now' is without the "
            f"{memory} of memory, and {segments} in /dev/shm, that they still take"
        )
    # Rates of a GPU are not measured.
    where = "the CPUs of machines like this one" if on_device else "machines like this one"
    seconds, epochs = report["epoch_seconds"], report["num_epochs"]
    print_text(f"an epoch should take about {seconds:.3g} s on {where}; there are {epochs}")
    if report["chosen"]:
        print_text(describe(report["chosen"]))
    for problem in report["problems"]:
        print_text(f"does not fit: {problem}")
    for machine in machines:
        if "ranges" in machine:
            print_text(_describe_walk(machine["machine"], machine["ranges"]))
    if in_files:
        files = human_bytes(max(machine["file_bytes"] for machine in machines))
        segments = human_bytes(max(machine["shared_memory_bytes"] for machine in machines))
        where = "(tables.storage, tables.folder)"
        print_text(f"tables are files of {files} a machine {where}; /dev/shm needs {segments}")
