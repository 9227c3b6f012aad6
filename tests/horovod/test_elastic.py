"""Workers are killed and added while they train: training goes on, and every sample of an epoch counts once."""

import datetime
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import clean_environment
from patience import HANG_S
from processes import command_lines

from fusedcomm.horovod import rendezvous, signatures

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

folder, worker = Path(sys.argv[1]), os.environ["FUSEDCOMM_HOROVOD_WORKER"]
if worker == "2":  # is started for worker 1, and comes when worker 0 has trained
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
ATTACKED = """
import json, os, sys, time
from pathlib import Path
import torch
import fusedcomm.horovod as hvd

folder = Path(sys.argv[1])
hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, sizes=[])

@hvd.elastic.run
def train(state):
    while not hvd.allreduce(torch.tensor(float((folder / "done").exists())), name="done"):
        state.sizes.append(hvd.size())
        state.commit()
        if len(state.sizes) == 3 and hvd.rank() == 0:
            names = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "FUSEDCOMM_HOROVOD_KEY")
            (folder / "unfinished").write_text(json.dumps([os.environ[name] for name in names]))
            (folder / "unfinished").rename(folder / "begun")
        time.sleep(0.01)
    print(f"rank {hvd.rank()} has met {set(state.sizes)}", flush=True)

train(state)
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
    said = ended(*launched(2, "--min-np", "2"), str(tmp_path), "1", "2", status=137)
    assert "1 workers are left, fewer than 2" in said
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


@pytest.fixture
def attacked(tmp_path):
    """A running elastic job of two workers that trains until the file "done" exists, as (process, port, key)."""
    command = [sys.executable, *launched(2, script=ATTACKED), str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job = subprocess.Popen(command, env=clean_environment(), **pipes)
    try:
        wait_for(lambda: (tmp_path / "begun").exists() or job.poll() is not None)
        port, key = json.loads((tmp_path / "begun").read_text())
        yield job, int(port), key
    finally:
        job.terminate()
        job.wait(HANG_S)


def wait_for(is_so) -> None:
    until = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.full
def test_who_knows_everything_but_the_key_joins_nothing(attacked, tmp_path, monkeypatch):
    job, port, key = attacked
    where = f"0100007F:{port:04X}"  # 127.0.0.1, as the kernel writes it
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert where in listening and f"00000000:{port:04X}" not in listening
    commands = command_lines()
    assert any(ATTACKED.encode() in each for each in commands) and not any(key.encode() in each for each in commands)

    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=HANG_S))
    store = dist.PrefixStore(rendezvous.PREFIX, store)
    published = store.get(rendezvous.NEWEST)
    head, generation = published[: published.rindex(b"{")], json.loads(published[published.rindex(b"{") :])
    joined = json.dumps({"number": 2, "members": ["0", "1", "stranger"], "sync_before": 2}).encode()
    assert generation == {"number": 1, "members": ["0", "1"], "sync_before": 1}
    store.set("failed/1", store.get("ready/1/0"))  # signed, but for another purpose
    for forged in (joined, head + joined, store.get("ready/1/0")):
        store.set(rendezvous.NEWEST, forged)
        wait_for(lambda: store.get(rendezvous.NEWEST) == published)
    store.delete_key(rendezvous.NEWEST)
    wait_for(lambda: store.check([rendezvous.NEWEST]))

    # A worker of the stranger's own, without a key and with a wrong one.
    monkeypatch.setattr(rendezvous, "_store", store)
    monkeypatch.setattr(rendezvous, "_newest", rendezvous.NONE)
    monkeypatch.setenv(rendezvous.WORKER, "0")
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "0.2")
    with pytest.raises(
        signatures.RefusedError, match="'newest' in the job's store is signed with the job's key, which"
    ):
        rendezvous.meet()
    monkeypatch.setenv(signatures.KEY, key[::-1])
    with pytest.raises(TimeoutError, match="the newest is 0, of the workers"):
        rendezvous.meet()

    (tmp_path / "done").touch()
    said = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 0, said
    assert said.count("has met {2}") == 2 and "Going on from the last commit" not in said
    assert said.count("somebody without this job's key has changed its list of workers") == 1
    assert "'failed/1' in the job's store has a wrong signature" in said
    assert key not in said


def test_an_older_generation_that_is_put_back_does_not_count(monkeypatch):
    monkeypatch.setenv(signatures.KEY, "0123456789abcdef" * 4)
    monkeypatch.setattr(rendezvous, "_newest", rendezvous.NONE)
    store = dist.HashStore()
    generations = [rendezvous.Generation(number, ["0"] * number, number) for number in (1, 2)]
    seen = []
    for generation in (*generations, generations[0]):
        rendezvous.publish(store, generation)
        seen.append(rendezvous._look(store).number)
    assert seen == [1, 2, 2]
    assert rendezvous.put_back(store, generations[1]) and not rendezvous.put_back(store, generations[1])
