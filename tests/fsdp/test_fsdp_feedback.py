"""Error feedback of FSDP2's sums, its state through distributed checkpointing, and wires by level."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback, TwoLevels


class Layers(nn.Module):
    """Weights whose gradients are given, of sizes that no number of ranks divides. Each sum is large enough to have
    codes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(37, 41)
        self.second = nn.Linear(41, 257, bias=False)

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True))


def made(kind, world_size, device="cpu"):
    """The model, sharded. With kind "gradients in DTYPE" gradients are reduced in that dtype, too, or in fp32 after a
    +."""
    torch.manual_seed(0)
    model = Layers().to(device)
    shape = (world_size // 2, 2) if kind == "hsdp" else (world_size,)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    if kind == "replicate":
        return replicate(model, mesh=mesh)
    options = {"reshard_after_forward": True} if kind == "gathered twice" else {}
    if kind == "Shard(1)":
        model.first, model.second = nn.Linear(32, 48, bias=False), nn.Linear(64, 40, bias=False)
        options["shard_placement_fn"] = lambda parameter: Shard(1)
    if kind.startswith("gradients in"):
        dtype = getattr(torch, kind.split()[2])
        reduced_in = torch.float32 if kind.endswith("+") else dtype
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced_in)
    return fully_shard(model, mesh=mesh, **options)


def gradients_of(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def reduced(model, gradients):
    for p in model.parameters():
        p.grad = None
    model(gradients).backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in model.parameters()]


def means_of(model, step, world_size):
    of_ranks = [gradients_of(model, rank, step) for rank in range(world_size)]
    return [torch.stack(each).double().mean(0) for each in zip(*of_ranks, strict=True)]


def total(state):
    return {name: values.full_tensor().double() for name, values in state["residuals"].items()}


def run_of(model, rank, world_size, steps):
    """The sums over steps of what was given and of what came back."""
    given, got = None, None
    for step in steps:
        back = [each.double() for each in reduced(model, gradients_of(model, rank, step))]
        mean = means_of(model, step, world_size)
        given = mean if given is None else [a + b for a, b in zip(given, mean, strict=True)]
        got = back if got is None else [a + b for a, b in zip(got, back, strict=True)]
    return given, got


def nothing_is_lost(rank, world_size, kind, config):
    model = made(kind, world_size)
    comm = fusedcomm.attach(model, config, quiet=True)
    empty = total(comm.state_dict())
    assert all((values == 0).all() for values in empty.values())
    given, got = run_of(model, rank, world_size, range(6))
    left = total(comm.state_dict())
    assert left.keys() == empty.keys()
    exact = 0
    for (name, _), want, have in zip(model.named_parameters(), given, got, strict=True):
        if name not in left:
            exact += 1
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
            continue
        assert left[name].shape == want.shape and (left[name] != 0).any()
        assert (have - want).norm() / want.norm() > 1e-4
        torch.testing.assert_close(have + left[name], want, rtol=1e-5, atol=2e-5)
    assert exact == sum(p.ndim < 2 for p in model.parameters())
    comm.detach()
    return len(left)


@pytest.mark.parametrize(
    ("kind", "config", "world_size"),
    [
        # Reduce-scatters within hosts are exact, so what is left out is the all-reduce's.
        ("hsdp", Config("int4", feedback=Feedback(), hosts=TwoLevels(2, local_wire="fp32")), 4),
        ("hsdp", Config("int4", feedback=Feedback(), hosts=TwoLevels(2, "fp32"), chunks=Chunks(4096)), 4),
        ("replicate", Config("int8", feedback=Feedback()), 2),
        ("replicate", Config("int4", feedback=Feedback()), 4),
        ("replicate", Config("int8", feedback=Feedback(), wires={"second.*": "bf16"}), 3),
    ],
)
def test_what_rounding_leaves_out_comes_later(ranks, kind, config, world_size):
    ranks.run(nothing_is_lost, kind, config, world_size=world_size)


def comes_back_in_the_next_step(comm, model, rank, world_size, step, before):
    """before: the state's residuals."""
    given, got = run_of(model, rank, world_size, [step])
    left = total(comm.state_dict())
    for (name, _), want, have in zip(model.named_parameters(), given, got, strict=True):
        if name in left:
            torch.testing.assert_close(have + left[name], want + before[name], rtol=1e-5, atol=2e-5)


def saved(rank, world_size, kind, config, path):
    model = made(kind, world_size)
    comm = fusedcomm.attach(model, config, quiet=True)
    run_of(model, rank, world_size, range(5))
    dcp.save({"comm": comm}, checkpoint_id=path)
    state = total(comm.state_dict())
    comm.detach()
    return state


def loaded(rank, world_size, kind, config, path, expected):
    model = made(kind, world_size)
    comm = fusedcomm.attach(model, config, quiet=True)
    dcp.load({"comm": comm}, checkpoint_id=path)
    state = comm.state_dict()
    assert set(state["calls"].values()) == {5}
    found = total(state)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
    comes_back_in_the_next_step(comm, model, rank, world_size, 9, expected)
    comm.detach()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("hsdp", 4), ("replicate", 2)),
        (("replicate", 2), ("hsdp", 4)),
        (("replicate", 2), ("replicate", 3)),  # residuals wait for their parameters
    ],
    ids=str,
)
def test_the_state_is_loaded_on_another_number_of_ranks(ranks, tmp_path, before, after):
    config, exact_within = (Config("int8", feedback=Feedback(), hosts=hosts) for hosts in (None, TwoLevels(2, "fp32")))
    path = str(tmp_path / "checkpoint")
    (expected, *others) = ranks.run(saved, before[0], config, path, world_size=before[1])
    assert expected.keys() == {"first.weight", "second.weight"} and all(map(torch.any, expected.values()))
    for other in others:
        for name, values in other.items():
            assert (values == expected[name]).all()
    second = exact_within if after[0] == "hsdp" else config
    ranks.run(loaded, after[0], second, path, expected, world_size=after[1])


def frozen_and_thawed(rank, world_size):
    model = made("replicate", world_size)
    comm = fusedcomm.attach(model, Config("int8", feedback=Feedback()), quiet=True)
    run_of(model, rank, world_size, range(2))
    before = total(comm.state_dict())
    model.second.weight.requires_grad_(False)
    for p in model.parameters():
        p.grad = None
    gradients = gradients_of(model, rank, 2)
    model(gradients).backward()
    between = total(comm.state_dict())
    assert (between["second.weight"] == before["second.weight"]).all()
    assert (between["first.weight"] != before["first.weight"]).any()
    model.second.weight.requires_grad_(True)
    comes_back_in_the_next_step(comm, model, rank, world_size, 3, between)
    comm.detach()


def test_a_frozen_parameter_keeps_its_residual(ranks):
    ranks.run(frozen_and_thawed, world_size=2)


def other_states(rank, world_size):
    model = made("replicate", world_size)
    comm = fusedcomm.attach(model, Config("int8", feedback=Feedback()), quiet=True)
    state = comm.state_dict()
    comm.detach()
    comm = fusedcomm.attach(model, "int8", quiet=True)
    with pytest.raises(ValueError, match="use one Config"):
        comm.load_state_dict(state)
    with pytest.raises(ValueError, match="has no"):
        comm.load_state_dict({})
    comm.detach()


def test_states_that_do_not_fit_are_refused(ranks):
    ranks.run(other_states, world_size=2)


def by_level(rank, world_size, hosts):
    model = made("hsdp", world_size)
    comm = fusedcomm.attach(model, Config("int4", hosts=hosts), quiet=True)
    plan = comm.plan()
    assert (plan.wire, plan.wire_of_replicas) == ("bf16", "int4")
    assert "reduce-scatters in bf16 over 2 ranks and all-reduces in int4 over 2 replicas" in str(plan)
    given, got = run_of(model, rank, world_size, [0])
    comm.detach()
    model = made("hsdp", world_size)
    comm = fusedcomm.attach(model, Config("int4"), quiet=True)
    assert comm.plan().wire == "int4"
    _, in_int4 = run_of(model, rank, world_size, [0])
    comm.detach()

    def error(result):
        return max(((have - want).norm() / want.norm()).item() for have, want in zip(result, given, strict=True))

    # Two roundings to int4 instead of three.
    assert 0.02 < error(got) < 0.95 * error(in_int4), (error(got), error(in_int4))


@pytest.mark.sampled(by=lambda hosts: {})
@pytest.mark.parametrize("hosts", [2, TwoLevels([[0, 1], [2, 3]]), TwoLevels(2, local_wire="bf16")], ids=str)
def test_hsdp_has_one_wire_within_hosts_and_another_between_them(ranks, hosts):
    ranks.run(by_level, hosts, world_size=4)


def with_nan(rank, world_size, kind):
    model = made(kind, world_size)
    comm = fusedcomm.attach(model, "int8", quiet=True)
    gradients = gradients_of(model, rank, 0)
    reduced(model, gradients)
    assert comm.stats().nonfinite_by_parameter == {}
    if rank == 1:
        gradients[0][3, 5:7] = float("nan")
        gradients[1][0] = float("inf")
    reduced(model, gradients)
    if kind == "sharded":
        model.second.weight.requires_grad_(False)  # the counts so far are kept
        for p in model.parameters():
            p.grad = None
        model(gradients).backward()
    report = [(row.rank, row.parameter, row.count) for row in comm.nonfinite_report()]
    stats = comm.stats()
    comm.detach()
    return report, stats.nonfinite_by_parameter


@pytest.mark.parametrize(("kind", "times"), [("sharded", 2), ("replicate", 1)])
def test_gradients_that_are_not_finite_are_counted(ranks, kind, times):
    outcomes = ranks.run(with_nan, kind, world_size=2)
    for rank, (report, own) in enumerate(outcomes):
        assert report == [(1, "first.weight", 2 * times), (1, "first.bias", times)]
        assert own == ({} if rank == 0 else {"first.weight": 2 * times, "first.bias": times})
