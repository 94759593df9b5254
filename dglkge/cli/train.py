"""``dglkge train`` and ``tune``: train a configuration; search for good settings on subgraphs."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import command, config_words, flag, option, print_columns, print_text
from dglkge.config import Config, load_config
from dglkge.config.load import recipe_file
from dglkge.data.dataset_files import DESCRIPTION, Field, read_description
from dglkge.distributed.dgl_import import require_dgl
from dglkge.errors import InputError
from dglkge.launch import ALONE

SCRIPT = "dglkge.cli.training_script"
"""The module that servers and trainers run."""

NEXT = "next: dglkge predict {0} --head NAME --relation NAME; dglkge serve {0}; dglkge report {0}"
"""What to do after a training, given the run's folder."""

MOST_ALONE = 200_000
"""Triples of all epochs that one process trains sooner than several have started."""

JOB_OPTIONS = ("ip_config", "num_trainers", "num_servers", "log_dir", "max_restarts", "no_verify", "json")
"""With one of them it is a job, however small."""


@command(
    *common.CONFIG,
    option("--ip-config FILE", "the machines (default: this one)"),
    option("--num-trainers N[:M]", "on each machine, as in dglkge-launch"),
    option("--num-servers N", "on each machine, as in dglkge-launch"),
    option("--log-dir FOLDER", "folder for the logs (default: logs/ of the run)"),
    flag("--no-verify", "as in dglkge-launch"),
    option("--max-restarts K", "starts after failures, as in dglkge-launch"),
)
def train(args: argparse.Namespace) -> int:
    """Train a configuration with servers and trainers on this machine, or on those of an
    ip_config.txt, or in one process where that takes less time (at most 200,000 triples in all epochs, and no
    option of a job). The same command again goes on from the last commit. dglkge-launch has more options, and
    runs scripts of your own.

    Examples
    --------
      dglkge data build my_triples/ -o data/mine
      dglkge train dataset=data/mine output=runs/mine          all settings by default: dglkge config show
      dglkge train --recipe fb15k237/complex dataset=data/mine output=runs/mine
      dglkge train my.yaml --num-trainers 4
      dglkge train my.yaml --ip-config ip_config.txt                    several machines
    """
    require_dgl("dglkge train")
    file, overrides = config_words(args)
    # Read here as well: a mistake is reported before any process starts.
    config = load_config(file, overrides, args.imports)
    # Here: --help does without numpy, and no other command needs the launcher.
    from dglkge.cli import launch
    from dglkge.data.dataset import Dataset

    if Path(config.output).is_file():
        raise InputError(f"output is {config.output}, which is a file; expected a folder")
    dataset = _dataset(config, args)
    config, script = job_script(file, overrides, dataset, lambda line: _say(args, line), args.imports)
    if args.ip_config is None:
        # On this machine: its servers would say the same, many seconds later.
        Dataset.open(dataset)
    words = ["--log_dir", args.log_dir or str(Path(config.output) / "logs")]
    for name in ("num_trainers", "num_servers", "max_restarts"):
        words += [] if getattr(args, name) is None else [f"--{name}", getattr(args, name)]
    words += [f"--{name}" for name in ("no_verify", "json") if getattr(args, name)]
    if is_small(config, dataset) and not any(getattr(args, name) for name in JOB_OPTIONS):
        from dglkge.cli import training_script

        logging.disable(logging.WARNING if args.quiet else logging.NOTSET)
        status = training_script.main(script)
        logging.disable(logging.NOTSET)
    else:
        machines = ALONE if args.ip_config is None else ("--ip_config", args.ip_config)
        status = launch.main([*machines, *words, "-m", SCRIPT, *script])
    if status == 0:
        _say(args, NEXT.format(config.output))
    return status


def _dataset(config: Config, args: argparse.Namespace) -> Path:
    """Return the folder of the data set; that of a graph of DGL is made in the run's folder."""
    # Here: --help does without numpy.
    from dglkge.partition.make_dataset import dataset_of_run
    from dglkge.partition.options import AUTO_SPLIT, Options
    from dglkge.partition.readers.dgl_graph import is_graph

    source = Path(config.dataset)
    if not is_graph(source):
        return source
    run = Path(config.output)
    options = Options(split=AUTO_SPLIT, name=run.absolute().name, progress=False if args.json else None)
    made, notes = dataset_of_run(source, run, options)
    for note in notes:
        _say(args, note)
    return made


def job_script(
    file: str | Path | None,
    words: list[str],
    dataset: Path,
    say: Callable[[str], None],
    imports: Sequence[str] = (),
) -> tuple[Config, list[str]]:
    """Return the configuration of a training, and the arguments of :data:`SCRIPT`; says what is chosen."""
    from dglkge.planning.defaults import adapted, describe

    defaults = adapted(file, words, dataset)
    if defaults:
        say(describe(defaults))
    words = [*words, f"dataset={dataset}", *defaults]
    config = load_config(file, words, imports)
    split = config.evaluation.split
    if _description(dataset).get(Field.SPLITS, {}).get(split) == 0:
        say(f"nothing is ranked: {dataset} has no {split} triples")
        words.append("evaluation.split=none")
    script = [word for setting in words for word in ("--set", setting)]
    script += [word for module in imports for word in ("--import", module)]
    return config, script + ([] if file is None else ["--config", str(file)])


def _say(args: argparse.Namespace, line: str) -> None:
    """Print a line unless stdout is for JSON."""
    if not args.json:
        print_text(line)


def is_small(config: Config, dataset: Path) -> bool:
    """Whether a training is over before several processes would have started."""
    description = _description(dataset)
    triples = description[Field.SPLITS]["train"] * config.training.num_epochs if description else math.inf
    return bool(triples <= MOST_ALONE and description[Field.NUM_PARTS] == 1)


def _description(dataset: Path) -> dict[str, Any]:
    """Return the description of a data set; empty if it is on other machines only."""
    return read_description(dataset) if (dataset / DESCRIPTION).is_file() else {}


@command(
    *common.CONFIG,
    common.OUTPUT,
    option("--num-trainers", "trainers of a trial (default: 0, one process alone)", least=0, default=0),
    option("--trials", "instead of search.trials of the file", type=int),
    option("--budget B", "instead of search.budget of the file", type=float),
    flag("--dry-run", "print the plan and exit"),
)
def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Search for good settings in a space (a YAML file). Many trials train few epochs on a small k-core of
    the graph, the best of them longer on a larger one, and the winner trains on the whole graph (GraSH:
    Kochsiek et al. 2022). The plan, with its cost in full trainings, is printed first. Each trial is a
    child process with a folder of its own. After Ctrl-C, the same command goes on. Needs Optuna: pip
    install 'dglkge[tune]'.

    Examples
    --------
      dglkge tune space.yaml -o tuned                     search; the winner is in tuned/best.yaml
      dglkge tune space.yaml -o tuned --dry-run           only the plan and its cost
      dglkge tune space.yaml -o tuned --num-trainers 2    each trial under dglkge-launch

    a space:
      config: my.yaml                            # base configuration, or --recipe NAME
      set: {dataset: data/mine}                  # changes to it
      space:
        optimizer.lr: {low: 0.01, high: 1.0, log: true}
        regularizer.weight: {low: 1.0e-4, high: 0.3, log: true}
        negatives.num_uniform: [500, 1000, 2000]
      search: {trials: 64, reduction: 4, budget: 3, seed: 0}
    """
    require_dgl("dglkge tune")
    # Here: --help does without torch and pandas.
    from dglkge.launch.stop_signals import stop_signals_raised
    from dglkge.training.building.checks import check_config
    from dglkge.tuning.space import load_space
    from dglkge.tuning.tune import Tuning

    base, args.recipe = args.recipe and str(recipe_file(args.recipe)), None
    path, overrides = config_words(args)
    if path is None:
        raise InputError("give the file of the space")
    overrides += [f"imports={args.imports}"] if args.imports else []
    space = load_space(Path(path), overrides, base)
    changes = {name: getattr(args, name) for name in ("trials", "budget") if getattr(args, name) is not None}
    space = dataclasses.replace(space, search=dataclasses.replace(space.search, **changes))
    tuning = Tuning(space, Path(args.output), args.num_trainers, check_config)
    plan = tuning.plan()
    if not args.json:
        print_columns(list(plan["rungs"][0]), [list(row.values()) for row in plan["rungs"]])
        cost, budget = plan["cost"], plan["budget"]
        print_text(f"cost: {cost:.2f} full trainings, the winner's included; allowed: {budget:g}")
    if args.dry_run:
        return plan
    total = sum(rung.num_trials for rung in tuning.rungs)
    with stop_signals_raised(), common.progress_bar(args, total, desc="tune", unit="trial") as bar:
        return {**plan, "best": tuning.run(bar.update)}


@tune.shows
def _print_best(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the best settings; the plan has been printed."""
    if "best" not in report:
        return
    best = report["best"]
    print_columns(["field", "best"], list(best["values"].items()))
    measure = f"{best['split']} {best['metric']} {best['value']:.4f}"
    print_text(f"{measure} on the whole graph, {best['seconds']:.0f} s")
    trials = Path(args.output) / "trials.tsv"
    print_text(f"configuration: {best['config']}; run: {best['run']}; trials: {trials}")
