"""Compressions, the text that names them, and the engines that it opens on groups of fusedcomm's own."""

import dataclasses
import datetime
import json
import threading
import types

import pytest
import torch
import torch.distributed as dist
from models import integers, normal
from scripts import printed_by_two_ranks

import fusedcomm
from fusedcomm.config import (
    WIRES,
    Blocks,
    Chunks,
    Config,
    Feedback,
    TwoLevels,
)
from fusedcomm.horovod import engines
from fusedcomm.horovod.compression import Compression, wire_of
from fusedcomm.horovod.wire_texts import config_of, text_of
from fusedcomm.native import _C

pytestmark = pytest.mark.check

# ---- texts

CONFIGS = [
    *(Config(wire) for wire in WIRES),
    Config("int8", wires={"b.*": "bf16", "a.*": "int4", "1d": "fp32"}),
    Config("fp16", "two-shot", predivide=0.1, chunks=Chunks(5000, 3)),
    Config("int4", blocks=Blocks(64, True), feedback=Feedback("bf16")),
    Config("bf16", hosts=TwoLevels([[0, 2], [1, 3]], "fp16")),
    Config("bf16", hosts=[[0, 1], [2, 3]]),
    Config("bf16", hosts=2),
    Config("bf16", hosts=None),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_text_names_the_whole_configuration(config):
    read = config_of(text_of(config))
    assert read.measure_every == 0
    assert dataclasses.replace(read, measure_every=config.measure_every).record() == config.record()
    assert list(read.wires.items()) == list(config.wires.items())


def test_a_configuration_without_options_is_named_by_its_wire():
    assert [text_of(Config(wire)) for wire in WIRES] == list(WIRES)
    feedback = {"format": "fp32", "unsharded": False, "decay": 1.0}
    assert json.loads(text_of(Config("int8", feedback=Feedback()))) == {"wire": "int8", "feedback": feedback}


def test_feedback_of_reduce_scatters_is_refused():
    with pytest.raises(ValueError, match="is for FSDP2"):
        Compression.of(Config("int8", feedback=Feedback(unsharded=True)))


@pytest.mark.parametrize("text", ["", "int7", "[1]", "7", '"int8"'])
def test_a_text_that_names_nothing_is_refused(text):
    with pytest.raises(ValueError, match="names no wire: use one of 'fp32'"):
        config_of(text)


def test_measurements_are_refused():
    with pytest.raises(ValueError, match="belong to no backward pass"):
        Compression.of(Config("int8", measure_every=0))


def test_a_compression_is_of_a_config():
    with pytest.raises(ValueError, match="config='int8' is not possible: use a fusedcomm.Config"):
        Compression.of("int8")


# ---- compressors that a script calls itself


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_script_that_compresses_by_itself_gets_the_dtype_and_its_own_back(name, dtype):
    compression = getattr(Compression, name)
    for given in (torch.float32, torch.float64, torch.float16):
        tensor = integers(0, (5, 6), given)
        sent, context = compression.compress(tensor)
        assert sent.dtype == dtype and torch.equal(sent.to(given), tensor)
        assert compression.decompress(sent, context).dtype == given
    whole = torch.tensor([3, -4])
    sent, context = compression.compress(whole)
    assert torch.equal(sent, whole) and compression.decompress(sent, context).dtype == torch.int64


@pytest.mark.parametrize("compression", [Compression.none, Compression.int8, Compression.of(Config("int4"))])
def test_other_compressors_leave_a_tensor_as_it_is(compression):
    tensor = integers(0, (5, 6))
    sent, context = compression.compress(tensor)
    assert sent is tensor and compression.decompress(sent, context) is tensor


def test_the_engine_takes_tensors_on_cpu_and_16_bit_casts_go_everywhere():
    here, elsewhere = torch.zeros(3), torch.zeros(3, device="meta")
    names = ("none", "bf16", "fp16", "int8", "fp8", "int4")
    assert [wire_of(getattr(Compression, name), here) for name in names] == ["", *names[1:]]
    assert [wire_of(getattr(Compression, name), elsewhere) for name in names[:3]] == [""] * 3
    with pytest.raises(ValueError, match="wire='int8' is for tensors on cpu, and this one is on meta"):
        wire_of(Compression.int8, elsewhere)

    class OfTheUser:
        def compress(self, tensor):
            return tensor, None

    assert wire_of(OfTheUser(), here) == wire_of(OfTheUser(), elsewhere) == ""


# ---- engines


def world_of(rank: int, size: int, store: dist.Store, sets: dict[int, list[int]]) -> types.SimpleNamespace:
    """What engines.py uses of a World. Makes a backend for each set that the rank is in."""
    backends = {
        number: dist.ProcessGroupGloo(
            dist.PrefixStore(f"set/{number}", store), ranks.index(rank), len(ranks), datetime.timedelta(seconds=60)
        )
        for number, ranks in sets.items()
        if rank in ranks
    }
    members = {number: types.SimpleNamespace(ranks=ranks) for number, ranks in sets.items()}
    return types.SimpleNamespace(rank=rank, size=size, store=store, sets=members, backends=backends)


def summed(hook, name: str, tensor: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    ended, errors = threading.Event(), []
    _C.FusedSum(hook).run(
        names=[name], tensors=[tensor], factor=factor, done=lambda error: (errors.append(error), ended.set())
    )
    assert ended.wait(60) and errors == [""]
    return tensor


NAMED = Config("int8", wires={"exact.*": "fp32"})


def in_sets(rank, size, path):
    store = dist.FileStore(path, size)
    world = world_of(rank, size, store, {0: list(range(size)), 1: [0, 2]})
    found = {}
    for set_id, wire in [(0, "bf16"), (1, "int8"), (0, text_of(NAMED)), (1, "int8")]:
        if set_id == 0 or rank in (0, 2):
            hook = engines.open_engine(world, set_id, wire)
            found[set_id, wire] = summed(hook, "exact.x", normal(rank, 0, (120, 130)))
    engines.close_engines(world, "the test ends")
    engines.close_engines(world, "the test ends")
    return found


def test_each_set_and_wire_has_an_engine(ranks, tmp_path):
    outcome = ranks.run(in_sets, str(tmp_path / "engines"), world_size=3)

    def mean(members, config):
        return fusedcomm.simulate([normal(rank, 0, (120, 130)) for rank in members], config)

    for rank, found in enumerate(outcome):
        assert torch.equal(found[0, "bf16"], mean(range(3), Config("bf16")))
        torch.testing.assert_close(found[0, text_of(NAMED)], mean(range(3), Config("fp32")), rtol=0, atol=1e-6)
        assert ((1, "int8") in found) == (rank != 1)
        if rank != 1:
            assert torch.equal(found[1, "int8"], mean([0, 2], Config("int8")))


def refused_everywhere(rank, size, path):
    world = world_of(rank, size, dist.FileStore(path, size), {0: list(range(size))})
    wire = "int8" if rank == 0 else "bf16"
    try:
        engines.open_engine(world, 0, wire)
    except RuntimeError as error:
        return str(error)


def test_ranks_that_open_different_wires_get_the_same_error(ranks, tmp_path):
    first, second = ranks.run(refused_everywhere, str(tmp_path / "engines"), world_size=2)
    assert first == second and "wire is 'int8' on rank 0 and 'bf16' on rank 1" in first


WITHOUT_A_PROCESS_GROUP = """
import datetime, sys, threading
import torch, torch.distributed as dist
from fusedcomm.horovod import engines
from test_engines import summed, world_of
from models import integers

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
world = world_of(rank, 2, dist.PrefixStore("hvd", store), {0: [0, 1]})
hook = engines.open_engine(world, 0, "int8")
assert not dist.is_initialized()
print(summed(hook, "x", torch.full((200, 200), 3.0 - 8.0 * rank), 2).unique().tolist())
dist.init_process_group("gloo", store=dist.PrefixStore("user", store), rank=rank, world_size=2)
print(summed(hook, "x", torch.full((200, 200), 3.0 - 8.0 * rank), 2).unique().tolist())
other = engines.open_engine(world, 0, "bf16")
dist.barrier()
dist.destroy_process_group()
print(summed(other, "x", torch.full((200, 200), 3.0 - 8.0 * rank), 2).unique().tolist())
engines.close_engines(world, "the script ends")
"""


def test_engines_need_no_process_group_and_do_not_mind_one(tmp_path):
    script = f"import sys; sys.path.insert(0, {str(__file__).rpartition('/')[0]!r})\n" + WITHOUT_A_PROCESS_GROUP
    for printed in printed_by_two_ranks(script, tmp_path):
        assert printed.splitlines() == ["[-2.0]"] * 3
