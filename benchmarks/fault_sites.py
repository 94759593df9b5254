"""Sites of the jobs of ``faults.py``: this machine, two hosts with one disk, two hosts with a disk each.

A site starts the job of a run again and again, finds its processes, and reads what was committed. Every
start goes on from the last commit. Hosts are those of ``cluster_hosts.py`` and need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from cluster_hosts import ClusterHost
from cluster_jobs import PORT, TRAIN, environment
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, MANIFEST_FILE, VERSION_FILE, Progress, version_folder
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.stores import open_store
from dglkge.distributed.jobs import live_jobs
from dglkge.errors import CheckpointError

MARK = "DGLKGE_FAULTS_SITE"
"""Environment variable by which the processes of a site on this machine are found."""

SHARED_MEMORY = Path("/dev/shm")
BATCH_SIZE = 48
SMALL_DISK_BYTES = 64 << 20
END_SECONDS = 60.0
START_SECONDS = 180.0

Commit = tuple[int, int]
"""A version of the checkpoint, and the batches that were done when it was taken."""


class Site:
    """A place where a run is trained, by one job after another.

    Parameters
    ----------
    folder : Path
        For logs and ip_config.txt.
    dataset : Path
    batches_per_epoch : int
        Of the data set's training split.
    limit_seconds : float
        Timeout of processes of a job for each other.

    Attributes
    ----------
    name : str
    job : subprocess.Popen or None
        The launcher.
    """

    name = ""
    script: str | Path = TRAIN

    def __init__(self, folder: Path, dataset: Path, batches_per_epoch: int, limit_seconds: float) -> None:
        self.folder = folder
        self.dataset = dataset
        self.batches_per_epoch = batches_per_epoch
        self.limit_seconds = limit_seconds
        self.num_starts = 0
        self.job: subprocess.Popen[bytes] | None = None
        self.log_dir = folder / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def start(self, **settings: object) -> None:
        """Start the job or resume it; ``settings`` are fields of the configuration."""
        # The logs of all starts would fill a small disk.
        self.log.unlink(missing_ok=True)
        for path in self.log_dir.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        self.num_starts += 1
        # A commit after each batch: a fault then comes during a save as often as possible.
        fields = {
            "dataset": self.dataset_argument(),
            "output": self.output_argument(),
            "model.dimension": 16,
            "negatives.num_uniform": 20,
            "training.batch_size": BATCH_SIZE,
            "training.num_epochs": 1_000_000,
            "checkpoint.every_batches": 1,
            "evaluation.split": "none",
            **settings,
        }
        sets = [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]
        variables = {**environment(), "DGLKGE_TIMEOUT_SECONDS": str(self.limit_seconds)}
        with open(self.log, "wb") as log:
            self.job = self.launch(sets, variables, log.fileno())

    @property
    def log(self) -> Path:
        """Output of the launcher of the present start."""
        return self.folder / f"launcher-{self.num_starts}.log"

    def log_text(self) -> str:
        """Return the output of the present launcher."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for_commits(self, number: int, after: int) -> None:
        """Wait until so many versions beyond version ``after`` were published.

        Raises
        ------
        RuntimeError
            If the job ends before, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while self.committed()[0] < after + number:
            if self.job is None or self.job.poll() is not None:
                raise RuntimeError(f"{self.name}: the job ended by itself:\n{self.log_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: no {number} commits after {START_SECONDS:g} s")
            time.sleep(0.02)

    def committed(self) -> Commit:
        """Return the newest commit that any disk of the site holds; (0, 0) if there is none."""
        return max(map(self.read_commit, self.output_folders()), default=(0, 0))

    def read_commit(self, output: Path) -> Commit:
        """Return the newest commit in a run's folder; the version may be dropped meanwhile."""
        folder = output / CHECKPOINT_FOLDER
        # The version file is read before the manifest: training may publish the next version in between.
        for _ in range(100):
            with contextlib.suppress(OSError, ValueError):
                version = int((folder / VERSION_FILE).read_text(encoding="ascii"))
                if version == 0:
                    return 0, 0
                text = (folder / version_folder(version) / MANIFEST_FILE).read_text(encoding="utf-8")
                progress = json.loads(text)["meta"]["progress"]
                return version, self.batches(
                    progress[Progress.FINISHED_EPOCHS], progress[Progress.BATCHES_DONE]
                )
            time.sleep(0.01)
        return 0, 0

    def batches(self, epochs: int, batches: int) -> int:
        """Return a position in the run as a number of batches."""
        return epochs * self.batches_per_epoch + batches

    def resumed_batches(self) -> int | None:
        """Return the position from which the present job resumed, by its log; None without such a line."""
        for line in self.log_text().splitlines():
            _, separator, words = line.partition("resumed: ")
            if separator:
                numbers = [int(word) for word in words.split() if word.isdigit()]
                return self.batches(numbers[0], numbers[1])
        return None

    def wait_for_end(self) -> tuple[float, list[str]]:
        """Wait until nothing of the job runs.

        Returns
        -------
        seconds : float
            How long that took.
        leftovers : list of str
            The processes that were still there after a minute, which are then ended, and shared memory.
        """
        start = time.monotonic()
        while (alive := self.processes()) and time.monotonic() < start + END_SECONDS:
            time.sleep(0.02)
        seconds = time.monotonic() - start
        leftovers = [f"process {process.pid} {process.name()}" for process in alive]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.job is not None:
            self.job.wait(END_SECONDS)
        return seconds, [*leftovers, *self.segments()]

    def close(self) -> None:
        """End everything that still runs."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.job is not None:
            self.job.kill()
            self.job.wait()

    def processes_of(self, role: str) -> list[psutil.Process]:
        """Return the servers (``server``) or trainers (``client``) that run."""
        processes = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("DGL_ROLE") == role:
                    processes.append(process)
        return processes

    def launcher(self) -> psutil.Process:
        """Return the launcher."""
        return next(process for process in self.processes() if "dglkge.cli.launch" in _words(process))

    def dataset_argument(self) -> str:
        """Return the data set as the configuration names it."""
        return str(self.dataset)

    def output_argument(self) -> str:
        """Return the run's folder as the configuration names it."""
        return str(self.folder / "run")

    def output_folders(self) -> list[Path]:
        """Return the places where the run's folder may lie, the user's first."""
        return [self.folder / "run"]

    def run(self) -> str:
        """Return the run as commands take it."""
        return str(self.output_folders()[0])

    def can_be_filled(self) -> bool:
        """Return whether the run and the logs are on disks of their own, small enough to be filled."""
        # A full disk of the machine would disturb other programs, so only a small one is filled.
        return max(shutil.disk_usage(path).total for path in (self.folder, self.log_dir)) <= SMALL_DISK_BYTES

    def launch(self, words: Sequence[str], variables: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        """Start the launcher."""
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        """Return what runs of the job, the launcher included, in the order of age."""
        raise NotImplementedError

    def segments(self) -> list[str]:
        """Return the shared memory that the job has left."""
        raise NotImplementedError


class OneMachine(Site):
    """This machine: one server and two trainers on loopback."""

    name = "one machine"

    def __init__(
        self, folder: Path, log_dir: Path, dataset: Path, batches_per_epoch: int, limit_seconds: float
    ) -> None:
        super().__init__(folder, dataset, batches_per_epoch, limit_seconds)
        self.log_dir = log_dir  # on another disk than the run
        self._mark = uuid.uuid4().hex
        self._jobs: set[str] = set()

    def launch(self, words: Sequence[str], variables: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        """Start the launcher with SIGINT and SIGHUP at their defaults, as a terminal does."""
        command = [sys.executable, "-m", "dglkge.cli.launch", "--ip_config", str(self._ip_config())]
        command += ["--num_trainers", "2", "--num_omp_threads", "1", "--json"]
        command += ["--log_dir", str(self.log_dir / str(self.num_starts)), str(self.script), *words]
        return subprocess.Popen(
            command,
            env={**variables, MARK: self._mark},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=default_signals,
        )

    def wait_for_commits(self, number: int, after: int) -> None:
        super().wait_for_commits(number, after)
        if self.job is not None:
            self._jobs |= {entry.job for entry in live_jobs() if entry.launcher_pid == self.job.pid}

    def processes(self) -> list[psutil.Process]:
        """Return the living processes that carry the site's mark."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # By environment and not by parent: descendants of a killed launcher have another parent.
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return sorted(processes, key=lambda process: process.pid)

    def segments(self) -> list[str]:
        """Return the names in shared memory of the site's jobs."""
        names = sorted(os.listdir(SHARED_MEMORY))
        return [f"/dev/shm/{name}" for name in names if any(job in name for job in self._jobs)]

    def end(self) -> None:
        """End what runs beside the jobs: nothing."""

    def _ip_config(self) -> Path:
        """Write an ip_config.txt with a port of loopback that is free now."""
        path = self.folder / "ip_config.txt"
        path.write_text(f"127.0.0.1 {free_port()}\n", encoding="ascii")
        return path


class EmptyMachine(OneMachine):
    """This machine with an empty run folder at each start, and a bucket on loopback that has the run."""

    name = "one machine, S3"

    def __init__(self, folder: Path, *arguments: Any) -> None:
        super().__init__(folder, *arguments)
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self.url = "s3://runs/run"
        with open(folder / "bucket.log", "wb") as log:
            server = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
            self._server = subprocess.Popen(server, stdout=log, stderr=log)
        os.environ.update(self.variables())
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/runs", method="PUT")).close()
                break
            time.sleep(0.1)

    def variables(self) -> dict[str, str]:
        """Return what every tool of Amazon reads."""
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint}

    def start(self, **settings: object) -> None:
        """Start the job on an empty disk."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        super().start(**{"checkpoint.storage": self.url, **settings})

    def committed(self) -> Commit:
        """Return the newest commit in the bucket; (0, 0) if there is none."""
        run = self.folder / "seen"
        with contextlib.suppress(CheckpointError):
            stored = Mirror(open_store(self.url), run).newest()
            if stored is not None:
                progress = stored.meta.progress
                done = self.batches(progress[Progress.FINISHED_EPOCHS], progress[Progress.BATCHES_DONE])
                return stored.version, done
        return 0, 0

    def run(self) -> str:
        """Return the run in the bucket."""
        return self.url

    def end(self) -> None:
        """End the server of the bucket, and with it what it holds."""
        self._server.kill()
        self._server.wait()


class TwoHosts(Site):
    """Two hosts that see one disk: a server and a trainer each; the launcher runs on the first."""

    name = "two hosts"

    def __init__(
        self,
        folder: Path,
        dataset: Path,
        batches_per_epoch: int,
        limit_seconds: float,
        hosts: Sequence[ClusterHost],
    ) -> None:
        super().__init__(folder, dataset, batches_per_epoch, limit_seconds)
        self.hosts = list(hosts)
        self.order = list(hosts)

    def launch(self, words: Sequence[str], variables: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        """Start the launcher on the first of the hosts."""
        ip_config = self.folder / "ip_config.txt"
        ip_config.write_text("".join(f"{host.address} {PORT}\n" for host in self.order), encoding="ascii")
        command: list[str | Path] = [sys.executable, "-m", "dglkge.cli.launch", "--ip_config", ip_config]
        command += ["--identity_file", self.hosts[0].identity, "--num_trainers", "1"]
        command += ["--num_omp_threads", "1", "--json", *self.options(), self.script, *words]
        return self.hosts[0].popen(
            command, env=dict(variables), stdout=log, stderr=subprocess.STDOUT, preexec_fn=default_signals
        )

    def options(self) -> list[str]:
        """Return further options of the launcher."""
        return ["--log_dir", str(self.log_dir / str(self.num_starts))]

    def processes(self) -> list[psutil.Process]:
        """Return what runs on the hosts beside sshd."""
        return [process for host in self.hosts for process in host.processes()]

    def segments(self) -> list[str]:
        """Return what is in the hosts' shared memory."""
        lines = []
        for host in self.hosts:
            done = host.run(["ls", "/dev/shm"], capture_output=True, text=True, check=True)
            lines += [f"{host.name}:/dev/shm/{name}" for name in done.stdout.split()]
        return lines


class TwoDisks(TwoHosts):
    """Two hosts with a disk each (``--sync``), which change places at every start."""

    name = "two hosts, --sync, reordered"
    script = "train.py"

    def __init__(
        self,
        folder: Path,
        dataset: Path,
        batches_per_epoch: int,
        limit_seconds: float,
        hosts: Sequence[ClusterHost],
    ) -> None:
        super().__init__(folder, dataset, batches_per_epoch, limit_seconds, hosts)
        # On the launcher's host only: --sync must bring the data to the other one.
        shutil.copytree(dataset, hosts[0].folder / "data", dirs_exist_ok=True)
        shutil.copy(TRAIN, hosts[0].folder)

    def dataset_argument(self) -> str:
        """Return the data set, which the launcher sends to the other host."""
        return "data"

    def launch(self, words: Sequence[str], variables: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        """Start the launcher with the hosts in the other order."""
        # Rank 0 is then on the other disk, which must be filled from the launcher's folder first.
        self.order = self.hosts if self.num_starts % 2 else self.hosts[::-1]
        return super().launch(words, variables, log)

    def options(self) -> list[str]:
        """Return further options of the launcher."""
        return ["--sync", "--log_dir", f"logs/{self.num_starts}"]

    def output_argument(self) -> str:
        """Return the run's folder, which is another one on each host."""
        return "run"

    def output_folders(self) -> list[Path]:
        """Return the launcher's folder of the run, as it is seen from here."""
        return [self.hosts[0].folder / "run"]


def free_port() -> int:
    """Return a port of loopback without a listener, below those that the kernel gives to clients."""
    while True:
        # Not the seeded generator: its numbers decide the faults, and two runs would choose equal ports.
        port = random.SystemRandom().randrange(10_000, 29_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def default_signals() -> None:
    """Give a child the signals of a terminal's foreground, whatever this process ignores."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _words(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
