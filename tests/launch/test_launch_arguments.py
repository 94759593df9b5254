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
    """Nothing after the script is read, whatever it looks like."""
    assert parse_arguments(arguments)[1] == command


def test_hyphens_and_underscores() -> None:
    """Both spellings of a name mean the same; values keep theirs."""
    for name in ("--num_trainers", "--num-trainers"):
        for spelling in ([name, "3"], [f"{name}=3"]):
            assert parse_arguments([*spelling, "train.py"])[0].num_trainers == (3, 3)
    assert parse_arguments(["--ip-config=my-file.txt", "train.py"])[0].ip_config == "my-file.txt"


def test_defaults() -> None:
    """What is not asked for is left to the machine."""
    options, _ = parse_arguments(["train.py"])
    assert (options.ip_config, options.num_samplers, options.num_server_threads) == ("ip_config.txt", 0, 1)
    assert (
        options.num_trainers is options.num_servers is options.num_omp_threads is options.part_config is None
    )
    assert (options.graph_format, options.extra_envs, options.workspace) == ("csc", {}, ".")
    assert (options.stop_seconds, options.exit_seconds, options.json, options.dry_run) == (
        120,
        30,
        False,
        False,
    )
    assert options.max_restarts == 0


def test_range_of_trainers() -> None:
    """A lowest and a highest number; one number is both."""
    for text, expected in (("2:5", (2, 5)), ("4:4", (4, 4)), ("3", (3, 3))):
        assert parse_arguments(["--num_trainers", text, "train.py"])[0].num_trainers == expected


def test_extra_variables() -> None:
    """Values keep their '=', blanks and emptiness."""
    options, _ = parse_arguments(["--extra-envs", "A=b=c", "D=", "E=f g", "train.py"])
    assert options.extra_envs == {"A": "b=c", "D": "", "E": "f g"}
    options, _ = parse_arguments(["--extra_envs=A=b=c", "train.py"])
    assert options.extra_envs == {"A": "b=c"}


def test_values_of_variables_that_are_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is not among the arguments, which every user of the machine can read."""
    monkeypatch.setenv("API_KEY", "geheim=1")
    options, command = parse_arguments(["--extra_envs", "A=b", "API_KEY", "train.py", "API_KEY"])
    assert options.extra_envs == {"A": "b", "API_KEY": "geheim=1"} and command == ("train.py", "API_KEY")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given; expected: dglkge-launch [options] script.py args..."),
        (["--num_trainers", "2"], "no script was given"),
        (["--num_trainer", "2", "train.py"], "unknown option '--num_trainer'; did you mean '--num_trainers'"),
        (["--num-tainers=2", "train.py"], "unknown option '--num_tainers'; did you mean '--num_trainers'"),
        (["-x", "train.py"], "unknown option '-x'"),
        (["--num_trainers"], "--num_trainers: expected one argument"),
        (["--num_trainers", "0", "train.py"], "--num_trainers: '0' is no whole number of 1 to 4096"),
        (["--num_trainers", "two", "train.py"], "'two' is no whole number"),
        (["--num_trainers", "99999", "train.py"], "'99999' is no whole number"),
        (["--num_trainers", "3:2", "train.py"], "'3:2': the first number is above the second"),
        (["--num_trainers", "0:2", "train.py"], "'0' is no whole number of 1 to 4096"),
        (["--num_trainers", "2:", "train.py"], "'' is no whole number of 1 to 4096"),
        (["--max_restarts", "-1", "train.py"], "--max_restarts: '-1' is no whole number of 0 to 4096"),
        (["--num_samplers", "-1", "train.py"], "--num_samplers"),
        (["--stop_seconds", "nan", "train.py"], "'nan' is no number of seconds from 0 to 86400"),
        (["--stop_seconds", "soon", "train.py"], "'soon' is no number of seconds"),
        (["--extra_envs=oops", "train.py"], "--extra_envs: oops has no value here; expected NAME=VALUE or"),
        (["--extra_envs=o.o=a", "train.py"], "--extra_envs: 'o.o' is no name of a variable"),
        (["--json=1", "train.py"], "--json"),
        (["-m"], "-m needs a module"),
    ],
)
def test_refused(arguments: list[str], message: str) -> None:
    """A mistake is an InputError in one line."""
    with pytest.raises(InputError) as caught:
        parse_arguments(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_teaches() -> None:
    """Every option has a text with its default, and the page has examples and the exit statuses."""
    parser = build_parser()
    page = parser.format_help()
    assert page.startswith("usage: dglkge-launch [options] script.py args...\n")
    assert "examples:" in page and "exit status:" in page
    assert all(action.help for action in parser._actions)
    assert max(len(line) for line in page.splitlines()) <= 120


def test_help_exits_with_0(capsys: pytest.CaptureFixture) -> None:
    """--help and -h print and end."""
    for option in ("--help", "-h"):
        with pytest.raises(SystemExit) as caught:
            parse_arguments([option])
        assert caught.value.code == 0
        assert "usage: dglkge-launch" in capsys.readouterr().out
