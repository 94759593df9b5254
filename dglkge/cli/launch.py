"""``dglkge-launch``: start a job and stay with it until nothing of it runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dglkge.config import Config
from dglkge.distributed.ip_config import Machine, read_ip_config
from dglkge.distributed.lease import new_nonce
from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.errors import INPUT_ERROR_STATUS, INTERRUPTED_STATUS, InputError, NotReadyError
from dglkge.launch.arguments import parse_arguments
from dglkge.launch.console import Console
from dglkge.launch.job_result import JobResult, attempt_log_dir, run_with_restarts
from dglkge.launch.local_job import find_unreadable_arguments, write_job_files
from dglkge.launch.ports import with_ports_chosen_again
from dglkge.launch.process_plan import (
    Host,
    JobSettings,
    Limits,
    Places,
    PlannedProcess,
    choose_num_trainers,
    describe_plan,
    plan_to_dict,
)
from dglkge.launch.remote.session import SshSettings
from dglkge.launch.script_config import Needs, partition_file, script_config, shared_memory_need
from dglkge.launch.site import Site
from dglkge.launch.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments instead of ``sys.argv[1:]``.

    Returns
    -------
    int
        0 if all went well, 2 for bad input, else as ``--help`` says.
    """
    console = Console.in_background(sys.stdout, sys.stderr)
    try:
        return _launch(sys.argv[1:] if argv is None else argv, console)
    except InputError as error:
        console.error(f"dglkge-launch: error: {error}")
        return INPUT_ERROR_STATUS
    except KeyboardInterrupt:  # no process of the job runs
        console.error("dglkge-launch: interrupted")
        return INTERRUPTED_STATUS
    finally:
        console.finish()


def _launch(argv: Sequence[str], console: Console) -> int:
    """Check that the job can run, run it, and again as often as it may be."""
    options, command = parse_arguments(argv)
    workspace = Path(options.workspace).resolve()
    places = Places(Path.cwd() if options.sync else workspace, workspace)
    _check_script(command, places.here)
    log_dir = Path(options.log_dir or f"logs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").resolve()
    ssh = SshSettings(
        options.ssh_port, options.ssh_username, options.identity_file, tuple(options.ssh_option)
    )
    name = new_nonce()
    with contextlib.closing(Site(ssh, options.python, str(workspace), options.sync, name)) as site:
        job = _Job(options, command, places, site, console, name)
        if options.dry_run:
            plan = job.plan(attempt_log_dir(log_dir, 0, options.max_restarts))
            console.summary(
                json.dumps(plan_to_dict(plan)) if options.json else describe_plan(plan).rstrip("\n")
            )
            return 0

        def run(attempt: int) -> JobResult:
            logs = attempt_log_dir(log_dir, attempt, options.max_restarts)
            try:
                return with_ports_chosen_again(lambda: job.run(logs), console.message)
            except NotReadyError as error:
                if attempt == 0:
                    raise
                # a host, a name or a port may take a while to come back after what has just failed
                return JobResult(1, str(error), 0.0, str(logs), ())

        result = run_with_restarts(run, options.max_restarts, console.message)
    _conclude(result, console, options.json)
    return result.status


@dataclass(frozen=True)
class _Job:
    """A job as its command line describes it; each attempt looks anew at what that depends on."""

    options: argparse.Namespace
    command: tuple[str, ...]
    places: Places
    site: Site
    console: Console
    name: str

    def plan(self, log_dir: Path) -> list[PlannedProcess]:
        """Plan an attempt that will not be made; no file is sent, no machine is held."""
        hosts, settings, config = self._prepare(log_dir, is_locked=False)
        if not self.options.sync:
            self.site.check(hosts, settings, self._needs(settings, config))
        return self.site.plan(hosts, settings)

    def run(self, log_dir: Path) -> JobResult:
        """Run one attempt to its end."""
        site, console, here = self.site, self.console, self.places.here
        hosts, settings, config = self._prepare(log_dir, is_locked=True)
        site.send_files(self.command, config, self.options.part_config, self.places)
        site.check(hosts, settings, self._needs(settings, config))
        plan = site.plan(hosts, settings)
        unreadable = find_unreadable_arguments(here / self.options.ip_config, self.command, here)
        for warning in [*site.warnings(), *unreadable]:
            console.message(f"warning: {warning}")
        write_job_files(log_dir, hosts)
        site.write_job_files(Path(settings.log_dir), hosts)
        console.message(_announce(settings, hosts, log_dir))
        limits = Limits(stop_seconds=self.options.stop_seconds, exit_seconds=self.options.exit_seconds)
        output = None if config is None else here / config.output
        with site.bringing_versions(output, self.places, console.message, self.options.sync_seconds):
            result = Supervisor(site.executor(), console, log_dir, limits).run(plan)
        try:
            site.bring_files(output, log_dir, self.places)
        except InputError as error:
            problem = f"not all files could be brought back: {' '.join(str(error).split())}"
            if result.status == 0:  # who started the job would take the results for complete
                return dataclasses.replace(result, status=1, reason=problem)
            console.message(f"error: {problem}")
        except KeyboardInterrupt:
            console.message("not all files have been brought back; the next start of the job brings the run")
            raise
        return result

    def _prepare(self, log_dir: Path, is_locked: bool) -> tuple[list[Host], JobSettings, Config | None]:
        """Read what an attempt depends on as it is now: the machines, their cores, the configuration."""
        here = self.places.here
        machines = read_ip_config(here / self.options.ip_config)
        hosts = self.site.connect(machines, is_locked)
        settings = _settings(self.options, self.command, hosts, machines, log_dir, self.places)
        settings = dataclasses.replace(settings, job=self.name)
        return hosts, settings, script_config(self.command, here)

    def _needs(self, settings: JobSettings, config: Config | None) -> Needs:
        """Return what the job needs of its machines."""
        here = self.places.here
        found = partition_file(config, here)
        graph = settings.part_config or (None if found is None else str(self.places.on_machines(found)))
        return Needs(graph, shared_memory_need(config, here))


def _check_script(command: Sequence[str], workspace: Path) -> None:
    """Refuse a script that does not exist, and teach those who come from DGL's launcher."""
    script = command[0]
    if script == "-m" or (workspace / script).is_file():
        return
    words = script.split()
    if (len(words) > 1 and len(command) == 1) or Path(script).name.startswith("python"):
        raise InputError(
            f"{script!r} is no script: give the script and its arguments as separate words, without 'python' "
            f"and without quotes around them all; {sys.executable} runs it"
        )
    raise InputError(f"there is no script {script!r} in {workspace}")


def _settings(
    options: argparse.Namespace,
    command: tuple[str, ...],
    hosts: Sequence[Host],
    machines: Sequence[Machine],
    log_dir: Path,
    places: Places,
) -> JobSettings:
    """Fill in the defaults; paths are those on the machines."""
    log_dir = places.on_machines(log_dir) if options.sync else log_dir
    part_config = None if options.part_config is None else places.on_machines(Path(options.part_config))
    return JobSettings(
        command=command,
        ip_config=str(log_dir / "ip_config.txt"),
        num_trainers=choose_num_trainers(hosts, *(options.num_trainers or ())),
        num_servers=options.num_servers or machines[0].num_servers or 1,
        num_samplers=options.num_samplers,
        num_omp_threads=options.num_omp_threads,
        num_server_threads=options.num_server_threads,
        graph_format=options.graph_format,
        part_config=None if part_config is None else str(part_config),
        log_dir=str(log_dir),
        extra_envs=options.extra_envs,
        is_watched=sys.stdout.isatty(),
        has_own_disks=options.sync,
    )


def _announce(settings: JobSettings, hosts: Sequence[Host], log_dir: Path) -> str:
    """Say what is being started."""
    where = ", ".join(f"{host.address}:{host.port}" for host in hosts)
    counts = f"{settings.num_servers} server(s) and {settings.num_trainers} trainer(s)"
    return f"{counts} on {where}; logs in {log_dir}"


def _conclude(result: JobResult, console: Console, as_json: bool) -> None:
    """Say how the job ended."""
    if result.reason is None:
        console.message(f"all processes ended well after {result.seconds:.1f} s")
    else:
        how = "stopped" if result.status == RESTART_STATUS or result.is_interrupted else "failed"
        console.message(f"{how} after {result.seconds:.1f} s: {result.reason}; logs in {result.log_dir}")
    if as_json:
        console.summary(json.dumps(result.to_dict()))


if __name__ == "__main__":
    sys.exit(main())
