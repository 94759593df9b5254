"""``dglkge train``: train a configuration on this machine, or on those of an ip_config.txt."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dglkge.cli.common import IMPORT, RECIPE, SET, WORDS, Command, config_words, flag, option
from dglkge.config import load_config
from dglkge.distributed.dgl_import import require_dgl
from dglkge.launch.ports import find_server_ports

SCRIPT = "dglkge.cli.training_script"
"""The module that servers and trainers run."""

THIS_MACHINE = "127.0.0.1"
"""Its address in an ip_config.txt of one machine, without SSH."""


def train(args: argparse.Namespace) -> int:
    """Launch the job."""
    require_dgl("dglkge train")
    file, overrides = config_words(args)
    # Read here as well: a mistake is reported before any process starts.
    config = load_config(file, overrides, args.imports)
    from dglkge.cli import launch  # here: no other command needs the launcher

    words = []
    for name in ("num_trainers", "num_servers", "max_restarts"):
        if getattr(args, name) is not None:
            words += [f"--{name}", getattr(args, name)]
    words += ["--no_verify"] if args.no_verify else []
    words += ["--log_dir", args.log_dir or str(Path(config.output) / "logs")]
    script = [word for setting in overrides for word in ("--set", setting)]
    script += [word for module in args.imports for word in ("--import", module)]
    if file is not None:
        script += ["--config", file]
    num_servers = int(args.num_servers) if (args.num_servers or "").isdigit() else 1
    with ip_config(args.ip_config, num_servers) as machines:
        return launch.main(["--ip_config", machines, *words, "-m", SCRIPT, *script])


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
  dglkge data build --input my_triples/ --output data/mine
  dglkge train dataset=data/mine output=runs/mine                   all settings by default: dglkge config
  dglkge train --recipe fb15k237/complex-5min dataset=data/mine output=runs/mine
  dglkge train my.yaml --num-trainers 4
  dglkge train my.yaml --ip-config ip_config.txt                    several machines""",
    options=[
        WORDS,
        RECIPE,
        SET,
        IMPORT,
        option("--ip-config", "the machines (default: this one)", metavar="FILE"),
        option("--num-trainers", "on each machine, as in dglkge-launch", metavar="N[:M]"),
        option("--num-servers", "on each machine, as in dglkge-launch", metavar="N"),
        option("--log-dir", "folder for the logs (default: logs/ of the run)", metavar="FOLDER"),
        flag("--no-verify", "as in dglkge-launch"),
        option("--max-restarts", "starts after failures, as in dglkge-launch", metavar="K"),
    ],
    run=train,
)
