"""Which kernels there are, and which of them an engine launches. The same for Triton and NVRTC.

This file imports neither compiler, because either may be missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.native import _C

TILE = 8192
"""Elements that a program handles at a time: 16 KiB of 16-bit or 32 KiB of fp32 gradients in flight."""

NUM_WARPS = 16
"""Warps of a program. One 128-bit access of every thread covers a quarter of an fp32 tile. Four accesses are in flight
before the first use, and one program saturates its SM without taking the registers from other kernels."""

Variant = _C.KernelKey
"""One kernel's specialization; csrc/devices/kernel_key.h documents its fields."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, and what the engine needs to launch it."""

    variant: "_C.KernelKey"
    symbol: str  # the kernel's name in the cubin
    cubin: bytes
    ptx: str  # empty if the cubin came from a cache that keeps no PTX
    num_warps: int
    shared_nbytes: int
    params: tuple[str, ...]  # type of each parameter: "ptr", "i32", "i64" or "f32"; scratch pointers excluded
    num_scratch_pointers: int  # pointers after the parameters; null must be passed for them


def engine_variants(
    wires: Sequence[tuple[str, int, bool]],
    grad_dtypes: Sequence[torch.dtype],
    stochastic: bool = False,
    feedback: str | None = None,
    measured: bool = False,
    local_wire: str | None = None,
    one_shot: bool = False,
) -> tuple["_C.KernelKey", ...]:
    """Every kernel that an engine launches for these wires and gradient dtypes, each once.

    Args:
        wires: (name, block, rotated) of each wire.
        stochastic: encoders round stochastically, except those of fp32.
        feedback: the format of residuals. Wires without loss have none. None: no residuals are kept.
        measured: in some steps the error of each first encoder is measured, through an fp32 residual.
        local_wire: the wire within a host, which is rounded to nearest; the sums of a host are then encoded in `wires`.
            The kernels without it are included, because the hosts may not be known yet. None: sums have one level.
        one_shot: unpack sums several messages, and there is no reduce.
    """
    variants = []
    for wire, block, rotated in wires:
        lossless = wire == "fp32"
        encoder = {"stochastic": stochastic and not lossless, "feedback": None if lossless else feedback}
        first_encoders = [encoder, {**encoder, "feedback": "fp32"}] if measured and not lossless else [encoder]
        packs = [{"wire": wire, "rotated": rotated, **how} for how in first_encoders]
        sums = [] if one_shot else [{"wire": wire, **encoder}]
        if local_wire is not None:
            packs.append({"wire": local_wire})
            if not one_shot:
                sums += [{"wire": wire, "rotated": rotated, "in_wire": local_wire, **how} for how in first_encoders]
        unpack = {"wire": wire, "rotated": rotated, "sums": one_shot}
        for flat in (True, False):
            for dtype in grad_dtypes:
                gradients = {"block": block, "grad_dtype": dtype, "flat": flat}
                variants += [Variant("pack", **gradients, **how) for how in packs]
                variants.append(Variant("unpack", **gradients, **unpack))
            variants += [Variant("reduce", block=block, flat=flat, **how) for how in sums]
    # For exact sums, small ones and those of wire fp32, of what is not summed in place: gradients that are allocated
    # one by one, and sums with a factor.
    is_exact = any(wire == "fp32" for wire, _, _ in wires)
    for dtype in grad_dtypes if is_exact else {torch.float32} & set(grad_dtypes):
        for flat in (True, False):
            exact = {"wire": "fp32", "grad_dtype": dtype, "flat": flat}
            variants += [Variant("pack", **exact), Variant("unpack", **exact)]
    variants.append(Variant("scale"))
    return tuple(dict.fromkeys(variants))
