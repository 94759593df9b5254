"""``dglkge``: commands that make data sets, train, and read trained models."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

from dglkge import __version__
from dglkge.cli.common import Command, Parser, TerminalFormatter, flush_output, print_text, run_command
from dglkge.errors import import_extra, unknown_name

COMMANDS = {
    "data list": ("datasets.list_data", "the data sets that have a name"),
    "data get": ("datasets.get_data", "download a data set by its name, and compare checksums and counts"),
    "data build": ("datasets.build", "turn triples into a data set folder with DGL partitions"),
    "data extend": ("datasets.extend", "add triples and entities to a data set; old ids and partitions stay"),
    "data check": ("datasets.check", "repeated triples, leaks into valid and test, unseen names, degrees"),
    "data vectors": ("datasets.vectors", "vectors of names, labels or descriptions, as features of entities"),
    "config show": ("configurations.show", "every field of a configuration with its default and help"),
    "config schema": ("configurations.schema", "a JSON Schema, for editors"),
    "config recipes": ("configurations.recipes", "the configurations that ship, by name"),
    "plan": ("plan.plan", "estimate memory, /dev/shm, disk and time of a configuration"),
    "train": ("train.train", "train a configuration on this machine, or on several"),
    "tune": ("train.tune", "search for good settings: many trials on small subgraphs, few on large ones"),
    "evaluate": ("evaluate.evaluate", "rank the true answers of a split, or of a file, among all entities"),
    "calibrate": ("evaluate.calibrate", "fit probabilities of scores on the valid split"),
    "predict": ("queries.predict", "complete triples: the best tails, heads or relations; score whole ones"),
    "complete": ("questions.complete", "write all likely missing triples to a Parquet file"),
    "ask": ("questions.ask", "answer questions of several hops, with and, or, not"),
    "explain": ("questions.explain", "reasons for a link: triples, rules, similar links; a relation's rules"),
    "attributes": ("questions.attributes", "predict a number of every entity from those of some"),
    "similar": ("queries.similar", "the entities most similar to an entity, by cosine"),
    "serve": ("serve.serve", "explore a trained model in the browser"),
    "report": ("report.report", "one HTML page about a run, or about several side by side"),
    "job list": ("jobs.list_jobs", "list the training jobs of this machine"),
    "job stop": ("jobs.stop", "stop a training job of this machine; it commits first"),
    "job watch": ("report.watch", "follow a run: progress, speed, loss, metrics, memory, events"),
    "checkpoint inspect": ("checkpoints.inspect", "show version, progress, model, tables and files"),
    "checkpoint verify": ("checkpoints.verify", "inspect, and compare every file with its checksum"),
    "checkpoint convert": ("checkpoints.convert", "convert to and from other programs' formats"),
    "checkpoint export": ("checkpoints.export", "write embeddings: npy, Parquet, faiss, Hugging Face, ..."),
    "launch": ("launch", "run a script of your own on several machines; the same as dglkge-launch"),
}
"""Command: its module and function in :mod:`dglkge.cli`, and a line of help.

``dglkge --help`` imports no command.
"""

GROUPS = {"data": "data sets", "config": "configurations", "job": "jobs", "checkpoint": "checkpoints"}
"""First words of commands of two words."""

LAUNCH = "launch"
"""Has a parser of its own: what follows the script is the script's."""

ALIASES = {
    "partition": "data build",
    "extend": "data extend",
    "quality": "data check",
    "recipes": "config recipes",
    "config --schema": "config schema",
    "score": "predict",
    "jobs": "job list",
    "stop": "job stop",
    "watch": "job watch",
    "inspect": "checkpoint inspect",
    "export": "checkpoint export",
}
"""Former names; no help shows them."""

DESCRIPTION = """Make data sets, train embeddings, and evaluate, query, export and inspect trained models.
All but train, tune, launch, job and serve only read and write files; no server runs."""
EPILOG = """Each command has its own help with examples:
  dglkge predict --help
Scripts of your own train under dglkge-launch; examples/train.py is the one to copy:
  dglkge-launch --num_trainers 2 examples/train.py --config dglkge/config/recipes/fb15k237/complex.yaml"""


def command_named(name: str) -> Command:
    """Import a command."""
    module, _, function = COMMANDS[name][0].partition(".")
    return getattr(importlib.import_module(f"dglkge.cli.{module}"), function)


def build_parser(with_arguments: bool = False) -> Parser:
    """Build the parser of all commands: of their names only, or with their arguments, which imports them."""
    parser = Parser(prog="dglkge", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"dglkge {__version__}")
    text = "print a script that makes a shell complete dglkge, and exit"
    parser.add_argument("--print-completion", choices=SHELLS, action=_PrintCompletion, help=text)
    _add_commands(parser, "", with_arguments)
    return parser


def _add_commands(parser: Parser, group: str, with_arguments: bool) -> None:
    """Add the commands of a group, or of the first level."""
    places = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for word in actions(group):
        name = f"{group} {word}".strip()
        if name in GROUPS:
            child = places.add_parser(word, help=f"{GROUPS[name]}: {', '.join(actions(name))}")
            _add_commands(child, name, with_arguments)
        else:
            child = places.add_parser(word, help=COMMANDS[name][1])
            if with_arguments and name != LAUNCH:
                command_named(name).declare(child)


def actions(group: str) -> list[str]:
    """Return the words that name the commands of a group; of the first level if it is empty."""
    names = [name.split() for name in COMMANDS]
    return list(dict.fromkeys(words[1] if group else words[0] for words in names if group in ("", words[0])))


class _PrintCompletion(argparse.Action):
    """Prints the completion script of all commands and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        print_text(completion_script(build_parser(with_arguments=True), arguments[1]))
        parser.exit()


SHELLS = ("bash", "zsh", "tcsh")
"""Shells for which a completion script can be written."""

FILES = ("FILE", "VALID_FILE", "PATH", "CONFIG", "MODULE", "SOURCE")
FOLDERS = ("RUN", "DIR", "FOLDER")
"""Metavars of arguments that are files or folders. Without a metavar, the argument's name counts."""

RECIPE_FUNCTION = "_dglkge_recipes"
"""Function of the bash script that lists the recipes that begin with a word."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that makes a shell complete a command, whose parser knows all arguments."""
    from dglkge.config.load import recipe_files

    shtab = import_extra("shell completion", "shtab", "completion")
    names = " ".join(recipe_files())
    # Written into the script: a list by `dglkge config recipes` would take a second for each press of Tab.
    recipes = {"bash": RECIPE_FUNCTION, "zsh": f"({names})", "tcsh": f"({names})"}
    kinds = {**dict.fromkeys(FILES, shtab.FILE), **dict.fromkeys(FOLDERS, shtab.DIRECTORY), "RECIPE": recipes}
    _describe(parser, kinds)
    preamble: Any = {"bash": f'{RECIPE_FUNCTION}() {{ compgen -W "{names}" -- "$1"; }}'}
    return shtab.complete(parser, shell, preamble=preamble)


def _describe(parser: argparse.ArgumentParser, kinds: dict[str, Any]) -> None:
    """Tell shtab what the arguments of a parser and of its subcommands are, by metavar."""
    for action in parser._actions:
        metavar = action.metavar or action.dest.upper()
        kind = kinds.get(metavar if isinstance(metavar, str) else metavar[0])
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _describe(command, kinds)
        elif kind is not None:
            action.complete = kind  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, by default with ``sys.argv[1:]``; the status is that of ``run_command``."""
    # The library logs to stderr; stdout is left to the result, which may be JSON.
    handler = logging.StreamHandler()
    handler.setFormatter(TerminalFormatter("dglkge: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return run_command("dglkge", lambda: _run(sys.argv[1:] if argv is None else argv))


def launch() -> int:
    """Run ``dglkge-launch``, which takes a second to import: Ctrl-C prints one line then, too."""
    return run_command("dglkge-launch", lambda: int(importlib.import_module("dglkge.cli.launch").main()))


def _run(argv: Sequence[str]) -> int:
    """Run the command that the arguments name."""
    try:
        name, words = _command_of(list(argv))
        if name == LAUNCH:
            return int(importlib.import_module("dglkge.cli.launch").main(words))
        command = command_named(name)
        args = command.parser(f"dglkge {name}").parse_args(words)
    except SystemExit:
        flush_output()  # the text of --help, whose reader may have exited
        raise
    return command.call(args)


def _command_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the full name of the command, and its arguments; exits after ``--help`` of a group."""
    for former, name in ALIASES.items():
        length = len(former.split())
        if words[:length] == former.split():
            words = [*name.split(), *words[length:]]
    group = words[0] if words and words[0] in GROUPS else ""
    depth = 2 if group else 1
    name = " ".join(words[:depth])
    if name in COMMANDS:
        return name, words[depth:]
    action = words[depth - 1] if len(words) >= depth else ""
    # Formerly the command of that name: dglkge config optimizer.
    if group == "config" and action not in ("-h", "--help"):
        return "config show", words[1:]
    parser = Parser(prog=f"dglkge {group}") if group else build_parser()
    if group:
        _add_commands(parser, group, False)
    if action and not action.startswith("-"):
        parser.error(str(unknown_name("command", action, actions(group))))
    parser.parse_args(words[depth - 1 :])  # prints the help, or says that the command is missing
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
