"""How near to the speed of a device copy are the GPU kernels, and how do they compare with PyTorch's expressions?

    pack       fp32 gradients → wire bytes: a flat bucket, and ragged ones, whose exempt tensors are sent as fp32
    unpack     wire bytes → fp32 gradients
    sum        two ranks' wire bytes → fp32 gradients
    reduce     4 ranks' encodings of a quarter of the bucket → the encoded mean
    scale      fp32 gradients in place, as for a bucket that is summed exactly

Each is compared with a device-to-device copy that moves as many bytes in total (the gradient is read and the wire
written once each), with the expressions of torch's own hooks, with those under torch.compile, and for ragged buckets
with torch._foreach_copy_, which casts but does not scale. Every call uses another of several sets of buffers, which
together exceed the cache fourfold. All implementations take turns. Times exclude the host's; where they cannot, the
JSON says so under "host_bound". A result is checked before it is timed: fusedcomm's bit for bit against the CPU codec,
the others against that or against float64.

With --json, rows are written as soon as they are measured. Cases that are left when --seconds have passed are named.

Needs a CUDA GPU with 24 GiB, Triton and tqdm; some minutes. --dry-run needs no GPU.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import compress

import torch
from codec import BLOCK, NUM_RANKS, WHOLE, Case, close, decoded, sections, torch_copy, torch_encode, torch_reduce
from lib.buckets import Shape, flat_shape, ragged_shape
from lib.common import Report, make_row, print_table, run_command, with_ratios
from lib.device import Device, have_gpu

from fusedcomm.native import _C

MIB = 1 << 20
# Tensors in a ragged bucket.
LIST_LENGTHS = (10, 100, 1000, 10_000)
PARTS = ("flat", "reduce", "scale", "ragged")
# A timed sample is 2 to 20 calls, enough to take a device that moves COPY_RATE bytes/s about SAMPLE_S.
SAMPLE_S, COPY_RATE = 150e-6, 4e12
COPY = "device copy"
BASELINES = (COPY, "torch")


@dataclasses.dataclass(frozen=True)
class Context:
    device: Device
    codec: "_C.Codec"
    compiles: Callable[[int], bool]
    """Whether torch.compile is measured for a bucket with this numel."""

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device.name).manual_seed(seed)

    def gradients(self, numel: int, seed: int) -> torch.Tensor:
        """fp32 [numel], normal values. Their magnitude depends on the seed."""
        grads = torch.randn(numel, device=self.device.name, generator=self.generator(seed))
        return grads.mul_(10.0 ** (seed % 3 - 1))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device.name)

    def poisoned(self, numel: int) -> torch.Tensor:
        """fp32 [numel], all NaN: an element that a kernel does not write fails the check."""
        return self.empty(numel, torch.float32).fill_(torch.nan)

    def compile(self, function: Callable) -> Callable:
        backend = "eager" if self.device.dry_run else "inductor"
        return torch.compile(function, dynamic=False, backend=backend)


# ---- cases


def num_tiles(layout: "_C.BucketLayout") -> int:
    """Programs that the engine launches for a bucket, of every kernel but pack: one for each tile."""
    from fusedcomm.kernels.variants import tile_of

    tile = tile_of(layout.wire, layout.block_numel)
    return layout.num_parts * sum(-(-numel // tile) for numel in (layout.part.lossy_numel, layout.part.exact_numel))


def add_copy(context: Context, case: Case) -> None:
    numel = case.traffic_bytes // 8
    src = [context.gradients(numel, seed) for seed in range(case.num_buffers)]
    dst = [context.poisoned(numel) for _ in src]
    case.impls[COPY] = lambda i: dst[i].copy_(src[i])
    case.checks[COPY] = lambda: torch.equal(dst[0], src[0])


def same_bits(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compares bytes. `expected` is on the CPU. Both are contiguous and start at multiples of 16 bytes."""
    return torch.equal(result.view(torch.uint8), expected.to(result.device).view(torch.uint8))


def anew(case: Case, impl: str, out: torch.Tensor, right: Callable[[], bool]) -> Callable[[], bool]:
    """A check that `impl` writes all of `out`, the output of set 0: other values are put there first."""

    def check() -> bool:
        out.fill_(0xA5 if out.dtype == torch.uint8 else torch.nan)
        case.impls[impl](0)
        return right()

    return check


def pack_on_cpu(context: Context, shape: Shape, wire: str, grads: torch.Tensor, scale: float) -> torch.Tensor:
    layout = shape.layout(wire)
    out = torch.empty(layout.chunk_nbytes, dtype=torch.uint8)
    context.codec.pack(layout, 0, *shape.views(grads.cpu()), scale, out)
    return out


def pack_case(context: Context, name: str, wire: str, shape: Shape) -> Case:
    import launchers

    from fusedcomm.kernels.variants import PACK_PROGRAMS_PER_SM

    layout, scale, num_programs = shape.layout(wire), 1 / NUM_RANKS, PACK_PROGRAMS_PER_SM * context.device.num_sms
    traffic_bytes = shape.numel * 4 + layout.chunk_nbytes
    num_sets = context.device.num_sets(traffic_bytes)
    grads = [context.gradients(shape.numel, seed) for seed in range(num_sets)]
    packed = [context.empty(layout.chunk_nbytes, torch.uint8).zero_() for _ in grads]
    buckets = [launchers.make_bucket(layout, flat, shape.lossy, shape.exact) for flat in grads]
    case = Case(f"pack/{wire}/{name}", shape.numel, traffic_bytes, num_sets, {}, {})
    case.impls["fusedcomm"] = lambda i: launchers.pack(buckets[i], 0, scale, packed[i], num_programs)
    case.checks["fusedcomm"] = anew(
        case, "fusedcomm", packed[0], lambda: same_bits(packed[0], pack_on_cpu(context, shape, wire, grads[0], scale))
    )
    add_copy(context, case)
    if name == "flat":
        case.impls["torch"] = lambda i: torch_encode(wire, grads[i], scale)
        if context.compiles(shape.numel):
            compiled = context.compile(torch_encode)
            case.impls["torch.compile"] = lambda i: compiled(wire, grads[i], scale)
        for impl in case.impls.keys() & {"torch", "torch.compile"}:
            case.checks[impl] = lambda impl=impl: close(wire, decoded(wire, case.impls[impl](0)), grads[0] * scale)
    elif wire != "int8":
        add_foreach(case, shape, wire, grads, packed, to_wire=True)
    return case


def unpack_case(context: Context, name: str, wire: str, shape: Shape) -> Case:
    import launchers

    layout, scale = shape.layout(wire), 1 / NUM_RANKS
    num_programs = num_tiles(layout)
    traffic_bytes = shape.numel * 4 + layout.chunk_nbytes
    num_sets = context.device.num_sets(traffic_bytes)
    on_cpu = pack_on_cpu(context, shape, wire, context.gradients(shape.numel, 0), 1.0)
    packed = [on_cpu.to(context.device.name) for _ in range(num_sets)]
    grads = [context.poisoned(shape.numel) for _ in packed]
    buckets = [launchers.make_bucket(layout, flat, shape.lossy, shape.exact) for flat in grads]
    case = Case(f"unpack/{wire}/{name}", shape.numel, traffic_bytes, num_sets, {}, {})

    @functools.cache
    def expected(scale: float) -> torch.Tensor:
        out = torch.full((shape.numel,), torch.nan)
        context.codec.unpack(layout, 0, on_cpu, scale, *shape.views(out))
        return out

    case.impls["fusedcomm"] = lambda i: launchers.unpack(buckets[i], 0, packed[i], scale, num_programs)
    case.checks["fusedcomm"] = anew(case, "fusedcomm", grads[0], lambda: same_bits(grads[0], expected(scale)))
    add_copy(context, case)
    if name == "flat":
        views = [sections(layout, buffer) for buffer in packed]
        case.impls["torch"] = lambda i: torch_copy(wire, *views[i], grads[i])
        if context.compiles(shape.numel):
            compiled = context.compile(torch_copy)
            case.impls["torch.compile"] = lambda i: compiled(wire, *views[i], grads[i])
        for impl in case.impls.keys() & {"torch", "torch.compile"}:
            case.checks[impl] = anew(
                case, impl, grads[0], lambda: close(wire, grads[0], expected(1.0).to(grads[0].device))
            )
    elif wire != "int8":
        add_foreach(case, shape, wire, grads, packed, to_wire=False)
    return case


def sum_case(context: Context, wire: str, numel: int) -> Case:
    """Unpack of a one-shot sum of two ranks."""
    import launchers

    shape, scale, num_messages = flat_shape(numel), 0.5, 2
    layout = shape.layout(wire)
    traffic_bytes = numel * 4 + layout.chunk_nbytes * num_messages
    num_sets = context.device.num_sets(traffic_bytes)
    encoded = [pack_on_cpu(context, shape, wire, context.gradients(numel, r), 1.0) for r in range(num_messages)]
    # The order of the ranks alternates between sets.
    messages = [torch.cat(encoded[:: 1 - 2 * (i % 2)]).to(context.device.name) for i in range(num_sets)]
    grads = [context.poisoned(numel) for _ in messages]
    buckets = [launchers.make_bucket(layout, flat, shape.lossy, shape.exact) for flat in grads]
    case = Case(f"sum/{wire}/2 ranks", numel, traffic_bytes, num_sets, {}, {})

    def expected() -> torch.Tensor:
        out = torch.full((numel,), torch.nan)
        context.codec.unpack(layout, 0, torch.cat(encoded), scale, [out], [], num_messages)
        return out

    case.impls["fusedcomm"] = lambda i: launchers.unpack(
        buckets[i], 0, messages[i], scale, num_tiles(layout), num_messages=num_messages
    )
    case.checks["fusedcomm"] = anew(case, "fusedcomm", grads[0], lambda: same_bits(grads[0], expected()))
    add_copy(context, case)
    return case


def add_foreach(
    case: Case, shape: Shape, wire: str, grads: list[torch.Tensor], packed: list[torch.Tensor], to_wire: bool
) -> None:
    """Adds PyTorch's function for many tensors in few launches. Like the copy back of torch's hooks, it does not
    scale."""
    layout = shape.layout(wire)
    lossy_numels, exact_numels = ([numel for _, numel in slices] for slices in (shape.lossy, shape.exact))
    in_lossy, in_exact = ([at != _C.HOLE for at, _ in slices] for slices in (shape.lossy, shape.exact))

    def pairs_of(flat: torch.Tensor, buffer: torch.Tensor) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """(to, from) of the lossy and of the exact elements. Each list has one dtype: PyTorch would copy a list of
        mixed dtypes tensor by tensor."""
        lossy, exact = shape.views(flat)
        codes = sections(layout, buffer)[0][: shape.lossy_numel].split(lossy_numels)
        floats = buffer[: shape.exact_numel * 4].view(torch.float32).split(exact_numels)
        lists = ((codes, lossy, in_lossy), (floats, exact, in_exact))
        pairs = [(list(compress(of_wire, real)), list(compress(grad, real))) for of_wire, grad, real in lists]
        return pairs if to_wire else [(grad, wire) for wire, grad in pairs]

    sets = [pairs_of(flat, buffer) for flat, buffer in zip(grads, packed, strict=True)]

    def copy(i: int) -> None:
        for dst, src in sets[i]:
            torch._foreach_copy_(dst, src)

    case.impls["torch._foreach_copy_"] = copy
    case.checks["torch._foreach_copy_"] = lambda: all(
        torch.equal(torch.cat(dst), torch.cat(src).to(dst[0].dtype)) for dst, src in sets[0]
    )


def reduce_case(context: Context, wire: str, numel: int) -> Case:
    import launchers

    layout, scale = _C.bucket_layout(wire, BLOCK, NUM_RANKS, 0, numel, WHOLE), 1 / NUM_RANKS
    shape = flat_shape(layout.part.lossy_numel)
    traffic_bytes = layout.chunk_nbytes + layout.part.nbytes
    num_sets = context.device.num_sets(traffic_bytes)
    encoded = [pack_on_cpu(context, shape, wire, context.gradients(shape.numel, r), 1.0) for r in range(NUM_RANKS)]
    # The order of the ranks rotates from set to set.
    parts = [torch.cat(encoded[i % 4 :] + encoded[: i % 4]).to(context.device.name) for i in range(num_sets)]
    out = [context.empty(layout.part.nbytes, torch.uint8).zero_() for _ in parts]
    num_programs = num_tiles(layout) // layout.num_parts  # the output is one part
    case = Case(f"reduce/{wire}/4 ranks", shape.numel, traffic_bytes, num_sets, {}, {})

    def expected() -> torch.Tensor:
        result = torch.empty(layout.part.nbytes, dtype=torch.uint8)
        context.codec.reduce(layout, parts[0].cpu(), scale, result)
        return result

    case.impls["fusedcomm"] = lambda i: launchers.reduce(layout, parts[i], scale, out[i], num_programs)
    case.checks["fusedcomm"] = anew(case, "fusedcomm", out[0], lambda: same_bits(out[0], expected()))
    add_copy(context, case)
    # The expressions get codes and scales in separate tensors, as hooks would have them.
    split = [[sections(layout, part) for part in buffer.view(NUM_RANKS, -1)] for buffer in parts]
    codes = [torch.stack([codes for codes, _ in ranks]) for ranks in split]
    scales = [torch.stack([scales for _, scales in ranks]) if wire == "int8" else None for ranks in split]
    case.impls["torch"] = lambda i: torch_reduce(wire, codes[i], scales[i])
    if context.compiles(numel):
        compiled = context.compile(torch_reduce)
        case.impls["torch.compile"] = lambda i: compiled(wire, codes[i], scales[i])

    def right(impl: str) -> bool:
        truth = (codes[0].double() * (scales[0] if wire == "int8" else 1)).mean(0)
        return close(wire, decoded(wire, case.impls[impl](0)), truth)

    for impl in case.impls.keys() & {"torch", "torch.compile"}:
        case.checks[impl] = lambda impl=impl: right(impl)
    return case


def scale_case(context: Context, numel: int) -> Case:
    import launchers

    shape, device = flat_shape(numel), context.device
    num_sets, factor = device.num_sets(numel * 8), -1.0  # repeated, any other factor would end in zeros or Infs
    grads = [context.gradients(numel, seed) for seed in range(num_sets)]
    buckets = [launchers.make_bucket(shape.layout("fp32"), flat, shape.lossy, shape.exact) for flat in grads]
    case = Case("scale/fp32/flat", numel, numel * 8, num_sets, {}, {})
    case.impls["fusedcomm"] = lambda i: launchers.scale_in_place(buckets[i], factor, num_tiles(shape.layout("fp32")))
    case.impls["torch"] = lambda i: grads[i].mul_(factor)

    def right(impl: str) -> bool:
        before = grads[0].clone().cpu()
        case.impls[impl](0)
        return same_bits(grads[0], before * factor)

    for impl in ("fusedcomm", "torch"):
        case.checks[impl] = lambda impl=impl: right(impl)
    add_copy(context, case)
    return case


# ---- measuring


def measure(context: Context, case: Case, rounds: int, report: Report) -> None:
    """Checks, then times, one case. An implementation that fails is not timed, and is named in the report."""
    checked = {}
    for impl in list(case.impls):
        try:
            case.impls[impl](0)
            checked[impl] = bool(case.checks[impl]())
        except Exception as error:
            report.missing(case.name, impl, error)
            context.device.synchronize()  # raises if the device is lost, since nothing else could run either
            del case.impls[impl]
    functions = {name: lambda turn, impl=impl: impl(turn % case.num_buffers) for name, impl in case.impls.items()}
    calls = min(20, max(2, round(SAMPLE_S * COPY_RATE / case.traffic_bytes))) if not context.device.dry_run else 1
    seconds = context.device.interleave(functions, rounds, calls)
    rows = [make_row(case.name, n, case.numel, case.traffic_bytes, seconds[n], checked[n]) for n in functions]
    rows = with_ratios(rows, BASELINES)
    print_table(rows)
    for impl in context.device.host_bound:
        print(f"{case.name} {impl}: its times include the host's time, which is too long to exclude")
        report.extra["host_bound"].append({"case": case.name, "numel": case.numel, "impl": impl})
    report.add(rows)


def plan(arguments: argparse.Namespace, context: Context, unit: int) -> list[tuple[str, Callable[[], Case]]]:
    """The names and constructors of the cases, the most telling first. `unit`: fp32 elements in a MiB (fewer in a dry
    run)."""
    codecs = {"pack": pack_case, "unpack": unpack_case}
    flat = [
        (f"{op}/{wire}/flat {mib} MiB", partial(codecs[op], context, "flat", wire, flat_shape(mib * unit)))
        for mib, wire, op in itertools.product(arguments.mib, arguments.wires, codecs)
    ]
    reduce = [
        (f"{op}/{wire} {mib} MiB", partial(case, context, wire, mib * unit))
        for mib, wire, (op, case) in itertools.product(
            arguments.mib, arguments.wires, (("reduce", reduce_case), ("sum", sum_case))
        )
    ]
    scale = [(f"scale {mib} MiB", partial(scale_case, context, mib * unit)) for mib in arguments.mib]
    ragged = [
        (
            f"{op}/{wire}/{length} tensors {mib} MiB",
            lambda op=op, wire=wire, mib=mib, length=length: codecs[op](
                context, f"{length} tensors", wire, ragged_shape(mib * unit, length)
            ),
        )
        for mib, wire, length, op in itertools.product(arguments.ragged_mib, arguments.wires, arguments.tensors, codecs)
    ]
    parts = {"flat": flat, "reduce": reduce, "scale": scale, "ragged": ragged}
    return [item for part in arguments.parts for item in parts[part]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024, 256, 16, 1], help="MiB of fp32 gradients")
    parser.add_argument("--ragged-mib", type=int, nargs="+", default=[64, 16, 256], help="MiB if ragged (64 16 256)")
    parser.add_argument("--compile-mib", type=int, nargs="*", default=[64], help="MiB with torch.compile (64)")
    parser.add_argument("--tensors", type=int, nargs="+", default=list(LIST_LENGTHS), help="tensors in a ragged bucket")
    parser.add_argument("--wires", nargs="+", choices=("fp32", "bf16", "fp16", "int8"), default=["bf16", "int8"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--all", action="store_true", help="every wire; ragged buckets of every size")
    parser.add_argument("--quick", action="store_true", help="one size, 5 rounds, no torch.compile")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, interpreted: the times mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    arguments = parser.parse_args()
    if arguments.all:
        arguments.wires, arguments.ragged_mib = ["bf16", "int8", "fp16", "fp32"], arguments.mib
    if arguments.quick:
        arguments.mib, arguments.ragged_mib, arguments.compile_mib, arguments.rounds = [64], [64], [], 5
    if arguments.dry_run:
        arguments.mib, arguments.ragged_mib, arguments.compile_mib = [1], [1], [1]
        arguments.tensors, arguments.rounds = [10], 1
    return arguments


def main() -> None:
    started = time.monotonic()
    arguments = parse()
    if not (arguments.dry_run or have_gpu()):
        print("not measured: this needs a CUDA GPU (--dry-run runs the same code on a CPU)")
        return
    # Only one kernel is compiled at a time, so starting a pool of compilers would take longer than it saves.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    device = Device(arguments.dry_run)
    # A dry run has two tiles and a part of one, divisible by the blocks and the ranks.
    unit = 2 * 8192 + 2 * NUM_RANKS * BLOCK if arguments.dry_run else MIB // 4
    compiled = {mib * unit for mib in arguments.compile_mib}
    codec = _C.Codec("auto", min(16, os.cpu_count() or 1))
    report = Report(arguments.json, dry_run=arguments.dry_run, rounds=arguments.rounds, host_bound=[])
    context = Context(device, codec, compiled.__contains__)
    for name, make in plan(arguments, context, unit):
        if time.monotonic() - started > arguments.seconds:
            report.missing(name, "all", f"no time left of {arguments.seconds:g} s", failed=False)
            continue
        try:
            measure(context, make(), arguments.rounds, report)
        except Exception as error:
            report.missing(name, "all", error)
            device.synchronize()
        gc.collect()  # a case is in a reference cycle, and holds its buffers until it is collected
    report.finish()


if __name__ == "__main__":
    run_command(main)
