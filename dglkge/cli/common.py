"""Shared by all commands: common arguments, tables and JSON on stdout, exit status."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import inspect
import io
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dglkge.checkpoint.layout import RUN_CONFIG_FILE
from dglkge.data.dataset_files import replacing
from dglkge.data.text_format import Columns, is_number, parse_columns, parse_delimiter
from dglkge.errors import USERS_TO_MEND, InputError, JobError, StorageError, exit_status_of, unknown_name
from dglkge.inference.choices import ALL, CANDIDATES

if TYPE_CHECKING:
    from rich.text import Text

    from dglkge.inference.run import Run

Option = Callable[[Any], None]
"""Declares an argument of a command in a parser or a group of one; see :func:`option`."""

Show = Callable[[Any, argparse.Namespace], None]
"""Prints for people what a command has returned."""

PIPE_COLUMNS = 1000
EXAMPLES = "\n\nExamples\n--------\n"
"""Heading in the docstring of a command: what is before and after it stand at both ends of the help."""

BROKEN_PIPE_STATUS = 141
"""128 + SIGPIPE, the status of a program that the signal ends."""


class Parser(argparse.ArgumentParser):
    """A parser that takes underscores for hyphens in names of options, and knows the nearest name."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with hyphens in the names of options."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        for place, word in enumerate(words[:end]):
            name, equals, value = word.partition("=")
            if not name.startswith("--"):
                continue
            name = name.replace("_", "-")
            words[place] = name + equals + value
            # Before argparse says which argument is missing: it may be this one.
            if not any(known.startswith(name) for known in self._option_string_actions):
                shown = [text for action in self._actions for text in action.option_strings]
                self.error(str(unknown_name("option", name, shown)).partition(" known:")[0])
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words that may stand in any order."""
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        parsed, rest = parse(args, namespace)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed


def option(
    names: str,
    help_text: str,
    former: str = "",
    least: float | None = None,
    most: float = math.inf,
    is_repeated: bool = False,
    **settings: Any,
) -> Option:
    """Return what declares an argument.

    Parameters
    ----------
    names, former : str
        Separated by spaces: the short one first, and at the end the metavar; names that help does not show.
    help_text : str
        A default is added, unless the text ends with a parenthesis.
    least, most : float, optional
        Bounds of a number, inclusive.
    is_repeated : bool
        The value is a list, empty by default.
    **settings
        As of ``add_argument``; ``type`` is by default that of a number in ``default``, int with bounds.
    """
    words = names.split()
    shown = [word for word in words if word.startswith("-")] or words[:1]
    if metavar := tuple(words[len(shown) :]):
        settings["metavar"] = metavar if len(metavar) > 1 else metavar[0]
    default = settings.get("default")
    if type(default) in (int, float) or least is not None:
        settings.setdefault("type", float if isinstance(default, float) else int)
    if settings.get("type") is int:
        settings.setdefault("metavar", "N")
    if least is not None:
        settings["type"] = _bounded(shown[-1], settings["type"], least, most)
    if is_repeated:
        settings |= {"action": "append", "default": []}
        help_text += "; may be repeated"
    if default is not None and not help_text.endswith((")", argparse.SUPPRESS)):
        help_text += " (default: %(default)s)"

    def declare(place: Any) -> None:
        action = place.add_argument(*shown, *former.split(), help=help_text, **settings)
        action.option_strings = [name for name in action.option_strings if name in shown]

    return declare


def flag(names: str, help_text: str) -> Option:
    """Describe an option without a value."""
    return option(names, help_text, action="store_true")


def _bounded(name: str, number: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option whose value is a number between bounds."""

    def parse(text: str) -> float:
        value = number(text)
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            # Not argparse's own error, which prints the usage too: scripts read one line.
            raise InputError(f"{name} must be {bounds}, got {text}")
        return value

    parse.__name__ = number.__name__  # argparse names it in "invalid int value"
    return parse


def num_candidates(text: str) -> int | None:
    """Parse the value of ``--candidates``; None for all."""
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--candidates must be all or a number of at least 1, got {text!r}")
    return int(text)


def num_threads(text: str) -> int:
    """Parse the value of ``--threads``."""
    from dglkge.launch.machine import usable_cores

    cores = usable_cores()
    number = cores if text == "all" else int(text) if text.isdigit() else 0
    if not 1 <= number <= cores:
        raise InputError(f"--threads must be 1 to {cores}, the cores of this process; got {text}")
    return number


def goes_with(args: argparse.Namespace, dest: str, holds: object, condition: str, name: str = "") -> None:
    """Refuse an option (its attribute; its name, if that differs) that is given where it has no effect."""
    if getattr(args, dest) not in (None, False, []) and not holds:
        raise InputError(f"--{name or dest.replace('_', '-')} goes with {condition}")


@dataclass(eq=False)
class Command:
    """A command: a function of parsed arguments with its options; see :func:`command`.

    Attributes
    ----------
    run : callable
        Does the work. Returns what ``--json`` prints, or, if it prints by itself, the exit status.
    options : sequence of Option or str
        A text is the heading of those after it.
    status : callable
        Returns the exit status of what ``run`` has returned.
    show : callable
        Prints that for people, by default as JSON; not called if it is an exit status.
    """

    run: Callable[[argparse.Namespace], Any]
    options: Sequence[Option | str]
    status: Callable[[Any], int]
    show: Show = lambda result, _args: print_json(result)

    def shows(self, show: Show) -> Show:
        """Let a function print for people what ``run`` has returned; a decorator."""
        self.show = show
        return show

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Declare help and options in a parser."""
        describe(parser, self.run)
        place: Any = parser
        for item in self.options:
            if isinstance(item, str):
                place = parser.add_argument_group(item)
            else:
                item(place)
        for declare in COMMON:
            declare(parser)

    def parser(self, prog: str) -> Parser:
        """Return a parser of this command."""
        parser = Parser(prog)
        self.declare(parser)
        return parser

    def call(self, args: argparse.Namespace) -> int:
        """Run with parsed arguments, print the result, and return the exit status."""
        level = logging.ERROR if args.quiet else logging.INFO if args.verbose else logging.WARNING
        logging.getLogger().setLevel(level)
        # Before torch is imported, which takes seconds.
        for path in [args.run] if RUN in self.options else getattr(args, "runs", []):
            if "://" not in path and not path.startswith("file:") and not Path(path).exists():
                raise InputError(f"{path} does not exist; expected the folder of a run")
        if getattr(args, "imports", None):
            from dglkge.registry import import_modules

            import_modules(args.imports)
        result = self.run(args)
        if isinstance(result, int):
            return result
        if args.json:
            print_json(result)
        else:
            self.show(result, args)
        return self.status(result)


def describe(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Make the docstring of a function the help of a parser."""
    description, _, examples = (inspect.getdoc(function) or "").partition(EXAMPLES)
    parser.description, parser.epilog = description, f"examples:\n{examples}"


def command(
    *options: Option | str, status: Callable[[Any], int] = lambda _result: 0
) -> Callable[[Callable[[argparse.Namespace], Any]], Command]:
    """Return a decorator that makes a command of a function, whose docstring is the help of the command."""
    return lambda run: Command(run, options, status)


COMMON = (
    flag("--json", "print JSON instead of text"),
    flag("-v --verbose", "log more to stderr"),
    flag("-q --quiet", "log errors only, and show no progress"),
)
"""Options of every command."""


RUN = option(
    "run RUN",
    "folder of a run, a checkpoint folder in it, or a folder of PyTorch-BigGraph or DGL-KE; or the URL of a "
    "run (s3://bucket/run), of which the newest version is downloaded to ~/.cache/dglkge/runs",
)
NO_VERIFY = flag("--no-verify", "do not compare files with their checksums; saves one pass over the rows")
THREADS = option("--threads N", "threads of the model (default: all cores)", type=num_threads, default="all")
SEEN = option("--candidates", "all, or seen on that side of the relation", choices=CANDIDATES, default=ALL)
DATASET = option("--dataset DIR", "the run's data set, if it has moved since training")
NEW_ENTITIES = (
    option(
        "--features FILE",
        "file of named vectors as those of features.files; its names that the run does not know are entities "
        "whose rows are computed from them; TYPE=FILE where several entity types have features",
        is_repeated=True,
    ),
    option(
        "--about NAME=TEXT",
        "an entity that the run does not know, whose row is computed from a text about it, as those of the "
        "file of dglkge data vectors that the run was trained with",
        is_repeated=True,
    ),
)
RULES = flag("--rules", "add the confidence of rules to scores; mined once, kept as rules.json in the run")
OVERWRITE = flag("--overwrite", "replace what exists")
COLUMNS = option("--columns LIST", "head,relation,tail (default), hrtT with a time, or names of the header")
DELIMITER = option("--delimiter CHAR", "instead of tab, and of the comma of .csv")
OUTPUT = option("-o --output DIR", "folder for what is written", required=True)
IMPORT = option(
    "--import MODULE",
    "module or .py file of yours that registers components; only a resume imports those of its run by itself",
    is_repeated=True,
    dest="imports",
)
SEED = option("--seed", "seed of what is drawn", default=0)
MODEL = (RUN, NO_VERIFY, IMPORT)
MODEL_AND_DATASET = (*MODEL, DATASET)
"""Options of a command that opens a run, and perhaps its data set."""

CONFIG = (
    option("words CONFIG", "YAML file, run or data set, and fields KEY=VALUE (others: defaults)", nargs="*"),
    option("--recipe RECIPE", "a configuration that ships, instead of CONFIG"),
    option("--set KEY=VALUE", "the same as KEY=VALUE", is_repeated=True),
    IMPORT,
)
"""Options of a command that reads a configuration; see :func:`config_words`."""


def open_model(args: argparse.Namespace) -> Run:
    """Open the run that the options of a command name."""
    from dglkge.inference.run import open_run  # here: --help does without torch

    values = {"dataset": None, "no_verify": False, "features": [], "about": [], "rules": False, **vars(args)}
    model = open_run(args.run, values["dataset"], verify=not values["no_verify"])
    model = model.with_features(values["features"]) if values["features"] else model
    texts: dict[str, str] = {}
    for about in values["about"]:
        name, _, text = about.partition("=")
        if not name or not text or name in texts:
            raise InputError(f"--about {about!r} is not of the form NAME=TEXT, or a second text of its name")
        texts[name] = text
    model = model.with_new_texts(texts) if texts else model
    return model.with_rules() if values["rules"] else model


def file_format(args: argparse.Namespace) -> tuple[Columns, str | None]:
    """Return the columns and the delimiter of a file of triples."""
    columns = parse_columns(args.columns) if args.columns else Columns()
    return columns, None if args.delimiter is None else parse_delimiter(args.delimiter)


Cells = Mapping[str, str | Callable[[Any], object]]
"""By heading of a column, the cell as a format of a record's fields, or as a function of the record."""


def print_table(cells: Cells, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row for each record."""
    columns = [cell if callable(cell) else cell.format_map for cell in cells.values()]
    print_columns(list(cells), [[column(record) for column in columns] for record in records])


def print_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: numbers aligned right, text left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(header):
        # A column is aligned by all of its cells, so that one text among numbers keeps it left.
        is_right = bool(rows) and all(is_number(str(row[place])) for row in rows)
        table.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    print_rich(table)


def cell(value: object) -> Text:
    """Return a value as a text of rich, without markup; control characters are written out."""
    from rich.text import Text

    # Tabs and line ends too: rich would move what follows them.
    return Text(re.sub(r"[\t\n]|" + CONTROLS.pattern, lambda match: repr(match[0])[1:-1], str(value)))


def figure(value: float | str | None, none: str = "") -> str:
    """Return a value as the text of a cell: a fraction with four decimals."""
    return none if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def print_rich(part: Any) -> None:
    """Print a part of rich, or what a callable prints on a console of rich; in a pipe no line is broken."""
    from rich.console import Console

    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else PIPE_COLUMNS
    console = Console(file=io.StringIO(), width=width, highlight=False)  # no terminal, so no colours
    part(console) if callable(part) else console.print(part)
    # Cells of a table are padded.
    text = console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
    print_text("\n".join(line.rstrip() for line in text.split("\n")))


def progress_bar(args: argparse.Namespace, total: int, **settings: Any) -> Any:
    """Return a bar of tqdm, which only a terminal shows."""
    from tqdm import tqdm

    return tqdm(total=total, disable=True if args.json or args.quiet else None, **settings)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    # Names stay readable: they may be in any script, and JSON is UTF-8.
    print_text(json.dumps(value, indent=2, ensure_ascii=False))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON to a file that appears only when it is complete; see :func:`write_text`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text to a file that appears only when it is complete.

    Raises
    ------
    InputError
        If the path is wrong or the user has no right to write there.
    StorageError
        If the disk is full or fails.
    """
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        kind = InputError if error.errno in (errno.ENOENT, *USERS_TO_MEND) else StorageError
        raise kind(f"cannot write {path}: {error.strerror or error}") from None


OVERRIDE = re.compile(r"[a-z_]\w*(\.[\w]+)*=")
"""Begins a word of a command line that overrides a field: ``optimizer.lr=0.1``."""


def config_words(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Return the file of a configuration, if any, and the overrides, from the options of :data:`CONFIG`.

    A run stands for its configuration, and a data set for the defaults with it.
    """
    # Here: pydantic takes a moment.
    from dglkge.config.load import recipe_file
    from dglkge.data.dataset_files import DESCRIPTION

    files = [word for word in args.words if not OVERRIDE.match(word)]
    sources = [*files, *([] if args.recipe is None else [args.recipe])]
    if len(sources) > 1:
        raise InputError(f"give one CONFIG or --recipe, got {' and '.join(sources)}")
    overrides = [*args.set, *filter(OVERRIDE.match, args.words)]
    if not files:
        return None if args.recipe is None else str(recipe_file(args.recipe)), overrides
    path = Path(files[0])
    if (path / DESCRIPTION).is_file():
        return None, [f"dataset={path}", *overrides]
    return str(path / RUN_CONFIG_FILE if path.is_dir() else path), overrides


def run_command(name: str, body: Callable[[], int]) -> int:
    """Run the body of a command and return its exit status.

    Parameters
    ----------
    name : str
        The command, for messages.
    body : callable
        Does the work and returns the exit status.

    Returns
    -------
    int
        The body's status. With one line on stderr: 2 for bad input, 1 for a failure of the job or for output
        that cannot be written (a full disk), 130 after Ctrl-C. Without a line: 141 if the reader of stdout
        has exited (as with ``| head``). Any other exception keeps its traceback.
    """
    # At exit Python looks for garbage among all that was imported, which takes .4 s after torch and DGL.
    atexit.register(gc.freeze)
    try:
        status = body()
        # Inside the try: a full disk or a closed pipe may only show when the buffer is written.
        flush_output()
        return status
    except (InputError, JobError) as error:
        for problem in getattr(error, "problems", [str(error)]):
            # One line, whatever an exception of another library was quoted: scripts read stderr by lines.
            _print_error(f"{name}: error: {' '.join(problem.split())}")
        return exit_status_of(error)
    except KeyboardInterrupt as error:
        _print_error(f"{name}: interrupted")
        return exit_status_of(error)
    except BrokenPipeError:
        _discard(sys.stdout)
        return BROKEN_PIPE_STATUS
    finally:
        # What stderr cannot write, e.g. to a closed terminal, is dropped: Python would end with status 120.
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and line end: terminals obey them."""


def for_terminal(text: str, stream: TextIO | None) -> str:
    """Return a text with its control characters written out (``\\x1b``) if a stream is a terminal.

    Names may come from a stranger's files. Text for files and pipes is not changed.
    """
    if stream is None or not stream.isatty():
        return text
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


class TerminalFormatter(logging.Formatter):
    """Formatter of the library's messages on stderr, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record), sys.stderr)


def print_text(text: str = "") -> None:
    """Print a text and a line end on stdout; StorageError if that cannot be written."""
    with _output_errors():
        print(for_terminal(text, sys.stdout))


def flush_output() -> None:
    """Write out stdout's buffer; StorageError if it cannot be written."""
    if sys.stdout is not None:  # None in a process that was started without one
        with _output_errors():
            sys.stdout.flush()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    """Raise StorageError for a failed write to stdout, but for a closed pipe."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(sys.stdout)
        raise StorageError(f"cannot write the output: {error.strerror or error}") from None


def _discard(stream: TextIO) -> None:
    """Redirect stdout or stderr to /dev/null."""
    # Python flushes them again at exit. That would fail too, print a second message and change the status.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be on the same full disk; the status still says it
        print(for_terminal(line, sys.stderr), file=sys.stderr)
