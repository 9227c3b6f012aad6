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

RIGHT = """
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
with fusedcomm.attach(ddp, config) as comm:
    print(comm.plan().sent_nbytes, comm.stats().steps)
fusedcomm.attach(ddp, "auto").detach()
fusedcomm.attach(ddp, "off").detach()
step_ms: float = comm.stats().scalars()["exposed_ms/p95"]
fusedcomm.attach(ddp, wire, local=fusedcomm.LocalOptions(stall_after=5), quiet=True)
fusedcomm.attach(ddp, fusedcomm.Auto(("bf16", "int8", config)))
ddp.register_comm_hook(fusedcomm.CommState("fp8"), fusedcomm.comm_hook)
mean: torch.Tensor = fusedcomm.simulate([torch.zeros(3)], "int4")
"""

FAULTS = {
    "Wire = 'bf16'": "Wire = 'bf17'",
    'ddp, "auto"': 'ddp, "automatic"',
    'ddp, "off"': 'ddp, "none"',
    'CommState("fp8")': 'CommState("fp7")',
    '], "int4"': '], "int3"',
    '"int8",\n    sum': '"int9",\n    sum',
    'sum="two-shot"': 'sum="two_shot"',
    '"lm_head.*": "bf16"': '"lm_head.*": "bfloat16"',
    'Feedback("bf16")': 'Feedback("fp8")',
    'TwoLevels("auto", "fp16")': 'TwoLevels("auto", "int8")',
    'Auto(("bf16", "int8"': 'Auto(("bf16", "off"',
    "comm.plan().sent_nbytes": "comm.plan().sent_bytes",
    "fusedcomm.LocalOptions": "fusedcomm.LocalOption",
}
"""Each piece of RIGHT, and the same with a fault."""


def test_types_have_the_names_that_the_engine_has():
    for of_type, names in (
        (literals.Wire, WIRES),
        (literals.WireWithoutScales, WITHOUT_SCALES),
        (literals.Sum, SUMS),
        (literals.ResidualFormat, RESIDUALS),
    ):
        assert get_args(of_type) == tuple(names)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """What mypy says about RIGHT, and about RIGHT with each of FAULTS: {file name without suffix: its lines}."""
    pytest.importorskip("mypy", reason="needs mypy: pip install mypy")
    folder = tmp_path_factory.mktemp("typed")
    scripts = {"right": RIGHT.replace('Wire = "bf16"', "Wire = 'bf16'")}
    for number, (right, wrong) in enumerate(FAULTS.items()):
        assert scripts["right"].count(right) == 1, right
        scripts[f"fault_{number}"] = scripts["right"].replace(right, wrong)
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = ["--follow-imports=silent", "--cache-dir", str(folder / "cache"), "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(f"{name}.py" for name in scripts)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in scripts}


@pytest.mark.full
def test_mypy_finds_nothing_in_a_right_script(complaints):
    assert complaints["right"] == []


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS.values()))
def test_mypy_finds_a_wrong_name(complaints, number):
    assert any("error:" in line for line in complaints[f"fault_{number}"]), list(FAULTS)[number]


def test_dir_lists_the_public_names():
    basics = {"__doc__", "__file__", "__name__", "__path__"}
    assert set(dir(fusedcomm)) == {*fusedcomm.__all__, *basics}
    assert all(hasattr(fusedcomm, name) for name in dir(fusedcomm))
