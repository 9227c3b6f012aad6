"""Compiles and launches ragged.cu: pack and unpack for buckets of many slices, in CUDA C++, through CuPy.

Why it exists: see ragged.cu. The engine uses these instead of Triton's where bench/kernels.py shows them ahead, which
AHEAD_OF_TRITON says. NVRTC compiles them at run time, so no CUDA toolkit is asked for; compiling needs no GPU either.
"""

import functools
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch

from fusedcomm.native import _C

from .constants import TILE, WIRE_IDS

if TYPE_CHECKING:
    from .bucket import Bucket, Stream

AHEAD_OF_TRITON: frozenset[str] = frozenset()
""""pack", "unpack" or both, where bench/kernels.py shows this file's kernel ahead: what the engine takes for buckets of
many slices.

Empty: not measured on a GPU yet.
"""

SOURCE = Path(__file__).with_name("ragged.cu")
WIRES = ("fp32", "bf16", "fp16", "int8")
"""Those that ragged.cu has; nor does it rotate, round stochastically, feed back what it leaves out, or sum."""

GRAD_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LANE_NUMEL = 16
"""Elements of a tile that a thread has, in ragged.cu."""

_STREAM = ("ptr", "ptr", "ptr", "i32", "i64")  # starts, offsets, first, num_slices, numel
_COUNTED_STREAM = ("ptr", "ptr", "ptr", "ptr", "i32", "i64")  # with counts
_PARTS = ("ptr", "ptr", "ptr", "i64", "i64", "i64", "i64", "i32")
_ENCODING = ("ptr", "i64", "i32", "i32", "i32")  # taken as the engine passes it, but not used
PARAMS = {
    "pack": ("ptr", *_COUNTED_STREAM, *_COUNTED_STREAM, *_PARTS, "f32", *_ENCODING),
    # num_messages is taken, too, but not used.
    "unpack": ("ptr", *_STREAM, *_STREAM, *_PARTS, "i32", "f32"),
}


@dataclass(frozen=True)
class Compiled:
    """The same fields as compile.Compiled has."""

    variant: "_C.KernelKey"
    symbol: str  # the kernel's name in the cubin
    cubin: bytes  # both kernels
    ptx: str
    num_warps: int
    shared_nbytes: int  # to ask for at launch: none, as these kernels declare theirs
    params: tuple[str, ...]  # "ptr", "i32", "i64" or "f32"
    num_scratch_pointers: int = 0


def check_cupy() -> str:
    """CuPy's version. RuntimeError if CuPy or the NVRTC it looks for is missing."""
    try:
        import cupy
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"CuPy with NVRTC cannot be loaded ({error}). Install what fits the driver: pip install "
            "cupy-cuda13x 'nvidia-cuda-nvrtc>=13,<14', or cupy-cuda12x nvidia-cuda-nvrtc-cu12"
        ) from error
    return cupy.__version__


def has(variant: "_C.KernelKey") -> bool:
    """Whether ragged.cu has a kernel for it."""
    plain = not (variant.flat or variant.rotated or variant.stochastic or variant.feedback or variant.sums)
    return variant.kernel in PARAMS and variant.wire in WIRES and plain


def compile(variant: "_C.KernelKey", capability: int, tile: int = TILE) -> Compiled:
    """Compiles for a compute capability, e.g. 90; once for each set of options in a process.

    ValueError if the variant is not one of this file's, RuntimeError with NVRTC's log if it cannot be compiled.
    """
    if not has(variant):
        raise ValueError(
            f"ragged.cu has pack and unpack of buckets that are not flat, for {', '.join(WIRES)} unrotated, to "
            f"nearest, not {variant}"
        )
    cubin, ptx = _compile(variant.wire, variant.block, variant.grad_dtype, tile, capability)
    symbol = f"ragged_{variant.kernel}_kernel"
    _check_params(ptx, symbol, PARAMS[variant.kernel])
    return Compiled(
        variant=variant,
        symbol=symbol,
        cubin=cubin,
        ptx=ptx,
        num_warps=tile // LANE_NUMEL // 32,
        shared_nbytes=0,
        params=PARAMS[variant.kernel],
    )


@functools.cache
def _compile(wire: str, block: int, grad_dtype: torch.dtype, tile: int, capability: int) -> tuple[bytes, str]:
    check_cupy()
    # Not cupy.RawModule(code=...), which asks the device for its architecture even where it is given.
    from cupy_backends.cuda.libs import nvrtc

    macros = {"WIRE": WIRE_IDS[wire], "GRAD": GRAD_IDS[grad_dtype], "BLOCK": block, "TILE": tile}
    options = (f"-arch=sm_{capability}", "-std=c++17", "-fmad=false", *(f"-D{k}={v}" for k, v in macros.items()))
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return _whole_elf(nvrtc.getCUBIN(program)), nvrtc.getPTX(program).decode()
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} {' '.join(options)}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _whole_elf(cubin: bytes) -> bytes:
    """CuPy 14 takes the last byte of a cubin for the end of a string and drops it; it is a zero."""
    table_offset, entry_nbytes, num_entries = (
        *struct.unpack_from("<Q", cubin, 32),
        *struct.unpack_from("<HH", cubin, 54),
    )
    return cubin.ljust(table_offset + entry_nbytes * num_entries, b"\0")


def _check_params(ptx: str, symbol: str, expected: tuple[str, ...]) -> None:
    """RuntimeError unless the kernel takes these; NVRTC does not tell pointers from integers."""
    kinds = {"ptr": "64", "i64": "64", "i32": "32", "f32": "f32"}
    entry = re.search(rf"\.entry\s+{symbol}\s*\((.*?)\)", ptx, re.DOTALL)
    found = re.findall(r"\.param\s+\.(\w+)", entry[1]) if entry else []
    if [kind.lstrip("usb") for kind in found] != [kinds[param] for param in expected]:
        raise RuntimeError(f"NVRTC compiled {symbol} with the parameters {found} where {expected} are passed")


# ---- launchers for tests and benchmarks


def pack(bucket: "Bucket", chunk: int, scale: float, out: torch.Tensor, num_programs: int) -> None:
    """One chunk's bytes into `out`, uint8 [layout.chunk_nbytes], on a GPU; adds to the streams' counts."""
    layout = bucket.layout
    arguments = (bucket.grads, *_stream(bucket.lossy, True), *_stream(bucket.exact, True))
    arguments = (*arguments, *_parts(layout, chunk, out), scale, *(None,) * len(_ENCODING))
    _launch("pack", bucket, num_programs, arguments)


def unpack(bucket: "Bucket", chunk: int, parts: torch.Tensor, scale: float, num_programs: int) -> None:
    """The values of `parts`, uint8 [layout.chunk_nbytes], into the bucket's slices, on a GPU."""
    layout = bucket.layout
    arguments = (bucket.grads, *_stream(bucket.lossy, False), *_stream(bucket.exact, False))
    arguments = (*arguments, *_parts(layout, chunk, parts), 1, scale)
    _launch("unpack", bucket, num_programs, arguments)


def _stream(stream: "Stream", counted: bool) -> tuple[object, ...]:
    counts = (stream.counts,) if counted else ()
    return stream.starts, stream.offsets, stream.first, *counts, stream.num_slices, stream.numel


def _parts(layout: object, chunk: int, parts: torch.Tensor) -> tuple[object, ...]:
    part, piece = layout.part, parts.data_ptr() + layout.part_offset
    sections = (piece, piece + part.scale_offset, piece + part.code_offset)
    shape = (layout.part_stride, part.lossy_numel, part.exact_numel)
    return *sections, *shape, chunk * layout.num_parts, layout.num_parts


def _launch(kernel: str, bucket: "Bucket", num_programs: int, arguments: tuple[object, ...]) -> None:
    import cupy

    device = bucket.grads.device
    layout = bucket.layout
    variant = _C.KernelKey(kernel, layout.wire, layout.block_numel, bucket.grads.dtype, False, layout.rotated)
    capability = "{}{}".format(*torch.cuda.get_device_capability(device))
    compiled = compile(variant, int(capability), bucket.tile)
    with torch.cuda.device(device), cupy.cuda.Device(device.index or 0):
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream)
        function = _loaded(compiled.cubin, device.index or 0).get_function(compiled.symbol)
        values = tuple(_scalar(param, argument) for param, argument in zip(PARAMS[kernel], arguments, strict=True))
        function((num_programs, 1, 1), (32 * compiled.num_warps, 1, 1), values, 0, stream)


@functools.cache
def _loaded(cubin: bytes, device_index: int) -> object:
    import cupy

    module = cupy.cuda.Module()
    module.load(cubin)
    return module


def _scalar(param: str, argument: object) -> object:
    """CuPy passes a scalar of numpy's by its own width."""
    if isinstance(argument, torch.Tensor):
        argument = argument.data_ptr()
    return {"ptr": numpy.uint64, "i64": numpy.int64, "i32": numpy.int32, "f32": numpy.float32}[param](argument or 0)
