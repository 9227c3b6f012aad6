"""LocalSteps between hosts that train with FSDP2 or HSDP inside: the bits of DDP inside."""

import torch
import torch.distributed as dist
from local_jobs import Job
from plain_simulation import Run, flat_of
from test_local_state import AdamW


def held(tensor, shard):
    """This rank's part of a tensor, flat. shard: (index, count), for a tensor that is not sharded."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local().detach().flatten()
    parts = tensor.detach().chunk(shard[1]) if tensor.dim() else [tensor] * shard[1]
    return parts[shard[0]].flatten() if shard[0] < len(parts) else torch.empty(0)


def all_of(job, shard):
    """This rank's part of the parameters and of the optimizer's state."""
    found = [held(parameter, shard) for parameter in job.model.parameters()]
    for parameter in job.optimizer.param_groups[0]["params"]:
        for _, value in sorted(job.optimizer.state.get(parameter, {}).items()):
            found += [held(value, shard)] if torch.is_tensor(value) else []
    return flat_of(found)


def beside_ddp(rank, world_size, cases):
    """For each case: the steps after which a sharded model, or its optimizer's state, has not the bits of DDP's; how
    often the hosts were apart; whether finish() and a step after it have the same bits, too."""
    found = []
    for run, inside, options in cases:
        shard = (0, 1) if inside == "hsdp" else (rank % 2, 2)
        ours, ddps = (Job(run, rank, inside=each, **options) for each in (inside, "ddp"))
        different, apart = [], 0
        for step in range(1, run.steps + 1):
            for job in (ours, ddps):
                job.train([step])
            own = all_of(ours, shard)
            different += [step] if not torch.equal(own, all_of(ddps, shard)) else []
            everybodys = [None] * world_size
            dist.all_gather_object(everybodys, own)
            apart += not torch.equal(everybodys[rank % 2], everybodys[rank % 2 + 2])
        for job in (ours, ddps):
            with torch.no_grad():
                job.model(torch.ones(2, 6))  # FSDP2 leaves whole copies in the outermost module
            job.comm.finish()
            job.train([99])
            job.comm.detach()
        found.append((different, apart, torch.equal(all_of(ours, shard), all_of(ddps, shard))))
    return found


CASES = [
    (Run(every=5, delay=1, steps=8), "fsdp", {}),
    (AdamW(every=2, delay=0, steps=4), "fsdp", {}),
    (AdamW(every=2, delay=1, steps=6), "fsdp", {}),
    (AdamW(every=2, delay=1, steps=4), "hsdp", {}),
]


def test_fsdp2_and_hsdp_inside_hosts_have_the_bits_of_ddp_inside(ranks, subtests):
    for case, *of_ranks in zip(CASES, *ranks.run(beside_ddp, CASES), strict=True):
        with subtests.test(case=str(case)):
            for different, apart, ends_equal in of_ranks:
                assert different == [] and ends_equal and apart >= 2
