"""A DataParallel as people use DDP: wrapped again, copied, saved, on a mesh."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints_of_torch
from models import Mlp, Normalised, refusal, wrapped
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.reducer.ddp_arguments import check_devices


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 10, generator=generator), torch.randn(8, 5, generator=generator)


def wrapped_again(rank, world_size):
    module = nn.Linear(1, 1, bias=False)
    for step in range(3):
        model = wrapped(True, module)
        module.weight.grad = None
        model(torch.tensor([[float(rank + step)]])).sum().backward()
        assert module.weight.grad.item() == step + 0.5
        assert model.comm.stats().steps == 1 and "fp32" in str(model.comm.plan())
        del model
    module.weight.grad = None
    module(torch.tensor([[float(rank)]])).sum().backward()
    return module.weight.grad.item()


def test_a_module_can_be_wrapped_again_when_its_wrapper_is_gone(ranks):
    assert ranks.run(wrapped_again, world_size=2) == [0.0, 1.0]


def wrapped_twice(rank, world_size):
    module, x = nn.Linear(1, 1, bias=False), torch.tensor([[float(rank)]])
    older = wrapped(True, module)
    older(x).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        newer = wrapped(True, module)
    assert [str(warning.message) for warning in said if "wrapped in a DataParallel again" in str(warning.message)]
    module.weight.grad = None
    newer(x).sum().backward()
    assert module.weight.grad.item() == 0.5
    with torch.no_grad():
        older(x)
    with pytest.raises(RuntimeError, match="use the newer one"):
        older(x)
    assert "detached" in repr(older.comm) and "1 steps" in repr(newer.comm) and "detached" not in repr(newer.comm)


def test_a_module_that_is_wrapped_again_belongs_to_the_newer_wrapper(ranks):
    ranks.run(wrapped_twice, world_size=2)


def copies(rank, world_size, ours, path):
    """The gradients of two steps of each kind of copy."""
    torch.manual_seed(rank)
    model = wrapped(ours, Normalised(), bucket_cap_mb=0.001)
    x, y = batch(rank, 0)
    nn.functional.mse_loss(model(x), y).backward()
    torch.save(model, f"{path}/{rank}")
    loaded = torch.load(f"{path}/{rank}", weights_only=False)
    if rank == 1:  # no other rank is needed for this
        pickle.loads(pickle.dumps(model)).module(x)
    found = []
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded, copy.copy(model)):
        assert type(copied) is type(model) and list(copied.state_dict()) == list(model.state_dict())
        for step in range(2):
            copied.zero_grad()
            x, y = batch(rank, step)
            nn.functional.mse_loss(copied(x), y).backward()
            found += [p.grad.clone() for p in copied.parameters()]
    with pytest.raises(RuntimeError, match="default process"):
        copy.deepcopy(wrapped(ours, Mlp(), process_group=dist.new_group([0, 1])))
    return found


def test_copies_train_as_those_of_ddp(ranks, tmp_path):
    ours, theirs = (ranks.run(copies, ours, str(tmp_path), world_size=2) for ours in (True, False))
    for gradients, expected in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, gradients, expected))


def on_a_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    module = nn.Linear(1, 1, bias=False)
    model = wrapped(True, module, device_mesh=mesh["inner"])
    assert isinstance(model, DistributedDataParallel) and model.device_mesh == mesh["inner"]
    model(torch.tensor([[float(rank)]])).sum().backward()
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        wrapped(True, module, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        wrapped(True, module, device_mesh=mesh["inner"], process_group=dist.group.WORLD)
    return module.weight.grad.item()


def test_a_device_mesh_is_its_group(ranks):
    assert ranks.run(on_a_mesh) == [0.5, 0.5, 2.5, 2.5]


def distributed_checkpoints(rank, world_size, folder):
    """From DDP to DataParallel, back, and the names of both."""
    states = {}
    for ours in (False, True):
        torch.manual_seed(rank + ours)
        model = wrapped(ours, Normalised())
        optimizer = torch.optim.Adam(model.parameters())
        model(batch(rank, 0)[0]).sum().backward()
        optimizer.step()
        states[ours] = model, optimizer
    for ours, name in ((False, "ddp"), (True, "ours")):
        saved = dict(zip(("model", "optimizer"), get_state_dict(*states[ours]), strict=True))
        assert "layers.0.weight" in saved["model"] and "layers.0.weight" in saved["optimizer"]["state"]
        checkpoints_of_torch.save(saved, checkpoint_id=f"{folder}/{name}")
        weight = saved["model"]["layers.0.weight"].clone()
        target = dict(zip(("model", "optimizer"), get_state_dict(*states[not ours]), strict=True))
        checkpoints_of_torch.load(target, checkpoint_id=f"{folder}/{name}")
        set_state_dict(*states[not ours], model_state_dict=target["model"], optim_state_dict=target["optimizer"])
        assert torch.equal(states[not ours][0].module.layers[0].weight, weight)


def test_distributed_checkpoints_load_both_ways(ranks, tmp_path):
    ranks.run(distributed_checkpoints, str(tmp_path), world_size=2)


CUDA_1 = torch.device("cuda", 1)


def test_device_ids_name_the_modules_device():
    for given in ([1], ["cuda:1"], [CUDA_1], ["cuda"]):
        assert check_devices(CUDA_1, given, None) == ([1], 1)
    assert check_devices(CUDA_1, [1], CUDA_1) == ([1], 1)
    for given in (None, []):
        assert check_devices(CUDA_1, given, None) == (None, None)
        assert check_devices(torch.device("cpu"), given, None) == (None, None)
    for given in (([0], None), (["cuda:2"], None), (["cpu"], None), ([1], 0), (None, 0)):
        assert "use cuda:1, or None" in refusal(check_devices, CUDA_1, *given)
