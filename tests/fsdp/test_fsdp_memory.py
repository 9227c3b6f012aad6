"""What attach() adds to the memory that FSDP2 takes: buffers for chunks, and the inputs of two reduce-scatters."""

import pytest
import torch
from sampling import few
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fusedcomm
import fusedcomm.fsdp.comm as comm_module

NUM_LAYERS, WIDTH = 8, 256
LAYER_NBYTES = 4 * WIDTH * WIDTH
MOST_PADDING_NBYTES = 4096


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


class Largest(TorchDispatchMode):
    """nbytes: of the memory of the largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def _step(model: nn.Module) -> int:
    with Largest() as memory:
        model(torch.ones(2, WIDTH)).sum().backward()
    model.zero_grad()
    return memory.nbytes


def _compare(rank, world_size, wire):
    model = _model()
    _step(model)
    plain = _step(model)
    config = fusedcomm.Config(wire, chunks=fusedcomm.Chunks(nbytes=64 << 10, in_flight=2))
    with fusedcomm.attach(model, config) as comm:
        _step(model)
        ours = _step(model)
        return plain, ours, comm.plan().scratch_nbytes


@pytest.mark.parametrize("wire", few(["fp32", "bf16", "int8", "int4"], "fp32", "bf16", "int8"))
def test_no_tensor_larger_than_a_layers_gradient_is_made(ranks, wire):
    for plain, ours, scratch in ranks.run(_compare, wire, world_size=2):
        # Zeros behind the input fill up its last blocks.
        assert plain == LAYER_NBYTES and ours - plain <= MOST_PADDING_NBYTES
        assert 0 < scratch < NUM_LAYERS * LAYER_NBYTES / 2


def _under_way(rank, world_size):
    """Rank 1 begins its backward pass only when rank 0 has handed over more reduce-scatters than may be under way."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)  # no all-gather in the backward pass makes rank 0 wait
    most, store = 0, torch.distributed.distributed_c10d._get_default_store()

    class Counted(comm_module.Pending):
        def add(self, future: torch.futures.Future) -> None:
            nonlocal most
            if rank == 0 and len(self._futures) == self.MAX_UNDER_WAY:
                store.set("full", "")
            super().add(future)
            most = max(most, len(self._futures))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedcomm.fsdp.mesh.Pending", Counted)
        comm = fusedcomm.attach(fully_shard(model), "bf16")
    loss = model(torch.ones(2, WIDTH)).sum()
    if rank == 1:
        store.wait(["full"])
    loss.backward()
    comm.detach()
    return most


def test_few_inputs_wait_for_a_slow_rank(ranks):
    assert ranks.run(_under_way, world_size=2) == [2, 2]
