"""``dglkge-launch`` over a stand-in for ssh, which gives the command to a shell as sshd does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT, TIMEOUT_SECONDS

LAUNCHER = Path(__file__).with_name("remote_launch.py")
FAKE_SSH = """#!/bin/sh
# -o ... -- address command
while [ "$1" != -- ]; do shift; done
echo "$2" >>"$FAKE_SSH_CALLS"
[ -z "$FAKE_SSH_FAILS" ] || { echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255; }
echo "Welcome to $2"
cd /
exec env -i HOME="$HOME" FAKE_SSH_CALLS="$FAKE_SSH_CALLS" sh -c "$3"
"""
SERVERS_LEAVE = "import os, sys\nif os.environ['DGL_ROLE'] == 'server': sys.exit()\n"
WAITS = """
import os, signal, sys
def leave(number, frame):
    sys.exit(143)
signal.signal(signal.SIGTERM, leave if "RANK" in os.environ else signal.SIG_IGN)
print("waits", os.environ.get("RANK", "server"), flush=True)
while True: signal.pause()
"""


@pytest.fixture
def remote(launch, tmp_path: Path, ip_config: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr("tests.launch.conftest.LAUNCHER", [str(LAUNCHER)])
    return launch


@pytest.fixture
def run(remote, tmp_path: Path):
    """Run the launcher alone, to its end, without a job."""

    def go(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        (tmp_path / "train.py").touch()
        return subprocess.run(
            [sys.executable, str(LAUNCHER), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )

    return go


def test_arguments_and_environment_arrive(remote, tmp_path: Path) -> None:
    """No shell reads arguments or variables; the folder is the workspace; secrets stay at home."""
    hostile = ["a b", "it's", '"', "$HOME `id`", "; touch injected", "\\", "a\nb", "", "*", "--port", "é"]
    names = ["ODD", "OMP_PROC_BIND", "SECRET", "DGL_ROLE", "RANK", "MASTER_ADDR"]
    values = f"[sys.argv[1:], [os.environ.get(name) for name in {names}], os.getcwd()]"
    script = f"{SERVERS_LEAVE}import json\nprint(json.dumps({values}), file=sys.stderr); sys.exit(5)"
    options = ["--num_trainers", "1", "--extra-envs", "ODD=$x; 'y'"]
    job = remote(options, script, *hostile, OMP_PROC_BIND="it's", SECRET="s")
    output = job.finish()
    assert job.launcher.returncode == 5, output
    (line,) = [line for line in output.splitlines() if line.startswith("[trainer 0] [[")]
    arguments, variables, folder = json.loads(line.partition("] ")[2])
    assert (arguments, folder) == (hostile, str(tmp_path))
    assert variables == ["$x; 'y'", "it's", None, "client", "0", "127.0.0.1"]
    assert not (tmp_path / "injected").exists()
    assert "[launcher] trainer 0 (pid " in output
    assert ") on 127.0.0.1 ended with status 5\n" in output
    assert (tmp_path / "calls").read_text().split() == ["127.0.0.1"]
    job.await_none_left()


@pytest.mark.parametrize("victim", ["launcher", "node program"])
def test_broken_connection(remote, victim: str) -> None:
    job = remote(["--num_trainers", "1"], WAITS)
    job.wait_for("waits server", "waits 0")
    program = job.process("trainer", 0).parent()
    (job.launcher if victim == "launcher" else program).kill()
    output = job.finish()
    job.await_none_left()
    if victim == "node program":
        assert job.launcher.returncode == 255
        assert ") on 127.0.0.1 was lost: " in output


def test_restart(remote, tmp_path: Path) -> None:
    script = f"{SERVERS_LEAVE}if not os.path.exists('mark'): open('mark', 'w').close(); 1 / 0"
    job = remote(["--num_trainers", "1", "--max_restarts", "1"], script)
    output = job.finish()
    assert job.launcher.returncode == 0, output
    assert "[launcher] restart 1 of 1 in 1 s" in output
    assert len((tmp_path / "calls").read_text().split()) == 1


def test_all_problems_are_told(run, tmp_path: Path, ip_config: Path) -> None:
    """One line for each problem, status 2, no log folder, nothing started."""
    (tmp_path / "two.json").write_text('{"num_parts": 2}')
    done = run("--workspace", str(tmp_path), "--part_config", "two.json", "--num_servers", "2", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    first, *problems = done.stderr.splitlines()
    assert first == "dglkge-launch: error: 1 problem on 1 of 1 hosts; nothing was started"
    assert "two.json has 2 partitions and ip_config has 1 machines" in problems[0]
    assert len((tmp_path / "calls").read_text().split()) == 1
    assert not (tmp_path / "logs").exists()


NO_DGLKGE = f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n'


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (
            [],
            {"FAKE_SSH_FAILS": "1"},
            "cannot be reached by ssh: ssh: connect to host 127.0.0.1 port 22: No ro",
        ),
        (["--python", "/no/such/python"], {}, "/no/such/python could not run there: "),
        (["--python", "{}/bare"], {}, "dglkge must be installed for "),
    ],
)
def test_machine_that_cannot_be_used(run, options, environment, message, tmp_path: Path) -> None:
    """Why there is no node program, in the words of ssh, the shell or Python."""
    (tmp_path / "bare").write_text(NO_DGLKGE)
    (tmp_path / "bare").chmod(0o755)
    done = run(*(word.format(tmp_path) for word in options), "train.py", **environment)
    assert done.returncode == 2
    assert f"  127.0.0.1  {message}" in done.stderr
    assert "Traceback" not in done.stderr


def synced(folder: Path) -> tuple[Path, list[str]]:
    """Return another workspace, and the options for it."""
    work = folder / "its" / "own work"
    return work, ["--num_trainers", "1", "--sync", "--workspace", str(work), "--log_dir", "logs"]


def test_sync(remote, tmp_path: Path) -> None:
    """Another workspace gets script, helper and named files; logs come back, and only what is new is sent."""
    (tmp_path / "helper.py").write_text("def read(path): return open(path).read()")
    (tmp_path / "my file.txt").write_text("it's here")
    script = SERVERS_LEAVE + (
        "import helper\nfrom pathlib import Path\n"
        "print('read', helper.read(sys.argv[1]), 'in', os.getcwd(), os.environ['DGLKGE_OWN_DISKS'])\n"
        "Path(os.environ['DGLKGE_LOG_DIR'], 'notes.txt').write_text('noted')\n"
    )
    work, options = synced(tmp_path)
    job = remote(options, script, "my file.txt")
    output = job.finish()
    assert job.launcher.returncode == 0, output
    assert f"[trainer 0] read it's here in {work} 1\n" in output
    assert sorted(path.name for path in work.iterdir()) == ["helper.py", "logs", "my file.txt", "script_0.py"]
    assert "warning" not in output
    assert (tmp_path / "logs" / "notes.txt").read_text() == "noted"
    assert len((tmp_path / "calls").read_text().split()) == 1


@pytest.mark.parametrize("status", [0, 5])
def test_results_that_cannot_be_brought_back_are_no_success(remote, tmp_path: Path, status: int) -> None:
    """The launcher's status is not 0, and it says where they are; a failure of the job stays what it was."""
    script = SERVERS_LEAVE + (
        "from pathlib import Path\n"
        "Path(os.environ['DGLKGE_LOG_DIR'], 'notes.txt').write_text('noted')\n"
        f"Path(os.environ['FAKE_SSH_CALLS']).with_name('logs').joinpath('notes.txt').mkdir()\n"
        f"sys.exit({status})\n"
    )
    work, options = synced(tmp_path)
    job = remote(options, script)
    output = job.finish()
    assert job.launcher.returncode == (status or 1), output
    assert (
        "not all files could be brought back: 1 problem on 1 of 1 hosts; their files are still there"
        in output
    )
    assert f"127.0.0.1 cannot write {tmp_path / 'logs' / 'notes.txt'}: Is a directory" in output
    assert "all processes ended well" not in output and "Traceback" not in output
    assert (work / "logs" / "notes.txt").read_text() == "noted"


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize(
    ("number", "status", "expected", "words"),
    [
        (signal.SIGTERM, 0, 1, "stopped by SIGTERM"),
        (signal.SIGHUP, 143, 143, "stopped by SIGHUP"),
    ],
)
def test_a_stop_while_files_are_fetched(remote, tmp_path, number, status, expected, words):
    """A transfer of a terabyte is cancelled within seconds; 143 still means that the state is committed."""
    script = SERVERS_LEAVE + (
        "path = os.path.join(os.environ['DGLKGE_LOG_DIR'], 'large')\n"
        f"open(path, 'w').close(); os.truncate(path, 1 << 40)\nsys.exit({status})\n"
    )
    job = remote([*synced(tmp_path)[1], "--json"], script)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not list((tmp_path / "logs").glob("large.*.tmp")):
        assert time.monotonic() < deadline and job.launcher.poll() is None
        time.sleep(0.02)
    start = time.monotonic()
    job.launcher.send_signal(number)
    output = job.finish()
    assert time.monotonic() - start < 20
    assert job.launcher.returncode == expected, output
    problem = f"{words}: not all files have been brought back"
    assert f"{problem}" in output and "Traceback" not in output
    summary = json.loads(output.splitlines()[-1])
    assert (summary["status"], summary["is_interrupted"]) == (expected, True)
    assert not list((tmp_path / "logs").glob("*.tmp"))
    job.await_none_left()
