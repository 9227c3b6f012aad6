"""The life of a GradReducer, and several of them."""

import gc
import weakref

import torch
from models import Gradients, Mlp, integers, mean_of_integers, reducer_of, synchronize, threads_of_engine

from fusedcomm.reducer.reducer import _of_modules


def threads_of_earlier_tests() -> int:
    """Of engines that nothing but a hook of theirs refers to, which Python cannot see."""
    gc.collect()
    return threads_of_engine()


def lives(rank, world_size):
    before = threads_of_earlier_tests()
    model, named = Mlp(), Mlp()
    reducer_of(model)
    of_named = reducer_of(named.named_parameters())
    gc.collect()
    x = torch.full((4, 10), float(rank + 1))
    model(x).sum().backward()
    named(x).sum().backward()
    of_model = weakref.ref(_of_modules[model])
    same = [torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), named.parameters(), strict=True)]
    del model, of_named
    gc.collect()
    return len(same), of_model() is None, threads_of_engine() - before


def test_a_module_keeps_its_reducer_alive_and_takes_it_along(ranks):
    for number, is_gone, threads in ranks.run(lives, world_size=2):
        assert number == 8 and is_gone and threads == 0


def several_reducers(rank, world_size):
    """Two models, each with a reducer, whose backward passes take turns."""
    first, second = Gradients((500,)), Gradients((700,), (9,))
    reducers = [reducer_of(first, "bf16"), reducer_of(second, "fp32")]
    seen = []
    for step in range(1, 4):
        seen += synchronize(first, [step * integers(rank, (500,))])
        seen += synchronize(second, [step * integers(rank, (700,)), step * integers(rank, (9,))])
    reducers[0].detach()
    seen += synchronize(second, [integers(rank, (700,)), integers(rank, (9,))])
    return seen


def test_reducers_of_several_models_stand_side_by_side(ranks):
    for seen in ranks.run(several_reducers, world_size=2):
        factors = [factor for step in range(1, 4) for factor in [step] * 3] + [1, 1]
        for factor, gradient in zip(factors, seen, strict=True):
            assert torch.equal(gradient, factor * mean_of_integers(2, gradient.shape))
