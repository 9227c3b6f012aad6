"""The report of who delays a step or has left it, between hosts with a link each."""

import re

import pytest
from on_hosts import needs_hosts, printed_by

pytestmark = pytest.mark.check

KILLED_UNDER_TORCHRUN = """
import datetime, os, signal, torch, torch.distributed as dist, fusedcomm
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
ddp = DistributedDataParallel(torch.nn.Linear(2000, 500))
comm = fusedcomm.attach(ddp, "int8", quiet=True)
try:
    for step in range(8):
        loss = ddp(torch.ones(1, 2000)).sum()
        if step == 5 and dist.get_rank() == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
except RuntimeError as error:
    print("rank", dist.get_rank(), "has", str(error).splitlines()[0], flush=True)
    os._exit(1)
"""


@pytest.mark.full
@needs_hosts
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_on_another_host_is_named_although_torchruns_store_goes_with_it(tmp_path, capsys, victim):
    printed = printed_by(KILLED_UNDER_TORCHRUN.format(victim=victim), tmp_path, capsys, ends_well=False)
    (error,) = re.findall(r"\[host\d\] rank (\d has fusedcomm: .*)", printed)
    assert error.startswith(f"{1 - victim} has fusedcomm: rank {1 - victim} of 2: the all-gather of chunk")
    assert "failed for bucket " in error and f"between this rank and rank {victim}: " in error


CUT = """
import datetime, os, re, subprocess, threading, time, torch, torch.distributed as dist, fusedcomm
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
rank = dist.get_rank()
log = f"{folder}/{{rank}}.log"
os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
interface = os.environ["FUSEDCOMM_BENCH_INTERFACE"]
own = subprocess.check_output(["ip", "-4", "-o", "address", "show", "dev", interface], text=True)
addresses = [None] * 3
dist.all_gather_object(addresses, re.search(r"inet ([0-9.]+)", own)[1])
def neighbours(*what):
    for peer in {peers}:
        subprocess.run(["ip", "neigh", what[0], addresses[peer], *what[1:], "dev", interface], check=True)
def heal():
    while {words!r} not in open(log).read():
        time.sleep(0.05)
    neighbours("del")
ddp = DistributedDataParallel(torch.nn.Linear(1000, 100))
comm = fusedcomm.attach(ddp, "int8", local=fusedcomm.LocalOptions(stall_after=100), quiet=True)
for step in range(4):
    if step == 2 and rank == {victim}:  # what it sends to the peers goes to an address that nobody has
        neighbours("replace", "lladdr", "02:00:00:00:00:63", "nud", "permanent")
        threading.Thread(target=heal).start()
    ddp(torch.ones(1, 1000)).sum().backward()
print("rank", rank, "is through:", open(log).read().replace("\\n", "|"), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def reports_of_a_cut(tmp_path, capsys, victim: int, peers: list[int], words: str) -> list[str]:
    """What each of three ranks has written to stderr. In step 2 what the victim sends to the peers is lost, until it
    has itself reported these words. A line break is "|"."""
    script = CUT.format(folder=tmp_path, victim=victim, peers=peers, words=words)
    printed = printed_by(script, tmp_path, capsys, num_hosts=3)
    return [re.search(rf"\[host{rank}\] rank {rank} is through: (.*)", printed)[1] for rank in range(3)]


SECONDS = r"\d+\.\d s"


@pytest.mark.full
@needs_hosts
def test_the_two_ends_of_a_cut_link_are_named_long_before_stall_after(tmp_path, capsys):
    for report in reports_of_a_cut(tmp_path, capsys, 1, [2], "carries nothing"):
        opened = r"where nothing has moved for [5-9]\.\d s and a host no longer acknowledges what it gets\|"
        assert re.search(opened, report), report
        assert re.search(
            rf"the link between rank 1 and rank 2 carries nothing: what rank [12] sent has not been acknowledged for "
            rf"{SECONDS}",
            report,
        ), report
        assert "is missing" not in report and "is slow" not in report


@pytest.mark.full
@needs_hosts
def test_a_host_that_is_cut_off_is_named_long_before_stall_after(tmp_path, capsys):
    *others, cut_off = reports_of_a_cut(tmp_path, capsys, 2, [0, 1], "cannot call the roll")
    assert "the store is silent" in cut_off
    assert re.search(rf"\d+\.\d+\.\d+\.\d+ has not acknowledged for {SECONDS} what this rank sent", cut_off), cut_off
    for report in others:
        assert re.search(
            rf"rank 2 \(process \d+ on host2\) is missing: no answer within {SECONDS}, and its host has not "
            rf"acknowledged for {SECONDS} what was sent to it\. That host is down or cut off",
            report,
        ), report
