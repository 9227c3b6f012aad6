"""The scripts in examples/ run on two ranks, and differ from Horovod's as little as they say."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S
from test_lifecycle import ROOT, clean_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INSTALLED = (
    "import runpy, sys, fusedcomm.horovod; fusedcomm.horovod.install(); runpy.run_path(sys.argv[1], None, '__main__')"
)


def printed(folder: Path, *script: str) -> str:
    """What the ranks print under torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**clean_environment(), "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "FUSEDCOMM_QUIET": "1"}
    done = subprocess.run(
        [*run, *script], env=environment, capture_output=True, text=True, timeout=HANG_S, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"epoch \d: ([\d.]+)% right", text)]


@pytest.mark.full
def test_the_example_learns_on_two_ranks(tmp_path):
    found = accuracies(printed(tmp_path, str(EXAMPLES / "horovod_after.py")))
    assert len(found) == 3 and found[-1] > 95 and found[-1] >= found[0]


@pytest.mark.full
def test_the_script_for_horovod_runs_as_it_is_with_install(tmp_path):
    script = tmp_path / "installed.py"
    script.write_text(INSTALLED)
    found = accuracies(printed(tmp_path, str(script), str(EXAMPLES / "horovod_before.py")))
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
    text = printed(tmp_path, str(EXAMPLES / "horovod_elastic.py"))
    (ranks, loss) = re.search(r"(\d+) ranks at the end, loss ([\d.]+)", text).groups()
    assert ranks == "2" and float(loss) < 0.5
