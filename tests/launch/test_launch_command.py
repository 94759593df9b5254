"""``dglkge-launch`` itself, as a child process: what it takes, says, returns and leaves."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import psutil
import pytest

from dglkge.cli import launch as command
from dglkge.distributed.jobs import live_jobs, matching_jobs
from dglkge.errors import DglkgeError, InputError, StorageError
from dglkge.launch.machine import usable_cores

SHARED = Path("/dev/shm")
SERVERS_LEAVE = "import os, sys\nif os.environ['DGL_ROLE'] == 'server': sys.exit()\n"
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
    segments = list(SHARED.glob(f"*{name}*"))
    for path in segments:
        path.unlink()
    assert not segments


def test_summary_logs_and_defaults(launch, tmp_path: Path, free_port: int, ip_config: Path) -> None:
    """--json summarises on the last line; logs lie in logs/<time>-<pid>; the third column counts servers."""
    ip_config.write_text(f"\n# here\n127.0.0.1 {free_port} 2  \r\n\r\n")
    script = (
        "import os; print(os.environ['DGL_NUM_SERVER'], open(os.environ['DGL_IP_CONFIG']).read().split(), "
        "os.environ['DGLKGE_LOG_DIR'])"
    )
    job = launch(["--json"], script)
    summary = json.loads(job.finish().splitlines()[-1])
    num_trainers = min(8, usable_cores())
    names = ["server 0", "server 1", *(f"trainer {i}" for i in range(num_trainers))]
    assert [process["name"] for process in summary["processes"]] == names
    assert {process["status"] for process in summary["processes"]} == {0}
    (log_dir,) = (tmp_path / "logs").iterdir()
    assert summary["log_dir"] == str(log_dir)
    assert log_dir.name.endswith(f"-{job.launcher.pid}")
    lines = (log_dir / "launcher.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines)
    assert lines[-1].split(" ", 1)[1].startswith("all processes ended well after ")
    for process in summary["processes"]:
        assert Path(process["log"]).read_text() == f"2 ['127.0.0.1', '{free_port}'] {log_dir}\n"


def test_module_in_a_workspace(launch, tmp_path: Path, free_port: int) -> None:
    """-m and --workspace: module, ip_config and part_config are sought in the workspace."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "ip.txt").write_text(f"localhost {free_port}\n")
    (work / "ring.json").write_text('{"num_parts": 1}')
    (work / "job.py").write_text("import os, sys; print(__name__, sys.argv[1:], os.environ['DGL_CONF_PATH'])")
    options = "--workspace work --ip_config ip.txt --part_config ring.json --num_trainers 1 -m".split()
    output = launch(options, Path("job"), "x").finish()
    assert f"[trainer 0] __main__ ['x'] {work / 'ring.json'}\n" in output, output


@pytest.mark.usefixtures("in_foreground")
def test_a_signal_leaves_nothing(launch, segments: str, light_path: str) -> None:
    """No process, no grandchild, no shared memory; 143 is for a commit."""
    job = launch(["--num_trainers", "2", "--stop_seconds", "0.5"], STUBBORN, segments, PYTHONPATH=light_path)
    job.wait_for(*ALL_WAIT)
    job.launcher.send_signal(signal.SIGINT)
    job.finish()
    assert job.launcher.returncode == 130
    assert job.processes_in_folder() == []


@pytest.mark.usefixtures("in_background")
def test_signals_that_were_ignored_at_the_start_stay_ignored(launch, segments: str, light_path: str) -> None:
    """After ``nohup`` the job goes on after Ctrl-C and hangups; SIGTERM ends it, here with no commit."""
    job = launch(["--num_trainers", "2", "--stop_seconds", "0.5"], STUBBORN, segments, PYTHONPATH=light_path)
    job.wait_for(*ALL_WAIT)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        job.launcher.send_signal(number)
    output = job.finish()
    assert job.launcher.returncode == 1
    assert "stopped by SIGTERM" in output and "SIGINT" not in output and "SIGHUP" not in output
    assert job.processes_in_folder() == []


def test_everything_killed_at_once_is_no_obstacle_for_the_next_job(
    launch, segments: str, light_path: str
) -> None:
    """The launcher, the node program and all processes die together; the next job finds nothing of theirs."""
    first = launch(["--num_trainers", "2"], WAITS, segments, PYTHONPATH=light_path)
    first.wait_for(*ALL_WAIT)
    everything = [first.launcher, *psutil.Process(first.launcher.pid).children(recursive=True)]
    for process in everything:
        process.suspend() if isinstance(process, psutil.Process) else process.send_signal(signal.SIGSTOP)
    for process in everything:
        process.kill()
    first.finish()
    first.await_none_left()
    assert len(list(SHARED.glob(f"*{segments}*"))) == 3
    second = launch(["--num_trainers", "1"], SERVERS_LEAVE + f"print(os.listdir({str(SHARED)!r}))")
    output = second.finish()
    assert second.launcher.returncode == 0, output
    assert segments not in output


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 1, "stopped by SIGTERM"),  # 143 means that a state is committed
        (signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_stop_between_two_attempts(launch, number: int, status: int, words: str) -> None:
    """It ends the pause: one line, and nothing is left."""
    job = launch(["--num_trainers", "1", "--max_restarts", "9"], "raise SystemExit(7)")
    job.wait_for("restart 1 of 9 in 1 s")
    job.launcher.send_signal(number)
    assert job.finish().splitlines()[-1] == f"dglkge-launch: {words}"
    assert job.launcher.returncode == status
    job.await_none_left()


@pytest.mark.parametrize(("error", "status"), [(StorageError("the disk is full"), 1), (InputError("odd"), 2)])
def test_an_error_is_one_line(error: DglkgeError, status: int, monkeypatch, capfd) -> None:
    """A failure that no change of the input would mend is no bad input, and no traceback."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(command, "_launch", fail)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert command.main(["train.py"]) == status
    assert capfd.readouterr().err == f"dglkge-launch: error: {error}\n"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_two_jobs_side_by_side(launch, segments: str, ip_config: Path, light_path: str) -> None:
    """The second takes other ports where ip_config gives none, and ends; the first goes on."""
    ip_config.write_text("127.0.0.1\n")
    first = launch(["--num_trainers", "2"], WAITS, segments, PYTHONPATH=light_path)
    first.wait_for(*ALL_WAIT)
    second = launch([], "print('hello')")
    output = second.finish()
    assert second.launcher.returncode == 0, output
    ports = [re.search(r" on 127\.0\.0\.1:(\d+); ", "\n".join(job.shown)) for job in (first, second)]
    assert ports[0].group(1) != ports[1].group(1)
    assert first.launcher.poll() is None
    (entry,) = [entry for entry in live_jobs() if entry.launcher_pid == first.launcher.pid]
    assert matching_jobs(str(first.launcher.pid), live_jobs()) == [entry]
    # One node program for all processes of the machine: no torch, no dgl in it.
    (program,) = psutil.Process(first.launcher.pid).children()
    assert len(program.children()) == 3 and program.memory_info().rss < 128 * 2**20
    first.launcher.send_signal(signal.SIGTERM)
    first.finish()
    assert entry.job not in {other.job for other in live_jobs()}


def test_reader_that_goes_away(launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SERVERS_LEAVE + "for i in range(20000): print('line', i)\n")
    job = launch(["--num_trainers", "1"], script)
    job.wait_for("line 5")
    job.launcher.stdout.detach().close()
    assert job.launcher.wait(60) == 0
    (log_dir,) = (tmp_path / "logs").iterdir()
    assert len((log_dir / "trainer-0.log").read_text().splitlines()) == 20000


SAVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(143)))
print("waits", flush=True)
while True: signal.pause()
"""


def in_terminal(command: list[str], folder: Path, python_path: str) -> tuple[int, int]:
    """Start a command in a session with a terminal of its own; return its pid and the other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = python_path
        os.execv(sys.executable, command)
    return pid, terminal


def await_in(path: Path, text: str) -> None:
    for _ in range(1200):
        if path.exists() and text in path.read_text():
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{path} never said {text!r}")


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_is_closed(
    tmp_path: Path, ip_config: Path, light_path: str, is_ignored: bool
) -> None:
    """SIGHUP lets trainers commit; under nohup the job goes on without its terminal, to its end."""
    waits = "import os, time\nprint('waits', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    script = waits + "for i in range(5000): print('line', i)" if is_ignored else SAVES
    (tmp_path / "script.py").write_text(SERVERS_LEAVE + script)
    options = ["--num_trainers", "1", "--log_dir", "logs", "script.py"]
    command = [sys.executable, "-m", "dglkge.cli.launch", *options]
    if is_ignored:
        code = (
            "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
        )
        command = [sys.executable, "-c", code, *command]
    pid, terminal = in_terminal(command, tmp_path, light_path)
    reader = threading.Thread(target=drain, args=[terminal], daemon=True)
    reader.start()
    log = tmp_path / "logs" / "trainer-0.log"
    await_in(log, "waits")
    os.close(os.dup(terminal))
    CLOSE.set()
    reader.join(60)
    os.close(terminal)
    CLOSE.clear()
    (tmp_path / "go").touch()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if is_ignored else 143)
    assert ("line 4999" if is_ignored else "saved") in log.read_text()


CLOSE = threading.Event()


def drain(terminal: int) -> None:
    while not CLOSE.is_set():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)


def test_a_console_that_nobody_reads(tmp_path: Path, ip_config: Path, light_path: str) -> None:
    (tmp_path / "script.py").write_text(SERVERS_LEAVE + "for i in range(80000): print('a line, number', i)")
    options = ["--num_trainers", "1", "--log_dir", "logs", "--json", "script.py"]
    command = [sys.executable, "-m", "dglkge.cli.launch", *options]
    environment = {**os.environ, "PYTHONPATH": light_path}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        assert job.wait(120) == 0  # nothing was read
        shown = job.stdout.read().decode()
    assert shown.startswith("[launcher] 1 server(s) and 1 trainer(s) on ")
    assert len((tmp_path / "logs" / "trainer-0.log").read_text().splitlines()) == 80000


def run_main(arguments: list[str], capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    """Run the command in this process, for what starts no job."""
    status = command.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_busy_port_is_refused(tmp_path, ip_config, free_port, capsys):
    """It is named with its holder before anything starts."""
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", free_port + 1)):
        options = ["--ip_config", str(ip_config), "--workspace", str(tmp_path), "--num_servers", "2"]
        status, _, err = run_main([*options, "train.py"], capsys)
    words = f"dglkge-launch: error: port {free_port + 1} on 127.0.0.1 is in use by pid {os.getpid()}: "
    assert status == 2 and err.startswith(words) and not (tmp_path / "logs").exists()


def test_dry_run_starts_and_writes_nothing(tmp_path, ip_config, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    options = f"--ip_config {ip_config} --workspace {tmp_path} --num_trainers 2 --dry-run".split()
    status, out, err = run_main([*options, "train.py", "a b"], capsys)
    assert (status, err) == (0, "")
    names = ("server 0", "trainer 0", "trainer 1")
    assert re.findall("^# .*", out, re.MULTILINE) == [f"# {name} on 127.0.0.1" for name in names]
    assert out.count("script_runner.py train.py 'a b'\n") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ip_config.txt", "train.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "there is no script 'absent.py' in "),
        (["python3", "train.py"], "'python3' is no script: give the script and its arguments as separate"),
        (["python3 train.py --x"], "without 'python' and without quotes around them all; "),
        (["--ip_config", "absent.txt", "train.py"], "absent.txt: No such file or directory"),
        (["--ip_config", "mixed.txt", "train.py"], "the others cannot reach a loopback address"),
        (["--ip_config", "twice.txt", "train.py"], "names this machine 2 times (127.0.0.1, 127.0.0.2)"),
        (["--ip_config", "bad.txt", "train.py"], "bad.txt:2: 'x' is no port"),
        (["--part_config", "two.json", "train.py"], "two.json has 2 partitions and ip_config has 1 machines"),
        (["--log_dir", "train.py", "train.py"], "cannot write logs to "),
    ],
)
def test_bad_input(tmp_path, ip_config, capsys, arguments, message):
    """Status 2, one line, no traceback."""
    (tmp_path / "train.py").touch()
    (tmp_path / "mixed.txt").write_text("127.0.0.1\n192.0.2.7\n")
    (tmp_path / "twice.txt").write_text("127.0.0.1\n127.0.0.2\n")
    (tmp_path / "bad.txt").write_text("127.0.0.1\n127.0.0.2 x\n")
    (tmp_path / "two.json").write_text('{"num_parts": 2}')
    options = ["--workspace", str(tmp_path)]
    if "--log_dir" in arguments:
        arguments = [*arguments[:1], str(tmp_path / "train.py"), *arguments[2:]]
    status, out, err = run_main([*options, *arguments], capsys)
    assert (status, out) == (2, "")
    assert err.startswith("dglkge-launch: error: ")
    assert message in err
    assert err.count("\n") == 1
