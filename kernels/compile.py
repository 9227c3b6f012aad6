"""Compiles the kernels ahead of time for the C++ engine, which launches them by their handles.

How Triton passes a kernel's arguments is no public interface and differs between its versions, so it is verified, not
believed: the parameter list of the PTX has to be the one that the engine packs. Needs no GPU, and nothing of fusedcomm.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .constants import CODE_NBYTES, FEEDBACK_IDS, OPTIONS, SCALE_NBYTES, WIRE_IDS
from .pack import pack_kernel
from .reduce import reduce_kernel
from .scale import scale_kernel
from .unpack import unpack_kernel
from .variants import NUM_WARPS, TILE, Compiled, Variant

SUPPORTED_TRITON = ((3, 6), (3, 9))
"""The first and the last minor version that tests/kernels/test_kernel_code.py has seen to keep the launch convention,
and tests/kernels/test_kernel_constants.py to extend no constant wrongly. With 3.6 one of the former's 833 tests fails:
int4's rotated, stochastic pack with bf16 residuals has 88 bytes of stack on sm_120."""

MAX_SHARED_NBYTES = 48 * 1024
"""What a launch may use without asking the driver for more."""

KERNELS = {"pack": pack_kernel, "reduce": reduce_kernel, "unpack": unpack_kernel, "scale": scale_kernel}
GRAD_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CODE_TYPES = {1: "*i8", 2: "*i16", 4: "*i32"}
SCALE_TYPES = {2: "*i16", 4: "*fp32"}
RESIDUAL_TYPES = {None: "*i8", "fp32": "*fp32", "bf16": "*i16", "int8": "*i8"}

# By parameter name, for all kernels; those of gradients, scales, codes and residuals depend on the variant.
_TYPES = {
    **dict.fromkeys(("starts", "offsets", "counts", "exact_starts", "exact_offsets", "exact_counts"), "*i64"),
    **dict.fromkeys(("first", "exact_first"), "*i32"),
    **dict.fromkeys(("exact_in", "exact_out"), "*i32"),
    **dict.fromkeys(("num_slices", "exact_num_slices", "num_parts", "num_messages", "world_size"), "i32"),
    **dict.fromkeys(("numel", "exact_numel"), "i64"),
    **dict.fromkeys(("in_stride", "part_stride", "part_numel", "part_exact_numel", "first_part"), "i64"),
    **dict.fromkeys(("noise_parameter", "noise_step", "noise_source"), "i32"),
    "noise_seed": "i64",
    "residual_scales": "*fp32",
    "data": "*fp32",
    "scale": "fp32",
    "nonfinite_out": "*i64",
    "sum_sq_out": "*fp64",
}
_ALIGNED = (
    *("grads", "data", "in_stride", "part_stride", "residual"),
    *("exact_in", "scales_in", "codes_in", "exact_out", "scales_out", "codes_out"),
)


def check_triton() -> str:
    """Triton's version. RuntimeError if its launch convention has not been checked, or if it only interprets."""
    version = triton.__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    first, last = (".".join(map(str, limit)) for limit in SUPPORTED_TRITON)
    if not SUPPORTED_TRITON[0] <= numbers <= SUPPORTED_TRITON[1]:
        raise RuntimeError(f"Triton {version} is not supported: use {first} to {last}")
    if not isinstance(pack_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so that the kernels cannot be compiled: unset it")
    return version


def compile(variant: Variant, capability: int) -> Compiled:
    """Compiles for a compute capability, e.g. 90. Triton caches what it has compiled before.

    RuntimeError if Triton is not supported, or if what it made cannot be launched as the engine launches.
    """
    version = check_triton()
    kernel = KERNELS[variant.kernel]
    signature, constants = _signature(variant)
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in _ALIGNED if n in signature}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(OPTIONS))
    metadata, ptx = binary.metadata, binary.asm["ptx"]

    num_scratch_pointers = 0
    for field in ("global_scratch_size", "profile_scratch_size"):
        if hasattr(metadata, field):
            _require(version, variant, field, getattr(metadata, field), 0)
            num_scratch_pointers += 1
    _require(version, variant, "num_ctas", metadata.num_ctas, 1)
    _require(version, variant, "num_warps", metadata.num_warps, NUM_WARPS)
    if metadata.shared > MAX_SHARED_NBYTES:
        _require(version, variant, "shared memory", metadata.shared, f"at most {MAX_SHARED_NBYTES}")
    expected = tuple(_ptx_type(t) for t in signature.values() if t != "constexpr")
    _require(version, variant, "parameters", ptx_params(ptx), expected + ("ptr",) * num_scratch_pointers)
    return Compiled(
        variant=variant,
        symbol=metadata.name,
        cubin=binary.asm["cubin"],
        ptx=ptx,
        num_warps=metadata.num_warps,
        shared_nbytes=metadata.shared,
        params=expected,
        num_scratch_pointers=num_scratch_pointers,
    )


def ptx_params(ptx: str) -> tuple[str, ...]:
    """What the PTX's kernel declares, hidden parameters included: "ptr", "i32", "i64" or "f32"; anything else as is."""
    entries = re.findall(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    declared = re.findall(r"\.param\s+\.(\w+)\s+(\.ptr\b)?", entries[0]) if len(entries) == 1 else ()
    names = {"u32": "i32", "b32": "i32", "s32": "i32", "u64": "i64", "b64": "i64", "s64": "i64"}
    return tuple("ptr" if pointer else names.get(kind, kind) for kind, pointer in declared)


def _signature(variant: Variant) -> tuple[dict[str, str], dict[str, object]]:
    """(type of every parameter in the kernel's order, value of every constexpr)."""
    wire = variant.wire or "fp32"
    in_wire = variant.in_wire or wire
    types = {
        **_TYPES,
        "grads": GRAD_TYPES.get(variant.grad_dtype, ""),
        "scales_in": SCALE_TYPES[SCALE_NBYTES.get(in_wire, 4)],
        "scales_out": SCALE_TYPES[SCALE_NBYTES.get(wire, 4)],
        "codes_in": CODE_TYPES[CODE_NBYTES[in_wire]],
        "codes_out": CODE_TYPES[CODE_NBYTES[wire]],
        "residual": RESIDUAL_TYPES[variant.feedback],
    }
    values = {
        "IN_WIRE": WIRE_IDS[in_wire],
        "WIRE": WIRE_IDS[wire],
        "BLOCK": variant.block,
        "TILE": TILE,
        "FLAT": variant.flat,
        "HAS_EXACT": not variant.flat,
        "EPILOGUE": variant.epilogue,
        "ROTATED": variant.rotated,
        "STOCHASTIC": variant.stochastic,
        "FEEDBACK": FEEDBACK_IDS[variant.feedback],
        "SUMS": variant.sums,
    }
    names = KERNELS[variant.kernel].arg_names
    signature = {name: "constexpr" if name in values else types[name] for name in names}
    return signature, {name: values[name] for name in names if name in values}


def _ptx_type(triton_type: str) -> str:
    return "ptr" if triton_type.startswith("*") else {"fp32": "f32"}.get(triton_type, triton_type)


def _require(version: str, variant: Variant, what: str, found: object, supported: object) -> None:
    if found != supported:
        raise RuntimeError(f"Triton {version} compiled {variant} with {what} = {found}; supported: {supported}")
