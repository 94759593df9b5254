"""``dglkge serve``: the process, its address, its end, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest

import dglkge
from tests import warm
from tests.functional.job import environment

TOKEN = "correct-horse-battery"
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


@pytest.fixture
def start(run):
    with contextlib.ExitStack() as stack:

        def start_one(*options, command=None):
            words = [*(command or warm.python()), "-m", "dglkge", "serve", str(run), *options]
            process = stack.enter_context(subprocess.Popen(words, **PIPES, text=True, env=environment()))
            stack.callback(process.kill)
            return process

        yield start_one


def facts_of(process):
    lines = list(itertools.takewhile(lambda line: line != "}\n", iter(process.stdout.readline, "")))
    assert lines, process.stderr.read()
    return json.loads("".join(lines) + "}")


def ask(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.load(answer)


def end_of(process, number):
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.usefixtures("in_foreground")
def test_ctrl_c_ends_it(start, run, dataset, refusal):
    process = start("--port", "0", "--json")
    facts = facts_of(process)
    assert facts["url"] == f"http://127.0.0.1:{facts['port']}/" and facts["port"] > 0
    assert facts["entities"] == {name: dataset.num_entities(name) for name in dataset.entity_types}
    assert ask(f"{facts['url']}health")["status"] == "ok"
    assert len(ask(f"{facts['url']}similar?entity=person1&k=3")["similar"]) == 3
    assert end_of(process, signal.SIGINT) == (130, "", "")
    port = facts["port"]
    with socket.create_server(("127.0.0.1", port)):  # it is free again
        line = refusal("serve", run, "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; --port 0" in line


@pytest.mark.usefixtures("in_background")
def test_in_the_background_with_a_token(start, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "token").chmod(0o600)
    options = ("--port", "0", "--json", "--token", str(tmp_path / "token"), "--host", "localhost")
    process = start(*options, command=[sys.executable])  # whose command line is looked at
    facts = facts_of(process)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{facts['url']}model")
    assert refused.value.code == 401
    refused.value.close()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGHUP)
    assert ask(f"{facts['url']}model", Authorization=f"Bearer {TOKEN}")["relations"] == facts["relations"]
    assert TOKEN not in " ".join(psutil.Process(process.pid).cmdline())
    assert psutil.Process(process.pid).children() == []
    assert end_of(process, signal.SIGTERM) == (143, "", "")


def test_an_agent_asks(run, tmp_path):
    mcp = pytest.importorskip("mcp")
    python, *words = [*warm.python(), "-m", "dglkge", "serve", str(run), "--mcp", "--rules"]
    process = mcp.StdioServerParameters(command=python, args=words, env=environment())

    async def ask_all() -> list:
        async with mcp.Client(mcp.stdio_client(process)) as client:
            tools = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
            assert tools["explain"]["required"] == ["head", "relation", "tail"]
            calls = [
                ("predict", {"head": "person1", "relation": "lives_in", "k": 3}),
                ("explain", {"head": "person1", "relation": "lives_in", "tail": "town1"}),
                ("search_entity", {"text": "person1", "k": 1}),
                ("ask", {"question": "(a, b, c)"}),
            ]
            return [await client.call_tool(*call) for call in calls]

    predicted, explained, matches, refused = asyncio.run(asyncio.wait_for(ask_all(), 120))
    opened = dglkge.open_run(run).with_rules()
    tails = [answer["tail"] for answer in json.loads(predicted.content[0].text)["answers"]]
    assert tails == opened.predict_tails("person1", "lives_in", 3)["entity"].tolist()
    assert json.loads(explained.content[0].text) == opened.explain("person1", "lives_in", "town1")
    assert json.loads(matches.content[0].text) == {"name": "person1", "type": "person"}
    assert refused.is_error and "begins with a variable" in refused.content[0].text


@pytest.mark.usefixtures("in_foreground")
def test_a_signal_ends_what_an_agent_asks(start):
    pytest.importorskip("mcp")
    process = start("--mcp", command=[sys.executable])
    process.stdin.write('{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
    process.stdin.flush()
    assert process.stdout.readline()  # it answers now
    assert end_of(process, signal.SIGTERM)[0] == 143


@pytest.mark.parametrize(
    "words, text",
    [
        ("--host 0.0.0.0", "so --token FILE is needed; allowed without one: 127.0.0.1, ::1, localhost"),
        ("--host no.such.host", "--host 'no.such.host' has no address"),
        ("--threads 0", "--threads must be 1 to"),
        (f"--token {TOKEN}", "--token takes a file"),
        ("--token -", "the token that was entered has 5 characters"),
    ],
)
def test_mistakes(refusal, run, monkeypatch, words, text):
    monkeypatch.setattr("getpass.getpass", lambda prompt: "short")
    line = refusal("serve", run, "--port", "0", *words.split())
    assert text in line and TOKEN not in line


@pytest.mark.parametrize(
    "content, mode, text",
    [
        (b"short\n", 0o600, "has 5 characters, at least 16 are needed"),
        ("пароль-пароль-пароль".encode(), 0o600, "has other characters than ASCII"),
        (b"\xff" * 20, 0o600, "is not text in UTF-8"),
        (TOKEN.encode(), 0o644, "other users can read the file of --token: its mode is 644; chmod 600 it"),
    ],
)
def test_tokens_that_cannot_be_used(refusal, run, tmp_path, content, mode, text):
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(mode)
    line = refusal("serve", run, "--port", "0", "--token", tmp_path / "token")
    assert text in line and content.decode("latin-1").strip() not in line
