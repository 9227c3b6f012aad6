"""Messages among the ranks of a channel (csrc/transport/exchange.h): their order and their ends.

That each arrives where it belongs: tests/engine/test_means.py; a peer that is lost in mid-message, and a channel that
is closed: test_failures.py.
"""

import datetime
import os
import re
import signal
import sys
import time

import native_bindings
import pytest
import torch
import torch.distributed as dist
from on_hosts import needs_hosts, printed_by
from patience import HANG_S

from fusedcomm.ranks.bounded_store import private_store
from fusedcomm.ranks.channels import make_channels

NBYTES = 40_003


def make_exchange(folder, max_sending=0):
    group, cpu = dist.group.WORLD, torch.device("cpu")
    channels = make_channels(group, cpu, private_store(group).native)
    dist.barrier()  # a rank that is still connecting would mistake the end of a channel for a crash
    return native_bindings.load(folder).Exchange(channels.scatter, max_sending=max_sending)


def get_ahead(rank, world_size, folder, max_sending, expected):
    """Ranks 0 and 1 start four exchanges before rank 2 starts any. Returns on these two ranks, for each exchange,
    whether the other's message has arrived by then."""
    exchange = make_exchange(folder, max_sending)
    send = torch.full((NBYTES,), rank + 1, dtype=torch.uint8)
    receive = [torch.zeros(world_size, NBYTES, dtype=torch.uint8) for _ in range(4)]
    under_way = []
    if rank != 2:
        under_way = [exchange.start(send=send, receive=r.view(-1)) for r in receive]
        ahead, until = 0, time.monotonic() + HANG_S
        while ahead < expected and time.monotonic() < until:
            time.sleep(0.1)
            ahead = sum(bool(r[1 - rank].all()) for r in receive)
        time.sleep(0.5)  # gives messages that must not be sent yet time to arrive
        ahead = [bool(r[1 - rank].all()) for r in receive]
    dist.barrier()
    if rank == 2:
        under_way = [exchange.start(send=send, receive=r.view(-1)) for r in receive]
    for ended in under_way:
        ended.wait()
    dist.barrier()
    assert all(torch.equal(r[:, 0], torch.tensor([1, 2, 3], dtype=torch.uint8)) for r in receive)
    return ahead if rank != 2 else None


@pytest.mark.parametrize(("max_sending", "expected"), [(0, 4), (1, 1), (2, 2)])
def test_no_peer_gets_further_ahead_than_it_may(ranks, bindings_folder, max_sending, expected):
    ahead = ranks.run(get_ahead, bindings_folder, max_sending, expected, world_size=3)
    assert ahead[0] == ahead[1] == [number < expected for number in range(4)]


# Seconds that the other ranks wait before the last rank is killed.
LONG_S = 6


def lose_the_last_while(rank, world_size, folder, others_have_begun):
    """Rank 2 is killed after the other ranks have waited for LONG_S. Rank 0 waits for rank 2 first. Returns a rank's
    error, and the seconds that it waited in all and until rank 2 was killed; None on a rank that starts no exchange."""
    exchange, store = make_exchange(folder), dist.distributed_c10d._get_default_store()
    send, receive = (torch.zeros(world_size * NBYTES, dtype=torch.uint8) for _ in range(2))
    exchange.start(send=send, receive=receive).wait()
    dist.barrier()
    if rank == 2:
        time.sleep(LONG_S)
        store.set("killed at", str(time.monotonic()))  # a clock that all processes share
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and not others_have_begun:
        store.wait(["rank 0 has its error"], datetime.timedelta(seconds=HANG_S))  # keeps its connections open
        return None
    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        exchange.start(send=send, receive=receive).wait()
    waited_s, killed_s = time.monotonic() - started, float(store.get("killed at")) - started
    if rank == 0:
        store.set("rank 0 has its error", "")
    return str(error.value), waited_s, killed_s


@pytest.mark.parametrize("others_have_begun", [True, False])
def test_an_error_also_names_whoever_else_is_awaited(ranks, bindings_folder, others_have_begun):
    """A rank may fail only because it waits for another one. An error that names just the first failed peer could name
    the wrong rank."""
    kind, found = ranks.outcomes(lose_the_last_while, bindings_folder, others_have_begun, world_size=3, lost=2)[0]
    assert kind == "value", found
    error, waited_s, killed_s = found
    assert error.startswith("between this rank and rank 2: ")
    late = re.findall(r"; between this rank and rank 1: not complete after (\d+\.\d) s$", error)
    assert len(late) == error.count("rank 1") == (not others_have_begun), error
    # The kill ends the wait, and not the group's timeout, which is minutes. On a busy machine rank 2 may be killed
    # late, and die seconds after that.
    assert all(LONG_S <= float(seconds) < killed_s + HANG_S / 10 for seconds in late), error
    assert all(float(seconds) < waited_s + 0.1 for seconds in late), error  # the text has tenths of a second


# A message takes 0.13 s of the line, so the time that a busy machine adds is small in comparison.
LATE_S, MESSAGE_NBYTES = 0.2, 1_600_000

BEGIN_LATE = f"""
import native_bindings, pathlib, time, torch, torch.distributed as dist
from fusedcomm.ranks.channels import make_channels
from fusedcomm.ranks.bounded_store import private_store
dist.init_process_group("gloo")
group, cpu = dist.group.WORLD, torch.device("cpu")
channels = make_channels(group, cpu, private_store(group).native)
exchange = native_bindings.load(pathlib.Path(FOLDER)).Exchange(channels.scatter, max_sending=0)
send, receive = (torch.zeros({2 * MESSAGE_NBYTES}, dtype=torch.uint8) for _ in range(2))
for _ in range(3):
    exchange.start(send=send, receive=receive).wait()
seconds = []
for _ in range(15):
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep({LATE_S})
    began = time.monotonic()
    exchange.start(send=send, receive=receive).wait()
    seconds.append(time.monotonic() - began)
if dist.get_rank() == 1:
    print(f"late={{min(seconds)}}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.alone
@needs_hosts
def test_both_directions_of_a_line_are_used_at_once(bindings_folder, tmp_path, capsys):
    """Both are used even if one rank begins later. Gloo's all-to-all would then use one direction after the other."""
    begin = f"import sys; sys.path[:0] = {sys.path!r}; FOLDER = {str(bindings_folder)!r}"
    printed = printed_by(begin + BEGIN_LATE, tmp_path, capsys)
    (taken_s,) = map(float, re.findall(r"late=([\d.]+)", printed))
    line_s = MESSAGE_NBYTES * 8 / 1e8
    assert line_s < taken_s < 2 * line_s
