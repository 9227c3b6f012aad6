"""What an error names if the ranks do not agree: the argument that differs, not a field that follows from it. What one
rank alone refuses, or what prevents it, is an error on all."""

import datetime
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from models import Gradients, refusal, synchronize
from patience import patient
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import version
from fusedcomm.config import Config, LocalOptions
from fusedcomm.native import _C
from fusedcomm.ranks import bounded_store, peers
from fusedcomm.ranks.agreement import _first_difference, agree
from fusedcomm.session import session


def attached_with(rank, world_size, of_ranks):
    ddp = DistributedDataParallel(Gradients((50, 2), (3,)))
    try:
        fusedcomm.attach(ddp, of_ranks[rank], quiet=True)
    except RuntimeError as error:
        return str(error)
    return "attached"


class Renamed(Gradients):
    """Gradients whose parameters have other names."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__(*shapes)
        self._modules["other"] = self._modules.pop("weights")


LAYOUT = _C.WIRE_LAYOUT_VERSION
DIFFERING = [
    (_C, "WIRE_LAYOUT_VERSION", LAYOUT - 1, f"wire layout is {LAYOUT} on rank 0 and {LAYOUT - 1} on rank 1"),
    (version, "__version__", "9.9.9", f"versions.fusedcomm is '{version.__version__}' on rank 0 and '9.9.9' on rank 1"),
    (
        sys.modules[__name__],
        "Gradients",
        Renamed,
        "parameters.list[0][0] is 'weights.0' on rank 0 and 'other.0' on rank 1",
    ),
]
"""What is set to another value on rank 1, and what is said of it."""


def attached_beside(rank, world_size, number):
    place, name, other, _ = DIFFERING[number]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(place, name, other)
        return attached_with(rank, world_size, (Config("int4"),) * world_size)


@pytest.mark.parametrize("number", range(len(DIFFERING)))
def test_what_differs_beside_the_configuration_is_named(ranks, number):
    for error in ranks.run(attached_beside, number, world_size=2):
        assert DIFFERING[number][-1] in error


def test_fields_are_compared_in_the_order_in_which_they_were_recorded():
    left = {"wire": "int4", "blocks": 32, "more": 1}
    assert _first_difference(left, {"wire": "bf16", "blocks": 128}) == ("wire", "int4", "bf16")
    assert _first_difference(left, {"blocks": 32, "wire": "int4", "extra": 2}) == ("more", 1, None)
    assert _first_difference({"a": {"b": 1}}, {"a": {"b": 1}, "extra": 2}) == ("extra", None, 2)
    assert _first_difference(left, dict(left)) is None


class Moody(torch.optim.SGD):
    """An optimizer that cannot be made on rank 1."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("not in this mood")
        super().__init__(*args, **kwargs)


def ddp_with_builtin_hook(is_bad):
    ddp = DistributedDataParallel(Gradients((50, 2)))
    if is_bad:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    fusedcomm.attach(ddp, "bf16")


def attached_twice(is_bad):
    ddp = DistributedDataParallel(Gradients((50, 2)))
    comm = fusedcomm.attach(ddp, "bf16")
    if not is_bad:
        comm.detach()
    fusedcomm.attach(ddp, "bf16")


def with_an_option_of_shards(is_bad):
    fusedcomm.attach(DistributedDataParallel(Gradients((50, 2))), Config(params="int8" if is_bad else "fp32"))


def hook_with_a_state(is_bad):
    ddp, state = DistributedDataParallel(Gradients((50, 2))), fusedcomm.CommState("bf16")
    if is_bad:
        state.load_state_dict({"version": "of another program"})
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    ddp([torch.ones(50, 2)]).backward()


def sharded_optimizer(is_bad):
    fusedcomm.ShardedOptimizer(fusedcomm.GradReducer(Gradients((50, 2)), "bf16"), Moody, lr=0.1)


def options_of_this_process(is_bad):
    ddp = DistributedDataParallel(Gradients((50, 2)))
    fusedcomm.attach(ddp, local=LocalOptions(isa="sse9" if is_bad else None), quiet=True)


LOCAL = {
    options_of_this_process: "isa='sse9'",
    ddp_with_builtin_hook: "already has a built-in communication hook",
    attached_twice: "already synchronizes the parameter",
    with_an_option_of_shards: "params='int8'",
    hook_with_a_state: "of another program",
    lambda is_bad: fusedcomm.GradReducer([] if is_bad else Gradients((50, 2))): "no parameters that could have",
    lambda is_bad: fusedcomm.GradReducer(Gradients((50, 2)), bucket_mib=0 if is_bad else 1): "bucket_mib=0",
    lambda is_bad: fusedcomm.DataParallel(Gradients((50, 2)).requires_grad_(not is_bad)): "requires a gradient",
    lambda is_bad: fusedcomm.DataParallel(Gradients((50, 2)), device_ids=[0] if is_bad else None): "device_ids=[0]",
    sharded_optimizer: "not in this mood",
}
"""Calls that fail on one rank alone, by what that rank knows alone, and what they say."""


def refused_on_rank_1(rank, world_size, number):
    text = refusal(list(LOCAL)[number], rank == 1)
    dist.barrier()
    return text, attached_with(rank, world_size, (Config("bf16"),) * world_size)


@pytest.mark.parametrize("number", range(len(LOCAL)))
def test_what_one_rank_alone_refuses_is_raised_on_all_ranks(ranks, number):
    words = list(LOCAL.values())[number]
    of_ranks, after = zip(*ranks.run(refused_on_rank_1, number, world_size=3), strict=True)
    assert words in of_ranks[1] and of_ranks[0] == of_ranks[2]
    assert f"rank 1 cannot attach: {of_ranks[1].split(': ', 1)[1].removeprefix('fusedcomm: ')}" in of_ranks[0]
    assert set(after) == {"attached"}


# ---- what prevents one rank


PREVENTED = {
    "compiling": OSError("No space left on device"),
    "connecting": MemoryError("no memory for channels"),
    "allocating": MemoryError("no memory for workspaces"),
}
"""By moment of attaching: an error that comes from outside fusedcomm."""


def prevented(rank, world_size, when):
    """The last rank cannot attach. Returns a rank's error, its cause and its warnings, and a mean of DDP's own: no rank
    is attached."""

    class Prevented(session.CpuPath):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.meet("compiling")

        def connect(self, *args):
            self.meet("connecting")
            connected = super().connect(*args)
            self.meet("allocating")
            return connected

        def meet(self, moment):
            if moment == when:
                raise PREVENTED[when]

    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=patient(4)))
    ddp = DistributedDataParallel(Gradients((1000,)), process_group=group)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == world_size - 1:
            patch.setattr(session, "CpuPath", Prevented)
        with pytest.raises((OSError, MemoryError, RuntimeError)) as error:
            fusedcomm.attach(ddp, "bf16")
        said = [str(warning.message) for warning in caught]
    named = f"{type(error.value).__name__}: {error.value}"
    mean = synchronize(ddp, [torch.full((1000,), float(rank))])[0][0].item()
    return named, error.value.__cause__, said, mean


@pytest.mark.check
@pytest.mark.parametrize("when", PREVENTED)
def test_what_prevents_one_rank_prevents_all_by_name(ranks, when):
    own = PREVENTED[when]
    first, second, last = ranks.run(prevented, when, world_size=3)
    assert last == (f"{type(own).__name__}: {own}", None, [], 1.0)
    assert first == second == (f"DisagreementError: fusedcomm: rank 2 cannot attach: {own}", None, [], 1.0)


FIRST = "no space left on device"
LATER = {"no space": True, "": True, "rank 1": True, FIRST: False}
"""By a later problem: whether its rank is told of the first one, too."""


def with_problems_of_their_own(rank, world_size):
    """Rank 1 has a problem, and later rank 0 has one, too. Returns, for each of these, a rank's error and its cause."""
    found = []
    for number, later in enumerate(LATER):
        store = bounded_store.private_store(dist.group.WORLD).under(f"problem {number}")
        waiting = peers.Peers(dist.group.WORLD, store, datetime.timedelta(seconds=60), 60)
        while rank == 0 and not store.check(["record/1"]):
            time.sleep(0.01)
        with pytest.raises(OSError) as error:
            agree(waiting, store, {}, OSError(FIRST if rank == 1 else later))
        cause = error.value.__cause__
        found.append((str(error.value), cause and str(cause)))
        dist.barrier()
    return found


def test_a_rank_with_a_problem_is_told_of_an_earlier_one_unless_that_is_the_same(ranks):
    on_0, on_1 = ranks.run(with_problems_of_their_own, world_size=2)
    told = f"fusedcomm: rank 1 cannot attach: {FIRST}"
    assert on_0 == [(later, told if is_told else None) for later, is_told in LATER.items()]
    assert on_1 == [(FIRST, None)] * len(LATER)
