"""Random faults, one after another, on runs that must lose nothing that was committed.

    python benchmarks/faults.py                              # a hundred faults, a hundred damages
    python benchmarks/faults.py --sites one --trials 10      # some minutes

A run is trained by one job after another. Each job is struck by a random fault at a random moment after its
first commits, and the next job must go on from the newest version that was published before. Kinds of
faults are dealt like cards, so that each comes equally often. After the last fault the run is finished, and
its tables are compared with those of a run of the same epochs that nothing disturbed.

Then the finished checkpoint is damaged in a random place, again and again, and read: the damage must be
named.

Sites: ``one`` (this machine), ``url`` (this machine, each time with an empty disk, and an S3 server on
loopback), ``hosts`` (two hosts with one disk), ``disks`` (two hosts with ``--sync``, in the other order at
each start). Hosts need root; so do disks that can be filled. Prints a table and, with
``--json``, writes the same as JSON. The status is 1 if a fault was not survived.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from cluster_hosts import cluster_hosts, what_is_missing
from cluster_jobs import make_dataset
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, STATS_FILE, VERSION_FILE
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.errors import CheckpointError
from fault_sites import BATCH_SIZE, EmptyMachine, OneMachine, Site, TwoDisks, TwoHosts

STOPPED = 143
BAD_INPUT = 2
COMMITS_BEFORE_A_FAULT = 2
COMMITS_DURING_A_FAULT = 100
"""Of a job that must go on; each is a line in the log, whose last page has room for some."""

LATEST_SECONDS = 1.0
"""A fault comes so long after these commits at the latest."""

LIMIT_SECONDS = 20.0
"""Timeout of processes of a job for each other: the cost of a process that stopped answering."""

FILLER = "filler"
DISK_BYTES = 32 << 20
LOG_DISK_BYTES = 1 << 20


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes
    ----------
    words : str
    strike : callable
        Causes it at a site; returns when that is done.
    mend : callable
        Undoes what must be undone before the next start.
    statuses : tuple of int or None
        The launcher's allowed exit statuses; None allows all but 0 and that of bad input.
    goes_on : bool
        Whether the job must go on, until it is stopped by SIGTERM.
    leaves_memory : bool
        Whether it ends those who would remove the job's shared memory; the next job must do it then.
    sites : tuple of type
        Where it can happen.
    """

    words: str
    strike: Callable[[Site], None]
    mend: Callable[[Site], None] = lambda site: None
    statuses: tuple[int, ...] | None = None
    goes_on: bool = False
    leaves_memory: bool = False
    sites: tuple[type[Site], ...] = (OneMachine, EmptyMachine, TwoHosts, TwoDisks)


def _kill(role: str) -> Callable[[Site], None]:
    def strike(site: Site) -> None:
        random.choice(site.processes_of(role)).kill()

    return strike


def _kill_node_program(site: Site) -> None:
    psutil.Process(random.choice(site.processes_of("client")).ppid()).kill()


def _kill_everything(site: Site) -> None:
    for process in site.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _kill_host(site: Site) -> None:
    if isinstance(site, TwoHosts):
        for process in site.hosts[1].processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _signal_launcher(number: int) -> Callable[[Site], None]:
    return lambda site: site.launcher().send_signal(number)


def _signal_trainer(number: int) -> Callable[[Site], None]:
    return lambda site: random.choice(site.processes_of("client")).send_signal(number)


def _kill_ssh(site: Site) -> None:
    next(process for process in site.processes() if process.name() == "ssh").kill()


def _drop_packets(site: Site) -> None:
    if isinstance(site, TwoHosts):
        site.hosts[1].drop_packets()


def _take_link_down(site: Site) -> None:
    if isinstance(site, TwoHosts):
        site.hosts[1].take_link_down()


def _reconnect(site: Site) -> None:
    if isinstance(site, TwoHosts):
        site.hosts[1].reconnect()


def _fill_disk(site: Site) -> None:
    _fill(site.folder)


def _free_disk(site: Site) -> None:
    (site.folder / FILLER).unlink(missing_ok=True)


def _fill_log_disk(site: Site) -> None:
    _fill(site.log_dir)


def _free_log_disk(site: Site) -> None:
    (site.log_dir / FILLER).unlink(missing_ok=True)


def _fill(folder: Path) -> None:
    # Unbuffered small blocks: the last bytes of the disk are taken too.
    with contextlib.suppress(OSError), open(folder / FILLER, "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


FAULTS = {
    "trainer": Fault("kill -9 of a trainer", _kill("client")),
    "server": Fault("kill -9 of a server", _kill("server")),
    "program": Fault("kill -9 of a node program", _kill_node_program),
    "launcher": Fault("kill -9 of the launcher", _signal_launcher(signal.SIGKILL), statuses=(-9, 137)),
    "all": Fault("kill -9 of everything at once", _kill_everything, statuses=(-9, 137), leaves_memory=True),
    "term": Fault("SIGTERM to the launcher", _signal_launcher(signal.SIGTERM), statuses=(STOPPED,)),
    "hup": Fault("SIGHUP to the launcher", _signal_launcher(signal.SIGHUP), statuses=(STOPPED,)),
    "int": Fault("SIGINT to a trainer", _signal_trainer(signal.SIGINT), statuses=(STOPPED,)),
    "frozen": Fault("a trainer stops answering", _signal_trainer(signal.SIGSTOP)),
    "disk": Fault("disk of the run full", _fill_disk, _free_disk, sites=(OneMachine,)),
    "logs": Fault(
        "disk of the logs full", _fill_log_disk, _free_log_disk, (STOPPED,), goes_on=True, sites=(OneMachine,)
    ),
    "ssh": Fault("kill -9 of an ssh client", _kill_ssh, sites=(TwoHosts, TwoDisks)),
    "host": Fault("kill -9 of all on a host", _kill_host, leaves_memory=True, sites=(TwoHosts, TwoDisks)),
    "packets": Fault("packets of a host dropped", _drop_packets, _reconnect, sites=(TwoHosts, TwoDisks)),
    "link": Fault("link of a host down", _take_link_down, _reconnect, sites=(TwoHosts, TwoDisks)),
}


@dataclass(frozen=True)
class Trial:
    """Result of one fault.

    Attributes
    ----------
    site, fault : str
    status : int
        Of the launcher; minus the signal that killed it.
    seconds : float
        Until nothing of the job ran.
    seconds_to_resume : float
        From the next start until the tables were those of the newest version, and training went on.
    lost_commits : int
        Versions that were published before the fault and that the next job did not go on from.
    wrong : str
        Why it counts as not survived; empty if it was.
    """

    site: str
    fault: str
    status: int
    seconds: float
    lost_commits: int
    wrong: str
    seconds_to_resume: float = 0.0


def run_trials(
    site: Site, names: Sequence[str], shown: tqdm | None = None, file: Path | None = None
) -> list[Trial]:
    """Cause one fault after another in a run; each start also shows the cost of the fault before.

    Parameters
    ----------
    site : Site
    names : sequence of str
        Of :data:`FAULTS`.
    shown : tqdm, optional
        Moved on after each fault.
    file : Path, optional
        Written after each fault, with the trials of this site.
    """
    trials: list[Trial] = []
    before = site.committed()
    try:
        for name in names:
            fault = FAULTS[name]
            seconds = start(site)
            if trials:
                # What a fault has cost is known only when the next job has resumed.
                trials[-1] = _with_resumption(trials[-1], site, before, seconds)
                write_json(trials, file)
            time.sleep(random.uniform(0, LATEST_SECONDS))
            # Read before the fault: what is published until then must survive it.
            before = site.committed()
            fault.strike(site)
            if fault.goes_on:
                site.wait_for_commits(COMMITS_DURING_A_FAULT, before[0])
                site.launcher().terminate()
            seconds, leftovers = site.wait_for_end()
            fault.mend(site)
            status = site.job.returncode if site.job is not None else 0
            # A job may publish another version while it is being stopped; that one must survive too.
            before = max(before, site.committed())
            trials.append(Trial(site.name, fault.words, status, seconds, 0, _wrong(fault, status, leftovers)))
            if shown is not None:
                shown.update()
        if trials:
            seconds = start(site)
            trials[-1] = _with_resumption(trials[-1], site, before, seconds)
            site.launcher().terminate()
            site.wait_for_end()
    finally:
        site.close()
    return trials


def start(site: Site) -> float:
    """Start the job, and wait until it has committed; return the seconds until it went on from a version."""
    version, _ = site.committed()
    begin = time.monotonic()
    site.start()
    while version and site.resumed_batches() is None and site.job is not None and site.job.poll() is None:
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    site.wait_for_commits(COMMITS_BEFORE_A_FAULT, version)
    return seconds


def _wrong(fault: Fault, status: int, leftovers: Sequence[str]) -> str:
    """Return the errors in a job's end as text; empty if there are none."""
    allowed = status in fault.statuses if fault.statuses else status not in (0, BAD_INPUT)
    wrong = [] if allowed else [f"status {status}"]
    if fault.leaves_memory:
        leftovers = [name for name in leftovers if "/dev/shm/" not in name]
    if leftovers:
        wrong.append(f"left: {', '.join(leftovers)}")
    return "; ".join(wrong)


def _with_resumption(trial: Trial, site: Site, before: tuple[int, int], seconds: float) -> Trial:
    """Add what the next start showed: where it went on, beside what was published before the fault."""
    _, published = before
    trial = dataclasses.replace(trial, seconds_to_resume=seconds)
    resumed = site.resumed_batches()
    lost = published - (resumed or 0)
    if lost <= 0 and resumed is not None:
        return trial
    wrong = f"published {published} batches, resumed at {resumed}"
    return dataclasses.replace(trial, lost_commits=lost, wrong="; ".join(filter(None, [trial.wrong, wrong])))


def deal(site: type[Site], number: int, can_fill: bool) -> list[str]:
    """Return the faults of so many trials, each kind equally often, in random order."""
    possible = [name for name, fault in FAULTS.items() if site in fault.sites]
    if not can_fill:
        possible = [name for name in possible if name not in ("disk", "logs")]
    dealt: list[str] = []
    while len(dealt) < number:
        random.shuffle(possible)
        dealt += possible
    return dealt[:number]


DAMAGES = ("bit", "cut", "gone", "empty", "lines")


def damage(folder: Path, kind: str) -> Path | None:
    """Damage a random file of a checkpoint's version; return it, or None if its content has not changed.

    training_stats.json belongs to no version: training and PyTorch-BigGraph append to it.
    """
    # Empty files cannot be damaged in a place.
    paths = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    path = random.choice(sorted(path for path in paths if path.name != STATS_FILE))
    content = path.read_bytes()
    changed = content
    if kind == "bit":
        place = random.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << random.randrange(8))])
        changed = content[:place] + flipped + content[place + 1 :]
    elif kind == "cut":
        changed = content[: random.randrange(len(content))]
    elif kind == "empty":
        changed = b""
    elif kind == "lines":
        lines = content.split(b"\n")
        random.shuffle(lines)
        changed = b"\n".join(lines)
    if kind == "gone":
        path.unlink()
        return path
    path.write_bytes(changed)
    # White space around the number changes nothing in the pointer; a version's own file has a checksum.
    has_effect = changed.strip() != content.strip() if path == folder / VERSION_FILE else changed != content
    return path if has_effect else None


def run_damages(checkpoint: Path, number: int, names: Sequence[str] = DAMAGES) -> list[Trial]:
    """Damage copies of a checkpoint and read each whole, as ``dglkge checkpoint inspect --verify`` does."""
    trials = []
    with tempfile.TemporaryDirectory(prefix="dglkge-damage-") as scratch:
        for index in range(number):
            folder = Path(scratch) / str(index)
            shutil.copytree(checkpoint, folder, symlinks=True)
            kind = names[index % len(names)]
            damaged = damage(folder, kind)
            start = time.monotonic()
            try:
                # An exception of another kind ends the program: damage must be reported as CheckpointError.
                open_checkpoint(folder).verify()
                wrong = "" if damaged is None else f"{damaged.name}: not noticed"
            except CheckpointError as error:
                wrong = "" if damaged is not None and "\n" not in str(error) else f"refused: {error}"
            seconds = time.monotonic() - start
            trials.append(Trial("checkpoint", f"damaged file: {kind}", 0, seconds, 0, wrong))
            shutil.rmtree(folder)
    return trials


def largest_difference(first: str, second: str) -> float:
    """Return the largest absolute difference between the tables of two runs."""
    checkpoint, other = open_checkpoint(first), open_checkpoint(second)
    return max(
        float(np.abs(checkpoint[table][:].numpy() - other[table][:].numpy()).max())
        for table in ("entity", "relation")
    )


def write_json(trials: Sequence[Trial], file: Path | None) -> None:
    """Write trials as JSON, if there is a file to write to."""
    if file is not None:
        rows = [dataclasses.asdict(trial) for trial in trials]
        file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def print_table(trials: Sequence[Trial]) -> None:
    """Print a row for each kind of fault at each site."""
    print("| where | fault | tried | survived | lost commits | seconds, median | longest | to resume |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for key in dict.fromkeys((trial.site, trial.fault) for trial in trials):
        rows = [trial for trial in trials if (trial.site, trial.fault) == key]
        seconds = [trial.seconds for trial in rows]
        survived = sum(not trial.wrong for trial in rows)
        lost = sum(trial.lost_commits for trial in rows)
        print(
            f"| {key[0]} | {key[1]} | {len(rows)} | {survived} | {lost} "
            f"| {statistics.median(seconds):.1f} | {max(seconds):.1f} "
            f"| {statistics.median(trial.seconds_to_resume for trial in rows):.1f} |"
        )
    for trial in trials:
        if trial.wrong:
            print(f"not survived: {trial.site}, {trial.fault}: {trial.wrong}")


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a small disk on a folder, where that is allowed; else the folder is on the disk that it is on."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            # Lazily, as a process that is being killed may still have a file open there.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def open_site(kind: str, base: Path) -> Iterator[Site]:
    """Make a site, with a data set of as many partitions as it has machines."""
    num_parts = 1 if kind in ("one", "url") else 2
    dataset = make_dataset(base / f"data-{kind}", num_parts, 200, 2_000, 4, "random")
    num_batches = -(-len(Dataset.open(dataset).split("train")) // BATCH_SIZE)
    if kind in ("one", "url"):
        machine = OneMachine if kind == "one" else EmptyMachine
        place = base / kind
        disks = small_disk(place / "disk", DISK_BYTES), small_disk(place / "logs", LOG_DISK_BYTES)
        with disks[0] as folder, disks[1] as log_dir:
            site = machine(folder, log_dir, dataset, num_batches, LIMIT_SECONDS)
            try:
                yield site
            finally:
                site.end()
        return
    with cluster_hosts(2) as hosts:
        make = TwoHosts if kind == "hosts" else TwoDisks
        yield make(base / kind, dataset, num_batches, LIMIT_SECONDS, hosts)


def finish_and_compare(site: Site, base: Path) -> Trial:
    """Finish the run, and train the same epochs again with nothing to disturb them."""
    try:
        return _compare(site, base)
    finally:
        site.close()


def _compare(site: Site, base: Path) -> Trial:
    """Train both runs; see :func:`finish_and_compare`."""
    _, batches = site.committed()
    epochs = {"training.num_epochs": batches // site.batches_per_epoch + 1}
    tables = []
    for output in (None, base / f"undisturbed-{type(site).__name__}"):
        start = time.monotonic()
        if output is None:
            site.start(**epochs)
        else:
            # The undisturbed run needs no commits.
            more = {"output": output, "checkpoint.every_batches": 0, "checkpoint.storage": ""}
            site.start(**epochs, **more)
        if site.job is None or site.job.wait(1800) != 0:
            raise RuntimeError(f"{site.name}: the last job failed:\n{site.log_text()[-4000:]}")
        tables.append(site.run() if output is None else str(output))
    difference = largest_difference(*tables)
    # Equal to the last bit: the order of triples and of sums must not depend on restarts.
    wrong = "" if difference == 0 else f"tables differ by up to {difference:g}"
    return Trial(
        site.name, "tables beside those of an undisturbed run", 0, time.monotonic() - start, 0, wrong
    )


def main() -> int:
    """Run the trials, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100, help="faults over all sites (default: 100)")
    parser.add_argument("--damages", type=int, default=100, help="damages of a checkpoint (default: 100)")
    parser.add_argument(
        "--sites", nargs="+", choices=("one", "url", "hosts", "disks"), help="default: all that can be made"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    options = parser.parse_args()
    missing = what_is_missing()
    kinds = options.sites or (["one", "url"] if missing else ["one", "url", "hosts", "disks"])
    if missing and {"hosts", "disks"} & set(kinds):
        sys.exit(f"no hosts can be made here: {missing}")
    if missing:
        print(f"without hosts: {missing}")
    random.seed(options.seed)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="dglkge-faults-") as name, tqdm(total=options.trials) as shown:
        for place, kind in enumerate(kinds):
            number = options.trials * (place + 1) // len(kinds) - options.trials * place // len(kinds)
            with open_site(kind, Path(name)) as site:
                shown.set_description(site.name)
                trials += run_trials(
                    site, deal(type(site), number, site.can_be_filled()), shown, options.json
                )
                trials.append(finish_and_compare(site, Path(name)))
                # Of a run with an empty disk at each start nothing is left here.
                if kind == kinds[-1] and kind != "url":
                    trials += run_damages(site.output_folders()[0] / CHECKPOINT_FOLDER, options.damages)
    print_table(trials)
    write_json(trials, options.json)
    return 1 if any(trial.wrong for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
