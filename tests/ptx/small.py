"""Small PTX kernels for the tests of this package."""

import numpy as np

from . import TensorMemory, launch

HEAD = """.version {version}
.target sm_90
.address_size 64
.visible .entry small({params}
)
{{
.shared .align 16 .b8 scratch[1024];
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .f32 %f<8>;
.reg .b64 %rd<16>;
"""
BODY_LINE = HEAD.count("\n") + 1
"""Line of the first line of a kernel's body."""


def text(body: str, params: tuple[str, ...] = ("u64",), version: str = "8.8") -> str:
    """A kernel with this body, whose parameters are p0, p1, …, all declared on one line."""
    declared = ",".join(f" .param .{kind} p{index}" for index, kind in enumerate(params))
    return HEAD.format(version=version, params=declared) + body.strip("\n") + "\nret;\n}\n"


ADDRESS = """
ld.param.u64 %rd1, [p0];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;
mul.wide.u32 %rd2, %r4, 4;
add.s64 %rd1, %rd1, %rd2;
"""
"""Sets %r1 to the thread's number in its block, %r4 to that in the grid, and %rd1 to its 4 bytes of p0."""

FIRST_LINE = BODY_LINE + ADDRESS.strip("\n").count("\n") + 1
"""Line of the first line of what follows ADDRESS."""


def run(body: str, data: np.ndarray, num_blocks: int = 1, num_threads: int = 32, tensors=None) -> None:
    """Runs ADDRESS and then `body`, with the address of `data` as p0. Memory is `data`, or `tensors` if given."""
    memory = TensorMemory([(x.ctypes.data, x.nbytes) for x in (tensors or [data])])
    arguments = [("ptr", data.ctypes.data)]
    launch(text(ADDRESS + body), num_blocks, num_threads, arguments, memory)


def aligned(numel: int, dtype=np.uint32) -> np.ndarray:
    """Zeros [numel] that start at a multiple of 64 bytes, with as many bytes of other memory around them."""
    dtype = np.dtype(dtype)
    memory = np.zeros(numel * dtype.itemsize + 192, np.uint8)
    start = 64 + -memory.ctypes.data % 64
    return memory[start : start + numel * dtype.itemsize].view(dtype)
