"""The report of who delays a step or has left it, between hosts with a link each."""

import re

import pytest
from on_hosts import needs_hosts, printed_by
from patience import patient

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


CRAWLS = """
import os, subprocess, torch, torch.distributed as dist, fusedcomm
from torch.nn.parallel import DistributedDataParallel
os.dup2(1, 2)  # the test reads the warnings
dist.init_process_group("gloo")
rank = dist.get_rank()
NAME = "after a failure: weight"  # no conclusion may depend on a label
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter(NAME, torch.nn.Parameter(torch.zeros({num_rows}, 1000)))
    def forward(self, x):
        return torch.nn.functional.linear(x, getattr(self, NAME))
ddp = DistributedDataParallel(Model())
config = fusedcomm.Config("bf16", "two-shot", chunks=fusedcomm.Chunks({chunk_nbytes}))
comm = fusedcomm.attach(ddp, config, local=fusedcomm.LocalOptions(stall_after={stall_after_s}), quiet=True)
for step in range(5):
    if step == 2 and rank == 2:
        line = ["dev", os.environ["FUSEDCOMM_BENCH_INTERFACE"], "root", "tbf"]
        line += "rate 6mbit burst 64kb latency 50ms".split()
        subprocess.run(["tc", "qdisc", "replace", *line], check=True)
    ddp.zero_grad()
    ddp(torch.full((1, 1000), rank + 1.0)).sum().backward()
    assert (getattr(ddp.module, NAME).grad == 2).all()
print("rank", rank, "is through", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
@needs_hosts
def test_a_link_that_crawls_is_named_although_its_bucket_moves(tmp_path, capsys):
    # For each second of stall_after, rank 2 sends 2.7 MB in a step. From step 2 on these take 3.5 s.
    stall_after_s = patient(2)
    script = CRAWLS.format(
        stall_after_s=stall_after_s, num_rows=1000 * stall_after_s, chunk_nbytes=stall_after_s * (192 << 10)
    )
    printed = printed_by(script, tmp_path, capsys, num_hosts=3)
    for rank in range(3):
        lines = [line for line in printed.splitlines() if line.startswith(f"[host{rank}] ")]
        assert f"[host{rank}] rank {rank} is through" in lines
        opened = [line for line in lines if "fusedcomm: roll call" in line]
        why = r"where bucket 0 \(after a failure: weight; .*\) of step 2 moves, but has been under way for (\d+\.\d) s"
        assert opened, printed
        begun = re.search("roll call 1 of 3 ranks, opened by rank [0-2], " + why, opened[0])
        assert begun and stall_after_s <= float(begun[1]) < 3 * stall_after_s, opened
        # A rank opens another roll call only for a bucket that has been under way for twice as long.
        pattern = rf"opened by rank {rank}, .* has been under way for (\d+\.\d) s"
        own = [float(match[1]) for match in (re.search(pattern, report) for report in opened) if match]
        assert all(2 * before <= after + 0.15 for before, after in zip(own, own[1:], strict=False)), opened
        found = [lines[lines.index(report) + 1].removeprefix(f"[host{rank}]   ") for report in opened]
        network = "every rank answered and none is behind: they wait for the network"
        # Rank 2's link carries 0.75 MB/s.
        what = r"what rank 2 sends (to rank [01] )?piles up: "
        pile = rf", where {what}\d+ KB have not left, [01]\.\d MB/s arrive; elsewhere "
        assert re.match(network + pile, found[0]), found
        # At a later roll call rank 2 may have sent everything, but no other rank may be named.
        assert all(re.match(f"{network}($|{pile})", text) for text in found[1:]), found


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


FULL_LINKS = """
import os, subprocess, torch, torch.distributed as dist, fusedcomm
from torch.nn.parallel import DistributedDataParallel
os.dup2(1, 2)  # the test reads the warnings
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(1000, 500))
comm = fusedcomm.attach(ddp, "bf16", local=fusedcomm.LocalOptions(stall_after=2), quiet=True)
for step in range(3):
    if step == 2:
        line = ["dev", os.environ["FUSEDCOMM_BENCH_INTERFACE"], "root", *"tbf rate 1mbit burst 16kb latency 4s".split()]
        subprocess.run(["tc", "qdisc", "replace", *line], check=True)
    ddp(torch.ones(1, 1000)).sum().backward()
print("rank", dist.get_rank(), "is through", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
@needs_hosts
def test_ranks_whose_answers_wait_behind_gradients_are_not_called_missing(tmp_path, capsys):
    printed = printed_by(FULL_LINKS, tmp_path, capsys, num_hosts=3)
    assert printed.count("is through") == 3 and "fusedcomm: roll call" in printed
    assert "is missing" not in printed and "as if its process had been stopped" not in printed, printed
