"""Wrong arguments: every command answers each with what is wrong, why, and what to change, and with nothing else.

The options come from the parsers themselves, so an option without a row here fails a test.
"""

import argparse

import pytest
from scripts import python

from fusedcomm import files
from fusedcomm.tools import cli

NP, MEMBERS = ("-np", "2"), ("-np", "2", "--members")
JOIN = (*MEMBERS, "--join", "10.0.0.7:1")
WHOLE, ABOVE, LEAST = "use a whole number of at least 1", "use a number above 0", "use a number of at least 0"
Rows = list[tuple[str, tuple[str, ...], str]]


# For each command and option: rows of (the wrong value, other arguments, what the message says).
WRONG: dict[str, dict[str, Rows]] = {
    "probe": {
        "--script": [
            ("no.py", (), "there is no file no.py: name a Python file"),
            ("no", (), "there is no file no: name a Python file"),
            ("{trace}:make", (), "{trace} is not a Python file: its name must end in .py"),
            ("{trace}", (), "{trace} is not a Python file: its name must end in .py"),
            ("/", (), "/ is a folder: name a Python file, PATH.py or PATH.py:FUNCTION"),
            ("no.py", ("--params", "1e6"), "--params 1e+06 describes the synthetic step, and --script no.py"),
            ("no.py", ("--backward-ms", "0"), "--backward-ms 0 describes the synthetic step"),
        ],
        "--params": [("0", (), "use a number of at least 1 and below")],
        "--backward-ms": [(value, (), LEAST) for value in ("-1", "nan", "inf", "many", "")],
        "--seconds": [("1", (), "use a number of at least 5")],
        "--caps": [("0", (), ABOVE)],
        "--wires": [
            ("int3", (), "'int3' is no wire: use some of fp32 bf16"),
            ("off", (), "--wires: off is DDP's own all-reduce, which is always compared: leave it out"),
        ],
        "--accept": [
            ("int3", (), "'int3' is no wire"),
            ("int8", ("--wires", "bf16"), "it is not among --wires bf16; add it to --wires"),
        ],
        "--json": [
            ("/dev/null/a.json", (), "--json /dev/null/a.json cannot be written ([Errno 17] File exists: '/dev/null')"),
            (
                "/",
                (),
                "--json / cannot be written ([Errno 21] it is a folder, and a file is wanted: '/'): name another",
            ),
            ("/proc/a.json", (), "--json /proc/a.json cannot be written ("),
        ],
    },
    "doctor": {},
    "run": {
        "--num-proc": [("0", (), WHOLE), ("1.5", (), WHOLE), ("many", (), WHOLE)],
        "--hosts": [
            ("one:none", NP, "'one:none' is not possible: use host:slots"),
            (":2", NP, "':2' is not possible: use host:slots"),
            ("one:1,-oProxyCommand=x:4", NP, "'-oProxyCommand=x:4' is not possible: use host:slots"),
            ("one:1", NP, "has 1 slots, too few for -np 2"),
        ],
        "--join": [
            ("one:1", NP, "--join one:1 needs --members"),
            ("10.0.0.7", MEMBERS, "--join 10.0.0.7 is not possible: use host:port"),
        ],
        "--address": [("one", NP, "--address one needs --members")],
        "--min-np": [
            ("0", NP, WHOLE),
            ("1", NP, "--min-np and --reset-limit need --elastic"),
            ("1", MEMBERS, "fusedcomm.Members(min_ranks=…) says it for --members"),
            ("3", (*NP, "--elastic"), "--min-np 3 is more than -np 2"),
        ],
        "--max-restarts": [
            ("-1", NP, "use a whole number of at least 0"),
            ("1", NP, "--max-restarts needs --elastic or --members"),
        ],
        "--reset-limit": [
            ("-1", NP, "use a whole number of at least 0"),
            ("0", NP, "--min-np and --reset-limit need --elastic"),
        ],
    },
}


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The long name of each option of a parser, and the metavar of each positional argument."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    longs = ([name for name in action.option_strings if name.startswith("--")] for action in actions)
    return {names[0] if names else action.metavar for names, action in zip(longs, actions, strict=True)}


def with_values(parser: argparse.ArgumentParser) -> set[str]:
    """Those of options_of() that take a value that can be wrong: no flags, and not the words of another program."""
    without = [action for action in parser._actions if action.nargs in (0, argparse.REMAINDER)]
    names = {name for action in without for name in (*action.option_strings, action.metavar)}
    return options_of(parser) - names


def rows() -> list[tuple[str, str, str, tuple[str, ...], str]]:
    return [
        (command, option, *row)
        for command, options in WRONG.items()
        for option, of_option in options.items()
        for row in of_option
    ]


def refusal(capsys, *argv: str) -> str:
    """What a refused command writes. It is two lines of stderr, and names the command."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(argv))
    assert stopped.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    what, hint = written.err.splitlines()
    assert hint.startswith("All options, with an example: fusedcomm") and hint.endswith("--help")
    return what


def test_every_option_has_a_row():
    assert {name: with_values(parser) for name, parser in commands().items()} == {
        name: set(options) for name, options in WRONG.items()
    }
    assert all(of_option for options in WRONG.values() for of_option in options.values())


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """An existing file. The process is in an empty folder, so that nothing is written elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.json").write_text("[]")
    return str(tmp_path / "trace.json")


@pytest.mark.parametrize(("command", "option", "value", "others", "said"), rows())
def test_a_wrong_value_is_named_with_the_reason_and_the_remedy(capsys, trace, command, option, value, others, said):
    value, *others = (word.replace("{trace}", trace) for word in (value, *others))
    argv = (command, *others, option, value) if option.startswith("-") else (command, value, *others)
    what = refusal(capsys, *argv, *(("true",) if command == "run" else ()))
    assert what.startswith(f"fusedcomm {command}: ") and said in what.replace(trace, "{trace}")
    named = what.removeprefix(f"fusedcomm {command}: ")
    assert option in named and (value in named or "combined" in named or command == "run")
    assert "_" not in named.replace(trace, "").replace("(min_ranks=…)", ""), "the user's names have no underscores"


def test_a_check_leaves_files_as_they_are(tmp_path):
    old, new, link = (tmp_path / name for name in ("old.json", "new.json", "link.json"))
    old.write_text("old")
    link.symlink_to(new)
    for path in (old, new, link):
        files.check_writable(path)
    assert old.read_text() == "old" and link.is_symlink() and not new.exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "required: COMMAND"),
        (("frobnicate",), "invalid choice: 'frobnicate'"),
        (("probe", "--caps"), "--caps: expected at least one argument"),
        (("probe", "--second", "9"), "unrecognized arguments: --second 9"),  # no abbreviations
        (("doctor", "stray"), "unrecognized arguments: stray"),
        (("run", "-np", "2"), "no command"),
        (("run", *MEMBERS, "--elastic", "true"), "exclude each other"),
        (("run", *JOIN, "-H", "elsewhere:2", "true"), "not of elsewhere: start `fusedcomm run` there"),
        (("run", *JOIN, "--address", "192.0.2.1", "true"), "this host cannot listen at 192.0.2.1"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(capsys, argv, said):
    assert said in refusal(capsys, *argv)


def test_one_rank_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "torchrun started one rank" in refusal(capsys, "probe")


LOADED = "from fusedcomm.tools import cli; import sys, atexit; atexit.register(lambda: print(*sys.modules)); cli.main()"


@pytest.mark.parametrize(
    "argv",
    [
        ("probe", "--accept", "int8", "--wires", "bf16"),
        ("probe", "--script", "no.py"),
        ("probe", "--json", "/"),
        ("probe", "--help"),
    ],
    ids=" ".join,
)
def test_no_torch_is_loaded_for_an_answer_that_needs_none(tmp_path, argv):
    done = python("-c", LOADED, *argv, cwd=tmp_path)
    assert done.returncode == (0 if "--help" in argv else 2), done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert "fusedcomm.tools.cli" in loaded and not {"torch", "numpy", "matplotlib"} & set(loaded)


@pytest.mark.parametrize("command", ["", *commands()])
def test_help_has_a_sentence_an_example_and_every_default(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    parser = commands()[command] if command else cli._parser()
    assert parser.description and parser.description.splitlines()[0] in text
    assert f"fusedcomm {command}".strip() in text[text.index("example") :]
    assert "None" not in text and "SUPPRESS" not in text
    for action in parser._actions:
        if action.option_strings and not action.required and not isinstance(action, argparse._HelpAction):
            assert action.help.endswith(")") or action.help.startswith("or:") or action.dest in WITHOUT_DEFAULT, action


WITHOUT_DEFAULT = ("version", "script")
"""Options that have no default: without them the command asks, or does something else."""
