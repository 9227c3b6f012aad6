"""config="off": DDP stays as it comes, with a handle that says so."""

import copy
import warnings

import pytest
import torch
from models import Gradients, synchronize, threads_of_engine
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback
from fusedcomm.session.state_dict import KEYS

SHAPE = (60, 90)


def seen_by(ddp, rank, steps=1):
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))
    return synchronize(ddp, [gradient], steps=steps)[-1]


def compared(rank, world_size):
    plain = seen_by(DistributedDataParallel(Gradients(SHAPE)), rank)
    ddp, before = DistributedDataParallel(Gradients(SHAPE)), threads_of_engine()
    comm = fusedcomm.attach(ddp, "off")
    is_bare = not ddp._comm_hooks and not ddp._forward_pre_hooks and threads_of_engine() == before
    assert torch.equal(seen_by(ddp, rank), plain)
    plan, stats = comm.plan(), comm.stats()
    with pytest.raises(RuntimeError, match="torch's own sums run"):
        comm.trace("trace.json")
    with pytest.raises(ValueError, match="fusedcomm.attach already synchronizes the parameter"):
        fusedcomm.attach(ddp, "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the copy is as good as the original, so nothing is to be said
        assert torch.equal(seen_by(copy.deepcopy(ddp), rank), plain)
    shown = (repr(comm), str(comm), str(plan))
    assert comm.tuning() is None and comm.nonfinite_report() == []
    comm.detach()
    comm.detach()
    with pytest.raises(RuntimeError, match="this handle is detached"):
        comm.load_state_dict(comm.state_dict())
    assert comm.plan().detached and repr(comm) == "<fusedcomm.Handle: detached>"
    lossy = fusedcomm.attach(ddp, "int8", quiet=True)
    differs = not torch.equal(seen_by(ddp, rank), plain)
    lossy.detach()
    with fusedcomm.attach(ddp, "off", quiet=True):  # the reducer still has the hook of the attachment before
        again = seen_by(ddp, rank, steps=2)
    return is_bare, stats, plan, shown, differs, torch.equal(again, plain)


def test_ddp_stays_as_it_comes(ranks):
    for is_bare, stats, plan, (line, whole, table), differs, is_plain_again in ranks.run(compared, world_size=2):
        assert is_bare and differs and is_plain_again
        assert stats.off and stats.scalars() == {"steps": 0.0, "nonfinite": 0.0, "off": 1.0}
        assert plan.off and plan.world_size == 2 and [row.parameters for row in plan.buckets] == [("weights.0",)]
        assert line == "<fusedcomm.Handle: off, DDP's own all-reduce, 2 ranks>"
        assert table.startswith("fusedcomm: off, DDP's own exact all-reduce, 2 ranks\n")
        assert whole.splitlines() == [
            "fusedcomm: off, DDP's own exact all-reduce, 2 ranks",
            "fusedcomm: off, DDP's own all-reduce, which is not counted",
        ]


def saved(rank, world_size):
    ddp = DistributedDataParallel(Gradients(SHAPE))
    comm = fusedcomm.attach(ddp, Config("int4", feedback=Feedback()))
    seen_by(ddp, rank, steps=3)
    state = comm.state_dict()
    comm.detach()
    off = fusedcomm.attach(ddp, "off")
    with pytest.raises(ValueError, match="keeps none .config='off'."):
        off.load_state_dict(state)
    with pytest.raises(ValueError, match="'nobody'"):
        off.load_state_dict({**state, "residuals": {}, "nonfinite": {"nobody": 1}})
    fresh = off.state_dict()
    state = {**state, "residuals": {}, "nonfinite": {"weights.0": 5}}
    off.load_state_dict(state)
    kept = off.state_dict()
    consolidated = off.state_dict(consolidated=True)
    off.detach()
    comm = fusedcomm.attach(ddp, "bf16")
    comm.load_state_dict(kept)
    return state, fresh, kept, consolidated, comm.state_dict()


def test_a_state_goes_through_it_unchanged(ranks):
    for rank, (state, fresh, kept, consolidated, restored) in enumerate(ranks.run(saved, world_size=2)):
        assert fresh.keys() == KEYS and (fresh["step"], fresh["nonfinite"], fresh["rank"]) == (0, {}, rank)
        assert kept == {**state, "error_feedback": False}
        assert consolidated == {**kept, "rank": None, "world_size": None}
        assert (restored["step"], restored["nonfinite"]) == (3, {"weights.0": 5})
