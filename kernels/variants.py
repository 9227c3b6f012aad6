"""Which kernels there are and which of them an engine launches, whoever compiles them: Triton or NVRTC.

Imports neither, for either may be missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

TILE = 8192
"""Stream elements that a program handles at a time: at least 16 KiB of 16-bit, 32 KiB of fp32 gradients in flight."""

NUM_WARPS = 16
"""With TILE, one 128-bit access per thread carries a quarter of a tile: four of them are in flight before the first
use, and one program saturates its SM without keeping the registers from other kernels."""


@dataclass(frozen=True)
class Variant:
    """One kernel's specialisation."""

    kernel: str  # pack, reduce, unpack or scale
    wire: str | None  # None: scale
    block: int  # elements; matters to wires with scales alone
    grad_dtype: torch.dtype | None  # None: reduce
    flat: bool  # pack, unpack: FLAT and no exact stream; reduce: no exact section
    epilogue: bool = False  # unpack
    rotated: bool = False  # the kernel rotates, unpack: back; reduce only where it changes the wire
    in_wire: str | None = None  # reduce: what is summed, if that is another than what is written
    stochastic: bool = False  # pack, reduce
    feedback: str | None = None  # pack, reduce: the residual's format
    sums: bool = False  # unpack: of several messages


@dataclass(frozen=True)
class Compiled:
    variant: Variant
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
) -> tuple[Variant, ...]:
    """What an engine launches for messages in these wires, (name, block, rotated), and these gradient dtypes.

    `feedback`: the format of residuals, which a wire that loses nothing has none of. `measured`: now and then, what a
    first encoder leaves out is asked for, as an fp32 residual. `local_wire`: the wire in which gradients travel within
    a host, packed to nearest, so that their sums are what is encoded in `wires`; whether there are such hosts may turn
    out later. None: all travel in `wires`. `one_shot`: unpack sums, and nothing is reduced. ValueError if a wire has no
    blocks for an int8 residual.
    """
    variants = []
    for wire, block, rotated in wires:
        if feedback == "int8" and wire in ("bf16", "fp16"):
            raise ValueError(f"an int8 residual has the wire's blocks, and {wire} has none: use 'bf16' or 'fp32'")
        lossless = wire == "fp32"
        encoder = {"stochastic": stochastic and not lossless, "feedback": None if lossless else feedback}
        packs = [Variant("pack", wire, block, None, True, rotated=rotated, **encoder)]
        sums_of_hosts = []
        if local_wire is not None:
            in_wire = local_wire if local_wire != wire else None
            sums_of_hosts = [Variant("reduce", wire, block, None, True, rotated=rotated, in_wire=in_wire, **encoder)]
        if measured and not lossless:
            packs, sums_of_hosts = (
                [*encoders, *(replace(encoder, feedback="fp32") for encoder in encoders)]
                for encoders in (packs, sums_of_hosts)
            )
        if local_wire is not None:
            packs.append(Variant("pack", local_wire, block, None, True))
        unpack = Variant("unpack", wire, block, None, True, rotated=rotated, sums=one_shot)
        sums = [] if one_shot else [Variant("reduce", wire, block, None, True, **encoder), *sums_of_hosts]
        for flat in (True, False):
            variants += [
                replace(variant, grad_dtype=dtype, flat=flat) for dtype in grad_dtypes for variant in (*packs, unpack)
            ]
            variants += [replace(variant, flat=flat) for variant in sums]
    variants.append(Variant("scale", None, 0, torch.float32, True))
    return tuple(dict.fromkeys(variants))
