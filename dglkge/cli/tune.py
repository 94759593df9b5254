"""``dglkge tune``: search for settings on subgraphs, and train the best ones on the whole graph."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from dglkge.cli.common import IMPORT, JSON, SET, Command, flag, option, print_columns, print_json, print_text
from dglkge.distributed.dgl_import import require_dgl
from dglkge.registry import import_modules


def tune(args: argparse.Namespace) -> int:
    """Plan, search and print."""
    require_dgl("dglkge tune")
    # Here: --help does without torch and pandas.
    from tqdm import tqdm

    from dglkge.launch.stop_signals import stop_signals_raised
    from dglkge.training.building.checks import check_config
    from dglkge.tuning.space import load_space
    from dglkge.tuning.trial_process import Trainer
    from dglkge.tuning.tune import Tuning, plan_row

    import_modules(args.imports)
    overrides = [*args.set, *([f"imports={args.imports}"] if args.imports else [])]
    space = load_space(Path(args.space), overrides)
    changes = {name: getattr(args, name) for name in ("trials", "budget") if getattr(args, name) is not None}
    space = dataclasses.replace(space, search=dataclasses.replace(space.search, **changes))
    output = Path(args.output)
    tuning = Tuning(space, output, Trainer(args.num_trainers), check_config)
    plan = [plan_row(rung) for rung in tuning.rungs]
    cost = sum(rung.cost for rung in tuning.rungs)
    if not args.json:
        print_columns(list(plan[0]), [list(row.values()) for row in plan])
        print_text(
            f"cost: {cost:.2f} full trainings, the winner's included; allowed: {space.search.budget:g}"
        )
    if args.dry_run:
        if args.json:
            print_json({"rungs": plan, "cost": cost, "budget": space.search.budget})
        return 0
    total = sum(rung.num_trials for rung in tuning.rungs)
    bar = tqdm(total=total, desc="tune", unit="trial", disable=True if args.json else None)
    with stop_signals_raised(), bar:
        result = tuning.run(bar.update)
    values = dict(result.values)
    if args.json:
        print_json(
            {
                "rungs": plan,
                "cost": cost,
                "budget": space.search.budget,
                "best": {"values": values, "config": str(result.config), "run": str(result.run)},
                "split": result.split,
                "mrr": result.outcome.value,
                "seconds": result.outcome.seconds,
            }
        )
        return 0
    print_columns(["field", "best"], [[key, value] for key, value in values.items()])
    outcome = result.outcome
    print_text(f"{result.split} MRR {outcome.value:.4f} on the whole graph, {outcome.seconds:.0f} s")
    print_text(f"configuration: {result.config}; run: {result.run}; trials: {output / 'trials.tsv'}")
    return 0


TUNE = Command(
    description="""Search for good settings in a space (a YAML file). Many trials train few epochs on a small
k-core of the graph, the best of them longer on a larger one, and the winner trains on the whole graph (GraSH:
Kochsiek et al. 2022). The plan, with its cost in full trainings, is printed first. Each trial is a
child process with a folder of its own. After Ctrl-C, the same command goes on. Needs Optuna:
pip install 'dglkge[tune]'.""",
    examples="""examples:
  dglkge tune space.yaml --output tuned                     search; the winner is in tuned/best.yaml
  dglkge tune space.yaml --output tuned --dry-run           only the plan and its cost
  dglkge tune space.yaml --output tuned --num-trainers 2    each trial under dglkge-launch

a space:
  config: dglkge/config/recipes/fb15k237/complex.yaml     # base configuration
  set: {dataset: data/mine}                  # changes to it
  space:
    optimizer.lr: {low: 0.01, high: 1.0, log: true}
    regularizer.weight: {low: 1.0e-4, high: 0.3, log: true}
    negatives.num_uniform: [500, 1000, 2000]
  search: {trials: 64, reduction: 4, budget: 3, seed: 0}""",
    options=[
        option("space", "YAML file with the base, the space and the search", metavar="SPACE"),
        option("--output", "folder of the search", required=True, metavar="DIR"),
        SET,
        IMPORT,
        option(
            "--num-trainers",
            "train each trial with N trainers under dglkge-launch (default: 0, one process without servers)",
            least=0,
            default=0,
            metavar="N",
        ),
        option("--trials", "instead of search.trials of the file", type=int, metavar="N"),
        option("--budget", "instead of search.budget of the file", type=float, metavar="B"),
        flag("--dry-run", "print the plan and exit"),
        JSON,
    ],
    run=tune,
)
