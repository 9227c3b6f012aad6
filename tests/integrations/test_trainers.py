"""Each trainer on two real ranks under torchrun: plain, attached, and resumed from the trainer's own checkpoint."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import training
from sampling import few
from scripts import torchrun

pytestmark = pytest.mark.check

FOLDER = Path(__file__).parent
# `make test` runs one trainer in each file of this folder, and another one in each.
TRAINERS = ("lightning", "accelerate", "transformers")


def need_trainer(name: str) -> None:
    """Skips the test if a trainer is not installed."""
    packages = {"transformers": ("transformers", "accelerate")}.get(name, (name,))
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")


def trained(made_once: Callable, trainer: str, job: str, *args: object) -> Path:
    """The folder in which each rank of a job has written what it found, once in a test run."""
    need_trainer(trainer)

    def train(folder: Path) -> None:
        (folder / "stderr").write_text(torchrun(FOLDER / f"{job}_job.py", *args, folder).stderr)

    return made_once(f"{job}-job-of-{trainer}", train)


def found_in(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module", params=few(TRAINERS, "lightning"))
def results(request, made_once) -> list[dict]:
    """What each rank has found: {name of a run: {"losses", "digest", "steps", …}}."""
    return found_in(trained(made_once, request.param, request.param))


def runs(results: list[dict], name: str) -> list[dict]:
    """Of each rank, one run, or an empty list if this trainer has none of that name."""
    return [each[name] for each in results if name in each]


def test_all_ranks_have_the_same_bits(results):
    ours, theirs = results
    trained = [name for name, run in ours.items() if "digest" in run]
    assert len(trained) >= 5
    for name in trained:
        assert ours[name]["digest"] == theirs[name]["digest"], name
        assert ours[name]["steps"] == training.NUM_STEPS
        assert ours[name]["losses"] != theirs[name]["losses"]  # the ranks have different data


@pytest.mark.parametrize("prefix", ["", "Fabric, "], ids=["trainer", "Fabric"])
def test_fp32_trains_as_without_fusedcomm(results, prefix):
    for plain, attached in zip(runs(results, prefix + "plain"), runs(results, prefix + "fp32"), strict=True):
        assert len(plain["losses"]) == training.NUM_STEPS * training.ACCUMULATED
        assert attached["losses"] == plain["losses"]
        assert attached["digest"] == plain["digest"]


@pytest.mark.parametrize("prefix", ["", "Fabric, "], ids=["trainer", "Fabric"])
def test_int8_trains_within_its_noise(results, prefix):
    for plain, attached in zip(runs(results, prefix + "plain"), runs(results, prefix + "int8"), strict=True):
        assert attached["digest"] != plain["digest"]
        differences = [abs(a - b) for a, b in zip(plain["losses"], attached["losses"], strict=True)]
        assert max(differences) < 0.01
        for losses in (plain["losses"], attached["losses"]):
            assert sum(losses[-20:]) < 0.8 * sum(losses[:20])  # 0.01 is little of what is learned


def test_a_step_is_synchronized_once_however_much_is_accumulated(results):
    for name in ("fp32", "int8", "Fabric, fp32", "Fabric, int8"):
        assert all(run["synchronized"] == training.NUM_STEPS for run in runs(results, name)), name


def test_it_detaches_at_the_end_and_after_an_error(results):
    for name in ("int8", "after an error"):
        for run in runs(results, name):
            assert run.get("detached", True)


def test_a_resumed_training_has_the_bits_of_one_that_did_not_stop(results):
    for whole, resumed in zip(runs(results, "feedback, every rank"), runs(results, "resumed, every rank"), strict=True):
        num_resumed = (training.NUM_STEPS - training.RESUMED_AT) * training.ACCUMULATED
        assert resumed["losses"] == whole["losses"][-num_resumed:]
        assert resumed["digest"] == whole["digest"]


def test_with_the_mean_of_residuals_it_trains_on_within_their_noise(results):
    for whole, resumed in zip(runs(results, "feedback, mean"), runs(results, "resumed, mean"), strict=True):
        uninterrupted = whole["losses"][-len(resumed["losses"]) :]
        differences = [abs(a - b) for a, b in zip(uninterrupted, resumed["losses"], strict=True)]
        assert 0 < max(differences) < 0.002


def test_lightnings_own_argument_for_hooks_does_nothing_on_cpu_and_that_is_said_once(made_once):
    printed = (trained(made_once, "lightning", "lightning") / "stderr").read_text()
    assert printed.count("CommState('int8') was made and never called") == 1
    assert "Lightning registers ddp_comm_hook= on CUDA only: use fusedcomm.integrations.lightning.FusedComm" in printed
