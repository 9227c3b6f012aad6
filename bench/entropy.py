"""How many bytes would a lossless stage save on the wire, and on which links would it pay?

    entropy      order 0, in bits an element: of bf16's exponents, of its signs and mantissas, and of the codes and
                 scales of the wires with blocks, as the CPU codec packs them
    errors       of the wires, and of blocks of other sizes and bits, by bytes: to compare with wires of fixed size
    coders       ratio and rates of compression libraries on the same bytes, with one thread. A coder is timed only
                 after its decompressed bytes were compared with the original ones
    break-even   whether a two-shot step gains by the best coder, by link, and what a smaller wire gains instead

Gradients are recorded while the models of accuracy.py train. Gaussian gradients are measured, too. zstandard and lz4
are measured if they are installed. docs/notes/lossless.md discusses the figures.

The break-even is computed for one of p ranks, which has a link of B bytes/s each way and n threads for coding. Let r =
coded / plain bytes. Let C and D be the plain bytes/s that one thread compresses and decompresses. Then, in seconds for
each byte of a bucket's wire bytes:

    wire    = 2(p − 1)/p / B                  each of the two shots sends and receives (p − 1)/p of the bytes
    coding  = (1/C + 2(p − 1)/p / D) / n      compresses p − 1 parts and the rank's own mean, decompresses what it gets

    gain with overlap     = wire / max(r · wire, coding)    coding is a stage of the pipeline beside the wire
    gain without overlap  = wire / (r · wire + coding)

Coding pays if the gain exceeds 1. Every assumption favors the coder: n threads are n times as fast, and are free for
coding; receivers know the sizes without an exchange; all chunks shrink alike; pack writes bf16's two planes at no cost;
pack, reduce and unpack take no time.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

import torch
from accuracy import (
    GRAIN,
    NUM_TRAINING_RANKS,
    UNMODIFIED,
    Characters,
    Task,
    characters_task,
    digits_task,
    gaussian,
    print_markdown,
    rank_gradients,
    set_gradient,
)
from codec import layout_of
from lib.common import Report, Row, interleave, make_row, run_command, with_ratios
from torch import Tensor
from tqdm import tqdm

from fusedcomm.native import _C

WIRES = ("bf16", "int8", "fp8", "int4", "int8-rotated", "int4-rotated")
# bf16 with the exponents apart from the rest. Only the exponents are coded.
PLANES = "bf16 planes"
STREAMS = (PLANES, "bf16", "int8", "fp8", "int4")
# Elements of a run for which a coder that adapts could have its own table.
RUN_NUMEL = 1 << 14
# Wires with the block sizes of Config(blocks=Blocks(numel)).
OTHER_BLOCKS = (("int4", 64), ("int4", 128))
# Bits of a code, for wires that do not exist, in blocks of 128.
BLOCK_BITS = range(5, 13)
LINKS_GBIT = (0.1, 1, 10, 25, 100)
NUM_THREADS = (1, 4)


# ---- gradients


@dataclasses.dataclass(frozen=True)
class Sample:
    """Each rank's own gradients, end to end, as the first shot sends them, or their mean, as the second shot does."""

    source: str  # name of a model or a distribution
    step: int | None
    mean: bool
    grads: Tensor  # fp32 [numel], a multiple of GRAIN

    @property
    def name(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.source}{step}{', mean' if self.mean else ''}"


def recorded_samples(task: Task, steps: int) -> Iterator[Sample]:
    """Samples from near the beginning, the middle and the end of `steps` steps of training with the exact mean."""
    moments = sorted({min(5, steps - 1), steps // 2, steps - 1})
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=steps)
    batches = [task.batches(0, rank) for rank in range(NUM_TRAINING_RANKS)]
    for step in range(steps):
        grads, _ = rank_gradients(task, model, batches)
        mean = UNMODIFIED.mean(grads)
        if step in moments:
            yield from samples_of(task.name, step, torch.stack(grads), mean)
        set_gradient(model, mean)
        optimizer.step()
        schedule.step()


def gaussian_samples(numel: int) -> Iterator[Sample]:
    grads = gaussian(NUM_TRAINING_RANKS, numel, torch.Generator().manual_seed(0))
    return samples_of("gaussian", None, grads, grads.mean(dim=0))


def samples_of(source: str, step: int | None, grads: Tensor, mean: Tensor) -> Iterator[Sample]:
    """`grads` is [num_ranks, numel], `mean` [numel]."""
    numel = grads.shape[1] // GRAIN * GRAIN
    yield Sample(source, step, False, grads[:, :numel].reshape(-1))
    yield Sample(source, step, True, mean[:numel].clone())


# ---- wire bytes


@functools.cache
def codec() -> "_C.Codec":
    return _C.Codec("auto", 1)


def pack(wire: str, grads: Tensor, block: int | None = None) -> Tensor:
    """uint8 [wire bytes]: scales, then codes."""
    layout = layout_of(wire, 1, grads.numel(), block)
    packed = torch.empty(layout.chunk_nbytes, dtype=torch.uint8)
    codec().pack(layout, 0, [grads], [], 1.0, packed)
    return packed


def unpack(wire: str, packed: Tensor, numel: int, block: int | None = None) -> Tensor:
    grads = torch.empty(numel)
    codec().unpack(layout_of(wire, 1, numel, block), 0, packed, 1.0, [grads], [])
    return grads


def split_planes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """bf16's exponents, and its signs and mantissas: uint8 [numel] each."""
    bits = packed.view(torch.int16).int()
    return (bits >> 7 & 0xFF).to(torch.uint8), (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)


def merge_planes(exponents: Tensor, rest: Tensor) -> Tensor:
    """The inverse of `split_planes`."""
    exponents, rest = exponents.int(), rest.int()
    return ((rest & 0x80) << 8 | exponents << 7 | rest & 0x7F).to(torch.int16).view(torch.uint8)


# ---- entropy


def entropy(symbols: Tensor, run: int | None = None) -> float:
    """Bits a symbol, order 0, of integers ≥ 0. With `run` each run of that many symbols has its own distribution."""
    bits = 0.0
    for part in symbols.split(run or len(symbols)):
        counts = torch.bincount(part.int()).double()
        counts = counts[counts > 0]
        bits += (counts * (len(part) / counts).log2()).sum().item()
    return bits / len(symbols)


def section_bits(wire: str, packed: Tensor, numel: int) -> dict[str, float]:
    """Bits an element for each section of the wire bytes. "codes" and "exponent" have the lesser of two entropies: of
    the whole section, and of runs with their own distributions."""

    def least(symbols: Tensor) -> float:
        return min(entropy(symbols), entropy(symbols, RUN_NUMEL)) * len(symbols) / numel

    if wire == "bf16":
        exponents, rest = split_planes(packed)
        whole = packed.view(torch.int16).int() & 0xFFFF
        return {
            "exponent": least(exponents),
            "exponent, one table": entropy(exponents),
            "sign and mantissa": entropy(rest),
            "whole symbol": entropy(whole),
        }
    layout = layout_of(wire, 1, numel)
    num_blocks = numel // layout.block_numel
    scales = packed[layout.part.scale_offset : layout.part.code_offset].view(num_blocks, -1)
    codes = packed[layout.part.code_offset :]
    if layout.wire == "int4":
        codes = torch.stack([codes & 15, codes >> 4], dim=1).view(-1)
    return {
        "codes": least(codes),
        "codes, one table": entropy(codes),
        "scales": sum(entropy(of_byte) for of_byte in scales.t()) * num_blocks / numel,
    }


def entropy_row(sample: Sample, wire: str) -> dict:
    """The row of one sample and wire. `ratio`: the least coded / plain bytes that coding symbol by symbol can reach."""
    numel = sample.grads.numel()
    packed = pack(wire, sample.grads)
    bits = section_bits(wire, packed, numel)
    wire_bits = packed.numel() * 8 / numel
    coded = bits["exponent"] + bits["sign and mantissa"] if wire == "bf16" else bits["codes"] + bits["scales"]
    return {
        "gradients": sample.name,
        "zeros": (sample.grads == 0).double().mean().item(),
        "numel": numel,
        "wire": wire,
        "wire_bits": wire_bits,
        "coded_bits": coded,
        "ratio": coded / wire_bits,
        "sections": bits,
    }


# ---- errors


def block_round_trip(grads: Tensor, bits: int) -> Tensor:
    """Rounds as wire="int8" does, but to codes of `bits` bits."""
    blocks = grads.view(-1, _C.DEFAULT_BLOCK_NUMEL)
    greatest = 2 ** (bits - 1) - 1
    scales = blocks.abs().amax(dim=1, keepdim=True) / greatest
    return (blocks / scales.clamp(min=2.0**-100)).round_().mul_(scales).view(-1)


def error_rows(sample: Sample) -> list[dict]:
    """A row for each format: vNMSE of encoding once, and bits an element on the wire."""

    def row(name: str, bits: float, decoded: Tensor) -> dict:
        error = (decoded.double() - sample.grads).square().sum() / sample.grads.double().square().sum()
        return {"gradients": sample.name, "format": name, "bits": bits, "vnmse": error.item()}

    rows, numel = [], sample.grads.numel()
    for wire, block in [*((wire, None) for wire in WIRES), *OTHER_BLOCKS]:
        packed = pack(wire, sample.grads, block)
        name = f"{wire}, blocks of {block}" if block else wire
        rows.append(row(name, packed.numel() * 8 / numel, unpack(wire, packed, numel, block)))
    for bits in BLOCK_BITS:
        name = f"{bits} bits, blocks of {_C.DEFAULT_BLOCK_NUMEL}"
        rows.append(row(name, bits + 32 / _C.DEFAULT_BLOCK_NUMEL, block_round_trip(sample.grads, bits)))
    return rows


# ---- coders


@dataclasses.dataclass(frozen=True)
class Coder:
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def zlib_huffman(data: bytes) -> bytes:
    compressor = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
    return compressor.compress(data) + compressor.flush()


def zstd_coders(zstandard) -> dict[str, Coder]:
    """zstd's fast levels (-1, -5) do not code literals at all. "zstd Huffman" finds hardly any matches, so it codes all
    symbols."""
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7
    )
    compressors = {
        "zstd 1": zstandard.ZstdCompressor(level=1),
        "zstd -1": zstandard.ZstdCompressor(level=-1),
        "zstd -5": zstandard.ZstdCompressor(level=-5),
        "zstd Huffman": zstandard.ZstdCompressor(compression_params=parameters),
    }
    decompress = zstandard.ZstdDecompressor().decompress
    return {name: Coder(compressor.compress, decompress) for name, compressor in compressors.items()}


def lz4_coders(lz4_block) -> dict[str, Coder]:
    return {"lz4": Coder(lz4_block.compress, lz4_block.decompress)}


OPTIONAL = {"zstandard": zstd_coders, "lz4.block": lz4_coders}


def find_coders(report: Report) -> dict[str, Coder]:
    """The coders by name. The report gets the versions of the packages, and the names of those not installed."""
    report.extra["packages"] = {}
    coders = {"zlib 1": Coder(lambda data: zlib.compress(data, 1), zlib.decompress)}
    coders["zlib Huffman"] = Coder(zlib_huffman, zlib.decompress)
    for module, make in OPTIONAL.items():
        package = module.partition(".")[0]
        try:
            coders |= make(importlib.import_module(module))
            report.extra["packages"][package] = metadata.version(package)
        except ImportError:
            report.missing("coders", package, f"not installed: pip install {package}", failed=False)
    return coders


def measure_coders(sample: Sample, stream: str, coders: dict[str, Coder], rounds: int) -> tuple[list[Row], list[dict]]:
    """Checks, then times, all coders on one sample: (rows, ratio and times of each). `stream` is one of STREAMS."""
    planes = stream == PLANES
    packed = pack("bf16" if planes else stream, sample.grads)
    coded_part, rest = split_planes(packed) if planes else (packed, None)
    data = coded_part.numpy().tobytes()
    coded = {name: coder.compress(data) for name, coder in coders.items()}
    checked = {}
    for name, coder in coders.items():
        decoded = torch.frombuffer(bytearray(coder.decompress(coded[name])), dtype=torch.uint8)
        checked[name] = torch.equal(merge_planes(decoded, rest) if planes else decoded, packed)

    copy = coded_part.clone()
    checked["memcpy"] = torch.equal(copy, coded_part)
    seconds = {}
    for direction in ("compress", "decompress"):
        functions = {"memcpy": lambda _: copy.copy_(coded_part)}
        for name, coder in coders.items():
            function, given = getattr(coder, direction), data if direction == "compress" else coded[name]
            functions[name] = lambda _, function=function, given=given: function(given)
        seconds[direction] = interleave(functions, rounds)

    rows, found, numel, nbytes = [], [], sample.grads.numel(), packed.numel()
    for direction, of_impl in seconds.items():
        for name, times in of_impl.items():
            traffic = len(data) + len(coded.get(name, data))
            rows.append(make_row(f"{direction}/{stream}/{sample.name}", name, numel, traffic, times, checked[name]))
    medians = {(row.case.partition("/")[0], row.impl): row.median_s for row in rows}
    for name in coders:
        coded_nbytes = len(coded[name]) + nbytes - len(data)
        found.append(
            {
                "source": sample.source,
                "step": sample.step,
                "stream": stream,
                "coder": name,
                "numel": numel,
                "nbytes": nbytes,
                "coded_nbytes": coded_nbytes,
                "ratio": coded_nbytes / nbytes,
                "compress_s": medians["compress", name],
                "decompress_s": medians["decompress", name],
            }
        )
    return with_ratios(rows, ["memcpy"]), found


# ---- break-even


@dataclasses.dataclass(frozen=True)
class Rates:
    """A coder's ratio and the rates of one thread, in plain bytes."""

    wire_bits: float  # of an element, without coding
    ratio: float
    compress_bytes_s: float
    decompress_bytes_s: float


def pooled(found: Sequence[dict]) -> Rates:
    """The rates over everything in `found`, coded one after the other."""
    nbytes = sum(one["nbytes"] for one in found)
    return Rates(
        nbytes * 8 / sum(one["numel"] for one in found),
        sum(one["coded_nbytes"] for one in found) / nbytes,
        nbytes / sum(one["compress_s"] for one in found),
        nbytes / sum(one["decompress_s"] for one in found),
    )


def gain(rates: Rates, link_bytes_s: float, ranks: int, threads: int, overlap: bool) -> float:
    """How many times as fast coding makes a step's communication. The formula is at the top of this file."""
    carried = 2 * (ranks - 1) / ranks
    wire = carried / link_bytes_s
    coding = (1 / rates.compress_bytes_s + carried / rates.decompress_bytes_s) / threads
    coded_wire = rates.ratio * wire
    return wire / (max(coded_wire, coding) if overlap else coded_wire + coding)


def break_even_gbit(rates: Rates, ranks: int, threads: int, overlap: bool) -> float:
    """The link, in Gbit/s, on which the gain is 1. 0 if coding does not reduce the bytes."""
    if rates.ratio >= 1:
        return 0.0
    carried = 2 * (ranks - 1) / ranks
    coding = (1 / rates.compress_bytes_s + carried / rates.decompress_bytes_s) / threads
    return carried * (1 if overlap else 1 - rates.ratio) / coding * 8 / 1e9


def break_even(rates: dict[tuple[str, str], Rates], ranks: int) -> list[dict]:
    """A row for every stream, link, number of threads and overlap, with the coder that gains most there.

    `rates` is by (stream, coder). "beside_bf16": how many times as fast as bf16 without coding.
    """
    rows = []
    for stream in dict.fromkeys(stream for stream, _ in rates):
        coders = {coder: found for (of_stream, coder), found in rates.items() if of_stream == stream}
        for overlap, threads, link in itertools.product((True, False), NUM_THREADS, LINKS_GBIT):
            gains = {name: gain(found, link * 1e9 / 8, ranks, threads, overlap) for name, found in coders.items()}
            best = max(gains, key=gains.get)
            row = {"stream": stream, "overlap": overlap, "threads": threads, "link_gbit": link, "coder": best}
            rows.append({**row, "gain": gains[best], "beside_bf16": gains[best] * 16 / coders[best].wire_bits})
    return rows


# ---- tables


def print_entropy(rows: list[dict]) -> None:
    body = []
    for row in rows:
        sections = ", ".join(f"{section} {bits:.2f}" for section, bits in row["sections"].items())
        body.append(
            [
                row["gradients"],
                f"{row['zeros']:.1%}",
                row["wire"],
                f"{row['wire_bits']:.2f}",
                sections,
                f"{row['coded_bits']:.2f}",
                f"{row['ratio']:.3f}",
            ]
        )
    print_markdown(["gradients", "zeros", "wire", "bits", "entropy, bits an element", "in all", "ratio"], body)


def print_errors(rows: list[dict]) -> None:
    names = list(dict.fromkeys(row["gradients"] for row in rows))
    found = {(row["format"], row["gradients"]): row for row in rows}
    body = []
    for format_ in dict.fromkeys(row["format"] for row in rows):
        own = [found[format_, name] for name in names]
        body.append([format_, f"{own[0]['bits']:.2f}", *[f"{row['vnmse']:.1e}" for row in own]])
    print_markdown(["vNMSE", "bits", *names], body)


def print_coders(source: str, rates: dict[tuple[str, str], Rates], ranks: int) -> None:
    ways = list(itertools.product((True, False), NUM_THREADS))
    body = []
    for (stream, coder), found in rates.items():
        speeds = [f"{found.compress_bytes_s / 1e9:.2f}", f"{found.decompress_bytes_s / 1e9:.2f}"]
        links = [f"{break_even_gbit(found, ranks, threads, overlap):.2f}" for overlap, threads in ways]
        body.append([stream, coder, f"{found.ratio:.3f}", *speeds, *links])
    links = [f"{_overlap(overlap)}, {_threads(threads)}" for overlap, threads in ways]
    print(f"\n{source}, all steps: GB/s of plain bytes, and the links in Gbit/s below which coding pays")
    print_markdown(["bytes", "coder", "ratio", "compress", "decompress", *links], body)


def print_break_even(source: str, rows: list[dict], ranks: int) -> None:
    body = []
    for key in dict.fromkeys((row["stream"], row["overlap"], row["threads"]) for row in rows):
        own = [row for row in rows if (row["stream"], row["overlap"], row["threads"]) == key]
        cells = [f"{row['gain']:.2f} ({row['coder']}; {row['beside_bf16']:.2f})" for row in own]
        body.append([key[0], f"{_overlap(key[1])}, {_threads(key[2])}", *cells])
    print(f"\n{source}, {ranks} ranks: times as fast as without coding (by which coder; as bf16 without coding)")
    print_markdown(["bytes", "", *[f"{link} Gbit/s" for link in LINKS_GBIT]], body)


def _overlap(overlap: bool) -> str:
    return "overlap" if overlap else "no overlap"


def _threads(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


# ---- command line


@dataclasses.dataclass(frozen=True)
class Sizes:
    steps: int = 300
    gaussian_numel: int = 1 << 18  # elements of each rank
    rounds: int = 7


QUICK = Sizes(steps=2, gaussian_numel=GRAIN, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, elements and rounds: the figures mean little")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the break-even (8)")
    parser.add_argument("--json", metavar="PATH", help="write figures there as soon as they are known")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else Sizes()
    report = Report(arguments.json, quick=arguments.quick, sizes=dataclasses.asdict(sizes), ranks=arguments.ranks)

    tasks = (digits_task(), characters_task(Characters(), held_out=1))
    samples = [sample for task in tasks for sample in recorded_samples(task, sizes.steps)]
    samples += gaussian_samples(sizes.gaussian_numel)
    own = [sample for sample in samples if not sample.mean]
    report.extra["entropy"] = [entropy_row(sample, wire) for sample in samples for wire in WIRES]
    report.extra["errors"] = [row for sample in own for row in error_rows(sample)]
    print_entropy(report.extra["entropy"])
    print_errors(report.extra["errors"])

    coders = find_coders(report)
    found, rates, ways = [], [], []
    report.extra.update(coded=found, rates=rates, break_even=ways)
    for sample in tqdm(own, disable=None):
        for stream in STREAMS:
            rows, of_stream = measure_coders(sample, stream, coders, sizes.rounds)
            found += of_stream
            report.add(rows)
    for source in dict.fromkeys(sample.source for sample in own):
        of_source = [one for one in found if one["source"] == source]
        keys = dict.fromkeys((one["stream"], one["coder"]) for one in of_source)
        pools = {key: pooled([one for one in of_source if (one["stream"], one["coder"]) == key]) for key in keys}
        own_ways = break_even(pools, arguments.ranks)
        rates += [{"source": source, "stream": key[0], "coder": key[1], **vars(pools[key])} for key in keys]
        ways += [{"source": source, **way} for way in own_ways]
        print_coders(source, pools, arguments.ranks)
        print_break_even(source, own_ways, arguments.ranks)
    report.write()
    report.finish()


if __name__ == "__main__":
    run_command(main)
