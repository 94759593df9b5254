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

from dglkge.launch.remote.connection import STARTER, forwarded_environment, ssh_client
from tests.launch.conftest import SERVERS_LEAVE, TIMEOUT_SECONDS

REMOTE_LAUNCHER = """
import sys
from dglkge.cli import launch
from dglkge.launch.remote import remote_site
remote_site.is_own_address = lambda address: False
sys.exit(launch.main())
"""
FAKE_SSH = """#!/bin/sh
# -o ... -- address command
while [ "$1" != -- ]; do shift; done
echo "$2" >>"$FAKE_SSH_CALLS"
[ -z "$FAKE_SSH_FAILS" ] || { echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255; }
echo "Welcome to $2"
cd /
exec env -i HOME="$HOME" FAKE_SSH_CALLS="$FAKE_SSH_CALLS" sh -c "$3"
"""


@pytest.fixture
def remote(launch, tmp_path: Path, ip_config: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr("tests.launch.conftest.LAUNCHER", ["-c", REMOTE_LAUNCHER])
    return launch


def test_arguments_and_environment_arrive(remote, tmp_path: Path) -> None:
    """No shell reads arguments or variables, secrets stay at home; a restart needs no other connection."""
    hostile = ["a b", "it's", '"', "$HOME `id`", "; touch injected", "\\", "a\nb", "", "*", "--port", "é"]
    names = ["ODD", "OMP_PROC_BIND", "SECRET", "DGL_ROLE", "RANK", "MASTER_ADDR"]
    values = f"[sys.argv[1:], [os.environ.get(name) for name in {names}], os.getcwd()]"
    script = SERVERS_LEAVE + (
        f"import json\nprint(json.dumps({values}), file=sys.stderr)\n"
        "if not os.path.exists('mark'): open('mark', 'w').close(); sys.exit(5)\n"
    )
    options = ["--num_trainers", "1", "--max_restarts", "1", "--extra-envs", "ODD=$x; 'y'"]
    job = remote(options, script, *hostile, OMP_PROC_BIND="it's", SECRET="s")
    output = job.finish()
    assert job.launcher.returncode == 0, output
    lines = [line.partition("] ")[2] for line in output.splitlines() if line.startswith("[trainer 0] [[")]
    variables = ["$x; 'y'", "it's", None, "client", "0", "127.0.0.1"]
    assert list(map(json.loads, lines)) == [[hostile, variables, str(tmp_path)]] * 2
    assert not (tmp_path / "injected").exists()
    assert ") on 127.0.0.1 ended with status 5" in output and "[launcher] restart 1 of 1 in 1 s" in output
    assert (tmp_path / "calls").read_text().split() == ["127.0.0.1"]
    job.await_none_left()


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ([], {"FAKE_SSH_FAILS": "1"}, "cannot be reached by ssh: ssh: connect to host 127.0.0.1 port 22"),
        (["--python", "/no/such/python"], {}, "/no/such/python could not run there: "),
        (["--python", "{}/bare"], {}, "dglkge must be installed for "),
        (["--part_config", "two.json"], {}, "two.json has 2 partitions and ip_config has 1 machines"),
    ],
)
def test_machine_that_cannot_be_used(remote, options, environment, message, tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text('{"num_parts": 2}')
    (tmp_path / "bare").write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bare").chmod(0o755)
    job = remote([word.format(tmp_path) for word in options], "", **environment)
    first, problem = job.finish().splitlines()
    assert job.launcher.returncode == 2
    assert first == "dglkge-launch: error: 1 problem on 1 of 1 hosts; nothing was started"
    assert problem.startswith("  127.0.0.1  ") and message in problem
    assert not (tmp_path / "logs").exists()


def synced(folder: Path) -> tuple[Path, list[str]]:
    work = folder / "its" / "own work"
    return work, ["--num_trainers", "1", "--sync", "--workspace", str(work), "--log_dir", "logs"]


def test_sync(remote, tmp_path: Path) -> None:
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


def test_results_that_cannot_be_brought_back_are_no_success(remote, tmp_path: Path) -> None:
    script = SERVERS_LEAVE + (
        "from pathlib import Path\n"
        "Path(os.environ['DGLKGE_LOG_DIR'], 'notes.txt').write_text('noted')\n"
        "Path(os.environ['FAKE_SSH_CALLS']).with_name('logs').joinpath('notes.txt').mkdir()\n"
    )
    work, options = synced(tmp_path)
    job = remote(options, script)
    output = job.finish()
    assert job.launcher.returncode == 1, output
    assert "not all files could be brought back: 1 problem on 1 of 1 hosts; their files are still" in output
    assert f"127.0.0.1 cannot write {tmp_path / 'logs' / 'notes.txt'}: Is a directory" in output
    assert "all processes ended well" not in output and "Traceback" not in output
    assert (work / "logs" / "notes.txt").read_text() == "noted"


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize(
    ("number", "status", "expected"), [(signal.SIGTERM, 0, 1), (signal.SIGHUP, 143, 143)]
)
def test_a_stop_while_files_are_fetched(remote, tmp_path, number, status, expected):
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
    job.launcher.send_signal(number)
    output = job.finish()
    assert job.launcher.returncode == expected, output
    words = f"stopped by {number.name}: not all files have been brought back"
    assert words in output and "Traceback" not in output
    summary = json.loads(output.splitlines()[-1])
    assert (summary["status"], summary["is_interrupted"]) == (expected, True)
    assert not list((tmp_path / "logs").glob("*.tmp"))
    job.await_none_left()


def test_users_options_come_first() -> None:
    """ssh takes the first value of an option, so the user's win; ours make a silent host known in time."""
    command = ssh_client({"-p": None}, ("ConnectTimeout=3", "StrictHostKeyChecking=no"))
    options = [value for flag, value in zip(command, command[1:]) if flag == "-o"]
    assert options[:2] == ["ConnectTimeout=3", "StrictHostKeyChecking=no"]
    values = dict(option.split("=", 1) for option in reversed(options))
    assert (values["ConnectTimeout"], values["BatchMode"]) == ("3", "yes")
    assert int(values["ServerAliveInterval"]) * int(values["ServerAliveCountMax"]) <= 15
    command = ssh_client({"-i": "my key", "-p": 2222})
    assert command[-4:] == ["-i", "my key", "-p", "2222"]


def test_forwarded_variables() -> None:
    forwarded = "PATH PYTHONHASHSEED LD_PRELOAD OMP_NUM_THREADS DGLBACKEND GLOO_SOCKET_IFNAME".split()
    private = "HOME USER SSH_AUTH_SOCK AWS_SECRET_ACCESS_KEY RANK DISPLAY DGLKGE_SECRET".split()
    variables = forwarded_environment(dict.fromkeys([*forwarded, *private], "/x'y $z"))
    assert variables == dict.fromkeys(forwarded, "/x'y $z")
    # Processes elsewhere start in other folders; an empty entry stays what it was.
    variables = forwarded_environment({"PYTHONPATH": f".{os.pathsep}{os.pathsep}/a", "PYTHONWARNINGS": "."})
    assert variables == {"PYTHONPATH": f"{os.getcwd()}{os.pathsep}{os.pathsep}/a", "PYTHONWARNINGS": "."}


def test_a_program_that_never_comes() -> None:
    """Where the launcher goes before it has sent the program, the interpreter goes too."""
    command = [sys.executable, "-I", "-S", "-c", STARTER]
    assert subprocess.run(command, input=b"[", capture_output=True, timeout=30).returncode == 1
    assert not set("'\n!$`\\") & set(STARTER)
