"""The error monitor: measured quantization errors, and reports of non-finite gradients."""

import datetime

import pytest
import reference
import torch
import torch.distributed as dist
from models import Gradients, synchronize
from patience import patient
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback
from fusedcomm.native import _C

NUMEL = 20000


def smooth(rank, step, numel=NUMEL):
    """Normal values, which every wire dtype represents well."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def spiky(rank, step, numel=NUMEL):
    """Normal values with an outlier in every block of 32. It is so large that int4 has few codes for the rest."""
    x = smooth(rank, step, numel)
    x[::32] = 12 * x[::32].sign()
    return x


def two_buckets(group=None):
    """A DDP module with two buckets: bucket 0 has weights.1, bucket 1 has weights.0."""
    return DistributedDataParallel(Gradients((NUMEL,), (NUMEL,)), bucket_cap_mb=0.05, process_group=group)


# ---- measured


def measured(rank, world_size, kwargs, num_steps):
    ddp = two_buckets()
    config = Config(**kwargs, wires={"1d": kwargs["wire"]}, measure_every=2)
    comm = fusedcomm.attach(ddp, config, quiet=True)
    for step in range(num_steps):
        results = synchronize(ddp, [smooth(rank, step), spiky(rank, step)])
    return comm.stats().quantization_error, results


def of_bucket(errors, index):
    """The error of the bucket with this index: labels begin with it."""
    (error,) = (error for label, error in errors.items() if label.startswith(f"bucket {index} ("))
    return error


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["bf16", "int8", "fp8", "int4"])
def test_quantization_errors_are_those_of_the_oracle(ranks, wire):
    kwargs = {"wire": wire, "sum": "two-shot"}
    for rank, (errors, results) in enumerate(ranks.run(measured, kwargs, 4, world_size=2)):
        # Steps 1, 3, … are measured. From step 1 on DDP's buckets are in their final order.
        for index, gradient in enumerate((spiky(rank, 3), smooth(rank, 3))):
            block = _C.default_block_numel(wire)
            sent = reference.decode(*reference.encode(gradient, wire, block), wire, block)
            expected = (gradient.double() - sent.double()).norm() / gradient.double().norm()
            assert of_bucket(errors, index) == pytest.approx(expected.item(), rel=1e-4)
        # Measuring does not change the results.
        for result, gradients in zip(
            results, ([smooth(r, 3) for r in (0, 1)], [spiky(r, 3) for r in (0, 1)]), strict=True
        ):
            assert torch.equal(result, fusedcomm.simulate(gradients, Config(**kwargs)))


@pytest.mark.parametrize(
    ("kwargs", "least"), [({"wire": "int4", "feedback": Feedback("bf16")}, 0.01), ({"wire": "fp32"}, None)], ids=str
)
def test_with_feedback_the_error_is_what_is_left_out_and_exact_sums_have_none(ranks, kwargs, least):
    for errors, _ in ranks.run(measured, kwargs, 4, world_size=2):
        assert errors == {} if least is None else least < of_bucket(errors, 1) < 0.5


# ---- reports of non-finite gradients


def reported(rank, world_size):
    ddp = two_buckets()
    comm = fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}), quiet=True)
    for step in range(2):
        broken = [smooth(rank, step), smooth(rank, step)]
        if rank == 1:
            broken[1][5] = torch.nan
        if rank == 2:
            broken[0][:3] = torch.inf
        synchronize(ddp, broken)
    return comm.nonfinite_report()


def test_the_report_names_rank_bucket_and_parameter(ranks):
    for report in ranks.run(reported, world_size=3):
        rows = [(row.rank, row.parameter, row.count) for row in report]
        assert rows == [(2, "weights.0", 6), (1, "weights.1", 2)]
        assert "bucket 1" in report[0].bucket and "bucket 0" in report[1].bucket


def report_by_one_rank(rank, world_size):
    ddp = two_buckets(dist.new_group(timeout=datetime.timedelta(seconds=patient(4))))
    comm = fusedcomm.attach(ddp, "int8", quiet=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] did not take part within .* collective call"):
            comm.nonfinite_report()
    dist.barrier()  # keeps rank 1 from leaving early, since it would then count as lost


@pytest.mark.check
def test_a_report_that_not_every_rank_asks_for_is_an_error(ranks):
    ranks.run(report_by_one_rank, world_size=2)


# ---- wires for some parameters


def with_wires(rank, world_size, kwargs):
    ddp = DistributedDataParallel(Gradients((NUMEL,), (50, 60), (33,), (7000,), (0, 5)))
    comm = fusedcomm.attach(ddp, Config("int4", **kwargs), quiet=True)
    gradients = [smooth(rank, index, weight.numel()).view_as(weight) for index, weight in enumerate(ddp.module.weights)]
    results = synchronize(ddp, gradients, steps=2)
    (bucket,) = comm.plan().buckets
    return gradients, results, bucket, comm.plan().exempt, comm.stats().sent_nbytes


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_travel_in_the_wires_given_for_them(ranks, world_size):
    """The last one has no elements."""
    kwargs = {
        "wires": {"weights.2": "fp32", "weights.[14]": "bf16", "weights.3": "int8", "weights.*": "fp8", "1d": "int4"}
    }
    outcome = ranks.run(with_wires, kwargs, world_size=world_size)
    for _, results, bucket, exempt, sent_nbytes in outcome:
        sum = "one-shot" if world_size == 2 else "two-shot"
        assert (bucket.wire, bucket.sum, exempt) == ("bf16+int8+fp8", sum, ("weights.2",))
        for index, wire in enumerate(("fp8", "bf16", "fp32", "int8", "bf16")):
            # Of one bucket: a parameter's blocks begin where its place in the bucket says.
            order = [int(name.removeprefix("weights.")) for name in bucket.parameters]
            flats = [torch.cat([gradients[i].flatten() for i in order]) for gradients, *_ in outcome]
            own = torch.cat([torch.full((results[i].numel(),), i == index) for i in order])
            means = fusedcomm.simulate(flats, Config(wire, sum=sum), exempt_mask=~own)[own]
            assert torch.equal(results[index].flatten(), means), wire
        payload = 2 * 3000 + 4 * 33 + 1.04 * (NUMEL + 7000)
        assert sent_nbytes == pytest.approx(2 * 2 * payload * (world_size - 1) / world_size, rel=0.02)
