"""``dglkge ask`` and ``explain``: answers to questions of several hops, and reasons for links."""

from __future__ import annotations

import argparse
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import Command, flag, option, print_columns, print_text
from dglkge.data.dataset_files import SPLITS
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Return the best answers with their paths."""
    if args.k < 1:
        raise InputError(f"the number of answers must be at least 1, got {args.k}")
    from dglkge.inference import logic, questions  # here: --help does without torch

    question = logic.parse(args.question)  # before the run is read
    splits = () if args.no_known else args.known_split or SPLITS
    type_, answers = questions.ask(common.open_model(args), question, args.k, args.beam, splits)
    ranked = [{"rank": rank, **answer} for rank, answer in enumerate(answers, start=1)]
    return {"question": args.question, "type": type_, "answers": ranked}


def _print_answers(result: dict[str, Any], _args: argparse.Namespace) -> None:
    print_text(f"{result['question']}: best answers of type {result['type']}")
    rows = [
        [one["rank"], f"{one['probability']:.4f}", one["entity"], "; ".join(map(_link, one["path"]))]
        for one in result["answers"]
    ]
    print_columns(["rank", "probability", "answer", "path"], rows)


def _link(link: dict[str, Any]) -> str:
    """Return a link of a path as a text, with its probability or that it is known."""
    how = "known" if link["known"] else f"{link['probability']:.3f}"
    return f"{'not ' if link['not'] else ''}({link['head']}, {link['relation']}, {link['tail']}) {how}"


ASK = Command(
    description="""Answer a question of several hops: a variable, and the triples that it fulfils, joined by
commas (and), or, not and parentheses. A triple of the data set has probability 1, others the one that
dglkge calibrate has fitted. Each answer has the links that led to it.""",
    examples="""examples:
  dglkge ask runs/demo '?x : (Alice, knows, ?y), (?y, likes, ?x)'   what do those like whom Alice knows?
  dglkge ask runs/demo '?x : (Alice, likes, ?x), not (Bob, likes, ?x)'
  dglkge ask runs/demo '?x : ((Alice, knows, ?y) or (Bob, knows, ?y)), (?y, likes, ?x)'
  dglkge ask runs/demo '?x : (?x, likes, "Paris, Texas")'           a name with a comma""",
    options=[
        *common.MODEL,
        common.DATASET,
        option("question", "?VARIABLE : and its triples", metavar="QUESTION"),
        option("-k --k", "answers to show", type=int, default=10),
        option("--beam", "entities of every other variable that go on", least=1, default=16),
        option(
            "--known-split",
            "split whose triples have probability 1 (default: all)",
            is_repeated=True,
            choices=SPLITS,
        ),
        flag("--no-known", "no triple is taken as known: probabilities only"),
    ],
    run=ask,
    show=_print_answers,
)


def explain(args: argparse.Namespace) -> dict[str, Any]:
    """Return the reasons for a link, or the rules for a relation."""
    if (args.head is None) != (args.tail is None):
        raise InputError("give --head and --tail, or neither: then rules for the relation are shown")
    run = common.open_model(args)
    if args.head is not None:
        return run.explain(args.head, args.relation, args.tail, args.k)
    return {"relation": args.relation, "rules": run.rules(args.relation, args.k).to_dict("records")}


def _print_reasons(result: dict[str, Any], _args: argparse.Namespace) -> None:
    if "head" in result:
        probability = result["probability"]
        print_text(
            f"{_triple(result)}: score {result['score']:.3f}"
            + ("" if probability is None else f", probability {probability:.4f}")
        )
        print_text("\ntraining triples that raise the score most")
        rows = [[f"{one['influence']:.3f}", one["of"], _triple(one)] for one in result["triples"]]
        print_columns(["influence", "of the", "triple"], rows)
        print_text("\nknown links of the relation with a similar entity")
        rows = [[f"{one['cosine']:.3f}", one["instead_of"], one["entity"]] for one in result["similar"]]
        print_columns(["cosine", "instead of the", "entity"], rows)
    print_text(f"\nrules for {result['relation']}")
    rows = [
        [f"{one['confidence']:.3f}", f"{one['support']}/{one['pairs']}", one["rule"], *_path(one)]
        for one in result["rules"]
    ]
    print_columns(["confidence", "support", "rule", *(["path"] if "head" in result else [])], rows)


def _path(rule: dict[str, Any]) -> list[str]:
    """Return the path of a rule as one cell; none where it has none."""
    return ["; ".join(map(_triple, rule["path"]))] if rule.get("path") else []


def _triple(one: dict[str, Any]) -> str:
    return f"({', '.join(one[role] for role in ROLES)})"


EXPLAIN = Command(
    description="""Show why a link is likely: the training triples without which its score would fall most,
the rules of up to three links that imply it, and known links with a similar entity. Without --head and
--tail: rules that imply the relation.""",
    examples="""examples:
  dglkge explain runs/demo --head Alice --relation likes --tail Bob
  dglkge explain runs/demo --relation likes                       what implies it?
  dglkge explain runs/demo --head Alice --relation likes --tail Bob -k 20 --json""",
    options=[
        *common.MODEL,
        common.DATASET,
        option("--head", "name of the head entity"),
        option("--relation", "name of the relation", required=True),
        option("--tail", "name of the tail entity"),
        option("-k --k", "reasons of each kind", type=int, default=5),
    ],
    run=explain,
    show=_print_reasons,
)
