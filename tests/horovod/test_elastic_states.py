"""Samplers share out each epoch exactly, and states keep what was committed."""

import itertools
import types

import pytest
import torch
from jobs import job

import fusedcomm.horovod as hvd
import fusedcomm.horovod.world as worlds


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process appear as a rank of a job."""

    def set_place(rank: int, size: int) -> None:
        monkeypatch.setattr(worlds, "_world", types.SimpleNamespace(rank=rank, size=size))

    return set_place


def shares(as_rank, size, numel, processed=0, epoch=2, shuffle=True):
    """Each rank's samples of an epoch."""
    found = []
    for rank in range(size):
        as_rank(rank, size)
        sampler = hvd.elastic.ElasticSampler(range(numel), shuffle=shuffle, seed=3)
        sampler.set_epoch(epoch)
        if processed:
            sampler.load_state_dict({"epoch": epoch, "processed_num": processed})
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


@pytest.mark.parametrize("numel", [1, 2, 7, 24, 25])
def test_a_change_of_ranks_neither_repeats_nor_loses_a_sample(as_rank, numel):
    for first, second, num_batches in itertools.product((1, 2, 3, 4), (1, 2, 3, 5), (0, 1, 2)):
        done = {index for each in shares(as_rank, first, numel) for index in each[: num_batches * 2]}
        processed = min(num_batches * 2 * first, numel)
        after = shares(as_rank, second, numel, processed=processed)
        assert {len(each) for each in after} == {-(-(numel - processed) // second)}
        assert done.isdisjoint(itertools.chain(*after)) and done.union(*after) == set(range(numel))


def test_every_epoch_has_an_order_of_its_own(as_rank):
    orders = [shares(as_rank, 1, 50, epoch=epoch)[0] for epoch in (0, 1, 2, 2)]
    assert orders[0] != orders[1] != orders[2] == orders[3]
    assert shares(as_rank, 2, 8, processed=3, shuffle=False) == [[3, 5, 7], [4, 6, 3]]


def check_object_state(rank, size):
    with job():
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=rank, names=["a"])
        state.names.append("not committed")
        state.restore()
        assert (state.epoch, state.names) == (rank, ["a"])
        state.sync()
        assert state.epoch == 0
        if rank == size - 1:  # it has done more than the others: all go on from there
            state.epoch = 7
            state.commit()
        state.sync()
        assert state.epoch == 7
        called = []
        state.register_reset_callbacks([lambda: called.append("reset")])
        state.on_reset()
        return called


def test_states_are_those_of_the_rank_that_has_committed_most(ranks):
    assert ranks.run(check_object_state, world_size=3) == [["reset"]] * 3


def check_torch_state(rank, size):
    with job():
        torch.manual_seed(rank)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5 + rank)
        sampler = hvd.elastic.ElasticSampler(range(40))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + rank)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=rank)

        def weights() -> list[float]:
            return state.model.weight.flatten().tolist()

        def train() -> None:
            before = weights()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            sampler.record_batch(0, 3)
            assert weights() != before

        state.sync()
        assert optimizer.param_groups[0]["lr"] == 0.5 and state.epoch == 0
        assert state.scheduler is scheduler and scheduler.step_size == 1
        synced = weights()
        assert hvd.allgather_object(synced) == [synced] * size
        train()
        state.restore()
        assert weights() == synced and sampler.processed_num == 0
        train()
        state.commit()
        committed = weights()
        train()
        state.restore()
        assert weights() == committed and sampler.processed_num == 3 * size
        state.model = torch.nn.Linear(2, 2)  # is saved
        kept = weights()
        torch.nn.init.zeros_(state.model.weight)
        state.restore()
        assert weights() == kept
        return "ended"


def test_models_optimizers_and_samplers_are_saved_restored_and_synced(ranks):
    assert ranks.run(check_torch_state, world_size=2) == ["ended"] * 2
