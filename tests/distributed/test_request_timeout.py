"""A request that is never answered ends the process, even one that waits in C and keeps Python's lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy_kg import REPOSITORY

SCRIPT = """
import atexit, ctypes, sys
from dglkge.distributed.dgl_compat import limit_shutdown, request_timeout, set_request_timeout
wait = ctypes.PyDLL(None).pause  # PyDLL keeps the lock, as DGL's requests do

def ask_server():
    with request_timeout():
        wait()

set_request_timeout(float(sys.argv[2]))
if sys.argv[1] == "request":
    ask_server()
elif sys.argv[1] == "shutdown":
    atexit.register(wait)
    limit_shutdown()
else:
    with request_timeout():
        print("answered")
    import time
    time.sleep(1.5 * float(sys.argv[2]))
    print("went on")
"""


def run(what: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run the script with a limit."""
    command = [sys.executable, "-c", SCRIPT, what, str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)


@pytest.mark.parametrize("what", ["request", "shutdown"])
def test_a_wait_without_an_answer_ends_the_process_and_says_where(what: str) -> None:
    done = run(what, 0.2)
    assert done.returncode == 1 and "Timeout (0:00:00.200000)!" in done.stderr
    assert ("in ask_server" in done.stderr) == (what == "request")


def test_an_answer_ends_the_limit() -> None:
    done = run("answered", 0.2)
    assert done.returncode == 0 and done.stdout == "answered\nwent on\n"


CONNECT = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
with open("ip_config.txt", "w") as file:
    file.write(f"127.0.0.1 {port}\\n")
os.environ.update(
    DGL_DIST_MODE="distributed", DGL_ROLE="client", DGL_NUM_SAMPLER="0", DGL_NUM_SERVER="1", DGL_GROUP_ID="0",
    DGL_IP_CONFIG="ip_config.txt", DGL_CONF_PATH="toy.json", DGL_NUM_CLIENT="1", DGL_GRAPH_FORMAT="csc",
    RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT="1",
    DGLKGE_TIMEOUT_SECONDS="2",
)
from dglkge.distributed.runtime import join_cluster
with join_cluster("toy", "toy.json", 1):
    pass
"""


def test_a_server_that_accepts_and_never_answers_ends_the_trainer(tmp_path: Path) -> None:
    """DGL's connection to the servers has the limit too."""
    command = [sys.executable, "-c", CONNECT]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr and "in connect" in done.stderr
