"""Each trainer on two real ranks under torchrun, with DDP and with a model that FSDP2 shards: plain, attached, and
resumed from the trainer's own checkpoint."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sampling import few
from scripts import torchrun

pytestmark = pytest.mark.check

FOLDER = Path(__file__).parent
TRAINERS = ("lightning", "accelerate", "transformers")


def need_trainer(name: str) -> None:
    """Skips the test if a trainer is not installed."""
    packages = {"transformers": ("transformers", "accelerate")}.get(name, (name,))
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")


def trained(made_once: Callable, trainer: str, way: str) -> Path:
    """The folder in which each rank of a job has written what it found, once in a test run."""
    need_trainer(trainer)
    script, arguments = ("weighted_job.py", []) if way == "weighted" else ("job.py", [way])

    def train(folder: Path) -> None:
        (folder / "stderr").write_text(torchrun(FOLDER / script, trainer, *arguments, folder).stderr)

    return made_once(f"{way}-job-of-{trainer}", train)


def found_in(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


JOBS = [(way, trainer) for way in ("ddp", "fsdp2") for trainer in TRAINERS]


@pytest.fixture(params=few(JOBS, ("ddp", "lightning"), ("fsdp2", "transformers")), ids=" ".join)
def job(request) -> tuple[str, str]:
    return request.param


@pytest.fixture
def results(job, made_once) -> list[dict]:
    """What each rank has found: {name of a run: {"losses", "digest", …}}; the name of a run that was resumed ends with
    "resumed"."""
    way, trainer = job
    return found_in(trained(made_once, trainer, way))


def pairs(results: list[dict], one: str, other: str) -> list[tuple[dict, dict]]:
    """Of each rank, its runs that have `one` in their names, beside those that have `other` there."""
    return [
        (run, of_rank[name.replace(one, other)])
        for of_rank in results
        for name, run in of_rank.items()
        if one in name and name.replace(one, other) in of_rank
    ]


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_all_ranks_have_the_same_bits(results):
    ours, theirs = results
    trained = [name for name, run in ours.items() if "digest" in run]
    assert len(trained) >= 5
    for name in trained:
        assert ours[name]["digest"] == theirs[name]["digest"], name
        assert ours[name]["losses"] != theirs[name]["losses"]  # the ranks have different data


def test_a_step_is_synchronized_once_however_much_is_accumulated(results):
    for each in results:
        for name, run in each.items():
            if "synchronized" in run and "feedback" not in name:
                assert run["synchronized"] == run["steps"], name


def test_fp32_trains_as_without_fusedcomm(results):
    compared = pairs(results, "plain", "fp32")
    assert len(compared) >= 2
    for plain, attached in compared:
        assert attached["losses"] == plain["losses"] != []
        assert attached["digest"] == plain["digest"]


def test_int8_trains_within_its_noise(results):
    for plain, attached in pairs(results, "plain", "int8"):
        assert attached["digest"] != plain["digest"]
        assert furthest(plain["losses"], attached["losses"]) < 0.01
        for losses in (plain["losses"], attached["losses"]):
            assert sum(losses[-20:]) < 0.8 * sum(losses[:20])  # 0.01 is little of what is learned


def test_a_resumed_training_is_that_of_one_that_did_not_stop_but_for_the_noise_of_mean_residuals(results):
    for each in results:
        resumed = [name for name in each if name.endswith(", resumed")]
        assert resumed
        for name in resumed:
            whole, later = each[name.removesuffix(", resumed")], each[name]
            uninterrupted = whole["losses"][len(whole["losses"]) // 2 :]
            # Without error feedback the bits are the same.
            difference = furthest(uninterrupted, later["losses"])
            assert 0 < difference < 0.002 if "feedback" in name else difference == 0, name


def test_it_detaches_at_the_end_and_after_an_error(results):
    for each in results:
        assert all(run.get("detached", True) for run in each.values())


def test_what_is_sharded_is_attached_as_fsdp2_and_a_trainer_that_makes_ddp_instead_is_named(job, results):
    for each in results:
        for name, run in each.items():
            if "handle" in run:
                assert run["sharded"] == (job[0] == "fsdp2" and name != "DDP instead")
                kind = "FsdpHandle" if run["sharded"] else "Handle"
                assert run["handle"].startswith("None" if "plain" in name else f"<fusedcomm.{kind}: wire "), name
        if "DDP instead" in each:
            (text,) = each["DDP instead"]["warned"]
            assert text.startswith("fusedcomm: Accelerate was asked for FSDP and has made a DistributedDataParallel")


def test_lightnings_own_argument_for_hooks_does_nothing_on_cpu_and_that_is_said_once(made_once):
    printed = (trained(made_once, "lightning", "ddp") / "stderr").read_text()
    assert printed.count("CommState('int8') was made and never called") == 1
    assert "Lightning registers ddp_comm_hook= on CUDA only: use fusedcomm.integrations.lightning.FusedComm" in printed


@pytest.mark.parametrize("trainer", few(TRAINERS, "accelerate"))
def test_with_weights_training_is_that_of_one_process_with_all_tokens(made_once, trainer):
    """The trainer's own scaling of losses does not count twice."""
    for found in found_in(trained(made_once, trainer, "weighted")):
        assert found["error"] < 1e-5
        counts = found["counts"]
        assert counts[0] != counts[1] and len(counts[0]) == 6
