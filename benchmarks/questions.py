"""Questions of several hops on a run: metrics of the 14 types, and time over many entities.

    python benchmarks/questions.py runs/fb15k237                 MRR and Hits@10 by type, the hard ones apart
    python benchmarks/questions.py --entities 1000000            milliseconds of two hops

Questions are drawn backwards from an answer over all triples, as those of BetaE (Ren and Leskovec 2020).
Triples of train and valid are known. Only answers that need a test triple are ranked, among the entities that
are no answers; those of which all links are test triples are in the column "hard" too, since most answers of
such questions need one new link only. The run must be calibrated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import dglkge
from dglkge.data.vocabulary import Vocabulary
from dglkge.evaluation.calibration import Calibration, Platt
from dglkge.inference.choices import BEAM
from dglkge.inference.logic import And, Fact, Formula, Not, Or, Question
from dglkge.inference.questions import Asked, Hop, Node
from dglkge.inference.trained_model import TrainedModel
from dglkge.inference.whole_tables import WholeTables
from dglkge.typing import RELATION, Relation
from measuring.machine import describe_machine

Links = tuple[tuple[str, str, str], ...]
PATTERNS: dict[str, Links] = {
    "1p": (("a", "r", "?x"),),
    "2p": (("a", "r", "?y"), ("?y", "s", "?x")),
    "3p": (("a", "r", "?y"), ("?y", "s", "?z"), ("?z", "t", "?x")),
    "2i": (("a", "r", "?x"), ("b", "s", "?x")),
    "3i": (("a", "r", "?x"), ("b", "s", "?x"), ("c", "t", "?x")),
    "pi": (("a", "r", "?y"), ("?y", "s", "?x"), ("b", "t", "?x")),
    "ip": (("a", "r", "?y"), ("b", "s", "?y"), ("?y", "t", "?x")),
    "2u": (("a", "r", "?x"), ("b", "s", "?x")),
    "up": (("a", "r", "?y"), ("b", "s", "?y"), ("?y", "t", "?x")),
    "2in": (("a", "r", "?x"), ("b", "s", "?x")),
    "3in": (("a", "r", "?x"), ("b", "s", "?x"), ("c", "t", "?x")),
    "inp": (("a", "r", "?y"), ("b", "s", "?y"), ("?y", "t", "?x")),
    "pin": (("a", "r", "?y"), ("?y", "s", "?x"), ("b", "t", "?x")),
    "pni": (("b", "t", "?x"), ("a", "r", "?y"), ("?y", "s", "?x")),
}
"""Links of each type, the negated ones last; a letter is an entity or a relation."""


def formula_of(kind: str, links: list[Fact]) -> Formula:
    """Return the formula of a type from its links."""
    if kind == "2u":
        return Or(tuple(links))
    if kind == "up":
        return And((Or(tuple(links[:2])), links[2]))
    if kind == "inp":
        return And((links[0], Not(links[1]), links[2]))
    if kind == "pni":
        return And((links[0], Not(And(tuple(links[1:])))))
    if kind.endswith("n"):
        return And((*links[:-1], Not(links[-1])))
    return And(tuple(links)) if len(links) > 1 else links[0]


class Graph:
    """Triples by name, to draw questions from and to answer them."""

    def __init__(self, triples: list[tuple[str, str, str]]) -> None:
        self.into: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.tails: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.all = list(dict.fromkeys(triples))  # a set has another order in each process
        for head, relation, tail in triples:
            self.into[tail].append((head, relation))
            self.tails[head, relation].add(tail)

    def answers(self, node: Node | Hop, names: list[str]) -> set[str]:
        """Return the entities that fulfil a planned question in this graph."""
        if isinstance(node, Hop):
            heads = {names[node.anchor]} if isinstance(node.anchor, int) else self.answers(node.anchor, names)
            return set().union(*(self.tails.get((head, node.relation.name), set()) for head in heads))
        parts = [self.answers(child, names) for child in node.children]
        if node.operation == "not":
            return set(names) - parts[0]
        return set.intersection(*parts) if node.operation == "and" else set.union(*parts)

    def draw(self, kind: str, draws: np.random.Generator, entities: list[str]) -> list[Fact] | None:
        """Draw links backwards from an answer; None if an entity has no link into it."""
        bound = {"?x": entities[draws.integers(len(entities))]}
        links: dict[int, Fact] = {}
        pattern = PATTERNS[kind]
        for place, (head, _, tail) in reversed(list(enumerate(pattern))):
            choices = self.into.get(bound.get(tail, ""), [])
            if not choices:
                return None
            anchor, relation = choices[draws.integers(len(choices))]
            if head.startswith("?"):
                bound.setdefault(head, anchor)
            links[place] = Fact(head if head.startswith("?") else anchor, relation, tail)
        drawn = [links[place] for place in range(len(pattern))]
        # A link that is drawn twice makes the question one of another type.
        return drawn if len(set(drawn)) == len(drawn) else None


def ranks_of(
    path: str, kinds: list[str], number: int, beam: int, seed: int, adapter: bool
) -> list[dict[str, Any]]:
    """Rank the new answers of drawn questions, and return a row for each type."""
    run = dglkge.open_run(path)
    (type_,) = run.tables.entity_types
    names, labels = list(run.tables.vocabulary(type_).names), run.tables.relations.labels
    triples = {
        split: [(names[h], labels[r], names[t]) for h, r, t in run.dataset.split(split).tolist()]
        for split in ("train", "valid", "test")
    }
    old = Graph(triples["train"] + triples["valid"])
    whole, new = Graph([*old.all, *triples["test"]]), Graph(triples["test"])
    place = {name: number for number, name in enumerate(names)}
    draws = np.random.default_rng(seed)
    table = []
    for kind in kinds:
        ranks: dict[bool, list[float]] = {False: [], True: []}
        num_questions, seconds = 0, 0.0
        while num_questions < number:
            links = whole.draw(kind, draws, names)
            if links is None:
                continue
            planned = Asked(run, Question("?x", formula_of(kind, links)), beam, ("train", "valid"), adapter)
            true = whole.answers(planned._root, names)
            new_answers = true - old.answers(planned._root, names)
            if not new_answers or len(true) > 100:
                continue
            begin = time.process_time()
            with torch.no_grad():
                values = planned._values(planned._root, type_)
            seconds += time.process_time() - begin
            num_questions += 1
            hard = new.answers(planned._root, names)
            is_wrong = np.ones(len(names), bool)
            is_wrong[[place[name] for name in true]] = False
            for name in new_answers:
                value = values[place[name]]
                better, same = (values[is_wrong] > value).sum(), (values[is_wrong] == value).sum()
                ranks[name in hard].append(1 + better + same / 2)
        row: dict[str, Any] = {
            "type": kind,
            "questions": num_questions,
            "cpu_ms": 1000 * seconds / num_questions,
        }
        for label, ranks_of_kind in (("all", ranks[False] + ranks[True]), ("hard", ranks[True])):
            reciprocal = 1 / np.array(ranks_of_kind) if ranks_of_kind else np.empty(0)
            row[label] = {
                "answers": len(ranks_of_kind),
                "mrr": float(reciprocal.mean()) if ranks_of_kind else None,
                "hits@10": float((reciprocal >= 0.1).mean()) if ranks_of_kind else None,
            }
        table.append(row)
        print(json.dumps(row), flush=True)
    return table


def two_hops(num_entities: int, beam: int, times: int = 20) -> dict[str, Any]:
    """Time questions of two hops over random rows of ComplEx, D = 200."""
    draws = torch.Generator().manual_seed(0)
    meta: Any = SimpleNamespace(
        relations=[Relation("r", "entity", "entity"), Relation("s", "entity", "entity")],
        entity_types={"entity": num_entities},
        score_function="complex",
        dim=200,
        reciprocal=False,
        score_options={},
    )
    rows = {
        "entity": torch.randn(num_entities, 200, generator=draws),
        RELATION: torch.randn(2, 200, generator=draws),
    }
    names = Vocabulary([str(number) for number in range(num_entities)], "entity")
    run = TrainedModel(WholeTables(Path(), meta, rows, lambda _type: names, {}))
    # One link in a thousand is above the probabilities that count as 0.
    scores = run.model.score(
        rows["entity"][:1000], rows[RELATION][:1].expand(1000, -1), rows["entity"][-1000:]
    )
    curve = Platt(1.0, -3.1 * float(scores.std()) - 13.8)
    run.__dict__["calibration"] = Calibration("platt", curve, 0.5, 1, 0, 1, 1, "", 0)
    walls, cpu = [], time.process_time()
    for number in range(times + 1):
        begin = time.perf_counter()
        question = And((Fact(str(number), "r", "?y"), Fact("?y", "s", "?x")))
        Asked(run, Question("?x", question), beam, (), adapter=True).answer(10)
        walls.append(time.perf_counter() - begin)
        if not number:  # it loads the compiled loops
            cpu = time.process_time()
    return {
        "entities": num_entities,
        "beam": beam,
        "bfloat16": run.likely_candidates.is_narrow,
        "median_ms": 1000 * float(np.median(walls[1:])),
        "least_ms": 1000 * min(walls[1:]),
        "cpu_ms": 1000 * (time.process_time() - cpu) / times,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="a calibrated run of one entity type")
    parser.add_argument("--entities", type=int, help="time two hops over so many random rows")
    parser.add_argument("--types", default=",".join(PATTERNS), help="separated by commas")
    parser.add_argument("--questions", type=int, default=100, help="of each type")
    parser.add_argument("--beam", type=int, default=BEAM)
    parser.add_argument("--no-adapter", action="store_true", help="without dglkge calibrate --questions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"machine": describe_machine()}
    if args.entities:
        report["two_hops"] = two_hops(args.entities, args.beam)
        print(json.dumps(report["two_hops"]), flush=True)
    if args.run:
        report["types"] = ranks_of(
            args.run, args.types.split(","), args.questions, args.beam, args.seed, not args.no_adapter
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
