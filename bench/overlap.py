"""How much do the codec's kernels and matrix products slow each other, by the number of programs that the codec has?

One stream has large bf16 products, as in a backward pass. Beside it a stream of high priority packs and unpacks buckets
in turn, with eight programs for each of 4, 16 and 64 SMs (they would fill these), and as the engine launches them: "all
SMs", where unpack has a program for each tile. There are two duties:

    back-to-back   one codec kernel after another: the worst case for the products
    step           a codec kernel, then a pause, so that alone it would be active for --duty of the time

Each duty has four medians, measured in turn: a product alone and beside the codec, a codec kernel alone and beside the
products. A kernel's time begins when it could have started, at its predecessor's end, so it includes waiting for SMs.
Only kernels that ran while both streams were busy count. The kernels are checked before anything is timed.

Needs a CUDA GPU and Triton; a minute. --dry-run needs no GPU.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from codec import BLOCK, WHOLE
from lib.common import Report, Row, run_command
from lib.device import Device, have_gpu
from lib.oracle import reference

from fusedcomm.native import _C

MIB = 1 << 20
PROGRAMS_OF_SM = 8
MAX_ENTRIES = 900
"""Fewer entries than a stream's queue holds (1,024), so the host never waits for one stream while another is empty."""
# GROUP_S: the time that a group of back-to-back codec kernels takes at least. MAX_HOST_S: if enqueueing takes longer,
# the streams start before all is enqueued.
GROUP_S, MAX_HOST_S = 150e-6, 0.2


class Product:
    """C = A·B, each [n, n] in bf16, with two sets of matrices in turn."""

    def __init__(self, device: Device, n: int) -> None:
        generator = torch.Generator(device.name).manual_seed(0)

        def matrix() -> torch.Tensor:
            return torch.randn(n, n, device=device.name, generator=generator).to(torch.bfloat16)

        self.sets = [(matrix(), matrix(), matrix()) for _ in range(2)]
        self.n = n

    def __call__(self, turn: int) -> None:
        a, b, out = self.sets[turn % 2]
        torch.mm(a, b, out=out)


class CodecKernels:
    """Packs and unpacks a bucket in turn, with as many programs as fill a number of SMs."""

    def __init__(self, device: Device, numel: int, wire: str) -> None:
        import launchers

        self.numel, self.num_sms = numel, device.num_sms
        self.layout = _C.bucket_layout(wire, BLOCK, 1, 0, numel, WHOLE)
        self.traffic_bytes = numel * 4 + self.layout.chunk_nbytes
        num_sets = device.num_sets(self.traffic_bytes)
        generator = torch.Generator(device.name).manual_seed(0)
        self.grads = [torch.randn(numel, device=device.name, generator=generator) for _ in range(num_sets)]
        self.wires = [
            torch.zeros(self.layout.chunk_nbytes, dtype=torch.uint8, device=device.name) for _ in range(num_sets)
        ]
        self.buckets = [launchers.make_bucket(self.layout, flat, [(0, numel)], []) for flat in self.grads]

    def check(self, sms: int) -> bool:
        """Whether both kernels agree with the tests' oracle on the device. bench/kernels.py compares the kernels with
        the CPU codec."""
        before = self.grads[0].clone()
        self(0, sms)
        self(1, sms)
        packed = reference.pack(self.layout, 0, before, before.new_empty(0), 1.0)
        values = reference.unpack(self.layout, 0, packed, 1.0, torch.float32)[0]
        return torch.equal(self.wires[0], packed) and torch.equal(self.grads[0], values)

    def __call__(self, turn: int, sms: int) -> None:
        import launchers

        from fusedcomm.kernels.variants import TILE

        index = turn // 2 % len(self.grads)
        if turn % 2 == 0:
            launchers.pack(self.buckets[index], 0, 1.0, self.wires[index], PROGRAMS_OF_SM * sms)
        else:
            num_programs = PROGRAMS_OF_SM * sms if sms < self.num_sms else -(-self.numel // TILE)
            launchers.unpack(self.buckets[index], 0, self.wires[index], 1.0, num_programs)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Work for one stream: `count` groups of `group` calls, with a pause after each group."""

    stream: object
    call: Callable[[int], None]
    count: int
    group: int = 1
    pause_s: float = 0.0

    @property
    def entries(self) -> int:
        """Entries in the stream's queue: for each group its calls, two events and the pause."""
        return self.count * (self.group + 2 + (self.pause_s > 0))

    def enqueue(self, device: Device, gate: object) -> list[tuple[object, object]]:
        """Enqueues all groups, to start after the event `gate`. Returns each group's (begin, end) events."""
        marks = []
        with device.on(self.stream):
            gate.wait()
            for index in range(self.count):
                begin, end = device.event(), device.event()
                begin.record()
                for turn in range(index * self.group, (index + 1) * self.group):
                    self.call(turn)
                end.record()
                device.sleep(self.pause_s)
                marks.append((begin, end))
        return marks


@dataclasses.dataclass(frozen=True)
class Taken:
    """The times of one stream's calls while all streams were busy."""

    seconds: list[float]
    active: float
    """Fraction of the time in which calls ran or waited to run. The rest are pauses."""


def run(device: Device, *streams: Stream) -> list[Taken]:
    """Runs the streams side by side. Everything is enqueued before anything starts, unless that takes the host longer
    than MAX_HOST_S."""
    host_s = 1e-3 + 20e-6 * sum(stream.entries for stream in streams)
    while True:
        results, late = _run_once(device, streams, host_s)
        if not late or host_s > MAX_HOST_S:
            return results
        host_s *= 2


def _run_once(device: Device, streams: Sequence[Stream], host_s: float) -> tuple[list[Taken], bool]:
    """The streams wait for an event while the host enqueues, which may take `host_s`. Returns each stream's times, and
    whether the host took longer."""
    device.synchronize()
    start, gate = device.event(), device.event()
    start.record()
    device.sleep(host_s)
    gate.record()
    marks = [stream.enqueue(device, gate) for stream in streams]
    late = gate.query()
    device.synchronize()
    shared_ms = min(start.elapsed_time(of_stream[-1][1]) for of_stream in marks)
    results = []
    for stream, of_stream in zip(streams, marks, strict=True):
        # The first group is not counted, because it also waits for the other streams to start.
        times = [(start.elapsed_time(begin), start.elapsed_time(end)) for begin, end in of_stream[1:]]
        times = [(begin, end) for begin, end in times if end <= shared_ms or device.dry_run]
        busy_ms = sum(end - begin for begin, end in times)
        seconds = [(end - begin) / stream.group / 1e3 for begin, end in times]
        results.append(Taken(seconds, busy_ms / (times[-1][1] - times[0][0]) if times else 0.0))
    return results, late


def measure(
    device: Device, product: Product, codec: CodecKernels, sms: int, duty: float, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], float]:
    """({name: seconds of each call}, part of the time in which the codec was active beside the products). The names are
    "product alone", "product beside codec", "codec alone" and "codec beside product"."""
    of_products, of_codec = device.stream(high_priority=False), device.stream(high_priority=True)

    def call(turn: int) -> None:
        codec(turn, sms)

    codec_s = statistics.median(run(device, Stream(of_codec, call, 20))[0].seconds)
    product_s = statistics.median(run(device, Stream(of_products, product, 4))[0].seconds)
    pause_s = codec_s * (1 / duty - 1)
    # Back to back, a group has so many calls that its two events add little to its time.
    group = max(1, round(GROUP_S / codec_s)) if pause_s == 0 and not device.dry_run else 1
    codecs = Stream(of_codec, call, 1, group, pause_s)
    # Side by side both streams take longer, so the codec gets calls to spare. Calls left at the end do no harm.
    wanted = 2.5 * arguments.products * product_s / (group * codec_s + pause_s)
    count = 4 if device.dry_run else min(MAX_ENTRIES // codecs.entries, max(8, round(wanted)))
    codecs = dataclasses.replace(codecs, count=count)
    codecs_alone = dataclasses.replace(codecs, count=min(count, 30))
    products = Stream(of_products, product, arguments.products)

    seconds: dict[str, list[float]] = {}
    active = []
    for _ in range(arguments.rounds):
        of_products_beside, of_codec_beside = run(device, products, codecs)
        active.append(of_codec_beside.active)
        for name, taken in (
            ("product alone", run(device, products)[0]),
            ("codec alone", run(device, codecs_alone)[0]),
            ("product beside codec", of_products_beside),
            ("codec beside product", of_codec_beside),
        ):
            seconds.setdefault(name, []).extend(taken.seconds)
    return seconds, statistics.median(active)


class NothingBeside(RuntimeError):
    """One stream kept the other from finishing any call: a finding, but there is no figure."""


def rows_of(case: str, seconds: dict[str, list[float]], product: Product, codec: CodecKernels) -> list[Row]:
    rows = []
    for impl, values in seconds.items():
        if not values:
            raise NothingBeside(f"{impl}: no call ended while both streams were busy")
        numel, nbytes = (
            (product.n**2, 6 * product.n**2) if impl.startswith("product") else (codec.numel, codec.traffic_bytes)
        )
        median_s = statistics.median(values)
        ratios = (
            {"alone": statistics.median(seconds[f"{impl.split()[0]} alone"]) / median_s} if "beside" in impl else {}
        )
        rows.append(Row(case, impl, numel, nbytes, median_s, min(values), True, ratios))
    return rows


def print_line(case: str, rows: list[Row], product: Product, active: float) -> None:
    by_impl = {row.impl: row for row in rows}
    alone, beside = by_impl["product alone"], by_impl["product beside codec"]
    codec, squeezed = by_impl["codec alone"], by_impl["codec beside product"]
    print(
        f"{case:<28} product {2 * product.n**3 / alone.median_s / 1e12:7.0f} TFLOP/s, x{beside.ratios['alone']:.2f} "
        f"beside the codec; codec {codec.traffic_bytes / codec.median_s / 1e9:6.0f} GB/s, "
        f"x{squeezed.ratios['alone']:.2f} beside the products, active {active:.0%} of the time",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sms", type=int, nargs="+", default=[4, 16, 64], help="SMs, besides all")
    parser.add_argument("--wires", nargs="+", choices=("bf16", "int8"), default=["bf16"])
    parser.add_argument("--mib", type=int, default=64, help="MiB of fp32 gradients in a bucket (64)")
    parser.add_argument("--matrix", type=int, default=8192, help="rows and columns of a matrix (8192)")
    parser.add_argument("--products", type=int, default=5, help="products in a round (5)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (10)")
    parser.add_argument("--duty", type=float, default=0.15, help="the codec's active part of a step (0.15)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, interpreted: the times mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 2
    if arguments.dry_run:
        arguments.matrix, arguments.products, arguments.rounds, arguments.sms = 64, 3, 1, [1]
    return arguments


def main() -> None:
    started = time.monotonic()
    arguments = parse()
    if not (arguments.dry_run or have_gpu()):
        print("not measured: this needs a CUDA GPU (--dry-run runs the same code on a CPU)")
        return
    device = Device(arguments.dry_run)
    active_of: dict[str, float] = {}
    settings = {
        "duty": arguments.duty,
        "rounds": arguments.rounds,
        "matrix": arguments.matrix,
        "codec_active": active_of,
    }
    report = Report(arguments.json, dry_run=arguments.dry_run, **settings)
    report.missing("all-reduce", "NCCL, one rank", "with one rank an all-reduce moves nothing", failed=False)
    product = Product(device, arguments.matrix)
    gc.disable()
    for wire in arguments.wires:
        codec = CodecKernels(device, 10_240 if arguments.dry_run else arguments.mib * MIB // 4, wire)
        duties = {"back-to-back": 1.0, "step": arguments.duty}
        limits = [sms for sms in arguments.sms if sms < device.num_sms] + [device.num_sms]
        for duty_name, sms in [(name, sms) for name in duties for sms in limits]:
            case = f"{duty_name}/{wire}/{sms} SMs"
            if time.monotonic() - started > arguments.seconds:
                report.missing(case, "all", f"no time left of {arguments.seconds:g} s", failed=False)
                continue
            try:
                if not codec.check(sms):
                    raise RuntimeError("wrong result")
                seconds, active = measure(device, product, codec, sms, duties[duty_name], arguments)
                rows = rows_of(case, seconds, product, codec)
            except Exception as error:
                report.missing(case, "all", error, failed=not isinstance(error, NothingBeside))
                device.synchronize()
                continue
            active_of[case] = active
            print_line(case, rows, product, active)
            report.add(rows)
    report.finish()


if __name__ == "__main__":
    run_command(main)
