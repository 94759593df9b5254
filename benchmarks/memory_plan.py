"""Planned against measured memory: runs a configuration and compares its peak with the plan.

    python benchmarks/memory_plan.py --dataset data/fb15k237 --num_trainers 2
    python benchmarks/memory_plan.py --random-entities 500000 --set model.dimension=200

Memory is the sum of the proportional set sizes of its processes, which counts shared pages once, but
for mapped files: these are those of the process that maps most, because other programs of the machine that
use the same libraries would make them seem smaller. ``/dev/shm`` is what its segments take. Both are sampled
while the job runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from dglkge.config import load_config
from dglkge.data.dataset_files import read_dataset_size
from dglkge.planning.memory import describe_hosts, plan_memory

ROOT = Path(__file__).resolve().parents[1]
SHARED_MEMORY = Path("/dev/shm")
SAMPLE_SECONDS = 0.1


def random_dataset(folder: Path, num_entities: int, num_triples: int) -> Path:
    """Partition a random graph with skewed degrees."""
    random = np.random.default_rng(0)
    source = folder / "source"
    source.mkdir()
    for name, count in (("train", num_triples), ("valid", 1000), ("test", 1000)):
        ends = (num_entities * random.random((2, count)) ** 2).astype(np.int64)
        relations = random.integers(50, size=count)
        frame = pd.DataFrame({"head": ends[0], "relation": relations, "tail": ends[1]})
        if name == "train":  # every entity occurs
            frame.loc[: num_entities - 1, "head"] = np.arange(num_entities)
        frame.to_csv(source / f"{name}.tsv", sep="\t", header=False, index=False)
    command = [sys.executable, str(ROOT / "partition_tools" / "partition.py"), "--input", str(source)]
    subprocess.run([*command, "--output", str(folder / "dataset"), "--num-parts", "1"], check=True)
    return folder / "dataset"


def memory_of(process: psutil.Process) -> dict[str, Any]:
    """Return the proportional set size of a process by kind, in bytes."""
    memory: dict[str, Any] = {}
    with contextlib.suppress(OSError, psutil.Error):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in ("Pss_Anon", "Pss_Shmem"):
                # The kernel's unit is kB = 1024 bytes.
                memory[name] = int(value.split()[0]) * 1024
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssFile:"):
                memory["RssFile"] = int(line.split()[1]) * 1024
        environment = process.environ()
        memory["role"] = environment.get("DGL_ROLE", "launcher")
    return memory


def segment_bytes() -> int:
    """Return the bytes of all segments in /dev/shm."""
    total = 0
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            # Blocks of 512 bytes and not the size: pages of a segment are allocated on first touch.
            total += path.stat().st_blocks * 512
    return total


def watch(job: subprocess.Popen[bytes]) -> tuple[int, int, list[dict[str, Any]]]:
    """Return the peaks of memory and of /dev/shm, and the processes at the peak of memory."""
    # Segments of other programs count before the job too, and are subtracted.
    before, most, most_shared = segment_bytes(), 0, 0
    at_peak: list[dict[str, Any]] = []
    root = psutil.Process(job.pid)
    while job.poll() is None:
        with contextlib.suppress(psutil.Error):
            processes = [memory_of(process) for process in [root, *root.children(recursive=True)]]
            total = sum(
                process_memory.get("Pss_Anon", 0) + process_memory.get("Pss_Shmem", 0)
                for process_memory in processes
            )
            total += max(process_memory.get("RssFile", 0) for process_memory in processes)
            if total > most:
                most, at_peak = total, processes
        most_shared = max(most_shared, segment_bytes() - before)
        time.sleep(SAMPLE_SECONDS)
    return most, most_shared, at_peak


def main() -> int:
    """Run one configuration and print both figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", type=Path, help="dataset folder; without it a random graph is made")
    parser.add_argument("--random-entities", type=int, default=500_000)
    parser.add_argument("--random-triples", type=int, default=1_000_000)
    parser.add_argument("--config", help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--num_trainers", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset = args.dataset or random_dataset(folder, args.random_entities, args.random_triples)
        settings = [*args.set, f"dataset={dataset}", f"output={folder / 'run'}"]
        config = load_config(args.config, settings)
        (folder / "ip_config.txt").write_text("127.0.0.1\n", encoding="utf-8")
        command = [sys.executable, "-m", "dglkge.cli.launch", "--ip_config", str(folder / "ip_config.txt")]
        command += ["--num_trainers", str(args.num_trainers), "--log_dir", str(folder / "logs")]
        command += [str(ROOT / "examples" / "train.py")]
        command += ["--config", args.config] if args.config else []
        for setting in settings:
            command += ["--set", setting]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        job = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
        measured, measured_shared, at_peak = watch(job)
        (planned,) = plan_memory(config, read_dataset_size(dataset), args.num_trainers, 1)
    figures = {
        "dataset": str(args.dataset or f"random, {args.random_entities} entities"),
        "num_trainers": args.num_trainers,
        "planned_bytes": planned.memory_bytes,
        "measured_bytes": measured,
        "planned_over_measured": round(planned.memory_bytes / measured, 3),
        "planned_shared_bytes": planned.shared_memory_bytes,
        "measured_shared_bytes": measured_shared,
        "status": job.returncode,
    }
    print(describe_hosts([planned]))
    for process in at_peak:
        print({key: round(value / 2**20) if key != "role" else value for key, value in process.items()})
    print(json.dumps(figures))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return job.returncode


if __name__ == "__main__":
    sys.exit(main())
