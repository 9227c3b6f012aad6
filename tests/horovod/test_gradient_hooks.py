"""The hooks of DistributedOptimizer: which gradients travel when, and where their results go."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from jobs import job
from models import Gradients, integers
from torch import nn

import fusedcomm.horovod as hvd
import fusedcomm.horovod.reduced_optimizer as reduced_optimizer

SHAPES = ((4, 5), (3,), (2, 3, 4))


class Sent:
    """What the optimizer has submitted: the name of each sum, which is its first gradient's, and its tensors."""

    def __init__(self) -> None:
        self.names, self.tensors = [], []


@contextlib.contextmanager
def noted_job() -> Iterator[Sent]:
    sent, begin = Sent(), reduced_optimizer.begin

    def note(found, signature, tensors, *rest):
        assert all(tensor.is_contiguous() for tensor in tensors)
        sent.names.append(signature.key.removeprefix("allreduce."))
        sent.tensors.append(tensors)
        return begin(found, signature, tensors, *rest)

    with job(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced_optimizer, "begin", note)
        yield sent


def wrapped(model: nn.Module, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), op=hvd.Sum, **options)


def gradients(rank: int) -> list[torch.Tensor]:
    return [integers(10 * rank + i, shape) for i, shape in enumerate(SHAPES)]


def assert_sums(model: Gradients, size: int) -> None:
    for weight, *given in zip(model.weights, *map(gradients, range(size)), strict=True):
        assert torch.equal(weight.grad, sum(given))


def check_when(rank, size):
    with noted_job() as sent:
        model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
        wrapped(model)
        gc.collect()
        replaced, optimizer = wrapped(model), wrapped(model)
        before = []
        hidden = model[0](torch.ones(2, 5))
        hidden.register_hook(lambda grad: before.append(sent.names.copy()))
        model[1](hidden).sum().backward()
        assert before == [["1.weight"]] and sent.names == ["1.weight", "0.weight"]
        optimizer.synchronize()

        sent.names.clear()
        sent.tensors.clear()
        model = Gradients(*SHAPES)
        optimizer = wrapped(model, groups=[[model.weights[2], model.weights[0]], [model.weights[1]]])
        for index in range(3):
            (model.weights[index] * gradients(rank)[index]).sum().backward()
            assert sent.names == [[], ["grouped.weights.1"], ["grouped.weights.1", "grouped.weights.2"]][index]
        assert [[tuple(each.shape) for each in tensors] for tensors in sent.tensors] == [[(3,)], [(2, 3, 4), (4, 5)]]
        optimizer.synchronize()
        assert_sums(model, size)
        assert replaced.is_replaced


def test_a_gradient_travels_once_when_it_is_ready_and_a_group_when_its_last_one_is(ranks):
    ranks.run(check_when, world_size=2)


def check_passes(rank, size):
    with noted_job() as sent:
        model = Gradients(*SHAPES)
        optimizer = wrapped(model)
        output = model(gradients(rank))
        model.weights[0].requires_grad_(False)  # after the forward pass: autograd gives it no gradient
        output.backward()
        model.weights[0].requires_grad_(True)
        assert sorted(sent.names) == ["weights.1", "weights.2"] and model.weights[0].grad is None
        optimizer.set_backward_passes_per_step(2)  # what is on its way is kept
        for num_sent in (2, 3):
            (model.weights[0] * gradients(rank)[0]).sum().backward()
            assert len(sent.names) == num_sent
        optimizer.synchronize()
        model.weights[0].grad /= 2
        assert_sums(model, size)


def test_frozen_parameters_send_nothing_and_another_number_of_passes_holds_at_once(ranks):
    ranks.run(check_passes, world_size=2)


def check_memory(rank, size):
    with noted_job() as sent:
        # Dimensions in another order are not copied.
        model = nn.Conv2d(3, 5, 2, bias=False).to(memory_format=torch.channels_last)
        optimizer = wrapped(model)
        model(torch.ones(2, 3, 4, 4)).sum().backward()
        gradient = model.weight.grad
        assert not gradient.is_contiguous() and sent.tensors[0][0].shape == (5, 2, 2, 3)
        assert sent.tensors[0][0].data_ptr() == gradient.data_ptr()
        optimizer.synchronize()
        assert model.weight.grad is gradient and torch.equal(gradient, torch.full_like(gradient, 18.0 * size))
        # Nor are those of a linear layer, which arrive as views.
        model = nn.Linear(3, 4, bias=False)
        optimizer = wrapped(model)
        model(torch.ones(2, 3)).sum().backward()
        assert sent.tensors[1][0].data_ptr() == model.weight.grad.data_ptr()
        optimizer.synchronize()
        # What the backward pass has yet to read keeps its values: here the gradient of `late` is computed from the
        # memory that autograd has given to the gradient of `early`.
        early, late = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(2, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([early, late], lr=1.0), op=hvd.Sum)
        doubled = late.clone()
        doubled.register_hook(lambda grad: (hvd.barrier(), grad * 2)[1])  # `early` may have its sum by then
        (early.view(2, 3) + doubled).backward(torch.full((2, 3), rank + 1.0))
        optimizer.synchronize()
        total = size * (size + 1) / 2
        assert early.grad.tolist() == [total] * 6 and late.grad.flatten().tolist() == [2 * total] * 6


def test_gradients_are_summed_where_they_lie_unless_the_pass_still_reads_there(ranks):
    ranks.run(check_memory, world_size=2)
