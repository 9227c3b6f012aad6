"""GradReducer on the engine's CUDA path without a GPU: its buckets are many separate tensors, which a bucket's kernels
reach through tables on the device. tests/helpers/fake_cuda.py has the driver."""

import dataclasses
from collections.abc import Callable

import fake_cuda
import pytest
import torch
from models import Gradients, normal, reducer_of
from sampling import few

from fusedcomm.config import Chunks, Config, Feedback

pytest.importorskip("triton", reason="the CUDA path's kernels are Triton's")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of the test stands in for a GPU"),
]

# Three buckets of many tensors, large and small, some of one element; the largest have several tiles each.
SHAPES = [(1 + 37 * i % 211,) if i % 3 else (5, 1 + 11 * i % 47) for i in range(88)] + [(61, 50), (1,)]
BUCKET_MIB = 0.02
CONFIGS = {
    "fp32": Config("fp32"),
    "bf16": Config("bf16"),
    "bf16 two-shot": Config("bf16", "two-shot"),
    "fp16 direct": Config("fp16", "direct"),
    "int8": Config("int8"),
    "int8 two-shot": Config("int8", "two-shot", wires={"1d": "int8"}),
    "int4 fed back": Config("int4", wires={"1d": "int4"}, feedback=Feedback()),
    "int4 weighted": Config("int4", "two-shot", wires={"1d": "int4"}, feedback=Feedback(), weighted="mean"),
    "fp8 two wires": Config("fp8", "two-shot", wires={"weights.1*": "bf16"}),
}


def whole(config: Config) -> Config:
    """The configuration with buckets of one chunk. The CPU path would choose by the speed of the link."""
    return dataclasses.replace(config, chunks=Chunks(1 << 20))


# --- the same bits as on the CPU ------------------------------------------------------------------------------------


def steps_on(rank, world_size, library, name):
    """Takes four steps on the CPU path, or with a `library` on the CUDA path. Returns the means' bits, the non-finite
    counts by parameter, the bytes sent, and the number of buckets."""
    config, model, seen = whole(CONFIGS[name]), Gradients(*SHAPES), []
    with fake_cuda.path(library, config):
        reducer = reducer_of(model, config, bucket_mib=BUCKET_MIB)
        for step in range(4):
            gradients = [normal(rank, 1000 * step + i, shape) for i, shape in enumerate(SHAPES)]
            if step == 2:
                gradients[5].view(-1)[-1] = torch.inf
                gradients[70 + rank].view(-1)[0] = torch.nan
            model.zero_grad()
            if config.weighted:
                reducer.weight = 3 * step + rank if step != 1 else 2 * rank
            model(gradients).backward()
            seen += [weight.grad.flatten() for weight in model.weights]
        stats, num_buckets = reducer.stats(), len(reducer.plan().buckets)
        reducer.detach()
    values = torch.cat(seen)
    # Which NaN a sum gives depends on the device.
    bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
    return bits, stats.nonfinite_by_parameter, stats.sent_nbytes, num_buckets


@pytest.mark.sampled(by=lambda name: {"feedback": CONFIGS[name].feedback is not None})
@pytest.mark.parametrize("name", CONFIGS)
def test_buckets_of_many_tensors_have_the_cpus_bits(ranks, library, name):
    cpu, cuda = (ranks.run(steps_on, driver, name, world_size=2) for driver in (None, library))
    for rank, (own, other) in enumerate(zip(cpu, cuda, strict=True)):
        assert torch.equal(own[0], other[0])
        assert own[1:] == other[1:]
        assert own[1] == {"weights.5": 1, f"weights.{70 + rank}": 1} and own[3] > 2
    assert torch.equal(cpu[0][0], cpu[1][0])


# --- launches and tables --------------------------------------------------------------------------------------------

TABLES = ("lossy.starts", "lossy.offsets", "lossy.first", "exact.starts", "exact.offsets", "exact.first")


def ones(model: Gradients) -> list[torch.Tensor]:
    return [torch.ones_like(weight) for weight in model.weights]


def recorded(rank, world_size, library, name, between: Callable[[Gradients, int], object]):
    """Takes five steps, before each of which `between` is called with the model and the step.

    Returns ([(kernel, programs, addresses of its tables) of each launch] of each step from the third on, when buckets
    have their last order; the parameters of each bucket)."""
    fake, config, model, kept = fake_cuda.gpu(library), whole(CONFIGS[name]), Gradients(*SHAPES), []
    steps = []
    with fake.takes_over(config):
        reducer = reducer_of(model, config, bucket_mib=BUCKET_MIB)
        for step in range(5):
            kept.append(between(model, step))  # what is kept stays in memory, so nothing new gets its addresses
            begin = len(fake.launches)
            model(ones(model)).backward()
            launches = zip(fake.launches[begin:], fake.grids[begin:], strict=True)
            steps.append([(kernel, grid, addresses(arguments)) for (kernel, arguments), grid in launches])
        buckets = [list(bucket.parameters) for bucket in reducer.plan().buckets]
        reducer.detach()
    return steps[2:], buckets


def addresses(arguments: dict) -> tuple[int, ...]:
    return tuple(arguments[name].data_ptr() for name in TABLES if name in arguments and arguments[name].numel())


def zeroed(model: Gradients, step: int) -> None:
    """The gradients stay where they are."""
    model.zero_grad(set_to_none=False)


def all_new(model: Gradients, step: int) -> list[torch.Tensor]:
    """Every gradient gets new memory. Returns the old gradients."""
    old = [weight.grad for weight in model.weights if weight.grad is not None]
    model.zero_grad()
    return old


def one_moved(model: Gradients, step: int) -> torch.Tensor | None:
    """In the last step the gradient of weights.40 gets new memory; all others stay. Returns the old one."""
    model.zero_grad(set_to_none=False)
    old = model.weights[40].grad
    if step == 4:
        model.weights[40].grad = torch.zeros_like(old)
    return old


@pytest.mark.sampled
@pytest.mark.parametrize("between", [zeroed, all_new])
@pytest.mark.parametrize("name", few(["fp32", "bf16", "int8 two-shot"], "int8 two-shot"))
def test_a_bucket_of_many_tensors_takes_at_most_three_launches(ranks, library, name, between):
    for steps, buckets in ranks.run(recorded, library, name, between, world_size=2):
        assert len(buckets) > 2 and max(map(len, buckets)) > 20
        for launches in steps:
            assert len(launches) == (3 if "two-shot" in name else 2) * len(buckets)
            packs = [num_programs for kernel, num_programs, _ in launches if kernel == "pack"]
            assert max(packs) == fake_cuda.NUM_PACK_PROGRAMS


def tables_of_buckets(steps: list, num_buckets: int) -> list[list[set[int]]]:
    """The addresses of each bucket's tables, by step, then by bucket, from the kernels that read gradients' tables."""
    found = []
    for launches in steps:
        packs = [tables for kernel, _, tables in launches if kernel == "pack"]
        unpacks = [tables for kernel, _, tables in launches if kernel == "unpack"]
        assert len(packs) == len(unpacks) == num_buckets and all(packs)
        found.append([{*pack, *unpack} for pack, unpack in zip(packs, unpacks, strict=True)])
    return found


# New tables are made while those that they replace are in memory, so they have other addresses.


@pytest.mark.sampled(by=lambda name: {})
@pytest.mark.parametrize("name", ["bf16", "int8 two-shot"])
def test_tables_are_uploaded_once_while_gradients_stay_where_they_are(ranks, library, name):
    for steps, buckets in ranks.run(recorded, library, name, zeroed, world_size=2):
        first, *others = tables_of_buckets(steps, len(buckets))
        assert others == [first] * len(others) and len(others) == 2


def test_tables_are_uploaded_again_for_the_bucket_whose_gradient_has_moved(ranks, library):
    for steps, buckets in ranks.run(recorded, library, "bf16", one_moved, world_size=2):
        before, same, after = tables_of_buckets(steps, len(buckets))
        assert same == before
        has_moved = [table != old for table, old in zip(after, same, strict=True)]
        assert has_moved == ["weights.40" in parameters for parameters in buckets] and sum(has_moved) == 1


def one_small_bucket(rank, world_size, library, wire):
    """The mean of one small gradient, which is summed exactly: it is in one run, but not summed where it lies."""
    config = Config(wire)
    with fake_cuda.gpu(library).takes_over(config):
        model = Gradients((100,))
        reducer = reducer_of(model, config)
        for step in range(2):
            model.zero_grad()
            model([torch.arange(100.0) * (rank + 1) + step]).backward()
        reducer.detach()
    return model.weights[0].grad


@pytest.mark.sampled(by=lambda wire: {"exact": wire == "fp32"})
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_a_bucket_of_one_small_gradient(ranks, library, wire):
    for mean in ranks.run(one_small_bucket, library, wire, world_size=2):
        assert torch.equal(mean, torch.arange(100.0) * 1.5 + 1)
