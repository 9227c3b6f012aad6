"""Random steps: parameters are frozen, thawed and left out, passes add up, gradients stay or go, ranks are skewed in
time. After each backward pass every gradient is what the definition of the mean says."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist
from models import Gradients, integers
from sampling import few

import fusedcomm

SHAPES = [(40, 50), (7,), (), (0, 4), (3, 5, 7), (2000,), (33,), (64, 64)]
NUM_STEPS = 40


class Expected:
    """The gradients by the definition, from the user's own all-reduces."""

    def __init__(self):
        self.gradients = [None] * len(SHAPES)
        self.used = [False] * len(SHAPES)

    def zero(self, set_to_none):
        self.gradients = [None if set_to_none or g is None else torch.zeros_like(g) for g in self.gradients]

    def add(self, gradients):
        for index, gradient in gradients.items():
            before = self.gradients[index]
            self.gradients[index] = gradient.clone() if before is None else before + gradient
            self.used[index] = True

    def synchronize(self, trained, world_size):
        for index in trained:
            users = torch.tensor(float(self.used[index]))
            dist.all_reduce(users)
            if users > 0:
                gradient = self.gradients[index]
                total = torch.zeros(SHAPES[index]) if gradient is None else gradient.clone()
                dist.all_reduce(total)
                self.gradients[index] = total / world_size
        self.used = [False] * len(SHAPES)


def random_steps(rank, world_size, seed):
    everybodys, own = random.Random(seed), random.Random(1000 * seed + rank)
    model, expected = Gradients(*SHAPES), Expected()
    reducer = fusedcomm.GradReducer(model, "fp32", bucket_mib=0.004, find_unused_parameters=True, quiet=True)
    for weight in model.weights:
        weight.register_hook(lambda gradient: time.sleep(own.choice([0, 0, 0.002])))
    num_synchronized = 0
    for step in range(NUM_STEPS):
        for weight in model.weights:
            weight.requires_grad_(weight.requires_grad != (everybodys.random() < 0.1))
        model.weights[2].requires_grad_(True)
        if everybodys.random() < 0.6:
            set_to_none = everybodys.random() < 0.5
            model.zero_grad(set_to_none)
            expected.zero(set_to_none)
        trained = [index for index, weight in enumerate(model.weights) if weight.requires_grad]
        used = [index for index in trained if own.random() < 0.6] or [2]
        own.shuffle(used)
        # Multiples of world_size, so that means are whole numbers.
        gradients = {index: integers(rank + 17 * step + index, SHAPES[index]) * world_size for index in used}
        is_synchronized = everybodys.random() < 0.7
        with contextlib.nullcontext() if is_synchronized else reducer.no_sync():
            sum((model.weights[index] * gradients[index]).sum() for index in used).backward()
        expected.add(gradients)
        if is_synchronized:
            num_synchronized += 1
            expected.synchronize(trained, world_size)
        for index, (weight, gradient) in enumerate(zip(model.weights, expected.gradients, strict=True)):
            assert (weight.grad is None) == (gradient is None), (step, index)
            assert gradient is None or torch.allclose(weight.grad, gradient, rtol=1e-5, atol=1e-3), (step, index)
    reducer.detach()
    return num_synchronized


@pytest.mark.parametrize("seed", few(range(3), 0))
def test_after_random_steps_gradients_are_what_the_mean_says(ranks, seed):
    assert min(ranks.run(random_steps, seed, world_size=3)) > NUM_STEPS / 2
