"""``dglkge train``: train a configuration on this machine, or on those of an ip_config.txt."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dglkge.cli.common import SET, Command, flag, option, print_text
from dglkge.config import Config, load_config
from dglkge.config.load import recipe_file
from dglkge.data.dataset_files import DESCRIPTION, Field, read_description
from dglkge.distributed.dgl_import import require_dgl
from dglkge.errors import InputError
from dglkge.launch.ports import find_server_ports

SCRIPT = "dglkge.cli.training_script"
"""The module that servers and trainers run."""

NEXT = "next: dglkge predict {0} --head NAME --relation NAME; dglkge serve {0}; dglkge report {0}"
"""What to do after a training, given the run's folder."""

THIS_MACHINE = "127.0.0.1"
"""Its address in an ip_config.txt of one machine, without SSH."""


def train(args: argparse.Namespace) -> int:
    """Launch the job."""
    require_dgl("dglkge train")
    if args.recipe is not None:
        if args.config is not None:
            raise InputError(f"give CONFIG or --recipe, got {args.config} and {args.recipe}")
        args.config = str(recipe_file(args.recipe))
    # Read here as well: a mistake is reported before any process starts.
    config = load_config(args.config, args.set, args.imports)
    from dglkge.cli import launch  # here: no other command needs the launcher

    words = []
    for name in ("num_trainers", "num_servers", "max_restarts"):
        if getattr(args, name) is not None:
            words += [f"--{name}", getattr(args, name)]
    words += ["--no_verify"] if args.no_verify else []
    words += ["--log_dir", args.log_dir or str(Path(config.output) / "logs")]
    split = empty_split(config, Path(config.dataset))
    if split is not None:
        print_text(f"nothing is ranked: {config.dataset} has no {split} triples")
        args.set.append("evaluation.split=none")
    script = [word for setting in args.set for word in ("--set", setting)]
    script += [word for module in args.imports for word in ("--import", module)]
    if args.config is not None:
        script += ["--config", args.config]
    num_servers = int(args.num_servers) if (args.num_servers or "").isdigit() else 1
    with ip_config(args.ip_config, num_servers) as machines:
        status = launch.main(["--ip_config", machines, *words, "-m", SCRIPT, *script])
    if status == 0:
        print_text(NEXT.format(config.output))
    return status


def empty_split(config: Config, dataset: Path) -> str | None:
    """Return the split to rank after training if the data set has no triples of it, else None."""
    split = config.evaluation.split
    # The folder may be on other machines only.
    if split == "none" or not (dataset / DESCRIPTION).is_file():
        return None
    return None if read_description(dataset)[Field.SPLITS][split] else split


@contextlib.contextmanager
def ip_config(given: str | None, num_servers: int = 1) -> Iterator[str]:
    """Return the path of the given file, or of a temporary one that names this machine and free ports."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="dglkge-train-") as folder:
        path = Path(folder) / "ip_config.txt"
        port = find_server_ports(THIS_MACHINE, num_servers)
        path.write_text(f"{THIS_MACHINE} {port}\n", encoding="utf-8")
        yield str(path)


TRAIN = Command(
    description="""Train a configuration with servers and trainers on this machine, or on those of an
ip_config.txt. The same command again goes on from the last commit. dglkge-launch has more options, and runs
scripts of your own.""",
    examples="""examples:
  dglkge partition --input my_triples/ --output data/mine
  dglkge train dataset=data/mine output=runs/mine                   all settings by default: dglkge config
  dglkge train --recipe fb15k237/complex-5min dataset=data/mine output=runs/mine
  dglkge train my.yaml --num_trainers 4
  dglkge train my.yaml --ip_config ip_config.txt                    several machines""",
    options=[
        option("config", "YAML file; what it leaves out has a default", nargs="?", metavar="CONFIG"),
        option("--recipe", "a configuration that ships, instead of CONFIG: dglkge recipes", metavar="NAME"),
        SET,
        option("--ip_config", "the machines (default: this one)", metavar="FILE"),
        option("--num_trainers", "on each machine, as in dglkge-launch", metavar="N[:M]"),
        option("--num_servers", "on each machine, as in dglkge-launch", metavar="N"),
        option("--log_dir", "folder for the logs (default: logs/ of the run)", metavar="FOLDER"),
        flag("--no_verify", "as in dglkge-launch"),
        option("--max_restarts", "starts after failures, as in dglkge-launch", metavar="K"),
    ],
    run=train,
)
