"""What the handle of an FSDP2 model tells, and does beside reducing."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedcomm


def _model(**options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(4, 9, generator=generator)).square().sum().backward()


def _locals(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _off(rank, world_size):
    plain, ours = _model(), _model()
    comm = fusedcomm.attach(ours, "off")
    for model in (plain, ours):
        _backward(model, rank)
    texts = repr(comm), str(comm.plan()).splitlines()[:2], str(comm.stats())
    with pytest.raises(RuntimeError, match="nothing to trace"):
        comm.trace("trace.json")
    is_same = all(map(torch.equal, _locals(plain), _locals(ours)))
    state = comm.state_dict()
    with fusedcomm.attach(plain, "int8") as other:
        _backward(plain, rank)
        comm.load_state_dict(other.state_dict())
    comm.detach()
    return is_same, texts, comm.nonfinite_report(), state["calls"], comm.state_dict()["calls"]


def test_off_leaves_the_sums_to_torch_and_says_so(ranks):
    names = ["0", "2"]
    for is_same, texts, report, calls, loaded in ranks.run(_off, world_size=2):
        assert is_same and report == []
        line, plan, stats = texts
        assert line == "<fusedcomm.FsdpHandle: off, torch's own sums, 2 ranks, 2 modules>"
        assert plan == ["fusedcomm: FSDP2: off, torch's own sums over 2 ranks", "  0: 2 parameters, 180 elements"]
        assert "off" in stats
        assert calls == dict.fromkeys(names, 0) and loaded == dict.fromkeys(names, 1)


def _counted(rank, world_size, kind):
    if kind == "replicate":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 17), nn.Linear(17, 5))
        for module in (model[0], model[1], model):
            replicate(module, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        shape = {"shards": (1, 2), "copies": (2, 1)}.get(kind, (world_size,))
        names = ("copies", "shards")[-len(shape) :]
        model = _model(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    if kind == "first module frozen":
        model[0].requires_grad_(False)
    with fusedcomm.attach(model, "int8") as comm:
        before = repr(comm)
        for step in range(3):
            _backward(model, rank, step)
        stats, lines = comm.stats(), [before, repr(comm)]
    return stats.steps, len(str(stats).splitlines()) > 3, [*lines, repr(comm)]


@pytest.mark.parametrize("kind", ["plain", "shards", "copies", "replicate", "first module frozen"])
def test_steps_are_counted_and_one_line_says_how_many(ranks, kind):
    how = {"shards": "2 ranks", "copies": "2 ranks (2 replicas)", "replicate": "2 ranks (2 replicas)"}
    for num_steps, has_times, lines in ranks.run(_counted, kind, world_size=2):
        assert num_steps == 3 and has_times
        head = f"<fusedcomm.FsdpHandle: wire int8, {how.get(kind, '2 ranks')}, 2 modules, "
        assert lines == [f"{head}0 steps>", f"{head}3 steps>", "<fusedcomm.FsdpHandle: detached>"]


def _saved_in_evaluation(rank, world_size):
    model = _model()
    with fusedcomm.attach(
        model, fusedcomm.Config("int8", feedback=fusedcomm.Feedback(unsharded=True), wires={"1d": "int8"})
    ) as comm:
        _backward(model, rank)
        with torch.inference_mode():
            states = [comm.state_dict(), comm.state_dict(consolidated=True)]
            comm.load_state_dict(states[0])
        for state in states:
            comm.load_state_dict(state)
            _backward(model, rank)
        wholes = [value.full_tensor() for value in states[0]["residuals"].values()]
        return all(map(torch.equal, wholes, states[1]["residuals"].values())), sum(w.abs().sum() for w in wholes).item()


def test_a_state_taken_in_inference_mode_is_loaded(ranks):
    for is_same, left_out in ranks.run(_saved_in_evaluation, world_size=2):
        assert is_same and left_out > 0
