"""A script in the manner of DGL's own examples runs on two hosts as it runs on one."""

from __future__ import annotations

import json
import subprocess
import sys

from cluster_jobs import LAUNCHER_LOG, REPOSITORY, environment, launch

FOLDER = REPOSITORY / "examples" / "dgl_graphsage"


def test_graphsage_trains_on_two_hosts(two_hosts, warm_runners, tmp_path):
    make = [sys.executable, str(FOLDER / "make_graph.py"), "--output", str(tmp_path / "graph")]
    sizes = ["--num-parts", "2", "--num-nodes", "400"]
    subprocess.run([*make, *sizes], check=True, timeout=120, capture_output=True, env=environment())
    options = ["--num_trainers", "1", "--part_config", str(tmp_path / "graph" / "communities.json")]
    script = [FOLDER / "train.py", "--num-epochs", "6", "--output", tmp_path / "run"]
    job = launch(two_hosts, tmp_path, [*options, "--log_dir", str(tmp_path / "logs")], script)
    try:
        status = job.wait(200)
    finally:
        job.kill()
        job.wait()
        for process in [process for host in two_hosts for process in host.processes()]:
            process.kill()
    assert status == 0, (tmp_path / LAUNCHER_LOG).read_text()
    losses = json.loads((tmp_path / "run" / "curve.json").read_text())["losses"]
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0]
