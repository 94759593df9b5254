"""Training from Python: triples of any source, a job of servers and trainers, the opened run.

The job is ``dglkge-launch`` in a process of its own, with a session of its own, so a notebook's interrupt
reaches it once, from here. It ends when this process dies.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from dglkge.checkpoint.layout import RUN_CONFIG_FILE
from dglkge.cli.train import NEXT, SCRIPT, is_small, job_script
from dglkge.config import Config, load_config
from dglkge.data.dataset_files import DESCRIPTION
from dglkge.data.text_format import bare_path
from dglkge.distributed.dgl_import import require_dgl
from dglkge.distributed.preemption import end_with_parent
from dglkge.errors import INPUT_ERROR_STATUS, InputError, JobError
from dglkge.launch import ALONE
from dglkge.launch.console import plain_text
from dglkge.partition.options import DATASET_FOLDER
from dglkge.train_arguments import DataOptions, config_file, in_python, overrides, pythonic, whole_number

if TYPE_CHECKING:
    from dglkge.inference.run import Run

logger = logging.getLogger(__name__)

LOGS = "logs"
LAST_LINES = 15
_STOPPED = (130, 143)
"""Statuses of dglkge-launch after a signal."""

_LOGGED = re.compile(r"epoch \d+/\d+|checkpoint, statistics and")
"""Lines of a job that are logged where its output is not shown."""


def train(
    triples: Any,
    score_function: str | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    trainers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **data: Any,
) -> Run:
    """Train embeddings of triples on this machine, evaluate them, and open the result.

    The same call again goes on from the last commit, or returns the finished run.

    Parameters
    ----------
    triples : object
        The training triples, or all of them: a data frame (pandas, Polars, Arrow) with columns head, relation
        and tail, or source, label and target, or the like; an array of ids (n, 3); a list of tuples; a graph
        of NetworkX, PyTorch Geometric or DGL; a data set or ``TriplesFactory`` of PyKEEN; a data set of OGB
        or Hugging Face; a mapping of split to any of them. Or a file, a folder or files that ``partition.py``
        reads, graphs that DGL saved or partitioned among them; a data set folder that it wrote; or a name
        such as ``"fb15k-237"`` (``dglkge data list``).
    score_function : str, optional
        ``"complex"``, for example; the field ``model.score_function``.
    output : path, optional
        The run's folder; by default ``runs/NAME-SCOREFUNCTION``. The data set is made in it, unless one is
        given.
    config : path or str, optional
        A YAML file of settings, or the name of a recipe.
    settings : mapping, optional
        Fields of the configuration, dotted or nested, for example ``{"training.num_epochs": 20}``;
        ``imports`` are modules of yours that register components.
    trainers : int, optional
        Trainer processes; by default one for each core, at most 8, and one process alone, without servers,
        for at most 200,000 triples in all epochs.
    overwrite : bool
        Remove a run that the folder has.
    progress : bool, optional
        Show the job's output; by default where this process has a terminal or is a notebook. Otherwise a line
        an epoch is logged, at level INFO.
    **data
        Fields of :class:`dglkge.train_arguments.DataOptions`: ``valid``, ``test``, ``columns``, ``split``,
        ``seed``, ``reading``.

    Returns
    -------
    Run
        Its ``metrics`` are what the job's evaluation measured.

    Raises
    ------
    InputError
        If the input or a setting is wrong, or the folder has a run of other triples.
    JobError
        If the job fails.
    KeyboardInterrupt
        After Ctrl-C: the job has committed and ended before.

    Examples
    --------
    ::

        run = dglkge.train(frame, "complex", output="runs/mine", settings={"training.num_epochs": 20})
        run.predict_tails("Alice", "likes")
    """
    options = DataOptions.from_mapping(data)
    is_shown = _is_interactive() if progress is None else progress
    file, words = config_file(config), overrides(settings, score_function, output)
    # Settings are read before anything is made; the data set's place is not known yet.
    read = load_config(file, [*words, "dataset=x"])
    folder = _run_folder(None if output is None else read.output, triples, read, overwrite)
    words.append(f"output={folder}")
    making = options.to_options(folder.absolute().name, is_shown)
    workers = None if trainers is None else whole_number("trainers", trainers, least=1)
    dataset = _dataset_of(triples, options)
    if overwrite and dataset is not None and dataset.is_relative_to(folder.absolute()):
        raise InputError(f"{dataset} lies in {folder}, which overwrite would remove")
    require_dgl("dglkge.train")
    # What is above needs no torch, which takes seconds to import.
    from dglkge.inference.run import open_run
    from dglkge.partition.make_dataset import dataset_of_run
    from dglkge.training.building.checks import check_config

    check_config(read)
    if dataset is None:
        splits = {"valid": options.valid, "test": options.test}
        with in_python():
            dataset, notes = dataset_of_run(triples, folder, making, overwrite, **splits)
        for note in notes:
            _say(pythonic(note), is_shown)
    elif overwrite and folder.exists():
        shutil.rmtree(folder)
    read, script = job_script(file, words, dataset, lambda line: _say(line, is_shown))
    script = ["-m", SCRIPT, *script]
    if workers is None and is_small(read, dataset):
        _run_job([sys.executable, *script], folder, is_shown)
    else:
        _say(f"logs: {folder / LOGS}", is_shown)
        launcher = ["-m", "dglkge.cli.launch", *ALONE, "--log_dir", str(folder / LOGS)]
        launcher += [] if workers is None else ["--num_trainers", str(workers)]
        _run_job([sys.executable, *launcher, *script], folder, is_shown)
    _say(NEXT.format(folder), is_shown)
    calls = 'run.predict_tails(head, relation); run.evaluate("test"); run.similar(entity)'
    _say(f"next, in Python: {calls}", is_shown)
    return open_run(folder, dataset=str(dataset), imports=read.imports)


def _dataset_of(triples: Any, options: DataOptions) -> Path | None:
    """Return the folder of a data set; check what can be known of other triples before they are read."""
    from dglkge.partition.sources import as_paths, check_kind, named_data

    not_read = "reading is for files and folders of triples, not for an object or a data set"
    paths = as_paths(triples)
    if not paths:
        if options.reading.keys() - {"relation_attribute"}:
            raise InputError(not_read)
        for name, source in (("triples", triples), ("valid", options.valid), ("test", options.test)):
            if name == "triples" or source is not None:
                check_kind(source, name)
        return None
    if options.valid is not None or options.test is not None:
        raise InputError("valid and test go with an object; a folder has files of these names")
    for path in paths:
        if not path.exists() and named_data(paths) is None:
            raise InputError(f"triples: {path}: there is no such file or folder")
    if len(paths) > 1 or not (paths[0] / DESCRIPTION).is_file():
        return None
    if options.reading:
        raise InputError(not_read)
    if options.split is not None:
        raise InputError(f"{triples} is a data set with splits of its own; give no split, valid or test")
    return paths[0].absolute()


def _run_folder(output: str | None, triples: Any, config: Config, overwrite: bool) -> Path:
    """Return the run's folder, by default named after the triples; it may be written to, or removed."""
    from dglkge.partition.sources import as_paths

    paths = as_paths(triples)
    name = (bare_path(paths[0]).stem if len(paths) == 1 else "") or "triples"
    folder = Path(output or Path("runs") / f"{name}-{config.model.score_function.name}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output is {folder}, which is a file; expected a folder")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"output is {folder}, and {parent} is not a folder that can be written")
    is_run = (folder / RUN_CONFIG_FILE).is_file() or (folder / DATASET_FOLDER / DESCRIPTION).is_file()
    if overwrite and folder.exists() and not is_run and any(folder.iterdir()):
        raise InputError(f"{folder} is not removed: it has no run (no {RUN_CONFIG_FILE})")
    return folder


def _say(line: str, is_shown: bool) -> None:
    """Show a line where a person looks on, else log it."""
    if is_shown:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    else:
        logger.info(line)


def _run_job(command: Sequence[str], folder: Path, is_shown: bool) -> None:
    """Run the launcher, or a small training itself, to its end."""

    def show(line: str) -> None:
        """Show a line; where nobody looks on, log the few that tell how far the job is."""
        if is_shown or _LOGGED.search(line):
            _say(line if is_shown else re.sub(r"^\[trainer \d+\] ", "", line), is_shown)

    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=functools.partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )
    output = cast(IO[bytes], process.stdout)
    try:
        for data in output:
            line = data.decode(errors="replace").rstrip()
            # With DGLKGE_LOG_FORMAT=json the lines are objects; errors are found in their messages.
            lines.extend(plain_text(line).splitlines())
            show(line)
        status = process.wait()
    except BaseException:
        # SIGTERM, which commits like Ctrl-C, but is not ignored in the background of a shell.
        process.send_signal(signal.SIGTERM)
        for data in output:
            show(data.decode(errors="replace").rstrip())
        process.wait()
        raise
    if status == 0:
        return
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    if status == INPUT_ERROR_STATUS and errors:
        raise InputError(errors[0])
    if status in _STOPPED:
        raise JobError(f"the job was stopped; the same call goes on from the last commit of {folder}")
    last = "\n".join(lines[-LAST_LINES:])
    logs = f"; its logs are in {folder / LOGS}" if (folder / LOGS).exists() else ""
    raise JobError(f"the job failed with status {status}{logs}; its last lines:\n{last}")


def _is_interactive() -> bool:
    """Return whether a person looks on: at a terminal or a notebook."""
    return sys.stdout is not None and (sys.stdout.isatty() or "ipykernel" in sys.modules)
