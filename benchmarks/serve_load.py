"""Load on ``dglkge serve``: requests per second and response times, by route; memory of the server.

    python benchmarks/serve_load.py runs/fb15k237
    python benchmarks/serve_load.py --synthetic 1000000 --dim 200 --faiss --requests 400

The server runs as a process of its own, the client is a small one on asyncio: a number of connections that
each send the next request as soon as the last one is answered. Both share the machine's cores. Every request
asks for another entity. ``--synthetic`` writes a model of clustered random rows in DGL-KE's format first. The
figures go to stdout as a table in Markdown and, with --output, to a JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np

NUM_CLUSTERS = 1000
SPREAD = 0.5
"""Standard deviation of a synthetic row around its cluster's centre, whose numbers have deviation 1."""


class Request(NamedTuple):
    """A request without its headers."""

    method: str
    target: str
    body: bytes = b""


class Figures(NamedTuple):
    """Measurements of one route; times in milliseconds."""

    route: str
    connections: int
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float


def write_synthetic(folder: Path, num_entities: int, dim: int, num_relations: int = 20) -> None:
    """Write a ComplEx model with rows in clusters, as DGL-KE's files."""
    draws = np.random.default_rng(0)
    centres = draws.standard_normal((NUM_CLUSTERS, dim), dtype=np.float32)
    path = folder / "synthetic_ComplEx_entity.npy"
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (num_entities, dim))
    for start in range(0, num_entities, 100_000):
        part = rows[start : start + 100_000]
        part[:] = centres[draws.integers(NUM_CLUSTERS, size=len(part))]
        part += SPREAD * draws.standard_normal(part.shape, dtype=np.float32)
    rows.flush()
    relations = draws.standard_normal((num_relations, dim), dtype=np.float32)
    np.save(folder / "synthetic_ComplEx_relation.npy", relations)


@contextlib.contextmanager
def serving(run: str, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Start the server; yield what it prints at its start, and the seconds until then."""
    command = [sys.executable, "-m", "dglkge", "serve", run, "--port", "0", "--json", *options]
    begin = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines: list[str] = []
        while server.stdout is not None and (not lines or lines[-1] != "}\n"):
            lines.append(server.stdout.readline())
            if not lines[-1]:
                raise SystemExit("the server has not started")
        facts = json.loads("".join(lines))
        yield {**facts, "start_seconds": time.perf_counter() - begin}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        if server.stdout is not None:
            server.stdout.close()


async def load(url: str, requests: Sequence[Request], connections: int) -> list[float]:
    """Send all requests over some connections; return the seconds of each."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port
    pending = iter(requests)
    seconds: list[float] = []

    async def send_all() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for request in pending:
            head = f"{request.method} {request.target} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            if request.body:
                head += f"Content-Type: application/json\r\nContent-Length: {len(request.body)}\r\n"
            begin = time.perf_counter()
            writer.write(head.encode() + b"\r\n" + request.body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            headers = dict(line.split(b": ", 1) for line in answer.split(b"\r\n")[1:] if b": " in line)
            content = await reader.readexactly(int(headers[b"content-length"]))
            seconds.append(time.perf_counter() - begin)
            if b" 200 " not in answer.split(b"\r\n")[0]:
                raise RuntimeError(f"{request.target}: {content[:200]!r}")
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(send_all() for _ in range(connections)))
    return seconds


def measure(url: str, route: str, requests: Sequence[Request], connections: int) -> Figures:
    """Measure one route after a warm-up with a tenth of the requests."""
    asyncio.run(load(url, requests[: max(1, len(requests) // 10)], connections))
    begin = time.perf_counter()
    seconds = asyncio.run(load(url, requests, connections))
    whole = time.perf_counter() - begin
    p50, p99 = (float(value) * 1000 for value in np.percentile(seconds, [50, 99]))
    return Figures(route, connections, len(requests), len(requests) / whole, p50, p99)


def ask(url: str) -> Any:
    """Return the answer to one request."""
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def draw_requests(url: str, count: int) -> dict[str, list[Request]]:
    """Draw the requests of each route: other entities, relations and beginnings of names each time."""
    draw = random.Random(0)
    names = [entity["name"] for entity in ask(f"{url}entities?k=1000")["entities"]]
    labels = [relation["relation"] for relation in ask(f"{url}relations")["relations"]]

    def query() -> dict[str, str]:
        return {"head": draw.choice(names), "relation": draw.choice(labels)}

    def prediction(number: int) -> Request:
        body = json.dumps({"queries": [query() for _ in range(number)], "k": 10})
        return Request("POST", "/predict", body.encode())

    requests = {
        "/entities?prefix= (k=12)": [
            Request("GET", f"/entities?k=12&anywhere=true&prefix={quote(draw.choice(names)[:4])}")
            for _ in range(count)
        ],
        "/similar (k=10)": [
            Request("GET", f"/similar?k=10&entity={quote(draw.choice(names), safe='')}") for _ in range(count)
        ],
        "/predict (1 query, k=10)": [prediction(1) for _ in range(count)],
        "/predict (100 queries, k=10)": [prediction(100) for _ in range(max(1, count // 20))],
    }
    if ask(f"{url}model")["no_triples"] is None:
        requests["/triples (20 of each relation)"] = [
            Request("GET", f"/triples?entity={quote(draw.choice(names), safe='')}") for _ in range(count)
        ]
    return requests


def memory_mb(pid: int) -> dict[str, float]:
    """Return the resident memory of a process: its own, and pages of files that it has mapped."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {name: int(values[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="a run; without one, --synthetic")
    parser.add_argument("--synthetic", type=int, metavar="N", help="entities of a model of random rows")
    parser.add_argument("--dim", type=int, default=200, help="its dimension (default: %(default)s)")
    parser.add_argument("--faiss", action="store_true", help="start the server with --faiss")
    parser.add_argument("--faiss-from", default="1000000", help="as for the server (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=2000, help="of each route (default: %(default)s)")
    parser.add_argument("--connections", default="1,8", help="numbers to measure (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if (args.run is None) == (args.synthetic is None):
        parser.error("give either a run or --synthetic N")
    return args


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        if args.synthetic:
            write_synthetic(Path(folder), args.synthetic, args.dim)
        options = ["--faiss", "--faiss-from", args.faiss_from] if args.faiss else []
        with serving(args.run or folder, options) as facts:
            at_start = memory_mb(facts["pid"])
            figures = [
                measure(facts["url"], route, requests, int(connections))
                for route, requests in draw_requests(facts["url"], args.requests).items()
                for connections in args.connections.split(",")
            ]
            at_end = memory_mb(facts["pid"])
    cores = len(os.sched_getaffinity(0))
    sizes = ", ".join(f"{count} {name}" for name, count in facts["entities"].items())
    print(f"{facts['score_function']}, dimension {facts['dimension']}, {sizes}, {cores} cores")
    print(f"similarity: {json.dumps(facts['similarity'])}; start: {facts['start_seconds']:.1f} s")
    for name, kind in (("RssAnon", "server's own memory"), ("RssFile", "mapped pages")):
        print(f"{kind}: {at_start[name]:.0f} MB at the start, {at_end[name]:.0f} MB at the end")
    print("\n| route | connections | requests/s | p50, ms | p99, ms |\n|---|--:|--:|--:|--:|")
    for route in figures:
        print(
            f"| {route.route} | {route.connections} | {route.requests_per_second:.0f} | {route.p50_ms:.1f} | "
            f"{route.p99_ms:.1f} |"
        )
    if args.output:
        content = {
            "facts": facts,
            "memory_mb": {"start": at_start, "end": at_end},
            "routes": [route._asdict() for route in figures],
        }
        Path(args.output).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
