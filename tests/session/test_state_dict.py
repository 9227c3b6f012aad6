"""States that are refused, forgotten with a warning, or handed over. Those that are loaded: test_nothing_is_lost.py."""

import warnings

import torch
import torch.distributed as dist
from models import Gradients, attach_to, error_of, normal, reducer_of, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback

SHAPE = (20011,)
FED_BACK = Config("int4", wires={"1d": "int4"}, feedback=Feedback())


def caught_by(call, *args):
    """The texts of fusedcomm's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [str(warning.message) for warning in caught if "fusedcomm" in str(warning.message)]


# What a state has in place of what it was saved with, and words of the error.
WRONG = [
    ({"version": 1}, ["state version 1", "reads 2"]),
    ({"residuals": "missing"}, ["['residuals'] missing"]),
    ({"residuals": {"weights.0": torch.zeros(5)}}, ["'weights.0'", "5 elements", f"{SHAPE[0]}"]),
    ({"residuals": {"bias": torch.zeros(5)}}, ["'bias'", "does not have"]),
    ({"residuals": {"weights.0": torch.full(SHAPE, torch.nan)}}, ["finite"]),
    ({"step": "x"}, ["state['step']", "'x'", "whole number"]),
    ({"step": -5}, ["state['step']", "-5"]),
    ({"step": 2**70}, ["state['step']", str(2**70)]),
    ({"nonfinite": {"weights.9": 3}}, ["'weights.9'", "of this model"]),
    ({"nonfinite": {"weights.0": -3}}, ["'weights.0'", "-3"]),
    ({"residuals": None}, ["state['residuals'] is a NoneType", "dict"]),
]


def loads(rank, world_size):
    """(the errors of WRONG, that without feedback, the warnings about another rank's residuals, residuals left)"""
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    saved = comm.state_dict()
    comm.detach()
    comm, texts = fusedcomm.attach(ddp, FED_BACK, quiet=True), []
    for change, _ in WRONG:
        state = {
            key: value for key, value in {**saved, **change}.items() if not isinstance(value, str) or value != "missing"
        }
        texts.append(error_of(ValueError, comm.load_state_dict, state))
        assert comm.state_dict()["residuals"] == {} and comm.state_dict()["step"] == 0
    said = caught_by(comm.load_state_dict, {**saved, "rank": 1})
    left = sorted(comm.state_dict()["residuals"])
    comm.detach()
    comm = fusedcomm.attach(ddp, "int4", quiet=True)
    without_feedback = error_of(ValueError, comm.load_state_dict, saved)
    comm.detach()
    comm = fusedcomm.attach(ddp, Config("int4", wires={"1d": "int4"}, feedback=Feedback()), quiet=True)
    assert caught_by(comm.load_state_dict, saved) == [] and sorted(comm.state_dict()["residuals"]) == ["weights.0"]
    return texts, without_feedback, said, left


def test_states_that_do_not_fit_are_refused_and_change_nothing(ranks, subtests):
    for rank, (texts, without_feedback, said, left) in enumerate(ranks.run(loads, world_size=2)):
        for (change, words), text in zip(WRONG, texts, strict=True):
            with subtests.test(change=str(change), rank=rank):
                assert all(word in text for word in words), text
        assert "the state has residuals" in without_feedback and "feedback=None" in without_feedback
        assert "feedback=fusedcomm.Feedback(…)" in without_feedback
        assert (len(said), left) == ((1, []) if rank == 0 else (0, ["weights.0"]))
        for words in ("rank 1 of 2", "this is rank 0 of 2", "consolidated=True"):
            assert rank == 1 or words in said[0]


def loaded_by_a_comm_state(rank, world_size):
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    state = fusedcomm.CommState(FED_BACK)
    state.load_state_dict(comm.state_dict())
    ddp = DistributedDataParallel(Gradients(SHAPE))
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    return caught_by(synchronize, ddp, [normal(rank, 0, SHAPE)], 3)


def test_residuals_that_no_parameter_takes_are_said_to_be_lost_once(ranks):
    for messages in ranks.run(loaded_by_a_comm_state, world_size=2):
        assert len(messages) == 1 and "'weights.0'" in messages[0] and "module=model" in messages[0]


def saved_often(rank, world_size):
    """Makes three consolidated states, rank 1 without residuals. Returns this rank's residuals, the mean, and for
    each state whether the store still has this rank's record of it."""
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    saved = comm.state_dict()
    if rank == 1:
        comm.load_state_dict({**saved, "residuals": {}})
    for _ in range(3):
        mean = comm.state_dict(consolidated=True)["residuals"]["weights.0"]
    store = comm.session._store
    dist.barrier()
    return saved["residuals"]["weights.0"], mean, [store.check([f"residuals/{i}/record/{rank}"]) for i in (1, 2, 3)]


def test_the_store_does_not_fill_up_with_every_checkpoint(ranks):
    outcomes = ranks.run(saved_often, world_size=2)
    for _, mean, in_store in outcomes:
        assert torch.equal(mean, outcomes[0][0] / 2) and in_store == [False, False, True]


def given_before(rank, world_size):
    """The reducer is given a weight, a step and counts before a ShardedOptimizer takes its session's place."""
    model = Gradients(SHAPE)
    reducer = reducer_of(model, Config("fp32", weighted="mean"))
    reducer.weight = 3 + rank
    reducer.load_state_dict({**reducer.state_dict(), "step": 7, "nonfinite": {"weights.0": 3}})
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, update="fp32", quiet=True, lr=1.0)
    state = reducer.state_dict()
    model([normal(rank, 0, SHAPE)]).backward()
    optimizer.step()
    reducer.detach()
    return state["step"], state["nonfinite"], model.weights[0].detach()


def test_what_a_reducer_was_given_goes_to_its_owners_session(ranks):
    mean = sum((3 + rank) * normal(rank, 0, SHAPE) for rank in range(2)) / 7
    for step, nonfinite, parameter in ranks.run(given_before, world_size=2):
        assert (step, nonfinite) == (7, {"weights.0": 3})
        assert torch.allclose(parameter, -mean, rtol=1e-5, atol=1e-6)
