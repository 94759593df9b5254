"""``dglkge job list``, ``stop`` and ``watch``: what they print, whom they signal, what they refuse."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dglkge.distributed.jobs import JobEntry, Registration, process_start
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.report.run_state import prometheus_text, run_state
from tests.toy_kg import REPOSITORY

LAUNCHER = """
import os, signal, socket, sys
from dglkge.distributed.jobs import JobEntry, Registration, process_start
job, run, num_signals = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
launcher = (socket.gethostname(), os.getpid(), process_start(os.getpid()))
names = dict(zip(("host", "launcher_pid", "launcher_started"), launcher))
entry = Registration(JobEntry(job, user="ann", run=run, log_dir="/logs", **names))
print("ready", flush=True)
for _ in range(int(num_signals)):
    signal.sigwait([signal.SIGTERM])
entry.release()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator:
    """Start a process that is registered as a job's launcher and ends after so many SIGTERM."""
    with contextlib.ExitStack() as stack:

        def start(num_signals: int) -> str:
            job, environment = new_nonce(), {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            command = [sys.executable, "-c", LAUNCHER, job, str(tmp_path / job), str(num_signals)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
            stack.callback(process.kill)
            assert process.stdout.readline() == b"ready\n"
            return job

        yield start


@pytest.mark.parametrize("by", ["run", "job", "beginning"])
def test_list_and_stop(launcher, tmp_path, by, shown, report, refusal):
    job = launcher(1)
    (line,) = [line for line in shown("jobs").splitlines() if job in line.split()]
    assert " ann " in line and line.endswith(str(tmp_path / job))
    (entry,) = [entry for entry in report("jobs") if entry["job"] == job]
    assert entry["run"] == str(tmp_path / job) and entry["is_launched_here"]
    assert entry["allocated_shared_memory_bytes"] == 0
    name = {"run": str(tmp_path / job), "job": job, "beginning": job[:12]}[by]
    line = shown("stop", name, "--seconds", "30")
    assert line.startswith(f"stopped job {job} of user ann, launcher pid ")
    assert f"no job of this machine matches {name!r}; running: " in refusal("stop", name)


def test_stop_now_is_a_second_signal(launcher, call, shown):
    """One signal lets the trainers commit; the limit of the wait is kept."""
    status, _, err = call("stop", launcher(2), "--seconds", "0.3")
    assert status == 1 and "still runs after 0.3 s; --now ends it without a commit" in err
    shown("stop", launcher(2), "--now", "--seconds", "30")


def test_who_cannot_be_stopped_from_here(monkeypatch, refusal):
    """A job whose launcher is on another machine, which gets no signal, and another user's."""
    kill, pid = mock.Mock(side_effect=PermissionError), os.getpid()
    monkeypatch.setattr("dglkge.cli.jobs.os.kill", kill)
    launcher = {"launcher_pid": pid, "launcher_started": process_start(pid)}
    for host, words, signals in (
        ("far", "was launched from another machine: stop it there", []),
        (socket.gethostname(), "is not yours to stop", [mock.call(pid, signal.SIGTERM)]),
    ):
        registration = Registration(JobEntry(new_nonce(), "", host, **launcher))
        try:
            assert words in refusal("stop", registration.entry.job)
        finally:
            registration.release()
        assert kill.mock_calls == signals


NOW = 1_700_000_000.0  # 2023-11-14T22:13:20Z
PROCESSES = {
    "trainer 0": {"machine": 0, "memory_bytes": 3 * 2**30, "shared_bytes": 2**30, "bytes_sent": 512},
    "trainer 1": {"machine": 1, "memory_bytes": 2**30, "shared_bytes": 2**20, "bytes_sent": 1024},
    "server 0": {"machine": 0, "memory_bytes": 2**20, "shared_bytes": 4096},
}


def line(epoch: int, done: int, seconds: float, clock: str, **more: Any) -> dict[str, Any]:
    """Return a line of stats.jsonl; an epoch has 10 batches."""
    numbers = {"loss": 0.5, "epoch_loss": 0.75, "edges_per_second": 1234.5, "bytes_sent": 1536}
    place = {"epoch": epoch, "batches_done": done, "num_batches": 10, "epoch_seconds": seconds}
    return {"time": f"2023-11-14T{clock}.000Z", **place, **numbers, **more}


LINES = [
    line(0, 10, 20.0, "22:12:30"),
    {"time": "2023-11-14T22:12:35.000Z", "epoch": 0, "valid": {"mrr": 0.5, "hits@1": 0.25}},
    line(1, 10, 20.0, "22:12:50"),
    {"time": "2023-11-14T22:12:55.000Z", "epoch": 1, "valid": {"mrr": 0.25, "hits@1": 0.25}},
    line(2, 2, 4.0, "22:13:00"),
    line(2, 4, 10.0, "22:13:10", processes=PROCESSES),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder, logs = tmp_path / "my rün", tmp_path / "logs"
    (folder / "checkpoint" / "v7").mkdir(parents=True)
    logs.mkdir()
    text = "".join(json.dumps(entry) + "\n" for entry in LINES)
    (folder / "stats.jsonl").write_text(text + '{"epoch": 2, "batch', encoding="utf-8")
    (folder / "config.json").write_text('{"training": {"num_epochs": 4}}')
    (folder / "job.json").write_text('{"log_dir": "/nowhere/else", "log_dir_from_here": "../logs"}')
    (folder / "checkpoint" / "checkpoint_version.txt").write_text("7\n")
    (folder / "checkpoint" / "v7" / "manifest.json").write_text('{"progress": {"finished_epochs": 2}}')
    (logs / "launcher.log").write_text("2023-11-14T22:12:00.500Z 1 server(s) and 2 trainer(s) on 10.0.0.1\n")
    text = "resumed: 2 epochs\nClient [7] waits on 10.0.0.1:1\n[red]not markup[/red]\n"
    (logs / "trainer-0.log").write_text(text)
    record = {"time": "2023-11-14T22:12:40.000Z", "process": "trainer 1", "message": "slow\ndisk"}
    record["level"] = "warning"
    hidden = {**record, "level": "debug", "message": "Server (0) shutdown."}
    (logs / "trainer-1.log").write_text(json.dumps(record) + "\n" + json.dumps(hidden) + "\n")
    return folder


def test_state_of_a_run_that_trains(run, shown):
    state = run_state(run, now=NOW)
    assert state["state"] == "training" and state["quiet_seconds"] == 10.0
    counts = {"epoch": 3, "num_epochs": 4, "batches_done": 4, "num_batches": 10}
    assert state["progress"] == {**counts, "epochs_done": 2.4, "fraction": 0.6}
    assert (state["loss"], state["epoch_loss"], state["edges_per_second"]) == (0.5, 0.75, 1234.5)
    assert state["seconds_left"] == pytest.approx(16 * 3.0)  # 2 batches took 6 s
    assert state["valid"]["last"] == {"epoch": 2, "mrr": 0.25, "hits@1": 0.25}
    assert state["valid"]["best"]["epoch"] == 1
    assert state["version"] == 7 and state["test"] is None and state["processes"] == PROCESSES
    assert [(event["process"], event["message"]) for event in state["events"]] == [
        ("launcher", "1 server(s) and 2 trainer(s) on 10.0.0.1"),
        ("trainer 0", "epoch 1: valid MRR 0.5000"),
        ("trainer 1", "slow\ndisk"),
        ("trainer 0", "epoch 2: valid MRR 0.2500"),
    ]
    assert state["log"] == ["resumed: 2 epochs", "[red]not markup[/red]"]
    out = shown("watch", run, "--once")
    for words in (
        "epoch       3 of 4, batch 4 of 10, 48 s left",
        "loss        0.5000, 0.7500 in this epoch",
        "valid MRR   0.2500 after epoch 2; best 0.5000 after epoch 1",
        "2023-11-14 22:12:40  trainer 1: slow",
    ):
        assert words in out, out
    assert "[red]not markup[/red]" in out and "1,234 edges/s" in out
    assert re.search(r"^trainer 0 +0 +3\.0 GiB +1\.0 GiB +512 B$", out, re.MULTILINE), out
    assert re.search(r"^server 0 +0 +1\.0 MiB +4\.0 KiB +–$", out, re.MULTILINE), out
    add(run, {**line(2, 6, 12.0, "22:13:20"), "loss": float("nan")})
    state = json.loads(shown("watch", run, "--json"), parse_constant=lambda name: pytest.fail(name))
    assert state["loss"] is None and state["progress"]["batches_done"] == 6


def add(run, entry):
    with (run / "stats.jsonl").open("a") as lines:
        lines.write("\n" + json.dumps(entry) + "\n")


def test_a_run_without_news_a_finished_one_and_a_new_one(run):
    assert run_state(run, now=NOW + 51)["state"] == "no news"
    add(run, line(3, 10, 20.0, "22:14:00"))
    (run / "metrics.json").write_text('{"test": {"both": {"mrr": 0.625}}}')
    state = run_state(run, now=NOW + 1000)
    assert state["state"] == "finished" and state["seconds_left"] is None and state["test"] == {"mrr": 0.625}
    (run / "stats.jsonl").unlink()
    state = run_state(run, now=NOW)
    assert (state["state"], state["progress"]["epoch"], state["quiet_seconds"]) == ("not begun", 0, None)
    progress = '{"progress": {"finished_epochs": 2, "ended_after": 3}}'  # a run that ended early
    (run / "checkpoint" / "v7" / "manifest.json").write_text(progress)
    assert run_state(run, now=NOW)["state"] == "finished"


def test_half_written_files_and_lines_of_older_versions(run):
    for name in ("config.json", "job.json", "metrics.json", "checkpoint/v7/manifest.json"):
        (run / name).write_text('{"half')
    entry = line(0, 5, 1.0, "22:13:00")
    del entry["time"]
    (run / "stats.jsonl").write_text(json.dumps(entry))
    os.utime(run / "stats.jsonl", (NOW - 7, NOW - 7))
    state = run_state(run, now=NOW)
    assert state["quiet_seconds"] == pytest.approx(7) and state["processes"] == {}
    assert state["progress"]["num_epochs"] is None and state["seconds_left"] is None
    assert state["logs"] is None and state["events"] == []


def test_logs_of_the_newest_attempt_and_a_given_folder(run, tmp_path):
    for number in (1, 2):
        folder = tmp_path / "logs" / f"attempt-{number}"
        folder.mkdir()
        (folder / "trainer-0.log").write_text(f"attempt {number}\n")
        os.utime(folder, (NOW + number, NOW + number))
    assert run_state(run, now=NOW)["log"] == ["attempt 2"]
    assert run_state(run, tmp_path / "logs" / "attempt-1", now=NOW)["log"] == ["attempt 1"]
    with pytest.raises(InputError, match="there is no folder of logs "):
        run_state(run, tmp_path / "absent")


SAMPLE = re.compile(
    r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{(?P<labels>(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} '
    r"(?P<value>[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|Inf)|NaN)"
)
"""A sample of the text exposition format 0.0.4, from its description."""


def samples(text: str) -> dict[str, dict[str, float]]:
    """Read the format strictly: each family once, its help and type before its samples, no other line."""
    families: dict[str, dict[str, float]] = {}
    _, *parts = re.split("^# HELP ", text, flags=re.MULTILINE)
    for part in parts:
        family = part.split(" ")[0]
        _, type_, *lines, end = part.split("\n")
        assert family not in families and type_ == f"# TYPE {family} gauge" and end == ""
        matches = [SAMPLE.fullmatch(line) for line in lines]
        assert all(sample and sample["name"] == family for sample in matches), part
        families[family] = {sample["labels"]: float(sample["value"]) for sample in matches}
        assert len(families[family]) == len(lines)
    return families


def test_prometheus_reads_the_same_numbers(run):
    state = run_state(run, now=NOW)
    state |= {"run": 'a "b"\\c\nd', "loss": float("inf"), "epoch_loss": float("nan")}
    families = samples(prometheus_text(state, NOW))
    label = 'run="a \\"b\\"\\\\c\\nd"'
    assert families["dglkge_up"] == {label: 1.0} and families["dglkge_finished"] == {label: 0.0}
    assert families["dglkge_loss"][label] == float("inf") and "dglkge_epoch_loss" in families
    assert families["dglkge_epochs_done"][label] == 2.4
    metrics = families["dglkge_valid_metric"]
    assert metrics == {f'{label},metric="mrr"': 0.25, f'{label},metric="hits@1"': 0.25}
    memory = families["dglkge_process_resident_memory_bytes"]
    assert memory[f'{label},process="trainer 1",machine="1"'] == 2**30 and len(memory) == 3
    assert len(families["dglkge_process_epoch_sent_bytes"]) == 2
    assert families["dglkge_written_timestamp_seconds"][label] == NOW
    assert "dglkge_test_metric" not in families


@contextlib.contextmanager
def follow(run: Path, target: Path, interval: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dglkge", "job", "watch", str(run), "--prometheus", str(target)]
    command += ["--interval", interval]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_it_replaces_the_file_until_the_run_is_finished(run, call, tmp_path):
    target = tmp_path / "run.prom"
    target.write_text("old")
    before = target.stat().st_ino
    assert call("watch", run, "--prometheus", target, "--once") == (0, "", "")
    assert target.stat().st_ino != before
    assert list(samples(target.read_text())["dglkge_finished"].values()) == [0.0]
    with follow(run, target, "0.1") as child:
        add(run, line(3, 10, 20.0, "22:14:00"))
        assert child.communicate(timeout=60) == ("", None) and child.returncode == 0
    assert list(samples(target.read_text())["dglkge_finished"].values()) == [1.0]
    assert [path.name for path in tmp_path.iterdir() if ".tmp" in path.name] == []


def test_ctrl_c_ends_it_well(run, tmp_path, in_foreground):
    target = tmp_path / "run.prom"
    wait = f"import os, time\nwhile not os.path.exists({str(target)!r}): time.sleep(0.02)"
    with follow(run, target, "3600") as child:
        subprocess.run([sys.executable, "-c", wait], timeout=60, check=True)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60) == ("", None) and child.returncode == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("watch RUN/checkpoint/..//..", "is no folder of a run: it has none of config.json, stats.jsonl, "),
        ("watch RUN --interval 0", "--interval must be 0.1 to 86400, got 0"),
        ("watch RUN --once --logs absent", "there is no folder of logs absent"),
        ("watch RUN --once --prometheus absent/run.prom", "cannot write absent/run.prom: No such file"),
        ("stop x --seconds nan", "--seconds must be 0.1 to 86400, got"),
    ],
)
def test_mistakes(run, refusal, arguments, words):
    assert words in refusal(*(word.replace("RUN", str(run)) for word in arguments.split()))
