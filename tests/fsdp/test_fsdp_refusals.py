"""What attach() refuses to do with FSDP2, and what it says."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fusedcomm


def _model() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def _options(rank, world_size):
    model = _model()
    for options, text in [
        ({"wire": "auto"}, "one wire from the start"),
        ({"config": fusedcomm.Auto()}, "one wire from the start"),
        ({"wire": "off"}, "leave attach"),
        ({"config": fusedcomm.Config("int8", sum="one-shot")}, "sum='one-shot' is not possible with FSDP2"),
        ({"config": fusedcomm.Config("int8", feedback=fusedcomm.Feedback())}, "4 bytes an element"),
        ({"config": fusedcomm.Config("int8", checks=fusedcomm.Checks(verify_every=2))}, "checks"),
        ({"config": fusedcomm.Config("int8", hosts=2)}, "one level"),
        ({"config": fusedcomm.Config("int8", wires={"no.such.*": "bf16"})}, "no.such"),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=text):
            fusedcomm.attach(model, **options)


def test_options_without_effect_are_refused(ranks):
    ranks.run(_options, world_size=2)


def _kinds(rank, world_size):
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        fusedcomm.attach(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="fully_shard"):
        fusedcomm.attach(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    model = _model()
    handle = fusedcomm.attach(model, wire="bf16")
    with pytest.raises(ValueError, match=r"FusedReduceScatter already.*detach"):
        fusedcomm.attach(model, wire="bf16")
    handle.detach()
    handle.detach()
    fusedcomm.attach(model, wire="bf16").detach()
    with pytest.raises(RuntimeError, match="detached"):
        handle.trace("x.json")


def test_other_models_and_a_second_attachment_are_refused(ranks):
    ranks.run(_kinds, world_size=2)


def _ranks_differ(rank, world_size):
    with pytest.raises(RuntimeError, match=r"(?s)rank 0.*rank 1|rank 1.*rank 0") as caught:
        fusedcomm.attach(_model(), wire="bf16" if rank else "int8")
    return str(caught.value)


def test_ranks_with_different_wires_are_told_on_every_rank(ranks):
    texts = ranks.run(_ranks_differ, world_size=2)
    assert texts[0] == texts[1] and "int8" in texts[0] and "bf16" in texts[0]


def _float64(rank, world_size):
    model = fully_shard(nn.Linear(8, 8, dtype=torch.float64))
    with fusedcomm.attach(model, wire="int8"), pytest.warns(UserWarning, match="float64, which no wire carries"):
        model(torch.full((2, 8), rank + 1.0, dtype=torch.float64)).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item()


def test_float64_is_left_to_torch_and_said_once(ranks):
    assert ranks.run(_float64, world_size=2) == [3.0, 3.0]
