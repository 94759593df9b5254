"""A host on which everything is killed at once, node programs too, which leaves its shared memory."""

from __future__ import annotations

import signal
from pathlib import Path

from cluster_faults import training_command, wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, launch, launcher_process
from tests.toy_kg import toy_dataset


def segments(host: ClusterHost) -> list[str]:
    """Return what lies in a host's shared memory."""
    return host.run(["ls", "/dev/shm"], capture_output=True, text=True).stdout.split()


def test_the_job_restarts_on_a_host_that_lost_everything(
    two_hosts: list[ClusterHost], tmp_path: Path
) -> None:
    log, stats = tmp_path / LAUNCHER_LOG, tmp_path / "run" / "stats.jsonl"
    options = ["--num_trainers", "1", "--max_restarts", "3", "--log_dir", str(tmp_path / "logs")]
    job = launch(two_hosts, tmp_path, options, training_command(toy_dataset(2), tmp_path / "run"))
    try:
        wait_until_trained(stats, 3, job, log)
        before = len(stats.read_text().splitlines())
        victims = two_hosts[1].processes()
        for process in victims:
            process.suspend()  # none sees another's end
        for process in victims:
            process.kill()
        wait_until_trained(stats, before + 3, job, log)
        launcher_process(two_hosts[0]).send_signal(signal.SIGTERM)
        status = job.wait(60)
    finally:
        for process in [process for host in two_hosts for process in host.processes()]:
            process.kill()
        job.kill()
        job.wait()
    said = log.read_text(encoding="utf-8")
    assert status == 143, said
    assert "stopped by SIGTERM; all trainers have committed and left" in said
    assert "restart 1 of 3" in said and "resumed: " in said
    assert [segments(host) for host in two_hosts] == [[], []]
