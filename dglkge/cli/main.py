"""``dglkge``: commands that make data sets, train, and read trained models."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Collection, Sequence
from typing import Any

from dglkge import __version__
from dglkge.cli.common import (
    COMPLETED_SHELLS,
    IMPORT,
    TerminalFormatter,
    flush_output,
    print_text,
    run_command,
    take_overrides,
)

COMMANDS = {
    "data": ("data", "data sets that have a name: list them, download one"),
    "partition": ("datasets", "turn triples into a data set folder with DGL partitions"),
    "extend": ("datasets", "add triples and entities to a data set; old ids and partitions stay"),
    "config": ("configurations", "every field of a configuration with its default and help"),
    "recipes": ("configurations", "the configurations that ship, by name"),
    "train": ("train", "train a configuration: dglkge-launch with a script that is in the package"),
    "evaluate": (
        "evaluate",
        "rank the true answers of a split, or of a file, among all entities of the right type",
    ),
    "predict": ("queries", "complete a triple: the best tails, heads or relations of the two parts given"),
    "score": ("queries", "score given triples"),
    "similar": ("queries", "the entities most similar to an entity, by cosine"),
    "serve": ("serve", "explore a trained model in the browser"),
    "export": (
        "checkpoints",
        "write the embeddings for others: npy, Parquet, faiss, LanceDB, the Hugging Face hub and more",
    ),
    "quality": (
        "datasets",
        "show a data set's repeated triples, leaks into valid and test, unseen names, degrees",
    ),
    "watch": ("watch", "follow a run: progress, speed, loss, metrics, memory, events; from its files"),
    "report": ("report", "one HTML page about a run, or about several side by side"),
    "inspect": ("checkpoints", "show a checkpoint's version, progress, model, tables and files"),
    "checkpoint": ("checkpoints", "inspect, verify or convert a checkpoint"),
    "plan": ("plan", "estimate memory, /dev/shm, disk and time of a configuration"),
    "jobs": ("jobs", "list the training jobs of this machine"),
    "stop": ("jobs", "stop a training job of this machine; it commits first"),
    "tune": ("tune", "search for good settings: many trials on small subgraphs, few on large ones"),
}
"""Command: the module of :mod:`dglkge.cli` that has it, under its name in capitals, and its line of help.

``dglkge --help`` imports no command.
"""

DESCRIPTION = """Make data sets, train embeddings, and evaluate, query, export and inspect trained models.
All but train, tune, jobs and stop only read and write files; no server runs."""
EPILOG = """Each command has its own help with examples:
  dglkge predict --help
Scripts of your own train under dglkge-launch; examples/train.py is the one to copy:
  dglkge-launch --num_trainers 2 examples/train.py --config dglkge/config/recipes/fb15k237/complex.yaml"""


def build_parser(with_arguments: Collection[str]) -> argparse.ArgumentParser:
    """Build the parser of all commands.

    Parameters
    ----------
    with_arguments : collection of str
        Commands that are imported and declare their arguments. The others are only known by name.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dglkge", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"dglkge {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=COMPLETED_SHELLS,
        action=_PrintCompletion,
        help="print a script that makes a shell complete dglkge, and exit",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, help_line) in COMMANDS.items():
        parser_of_command = commands.add_parser(name, help=help_line)
        if name in with_arguments:
            command = getattr(importlib.import_module(f"dglkge.cli.{module}"), name.upper())
            command.declare(parser_of_command, [IMPORT])
    return parser


class _PrintCompletion(argparse.Action):
    """Prints the completion script of all commands and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        from dglkge.cli.completion import completion_script

        print_text(completion_script(build_parser(COMMANDS), given[1]))
        parser.exit()


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
    handler = logging.StreamHandler()
    handler.setFormatter(TerminalFormatter("dglkge: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return run_command("dglkge", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    """Parse the arguments and run the command that they name."""
    # No option before a command takes a value, so its name is the first word that is not an option.
    name = next((word for word in argv if not word.startswith("-")), "")
    try:
        parser = build_parser([name])
        args, rest = parser.parse_known_args(argv)
        rest = take_overrides(args, rest)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit:
        flush_output()  # the text of --help, whose reader may have exited
        raise
    # Suppressed defaults: the attribute is missing where the option was not given.
    args.imports = getattr(args, "imports", [])
    if args.imports:
        from dglkge.registry import import_modules

        import_modules(args.imports)
    return int(args.body(args))


if __name__ == "__main__":
    sys.exit(main())
