"""Which kernels there are and which of them an engine launches, whoever compiles them: Triton or NVRTC.

Imports neither, for either may be missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.native import _C

TILE = 8192
"""Stream elements that a program handles at a time: at least 16 KiB of 16-bit, 32 KiB of fp32 gradients in flight."""

NUM_WARPS = 16
"""With TILE, one 128-bit access per thread carries a quarter of a tile: four of them are in flight before the first
use, and one program saturates its SM without keeping the registers from other kernels."""

Variant = _C.KernelKey
"""One kernel's specialisation: csrc/devices/kernel_key.h says what its fields are."""


@dataclass(frozen=True)
class Compiled:
    variant: "_C.KernelKey"
    symbol: str  # the kernel's name in the cubin
    cubin: bytes
    ptx: str
    num_warps: int
    shared_nbytes: int
    params: tuple[str, ...]  # "ptr", "i32", "i64" or "f32", without the scratch pointers
    num_scratch_pointers: int  # pointers that follow the parameters; pass null


def engine_variants(
    wires: Sequence[tuple[str, int, bool]],
    grad_dtypes: Sequence[torch.dtype],
    stochastic: bool = False,
    feedback: str | None = None,
    measured: bool = False,
    local_wire: str | None = None,
    one_shot: bool = False,
) -> tuple["_C.KernelKey", ...]:
    """What an engine launches for messages in these wires, (name, block, rotated), and these gradient dtypes.

    `feedback`: the format of residuals, which a wire that loses nothing has none of. `measured`: now and then, what a
    first encoder leaves out is asked for, as an fp32 residual. `local_wire`: the wire in which gradients travel within
    a host, packed to nearest, so that their sums are what is encoded in `wires`; whether there are such hosts may turn
    out later. None: all travel in `wires`. `one_shot`: unpack sums, and nothing is reduced.
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
    if torch.float32 in grad_dtypes:  # an exact sum of gradients that lie apart; those in one run are summed in place
        exact = {"wire": "fp32", "grad_dtype": torch.float32, "flat": False}
        variants += [Variant("pack", **exact), Variant("unpack", **exact)]
    variants.append(Variant("scale"))
    return tuple(dict.fromkeys(variants))
