"""What an error names if the ranks do not agree: the argument that differs, not a field that follows from it."""

import pytest
import torch
import torch.distributed as dist
from models import Gradients, refusal
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback
from fusedcomm.native import _C
from fusedcomm.ranks.agreement import _first_difference


def attached_with(rank, world_size, of_ranks):
    ddp = DistributedDataParallel(Gradients((50, 2), (3,)))
    try:
        fusedcomm.attach(ddp, of_ranks[rank], quiet=True)
    except RuntimeError as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        # A wire has its own default block, its own exempt parameters and its own wire within a host.
        ((Config("int4"), Config("bf16")), "wire is 'int4' on rank 0 and 'bf16' on rank 1"),
        ((Config("int8"), Config("int4")), "wire is 'int8' on rank 0 and 'int4' on rank 1"),
        ((Config("fp32", hosts=2), Config("bf16", hosts=2)), "wire is 'fp32' on rank 0 and 'bf16' on rank 1"),
        ((fusedcomm.Auto(), Config("int8")), "wire is 'auto' on rank 0 and 'int8' on rank 1"),
        ((Config("bf16"), fusedcomm.Auto()), "wire is 'bf16' on rank 0 and 'auto' on rank 1"),
        (
            (fusedcomm.Auto(("bf16", Config("int4"))), fusedcomm.Auto(("bf16", "int8"))),
            "auto.candidates[1] is 'int4' on rank 0 and 'int8' on rank 1",
        ),
    ],
    ids=str,
)
def test_ranks_with_different_wires_are_told_so(ranks, of_ranks, words):
    for error in ranks.run(attached_with, of_ranks, world_size=2):
        assert f"the ranks do not agree: {words}. Give every rank" in error


def attached_with_layout(rank, world_size, versions):
    # The name that fusedcomm.ranks.agreement reads; the codec itself is the same on every rank.
    now, _C.WIRE_LAYOUT_VERSION = _C.WIRE_LAYOUT_VERSION, versions[rank]
    try:
        return attached_with(rank, world_size, (Config("int4"),) * world_size)
    finally:
        _C.WIRE_LAYOUT_VERSION = now


def test_a_rank_with_an_older_wire_layout_is_told_so(ranks):
    now = _C.WIRE_LAYOUT_VERSION
    for error in ranks.run(attached_with_layout, (now, now - 1), world_size=2):
        assert f"wire layout is {now} on rank 0 and {now - 1} on rank 1" in error


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


def searched(is_bad):
    ddp = DistributedDataParallel(Gradients((50, 2)))
    fusedcomm.attach(ddp, fusedcomm.Auto((Config(feedback=Feedback(unsharded=is_bad)),)))


def hook_with_a_state(is_bad):
    ddp, state = DistributedDataParallel(Gradients((50, 2))), fusedcomm.CommState("bf16")
    if is_bad:
        state.load_state_dict({"version": "of another program"})
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    ddp([torch.ones(50, 2)]).backward()


def sharded_optimizer(is_bad):
    fusedcomm.ShardedOptimizer(fusedcomm.GradReducer(Gradients((50, 2)), "bf16"), Moody, lr=0.1)


LOCAL = {
    ddp_with_builtin_hook: "already has a built-in communication hook",
    attached_twice: "already synchronizes the parameter",
    searched: "Feedback(unsharded=True)",
    hook_with_a_state: "of another program",
    lambda is_bad: fusedcomm.GradReducer([] if is_bad else Gradients((50, 2))): "no parameters that could have",
    lambda is_bad: fusedcomm.GradReducer(Gradients((50, 2)), every=0 if is_bad else 1): "every=0",
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
