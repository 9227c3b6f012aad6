"""The report that names the rank that delays a step or has left it, on every rank that waits: as a warning and in the
error."""

import contextlib
import datetime
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
from models import Gradients, stderr_to, synchronise
from on_hosts import needs_hosts, printed_by
from patience import patient, wait_for_words
from stores import group_over
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import config
from fusedcomm.config import Config, LocalOptions

SHAPES = ((400, 300), (500, 600))
TIMEOUT_S = patient(6)


def train(rank, world_size, victim, fate, store_kind, wire):
    """Trains. In step 3 the `victim` is killed or stopped in the middle of the backward pass. Returns the error, what
    was written to stderr meanwhile, the seconds that the step took, and the seconds that detaching took."""
    with group_over(store_kind, rank, world_size, victim, datetime.timedelta(seconds=TIMEOUT_S)) as group:
        ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3, process_group=group)
        comm = fusedcomm.attach(ddp, Config(wire, sum="exact" if wire == "fp32" else "two-shot"))
        gradients = [torch.ones(shape) for shape in SHAPES]
        synchronise(ddp, gradients, steps=3)

        def meet_fate(gradient):
            os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
            return gradient

        if rank == victim:
            ddp.module.weights[0].register_hook(meet_fate)
        with tempfile.NamedTemporaryFile() as log:
            started, error = time.monotonic(), None
            with stderr_to(log.name):
                try:
                    synchronise(ddp, gradients)
                except RuntimeError as caught:
                    error = str(caught)
            waited = time.monotonic() - started
            with open(log.name) as file:
                warned = file.read()
        started = time.monotonic()
        comm.detach()
        return error, warned, waited, time.monotonic() - started


def late_for_the_end_of_a_trial(rank, world_size, folder):
    """Trains with wire="auto" to the end of a trial, where ranks compare times. Rank 1 comes only after rank 0 has
    warned about it. Returns what this rank writes to stderr meanwhile."""
    ddp = DistributedDataParallel(Gradients((4000,)))
    comm = fusedcomm.attach(ddp, fusedcomm.Auto(("bf16",)), local=LocalOptions(stall_after=patient(1)))
    gradients = [torch.ones(4000)]
    trial_steps = comm._runs._search.trial_steps
    synchronise(ddp, gradients, steps=trial_steps)
    log = folder / f"{rank}.log"
    with stderr_to(log):
        if rank == 1:
            wait_for_words("rank 1", folder / "0.log")
        synchronise(ddp, gradients)
    return log.read_text()


def test_a_rank_that_is_late_for_the_end_of_a_trial_is_named(ranks, tmp_path):
    warned, _ = ranks.run(late_for_the_end_of_a_trial, tmp_path, world_size=2)
    assert "rank 1 is slow" in warned and "is missing" not in warned, warned
    assert "the times of wire='auto' trying off" in warned


@pytest.mark.parametrize("fate", ["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("store_kind", ["file", "tcp"])
def test_a_rank_lost_in_mid_step_is_named_on_every_other(ranks, victim, fate, store_kind):
    pid = ranks.processes[victim].pid
    outcome = ranks.outcomes(train, victim, fate, store_kind, "int8", world_size=3, lost=victim)
    for rank in {0, 1, 2} - {victim}:
        kind, value = outcome[rank]
        assert kind == "value", value
        error, warned, waited, detached = value
        report = error[error.index("restart the job") :]
        if store_kind == "tcp" and victim == 0:
            assert ("the store fails" if fate == "killed" else "the store is silent") in report
            assert "a TCPStore at 127.0.0.1" in report and "hosted by rank 0 of the job" in report
            assert "failed for bucket" in error and "between this rank and rank 0: " in error
        else:
            assert f"rank {victim} (process {pid} on " in report and "is missing: no answer within" in report
            assert report.count("is missing") == 1 and "is slow" not in report
        assert re.search(
            r"in step 3 for the all-(to-all|gather) of chunk \d/\d of bucket [01] \(weights\.[01]; ", report
        )
        if fate == "stopped":
            # There was one warning, before the timeout caused an error.
            assert warned.count("Warning: fusedcomm") == 1
            if store_kind == "tcp" and victim == 0:  # the error comes from a later roll call than the warning
                assert "the store is silent" in warned and "hosted by rank 0 of the job" in warned
            else:
                assert report[report.index("fusedcomm: ") :].splitlines()[1] in warned
            assert waited < TIMEOUT_S + patient(4)
        else:
            assert "Warning: fusedcomm" not in warned
            assert waited < TIMEOUT_S
        assert detached < TIMEOUT_S / 2


def test_a_rank_whose_own_connections_hold_learns_of_a_death_too(ranks):
    # An exact sum uses a ring, in which rank 1 is no neighbor of rank 3: rank 1 sees nothing but a timeout.
    outcome = ranks.outcomes(train, 3, "killed", "file", "fp32", world_size=4, lost=3)
    for rank in range(3):
        kind, value = outcome[rank]
        assert kind == "value", value
        error, warned, waited, _ = value
        assert "rank 3 (process " in error and error.count("is missing") == 1
        if rank == 1 and waited > TIMEOUT_S - 1:
            assert warned.count("Warning: fusedcomm") == 1 and "rank 3 (process " in warned


def paused(rank, world_size, victim):
    """Trains. In step 3 the `victim` is stopped for six times stall_after; then five more steps follow. Returns whether
    the means were right and what was written to stderr."""
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3)
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"), local=LocalOptions(stall_after=patient(1)))
    gradients = [torch.full(shape, float(rank + 1)) for shape in SHAPES]
    synchronise(ddp, gradients, steps=3)

    def pause(gradient):
        if not paused_already:
            paused_already.append(True)
            subprocess.Popen(["sh", "-c", f"sleep {patient(6)}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return gradient

    paused_already = []
    if rank == victim:
        ddp.module.weights[0].register_hook(pause)
    with tempfile.NamedTemporaryFile() as log:
        with stderr_to(log.name):
            means = synchronise(ddp, gradients, steps=6)
        with open(log.name) as file:
            warned = file.read()
    comm.detach()
    return all((mean == (world_size + 1) / 2).all().item() for mean in means), warned


def test_a_rank_that_was_stopped_and_goes_on_is_named_by_the_others_alone(ranks):
    for rank, (right, warned) in enumerate(ranks.run(paused, 2, world_size=3)):
        assert right
        assert warned.count("Warning: fusedcomm") == (rank != 2), warned
        if rank != 2:
            assert "rank 2 (process" in warned and "is missing" in warned


def slow(rank, world_size, victim, stall_after, folder, forged=None):
    """Trains. In step 3 the `victim` begins its backward pass only after the others have warned about it; if
    `stall_after` is None, 3 s late, which is too early for a warning. Then five more steps follow.

    Returns whether the means were right, what was written to stderr in step 3 and later, and the seconds that detaching
    took. `forged`: a text that rank 0 puts into the store as roll call 1.
    """
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3)
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"), local=LocalOptions(stall_after=stall_after))
    if forged is not None and rank == 0:
        comm._session._store.set("watch/call/1", forged)
        comm._session._store.wait([f"watch/answer/1/{answering}" for answering in range(world_size)])
    gradients = [torch.full(shape, float(rank + 1)) for shape in SHAPES]
    synchronise(ddp, gradients, steps=3)
    log = folder / f"{rank}.log"
    with stderr_to(log):
        if rank == victim and stall_after is None:
            time.sleep(3)
        elif rank == victim:
            for other in {*range(world_size)} - {victim}:
                wait_for_words("is slow", folder / f"{other}.log")
        means = synchronise(ddp, gradients)
        means += synchronise(ddp, gradients, steps=5)
    warned = log.read_text()
    started = time.monotonic()
    comm.detach()
    right = all((mean == (world_size + 1) / 2).all().item() for mean in means)
    return right, warned, time.monotonic() - started


def test_a_slow_rank_is_named_once_and_training_goes_on(ranks, tmp_path):
    for rank, (right, warned, detached) in enumerate(ranks.run(slow, 1, patient(2), tmp_path, world_size=3)):
        assert right and detached < patient(5)
        if rank == 1:
            assert warned == ""
            continue
        # The roll call's number is open: on a busy machine an earlier step may have stalled.
        assert len(re.findall(r"Warning: fusedcomm: roll call \d+ of 3 ranks", warned)) == 1
        assert "rank 1 is slow: it has not handed over bucket 0 (weights.1; " in warned
        assert "of step 3; nothing under way for" in warned and "since step 2" in warned
        assert "ranks 0, 2 wait in step 3 for the all-to-all of chunk 1/" in warned
        assert "missing" not in warned


@pytest.mark.parametrize("forged", ["", "opened by rank 2, after a failure: ", "call 1 0123456789abcdef\n1:2,"])
def test_a_roll_call_that_cannot_be_read_is_answered_and_passed_over(ranks, tmp_path, forged):
    outcomes = ranks.run(slow, 1, patient(2), tmp_path, forged, world_size=3)
    assert all(right for right, _, _ in outcomes) and outcomes[1][1] == ""
    for _, warned, _ in (outcomes[0], outcomes[2]):
        assert "Warning: fusedcomm: roll call 2 of 3 ranks, opened by rank " in warned
        assert "rank 1 is slow: it has not handed over bucket 0" in warned and "missing" not in warned


def test_nothing_is_said_of_a_wait_within_stall_after(ranks, tmp_path):
    for right, warned, _ in ranks.run(slow, 1, None, tmp_path, world_size=3):
        assert right and warned == ""


# ---- a store whose connections fail


class Proxy:
    """A proxy between the ranks and a TCPStore. It obeys one byte from a client of the port `control`:

    - "h" holds back all data, until "g".
    - "0" cuts all connections and refuses new ones.
    - Any other byte cuts all connections.
    """

    def __init__(self, port):
        self._port, self._pairs, self._is_open, self._goes_on = port, [], True, threading.Event()
        self._goes_on.set()
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.port, self.control = (listener.getsockname()[1] for listener in self._listeners)
        for listener, serve in zip(self._listeners, (self._connect, self._obey), strict=True):
            threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    def close(self):
        for listener in self._listeners:
            listener.close()
        self._cut()

    def _accept(self, listener, serve):
        with contextlib.suppress(OSError):
            while True:
                serve(listener.accept()[0])

    def _connect(self, client):
        if not self._is_open:
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self._port))
        self._pairs += [client, server]
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._goes_on.wait()
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def _obey(self, client):
        order = client.recv(1)
        if order in b"hg":
            self._goes_on.clear() if order == b"h" else self._goes_on.set()
        else:
            self._is_open = order != b"0"
            self._cut()
        client.sendall(b"done")
        client.close()

    def _cut(self):
        while self._pairs:
            with contextlib.suppress(OSError):
                self._pairs.pop().shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(store.port)
    yield proxy
    proxy.close()


def obey(control, order):
    with socket.create_connection(("127.0.0.1", control)) as client:
        client.sendall(order)
        assert client.recv(4) == b"done"


def cut_off(rank, world_size, port, control):
    """Cuts the connections to the store twice, the second time permanently. Each time rank 1 is late afterwards.
    Returns what was written to stderr each time, and whether the means were right."""
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=patient(5))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3)
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"), local=LocalOptions(stall_after=patient(2)))
    gradients = [torch.full(shape, float(rank + 1)) for shape in SHAPES]
    means, logs = synchronise(ddp, gradients, steps=3), []
    for order, wait_s in ((b"1", patient(2)), (b"0", patient(10))):
        with tempfile.NamedTemporaryFile() as log:
            with stderr_to(log.name):
                if rank == 0:
                    obey(control, order)
                means += synchronise(ddp, gradients)
                time.sleep(wait_s)  # long enough to notice the loss, and to stop reconnecting
                means += synchronise(ddp, gradients)
                time.sleep(patient(6) if rank == 1 else 0)
                means += synchronise(ddp, gradients)
            with open(log.name) as file:
                logs.append(file.read())
    comm.detach()
    return logs, all((mean == (world_size + 1) / 2).all().item() for mean in means)


def test_a_connection_to_the_store_is_made_again_once(ranks, proxy):
    for rank, ((first, second), right) in enumerate(ranks.run(cut_off, proxy.port, proxy.control, world_size=3)):
        assert right
        # Rank 1 answers over its new connection, so it is slow and not missing.
        assert ("rank 1 is slow: it has not handed over bucket 0" in first) == (rank != 1), first
        assert "is missing" not in first and "has lost the store" not in first
        assert second.count(f"Warning: fusedcomm: rank {rank} of 3 has lost the store") == 1, second
        assert "a TCPStore at 127.0.0.1" in second
        assert ("cannot call the roll" in second) == (rank != 1)


def held_back(rank, world_size, port, control, in_a_roll_call, silent_s):
    """Makes the store silent for `silent_s` seconds while rank 1 is late. If `in_a_roll_call`, the silence begins after
    rank 1 has answered a roll call that another rank opened. Returns what was written to stderr, and whether the means
    were right.

    These seconds are the same on slow machines, because the watch waits equally long for a store on any machine.
    """
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3)
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"), local=LocalOptions(stall_after=2))
    gradients = [torch.full(shape, float(rank + 1)) for shape in SHAPES]
    means = synchronise(ddp, gradients, steps=3)
    with tempfile.NamedTemporaryFile() as log:
        with stderr_to(log.name):
            if rank == 1:
                if in_a_roll_call:
                    comm._session._store.wait(["watch/answer/1/1"])
                obey(control, b"h")
                time.sleep(silent_s)
                obey(control, b"g")
                time.sleep(patient(8))
            means += synchronise(ddp, gradients)
        with open(log.name) as file:
            text = file.read()
    comm.detach()
    return text, all((mean == (world_size + 1) / 2).all().item() for mean in means)


@pytest.mark.parametrize(
    ("in_a_roll_call", "silent_s", "silences"), [(False, 3, {0}), (False, 8, {1}), (True, 3.1, {0, 1})]
)
def test_a_store_that_is_silent_for_a_while_hides_nobody(ranks, proxy, in_a_roll_call, silent_s, silences):
    """A short silence is not reported. A longer silence may be reported, and so may a silence during a roll call, but a
    later report names the slow rank."""
    outcomes = ranks.run(held_back, proxy.port, proxy.control, in_a_roll_call, silent_s, world_size=3)
    for rank, (text, right) in enumerate(outcomes):
        assert right
        if rank != 1:
            assert "rank 1 is slow: it has not handed over bucket 0" in text, text
            assert text.count("the store is silent") in silences, text
        assert "is missing" not in text and "has lost the store" not in text, text


# ---- the option


@pytest.mark.parametrize(
    "stall_after", [0, -1.0, True, "60", float("inf"), float("nan"), 1e-9, 0.099, 2e9, 1e300, 10**400]
)
def test_an_impossible_stall_after_is_refused(stall_after):
    with pytest.raises(ValueError, match=r"stall_after=.* is not possible: use a number of seconds from 0\.1 to 1e9"):
        config.choose_stall_after(stall_after, 30)


def test_by_default_a_stall_is_reported_before_the_timeout():
    assert config.choose_stall_after(None, 1800) == 60
    assert config.choose_stall_after(None, 30) == 10
    assert config.choose_stall_after(25, 30) == 25
    assert config.choose_stall_after(0.1, 30) == 0.1


def refused(rank, world_size):
    ddp = DistributedDataParallel(Gradients((5,)))
    try:
        fusedcomm.attach(ddp, local=LocalOptions(stall_after=0 if rank == 1 else 1))
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_an_impossible_stall_after_on_one_rank_is_an_error_on_all(ranks):
    errors = ranks.run(refused, world_size=2)
    assert errors[1].startswith("stall_after=0 is not possible") and "rank 1 cannot attach: stall_after=0" in errors[0]


KILLED_UNDER_TORCHRUN = """
import datetime, os, signal, torch, torch.distributed as dist, fusedcomm
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
ddp = DistributedDataParallel(torch.nn.Linear(2000, 500))
comm = fusedcomm.attach(ddp, wire="int8", quiet=True)
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
