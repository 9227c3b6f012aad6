"""How near to the memory's speed are the CPU codec's stages, and how do they compare with PyTorch's expressions?

    pack     fp32 gradients → wire bytes
    reduce   4 ranks' encodings of a quarter of them → the encoded mean
    unpack   wire bytes → fp32 gradients
    sum      2 ranks' wire bytes → their fp32 mean, as unpack does after a one-shot sum

Each is compared with a memcpy that moves as many bytes in total, with the eager PyTorch expression for the same stage,
and with that expression under torch.compile. Every call uses another buffer of a ring that is larger than the caches,
and all implementations take turns. A result is checked before it is timed: fusedcomm's bit for bit against
the tests' oracle, in a bucket of at most 16 MiB, the others against float64. The allocator keeps freed memory, so
that torch's fresh outputs cost no page faults.

Needs tqdm, 6 GiB of memory, and a C++ compiler for torch.compile; half an hour, a minute with --quick.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable

import torch
from lib.common import (
    Row,
    drop_memory,
    interleave,
    keep_memory,
    make_row,
    print_table,
    run_command,
    with_ratios,
    write_json,
)
from lib.oracle import reference
from tqdm import tqdm

from fusedcomm.native import _C

MIB = 1 << 20
BLOCK = 128
NUM_RANKS = 4
# Total size of the fp32 gradients of a ring's buffers. A ring has at least two buffers.
RING_NBYTES = 256 * MIB
# Greatest bucket that is compared with the reference, which needs fifty times the bucket's memory, and blocks that are
# compared at a time.
CHECKED_NUMEL, CHECKED_BLOCKS = 4 * MIB, 1 << 14
# Chunk size so large that any bucket is one chunk.
WHOLE = 1 << 62
# Chunk size of a one-shot sum of two ranks on a link of 1 Gbit/s.
ONE_SHOT_CHUNK_NBYTES = 128 << 10
PLAIN_WIRES = _C.WIRES
# Wires that differ only in how they encode. They unpack like the plain wire.
SPECIAL_WIRES = ("bf16-feedback", "int8-feedback", "fp8-feedback", "int4-feedback")
WIRES = (*PLAIN_WIRES, *SPECIAL_WIRES)
# Greatest error that passes the check, relative to the value itself, or for int8 to the greatest value of its block:
# twice half a step, because an expression may round before it divides.
TOLERANCE = {"fp32": 2.0**-22, "bf16": 2.0**-7, "fp16": 2.0**-10, "int8": 1.01 / 127}
# PyTorch has no usual expression for the other wires. They are compared with memcpy only.
TORCH_WIRES = tuple(TOLERANCE)

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Case:
    """One stage of one wire. `impls` take the index of a buffer. `checks` look at the result for index 0."""

    name: str
    numel: int
    traffic_bytes: int
    num_buffers: int
    impls: dict[str, Callable[[int], object]]
    checks: dict[str, Callable[[], bool]]


# ---- PyTorch's expressions. They encode a tensor [numel] as (codes, scales) for int8, else as (codes,)


def torch_encode(wire: str, x: torch.Tensor, factor: float) -> Tensors:
    """16 bits: the expression of torch's own hooks. int8: the usual expression, in blocks of BLOCK."""
    if wire == "int8":
        blocks = x.view(-1, BLOCK) * factor
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        return (blocks / scales).round().to(torch.int8), scales
    return (x.to(reference.WIRE_DTYPES[wire]).div_(1 / factor) if wire != "fp32" else x * factor,)


def torch_reduce(wire: str, codes: torch.Tensor, scales: torch.Tensor | None) -> Tensors:
    """The encoded mean of codes [NUM_RANKS, …], summed in fp32."""
    if wire == "int8":
        return torch_encode(wire, (codes.float() * scales).sum(0).view(-1), 1 / NUM_RANKS)
    return (codes.float().sum(0).mul_(1 / NUM_RANKS).to(codes.dtype),)


def torch_decode(wire: str, codes: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Decodes and divides by the world size, into fresh memory, as an eager hook does. `out` is not used."""
    if wire == "int8":
        return (codes.view(-1, BLOCK) * scales).div_(NUM_RANKS)
    return codes.to(torch.float32, copy=True).div_(NUM_RANKS)


def torch_copy(wire: str, codes: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Only decodes into the bucket, as torch's own hooks do after their sum."""
    if wire == "int8":
        return out.view(-1, BLOCK).copy_(codes.view(-1, BLOCK) * scales)
    return out.copy_(codes)


# ---- cases


def layout_of(
    wire: str, num_parts: int, numel: int, block: int | None = None, chunk_nbytes: int = WHOLE
) -> "_C.BucketLayout":
    name = wire.partition("-")[0]
    block = block or _C.default_block_numel(name)
    return _C.bucket_layout(name, block, num_parts, 0, numel, chunk_nbytes)


class Residuals:
    """The residuals that `wire` needs, one residual for each buffer of a ring."""

    def __init__(self, wire: str, layout: "_C.BucketLayout", numel: int, num_buffers: int) -> None:
        self.residuals: list[torch.Tensor] = []
        if wire in SPECIAL_WIRES:
            self.residuals = ring(num_buffers, numel, torch.float32)
            for residual in self.residuals:
                residual.zero_()

    @property
    def traffic_bytes(self) -> int:
        """Bytes of a residual that are read and written."""
        return 2 * self.residuals[0].nbytes if self.residuals else 0

    def of(self, index: int) -> torch.Tensor | None:
        return self.residuals[index] if self.residuals else None

    def of_reference(self) -> torch.Tensor | None:
        """A residual of zeros. None without error feedback."""
        return torch.zeros_like(self.residuals[0]) if self.residuals else None


def sections(layout: "_C.BucketLayout", part_bytes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, scales) as views of one part's bytes; for int8 as blocks, for other wires without scales."""
    part = layout.part
    codes = part_bytes[part.code_offset : part.nbytes].view(reference.WIRE_DTYPES[layout.wire])
    if layout.wire != "int8":
        return codes, None
    scale_end = part.scale_offset + part.lossy_numel // BLOCK * 4
    scales = part_bytes[part.scale_offset : scale_end].view(torch.float32)
    return codes.view(-1, BLOCK), scales.view(-1, 1)


def ring(num_buffers: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Buffers that have been written once, so that every page has its own physical memory."""
    return [torch.empty(numel, dtype=dtype).fill_(1) for _ in range(num_buffers)]


def gradients(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def close(wire: str, result: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether the error is within TOLERANCE, relative to the greatest value of a block (int8) or to the value itself.

    For other wires the bound has a constant, too: in a sum, terms of order one may cancel, which leaves fp32's rounding
    of terms of that order.
    """

    def piece_is_close(result: torch.Tensor, truth: torch.Tensor) -> bool:
        result, truth = result.double(), truth.double()
        size = truth.abs().amax(1, keepdim=True) if wire == "int8" else truth.abs() + (1 if wire == "fp32" else 1e-4)
        return bool(((result - truth).abs() <= TOLERANCE[wire] * size).all())

    pieces = (values.view(-1, BLOCK).split(CHECKED_BLOCKS) for values in (result, truth))
    return all(itertools.starmap(piece_is_close, zip(*pieces, strict=True)))


def decoded(wire: str, result: Tensors) -> torch.Tensor:
    return (result[0] * result[1] if wire == "int8" else result[0]).float().view(-1)


def add_memcpy(case: Case) -> None:
    numel = case.traffic_bytes // 8
    src, dst = ring(case.num_buffers, numel, torch.float32), ring(case.num_buffers, numel, torch.float32)
    src[0].copy_(gradients(numel, seed=0))
    case.impls["memcpy"] = lambda i: dst[i].copy_(src[i])
    case.checks["memcpy"] = lambda: torch.equal(dst[0], src[0])


def pack_case(wire: str, numel: int, num_buffers: int, codec: "_C.Codec", torch_impls: dict[str, Callable]) -> Case:
    layout, scale = layout_of(wire, 1, numel), 1 / NUM_RANKS
    grads = [gradients(numel, seed) for seed in range(num_buffers)]
    packed = ring(num_buffers, layout.chunk_nbytes, torch.uint8)
    residuals = Residuals(wire, layout, layout.padded_numel, num_buffers)
    traffic_bytes = numel * 4 + layout.chunk_nbytes + residuals.traffic_bytes
    case = Case(f"pack/{wire}", numel, traffic_bytes, num_buffers, {}, {})
    case.impls["fusedcomm"] = lambda i: codec.pack(layout, 0, [grads[i]], [], scale, packed[i], residuals.of(i))
    case.checks["fusedcomm"] = lambda: torch.equal(
        packed[0],
        reference.pack(layout, 0, grads[0], grads[0].new_empty(0), scale, residuals.of_reference()),
    )
    add_memcpy(case)
    for name, wrap in torch_impls.items() if wire in TORCH_WIRES else ():
        function = wrap(torch_encode)
        case.impls[name] = lambda i, function=function: function(wire, grads[i], scale)
        case.checks[name] = lambda name=name: close(wire, decoded(wire, case.impls[name](0)), grads[0] * scale)
    return case


def reduce_case(wire: str, numel: int, num_buffers: int, codec: "_C.Codec", torch_impls: dict[str, Callable]) -> Case:
    part_numel = numel // NUM_RANKS
    single, layout = layout_of(wire, 1, part_numel), layout_of(wire, NUM_RANKS, numel)
    values = torch.stack([gradients(part_numel, seed) for seed in range(NUM_RANKS)])
    parts = ring(num_buffers, layout.chunk_nbytes, torch.uint8)
    for buffer in parts:
        for part, value in zip(buffer.view(NUM_RANKS, -1), values, strict=True):
            codec.pack(single, 0, [value], [], 1.0, part)
    out = ring(num_buffers, layout.part.nbytes, torch.uint8)
    residuals = Residuals(wire, layout, part_numel, num_buffers)
    traffic_bytes = layout.chunk_nbytes + layout.part.nbytes + residuals.traffic_bytes
    case = Case(f"reduce/{wire}", part_numel, traffic_bytes, num_buffers, {}, {})
    case.impls["fusedcomm"] = lambda i: codec.reduce(layout, parts[i], 1 / NUM_RANKS, out[i], residuals.of(i))
    case.checks["fusedcomm"] = lambda: torch.equal(
        out[0], reference.reduce(layout, parts[0], 1 / NUM_RANKS, residuals.of_reference())
    )
    add_memcpy(case)
    if wire not in TORCH_WIRES:
        return case
    # The expressions get codes and scales in separate tensors, as hooks would have them.
    split = [[sections(layout, part) for part in buffer.view(NUM_RANKS, -1)] for buffer in parts]
    codes = [torch.stack([codes for codes, _ in ranks]) for ranks in split]
    scales = [torch.stack([scales for _, scales in ranks]) if wire == "int8" else None for ranks in split]
    truth = sum(codes[0][rank].double() * (scales[0][rank] if wire == "int8" else 1) for rank in range(NUM_RANKS))
    truth /= NUM_RANKS
    for name, wrap in torch_impls.items():
        function = wrap(torch_reduce)
        case.impls[name] = lambda i, function=function: function(wire, codes[i], scales[i])
        case.checks[name] = lambda name=name: close(wire, decoded(wire, case.impls[name](0)), truth)
    return case


def unpack_case(wire: str, numel: int, num_buffers: int, codec: "_C.Codec", torch_impls: dict[str, Callable]) -> Case:
    layout = layout_of(wire, 1, numel)
    packed, grads = ring(num_buffers, layout.chunk_nbytes, torch.uint8), ring(num_buffers, numel, torch.float32)
    for seed, buffer in enumerate(packed):
        codec.pack(layout, 0, [gradients(numel, seed)], [], 1.0, buffer)
    case = Case(f"unpack/{wire}", numel, numel * 4 + layout.chunk_nbytes, num_buffers, {}, {})

    mean = 1 / NUM_RANKS

    def expected(scale: float) -> torch.Tensor:
        """By fusedcomm, whose own check is that it agrees with the reference."""
        out = torch.empty(numel)
        codec.unpack(layout, 0, packed[0], scale, [out], [])
        return out

    case.impls["fusedcomm"] = lambda i: codec.unpack(layout, 0, packed[i], mean, [grads[i]], [])
    case.checks["fusedcomm"] = lambda: torch.equal(
        grads[0], reference.unpack(layout, 0, packed[0], mean, torch.float32)[0]
    )
    add_memcpy(case)
    if wire not in TORCH_WIRES:
        return case
    views = [sections(layout, buffer) for buffer in packed]
    for name, wrap in torch_impls.items():
        function = wrap(torch_decode)
        case.impls[name] = lambda i, function=function: function(wire, *views[i], grads[i])
        case.checks[name] = lambda name=name: torch.equal(case.impls[name](0).view(-1), expected(mean))
    case.impls["torch copy_"] = lambda i: torch_copy(wire, *views[i], grads[i])
    case.checks["torch copy_"] = lambda: torch.equal(grads[0], expected(1.0))
    return case


def sum_case(wire: str, numel: int, num_buffers: int, codec: "_C.Codec", torch_impls: dict[str, Callable]) -> Case:
    """Sums two ranks' messages chunk by chunk, as the engine does for a bucket."""
    layout = layout_of(wire, 1, numel, chunk_nbytes=ONE_SHOT_CHUNK_NBYTES)
    message_nbytes, num_chunks = layout.chunk_nbytes, layout.num_chunks
    nbytes = 2 * message_nbytes
    packed = ring(num_buffers, num_chunks * nbytes, torch.uint8)
    grads = ring(num_buffers, numel, torch.float32)
    for seed, buffer in enumerate(packed):
        for rank in range(2):
            values = gradients(numel, 2 * seed + rank)
            for chunk in range(num_chunks):
                begin = chunk * nbytes + rank * message_nbytes
                codec.pack(layout, chunk, [values], [], 1.0, buffer[begin : begin + message_nbytes])
    case = Case(f"sum/{wire}", numel, numel * 4 + num_chunks * nbytes, num_buffers, {}, {})

    def unpack(i: int) -> None:
        for chunk in range(num_chunks):
            parts = packed[i][chunk * nbytes : (chunk + 1) * nbytes]
            codec.unpack(layout, chunk, parts, 0.5, [grads[i]], [], 2)

    def expected() -> torch.Tensor:
        chunks = packed[0].view(num_chunks, nbytes)
        means = (reference.unpack(layout, k, parts, 0.5, torch.float32, 2)[0] for k, parts in enumerate(chunks))
        return torch.cat(list(means))

    case.impls["fusedcomm"] = unpack
    case.checks["fusedcomm"] = lambda: torch.equal(grads[0], expected())
    add_memcpy(case)
    return case


STAGES = {"pack": pack_case, "reduce": reduce_case, "unpack": unpack_case, "sum": sum_case}


def measure(case: Case, twin: Case, rounds: int) -> list[Row]:
    """Checks, then times, all implementations of one case. `twin`: the same with a bucket that the reference can take,
    for fusedcomm's check."""
    checked = {}
    for name in list(case.impls):
        of = twin if name == "fusedcomm" else case
        try:
            of.impls[name](0)
            checked[name] = of.checks[name]()
        except Exception as error:  # torch.compile fails in more ways than can be listed
            if name != "torch.compile":
                raise
            print(f"{case.name}: torch.compile is not measured: {str(error).splitlines()[0]}")
            del case.impls[name]
    # All implementations share one ring: a buffer is used again only after all the others.
    turns = itertools.count(1)
    functions = {name: lambda _, impl=impl: impl(next(turns) % case.num_buffers) for name, impl in case.impls.items()}
    seconds = interleave(functions, rounds)
    return [make_row(case.name, name, case.numel, case.traffic_bytes, seconds[name], checked[name]) for name in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64, 256], help="MiB of fp32 gradients (16 64 256)")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=WIRES)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--isa", default="auto", help=f"one of auto, {', '.join(_C.available_isas())} (auto)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the codec and of torch (1)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--no-compile", action="store_true", help="do not measure torch.compile")
    parser.add_argument("--quick", action="store_true", help="4 MiB, 5 rounds")
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    keep_memory()
    sizes, rounds = ([4], 5) if arguments.quick else (arguments.mib, arguments.rounds)
    torch.set_num_threads(arguments.threads)
    codec = _C.Codec(arguments.isa, arguments.threads)
    torch_impls = {"torch": lambda function: function}
    if not arguments.no_compile:
        torch_impls["torch.compile"] = torch.compile

    rows = []
    cases = [
        case
        for case in itertools.product(sizes, arguments.stages, arguments.wires)
        if case[1] not in ("unpack", "sum") or case[2] not in SPECIAL_WIRES
    ]
    for mib, stage, wire in tqdm(cases, disable=None):
        numel, num_buffers = mib * MIB // 4, max(2, RING_NBYTES // (mib * MIB))
        case = STAGES[stage](wire, numel, num_buffers, codec, torch_impls)
        twin = case if numel <= CHECKED_NUMEL else STAGES[stage](wire, CHECKED_NUMEL, 1, codec, {})
        rows += measure(case, twin, rounds)
        del case, twin  # their functions refer to them
        drop_memory()
    rows = with_ratios(rows, ["memcpy", "torch"])
    print(f"codec {codec.isa}, {arguments.threads} thread(s)")
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows, isa=codec.isa, rounds=rounds)
    wrong = [f"{row.case} {row.impl}" for row in rows if not row.checked]
    if wrong:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


if __name__ == "__main__":
    run_command(main)
