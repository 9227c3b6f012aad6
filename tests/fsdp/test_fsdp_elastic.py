"""A rank of an FSDP2 training dies, torchrun starts both again, and they go on from their distributed checkpoint."""

import json
from pathlib import Path

import pytest
from scripts import torchrun

# It starts nine processes; tests/horovod/test_elastic.py has a restart that `make check` runs.
pytestmark = pytest.mark.full
JOB = Path(__file__).with_name("elastic_job.py")
NUM_STEPS, RESUMED_AT, ACCUMULATED = 30, 10, 2
INT8, FEEDBACK = "int8", "int4 with feedback"


def train(folder: Path, dying: int) -> None:
    """Each rank writes what it has found at the end of its last life."""
    # Else torchrun's store outlives a restart, and gloo reads dead ranks' addresses there: pytorch issue 135712.
    torchrun(JOB, folder, dying, options=("--max-restarts=1",), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def found_by(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def whole(made_once) -> list[dict]:
    return found_by(made_once("fsdp-whole", lambda folder: train(folder, -1)))


@pytest.fixture(params=[0, 1], ids=["rank 0 dies", "rank 1 dies"])
def interrupted(request, made_once) -> list[dict]:
    folder = made_once(f"fsdp-interrupted-{request.param}", lambda folder: train(folder, request.param))
    assert (folder / "died").read_text() == str(request.param)
    return found_by(folder)


def after_the_checkpoint(run: dict) -> list[float]:
    return run["losses"][RESUMED_AT * ACCUMULATED :]


def test_both_ranks_went_on_from_the_checkpoint(interrupted, whole):
    assert [(rank["life"], rank["began"]) for rank in interrupted] == [(1, RESUMED_AT)] * 2
    assert [(rank["life"], rank["began"]) for rank in whole] == [(0, 0)] * 2
    for wire in (INT8, FEEDBACK):
        for rank in (*interrupted, *whole):
            assert rank["runs"][wire]["calls"] == [NUM_STEPS]  # those before the checkpoint count, too
        ours, theirs = (rank["runs"][wire] for rank in whole)
        assert ours["losses"] != theirs["losses"]  # the ranks have different data
        assert len(ours["losses"]) == NUM_STEPS * ACCUMULATED
        assert sum(ours["losses"][-10:]) < 0.9 * sum(ours["losses"][:10])


# A checkpoint has the mean over ranks of their residuals, so that loading it changes each rank's own. The run to
# compare bits with is one that loads its checkpoint as soon as it is saved.
@pytest.mark.parametrize(("wire", "run"), [(INT8, INT8), (FEEDBACK, f"{FEEDBACK}, reloaded")])
def test_they_go_on_with_the_bits_of_a_run_that_was_not_interrupted(interrupted, whole, wire, run):
    digests = set()
    for rank, uninterrupted in zip(interrupted, whole, strict=True):
        own, expected = rank["runs"][wire], uninterrupted["runs"][run]
        assert own["losses"] == after_the_checkpoint(expected)
        digests |= {own["digest"], expected["digest"]}
    assert len(digests) == 1


def test_with_the_mean_of_residuals_they_go_on_within_their_noise(interrupted, whole):
    for rank, uninterrupted in zip(interrupted, whole, strict=True):
        own, expected = rank["runs"][FEEDBACK], uninterrupted["runs"][FEEDBACK]
        differences = [abs(a - b) for a, b in zip(own["losses"], after_the_checkpoint(expected), strict=True)]
        assert differences[:ACCUMULATED] == [0] * ACCUMULATED  # of the parameters in the checkpoint
        assert 0 < max(differences) < 0.02
