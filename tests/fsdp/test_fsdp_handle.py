"""What the handle of an FSDP2 model tells, and does beside reducing."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


def _clipped(rank, world_size):
    plain, ours = _model(), _model()
    same, norms = [], []
    with fusedcomm.attach(ours, "fp32") as comm:
        with pytest.raises(RuntimeError, match="^fusedcomm: no parameter of this model has a gradient"):
            comm.grad_norm()
        for norm_type in (2.0, 1.0, float("inf")):
            for max_norm in (0.5, 1e6):
                for model in (plain, ours):
                    _backward(model, rank)
                want = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type).full_tensor()
                before = comm.grad_norm(norm_type)
                got = comm.clip_grad_norm_(max_norm, norm_type)
                same.append(torch.equal(want, got) and torch.equal(before, got))
                same.append(all(map(torch.equal, _locals(plain), _locals(ours))))
                norms.append(got.item())
        if rank == 1:
            ours[0].bias.grad.to_local().fill_(torch.nan)
        with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
            comm.clip_grad_norm_(1.0, error_if_nonfinite=True)
    return same, norms


def test_norms_and_clipping_have_torchs_bits(ranks):
    (same, norms), (others_same, others) = ranks.run(_clipped, world_size=2)
    assert all(same) and all(others_same) and norms == others and min(norms) > 1


def _norm_beside_tensor_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with fusedcomm.attach(model, "fp32") as comm:
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        model(torch.randn(4, 8, generator=generator)).square().sum().backward()
        parts = [parameter.grad.full_tensor().double().square().sum() for parameter in model.parameters()]
        return sum(parts).sqrt().item(), comm.grad_norm().item()


def test_a_norm_counts_what_tensor_parallel_ranks_share_once(ranks):
    for want, got in ranks.run(_norm_beside_tensor_parallel, world_size=4):
        assert abs(got / want - 1) < 1e-6


def _off(rank, world_size):
    plain, ours = _model(), _model()
    comm = fusedcomm.attach(ours, "off")
    for model in (plain, ours):
        _backward(model, rank)
    texts = repr(comm), str(comm.plan()).splitlines()[:2], str(comm.stats())
    with pytest.raises(RuntimeError, match="nothing to trace"):
        comm.trace("trace.json")
    is_same = all(map(torch.equal, _locals(plain), _locals(ours)))
    norm, state = comm.clip_grad_norm_(0.1), comm.state_dict()
    with fusedcomm.attach(plain, "int8") as other:
        _backward(plain, rank)
        comm.load_state_dict(other.state_dict())
    comm.detach()
    return is_same, texts, comm.nonfinite_report(), norm.item() > 0.1, state["calls"], comm.state_dict()["calls"]


def test_off_leaves_the_sums_to_torch_and_says_so(ranks):
    names = ["0", "2"]
    for is_same, texts, report, is_clipped, calls, loaded in ranks.run(_off, world_size=2):
        assert is_same and is_clipped and report == []
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
