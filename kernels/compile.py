"""Compiles the Triton kernels ahead of time for the C++ engine, which launches them by their handles.

Triton's launch convention is not a public interface and differs between versions. compile() therefore checks that the
parameter list in the PTX is the one that the engine passes. Compiling needs no GPU.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedcomm.native import _C

from .arguments import CountedSlices, Counts, PartShape, Sections, Slices
from .constants import CODE_NBYTES, CONVERTS_FP8, SCALE_NBYTES, WIRE_IDS, options
from .pack import pack_kernel
from .reduce import reduce_kernel
from .scale import scale_kernel
from .unpack import unpack_kernel
from .variants import NUM_WARPS, SUPPORTED_TRITON, TRITON, Compiled, plain_registers, tile_of

MAX_SHARED_NBYTES = 48 * 1024
"""Shared memory, in bytes, that a launch may use without asking the driver for more."""

KERNELS = {"pack": pack_kernel, "reduce": reduce_kernel, "unpack": unpack_kernel, "scale": scale_kernel}
GRAD_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CODE_TYPES = {1: "*i8", 2: "*i16", 4: "*i32"}
SCALE_TYPES = {2: "*i16", 4: "*fp32"}

_SLICES = Slices("*i64", "*i32", "*i32", "*i32", "*i64", "*i64", "*i64")
_COUNTED = CountedSlices(*_SLICES, "*i64", "*i64", "*i64", "i32")

# Types by parameter name. They hold for all kernels, except that pack's slices are CountedSlices. The types of
# gradients, sections and residuals depend on the variant; _signature() adds them.
_TYPES = {
    "lossy": _SLICES,
    "exact": _SLICES,
    "slices": Counts("*i64", "*i64", "*i64", "i32"),
    "shape": PartShape("i64", "i64", "i64"),
    **dict.fromkeys(("num_parts", "num_messages", "world_size"), "i32"),
    **dict.fromkeys(("numel", "in_stride", "first_part"), "i64"),
    "data": "*fp32",
    "scale": "fp32",
}
_ALIGNED = {
    *("grads", "data", "in_stride", "residual", "shape.stride"),
    *(f"{message}.{section}" for message in ("message", "out") for section in Sections._fields),
}
"""Parameters that are multiples of 16, by their names in flattened()."""


def check_triton() -> str:
    """Triton's version.

    Raises RuntimeError if the version is outside SUPPORTED_TRITON, or if TRITON_INTERPRET is set.
    """
    version = triton.__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    first, last = (".".join(map(str, limit)) for limit in SUPPORTED_TRITON)
    if not SUPPORTED_TRITON[0] <= numbers <= SUPPORTED_TRITON[1]:
        raise RuntimeError(
            f'fusedcomm: Triton {version} is not supported: use {first} to {last}, pip install "{TRITON}"'
        )
    if not isinstance(pack_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so the kernels cannot be compiled: unset it")
    return version


def compile(variant: "_C.KernelKey", capability: int) -> Compiled:
    """Compiles one kernel for a compute capability, 90 for example. Triton caches compiled kernels.

    Raises RuntimeError if Triton is not supported, or if the engine could not launch the compiled kernel.
    """
    version = check_triton()
    kernel = KERNELS[variant.kernel]
    signature, constants = _signature(variant, capability)
    aligned = [place for name, place, _ in flattened(kernel, signature) if name in _ALIGNED]
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    grad_nbytes = variant.grad_dtype.itemsize if variant.grad_dtype is not None else 4
    plain = plain_registers(variant.kernel, variant.wire or "fp32", variant.in_wire, grad_nbytes, capability)
    how = options(constants["TILE"], plain, variant.feedback, variant.sums)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)
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
    expected = tuple(_ptx_type(kind) for _, _, kind in flattened(kernel, signature))
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
    """The types of the kernel's parameters, hidden ones included: "ptr", "i32", "i64", "f32", or PTX's name of another
    type. Empty unless the PTX has exactly one kernel."""
    entries = re.findall(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    declared = re.findall(r"\.param\s+\.(\w+)\s+(\.ptr\b)?", entries[0]) if len(entries) == 1 else ()
    names = {"u32": "i32", "b32": "i32", "s32": "i32", "u64": "i64", "b64": "i64", "s64": "i64"}
    return tuple("ptr" if pointer else names.get(kind, kind) for kind, pointer in declared)


def flattened(kernel: object, signature: dict[str, object]) -> list[tuple[str, tuple[int, ...], str]]:
    """The parameters as the engine passes them, without constants: (name, place, type) of each.

    The field of a tuple is named "tuple.field". A place is (index,), and (index, field index) within a tuple, as in
    Triton's attributes.
    """
    parameters = []
    for name, kind in signature.items():
        place = kernel.arg_names.index(name)
        if isinstance(kind, tuple):
            fields = zip(kind._fields, kind, strict=True)
            parameters += [(f"{name}.{field}", (place, i), type_) for i, (field, type_) in enumerate(fields)]
        elif kind != "constexpr":
            parameters.append((name, (place,), kind))
    return parameters


def _signature(variant: "_C.KernelKey", capability: int) -> tuple[dict[str, object], dict[str, object]]:
    """(types, values): the type of every parameter in the kernel's order, and the value of every constexpr.

    The type of a tuple is a tuple of types.
    """
    wire = variant.wire or "fp32"
    in_wire = variant.in_wire or wire
    types = {
        **_TYPES,
        **(dict.fromkeys(("lossy", "exact"), _COUNTED) if variant.kernel == "pack" else {}),
        "grads": GRAD_TYPES.get(variant.grad_dtype, ""),
        "message": _section_types(in_wire, capability),
        "out": _section_types(wire, capability),
        "residual": "*fp32" if variant.feedback else "*i8",
    }
    values = {
        "IN_WIRE": WIRE_IDS[in_wire],
        "WIRE": WIRE_IDS[wire],
        "BLOCK": variant.block,
        "TILE": tile_of(wire, variant.block),
        "FEEDBACK": variant.feedback,
        "SUMS": variant.sums,
    }
    names = KERNELS[variant.kernel].arg_names
    signature = {name: "constexpr" if name in values else types[name] for name in names}
    return signature, {name: values[name] for name in names if name in values}


def _section_types(wire: str, capability: int) -> Sections:
    converted = wire == "fp8" and divmod(capability, 10) >= CONVERTS_FP8
    codes = "*fp8e4nv" if converted else CODE_TYPES[CODE_NBYTES[wire]]
    return Sections("*i32", SCALE_TYPES[SCALE_NBYTES[wire]], codes)


def _ptx_type(triton_type: str) -> str:
    return "ptr" if triton_type.startswith("*") else {"fp32": "f32"}.get(triton_type, triton_type)


def _require(version: str, variant: "_C.KernelKey", what: str, found: object, supported: object) -> None:
    if found != supported:
        raise RuntimeError(
            f"Triton {version} compiled {variant} with {what} = {found}; supported: {supported}. Use another version "
            "of Triton"
        )
