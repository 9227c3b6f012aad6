"""Branches, predicates, exchanges between threads, and barriers."""

import re

import numpy as np
import pytest

from . import Fault, TensorMemory, launch
from .small import ADDRESS, FIRST_LINE, aligned, run, text

pytestmark = pytest.mark.check


def result(body, num_threads=32, num_blocks=1):
    """The u32 that `body` leaves in %r10 of each thread."""
    data = aligned(num_threads * num_blocks)
    run(body + "\nst.global.b32 [%rd1], %r10;", data, num_blocks, num_threads)
    return data.tolist()


def fault(body, line, num_threads=64):
    with pytest.raises(Fault) as caught:
        run(body, aligned(num_threads), num_threads=num_threads)
    assert re.match(rf"small, line {FIRST_LINE + line - 1}: ", str(caught.value)), str(caught.value)
    return str(caught.value)


# ---- control flow


def test_predicates():
    body = "setp.lt.s32 %p1, %r1, 3;\n mov.b32 %r10, 5;\n @%p1 mov.b32 %r10, 6;\n @!%p1 add.s32 %r10, %r10, %r1;"
    assert result(body) == [6] * 3 + [5 + n for n in range(3, 32)]
    body = "setp.lt.and.s32 %p1|%p2, %r1, 3, %p3;\n selp.b32 %r10, 1, 0, %p1;\n @%p2 add.s32 %r10, %r10, 2;"
    always = "setp.ge.s32 %p3, %r1, 0;\n"
    assert result(always + body) == [1] * 3 + [2] * 29
    assert result(always + body.replace("%p3", "!%p3")) == [0] * 32


def test_loops_of_different_lengths():
    body = """mov.b32 %r10, 0;
    mov.b32 %r11, %r1;
    $again:
    setp.eq.s32 %p1, %r11, 0;
    @%p1 bra $done;
    add.s32 %r10, %r10, %r11;
    sub.s32 %r11, %r11, 1;
    bra.uni $again;
    $done:"""
    assert result(body) == [n * (n + 1) // 2 for n in range(32)]


def test_branches_meet_again_wherever_the_code_lies():
    """The first branch's code lies behind the exchange in which both meet."""
    body = """setp.lt.s32 %p1, %r1, 16;
    @%p1 bra $low;
    mov.b32 %r11, 100;
    $both:
    shfl.sync.bfly.b32 %r10, %r11, 16, 31, -1;
    bra $end;
    $low:
    mov.b32 %r11, %r1;
    bra $both;
    $end:"""
    assert result(body) == [100] * 16 + list(range(16))


def test_threads_that_return_early():
    data = aligned(32)
    run("setp.lt.s32 %p1, %r1, 3;\n @%p1 ret;\n st.global.b32 [%rd1], 7;", data)
    assert data.tolist() == [0] * 3 + [7] * 29


def test_registers_that_were_never_written_are_garbage_by_the_seed():
    outputs = []
    for seed in (0, 0, 1):
        data = aligned(32)
        memory = TensorMemory([(data.ctypes.data, data.nbytes)])
        kernel = text(ADDRESS + "setp.lt.s32 %p1, %r1, 8;\n @%p1 mov.b32 %r10, 1;\n st.global.b32 [%rd1], %r10;")
        launch(kernel, 1, 32, [("ptr", data.ctypes.data)], memory, seed=seed)
        assert data[:8].tolist() == [1] * 8
        outputs.append(data.tolist())
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(set(outputs[0][8:])) == 24


def test_vectors_of_registers():
    body = "mov.b32 {%h1, %h2}, 0x00050003;\n mov.b32 %r10, {%h2, %h1};"
    assert result(body) == [0x00030005] * 32
    body = "mov.b64 %rd5, {%r1, 7};\n mov.b64 {_, %r11}, %rd5;\n mov.b64 {%r12, _}, %rd5;\n add.s32 %r10, %r11, %r12;"
    assert result(body) == [7 + n for n in range(32)]
    body = "mov.b32 %r11, %r1;\n mov.b32 {%h1, %h2}, %r11;\n cvt.u32.u16 %r10, %h1;"
    assert result(body) == list(range(32))


def test_special_registers():
    body = "mov.u32 %r11, %laneid;\n mov.u32 %r12, %nctaid.x;\n mad.lo.s32 %r10, %r12, 100, %r11;"
    assert result(body, 64, 2) == [200 + n % 32 for n in range(128)]
    body = "mov.u32 %r11, %ntid.x;\n mov.u32 %r12, %ntid.y;\n mov.u32 %r13, %ctaid.z;\n add.s32 %r10, %r11, %r12;"
    assert result(body, 64) == [65] * 64


def test_immediates():
    assert result("mov.b32 %r10, -1;")[0] == 0xFFFFFFFF
    assert result("mov.u32 %r10, 0xffffffffffff8000;")[0] == 0xFFFF8000  # cut to 32 bits
    assert result("mov.f32 %f1, 0f3F800000;\n add.rn.f32 %f2, %f1, 0f3F800000;\n mov.b32 %r10, %f2;")[0] == 0x40000000


# ---- exchanges: the lane that each lane reads, by the ISA's text


def shuffled(mode, b, c):
    body = f"add.s32 %r11, %r1, 100;\n shfl.sync.{mode}.b32 %r10|%p1, %r11, {b}, {c}, -1;"
    lanes = [value - 100 for value in result(body)]
    inside = result(body + "\n selp.b32 %r10, 1, 0, %p1;")
    return lanes, inside


@pytest.mark.parametrize("segment", [32, 8])
@pytest.mark.parametrize("b", [0, 1, 5, 31])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode, b, segment):
    """Within segments of 32 or 8 lanes: c holds the mask of the segment's number, and the last lane within it."""
    c = ((32 - segment) << 8) | (0 if mode == "up" else 31)
    lanes, inside = [], []
    for lane in range(32):
        first = lane // segment * segment
        wanted = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first + b % segment}[mode]
        # bfly may read a lane of an earlier segment.
        there = wanted >= first if mode == "up" else wanted <= first + segment - 1
        inside.append(int(there))
        lanes.append(wanted if there else lane)
    assert shuffled(mode, b, c) == (lanes, inside)


def test_shfl_clamps():
    lanes, inside = shuffled("down", 1, 20)
    assert lanes == [lane + 1 if lane < 20 else lane for lane in range(32)]
    assert inside == [int(lane < 20) for lane in range(32)]


def test_shfl_of_half_a_warp():
    body = """setp.lt.s32 %p1, %r1, 16;
    mov.b32 %r10, %r1;
    @%p1 shfl.sync.bfly.b32 %r10, %r1, 8, 31, 0xffff;"""
    assert result(body) == [*range(8, 16), *range(8), *range(16, 32)]


@pytest.mark.parametrize(
    ("vote", "expected"),
    [("ballot", 0b111), ("any", 1), ("all", 0), ("uni", 0)],
)
def test_vote(vote, expected):
    found = "setp.lt.s32 %p1, %r1, 3;\n"
    if vote == "ballot":
        body = found + "vote.sync.ballot.b32 %r10, %p1, -1;"
    else:
        body = found + f"vote.sync.{vote}.pred %p2, %p1, -1;\n selp.b32 %r10, 1, 0, %p2;"
    assert result(body) == [expected] * 32


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.s32", sum(range(-5, 27)) % 2**32),
        ("min.s32", 2**32 - 5),
        ("max.s32", 26),
        ("min.u32", 0),
        ("max.u32", 2**32 - 1),
        ("and.b32", 0),
        ("or.b32", 2**32 - 1),
        ("xor.b32", int(np.bitwise_xor.reduce(np.arange(-5, 27).astype(np.uint32)))),
    ],
)
def test_redux(operation, expected):
    assert result(f"sub.s32 %r11, %r1, 5;\n redux.sync.{operation} %r10, %r11, -1;") == [expected] * 32


def test_redux_of_half_a_warp():
    body = "setp.lt.s32 %p1, %r1, 16;\n mov.b32 %r10, 0;\n @%p1 redux.sync.add.u32 %r10, %r1, 0xffff;"
    assert result(body) == [120] * 16 + [0] * 16


# ---- bad input: exchanges


def test_a_mask_that_names_threads_that_are_not_there():
    found = fault("setp.lt.s32 %p1, %r1, 16;\n @%p1 ret;\n shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1;", 3, 32)
    assert "where (block 0, thread 0) does not come: it has ended: block 0, thread 16" in found


def test_a_mask_that_leaves_out_the_thread_itself():
    found = fault("shfl.sync.bfly.b32 %r10, %r1, 1, 31, 0xffff;", 1, 32)
    assert "the member mask 0xffff leaves out the thread itself: block 0, thread 16" in found


def test_a_lane_that_the_mask_leaves_out():
    body = "setp.lt.s32 %p1, %r1, 16;\n @%p1 shfl.sync.bfly.b32 %r10, %r1, 16, 31, 0xffff;"
    assert "reads lane 16, which the member mask leaves out: block 0, thread 0" in fault(body, 2, 32)


def test_threads_with_different_masks():
    body = "setp.lt.s32 %p1, %r1, 1;\n selp.b32 %r5, -1, -2, %p1;\n shfl.sync.bfly.b32 %r10, %r1, 0, 31, %r5;"
    assert "threads of a warp meet with different member masks: block 0, thread 0" in fault(body, 3, 32)


def test_a_warp_that_meets_in_different_exchanges():
    body = """setp.lt.s32 %p1, %r1, 16;
    @%p1 bra $other;
    shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1;
    ret;
    $other:
    shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1;"""
    found = fault(body, 6, 32)
    assert f"where (block 0, thread 16) does not come: it waits at line {FIRST_LINE + 2}: block 0, thread 0" in found


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_shared_memory(transposed):
    """Four matrices are stored with rows in reverse order, and loaded. Lane l holds (row, column) l // 4, 2·(l % 4)."""
    trans = ".trans" if transposed else ""
    body = f"""mov.u32 %r20, scratch;
    sub.s32 %r21, 31, %r1;
    shl.b32 %r21, %r21, 4;
    add.s32 %r21, %r20, %r21;
    shl.b32 %r22, %r1, 4;
    add.s32 %r22, %r20, %r22;
    add.s32 %r11, %r1, 0x10000;
    add.s32 %r12, %r1, 0x20000;
    add.s32 %r13, %r1, 0x30000;
    add.s32 %r14, %r1, 0x40000;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r21], {{%r11, %r12, %r13, %r14}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r15, %r16, %r17, %r18}}, [%r22];
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r10}}, [%r22];"""
    # The first matrix that is read is the last one that was written, with its rows reversed.
    expected = [0x40000 + 4 * row + pair for row in range(7, -1, -1) for pair in range(4)]
    found = result(body.replace("%r10}}", "%r19}}") + "\nmov.b32 %r10, %r15;")
    # Loaded as it was stored, by columns: the reversed rows have swapped the halves, and the lanes of a column.
    swapped = [(lane // 4 * 4 + 3 - lane % 4) << 16 | 4 for lane in range(32)]
    assert found == (swapped if transposed else expected)
    plain = result(body)
    assert (plain == expected) != transposed
    if transposed:
        # Stored as columns: the first row read is the last row of matrix 3, which holds the pairs' halves of column 7.
        halves = np.zeros((8, 8), np.uint16)
        for lane in range(32):
            halves[2 * (lane % 4), lane // 4], halves[2 * (lane % 4) + 1, lane // 4] = lane, 4
        reversed_rows = np.ascontiguousarray(halves[::-1])
        assert plain == reversed_rows.view(np.uint32).reshape(-1).tolist()


def test_a_launch_that_does_not_end():
    data = aligned(32)
    memory = TensorMemory([(data.ctypes.data, data.nbytes)])
    with pytest.raises(Fault, match="the launch does not end"):
        launch(text("$again:\n bra $again;"), 1, 32, [("ptr", data.ctypes.data)], memory, max_steps=1000)


# ---- barriers


def test_a_barrier_of_some_warps():
    """Warps 0 and 1 of three exchange values; warp 2 does not come."""
    body = """mov.u32 %r20, scratch;
    shl.b32 %r21, %r1, 2;
    add.s32 %r22, %r20, %r21;
    xor.b32 %r23, %r21, 128;
    add.s32 %r23, %r20, %r23;
    mov.b32 %r10, 1000;
    setp.ge.s32 %p1, %r1, 64;
    @%p1 bra $end;
    st.shared.b32 [%r22], %r1;
    bar.sync 1, 64;
    ld.shared.b32 %r10, [%r23];
    $end:"""
    assert result(body, 96) == [*range(32, 64), *range(32), *[1000] * 32]


def test_warps_may_come_to_a_barrier_one_by_one():
    """Warp 1 reaches the loop's barrier from code behind it, warp 0 from code before it."""
    body = """mov.b32 %r10, 0;
    $again:
    add.s32 %r10, %r10, 1;
    $meet:
    bar.sync 0;
    setp.ge.s32 %p1, %r10, 3;
    @%p1 bra $end;
    setp.lt.s32 %p2, %r1, 32;
    @%p2 bra $again;
    add.s32 %r10, %r10, 1;
    bra $meet;
    $end:"""
    assert result(body, 64) == [3] * 64


def test_a_barrier_in_a_divergent_branch():
    found = fault("setp.lt.s32 %p1, %r1, 32;\n @%p1 bra $end;\n bar.sync 0;\n $end:", 3)
    assert "where (block 0, thread 0) does not come: it has ended: block 0, thread 32" in found
    body = "setp.lt.s32 %p1, %r1, 20;\n @%p1 bra $low;\n bar.sync 0;\n bra $end;\n $low:\n bar.sync 0;\n $end:"
    found = fault(body, 6)
    assert f"where (block 0, thread 20) does not come: it waits at line {FIRST_LINE + 2}: block 0, thread 0" in found


def test_more_threads_than_a_barrier_counts():
    assert "64 threads come to a barrier of 32: block 0, thread 0" in fault("bar.sync 0, 32;", 1)
