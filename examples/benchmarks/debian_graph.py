"""Debian's packages as a knowledge graph: a graph of a real size that nobody has tuned settings for.

    python examples/benchmarks/debian_graph.py --output data/debian-triples

Reads ``apt-cache dumpavail`` (the lists of ``apt-get update``). Packages, sections, maintainers, sources and
tags are entities; fields of a package are relations. Triples whose entities stay in others are held out.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Triple = tuple[str, str, str]

TO_PACKAGES = (
    "Depends",
    "Recommends",
    "Suggests",
    "Breaks",
    "Conflicts",
    "Replaces",
    "Enhances",
    "Pre-Depends",
    "Provides",
)


def triples_of(fields: dict[str, str], packages: set[str]) -> Iterator[Triple]:
    """Yield the triples of one package."""
    package = fields["Package"]
    for field in TO_PACKAGES:
        for part in re.split(r"[,|]", fields.get(field, "")):
            # Versions and architectures are left out.
            other = re.sub(r"[\s(:].*", "", part.strip())
            if other and (other in packages or field == "Provides"):
                yield package, field.lower(), other
    if "Section" in fields:
        yield package, "section", "section:" + fields["Section"]
    if "Maintainer" in fields:
        yield package, "maintainer", "maintainer:" + fields["Maintainer"].split("<")[0].strip()
    if "Source" in fields:
        yield package, "source", "source:" + fields["Source"].split()[0]
    for tag in fields.get("Tag", "").split(","):
        if "::" in tag:
            yield package, "tag-" + tag.strip().split("::")[0], "tag:" + tag.strip()


def read(text: str) -> list[Triple]:
    """Return the distinct triples of a list of packages, sorted."""
    packages = set(re.findall(r"^Package: (\S+)", text, re.MULTILINE))
    found: set[Triple] = set()
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if "Package" in fields:
            found.update(triples_of(fields, packages))
    return sorted(found)


def split(triples: list[Triple], num_held_out: int, seed: int) -> dict[str, list[Triple]]:
    """Hold triples out whose entities keep at least two others in training."""
    shuffled = random.Random(seed).sample(triples, len(triples))
    count: Counter[str] = Counter()
    for head, _, tail in shuffled:
        count.update((head, tail))
    held: list[Triple] = []
    train: list[Triple] = []
    for head, relation, tail in shuffled:
        if len(held) < num_held_out and count[head] > 2 and count[tail] > 2:
            held.append((head, relation, tail))
            count.subtract((head, tail))
        else:
            train.append((head, relation, tail))
    half = len(held) // 2
    return {"train": train, "valid": held[:half], "test": held[half:]}


def main() -> int:
    """Write train.tsv, valid.tsv and test.tsv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the triples")
    parser.add_argument("--held-out", type=int, default=20000, help="triples of valid and test together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        text = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"debian_graph.py: cannot read Debian's lists of packages: {error}", file=sys.stderr)
        return 1
    splits = split(read(text), args.held_out, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, triples in splits.items():
        lines = "".join("\t".join(triple) + "\n" for triple in triples)
        (args.output / f"{name}.tsv").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(triples)} triples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
