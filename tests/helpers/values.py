"""Values for tests of the codec and of the kernels, and comparisons of bits."""

import math

import reference
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_WIRES = ("int8", "fp8", "int4")
WIRES = ("fp32", "bf16", "fp16", *BLOCK_WIRES)


def signed(
    numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, specials: bool = False, binades: int = 20
) -> torch.Tensor:
    """Random values of both signs over 2·binades binades. With `specials`, one element in 300 has a random bit
    pattern."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-binades, binades, (numel,), generator=generator).float()
    x = (torch.randn(numel, generator=generator) * exponents.exp2()).to(dtype)
    if specials:
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        limits = torch.iinfo(integers)
        patterns = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator).to(integers).view(dtype)
        x = torch.where(torch.rand(numel, generator=generator) < 1 / 300, patterns, x)
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def every_16_bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def special_fp32() -> torch.Tensor:
    """fp32 bit patterns at which the result of rounding, saturation or comparison changes."""
    nans = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC12345, 0xFFFFFFFF]
    infs = [0x7F800000, 0xFF800000]
    denormals = [0x00000001, 0x80000001, 0x007FFFFF, 0x00400000]
    bf16_ties = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00008000, 0x00018000, 0x7F7F8000]
    fp16_ties = [0x3F801000, 0x3F803000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33C00000, 0x387FE000]
    others = [0x00000000, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FE000, 0x38800000, 0x33800000]
    bits = [*nans, *infs, *denormals, *bf16_ties, *fp16_ties, *others]
    return torch.tensor(bits).to(torch.int32).view(torch.float32)


def blocks_of_32() -> torch.Tensor:
    """fp32 [num_blocks, 32]: blocks that wires with scales treat differently."""
    generator = torch.Generator().manual_seed(4)
    uniform = torch.rand(32, generator=generator) * 2 - 1
    least = torch.tensor(2.0**-100)
    below, above = (least.nextafter(torch.tensor(end)).item() for end in (0.0, 1.0))
    greatest = torch.finfo(torch.float32).max
    blocks = [
        *(torch.zeros(32), torch.full((32,), -0.0), torch.full((32,), -2.5), torch.full((32,), 1e-40)),
        *(torch.cat([torch.tensor([x]), uniform[1:] * x]) for x in (below, least.item(), above, 127.0)),
        torch.nn.functional.pad(torch.tensor([2.0**-96]), (3, 28)),
        torch.cat([torch.tensor([1e30]), uniform[1:]]),
        uniform * greatest,
        torch.cat([torch.tensor([greatest, -greatest]), uniform[2:] * greatest]),
        torch.tensor([greatest, -greatest]).repeat(16),
        torch.cat([torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45]), uniform[6:]]),
        torch.cat([torch.tensor([math.nan]), torch.zeros(31)]),
    ]
    blocks += [torch.cat([uniform[1:], torch.tensor([bad])]) for bad in (math.inf, -math.inf, math.nan)]
    return torch.stack(blocks)


def around(values: torch.Tensor, every: int = 1) -> torch.Tensor:
    """`values` (fp32, sorted, not negative) and the midpoints between them, one in `every`, and the fp32 neighbors of
    both. With both signs."""
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])[::every]
    infinity = torch.tensor(math.inf)
    points = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    return torch.cat([points, -points])


def blocks_around_codes(wire: str) -> torch.Tensor:
    """fp32 [num_blocks, 32]. Each block contains the greatest value of a code, in int4 the least: its scale is 1."""
    greatest = 8.0 if wire == "int4" else reference.GREATEST_CODE[wire]
    if wire == "fp8":
        values = torch.arange(256).to(torch.uint8).view(reference.WIRE_DTYPES[wire]).float()
        values = values[values.isfinite() & (values >= 0)].unique()
    elif wire == "int4":
        # Where the codes change: the roots of n + 1/2 = v·(9856 − 29·v²) / 8192.
        line = torch.linspace(0, 8, (1 << 20) + 1)
        changes = (line * (9856 - 29 * line * line) / 8192).round().diff().nonzero().view(-1)
        levels = torch.tensor(reference.LEVELS)[:9].neg()
        values = torch.cat([levels, line[changes], line[changes + 1]]).unique()
    else:
        values = torch.arange(int(greatest) + 1).float()
    points = around(values)
    points = points[points.abs() <= greatest]
    points = torch.nn.functional.pad(points, (0, -len(points) % 31)).view(-1, 31)
    return torch.cat([torch.full((len(points), 1), -greatest if wire == "int4" else greatest), points], dim=1)


def around_codes(wire: str) -> torch.Tensor:
    """fp32 [numel]: values at which a wire's rounding changes, and their neighbors."""
    if wire in BLOCK_WIRES:
        blocks = blocks_around_codes(wire)
        return torch.cat([blocks, blocks * 2**-30, blocks * 1.7, blocks / 3]).flatten()  # inverses of any mantissa
    if wire == "fp32":
        return special_fp32()
    values = every_16_bits(reference.WIRE_DTYPES[wire]).float()
    return around(values[values.isfinite() & (values >= 0)].unique(), every=7)
