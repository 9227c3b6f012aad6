"""DDP's contract with a communication hook, one test for each clause. That gradients are DDP's is in
tests/test_like_ddp.py."""

import inspect
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from models import (
    Gradients,
    Mlp,
    Normalised,
    Sparse,
    error_of,
    integers,
    mean_of_integers,
    synchronize,
    synchronized,
)
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback
from fusedcomm.ddp.module import refuse_sparse

# --- registration ---------------------------------------------------------------------------------------------------


def test_comm_hook_is_a_plain_function_that_ddp_and_trainers_accept():
    parameters = list(inspect.signature(fusedcomm.comm_hook).parameters.values())
    assert parameters[1].name == "bucket" and parameters[1].annotation is dist.GradBucket
    assert inspect.signature(fusedcomm.comm_hook).return_annotation == torch.futures.Future[torch.Tensor]
    assert fusedcomm.comm_hook.__name__ == fusedcomm.comm_hook.__qualname__ == "comm_hook"


def after_refused_hooks(rank, world_size):
    """Registers a hook while fusedcomm's is in the reducer, which refuses it: attached, just detached, and twice."""
    ddp, inputs, seen = DistributedDataParallel(Mlp()), torch.ones(4, 10), []

    def refuse():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can only be called once"):
                ddp.register_comm_hook(fusedcomm.CommState(), fusedcomm.comm_hook)

    for when in ("attached", "detached", "both"):
        comm = fusedcomm.attach(ddp, quiet=True)
        if when != "detached":
            refuse()
        comm.detach()
        if when != "attached":
            refuse()
            ddp(inputs).sum().backward()  # gives the reducer back without a hook
            seen.append(len(ddp._comm_hooks))
        again = fusedcomm.attach(ddp, "int8", quiet=True)
        seen.append(ddp._get_ddp_logging_data()["comm_hook"])
        again.detach()
    comm = fusedcomm.attach(ddp, quiet=True)
    comm.detach()
    ddp(inputs).sum().backward()
    ddp.register_comm_hook(fusedcomm.CommState(), fusedcomm.comm_hook)  # the reducer has no hook now
    return [*seen, error_of(RuntimeError, fusedcomm.attach, ddp, quiet=True)]


def test_a_hook_that_the_reducer_refused_does_not_keep_fusedcomm_from_attaching_again(ranks):
    for seen in ranks.run(after_refused_hooks, world_size=2):
        *counts_and_names, error = seen
        assert counts_and_names == ["fusedcomm", 0, "fusedcomm", 0, "fusedcomm"]
        assert "already has the communication hook comm_hook" in error


def test_auto_is_refused_where_ddps_own_all_reduce_has_no_sparse_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Embedding(5, 3, sparse=True))
    ddp = types.SimpleNamespace(module=model, parameters_to_ignore=set())
    refuse_sparse(ddp, torch.device("cpu"))
    with pytest.raises(ValueError, match="'1.weight'.* name a wire"):
        refuse_sparse(ddp, torch.device("cuda"))
    ddp.parameters_to_ignore.add("1.weight")
    refuse_sparse(ddp, torch.device("cuda"))


# --- bucket identity ------------------------------------------------------------------------------------------------


def rebuilt(rank, world_size, ddp_kwargs):
    """Each gradient's values identify its parameter, so that a mix-up in changed buckets shows."""
    shapes = tuple((2000 + i,) for i in range(8))
    ddp = DistributedDataParallel(Gradients(*shapes), bucket_cap_mb=0.02, **ddp_kwargs)
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot", wires={"weights.3": "fp32"}))
    buckets = []
    for step in range(4):
        gradients = [torch.full(shape, float((i + 1) * (step + 1) * (2 * rank + 1))) for i, shape in enumerate(shapes)]
        for i, seen in enumerate(synchronize(ddp, gradients)):
            assert seen.unique().tolist() == [(i + 1) * (step + 1) * 2.0], (step, i)
        buckets.append([row.parameters for row in comm.plan().buckets])
    return buckets


@pytest.mark.parametrize("kwargs", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_buckets_may_be_rebuilt_and_renumbered(ranks, kwargs):
    """static_graph reports every first bucket as index 0, and find_unused_parameters never rebuilds."""
    for buckets in ranks.run(rebuilt, kwargs, world_size=2):
        assert sorted(sum(buckets[3], ())) == sorted(f"weights.{i}" for i in range(8))
        if "static_graph" not in kwargs:
            assert buckets[2] == buckets[3]
            assert (len(buckets[0]) < len(buckets[3])) == (not kwargs)
            assert not kwargs or buckets[0] == buckets[1] == buckets[2]


def moved_to_another_group(rank, world_size, front_end):
    """_update_process_group to the first two ranks. Returns the error, and the mean of another attachment."""
    subgroup, config = dist.new_group([0, 1]), Config("int8", wires={"1d": "int8"})
    ddp, comm = synchronized(front_end, Gradients((6000,)), config)
    gradient = [torch.full((6000,), float(rank))]
    synchronize(ddp, gradient)
    ddp._update_process_group(subgroup)
    if rank > 1:
        return "", None
    if front_end == "CommState":
        comm.process_group = subgroup
    with pytest.raises(RuntimeError) as error:
        synchronize(ddp, gradient)
    if front_end == "CommState":
        return str(error.value), None
    comm.detach()
    comm = fusedcomm.attach(ddp, config, quiet=True)
    return str(error.value), synchronize(ddp, gradient, steps=3)[0].unique().tolist()


@pytest.mark.parametrize("front_end", ["hook", "CommState"])
def test_an_updated_process_group_needs_another_attachment(ranks, front_end):
    for rank, (error, after) in enumerate(ranks.run(moved_to_another_group, front_end)):
        assert ("process group" in error) == (rank < 2)
        assert after == ([0.5] if rank < 2 and front_end == "hook" else None)


def moved_after_detaching(rank, world_size):
    subgroup = dist.new_group([0, 1])
    ddp, comm = synchronized("hook", Gradients((6000,)), Config("int8", wires={"1d": "int8"}))
    gradient = [torch.full((6000,), float(rank))]
    before = synchronize(ddp, gradient)[0].unique().tolist()
    comm.detach()
    ddp._update_process_group(subgroup)
    return before, synchronize(ddp, gradient, steps=3)[0].unique().tolist() if rank < 2 else None


def test_an_updated_process_group_is_followed_after_detaching(ranks):
    for rank, (before, after) in enumerate(ranks.run(moved_after_detaching)):
        assert before == [1.5] and after == ([0.5] if rank < 2 else None)


# --- contents -------------------------------------------------------------------------------------------------------


def sparse_gradients(rank, world_size):
    ddp = DistributedDataParallel(Sparse())
    fusedcomm.attach(ddp, "int8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ddp(torch.full((1, 10), 0.1 * (rank + 1))).sum().backward()
    messages = [str(w.message) for w in caught if "is sparse" in str(w.message)]
    return ddp.module.embedding.weight.grad.is_sparse, messages


def test_sparse_gradients_stay_sparse_with_one_warning():
    fresh = Ranks(2)  # torch gives the warning once in a process
    results = fresh.run(sparse_gradients)
    fresh.close()
    for is_sparse, messages in results:
        assert is_sparse and len(messages) == 1 and "summed exactly" in messages[0]


def rebuilt_twice(rank, world_size):
    """torch keeps the parameter lists of buckets that it has built before."""
    shapes = ((2000,), (3000,))
    subgroup = dist.new_group([0, 1])
    ddp = DistributedDataParallel(Gradients(*shapes), bucket_cap_mb=0.008)
    state = fusedcomm.CommState(Config("int8", wires={"1d": "int8"}), module=ddp.module)
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    gradients = [torch.full(shape, float(rank + index)) for index, shape in enumerate(shapes)]
    synchronize(ddp, gradients, steps=3)
    ddp._update_process_group(subgroup)
    order = ddp.module.weights
    seen = []
    for _ in range(3):
        ddp.zero_grad(set_to_none=True)
        # Adds a term of weights.1 first, so that the gradients become ready in another order than before.
        try:
            ((order[1] * gradients[1]).sum() + ddp([gradients[0], 0 * gradients[1]])).backward()
        except RuntimeError as error:
            return str(error)
        seen = [weight.grad.unique().tolist() for weight in order]
    return seen, [bucket.parameters for bucket in state._comm.plan().buckets]


def test_buckets_cut_anew_for_another_group_have_their_own_parameters_or_are_refused(ranks):
    for outcome in ranks.run(rebuilt_twice, world_size=2):
        if isinstance(outcome, str):
            assert "still lists their former parameters" in outcome
            continue
        seen, buckets = outcome
        assert seen == [[0.5], [1.5]] and sorted(sum(buckets, ())) == ["weights.0", "weights.1"]


def with_ignored_parameters(rank, world_size, front_end):
    """Parameters that DDP ignores may be on another device, and differ between ranks."""
    model = Gradients((600, 70))
    model.teacher = torch.nn.Linear(3 + rank, 1, bias=False, device="meta")
    model._modules = {"teacher": model._modules.pop("teacher"), **model._modules}  # its parameter is the first
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["teacher.weight"])
    ddp, _ = synchronized(front_end, model, "int8")
    return synchronize(ddp, [torch.full((600, 70), float(rank))])[0].unique().tolist()


@pytest.mark.parametrize("front_end", ["hook", "CommState"])
def test_parameters_that_ddp_ignores_are_left_alone(ranks, front_end):
    for seen in ranks.run(with_ignored_parameters, front_end, world_size=2):
        assert seen == pytest.approx([0.5], abs=0.01)


def broadcast(state, buffers):
    """A buffer hook, as users write them: asynchronous, on DDP's group."""
    return [dist.broadcast(buffer, 0, async_op=True).get_future() for buffer in buffers.values()]


def with_buffers_after_the_pass(rank, world_size):
    """Parameters and buffers after steps of a DDP module whose hook broadcasts buffers behind each forward pass, as it
    comes and attached."""
    found = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Normalised())
        comm = fusedcomm.attach(ddp, "fp32", quiet=True) if is_ours else None
        ddp._register_buffer_comm_hook(None, broadcast)
        optimizer, generator = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.Generator().manual_seed(rank)
        for _ in range(10):
            optimizer.zero_grad()
            ddp(torch.randn(8, 10, generator=generator)).square().mean().backward()
            optimizer.step()
        found.append([each.clone() for each in ddp.state_dict().values()])
        if comm is not None:
            comm.detach()
    return found


def test_buffers_that_a_hook_broadcasts_behind_the_forward_pass_are_ddps(ranks):
    for plain, ours in ranks.run(with_buffers_after_the_pass, world_size=2):
        assert all(map(torch.equal, plain, ours))


# --- frozen modules -------------------------------------------------------------------------------------------------


def frozen_and_back(rank, world_size, frozen):
    """Gradual unfreezing: a parameter is frozen before attaching and trained afterwards."""
    ddp = DistributedDataParallel(Gradients((600, 70), (64,)), find_unused_parameters=True)
    ddp.module.weights[frozen].requires_grad_(False)
    comm = fusedcomm.attach(ddp, Config("int4", wires={"weights.0": "bf16"} if frozen else {}, feedback=Feedback()))
    ddp.module.weights[frozen].requires_grad_(True)
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for shape in ((600, 70), (64,))]
    synchronize(ddp, gradients, steps=2)
    names = [bucket.parameters for bucket in comm.plan().buckets]
    state = comm.state_dict()
    comm.load_state_dict(state)
    return names, sorted(state["residuals"]), comm.plan().exempt


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_parameter_frozen_before_attaching_keeps_its_name_and_its_wire(ranks, frozen):
    for names, residuals, exempt in ranks.run(frozen_and_back, frozen, world_size=2):
        assert sorted(name for bucket in names for name in bucket) == ["weights.0", "weights.1"]
        assert residuals == ["weights.0"]  # weights.1 is "1d", and so exact
        assert exempt == ("weights.1",)


def all_frozen(rank, world_size, kwargs):
    gradients = [integers(rank, shape) for shape in ((80, 64), (7,))]
    ddp = DistributedDataParallel(Gradients((80, 64), (7,)))
    ddp.requires_grad_(False)
    comm = fusedcomm.attach(ddp, **kwargs, quiet=True)
    without = comm.plan()
    ddp(gradients)
    ddp.requires_grad_(True)
    thawed = comm.plan()
    means = synchronize(ddp, gradients, steps=2)
    ddp.requires_grad_(False)
    return without, thawed, means, comm.plan()


@pytest.mark.parametrize(
    "kwargs",
    [{"config": "fp32"}, {"config": Config("int8", wires={"weights.*": "fp32"})}, {"config": "auto"}],
    ids=str,
)
def test_of_a_frozen_module_there_is_a_plan_without_buckets_and_training_begins_when_it_is_thawed(ranks, kwargs):
    says = "no parameter requires gradients: nothing is sent until one does"
    for without, thawed, means, after in ranks.run(all_frozen, kwargs, world_size=2):
        assert without.buckets == () and without.sent_nbytes == 0 and without.frozen
        assert says in str(without) and "each rank sends" not in str(without)
        assert [row.parameters for row in thawed.buckets] == [("weights.1", "weights.0")] and not thawed.frozen
        assert says not in str(thawed) and "weights.1 … weights.0 (2)" in str(thawed)
        assert all(torch.equal(mean, mean_of_integers(2, mean.shape)) for mean in means)
        assert says in str(after)
