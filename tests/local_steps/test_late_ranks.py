"""LocalSteps with a quorum: merges without a rank that is late. With gradients that do not depend on the parameters, a
rank's parameters are the merged state and what it has done that is in no merge yet, whoever was late when."""

import threading

import pytest
import torch
from models import error_of
from patience import HANG_S
from plain_simulation import Net
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

EVERY, STEPS, LATE_IN, LR = 4, 12, 6, 2.0**-6
"""Rank 2 stands still after step 6, until the others have sent the messages of all their steps."""


def updates(rank, step):
    """float32, whole numbers of both signs times LR, of each parameter."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [LR * torch.randint(-50, 51, p.shape, generator=generator).float() for p in Net().parameters()]


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def trained(rank, world_size, merge, fragments, config):
    """([(message, steps that this rank had made, or -1 if it missed it)], missed, parameters, merged states)."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = fusedcomm.LocalSteps(
        model,
        optimizer,
        EVERY,
        delay=1,
        merge=merge,
        fragments=fragments,
        config=config,
        quorum=2,
        timeout=0.3,
        quiet=True,
    )
    sent, waits, send = [], threading.Event(), comm.messages.send
    comm.messages.send = lambda pending: (sent.append((pending.message, pending.began)), send(pending))
    for step in range(1, STEPS + 1):
        if rank == 2 and step == LATE_IN + 1:
            for _ in range(HANG_S * 100):
                if comm.num_messages >= STEPS // EVERY * fragments:
                    break
                waits.wait(0.01)
        for parameter, update in zip(model.parameters(), updates(rank, step), strict=True):
            parameter.grad = update
        optimizer.step()
    missed = comm.stats().missed
    comm.finish()
    found = (sent, missed, flat(model.parameters()), [fragment.anchor.clone() for fragment in comm.fragments])
    comm.detach()
    return found


def test_a_late_rank_holds_nobody_up_and_what_it_did_is_in_its_next_merge(ranks):
    outcomes = ranks.run(trained, "corrected", 1, "fp32", world_size=3)
    assert outcomes[2][1] >= 2  # of steps 8 and 12, for which the others did not wait
    done = [torch.stack([flat(updates(rank, step)).double() for step in range(1, STEPS + 1)]) for rank in range(3)]
    merged, contributed = flat(Net().parameters()).double(), [0, 0, 0]
    for message in range(len(outcomes[0][0])):
        began = [sent[message][1] for sent, *_ in outcomes]
        assert [sent[message][0] for sent, *_ in outcomes] == [message] * 3
        there = [rank for rank in range(3) if began[rank] >= 0]
        merged -= sum(done[rank][contributed[rank] : began[rank]].sum(0) for rank in there) / len(there)
        contributed = [began[rank] if rank in there else contributed[rank] for rank in range(3)]
    assert contributed == [STEPS] * 3
    for _, _, parameters, _ in outcomes:
        assert torch.equal(parameters, outcomes[0][2])
        assert (parameters - merged).abs().max() <= 1e-6 * merged.abs().max()


@pytest.mark.parametrize(("merge", "fragments"), [("corrected", 2), ("nesterov", 1), ("blend", 4)])
def test_lossy_merges_without_a_late_rank_are_the_same_on_all(ranks, merge, fragments):
    outcomes = ranks.run(trained, merge, fragments, "int4", world_size=3)
    for _, _, parameters, anchors in outcomes:
        assert torch.equal(parameters, outcomes[0][2])
        assert [a.tolist() for a in anchors] == [a.tolist() for a in outcomes[0][3]]
    assert outcomes[2][1] > 0


def refused(rank, world_size):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = [{"quorum": 2}, {"timeout": 1.0}, {"quorum": 9, "timeout": 1.0}, {"quorum": 1, "timeout": 0.0}]
    wrong.append({"quorum": 1, "timeout": 1.0, "state": "average", "delay": 0})
    texts = [error_of(ValueError, fusedcomm.LocalSteps, model, optimizer, 4, **each) for each in wrong]
    ddp = DistributedDataParallel(model, process_group=torch.distributed.new_subgroups(1)[0])
    return [*texts, error_of(ValueError, fusedcomm.LocalSteps, ddp, optimizer, 4, quorum=1, timeout=1.0)]


def test_half_a_quorum_and_one_that_cannot_be_are_refused(ranks):
    for texts in ranks.run(refused, world_size=2):
        assert "belong together" in texts[0] and "belong together" in texts[1]
        assert "quorum=9" in texts[2] and "timeout=0.0" in texts[3]
        assert "state='average'" in texts[4] and "one rank of a host" in texts[5]
