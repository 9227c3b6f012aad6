"""What the executor must find and the kernels, which are right, never show: faults of memory, races, threads that wait
for ever, and instructions whose result is not known. What an instruction computes shows in the bytes of the kernels."""

import re

import numpy as np
import pytest

from . import Fault, HostMemory, TensorMemory, Unsupported, launch, parse

pytestmark = pytest.mark.check

NUM_THREADS = 64
HEAD = """.version 8.8
.target sm_90
.address_size 64
.visible .entry small( .param .u64 p0, .param .u64 p1)
{
.shared .align 16 .b8 scratch[1024];
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
ld.param.b64 %rd3, [p0];
ld.param.b64 %rd4, [p1];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mad.lo.s32 %r4, %r2, 64, %r1;
mul.wide.u32 %rd2, %r4, 4;
add.s64 %rd1, %rd3, %rd2;
mov.u32 %r20, scratch;
shl.b32 %r21, %r1, 2;
add.s32 %r22, %r20, %r21;
sub.s32 %r23, 252, %r21;
add.s32 %r23, %r23, %r20;
"""
"""Sets %r1 to the thread's number, %rd3 to p0, %rd4 to p1, %rd1 to the thread's 4 bytes of p0, %r22 to those of shared
memory, and %r23 to those of the block's thread 63 - %r1."""


def text(*lines: str) -> str:
    return HEAD + "\n".join(lines) + "\nret;\n}\n"


def aligned(numel: int) -> np.ndarray:
    """int32 [numel] that starts at a multiple of 64 bytes."""
    memory = np.zeros(4 * numel + 192, np.uint8)
    start = 64 + -memory.ctypes.data % 64
    return memory[start : start + 4 * numel].view(np.int32)


def run(*lines: str, num_blocks: int = 1, seed: int = 0, max_steps: int = 1000) -> list[int]:
    """The elements of p0 [64·num_blocks] after a launch. Right behind them lies p1 [64]; there is no other memory."""
    memory = aligned(64 * num_blocks + 64 + 16)
    data, other = memory[: 64 * num_blocks], memory[64 * num_blocks + 16 :]
    tensors = TensorMemory([(x.ctypes.data, x.nbytes) for x in (data, other)])
    arguments = [("ptr", data.ctypes.data), ("ptr", other.ctypes.data)]
    launch(text(*lines), num_blocks, NUM_THREADS, arguments, tensors, seed=seed, max_steps=max_steps)
    return data.tolist()


STORE, BARRIER, LOAD = "st.shared.b32 [%r22], %r1;", "bar.sync 0;", "ld.shared.b32 %r5, [%r23];"
# The first line of each is the one that must be named. It stands where None is, or else after the others.
FAULTS = {
    "a null pointer": (["ld.global.b32 %r5, [%rd5+16];", "mov.u64 %rd5, 0;"], "null pointer"),
    "one byte after a tensor": (["ld.global.b8 %h1, [%rd3+512];"], "access of 1 bytes outside of what was given"),
    "one byte before a tensor": (["st.global.b8 [%rd3+-1], %h1;"], "access of 1 bytes outside of what was given"),
    "beyond the end of a tensor": (["ld.global.b32 %r5, [%rd1+4];"], "outside of what was given: block 1, thread 63"),
    "between two tensors": (["st.global.b32 [%rd4+-4], %r1;"], "access of 4 bytes outside"),
    "a misaligned vector": (["ld.global.v2.b32 {%r5, %r6}, [%rd1];"], "misaligned access of 8 bytes"),
    "outside of shared memory": (["st.shared.b32 [%r22+772], %r1;"], "outside of 1024 bytes: block 0, thread 63"),
    "before shared memory": (["st.shared.b32 [%r22+-4], %r1;"], "outside of 1024 bytes: block 0, thread 0"),
    "misaligned shared memory": (["st.shared.v2.b32 [%r22], {%r1, %r1};"], "misaligned access of 8 bytes"),
    "shared memory that no thread wrote": (["ld.shared.b32 %r5, [%r22];"], "reads what no thread wrote"),
    "a read after a write": ([LOAD, STORE], r"reads what thread \(block 0, thread 63\) wrote, without a barrier"),
    "a write before a read's barrier": (
        ["ld.shared.b32 %r5, [%r22];", STORE, BARRIER, None, "st.shared.b32 [%r23], %r1;", BARRIER],
        "reads what thread .* writes later, without a barrier",
    ),
    "different values at once in shared memory": (["st.shared.b32 [%r20], %r1;"], "writes what thread .* wrote"),
    "two writes of an element": (["st.global.b32 [%rd3], %r1;"], "writes what thread .* wrote"),
    "two writes of a byte": (
        ["st.global.b8 [%rd3+5], %h1;", "st.global.b32 [%rd1], %r1;"],
        "writes what thread .* wrote, without a barrier",
    ),
    "an element that another block wrote": (
        ["ld.global.b32 %r5, [%rd3];", "st.global.b32 [%rd1], %r4;", BARRIER],
        r"reads what thread \(block 0, thread 0\) wrote",
    ),
    "an element that another thread writes later": (
        ["ld.global.b32 %r5, [%rd3];", None, "st.global.b32 [%rd1], %r1;"],
        r"reads what thread \(block 0, thread 0\) writes later, without a barrier",
    ),
    "an atomic operation and a write": (
        ["st.global.b32 [%rd1], %r1;", "red.global.gpu.relaxed.add.u32 [%rd3], %r1;"],
        "writes what thread of an atomic operation wrote",
    ),
    "an exchange with a thread that has ended": (
        ["shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;", "setp.lt.s32 %p1, %r1, 16;", "@%p1 bra $end;"],
        r"where \(block 0, thread 0\) does not come: it has ended: block 0, thread 16",
    ),
    "an exchange of some lanes": (["shfl.sync.bfly.b32 %r5, %r1, 1, 31, 0xffff;"], "the member mask leaves out lanes"),
    "a barrier in a divergent branch": (
        ["bar.sync 0;", "setp.lt.s32 %p1, %r1, 32;", "@%p1 bra $end;"],
        r"where \(block 0, thread 0\) does not come: it has ended: block 0, thread 32",
    ),
    "a launch that does not end": (["bra $again;", "$again:"], "the launch does not end"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_line(name):
    (bad, *others), words = FAULTS[name]
    before, _, after = ("\n".join(line or "|" for line in others)).partition("|")
    lines = [*before.splitlines(), bad, *after.splitlines(), "$end:"]
    with pytest.raises(Fault, match=words) as found:
        run(*lines, num_blocks=2)
    line = text(*lines).splitlines().index(bad) + 1
    assert re.match(rf"small, line {line}: ", str(found.value)), str(found.value)


def test_what_a_barrier_orders_is_no_fault():
    swapped = run(STORE, BARRIER, LOAD, "st.global.b32 [%rd1], %r5;", BARRIER, "st.shared.b32 [%r22], %r5;")
    assert swapped == list(range(63, -1, -1))
    run("st.shared.b32 [%r20], 5;", BARRIER, "ld.shared.b32 %r5, [%r20];")  # all threads write the same


def test_atomic_operations_add_each_threads_value():
    assert run("red.global.gpu.relaxed.add.u32 [%rd3], %r1;")[0] == 63 * 64 // 2


def test_registers_that_were_never_written_are_garbage_by_the_seed():
    first, again, other = (run("st.global.b32 [%rd1], %r10;", seed=seed) for seed in (0, 0, 1))
    assert first == again != other and len(set(first)) == 64


def test_launches_are_ordered_so_that_each_forgets_the_accesses_of_earlier_ones():
    data = aligned(128)
    memory, arguments = TensorMemory([(data.ctypes.data, data.nbytes)]), [("ptr", data.ctypes.data)] * 2
    for line in ("st.global.b32 [%rd1], %r1;", "ld.global.b32 %r5, [%rd1+4];", "st.global.b32 [%rd1], %r1;"):
        launch(text(line), 1, NUM_THREADS, arguments, memory)


def test_host_memory_checks_alignment_and_null_pointers():
    data, kernel = aligned(128), text("st.global.b32 [%rd1], %r1;")
    launch(kernel, 1, NUM_THREADS, [("ptr", data.ctypes.data)] * 2, HostMemory())
    assert data[:64].tolist() == list(range(64))
    for address, words in ((data.ctypes.data + 2, "misaligned access of 4 bytes"), (0, "null pointer")):
        with pytest.raises(Fault, match=f"{words}: block 0, thread 0"):
            launch(kernel, 1, NUM_THREADS, [("ptr", address)] * 2, HostMemory())


def test_arguments_that_are_not_the_parameters():
    for arguments in ([("ptr", 1 << 20)], [("ptr", 1 << 20), ("i32", 1)], [("ptr", 1 << 20), ("f32", 1.0)]):
        with pytest.raises(Fault, match="small: launched with .*; its parameters: u64, u64"):
            launch(text(), 1, NUM_THREADS, arguments, HostMemory())
    with pytest.raises(Fault, match="small: 48 threads in a block"):
        launch(text(), 1, 48, [("ptr", 1 << 20)] * 2, HostMemory())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
        ("fma.rn.f32 %r1, %r2, %r3, %r1;", "unknown instruction"),
        ("ex2.approx.f32 %r1, %r2;", "unknown instruction"),
        ("add.f32 %r1, %r2, %r3;", "needs one of rn"),
        ("add.rz.f32 %r1, %r2, %r3;", "needs one of rn"),
        ("add.rn.ftz.f32 %r1, %r2, %r3;", "unknown modifier .ftz"),
        ("mad.rn.f32 %r1, %r2, %r3, %r1;", "needs one of lo, wide"),
        ("div.full.f32 %r1, %r2, %r3;", "needs one of rn"),
        ("cvt.rz.f16.f32 %h1, %r2;", "needs one of rn"),
        ("add.f64 %rd1, %rd2, %rd3;", "unknown type .f64"),
        ("add.s32 %rd1, %r2, %r3;", "%rd1 is .b64"),
        ("add.s32 %r1, %r2, nothing;", "unknown operand nothing"),
        ("add.s32 %r1, %r2;", "1 operands instead of 2"),
        ("@%r1 add.s32 %r1, %r2, %r3;", "%r1 is not a predicate"),
        ("bra nowhere;", "nowhere"),
        ("ld.global.secretly.b32 %r1, [%rd1];", "unknown modifier .secretly"),
        ("ld.local.b32 %r1, [%rd1];", "needs one of global, shared"),
        ("shfl.sync.up.b32 %r1, %r2, 1, 0, -1;", "unknown exchange"),
        ("bar.arrive 0, 32;", "unknown barrier"),
    ],
)
def test_what_is_not_known_is_refused_with_kernel_and_line(line, reason):
    with pytest.raises(Unsupported, match=f"small, line {HEAD.count(chr(10)) + 1}: ") as refused:
        run(line)
    assert reason in str(refused.value)


def test_newer_isas_are_refused():
    with pytest.raises(Unsupported, match="small, line 1: ISA 99.0; known: 9.5"):
        parse(text().replace("8.8", "99.0"))
