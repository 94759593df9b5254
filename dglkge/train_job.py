"""Training from Python: triples in a data frame or files, a job of servers and trainers, the opened run.

The job is ``dglkge-launch`` in a process of its own, with a session of its own, so a notebook's interrupt
reaches it once, from here. It ends when this process dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Union, cast

from dglkge.checkpoint.layout import RUN_CONFIG_FILE
from dglkge.cli.train import SCRIPT, ip_config
from dglkge.config import Config, load_config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import DESCRIPTION
from dglkge.distributed.dgl_import import require_dgl
from dglkge.errors import INPUT_ERROR_STATUS, InputError, JobError
from dglkge.inference.run import Run, open_run
from dglkge.launch.console import plain_text
from dglkge.training.building.checks import check_config

if TYPE_CHECKING:
    import pandas as pd

DATASET_FOLDER = "dataset"
"""In a run's folder: the data set of the triples that were given."""

LAST_LINES = 15
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_STOPPED = (130, 143)
"""Statuses of dglkge-launch after a signal."""

Triples = Union["pd.DataFrame", str, "os.PathLike[str]"]


@dataclass(frozen=True)
class DataOptions:
    """How the data set of :func:`train` is made; nothing of it goes with a data set that is there.

    Attributes
    ----------
    valid, test : DataFrame, optional
        Further splits of a data frame.
    columns : str
        Columns of head, relation and tail, as in ``partition.py --columns``.
    split : three floats, optional
        Shares of train, valid and test of a single set of triples. By default .9, .05 and .05 of a data
        frame without ``valid`` and ``test``, and of a single file.
    seed : int
        Of the split; ``settings={"seed": 1}`` is that of the training.
    reading : mapping
        How a file or folder is read: the fields of
        :class:`dglkge.partition.options.ReadingOptions`, for example
        ``{"types_from": "rdf:type", "literals": "numeric"}``.
    """

    valid: pd.DataFrame | None = None
    test: pd.DataFrame | None = None
    columns: str = "head,relation,tail"
    split: Sequence[float] | None = None
    seed: int = 0
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_splits(self) -> bool:
        """Whether there are frames of further splits."""
        return self.valid is not None or self.test is not None


def train(
    triples: Triples,
    score_function: str | None = None,
    *,
    output: str | os.PathLike[str],
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
    triples : DataFrame or path
        The training triples, or all of them; or a file or folder that ``partition.py`` reads; or a data set
        folder that it wrote.
    score_function : str, optional
        ``"complex"``, for example; the field ``model.score_function``.
    output : path
        The run's folder. The data set is made in it, unless one is given.
    config : path, optional
        A YAML file of settings.
    settings : mapping, optional
        Fields of the configuration by dotted name, for example ``{"training.num_epochs": 20}``; ``imports``
        are modules of yours that register components.
    trainers : int, optional
        Trainer processes; by default one for each core, at most 8.
    overwrite : bool
        Remove a run that the folder has.
    progress : bool, optional
        Show the job's output; by default where this process has a terminal or is a notebook.
    **data
        Fields of :class:`DataOptions`: ``valid``, ``test``, ``columns``, ``split``, ``seed``, ``reading``.

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
    require_dgl("dglkge.train")
    folder, options = Path(output), DataOptions(**data)
    values = dict(settings or {})
    if score_function is not None:
        values["model.score_function"] = score_function
    words = [f"{name}={_as_yaml(value)}" for name, value in values.items()]
    # Settings are read before anything is made; the data set's place is not known yet.
    read = load_config(config, [*words, "dataset=x", f"output={folder}"])
    check_config(read)
    if trainers is not None and trainers < 1:
        raise InputError(f"trainers is {trainers}; expected at least 1")
    is_run = (folder / RUN_CONFIG_FILE).is_file() or (folder / DATASET_FOLDER / DESCRIPTION).is_file()
    if overwrite and folder.exists() and not is_run and any(folder.iterdir()):
        raise InputError(f"{folder} is not removed: it has no run (no {RUN_CONFIG_FILE})")
    is_shown = _is_interactive() if progress is None else progress
    dataset = _dataset(triples, folder, options, overwrite, is_shown)
    words += [f"dataset={dataset}", f"output={folder}"]
    command = ["--log_dir", str(folder / "logs")]
    command += [] if trainers is None else ["--num_trainers", str(trainers)]
    command += ["-m", SCRIPT, *(word for setting in words for word in ("--set", setting))]
    command += [] if config is None else ["--config", str(config)]
    with ip_config(None) as machines:
        _run_job(
            [sys.executable, "-m", "dglkge.cli.launch", "--ip_config", machines, *command], read, is_shown
        )
    return open_run(folder, dataset=str(dataset), imports=read.imports)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _dataset(triples: Triples, folder: Path, options: DataOptions, overwrite: bool, progress: bool) -> Path:
    """Return the data set of the triples, made in the run's folder if it is not one already.

    With ``overwrite`` the folder's run is removed, but only once the triples have proved to be good.
    """
    from dglkge.data.text_format import parse_columns
    from dglkge.partition.make_dataset import partition_dataframe, partition_files
    from dglkge.partition.options import Options, ReadingOptions, parse_fractions

    is_path = isinstance(triples, (str, os.PathLike))
    is_dataset = is_path and (Path(triples) / DESCRIPTION).is_file()
    if options.reading and (is_dataset or not is_path):
        raise InputError("reading is for files and folders of triples, not for a data frame or a data set")
    if is_dataset:
        if options.split is not None or options.has_splits:
            raise InputError(f"{triples} is a data set with splits of its own; give no split, valid or test")
        dataset = Path(triples).absolute()
        if overwrite:
            if dataset.is_relative_to(folder.absolute()):
                raise InputError(f"{triples} lies in {folder}, which overwrite would remove")
            _remove(folder)
        return dataset
    if is_path and options.has_splits:
        raise InputError("valid and test go with a data frame; a folder has files of these names")
    is_single = Path(triples).is_file() if is_path else not options.has_splits
    shares = options.split or ((0.9, 0.05, 0.05) if is_single else None)
    making = Options(
        seed=options.seed,
        columns=parse_columns(options.columns),
        split=None if shares is None else parse_fractions(",".join(map(str, shares))),
        name=folder.absolute().name,
        progress=progress,
        reading=ReadingOptions.from_mapping(options.reading),
    )
    made = (folder / DATASET_FOLDER).absolute()
    made.parent.parent.mkdir(parents=True, exist_ok=True)
    # Beside the run's folder, on the same disk: wrong triples leave it as it was.
    with tempfile.TemporaryDirectory(dir=made.parent.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary) / DATASET_FOLDER
        if is_path:
            partition_files([Path(triples)], new, making)
        else:
            partition_dataframe(triples, new, options.valid, options.test, options.columns, making)
        if overwrite:
            _remove(folder)
        if not made.exists():
            folder.mkdir(exist_ok=True)
            new.rename(made)
        # The same triples in the same splits: the run goes on. The maker is deterministic.
        elif Dataset.open(made).fingerprint != Dataset.open(new).fingerprint:
            raise InputError(
                f"{folder} has a run of other triples or splits; give overwrite=True or another output"
            )
    return made


def _run_job(command: Sequence[str], config: Config, is_shown: bool) -> None:
    """Run the launcher to its end.

    Raises
    ------
    InputError, JobError
        If it fails, with its own words.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        """Ask the kernel for a SIGTERM when this process ends, however it ends."""
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl took effect
            os._exit(1)

    def show(line: str) -> None:
        """Show a line where a person looks on."""
        if is_shown:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
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
        raise JobError(f"the job was stopped; the same call goes on from the last commit of {config.output}")
    last = "\n".join(lines[-LAST_LINES:])
    raise JobError(f"the job failed with status {status}; its last lines:\n{last}")


def _is_interactive() -> bool:
    """Return whether a person looks on: at a terminal or a notebook."""
    return sys.stdout is not None and (sys.stdout.isatty() or "ipykernel" in sys.modules)


def _as_yaml(value: Any) -> str:
    """Return a value as the right side of KEY=VALUE."""
    # JSON is YAML; a text stays as it is, as on the command line.
    return value if isinstance(value, str) else json.dumps(value)
