"""States that are saved and loaded: real ranks over gloo, with checkpoints and with other numbers of ranks."""

import io
import warnings

import pytest
import torch
import torch.distributed as dist
from models import Gradients, attach_to, normal, reducer_of, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback

SHAPE = (20011,)


def saved_after(rank, world_size, num_steps, consolidated, kwargs):
    ddp, comm = attach_to(Gradients(SHAPE), **kwargs)
    for step in range(num_steps):
        synchronize(ddp, [normal(rank, step, SHAPE)])
    state = comm.state_dict(consolidated)
    return state, [synchronize(ddp, [normal(rank, step, SHAPE)])[0] for step in (num_steps, num_steps + 1)]


def resumed(rank, world_size, states, num_steps, kwargs):
    """Loads a state and takes two steps. Returns the sum of their results, and the consolidated state after them."""
    ddp, comm = attach_to(Gradients(SHAPE), **kwargs)
    comm.load_state_dict(states[rank])
    seen = [synchronize(ddp, [normal(rank, step, SHAPE)])[0].double() for step in (num_steps, num_steps + 1)]
    return sum(seen), comm.state_dict(consolidated=True)


def test_a_loaded_state_is_neither_lost_nor_counts_twice(ranks):
    kwargs = {"feedback": Feedback()}
    states = [state for state, _ in ranks.run(saved_after, 3, False, kwargs, world_size=2)]
    assert [(s["rank"], s["world_size"], s["step"]) for s in states] == [(0, 2, 3), (1, 2, 3)]
    left_out = [state["residuals"]["weights.0"] for state in states]
    assert not torch.equal(*left_out)
    wanted = sum(left_out).double() / 2
    wanted += sum(normal(rank, step, SHAPE).double() for rank in range(2) for step in (3, 4)) / 2
    for delivered, state in ranks.run(resumed, states, 3, kwargs, world_size=2):
        assert torch.allclose(delivered + state["residuals"]["weights.0"], wanted, rtol=0, atol=1e-4)
        assert state["step"] == 5


def test_a_consolidated_state_is_the_mean_and_fits_any_number_of_ranks(ranks):
    kwargs = {"feedback": Feedback()}
    outcome = ranks.run(saved_after, 3, True, kwargs, world_size=3)
    own = ranks.run(saved_after, 3, False, kwargs, world_size=3)
    consolidated = [state for state, _ in outcome]
    mean = sum(state["residuals"]["weights.0"] for state, _ in own) / 3
    for state in consolidated:
        assert (state["rank"], state["world_size"]) == (None, None)
        assert torch.allclose(state["residuals"]["weights.0"], mean, rtol=1e-5, atol=1e-6)
    # On two ranks a step's result plus the new residual is the mean gradient plus the loaded residual.
    for delivered, remaining in ranks.run(delivered_and_remaining, consolidated[0], world_size=2):
        wanted = (normal(0, 9, SHAPE) + normal(1, 9, SHAPE)) / 2 + mean
        assert torch.allclose(delivered + remaining, wanted, rtol=0, atol=1e-4)


def delivered_and_remaining(rank, world_size, state):
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    comm.load_state_dict(state)
    (delivered,) = synchronize(ddp, [normal(rank, 9, SHAPE)])
    return delivered, comm.state_dict(consolidated=True)["residuals"]["weights.0"]


def loads(rank, world_size, change, kwargs):
    """Loads a state with some entries changed. Returns the error, "" if there is none, the warnings, and the names of
    the residuals afterwards."""
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    state = {**comm.state_dict(), **change}
    for key in [key for key, value in change.items() if value == "missing"]:
        del state[key]
    comm.detach()
    comm = fusedcomm.attach(ddp, Config("int4", wires={"1d": "int4"}, **kwargs), quiet=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            comm.load_state_dict(state)
            error = ""
        except ValueError as e:
            error = str(e)
    return error, [str(warning.message) for warning in caught], sorted(comm.state_dict()["residuals"])


@pytest.mark.parametrize(
    ("change", "kwargs", "words"),
    [
        ({"version": 1}, {"feedback": Feedback()}, ["state version 1", "reads 2"]),
        ({"residuals": "missing"}, {"feedback": Feedback()}, ["['residuals'] missing"]),
        ({}, {}, ["error_feedback='fp32'", "feedback=None", "attach with feedback=fusedcomm.Feedback(…)"]),
        (
            {"residuals": {"weights.0": torch.zeros(5)}},
            {"feedback": Feedback()},
            ["'weights.0'", "5 elements", f"{SHAPE[0]}"],
        ),
        ({"residuals": {"bias": torch.zeros(5)}}, {"feedback": Feedback()}, ["'bias'", "does not have"]),
        ({"residuals": {"weights.0": torch.full(SHAPE, torch.nan)}}, {"feedback": Feedback()}, ["finite"]),
        ({"step": "x"}, {"feedback": Feedback()}, ["state['step']", "'x'", "whole number"]),
        ({"step": -5}, {"feedback": Feedback()}, ["state['step']", "-5"]),
        ({"step": 2**70}, {"feedback": Feedback()}, ["state['step']", str(2**70)]),
        ({"nonfinite": {"weights.9": 3}}, {"feedback": Feedback()}, ["'weights.9'", "of this model"]),
        ({"nonfinite": {"weights.0": -3}}, {"feedback": Feedback()}, ["'weights.0'", "-3"]),
        (
            {"error_feedback": "int8"},
            {"feedback": Feedback()},
            ["error_feedback='int8'", "'fp32', 'bf16'", "state['error_feedback'] = 'fp32'", "state['residuals']"],
        ),
        ({"residuals": None}, {"feedback": Feedback()}, ["state['residuals'] is a NoneType", "dict"]),
    ],
    ids=str,
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(ranks, change, kwargs, words):
    for error, _, left_out in ranks.run(loads, change, kwargs, world_size=2):
        assert all(word in error for word in words), error
        assert left_out == []


def test_another_ranks_residuals_are_forgotten_with_a_warning(ranks):
    outcome = ranks.run(loads, {"rank": 1}, {"feedback": Feedback()}, world_size=2)
    error, messages, left_out = outcome[0]
    assert error == "" and left_out == [] and len(messages) == 1
    assert all(words in messages[0] for words in ("rank 1 of 2", "this is rank 0 of 2", "consolidated=True"))
    assert outcome[1] == ("", [], ["weights.0"])


def test_residuals_may_be_loaded_under_another_wire_or_format(ranks):
    for error, messages, left_out in ranks.run(loads, {}, {"feedback": Feedback("bf16")}, world_size=2):
        assert (error, messages, left_out) == ("", [], ["weights.0"])


# ---- another process group


def moved_to_a_smaller_group(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    before = comm.state_dict()["residuals"]["weights.0"]
    if rank == 2:
        return None
    ddp._update_process_group(pairs[0])
    (delivered,) = synchronize(ddp, [normal(rank, 1, SHAPE)])
    return before, delivered, comm.state_dict(consolidated=True)["residuals"]["weights.0"]


def test_residuals_follow_into_another_group_with_the_weight_they_had(ranks):
    """One of three ranks leaves. A residual of a mean of three ranks weighs 2/3 as much in a mean of two ranks."""
    (before_0, delivered, remaining), (before_1, _, _), _ = ranks.run(moved_to_a_smaller_group, world_size=3)
    wanted = (normal(0, 1, SHAPE) + normal(1, 1, SHAPE)) / 2 + (before_0 + before_1) / 3
    assert torch.allclose(delivered + remaining, wanted, rtol=0, atol=1e-4)


def through_a_comm_state(rank, world_size, loaded):
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    state = fusedcomm.CommState(Config("int4", wires={"1d": "int4"}, feedback=Feedback()))
    if loaded is not None:
        state.load_state_dict(loaded)
    ddp = DistributedDataParallel(Gradients(SHAPE))
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    (first,) = synchronize(ddp, [normal(rank, 0, SHAPE)])
    before = state.state_dict(consolidated=True)
    own = state.state_dict()["residuals"]
    if rank == 2:
        return first, before, own, None, None
    ddp._update_process_group(pairs[0])
    state.process_group = pairs[0]
    (second,) = synchronize(ddp, [normal(rank, 1, SHAPE)])
    return first, before, own, second, state.state_dict(consolidated=True)


def test_a_comm_state_saves_loads_and_moves(ranks):
    outcome = ranks.run(through_a_comm_state, None, world_size=3)
    first, before, own, second, after = outcome[0]
    (name,) = own
    wanted = sum(normal(rank, 0, SHAPE) for rank in range(3)) / 3
    assert torch.allclose(first + before["residuals"][name], wanted, rtol=0, atol=1e-4)
    wanted = (normal(0, 1, SHAPE) + normal(1, 1, SHAPE)) / 2 + (own[name] + outcome[1][2][name]) / 3
    assert torch.allclose(second + after["residuals"][name], wanted, rtol=0, atol=1e-4)
    assert (before["step"], after["step"]) == (1, 2)
    first_again, again, *_ = ranks.run(through_a_comm_state, before, world_size=3)[0]
    wanted = sum(normal(rank, 0, SHAPE) for rank in range(3)) / 3 + before["residuals"][name]
    assert torch.allclose(first_again + again["residuals"][name], wanted, rtol=0, atol=1e-4)


def moves_with_several_parameters(rank, world_size):
    """Trains, then moves to a smaller process group. In the first pass one bucket holds all parameters in the model's
    order. Later buckets hold them in the order in which gradients are ready."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    state = fusedcomm.CommState(Config("int4", wires={"1d": "int4"}, feedback=Feedback()))
    ddp = DistributedDataParallel(Gradients(*[(6000,)] * 4), bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    delivered = [torch.zeros(6000, dtype=torch.float64) for _ in range(4)]
    for step in range(3):
        gradients = [normal(rank, 10 * step + index, (6000,)) for index in range(4)]
        delivered = [total + seen for total, seen in zip(delivered, synchronize(ddp, gradients), strict=True)]
    before = state.state_dict()["residuals"]
    if rank == 2:
        return delivered, None, before, None
    ddp._update_process_group(pairs[0])
    state.process_group = pairs[0]
    second = synchronize(ddp, [normal(rank, 100 + index, (6000,)) for index in range(4)])
    return delivered, second, before, state.state_dict(consolidated=True)["residuals"]


def test_a_comm_states_residuals_stay_with_their_parameters_in_another_group(ranks):
    """In the new group, a result plus the new residual is the mean gradient plus the parameter's own old residual."""
    outcome = ranks.run(moves_with_several_parameters, world_size=3)
    names = sorted(outcome[0][2])
    assert len(names) == 4 and sorted(outcome[0][3]) == names
    # A CommState does not have the parameters' names, so each name is found by the value of its residual.
    for index in range(4):
        sent = sum(normal(rank, 10 * step + index, (6000,)).double() for rank in range(3) for step in range(3)) / 3
        left_out = sent - outcome[0][0][index]
        (name,) = [n for n in names if torch.allclose(sum(o[2][n] for o in outcome) / 3, left_out.float(), atol=1e-4)]
        wanted = sum(normal(rank, 100 + index, (6000,)) + 2 / 3 * outcome[rank][2][name] for rank in range(2)) / 2
        assert torch.allclose(outcome[0][1][index] + outcome[0][3][name], wanted, rtol=0, atol=1e-4)


def attached_and_loaded_by_a_comm_state(rank, world_size):
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    saved = comm.state_dict()
    state = fusedcomm.CommState(Config("int4", wires={"1d": "int4"}, feedback=Feedback()))
    state.load_state_dict(saved)
    ddp = DistributedDataParallel(Gradients(SHAPE))
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            synchronize(ddp, [normal(rank, step, SHAPE)])
    return [str(warning.message) for warning in caught if "fusedcomm" in str(warning.message)]


def test_residuals_that_no_parameter_takes_are_said_to_be_lost_once(ranks):
    for messages in ranks.run(attached_and_loaded_by_a_comm_state, world_size=2):
        assert len(messages) == 1 and "'weights.0'" in messages[0] and "module=model" in messages[0]


# ---- the store


def saved_often(rank, world_size):
    """Makes three consolidated states. Returns for each whether the store still has this rank's record of it."""
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback())
    synchronize(ddp, [normal(rank, 0, SHAPE)])
    for _ in range(3):
        comm.state_dict(consolidated=True)
    store = comm.session._store
    dist.barrier()
    return [store.check([f"residuals/{call}/record/{rank}"]) for call in (1, 2, 3)]


def test_the_store_does_not_fill_up_with_every_checkpoint(ranks):
    assert ranks.run(saved_often, world_size=2) == [[False, False, True]] * 2


# ---- the same bits


def of_ddp(config):
    ddp = DistributedDataParallel(Gradients(SHAPE))
    return ddp, fusedcomm.attach(ddp, config, quiet=True)


def of_reducer(config):
    model = Gradients((64, 96), (40, 50), (3, 1000))
    return model, reducer_of(model, config, bucket_mib=0.02)


def of_owners(config):
    model, comm = of_reducer(config)
    model.optimizer = fusedcomm.ShardedOptimizer(
        comm, torch.optim.SGD, lr=0.1, update="int8", overlap=False, quiet=True
    )
    return model, comm


def file_of(*states):
    torch.save(states, file := io.BytesIO())
    return file.getvalue()


def trained(rank, model, comm, steps):
    """What a step ends with: gradients, or a ShardedOptimizer's parameters."""
    optimizer = getattr(model, "optimizer", None)
    weights = getattr(model, "module", model).weights
    for step in steps:
        if comm.session.config.weighted:
            comm.weight = 1 + (rank + step) % 3
        found = synchronize(model, [normal(rank, 10 * step + i, each.shape) for i, each in enumerate(weights)])
        if optimizer is not None:
            optimizer.step()
            found = [each.detach().clone() for each in weights]
    return found


def resumed_twice(rank, world_size, make, config):
    """Whether a run that was saved, loaded, saved at once and loaded again has the bits of one that went on."""
    model, comm = make(config)
    trained(rank, model, comm, range(3))
    states = [getattr(each, "state_dict", dict)() for each in (model, comm, getattr(model, "optimizer", None))]
    file = file_of(*states)
    expected = trained(rank, model, comm, range(3, 6))
    for _ in range(2):
        comm.detach()
        model, comm = make(config)
        of_model, of_comm, of_optimizer = torch.load(io.BytesIO(file), weights_only=False)
        model.load_state_dict(of_model)
        comm.load_state_dict(of_comm)
        if of_optimizer:
            model.optimizer.load_state_dict(of_optimizer)
        file = file_of(model.state_dict(), comm.state_dict(), of_optimizer and model.optimizer.state_dict())
    found = trained(rank, model, comm, range(3, 6))
    comm.detach()
    return [torch.equal(*pair) for pair in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (of_ddp, Config("int4", wires={"1d": "int4"}, feedback=Feedback())),
        (of_reducer, Config("int8", feedback=Feedback("bf16"))),
        (of_reducer, Config("int8", feedback=Feedback(), weighted="mean")),
        (of_owners, Config("int8", feedback=Feedback())),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(ranks, make, config):
    for same in ranks.run(resumed_twice, make, config, world_size=3):
        assert all(same)
