"""Compressions: which configuration each names, and what sums in a wire give."""

import dataclasses
import random

import pytest
import torch
from jobs import job
from models import integers, normal
from sampling import few

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import WIRES, Chunks, Config, Feedback, TwoLevels
from fusedcomm.horovod.compression import config_of, text_of, wire_of
from fusedcomm.horovod.world import world

CONFIGS = [
    *(Config(wire) for wire in WIRES),
    Config("int8", wires={"b.*": "bf16", "a.*": "int4", "1d": "fp32"}),
    Config("fp16", "two-shot", chunks=Chunks(5000, 3)),
    Config("int4", feedback=Feedback()),
    Config("bf16", hosts=TwoLevels([[0, 2], [1, 3]], "fp16")),
    Config("bf16", hosts=[[0, 1], [2, 3]]),
    Config("bf16", hosts=2),
    Config("bf16", hosts=None),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_text_names_the_whole_configuration(config):
    read = config_of(text_of(config))
    assert read.record() == config.record()
    assert list(read.wires.items()) == list(config.wires.items())


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("int4", None)])
def test_a_script_that_compresses_by_itself_gets_the_dtype_and_its_own_back(name, dtype):
    compression = getattr(hvd.Compression, name)
    for given in (torch.float32, torch.float64, torch.float16, torch.int64):
        tensor = integers(0, (5, 6), given)
        sent, context = compression.compress(tensor)
        assert sent.dtype == (dtype if dtype and given.is_floating_point else given)
        assert torch.equal(compression.decompress(sent, context), tensor)
        assert compression.decompress(sent, context).dtype == given


def test_the_engine_takes_tensors_on_cpu_and_16_bit_casts_go_everywhere():
    here, elsewhere = torch.zeros(3), torch.zeros(3, device="meta")
    names = ("none", "bf16", "fp16", "int8", "fp8", "int4")
    assert [wire_of(getattr(hvd.Compression, name), here) for name in names] == ["", *names[1:]]
    assert [wire_of(getattr(hvd.Compression, name), elsewhere) for name in names[:3]] == [""] * 3
    with pytest.raises(ValueError, match="wire='int8' is for tensors on cpu, and this one is on meta"):
        wire_of(hvd.Compression.int8, elsewhere)


# ---- sums

EXACT = [Config("fp32", "exact"), Config("bf16", "direct"), Config("fp16", "direct")]
EXACT += [Config(wire, sum, chunks=Chunks(4096)) for wire in ("fp32", "bf16", "fp16") for sum in ("auto", "two-shot")]
EXACT += [Config(wire, "one-shot") for wire in ("fp32", "bf16", "fp16")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUP = [(5,), (300, 70), (3, 5, 7), (0, 3), ()]


def check_whole_numbers(rank, size):
    """Each name comes with another shape and dtype every time."""
    wrong = []
    with job():
        for config in EXACT:
            compression = hvd.Compression.of(config)
            for number, (dtype, factor) in enumerate(zip(DTYPES, (1.0, 0.5, -4.0), strict=True)):
                shapes = GROUP[number:] + GROUP[:number]
                every = [[integers(other, shape, dtype) for shape in shapes] for other in range(size)]
                how = dict(name="group", op=hvd.Sum, compression=compression, prescale_factor=factor)
                for i, found in enumerate(hvd.grouped_allreduce(every[rank], **how)):
                    expected = torch.stack([tensors[i].double() for tensors in every]).sum(0).mul(factor)
                    if not torch.equal(found, expected.to(dtype)):
                        wrong.append((config, number, i))
            mixed = hvd.grouped_allreduce(
                [every[rank][1].to(dtype) for dtype in DTYPES], op=hvd.Sum, compression=compression
            )
            assert all(torch.equal(found, sum(tensors[1] for tensors in every).to(found.dtype)) for found in mixed)
            large = hvd.allreduce(torch.full((100, 100), 24576.0), op=hvd.Sum, compression=compression)
            assert large.unique().tolist() == [24576.0 * size], "beyond the range of fp16"
            whole = hvd.allreduce(torch.full((40, 50), 3), op=hvd.Sum, compression=compression)
            assert torch.equal(whole, torch.full((40, 50), 3 * size)), "no wire carries it, and it travels as it is"
    return wrong


@pytest.mark.parametrize("size", few([1, 2, 3, 4], 3))
def test_sums_of_whole_numbers_are_exact(ranks, size):
    assert ranks.run(check_whole_numbers, world_size=size) == [[]] * size


LOSSY = [
    Config("bf16", feedback=Feedback()),
    Config("fp16"),
    Config("int8"),
    Config("int8", feedback=Feedback()),
    Config("int4", feedback=Feedback()),
    Config("fp8", feedback=Feedback()),
]
LOSSY = [dataclasses.replace(config, chunks=Chunks(4096)) for config in LOSSY]
SHAPE, NUM_STEPS = (71, 281), 4
BY_NAME = Config("int8", wires={"exact.*": "fp32", "half.*": "bf16"})
NAMES = {"exact.x": "fp32", "half.x": "bf16", "x": "int8"}


def lossy_sums(rank, size):
    """The results by configuration, whether they are of all ranks, and step; and those of names that choose a wire."""
    ends, found = hvd.ProcessSet([0, size - 1]), {}
    with job(process_sets=[ends]):
        for number, config in enumerate(LOSSY):
            how = dict(name="x", op=hvd.Average, postscale_factor=2.0, compression=hvd.Compression.of(config))
            for step in range(NUM_STEPS):
                found[number, True, step] = hvd.allreduce(normal(rank, step, SHAPE), **how)
                if ends.included():
                    found[number, False, step] = hvd.allreduce(normal(rank, step, SHAPE), **how, process_set=ends)
        compression = hvd.Compression.of(BY_NAME)
        by_name = {name: hvd.allreduce(normal(rank, 0, SHAPE), name=name, compression=compression) for name in NAMES}
    return found, by_name


@pytest.mark.parametrize("size", few([3, 4], 3))
def test_means_have_the_bits_of_simulate_and_a_power_of_two_rounds_nothing(ranks, size):
    outcome = ranks.run(lossy_sums, world_size=size)
    for number, config in enumerate(LOSSY):
        for of_all, members in ((True, range(size)), (False, (0, size - 1))):
            residuals = None if config.feedback is None else fusedcomm.Residuals()
            for step in range(NUM_STEPS):
                gradients = [normal(rank, step, SHAPE) for rank in members]
                expected = 2.0 * fusedcomm.simulate(gradients, config, residuals=residuals)
                for rank in members:
                    assert torch.equal(outcome[rank][0][number, of_all, step], expected), (config, members, step)
    for _, by_name in outcome:
        for name, wire in NAMES.items():
            mean = fusedcomm.simulate([normal(rank, 0, SHAPE) for rank in range(size)], Config(wire))
            torch.testing.assert_close(by_name[name], mean, rtol=0, atol=1e-6 if wire == "fp32" else 0)


SHAPES = {"a": (50, 101), "b": (64, 77), "c": (33, 300), "d": (91, 90), "bias": (300,)}
NUM_ROUNDS = 12


def conserved(rank, size):
    """By name: the sum of all results, what was given in a round, and this rank's residual. Buckets hold other names
    each time; in every third round a rank submits a name only when the one before has ended."""
    order, names = random.Random(rank), list(SHAPES)
    given = {name: normal(rank, index, shape) for index, (name, shape) in enumerate(SHAPES.items())}
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    wire = text_of(Config("int4", feedback=Feedback(), chunks=Chunks(4096)))
    with job(HOROVOD_FUSION_THRESHOLD="60000"):
        for number in range(NUM_ROUNDS):
            is_alone = number % 3 == 2
            handles = {}
            for name in names if is_alone else order.sample(names, len(names)):
                handles[name] = hvd.allreduce_async(given[name], name=name, op=hvd.Sum, wire=wire)
                if is_alone:
                    total[name] += hvd.synchronize(handles.pop(name))
            for name, handle in handles.items():
                total[name] += hvd.synchronize(handle)
        (session,) = world().sessions
        residuals = session.synchronizer.residuals()
    return total, given, {name: residuals[name].view(shape) for name, shape in SHAPES.items() if name in residuals}


@pytest.mark.parametrize("size", [2, 3])
def test_error_feedback_loses_nothing_when_buckets_change(ranks, size):
    outcome = ranks.run(conserved, world_size=size)
    for name, shape in SHAPES.items():
        given = NUM_ROUNDS * sum(given[name].double() for _, given, _ in outcome)
        left_out = sum(residuals.get(name, torch.zeros(shape)).double() for _, _, residuals in outcome)
        assert (left_out.abs().max() > 0.01) == (name != "bias")
        for total, _, _ in outcome:
            torch.testing.assert_close(total[name].double() + left_out, given, rtol=0, atol=2e-3)
