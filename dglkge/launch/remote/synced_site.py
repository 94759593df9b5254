"""Site of machines that share no disk: sends files before a job, fetches results during and after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dglkge.config import Config
from dglkge.distributed.lease import LAUNCHER, Lease, LeaseTaker, new_nonce
from dglkge.errors import InputError
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.file_transfer import COMPARE_SECONDS
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.remote.rendezvous import Rendezvous
from dglkge.launch.remote.run_copies import HOLD_FOLDER
from dglkge.launch.remote.sync import (
    choose_source,
    fetch_logs,
    fetch_output,
    fetch_version,
    launcher_place,
    send_inputs,
    send_output,
)
from dglkge.launch.ssh import SshSettings

STOP_SECONDS = 20.0


class SyncedSite(RemoteSite):
    """Several machines, each with a disk of its own; see :mod:`dglkge.launch.remote.sync`.

    The launcher holds the lease of its own copy of the run's folder from the first file on, and releases it
    in :meth:`close`.

    Parameters
    ----------
    ssh, python, folder, nodes, report
        See :class:`RemoteSite`.
    job : str
        Id of the job, equal for all its attempts, in the leases of run folders.
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
    ) -> None:
        super().__init__(ssh, python, folder, nodes, report)
        self._job = job
        self._lease: Lease | None = None

    def send_files(
        self, command: Sequence[str], config: Config | None, part_config: str | None, places: Places
    ) -> None:
        """Send every machine its inputs and the newest version of the run.

        Raises
        ------
        PreflightError
            If a machine cannot be reached or cannot take its files.
        """
        self._raise_problems()
        self._run_all(send_inputs(self._sessions, self._order, command, config, part_config, places))
        self._raise_problems()
        if config is not None:
            self._send_run(places.here / config.output, places)
            self._raise_problems()

    def _send_run(self, output: Path, places: Places) -> None:
        """Find the newest version of the run among all copies, fetch it here, and send it to every machine.

        Raises
        ------
        InputError
            If it is not clear which copy is the newest, or another job writes to the run's folder.
        """
        sessions = self._sessions
        # Kept over all attempts of the job: no other job may write to the local copy between two of them.
        if self._lease is None:
            self._lease = LeaseTaker(output, new_nonce(), self._job, LAUNCHER).take()
            # After a stop a transfer may still be blocked by a disk. The lease then ends with this process.
            self._lease.keep_while(self._is_working)
        there = str(places.on_machines(output))
        question = {"folder": there, "launcher": launcher_place(output), "job": self._job}
        found = self._call_all(dict.fromkeys(self._order, question), "describe_copy")
        self._raise_problems()
        ordered = {address: found[address] for address in self._order}
        source, copy = choose_source(sessions, ordered, output, places)
        if source is not None:
            self._run_all(
                lambda address: fetch_output(sessions[address], output, places, self._job, self._check_lease),
                [source],
            )
            self._raise_problems()
        if copy.version:
            self._run_all(lambda address: send_output(sessions[address], output, places))

    def fetch_files(self, output: Path | None, log_dir: Path, places: Places) -> None:
        """Fetch the logs of all machines, and the run's folder of the first.

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
                session = self._sessions[address]
                session.call("drop_hold", COMPARE_SECONDS, hold=str(there / HOLD_FOLDER))
                fetch_output(session, output or Path(), places, self._job, self._check_lease)
            except InputError as error:
                raise InputError(f"the run's folder is still {there} there: {error}") from None

        if output is not None:
            # Rank 0 is on the first machine, and its disk has the run's folder.
            self._run_all(fetch_run, self._order[:1])
        self._raise_problems("their files are still there")

    @contextlib.contextmanager
    def fetching_versions(
        self, output: Path | None, places: Places, report: Callable[[str], None], seconds: float
    ) -> Iterator[None]:
        """Fetch published versions inside the block; see :class:`VersionFetcher`. 0 s: not at all."""
        if output is None or not seconds:
            yield
            return
        run, session = output, self._sessions[self._order[0]]
        fetcher = VersionFetcher(
            lambda is_cancelled: fetch_version(session, run, places, is_cancelled, self._check_lease),
            report,
            seconds,
        )
        fetcher.start()
        try:
            yield
        finally:
            fetcher.stop()

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


class VersionFetcher:
    """Polls the first machine for a new checkpoint version, and fetches the newest, in a thread.

    A problem is reported once, and the next poll tries again: the job does not depend on it.

    Parameters
    ----------
    fetch : callable
        Fetches the newest version, given a test whether to cancel; returns its number, or None if there is
        nothing new.
    report : callable
        Takes messages for the user.
    seconds : float
        Between two polls.
    """

    def __init__(
        self,
        fetch: Callable[[Callable[[], bool]], int | None],
        report: Callable[[str], None],
        seconds: float,
    ) -> None:
        self._fetch = fetch
        self._report = report
        self._seconds = seconds
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dglkge-fetch", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop at once. A transfer is cancelled and leaves the earlier files in place."""
        self._is_stopped.set()
        # Bounded: a blocked disk could hold the thread forever. It is a daemon thread.
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        """Fetch new versions until stopped; the body of the thread."""
        has_warned = False
        while not self._is_stopped.wait(self._seconds):
            try:
                self._fetch(self._is_stopped.is_set)
                has_warned = False
            except (InputError, OSError, ValueError) as error:
                if not has_warned and not self._is_stopped.is_set():
                    self._report(
                        f"warning: the newest version could not be brought here, trying again: {error}"
                    )
                has_warned = True
