"""Train the same GraphSAGE with DGL's sparse optimizer and with ours, and print both loss curves.

python examples/dgl_graphsage/compare.py --output demo/graphsage
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def trained(folder: Path, optimizer: str, ip_config: str) -> dict[str, Any]:
    """Train under the launcher with two trainers; return the curve."""
    output = folder / f"run-{optimizer}"
    shutil.rmtree(output, ignore_errors=True)  # a finished run would not be trained again
    launch = [sys.executable, "-m", "dglkge.cli.launch", "--ip-config", ip_config, "--num-trainers", "2"]
    launch += [
        "--part-config",
        str(folder / "communities.json"),
        "--log-dir",
        str(folder / f"logs-{optimizer}"),
    ]
    command = [*launch, str(HERE / "train.py"), "--optimizer", optimizer, "--output", str(output)]
    subprocess.run(command, check=True, timeout=600)
    curve: dict[str, Any] = json.loads((output / "curve.json").read_text(encoding="utf-8"))
    return curve


def main() -> None:
    """Make the graph, train twice, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo/graphsage"), help="folder for everything")
    parser.add_argument("--ip-config", default="ip_config.txt", help="the machine to train on")
    arguments = parser.parse_args()
    make = [sys.executable, str(HERE / "make_graph.py"), "--output", str(arguments.output)]
    subprocess.run(make, check=True, timeout=300, stdout=subprocess.DEVNULL)
    # Two jobs, one after the other: both get all cores, and the same seeds.
    sparse, dense = (trained(arguments.output, name, arguments.ip_config) for name in ("dglkge", "dgl"))
    print(f"\n{'epoch':>8}  {'dglkge.optim':>14}  {'dgl.distributed.optim':>22}")
    for epoch, (mine, other) in enumerate(zip(sparse["losses"], dense["losses"]), start=1):
        print(f"{epoch:>8}  {mine:>14.4f}  {other:>22.4f}")
    print(f"{'accuracy':>8}  {sparse['accuracy']:>14.4f}  {dense['accuracy']:>22.4f}")
    both = {"dglkge": sparse, "dgl": dense}
    (arguments.output / "curves.json").write_text(json.dumps(both, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
