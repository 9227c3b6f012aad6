"""The engine's CUDA path with the kernels that run on a GPU: compiled by Triton for the real tile, and executed from
their PTX by the driver of the test. The gradients, the counts and the bytes sent are those of the CPU path.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path

import compiling
import fake_cuda
import ptx_kernels
import pytest
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback

pytest.importorskip("triton", reason="the CUDA path's kernels are Triton's")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/devices/test_cuda.py runs the same on it"
)

CHUNKED = Chunks(4096)
FED_BACK = {"feedback": Feedback()}
LOSSY_INT4 = {"wires": {"1d": "int4"}, "chunks": CHUNKED}
EXEMPT = {"weights.[24]": "fp32"}

CONFIGS = {
    "fp32": Config("fp32"),
    "fp32 two-shot": Config("fp32", "two-shot"),
    "bf16": Config("bf16"),
    "bf16 two-shot chunked": Config("bf16", "two-shot", chunks=CHUNKED),
    "bf16 exempt": Config("bf16", "two-shot", wires={"1d": "fp32"}),
    "fp16 direct": Config("fp16", "direct"),
    "int8": Config("int8", "two-shot"),
    "fp8": Config("fp8", "two-shot"),
    "fp8 all lossy": Config("fp8", "two-shot", wires={"1d": "fp8"}),
    "int4": Config("int4", "two-shot"),
    "int4 all lossy": Config("int4", "two-shot", **LOSSY_INT4),
    "bf16 feedback": Config("bf16", "two-shot", feedback=Feedback()),
    "fp16 chunked": Config("fp16", "two-shot", chunks=CHUNKED),
    "fp8 feedback": Config("fp8", "two-shot", **FED_BACK),
    "int4 feedback": Config("int4", "two-shot", **LOSSY_INT4, **FED_BACK),
    "several wires": Config(
        "int8",
        "two-shot",
        wires={**EXEMPT, "weights.0": "int4", "weights.3": "bf16", "1d": "int8"},
        chunks=CHUNKED,
        **FED_BACK,
    ),
    "two levels": Config("int4", "two-shot", chunks=CHUNKED, hosts=[[0, 1], [2, 3]], **FED_BACK),
    "two levels apart": Config(
        "int8", "two-shot", wires={**EXEMPT, "weights.3": "bf16", "1d": "int8"}, hosts=[[0, 3], [1, 2]]
    ),
    "int8 one-shot": Config("int8", "one-shot", chunks=CHUNKED),
    "int4 one-shot": Config("int4", "one-shot", **LOSSY_INT4, **FED_BACK),
    "several wires one-shot": Config(
        "fp8",
        "one-shot",
        wires={**EXEMPT, "weights.0": "int4", "weights.3": "fp16", "1d": "fp8"},
        feedback=Feedback(),
    ),
    "fp32 one-shot": Config("fp32", "one-shot"),
    "all exempt": Config("int8", "two-shot", wires={"*": "fp32", "1d": "int8"}, feedback=Feedback()),
    "all exempt one-shot": Config("int8", "one-shot", wires={"*": "fp32", "1d": "int8"}, feedback=Feedback()),
    "int8 chunked": Config("int8", "two-shot", chunks=Chunks(4096, in_flight=1)),
    "bf16 direct": Config("bf16", "direct"),
    "bf16 one-shot": Config("bf16", "one-shot", feedback=Feedback()),
    "fp16 one-shot": Config("fp16", "one-shot", chunks=CHUNKED),
    "fp8 one-shot": Config("fp8", "one-shot"),
}
"""Each wire with each sum that it can have."""

# Small buckets and one of several tiles.
SHAPES = ((61, 500), (301,), (7,), (17000,), (1,))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def compiler(triton_folder: str | None) -> ptx_kernels.TritonCompiler:
    """The compiler of this process."""
    return ptx_kernels.TritonCompiler(triton_folder and Path(triton_folder))


def both_paths(rank, world_size, library, config, dtype, triton_folder, capability):
    """Trains on the CPU path and on the CUDA path, for several steps each, because DDP rebuilds its buckets.

    Returns [gradients' bits and counts, of each path].
    """
    if config.chunks.nbytes is None:  # the CPU path would choose by how fast the link is now
        config = dataclasses.replace(config, chunks=dataclasses.replace(config.chunks, nbytes=1 << 20))
    num_steps = 4 if config.feedback else 2  # a residual shows in the next step
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    gradients[0].view(-1)[3] = -torch.inf
    gradients[3][17 * rank : 17 * rank + 2] = torch.nan
    results, fake = [], fake_cuda.gpu(library)
    on_ptx = functools.partial(fake.takes_over, compiled=compiler(triton_folder), capability=capability)
    for path in (contextlib.nullcontext, on_ptx):
        ddp = DistributedDataParallel(Gradients(*SHAPES, dtype=dtype), bucket_cap_mb=0.016)
        with path(config):
            comm = fusedcomm.attach(ddp, config)
            seen = synchronize(ddp, gradients, steps=num_steps)
        stats = comm.stats()
        comm.detach()
        values = torch.cat([gradient.flatten() for gradient in seen])
        if config.wire == "fp32":  # a product that is NaN has other bits on a GPU, and sums in place keep them
            values = torch.where(values.isnan(), torch.nan, values)
        results.append((values.view(torch.uint8), stats.nonfinite, stats.nonfinite_by_parameter, stats.sent_nbytes))
    assert fake.launches
    return results


# Every configuration with both versions, and each of these with both capabilities in turn.
CASES = [
    (name, triton, (80, 90)[(index + which) % 2], 4 if config.needs_two_levels else (2, 3, 4, 1)[index // 3 % 4])
    for which, triton in enumerate(("newest", "oldest"))
    for index, (name, config) in enumerate(CONFIGS.items())
]


def features(name, triton, capability, world_size):
    """A case's properties, by which `make check` samples: every wire with the newest compiler."""
    config = CONFIGS[name]
    of_newest = (config.wire, config.needs_two_levels) if triton == "newest" else None
    return {"sum": (config.sum, triton), "wire": of_newest}


@pytest.mark.sampled(by=features)
@pytest.mark.parametrize(("name", "triton", "capability", "world_size"), CASES)
def test_gradients_and_bytes_are_those_of_the_cpu(ranks, library, request, name, triton, capability, world_size):
    folder = str(compiling.oldest_triton(request.config)) if triton == "oldest" else None
    dtype = DTYPES[list(CONFIGS).index(name) % 3]
    of_ranks = ranks.run(both_paths, library, CONFIGS[name], dtype, folder, capability, world_size=world_size)
    for (cpu, *cpu_counts), (gpu, *gpu_counts) in of_ranks:
        assert torch.equal(cpu, gpu)
        assert cpu_counts == gpu_counts
        assert cpu_counts[0] > 0
