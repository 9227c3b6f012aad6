"""DDP's contract with a communication hook, one test for each clause."""

import copy
import inspect
import io
import time
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from models import (
    SMALL_BUCKETS,
    Gradients,
    Mlp,
    Sparse,
    by_kind,
    constant,
    error_of,
    refusal,
    synchronize,
    synchronized,
)
from ranks import GROUP_TIMEOUT_S, Ranks
from torch.distributed.algorithms.join import Join
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


def registrations(rank, world_size):
    attached, registered, builtin = (DistributedDataParallel(Mlp()) for _ in range(3))
    fusedcomm.attach(attached)
    registered.register_comm_hook(fusedcomm.CommState(), fusedcomm.comm_hook)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    register = attached.register_comm_hook
    return {
        "logged name": attached._get_ddp_logging_data()["comm_hook"],
        "attach twice": refusal(fusedcomm.attach, attached),
        "register after attach": refusal(register, fusedcomm.CommState(), fusedcomm.comm_hook),
        "attach after register": refusal(fusedcomm.attach, registered),
        "attach after builtin": refusal(fusedcomm.attach, builtin),
    }


def test_one_hook_for_each_module(ranks):
    for errors in ranks.run(registrations, world_size=2):
        assert errors["logged name"] == "fusedcomm"
        assert "fusedcomm.attach already synchronizes the parameter" in errors["attach twice"]
        assert "can only be called once" in errors["register after attach"]
        assert "already has the communication hook comm_hook" in errors["attach after register"]
        assert "built-in communication hook" in errors["attach after builtin"]


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


def incompatible(rank, world_size):
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16)
    if torch.version.cuda and not torch.cuda.is_available():
        mixed = DistributedDataParallel(Mlp())  # the constructor would need a CUDA stream
        mixed.mixed_precision = precision
    else:
        mixed = DistributedDataParallel(Mlp(), mixed_precision=precision)
    model = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    moved = DistributedDataParallel(Mlp())
    moved.module.to("meta")
    split = DistributedDataParallel(Mlp())
    split.module.layers[0].to("meta")
    modules = (mixed, DistributedDataParallel(model), moved, split)
    return [error_of(RuntimeError, fusedcomm.attach, ddp) for ddp in modules]


def test_options_and_devices_that_cannot_combine_are_refused_by_name(ranks):
    for errors in ranks.run(incompatible, world_size=2):
        words = ("mixed_precision=", "_apply_optimizer_in_backward", "are on meta", "several devices")
        for word, error in zip(words, errors, strict=True):
            assert word in error


SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
needs_skipping = pytest.mark.skipif(
    "skip_all_reduce_unused_params" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch has no skip_all_reduce_unused_params",
)


class FirstOrLast(torch.nn.Module):
    """Uses one of two parameters. Each parameter has its own bucket."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(5000) for _ in range(2))
        self.used = used

    def forward(self) -> torch.Tensor:
        return self.weights[self.used].sum()


def skipping(rank, world_size, used, registered):
    ddp = DistributedDataParallel(FirstOrLast(used), bucket_cap_mb=0.01, **SKIPS)
    with pytest.raises(RuntimeError) as error:
        if registered:
            ddp.register_comm_hook(fusedcomm.CommState(Config("int8", wires={"1d": "int8"})), fusedcomm.comm_hook)
        else:
            fusedcomm.attach(ddp)
        for _ in range(4):
            ddp().backward()
    return str(error.value)


@needs_skipping
@pytest.mark.sampled
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("registered", [False, True])
def test_buckets_that_ddp_leaves_out_are_refused_by_name(ranks, used, registered):
    """Without the last bucket no step would end. Without the first bucket no step would begin."""
    for said in ranks.run(skipping, used, registered, world_size=2):
        assert "skip_all_reduce_unused_params=True" in said and "without that option" in said


def refused_on_one_rank(rank, world_size, registered):
    config = Config("int8", wires={"weights.7": "fp32"} if rank == 1 else {})
    with pytest.raises((ValueError, RuntimeError)) as error:
        ddp, _ = synchronized("CommState" if registered else "hook", Gradients((50,)), config)
        synchronize(ddp, [torch.ones(50)])
    return str(error.value)


@pytest.mark.parametrize("registered", [False, True])
def test_what_one_rank_refuses_all_hear_at_once(ranks, registered):
    began = time.monotonic()
    for said in ranks.run(refused_on_one_rank, registered, world_size=3):
        assert "'weights.7' matches none" in said
    assert time.monotonic() - began < GROUP_TIMEOUT_S / 2


def test_auto_is_refused_where_ddps_own_all_reduce_has_no_sparse_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Embedding(5, 3, sparse=True))
    ddp = types.SimpleNamespace(module=model, parameters_to_ignore=set())
    refuse_sparse(ddp, torch.device("cpu"))
    with pytest.raises(ValueError, match="'1' has: name a wire, config='bf16'"):
        refuse_sparse(ddp, torch.device("cuda"))
    ddp.parameters_to_ignore.add("1.weight")
    refuse_sparse(ddp, torch.device("cuda"))


def copies(rank, world_size):
    ddp = DistributedDataParallel(Gradients((5000,)))
    fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}))
    buffer = io.BytesIO()
    torch.save(ddp, buffer)
    buffer.seek(0)
    results = []
    for other in (copy.deepcopy(ddp), torch.load(buffer, weights_only=False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gradient = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
            (exact,) = synchronize(other, [gradient], steps=2)
        messages = [str(w.message) for w in caught if "copy of one with fusedcomm" in str(w.message)]
        comm = fusedcomm.attach(other, Config("int8", wires={"1d": "int8"}))
        (lossy,) = synchronize(other, [gradient])
        results.append((len(messages), exact, torch.equal(exact, lossy), comm.stats().buckets))
    # The original is still attached.
    synchronize(ddp, [gradient])
    return results


def test_copies_lose_the_hook_say_so_once_and_can_be_attached(ranks):
    gradients = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for results in ranks.run(copies, world_size=2):
        for num_warnings, exact, is_equal, num_buckets in results:
            assert num_warnings == 1
            assert torch.equal(exact, gradients[0] * 0.5 + gradients[1] * 0.5)
            assert not is_equal and num_buckets == 1


def python_reducer(rank, world_size):
    state = fusedcomm.CommState()
    parameter = torch.nn.Parameter(torch.ones(3))
    called = error_of(RuntimeError, fusedcomm.comm_hook, state, (torch.ones(3), parameter))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return called, error_of(RuntimeError, fusedcomm.attach, DistributedDataParallel(Mlp()))


def test_compiled_autograds_python_reducer_is_refused_loudly(ranks):
    for called, attached in ranks.run(python_reducer, world_size=2):
        assert "python_reducer" in called and "tuple" in called
        assert "python_reducer" in attached


# --- the result -----------------------------------------------------------------------------------------------------


def aliasing(rank, world_size, wire, views):
    """With views every gradient stays in its bucket's memory. Sizes are whole blocks, so that int8 is exact, too."""
    ddp = DistributedDataParallel(Gradients((5120,), (3072,)), gradient_as_bucket_view=views)
    fusedcomm.attach(ddp, Config(wire, wires={"1d": wire}))
    pointers = []
    for _ in range(4):
        ddp([torch.full((5120,), 2.0 * rank), torch.full((3072,), 4.0 * rank)]).backward()
        a, b = ddp.module.weights[0].grad, ddp.module.weights[1].grad
        pointers.append((a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()))
        values = (a.unique().tolist(), b.unique().tolist())
        ddp.zero_grad(set_to_none=not views)
    same_bucket = all(a == b for a, b in pointers[2:])
    return values, same_bucket


@pytest.mark.sampled(by=by_kind)
@pytest.mark.parametrize("wire", fusedcomm.WIRES)
def test_the_result_is_the_mean_in_the_buckets_own_memory(ranks, wire):
    for values, same_bucket in ranks.run(aliasing, wire, True, world_size=2):
        assert values == ([constant(1.0, wire)], [constant(2.0, wire)]) and same_bucket
    for values, _ in ranks.run(aliasing, wire, False, world_size=2):
        assert values == ([constant(1.0, wire)], [constant(2.0, wire)])


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


def moved_to_another_group(rank, world_size, through):
    """_update_process_group to the first two ranks. Returns the mean before and after, and the plan's world size."""
    subgroup, config = dist.new_group([0, 1]), Config("int8", wires={"1d": "int8"})
    ddp, comm = synchronized("CommState" if through == "CommState" else "hook", Gradients((6000,)), config)
    gradient = [torch.full((6000,), float(rank))]
    before = synchronize(ddp, gradient)[0].unique().tolist()
    if through == "a detached handle":
        comm.detach()
    ddp._update_process_group(subgroup)
    if rank > 1:
        if through == "attach":
            comm.detach()
        return before, None, None
    if through == "CommState":
        comm.process_group = subgroup
    after = synchronize(ddp, gradient, steps=3)[0].unique().tolist()
    return before, after, comm.plan().world_size if through == "attach" else None


@pytest.mark.parametrize("through", ["attach", "CommState", "a detached handle"])
def test_an_updated_process_group_is_followed(ranks, through):
    for rank, (before, after, world_size) in enumerate(ranks.run(moved_to_another_group, through)):
        assert before == [1.5] and after == ([0.5] if rank < 2 else None)
        assert world_size == (2 if rank < 2 and through == "attach" else None)


# --- contents -------------------------------------------------------------------------------------------------------


def strided(rank, world_size, wire):
    """Gradients of a channels_last and a complex parameter. The values of their elements tell their places.

    Returns (whether each gradient is right, for both; the number of buckets so far).
    """
    conv = torch.nn.Parameter(torch.zeros(6, 5, 4, 3).to(memory_format=torch.channels_last))
    complex_ = torch.nn.Parameter(torch.zeros(20, 9, dtype=torch.complex64))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.complex = conv, complex_

        def forward(self, a, b):
            return (self.conv * a).sum() + (self.complex * b).real.sum()

    ddp = DistributedDataParallel(Model())
    comm = fusedcomm.attach(ddp, Config(wire, sum="auto" if wire == "fp32" else "two-shot"))
    a = torch.arange(360.0).reshape(6, 5, 4, 3) % 64
    b = torch.complex(torch.arange(180.0) % 32, -(torch.arange(180.0) % 16)).reshape(20, 9)
    for _ in range(3):
        ddp.zero_grad()
        ddp(a * (1 + 2 * rank), b * (1 + 2 * rank)).backward()
    # The gradient of Re(z·w) with respect to z is conj(w).
    return torch.equal(conv.grad, 2 * a), torch.equal(complex_.grad, 2 * b.conj()), comm.stats().buckets


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_channels_last_and_complex_gradients_keep_their_order(ranks, wire):
    for on_rank in ranks.run(strided, wire, world_size=2):
        assert on_rank[:2] == (True, True) and on_rank[2] >= 3


def sparse_gradients(rank, world_size):
    ddp = DistributedDataParallel(Sparse())
    fusedcomm.attach(ddp, "int8")
    messages = []
    for _ in range(3):
        ddp.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.full((1, 10), 0.1 * (rank + 1))
            ddp(x).sum().backward()
        messages += [str(w.message) for w in caught if "is sparse" in str(w.message)]
    gradient = ddp.module.embedding.weight.grad
    return gradient.is_sparse, gradient.to_dense(), ddp.module.head.weight.detach().clone(), messages


def test_sparse_gradients_pass_exactly_with_one_warning():
    fresh = Ranks(2)  # torch gives the warning once in a process
    results = fresh.run(sparse_gradients)
    fresh.close()
    for is_sparse, dense, head, messages in results:
        assert is_sparse
        # Rank r looks up row r + 1 in all three places; its gradient is the head's column sums, halved by the mean.
        expected = torch.zeros(40, 16)
        expected[1] = expected[2] = head.sum(0) / 2
        assert torch.allclose(dense, expected, rtol=0, atol=1e-6)
        assert len(messages) == 1 and "summed exactly" in messages[0]


def joined(rank, world_size, wire):
    """Rank 0 has two batches, rank 1 has five. Rank 0 then takes part with buckets of zeros at new addresses."""
    ddp = DistributedDataParallel(Gradients((5120,), (64, 40)), **SMALL_BUCKETS)
    fusedcomm.attach(ddp, Config(wire, wires={"1d": wire}))
    seen = []
    with Join([ddp]):
        for _ in range(2 + 3 * rank):
            values = synchronize(ddp, [torch.full((5120,), 4.0), torch.full((64, 40), 8.0)])
            seen.append([value.unique().tolist() for value in values])
    return seen


@pytest.mark.sampled(by=by_kind)
@pytest.mark.parametrize("wire", fusedcomm.WIRES)
def test_ranks_that_ran_out_under_join_count_as_zeros(ranks, wire):
    # The hook divides by the group's size, as Join does with divide_by_initial_world_size=True.
    outcome = ranks.run(joined, wire, world_size=2)
    both, one = [[[constant(4.0, wire)], [constant(8.0, wire)]], [[constant(2.0, wire)], [constant(4.0, wire)]]]
    assert outcome[0] == [both] * 2
    assert outcome[1] == [both] * 2 + [one] * 3


def frozen_after_wrapping(rank, world_size):
    """The reducer keeps a parameter that was frozen after wrapping. Its bucket has more elements than the module's
    trainable parameters."""
    ddp = DistributedDataParallel(Gradients((600, 700), (64,)), find_unused_parameters=True)
    ddp.module.weights[0].requires_grad_(False)
    fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}))
    ddp([torch.ones(600, 700), torch.full((64,), float(rank))]).backward()
    return ddp.module.weights[1].grad.unique().tolist()


def test_a_parameter_frozen_after_wrapping_still_travels(ranks):
    for seen in ranks.run(frozen_after_wrapping, world_size=2):
        assert seen == pytest.approx([0.5], abs=0.01)


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


def rebuilt_twice(rank, world_size):
    """torch keeps the parameter lists of buckets that it has built before."""
    shapes = ((2000,), (3000,))
    subgroup = dist.new_group([0, 1])
    ddp = DistributedDataParallel(Gradients(*shapes), bucket_cap_mb=0.008)
    comm = fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}))
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
    return seen, [bucket.parameters for bucket in comm.plan().buckets]


def test_buckets_cut_anew_for_another_group_have_their_own_parameters_or_are_refused(ranks):
    for outcome in ranks.run(rebuilt_twice, world_size=2):
        if isinstance(outcome, str):
            assert "still lists their former parameters" in outcome
            continue
        seen, buckets = outcome
        assert seen == [[0.5], [1.5]] and sorted(sum(buckets, ())) == ["weights.0", "weights.1"]


def with_ignored_parameters(rank, world_size, registered):
    """Parameters that DDP ignores may be on another device, and differ between ranks."""
    model = Gradients((600, 70))
    model.teacher = torch.nn.Linear(3 + rank, 1, bias=False, device="meta")
    model._modules = {"teacher": model._modules.pop("teacher"), **model._modules}  # its parameter is the first
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["teacher.weight"])
    ddp, _ = synchronized("CommState" if registered else "hook", model, "int8")
    return synchronize(ddp, [torch.full((600, 70), float(rank))])[0].unique().tolist()


@pytest.mark.parametrize("registered", [False, True])
def test_parameters_that_ddp_ignores_are_left_alone(ranks, registered):
    for seen in ranks.run(with_ignored_parameters, registered, world_size=2):
        assert seen == pytest.approx([0.5], abs=0.01)
