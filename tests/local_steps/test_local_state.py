"""LocalSteps: what is saved, how training ends, and training that goes on with other ranks."""

import io

import pytest
import torch
from plain_simulation import Run
from test_local_steps import flat, local_steps

from fusedcomm.config import Blocks, Chunks, Config, Feedback


def begun(run, config="fp32", **kwargs):
    model = run.model()
    optimizer = run.optimizer(model)
    return model, optimizer, local_steps(run, model, optimizer, config, **kwargs)


def file_of(state):
    """As it is in a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(data):
    return torch.load(io.BytesIO(data))


def resumed(rank, world_size, run, config, at):
    """(whether a run that was saved after `at` steps ends with the bits of one that was not, merges under way then). It
    is saved again as soon as it is loaded, before residuals have found their parameters."""
    whole, optimizer, comm = begun(run, config)
    for step in range(1, run.steps + 1):
        run.step(whole, optimizer, rank, step)
        if step == at:
            of_model, of_optimizer = file_of(whole.state_dict()), file_of(optimizer.state_dict())
            saved = file_of(comm.state_dict())
    for _ in range(2):
        comm.detach()
        model, optimizer, comm = begun(run, config)
        model.load_state_dict(read(of_model))
        optimizer.load_state_dict(read(of_optimizer))
        comm.load_state_dict(read(saved))
        saved = file_of(comm.state_dict())
    for step in range(at + 1, run.steps + 1):
        run.step(model, optimizer, rank, step)
    comm.detach()
    return torch.equal(flat(model), flat(whole)), len(read(saved)["under_way"])


@pytest.mark.parametrize(("at", "under_way"), [(14, 1), (15, 2), (17, 1)])
@pytest.mark.parametrize("merge", ["corrected", "nesterov"])
@pytest.mark.sampled
def test_a_loaded_state_goes_on_as_if_nothing_had_been_interrupted(ranks, merge, at, under_way):
    run = Run(merge, every=6, delay=4, fragments=2, steps=23)
    assert ranks.run(resumed, run, "fp32", at, world_size=2) == [(True, under_way)] * 2


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        ("int4", 3),
        (Config("int8", feedback=Feedback("bf16"), chunks=Chunks(4096)), 3),
        (Config("int4", feedback=Feedback(decay=0.9), blocks=Blocks(rotate=True)), 3),
        (Config("int4", feedback=Feedback(), blocks=Blocks(rotate=True)), 2),
        (Config("fp16", "two-shot", feedback=Feedback(), predivide=3), 3),
        (Config("int4", feedback=Feedback(), hosts=[[0, 2], [1, 3]]), 4),
    ],
    ids=str,
)
def test_both_encoders_go_on_with_what_each_has_left_out(ranks, config, world_size):
    run = Run("corrected", every=6, delay=4, fragments=2, steps=23, width=100)
    assert ranks.run(resumed, run, config, 15, world_size=world_size) == [(True, 2)] * world_size


def part_of_a_job(rank, world_size, run, config, files, first, last):
    """Trains steps [first, last) from a checkpoint of any rank, and returns this rank's checkpoint and its samples."""
    model, optimizer, comm = begun(run, config)
    if files:
        of_model, of_optimizer, saved, _ = files[rank % len(files)]
        model.load_state_dict(read(of_model))
        optimizer.load_state_dict(read(of_optimizer))
        comm.load_state_dict(read(saved))
    samples = list(range(first + rank, last, world_size))
    for sample in samples:
        run.step(model, optimizer, 0, sample)
    comm.finish()
    files = file_of(model.state_dict()), file_of(optimizer.state_dict()), file_of(comm.state_dict()), samples
    comm.detach()
    return (*files, flat(model))[:5]


def test_training_goes_on_with_one_rank_and_with_two_again(ranks):
    run = Run("nesterov", every=4, delay=1, fragments=2)
    files, samples = None, []
    for world_size, first, last in ((2, 0, 20), (1, 20, 30), (2, 30, 50)):
        outcomes = ranks.run(part_of_a_job, run, "int8", files, first, last, world_size=world_size)
        for outcome in outcomes:
            assert torch.equal(outcome[4], outcomes[0][4])
            samples += outcome[3]
        files = [outcome[:4] for outcome in outcomes]
    assert sorted(samples) == list(range(50))


def wrong_states(rank, world_size, run):
    model, optimizer, comm = begun(run)
    for step in range(1, 6):
        run.step(model, optimizer, rank, step)
    saved = comm.state_dict()
    texts = []
    for change in (
        {"version": 7},
        {"schedule": {**saved["schedule"], "every": 9}},
        {"schedule": {**saved["schedule"], "groups": 4}},
        {"wire": "int8"},
        {"merged": {**saved["merged"], "layers.0.bias": torch.zeros(3)}},
        {"parameters": [1]},
    ):
        with pytest.raises(ValueError) as caught:
            comm.load_state_dict({**saved, **change})
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="no state of LocalSteps: missing"):
        comm.load_state_dict({})
    comm.load_state_dict(
        {**saved, "schedule": {**saved["schedule"], "groups": 1, "warmup": 0, "seed": 3, "alpha": 0.0}}
    )
    comm.detach()
    comm.detach()
    with pytest.raises(RuntimeError, match="is detached"):
        comm.finish()
    return texts


def test_states_of_other_schedules_wires_and_models_are_refused(ranks):
    run = Run("corrected", every=4, delay=1)
    for texts in ranks.run(wrong_states, run, world_size=2):
        version, every, groups, wire, shape, parameters = texts
        assert "version 7" in version
        assert "every=9, and here it is 4" in every and "finish()" in every
        assert "groups=4, and here it is 1" in groups
        assert "wire='int8', and here it is 'fp32'" in wire
        assert "layers.0.bias has shape (3,) in the state and (8,) in the model" in shape
        assert "not those that were saved" in parameters and "make LocalSteps first" in parameters


def finished(rank, world_size, run, config, kwargs):
    """Rank r makes r steps more than rank 0."""
    model, optimizer, comm = begun(run, config, **kwargs)
    for step in range(1, run.steps + 1 + 3 * rank):
        run.step(model, optimizer, rank, step)
    comm.finish()
    first = flat(model).clone()
    for step in range(1, 10):
        run.step(model, optimizer, rank, step)
    comm.finish()
    stats = comm.stats()
    assert stats.under_way == 0 and stats.merges == sum(comm.merges)
    comm.detach()
    return first, flat(model)


@pytest.mark.parametrize("kwargs", [{}, {"weights": "steps"}], ids=str)
@pytest.mark.parametrize("merge", ["corrected", "nesterov"])
@pytest.mark.sampled
def test_all_ranks_end_with_equal_parameters_also_after_unequal_steps(ranks, merge, kwargs):
    run = Run(merge, every=4, delay=3, fragments=2, steps=13)
    outcomes = ranks.run(finished, run, "int4", kwargs, world_size=3)
    for outcome in outcomes:
        assert torch.equal(outcome[0], outcomes[0][0]) and torch.equal(outcome[1], outcomes[0][1])
    assert outcomes[0][0].isfinite().all() and not torch.equal(*outcomes[0])
