"""What one slow machine costs the other: training where machines wait for one another, and where they do not.

    python benchmarks/slow_machine.py --input PATH/TO/FB15k-237
    python benchmarks/slow_machine.py --input PATH/TO/FB15k-237 --slow machine --rounds 3
    python benchmarks/slow_machine.py --input PATH/TO/FB15k-237 --slow machine --modes wait "do not wait" pbg

Two hosts are namespaces of this machine (``cluster_hosts.py``; needs root), each with a server and a
trainer of one thread. The second is slowed to half its speed: it is stopped and continued every 10 ms by
signals, as the CPU quota of a control group does. Printed are the seconds that the first machine takes for
its own triples in the last epoch, up to the last of them, and the MRR of the test split. The hosts share this
machine's cores, so ratios of one run count, not seconds.

``pbg`` is PyTorch-BigGraph on both hosts, with four partitions, a worker and a partition server on each. Its
machines take buckets as they come free, so the seconds are those that the first would need for half of the
triples at its speed of the last epoch; nothing is ranked.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from cluster_hosts import ClusterHost, cluster_hosts, what_is_missing
from cluster_jobs import LAUNCHER_LOG, REPOSITORY, environment, launch
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from measuring import pbg_peer
from measuring.peer_environment import peer_python

HALF_PERIOD_SECONDS = 0.01
LIMIT_SECONDS = 600
Measured = tuple[float, float]
"""Seconds of the first machine in the last epoch, and the MRR."""

PBG, PBG_PARTS, PBG_PORT = "pbg", 4, 30200
MODES = {
    "wait": ["training.synchronous=true"],
    "wait, kvstore": ["training.synchronous=true", "training.lookup=kvstore"],
    "do not wait": ["training.synchronous=false", "training.max_lag=1000000"],
}


def train(settings: Sequence[str], result: Path) -> None:
    """Train on one trainer of a job; write its seconds in each epoch."""
    import dglkge

    config, seconds = dglkge.load_config(None, list(settings)), []
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        for _epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
            start = time.monotonic()
            for batch in trainer.batches():
                # The last step reports, which waits for the others: what counts ends before it.
                last = time.monotonic()
                trainer.step(batch)
            seconds.append(last - start)
        mrr = trainer.evaluate("test").both.mrr
        rank = cluster.world.rank
    (result / f"trainer-{rank}.json").write_text(json.dumps({"seconds": seconds, "mrr": mrr}))


@contextlib.contextmanager
def slowed(host: ClusterHost, scope: str) -> Iterator[None]:
    """Stop and continue a host's trainer, or its trainer and server, half of the time."""
    over = threading.Event()

    def work() -> None:
        processes: list[psutil.Process] = []
        looked = 0.0
        while not over.wait(HALF_PERIOD_SECONDS):
            if time.monotonic() - looked > 2:
                processes, looked = (
                    [process for process in host.processes() if is_slowed(process, scope)],
                    time.monotonic(),
                )
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                if number == signal.SIGSTOP:
                    time.sleep(HALF_PERIOD_SECONDS)

    thread = threading.Thread(target=work, daemon=True)
    if scope != "nothing":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if scope != "nothing":
            thread.join()


def is_slowed(process: psutil.Process, scope: str) -> bool:
    """Whether a process of a host is one of those that are slowed."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        role = process.environ().get("DGL_ROLE", "")
        return role == "client" or (scope == "machine" and role == "server")
    return False


def configured(dataset: Path, mode: str, arguments: argparse.Namespace) -> list[str]:
    """Return the settings of a training."""
    return [
        *(f"dataset={dataset}", "model.score_function=complex", f"model.dimension={arguments.dimension}"),
        *("loss.name=softmax", "optimizer.name=sparse_adagrad", "optimizer.lr=0.1"),
        *(f"negatives.num_uniform={arguments.negatives}", f"training.batch_size={arguments.batch_size}"),
        *(f"training.num_epochs={arguments.epochs}", f"evaluation.max_triples={arguments.max_triples}"),
        *("checkpoint.every_epochs=0", "training.progress=never", *MODES.get(mode, [])),
    ]


def run_pbg(dataset: Path, slow: str, arguments: argparse.Namespace) -> Measured:
    """Train once with PyTorch-BigGraph; returns seconds, and nan for the MRR."""
    config = load_config(None, configured(dataset, PBG, arguments))
    with cluster_hosts(2) as hosts, tempfile.TemporaryDirectory(prefix="dglkge-job-") as name:
        folder = Path(name)
        method = f"tcp://{hosts[0].address}:{PBG_PORT}"
        more = ["num_machines=2", f"distributed_init_method={json.dumps(method)}"]
        described = pbg_peer.describe(config, folder, 1, PBG_PARTS, more)
        pbg_peer.export(Dataset.open(dataset), folder, PBG_PARTS)
        (folder / "config.py").write_text(f"def get_torchbiggraph_config():\n    return {described!r}\n")
        python = arguments.pbg_python
        command = [python, python.parent / "torchbiggraph_train", folder / "config.py", "--rank"]
        # The role of ours whose processes are slowed; not of the shell, the host's own process waits for it.
        command = ["sh", "-c", 'DGL_ROLE=client "$@"; exit $?', "sh", *command]
        # Its messages are pickles, which torch 2.6 refuses.
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        variables["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        variables = {**environment(), **pbg_peer.ALLOCATOR, **variables}
        with contextlib.ExitStack() as stack:
            jobs = []
            for rank, host in enumerate(hosts):
                log = stack.enter_context(open(folder / f"{rank}.log", "w", encoding="utf-8"))
                options = {"env": variables, "stdout": log, "stderr": subprocess.STDOUT}
                jobs.append(host.popen([*command, str(rank)], **options))
            deadline = time.monotonic() + LIMIT_SECONDS
            with slowed(hosts[1], slow):
                # One that fails leaves the other waiting.
                while None in (statuses := [job.poll() for job in jobs]) and not any(statuses):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.1)
        text = (folder / "0.log").read_text(encoding="utf-8")
        if any(job.returncode for job in jobs):
            raise RuntimeError(
                f"PyTorch-BigGraph ended with {[job.returncode for job in jobs]}:\n{text[-4000:]}"
            )
    return pbg_peer.seconds_for_share(text, len(Dataset.open(dataset).split("train")) // 2), math.nan


def run(dataset: Path, mode: str, slow: str, arguments: argparse.Namespace) -> Measured:
    """Train once; returns what is measured."""
    if mode == PBG:
        return run_pbg(dataset, slow, arguments)
    settings = configured(dataset, mode, arguments)
    with cluster_hosts(2) as hosts, tempfile.TemporaryDirectory(prefix="dglkge-job-") as name:
        folder = Path(name)
        command: list[str | Path] = [
            Path(__file__),
            "--worker",
            folder,
            *settings,
            f"output={folder / 'run'}",
        ]
        options = ["--num_trainers", "1", "--log_dir", str(folder / "logs")]
        job = launch(hosts, folder, options, command)
        with slowed(hosts[1], slow), contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(LIMIT_SECONDS)
        if job.returncode != 0:
            output = (folder / LAUNCHER_LOG).read_text(encoding="utf-8")
            raise RuntimeError(f"the job ended with {job.returncode}:\n{output}")
        figures = json.loads((folder / "trainer-0.json").read_text())
    return float(figures["seconds"][-1]), float(figures["mrr"])


def main() -> int:
    """Run every mode with and without the slow machine, print the table."""
    if "--worker" in sys.argv:
        place = sys.argv.index("--worker")
        train(sys.argv[place + 2 :], Path(sys.argv[place + 1]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of the triples, such as FB15k-237")
    add("--slow", choices=("trainer", "machine"), default="trainer", help="what is slowed on the second host")
    add("--modes", nargs="+", choices=[*MODES, PBG], default=["wait", "do not wait"], help="what to compare")
    add(
        "--pbg-python",
        type=Path,
        metavar="PATH",
        help="interpreter that has torchbiggraph (default: installed)",
    )
    add("--dimension", type=int, default=100)
    add("--negatives", type=int, default=200)
    add("--batch-size", type=int, default=2000, help="triples in a global batch")
    add("--epochs", type=int, default=3)
    add("--max-triples", type=int, default=2000, help="triples of the test split that are ranked")
    add("--rounds", type=int, default=1, help="runs of which the table has the medians")
    arguments = parser.parse_args()
    missing = what_is_missing()
    if missing is not None:
        sys.exit(f"no hosts can be made here: {missing}")
    keys = list(itertools.product(arguments.modes, ("nothing", arguments.slow)))
    runs: dict[tuple[str, str], list[Measured]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory(prefix="dglkge-bench-") as name:
        if PBG in arguments.modes:
            arguments.pbg_python = peer_python(PBG, arguments.pbg_python, Path(name) / PBG, [])
        command: list[str | Path] = [
            sys.executable,
            REPOSITORY / "partition_tools" / "partition.py",
            "--input",
        ]
        command += [arguments.input, "--output", Path(name) / "graph", "--num-parts", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
        for _, key in itertools.product(range(arguments.rounds), keys):
            mode, slow = key
            runs[key].append(run(Path(name) / "graph", mode, slow, arguments))
            print(*key, *runs[key][-1], file=sys.stderr, flush=True)
    print("| machines | slowed | seconds of the other | to undisturbed | MRR |\n|---|---|--:|--:|--:|")
    for (mode, slow), repeats in runs.items():
        seconds, mrr = (statistics.median(values) for values in zip(*repeats))
        base = statistics.median(values[0] for values in runs[mode, "nothing"])
        shown_mrr = "" if math.isnan(mrr) else f"{mrr:.4f}"
        print(f"| {mode} | {slow} | {seconds:.1f} | {seconds / base:.2f} | {shown_mrr} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
