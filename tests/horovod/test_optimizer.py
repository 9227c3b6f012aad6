"""DistributedOptimizer steps exactly as one optimizer would with the reduced gradients of all ranks."""

import copy
import warnings

import pytest
import torch
from jobs import job, raised, values

import fusedcomm.horovod as hvd

NUM_STEPS = 4
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.125),
}


def model_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 8).round() / 8)
    return model


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(values(rank, (4, 3), torch.float64, salt=step)).square().mean()


def reference(make, size: int, num_steps: int = NUM_STEPS, factor=lambda size: 1 / size, passes: int = 1):
    """The model after steps with the ranks' gradients summed and multiplied by the factor."""
    model = model_of()
    optimizer = make(model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in range(size):
            for i in range(passes):
                (loss_of(model, rank, step * passes + i) * factor(size)).backward()
        optimizer.step()
    return model


def assert_close(model: torch.nn.Module, wanted: torch.nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, msg=lambda text, name=name: f"{name}: {text}")


def train(model, optimizer, rank, num_steps=NUM_STEPS, passes=1) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, rank, step * passes + i).backward()
        optimizer.step()


HOW = {
    "plain": ({}, lambda size: 1 / size),
    "sums": (dict(op=hvd.Sum), lambda size: 1.0),
    "predivided": (dict(gradient_predivide_factor=4.0), lambda size: 1 / size),
    "in 2 groups": (dict(groups=2), lambda size: 1 / size),
    "in 9 groups": (dict(groups=9), lambda size: 1 / size),
    "in groups, predivided": (dict(groups=2, gradient_predivide_factor=2.0), lambda size: 1 / size),
    "as fp16": (dict(compression=hvd.Compression.fp16), None),
    "as bf16": (dict(compression=hvd.Compression.bf16), None),
}


def check_steps(rank, size, how, name):
    options, factor = HOW[how]
    with job():
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[name](model.parameters()), named_parameters=model.named_parameters(), **options
        )
        assert isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ == name
        train(model, optimizer, rank)
        if factor is None:  # some digits fewer
            for mine, wanted in zip(model.parameters(), reference(OPTIMIZERS[name], size).parameters(), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0.05, atol=0.05)
        else:
            assert_close(model, reference(OPTIMIZERS[name], size, factor=factor))
        everyone = hvd.allgather(model[0].weight.detach().reshape(1, -1))
        assert torch.equal(everyone, everyone[:1].expand_as(everyone)), "the ranks differ"


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", HOW)
def test_it_steps_with_the_reduced_gradients(ranks, how, name, size):
    ranks.run(check_steps, how, name, world_size=size)


def check_lists(rank, size):
    with job():
        model = model_of()
        parameters = list(model.parameters())
        groups = [[parameters[3], parameters[0]], [parameters[1]]]
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](parameters), named_parameters=model.named_parameters(), groups=groups
        )
        train(model, optimizer, rank)
        assert_close(model, reference(OPTIMIZERS["SGD"], size))


def test_groups_can_be_lists_of_parameters(ranks):
    ranks.run(check_lists, world_size=2)


def check_passes(rank, size):
    with job():
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=3,
        )
        train(model, optimizer, rank, passes=3)
        assert_close(model, reference(OPTIMIZERS["SGD"], size, passes=3))
        optimizer.zero_grad()
        for i in range(3):
            loss_of(model, rank, i).backward()
        if size > 1:
            kind, said = raised(lambda: loss_of(model, rank, 3).backward())
            assert "backward_passes_per_step" in said, f"{kind}: {said}"
        optimizer.synchronize()
        # Fewer passes than announced are reduced by step().
        optimizer.set_backward_passes_per_step(2)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_several_passes_are_added_up(ranks, size):
    ranks.run(check_passes, world_size=size)


class Branches(torch.nn.Module):
    """Each rank uses another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        self.branches = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([3.0 + i, 1.0])) for i in range(3)])
        self.never = torch.nn.Parameter(torch.ones(2))

    def forward(self, which: int) -> torch.Tensor:
        return (self.shared * self.branches[which]).sum()


def check_branches(rank, size, groups):
    with job():
        model, wanted = Branches(), Branches()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters(), groups=groups
        )
        plain = torch.optim.SGD(wanted.parameters(), lr=0.5)
        for step in range(4):
            optimizer.zero_grad()
            model((rank + step) % 3).backward()
            optimizer.step()
            plain.zero_grad()
            for other in range(size):
                (wanted((other + step) % 3) / size).backward()
            plain.step()
            assert_close(model, wanted)
        assert torch.equal(model.never.grad, torch.zeros(2))


@pytest.mark.parametrize("groups", [None, 2])
def test_ranks_may_use_different_parameters(ranks, groups):
    ranks.run(check_branches, groups, world_size=3)


def check_sparse(rank, size, as_dense, is_missing):
    with job():
        torch.manual_seed(0)
        table, wanted = (torch.nn.Embedding(10, 3, sparse=True) for _ in range(2))
        wanted.load_state_dict(table.state_dict())
        second = torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*table.parameters(), second], lr=0.5),
            named_parameters=[("table", table.weight), ("second", second)],
            sparse_as_dense=as_dense,
        )
        plain = torch.optim.SGD(wanted.parameters(), lr=0.5)
        for step in range(4):
            users = [other for other in range(size) if not is_missing or (other + step) % size]
            optimizer.zero_grad()
            plain.zero_grad()
            if rank in users:
                (table(torch.tensor([1, 3, rank, rank + step])).sum(0) * second.detach()).sum().backward()
            for other in users:
                (wanted(torch.tensor([1, 3, other, other + step])).sum() / size).backward()
            optimizer.step()
            plain.step()
            torch.testing.assert_close(table.weight, wanted.weight)
            assert table.weight.grad.is_sparse


@pytest.mark.sampled
@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_reduced_also_where_a_rank_has_none(ranks, as_dense, is_missing):
    ranks.run(check_sparse, as_dense, is_missing, world_size=3)


def check_clipping(rank, size):
    with job():
        model, wanted = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters()
        )
        plain = OPTIMIZERS["SGD"](wanted.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with optimizer.skip_synchronize():
                    optimizer.step()
            plain.zero_grad()
            for other in range(size):
                (loss_of(wanted, other, step) / size).backward()
            torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.1)
            plain.step()
            assert_close(model, wanted)
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        assert [each for each in seen if "skip_synchronize" in str(each.message)]


def test_gradients_can_be_clipped_between_synchronize_and_step(ranks):
    ranks.run(check_clipping, world_size=2)


def check_closure(rank, size):
    with job():
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters()
        )
        for step in range(NUM_STEPS):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() >= 0
        assert_close(model, reference(OPTIMIZERS["SGD"], size))


def test_a_closures_gradients_are_reduced(ranks):
    ranks.run(check_closure, world_size=2)


def check_kept_state(rank, size):
    with job():
        model = model_of()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        wanted = copy.deepcopy(model)
        plain = OPTIMIZERS["SGD"](wanted.parameters())
        calls = []
        for each, own in ((model, optimizer), (wanted, plain)):
            loss_of(each, 0, 0).backward()
            own.step()
            own.zero_grad()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        assert wrapped.state[model[0].weight]["momentum_buffer"] is optimizer.state[model[0].weight]["momentum_buffer"]
        for step in range(3):
            loss_of(model, 0, step).backward()
            wrapped.step()
            scheduler.step()
            wrapped.zero_grad(set_to_none=step == 0)
            loss_of(wanted, 0, step).backward()
            plain.step()
            plain.param_groups[0]["lr"] *= 0.5
            plain.zero_grad()
        assert_close(model, wanted)
        assert len(calls) == 3, "a hook runs once in each step"
        assert wrapped.param_groups[0]["lr"] == 0.25 / 8
        other = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters()
        )
        other.load_state_dict(wrapped.state_dict())
        assert other.param_groups[0]["lr"] == 0.25 / 8


def test_the_optimizers_state_hooks_and_scheduler_go_on(ranks):
    ranks.run(check_kept_state, world_size=2)


def check_early_zero_grad(rank, size):
    with job():
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters()
        )
        loss_of(model, rank, 0).backward()
        kind, said = raised(optimizer.zero_grad)
        assert kind == "AssertionError" and "zero_grad()" in said
        optimizer.step()
        optimizer.zero_grad()
        assert model[0].weight.grad is None


def test_zero_grad_between_backward_and_step_is_an_error(ranks):
    ranks.run(check_early_zero_grad, world_size=2)


def check_set(rank, size):
    even = hvd.ProcessSet([0, 2])
    with job(process_sets=[even]):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters(), process_set=even
        )
        train(model, optimizer, rank)
        wanted = model_of()
        plain = OPTIMIZERS["SGD"](wanted.parameters())
        for step in range(NUM_STEPS):
            plain.zero_grad()
            for other in [0, 2] if rank in (0, 2) else [rank]:
                (loss_of(wanted, other, step) / (2 if rank in (0, 2) else 1)).backward()
            plain.step()
        assert_close(model, wanted)


def test_gradients_can_be_reduced_over_a_process_set(ranks):
    ranks.run(check_set, world_size=3)


def check_adasum(rank, size):
    with job():
        model, single = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        plain = OPTIMIZERS["SGD"](single.parameters())
        # Equal steps are averaged, so all ranks step as one would.
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
            plain.zero_grad()
            loss_of(single, 0, step).backward()
            plain.step()
            assert_close(model, single)
        assert raised(lambda: optimizer.skip_synchronize().__enter__())[0] == "AssertionError"
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(model, rank, 9).backward()
        assert raised(optimizer.zero_grad)[0] == "AssertionError"
        optimizer.step()
        everyone = hvd.allgather(model[0].weight.detach().reshape(1, -1))
        torch.testing.assert_close(everyone, everyone[:1].expand_as(everyone))


def test_adasum_joins_the_ranks_steps(ranks):
    ranks.run(check_adasum, world_size=4)


def check_wrong(rank, size):
    with job():
        model = model_of()
        named = list(model.named_parameters())
        make = lambda: OPTIMIZERS["SGD"](model.parameters())  # noqa: E731
        wrong = [
            (dict(named_parameters=list(model.parameters())), "pairs"),
            (dict(named_parameters=[("a", parameter) for _, parameter in named]), "twice"),
            (dict(named_parameters=named[:1]), "lack 3"),
            (dict(named_parameters=named, backward_passes_per_step=0), "at least 1"),
            (dict(named_parameters=named, op=hvd.Sum, gradient_predivide_factor=2.0), "op=hvd.Average"),
            (dict(named_parameters=named, groups=0), "groups=0"),
            (dict(named_parameters=named, groups=[["x"]]), "expected parameters"),
            (dict(named_parameters=named, groups=[[named[0][1]], [named[0][1]]]), "two groups"),
        ]
        for arguments, text in wrong:
            kind, said = raised(hvd.DistributedOptimizer, make(), **arguments)
            assert kind == "ValueError" and text in said, f"{arguments.keys()}: {said}"
        wrapped = hvd.DistributedOptimizer(make(), named_parameters=[*named, ("more", torch.zeros(1))])
        assert raised(hvd.DistributedOptimizer, wrapped)[0] == "ValueError"
        if size == 3:
            assert raised(hvd.DistributedOptimizer, make(), named, op=hvd.Adasum)[0] == "NotImplementedError"


@pytest.mark.parametrize("size", [1, 3])
def test_wrong_arguments_are_value_errors(ranks, size):
    ranks.run(check_wrong, world_size=size)
