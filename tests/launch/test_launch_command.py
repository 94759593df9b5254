"""``dglkge-launch`` itself, as a child process: what it takes, says, returns and leaves."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from dglkge.cli import launch as command
from dglkge.launch.machine import usable_cores
from tests.launch.conftest import SERVERS_LEAVE, TIMEOUT_SECONDS, processes_in

SHARED = Path("/dev/shm")
WAITS = """
import mmap, os, signal, subprocess, sys
name = sys.argv[1]
who = os.environ.get("RANK", "server")
with open(f"/dev/shm/{os.environ['DGLKGE_SEGMENTS']}{name}-{who}-kvdata-", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
child = subprocess.Popen([sys.executable, "-c", "import signal; print('child', flush=True); signal.pause()"],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("waits", who, flush=True)
while True:
    signal.pause()
"""
STUBBORN = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n" + WAITS
ALL_WAIT = ("waits server", "waits 0", "waits 1")


@pytest.fixture
def segments() -> str:
    """A name for shared memory; nothing of that name may be left by the test's job."""
    name = f"dglkge-{uuid.uuid4().hex}"
    yield name
    left = list(SHARED.glob(f"*{name}*"))
    for path in left:
        path.unlink()
    assert not left


def test_summary_logs_and_defaults(launch, tmp_path: Path, free_port: int, ip_config: Path) -> None:
    """--json summarises on the last line; logs lie in logs/<time>-<pid>; the third column counts servers."""
    ip_config.write_text(f"\n# here\n127.0.0.1 {free_port} 2  \r\n\r\n")
    values = "os.environ['DGL_NUM_SERVER'], open(os.environ['DGL_IP_CONFIG']).read().split()"
    job = launch(["--json"], f"import os; print({values}, os.environ['DGLKGE_LOG_DIR'])")
    summary = json.loads(job.finish().splitlines()[-1])
    num_trainers = min(8, usable_cores())
    names = ["server 0", "server 1", *(f"trainer {i}" for i in range(num_trainers))]
    assert [process["name"] for process in summary["processes"]] == names
    assert {process["status"] for process in summary["processes"]} == {0}
    (log_dir,) = (tmp_path / "logs").iterdir()
    assert summary["log_dir"] == str(log_dir) and log_dir.name.endswith(f"-{job.launcher.pid}")
    lines = (log_dir / "launcher.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines)
    assert lines[-1].split(" ", 1)[1].startswith("all processes ended well after ")
    for process in summary["processes"]:
        assert Path(process["log"]).read_text() == f"2 ['127.0.0.1', '{free_port}'] {log_dir}\n"


def test_module_in_a_workspace(launch, tmp_path: Path, free_port: int) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "ip.txt").write_text(f"localhost {free_port}\n")
    (work / "ring.json").write_text('{"num_parts": 1}')
    (work / "job.py").write_text("import os, sys; print(__name__, sys.argv[1:], os.environ['DGL_CONF_PATH'])")
    options = "--workspace work --ip_config ip.txt --part_config ring.json --num_trainers 1 -m".split()
    output = launch(options, Path("job"), "x").finish()
    assert f"[trainer 0] __main__ ['x'] {work / 'ring.json'}\n" in output, output


@pytest.mark.parametrize(
    ("surroundings", "numbers", "status"),
    [
        ("in_foreground", [signal.SIGINT], 130),
        # After nohup the job goes on; 143 would mean a commit.
        ("in_background", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], 1),
    ],
)
def test_a_signal_leaves_nothing(launch, segments, light_path, request, surroundings, numbers, status):
    """No process, no grandchild, no shared memory; signals that were ignored at the start stay ignored."""
    request.getfixturevalue(surroundings)
    job = launch(["--num_trainers", "2", "--stop_seconds", "0.5"], STUBBORN, segments, PYTHONPATH=light_path)
    job.wait_for(*ALL_WAIT)
    for number in numbers:
        job.launcher.send_signal(number)
    output = job.finish()
    assert job.launcher.returncode == status
    assert [name for name in ("SIGINT", "SIGHUP", "SIGTERM") if name in output] == [numbers[-1].name]
    assert processes_in(job.folder) == []


def test_everything_killed_at_once_is_no_obstacle_for_the_next_job(launch, segments: str, light_path: str):
    """The launcher, the node program and all processes die together; the next job finds nothing of theirs."""
    first = launch(["--num_trainers", "2"], WAITS, segments, PYTHONPATH=light_path)
    first.wait_for(*ALL_WAIT)
    everything = [first.launcher, *psutil.Process(first.launcher.pid).children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in everything:
            process.send_signal(number)
    first.finish()
    first.await_none_left()
    assert len(list(SHARED.glob(f"*{segments}*"))) == 3
    second = launch(["--num_trainers", "1"], SERVERS_LEAVE + f"print(os.listdir({str(SHARED)!r}))")
    output = second.finish()
    assert second.launcher.returncode == 0, output
    assert segments not in output


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize(
    ("number", "status", "words"), [(2, 130, "interrupted"), (15, 1, "stopped by SIGTERM")]
)
def test_a_stop_between_two_attempts(launch, number: int, status: int, words: str) -> None:
    """143 would mean that a state is committed."""
    job = launch(["--num_trainers", "1", "--max_restarts", "9"], "raise SystemExit(7)")
    job.wait_for("restart 1 of 9 in 1 s")
    job.launcher.send_signal(number)
    assert job.finish().splitlines()[-1] == f"dglkge-launch: {words}"
    assert job.launcher.returncode == status
    job.await_none_left()


def test_reader_that_goes_away(launch, tmp_path: Path) -> None:
    job = launch(["--num_trainers", "1"], SERVERS_LEAVE + "for i in range(20000): print('line', i)\n")
    job.wait_for("line 5")
    job.launcher.stdout.detach().close()
    assert job.launcher.wait(60) == 0
    (log_dir,) = (tmp_path / "logs").iterdir()
    assert len((log_dir / "trainer-0.log").read_text().splitlines()) == 20000


@pytest.mark.usefixtures("in_foreground", "ip_config")
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_is_closed(tmp_path: Path, light_path: str, is_ignored: bool) -> None:
    """SIGHUP lets trainers commit; under nohup the job goes on without its terminal, to its end."""
    waits = "import os, time\nprint('waits', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    saves = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
    saves += "print('waits', flush=True)\nwhile True: signal.pause()"
    script = waits + "for i in range(5000): print('line', i)" if is_ignored else saves
    (tmp_path / "script.py").write_text(SERVERS_LEAVE + script)
    options = ["--num_trainers", "1", "--log_dir", "logs", "script.py"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ["PYTHONPATH"] = light_path
        if is_ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execv(sys.executable, [sys.executable, "-m", "dglkge.cli.launch", *options])
    log, deadline = tmp_path / "logs" / "trainer-0.log", time.monotonic() + TIMEOUT_SECONDS
    while not (log.exists() and "waits" in log.read_text()):
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    (tmp_path / "go").touch()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if is_ignored else 143)
    assert ("line 4999" if is_ignored else "saved") in log.read_text()


@pytest.mark.usefixtures("ip_config")
def test_a_console_that_nobody_reads(tmp_path: Path, light_path: str) -> None:
    (tmp_path / "script.py").write_text(SERVERS_LEAVE + "for i in range(40000): print('a line, number', i)")
    options = ["--num_trainers", "1", "--log_dir", "logs", "--json", "script.py"]
    command = [sys.executable, "-m", "dglkge.cli.launch", *options]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "PYTHONPATH": light_path}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **streams) as job:
        assert job.wait(120) == 0  # nothing was read
        shown = job.stdout.read().decode()
    assert shown.startswith("[launcher] 1 server(s) and 1 trainer(s) on ")
    assert len((tmp_path / "logs" / "trainer-0.log").read_text().splitlines()) == 40000


def test_dry_run_starts_and_writes_nothing(tmp_path, ip_config, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    options = f"--ip_config {ip_config} --workspace {tmp_path} --num_trainers 2 --dry-run".split()
    assert command.main([*options, "train.py", "a b"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    names = ("server 0", "trainer 0", "trainer 1")
    assert re.findall("^# .*", out, re.MULTILINE) == [f"# {name} on 127.0.0.1" for name in names]
    assert out.count("script_runner.py train.py 'a b'\n") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ip_config.txt", "train.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "there is no script 'absent.py' in "),
        (["train.py " + 60 * "--set a=b "], "is no script: give the script and its arguments as separate"),
        (["python3", "train.py"], "'python3' is no script: give the script and its arguments as separate"),
        (["python3 train.py --x"], "without 'python' and without quotes around them all; "),
        (["--ip_config", "mixed.txt", "train.py"], "the others cannot reach a loopback address"),
        (["--ip_config", "twice.txt", "train.py"], "names this machine 2 times (127.0.0.1, 127.0.0.2)"),
        (["--part_config", "two.json", "train.py"], "two.json has 2 partitions and ip_config has 1 machines"),
        (["--log_dir", "FOLDER/train.py", "train.py"], "cannot write logs to "),
    ],
)
def test_bad_input(tmp_path, ip_config, capsys, arguments, message):
    (tmp_path / "train.py").touch()
    (tmp_path / "mixed.txt").write_text("127.0.0.1\n192.0.2.7\n")
    (tmp_path / "twice.txt").write_text("127.0.0.1\n127.0.0.2\n")
    (tmp_path / "two.json").write_text('{"num_parts": 2}')
    arguments = [word.replace("FOLDER", str(tmp_path)) for word in arguments]
    status = command.main(["--workspace", str(tmp_path), *arguments])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("dglkge-launch: error: ") and message in err and err.count("\n") == 1
