"""What one slow machine costs the other: training where machines wait for one another, and where they do not.

    python benchmarks/slow_machine.py --input PATH/TO/FB15k-237
    python benchmarks/slow_machine.py --input PATH/TO/FB15k-237 --slow machine --rounds 3

Two hosts are namespaces of this machine (``cluster_hosts.py``; needs root), each with a server and a
trainer of one thread. The second is slowed to half its speed: it is stopped and continued every 10 ms by
signals, as the CPU quota of a control group does. Printed are the seconds that the first machine takes for
its own triples in the last epoch, up to the last of them, and the MRR of the test split. The hosts share this
machine's cores, so ratios of one run count, not seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
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

HALF_PERIOD_SECONDS = 0.01
LIMIT_SECONDS = 600
Measured = tuple[float, float]
"""Seconds of the first machine in the last epoch, and the MRR."""

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


def run(dataset: Path, mode: str, slow: str, arguments: argparse.Namespace) -> Measured:
    """Train once; returns what is measured."""
    settings = [
        *(f"dataset={dataset}", "model.score_function=complex", f"model.dimension={arguments.dimension}"),
        *("loss.name=softmax", "optimizer.name=sparse_adagrad", "optimizer.lr=0.1"),
        *(f"negatives.num_uniform={arguments.negatives}", f"training.batch_size={arguments.batch_size}"),
        *(f"training.num_epochs={arguments.epochs}", f"evaluation.max_triples={arguments.max_triples}"),
        *("checkpoint.every_epochs=0", "training.progress=never", *MODES[mode]),
    ]
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
    add("--modes", nargs="+", choices=MODES, default=["wait", "do not wait"], help="what to compare")
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
        print(f"| {mode} | {slow} | {seconds:.1f} | {seconds / base:.2f} | {mrr:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
