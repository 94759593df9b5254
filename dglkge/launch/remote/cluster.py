"""Machines of a job on several machines: an agent on each, asked side by side, and executors over SSH."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dglkge import __version__
from dglkge.config import Config
from dglkge.distributed.ip_config import Machine
from dglkge.distributed.lease import LAUNCHER, Lease, LeaseTaker, new_nonce
from dglkge.errors import InputError, NotReadyError
from dglkge.launch import keeper
from dglkge.launch.kept_process import KeptProcess
from dglkge.launch.local_job import is_local, local_interfaces, resolve
from dglkge.launch.process_plan import Host, JobSettings, Places, PlannedProcess, plan_processes
from dglkge.launch.remote.file_transfer import COMPARE_SECONDS
from dglkge.launch.remote.run_copies import HOLD_FOLDER
from dglkge.launch.remote.session import (
    HostSession,
    SshSettings,
    close_all,
    forwarded_environment,
    python_from_stdin,
)
from dglkge.launch.remote.sync import (
    VersionBringer,
    bring_logs,
    bring_output,
    bring_version,
    choose_source,
    launcher_place,
    send_inputs,
    send_output,
)
from dglkge.launch.script_config import Needs


class PreflightError(NotReadyError):
    """Machines are not ready; each problem has a line. Nothing was started."""


def raise_problems(
    problems: Sequence[tuple[str, str]], num_hosts: int, outcome: str = "nothing was started"
) -> None:
    """Raise all problems in one error, if there are any.

    Parameters
    ----------
    problems : sequence of (address, sentence)
    num_hosts : int
        Machines of the job.
    outcome : str
        What became of it all.

    Raises
    ------
    PreflightError
    """
    if not problems:
        return
    width = max(len(address) for address, _ in problems)
    hosts = len({address for address, _ in problems})
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"  {address:{width}}  {' '.join(text.split())}" for address, text in problems]
    raise PreflightError("\n".join([f"{count} on {hosts} of {num_hosts} hosts; {outcome}", *lines]))


def compare_versions(described: Mapping[str, Mapping[str, Any]], own_version: str) -> list[tuple[str, str]]:
    """Find machines with other versions than the first, or with another dglkge than the launcher's.

    Parameters
    ----------
    described : mapping of str to mapping
        By address, what ``agent.describe_machine`` said.
    own_version : str
        dglkge's, of the launcher.
    """
    problems = []
    addresses = list(described)
    for address in addresses:
        versions = described[address]["versions"]
        reference = {**described[addresses[0]]["versions"], "dglkge": own_version}
        for name, wanted in reference.items():
            whose = "the launcher" if name == "dglkge" else addresses[0]
            if versions.get(name) is None:
                problems.append((address, f"has no {name}"))
            elif wanted is not None and versions[name] != wanted:
                problems.append((address, f"has {name} {versions[name]}, {whose} has {wanted}"))
    return problems


def compare_fingerprints(fingerprints: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Find machines whose partition file is not that of the first machine that has one."""
    known = {address: text for address, text in fingerprints.items() if text is not None}
    first = next(iter(known), "")
    return [
        (address, f"its partition file differs from that of {first}: they are of two partitionings")
        for address, text in known.items()
        if text != known[first]
    ]


CLEAN_UP_SECONDS = 5.0


class ClusterExecutor:
    """Several machines, each with a session.

    Parameters
    ----------
    sessions : mapping of str to HostSession
        By address.
    before : mapping of str to list of str
        The shared memory that was on each machine before the job.
    folder : str
        Where the processes run.
    """

    def __init__(
        self, sessions: Mapping[str, HostSession], before: Mapping[str, list[str]], folder: str
    ) -> None:
        self._sessions = sessions
        self._before = before
        self._folder = folder
        self._program = Path(keeper.__file__).read_bytes()

    def start(self, planned: PlannedProcess) -> KeptProcess:
        """Start one process under a keeper, whose program travels with the request."""
        session = self._sessions[planned.address]
        environment = {**session.environment, **planned.environment}
        return KeptProcess(
            dataclasses.replace(planned, environment=environment),
            session.command(python_from_stdin(session.python, self._program)),
            self._folder,
            self._before[planned.address],
            self._program,
            is_remote=session.ssh is not None,
        )

    def clean_up(self, segments: Mapping[str, set[str]]) -> list[str]:
        """Remove what the job has left on each machine; keepers of lost machines do so themselves."""
        removed = []
        for address, names in segments.items():
            session = self._sessions[address]
            if session.is_alive:
                question = {"segments": sorted(names), "before": self._before[address]}
                try:
                    removed.append(session.ask("clean_up", CLEAN_UP_SECONDS, **question))
                except InputError:  # it went while we asked
                    continue
        return list(itertools.chain.from_iterable(removed))


Problems = list[tuple[str, str]]


class Cluster:
    """Sessions with the agents of all machines; they stay open from one attempt of a job to the next.

    Machines with an address of this one are reached without SSH.

    Parameters
    ----------
    ssh : SshSettings
    python : str
        The interpreter on every machine.
    folder : str
        Where the processes run.
    job : str
        Names the job, with all its attempts, in the leases of run folders.
    """

    def __init__(self, ssh: SshSettings, python: str, folder: str, job: str = "") -> None:
        self._job = job
        self._lease: Lease | None = None
        self._ssh = ssh
        self._python = python
        self._folder = folder
        self._sessions: dict[str, HostSession] = {}
        self._described: dict[str, dict[str, Any]] = {}
        self._problems: Problems = []
        self._order: list[str] = []
        self._before: dict[str, list[str]] = {}

    def connect(self, machines: Sequence[Machine], is_locked: bool) -> list[Host]:
        """Start agents where there are none yet and learn what the plan depends on.

        Parameters
        ----------
        machines : sequence of Machine
            Sessions with machines that are not among them end.
        is_locked : bool
            Whether to hold each machine for this job, and to clear what earlier jobs and attempts have left.

        Returns
        -------
        list of Host
            Those that answered; what is wrong with the others, :meth:`check` raises.

        Raises
        ------
        InputError
            If a name has no address or two have the same, or a loopback address is among several.
        """
        addresses = self._order = _addresses(machines)
        self._problems = []
        names = dict(zip(addresses, (machine.address for machine in machines)))
        dead = [
            address
            for address, session in self._sessions.items()
            if address not in names or not session.is_alive
        ]
        close_all([self._sessions.pop(address) for address in dead])
        for address in addresses:
            if address not in self._sessions:
                self._sessions[address] = self._open(address, names[address])
        self._described = self._ask_all({address: {} for address in addresses}, "describe")
        if is_locked:
            # not asked for earlier: keepers of an ended job might remove some of what was there then
            self._before = self._ask_all({address: {} for address in self._described}, "lock")
        return [
            _host(address, machine, self._described[address])
            for address, machine in zip(addresses, machines)
            if address in self._described
        ]

    def check(self, hosts: Sequence[Host], settings: JobSettings, needs: Needs) -> None:
        """Look on all machines for all that would keep the job from running.

        Parameters
        ----------
        hosts : sequence of Host
            Those that answered.
        settings : JobSettings
        needs : Needs

        Raises
        ------
        PreflightError
            With every problem of every machine.
        """
        script = None if settings.command[0] == "-m" else settings.command[0]
        questions = {
            host.address: {
                "address": host.address,
                "port": host.port,
                "num_servers": settings.num_servers,
                "folder": self._folder,
                "script": script,
                "part_config": needs.partition_file,
                "part_id": self._order.index(host.address),
                "num_parts": len(self._order),
                "shared_memory_bytes": needs.shared_memory_bytes.get(self._order.index(host.address), 0),
            }
            for host in hosts
        }
        self._problems += compare_versions(self._described, __version__)
        found = self._ask_all(questions, "check")
        for address, answer in found.items():
            self._problems += [(address, text) for text in answer["problems"]]
        prints = {address: answer["fingerprint"] for address, answer in found.items()}
        self._problems += compare_fingerprints(prints)
        self._problems.sort(key=lambda problem: self._order.index(problem[0]))
        raise_problems(self._problems, len(self._order))

    def plan(self, hosts: Sequence[Host], settings: JobSettings) -> list[PlannedProcess]:
        """Plan the job, with a rendezvous port that is free on the first machine now.

        Raises
        ------
        PreflightError
            If a machine was not reached, or the first one has no free port.
        """
        raise_problems(self._problems, len(self._order))
        first = hosts[0]
        avoid = list(range(first.port, first.port + settings.num_servers))
        question = {"address": first.address, "avoid": avoid}
        ports = self._ask_all({first.address: question}, "choose_master_port")
        raise_problems(self._problems, len(self._order))
        return plan_processes(hosts, settings, ports[first.address], (), os.environ)

    def send_files(
        self, command: Sequence[str], config: Config | None, part_config: str | None, places: Places
    ) -> None:
        """Bring every machine what it needs; see :mod:`dglkge.launch.remote.sync`.

        Raises
        ------
        PreflightError
            If a machine cannot be reached or cannot take its files.
        """
        raise_problems(self._problems, len(self._order))
        sessions, order = self._sessions, self._order
        work = send_inputs(sessions, order, command, config, part_config, places)
        self._do_all(work)
        raise_problems(self._problems, len(self._order))
        if config is not None:
            self._send_run(places.here / config.output, places)
            raise_problems(self._problems, len(self._order))

    def _send_run(self, output: Path, places: Places) -> None:
        """Bring every machine the newest version of the run, wherever that is.

        Raises
        ------
        InputError
            If it is not clear which copy counts, or another job writes to the run's folder.
        """
        sessions = self._sessions
        if self._lease is None:
            self._lease = LeaseTaker(output, new_nonce(), self._job, LAUNCHER).take()
        there = str(places.on_machines(output))
        question = {"folder": there, "launcher": launcher_place(output), "job": self._job}
        found = self._ask_all(dict.fromkeys(self._order, question), "describe_copy")
        raise_problems(self._problems, len(self._order))
        ordered = {address: found[address] for address in self._order}
        source, copy = choose_source(sessions, ordered, output, places)
        if source is not None:
            self._do_all(
                lambda address: bring_output(sessions[address], output, places, self._job, self._check_lease),
                [source],
            )
            raise_problems(self._problems, len(self._order))
        if copy.version:
            self._do_all(lambda address: send_output(sessions[address], output, places))

    def bring_files(self, output: Path | None, log_dir: Path, places: Places) -> None:
        """Bring logs, and the run's folder from the first machine, here.

        A machine whose agent has gone meanwhile gets another one.

        Raises
        ------
        PreflightError
            If a machine cannot be reached; says where the run's folder is.
        """
        self._problems = []
        for address, session in self._sessions.items():
            if not session.is_alive:
                session.close()
                self._sessions[address] = self._open(address, session.address)
        self._do_all(lambda address: bring_logs(self._sessions[address], log_dir, places))

        def bring_run(address: str) -> None:
            there = places.on_machines(output or Path())
            try:
                session = self._sessions[address]
                session.ask("drop_hold", COMPARE_SECONDS, hold=str(there / HOLD_FOLDER))
                bring_output(session, output or Path(), places, self._job, self._check_lease)
            except InputError as error:
                raise InputError(f"the run's folder is still {there} there: {error}") from None

        if output is not None:
            self._do_all(bring_run, self._order[:1])
        raise_problems(self._problems, len(self._order), "their files are still there")

    @contextlib.contextmanager
    def bringing_versions(
        self, output: Path, places: Places, say: Callable[[str], None], seconds: float
    ) -> Iterator[None]:
        """Bring published versions here while the job runs; see :class:`VersionBringer`."""
        first = self._order[0]
        name = self._sessions[first].address
        bringer = VersionBringer(
            lambda: self._open(first, name),
            lambda session, is_cancelled: bring_version(
                session, output, places, is_cancelled, self._check_lease
            ),
            say,
            seconds,
        )
        bringer.start()
        try:
            yield
        finally:
            bringer.stop()

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Make the log folder on every machine, with the ip_config.txt that the processes read.

        Raises
        ------
        PreflightError
            If a machine cannot write it.
        """
        machines = [[host.address, host.port] for host in hosts]
        question = {"log_dir": str(log_dir), "machines": machines}
        self._ask_all({host.address: question for host in hosts}, "write_job_files")
        raise_problems(self._problems, len(self._order))

    def warnings(self) -> list[str]:
        """Return what the agents found that is no obstacle."""
        return [
            f"{address}: {warning}"
            for address, described in self._described.items()
            for warning in described["warnings"]
        ]

    def executor(self) -> ClusterExecutor:
        """Return what runs processes on these machines."""
        return ClusterExecutor(self._sessions, self._before, self._folder)

    def close(self) -> None:
        """Let all agents go."""
        close_all(list(self._sessions.values()))
        self._sessions = {}
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _check_lease(self) -> None:
        """Raise if the run's folder here is another job's by now: a launcher that was suspended loses it."""
        if self._lease is not None:
            self._lease.check()

    def _open(self, address: str, name: str) -> HostSession:
        """Start an agent."""
        here = is_local(address, local_interfaces())
        return HostSession(name, None if here else self._ssh, self._python, forwarded_environment(os.environ))

    def _ask_all(self, questions: Mapping[str, dict[str, Any]], task: str) -> dict[str, Any]:
        """Ask machines side by side; note the problems, return the answers."""

        def ask(address: str) -> Any:
            return self._sessions[address].ask(task, **questions[address])

        return self._do_all(ask, list(questions))

    def _do_all(self, work: Callable[[str], Any], addresses: Sequence[str] | None = None) -> dict[str, Any]:
        """Do some work for machines side by side; note the problems, return the results."""
        answers: dict[str, Any] = {}
        chosen = self._order if addresses is None else addresses
        for address, outcome in side_by_side(work, chosen).items():
            if isinstance(outcome, InputError):
                self._problems.append((address, str(outcome)))
            else:
                answers[address] = outcome
        return answers


def side_by_side(work: Callable[[str], Any], addresses: Sequence[str]) -> dict[str, Any]:
    """Do some work for each machine in a thread of its own; an InputError stands in place of a result."""

    def attempt(address: str) -> Any:
        try:
            return work(address)
        except InputError as error:
            return error

    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as threads:
        return dict(zip(addresses, threads.map(attempt, addresses)))


def _addresses(machines: Sequence[Machine]) -> list[str]:
    """Return the IPv4 address of each machine."""
    addresses = [resolve(machine.address) for machine in machines]
    for address, machine in zip(addresses, machines):
        if is_local(address, {}) and len(machines) > 1:
            raise InputError(
                f"ip_config names {machine.address} among {len(machines)} machines: the others cannot reach "
                "a loopback address; give the machine's address on their network"
            )
        if addresses.count(address) > 1:
            raise InputError(f"ip_config names {address} {addresses.count(address)} times, under other names")
    return addresses


def _host(address: str, machine: Machine, described: Mapping[str, Any]) -> Host:
    """Return a machine as the plan needs it."""
    interface = described["interfaces"].get(address)
    return Host(address, machine.port, described["num_cores"], interface, tuple(described["runner"]))
