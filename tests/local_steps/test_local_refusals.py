"""LocalSteps on one rank, and with a rank that is lost."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from plain_simulation import Net, Run
from test_local_state import begun


def one_rank_alone(rank, world_size):
    assert dist.get_world_size() == 1
    run = Run("corrected", every=3, delay=1)
    model, optimizer, comm = begun(run, "int4")
    other = Net()
    of_other = run.optimizer(other)
    for step in range(1, 8):
        run.step(model, optimizer, rank, step)
        run.step(other, of_other, rank, step)
    comm.finish()
    comm.detach()
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_one_rank_trains_as_it_would_alone(ranks):
    assert ranks.run(one_rank_alone, world_size=1) == [True]


def killed(rank, world_size):
    """Rank 1 is killed after its snapshot was sent once; rank 0 ends with an error at the merge that it misses."""
    run = Run("corrected", every=3, delay=1)
    model, optimizer, comm = begun(run)
    for step in range(1, 6):
        run.step(model, optimizer, rank, step)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        for step in range(6, 9):
            run.step(model, optimizer, rank, step)
    comm.detach()
    return str(caught.value)


def test_a_lost_rank_is_named_at_the_next_merge(ranks):
    (kind, text), _ = ranks.outcomes(killed, world_size=2, lost=1)
    assert kind == "value" and "rank 1" in text and "bucket 0" in text, text
