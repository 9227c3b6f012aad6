"""Workers are killed and added while they train: training goes on, and every sample of an epoch counts once."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from jobs import clean_environment
from patience import HANG_S

pytestmark = pytest.mark.check

TRAINING = str(Path(__file__).with_name("elastic_training.py"))
DISAGREES = """
import torch
import fusedcomm.horovod as hvd

hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)
train = hvd.elastic.run(lambda state: hvd.allreduce(torch.ones(hvd.rank() + 1), name="gradient"))
train(state)
"""
LATE = """
import os, sys, time
from pathlib import Path
import torch
import fusedcomm.horovod as hvd

folder, worker = Path(sys.argv[1]), os.environ["RANK"]
if os.environ["FUSEDCOMM_JOIN"] == "1":  # worker 1 is started again, and comes when worker 0 has trained
    (folder / "started").touch()
    while not (folder / "trained").exists():
        time.sleep(0.02)
hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

@hvd.elastic.run
def train(state):
    if worker == "1":
        os._exit(3)
    hvd.allreduce(torch.ones(1), name="gradient")
    print(f"worker {worker} trains in {hvd.size()}", flush=True)

train(state)
while not (folder / "started").exists():
    time.sleep(0.02)
(folder / "trained").touch()
"""


def ended(*command: str, status: int = 0, **variables: str) -> str:
    """What a command has printed."""
    done = subprocess.run(
        [sys.executable, *command],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=4 * HANG_S,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def launched(num_ranks: int, *options: str, script: str = "") -> list[str]:
    """A command; the script's own arguments follow. "": the script is elastic_training.py."""
    run = ["-m", "fusedcomm", "run", "-np", str(num_ranks), "--elastic", *options, sys.executable]
    return [*run, "-c", script] if script else [*run, TRAINING]


def check(folder: Path) -> dict:
    """What the training has written. Every sample was seen once in each epoch, and the weights were learnt."""
    result = json.loads((folder / "result.json").read_text())
    seen = Counter(map(tuple, result["seen"]))
    epochs, indices = range(result["num_epochs"]), range(result["num_samples"])
    assert seen == {(epoch, index): 1 for epoch in epochs for index in indices}
    losses = result["losses"]
    assert len(losses) == result["num_steps"]
    assert max(losses[-3:]) < 0.1 * losses[0]
    return result


@pytest.mark.parametrize("lost", [0, *(pytest.param(rank, marks=pytest.mark.full) for rank in (1, 2))])
def test_two_of_three_go_on_when_one_is_killed_in_mid_epoch(tmp_path, lost):
    said = ended(*launched(3), str(tmp_path), str(lost), "4")
    result = check(tmp_path)
    assert result["sizes"][:4] == [3] * 4
    assert set(result["sizes"][4:]) == {2}
    # The loss continues: the first step with two is no worse than the untrained model by far.
    assert result["losses"][4] < result["losses"][0]
    assert f"worker {lost} on localhost was ended by SIGKILL" in said
    assert "rank 0 of 2 at step 4" in said


@pytest.mark.full
def test_a_worker_that_is_started_again_joins_the_others(tmp_path):
    said = ended(*launched(3, "--max-restarts", "1"), str(tmp_path), "1", "2", "3")
    result = check(tmp_path)
    assert result["size"] == 3 and result["sizes"][-1] == 3
    assert "rank 2 of 3 at step" in said


@pytest.mark.full
def test_a_job_ends_when_fewer_than_min_np_are_left(tmp_path):
    said = ended(*launched(2, "--min-np", "2"), str(tmp_path), "1", "2", status=1)
    assert "TooFewRanksError: fusedcomm: 1 of 2 members" in said and "min_ranks is 2" in said
    assert not (tmp_path / "result.json").exists()


@pytest.mark.full
def test_a_worker_that_comes_too_late_does_not_train_anew(tmp_path):
    said = ended(*launched(2, "--max-restarts", "1", script=LATE), str(tmp_path))
    assert said.count("trains in") == 1 and "worker 0 trains in 1" in said


@pytest.mark.full
def test_a_script_that_fails_each_time_ends_at_the_reset_limit():
    said = ended(*launched(2, "--reset-limit", "1", script=DISAGREES), status=1)
    assert "ranks are to meet again after --reset-limit 1 times: the job ends" in said
    assert said.count("Going on from the last commit") == 4  # two ranks, twice


@pytest.mark.full
def test_workers_that_torchrun_restarts_go_on_from_the_file(tmp_path):
    folder = tmp_path / "states"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    said = ended(*torchrun, TRAINING, str(tmp_path), "1", "5", FUSEDCOMM_HOROVOD_STATE=str(folder))
    check(tmp_path)
    assert "rank 0 of 2 at step 5" in said and "rank 1 of 2 at step 5" in said
    assert list(folder.iterdir()) == []  # the next job begins anew
