"""The scripts in examples/ run on two ranks, and differ from Horovod's as little as they say."""

import difflib
import re
import sys

import pytest
from scripts import ROOT, torchrun

EXAMPLES = ROOT / "examples"
INSTALLED = (
    "import runpy, sys, fusedcomm.horovod; fusedcomm.horovod.install(); runpy.run_path(sys.argv[1], None, '__main__')"
)


def accuracies(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"epoch \d: ([\d.]+)% right", text)]


@pytest.mark.full
def test_the_example_learns_on_two_ranks(tmp_path):
    found = accuracies(torchrun(EXAMPLES / "horovod_after.py", cwd=tmp_path, FUSEDCOMM_QUIET="1").stdout)
    assert len(found) == 3 and found[-1] > 95 and found[-1] >= found[0]


@pytest.mark.full
def test_the_script_for_horovod_runs_as_it_is_with_install(tmp_path):
    (script := tmp_path / "installed.py").write_text(INSTALLED)
    found = accuracies(torchrun(script, EXAMPLES / "horovod_before.py", cwd=tmp_path).stdout)
    assert len(found) == 3 and found[-1] > 95


def test_before_and_after_differ_in_the_import_and_the_wire_alone():
    before, after = ((EXAMPLES / f"horovod_{name}.py").read_text().split('"""', 2)[2] for name in ("before", "after"))
    changes = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    assert {line[2:].strip() for line in changes} - {""} == {
        "import horovod.torch as hvd",
        "import fusedcomm.horovod as hvd",
        "compression=hvd.Compression.fp16,",
        "compression=hvd.Compression.bf16,",
    }


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's ranks meet over Linux's loopback interface")
def test_the_elastic_example_ends_with_all_ranks_if_none_is_lost(tmp_path):
    text = torchrun(EXAMPLES / "horovod_elastic.py", cwd=tmp_path).stdout
    (ranks, loss) = re.search(r"(\d+) ranks at the end, loss ([\d.]+)", text).groups()
    assert ranks == "2" and float(loss) < 0.5
