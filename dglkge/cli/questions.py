"""``dglkge complete``, ``ask`` and ``explain``: missing triples, questions of several hops, reasons."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import command, flag, option, print_table, print_text
from dglkge.data.dataset_files import SPLITS
from dglkge.data.text_format import ROLES, is_number
from dglkge.errors import InputError
from dglkge.inference.choices import ALL, SEARCHES

SHOWN_RANKS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


@command(
    *common.MODEL_AND_DATASET,
    option("-o --output FILE", "the Parquet file", required=True),
    option("--relation NAME", "only this one", is_repeated=True),
    option("--head NAME", "only this one", is_repeated=True),
    option("--head-type TYPE", "only relations with heads of this type", is_repeated=True),
    option("--min-probability P", "least calibrated probability (default: 0.5, or none with -k)", type=float),
    option("-k --k", "most tails of each pair of head and relation", type=int),
    option(
        "--candidates",
        "all entities of the types; heads and tails seen on that side of the relation; or tails that an "
        "approximate index of faiss finds, with the recall on a sample",
        choices=SEARCHES,
        default=ALL,
    ),
    option(
        "--held-out",
        "a split that counts as missing; the precision of finding it is shown, and in dglkge report",
        choices=SPLITS,
    ),
    common.OVERWRITE,
    common.THREADS,
)
def complete(args: argparse.Namespace) -> dict[str, Any]:
    """Write the likely triples that the data set does not have to a Parquet file: for every pair of head
    and relation, the tails above a probability or the best k; sorted by descending probability, then score.
    All possible triples are compared, on all cores; a bound skips those that cannot be likely. After an
    interruption the same command goes on.

    Examples
    --------
      dglkge calibrate runs/demo --positive-rate 1e-5       first: the share of true triples
      dglkge complete runs/demo -o missing.parquet                        probability of .5 or more
      dglkge complete runs/demo -o missing.parquet --min-probability 0.9 --relation likes
      dglkge complete runs/demo -o best.parquet -k 3 --candidates seen    the best 3 tails of each pair
      dglkge complete runs/demo -o best.parquet -k 3 --candidates faiss   approximately, by an index
      dglkge complete runs/demo -o found.parquet --held-out test          how many test triples are found?
    """
    import torch  # here: --help does without

    from dglkge.checkpoint.layout import completion_file
    from dglkge.inference.links.completion import plan_completion, write_completion

    run = common.open_model(args)
    torch.set_num_threads(args.threads)
    names = (args.relation or None, args.head or None, args.head_type or None)
    limits = (args.min_probability, args.k, args.candidates, args.held_out)
    completion = plan_completion(run, *names, *limits)
    path = Path(args.output)
    with common.progress_bar(args, completion.num_queries, desc="complete", unit="query") as bar:
        summary = write_completion(completion, path, args.overwrite, bar.update)
    if args.held_out is not None:
        identity = completion.identity()
        del identity["least_scores"]  # may be infinite, which is no JSON; the summary has the least
        common.write_json(run.checkpoint.run_folder / completion_file(args.held_out), {**identity, **summary})
    return summary


@complete.shows
def _print_summary(summary: dict[str, Any], _args: argparse.Namespace) -> None:
    print_text(
        "{triples:,} missing triples of {queries:,} pairs of head and relation, and {pairs:,} possible "
        "triples".format(**summary)
    )
    if "held_out" in summary:
        print_text(f"{summary['held_out_triples']:,} triples of the {summary['held_out']} split to be found:")
        points = [point for point in summary["curve"] if point["rank"] in SHOWN_RANKS]
        points += summary["curve"][-1:] if summary["curve"][-1:] != points[-1:] else []
        print_table({"best": "{rank:,}", "precision": "{precision:.4f}", "recall": "{recall:.4f}"}, points)
    if (recall := summary.get("recall")) is not None:
        share = "none" if recall["recall"] is None else f"{recall['recall']:.4f}"
        print_text(
            f"recall of the index: {share}, of {recall['links']:,} links that exact search finds for "
            f"{recall['queries']:,} of the pairs"
        )
    print_text(f"written to {summary['path']}")


@command(
    *common.MODEL_AND_DATASET,
    option("question QUESTION", "?VARIABLE : and its triples"),
    option("-k --k", "answers to show", least=1, default=10),
    option("--beam", "entities of every other variable that go on", least=1, default=16),
    option("--known-split", "whose triples have probability 1 (all)", is_repeated=True, choices=SPLITS),
    flag("--no-known", "no triple is taken as known: probabilities only"),
    flag("--no-adapter", "without the curves of dglkge calibrate --questions"),
)
def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Answer a question of several hops: a variable, and the triples that it fulfils, joined by
    commas (and), or, not and parentheses. A triple of the data set has probability 1, others the one that
    dglkge calibrate has fitted. Each answer has the links that led to it.

    Examples
    --------
      dglkge ask runs/demo '?x : (Alice, knows, ?y), (?y, likes, ?x)'   what do those like whom Alice knows?
      dglkge ask runs/demo '?x : (Alice, likes, ?x), not (Bob, likes, ?x)'
      dglkge ask runs/demo '?x : ((Alice, knows, ?y) or (Bob, knows, ?y)), (?y, likes, ?x)'
      dglkge ask runs/demo '?x : (?x, likes, "Paris, Texas")'           a name with a comma
    """
    from dglkge.inference import logic, questions  # here: --help does without torch

    question = logic.parse(args.question)  # before the run is read
    splits = () if args.no_known else args.known_split or SPLITS
    run = common.open_model(args)
    asked = questions.Asked(run, question, args.beam, splits, not args.no_adapter)
    return {"question": args.question, "type": asked.answer_type, "answers": asked.answer(args.k)}


@ask.shows
def _print_answers(result: dict[str, Any], _args: argparse.Namespace) -> None:
    print_text(f"{result['question']}: best answers of type {result['type']}")
    cells: common.Cells = {"rank": "{rank}", "probability": "{probability:.4f}", "answer": "{entity}"}
    print_table({**cells, "path": lambda answer: "; ".join(map(_link, answer["path"]))}, result["answers"])


def _link(link: dict[str, Any]) -> str:
    """Return a link of a path as a text, with its probability or that it is known."""
    how = "known" if link["known"] else f"{link['probability']:.3f}"
    return f"{'not ' if link['not'] else ''}({link['head']}, {link['relation']}, {link['tail']}) {how}"


@command(
    *common.MODEL_AND_DATASET,
    option("--head", "name of the head entity"),
    option("--relation", "name of the relation", required=True),
    option("--tail", "name of the tail entity"),
    option("-k --k", "reasons of each kind", default=5),
)
def explain(args: argparse.Namespace) -> dict[str, Any]:
    """Show why a link is likely: the training triples without which its score would fall most,
    the rules of up to three links that imply it, and known links with a similar entity. Without --head and
    --tail: rules that imply the relation.

    Examples
    --------
      dglkge explain runs/demo --head Alice --relation likes --tail Bob
      dglkge explain runs/demo --relation likes                       what implies it?
      dglkge explain runs/demo --head Alice --relation likes --tail Bob -k 20 --json
    """
    if (args.head is None) != (args.tail is None):
        raise InputError("give --head and --tail, or neither: then rules for the relation are shown")
    run = common.open_model(args)
    if args.head is not None:
        return run.explain(args.head, args.relation, args.tail, args.k)
    return {"relation": args.relation, "rules": run.rules(args.relation, args.k).to_dict("records")}


@explain.shows
def _print_reasons(result: dict[str, Any], _args: argparse.Namespace) -> None:
    if "head" in result:
        probability = result["probability"]
        text = "" if probability is None else f", probability {probability:.4f}"
        print_text(f"{_triple(result)}: score {result['score']:.3f}{text}")
        print_text("\ntraining triples that raise the score most")
        print_table({"influence": "{influence:.3f}", "of the": "{of}", "triple": _triple}, result["triples"])
        print_text("\nknown links of the relation with a similar entity")
        cells = {"cosine": "{cosine:.3f}", "instead of the": "{instead_of}", "entity": "{entity}"}
        print_table(cells, result["similar"])
    print_text(f"\nrules for {result['relation']}")
    cells = {"confidence": "{confidence:.3f}", "support": "{support}/{pairs}", "rule": "{rule}"}
    path = {"path": lambda rule: "; ".join(map(_triple, rule["path"]))} if "head" in result else {}
    print_table({**cells, **path}, result["rules"])


def _triple(triple: Mapping[str, Any]) -> str:
    return f"({', '.join(triple[role] for role in ROLES)})"


@command(
    *common.MODEL,
    option("values VALUES", "table of names and numbers: .tsv, .csv with a header, or .parquet"),
    option("-k --k", "entities to show", least=1, default=10),
    flag("--least", "those with the smallest numbers"),
    flag("--known", "also entities with a known value"),
    option("--type", "entity type, if several have the names"),
    option("-o --output FILE", "Parquet file with all of them"),
)
def attributes(args: argparse.Namespace) -> dict[str, Any]:
    """Predict a number of every entity of a type, such as a year or a population, from those of
    some: a ridge regression on the rows, whose error on known values is shown.

    Examples
    --------
      dglkge attributes runs/demo populations.tsv                 NAME<tab>NUMBER lines; the 10 greatest
      dglkge attributes runs/demo populations.csv -o all.parquet --known
    """
    from dglkge.data.vector_files import read_texts, write_parquet  # here: --help does without pandas
    from dglkge.inference.attributes import best_numbers

    texts = read_texts(Path(args.values))
    for name, text in texts.items():
        if not is_number(text):
            raise InputError(f"{args.values}: the value of {name!r} is {text!r}; expected a number")
    values = {name: float(text) for name, text in texts.items()}
    frame = common.open_model(args).predict_numbers(values, args.type)
    if args.output:
        shown = frame if args.known else frame[frame["known"].isna()]
        write_parquet(Path(args.output), dict(shown.items()))
    return {"values": len(values), **best_numbers(frame, args.k, args.least, args.known)}


@attributes.shows
def _print_attributes(result: dict[str, Any], _args: argparse.Namespace) -> None:
    print_text(
        f"{result['values']} known values; predicted from one another: R2 {result['r2']:.3f}, "
        f"mean absolute error {result['mean_error']:.4g}"
    )
    cells: common.Cells = {
        "predicted": "{predicted:.6g}",
        "known": lambda value: "" if value["known"] is None else f"{value['known']:.6g}",
        "entity": "{entity}",
    }
    print_table(cells, result["entities"])
