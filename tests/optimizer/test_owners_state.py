"""The state of a ShardedOptimizer: any number of ranks loads it, plain optimizers too, and training goes on with it."""

import itertools

import on_streams
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Conv, reducer_of
from owners import (
    BUCKET_MIB,
    FP32,
    Net,
    Scaled,
    flat,
    made,
    one_step,
    plain_optimizers,
    sharded,
    unequal,
    whole,
)
from sampling import few, for_all_lists
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

# ---- through torch.distributed.checkpoint


def save(model, optimizer, folder):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model, optimizer, folder):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    both = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])


def leg(rank, world_size, kind, update, make, loaded, saved, first, last):
    """Trains steps [first, last) from a checkpoint. (state at the beginning, state at the end, parameters at both)."""
    model, reducer, optimizer = made(kind, make, update=update)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    if loaded is not None:
        load(model, optimizer, loaded)
    begun = whole(optimizer.state_dict()), flat(model)
    for step in range(first, last):
        one_step(model, optimizer, rank, step)
        scheduler.step()
    optimizer.zero_grad()
    if saved is not None:
        save(model, optimizer, saved)
    ended = whole(optimizer.state_dict()), flat(model)
    reducer.detach()
    return begun, ended


def bf16_scaled() -> Net:
    return Scaled().to(torch.bfloat16)


KINDS = {
    "adamw": ("adamw", "fp32", Net),
    "int8": ("adamw", "int8", Net),
    "muon": ("muon", "bf16", Net),
    "bf16 parameters": ("two groups", "bf16", bf16_scaled),
    "sgd": ("sgd", "fp32", Net),
    "channels_last": ("adamw", "fp32", Conv),
    "without dimensions": ("adamw", "fp32", Scaled),
    **{kind.__name__: (kind, "fp32", Net) for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop)},
}


@pytest.mark.check
@pytest.mark.parametrize("name", few(KINDS, "int8", "muon", "bf16 parameters"))
def test_two_ranks_then_three_then_two_have_the_state_that_was_saved(ranks, tmp_path, name):
    kind, update, make = KINDS[name]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first = ranks.run(leg, kind, update, make, None, a, 0, 3, world_size=2)
    second = ranks.run(leg, kind, update, make, a, b, 3, 5, world_size=3)
    third = ranks.run(leg, kind, update, make, b, None, 5, 6, world_size=2)
    for before, after in ((first, second), (second, third)):
        saved, parameters = before[0][1]
        assert any("master" in values for values in saved["state"].values()) == (update != "fp32")
        for (loaded, loaded_parameters), _ in after:
            assert unequal(loaded, saved) == []
            assert torch.equal(loaded_parameters, parameters)
    for _, (_, parameters) in third:
        assert torch.equal(parameters, third[0][1][1]) and not torch.equal(parameters, second[0][1][1])


# ---- whatever happens between two steps


class Run:
    """A model, and the owners that step it; of `model` if it is given."""

    def __init__(self, name, model=None):
        self.name, (self.kind, update, make) = name, KINDS[name]
        if model is None:
            self.model, self.reducer, self.optimizer = made(self.kind, make, update=update)
        else:
            self.model, self.reducer = model, reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
            self.optimizer = sharded(model, self.reducer, self.kind, update=update)

    def both(self):
        return self.model, self.optimizer

    def step(self, number):
        one_step(*self.both(), dist.get_rank(), number)


# What may happen between two steps. Each returns the Run that goes on.


def into_new_ones(run, folder):
    other = Run(run.name)
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(whole(run.optimizer.state_dict()))
    return other


def by_torchs_functions(run, folder):
    """These load the model after the optimizer."""
    of_model, of_optimizer = get_state_dict(*run.both())
    other = Run(run.name)
    other.step(99)
    set_state_dict(*other.both(), model_state_dict=of_model, optim_state_dict=of_optimizer)
    return other


def by_a_checkpoint(run, folder):
    save(*run.both(), folder)
    other = Run(run.name)
    load(*other.both(), folder)
    return other


def with_the_same_model(run, folder):
    state = whole(run.optimizer.state_dict())
    run.reducer.detach()
    other = Run(run.name, run.model)
    other.optimizer.load_state_dict(state)
    return other


def through_a_plain_optimizer(run, folder, by_torch=False):
    plain = KINDS[run.name][2]()
    plain.load_state_dict(run.model.state_dict())
    (optimizer,) = plain_optimizers(plain, run.kind)
    if by_torch:
        options = StateDictOptions(full_state_dict=True)
        full = get_optimizer_state_dict(*run.both(), options=options)
        set_optimizer_state_dict(plain, optimizer, full, options=options)
    else:
        optimizer.load_state_dict(whole(run.optimizer.state_dict()))
    run.reducer.detach()
    reducer = reducer_of(plain, FP32, bucket_mib=BUCKET_MIB)
    one_step(plain, optimizer, dist.get_rank(), 50)
    reducer.detach()
    other = Run(run.name)
    other.model.load_state_dict(plain.state_dict())
    other.optimizer.load_state_dict(optimizer.state_dict())
    return other


def through_one_by_torchs_functions(run, folder):
    return through_a_plain_optimizer(run, folder, by_torch=True)


RELOADS = [into_new_ones, by_torchs_functions, by_a_checkpoint, with_the_same_model]
PLAIN_STEPS = [through_a_plain_optimizer, through_one_by_torchs_functions]


def beside_an_interrupted_run(rank, world_size, name, actions, folder, device="cpu"):
    """What differs between a run that is interrupted and one that is not."""
    with torch.device(device):
        ends = []
        for is_interrupted in (False, True):
            run = Run(name)
            for number, action in enumerate(actions):
                if action == "write":
                    with torch.no_grad():
                        for p in run.model.parameters():
                            p.clamp_(-0.05, 0.05)
                elif action == "step" or (action in PLAIN_STEPS and not is_interrupted):
                    run.step(50 if action in PLAIN_STEPS else number)
                elif is_interrupted:
                    interrupted, run = run, action(run, f"{folder}-{number}")
                    interrupted.reducer.detach()
            ends.append((whole(run.optimizer.state_dict()), flat(run.model).cpu()))
            run.reducer.detach()
        return unequal(ends[0][0], ends[1][0]) + ["parameters"] * (not torch.equal(ends[0][1], ends[1][1]))


@pytest.mark.check
@pytest.mark.parametrize("num_examples", few([3, 40], 3))
@pytest.mark.parametrize("name", few(KINDS, "channels_last", "int8", "bf16 parameters"))
def test_an_interrupted_run_has_the_bits_of_one_that_went_on(ranks, tmp_path, name, num_examples):
    actions = ["step", "write", *RELOADS, *(PLAIN_STEPS if KINDS[name][1] == "fp32" else [])]
    numbers = itertools.count()

    def law(drawn):
        folder = str(tmp_path / str(next(numbers)))
        for found in ranks.run(beside_an_interrupted_run, name, [*drawn, "step"], folder, world_size=2):
            assert found == []

    for_all_lists(actions, num_examples, law)


def test_it_has_them_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams):
    actions = ["step", "step", with_the_same_model, "step"]
    case = "without dimensions", actions, "", on_streams.DEVICE
    assert ranks_on_streams.run(beside_an_interrupted_run, *case) == [[], []]


def test_it_has_them_with_a_parameter_without_dimensions_and_through_a_plain_optimizer(ranks):
    actions = ["step", into_new_ones, "step", *PLAIN_STEPS, "step"]
    assert ranks.run(beside_an_interrupted_run, "without dimensions", actions, "", world_size=2) == [[], []]


def saved_at_first(rank, world_size, names):
    return {
        name: beside_an_interrupted_run(rank, world_size, name, [into_new_ones, "step", "step"], "") for name in names
    }


def test_a_state_from_before_the_first_step_is_what_the_optimizer_begins_with(ranks):
    names = ["NAdam", "ASGD", "Rprop", "sgd"]
    assert ranks.run(saved_at_first, names, world_size=2) == [{name: [] for name in names}] * 2


def loads_no_masters(rank, world_size):
    """What differs between an optimizer that has stepped and a new one, when both have loaded a plain optimizer's
    state, in bf16 and without fp32 copies, and have stepped then."""
    run = Run("bf16 parameters")
    for number in range(3):
        run.step(number)
    state, ends = whole(run.optimizer.state_dict()), []
    for values in state["state"].values():
        del values["master"], values["written"]
        values |= {key: value.bfloat16() for key, value in values.items() if key != "step"}
    other = Run(run.name)
    other.model.load_state_dict(run.model.state_dict())
    for each in (run, other):
        each.optimizer.load_state_dict(state)
        each.step(3)
        ends.append(whole(each.optimizer.state_dict()))
        each.reducer.detach()
    return unequal(*ends)


def test_without_fp32_copies_in_the_state_they_are_the_parameters(ranks):
    assert ranks.run(loads_no_masters, world_size=2) == [[], []]


# ---- whose state it is


def nbytes_of(states):
    """Bytes of optimizers' state, without owners' fp32 copies."""
    values = [value for state in states for key, value in state.items() if key not in ("master", "written")]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)


def shares(rank, world_size, kind):
    model, reducer, optimizer = made(kind)
    one_step(model, optimizer, rank, 0)
    plan = optimizer.plan()
    own = nbytes_of(state for inner in optimizer._owner.optimizers for state in inner.state.values())
    replicated = nbytes_of(whole(optimizer.state_dict())["state"].values())
    reducer.detach()
    return own, replicated, str(plan), plan.owners


@pytest.mark.parametrize("kind", few(["adamw", "sgd", "two groups", "muon"], "adamw", "muon"))
@pytest.mark.parametrize("world_size", few([2, 3, 4], 3))
def test_a_rank_has_its_share_of_the_state_and_the_plan_says_whose(ranks, kind, world_size):
    numels = {name: p.numel() for name, p in Net().named_parameters()}
    outcomes = ranks.run(shares, kind, world_size=world_size)
    assert sum(own for own, *_ in outcomes) == outcomes[0][1]
    for rank, (own, replicated, text, owners) in enumerate(outcomes):
        # Three blocks of one shape and matrices of other sizes cannot be shared out evenly among two or four.
        assert own == pytest.approx(replicated / world_size, rel=0.1 if kind != "muon" else 0.5)
        assert {name: sum(of_ranks) for name, of_ranks in owners.items()} == numels
        assert f"rank {rank} has" in text and f"{world_size} ranks" in text
        assert owners == outcomes[0][3]
