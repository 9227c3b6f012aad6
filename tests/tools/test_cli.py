"""The command line: what it refuses, what ``doctor`` says, and a very short ``demo``."""

import importlib.metadata
import json
import os
import platform
import re

import pytest
from scripts import python
from test_arguments import refusal

import fusedcomm
from fusedcomm.tools.arguments import WIRES
from fusedcomm.tools.cli import main

# ---- arguments


def test_demo_refuses_to_be_started_by_torchrun(capsys, tmp_path, monkeypatch, demo_packages):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "run it without torchrun" in refusal(capsys, "demo", "--out", str(tmp_path))


def test_demo_refuses_a_folder_that_it_may_not_write_to(capsys, tmp_path, monkeypatch, demo_packages):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    text = refusal(capsys, "demo", "--out", str(tmp_path))
    assert f"--out {tmp_path}/demo.json cannot be written: no permission" in text


# ---- versions


def test_the_version_is_told_without_torch():
    hide = "import sys; sys.modules['torch'] = None; from fusedcomm.tools import cli; sys.exit(cli.main())"
    done = python("-c", hide, "--version")
    assert done.returncode == 0, done.stderr
    first, torch, last = done.stdout.splitlines()
    assert first.startswith(f"fusedcomm {fusedcomm.__version__}")
    assert torch == f"torch {importlib.metadata.version('torch')}" and last == f"Python {platform.python_version()}"


# ---- doctor


def doctor(capsys) -> tuple[int, str]:
    """(exit status, output) of the command in this process."""
    status = main(["doctor"])
    return status, capsys.readouterr().out


def test_doctor_says_what_there_is(capsys):
    status, said = doctor(capsys)
    assert status == 0
    for word in ("torch", "gloo yes", "compiler", "portable", "supported over gloo"):
        assert word in said


@pytest.mark.check
@pytest.mark.parametrize("module", ["fusedcomm._C", "torch"])
def test_doctor_runs_without(module):
    hide = (
        f"import sys; sys.modules[{module!r}] = None; from fusedcomm.tools import cli; sys.exit(cli.main(['doctor']))"
    )
    done = python("-c", hide)
    assert done.returncode == 1, done.stderr
    assert "cannot be used" in done.stdout and "make build" in done.stdout or module == "torch"
    assert not done.stderr


@pytest.mark.check
def test_without_the_extension_a_command_says_how_to_build_it(demo_packages):
    hide = "import sys; sys.modules['fusedcomm._C'] = None; from fusedcomm.tools import cli; sys.exit(cli.main())"
    done = python("-c", hide, "demo")
    assert done.returncode == 1 and "make build" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "status", "words"),
    [
        ("CXX", "", 0, r"c\+\+"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0, "CUDA_DEVICE_MAX_CONNECTIONS=1: .* wait for each other, so"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "3", 0, "CUDA_DEVICE_MAX_CONNECTIONS=3: on CUDA the .* share 3 queues"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "5", 0, "CUDA_DEVICE_MAX_CONNECTIONS=5: on CUDA, with sums on two levels, the"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", 0, "^((?!CUDA_DEVICE_MAX_CONNECTIONS)[\\s\\S])*$"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "", 0, "^((?!CUDA_DEVICE_MAX_CONNECTIONS)[\\s\\S])*$"),
        ("FUSEDCOMM_ISA", "abacus", 1, "FUSEDCOMM_ISA=abacus"),
    ],
)
def test_doctor_says_what_a_variable_does(capsys, monkeypatch, variable, value, status, words):
    monkeypatch.setenv(variable, value)
    found, said = doctor(capsys)
    assert found == status and re.search(words, said)


# ---- demo


@pytest.fixture
def demo_packages():
    for module in ("sklearn", "tqdm"):
        pytest.importorskip(module)


@pytest.mark.full
def test_demo(tmp_path, demo_packages):
    done = python("-m", "fusedcomm", "demo", "--steps", "12", "--seeds", "2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["env"]["ranks"] == 2
    assert written["noise_band"]["seeds"] == 2
    names = ["DDP default", "DDP fp16 hook", *(f"fusedcomm {wire}" for wire in WIRES)]
    assert [row["name"] for row in written["summary"]] == names
    assert [(run["name"], run["seed"]) for run in written["runs"]] == [
        (name, seed) for seed in (0, 1) for name in names
    ]
    runs = {run["name"]: run for run in written["runs"] if run["seed"] == 0}
    assert all(name in done.stdout for name in names)
    for row in runs.values():
        assert row["ranks_identical"]
        assert 0 <= row["accuracy"] <= 1

    # Twelve steps hardly train the model, but the same arithmetic gives the same loss.
    default = runs["DDP default"]
    assert runs["fusedcomm fp32"]["final_loss"] == pytest.approx(default["final_loss"], rel=1e-6)
    assert runs["fusedcomm bf16"]["final_loss"] == pytest.approx(default["final_loss"], rel=2e-2)

    if default["wire_bytes_per_step"] is None:
        pytest.skip("this kernel does not count the bytes of a socket: ratios not checked")
    ratios = {row["name"]: row["bytes_ratio"] for row in written["summary"]}
    bounds = {"fp32": (0.99, 1.01), "bf16": (0.49, 0.51), "fp16": (0.49, 0.51), "int8": (0.25, 0.27)}
    for wire, (low, high) in bounds.items():
        assert low <= ratios[f"fusedcomm {wire}"] <= high, wire


@pytest.mark.full
def test_an_error_in_a_rank_reaches_the_user(tmp_path, demo_packages):
    (tmp_path / "demo.json").symlink_to("/dev/full")  # rank 0 cannot write it, and no check can tell before
    done = python("-m", "fusedcomm", "demo", "--steps", "2", "--seeds", "1", "--wires", "bf16", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "rank 0 failed" in done.stderr
    assert "No space left on device" in done.stderr
