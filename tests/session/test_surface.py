"""What handles show: their public names, repr() and with, and an error for a misspelt attribute."""

import pytest
import torch
from models import Mlp, refusal
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.horovod as hvd

COMMON = {"detach", "is_attached", "load_state_dict", "plan", "state_dict", "stats", "trace"}


def handles():
    """Every handle with names that it shows beside COMMON, and repr()'s beginning."""
    model = Mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    local_steps = fusedcomm.LocalSteps(model, sgd, 30, quiet=True)
    ddp = DistributedDataParallel(Mlp())
    yield local_steps, {"finish"}, "wire int4, a merge every 30 steps, 2 ranks, 0 steps"
    yield fusedcomm.attach(ddp, "bf16", quiet=True), {"weight", "tuning"}, "wire bf16, sum auto, 2 ranks"
    yield fusedcomm.GradReducer(Mlp(), "bf16", quiet=True), {"weight", "no_sync"}, "wire bf16, 2 ranks"
    yield fusedcomm.attach(fully_shard(Mlp()), "bf16", quiet=True), {"weight"}, "wire bf16, 2 ranks"


def shown(rank, world_size):
    for handle, names, text in handles():
        kind = type(handle).__name__
        assert repr(handle).startswith(f"<fusedcomm.{kind}: {text}"), repr(handle)
        assert COMMON | names <= set(dir(handle)) and "session" not in dir(handle)
        assert all(not name.startswith("_") and hasattr(type(handle), name) for name in dir(handle))
        for name in ("finsh" if "finish" in names else "wieght", "plann"):
            with pytest.raises(AttributeError, match=f"{kind} has no attribute '{name}'.*did you mean"):
                setattr(handle, name, 3)
        with pytest.raises(ZeroDivisionError), handle as entered:
            assert entered is handle and handle.is_attached
            raise ZeroDivisionError
        assert repr(handle) == f"<fusedcomm.{kind}: detached>" and not handle.is_attached
        assert "is detached, so a block cannot detach it" in refusal(handle.__enter__)
        assert "is detached" in refusal(handle.trace, "trace.json")
        assert kind != "GradReducer" or "is detached" in refusal(handle.plan)
    with pytest.raises(AttributeError, match="did you mean 'process_group'"):
        fusedcomm.CommState().proces_group = None


def test_every_handle_shows_what_is_public_and_refuses_a_misspelt_attribute(ranks):
    ranks.run(shown, world_size=2)


def weights(rank, world_size):
    """On a module and on optimizers, whose other attributes are other people's business."""
    hvd.init()
    plain = fusedcomm.DataParallel(Mlp(), config="bf16", quiet=True)
    model = fusedcomm.DataParallel(Mlp(), config=fusedcomm.Config("bf16", weighted="mean"), quiet=True)
    owners = fusedcomm.ShardedOptimizer(plain, torch.optim.SGD, lr=0.1, quiet=True)
    inner = Mlp()
    reduced = hvd.DistributedOptimizer(torch.optim.SGD(inner.parameters(), 0.1), inner.named_parameters())
    model.weight = 5
    assert model.weight == model.comm.weight == 5
    wrong = [
        (model, "wieght"),
        (model, "weigth"),
        (model, "weights"),
        (reduced, "wight"),
        (reduced, "weight"),
        (owners, "weight"),
    ]
    for of, name in wrong:
        with pytest.raises(AttributeError, match=f"{name} would do nothing"):
            setattr(of, name, 5)
    assert "ranks weigh equally" in refusal(setattr, plain, "weight", 5)
    model.height, model.weights, model.scale = 224, [1, 2], torch.ones(1)
    reduced.last_epoch = owners.found_inf = 1
    model.comm.detach()
    plain.comm.detach()
    hvd.shutdown()


def test_a_weight_that_would_do_nothing_is_an_error_on_modules_and_optimizers(ranks):
    ranks.run(weights, world_size=2)
