"""Faults of a job on two hosts: seconds until nothing of it runs, and the message of the launcher.

    python benchmarks/cluster_faults.py                    # every fault, about five minutes
    python benchmarks/cluster_faults.py trainer packets    # some of them
    python benchmarks/cluster_faults.py --without-ssh      # dglkge-launch --node_rank on each host

For each fault a job of one server and one trainer a host is started on two hosts (``cluster_hosts.py``; needs
root), the launcher on the first. Once it trains the fault comes, and the seconds count until no process of it
is left on either host. Prints a table; the status is 1 if a job outlived 20 seconds or ended with status 0.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster_hosts import ClusterHost, cluster_hosts, what_is_missing
from cluster_jobs import (
    LAUNCHER_LOG,
    TRAIN,
    job_process,
    launch,
    launch_node,
    launcher_process,
    make_dataset,
    node_log,
)
from dglkge.checkpoint.layout import RUN_STATS_FILE

ALLOWED_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
START_SECONDS = 120.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes
    ----------
    words : str
        Its description.
    strike : callable
        Causes it on the hosts.
    limit_seconds : str
        Timeout of processes of the job for each other.
    """

    words: str
    strike: Callable[[Sequence[ClusterHost]], None]
    limit_seconds: str = "600"


def _kill_node_program(hosts: Sequence[ClusterHost]) -> None:
    """Kill the parent of the trainer on host 1."""
    psutil.Process(job_process(hosts[1], "client").ppid()).kill()


def _kill_ssh_client(hosts: Sequence[ClusterHost]) -> None:
    """Kill the youngest ssh client of the launcher."""
    [process for process in hosts[0].processes() if process.name() == "ssh"][-1].kill()


FAULTS = {
    "trainer": Fault("kill -9 of a trainer", lambda hosts: job_process(hosts[1], "client").kill()),
    "server": Fault("kill -9 of a server", lambda hosts: job_process(hosts[1], "server").kill()),
    "program": Fault("kill -9 of a node program", _kill_node_program),
    "ssh": Fault("kill -9 of an ssh client", _kill_ssh_client),
    "sshd": Fault("kill -9 of an sshd session", lambda hosts: hosts[1].ssh_sessions()[-1].kill()),
    "launcher": Fault("kill -9 of the launcher", lambda hosts: launcher_process(hosts[0]).kill()),
    "frozen": Fault(
        "a trainer stops answering (limit set to 5 s)",
        lambda hosts: job_process(hosts[1], "client").send_signal(signal.SIGSTOP),
        limit_seconds="5",
    ),
    "link": Fault("link of a host down", lambda hosts: hosts[1].take_link_down()),
    "packets": Fault("packets of a host dropped", lambda hosts: hosts[1].drop_packets()),
    "power": Fault("everything on a host killed at once", lambda hosts: hosts[1].power_off()),
}


FAULTS_WITHOUT_SSH = {
    # A node's dglkge-launch is its node program.
    **{name: fault for name, fault in FAULTS.items() if name not in ("ssh", "sshd", "program")},
    "node": Fault("kill -9 of a node's dglkge-launch", lambda hosts: launcher_process(hosts[1]).kill()),
}


@dataclass(frozen=True)
class Outcome:
    """End of a job after a fault.

    Attributes
    ----------
    seconds : float
        Until nothing of it was left; infinity if something was after a minute.
    status : int
        Of the launcher; minus the signal that killed it.
    reason : str
        Message of the launcher; empty if it was killed itself.
    output : str
        Output of the launcher.
    other_statuses : tuple of int
        Of the other nodes' ``dglkge-launch``, in a job without SSH.
    """

    seconds: float
    status: int
    reason: str
    output: str
    other_statuses: tuple[int, ...] = ()


def training_command(dataset: Path, output: Path) -> list[str | Path]:
    """Return a training script that runs forever and commits after every epoch."""
    settings = {
        "dataset": dataset,
        "output": output,
        "model.dimension": 16,
        "negatives.num_uniform": 20,
        "training.batch_size": 200,
        "training.num_epochs": 1_000_000,
        "evaluation.split": "none",
    }
    return [TRAIN, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def wait_until_trained(stats: Path, num_epochs: int, job: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until so many epochs are done.

    Raises
    ------
    RuntimeError
        If the job ends before, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    # Each finished epoch is one line.
    while not stats.exists() or stats.read_text(encoding="utf-8").count("\n") < num_epochs:
        if job.poll() is not None:
            raise RuntimeError(f"the job ended with {job.returncode}: {log.read_text(encoding='utf-8')}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the job has not trained {num_epochs} epochs after {START_SECONDS} s")
        time.sleep(0.05)


def seconds_until(condition: Callable[[], bool]) -> float:
    """Wait until something holds; return the seconds that it took, infinity after a minute."""
    start = time.monotonic()
    while time.monotonic() < start + PATIENCE_SECONDS:
        if condition():
            return time.monotonic() - start
        time.sleep(0.05)
    return float("inf")


def run_fault(fault: Fault, hosts: Sequence[ClusterHost], dataset: Path, has_ssh: bool = True) -> Outcome:
    """Start a job, let it train, cause the fault, and wait for the end."""
    with tempfile.TemporaryDirectory(prefix="dglkge-fault-") as name:
        folder = Path(name)
        command = training_command(dataset, folder / "run")
        options = ["--num_trainers", "1", "--log_dir", str(folder / "logs")]
        limit = {"DGLKGE_TIMEOUT_SECONDS": fault.limit_seconds}
        if has_ssh:
            log = folder / LAUNCHER_LOG
            jobs = [launch(hosts, folder, options, command, limit)]
        else:
            log = node_log(folder, 0)
            place = ["--nodes", str(len(hosts)), "--rendezvous", hosts[0].address, "--json"]
            jobs = [launch_node(host, rank, folder, place, command, limit) for rank, host in enumerate(hosts)]
        job = jobs[0]
        try:
            wait_until_trained(folder / "run" / RUN_STATS_FILE, 2, job, log)
            fault.strike(hosts)
            # Node programs count too: a job has ended when nothing of it is left.
            seconds = seconds_until(lambda: not any(host.processes() for host in hosts))
            for other_job in jobs:
                other_job.wait(PATIENCE_SECONDS)
        finally:
            for host in hosts:
                for process in host.processes():
                    process.kill()
            for other_job in jobs:
                other_job.kill()
                other_job.wait()
        output = log.read_text(encoding="utf-8")
        reason = ""
        # With --json the last line is the summary. A launcher that was killed writes none.
        if job.returncode > 0 and output.splitlines()[-1].startswith("{"):
            reason = json.loads(output.splitlines()[-1])["reason"]
        other_statuses = tuple(other_job.returncode for other_job in jobs[1:])
        return Outcome(seconds, job.returncode, reason, output, other_statuses)


def main() -> int:
    """Run the selected faults, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--without-ssh", action="store_true", help="start each host's part on the host")
    options = parser.parse_args()
    faults = FAULTS_WITHOUT_SSH if options.without_ssh else FAULTS
    names = options.faults or list(faults)
    if unknown := set(names) - set(faults):
        parser.error(f"no fault {', '.join(sorted(unknown))}; allowed are {', '.join(faults)}")
    missing = what_is_missing()
    if missing is not None:
        sys.exit(f"no hosts can be made here: {missing}")
    print("| fault | seconds until nothing runs | status | what the launcher says |\n|---|--:|--:|---|")
    all_well = True
    with tempfile.TemporaryDirectory(prefix="dglkge-faults-") as folder:
        dataset = make_dataset(Path(folder), 2, 200, 2_000, 4, "random")
        for name in names:
            # New hosts for each fault: some faults cannot be undone.
            with cluster_hosts(2) as hosts:
                outcome = run_fault(faults[name], hosts, dataset, not options.without_ssh)
            reason = outcome.reason or "(it is dead)"
            statuses = ", ".join(map(str, (outcome.status, *outcome.other_statuses)))
            row = f"| {faults[name].words} | {outcome.seconds:.1f} | {statuses} | {reason} |"
            print(row, flush=True)
            all_well = (
                all_well
                and outcome.seconds <= ALLOWED_SECONDS
                and 0 not in (outcome.status, *outcome.other_statuses)
            )
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
