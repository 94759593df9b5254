"""``dglkge``: everything that is done with a trained model, on files alone, with no server."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from dglkge import __version__
from dglkge.cli import checkpoint, evaluate, export, inspect_run, plan, predict, similar
from dglkge.cli.run_command import run_command

COMMANDS = {
    "evaluate": evaluate,
    "predict": predict,
    "similar": similar,
    "export": export,
    "inspect": inspect_run,
    "checkpoint": checkpoint,
    "plan": plan,
}

DESCRIPTION = "Everything that is done with a trained model, on its files alone, with no server."
EPILOG = """Each command has its own help with examples: dglkge predict --help
Training is done by a script of yours under dglkge-launch; see examples/train.py."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dglkge", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"dglkge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=raw,
        )
        module.add_arguments(command)
        command.set_defaults(run_module=module)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments instead of ``sys.argv[1:]``.

    Returns
    -------
    int
        0 if all went well, 2 for bad input.
    """
    logging.basicConfig(level=logging.WARNING, format="dglkge: %(message)s")
    args = build_parser().parse_args(argv)
    return run_command("dglkge", lambda: args.run_module.run(args))


if __name__ == "__main__":
    sys.exit(main())
