"""Error feedback and stochastic rounding from end to end: real ranks over gloo, through everything that DDP does to
buckets, checkpoints, and other numbers of ranks."""

import warnings

import pytest
import torch
from models import Gradients, synchronise
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import residual_name

SHAPE = (20011,)


def gradient(rank, step, shape=SHAPE):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator) * (rank + 1)


def attach_to(model, wire="int4", ddp_kwargs=None, **kwargs):
    ddp = DistributedDataParallel(model, **(ddp_kwargs or {}))
    return ddp, fusedcomm.attach(ddp, wire=wire, exempt=(), quiet=True, **kwargs)


# ---- the bits


def bits(rank, world_size, num_steps, wire, kwargs):
    ddp, _ = attach_to(Gradients(SHAPE), wire, **kwargs)
    return [synchronise(ddp, [gradient(rank, step)])[0] for step in range(num_steps)]


@pytest.mark.parametrize(
    ("wire", "kwargs", "hosts"),
    [
        ("int8", {"error_feedback": True, "local_wire": "fp32"}, [[0, 1], [2, 3]]),
        ("int4", {"error_feedback": "int8", "rotate": True, "rounding": "stochastic"}, [[0, 2], [1, 3]]),
        ("bf16", {"error_feedback": "bf16", "rounding": "stochastic", "local_wire": "fp16"}, [[3, 1], [0, 2]]),
    ],
    ids=str,
)
def test_sums_on_two_levels_give_the_bits_of_simulate(ranks, wire, kwargs, hosts):
    outcome = ranks.run(bits, 3, wire, {**kwargs, "hosts": hosts, "chunk_nbytes": 8192})
    residuals = fusedcomm.Residuals(residual_name(kwargs["error_feedback"]))
    settings = {key: value for key, value in kwargs.items() if key in ("rotate", "rounding", "local_wire")}
    for step in range(3):
        gradients = [gradient(rank, step) for rank in range(4)]
        expected = fusedcomm.simulate(
            gradients, wire, sum="two-shot", hosts=hosts, step=step, residuals=residuals, **settings
        )
        for on_rank in outcome:
            assert torch.equal(on_rank[step], expected), step


@pytest.mark.parametrize(("world_size", "sum"), [(2, "one-shot"), (3, "one-shot"), (2, "two-shot"), (3, "two-shot")])
@pytest.mark.parametrize(
    ("wire", "kwargs"),
    [
        ("bf16", {"error_feedback": True}),
        ("fp16", {"error_feedback": "bf16", "rounding": "stochastic"}),
        ("int8", {"error_feedback": "int8"}),
        ("fp8", {"rounding": "stochastic", "seed": 2**63 + 5}),
        ("fp8_e5m2", {"error_feedback": True, "rounding": "stochastic"}),
        ("int4", {"error_feedback": True, "rotate": True}),
        ("int4", {"error_feedback": "int8", "rotate": True, "rounding": "stochastic"}),
    ],
    ids=str,
)
def test_every_step_gives_the_bits_of_simulate(ranks, world_size, sum, wire, kwargs):
    outcome = ranks.run(bits, 4, wire, {**kwargs, "sum": sum, "chunk_nbytes": 4096}, world_size=world_size)
    feedback = residual_name(kwargs.get("error_feedback"))
    residuals = None if feedback is None else fusedcomm.Residuals(feedback)
    settings = {key: value for key, value in kwargs.items() if key in ("rotate", "rounding", "seed")}
    for step in range(4):
        gradients = [gradient(rank, step) for rank in range(world_size)]
        expected = fusedcomm.simulate(gradients, wire, sum=sum, step=step, residuals=residuals, **settings)
        for on_rank in outcome:
            assert torch.equal(on_rank[step], expected), step


def bits_by_chunks(rank, world_size, chunk_nbytes, codec_threads):
    ddp, _ = attach_to(
        Gradients(SHAPE),
        error_feedback=True,
        rounding="stochastic",
        chunk_nbytes=chunk_nbytes,
        codec_threads=codec_threads,
    )
    return [synchronise(ddp, [gradient(rank, step)])[0] for step in range(3)]


def test_bits_do_not_depend_on_chunks_or_threads(ranks):
    outcomes = [ranks.run(bits_by_chunks, *how, world_size=3)[0] for how in ((4096, 1), (1 << 20, 1), (10000, 3))]
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


# ---- nothing is lost

SHAPES = ((64, 33), (128,), (40, 50), (3, 1000), (7,))
SMALL_BUCKETS = {"bucket_cap_mb": 0.012}


def what_was_delivered(rank, world_size, scenario, kwargs):
    """By parameter: Σ results + what is left out, and Σ means of what each rank had; on rank 0."""
    ddp, comm = attach_to(Gradients(*SHAPES), ddp_kwargs=SMALL_BUCKETS, **kwargs)
    delivered = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    handed_in = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def step(number, contribute=True):
        ddp.zero_grad(set_to_none=True)
        gradients = [gradient(rank, 10 * number + index, shape) for index, shape in enumerate(SHAPES)]
        if scenario == "no_sync" and number % 2:
            with ddp.no_sync():
                ddp(gradients).backward()
            for total, g in zip(handed_in, gradients, strict=True):
                total += g
        ddp(gradients).backward()
        for total, g in zip(handed_in, gradients, strict=True):
            total += g
        for total, weight in zip(delivered, ddp.module.weights, strict=True):
            total += weight.grad

    num_steps = 6
    if scenario == "join":
        # Ranks that are done take part with zeros, and send what they have left out.
        num_steps = 6 if rank == 0 else 3
        with Join([ddp]):
            for number in range(num_steps):
                step(number)
    else:
        for number in range(num_steps):
            step(number)
    state = comm.state_dict(consolidated=True)
    buckets = len(comm.plan().buckets)
    for index, total in enumerate(delivered):
        residual = state["residuals"].get(f"weights.{index}")
        if residual is not None:
            total += residual.view(SHAPES[index])
    return delivered, handed_in, buckets, comm.stats().nonfinite


@pytest.mark.parametrize("scenario", ["plain", "no_sync", "join"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"error_feedback": True},
        {"error_feedback": True, "rotate": True, "rounding": "stochastic"},
        {"error_feedback": True, "wire_for": {"weights.2": "int8", "weights.3": "bf16"}},
    ],
    ids=str,
)
def test_what_was_not_delivered_is_in_the_residuals(ranks, scenario, kwargs):
    """Through the rebuilding of buckets, which moves residuals from bucket to bucket."""
    world_size = 3
    outcome = ranks.run(what_was_delivered, scenario, kwargs, world_size=world_size)
    assert outcome[0][2] > 1
    for index in range(len(SHAPES)):
        wanted = sum(on_rank[1][index] for on_rank in outcome) / world_size
        delivered = outcome[0][0][index]  # rank 0 takes part to the end
        assert torch.allclose(delivered, wanted, rtol=0, atol=2e-5 * wanted.abs().max().item() + 1e-5), index


# ---- what is not finite


def after_an_overflow(rank, world_size, error_feedback):
    ddp, comm = attach_to(Gradients(SHAPE), error_feedback=error_feedback)
    broken = gradient(rank, 0)
    if rank == 1:
        broken[777] = torch.inf
        broken[7777] = torch.nan
    (first,) = synchronise(ddp, [broken])
    (second,) = synchronise(ddp, [gradient(rank, 1)])
    return bool(first.isfinite().all()), bool(second.isfinite().all()), comm.state_dict()["residuals"]["weights.0"]


@pytest.mark.parametrize("error_feedback", ["fp32", "bf16", "int8"])
def test_an_overflow_does_not_live_on(ranks, error_feedback):
    for first_finite, second_finite, residual in ranks.run(after_an_overflow, error_feedback, world_size=2):
        assert not first_finite and second_finite and residual.isfinite().all()


# ---- checkpoints


def saved_after(rank, world_size, num_steps, consolidated, kwargs):
    ddp, comm = attach_to(Gradients(SHAPE), **kwargs)
    for step in range(num_steps):
        synchronise(ddp, [gradient(rank, step)])
    state = comm.state_dict(consolidated)
    return state, [synchronise(ddp, [gradient(rank, step)])[0] for step in (num_steps, num_steps + 1)]


def resumed(rank, world_size, states, num_steps, kwargs):
    """What is delivered in two steps after loading, and what is left out then."""
    ddp, comm = attach_to(Gradients(SHAPE), **kwargs)
    comm.load_state_dict(states[rank])
    seen = [synchronise(ddp, [gradient(rank, step)])[0].double() for step in (num_steps, num_steps + 1)]
    return sum(seen), comm.state_dict(consolidated=True)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_loaded_state_is_neither_lost_nor_counts_twice(ranks, rounding):
    kwargs = {"error_feedback": True, "rounding": rounding}
    states = [state for state, _ in ranks.run(saved_after, 3, False, kwargs, world_size=2)]
    assert [(s["rank"], s["world_size"], s["step"]) for s in states] == [(0, 2, 3), (1, 2, 3)]
    left_out = [state["residuals"]["weights.0"] for state in states]
    assert not torch.equal(*left_out)
    wanted = sum(left_out).double() / 2
    wanted += sum(gradient(rank, step).double() for rank in range(2) for step in (3, 4)) / 2
    for delivered, state in ranks.run(resumed, states, 3, kwargs, world_size=2):
        assert torch.allclose(delivered + state["residuals"]["weights.0"], wanted, rtol=0, atol=1e-4)
        assert state["step"] == 5


def test_a_consolidated_state_is_the_mean_and_fits_any_number_of_ranks(ranks):
    kwargs = {"error_feedback": True}
    outcome = ranks.run(saved_after, 3, True, kwargs, world_size=3)
    own = ranks.run(saved_after, 3, False, kwargs, world_size=3)
    consolidated = [state for state, _ in outcome]
    mean = sum(state["residuals"]["weights.0"] for state, _ in own) / 3
    for state in consolidated:
        assert (state["rank"], state["world_size"]) == (None, None)
        assert torch.allclose(state["residuals"]["weights.0"], mean, rtol=1e-5, atol=1e-6)
    # A step on two ranks, by hand: what is delivered and what remains is the mean gradient and what was loaded.
    for delivered, remaining in ranks.run(delivered_and_remaining, consolidated[0], world_size=2):
        wanted = (gradient(0, 9) + gradient(1, 9)) / 2 + mean
        assert torch.allclose(delivered + remaining, wanted, rtol=0, atol=1e-4)


def delivered_and_remaining(rank, world_size, state):
    ddp, comm = attach_to(Gradients(SHAPE), error_feedback=True)
    comm.load_state_dict(state)
    (delivered,) = synchronise(ddp, [gradient(rank, 9)])
    return delivered, comm.state_dict(consolidated=True)["residuals"]["weights.0"]


def loads(rank, world_size, change, kwargs):
    """The error or warning that loading a changed state gives, and what is left out afterwards."""
    import warnings

    ddp, comm = attach_to(Gradients(SHAPE), error_feedback=True)
    synchronise(ddp, [gradient(rank, 0)])
    state = {**comm.state_dict(), **change}
    for key in [key for key, value in change.items() if value == "missing"]:
        del state[key]
    comm.detach()
    comm = fusedcomm.attach(ddp, wire="int4", exempt=(), quiet=True, **kwargs)
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
        ({"version": 1}, {"error_feedback": True}, ["state version 1", "reads 2"]),
        ({"residuals": "missing"}, {"error_feedback": True}, ["['residuals'] missing"]),
        ({}, {}, ["error_feedback='fp32'", "error_feedback=None", "attach with error_feedback"]),
        (
            {"residuals": {"weights.0": torch.zeros(5)}},
            {"error_feedback": True},
            ["'weights.0'", "5 elements", f"{SHAPE[0]}"],
        ),
        ({"residuals": {"bias": torch.zeros(5)}}, {"error_feedback": True}, ["'bias'", "does not have"]),
        ({"residuals": {"weights.0": torch.full(SHAPE, torch.nan)}}, {"error_feedback": True}, ["finite"]),
        ({"step": "x"}, {"error_feedback": True}, ["state['step']", "'x'", "whole number"]),
        ({"step": -5}, {"error_feedback": True}, ["state['step']", "-5"]),
        ({"nonfinite": {"weights.9": 3}}, {"error_feedback": True}, ["'weights.9'", "of this model"]),
    ],
    ids=str,
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(ranks, change, kwargs, words):
    for error, _, left_out in ranks.run(loads, change, kwargs, world_size=2):
        assert all(word in error for word in words), error
        assert left_out == []


def test_another_ranks_residuals_are_forgotten_with_a_warning(ranks):
    outcome = ranks.run(loads, {"rank": 1}, {"error_feedback": True}, world_size=2)
    error, messages, left_out = outcome[0]
    assert error == "" and left_out == [] and len(messages) == 1
    assert all(words in messages[0] for words in ("rank 1 of 2", "this is rank 0 of 2", "consolidated=True"))
    assert outcome[1] == ("", [], ["weights.0"])


def test_residuals_may_be_loaded_under_another_wire_or_format(ranks):
    for error, messages, left_out in ranks.run(loads, {}, {"error_feedback": "int8"}, world_size=2):
        assert (error, messages, left_out) == ("", [], ["weights.0"])


# ---- another group


def moved_to_a_smaller_group(rank, world_size):
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp, comm = attach_to(Gradients(SHAPE), error_feedback=True)
    synchronise(ddp, [gradient(rank, 0)])
    before = comm.state_dict()["residuals"]["weights.0"]
    if rank == 2:
        return None
    ddp._update_process_group(pairs[0])
    (delivered,) = synchronise(ddp, [gradient(rank, 1)])
    return before, delivered, comm.state_dict(consolidated=True)["residuals"]["weights.0"]


def test_residuals_follow_into_another_group_with_the_weight_they_had(ranks):
    """Of three ranks one leaves: what the others had left out of means of three is a mean of two's share of 2/3."""
    (before_0, delivered, remaining), (before_1, _, _), _ = ranks.run(moved_to_a_smaller_group, world_size=3)
    wanted = (gradient(0, 1) + gradient(1, 1)) / 2 + (before_0 + before_1) / 3
    assert torch.allclose(delivered + remaining, wanted, rtol=0, atol=1e-4)


def through_a_comm_state(rank, world_size, loaded):
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    state = fusedcomm.CommState(wire="int4", exempt=(), error_feedback=True)
    if loaded is not None:
        state.load_state_dict(loaded)
    ddp = DistributedDataParallel(Gradients(SHAPE))
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    (first,) = synchronise(ddp, [gradient(rank, 0)])
    before = state.state_dict(consolidated=True)
    own = state.state_dict()["residuals"]
    if rank == 2:
        return first, before, own, None, None
    ddp._update_process_group(pairs[0])
    state.process_group = pairs[0]
    (second,) = synchronise(ddp, [gradient(rank, 1)])
    return first, before, own, second, state.state_dict(consolidated=True)


def test_a_comm_state_saves_loads_and_moves(ranks):
    outcome = ranks.run(through_a_comm_state, None, world_size=3)
    first, before, own, second, after = outcome[0]
    (name,) = own
    wanted = sum(gradient(rank, 0) for rank in range(3)) / 3
    assert torch.allclose(first + before["residuals"][name], wanted, rtol=0, atol=1e-4)
    wanted = (gradient(0, 1) + gradient(1, 1)) / 2 + (own[name] + outcome[1][2][name]) / 3
    assert torch.allclose(second + after["residuals"][name], wanted, rtol=0, atol=1e-4)
    assert (before["step"], after["step"]) == (1, 2)
    first_again, again, *_ = ranks.run(through_a_comm_state, before, world_size=3)[0]
    wanted = sum(gradient(rank, 0) for rank in range(3)) / 3 + before["residuals"][name]
    assert torch.allclose(first_again + again["residuals"][name], wanted, rtol=0, atol=1e-4)


def moves_with_several_parameters(rank, world_size):
    """In the first pass one bucket has all parameters in the order of the model; later ones in that of gradients."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    state = fusedcomm.CommState(wire="int4", exempt=(), error_feedback=True)
    ddp = DistributedDataParallel(Gradients(*[(6000,)] * 4), bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    delivered = [torch.zeros(6000, dtype=torch.float64) for _ in range(4)]
    for step in range(3):
        gradients = [gradient(rank, 10 * step + index, (6000,)) for index in range(4)]
        delivered = [total + seen for total, seen in zip(delivered, synchronise(ddp, gradients), strict=True)]
    before = state.state_dict()["residuals"]
    if rank == 2:
        return delivered, None, before, None
    ddp._update_process_group(pairs[0])
    state.process_group = pairs[0]
    second = synchronise(ddp, [gradient(rank, 100 + index, (6000,)) for index in range(4)])
    return delivered, second, before, state.state_dict(consolidated=True)["residuals"]


def test_a_comm_states_residuals_stay_with_their_parameters_in_another_group(ranks):
    """What is delivered there and left out there is the mean there, and of each parameter what it had left out."""
    outcome = ranks.run(moves_with_several_parameters, world_size=3)
    names = sorted(outcome[0][2])
    assert len(names) == 4 and sorted(outcome[0][3]) == names
    # What has been left out so far tells whose name is whose.
    for index in range(4):
        sent = sum(gradient(rank, 10 * step + index, (6000,)).double() for rank in range(3) for step in range(3)) / 3
        left_out = sent - outcome[0][0][index]
        (name,) = [n for n in names if torch.allclose(sum(o[2][n] for o in outcome) / 3, left_out.float(), atol=1e-4)]
        wanted = sum(gradient(rank, 100 + index, (6000,)) + 2 / 3 * outcome[rank][2][name] for rank in range(2)) / 2
        assert torch.allclose(outcome[0][1][index] + outcome[0][3][name], wanted, rtol=0, atol=1e-4)


def attached_and_loaded_by_a_comm_state(rank, world_size):
    ddp, comm = attach_to(Gradients(SHAPE), error_feedback=True)
    synchronise(ddp, [gradient(rank, 0)])
    saved = comm.state_dict()
    state = fusedcomm.CommState(wire="int4", exempt=(), error_feedback=True)
    state.load_state_dict(saved)
    ddp = DistributedDataParallel(Gradients(SHAPE))
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            synchronise(ddp, [gradient(rank, step)])
    return [str(warning.message) for warning in caught if "fusedcomm" in str(warning.message)]


def test_residuals_that_no_parameter_takes_are_said_to_be_lost_once(ranks):
    for messages in ranks.run(attached_and_loaded_by_a_comm_state, world_size=2):
        assert len(messages) == 1 and "'weights.0'" in messages[0] and "module=model" in messages[0]


# ---- what users do around it


def under_autocast(rank, world_size):
    """Gradients as a GradScaler leaves them: what owners leave out of their means exceeds fp16's greatest."""
    ddp, comm = attach_to(Gradients(*SHAPES), ddp_kwargs=SMALL_BUCKETS, error_feedback=True, rotate=True)
    gradients = [65536 * gradient(rank, index, shape) for index, shape in enumerate(SHAPES)]
    delivered = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            seen = synchronise(ddp, gradients)
        delivered = [total + grad for total, grad in zip(delivered, seen, strict=True)]
    with torch.autocast("cpu", torch.float16):
        residuals = comm.state_dict(consolidated=True)["residuals"]
    zero = torch.zeros(())  # of what is summed exactly, nothing is left out
    left_out = [residuals.get(f"weights.{index}", zero).view(-1) for index in range(len(SHAPES))]
    return [total.view(-1) + values for total, values in zip(delivered, left_out, strict=True)]


def test_autocast_does_not_touch_residuals(ranks):
    for totals in ranks.run(under_autocast, world_size=2):
        for index, total in enumerate(totals):
            wanted = 3 * 65536 * sum(gradient(rank, index, SHAPES[index]).double().view(-1) for rank in range(2)) / 2
            assert torch.allclose(total, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def under_another_default_dtype(rank, world_size):
    torch.set_default_dtype(torch.bfloat16)
    try:
        ddp, comm = attach_to(Gradients(*SHAPES), ddp_kwargs=SMALL_BUCKETS, error_feedback=True, rotate=True)
        synchronise(ddp, [gradient(rank, 0, shape).float() for shape in SHAPES], steps=3)
        state = comm.state_dict()
        if rank == 1:  # one that has none takes part with zeros
            comm.load_state_dict({**state, "residuals": {}})
        consolidated = comm.state_dict(consolidated=True)["residuals"]
        dtypes = {values.dtype for residuals in (state["residuals"], consolidated) for values in residuals.values()}
        return dtypes, state["residuals"], consolidated
    finally:
        torch.set_default_dtype(torch.float32)


def test_residuals_are_fp32_whatever_the_default_dtype(ranks):
    outcome = ranks.run(under_another_default_dtype, world_size=2)
    for dtypes, _, consolidated in outcome:
        assert dtypes == {torch.float32}
        assert consolidated.keys() == outcome[0][1].keys()
        assert all(torch.equal(values, outcome[0][1][name] / 2) for name, values in consolidated.items())


def saved_often(rank, world_size):
    """What the store keeps of three consolidated states."""
    ddp, comm = attach_to(Gradients(SHAPE), error_feedback=True)
    synchronise(ddp, [gradient(rank, 0)])
    for _ in range(3):
        comm.state_dict(consolidated=True)
    store = comm._session._store
    torch.distributed.barrier()
    return [store.check([f"residuals/{call}/record/{rank}"]) for call in (1, 2, 3)]


def test_the_store_does_not_fill_up_with_every_checkpoint(ranks):
    assert ranks.run(saved_often, world_size=2) == [[False, False, True]] * 2
