"""Training with fusedcomm against training without it: 100 iterations, every gradient and every parameter.

On an exact wire no bit may differ. On a lossy wire each gradient must be within the format's tolerance of the exact
gradient from the same parameters.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from models import SCENARIOS, Scenario
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

NUM_STEPS = 100

# Bounds of |seen − exact| / max|exact|. The maximum is over one parameter's gradient; with int8 it is over all of the
# step. A gradient is rounded twice, each time by at most half a unit in the last place. The unit is 2⁻⁸ (bf16)
# or 1/127 of the block's largest value (int8). Local gradients are up to 8 times the mean here. Quantizing the sum
# again for each rank would exceed these bounds. The bits of every wire: tests/codec/test_simulate.py.
TOLERANCE = {"bf16": 8 * 2.0**-8, "int8": 8 / 127}


def train(
    rank: int, scenario: Scenario, config: Config | None, record: list[list[torch.Tensor]], follow: list | None
) -> list[torch.Tensor]:
    """Trains for NUM_STEPS steps and appends each step's gradients and parameters to `record`. Returns the parameters.

    With `follow`, takes that run's parameters after every step, so that gradients of the same parameters are compared.
    """
    ddp = DistributedDataParallel(scenario.build(reference=config is None), **scenario.ddp)
    comm = fusedcomm.attach(ddp, config) if config else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    num_steps = NUM_STEPS - 3 * rank if scenario.uneven else NUM_STEPS
    with Join([ddp]) if scenario.uneven else contextlib.nullcontext():
        for step in range(num_steps):
            for accumulated in range(scenario.accumulate):
                is_synchronized = accumulated == scenario.accumulate - 1
                with contextlib.nullcontext() if is_synchronized else ddp.no_sync():
                    x, y = scenario.batch(rank, scenario.accumulate * step + accumulated)
                    (ddp(x.to(_input_dtype(ddp))).to(y.dtype) - y).square().mean().backward()
            record.append([_dense(p.grad) for p in ddp.parameters()])
            optimizer.step()
            # Even steps keep the gradients' memory and odd steps free it: users do both.
            optimizer.zero_grad(set_to_none=step % 2 == 1)
            if follow is not None:
                with torch.no_grad():
                    for parameter, value in zip(ddp.parameters(), follow[step], strict=True):
                        parameter.copy_(value)
            record[-1].extend(p.detach().clone() for p in ddp.parameters())
    if comm is not None:
        assert comm.stats().buckets > 0, "the hook was never called"
        comm.detach()
    return [p.detach().clone() for p in ddp.parameters()]


def _input_dtype(ddp: DistributedDataParallel) -> torch.dtype:
    dtype = next(ddp.parameters()).dtype
    return torch.float32 if dtype.is_complex else dtype


def _dense(gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.empty(0)
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()


_last_by_default: dict[int, tuple[str, list[list[torch.Tensor]]]] = {}
"""(scenario's name, record) of the last training without fusedcomm, by world size."""


def by_default(rank: int, world_size: int, name: str) -> list[list[torch.Tensor]]:
    """The record of training without fusedcomm. The last one is kept, because several tests in a row compare with it
    and ranks outlive tests."""
    if world_size not in _last_by_default or _last_by_default[world_size][0] != name:
        record: list[list[torch.Tensor]] = []
        train(rank, SCENARIOS[name], None, record, None)
        dist.barrier()  # so that either all ranks have it or none
        _last_by_default[world_size] = name, record
    return _last_by_default[world_size][1]


def exact_parity(rank, world_size, name, config):
    expected, seen = by_default(rank, world_size, name), []
    train(rank, SCENARIOS[name], config, seen, None)
    assert len(expected) == len(seen) > 0
    for step, (on_default, on_hook) in enumerate(zip(expected, seen, strict=True)):
        for index, (a, b) in enumerate(zip(on_default, on_hook, strict=True)):
            assert torch.equal(a, b), f"step {step}, tensor {index}: {(a - b).abs().max()}"
    return seen[-1]


EXACT = [name for name in SCENARIOS if name not in ("bf16_parameters", "mixed_dtypes")]

# (scenario, world size) with which DDP's default rounds differently. Before its sum DDP multiplies by 1/p when it
# copies a gradient into its bucket, and divides by p when the gradient is already a view of the bucket. On three ranks
# these differ in the last bit. fusedcomm always multiplies. A sparse gradient adds its duplicate entries in another
# order than a dense one.
ROUNDED = [(name, 3) for name in EXACT if name.endswith("views")] + [("sparse", 2), ("sparse", 3)]


@pytest.mark.sampled(by=lambda name, world_size: {"world_size": world_size})
@pytest.mark.parametrize(
    ("name", "world_size"), [(name, p) for name in EXACT for p in (2, 3) if (name, p) not in ROUNDED]
)
def test_an_exact_wire_changes_no_bit_in_100_iterations(ranks, name, world_size):
    ranks.run(exact_parity, name, Config("fp32"), world_size=world_size)


@pytest.mark.sampled(by=lambda name, world_size: {"views": name.endswith("views"), "world_size": world_size})
@pytest.mark.parametrize(("name", "world_size"), ROUNDED)
def test_an_exact_wire_differs_by_rounding_alone_where_the_default_rounds_otherwise(ranks, name, world_size):
    # The tolerance is an ulp, 2⁻²³, of terms that are up to 8 times their mean.
    ranks.run(lossy_parity, name, "fp32", 8 * 2.0**-23, world_size=world_size)


def lossy_parity(rank, world_size, name, wire, tolerance):
    scenario = SCENARIOS[name]
    num_parameters = len(list(scenario.build().parameters()))
    expected, seen = by_default(rank, world_size, name), []
    follow = [tensors[num_parameters:] for tensors in expected]
    sum = "auto" if wire == "fp32" else "two-shot"
    train(rank, scenario, Config(wire, sum, wires={"1d": wire}), seen, follow)
    largest = 0.0
    for step, (on_default, on_hook) in enumerate(zip(expected, seen, strict=True)):
        # A block may span several parameters. Its largest element then bounds the error of all of them.
        largest_of_step = max(g.abs().max().item() for g in on_default[:num_parameters] if g.numel())
        for index in range(num_parameters):
            exact, lossy = on_default[index], on_hook[index]
            assert exact.shape == lossy.shape and exact.dtype == lossy.dtype
            if exact.numel() == 0 or exact.abs().max() == 0:
                assert torch.equal(exact, lossy)
                continue
            # A gradient that is zero except for rounding has no meaningful relative error. A bias has such a gradient
            # if a mean is subtracted after its layer.
            unit = largest_of_step if wire == "int8" else max(exact.abs().max().item(), largest_of_step / 1024)
            error = (exact - lossy).abs().max().item() / unit
            assert error <= tolerance, f"step {step}, parameter {index}: relative error {error:.2e}"
            largest = max(largest, error)
    return largest


@pytest.mark.sampled(by=lambda name, wire: {"wire": wire})
@pytest.mark.parametrize("wire", TOLERANCE)  # varies fastest: all of a scenario in a row
@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith("float64")])
def test_a_lossy_wire_stays_within_its_format_in_100_iterations(ranks, name, wire):
    # Parameters in bf16 round the mean once more, to bf16, on every wire.
    half_parameters = name in ("bf16_parameters", "mixed_dtypes")
    tolerance = max(TOLERANCE[wire], TOLERANCE["bf16"]) if half_parameters else TOLERANCE[wire]
    largest = ranks.run(lossy_parity, name, wire, tolerance, world_size=2)
    if name == "plain":
        assert min(largest) > 0, "the lossy wire lost nothing, so it was not used"


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["plain", "find_unused", "static_graph_views"])
def test_the_registered_hook_is_the_same_engine(ranks, name, wire):
    for on_rank in ranks.run(registered_and_attached, name, wire, world_size=2):
        assert on_rank


def registered_and_attached(rank, world_size, name, wire):
    """Whether training with comm_hook and with attach gives the same bits."""
    results = []
    for register in (False, True):
        ddp = DistributedDataParallel(SCENARIOS[name].build(), **SCENARIOS[name].ddp)
        if register:
            ddp.register_comm_hook(fusedcomm.CommState(wire), fusedcomm.comm_hook)
        else:
            fusedcomm.attach(ddp, wire)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(20):
            x, y = SCENARIOS[name].batch(rank, step)
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in ddp.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- torch.compile ---------------------------------------------------------------------------------------------------


def compiled_gradients(rank, world_size, wire, backend):
    """Parameters after two steps of a module under DDP: [without compilation, with compilation]."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        # Dynamo splits the graph between the three buckets, so that the hook runs during the backward pass.
        layers = [torch.nn.Linear(400, 400) for _ in range(5)]
        model = torch.nn.Sequential(torch.nn.Linear(10, 400), *layers, torch.nn.LayerNorm(400))
        ddp = DistributedDataParallel(model, bucket_cap_mb=1.2)
        comm = fusedcomm.attach(ddp, Config(wire, sum="two-shot"))
        step = torch.compile(ddp, backend=backend) if compiled else ddp
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            optimizer.zero_grad()
            step(torch.randn(8, 10, generator=generator)).square().mean().backward()
            optimizer.step()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        assert comm.stats().steps == 2
        assert len(comm.plan().buckets) == 3
        comm.detach()
    return seen


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_compiled_module_trains_as_it_does_uncompiled(ranks, wire):
    results = ranks.run(compiled_gradients, wire, "aot_eager", world_size=2)
    for eager, compiled in results:
        for a, b in zip(eager, compiled, strict=True):
            assert torch.equal(a, b)
