"""Debian's packages as a knowledge graph: a graph of a real size that nobody has tuned settings for.

    python benchmarks/debian_graph.py --output data/debian-triples
    curl -O http://deb.debian.org/debian/dists/bookworm/main/source/Sources.xz
    python benchmarks/debian_graph.py --output data/debian-sources --sources Sources.xz

Reads ``apt-cache dumpavail`` (the lists of ``apt-get update``). Packages, sections, maintainers, sources and
tags are entities; fields of a package are relations. With ``--sources``, the list of the source packages adds
what each needs to be built, what is built from it, and who uploads it. Triples whose entities stay in others
are held out.
"""

from __future__ import annotations

import argparse
import lzma
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


TO_BUILD = ("Build-Depends", "Build-Depends-Indep", "Build-Depends-Arch", "Build-Conflicts")


def triples_of_source(fields: dict[str, str]) -> Iterator[Triple]:
    """Yield the triples of one source package."""
    source = "source:" + fields["Package"]
    for field in TO_BUILD:
        for part in re.split(r"[,|]", fields.get(field, "")):
            other = re.sub(r"[\s(:\[<].*", "", part.strip())
            if other:
                yield source, field.lower(), other
    for binary in fields.get("Binary", "").split(","):
        if binary.strip():
            yield source, "builds", binary.strip()
    for word in fields.get("Architecture", "").split():
        yield source, "built-for", "architecture:" + word
    for part in re.split(r">\s*,", fields.get("Uploaders", "")):
        if part.split("<")[0].strip():
            yield source, "uploader", "maintainer:" + part.split("<")[0].strip()
    for field, relation in (("Section", "source-section"), ("Maintainer", "source-maintainer")):
        if field in fields:
            yield source, relation, f"{field.lower()}:" + fields[field].split("<")[0].strip()
    for field in ("Standards-Version", "Format", "Testsuite"):
        if field in fields:
            yield source, field.lower(), f"{field.lower()}:{fields[field].strip()}"


def read(text: str, sources: str = "") -> list[Triple]:
    """Return the distinct triples of a list of packages, and one of source packages, sorted."""
    packages = set(re.findall(r"^Package: (\S+)", text, re.MULTILINE))
    triples: set[Triple] = set()
    for fields in paragraphs(text):
        triples.update(triples_of(fields, packages))
    for fields in paragraphs(sources):
        triples.update(triples_of_source(fields))
    return sorted(triples)


def paragraphs(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package of a list, without lines that go on with a field."""
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", paragraph, re.MULTILINE))
        if "Package" in fields:
            yield fields


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
    parser.add_argument("--sources", type=Path, help="list of source packages of a mirror, Sources.xz")
    parser.add_argument("--held-out", type=int, default=20000, help="triples of valid and test together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        text = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"debian_graph.py: cannot read Debian's lists of packages: {error}", file=sys.stderr)
        return 1
    sources = ""
    if args.sources is not None:
        try:
            sources = lzma.decompress(args.sources.read_bytes()).decode()
        except (OSError, lzma.LZMAError) as error:
            print(f"debian_graph.py: cannot read {args.sources}: {error}", file=sys.stderr)
            return 1
    splits = split(read(text, sources), args.held_out, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, triples in splits.items():
        lines = "".join("\t".join(triple) + "\n" for triple in triples)
        (args.output / f"{name}.tsv").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(triples)} triples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
