"""Site of machines that share no disk: sends files before a job, holds its run, fetches logs after it.

The run itself is in the launcher's folder while the job runs: :mod:`dglkge.launch.remote.run_store`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.config import Config
from dglkge.data.dataset_files import PARTITIONS, Field, part_of_folder
from dglkge.distributed.lease import LAUNCHER, Lease, LeaseTaker, new_nonce
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import InputError
from dglkge.launch.background import in_thread
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.file_transfer import copy_files, file_names
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.remote.run_store import RunFolder


def plan_sync(
    command: Sequence[str], config: Config | None, part_config: str | None, places: Places, part_id: int
) -> dict[tuple[str, str], list[str]]:
    """Return the files that one machine needs before a job can run there, with its own partition alone.

    Their names are relative to a folder here and one there, the keys. `config` is the script's configuration,
    which names the data set, `part_config` DGL's partition file of other scripts. Raises InputError if a
    relative path leads out of the folder.
    """
    files = list(_program(command, places.here))
    for text in itertools.chain.from_iterable((word, word.partition("=")[2]) for word in command):
        if text and os.path.isfile(places.here / text):  # an argument names it; False for what is no path
            files.append(places.here / text)
    if config is not None:
        folder = places.here / config.dataset
        files += [folder / name for name in dataset_files(folder, part_id)]
    if part_config is not None:
        files += _graph_files(places.here / part_config, part_id)
    names: dict[tuple[str, str], list[str]] = {}
    for path in dict.fromkeys(files):
        # is_relative_to compares names only, so a path with ".." could lead out of the folder.
        if ".." in path.parts:
            raise InputError(f"{path} lies outside of {places.here}, so --sync has no place for it: {path}")
        is_inside = path.is_relative_to(places.here)
        here, there = (places.here, places.workspace) if is_inside else (path.parent, path.parent)
        names.setdefault((str(here), str(there)), []).append(str(path.relative_to(here)))
    return names


def dataset_files(folder: Path, part_id: int) -> list[str]:
    """Return the files of a data set without the partitions of other machines."""

    def is_needed(name: str) -> bool:
        folder, *rest = Path(name).parts
        return folder != PARTITIONS or len(rest) < 2 or part_of_folder(rest[0]) in (None, part_id)

    return list(filter(is_needed, file_names(str(folder), follow_links=True)))


def _program(command: Sequence[str], here: Path) -> Iterator[Path]:
    """Yield the script and the modules beside it, or the whole package of a module."""
    if command[0] == "-m":
        package = here / command[1].partition(".")[0]
        # Only Python files: data beside a script is named in arguments or in the configuration.
        yield from (path for path in (*package.rglob("*.py"), package.with_suffix(".py")) if path.is_file())
    else:
        yield from sorted((here / command[0]).parent.glob("*.py"))


def _graph_files(part_config: Path, part_id: int) -> Iterator[Path]:
    """Yield DGL's partition file and the files of one partition."""
    yield part_config
    # The check on the machine reports a problem.
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        content = json.loads(part_config.read_bytes())
        yield from (part_config.parent / name for name in content[Field.part_files(part_id)].values())


@dataclass(eq=False)
class SyncedSite(RemoteSite):
    """Several machines, each with a disk of its own.

    The launcher holds the lease of the run's folder on its own disk from before the first attempt on, and
    releases it in :meth:`close`. ``repair`` goes back to an undamaged version, if the newest is damaged.
    """

    places: Places = field(kw_only=True)
    repair: Callable[..., object] = field(kw_only=True)
    has_shared_disk: ClassVar[bool] = False
    _lease: Lease | None = field(default=None, init=False)

    def send_files(self, command: Sequence[str], config: Config | None, part_config: str | None) -> None:
        """Send every machine its inputs, and open the run's folder to it.

        Raises
        ------
        NotReadyError
            If a machine cannot be reached or cannot take its files.
        CheckpointError
            If the run is damaged, or another job writes to its folder.
        """
        self._raise_problems()
        places = self.places

        async def work(address: str) -> None:
            session, part_id = self._sessions[address], self.addresses.index(address)
            await session.call("place_folder", folder=str(places.workspace))
            files = await in_thread(plan_sync, command, config, part_config, places, part_id)
            for (here, there), names in files.items():
                await copy_files(session, here, there, names)

        self._run_all(work, self.addresses)
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
            self.repair(storage, config)
        storage.published()
        if storage.path.is_dir():
            storage.drop_unpublished(storage.named_version())
        LeasedFolder(output, self._lease).drop_temporaries()
        folder = RunFolder(output, self._lease)
        for session in self._sessions.values():
            session.store = folder.answer

    def fetch_logs(self, log_dir: Path) -> None:
        """Fetch what scripts have written to the folder of the logs on all machines.

        A machine whose node program has ended meanwhile gets a new one. Raises NotReadyError.
        """
        self._problems = []
        for address, session in self._sessions.items():
            if not session.is_alive:
                self._sessions[address] = self._reopen(address)
        there = str(self.places.on_machines(log_dir))
        self._run_all(lambda name: copy_files(self._sessions[name], str(log_dir), there), self.addresses)
        self._raise_problems("their files are still there")

    def close(self) -> None:
        """Release the machines and the lease."""
        super().close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
