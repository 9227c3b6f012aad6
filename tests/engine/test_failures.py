"""If a rank dies, leaves, stops or differs, every other rank raises a clear error within the group's timeout."""

import dataclasses
import datetime
import gc
import os
import signal
import tempfile
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Gradients, stderr_to, synchronize
from patience import patient
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import version
from fusedcomm.config import Blocks, Config, LocalOptions
from fusedcomm.ranks import groups, peers
from fusedcomm.session import session

pytestmark = pytest.mark.check

# Seconds; the timeout of the process group. It must also be enough for ranks to start, attach and take three steps
# while other programs use the cores.
TIMEOUT_S = patient(12)


def train_until_error(rank, world_size, wire, fate, through_state):
    """Trains. In step 3 the last rank is killed or stopped in the middle of the backward pass. Returns the error of a
    surviving rank and the seconds that the rank waited for it."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    group = dist.new_group(list(range(world_size)), timeout=timeout)
    ddp = DistributedDataParallel(Gradients((400, 300), (500, 600)), bucket_cap_mb=0.3, process_group=group)
    if through_state:
        state = fusedcomm.CommState(wire, process_group=group)
        ddp.register_comm_hook(state, fusedcomm.comm_hook)
    else:
        comm = fusedcomm.attach(ddp, Config(wire, sum="exact" if wire == "fp32" else "two-shot"))
    gradients = [torch.ones(400, 300), torch.ones(500, 600)]
    synchronize(ddp, gradients, steps=3)

    def meet_fate(gradient):
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fate == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        return gradient

    if rank == world_size - 1:
        ddp.module.weights[0].register_hook(meet_fate)
    started = time.monotonic()
    try:
        synchronize(ddp, gradients)
    except RuntimeError as error:
        waited = time.monotonic() - started
        # The error is permanent: every later step must fail, too.
        with pytest.raises(RuntimeError, match="fusedcomm: rank"):
            if through_state:
                raise error
            ddp.module.weights[0].grad = None
            bucket_error_again(ddp, gradients)
        if not through_state:
            comm.detach()
        return str(error), waited
    return None, time.monotonic() - started


def bucket_error_again(ddp, gradients):
    """Hands the engine another bucket after the failure; it must raise. The hook is called directly, because a reducer
    cannot be used again after it has raised in the backward pass."""
    zero_buckets = ddp.reducer._get_zeros_like_grad_buckets()
    ddp.reducer._run_comm_hook(zero_buckets[0]).wait()


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("fate", ["killed", "stopped"])
@pytest.mark.parametrize("through_state", [False, True])
def test_a_rank_lost_in_mid_step_is_an_error_on_every_survivor(ranks, wire, fate, through_state):
    outcome = ranks.outcomes(train_until_error, wire, fate, through_state, world_size=3, lost=2)
    for rank in (0, 1):
        kind, value = outcome[rank]
        assert kind == "value", value
        error, waited = value
        assert f"fusedcomm: rank {rank} of 3" in error
        assert "bucket" in error and "weights." in error or through_state and "parameter" in error
        assert "restart the job" in error
        assert waited < TIMEOUT_S + patient(9)


def disagree(rank, world_size, field):
    """Attaches with one field that differs on rank 1. Returns the error's text."""
    config = Config("int8", blocks=Blocks(128))
    shapes = [(5000,), (10, 10)]
    if rank == 1:
        if field == "block":
            config = dataclasses.replace(config, blocks=Blocks(64))
        elif field == "wire":
            config = Config("bf16")
        elif field == "wires":
            config = dataclasses.replace(config, wires={"weights.1": "fp32"})
        elif field == "version":
            version.__version__ = "9.9.9"
    try:
        ddp = DistributedDataParallel(Gradients(*shapes))
        if field == "parameters":
            name = "weights" if rank == 0 else "other"
            ddp.module._modules[name] = ddp.module._modules.pop("weights")
        try:
            fusedcomm.attach(ddp, config)
        except RuntimeError as error:
            return str(error)
    finally:
        version.__version__ = fusedcomm.__version__


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("block", ["config.blocks.numel", "128", "64"]),
        ("wire", ["config.", "'int8'", "'bf16'"]),
        ("wires", ["config.wires", "weights.1"]),
        ("version", ["versions.fusedcomm", "9.9.9"]),
        ("parameters", ["parameters.list[0]", "weights.0", "other.0"]),
    ],
)
def test_a_rank_with_another_configuration_is_named_on_every_rank(ranks, field, named):
    errors = ranks.run(disagree, field, world_size=3)
    assert len(set(errors)) == 1
    assert "rank 0" in errors[0] and "rank 1" in errors[0]
    if field == "wire":
        named = ["rank 1"]  # these wires also differ in blocks, and only the first difference is reported
    for word in named:
        assert word in errors[0]


def wrong_on_one_rank(rank, world_size):
    ddp = DistributedDataParallel(Gradients((5,)))
    try:
        fusedcomm.attach(ddp, local=LocalOptions(isa="sse9" if rank == 1 else None))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_what_is_wrong_on_one_rank_alone_is_an_error_on_all(ranks):
    errors = ranks.run(wrong_on_one_rank, world_size=3)
    assert errors[1].startswith("ValueError: isa='sse9'")
    assert errors[0] == errors[2] and "rank 1 cannot attach: isa='sse9'" in errors[0]


def absent(rank, world_size):
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=patient(2)))
    ddp = DistributedDataParallel(Gradients((5,)), process_group=group)
    if rank == 1:
        dist.barrier()  # the other ranks reach this barrier after their attach has failed
        return None
    try:
        fusedcomm.attach(ddp)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()


def test_a_rank_that_does_not_attach_is_named(ranks):
    errors = ranks.run(absent, world_size=3)
    assert f"rank(s) [1] did not attach within {patient(2)} s" in errors[0] and errors[0] == errors[2]


def stopped_under_way(rank, world_size):
    """Detaches while a bucket waits for rank 1. Returns the bucket's error."""
    ddp = DistributedDataParallel(Gradients((300000,)))
    comm = fusedcomm.attach(ddp, "int8")
    synchronize(ddp, [torch.ones(300000)])
    if rank == 1:
        comm.detach()
        return None
    bucket = ddp.reducer._get_zeros_like_grad_buckets()[0]
    future = ddp.reducer._run_comm_hook(bucket)
    comm.detach()
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)


def test_detaching_with_a_bucket_under_way_fails_that_bucket(ranks):
    error, _ = ranks.run(stopped_under_way, world_size=2)
    assert "fusedcomm: rank 0" in error


def prevented(rank, world_size, when):
    """The last rank cannot attach. The reason is an error that comes from outside fusedcomm."""

    class Prevented(session.CpuPath):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            if when == "compiling":
                raise OSError("No space left on device")

        def connect(self, *args):
            connected = super().connect(*args)
            if when == "allocating":
                raise MemoryError("no memory for workspaces")
            return connected

    ddp = DistributedDataParallel(Gradients((1000,)))
    own = session.CpuPath
    if rank == world_size - 1:
        session.CpuPath = Prevented
    try:
        fusedcomm.attach(ddp, "bf16")
    except (OSError, MemoryError, RuntimeError) as error:
        # No rank is attached: the module still works, with DDP's default all-reduce.
        return f"{type(error).__name__}: {error}", synchronize(ddp, [torch.full((1000,), float(rank))])[0][0].item()
    finally:
        session.CpuPath = own
    return "attached", None


@pytest.mark.parametrize(
    ("when", "own"),
    [("compiling", "OSError: No space left on device"), ("allocating", "MemoryError: no memory for workspaces")],
)
def test_what_prevents_one_rank_prevents_all_by_name(ranks, when, own):
    first, second, last = ranks.run(prevented, when, world_size=3)
    assert last == (own, 1.0)
    assert first == second
    assert first == (f"DisagreementError: fusedcomm: rank 2 cannot attach: {own.split(': ', 1)[1]}", 1.0)


def prevented_from_connecting(rank, world_size):
    """The last rank fails while it connects, and the others wait for it. Returns a rank's error, its cause and its
    warnings."""

    class Prevented(session.CpuPath):
        def connect(self, *args):
            raise MemoryError("no memory for channels")

    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=patient(4)))
    ddp = DistributedDataParallel(Gradients((1000,)), process_group=group)
    own = session.CpuPath
    if rank == world_size - 1:
        session.CpuPath = Prevented
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fusedcomm.attach(ddp, "bf16")
        except Exception as error:
            return f"{type(error).__name__}: {error}", str(error.__cause__), [str(w.message) for w in caught]
        finally:
            session.CpuPath = own
    return None


def test_what_keeps_one_rank_from_connecting_is_the_reason_that_all_are_told(ranks):
    first, second, last = ranks.run(prevented_from_connecting, world_size=3)
    assert last == ("MemoryError: no memory for channels", "None", [])
    assert first == second == ("DisagreementError: fusedcomm: rank 2 cannot attach: no memory for channels", "None", [])


def with_problems_of_their_own(rank, world_size, problems):
    """Rank 1 has a problem, and later rank 0 has one, too. Returns a rank's error and its cause."""
    store = groups.private_store(dist.group.WORLD)
    attaching = types.SimpleNamespace(
        peers=peers.Peers(dist.group.WORLD, store, datetime.timedelta(seconds=60), 60), rank=rank, _store=store
    )
    while rank == 0 and not store.check(["plan/record/1"]):
        time.sleep(0.01)
    try:
        session.Session._agree(attaching, store, "plan", {}, OSError(problems[rank]))
    except OSError as error:
        return str(error), error.__cause__ and str(error.__cause__)


@pytest.mark.parametrize(
    ("own", "is_told"), [("no space", True), ("", True), ("rank 1", True), ("no space left on device", False)]
)
def test_a_rank_with_a_problem_is_told_of_an_earlier_one_unless_that_is_the_same(ranks, own, is_told):
    first = "no space left on device"
    on_0, on_1 = ranks.run(with_problems_of_their_own, [own, first], world_size=2)
    assert on_0 == (own, f"fusedcomm: rank 1 cannot attach: {first}" if is_told else None)
    assert on_1 == (first, None)


def let_go(rank, world_size, wire, how):
    """After two steps the last rank stops, and the others raise an error of the user's and release everything. Returns
    the seconds that the release took and what it wrote to stderr."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=patient(25)))
    ddp = DistributedDataParallel(Gradients((400, 300), (500, 600)), bucket_cap_mb=0.3, process_group=group)
    comm = fusedcomm.attach(ddp, Config(wire, sum=how))
    gradients = [torch.ones(400, 300), torch.ones(500, 600)]
    synchronize(ddp, gradients, steps=2)

    def fail(gradient):
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # a bucket is under way by now
        raise ArithmeticError("of the user's")

    ddp.module.weights[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        synchronize(ddp, gradients)
    comm.detach()
    with tempfile.NamedTemporaryFile() as log, stderr_to(log.name):
        began = time.monotonic()
        del comm, ddp
        gc.collect()
        taken_s = time.monotonic() - began
        text = Path(log.name).read_text()
    return taken_s, text


def test_messages_are_given_up_while_a_peer_is_silent(ranks):
    for how in ("one-shot", "two-shot"):
        outcomes = ranks.outcomes(let_go, "int8", how, world_size=2, lost=1)
        kind, (taken_s, text) = outcomes[0]
        assert kind == "value" and taken_s < patient(5) and "closes its channels" not in text, outcomes


def test_channels_are_let_go_of_while_a_peer_is_silent(ranks):
    """Unlike a message, an all-reduce cannot be aborted, so its channel is closed only after a while."""
    outcomes = ranks.outcomes(let_go, "bf16", "direct", world_size=2, lost=1)
    kind, (taken_s, text) = outcomes[0]
    assert kind == "value" and 9 < taken_s < patient(15), outcomes
    assert "fusedcomm: rank 0 of 2 closes its channels, but a collective still waits for a peer after 10 s" in text
