"""Parameters gathered in codes: what ranks compute with, what is left exact, and what is left to torch.
tests/fsdp/test_fsdp_parity.py has every way to use FSDP2, with parameters that codes have exactly."""

import contextlib
import dataclasses
import hashlib
import warnings

import on_streams
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import on_host
from scripts import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusedcomm
from fusedcomm.config import Chunks, Config

WIDTH = 48
ERRORS = {"bf16": 0.003, "fp16": 0.0004, "int8": 0.02, "fp8": 0.05, "int4": 0.15}
"""Relative errors of normal values after one rounding, in blocks that several rows may share."""


class Lora(nn.Module):
    """A frozen layer, with an adapter that is trained."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _made(shape: tuple[int, ...], **options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 77), nn.LayerNorm(77), nn.GELU(), nn.Linear(77, WIDTH), Lora())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, exactly."""
    return {name: p.full_tensor().detach().clone() for name, p in model.state_dict().items()}


def _seen(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters that a forward pass computes with."""
    found: dict[str, torch.Tensor] = {}

    def look(name: str, module: nn.Module) -> None:
        found.update({f"{name}.{own}": p.detach().clone() for own, p in module.named_parameters(recurse=False)})

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if not list(module.children()):
                stack.callback(module.register_forward_pre_hook(lambda m, _, name=name: look(name, m)).remove)
        model(x)
    return found


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    data = b"".join(tensors[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(data).hexdigest()


def _compute(rank, world_size, shape, config, options):
    model = _made(shape, **options)
    exact, x = _whole(model), _batch(rank, 0)
    with fusedcomm.attach(model, config, quiet=True) as comm:
        model.unshard(async_op=True).wait()
        seen = _seen(model, x)
        evaluated = _seen(model.eval(), x)
        with comm.exact_params(), torch.no_grad():
            exactly = _seen(model, x)
        with torch.no_grad():  # the model keeps the whole parameters
            again = _seen(model, x)
    detached, after = _seen(model, x), _whole(model)
    assert all(torch.equal(exact[name], after[name]) for name in exact), "rounding has changed a shard"
    dtype = options["mp_policy"].param_dtype if options else torch.float32
    exact = {name: whole.to(dtype) for name, whole in exact.items()}
    assert all(torch.equal(each[name], exact[name]) for name in exact for each in (exactly, detached))
    errors = {
        name: ((seen[name].double() - whole.double()).norm() / (whole.double().norm() + 1e-30)).item()
        for name, whole in exact.items()
    }
    return errors, {_digest(each) for each in (seen, evaluated, again)}


@pytest.mark.sampled(by=lambda config, **_: {"wire": config.params})
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("config", [Config("fp32", params=wire) for wire in ERRORS], ids=repr)
def test_all_ranks_compute_with_the_same_rounded_parameters(ranks, shape, config):
    world_size = shape[0] * (shape[1] if len(shape) > 1 else 1)
    outcomes = ranks.run(_compute, shape, config, {}, world_size=world_size)
    assert len(set().union(*(digests for _, digests in outcomes))) == 1
    for name, error in outcomes[0][0].items():
        is_exact = name.startswith("1.") or ("bias" in name and config.params in ("int8", "fp8", "int4"))
        assert error == 0 if is_exact else 0 < error < ERRORS[config.params], (name, error)


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
FEW = {"4.*": "fp32", "0.*": "bf16"}
BIASES = {"0.bias", "3.bias", "4.base.bias"}
EXEMPT = {"4.base.weight", "4.down.weight", "4.up.weight"}


@pytest.mark.parametrize(
    ("config", "options", "exact"),
    [
        (Config("int4", params="int8", wires=FEW), {}, EXEMPT | BIASES),
        (Config("int8", params="int8", wires={"1d": "int8", **FEW}), {}, EXEMPT),
        (
            Config("fp32", params="bf16"),
            BF16,
            EXEMPT | BIASES | {"0.weight", "3.weight"},
        ),  # rounded by torch, and not again
    ],
    ids=["int8", "int8, 1d", "bf16"],
)
def test_what_wires_exempts_is_exact(ranks, config, options, exact):
    ((errors, _), _) = ranks.run(_compute, (2,), config, options, world_size=2)
    assert {name for name, error in errors.items() if error == 0} - {"1.weight", "1.bias"} == exact


# ---- training


def _attached(world_size: int, wires: str = "int8") -> tuple:
    model = _made((world_size,))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, optimizer, fusedcomm.attach(model, Config(wires, params=wires), quiet=True)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = _batch(rank, step)
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def _saved(rank, world_size, path):
    model, optimizer, comm = _attached(world_size)
    with comm:
        _train(model, optimizer, rank, range(3))
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        return _digest(_whole(model))


def _elsewhere(rank, world_size, path):
    model, optimizer, comm = _attached(world_size)
    with comm:
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)
        loaded, seen = _digest(_whole(model)), _digest(_seen(model, _batch(0, 0)))
        _train(model, optimizer, rank, range(2))
        return loaded, seen, _digest(_seen(model, _batch(0, 0)))


def test_another_number_of_ranks_loads_exact_parameters(ranks, tmp_path):
    """That a run resumed on as many has the bits of one that went on is in tests/session/test_nothing_is_lost.py."""
    path = str(tmp_path / "checkpoint")
    (saved,) = set(ranks.run(_saved, path, world_size=2))
    ((loaded, *seen),) = set(ranks.run(_elsewhere, path, world_size=3))
    assert loaded == saved and len({loaded, *seen}) == 3


def _with_nan(rank, world_size):
    model, _, comm = _attached(world_size)
    if rank == 1:
        with torch.no_grad():
            model[3].weight.to_local()[0, 5] = float("nan")
    with comm, torch.no_grad():
        seen = _seen(model, _batch(0, 0))["3.weight"]
        report = [(row.rank, row.bucket, row.parameter, row.count) for row in comm.nonfinite_report()]
    return report, seen.isnan().sum().item()


def test_nan_in_a_weight_is_a_block_of_nan_on_all_ranks_and_the_report_names_it(ranks):
    assert ranks.run(_with_nan, world_size=2) == [([(1, "3", "3.weight (value)", 1)], 128)] * 2


def _trained_on(rank, world_size, device):
    """The bits of this rank's shards after five steps that gather ahead in all ways, and how often the host has waited
    for the device in the last ones. Four ranks are on two hosts, and keep codes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 77), nn.Linear(77, WIDTH)) for _ in range(4)]).to(device)
    mesh = init_device_mesh(device, (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[3].set_modules_to_backward_prefetch([model[2], model[1]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config("int8", params="int8", wires={"0.*": "fp32"}, chunks=Chunks(4096, in_flight=2))
    if world_size == 4:
        config = dataclasses.replace(config, hosts=2, params_kept=True)
    waits = []
    with fusedcomm.attach(model, config, quiet=True):
        for step in range(5):
            x = _batch(rank, step).to(device)
            before = on_streams.waits()
            optimizer.zero_grad()
            if step % 2:
                under_way = [layer.unshard(async_op=True) for layer in model]
                under_way[0].wait()
            model(x).square().mean().backward()
            optimizer.step()
            waits.append(on_streams.waits() - before)
        return [p.to_local().detach().cpu() for p in model.parameters()], waits[2:]


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_accelerators_streams_give_the_cpus_bits_and_the_host_never_waits(ranks_on_streams, ranks, world_size):
    on_cpu = ranks.run(_trained_on, "cpu", world_size=world_size)
    on_device = ranks_on_streams.run(_trained_on, on_streams.DEVICE, world_size=world_size)
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        assert all(map(torch.equal, ours[0], theirs[0])) and ours[1] == theirs[1] == [0, 0, 0]


# ---- bytes


def _layers(reshards: bool | int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshards)
    return fully_shard(model)


def _sent(rank, world_size, hosts, reshards):
    with on_host(hosts[rank]):
        model = _layers(reshards)
        with fusedcomm.attach(model, Config("int8", params="int8"), quiet=True) as comm:
            plan, before = comm.plan(), comm.stats()
            model(torch.ones(2, 256)).sum().backward()
            counted = comm.stats()
        rows = sum(row.sent_nbytes for row in plan.rows)
        between = counted.sent_between_hosts_nbytes - before.sent_between_hosts_nbytes
        return counted.sent_nbytes - before.sent_nbytes - rows, between, plan


@pytest.mark.parametrize(("reshards", "num_gathers"), [(True, 2), (False, 1), (2, 1)])
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_the_plan_says_what_all_gathers_send(ranks, hosts, reshards, num_gathers):
    ((sent, between, plan), *_) = ranks.run(_sent, hosts, reshards, world_size=4)
    exact = num_gathers * 3 * 4 * (256 * 256 + 256)  # of 4 layers, a quarter of each
    assert sent == plan.gathered_nbytes and plan.exact_gathered_nbytes == exact and 0.25 < sent / exact < 0.28
    assert f"all-gathers of parameters in int8: a rank sends {sent / 2**20:.2f} MiB in a step, 0.2" in str(plan)
    # A shard goes to the other host once, or on one level to both of its ranks.
    assert plan.traffic.parameters_nbytes == pytest.approx(sent * 2 * (1 if hosts == "aabb" else 2) / 3, rel=0.01)
    assert plan.traffic.nbytes == 2 * between


def _kept(rank, world_size, hosts, reshards):
    """With codes that are not kept, and that are: this rank's shards after steps, with one gathered exactly and one
    attached to between its passes; the bytes that the last backward pass sent to other hosts; the plan; warnings."""
    found = []
    for kept in (False, True):
        model = _made((world_size,), reshard_after_forward=reshards)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with on_host(hosts[rank]), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            config = Config("int8", params="int8", params_kept=kept, chunks=Chunks(4096, in_flight=2))
            comm = fusedcomm.attach(model, config, quiet=True)
        with comm:
            for step in range(4):
                optimizer.zero_grad()
                with comm.exact_params() if step == 1 else contextlib.nullcontext():
                    loss = model(_batch(rank, step)).square().mean()
                before = comm.stats().sent_between_hosts_nbytes
                loss.backward()
                sent = comm.stats().sent_between_hosts_nbytes - before
                optimizer.step()
            texts = [str(each.message) for each in said if "params_kept" in str(each.message)]
            found.append((_digest({n: p.to_local() for n, p in model.state_dict().items()}), sent, comm.plan(), texts))
    return found


@pytest.mark.parametrize(
    ("hosts", "reshards", "notice"),
    [
        ("aabb", True, ""),
        ("abab", True, "shards must lie host by host"),
        ("aabb", False, "all modules keep their parameters"),
    ],
)
def test_kept_codes_change_no_bits_and_spare_the_network_a_gather(ranks, hosts, reshards, notice):
    outcomes = ranks.run(_kept, hosts, reshards, world_size=4)
    numel = 48 * 77 + 2 * 77 + 48 * 77 + 48 * 48 + 8 * 48  # about, of what is gathered in codes
    for rank, ((plain, sent, plan, _), (same, sent_kept, plan_kept, said)) in enumerate(outcomes):
        assert plain == same and plan.kept_nbytes == 0
        if notice:
            assert [notice in text for text in said] == [True] * (rank == 0)
            assert sent_kept == sent and plan_kept.kept_nbytes == 0
            continue
        assert not said and 1.03 < plan_kept.kept_nbytes / (numel / 2) < 1.4  # exact biases, and padding of small parts
        spared = plan.traffic.parameters_nbytes - plan_kept.traffic.parameters_nbytes
        assert spared == plan_kept.traffic.parameters_nbytes == 2 * (sent - sent_kept)
        assert f"each rank keeps {plan_kept.kept_nbytes / 2**20:.2f} MiB of codes" in str(plan_kept)


WAYS = [("fp32", True, False), ("fp32", 2, False), ("int8", True, False), ("int8", True, True), ("int8", 2, False)]
"""params, reshard_after_forward, params_kept; by row of the table in docs/fsdp.md."""


def _by_arithmetic(num_hosts: int, ranks_per_host: int) -> list[tuple[float, float, float]]:
    """Of each way: what a host sends in the forward and the backward pass, and what a rank keeps between them."""
    num_ranks, codes = num_hosts * ranks_per_host, (1 + 4 / 128) / 4
    found = []
    for params, reshards, kept in WAYS:
        forward = (num_ranks - 1) / num_ranks if params == "fp32" else codes * (num_hosts - 1) / num_hosts
        is_again = reshards is True and not kept
        found.append((forward, forward * is_again, 0 if is_again else (codes if kept else 1) / ranks_per_host))
    return found


def test_the_table_of_what_is_sent_and_kept_is_that_of_the_arithmetic():
    """Which plans and counts obey: the tests above, and test_fsdp_hosts.py."""
    page = (ROOT / "docs/fsdp.md").read_text().split("| 2 hosts × 4 ranks | forward")[1].splitlines()[2:]
    shown = [tuple(float(cell) for cell in line.split("|")[2:5]) for line in page[: len(WAYS)]]
    assert shown == [tuple(round(value, 2) for value in row) for row in _by_arithmetic(2, 4)]


# ---- left to torch


def _left(rank, world_size, kind):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, dtype=torch.float64 if kind == "float64" else torch.float32)
    if kind == "several dtypes":
        model.weight = nn.Parameter(model.weight.detach().bfloat16(), requires_grad=False)
        model.forward = lambda x: nn.functional.linear(x, model.weight.float(), model.bias)
    fully_shard(model)
    if kind == "an extension":  # says itself what is gathered of it
        local = model.weight._local_tensor
        local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
        local.fsdp_post_all_gather = lambda got, _, dtype, *, out=None: None if out is not None else (got[0], got)
    exact = _whole(model)
    with fusedcomm.attach(model, Config("fp32", params="int8"), quiet=True) as comm:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                model.unshard()
                seen = {name: p.detach().clone() for name, p in model.named_parameters()}
                model.reshard()
        buckets = comm.stats().buckets
    texts = [str(each.message) for each in said if "gathered by torch itself" in str(each.message)]
    return all(torch.equal(exact[name], seen[name]) for name in exact), buckets, texts


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("float64", "they are torch.float64, which no wire carries"),
        ("several dtypes", "they have several dtypes"),
        ("an extension", "extension tensors among them encode themselves"),
    ],
)
def test_what_codes_cannot_carry_is_left_to_torch_and_said_once(ranks, kind, why):
    for is_exact, num_buckets, (text,) in ranks.run(_left, kind, world_size=2):
        assert is_exact and num_buckets == 0
        assert f"the parameters of (model) are gathered by torch itself, exactly: {why}" in text
