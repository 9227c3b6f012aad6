"""kernels/ragged.cu against the oracle, bit for bit: run on the CPU as it is written (tests/native/cuda_on_cpu.h), on a
GPU where there is one; and, with neither, what NVRTC makes of it for every architecture."""

import ctypes
import dataclasses
import functools
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fusedcomm import reference
from fusedcomm.native import _C

ROOT = Path(__file__).parents[2]
WIRES = ("fp32", "bf16", "fp16", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 7.0  # in memory that belongs to no slice
GUARD_NBYTES = 64


# ---- buckets


@dataclasses.dataclass(frozen=True)
class Setup:
    """A bucket in memory. Slices are (offset, numel) in elements of `memory`, whose first one is the origin."""

    layout: "_C.BucketLayout"
    memory: torch.Tensor
    lossy: list[tuple[int, int]]
    exact: list[tuple[int, int]]

    def stream(self, slices):
        return torch.cat([self.memory[:0], *(self.memory[offset : offset + numel] for offset, numel in slices)])


def patterns(numel, dtype, seed):
    """Any bits, but mostly numbers of 40 binades; some in a row near 2^-100, ties, and at the ends of formats."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(numel, generator=generator)
    exponents = torch.randint(-20, 20, (numel,), generator=generator).float()
    x = torch.randn(numel, generator=generator) * exponents.exp2()
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integers)
    any_bits = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator).to(integers).view(dtype)
    ends = torch.tensor([65504.0, 65519.99, 65520.0, -65536.0, 3.4e38, -3.39e38, 2**-14, 2**-24, 2**-25, -(2**-133)])
    ties = torch.randint(-300, 300, (numel,), generator=generator) * 0.5
    x = torch.where(random < 0.1, ties, x)
    # Whole blocks of less, with their greatest at the limit or just below.
    tiny = torch.arange(numel) // 600 % 7
    x = torch.where(tiny == 3, x.sign() * 2.0**-100, torch.where(tiny == 5, x.sign() * (2.0**-100 - 2.0**-124), x))
    x = torch.where(random > 0.998, ends[torch.randint(len(ends), (numel,), generator=generator)], x)
    special = torch.rand(numel, generator=generator) < 1 / 300
    return torch.where(special & (torch.arange(numel) % 2500 < 1800), any_bits, x.to(dtype))


def make_setup(wire, dtype, block, lossy_numels, exact_numels, num_parts=2, chunk_nbytes=4096, gap=1, seed=0):
    """Slices of both streams in turns, `gap` elements or a few more between them."""
    layout = _C.bucket_layout(wire, block, num_parts, sum(exact_numels), sum(lossy_numels), chunk_nbytes)
    numels = [(False, n) for n in lossy_numels]
    for index, n in enumerate(exact_numels):
        numels.insert(min(3 * index + 1, len(numels)), (True, n))
    slices, position = {False: [], True: []}, 16
    for index, (exact, numel) in enumerate(numels):
        position += gap * (1 + index % 3)
        slices[exact].append((position, numel))
        position += numel
    memory = torch.full((position + 32,), GUARD, dtype=dtype)
    values = patterns(sum(n for _, n in numels), dtype, seed)
    taken = 0
    for offset, numel in slices[False] + slices[True]:
        memory[offset : offset + numel] = values[taken : taken + numel]
        taken += numel
    return Setup(layout, memory, slices[False], slices[True])


def expected_counts(setup, slices, scale):
    return [
        int((~reference.scaled(setup.memory[offset : offset + numel], scale).isfinite()).sum())
        for offset, numel in slices
    ]


def bits(x):
    return x.view(torch.uint8)


def assert_same(found, expected, what):
    if not torch.equal(bits(found), bits(expected)):
        where = (bits(found) != bits(expected)).nonzero().flatten() // expected.element_size()
        first = int(where[0])
        pytest.fail(f"{what}: {len(where)} bytes differ, first in {first}: {found[first]} for {expected[first]}")


def check_pack(runner, setup, scale, num_programs=3):
    layout = setup.layout
    kernels = runner(setup)
    lossy, exact = setup.stream(setup.lossy), setup.stream(setup.exact)
    for chunk in range(layout.num_chunks):
        expected = reference.pack(layout, chunk, lossy, exact, scale)
        found = kernels.pack(chunk, scale, num_programs)
        assert_same(found, expected, f"chunk {chunk} of {layout}")
    assert kernels.counts(False) == expected_counts(setup, setup.lossy, scale)
    assert kernels.counts(True) == expected_counts(setup, setup.exact, scale)


def check_unpack(runner, setup, scale, parts_of, num_programs=3, epilogue=True):
    layout, dtype = setup.layout, setup.memory.dtype
    expected = torch.full_like(setup.memory, GUARD)
    kernels = runner(dataclasses.replace(setup, memory=expected.clone()))
    for chunk in range(layout.num_chunks):
        parts = parts_of(chunk)
        tally = kernels.unpack(chunk, parts, scale, num_programs, epilogue)
        stored = []
        for exact, values in enumerate(reference.unpack(layout, chunk, parts, scale, dtype)):
            begin = (layout.exact_range if exact else layout.lossy_range)(chunk, 0)[0]
            put(expected, setup.exact if exact else setup.lossy, begin, values)
            stored.append(values.float())
        assert_same(kernels.memory(), expected, f"chunk {chunk} of {layout}")
        if epilogue:
            check_tally(tally, torch.cat(stored))


def put(memory, slices, begin, values):
    """Into the stream of `slices`, from element `begin` on."""
    start = 0
    for offset, numel in slices:
        low, high = max(start, begin), min(start + numel, begin + values.numel())
        if low < high:
            memory[offset + low - start : offset + high - start] = values[low - begin : high - begin]
        start += numel


def check_tally(tally, stored):
    num_nonfinite, sum_sq = tally
    squares = (stored * stored).double()
    assert int(num_nonfinite.sum()) == int((~stored.isfinite()).sum())
    found, expected = float(sum_sq.sum()), float(squares.sum())
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True) or (math.isinf(found) and expected > 1e38)


def packed(setup, scale):
    lossy, exact = setup.stream(setup.lossy), setup.stream(setup.exact)
    return lambda chunk: reference.pack(setup.layout, chunk, lossy, exact, scale)


def random_parts(setup):
    """Wire bytes that no pack writes: NaNs with payloads, negative scales, …"""
    generator = torch.Generator().manual_seed(5)
    return lambda chunk: torch.randint(256, (setup.layout.chunk_nbytes,), generator=generator).to(torch.uint8)


# ---- on the CPU

SMALL = 1024
DRIVER = """
#include "cuda_on_cpu.h"
#include "ragged.cu"
CUDA_ON_CPU_EXPORT(ragged_pack_kernel, kNumThreads)
CUDA_ON_CPU_EXPORT(ragged_unpack_kernel, kNumThreads)
"""
OLDEST_CAPABILITY = 75
# (block, capability): the oldest one shuffles where later ones have an instruction.
BLOCKS = (*((block, 80) for block in (32, 64, 256, 512, 1024)), (256, OLDEST_CAPABILITY), (1024, OLDEST_CAPABILITY))
# (wire, gradients, block, tile, epilogue, capability); tiles of 8192 are the engine's.
BUILDS = (
    *((wire, dtype, 128, SMALL, 1, 80) for wire in WIRES for dtype in DTYPES),
    *(("int8", torch.float32, block, SMALL, 1, capability) for block, capability in BLOCKS),
    *(("int8", torch.bfloat16, block, 8192, 0, 80) for block in (32, 256, 4096)),
    ("int8", torch.float16, 2048, 8192, 1, 80),
    ("bf16", torch.float32, 128, 8192, 1, 80),
)


@pytest.fixture(scope="session")
def library(made_once):
    """library(entry in BUILDS): the kernels, compiled for the CPU when a test first asks for them."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")

    @functools.cache
    def library(build):
        name = "_".join(str(word) for word in build)
        folder = made_once(f"ragged_{name}", lambda folder: compile_for_cpu(compiler, build, folder))
        return ctypes.CDLL(str(folder / "kernels.so"))

    return library


def compile_for_cpu(compiler, build, folder):
    assert build in BUILDS
    wire, dtype, block, tile, epilogue, capability = build
    (folder / "driver.cpp").write_text(DRIVER)
    macros = {"WIRE": WIRES.index(wire), "GRAD": DTYPES.index(dtype), "BLOCK": block, "TILE": tile}
    macros |= {"EPILOGUE": epilogue, "__CUDA_ARCH__": 10 * capability}
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
    # A longjmp from one stack to another is what the check of fortified ones is against.
    command += ["-fsanitize=alignment", "-U_FORTIFY_SOURCE", "-fvisibility=hidden"]
    command += [f"-I{ROOT / 'tests/native'}", f"-I{ROOT / 'kernels'}"]
    command += [f"-D{name}={value}" for name, value in macros.items()]
    for step in (
        [*command, "-c", str(folder / "driver.cpp"), "-o", str(folder / "kernels.o")],
        [compiler, "-shared", str(folder / "kernels.o"), "-o", str(folder / "kernels.so")],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def aligned(tensor):
    """A copy that starts at a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() * tensor.element_size() + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    view = room[begin : begin + tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return view.copy_(tensor)


class OnCpu:
    """A bucket and the kernels for it, which fibers run."""

    def __init__(self, library, setup, tile):
        self.library, self.layout = library, setup.layout
        self.grads = aligned(setup.memory)
        self.tables = {
            exact: _C.stream_table(setup.layout, exact, slices, tile)
            for exact, slices in ((False, setup.lossy), (True, setup.exact))
        }
        self.tallies = {exact: torch.zeros(len(table[1]), dtype=torch.int64) for exact, table in self.tables.items()}

    def memory(self):
        return self.grads

    def counts(self, exact):
        return self.tallies[exact].tolist()

    def pack(self, chunk, scale, num_programs):
        nbytes = self.layout.chunk_nbytes
        out = aligned(torch.full((nbytes + GUARD_NBYTES,), 0xA5, dtype=torch.uint8))
        arguments = [("ptr", self.grads), *self._stream(False, True), *self._stream(True, True)]
        no_encoding = [("ptr", None), ("ptr", None), ("i64", 0), ("i32", 0), ("i32", 0), ("i32", 0)]
        self._launch(
            "ragged_pack_kernel", num_programs, [*arguments, *self._parts(chunk, out), ("f32", scale), *no_encoding]
        )
        assert (out[nbytes:] == 0xA5).all(), "wrote past the chunk"
        return out[:nbytes]

    def unpack(self, chunk, parts, scale, num_programs, epilogue):
        parts = aligned(parts)
        arguments = [("ptr", self.grads), *self._stream(False, False), *self._stream(True, False)]
        arguments += [*self._parts(chunk, parts), ("i32", 1), ("f32", scale)]
        num_nonfinite = torch.full((num_programs + 1,), -5, dtype=torch.int64)
        sum_sq = torch.full((num_programs + 1,), -5, dtype=torch.float64)
        arguments += [("ptr", num_nonfinite), ("ptr", sum_sq)] if epilogue else [("ptr", None), ("ptr", None)]
        self._launch("ragged_unpack_kernel", num_programs, arguments)
        assert num_nonfinite[-1] == sum_sq[-1] == -5
        return num_nonfinite[:-1], sum_sq[:-1]

    def _stream(self, exact, counted):
        starts, offsets, first = self.tables[exact]
        counts = [("ptr", self.tallies[exact])] if counted else []
        tables = [("ptr", starts), ("ptr", offsets), ("ptr", first), *counts]
        return [*tables, ("i32", len(offsets)), ("i64", int(starts[-1]))]

    def _parts(self, chunk, parts):
        part, num_parts = self.layout.part, self.layout.num_parts
        piece = parts[self.layout.part_offset :]
        sections = [("ptr", piece[begin:]) for begin in (0, part.scale_offset, part.code_offset)]
        numels = part.lossy_numel, part.exact_numel
        shape = [("i64", n) for n in (self.layout.part_stride, *numels, chunk * num_parts)]
        return [*sections, *shape, ("i32", num_parts)]

    def _launch(self, symbol, num_programs, arguments):
        types = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
        values = [types[kind](x.data_ptr() if isinstance(x, torch.Tensor) else x) for kind, x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        num_faults = self.library[f"launch_{symbol}"](num_programs, pointers)
        assert num_faults == 0, f"{symbol}: {num_faults} faults, printed to stderr"


@pytest.fixture
def on_cpu(library):
    """runner(setup) → its kernels, built for a tile, with an epilogue, as for a compute capability."""

    def make(tile=SMALL, epilogue=1, capability=80):
        def runner(setup):
            build = (setup.layout.wire, setup.memory.dtype, setup.layout.block_numel, tile, epilogue, capability)
            return OnCpu(library(build), setup, tile)

        return runner

    return make


# Lossy and exact slices, and the gap before each.
LISTS = {
    "one": ([6000], [900], 0),
    "one unaligned": ([6001], [900], 1),
    "aligned": ([512, 768, 768, 8, 16, 2048, 1032], [256, 64], 16),
    "off phase": ([3, 4000, 1, 700, 900], [1, 1000], 4),
    "tiny": ([1, 2, 3] * 400 + [40] * 20, [1] * 300, 1),
    "empty": ([0, 0, 513, 0, 0, 1, 0, 2000] + [0] * 100 + [7, 0], [0, 5, 0], 8),
    "no exact": ([100, 2000, 31], [], 2),
    "no lossy": ([], [100, 900, 31], 2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_same_bits(on_cpu, wire, dtype, lists):
    setup = make_setup(wire, dtype, 128, *LISTS[lists][:2], gap=LISTS[lists][2], num_parts=2, chunk_nbytes=7000)
    check_pack(on_cpu(), setup, 1 / 3)
    check_unpack(on_cpu(), setup, -3.0, packed(setup, 0.25))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_any_bytes_are_decoded(on_cpu, wire, dtype):
    setup = make_setup(wire, dtype, 128, [700, 1, 1500], [300, 33], num_parts=3, chunk_nbytes=5000)
    check_unpack(on_cpu(), setup, 0.5, random_parts(setup))


@pytest.mark.sampled
@pytest.mark.parametrize(("block", "capability"), BLOCKS)
def test_blocks(on_cpu, block, capability):
    kernels = on_cpu(capability=capability)
    for gap, seed in ((0, 1), (4, 2), (3, 3)):
        setup = make_setup("int8", torch.float32, block, [2600, 3, 1], [100], chunk_nbytes=3000, gap=gap, seed=seed)
        check_pack(kernels, setup, 1.0)
        check_unpack(kernels, setup, 1.0, packed(setup, 1.0))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wire", "dtype", "block", "epilogue"),
    [(wire, dtype, block, epilogue) for wire, dtype, block, tile, epilogue, _ in BUILDS if tile == 8192],
    ids=str,
)
def test_tiles_of_the_engine(on_cpu, wire, dtype, block, epilogue):
    slices = [9000, 1, 4096, 17, 12000] + [1] * 1500 + [0, 5]
    setup = make_setup(wire, dtype, block, slices, [5000, 3], num_parts=1, chunk_nbytes=1 << 20, gap=8)
    check_pack(on_cpu(8192, epilogue), setup, 0.5)
    check_unpack(on_cpu(8192, epilogue), setup, 2.0, packed(setup, 1.0), epilogue=bool(epilogue))


@pytest.mark.parametrize("num_programs", [1, 2, 50])
def test_any_number_of_programs(on_cpu, num_programs):
    setup = make_setup("bf16", torch.float32, 128, [3000, 5, 70], [900], num_parts=1, chunk_nbytes=1 << 20)
    check_pack(on_cpu(), setup, 1.0, num_programs)
    check_unpack(on_cpu(), setup, 1.0, packed(setup, 1.0), num_programs)


def test_parts_without_elements(on_cpu):
    setup = make_setup("int8", torch.float32, 128, [130], [5], num_parts=8, chunk_nbytes=1 << 20)
    check_pack(on_cpu(), setup, -1.0)
    check_unpack(on_cpu(), setup, 1.0, packed(setup, 1.0))


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -0.0, 3e38, 1e-40])
@pytest.mark.parametrize("wire", WIRES)
def test_scales(on_cpu, wire, scale):
    setup = make_setup(wire, torch.float32, 128, [700, 30], [40], chunk_nbytes=1 << 20)
    check_pack(on_cpu(), setup, scale)
    check_unpack(on_cpu(), setup, scale, packed(setup, 1.0))


def test_slices_before_the_origin(on_cpu):
    """Of tensors with memory of their own, any may come first."""
    setup = make_setup("bf16", torch.float32, 128, [600, 100, 512], [64], chunk_nbytes=1 << 20, gap=4)
    kernels = on_cpu()(setup)
    shift = 640  # elements, so that the first slices lie before
    kernels.grads = kernels.grads[shift:]
    for starts_offsets_first in kernels.tables.values():
        starts_offsets_first[1].sub_(shift)
    expected = reference.pack(setup.layout, 0, setup.stream(setup.lossy), setup.stream(setup.exact), 1.0)
    assert_same(kernels.pack(0, 1.0, 2), expected, "chunk 0")


# ---- as NVRTC compiles it


def compiled(kernel, wire, dtype, block, capability, epilogue):
    pytest.importorskip("triton", reason="its constants are the kernels'")
    from fusedcomm.kernels import compile, ragged_cuda

    try:
        ragged_cuda.check_cupy()
    except RuntimeError as error:
        pytest.skip(str(error))
    return ragged_cuda.compile(compile.Variant(kernel, wire, block, dtype, False, epilogue), capability)


def tool(name, *arguments):
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not path.exists():
        pytest.skip(f"this Triton has no {name}")
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def lane_nbytes(wire, dtype):
    """Of gradients that a lane moves at once: 16 of the wider side, gradients or wire."""
    return 16 * dtype.itemsize // max(dtype.itemsize, reference.WIRE_DTYPES[wire].itemsize)


CODE = [
    *((wire, dtype, 128, 90) for wire in WIRES for dtype in DTYPES),
    *(
        (wire, torch.float32, 128, capability)
        for wire in ("bf16", "int8")
        for capability in (OLDEST_CAPABILITY, 80, 100, 120)
    ),
    ("int8", torch.bfloat16, 32, 120),
    ("int8", torch.bfloat16, 4096, 80),
    ("int8", torch.bfloat16, 4096, OLDEST_CAPABILITY),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "dtype", "block", "capability"), CODE, ids=str)
def test_code(tmp_path, wire, dtype, block, capability):
    """No stack, no spills, registers for a block of 512, 16-byte accesses, and arithmetic as it is written."""
    results = {k: compiled(k, wire, dtype, block, capability, True) for k in ("pack", "unpack")}
    ptx = results["pack"].ptx
    assert results["pack"].num_warps == 16
    assert ".ftz" not in ptx and not re.search(r"\bfma\.", ptx)
    cubin = tmp_path / "ragged.cubin"
    cubin.write_bytes(results["pack"].cubin)

    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", tool("cuobjdump", "-res-usage", cubin)
    )
    assert {symbol for symbol, *_ in usage} == {result.symbol for result in results.values()}
    for symbol, num_registers, stack, shared, local in usage:
        print(
            f"{symbol} {wire} {dtype} block {block} sm_{capability}: {num_registers} registers, {shared} bytes shared"
        )
        assert (int(stack), int(local)) == (0, 0), symbol
        assert int(num_registers) <= 65536 // 512, symbol
        assert int(shared) <= 48 * 1024, symbol

    sass = dict(re.findall(r"\.text\.(ragged_\w+):(.*?)(?=\.text\.|\Z)", tool("nvdisasm", "-c", cubin), re.DOTALL))
    for symbol, code in sass.items():
        assert not re.search(r"\b(LDL|STL)\b", code), symbol
        # Divisions are made of such, but round correctly in the end.
        assert wire == "int8" or not re.search(r"\bFFMA\b|\bF(ADD|MUL)\.FTZ", code), symbol
        # The wire's side has them in the exact stream, if nowhere else.
        wire_side, grad_side = ("STG", "LDG") if "unpack" not in symbol else ("LDG", "STG")
        assert f"{wire_side}.E.128" in code, symbol
        assert lane_nbytes(wire, dtype) < 16 or f"{grad_side}.E.128" in code, symbol


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_accesses_of_gradients(wire, dtype):
    nbytes = lane_nbytes(wire, dtype)
    entries = re.split(r"\.entry ", compiled("pack", wire, dtype, 128, 90, True).ptx)
    pack, unpack = (next(e for e in entries if e.startswith(f"ragged_{k}_kernel")) for k in ("pack", "unpack"))
    # NVRTC's versions differ in the type that they name, not in the width.
    vector = {16: r"v4\.[ubf]32", 8: r"(v4\.[ub]16|v2\.[ubf]32)"}[nbytes]
    assert re.search(rf"ld\.global\.nc\.{vector}", pack)
    assert re.search(rf"st\.global\.{vector}", unpack)


def test_what_it_refuses():
    pytest.importorskip("triton")
    from fusedcomm.kernels import compile, ragged_cuda

    for variant in (
        compile.Variant("pack", "bf16", 128, torch.float32, True),
        compile.Variant("reduce", "bf16", 128, None, False),
        compile.Variant("pack", "bf16", 128, torch.float32, False, stochastic=True),
        compile.Variant("pack", "int8", 128, torch.float32, False, feedback="fp32"),
    ):
        with pytest.raises(ValueError, match="not flat"):
            ragged_cuda.compile(variant, 90)


# ---- on a GPU


class OnGpu:
    def __init__(self, setup):
        from fusedcomm.kernels import ragged_cuda
        from fusedcomm.kernels.bucket import make_bucket

        self.kernels = ragged_cuda
        self.bucket = make_bucket(setup.layout, setup.memory.cuda(), setup.lossy, setup.exact)

    def memory(self):
        return self.bucket.grads.cpu()

    def counts(self, exact):
        return (self.bucket.exact if exact else self.bucket.lossy).counts.tolist()

    def pack(self, chunk, scale, num_programs):
        nbytes = self.bucket.layout.chunk_nbytes
        out = torch.full((nbytes + GUARD_NBYTES,), 0xA5, dtype=torch.uint8, device="cuda")
        self.kernels.pack(self.bucket, chunk, scale, out, num_programs)
        assert (out[nbytes:] == 0xA5).all(), "wrote past the chunk"
        return out[:nbytes].cpu()

    def unpack(self, chunk, parts, scale, num_programs, epilogue):
        num_nonfinite = torch.full((num_programs,), -5, dtype=torch.int64, device="cuda")
        sum_sq = torch.full((num_programs,), -5, dtype=torch.float64, device="cuda")
        outputs = (num_nonfinite, sum_sq) if epilogue else None
        self.kernels.unpack(self.bucket, chunk, parts.cuda(), scale, num_programs, outputs)
        return num_nonfinite.cpu(), sum_sq.cpu()


@pytest.fixture
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    pytest.importorskip("triton")
    pytest.importorskip("cupy")
    return OnGpu


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_same_bits_on_gpu(on_gpu, wire, dtype):
    lists = [(lossy, exact, gap) for lossy, exact, gap in LISTS.values()]
    lists.append(([9000, 1, 4096, 17, 12000] + [1] * 9000 + [0, 100_000], [5000, 3, 20_000], 8))
    for lossy, exact, gap in lists:
        for block in (32, 128, 4096) if wire == "int8" else (128,):
            setup = make_setup(wire, dtype, block, lossy, exact, num_parts=3, chunk_nbytes=1 << 18, gap=gap)
            check_pack(on_gpu, setup, 1 / 3, 5)
            check_unpack(on_gpu, setup, -3.0, packed(setup, 0.25), 5)
            check_unpack(on_gpu, setup, 0.5, random_parts(setup), 5, epilogue=False)
