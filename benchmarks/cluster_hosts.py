"""Hosts of a cluster on one machine: Linux namespaces joined by a bridge, each with its own sshd.

A host has a network (``eth0`` and loopback), process ids, a host name, a ``/dev/shm`` and a working folder
of its own; the rest of the file system is the machine's. The bridge lies in a namespace too, so the machine's
own network does not change, nothing outside is reached, and all of it ends with the process that made it.

Needs Linux, root, iproute2, util-linux and openssh-server (:func:`what_is_missing`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

NETWORK = "10.77.0"
SSH_PORTS = (22, 2222)
"""Each host's sshd listens on both, so that ``--ssh_port`` can be tried."""

SSHD = "/usr/sbin/sshd"
SSHD_NAMES = ("sshd", "sshd-session", "sshd-auth")
START_SECONDS = 20
# --kill-child: the namespace's process 1 dies with unshare, and the kernel then ends all processes in it.
NAMESPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")

#: Process 1 of a host: $1 the base folder, $2 its own folder, $3 name, $4 size of shared memory, $5 address.
INIT = """
set -e
mount -t tmpfs -o size="$4" tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind "$1/ssh" /etc/ssh
mount --bind "$2" "$1/work"
hostname "$3"
ip link set lo up
cd "$1/work"
echo ready
read -r go
/usr/sbin/sshd -D -e -o ListenAddress="$5" 2>>"$2.sshd.log" </dev/null >/dev/null &
wait $!
"""


def what_is_missing() -> str | None:
    """Return why hosts cannot be made here, None if they can. Tries it: containers forbid some steps."""
    programs = ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", SSHD)
    absent = [program for program in programs if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2, util-linux, openssh-server)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    # The steps that containers usually forbid: mounting, a bridge, a veth pair.
    trial = "mount -t tmpfs tmpfs /dev/shm; ip link add b0 type bridge; ip link add v0 type veth peer name e0"
    done = subprocess.run(
        [*NAMESPACES, "sh", "-ec", trial], capture_output=True, text=True, timeout=START_SECONDS
    )
    return f"this machine makes no namespaces: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host's interface has carried, headers included."""

    received_bytes: int
    sent_bytes: int


class ClusterHost:
    """One host; :func:`cluster_hosts` makes it.

    Parameters
    ----------
    base : Path
        Folder of the whole cluster; ``base/work`` is a folder of its own on each host, the rest is shared.
    number : int
    switch : int
        Process id of the bridge's namespace.
    shared_memory : str
        Size of ``/dev/shm``, as mount writes it.

    Attributes
    ----------
    name, address : str
    work : Path
        The working folder as the host sees it: the same path on every host, with other contents.
    folder : Path
        The same folder as it is seen from outside.
    identity : Path
        Private key that opens the ssh of every host.
    """

    def __init__(self, base: Path, number: int, switch: int, shared_memory: str) -> None:
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number + 1}"
        self.work = base / "work"
        self.folder = base / self.name
        self.identity = base / "identity"
        self._switch = switch
        self._port = f"v{number}"
        self.folder.mkdir()
        arguments = (str(base), str(self.folder), self.name, shared_memory, self.address)
        self._holder = subprocess.Popen(
            [*DIE_WITH_PARENT, *NAMESPACES, "sh", "-c", INIT, "init", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._init = 0

    def boot(self) -> None:
        """Give the host its network and start its sshd."""
        # The script writes "ready" once its mounts are done, and waits for the network.
        if self._holder.stdin is None or self._holder.stdout is None or not self._holder.stdout.readline():
            raise RuntimeError(f"{self.name} did not start: {self._holder.communicate()[1]}")
        self._init = psutil.Process(self._holder.pid).children()[0].pid
        _ip(self._switch, f"link add {self._port} type veth peer name eth0 netns {self._init}")
        _ip(self._switch, f"link set {self._port} master br0 up")
        _ip(self._init, f"address add {self.address}/24 dev eth0")
        # No IPv6 address: it would not be used, and its discovery would add packets to the counters.
        _ip(self._init, "link set eth0 addrgenmode none up")
        self._holder.stdin.write("go\n")
        self._holder.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while (self.address, SSH_PORTS[-1]) not in self.listening():
            if time.monotonic() > deadline or self._holder.poll() is not None:
                log = self.folder.with_name(f"{self.name}.sshd.log").read_text(encoding="utf-8")
                raise RuntimeError(f"the sshd of {self.name} does not listen: {log}")
            time.sleep(0.02)

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the host, in its working folder; takes the options of ``subprocess.Popen``."""
        return subprocess.Popen([*self._enter(), *map(str, command)], **options)

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on the host to its end; takes the options of ``subprocess.run``."""
        return subprocess.run([*self._enter(), *map(str, command)], **options)

    def processes(self) -> list[psutil.Process]:
        """Return what runs on the host beside process 1 and sshd, in the order of age."""
        return self._processes(lambda process: process.name() not in SSHD_NAMES)

    def ssh_sessions(self) -> list[psutil.Process]:
        """Return the processes of sshd that serve a connection."""
        return self._processes(lambda process: process.name() in SSHD_NAMES and process.ppid() != self._init)

    def listening(self) -> set[tuple[str, int]]:
        """Return the (address, port) pairs on which the host's processes listen, loopback included."""
        endpoints = set()
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self._init}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
            for line in lines:
                _, local, _, state, *_ = line.split()
                if state == "0A":  # LISTEN (include/net/tcp_states.h)
                    address, _, port = local.partition(":")
                    endpoints.add((_readable(address), int(port, 16)))
        return endpoints

    def traffic(self) -> Traffic:
        """Read the counters of eth0."""
        text = Path(f"/proc/{self._init}/net/dev").read_text(encoding="ascii")
        fields = text.partition("eth0:")[2].split()
        return Traffic(received_bytes=int(fields[0]), sent_bytes=int(fields[8]))

    def drop_packets(self) -> None:
        """Drop every packet to and from the host; its link stays up and neither end is notified."""
        # The cable leaves the bridge: both ends keep their link, so only timeouts can find the loss.
        _ip(self._switch, f"link set {self._port} nomaster")

    def take_link_down(self) -> None:
        """Take the host's interface down, as pulling its cable with the address kept."""
        _ip(self._init, "link set eth0 down")

    def reconnect(self) -> None:
        """Undo :meth:`drop_packets` and :meth:`take_link_down`."""
        _ip(self._init, "link set eth0 up")
        _ip(self._switch, f"link set {self._port} master br0 up")

    def power_off(self) -> None:
        """End everything on the host at once; the kernel closes its connections, it does not come back."""
        if self._init and self._holder.poll() is None:
            os.kill(self._init, signal.SIGKILL)  # the kernel ends the others before this one counts as ended
        else:
            self._holder.kill()
        self._holder.communicate()

    def _enter(self) -> list[str]:
        """Return the prefix of a command in the host's namespaces; the command ends with its starter."""
        return [*DIE_WITH_PARENT, "nsenter", f"--target={self._init}", "-m", "-u", "-n", "-p", "-w", "--"]

    def _processes(self, is_wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        """Return living processes of the host but process 1, in the order of age."""
        # Processes of a host are those of its pid namespace, whoever started them.
        space = os.readlink(f"/proc/{self._init}/ns/pid") if psutil.pid_exists(self._init) else ""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                is_alive = is_here and process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.pid != self._init and is_wanted(process):
                    processes.append(process)
        return sorted(processes, key=lambda process: process.create_time())


@contextlib.contextmanager
def cluster_hosts(num_hosts: int, shared_memory: str = "1g") -> Iterator[list[ClusterHost]]:
    """Make hosts that reach each other and nothing else; all that runs on them ends with the block.

    Parameters
    ----------
    num_hosts : int
    shared_memory : str
        Size of each host's ``/dev/shm``, as mount writes it.

    Yields
    ------
    list of ClusterHost

    Raises
    ------
    RuntimeError
        If a host did not start.
    """
    base = Path(tempfile.mkdtemp(prefix="dglkge-cluster-"))
    hosts: list[ClusterHost] = []
    switch = subprocess.Popen(
        [*DIE_WITH_PARENT, "unshare", "--net", "sh", "-c", "ip link add br0 type bridge; ip link set br0 up; "
         "echo ready; exec sleep infinity"],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        for name in ("work", "home"):
            (base / name).mkdir()
        _write_ssh_files(base, num_hosts)
        if switch.stdout is None or not switch.stdout.readline():
            raise RuntimeError("the bridge did not start")
        # All hosts start at once; boot() then waits for each.
        hosts.extend(ClusterHost(base, number, switch.pid, shared_memory) for number in range(num_hosts))
        for host in hosts:
            host.boot()
        yield hosts
    finally:
        for host in hosts:
            host.power_off()
        switch.send_signal(signal.SIGKILL)
        switch.communicate()
        shutil.rmtree(base, ignore_errors=True)


def _write_ssh_files(base: Path, num_hosts: int) -> None:
    """Write throw-away keys and what lies in ``/etc/ssh`` of every host."""
    folder = base / "ssh"
    folder.mkdir()
    for key in (folder / "host_key", base / "identity"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    public = (folder / "host_key.pub").read_text(encoding="ascii")
    names = [f"{NETWORK}.{number + 1}" for number in range(num_hosts)]
    names += [f"[{name}]:{port}" for name in names for port in SSH_PORTS[1:]]
    # Known in advance: ssh in batch mode refuses a host whose key is not listed.
    (folder / "known_hosts").write_text(f"{','.join(names)} {public}", encoding="ascii")
    (folder / "ssh_config").write_text(
        f"GlobalKnownHostsFile {folder / 'known_hosts'}\nUserKnownHostsFile none\n", encoding="ascii"
    )
    ports = "".join(f"Port {port}\n" for port in SSH_PORTS)
    (folder / "sshd_config").write_text(
        # A home of their own: the user's shell would read start-up files, and leave locks when it is killed.
        f"SetEnv HOME={base / 'home'}\n"
        f"{ports}HostKey {folder / 'host_key'}\nAuthorizedKeysFile {base / 'identity.pub'}\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPidFile none\nUseDNS no\n"
        "AddressFamily inet\nSubsystem sftp internal-sftp\n",
        encoding="ascii",
    )


def _ip(namespace_of: int, arguments: str) -> None:
    """Run ``ip`` in the network namespace of a process."""
    subprocess.run(["nsenter", f"--target={namespace_of}", "-n", "ip", *arguments.split()], check=True)


def _readable(address: str) -> str:
    """Turn an address of the kernel's tables, words of the machine's byte order, into the usual form."""
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
