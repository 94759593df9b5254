"""Site of a job: the interface, and the choice of a site for the machines of ip_config."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dglkge.config import Config
from dglkge.distributed.ip_config import Machine
from dglkge.distributed.jobs import JobEntry
from dglkge.launch.local_site import LocalSite, are_all_local, local_interfaces
from dglkge.launch.process_plan import Host, JobSettings, Places, PlannedProcess
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.remote.rendezvous import Rendezvous
from dglkge.launch.remote.session import SshSettings
from dglkge.launch.remote.synced_site import SyncedSite
from dglkge.launch.script_config import Needs
from dglkge.launch.watched_process import Executor


class Site(Protocol):
    """The machines of a job, as the launcher uses them; the methods are called in this order.

    Implemented by :class:`LocalSite` (this machine, without SSH), :class:`RemoteSite` (several machines with
    a shared disk) and :class:`SyncedSite` (several machines, each with its own disk).
    """

    def connect(self, machines: Sequence[Machine], entry: JobEntry | None) -> list[Host]:
        """Connect to the machines of ip_config, and register the job on each; without an entry do not.

        Raises
        ------
        InputError
            If ip_config does not make sense. Problems of single machines are raised by :meth:`check`.
        """
        ...

    def with_ports(self, hosts: Sequence[Host], machines: Sequence[Machine], num_servers: int) -> list[Host]:
        """Choose free ports for the servers of machines to which ip_config gives none."""
        ...

    def send_files(
        self, command: Sequence[str], config: Config | None, part_config: str | None, places: Places
    ) -> None:
        """Send the machines the files that they need, if they share no disk."""
        ...

    def check(self, hosts: Sequence[Host], settings: JobSettings, needs: Needs) -> None:
        """Check all machines for anything that would keep the job from running.

        Raises
        ------
        InputError
            With every problem of every machine.
        """
        ...

    def plan(self, hosts: Sequence[Host], settings: JobSettings) -> list[PlannedProcess]:
        """Plan the processes of the job, with a rendezvous port that is free now."""
        ...

    def warnings(self) -> list[str]:
        """Return problems that do not keep the job from running."""
        ...

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Create the log folder with its ip_config.txt on machines other than this one."""
        ...

    def fetching_versions(
        self, output: Path | None, places: Places, report: Callable[[str], None], seconds: float
    ) -> contextlib.AbstractContextManager[None]:
        """Fetch published checkpoint versions inside the block, if the machines share no disk."""
        ...

    def executor(self) -> Executor:
        """Return the executor that starts processes on these machines."""
        ...

    def fetch_files(self, output: Path | None, log_dir: Path, places: Places) -> None:
        """Fetch the files that a job has written, if the machines share no disk."""
        ...

    def close(self) -> None:
        """Release the machines."""
        ...


class SiteChooser:
    """Chooses the site of each attempt of a job, and keeps it while ip_config needs no other kind.

    Parameters
    ----------
    ssh : SshSettings
    python : str
        The interpreter on the machines of several.
    folder : str
        Working folder of the processes.
    has_own_disks : bool
        Whether the machines share no disk; then this machine gets a copy too.
    job : str
        Id of the job in the leases of run folders.
    nodes : Rendezvous, optional
        Connections of the nodes of a job without SSH.
    """

    def __init__(
        self,
        ssh: SshSettings,
        python: str,
        folder: str,
        has_own_disks: bool = False,
        job: str = "",
        nodes: Rendezvous | None = None,
    ) -> None:
        self._ssh = ssh
        self._python = python
        self._folder = folder
        self._has_own_disks = has_own_disks
        self._name = job
        self._nodes = nodes
        self._site: Site | None = None
        self._is_local = False

    def choose(self, machines: Sequence[Machine]) -> Site:
        """Return the site for some machines: the one of the attempt before if it still fits.

        Raises
        ------
        InputError
            If a name of ip_config has no IPv4 address.
        """
        can_be_local = not self._has_own_disks and self._nodes is None
        is_local = can_be_local and are_all_local(machines, local_interfaces())
        # A restart reads ip_config again, which may name other machines by then.
        if self._site is None or is_local != self._is_local:
            self.close()
            self._site, self._is_local = self._open(is_local), is_local
        return self._site

    def _open(self, is_local: bool) -> Site:
        """Build a site."""
        if is_local:
            return LocalSite(self._folder)
        if self._has_own_disks:
            return SyncedSite(self._ssh, self._python, self._folder, self._name, self._nodes)
        return RemoteSite(self._ssh, self._python, self._folder, self._nodes)

    def close(self) -> None:
        """Release the machines of the present site."""
        if self._site is not None:
            self._site.close()
            self._site = None
