"""The methods of a GradReducer, its life, and several of them."""

import gc
import json
import weakref

import torch
from models import Gradients, Mlp, error_of, integers, mean_of_integers, reducer_of, synchronize, threads_of_engine

from fusedcomm.config import Config, Feedback
from fusedcomm.reducer.reducer import _of_modules


def threads_of_earlier_tests() -> int:
    """Of engines that nothing but a hook of theirs refers to, which Python cannot see."""
    gc.collect()
    return threads_of_engine()


def handle(rank, world_size, path):
    model = Mlp()
    config = Config("int8", "two-shot", wires={"1d": "int8"}, feedback=Feedback())
    before = threads_of_earlier_tests()
    reducer = reducer_of(model, config)
    predicted = str(reducer.plan())
    with reducer.trace(path):
        for _ in range(4):
            model(torch.full((8, 10), float(rank))).sum().backward()
    found = predicted, str(reducer.plan()), reducer.stats(), reducer.state_dict(consolidated=True)
    reducer.detach()
    refused = [reducer.plan, lambda: reducer.load_state_dict(found[-1]), lambda: reducer.trace("x")]
    return *found, threads_of_engine() - before, [error_of(RuntimeError, call) for call in refused]


def test_the_handle_has_the_hooks_methods_until_it_is_detached(ranks, tmp_path):
    path = tmp_path / "trace.json"
    for predicted, plan, stats, state, threads, refused in ranks.run(handle, str(path), world_size=2):
        assert "buckets as they are expected" in predicted and "buckets as they are" not in plan
        assert "layers.0.weight" in plan and "int8" in plan
        assert stats.steps == 4 and stats.buckets == 4
        assert state["step"] == 4 and len(state["residuals"]) == 8 and threads == 0
        assert all("this GradReducer is detached" in text for text in refused)
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert any("bucket 0" in name for name in names), names


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
