"""The hooks of DistributedOptimizer: which gradients travel when, and where their results go."""

import gc

import torch
from jobs import job
from models import Gradients, integers
from patience import wait_until
from torch import nn

import fusedcomm.horovod as hvd

SHAPES = ((4, 5), (3,), (2, 3, 4))


def wrapped(model: nn.Module, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), op=hvd.Sum, **options)


def gradients(rank: int) -> list[torch.Tensor]:
    return [integers(10 * rank + i, shape) for i, shape in enumerate(SHAPES)]


def assert_sums(model: Gradients, size: int) -> None:
    for weight, *given in zip(model.weights, *map(gradients, range(size)), strict=True):
        assert torch.equal(weight.grad, sum(given))


def check_when(rank, size):
    with job(HOROVOD_FUSION_THRESHOLD="0"):
        model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
        wrapped(model)
        gc.collect()
        replaced, optimizer = wrapped(model), wrapped(model)
        optimizer.step()  # the ranks connect
        optimizer.zero_grad()
        hidden = model[0](torch.ones(2, 5))
        own = 2 * hidden.detach().sum(0).repeat(5, 1)
        total = hvd.allreduce(own, op=hvd.Sum)
        # The rest of the backward pass waits until the last layer's gradient has been summed.
        hidden.register_hook(lambda _: wait_until(lambda: torch.equal(model[1].weight.grad, total), "the first sum"))
        model[1](hidden).sum().mul(2).backward()
        optimizer.synchronize()
        assert torch.equal(model[1].weight.grad, total) and replaced.is_replaced

    with job():
        model = Gradients(*SHAPES)
        optimizer = wrapped(model, groups=[[model.weights[2], model.weights[0]], [model.weights[1]]])
        for _ in range(2):
            optimizer.zero_grad()
            for index in range(3):
                (model.weights[index] * gradients(rank)[index]).sum().backward()
            optimizer.synchronize()
            assert_sums(model, size)
        return [sorted(bucket) for bucket in optimizer.reducer.native.buckets_now()]


def test_a_gradient_travels_when_it_is_ready_and_a_group_when_its_last_one_is(ranks):
    assert ranks.run(check_when, world_size=2) == [[[1], [0, 2]]] * 2


def check_passes(rank, size):
    with job():
        model = Gradients(*SHAPES)
        optimizer = wrapped(model)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_backward_passes_per_step(1)
            output = model(gradients(rank))
            model.weights[0].requires_grad_(False)  # after the forward pass: autograd gives it no gradient
            output.backward()
            model.weights[0].requires_grad_(True)
            assert model.weights[0].grad is None
            optimizer.set_backward_passes_per_step(2)  # what is on its way is kept
            for _ in range(2):
                (model.weights[0] * gradients(rank)[0]).sum().backward()
            optimizer.synchronize()
            model.weights[0].grad /= 2
            assert_sums(model, size)


def test_frozen_parameters_send_nothing_and_another_number_of_passes_holds_at_once(ranks):
    ranks.run(check_passes, world_size=2)


def check_memory(rank, size):
    with job():
        # Dimensions in another order are not copied, nor are gradients of a linear layer, which arrive as views.
        model = nn.Conv2d(3, 5, 2, bias=False).to(memory_format=torch.channels_last)
        linear = nn.Linear(3, 4, bias=False)
        optimizers = [wrapped(model), wrapped(linear)]
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.ones(2, 3, 4, 4)).sum().backward()
            linear(torch.ones(2, 3)).sum().backward()
            gradient = model.weight.grad
            assert not gradient.is_contiguous()
            for optimizer in optimizers:
                optimizer.synchronize()
                assert optimizer.reducer.native.num_copied == 0
            assert model.weight.grad is gradient and torch.equal(gradient, torch.full_like(gradient, 18.0 * size))
        # What the backward pass has yet to read keeps its values: here the gradient of `late` is computed from the
        # memory that autograd has given to the gradient of `early`.
        early, late = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(2, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([early, late], lr=1.0), op=hvd.Sum)
        total = size * (size + 1) / 2
        for _ in range(2):
            optimizer.zero_grad()
            doubled = late.clone()
            doubled.register_hook(lambda grad: (hvd.barrier(), grad * 2)[1])  # `early` may have its sum by then
            (early.view(2, 3) + doubled).backward(torch.full((2, 3), rank + 1.0))
            optimizer.synchronize()
            assert early.grad.tolist() == [total] * 6 and late.grad.flatten().tolist() == [2 * total] * 6


def test_gradients_are_summed_where_they_lie_unless_the_pass_still_reads_there(ranks):
    ranks.run(check_memory, world_size=2)
