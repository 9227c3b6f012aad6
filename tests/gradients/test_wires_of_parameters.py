"""Reports of non-finite gradients, and wires for some parameters."""

import datetime

import pytest
import torch
import torch.distributed as dist
from models import Gradients, synchronize
from patience import patient
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

NUMEL = 20000


def smooth(rank, step, numel=NUMEL):
    """Normal values, which every wire dtype represents well."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def two_buckets(group=None):
    """A DDP module with two buckets: bucket 0 has weights.1, bucket 1 has weights.0."""
    return DistributedDataParallel(Gradients((NUMEL,), (NUMEL,)), bucket_cap_mb=0.05, process_group=group)


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
