"""Seconds from a command to its first result: a launched job to its first batch, and short commands.

    python benchmarks/start.py data/nations --runs 5

The job runs ``timed_train.py``. A phase is counted from the start of the command to its end; the processor
seconds are those of all processes of the whole job, with one epoch and its commit. Medians go to stdout as
tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PHASES = {
    "script": "the script begins",
    "imported": "its imports and the configuration are done",
    "joined": "the cluster has joined",
    "built": "the trainer is built",
    "first_batch": "first batch",
}
"""Milestones of ``timed_train.py`` that are shown."""


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return its seconds, and the processor seconds of it and of what it has waited for."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime


def job(dataset: Path, num_trainers: int, folder: Path) -> dict[str, float]:
    """Run a job; return the seconds of its phases, to its end, and of its processors."""
    timings, script = folder / "timings.json", Path(__file__).with_name("timed_train.py")
    words = [f"dataset={dataset}", f"output={folder / 'run'}", "training.num_epochs=1"]
    words.append("evaluation.split=none")
    (folder / "ip_config.txt").write_text("127.0.0.1\n", encoding="utf-8")
    options = [f"--ip_config={folder / 'ip_config.txt'}", f"--num_trainers={num_trainers}"]
    options.append(f"--log_dir={folder / 'logs'}")
    settings = [word for setting in words for word in ("--set", setting)]
    command = [sys.executable, "-m", "dglkge.cli.launch", *options, str(script)]
    begin = time.time()
    seconds, processors = timed([*command, "--timings", str(timings), *settings])
    marks = json.loads(timings.read_text(encoding="utf-8"))["marks"]
    phases = {text: marks[name] - begin for name, text in PHASES.items()}
    return {**phases, "end of the job": seconds, "processor seconds": processors}


def commands(run: Path, dataset: Path) -> dict[str, list[str]]:
    """Return short commands by what the table calls them; the query is the first training triple."""
    from dglkge.data.dataset import Dataset

    opened = Dataset.open(dataset)
    relation = opened.relations.relations[0]
    head = opened.mapped_vocabulary(relation.lhs).names[0]
    python = [sys.executable, "-m", "dglkge"]
    query = ["predict", str(run), "--head", head, "--relation", opened.relations.labels[0]]
    return {
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "dglkge --help": [*python, "--help"],
        "dglkge predict --help": [*python, "predict", "--help"],
        "dglkge predict, one query": [*python, *query],
    }


def table(heading: str, rows: dict[str, Sequence[float]]) -> str:
    """Return a table of medians in Markdown."""
    lines = [f"| {heading} | s | processor s |", "|---|--:|--:|"]
    for name, numbers in rows.items():
        cells = [f"{number:.2f}" for number in numbers] + [""] * (2 - len(numbers))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, help="folder of a data set; its size counts too")
    parser.add_argument("--num-trainers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="each figure is their median")
    args = parser.parse_args(words)
    jobs, short = [], dict[str, list[tuple[float, float]]]()
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="dglkge-start-") as name:
            folder = Path(name)
            jobs.append(job(args.dataset.absolute(), args.num_trainers, folder))
            for text, command in commands(folder / "run", args.dataset).items():
                short.setdefault(text, []).append(timed(command))
    medians = {text: statistics.median(times[text] for times in jobs) for text in jobs[0]}
    processors = medians.pop("processor seconds")
    rows: dict[str, Sequence[float]] = {text: [seconds] for text, seconds in medians.items()}
    rows["end of the job"] = [medians["end of the job"], processors]
    print(table(f"job of {args.num_trainers} trainers", rows), end="\n\n")
    print(table("command", {text: [*map(statistics.median, zip(*all_))] for text, all_ in short.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
