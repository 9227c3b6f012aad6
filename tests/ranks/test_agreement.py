"""What an error names if the ranks do not agree: the argument that differs, not a field that follows from it."""

import pytest
from models import Gradients
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config
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
            (fusedcomm.Auto(base=Config("int4")), fusedcomm.Auto(base=Config("bf16"))),
            "auto.wires[1] is 'int4' on rank 0 and 'bf16' on rank 1",
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
