"""The types of options that are given by name: they have the engine's names, and a type checker finds a wrong one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from patience import HANG_S

import fusedcomm
from fusedcomm import literals
from fusedcomm.config import RESIDUALS, SUMS, WIRES, WITHOUT_SCALES

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
config = fusedcomm.Config(
    "int8",
    sum="two-shot",
    wires={"lm_head.*": "bf16", "1d": "fp32"},
    feedback=fusedcomm.Feedback("bf16"),
    hosts=fusedcomm.TwoLevels("auto", "fp16"),
)
wire: fusedcomm.Wire = "bf16"
wire = "bf17"  # wrong
with fusedcomm.attach(ddp, config) as comm:
    print(comm.plan().sent_nbytes, comm.stats().steps)
    print(comm.plan().sent_bytes)  # wrong
fusedcomm.attach(ddp, "auto").detach()
fusedcomm.attach(ddp, "automatic").detach()  # wrong
fusedcomm.attach(ddp, "off").detach()
fusedcomm.attach(ddp, "none").detach()  # wrong
step_ms: float = comm.stats().scalars()["exposed_ms/p95"]
fusedcomm.attach(ddp, wire, local=fusedcomm.LocalOptions(stall_after=5), quiet=True)
fusedcomm.attach(ddp, wire, local=fusedcomm.LocalOption(stall_after=5), quiet=True)  # wrong
ddp.register_comm_hook(fusedcomm.CommState("fp8"), fusedcomm.comm_hook)
ddp.register_comm_hook(fusedcomm.CommState("fp7"), fusedcomm.comm_hook)  # wrong
mean: torch.Tensor = fusedcomm.simulate([torch.zeros(3)], "int4")
mean = fusedcomm.simulate([torch.zeros(3)], "int3")  # wrong
fusedcomm.Config("int9")  # wrong
fusedcomm.Config("int8", sum="two_shot")  # wrong
fusedcomm.Config("int8", wires={"lm_head.*": "bfloat16"})  # wrong
fusedcomm.Feedback("fp8")  # wrong
fusedcomm.TwoLevels("auto", "int8")  # wrong
"""


def test_types_have_the_names_that_the_engine_has():
    for of_type, names in (
        (literals.Wire, WIRES),
        (literals.WireWithoutScales, WITHOUT_SCALES),
        (literals.Sum, SUMS),
        (literals.ResidualFormat, RESIDUALS),
    ):
        assert get_args(of_type) == tuple(names)


@pytest.mark.full
def test_mypy_finds_each_wrong_name_and_nothing_else(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy: pip install mypy")
    (tmp_path / "typed.py").write_text(SCRIPT)
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "typed.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stderr == ""
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")}


def test_dir_lists_the_public_names():
    basics = {"__doc__", "__file__", "__name__", "__path__"}
    assert set(dir(fusedcomm)) == {*fusedcomm.__all__, *basics}
    assert all(hasattr(fusedcomm, name) for name in dir(fusedcomm))
