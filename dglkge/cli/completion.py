"""Shell completion of the commands, as scripts that shtab writes from their parsers."""

from __future__ import annotations

import argparse
from typing import Any

from dglkge.config.load import recipe_files
from dglkge.errors import import_extra

FILES = ("FILE", "VALID_FILE", "PATH", "CONFIG", "SPACE", "MODULE")
FOLDERS = ("RUN", "DIR", "FOLDER", "SOURCE")
"""Metavars of arguments that are files or folders. Without a metavar, the argument's name counts."""

SHELLS = ("bash", "zsh", "tcsh")
"""Shells for which a script can be written."""

RECIPE_FUNCTION = "_dglkge_recipes"
"""Function of the bash script that lists the recipes that begin with a word."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that makes a shell complete a command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        With all subcommands and their arguments. Attributes that shtab reads are added to its actions.
    shell : str
        ``"bash"``, ``"zsh"`` or ``"tcsh"``.

    Raises
    ------
    InputError
        If shtab is not installed.
    """
    shtab = import_extra("shell completion", "shtab", "completion")
    names = " ".join(recipe_files())
    # Written into the script: a list by `dglkge config recipes` would take a second for each press of Tab.
    recipes = {"bash": RECIPE_FUNCTION, "zsh": f"({names})", "tcsh": f"({names})"}
    _describe(parser, shtab.FILE, shtab.DIRECTORY, recipes)
    preamble: Any = {"bash": f'{RECIPE_FUNCTION}() {{ compgen -W "{names}" -- "$1"; }}'}
    return shtab.complete(parser, shell, preamble=preamble)


def _describe(parser: argparse.ArgumentParser, file: Any, folder: Any, recipes: Any) -> None:
    """Tell shtab what the arguments of a parser and of its subcommands are."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _describe(command, file, folder, recipes)
            continue
        metavar = action.metavar or action.dest.upper()
        words = metavar if isinstance(metavar, tuple) else (metavar,)
        # The positional NAME of `dglkge config recipes` is one too.
        if action.dest == "recipe" or (parser.prog.endswith(" recipes") and action.dest == "name"):
            kind = recipes
        elif words[0] in FILES:
            kind = file
        elif words[0] in FOLDERS:
            kind = folder
        else:
            continue
        action.complete = kind  # type: ignore[attr-defined]
