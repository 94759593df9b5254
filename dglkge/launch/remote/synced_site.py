"""Site of machines that share no disk: sends files before a job, holds its run, fetches logs after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.config import Config
from dglkge.distributed.lease import LAUNCHER, Lease, LeaseTaker, new_nonce
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import InputError
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.remote.rendezvous import Rendezvous
from dglkge.launch.remote.run_store import RunFolder
from dglkge.launch.remote.sync import fetch_logs, fetch_records, send_inputs
from dglkge.launch.ssh import SshSettings


class SyncedSite(RemoteSite):
    """Several machines, each with a disk of its own; see :mod:`dglkge.launch.remote.sync`.

    The launcher holds the lease of the run's folder on its own disk from before the first attempt on, and
    releases it in :meth:`close`.

    Parameters
    ----------
    ssh, python, folder, nodes, report
        See :class:`RemoteSite`.
    job : str
        Id of the job, equal for all its attempts, in the leases of run folders.
    repair : callable
        Goes back to an undamaged version, if the newest is damaged, given the configuration.
    """

    has_shared_disk = False

    def __init__(
        self,
        ssh: SshSettings,
        python: str,
        folder: str,
        nodes: Rendezvous | None = None,
        report: Callable[[str], None] = lambda text: None,
        job: str = "",
        repair: Callable[[CheckpointStorage, Config], object] = lambda storage, config: None,
    ) -> None:
        super().__init__(ssh, python, folder, nodes, report)
        self._job = job
        self._repair = repair
        self._lease: Lease | None = None
        self._run: RunFolder | None = None

    def send_files(
        self, command: Sequence[str], config: Config | None, part_config: str | None, places: Places
    ) -> None:
        """Send every machine its inputs, and open the run's folder to it.

        Raises
        ------
        PreflightError
            If a machine cannot be reached or cannot take its files.
        CheckpointError
            If the run is damaged, or another job writes to its folder.
        """
        self._raise_problems()
        self._run_all(send_inputs(self._sessions, self._order, command, config, part_config, places))
        self._raise_problems()
        # A run at a URL has its store there.
        if config is not None and not config.checkpoint.storage:
            self._open_run(places.here / config.output, config)

    def _open_run(self, output: Path, config: Config) -> None:
        """Take the run's folder here, check it, and let the machines read and write it."""
        # Kept over all attempts of the job: no other job may write there between two of them.
        if self._lease is None:
            self._lease = LeaseTaker(output, new_nonce(), self._job, LAUNCHER).take()
        storage = CheckpointStorage(output / CHECKPOINT_FOLDER, self._lease)
        if config.checkpoint.fallback:
            self._repair(storage, config)
        storage.published()
        if storage.path.is_dir():
            storage.drop_unpublished(storage.published_version())
        LeasedFolder(output, self._lease).drop_temporaries()
        self._run = RunFolder(output, self._lease)
        for session in self._sessions.values():
            session.store = self._run.answer

    def fetch_files(self, output: Path | None, log_dir: Path, places: Places) -> None:
        """Fetch the logs of all machines, and the run's records from the first.

        A machine whose node program has ended meanwhile gets a new one.

        Raises
        ------
        PreflightError
            If a machine cannot be reached; the message has the path of the run's folder there.
        """
        self._problems = []
        for address, session in self._sessions.items():
            # Results are fetched even if the node program has ended, for instance after a lost connection.
            if not session.is_alive:
                self._sessions[address] = self._reopen(address)
        self._run_all(lambda address: fetch_logs(self._sessions[address], log_dir, places))

        def fetch_run(address: str) -> None:
            there = places.on_machines(output or Path())
            try:
                fetch_records(self._sessions[address], output or Path(), places, self._check_lease)
            except InputError as error:
                raise InputError(f"the run's folder is still {there} there: {error}") from None

        # A job that was refused has left nothing there, or the folder belongs to another run.
        if output is not None and self._run is not None and self._run.was_taken:
            # Rank 0, which writes records, is on the first machine.
            self._run_all(fetch_run, self._order[:1])
        self._raise_problems("their files are still there")

    def close(self) -> None:
        """Release the machines and the lease."""
        super().close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _check_lease(self) -> None:
        """Raise if another job holds the run's folder here: a launcher that was suspended loses its lease."""
        if self._lease is not None:
            self._lease.check()
