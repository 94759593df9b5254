"""``dglkge serve``: an explorer of a trained model in the browser, and REST beside it."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import command, flag, flush_output, open_model, option, print_json, print_text
from dglkge.errors import InputError, import_extra
from dglkge.launch.stop_signals import StoppedBySignal, stop_signals_raised

DEFAULT_PORT = 8765
APPROXIMATE_FROM = 1_000_000


@command(
    *common.MODEL_AND_DATASET,
    common.RULES,
    option("--host", "address to listen on; others need --token", default="127.0.0.1"),
    option("--port", "0 takes a free one", least=0, most=65535, default=DEFAULT_PORT),
    option(
        "--token FILE",
        "file with a token that every request for data must have; - asks for it. The page asks for it, "
        "too, or takes it from its address: http://HOST:PORT/#token=TOKEN",
    ),
    option("--allow-host NAME", "answer under this host name too, e.g. a proxy's", is_repeated=True),
    flag("--faiss", "search similar entities approximately, in types of --faiss-from entities or more"),
    option("--faiss-from", "smallest type for --faiss", least=1, default=APPROXIMATE_FROM),
    flag("--mcp", "instead: answer an agent on stdin and stdout, by the Model Context Protocol"),
    common.THREADS,
)
def serve(args: argparse.Namespace) -> int:
    """Serve a page to search entities, their known and predicted triples and similar entities, and
    REST under the same address: /predict, /complete, /ask, /explain, /attributes, /unseen, /score, /similar,
    /entities, /relations, /triples, /model and /health, described by /openapi.json. It runs until
    Ctrl-C or SIGTERM.

    Examples
    --------
      dglkge serve runs/demo
      dglkge serve runs/demo --mcp                           tools for an agent, which starts this command
      dglkge serve runs/demo --port 0                        a free port; the address is printed
      dglkge serve runs/demo --host 0.0.0.0 --token token.txt    reachable from other machines, with a token
      curl 'http://127.0.0.1:8765/entities?prefix=dou'
      curl http://127.0.0.1:8765/predict --json '{"queries": [{"head": "Bob", "relation": "likes"}], "k": 3}'
    """
    try:
        with stop_signals_raised():
            return _serve(args)
    except StoppedBySignal as error:  # before requests were answered
        return 128 + error.number


def _serve(args: argparse.Namespace) -> int:
    # Packages of extras first, before the run is read.
    extras = {"mcp": "mcp"} if args.mcp else {"fastapi": "serve", "uvicorn": "serve"}
    for module, extra in extras.items():
        import_extra("dglkge serve --mcp" if args.mcp else "dglkge serve", module, extra)
    import torch

    from dglkge.serving.explorer import Explorer

    torch.set_num_threads(args.threads)
    if args.mcp:  # answers an agent until stdin ends
        from dglkge.serving.agent_tools import build_server

        build_server(Explorer(open_model(args))).run("stdio")
        return 0
    from dglkge.serving.app import ModelCalls, create_app
    from dglkge.serving.server import HostNames, is_loopback, listening_socket, serve_until_signal, url_of

    if args.faiss:
        import_extra("--faiss", "faiss", "faiss", "faiss-cpu")
    token = _token(args.token)
    with listening_socket(args.host, args.port) as bound:
        is_local = is_loopback(bound)
        if token is None and not is_local:
            raise InputError(
                f"--host {args.host} can be reached from other machines, so --token FILE is needed; allowed "
                "without one: 127.0.0.1, ::1, localhost"
            )
        approximate_from = args.faiss_from if args.faiss else None
        explorer = Explorer(open_model(args), approximate_from, args.threads, show_progress=True)
        calls = ModelCalls(args.threads)
        app = create_app(explorer, calls, HostNames(args.host, is_local, args.allow_host), token)
        url = url_of(bound, args.host)

        def announce() -> None:
            facts = explorer.describe()
            if args.json:
                print_json({"url": url, "port": bound.getsockname()[1], "pid": os.getpid(), **facts})
            else:
                _print_facts(facts, url, token is not None)
            flush_output()

        try:
            number = serve_until_signal(app, bound, announce)
        finally:
            is_running = calls.close()
    if not args.json:
        print("dglkge serve: stopped", file=sys.stderr)
    status = 128 + number if number else 1
    if is_running:
        # Nobody waits for its result any more, and the interpreter would join its thread.
        flush_output()
        sys.stderr.flush()
        os._exit(status)
    return status


def _token(path: str | None) -> str | None:
    """Return the token of ``--token``."""
    from dglkge.serving.server import read_token, valid_token

    if path is None:
        return None
    if path != "-":
        return read_token(Path(path))
    try:
        return valid_token(getpass.getpass("token: "), "that was entered")
    except EOFError:
        raise InputError("--token -: no token was entered") from None


def _print_facts(facts: dict[str, Any], url: str, has_token: bool) -> None:
    entities = sum(facts["entities"].values())
    print_text(
        f"{facts['path']}: {facts['score_function']}, dimension {facts['dimension']}, {entities} entities, "
        f"{facts['relations']} relations"
    )
    if facts["no_triples"] is not None:
        print_text(f"known triples are not shown: {facts['no_triples']}")
    if facts["rules"]:
        print_text("scores are those of the model and of rules")
    elif not facts["probabilities"]:
        print_text("scores instead of probabilities: dglkge calibrate fits some")
    for type_, how in facts["similarity"].items():
        if how["method"] == "faiss":
            print_text(
                f"similar entities of type {type_}: faiss, recall@10 {how['recall_at_10']:.3f}, "
                f"{how['lists_searched']} of {how['lists']} lists searched"
            )
    print_text(f"{url}{'#token=TOKEN' if has_token else ''}   Ctrl-C ends it")
