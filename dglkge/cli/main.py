"""``dglkge``: commands that make data sets, train, and read trained models."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from dglkge import __version__
from dglkge.cli import (
    checkpoint,
    evaluate,
    export,
    inspect_run,
    partition,
    plan,
    predict,
    quality,
    recipes,
    report,
    score,
    serve,
    show_config,
    similar,
    train,
    tune,
)
from dglkge.cli.common import add_import_argument, flush_output, run_command
from dglkge.registry import import_modules

COMMANDS = {
    "partition": partition,
    "config": show_config,
    "recipes": recipes,
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "score": score,
    "similar": similar,
    "serve": serve,
    "export": export,
    "quality": quality,
    "report": report,
    "inspect": inspect_run,
    "checkpoint": checkpoint,
    "plan": plan,
    "tune": tune,
}

DESCRIPTION = """Make data sets, train embeddings, and evaluate, query, export and inspect trained models.
All but train and tune only read and write files; no server runs."""
EPILOG = """Each command has its own help with examples:
  dglkge predict --help
Scripts of your own train under dglkge-launch; examples/train.py is the one to copy:
  dglkge-launch --num_trainers 2 examples/train.py --config examples/fb15k237/complex.yaml"""


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
        add_import_argument(command)
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
        0 for success, else as :func:`dglkge.cli.common.run_command` returns it.
    """
    # The library logs to stderr; stdout is left to the result, which may be JSON.
    logging.basicConfig(level=logging.WARNING, format="dglkge: %(message)s")
    return run_command("dglkge", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    """Parse the arguments and run the command that they name."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit:
        flush_output()  # the text of --help, whose reader may have exited
        raise
    # Suppressed defaults: the attribute is missing where the option was not given.
    args.imports = getattr(args, "imports", [])
    import_modules(args.imports)
    return args.run_module.run(args)


if __name__ == "__main__":
    sys.exit(main())
