"""README.md and docs/: their commands are valid and have produced the results below them, and their links lead to
existing files."""

import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from fusedcomm import env
from fusedcomm.tools import cli

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = re.compile(r"fusedcomm ((?:plan|probe|demo|timeline|doctor)\b[^`\n#]*)")
STEPS = re.compile(r"<!-- (\S+) -->\n```\nsudo \S*python (bench/ddp_step\.py [^`]*)\n```")


def commands() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text().replace("\\\n", " ")
        # A command is either quoted within a sentence or a line of its own.
        for pattern in (rf"`{OURS.pattern}`", rf"(?m)^(?:    |torchrun .*-m |\.?\S*python\S* -m )?{OURS.pattern}"):
            found += [(path.name, match.strip()) for match in re.findall(pattern, text)]
    return sorted(set(found))


def test_there_are_commands_to_check():
    assert {command.split()[0] for _, command in commands()} == {"plan", "probe", "timeline", "doctor"}


@pytest.mark.parametrize(("document", "command"), commands(), ids=str)
def test_commands_can_be_given(document, command):
    arguments = [word for word in shlex.split(command) if word != "…"]
    if arguments == ["timeline"] or arguments == ["plan"]:
        return  # the text only names the command
    cli._parser().parse_args(arguments)


def steps() -> list[tuple[str, str]]:
    return STEPS.findall((ROOT / "docs" / "benchmarks.md").read_text().replace("\\\n", " "))


@pytest.mark.parametrize(("name", "command"), steps(), ids=str)
def test_what_a_table_was_measured_with_is_the_command_above_it(monkeypatch, name, command):
    monkeypatch.syspath_prepend(str(BENCH))
    import ddp_step

    monkeypatch.setattr(sys, "argv", shlex.split(command))
    given = vars(ddp_step.parse())
    document = json.loads((BENCH / "results" / f"ddp-step-{name}.json").read_text())
    settings = document["settings"]
    assert {key: given[key] for key in settings} == settings
    assert given["json"] == f"bench/results/ddp-step-{name}.json"
    links = list(dict.fromkeys(case.split("/")[1] for case in document["cases"]))
    assert given["link"] == links


def test_every_table_of_steps_has_its_command():
    measured = {path.stem.removeprefix("ddp-step-") for path in (BENCH / "results").glob("ddp-step-*.json")}
    assert {name for name, _ in steps()} == measured


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text())]
    missing = [t for t in targets if t and "://" not in t and not (path.parent / t).exists()]
    assert missing == []


def test_every_environment_variable_is_told_of():
    variables = [value for name, value in inspect.getmembers(env) if name.isupper() and isinstance(value, str)]
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(variables) == 6 and [name for name in variables if f"`{name}" not in text] == []
