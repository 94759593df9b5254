"""``dglkge-launch``: runs a job on one or several machines until all its processes have ended."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import getpass
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dglkge.distributed.addresses import Machine, read_ip_config
from dglkge.distributed.dgl_import import require_dgl
from dglkge.distributed.jobs import JobEntry, process_start
from dglkge.distributed.lease import new_nonce
from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.distributed.world import TEXT
from dglkge.errors import FAILURE_STATUS, DglkgeError, InputError, NotReadyError, exit_status_of, os_errors
from dglkge.launch import arguments, process_plan, supervisor
from dglkge.launch.background import wait
from dglkge.launch.console import LAUNCHER_LOG, Console
from dglkge.launch.machine import allow_open_files, local_interfaces
from dglkge.launch.process_plan import Host, JobSettings, Places, PlannedProcess
from dglkge.launch.remote.connection import ssh_client
from dglkge.launch.remote.node_place import NodePlace, node_place
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.remote.rendezvous import Rendezvous, nodes_of_job, run_node
from dglkge.launch.stop_signals import describe_stop, stop_signals_raised
from dglkge.launch.supervisor import JobResult
from dglkge.planning.host import MOST_DEFAULT_TRAINERS
from dglkge.typing import CUDA_DEVICE

if TYPE_CHECKING:
    from dglkge.checkpoint.storage import CheckpointStorage
    from dglkge.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, by default with ``sys.argv[1:]``; the exit statuses are in ``--help``."""
    # In the background: a terminal that is stopped with Ctrl-S must not stop heartbeats.
    console = Console.in_background(sys.stdout, sys.stderr)
    try:
        with stop_signals_raised():
            return _launch(sys.argv[1:] if argv is None else argv, console)
    except DglkgeError as error:
        console.error(f"dglkge-launch: error: {error}")
        return exit_status_of(error)
    except KeyboardInterrupt as error:  # no process of the job runs
        words, status = describe_stop(error)
        console.error(f"dglkge-launch: {words}")
        return status
    finally:
        console.finish()


def _launch(argv: Sequence[str], console: Console) -> int:
    """Check that the job can run, run it, and restart it as often as allowed."""
    options, command = arguments.parse_arguments(argv)
    console.log_format = options.log_format
    if options.print_completion:
        console.summary(_completion_script(options.print_completion).rstrip("\n"))
        return 0
    require_dgl("dglkge-launch")
    workspace = Path(options.workspace).resolve()
    # With --sync relative paths are on this machine, from which files are copied; else in the workspace,
    # which all machines see.
    places = Places(Path.cwd() if options.sync else workspace, workspace)
    read = functools.partial(read_ip_config, places.here / options.ip_config)
    place = node_place(options, read, local_interfaces())
    if place is not None and place.rank > 0:
        seconds = options.rendezvous_seconds
        return run_node(place, options.secret_file, options.python, seconds, console.message)
    with nodes_of_job(place, options.secret_file, options.rendezvous_seconds, console.message) as nodes:
        status, reason = _Job(options, command, console, places, place, nodes).launch()
        if nodes is not None:
            wait(nodes.end(status, reason))
        return status


def _fall_back(places: Places, storage: CheckpointStorage, config: Config) -> None:
    """Go back to the newest undamaged version of the run in the launcher's folder."""
    # Imported here: they load torch, and no other job needs them.
    from dglkge.checkpoint.manager import fall_back
    from dglkge.data.dataset import Dataset

    dataset = Dataset.open(places.here / config.dataset)
    fall_back(storage, {name: dataset.mapped_vocabulary(name) for name in dataset.entity_types})


def _completion_script(shell: str) -> str:
    """Return the script that makes a shell complete the options, the script and its files."""
    from dglkge.cli.main import completion_script

    parser = arguments.build_parser()
    parser.add_argument("script", metavar="FILE", help="the script")
    parser.add_argument("args", metavar="FILE", nargs=argparse.REMAINDER, help="its arguments")
    return completion_script(parser, shell)


@dataclass(frozen=True)
class _Job:
    """A job as its command line describes it; each attempt reads machines and configuration anew."""

    options: argparse.Namespace
    command: tuple[str, ...]
    console: Console
    places: Places
    place: NodePlace | None
    nodes: Rendezvous | None
    # One id for all attempts: a restart may take over the lease of the attempt before.
    name: str = field(default_factory=new_nonce)
    attempts: Iterator[int] = field(default_factory=itertools.count)

    @functools.cached_property
    def site(self) -> RemoteSite:
        """The machines of the job."""
        options, folder = self.options, str(self.places.workspace)
        flags = {"-i": options.identity_file, "-l": options.ssh_username, "-p": options.ssh_port}
        ssh = ssh_client(flags, options.ssh_option)
        about = ssh, options.python, folder, self.nodes, self.console.message
        if not options.sync:
            return RemoteSite(*about)
        # Imported here: it reads checkpoints, and other jobs start sooner without it.
        from dglkge.launch.remote.synced_site import SyncedSite

        return SyncedSite(*about, places=self.places, repair=functools.partial(_fall_back, self.places))

    def launch(self) -> tuple[int, str]:
        """Run the job from this machine; return its status and a reason for the other nodes."""
        options, report = self.options, self.console.message
        _check_script(self.command, self.places.here)
        log_dir = Path(options.log_dir or f"logs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").resolve()
        with contextlib.closing(self.site):
            if options.dry_run:
                plan, *_ = self.plan(
                    supervisor.attempt_log_dir(log_dir, 0, options.max_restarts), is_dry=True
                )
                text = process_plan.describe_plan(plan)
                self.console.summary(json.dumps(process_plan.plan_to_dict(plan)) if options.json else text)
                return 0, ""

            def run(attempt: int) -> JobResult:
                logs = supervisor.attempt_log_dir(log_dir, attempt, options.max_restarts)
                try:
                    return supervisor.with_ports_chosen_again(lambda: self.run(logs), report)
                # At the first attempt the user can mend it at once.
                except NotReadyError as error:
                    if attempt == 0:
                        raise
                    # after a failure, a host, a name or a port may be unavailable for a while
                    return JobResult(1, str(error), 0.0, str(logs), ())

            result = supervisor.run_with_restarts(run, options.max_restarts, report)
        _conclude(result, self.console, options.json)
        return result.status, result.reason or ""

    def plan(
        self, log_dir: Path, is_dry: bool = False
    ) -> tuple[list[PlannedProcess], list[Host], JobSettings]:
        """Plan an attempt, whose inputs are read anew: the machines, their cores, the configuration.

        In a dry run no file is sent and nothing is registered.
        """
        machines = self._machines()
        config = arguments.script_config(self.command, self.places.here)
        num_servers = self.options.num_servers or machines[0].num_servers or 1
        entry = None if is_dry else self._entry(log_dir, config)
        hosts = self.site.connect(machines, entry, num_servers)
        settings = self._settings(hosts, num_servers, log_dir, config)
        # The files come before the check, which looks for them on the machines.
        if not is_dry:
            self.site.send_files(self.command, config, self.options.part_config)
        # In a dry run with --sync the machines have no files yet, so a check would only find that.
        if not (is_dry and self.options.sync):
            self._check(hosts, settings, config)
        return self.site.plan(hosts, settings), hosts, settings

    def run(self, log_dir: Path) -> JobResult:
        """Run one attempt to its end."""
        console, site = self.console, self.site
        plan, hosts, settings = self.plan(log_dir)
        allow_open_files(len(plan))
        for warning in site.warnings():
            console.message(f"warning: {warning}")
        # After all checks: a refused job leaves no folder.
        with os_errors(NotReadyError, f"cannot write logs to {log_dir}"):
            log_dir.mkdir(parents=True, exist_ok=True)
        console.log_path = log_dir / LAUNCHER_LOG
        site.write_job_files(Path(settings.log_dir), hosts)
        where = ", ".join(f"{host.address}:{host.port}" for host in hosts)
        each = ", each with a GPU," if settings.device == CUDA_DEVICE else ""
        counts = f"{settings.num_servers} server(s) and {settings.num_trainers} trainer(s){each}"
        console.message(f"{counts} on {where}; logs in {log_dir}")
        threads = min(process_plan.num_threads(settings, host) for host in hosts)
        is_default = self.options.num_trainers is None
        if is_default and threads > 1 and settings.num_trainers < MOST_DEFAULT_TRAINERS:
            console.message(
                f"{threads} threads a trainer, not a trainer a core: threads share the negatives of a chunk, "
                "each trainer computes with all of them"
            )
        seconds = {name: getattr(self.options, name) for name in ("stop_seconds", "exit_seconds")}
        result = supervisor.Supervisor(site, console, log_dir, process_plan.Limits(**seconds)).run(plan)
        return self._with_logs_fetched(result, log_dir)

    def _with_logs_fetched(self, result: JobResult, log_dir: Path) -> JobResult:
        """Fetch the logs of an attempt; return its result, which a problem or a stop changes.

        A success becomes a failure: the user would take the results for complete. Another status stays: 143
        still means that the state is committed.
        """
        try:
            self.site.fetch_logs(log_dir)
            return result
        except DglkgeError as error:
            status = FAILURE_STATUS
            reason = f"not all files could be brought back: {' '.join(str(error).split())}"
        except KeyboardInterrupt as error:
            words, status = describe_stop(error)
            reason = f"{words}: not all files have been brought back"
            result = dataclasses.replace(result, is_interrupted=True)
        if result.status == 0:
            return dataclasses.replace(result, status=status, reason=reason)
        self.console.message(f"error: {reason}")
        return result

    def _settings(
        self, hosts: Sequence[Host], num_servers: int, log_dir: Path, config: Config | None
    ) -> JobSettings:
        """Build the settings of an attempt with all defaults; paths are those on the machines."""
        options, places = self.options, self.places
        device = "" if config is None else config.training.device
        lowest, highest = options.num_trainers or (1, None)
        most = arguments.most_trainers_of(config, places)
        num_trainers = process_plan.choose_num_trainers(hosts, lowest, highest, device, most)
        log_dir = places.on_machines(log_dir) if options.sync else log_dir
        return JobSettings(
            command=self.command,
            num_trainers=num_trainers,
            num_servers=num_servers,
            part_config=options.part_config and str(places.on_machines(Path(options.part_config))),
            log_dir=str(log_dir),
            shows_progress=sys.stdout.isatty() and options.log_format == TEXT,
            job=self.name,
            attempt=next(self.attempts),
            device=process_plan.device_of_trainers(device, hosts, num_trainers),
            **{name: getattr(options, name) for name in process_plan.OPTIONS},
        )

    def _entry(self, log_dir: Path, config: Config | None) -> JobEntry:
        """Describe the job for the registers of its machines."""
        return JobEntry(
            self.name,
            user=_user_name(),
            host=socket.gethostname(),
            launcher_pid=os.getpid(),
            launcher_started=process_start(os.getpid()),
            command=self.command,
            folder=str(self.places.workspace),
            run="" if config is None else str(self.places.on_machines(Path(config.output)).resolve()),
            log_dir=str(log_dir),
            started=time.time(),
        )

    def _machines(self) -> list[Machine]:
        """Return the machines of an attempt; waits for the nodes of a job without SSH."""
        place, ip_config = self.place, self.places.here / self.options.ip_config
        if self.nodes is not None:
            return self.nodes.machines(ip_config)
        if place is not None and not place.has_ip_config:  # --nodes 1
            return [Machine(place.address or "127.0.0.1", has_port=False)]
        return read_ip_config(ip_config)

    def _check(self, hosts: Sequence[Host], settings: JobSettings, config: Config | None) -> None:
        """Check that all machines can take the job, as far as its needs are known."""
        graph = settings.part_config
        partitions = arguments.partition_file(config, self.places.here)
        if graph is None and partitions is not None:
            graph = str(self.places.on_machines(partitions))
        counts = (len(self.site.addresses), settings.num_trainers, settings.num_servers)
        self.site.check(hosts, settings, graph, arguments.machine_needs(config, self.places, *counts))


def _user_name() -> str:
    """Return the name of this user; the number if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 raises the latter
        return str(os.getuid())


def _check_script(command: Sequence[str], workspace: Path) -> None:
    """Raise InputError for a script that does not exist, with a hint for the syntax of DGL's launcher."""
    script = command[0]
    if script == "-m" or os.path.isfile(workspace / script):  # also of a text too long for a name
        return
    words = script.split()
    if (len(words) > 1 and len(command) == 1) or Path(script).name.startswith("python"):
        raise InputError(
            f"{script!r} is no script: give the script and its arguments as separate words, without 'python' "
            f"and without quotes around them all; {sys.executable} runs it"
        )
    raise InputError(f"there is no script {script!r} in {workspace}")


def _conclude(result: JobResult, console: Console, as_json: bool) -> None:
    """Show the result of the job."""
    if result.reason is None:
        console.message(f"all processes ended well after {result.seconds:.1f} s")
    else:
        how = "stopped" if result.status == RESTART_STATUS or result.is_interrupted else "failed"
        text = f"{how} after {result.seconds:.1f} s: {result.reason}; logs in {result.log_dir}"
        console.message(text, "error" if how == "failed" else "info")
    if as_json:
        console.summary(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    sys.exit(main())
