"""Samplers share out each epoch exactly, and states keep what was committed."""

import itertools
import os
import pickle
import types

import numpy as np
import pytest
import torch
from jobs import job

import fusedcomm.horovod as hvd
import fusedcomm.horovod.world as worlds
from fusedcomm.horovod.elastic import files


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process appear as a rank of a job."""

    def set_place(rank: int, size: int) -> None:
        monkeypatch.setattr(worlds, "_world", types.SimpleNamespace(rank=rank, size=size))

    return set_place


def shares(as_rank, size, numel, pad=False, processed=0, epoch=2, shuffle=True):
    """Each rank's samples of an epoch."""
    found = []
    for rank in range(size):
        as_rank(rank, size)
        sampler = hvd.elastic.ElasticSampler(range(numel), shuffle=shuffle, seed=3, pad=pad)
        sampler.set_epoch(epoch)
        if processed:
            sampler.load_state_dict({"epoch": epoch, "processed_num": processed})
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


@pytest.mark.parametrize("numel", [1, 2, 7, 24, 25])
def test_a_change_of_ranks_neither_repeats_nor_loses_a_sample(as_rank, numel):
    for first, second, num_batches in itertools.product((1, 2, 3, 4), (1, 2, 3, 5), (0, 1, 2)):
        done = [index for each in shares(as_rank, first, numel) for index in each[: num_batches * 2]]
        processed = min(num_batches * 2 * first, numel)
        after = itertools.chain(*shares(as_rank, second, numel, processed=processed))
        assert sorted([*done, *after]) == list(range(numel))


def test_padding_gives_every_rank_as_many_and_every_epoch_has_an_order_of_its_own(as_rank):
    for numel, size in itertools.product((1, 2, 7, 10, 12), (1, 2, 3, 5)):
        padded = shares(as_rank, size, numel, pad=True)
        assert {len(each) for each in padded} == {-(-numel // size)}
        assert set(itertools.chain(*padded)) == set(range(numel))
    orders = [shares(as_rank, 1, 50, epoch=epoch)[0] for epoch in (0, 1, 2, 2)]
    assert orders[0] != orders[1] != orders[2] == orders[3]
    assert shares(as_rank, 2, 8, processed=3, shuffle=False) == [[3, 5, 7], [4, 6]]


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
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=rank)

        def weights() -> list[float]:
            return state.model.weight.flatten().tolist()

        def train() -> None:
            before = weights()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            sampler.record_batch(0, 3)
            assert weights() != before

        state.sync()
        assert optimizer.param_groups[0]["lr"] == 0.5
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


class Counter:
    number = 5


class CounterHandler(hvd.elastic.StateHandler):
    def save(self):
        self.saved = self.value.number

    def restore(self):
        self.value.number = self.saved

    def sync(self):
        self.value.number = hvd.broadcast_object(self.value.number, self.root_rank)
        self.save()


def check_registry(rank, size):
    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        with job():
            state = hvd.elastic.TorchState(counter=Counter())
            state.counter.number += rank
            state.sync()
            state.counter.number += 1
            state.restore()
            return state.counter.number
    finally:
        hvd.elastic.set_handler_registry(before)


def test_a_handler_of_the_users_own_is_used(ranks):
    assert ranks.run(check_registry, world_size=2) == [5, 5]


@pytest.fixture
def state_file(tmp_path, monkeypatch):
    """A state that this user has committed, in a folder that did not exist, where everybody may write by default."""
    monkeypatch.setenv("FUSEDCOMM_HOROVOD_STATE", str(tmp_path / "states"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = os.umask(0)
    try:
        files.write(files.path(), {"num_commits": 3, "saved": {"w": torch.tensor([1.5, -2.0]), "n": np.arange(3)}})
    finally:
        os.umask(before)
    return files.path()


def test_a_state_file_is_for_its_user_alone_and_read_again(state_file):
    assert [path.name for path in state_file.parent.iterdir()] == ["job.pt"]
    assert (state_file.stat().st_mode & 0o777, state_file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    found = files.read()
    assert found["num_commits"] == 3 and found["saved"]["w"].tolist() == [1.5, -2.0]
    assert isinstance(found["saved"]["n"], np.ndarray) and found["saved"]["n"].tolist() == [0, 1, 2]


class Planted:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_a_state_that_somebody_has_planted_runs_no_code(state_file):
    torch.save([Planted(), []], state_file)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        files.read()


def test_a_commit_says_what_its_file_cannot_keep(state_file):
    before = state_file.read_bytes()
    said = r"what FUSEDCOMM_HOROVOD_STATE keeps\['saved'\] is a .*\.Planted"
    with pytest.raises(TypeError, match=said):
        files.write(state_file, {"num_commits": 4, "saved": Planted()})
    assert state_file.read_bytes() == before
