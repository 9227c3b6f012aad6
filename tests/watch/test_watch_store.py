"""The report of who delays a step, where connections to the store are cut or held back."""

import contextlib
import datetime
import fcntl
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from models import Gradients, stderr_to, synchronize
from patience import HANG_S, patient, wait_for_words
from ranks import forkserver
from scripts import python
from stores import group_over
from test_watch import SHAPES, are_right, attached
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.ranks import agreement, bounded_store
from fusedcomm.session import session

pytestmark = pytest.mark.check


def serve(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def server():
    """(process, port) of a TCPStore. Ranks stop, continue and kill the process."""
    ours, theirs = multiprocessing.Pipe()
    process = forkserver().Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    yield process.pid, ours.recv()
    process.kill()
    process.join()


def cut_connections_to(port):
    """Ends those of this process."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.getpeername()[1:2] == (port,):  # not those of Unix sockets, which have names
                connected.shutdown(socket.SHUT_RDWR)


def join_the_server(rank, world_size, port, group_timeout=None, **options):
    """Makes a default group over the server's store. options: of the store."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, **options)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=group_timeout)


def over_the_server(rank, world_size, port, stall_after, **options):
    """The handle, and a function that makes steps. options: of the store."""
    join_the_server(rank, world_size, port, **options)
    return attached(rank, stall_after)[1:]


def cut_off(rank, world_size, server, port, folder):
    """Cuts the connections to the store twice, the second time permanently. Each time rank 1 is late afterwards, until
    the others have reported it. Returns what was written to stderr each time, and whether the means were right."""
    comm, steps = over_the_server(rank, world_size, port, patient(2), timeout=datetime.timedelta(seconds=patient(3)))
    means, logs = steps(3), []
    for is_gone, report in ((False, "rank 1 is slow"), (True, "cannot call the roll")):
        paths = [folder / f"{other}.{is_gone}" for other in range(world_size)]
        with stderr_to(paths[rank]):
            if not is_gone:
                cut_connections_to(port)
            means += steps(1)  # from here on, the stderr of every rank is its file
            if is_gone:
                if rank == 0:
                    os.kill(server, signal.SIGKILL)
                # All wait for all, so that rank 1 alone is late in the next step.
                for path in paths:
                    wait_for_words("has lost the store", path)
            else:
                time.sleep(patient(1))  # long enough to notice the loss
            means += steps(1)
            for path in (paths[0], paths[2]) if rank == 1 else ():
                wait_for_words(report, path)
            means += steps(1)
        logs.append(paths[rank].read_text())
    comm.detach()
    return logs, are_right(means, world_size)


def test_a_connection_to_the_store_is_made_again_once(ranks, server, tmp_path):
    outcomes = ranks.run(cut_off, *server, tmp_path, world_size=3)
    for rank, ((first, second), right) in enumerate(outcomes):
        assert right
        # Rank 1 answers over its new connection, so it is slow and not missing.
        assert ("rank 1 is slow: it has not handed over bucket 0" in first) == (rank != 1), first
        assert "is missing" not in first and "has lost the store" not in first
        assert second.count(f"Warning: fusedcomm: rank {rank} of 3 has lost the store") == 1, second
        assert "a TCPStore at 127.0.0.1" in second
        assert ("cannot call the roll" in second) == (rank != 1)


def held_back(rank, world_size, server, port, folder, in_a_roll_call, silent_s):
    """Makes the store silent for `silent_s` seconds while rank 1 is late, until the others have reported it. If
    `in_a_roll_call`, the silence begins after rank 1 has answered a roll call that another rank opened. Returns what
    was written to stderr, and whether the means were right.

    These seconds are the same on slow machines, because the watch waits equally long for a store on any machine.
    """
    comm, steps = over_the_server(rank, world_size, port, stall_after=2)
    means, paths = steps(3), [folder / f"{other}.log" for other in range(world_size)]
    with stderr_to(paths[rank]):
        if rank == 1:
            if in_a_roll_call:
                comm.session._store.native.wait(["watch/answer/1/1"])
            os.kill(server, signal.SIGSTOP)
            time.sleep(silent_s)
            os.kill(server, signal.SIGCONT)
            for path in (paths[0], paths[2]):
                wait_for_words("rank 1 is slow: it has not handed over bucket 0", path)
        means += steps(1)
    comm.detach()
    return paths[rank].read_text(), are_right(means, world_size)


@pytest.mark.sampled(by=lambda in_a_roll_call, silent_s, silences: {"reported": silences})
@pytest.mark.parametrize(
    ("in_a_roll_call", "silent_s", "silences"), [(False, 3, {0}), (False, 8, {1}), (True, 3.1, {0, 1})]
)
def test_a_store_that_is_silent_for_a_while_hides_nobody(ranks, server, tmp_path, in_a_roll_call, silent_s, silences):
    """A short silence is not reported. A longer silence may be reported, and so may a silence during a roll call, but a
    later report names the slow rank."""
    outcomes = ranks.run(held_back, *server, tmp_path, in_a_roll_call, silent_s, world_size=3)
    for rank, (text, right) in enumerate(outcomes):
        assert right
        if rank != 1:
            assert "rank 1 is slow: it has not handed over bucket 0" in text, text
            assert text.count("the store is silent") in silences, text
        assert "is missing" not in text and "has lost the store" not in text, text


# The store goes on while the interpreter ends, which then waits until the thread of the late request has ended.
ENDS_BESIDE_A_REQUEST = """
import datetime, os, signal, sys, time, torch.distributed as dist
from fusedcomm.ranks.bounded_store import OwnClient, StoreError

class Last:
    def __del__(self, kill=os.kill, go_on=signal.SIGCONT, sleep=time.sleep, listdir=os.listdir):
        num_threads = len(listdir("/proc/self/task"))
        kill(self.server, go_on)
        while len(listdir("/proc/self/task")) == num_threads:
            sleep(0.01)

def is_silent(request):
    try:
        request()
    except StoreError as error:
        return error.is_silence
    return False

last, port = Last(), int(sys.argv[2])
last.server = int(sys.argv[1])
client = OwnClient(dist.TCPStore("127.0.0.1", port, is_master=False), datetime.timedelta(seconds=0.2), "a store")
while is_silent(lambda: client.set("key", "")):
    time.sleep(0.01)
os.kill(last.server, signal.SIGSTOP)
while open(f"/proc/{last.server}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
print(is_silent(lambda: client.get("key")))
"""


def test_a_process_ends_well_although_the_store_answers_just_then(server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS_BESIDE_A_REQUEST)
    ended = python(script, *server)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


# ---- the host of the store is gone

# What attaching calls first after each moment.
MOMENTS = {
    "comparing": (agreement, "agree"),
    "connecting": (bounded_store, "own_client"),
    "watching": (session.Session, "watch"),
}
# The group's timeout in these tests. A clone of a store whose host is gone tries to connect for that long.
LONG_S = HANG_S / 4


@contextlib.contextmanager
def called_first(moment, function):
    """Calls `function` once when attaching comes to the moment."""
    place, name = MOMENTS[moment]
    own = getattr(place, name)

    def patched(*args):
        setattr(place, name, own)
        function()
        return own(*args)

    setattr(place, name, patched)
    try:
        yield
    finally:
        setattr(place, name, own)


def without_its_store(rank, world_size, moment, server=None, port=None):
    """The host of the store, the process `server` or without one rank 0, ends while ranks attach, or after a step of
    DataParallel. Returns the error, "" if there is none, and the seconds until then."""
    timeout, text = datetime.timedelta(seconds=LONG_S), ""
    with contextlib.ExitStack() as group:
        if server is None:
            group.enter_context(group_over("tcp", rank, world_size, 0, timeout))
            port = bounded_store.store_port(dist.group.WORLD)
        else:
            join_the_server(rank, world_size, port, timeout, timeout=timeout)

        def end() -> None:
            if server is not None:
                dist.barrier()  # no rank needs the store to come this far
            if rank == 0:
                os._exit(1) if server is None else os.kill(server, signal.SIGKILL)
            with contextlib.suppress(OSError):
                while True:
                    socket.create_connection(("127.0.0.1", port)).close()
                    time.sleep(0.02)

        started = time.monotonic()
        try:
            if moment in MOMENTS:
                ddp = DistributedDataParallel(Gradients(*SHAPES))
                with called_first(moment, end):
                    fusedcomm.attach(ddp, "int8")
                synchronize(ddp, [torch.ones(shape) for shape in SHAPES])
            else:
                model = fusedcomm.DataParallel(torch.nn.Linear(256, 256), config="int8")
                for step in range(4):
                    if step == 2:
                        end()
                    model(torch.ones(8, 256)).sum().backward()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        waited_s = time.monotonic() - started
        if server is not None:
            dist.barrier()  # a rank that has left would count as lost
        return text, waited_s


@pytest.mark.sampled(by=lambda moment: {"error": moment != "watching"})
@pytest.mark.parametrize("moment", MOMENTS)
def test_attaching_ends_soon_when_the_store_is_gone_and_says_which_store(ranks, server, moment):
    for text, waited_s in ranks.run(without_its_store, moment, *server, world_size=2):
        if moment == "watching":  # the ranks have agreed, and train without reports
            assert text == ""
        else:
            assert text.startswith("StoreError: fusedcomm: the process group's store failed ("), text
            assert f"a TCPStore at 127.0.0.1:{server[1]}, hosted by rank 0 of the job" in text
            assert "look at its log" in text and "\n" not in text
        assert waited_s < LONG_S / 2


@pytest.mark.sampled(by=lambda moment: {"training": moment == "training"})
@pytest.mark.parametrize("moment", [*MOMENTS, "training"])
def test_a_rank_that_dies_with_the_store_is_named_soon(ranks, moment):
    outcome = ranks.outcomes(without_its_store, moment, world_size=3, lost=0)
    for kind, value in outcome[1:]:
        assert kind == "value", value
        error, waited_s = value
        # A wait for ranks names the lost rank; a request to the store names its host.
        assert error.partition(": ")[2].startswith("fusedcomm: ") and "rank 0" in error, error
        assert waited_s < LONG_S / 2


def ends_beside_a_held_file(rank, world_size, path):
    """Whether an engine ends although requests to its FileStore block, as that of a clone's end does."""
    dist.destroy_process_group()
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    reducer = fusedcomm.GradReducer(torch.nn.Linear(8, 8), "bf16", quiet=True)
    dist.barrier()
    dist.destroy_process_group()
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # it is for reading, so both ranks get it
        gave_up = threading.Event()
        timer = threading.Timer(patient(20), lambda: (gave_up.set(), fcntl.flock(file, fcntl.LOCK_UN)))
        timer.start()
        reducer.detach()
        del reducer
        gc.collect()
        timer.cancel()
    del store  # the last one may block
    return not gave_up.is_set()


@pytest.mark.full  # ten seconds, for which the connections that tell of lost ranks wait for the store
def test_an_engine_ends_although_its_store_does_not(ranks, tmp_path):
    assert ranks.run(ends_beside_a_held_file, str(tmp_path / "store"), world_size=2) == [True, True]
