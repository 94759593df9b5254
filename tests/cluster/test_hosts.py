"""The hosts that the other tests of this folder run on are what they seem."""

from __future__ import annotations

import socket
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from cluster_hosts import SSH_PORTS, cluster_hosts

SSHD_WORDS = b"SSH-2.0-"
SSH = ["ssh", "-o", "BatchMode=yes"]


def greeting(address: tuple[str, int]) -> bytes:
    """What answers first there, asked from outside of the hosts.

    Some machines' networks take every connection, whoever should listen there: only sshd's own words count.
    """
    with socket.socket() as probe:
        probe.settimeout(2)
        try:
            probe.connect(address)
            return probe.recv(64)
        except OSError:
            return b""


def test_a_stranger_is_not_let_in(two_hosts, tmp_path):
    first, second = two_hosts
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    line = [*SSH, "-i", key, "-o", "IdentitiesOnly=yes", second.address, "true"]
    done = first.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 255 and "Permission denied" in done.stderr


def test_hosts_share_neither_working_folder_nor_shared_memory_nor_processes(two_hosts):
    first, second = two_hosts
    first.run(["sh", "-c", "echo mine > note; echo mine > /dev/shm/segment"], check=True)
    assert (first.folder / "note").read_text() == "mine\n"
    assert list(second.folder.iterdir()) == []
    assert not Path("/dev/shm/segment").exists()
    done = second.run(
        ["sh", "-c", "pwd; ls; ls /dev/shm; ls -d /proc/[0-9]* | wc -l"], capture_output=True, text=True
    )
    where, number = done.stdout.split()
    assert where == str(second.work) and int(number) < 10
    first.run(["rm", "note", "/dev/shm/segment"], check=True)


def test_hosts_reach_nothing_else(two_hosts):
    first, _ = two_hosts
    script = "tail -n +2 /proc/net/route; exec 3<>/dev/tcp/192.0.2.1/80"  # an address for documentation
    done = first.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "Network is unreachable" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["eth0"]
    assert not greeting((first.address, SSH_PORTS[0])).startswith(SSHD_WORDS)
    with socket.create_server(("127.0.0.1", 0)) as server:  # who answers so is heard
        answering = threading.Thread(target=lambda: server.accept()[0].sendall(SSHD_WORDS), daemon=True)
        answering.start()
        assert greeting(server.getsockname()) == SSHD_WORDS
        answering.join()


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
