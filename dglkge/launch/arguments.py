"""The launcher's command line, ``[options] script.py args...``, and the configuration that the script reads.

The configuration is read to plan and check a job before it starts. What reads one is imported when there is
one: its settings take half of the launcher's start.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dglkge.data import dataset_files
from dglkge.distributed.world import LOG_FORMATS, inherited_log_format
from dglkge.errors import InputError, unknown_name
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.node_place import AUTO
from dglkge.launch.table_storage import MachineNeeds
from dglkge.planning.host import MOST_DEFAULT_TRAINERS

if TYPE_CHECKING:
    from dglkge.config import Config

VARIABLE = re.compile(r"[A-Za-z_]\w*(=|\Z)")


def build_parser() -> argparse.ArgumentParser:
    """Start a distributed job: on every machine of ip_config.txt the servers that hold its partition and the
    trainers that compute, with the environment that DGL's and torch's distributed modules read. All processes
    are watched: when one fails, all are ended, and the last lines name it, its status and its log.

    Everything after the script is the script's own and reaches it unchanged, without a shell;
    -m package.module works as with python. Option names may be written with hyphens or underscores.

    Examples
    --------
      dglkge-launch --ip_config ip_config.txt train.py --config my.yaml
      dglkge-launch --ip_config ip_config.txt --num_trainers 4 --num_servers 2 -m my_package.train
      dglkge-launch --ip_config ip_config.txt --part_config data/ring.json --dry_run train.py
      srun --ntasks-per-node=1 dglkge-launch --node_rank auto --secret_file secret train.py --config my.yaml
      dglkge-launch --node_rank 1 --nodes 2 --rendezvous node0 --secret_file secret train.py --config my.yaml

    exit status: 0 if all trainers ended well; 143 if the trainers were asked to stop, have committed their
    state and can be started again; without that commit 130 after Ctrl-C, 129 after SIGHUP, 1 after SIGTERM;
    75 if other programs took the job's ports five times; 2 for bad input; 127 or 255 if a process could not
    be started, or its machine was lost; 1 if results could not be brought back; else the status of the
    process that failed first, or 128 + the number of the signal that killed it (1 for SIGTERM).
    With --max_restarts, that of the last attempt; bad input and signals to the launcher itself restart
    nothing.
    """
    # As of the other commands, the docstring is the help.
    text = (inspect.getdoc(build_parser) or "").replace("Examples\n--------", "examples:")
    description, _, epilog = text.partition("\n\n")
    parser = argparse.ArgumentParser(
        "dglkge-launch", "dglkge-launch [options] script.py args...", description, epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--ip_config", default="ip_config.txt", metavar="FILE",
        help="the machines, a line 'ip [port [servers]]' each (default: ip_config.txt)")  # fmt: skip
    add("--part_config", metavar="FILE", help="DGL's partition file; not needed where the script names it")
    add("--num_trainers", type=_range, metavar="N[:M]",
        help="trainers on each machine; N:M: one for each core, at least N and at most M, counted anew at "
             "every restart (default: one for each GPU if training.device is cuda or auto and every machine "
             "has one, else one for each core, at most 8; where trainers have threads, at most one for 500 "
             "positives or a chunk of a batch, but two in any case)")  # fmt: skip
    add("--num_servers", type=_count(1), metavar="N",
        help="servers on each machine (default: the third column of ip_config, else 1)")  # fmt: skip
    add("--num_samplers", type=_count(0), default=0, metavar="N",
        help="sampler processes of each trainer (default: 0, trainers sample themselves)")  # fmt: skip
    add("--num_omp_threads", type=_count(1), metavar="N",
        help="OpenMP threads of a trainer (default: the machine's cores / its trainers)")  # fmt: skip
    add("--num_server_threads", type=_count(1), default=1, metavar="N",
        help="OpenMP threads of a server (default: 1)")  # fmt: skip
    add("--graph_format", default="csc", metavar="F[,F]",
        help="DGL's sparse formats of the servers' graph (default: csc)")  # fmt: skip
    add("--no_verify", action="store_true",
        help="do not compare the data set with its checksums; saves one pass over its files")  # fmt: skip
    add("--extra_envs", type=_variable, nargs="*", default=[], metavar="NAME[=VALUE]",
        help="variables for every process; they win over all others. NAME alone takes the launcher's value, "
             "which the list of processes then does not show")  # fmt: skip
    add("--workspace", default=".", metavar="FOLDER",
        help="where the processes run; relative paths above are sought there (default: here)")  # fmt: skip
    add("--sync", action="store_true",
        help="bring the machines, which share no disk, the script and the modules beside it, files that its "
             "arguments name, and of the data set what they need; the run stays in its folder here, which "
             "they read and write; logs come back. Relative paths are then sought here; --workspace is "
             "made")  # fmt: skip
    add("--ssh_port", type=_count(1, 65535), metavar="PORT", help="of the machines' SSH servers")
    add("--ssh_username", metavar="USER", help="on the machines")
    add("--identity_file", metavar="FILE", help="private key for ssh")
    add("--ssh_option", action="append", default=[], metavar="KEY=VALUE",
        help="a further option for ssh, see ssh_config(5); may be repeated")  # fmt: skip
    add("--node_rank", type=_rank, metavar="K",
        help="without SSH: start the part of node K only (from 0; node 0 is the launcher), with the same "
             "command on every node; auto: from the variables of SLURM's srun, Kubernetes' indexed jobs, "
             "torchrun or Open MPI. Node K is line K of ip_config.txt")  # fmt: skip
    add("--nodes", type=_count(1), metavar="N",
        help="with --node_rank and without ip_config.txt: the number of nodes; they find out their addresses "
             "(default: the scheduler's)")  # fmt: skip
    add("--rendezvous", metavar="HOST[:PORT]",
        help="with --node_rank: where the nodes reach node 0 by TCP (default: the first machine of "
             "ip_config.txt or of the scheduler, port 29450)")  # fmt: skip
    add("--rendezvous_seconds", type=_seconds, default=300.0, metavar="S",
        help="with --node_rank: how long nodes wait for each other at the start and before a restart "
             "(default: 300)")  # fmt: skip
    add("--secret_file", metavar="FILE",
        help="with --node_rank: a file with a secret of at least 16 bytes, the same on every node (default: "
             "the variable DGLKGE_SECRET); make one with: openssl rand -hex 32")  # fmt: skip
    add("--address", metavar="IP|IFACE",
        help="with --nodes: this node's IPv4 address for the traffic between the nodes, or the interface "
             "that has it (default: the one by which it reaches the rendezvous)")  # fmt: skip
    add("--python", default=sys.executable, metavar="FILE",
        help="the interpreter on machines of several (default: this one's path)")  # fmt: skip
    add("--log_dir", metavar="FOLDER", help="folder for the logs (default: logs/<time>-<pid>)")
    add("--log_format", choices=LOG_FORMATS, default=None,
        help="json: each line of logs and output is an object with time, level, process and message "
             "(default: the variable DGLKGE_LOG_FORMAT, else text)")  # fmt: skip
    add("--max_restarts", type=_count(0), default=0, metavar="K",
        help="start the job again up to K times after a failure other than bad input, or when a signal to a "
             "trainer has stopped it (status 143); ip_config is read again (default: 0)")  # fmt: skip
    add("--stop_seconds", type=_seconds, default=120.0, metavar="S",
        help="time for trainers to save their state after Ctrl-C, SIGTERM or SIGHUP; a second signal ends "
             "them now (default: 120)")  # fmt: skip
    add("--exit_seconds", type=_seconds, default=30.0, metavar="S",
        help="time for servers to leave after the trainers, or the reverse (default: 30)")  # fmt: skip
    add("--json", action="store_true", help="print a summary as the last line of stdout")
    add("--dry_run", action="store_true", help="print every command with its environment; start nothing")
    add("--print_completion", choices=("bash", "zsh", "tcsh"),
        help="print a script that makes a shell complete dglkge-launch, and exit")  # fmt: skip
    return parser


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Read the command line, without the program's name.

    Returns
    -------
    options : argparse.Namespace
        ``extra_envs`` is a dict; ``has_ip_config`` whether ``--ip_config`` is among the arguments.
    command : tuple of str
        The script and its arguments, or ``-m``, a module and its arguments. May be empty with
        ``--print_completion``.

    Raises
    ------
    InputError
        If an option is unknown or has a bad value, or if there is no script.
    """
    parser = build_parser()
    words, command = _split(parser, arguments)
    try:
        options = parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise InputError(f"{error} (see --help)") from None
    options.extra_envs = dict(options.extra_envs)
    options.log_format = options.log_format or inherited_log_format()
    options.has_ip_config = any(word.partition("=")[0] == "--ip_config" for word in words)
    if not command and not options.print_completion:
        raise InputError("no script was given; expected: dglkge-launch [options] script.py args...")
    if command == ("-m",):
        raise InputError("-m needs a module: dglkge-launch [options] -m package.module args...")
    return options, command


def _split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the arguments into the launcher's options and the script with all that follows it.

    argparse cannot do this: ``--extra_envs A=B train.py`` would take the script for a variable, and an
    unknown option would be taken for an argument of the script.
    """
    # Read from the parser, so that the list of options exists once.
    takes_value = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    words: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m"):
        name, equals, value = rest.pop(0).partition("=")
        if name == "--":
            break
        # Only the name: a value may contain hyphens.
        name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        if name not in takes_value:
            raise unknown_name("option", name, (known for known in takes_value if known.startswith("--")))
        # Variables as words of their own: after NAME=VALUE with an = argparse takes no further ones.
        words += [name, value] if name == "--extra_envs" and equals else [name + equals + value]
        if name == "--extra_envs":
            while rest and VARIABLE.match(rest[0]):
                words.append(rest.pop(0))
        # A missing value is not an error here: argparse reports it in its own words.
        elif takes_value[name] and not equals and rest:
            words.append(rest.pop(0))
    return words, tuple(rest)


def _count(lowest: int, highest: int = 4096) -> Callable[[str], int]:
    """Return a reader of whole numbers within bounds."""

    def read(text: str) -> int:
        if re.fullmatch("[0-9]{1,9}", text) and lowest <= int(text) <= highest:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {lowest} to {highest}")

    return read


def _seconds(text: str) -> float:
    """Read a number of seconds."""
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) <= 86400:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 86400")


def _rank(text: str) -> str:
    """Read a node's rank or ``auto``."""
    return text if text == AUTO else str(_count(0)(text))


def _range(text: str) -> tuple[int, int]:
    """Read ``N`` or ``N:M``."""
    bounds = [_count(1)(number) for number in text.split(":", 1)]
    if bounds[0] > bounds[-1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is above the second")
    return bounds[0], bounds[-1]


def _variable(text: str) -> tuple[str, str]:
    """Read one NAME=VALUE, or a NAME whose value the environment has."""
    name, equals, value = text.partition("=")
    if VARIABLE.match(text) is None:
        raise argparse.ArgumentTypeError(f"{name!r} is no name of a variable")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} has no value here; expected NAME=VALUE or a set variable")
    return name, value if equals else os.environ[name]


def script_config(command: Sequence[str], folder: Path) -> Config | None:
    """Read the configuration of a script that takes ``--config FILE`` and ``--set KEY=VALUE``.

    None for scripts with another command line, and for a wrong configuration, which the script itself then
    reports. `folder` is the base of relative paths.
    """
    # Scripts of other projects may have a --config of their own: what does not parse is not ours.
    if not any(word.partition("=")[0] in ("--config", "--set", "dataset") for word in command):
        return None
    from dglkge.config import load_config

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The same options as the training script has, so both read the same configuration.
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--import", dest="imports", action="append", default=[])
    try:
        options, rest = parser.parse_known_args(list(command[1:]))
        bare = [word for word in rest if "=" in word and not word.startswith("-")]
        path = None if options.config is None else folder / options.config
        return load_config(path, [*options.set, *bare], options.imports)
    except (InputError, SystemExit):
        return None


def partition_file(config: Config | None, folder: Path) -> Path | None:
    """Return DGL's partition file of a configuration's data set; None if it is not here.

    It may be on the machines only, and the script reports a damaged one. Raises InputError if a file is
    there, or a folder with something else in it.
    """
    if config is None:
        return None
    dataset = folder / config.dataset
    # An empty folder may be where the machines have mounted a disk.
    if dataset.is_file() or (dataset.is_dir() and any(dataset.iterdir())):
        dataset_files.require_dataset(dataset)
    with contextlib.suppress(InputError):
        return dataset_files.locate_partitions(dataset)[1]
    return None


def most_trainers_of(config: Config | None, places: Places) -> int:
    """Return the trainers of a machine at most without the user's choice, as far as the data set is here."""
    if config is not None:
        from dglkge.planning.defaults import most_trainers

        with contextlib.suppress(InputError):
            return most_trainers(config, dataset_files.read_dataset_size(places.here / config.dataset))
    return MOST_DEFAULT_TRAINERS


def machine_needs(
    config: Config | None, places: Places, num_machines: int, num_trainers: int, num_servers: int
) -> list[MachineNeeds]:
    """Return what a job needs on each machine, as far as the descriptions of its data set are here."""
    if config is None:
        return [MachineNeeds()] * num_machines
    from dglkge.planning.memory import plan_memory

    folder = config.tables.folder
    folders = (str(places.on_machines(Path(folder))),) if folder else ()
    storage = config.tables.storage
    needs = [MachineNeeds(storage=storage, table_folders=folders)] * num_machines
    with contextlib.suppress(InputError):
        size = dataset_files.read_dataset_size(places.here / config.dataset)
        for host in plan_memory(config, size, num_trainers, num_servers)[:num_machines]:
            shared, memory = host.shared_memory_bytes, host.needed_bytes(in_files=False) - host.base_bytes
            needs[host.machine] = MachineNeeds(shared, memory, host.structure_bytes, storage, folders)
    return needs
