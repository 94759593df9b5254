"""Tables larger than memory: speed in bucket order on a disk, beside the same order in memory.

    python benchmarks/out_of_core.py --work /some/disk
    python benchmarks/out_of_core.py --entities 20000000 --edges 100000000 --beside 0 \\
        --work /some/disk --peer pbg --json figures.json

It makes a synthetic graph (or takes --dataset) and trains it several times, always in the same bucket order
with the same seed:

* in memory, without a limit;
* on disk: tables in files below --work, all processes in a control group whose memory is limited to --share
  of the rows and the optimizer state, plus --beside;
* killed: as on disk, but kill -9 ends all processes in the middle of the last epoch, and the same command
  goes on from the last commit;
* PyTorch-BigGraph with --peer-parts partitions, in the same control group and on the same disk, with --peer.

Linux writes pages that have been dirty for vm.dirty_expire_centisecs, 30 seconds, also those of a file that
is still being changed; training then waits at each page's next write. --expire-seconds sets it for the time
of the benchmark, for the whole machine.

Tables at the end of our runs are compared bit by bit. Edges/s is that of an epoch after the first, without
the commit at the end. Bytes are those of the disk below --work in that epoch, by the kernel's counters, so
nothing else should use it meanwhile. It needs the right to make a control group with the memory controller,
usually root; the group is removed at the end. Markdown goes to stdout, everything to --json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, LATEST_LINK, RUN_STATS_FILE, Progress
from dglkge.config import load_config
from dglkge.config.schema import BUCKET_ORDERS
from dglkge.distributed.jobs import parse_bytes
from dglkge.errors import DglkgeError, InputError
from dglkge.planning.epoch import TABLE_ITEMS
from measuring import our_job, pbg_peer
from measuring.disk_traffic import Disk, DiskTraffic
from measuring.machine import describe_machine
from measuring.memory_group import MemoryGroup
from measuring.peer_environment import peer_python
from measuring.processes import run_watched
from measuring.run_figures import RunFigures

MEMORY, DISK, KILLED, PEER = "in memory", "on disk, limited", "killed and resumed", "PyTorch-BigGraph"
POLL_SECONDS = 0.1
COMPARED_ROWS = 1 << 20
EXPIRY = Path("/proc/sys/vm/dirty_expire_centisecs")
COMMITS_PER_EPOCH = 3
"""Of the run that is killed: it then goes on inside an epoch."""

HEADER = (
    "| run | memory limit, GB | peak, GB | edges/s | : in memory | read, GB | written, GB "
    "| predicted, each, GB | same tables |\n|---|--:|--:|--:|--:|--:|--:|--:|---|"
)


@dataclass(frozen=True)
class Plan:
    """What ``dglkge plan`` says of the configuration.

    Attributes
    ----------
    table_bytes : int
        Rows and optimizer state.
    own_bytes : int
        All else that is not in the page cache: interpreters, batches, the graph's structure.
    ranges : dict or None
        Of :class:`dglkge.planning.epoch.RangePlan`; None if no number of ranges fits.
    """

    table_bytes: int
    own_bytes: int
    ranges: dict[str, Any] | None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--work",
        required=True,
        type=Path,
        help="folder on the disk: graph, tables, runs; removed unless --keep",
    )
    add("--dataset", type=Path, help="folder written by partition_tools/partition.py, instead of a graph")
    add("--entities", type=int, default=200_000, help="of the graph (%(default)s)")
    add("--relations", type=int, default=100, help="of the graph (%(default)s)")
    add("--edges", type=int, default=2_000_000, help="of the graph (%(default)s)")
    add("--dimension", type=int, default=100)
    add("--negatives", type=int, default=100, help="uniform negatives of a chunk (%(default)s)")
    add("--ranges", type=int, default=0, metavar="P", help="ranges; 0: what dglkge plan proposes")
    add("--order", default="inside_out", choices=BUCKET_ORDERS, help="sampling.bucket_order (%(default)s)")
    add("--share", type=float, default=0.25, help="of rows and state that fit into memory (%(default)s)")
    add("--beside", default="plan", metavar="SIZE", help="memory besides, for all that is not rows and "
        "state, such as 1G; plan: what dglkge plan counts; 0: none (%(default)s)")  # fmt: skip
    add("--limit", metavar="SIZE", help="the limit itself, instead of --share and --beside")
    add("--expire-seconds", type=int, default=0, metavar="S", help="time after which the kernel writes dirty "
        "pages, while the benchmark runs; 0: as it is (%(default)s)")  # fmt: skip
    add("--epochs", type=int, default=2, help="of each run; those after the first count (%(default)s)")
    add("--trainers", type=int, default=2)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--repeats", type=int, default=1, help="of the runs in memory and on disk, in turn (%(default)s)")
    add("--no-kill", action="store_true", help="leave out the run that is killed")
    add("--peer", choices=["pbg"], help="run PyTorch-BigGraph as well")
    add("--peer-python", type=Path, help="interpreter that has it (default: an environment is made)")
    add("--peer-folder", type=Path, default=Path(".venv-pbg"), help="where that is made (%(default)s)")
    add("--peer-parts", type=int, default=8, help="partitions of its entities (%(default)s)")
    add("--peer-set", action="append", default=[], metavar="KEY=JSON", help="override one of its settings")
    add("--pip-flag", action="append", default=[], help="for the peer's environment")
    add("--partition-options", default="", help='more options of partition.py, e.g. "--max_memory 4GB"')
    add("--limit-seconds", type=float, default=7200.0, help="of each run (%(default)s)")
    add("--keep", action="store_true", help="keep graph and logs below --work; a kept graph is used again")
    add("--json", type=Path, help="file for all figures")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse mistakes before anything runs.

    Raises
    ------
    InputError
    """
    for name, least in (("epochs", 2), ("repeats", 1), ("trainers", 1), ("ranges", 0), ("expire_seconds", 0)):
        if getattr(args, name) < least:
            raise InputError(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}"
            )
    if args.expire_seconds and not os.access(EXPIRY, os.W_OK):
        raise InputError(f"--expire-seconds needs the right to write {EXPIRY}, usually root's")
    if not 0 < args.share < 1:
        raise InputError(f"--share must be between 0 and 1, got {args.share:g}")
    for size in (args.limit, None if args.beside in ("plan", "0") else args.beside):
        if size is not None:
            parse_bytes(size)
    args.work.mkdir(parents=True, exist_ok=True)
    if Disk.of(args.work).file_system in ("tmpfs", "ramfs"):
        raise InputError(f"--work must be on a disk; {args.work} is in memory")
    # Made and removed: without the right to do so, nothing needs to start.
    with MemoryGroup(1 << 40):
        pass


def settings(args: argparse.Namespace, dataset: Path) -> list[str]:
    """Return the settings that all runs of ours share."""
    return [
        f"dataset={dataset}",
        f"model.dimension={args.dimension}",
        f"negatives.num_uniform={args.negatives}",
        f"training.num_epochs={args.epochs}",
        # "auto" measures at the start of each run, and two runs could choose different types.
        "training.matmul_dtype=float32",
        # The optimizer of PyTorch-BigGraph: one number of state for each row.
        "optimizer.name=row_adagrad",
        "regularizer.name=none",
        f"sampling.bucket_order={args.order}",
        "checkpoint.every_epochs=0",
        # In the background it would hold a copy of all rows in memory.
        "checkpoint.background=false",
        "evaluation.split=none",
        *args.set,
    ]


def make_dataset(args: argparse.Namespace, work: Path) -> Path:
    """Return the given data set, or one of a synthetic graph; a kept one is taken as it is."""
    if args.dataset is not None:
        return Path(args.dataset).resolve()
    name = f"{args.entities}-{args.relations}-{args.edges}"
    triples, dataset = work / f"triples-{name}", work / f"dataset-{name}"
    if dataset.exists():
        return dataset
    shutil.rmtree(triples, ignore_errors=True)
    script = our_job.SCRIPT.with_name("synthetic_graph.py")
    command = [sys.executable, str(script), "--format", "parquet", "--output", str(triples)]
    for option in ("entities", "relations", "edges"):
        command += [f"--{option}", str(getattr(args, option))]
    run_watched(command, work / "synthetic.log", args.limit_seconds, our_job.VARIABLES)
    program = our_job.REPOSITORY / "partition_tools" / "partition.py"
    command = [sys.executable, str(program), "--input", str(triples), "--output", str(dataset)]
    command += args.partition_options.split()
    run_watched(command, work / "partition.log", args.limit_seconds, our_job.VARIABLES)
    shutil.rmtree(triples)
    return dataset


def read_plan(sets: Sequence[str], trainers: int, work: Path, max_memory: int = 0) -> Plan:
    """Run ``dglkge plan``.

    Raises
    ------
    RuntimeError
        If it prints no plan.
    """
    config = work / "plan.yaml"
    config.write_text("output: runs/planned\n", encoding="utf-8")
    command = [sys.executable, "-m", "dglkge.cli.main", "plan", str(config), "--json"]
    command += ["--num_trainers", str(trainers)]
    for setting in [*sets, "tables.storage=disk", f"output={work / 'planned'}"]:
        command += ["--set", setting]
    if max_memory:
        command += ["--max_memory", str(max_memory)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **our_job.VARIABLES}
    )
    # Exit status 2 with a plan: it does not fit into the memory of this moment, which is no concern here.
    try:
        (machine,) = json.loads(done.stdout)["machines"]
    except ValueError:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}") from None
    memory = machine["memory"]
    table_bytes = memory["tables"] + memory["optimizer state"]
    own_bytes = sum(size for name, size in memory.items() if name not in TABLE_ITEMS)
    return Plan(table_bytes, own_bytes, machine.get("ranges"))


def memory_limit(args: argparse.Namespace, plan: Plan) -> int:
    """Return the limit of the control group, in bytes."""
    if args.limit is not None:
        return parse_bytes(args.limit)
    beside = {"plan": plan.own_bytes, "0": 0}.get(args.beside)
    return int(args.share * plan.table_bytes) + (parse_bytes(args.beside) if beside is None else beside)


def choose_ranges(
    args: argparse.Namespace, sets: list[str], limit: int, work: Path
) -> tuple[list[str], Plan]:
    """Return the settings with a number of ranges, and the plan of it in the limit.

    Raises
    ------
    InputError
        If no number fits.
    """
    if args.ranges > 1:
        sets = [*sets, f"sampling.num_ranges={args.ranges}"]
    plan = read_plan(sets, args.trainers, work, limit)
    if plan.ranges is None:
        raise InputError(
            f"no number of ranges fits: of a limit of {limit / 1e9:.2f} GB all else takes "
            f"{plan.own_bytes / 1e9:.2f} GB; take a larger graph, --beside, or --ranges"
        )
    if args.ranges > 1:
        return sets, plan
    return [*sets, f"sampling.num_ranges={plan.ranges['num_ranges']}"], plan


def last_version(run: Path) -> dict[str, Path]:
    """Return the HDF5 files of a run's newest version by their names without the version."""
    folder = run / CHECKPOINT_FOLDER / LATEST_LINK
    return {path.name.rsplit(".v", 1)[0]: path for path in folder.glob("*.h5")}


def different_tables(first_run: Path, second_run: Path) -> list[str]:
    """Return the datasets of two runs' newest versions that are not equal bit by bit.

    Rows, ids and optimizer state of each part and of the relations; not the attributes, which have the
    configuration.
    """
    first, second = last_version(first_run), last_version(second_run)
    if sorted(first) != sorted(second) or not first:
        return [f"files {sorted(first)} and {sorted(second)}"]
    differences = []
    for stem, path in sorted(first.items()):
        with h5py.File(path) as left, h5py.File(second[stem]) as right:
            names = {name: _datasets(file) for name, file in (("left", left), ("right", right))}
            if names["left"] != names["right"]:
                differences.append(stem)
            both = [name for name in names["left"] if name in names["right"]]
            differences += [f"{stem}:{name}" for name in both if not _equal(left[name], right[name])]
    return differences


def _datasets(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(names)


def _equal(left: h5py.Dataset, right: h5py.Dataset) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # As bytes: a NaN equals itself, and 0.0 does not equal -0.0.
    return all(
        left[start : start + COMPARED_ROWS].tobytes() == right[start : start + COMPARED_ROWS].tobytes()
        for start in range(0, len(left), COMPARED_ROWS)
    )


def forget_cached(folder: Path) -> None:
    """Drop a folder's clean pages from the page cache: a run in a group would use those of the run before."""
    for path in folder.rglob("*"):
        if path.is_file():
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def limited(limit: int, figures: dict[str, Any]) -> Iterator[MemoryGroup]:
    """Make a group for a run; its peak is noted at the end, and a failure for lack of memory is named."""
    with MemoryGroup(limit) as group:
        try:
            yield group
        except RuntimeError as error:
            if killed := group.out_of_memory_kills():
                raise RuntimeError(
                    f"the limit of {limit / 1e9:.2f} GB killed {killed} processes: {error}"
                ) from None
            raise
        finally:
            figures["peak_group_bytes"] = group.peak_bytes()


@contextlib.contextmanager
def expiry(seconds: int) -> Iterator[None]:
    """Let the kernel write dirty pages after so many seconds; 0 changes nothing."""
    if not seconds:
        yield
        return
    before = EXPIRY.read_text(encoding="ascii")
    EXPIRY.write_text(f"{100 * seconds}\n", encoding="ascii")
    try:
        yield
    finally:
        EXPIRY.write_text(before, encoding="ascii")


def traffic_of_epochs(run: RunFigures, traffic: DiskTraffic) -> dict[str, float]:
    """Return the bytes of the epochs after the first: the median over them."""
    epoch_bytes = [
        traffic.between(epoch.ended_at - epoch.seconds, epoch.ended_at) for epoch in run.epochs[1:]
    ]
    read, written = (statistics.median(column) for column in zip(*epoch_bytes))
    return {"read_bytes": read, "written_bytes": written}


def train_once(
    args: argparse.Namespace, sets: Sequence[str], folder: Path, limit: int, disk: Disk
) -> dict[str, Any]:
    """Train once, in memory or with a limit on disk; returns the figures."""
    figures: dict[str, Any] = {"limit_bytes": limit}
    storage = [f"tables.folder={folder.parent / 'tables'}"] if limit else []
    sets = [*sets, f"tables.storage={'disk' if limit else 'memory'}", *storage]
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(limited(limit, figures)) if limit else None
        traffic = stack.enter_context(DiskTraffic(disk))
        within: Callable[[list[str]], list[str]] = list if group is None else group.command
        run = our_job.train(None, sets, args.trainers, folder, args.limit_seconds, within=within)
    return {**figures, **traffic_of_epochs(run, traffic), **run.to_dict()}


def train_killed(args: argparse.Namespace, sets: Sequence[str], folder: Path, limit: int) -> dict[str, Any]:
    """Train on disk, kill everything in the middle of the last epoch, and go on; returns the figures.

    Raises
    ------
    RuntimeError
        If the job ends before that, or fails.
    """
    figures: dict[str, Any] = {"limit_bytes": limit}
    sets = [*sets, "tables.storage=disk", f"tables.folder={folder.parent / 'tables'}"]
    with limited(limit, figures) as group:
        command = group.command(our_job.job_command(None, sets, args.trainers, folder))
        log, end = folder / "killed.log", time.monotonic() + args.limit_seconds
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **our_job.VARIABLES}
            )
        try:
            while not _is_in_the_middle(folder / "run", args.epochs):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the job to be killed has ended or takes too long; its log is {log}")
                time.sleep(POLL_SECONDS)
        finally:
            group.kill()
            process.wait()
        figures["killed_at"] = _last_line(folder / "run")
        run = our_job.train(None, sets, args.trainers, folder, args.limit_seconds, within=group.command)
    return {**figures, **run.to_dict()}


def _is_in_the_middle(run: Path, num_epochs: int) -> bool:
    """Return whether a job is past the middle of its last epoch, and has a commit."""
    line = _last_line(run)
    if not line or line["epoch"] < num_epochs - 1:
        return False
    return bool(line[Progress.BATCHES_DONE] >= line["num_batches"] // 2 and last_version(run))


def _last_line(run: Path) -> dict[str, Any]:
    """Return the last whole line of a run's statistics of epochs; empty if there is none."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (run / RUN_STATS_FILE).read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            entry: dict[str, Any] = json.loads(line)
            if "batches_done" in entry:
                return entry
    return {}


def train_peer(
    args: argparse.Namespace, sets: Sequence[str], folder: Path, limit: int, disk: Disk
) -> dict[str, Any]:
    """Train PyTorch-BigGraph with the limit; returns the figures.

    Its speed counts the time in which it trains, loads and writes partitions, and not its commit.
    """
    figures: dict[str, Any] = {"limit_bytes": limit}
    python = peer_python("pbg", args.peer_python, args.peer_folder, args.pip_flag).absolute()
    # Half of its negatives are the other edges of the chunk, half are drawn.
    in_batch = pbg_peer.BATCH_NEGATIVES
    sets_of_peer = [f"num_uniform_negs={max(1, args.negatives - in_batch)}", *args.peer_set]
    shape = (args.trainers, args.peer_parts, sets_of_peer)
    with limited(limit, figures) as group, DiskTraffic(disk) as traffic:
        run = pbg_peer.train(
            python,
            load_config(None, [*sets, "output=unused"]),
            *shape,
            folder,
            args.limit_seconds,
            group.command,
        )
    log = (folder / "train.log").read_text(encoding="utf-8")
    starts = [moment for moment, message in pbg_peer.timed_lines(log) if message.startswith("Starting epoch")]
    loading = pbg_peer.loading_seconds(log)
    speeds = [epoch.edges / (epoch.seconds + more) for epoch, more in zip(run.epochs, loading)]
    ends = [*starts[1:], pbg_peer.timed_lines(log)[-1][0]]
    passed = [traffic.between(*period) for period in zip(starts, ends)][1:]
    read, written = (statistics.median(column) for column in zip(*passed))
    return {
        **figures,
        **run.to_dict(),
        "edges_per_second": statistics.median(speeds[1:]),
        "edges_per_second_without_io": run.edges_per_second,
        "loading_seconds": loading,
        "read_bytes": read,
        "written_bytes": written,
    }


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run everything in turn; lines of the table go to stderr as they come."""
    dataset = make_dataset(args, work)
    shared = settings(args, dataset)
    first = read_plan(shared, args.trainers, work)
    limit = memory_limit(args, first)
    shared, plan = choose_ranges(args, shared, limit, work)
    disk = Disk.of(work)
    figures: dict[str, Any] = {
        "machine": describe_machine(),
        "disk": str(disk),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "plan": {"table_bytes": plan.table_bytes, "own_bytes": plan.own_bytes, "ranges": plan.ranges},
        "runs": {MEMORY: [], DISK: []},
    }
    runs: dict[str, list[dict[str, Any]]] = figures["runs"]

    def add(name: str, run: dict[str, Any], folder: Path) -> None:
        if name in (DISK, KILLED):
            run["different_tables"] = different_tables(reference, folder / "run")
        runs.setdefault(name, []).append(run)
        print(row(name, [run], figures), file=sys.stderr, flush=True)

    reference = work / "job-memory-0" / "run"
    for turn in range(args.repeats):
        for name, kind, kind_limit in ((MEMORY, "memory", 0), (DISK, "disk", limit)):
            folder = _new(work / f"job-{kind}-{turn}")
            forget_cached(dataset)
            add(name, train_once(args, shared, folder, kind_limit, disk), folder)
            if folder / "run" != reference:
                shutil.rmtree(folder / "run")
    if not args.no_kill:
        folder = _new(work / "job-killed")
        forget_cached(dataset)
        period = max(1, -(-_last_line(reference)["num_batches"] // COMMITS_PER_EPOCH))
        add(
            KILLED, train_killed(args, [*shared, f"checkpoint.every_batches={period}"], folder, limit), folder
        )
        shutil.rmtree(folder / "run")
    shutil.rmtree(reference)
    if args.peer:
        folder = _new(work / "job-peer")
        try:
            add(PEER, train_peer(args, shared, folder, limit, disk), folder)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            # It may not fit into the limit, or not be there to install; the other figures stay.
            figures["peer_problem"] = str(error)
            print(f"out_of_core.py: {PEER}: {error}", file=sys.stderr)
        for name in ("model", "train", "valid", "test"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return figures


def _new(folder: Path) -> Path:
    """Return a folder's name, without what an earlier call has left there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def row(name: str, repeats: Sequence[dict[str, Any]], figures: dict[str, Any]) -> str:
    """Return the row of a run: medians over its repeats."""

    def middle(key: str) -> float:
        return statistics.median(run.get(key, 0) for run in repeats)

    in_memory = [run["edges_per_second"] for run in figures["runs"][MEMORY]]
    speed, limit = middle("edges_per_second"), repeats[0]["limit_bytes"]
    is_on_disk, is_compared = name in (DISK, PEER), name in (DISK, KILLED)
    differing = [table for run in repeats for table in run.get("different_tables", ())]
    # The epoch that was killed has no whole figures.
    is_whole = name != KILLED
    cells = [
        name,
        f"{limit / 1e9:.2f}" if limit else "none",
        f"{middle('peak_group_bytes') / 1e9:.2f}" if limit else "",
        f"{speed:,.0f}" if is_whole else "",
        f"{speed / statistics.median(in_memory):.2f}" if is_whole else "",
        f"{middle('read_bytes') / 1e9:.2f}" if is_on_disk else "",
        f"{middle('written_bytes') / 1e9:.2f}" if is_on_disk else "",
        f"{figures['plan']['ranges']['read_bytes'] / 1e9:.2f}" if name == DISK else "",
        (f"no: {', '.join(differing)}" if differing else "yes") if is_compared else "",
    ]
    return "| " + " | ".join(cells) + " |"


def report(figures: dict[str, Any]) -> str:
    """Return the table, and a line about the plan."""
    plan, ranges = figures["plan"], figures["plan"]["ranges"]
    lines = [
        *HEADER.splitlines(),
        *(row(name, repeats, figures) for name, repeats in figures["runs"].items() if repeats),
        "",
        f"Rows and state: {plan['table_bytes'] / 1e9:.2f} GB; {ranges['num_ranges']} ranges, "
        f"{ranges['order']}, {ranges['loads']} loads an epoch. "
        f"All else takes {plan['own_bytes'] / 1e9:.2f} GB by the plan. Disk: {figures['disk']}.",
    ]
    if "peer_problem" in figures:
        lines.append(f"{PEER} is left out: {figures['peer_problem'].splitlines()[0]}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    try:
        check(args)
        # Kept graphs lie in the folder itself, everything else in a temporary one.
        work = (
            args.work.resolve() if args.keep else Path(tempfile.mkdtemp(prefix="out_of_core_", dir=args.work))
        )
        try:
            with expiry(args.expire_seconds):
                figures = measure(args, work)
        finally:
            if not args.keep:
                shutil.rmtree(work, ignore_errors=True)
    except (DglkgeError, RuntimeError) as error:
        print(f"out_of_core.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    print(report(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
