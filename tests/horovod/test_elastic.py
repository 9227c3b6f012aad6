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
hvd.shutdown()
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
STAYS = """
import os, signal, sys, torch
import fusedcomm.horovod as hvd
import fusedcomm.horovod.membership as membership

membership.SILENCE_S = 2.0
sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
hvd.init(process_sets=sets)
first, pids = hvd.local_rank(), hvd.allgather_object(os.getpid())
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

@hvd.elastic.run
def train(state):
    if hvd.size() == 3:
        hvd.allreduce(torch.ones(1), name="before")
        if first == 0:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        hvd.allreduce(torch.ones(1), name="lost")
    total = hvd.allreduce(torch.tensor([first]), op=hvd.Sum, name="after", process_set=sets[0]).item()
    try:
        hvd.barrier(process_set=sets[1])
    except ValueError as error:
        print(f"local rank {first} is {hvd.local_rank()}, the pair's sum {total}, {error}", flush=True)

train(state)
if first == 1 and sys.argv[1] == "SIGSTOP":
    os.kill(pids[0], signal.SIGKILL)
"""
LINGERS = """
import logging, os, signal, sys, time, torch
from pathlib import Path
import fusedcomm.horovod as hvd
from fusedcomm.log import LOGGER

named, given_up = (Path(sys.argv[1]) / name for name in ("named", "given up"))
hvd.init()
first = hvd.rank()
os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "5"
os.environ["HOROVOD_ELASTIC_TIMEOUT"] = sys.argv[3]
handler = logging.Handler()
handler.emit = lambda record: named.touch() if "rank(s) [1] of it have not come" in record.getMessage() else None
LOGGER.addHandler(handler)
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

@hvd.elastic.run
def train(state):
    if hvd.size() == 3:
        hvd.allreduce(torch.ones(1), name="before")
        if first == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while first == 1 and not (Path(sys.argv[1]) / sys.argv[2]).exists():
            time.sleep(0.02)
        if given_up.exists():
            os._exit(3)
    total = hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item()
    print(f"rank {first} goes on with the sum {total}", flush=True)

try:
    train(state)
except RuntimeError as error:
    print(error, flush=True)
    given_up.touch()
    os._exit(3)
"""
MISSING = """
import os, signal
if os.environ["RANK"] == "1":
    signal.pause()
import fusedcomm.horovod as hvd
hvd.init()
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


@pytest.mark.parametrize("how", ["SIGSTOP", pytest.param("SIGKILL", marks=pytest.mark.full)])
def test_those_that_stay_keep_local_ranks_sets_and_timelines_whether_one_is_killed_or_silent(tmp_path, how):
    timeline = tmp_path / "timeline.json"
    said = ended(*launched(3, script=STAYS), how, HOROVOD_TIMELINE=str(timeline))
    assert said.count("local rank 1 is 1, the pair's sum 3") == said.count("local rank 2 is 2, the pair's sum 3") == 1
    assert said.count("ranks=[1, 2]) is not in use in this job of 2 ranks") == 2
    assert "allreduce.before" in timeline.read_text()
    assert "allreduce.after" in str(json.loads((tmp_path / "timeline.2.json").read_text()))


@pytest.mark.full
def test_a_worker_that_never_comes_is_named_within_the_limit():
    said = ended(*launched(2, script=MISSING), status=1, HOROVOD_GLOO_TIMEOUT_SECONDS="2")
    assert "TimeoutError: hvd.init(): fusedcomm: rank(s) [1] did not take part within 2 s" in said


@pytest.mark.full
def test_a_worker_that_does_not_come_after_a_change_is_named_and_waited_for(tmp_path):
    said = ended(*launched(3, script=LINGERS), str(tmp_path), "named", "1000")
    assert [said.count(f"rank {rank} goes on with the sum 2.0") for rank in range(3)] == [1, 1, 0]


@pytest.mark.full
def test_a_worker_that_never_comes_after_a_change_is_named_within_the_limit(tmp_path):
    said = ended(*launched(3, script=LINGERS), str(tmp_path), "given up", "1", status=3)
    assert "ready everywhere in 1 s: rank(s) [1] of it have not come" in said
