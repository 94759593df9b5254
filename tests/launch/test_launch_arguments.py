"""The command line: where the launcher's options end and the script's begin."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.launch.arguments import build_parser, parse_arguments


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train.py"], ("train.py",)),
        (["train.py", "--num_trainers", "3", "-m", "x"], ("train.py", "--num_trainers", "3", "-m", "x")),
        (["--num_trainers", "3", "train.py", "--", "a b", "$c;'\""], ("train.py", "--", "a b", "$c;'\"")),
        (["-m", "package.module", "--json"], ("-m", "package.module", "--json")),
        (["--json", "-m", "package.module"], ("-m", "package.module")),
        (["--json", "--", "-odd name.py", "x"], ("-odd name.py", "x")),
        (["--extra_envs", "A=B", "C=d e=f", "train.py", "X=Y"], ("train.py", "X=Y")),
        (["--extra_envs", "train.py"], ("train.py",)),
        (["--extra_envs=A=B", "train.py"], ("train.py",)),
        (["--num-trainers=3", "train.py"], ("train.py",)),
    ],
)
def test_script_and_all_after_it_is_the_scripts(arguments: list[str], command: tuple[str, ...]) -> None:
    assert parse_arguments(arguments)[1] == command


def test_hyphens_and_underscores() -> None:
    """Both spellings of a name mean the same; values keep theirs."""
    for name in ("--num_trainers", "--num-trainers"):
        for spelling in ([name, "3"], [f"{name}=3"]):
            assert parse_arguments([*spelling, "train.py"])[0].num_trainers == (3, 3)
    assert parse_arguments(["--num_trainers", "2:5", "train.py"])[0].num_trainers == (2, 5)
    assert parse_arguments(["--ip-config=my-file.txt", "train.py"])[0].ip_config == "my-file.txt"
    options, _ = parse_arguments(["--extra-envs", "A=b=c", "D=", "E=f g", "train.py"])
    assert options.extra_envs == {"A": "b=c", "D": "", "E": "f g"}


def test_defaults() -> None:
    """What is not asked for is left to the machine."""
    options, _ = parse_arguments(["train.py"])
    assert (options.ip_config, options.num_samplers, options.num_server_threads) == ("ip_config.txt", 0, 1)
    unset = ("num_trainers", "num_servers", "num_omp_threads", "part_config")
    assert [getattr(options, name) for name in unset] == [None] * 4
    assert (options.graph_format, options.extra_envs, options.workspace) == ("csc", {}, ".")
    assert (options.stop_seconds, options.exit_seconds, options.max_restarts) == (120, 30, 0)
    assert not options.json and not options.dry_run


def test_values_of_variables_that_are_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is not among the arguments, which every user of the machine can read."""
    monkeypatch.setenv("API_KEY", "geheim=1")
    options, command = parse_arguments(["--extra_envs", "A=b", "API_KEY", "train.py", "API_KEY"])
    assert options.extra_envs == {"A": "b", "API_KEY": "geheim=1"} and command == ("train.py", "API_KEY")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given; expected: dglkge-launch [options] script.py args..."),
        (["--num-tainers=2", "train.py"], "unknown option '--num_tainers'; did you mean '--num_trainers'"),
        (["-x", "train.py"], "unknown option '-x'"),
        (["--num_trainers"], "--num_trainers: expected one argument"),
        (["--num_trainers", "0", "train.py"], "--num_trainers: '0' is no whole number of 1 to 4096"),
        (["--num_servers", "99999", "train.py"], "--num_servers: '99999' is no whole number"),
        (["--num_trainers", "3:2", "train.py"], "'3:2': the first number is above the second"),
        (["--num_trainers", "2:", "train.py"], "'' is no whole number of 1 to 4096"),
        (["--stop_seconds", "nan", "train.py"], "'nan' is no number of seconds from 0 to 86400"),
        (["--extra_envs=oops", "train.py"], "--extra_envs: oops has no value here; expected NAME=VALUE or"),
        (["--extra_envs=o.o=a", "train.py"], "--extra_envs: 'o.o' is no name of a variable"),
        (["--json=1", "train.py"], "--json"),
        (["-m"], "-m needs a module"),
    ],
)
def test_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arguments(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_teaches(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["-h"])
    page = capsys.readouterr().out
    assert caught.value.code == 0 and page == build_parser().format_help()
    assert page.startswith("usage: dglkge-launch [options] script.py args...\n")
    assert "examples:" in page and "exit status:" in page
    assert all(action.help for action in build_parser()._actions)
    assert max(len(line) for line in page.splitlines()) <= 120
