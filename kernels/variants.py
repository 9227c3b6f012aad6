"""The kernels, and which of them an engine launches.

This file does not import Triton, which may be missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.native import _C

TILE = 2048
"""Elements that a program handles at a time: four accesses of 16 bytes of every thread for fp32 gradients. See
tile_of()."""

NUM_WARPS = 4
"""Warps of a program."""

PACK_PROGRAMS_PER_SM = 8
"""Programs of pack on each multiprocessor: as many as run at a time. All other kernels have one for each tile."""


def tile_of(wire: str, block_numel: int) -> int:
    """Elements of a tile: a block lies in one tile."""
    return max(TILE, block_numel) if _C.has_scales(wire) else TILE


def plain_registers(kernel: str, wire: str, in_wire: str | None, grad_nbytes: int, capability: int = 90) -> int:
    """Registers of a thread for max_registers(). With 64 these use a stack: with Triton 3.6 sums that change the wire,
    on sm_120 whatever counts elements that are not finite, and packs of int4 and of gradients of 16 bits."""
    if kernel == "reduce" and in_wire not in (None, wire):
        return 128
    counts_on_120 = kernel in ("pack", "scale") and capability >= 120
    return 80 if counts_on_120 or (kernel == "pack" and (wire == "int4" or grad_nbytes == 2)) else 64


def max_registers(
    tile: int,
    plain: int,
    feedback: bool = False,
    sums: bool = False,
) -> int:
    """Registers of a thread: as few as hold everything, so that as many programs as possible run at a time.

    plain: without the options that follow, in a tile of TILE elements.
    """
    if tile > TILE:
        return 255
    return 128 if feedback or sums else plain


SUPPORTED_TRITON = ((3, 6), (3, 9))
"""The oldest and the newest supported minor version. tests/kernels/test_every_variant.py executes what both
compile."""

TRITON = "triton>={0[0]}.{0[1]},<{1[0]}.{2}".format(*SUPPORTED_TRITON, SUPPORTED_TRITON[1][1] + 1)
"""The supported versions as pip takes them."""

Variant = _C.KernelKey
"""One kernel's specialization; csrc/devices/kernel_key.h documents its fields."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, and what the engine needs to launch it."""

    variant: "_C.KernelKey"
    symbol: str  # the kernel's name in the cubin
    cubin: bytes
    ptx: str
    num_warps: int
    shared_nbytes: int
    params: tuple[str, ...]  # type of each parameter: "ptr", "i32", "i64" or "f32"; scratch pointers excluded
    num_scratch_pointers: int  # pointers after the parameters; null must be passed for them


def engine_variants(
    wires: Sequence[tuple[str, int]],
    grad_dtypes: Sequence[torch.dtype],
    feedback: bool = False,
    local_wire: str | None = None,
    one_shot: bool = False,
    keeps_residuals: bool = False,
    gathered: Sequence[str] = (),
) -> tuple["_C.KernelKey", ...]:
    """Every kernel that an engine launches for these wires and gradient dtypes, each once.

    Args:
        wires: (name, block) of each wire.
        feedback: whether residuals are kept. Wires without loss have none.
        local_wire: the wire within a host, without residuals; the sums of a host are then encoded in `wires`.
            The kernels without it are included, because the hosts may not be known yet. None: sums have one level.
        one_shot: unpack sums several messages, and there is no reduce but within a host.
        gathered: the wires of all-gathers beside a one-shot's sums.
        keeps_residuals: in some passes pack leaves the residuals as they are: those in which this rank has no weight.
    """
    variants = []
    for wire, block in wires:
        lossless = wire == "fp32"
        encoder = {"feedback": feedback and not lossless}
        first_encoders = [encoder]
        if keeps_residuals and encoder["feedback"]:
            first_encoders.append({"feedback": False})
        packs = [{"wire": wire, **how} for how in first_encoders]
        sums = [] if one_shot else [{"wire": wire, **encoder}]
        if local_wire is not None:
            packs.append({"wire": local_wire})
            sums += [{"wire": wire, "in_wire": local_wire, **how} for how in first_encoders]
        unpack = {"wire": wire, "sums": one_shot}
        for dtype in grad_dtypes:
            variants += [Variant("pack", block=block, grad_dtype=dtype, **how) for how in packs]
            variants.append(Variant("unpack", block=block, grad_dtype=dtype, **unpack))
            if wire in gathered:
                variants.append(Variant("unpack", block=block, grad_dtype=dtype, **{**unpack, "sums": False}))
        variants += [Variant("reduce", block=block, **how) for how in sums]
    # For exact sums, small ones and those of wire fp32, of what is not summed in place: gradients that are allocated
    # one by one, and sums with a factor.
    is_exact = any(wire == "fp32" for wire, _ in wires)
    for dtype in grad_dtypes if is_exact else {torch.float32} & set(grad_dtypes):
        variants += [Variant(kernel, wire="fp32", grad_dtype=dtype) for kernel in ("pack", "unpack")]
    variants.append(Variant("scale"))
    return tuple(dict.fromkeys(variants))
