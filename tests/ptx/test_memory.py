"""Loads, stores and atomic operations, and their faults."""

import re

import numpy as np
import pytest

from . import Fault, HostMemory, TensorMemory, launch
from .small import ADDRESS, BODY_LINE, FIRST_LINE, aligned, run, text

pytestmark = pytest.mark.check


def fault(body, data=None, line=1, **options):
    """The text of the fault that `body` meets. Checks that it names the kernel and line number `line` of the body."""
    data = aligned(256) if data is None else data
    with pytest.raises(Fault) as caught:
        run(body, data, **options)
    assert re.match(rf"small, line {FIRST_LINE + line - 1}: ", str(caught.value)), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["u8", "s8", "b16", "s16", "u32", "b64"])
def test_integers_are_extended_to_their_registers(kind):
    data = aligned(64, np.uint64)
    data[:] = 0xFFEEDDCCBBAA9988 - np.arange(64, dtype=np.uint64)
    nbytes = int(kind[1:]) // 8
    run(
        f"mul.wide.u32 %rd3, %r4, 8;\n ld.param.u64 %rd1, [p0];\n add.s64 %rd1, %rd1, %rd3;\n"
        f"ld.global.{kind} %rd4, [%rd1];\n st.global.b64 [%rd1+256], %rd4;",
        data,
    )
    before = data[:32].view(f"{'i' if kind[0] == 's' else 'u'}{nbytes}")[:: 8 // nbytes]
    expected = before.astype(np.int64).view(np.uint64) if kind[0] == "s" else before.astype(np.uint64)
    assert np.array_equal(data[32:], expected)


def test_vectors_and_cache_operators():
    data = aligned(256)
    data[:128] = np.arange(128)
    run(
        """mul.wide.u32 %rd3, %r1, 16;
        ld.param.u64 %rd1, [p0];
        add.s64 %rd1, %rd1, %rd3;
        ld.global.nc.L1::no_allocate.v4.b32 {%r10, %r11, %r12, %r13}, [ %rd1 + 0 ];
        st.global.cs.v2.b32 [ %rd1 + 512 ], {%r13, %r12};
        st.global.wt.v2.f32 [%rd1+520], {%r11, %r10};""".replace("v2.f32", "v2.b32"),
        data,
    )
    assert np.array_equal(data[128:].reshape(32, 4), data[:128].reshape(32, 4)[:, ::-1])


def test_atomic_operations_go_in_the_order_of_threads():
    data = aligned(96)
    run(
        """ld.param.u64 %rd3, [p0];
        atom.global.gpu.relaxed.add.u32 %r5, [%rd3], %r1;
        red.global.max.s32 [%rd3+4], %r1;
        atom.global.exch.b32 %r6, [%rd3+8], %r1;
        st.global.b32 [%rd1+128], %r5;
        st.global.b32 [%rd1+256], %r6;""",
        data,
        tensors=[data],
    )
    assert data[0] == 31 * 32 // 2 and data[1] == 31 and data[2] == 31
    assert data[32:64].tolist() == [n * (n - 1) // 2 for n in range(32)]
    assert data[64:].tolist() == [0, *range(31)]


# ---- bad input: places


def test_a_null_pointer():
    found = fault("mov.u64 %rd3, 0;\n ld.global.b32 %r5, [%rd3+16];", line=2)
    assert "null pointer: block 0, thread 0, address 0x10" in found


@pytest.mark.parametrize("moved", [-1, 1])
@pytest.mark.parametrize("access", ["ld.global.u8 %h1, [%rd3];", "st.global.u8 [%rd3], %h1;"])
def test_outside_of_a_tensor_by_one_byte(moved, access):
    data = aligned(32, np.uint8)
    body = "ld.param.u64 %rd3, [p0];\n cvt.u64.u32 %rd4, %r1;\n add.s64 %rd3, %rd3, %rd4;\n"
    body += f"add.s64 %rd3, %rd3, {{}};\n {access}"
    run(body.format(0), data)
    found = fault(body.format(moved), data, line=5)
    address = data.ctypes.data + (-1 if moved < 0 else 32)
    assert f"thread {0 if moved < 0 else 31}, address {address:#x}" in found
    assert "access of 1 bytes outside of what was given" in found


def test_an_access_that_starts_inside_and_ends_outside_of_a_tensor():
    data = aligned(32)
    found = fault("ld.global.b32 %r5, [%rd1];", data, tensors=[data.view(np.uint8)[:127]])
    assert f"thread 31, address {data.ctypes.data + 124:#x}" in found


def test_between_two_tensors():
    memory = aligned(96)
    tensors = [memory[:32], memory[64:]]
    run("ld.global.b32 %r5, [%rd1];\n st.global.b32 [%rd1+256], %r5;", memory, tensors=tensors)
    found = fault("ld.global.b32 %r5, [%rd1+64];", memory, tensors=tensors)
    assert f"thread 16, address {memory.ctypes.data + 128:#x}" in found


def test_a_grid_reaches_every_tensor():
    memory = aligned(192)
    run("st.global.b32 [%rd1], %r4;", memory, num_blocks=3, tensors=[memory[:40], memory[40:96]])
    assert np.array_equal(memory[:96], np.arange(96))


@pytest.mark.parametrize(("vector", "nbytes"), [("v2.b32 {%r5, %r6}", 8), ("v4.b32 {%r5, %r6, %r7, %r8}", 16)])
def test_a_misaligned_vector(vector, nbytes):
    found = fault(f"ld.global.{vector}, [%rd1];")
    assert f"misaligned access of {nbytes} bytes: block 0, thread 1, address" in found


def test_host_memory_checks_alignment_and_null_pointers():
    data = aligned(64)
    kernel = text(ADDRESS + "st.global.b32 [%rd1+128], %r1;")
    launch(kernel, 1, 32, [("ptr", data.ctypes.data)], HostMemory())
    assert np.array_equal(data[32:], np.arange(32))
    with pytest.raises(Fault, match="misaligned access of 4 bytes: block 0, thread 0"):
        launch(kernel, 1, 32, [("ptr", data.ctypes.data + 2)], HostMemory())
    with pytest.raises(Fault, match="null pointer: block 0, thread 0, address 0x80"):
        launch(kernel, 1, 32, [("ptr", 0)], HostMemory())


# ---- bad input: shared memory

SHARED = """
mov.u32 %r20, scratch;
shl.b32 %r21, %r1, 2;
add.s32 %r22, %r20, %r21;
"""
SHARED_LINES = 3


def shared_fault(body, line, num_threads=64, **options):
    return fault(SHARED.strip("\n") + "\n" + body, line=SHARED_LINES + line, num_threads=num_threads, **options)


def test_shared_memory_passes_values_between_barriers():
    data = aligned(128)
    body = (
        SHARED
        + """
    st.shared.b32 [%r22], %r4;
    bar.sync 0;
    xor.b32 %r23, %r21, 252;
    add.s32 %r23, %r23, %r20;
    ld.shared.b32 %r24, [%r23];
    bar.sync 0;
    st.shared.b32 [%r22+256], %r24;
    ld.shared.b32 %r25, [%r22+256];
    st.global.b32 [%rd1], %r25;"""
    )
    run(body, data, num_blocks=2, num_threads=64)
    assert data.tolist() == [*range(63, -1, -1), *range(127, 63, -1)]


def test_shared_memory_that_no_thread_wrote():
    assert "reads what no thread wrote: block 0, thread 0, address 0x400" in shared_fault(
        "ld.shared.b32 %r5, [%r22];", 1
    )


def test_outside_of_shared_memory():
    found = shared_fault("st.shared.b32 [%r22+772], %r1;", 1)
    assert "access of 4 bytes outside of 1024 bytes: block 0, thread 63, address 0x800" in found
    assert "thread 0, address 0x3fc" in shared_fault("st.shared.b32 [%r22+-4], %r1;", 1)


def test_misaligned_shared_memory():
    found = shared_fault("st.shared.v2.b32 [%r22], {%r1, %r1};", 1)
    assert "misaligned access of 8 bytes: block 0, thread 1, address 0x404" in found


def test_shared_memory_without_a_barrier():
    write = "st.shared.b32 [%r22], %r1;\n"
    read = "sub.s32 %r23, 252, %r21;\n add.s32 %r23, %r23, %r20;\n ld.shared.b32 %r5, [%r23];"
    found = shared_fault(write + read, 4)
    assert "reads what thread (block 0, thread 63) wrote, without a barrier between them: block 0, thread 0" in found
    found = shared_fault(f"{write}st.shared.b32 [%r20], %r21;".replace("%r21;", "7;"), 2)
    assert "writes what thread (block 0, thread 0) wrote" in found
    # A write after a read, too: seen at the next barrier, and named by the line of the read.
    late = "\n st.shared.b32 [%r23], %r1;\n bar.sync 0;"
    found = shared_fault(
        f"{write}bar.sync 0;\n{read}{late}".replace("ld.shared.b32 %r5, [%r23]", "ld.shared.b32 %r5, [%r22]"), 5
    )
    assert "reads what thread (block 0, thread 63) writes later, without a barrier" in found


def test_threads_that_write_different_values_at_once():
    assert "writes what thread" in shared_fault("st.shared.b32 [%r20], %r1;", 1)
    run(SHARED + "st.shared.b32 [%r20], 5;", aligned(64), num_threads=64)


def test_a_barrier_of_a_warp_orders_its_threads_only():
    body = """st.shared.b32 [%r22], %r1;
    bar.warp.sync -1;
    sub.s32 %r23, {last}, %r21;
    add.s32 %r23, %r23, %r20;
    ld.shared.b32 %r5, [%r23];"""
    run(SHARED + body.format(last=124), aligned(32))
    assert "without a barrier" in shared_fault(body.format(last=252), 5)


# ---- bad input: races in global memory


def test_two_threads_write_the_same_byte():
    found = fault("ld.param.u64 %rd3, [p0];\n st.global.b32 [%rd3], %r1;", line=2)
    assert "writes what thread (block 0, thread 31) wrote" in found
    found = fault("st.global.b32 [%rd1], %r1;\n st.global.u8 [%rd1+3], %h1;\n st.global.u8 [%rd1+5], %h1;", line=3)
    assert "writes what thread (block 0, thread 1) wrote, without a barrier between them: block 0, thread 0" in found


def test_a_barrier_orders_a_block_but_no_other_block():
    body = """st.global.b32 [%rd1], %r4;
    bar.sync 0;
    shl.b32 %r5, %r1, 3;
    cvt.u64.u32 %rd3, %r5;
    sub.s64 %rd1, %rd1, %rd3;
    ld.global.b32 %r6, [%rd1+{last}];"""
    run(body.format(last=252), aligned(128), num_blocks=2, num_threads=64)
    found = fault(body.format(last=256), aligned(129), line=6, num_blocks=2, num_threads=64)
    assert "reads what thread (block 1, thread 0) wrote" in found


def test_a_read_before_a_write_by_another_thread():
    found = fault("ld.global.b32 %r5, [%rd1+4];\n st.global.b32 [%rd1], %r5;")
    assert (
        "reads what thread (block 0, thread 1) writes later, without a barrier between them: block 0, thread 0" in found
    )
    run("ld.global.b32 %r5, [%rd1];\n st.global.b32 [%rd1], %r5;", aligned(32))


def test_an_atomic_operation_and_a_write():
    found = fault("ld.param.u64 %rd3, [p0];\n red.global.add.u32 [%rd3], %r1;\n st.global.b32 [%rd1], %r1;", line=3)
    assert "writes what thread of an atomic operation wrote" in found


def test_a_launch_forgets_the_accesses_of_earlier_ones():
    data = aligned(33)
    memory = TensorMemory([(data.ctypes.data, data.nbytes)])
    write, read = (text(ADDRESS + line) for line in ("st.global.b32 [%rd1], %r1;", "ld.global.b32 %r5, [%rd1+4];"))
    for kernel in (write, read, write):
        launch(kernel, 1, 32, [("ptr", data.ctypes.data)], memory)


# ---- bad input: arguments


def test_arguments_that_do_not_match():
    data = aligned(32)
    memory = TensorMemory([(data.ctypes.data, data.nbytes)])
    kernel = text("", ("u64", "u32", "f32"))
    launch(kernel, 1, 32, [("ptr", data.ctypes.data), ("i32", -1), ("f32", 0.5)], memory)
    for arguments in (
        [("ptr", data.ctypes.data), ("i32", 1)],
        [("ptr", data.ctypes.data), ("i64", 1), ("f32", 0.5)],
        [("ptr", data.ctypes.data), ("f32", 1.0), ("i32", 1)],
    ):
        with pytest.raises(Fault, match="small: launched with .*; its parameters: u64, u32, f32"):
            launch(kernel, 1, 32, arguments, memory)
    with pytest.raises(Fault, match="small: 48 threads in a block"):
        launch(text(""), 1, 48, [("ptr", data.ctypes.data)], memory)
    assert BODY_LINE < FIRST_LINE
