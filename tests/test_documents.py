"""README.md, docs/ and the tables in bench/results/: their commands are valid and have produced the results below them,
their links lead somewhere, and every page can be reached. test_snippets.py runs their code."""

import contextlib
import inspect
import io
import json
import re
import shlex
import sys
from pathlib import Path

import combinations_page
import pytest
from pages import DOCS, FENCED, README, blocks
from scripts import ROOT

import fusedcomm
from fusedcomm import env
from fusedcomm.tools import cli

BENCH = ROOT / "bench"
DOCUMENTS = [README, *sorted(DOCS.rglob("*.md")), *sorted((BENCH / "results").glob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
OURS = re.compile(r"fusedcomm ((?:probe|doctor)\b[^`\n#]*)")
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
    assert {command.split()[0] for _, command in commands()} == {"probe", "doctor"}


@pytest.mark.parametrize(("document", "command"), commands(), ids=str)
def test_commands_can_be_given(document, command):
    cli._parser().parse_args([word for word in shlex.split(command) if word != "…"])


def steps() -> list[tuple[str, str]]:
    return STEPS.findall((BENCH / "results" / "steps.md").read_text().replace("\\\n", " "))


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


# ---- links


def anchors(path: Path) -> set[str]:
    """What a link to a heading of this page has after "#", as GitHub makes it."""
    headings = re.findall(r"(?m)^#+ (.*)$", without_code(path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    """The links of a page to other files of the repository and to headings, pictures included."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text()))
    return [target for target in found if "://" not in target]


def without_code(text: str) -> str:
    return FENCED.sub("", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(path):
    missing = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path
        if not to.exists() or (anchor and anchor not in anchors(to)):
            missing.append(target)
    assert missing == []


def test_every_page_and_picture_can_be_reached_from_the_index():
    reached, new = set(), [DOCS / "index.md"]
    while new:
        page = new.pop()
        reached.add(page)
        found = {(page.parent / target.split("#")[0]).resolve() for target in links(page)}
        new += [path for path in found - reached if path.suffix == ".md"]
        reached |= found
    there = {*DOCUMENTS, *(path for path in (DOCS / "pictures").iterdir())}
    assert sorted(there - reached) == []


INSTALLED = ("fusedcomm", "csrc", "kernels")
"""A wheel has no pages, so its messages say what a page would."""


def test_code_names_pages_that_exist_and_none_where_it_is_installed():
    for folder in (*INSTALLED, "bench", "tests"):
        sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")]
        named = {name for path in sources for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
        assert sources and (folder not in INSTALLED or named == set()), folder
        assert [name for name in sorted(named) if not (ROOT / name).exists()] == [], folder


# ---- README


def test_readme_says_who_it_is_for_and_what_columns_are_before_its_tables():
    text = README.read_text()
    order = ("Is it for me?", "A **wire** is", "Each column is", "<!-- headline", "**Error of the mean**", "<!-- wires")
    assert list(map(text.index, order)) == sorted(map(text.index, order))


def test_all_that_tell_how_long_make_test_takes_tell_the_same():
    told = {name: re.findall(r"(\d+) minutes on two cores", (ROOT / name).read_text()) for name in TELL_HOW_LONG}
    assert set(map(tuple, told.values())) == {("5",)}, told


TELL_HOW_LONG = ("README.md", "Makefile", "CONTRIBUTING.md")
"""Where the time of `make test` stands: measured on a quiet machine."""


def printed_by(rank, world_size, script):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    return printed.getvalue()


@pytest.mark.check
def test_readmes_script_prints_what_stands_below_it(ranks):
    (script,) = [block.code for block in blocks(README) if "init_process_group" in block.code]
    # The ranks have a process group already.
    without_group = re.sub(r"(?m)^dist\.(init|destroy)_process_group.*$", "", script)
    assert without_group.count("process_group") == 0
    printed, other = ranks.run(printed_by, without_group, world_size=2)
    check_printed(printed)
    assert other == ""


def check_printed(text: str) -> None:
    """Checks that README's script has printed what stands below it, but for what depends on the machine: the
    instruction set, threads, chunks and times."""
    (shown,) = [block.code for block in blocks(README) if block.code.startswith("fusedcomm: wire")]
    printed, expected = text.splitlines(), shown.splitlines()
    assert [shape(line) for line in printed] == [shape(line) for line in expected]
    for line, wanted in zip(printed, expected, strict=True):
        if " MiB a step" in line or ONE_BUCKET.match(line):
            assert numbers(line) == pytest.approx(numbers(wanted), rel=0.01)
    assert sum(bool(ONE_BUCKET.match(line)) for line in printed) > 2
    loss, ratio, exposed_ms = numbers(printed[-1])
    assert ratio == pytest.approx(numbers(expected[-1])[1], rel=0.05) and exposed_ms > 0
    assert loss == pytest.approx(numbers(expected[-1])[0], rel=0.05)


ONE_BUCKET = re.compile(r" +\d+ +(?P<mib>[\d.]+) +int8 +one-shot +(?P<chunks>\d+) ")
"""The line of a bucket in a plan."""


def shape(line: str) -> str:
    """The line without its numbers, its padding, and the name of the instruction set."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "#", re.sub(r"codec \w+", "codec", line)).split())


def numbers(line: str) -> list[float]:
    """The numbers that stand alone, without the number of a bucket's chunks."""
    if found := ONE_BUCKET.match(line):
        line = line[: found.start("chunks")] + line[found.end("chunks") :]
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", line)]


# ---- options


@pytest.mark.parametrize("group", ["Config", "Chunks", "TwoLevels", "LocalOptions", "attach"])
def test_every_option_is_in_the_help_of_what_takes_it(group):
    """The documents send users there for the options."""
    options = getattr(fusedcomm, group)
    names = [name for name in inspect.signature(options).parameters]
    assert names and [name for name in names if f"\n        {name}: " not in options.__doc__] == []


# ---- combinations


def test_the_page_of_combinations_is_that_of_the_table():
    assert combinations_page.PAGE.read_text() == combinations_page.page()


# ---- environment variables


def test_every_environment_variable_is_told_of():
    variables = [value for name, value in inspect.getmembers(env) if name.isupper() and isinstance(value, str)]
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(variables) == 7 and [name for name in variables if f"`{name}" not in text] == []
