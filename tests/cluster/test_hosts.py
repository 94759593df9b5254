"""The hosts that the other tests of this folder run on are what they seem."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from cluster_hosts import SSH_PORTS, cluster_hosts

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]


def test_hosts_share_nothing(two_hosts):
    first, second = two_hosts
    first.run(["sh", "-c", "echo mine > note; echo mine > /dev/shm/segment"], check=True)
    assert (first.folder / "note").read_text() == "mine\n"
    assert list(second.folder.iterdir()) == []
    assert not Path("/dev/shm/segment").exists()
    shell = "pwd; ls; ls /dev/shm; ls -d /proc/[0-9]* | wc -l"
    where, number = second.run(["sh", "-c", shell], capture_output=True, text=True).stdout.split()
    assert where == str(second.work) and int(number) < 10
    first.run(["rm", "note", "/dev/shm/segment"], check=True)


def test_nobody_else_is_reached_or_let_in(two_hosts, tmp_path):
    first, second = two_hosts
    script = "tail -n +2 /proc/net/route; exec 3<>/dev/tcp/192.0.2.1/80"  # an address for documentation
    done = first.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "Network is unreachable" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["eth0"]
    # Some machines' networks take every connection: only sshd's own words would count.
    with contextlib.suppress(OSError):
        with socket.create_connection((first.address, SSH_PORTS[0]), timeout=2) as probe:
            assert not probe.recv(64).startswith(b"SSH-2.0-")
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    done = first.run([*SSH, "-i", key, second.address, "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 255 and "Permission denied" in done.stderr


@pytest.mark.usefixtures("hosts_can_be_made")
def test_nothing_outlives_the_block_even_when_it_fails():
    interfaces = {name for _, name in socket.if_nameindex()}
    with pytest.raises(ZeroDivisionError):
        with cluster_hosts(2) as hosts:
            job = hosts[1].popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
            while len(hosts[1].processes()) < 3:
                assert job.poll() is None
            started = [*hosts[1].processes(), psutil.Process(job.pid)]
            raise ZeroDivisionError
    job.wait(20)
    assert not [process for process in started if process.is_running()]
    assert not hosts[0].folder.parent.exists()
    assert {name for _, name in socket.if_nameindex()} == interfaces
