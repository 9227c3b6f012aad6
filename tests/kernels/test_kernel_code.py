"""Triton's code for the kernels on every GPU generation, without a GPU: vector widths, registers, parameters, and how
a tile's loads and instructions follow each other in the machine code.

A child process compiles, because Triton may interpret in this one. The child is this file, run as a program. It
compiles a kernel when a test first asks for it.
"""

import base64
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.check

if __name__ != "__main__":
    pytest.importorskip("triton")

CAPABILITIES = (80, 90, 100, 120)
OLDEST_CAPABILITY = 75
WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
ROTATED = ("int8", "int4")  # compiled for every capability; fp8 differs only in the code before and after the rotation
GRAD_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1, "int4": 0.5}
BLOCKS = {"int4": 32}  # elements of a block; other wires have 128
TILE = 2048
NUM_THREADS = 128
SM_REGISTERS = 65536


def kernel_key(kernel, wire, grad_dtype, rotated=False):
    return f"{kernel}-{wire}-{grad_dtype}" + "-rotated" * rotated


def all_kernels():
    """(kernel, wire, gradient dtype, rotated, capability) of every kernel that is tested here except ENCODERS."""
    kernels = []
    for capability in (OLDEST_CAPABILITY, *CAPABILITIES):
        kernels.append(("scale", None, "float32", False, capability))
        for wire in WIRES if capability in CAPABILITIES else WIRES[3:]:
            every_dtype = capability == 90 and wire in WIRES[:4]
            kernels.append(("reduce", wire, None, False, capability))
            for dtype in GRAD_NBYTES if every_dtype else ("float32",):
                kernels.append(("pack", wire, dtype, False, capability))
                kernels.append(("unpack", wire, dtype, False, capability))
        for wire in ROTATED:
            kernels.append(("pack", wire, "float32", True, capability))
            kernels.append(("unpack", wire, "float32", True, capability))
    return kernels


# Kernels that sum messages, and encoders with residuals or another input wire: (kernel, wire, gradient dtype,
# other fields of the variant).
ENCODERS = [
    ("pack", "bf16", "float32", {"feedback": "fp32"}),
    ("pack", "int4", "float32", {"feedback": "bf16", "rotated": True}),
    ("reduce", "int8", None, {"feedback": "fp32"}),
    ("unpack", "int8", "float32", {"sums": True}),
    ("unpack", "bf16", "float32", {"sums": True}),
    ("unpack", "bf16", "bfloat16", {"sums": True}),
    ("unpack", "int4", "float32", {"sums": True, "rotated": True}),
    ("unpack", "fp8", "float32", {"sums": True}),
    ("pack", "bf16", "bfloat16", {"feedback": "bf16"}),
    ("pack", "fp16", "float32", {"feedback": "fp32"}),
    ("pack", "int8", "float32", {"feedback": "bf16"}),
    ("pack", "int8", "float32", {"feedback": "fp32"}),
    ("pack", "fp8", "float32", {"feedback": "bf16", "rotated": True}),
    ("reduce", "fp8", None, {"feedback": "fp32"}),
    ("reduce", "int4", None, {"feedback": "fp32"}),
    ("reduce", "int4", None, {"feedback": "bf16", "in_wire": "bf16", "rotated": True}),
]

RESIDUAL_NBYTES = {"fp32": 4, "bf16": 2}


def all_encoders():
    """(*encoder, capability): all encoders for capabilities 80 and 90, and the first four for the others."""
    return [
        (*encoder, capability)
        for index, encoder in enumerate(ENCODERS)
        for capability in CAPABILITIES
        if capability in (80, 90) or index < 4
    ]


def encoder_key(kernel, wire, grad_dtype, encoding, capability):
    encoding = "-".join(name if value is True else f"{name}={value}" for name, value in encoding.items())
    return f"{kernel_key(kernel, wire, grad_dtype)}-{encoding}-{capability}"


# ---- the child


def cuobjdump(cubin, option):
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout


def resources(cubin):
    """The resources that cuobjdump reports for the cubin's kernel: {"REG": …, "STACK": …, "LOCAL": …, …}."""
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", cuobjdump(cubin, "-res-usage"))}


def all_variants():
    """{key: (variant, capability)} of all kernels and encoders."""
    from fusedcomm.kernels.variants import Variant

    variants = {}
    for kernel, wire, dtype, rotated, capability in all_kernels():
        variant = Variant(kernel, wire, BLOCKS.get(wire, 128), dtype and getattr(torch, dtype), rotated)
        variants[f"{kernel_key(kernel, wire, dtype, rotated)}-{capability}"] = variant, capability
    for kernel, wire, dtype, encoding, capability in all_encoders():
        variant = Variant(kernel, wire, BLOCKS.get(wire, 128), dtype and getattr(torch, dtype), **encoding)
        variants[encoder_key(kernel, wire, dtype, encoding, capability)] = variant, capability
    return variants


def compile_on_request():
    """Reads a key from each line of stdin, and writes the compiled kernel as a line of JSON to stdout."""
    variants = all_variants()
    for line in sys.stdin:
        print(json.dumps(compiled_by_triton(*variants[line.strip()])), flush=True)


def compiled_by_triton(variant, capability):
    from fusedcomm.kernels.compile import compile

    result = compile(variant, capability)
    return {
        "ptx": result.ptx,
        "params": result.params,
        "num_scratch_pointers": result.num_scratch_pointers,
        "symbol": result.symbol,
        "shared_nbytes": result.shared_nbytes,
        "num_warps": result.num_warps,
        "cubin_begin": base64.b64encode(result.cubin[:4]).decode(),
        "resources": resources(result.cubin),
        "sass": cuobjdump(result.cubin, "-sass") if capability == 90 else "",
    }


@pytest.fixture(scope="session")
def compiled(made_once):
    """compiled(key) returns the compiled kernel or encoder. Each is compiled once for all processes that run tests."""
    from compiling import Child  # not at the top: this file is also run as a program

    compiler = Child(__file__)

    @functools.cache
    def compiled(key):
        folder = made_once(f"kernel {key}", lambda folder: (folder / "code.json").write_text(compiler.ask(key)))
        return json.loads((folder / "code.json").read_text())

    yield compiled
    compiler.close()


# ---- tests

VARIANT = ("kernel", "wire", "dtype", "rotated", "capability")


def every_kernel():
    return [pytest.param(*kernel, id=f"{kernel_key(*kernel[:-1])}-{kernel[-1]}") for kernel in all_kernels()]


@pytest.fixture
def code(request, compiled):
    return compiled(request.node.callspec.id)


def wide_side_numel(kernel, wire, dtype):
    """Elements of a thread's access: 16 bytes of the wider of gradient and code, or its share of a tile if smaller."""
    nbytes = 4 if kernel == "scale" else CODE_NBYTES[wire]
    return min(int(16 / max(nbytes, GRAD_NBYTES.get(dtype, 0))), TILE // NUM_THREADS)


def access(verb, nbytes):
    """A regular expression for a global access of `nbytes` bytes, with or without a predicate."""
    types = {16: r"v4\.b32|v2\.b64", 8: r"v2\.b32|b64", 4: r"b32", 2: r"b16", 1: r"b8"}[nbytes]
    return rf"{verb}\.global\.({types})\s"


def accesses(ptx, verb, nbytes, predicated=False):
    """The lines with such an access. Lines with a predicate are included only if `predicated`."""
    lines = (line for line in ptx.splitlines() if re.search(access(verb, nbytes), line))
    return [line for line in lines if predicated or "@" not in line.split(verb)[0]]


def check_full_tiles(code, kernel, wire, dtype):
    """Checks that the wider of gradient and code moves in 128 bits, the other in as many bits as the same elements
    have."""
    numel = wide_side_numel(kernel, wire, dtype)
    grad, wire_nbytes = GRAD_NBYTES.get(dtype, 0), CODE_NBYTES.get(wire, 0)
    loaded, stored = {
        "pack": (grad, wire_nbytes),
        "unpack": (wire_nbytes, grad),
        "reduce": (wire_nbytes, wire_nbytes),
        "scale": (grad, grad),
    }[kernel]
    # A thread has 16 elements of a tile, and sums access nothing wider than codes: 8 bytes in int4.
    narrow = {"int4": 8} if kernel == "reduce" else {}
    assert max(loaded, stored) * numel == narrow.get(wire, 16)
    for verb, nbytes in (("ld", loaded * numel), ("st", stored * numel)):
        found = accesses(code["ptx"], verb, nbytes, predicated=kernel == "reduce")
        wanted = TILE // (NUM_THREADS * numel) * (4 if kernel == "reduce" and verb == "ld" else 1)
        assert len(found) >= wanted, f"{len(found)} instead of {wanted} {verb}.global of {nbytes} bytes"


@pytest.mark.sampled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("wire", "rotated"), [*((wire, False) for wire in WIRES), *((wire, True) for wire in ROTATED)])
def test_tiles_pass_through_no_shared_memory(compiled, wire, rotated, capability):
    """Those that are looked up neither. At its end pack finds the greatest magnitude of all threads."""
    pack, unpack = (
        compiled(f"{kernel_key(kernel, wire, 'float32', rotated=rotated)}-{capability}")["ptx"]
        for kernel in ("pack", "unpack")
    )
    code_store = list(re.finditer(r"(?m)^\s*(@%\w+ )?" + access("st", 4 * CODE_NBYTES[wire]), pack))[-1]
    assert not re.search(r"bar\.|(?:ld|st)\.shared", pack[: code_store.start()] + unpack)
    # A thread holds four neighbors at a time, so three of a rotation's five stages exchange each of its 16 elements.
    assert unpack.count("shfl.sync") == 3 * 16 * rotated


@pytest.mark.sampled
@pytest.mark.parametrize(VARIANT, every_kernel())
def test_full_tiles_move_in_128_bits_and_round_as_the_reference(code, kernel, wire, dtype, rotated, capability):
    if capability != OLDEST_CAPABILITY:
        check_full_tiles(code, kernel, wire, dtype)
    check_code(code, kernel, 128 if rotated else 80)
    assert 0 <= code["num_scratch_pointers"] <= 2


def check_code(code, kernel, registers=None):
    """Checks parameters, arithmetic and resources, and that the installed Triton, the newest, extends no constant
    wrongly. tests/kernels/test_kernel_constants.py checks the oldest Triton."""
    from test_kernel_constants import wrong_constants

    ptx = code["ptx"]
    assert code["params"] == PARAMS[kernel] and code["symbol"] == f"{kernel}_kernel"
    # A thread stores the elements that it loads.
    assert kernel in ("pack", "scale") or (code["shared_nbytes"] == 0 and "bar.sync" not in ptx)
    assert not wrong_constants(ptx)
    assert not re.search(r"\bfma\.", ptx)
    assert ".ftz" not in ptx
    assert "div.full" not in ptx and "div.approx" not in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)
    assert code["resources"]["STACK"] == 0
    assert code["resources"]["LOCAL"] == 0
    assert code["resources"]["REG"] <= (128 if registers is None else registers)
    assert code["shared_nbytes"] <= 48 * 1024
    assert code["num_warps"] * 32 == NUM_THREADS
    assert code["cubin_begin"] == base64.b64encode(b"\x7fELF").decode()


POINTER, I32, I64, F32 = ["ptr"], ["i32"], ["i64"], ["f32"]
SECTIONS = POINTER * 3
PARAMS = {
    "pack": (POINTER + (POINTER * 9 + I32) * 2 + SECTIONS + I64 * 4 + I32 + F32 + POINTER),
    "reduce": SECTIONS * 2 + I64 * 4 + I32 * 2 + F32 + POINTER,
    "unpack": POINTER * 15 + SECTIONS + I64 * 4 + I32 * 2 + F32,
    "scale": POINTER + I64 + F32 + POINTER * 2 + I32,
}


# ---- encoders with residuals


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kernel", "wire", "dtype", "encoding", "capability"),
    [pytest.param(*encoder, id=encoder_key(*encoder)) for encoder in all_encoders()],
)
def test_encoders_move_residuals_in_the_widest_accesses_without_barriers(
    code, compiled, kernel, wire, dtype, encoding, capability
):
    """A thread has as many neighbors as fill 16 bytes of the widest of gradient, code and residual."""
    check_code(code, kernel)
    feedback, in_wire = encoding.get("feedback"), encoding.get("in_wire", wire)
    sums, rotated = (encoding.get(name, False) for name in ("sums", "rotated"))
    plain = compiled(f"{kernel_key(kernel, wire, dtype, rotated=rotated and sums)}-90")["ptx"]
    # There are no more barriers than without residuals, which stay with their threads.
    assert code["ptx"].count("bar.sync") <= plain.count("bar.sync")
    if sums:
        # The codes of later messages are loaded in accesses as wide as those of the first.
        numel = wide_side_numel(kernel, wire, dtype)
        loads, of_plain = (len(accesses(ptx, "ld", numel * CODE_NBYTES[wire])) for ptx in (code["ptx"], plain))
        assert loads - of_plain >= TILE // (NUM_THREADS * numel)
    if feedback is None:
        return
    # A code counts as at least one byte: int4 has two codes in a byte.
    widest = max(
        RESIDUAL_NBYTES[feedback], *(max(1, CODE_NBYTES[w]) for w in (wire, in_wire)), GRAD_NBYTES.get(dtype, 0)
    )
    nbytes = 16 // widest * RESIDUAL_NBYTES[feedback]
    wanted = TILE // (NUM_THREADS * 16 // widest)
    for verb in ("ld", "st"):
        assert len(re.findall(access(verb, nbytes), code["ptx"])) >= wanted


# ---- the machine code

CODE_OPS = {"bf16": ".64", "int8": "", "int4": ".U16"}  # of an access to four codes


def tile_way(sass_text, kernel, wire, looked_up):
    """The shortest way past a tile of fp32 gradients: in one run, or `looked_up`. Of pack, whose programs have many
    tiles, from one tile's stores to the next's."""
    import sass

    def is_op(op, predicated=None):
        return lambda i: i.op == op and predicated in (None, bool(i.predicate))

    code = sass.parse(sass_text)
    load, store = "LDG.E" + CODE_OPS[wire], "STG.E" + CODE_OPS[wire]
    if kernel == "unpack":
        stops = [is_op(load), *([is_op("STG.E")] if looked_up else []), is_op("STG.E.128"), is_op("EXIT")]
        stops = stops if not looked_up else [stops[0], stops[2], stops[1], stops[3]]
        return code.way(*stops, avoid=is_op("LDG.E.128"))
    stops = is_op("LDG.E.128", predicated=looked_up), is_op(store)
    none = is_op("")
    return code.way(*stops, avoid=none, after=code.way(*stops, avoid=none)[-1])


# (kernel, wire): most instructions an element of a tile in one run, and of one whose runs are looked up.
BUDGETS = {
    ("pack", "bf16"): (14, 32),
    ("pack", "int8"): (28, 44),
    ("unpack", "bf16"): (14, 32),
    ("unpack", "int8"): (20, 36),
}


@pytest.mark.parametrize(("kernel", "wire"), BUDGETS)
def test_a_tile_in_one_run_waits_twice_and_keeps_memory_busy(compiled, kernel, wire):
    import sass

    code = compiled(f"{kernel_key(kernel, wire, 'float32')}-90")
    for looked_up, most in zip((False, True), BUDGETS[kernel, wire], strict=True):
        way = tile_way(code["sass"], kernel, wire, looked_up)
        per_element = len(way) * NUM_THREADS / TILE
        print(kernel, wire, "looked up" * looked_up, f"{per_element:.1f} instructions, {sass.load_rounds(way)} rounds")
        assert 0 < per_element <= most
        if not looked_up:
            assert sass.load_rounds(way) <= 2
    # What a multiprocessor has under way: all programs' loads of a tile.
    moved = TILE * (4 if kernel == "pack" else CODE_NBYTES[wire])
    assert SM_REGISTERS // (code["resources"]["REG"] * NUM_THREADS) * moved >= (32 if kernel == "pack" else 16) * 1024


@pytest.mark.parametrize("split", [1, 2])
def test_loads_that_wait_for_each_other_are_found(compiled, split):
    """Registers that are used again between a tile's loads, as a stall of the machine would be."""
    import sass

    text = compiled(f"{kernel_key('pack', 'bf16', 'float32')}-90")["sass"]
    way = tile_way(text, "pack", "bf16", False)
    at = [i for i, instruction in enumerate(way) if instruction.op == "LDG.E.128"]
    uses = [i for i in way if i.op == "FMUL"][: 4 * split : 4]
    for place, use in zip(at[1:], uses, strict=False):
        way.insert(place + 1, use)
    assert sass.load_rounds(way) > 2


# ---- what compile refuses

REFUSALS = """
import dataclasses, torch, triton
from fusedcomm.kernels import compile as c, variants

def refused(expected, call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert expected in str(error), error
    else:
        raise AssertionError("not refused: " + expected)

variant = variants.Variant("scale", None, 128, torch.float32)
engine = variants.engine_variants([("int8", 128, False)], (torch.float32, torch.bfloat16))
assert len(engine) == len(set(engine)) == 8, engine  # two for exact sums that are not in place
rotated = variants.engine_variants([("int4", 32, True)], (torch.float32,))
assert [v.kernel for v in rotated if v.rotated] == ["pack", "unpack"], rotated
measured = variants.engine_variants([("int8", 128, False)], (torch.float32,), measured=True)
packs = [v.feedback for v in measured if v.kernel == "pack" and v.wire != "fp32"]
assert packs == [None, "fp32"], packs
several = variants.engine_variants([("int4", 32, True), ("fp32", 128, False)], (torch.float32,), "bf16")
assert {(v.wire, v.feedback) for v in several if v.kernel in ("pack", "reduce")} == {
    ("int4", "bf16"), ("fp32", None)
}, several
hosts = variants.engine_variants([("int4", 32, True)], (torch.float32,), "bf16", local_wire="bf16")
assert {(v.kernel, v.wire, v.in_wire, v.rotated, v.feedback) for v in hosts if v.wire} == {
    ("pack", "bf16", None, False, None), ("pack", "int4", None, True, "bf16"),
    ("reduce", "int4", "bf16", True, "bf16"),
    ("reduce", "int4", None, False, "bf16"), ("unpack", "int4", None, True, None),
    ("pack", "fp32", None, False, None), ("unpack", "fp32", None, False, None),
}, hosts
measured = variants.engine_variants([("fp8", 128, False)], (torch.float32,), measured=True, local_wire="fp32")
assert {(v.kernel, v.wire, v.in_wire, v.feedback) for v in measured if v.kernel in ("pack", "reduce")} == {
    ("pack", "fp8", None, None), ("pack", "fp8", None, "fp32"), ("pack", "fp32", None, None),
    ("reduce", "fp8", None, None), ("reduce", "fp8", "fp32", None), ("reduce", "fp8", "fp32", "fp32"),
}, measured
one_shot = variants.engine_variants([("int4", 32, True)], (torch.float32,), one_shot=True)
assert {(v.kernel, v.rotated, v.sums) for v in one_shot if v.wire == "int4"} == {
    ("pack", True, False), ("unpack", True, True)
}, one_shot
assert {(v.kernel, v.sums) for v in one_shot if v.wire == "fp32"} == {("pack", False), ("unpack", False)}, one_shot
assert c.check_triton() == triton.__version__

c.MAX_SHARED_NBYTES = 8
refused("shared memory = 16; supported: at most 8", lambda: c.compile(variant, 90))
c.MAX_SHARED_NBYTES = 48 * 1024
c._TYPES["numel"], wanted = "i32", c._ptx_type
c._ptx_type = lambda kind: {"i32": "i64"}.get(kind, wanted(kind))
refused("with parameters = ('ptr', 'i32', 'f32'", lambda: c.compile(variant, 90))

for version in ("3.5.1", "3.10.0", "4.0.0", "2.3.0+git"):
    triton.__version__ = version
    refused(f"Triton {version} is not supported: use 3.6 to 3.9", c.check_triton)
"""


def run_python(source, env):
    return subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True)


def test_refuses_what_the_engine_could_not_launch():
    from compiling import environment

    result = run_python(REFUSALS, environment())
    assert result.returncode == 0, result.stderr


def test_refuses_to_compile_under_the_interpreter():
    source = "from fusedcomm.kernels.compile import check_triton; check_triton()"
    result = run_python(source, {**os.environ, "TRITON_INTERPRET": "1"})
    assert "TRITON_INTERPRET is set" in result.stderr


if __name__ == "__main__":
    compile_on_request()
