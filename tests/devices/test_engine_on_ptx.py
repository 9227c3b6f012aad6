"""The engine's CUDA path with the kernels that run on a GPU: compiled by Triton for the real tile, and executed from
their PTX by the driver of the test. The gradients, the counts and the bytes sent are those of the CPU path.

tests/devices/test_cuda_engine.py has the same configurations with interpreted kernels and small tiles.
"""

import functools
from pathlib import Path

import compiling
import fake_cuda
import ptx_kernels
import pytest
import torch
from test_cuda_engine import CHUNKED, CONFIGS, both_paths, check_both_paths

from fusedcomm.config import Blocks, Config, Feedback

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/devices/test_cuda.py runs the same on it"
)

SHAPES = ((61, 500), (301,), (7,), (17000,), (1,))
"""Small buckets and one of several tiles."""


@functools.cache
def compiler(triton_folder: str | None) -> ptx_kernels.TritonCompiler:
    """The compiler of this process."""
    return ptx_kernels.TritonCompiler(triton_folder and Path(triton_folder))


def on_ptx(rank, world_size, library, config, dtype, triton_folder, capability):
    fake = fake_cuda.gpu(library)
    return both_paths(
        rank,
        world_size,
        library,
        config,
        dtype,
        takes_over=functools.partial(fake.takes_over, compiled=compiler(triton_folder), capability=capability),
        shapes=SHAPES,
        # A product that is NaN has other bits on a GPU, and gradients that are scaled in place keep them.
        any_nan=config.wire == "fp32",
    )


ALL = {
    **CONFIGS,
    "bf16 direct": Config("bf16", "direct"),
    "bf16 one-shot": Config("bf16", "one-shot", feedback=Feedback("bf16")),
    "fp16 one-shot": Config("fp16", "one-shot", chunks=CHUNKED),
    "fp8 one-shot rotated": Config("fp8", "one-shot", blocks=Blocks(rotate=True)),
}
"""Each wire with each sum that it can have."""

# Every configuration with both versions, and each of these with both capabilities in turn.
CASES = [
    (name, triton, (80, 90)[(index + which) % 2])
    for which, triton in enumerate(("newest", "oldest"))
    for index, name in enumerate(ALL)
]


def dtype_and_world_size(name: str) -> tuple[torch.dtype, int]:
    index = list(ALL).index(name)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
    return dtype, 4 if ALL[name].needs_two_levels else (2, 3, 4)[index // 3 % 3]


@pytest.mark.sampled(by=lambda name, triton, capability: {"sum": ALL[name].sum, "compiler": triton})
@pytest.mark.parametrize(("name", "triton", "capability"), CASES)
def test_gradients_and_bytes_are_those_of_the_cpu(ranks, library, request, name, triton, capability):
    folder = str(compiling.oldest_triton(request.config)) if triton == "oldest" else None
    dtype, world_size = dtype_and_world_size(name)
    check_both_paths(ranks.run(on_ptx, library, ALL[name], dtype, folder, capability, world_size=world_size))
