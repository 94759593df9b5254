"""Site of one or several machines that see one disk: a node program on each, called in parallel."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dglkge import __version__
from dglkge.distributed.addresses import Machine, is_own_address
from dglkge.distributed.jobs import JobEntry
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.background import Report, wait
from dglkge.launch.machine import machine_addresses
from dglkge.launch.process_plan import Host, JobSettings, PlannedProcess, plan_processes
from dglkge.launch.remote.connection import Events, NodeConnection, RunningProcess, close_all, open_node
from dglkge.launch.remote.rendezvous import Rendezvous
from dglkge.launch.stop_signals import forward_stop
from dglkge.launch.table_storage import MachineNeeds

if TYPE_CHECKING:
    from dglkge.config import Config


def describe_problems(problems: Sequence[tuple[str, InputError]], num_hosts: int, outcome: str) -> str:
    """Return a line for each problem, with the address of its machine, after one that counts them."""
    width = max(len(address) for address, _ in problems)
    hosts = len({address for address, _ in problems})
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"  {address:{width}}  {' '.join(str(error).split())}" for address, error in problems]
    return "\n".join([f"{count} on {hosts} of {num_hosts} hosts; {outcome}", *lines])


def compare_versions(described: Mapping[str, Mapping[str, Any]], own_version: str) -> list[tuple[str, str]]:
    """Find machines with other versions than the first, or with another dglkge than the launcher's.

    `described` has the replies of ``machine.describe_machine`` by address.
    """
    first, problems = next(iter(described), ""), []
    for address, about in described.items():
        # dglkge is compared with the launcher's, which plans the job; the others with the first machine's.
        for name, version in {**described[first]["versions"], "dglkge": own_version}.items():
            installed, owner = about["versions"].get(name), "the launcher" if name == "dglkge" else first
            if installed is None:
                problems.append((address, f"has no {name}"))
            elif version not in (None, installed):
                problems.append((address, f"has {name} {installed}, {owner} has {version}"))
    return problems


def compare_fingerprints(fingerprints: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Find machines whose partition file is not that of the first machine that has one."""
    known = {address: text for address, text in fingerprints.items() if text is not None}
    first = next(iter(known), "")
    words = f"its partition file differs from that of {first}: they are of two partitionings"
    return [(address, words) for address, text in known.items() if text != known[first]]


CLEAN_UP_SECONDS = 5.0


@dataclass(eq=False)
class RemoteSite:
    """The machines of a job that see one disk, with a node program on each.

    Node programs go on from one attempt of a job to the next. Machines with an address of this one are
    reached without SSH. One machine alone, if it is this one, is used as it is named in ip_config.txt.

    Parameters
    ----------
    ssh : sequence of str
        Command of the client for machines that are not this one; see ``ssh_client``.
    python : str
        The interpreter on every machine.
    folder : str
        Working folder of the processes.
    nodes : Rendezvous, optional
        Connections of the nodes of a job without SSH: line k of ip_config is node k, line 0 is this machine.
    report : callable, optional
        Takes messages for the user.

    Attributes
    ----------
    addresses : list of str
        Of the machines, in the order of ip_config.txt.
    """

    ssh: Sequence[str]
    python: str
    folder: str
    nodes: Rendezvous | None = None
    report: Report = lambda text: None
    addresses: list[str] = field(default_factory=list, init=False)
    has_shared_disk: ClassVar[bool] = True
    _is_alone: bool = field(default=False, init=False)
    _job: str = field(default="", init=False)
    _sessions: dict[str, NodeConnection] = field(default_factory=dict, init=False)
    _checked: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _problems: list[tuple[str, InputError]] = field(default_factory=list, init=False)

    def connect(
        self, machines: Sequence[Machine], entry: JobEntry | None, num_servers: int = 1
    ) -> list[Host]:
        """Start missing node programs, and get the facts that the plan depends on, with ports for servers.

        Sessions with other machines are closed. The entry registers the job on each machine, and removes
        segments of ended jobs and attempts; None: a dry run.

        Returns the machines that replied; the next step raises the problems of the others, and versions that
        differ. Raises InputError if a name has no address or two have the same, or a loopback address is
        among several.
        """
        self.addresses = machine_addresses(machines)
        is_alone = self.has_shared_disk and self.nodes is None and len(machines) == 1
        self._is_alone = is_alone and is_own_address(self.addresses[0])
        self._problems = []
        machine_of = dict(zip(self.addresses, machines))
        sessions = self._sessions.items()
        self._close([name for name, session in sessions if name not in machine_of or not session.is_alive])
        for address in [name for name in machine_of if name not in self._sessions]:
            try:
                self._sessions[address] = self._open(address, machine_of[address].address)
            except NotReadyError as error:
                if not self._is_node(address):
                    raise
                self._problems.append((address, error))
        # All machines reply in parallel: a login over SSH takes most of a second.
        present = [address for address in self.addresses if address in self._sessions]
        described = self._call_all(dict.fromkeys(present, {}), "describe")
        differences = compare_versions(described, __version__)
        self._problems += [(address, NotReadyError(text)) for address, text in differences]
        if entry is not None:
            self._job = entry.job
            self._call_all(dict.fromkeys(described, {"entry": entry.to_dict()}), "register")
        without = [name for name in described if not machine_of[name].has_port]
        questions = {name: {"address": name, "num_servers": num_servers} for name in without}
        ports = self._call_all(questions, "choose_server_ports")
        ports = {name: machine_of[name].port for name in described} | ports
        return [planned_host(name, ports[name], about) for name, about in described.items()]

    def check(
        self, hosts: Sequence[Host], settings: JobSettings, graph: str | None, needs: Sequence[MachineNeeds]
    ) -> None:
        """Check all machines that replied for all problems that would keep the job from running.

        `graph` is the path of the partition file on the machines, None if unknown; `needs` are by the number
        of the machine. Raises NotReadyError with every problem of every machine, a line for each.
        """
        script = None if settings.command[0] == "-m" else settings.command[0]
        questions = {}
        for host in hosts:
            machine = self.addresses.index(host.address)
            # A script on this machine alone looks at its own part itself.
            part_id = None if self._is_alone else machine
            questions[host.address] = {
                "servers": (host.address, host.port, settings.num_servers),
                "folder": self.folder,
                "script": script,
                "partition": graph and (graph, part_id, len(self.addresses)),
                "num_processes": len(hosts) * (settings.num_servers + settings.num_trainers),
                "needs": dataclasses.asdict(needs[machine]),
            }
        answers = self._checked = self._call_all(questions, "check")
        for address, answer in answers.items():
            for text, is_input in answer["problems"]:
                self._problems.append((address, (InputError if is_input else NotReadyError)(text)))
        prints = {address: answer["fingerprint"] for address, answer in answers.items()}
        self._problems += [(address, NotReadyError(text)) for address, text in compare_fingerprints(prints)]
        # Stable: the order of ip_config, and of the checks on each machine.
        self._problems.sort(key=lambda problem: self.addresses.index(problem[0]))
        self._raise_problems()

    def plan(self, hosts: Sequence[Host], settings: JobSettings) -> list[PlannedProcess]:
        """Plan the job, with a rendezvous port that is free on the first machine now."""
        self._raise_problems()
        first = hosts[0]
        avoid = list(range(first.port, first.port + settings.num_servers))
        question = {"address": first.address, "avoid": avoid}
        # Chosen as late as possible: any program may take the port until torch binds it.
        ports = self._call_all({first.address: question}, "choose_master_port")
        self._raise_problems()
        folders = {address: answer["table_folder"] for address, answer in self._checked.items()}
        hosts = [dataclasses.replace(host, table_folder=folders.get(host.address, "")) for host in hosts]
        return plan_processes(hosts, settings, ports[first.address], os.environ)

    def send_files(self, command: Sequence[str], config: Config | None, part_config: str | None) -> None:
        """Do nothing: the machines share a disk with this one."""

    def fetch_logs(self, log_dir: Path) -> None:
        """Do nothing: the machines share a disk with this one."""

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Create the log folder on every machine, with the ip_config.txt that the processes read."""
        question = {"log_dir": str(log_dir), "machines": [[host.address, host.port] for host in hosts]}
        self._call_all({host.address: question for host in hosts}, "write_job_files")
        self._raise_problems()

    def warnings(self) -> list[str]:
        """Return where tables are files."""
        notes = {address: answer["note"] for address, answer in self._checked.items() if answer["note"]}
        return [note if self._is_alone else f"{address}: {note}" for address, note in notes.items()]

    def start(self, plan: Sequence[PlannedProcess], events: Events) -> list[RunningProcess]:
        """Start the processes of a job on their machines; return them in the order of the plan."""
        started = []
        for address in {planned.address for planned in plan}:
            local = [planned for planned in plan if planned.address == address]
            started += wait(self._sessions[address].start(local, self.folder, events))
        return sorted(started, key=lambda process: plan.index(process.planned))

    def clean_up(self, addresses: Collection[str]) -> None:
        """Remove what the job's processes have left on some machines; node programs of lost ones do so."""
        for address in addresses:
            session = self._sessions[address]
            # A machine that cannot be reached would cost CLEAN_UP_SECONDS.
            if session.why_silent:
                continue
            question = {"job": self._job}
            with contextlib.suppress(InputError):
                if not session.is_alive:  # it was killed: another one cleans up
                    question["table_folder"] = self._checked.get(address, {}).get("table_folder", "")
                    session = self._sessions[address] = self._reopen(address)
                wait(session.call("clean_up", CLEAN_UP_SECONDS, **question))

    def close(self) -> None:
        """End all node programs, and with them the job's entries on the machines."""
        self._close(list(self._sessions))

    def _open(self, address: str, name: str) -> NodeConnection:
        """Connect to a machine and start its node program."""
        if self._is_node(address) and self.nodes is not None:
            return self.nodes.connection(self.addresses.index(address))
        # Without SSH the machine of the launcher needs no SSH server and no key.
        is_here = self.nodes is not None or is_own_address(address)
        python = sys.executable if self._is_alone else self.python
        ssh = None if is_here else self.ssh
        session = open_node(name, ssh, python)
        session.on_stop = functools.partial(forward_stop, self.report, f"the node program on {address}")
        return session

    def _reopen(self, address: str) -> NodeConnection:
        """Connect anew to a machine whose node program has ended."""
        session = self._sessions[address]
        if not session.is_borrowed:
            wait(session.close())
        return self._open(address, session.address)

    def _is_node(self, address: str) -> bool:
        """Whether a machine's node program has connected by itself."""
        return self.nodes is not None and self.addresses.index(address) > 0

    def _close(self, addresses: Sequence[str]) -> None:
        """End node programs but those that have connected by themselves, which are told the job's end."""
        sessions = [self._sessions.pop(address) for address in addresses]
        wait(close_all(session for session in sessions if not session.is_borrowed))

    def _raise_problems(self, outcome: str = "nothing was started") -> None:
        """Raise all problems in one error, if there are any; of this machine alone only the first."""
        if not self._problems:
            return
        if self._is_alone:
            errors = [error for _, error in self._problems]
            raise next((error for error in errors if not isinstance(error, NotReadyError)), errors[0])
        raise NotReadyError(describe_problems(self._problems, len(self.addresses), outcome))

    def _call_all(self, questions: Mapping[str, dict[str, Any]], task: str) -> dict[str, Any]:
        """Call a task on machines in parallel; record the problems, return the replies."""
        return self._run_all(lambda name: self._sessions[name].call(task, **questions[name]), list(questions))

    def _run_all(self, work: Callable[[str], Awaitable[Any]], addresses: Sequence[str]) -> dict[str, Any]:
        """Run a coroutine for each machine in parallel; record the problems, return the results in order."""

        async def run() -> list[Any]:
            return await asyncio.gather(*map(work, addresses), return_exceptions=True)

        results = {}
        for address, outcome in zip(addresses, wait(run())):
            if isinstance(outcome, InputError):
                self._problems.append((address, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[address] = outcome
        return results


def planned_host(address: str, port: int, described: Mapping[str, Any]) -> Host:
    """Return a machine as the plan needs it."""
    # 127.0.0.2 and others are no addresses of an interface, but all of them are reached by the loopback.
    loopback = described["interfaces"].get("127.0.0.1", "lo") if address.startswith("127.") else None
    interface = described["interfaces"].get(address, loopback)
    gpus = tuple(described["gpus"])
    runner = tuple(described["runner"])
    return Host(address, port, described["num_cores"], interface, runner, gpus=gpus)
