"""The C++ codec against the oracle: the same bytes on every instruction set, with any number of threads."""

import dataclasses
import threading

import pytest
import reference
import torch
from codec_cases import CASES, SEVERAL_WIRES, Case, any_case, bucket_layout, case_of
from codec_checks import CODECS, check_codecs, check_every_code, check_hosts, guarded
from hypothesis import given, settings
from values import DTYPES, WIRES, same_bits, signed

from fusedcomm.native import _C

NOTHING = torch.empty(0)
ON_THREADS = [CODECS[f"{isa}-3"] for isa in _C.available_isas()]


def sample(wire_format, dtype, name):
    """Every pair, and special values with every wire and dtype."""
    pairs = {"dtype and wire": (dtype, wire_format), "wire": (wire_format, name), "dtype": (dtype, name)}
    return pairs | ({"values": (wire_format, dtype, name)} if name == "special values" else {})


@pytest.mark.sampled(by=sample)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire_format", WIRES)
def test_gives_the_bytes_of_the_oracle(wire_format, dtype, name):
    check_codecs(case_of(name, wire_format, dtype))


@settings(deadline=None, max_examples=60)
@given(case=any_case())
def test_any_bucket(case):
    check_codecs(case)


@pytest.mark.parametrize("feedback", [False, True])
def test_wires_share_a_message(feedback):
    assert check_codecs(dataclasses.replace(SEVERAL_WIRES, feedback=feedback))[0].num_chunks > 1


@pytest.mark.parametrize("in_wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wire_format", WIRES)
def test_sums_in_one_wire_are_encoded_in_another(wire_format, in_wire):
    for run in CODECS.values():
        for feedback in (False, True):
            check_hosts(run, in_wire, wire_format, feedback)


@pytest.mark.parametrize("wire", WIRES[1:])
def test_every_code_is_decoded(wire):
    for run in CODECS.values():
        check_every_code(run, wire)


# ---- large buckets


@pytest.mark.parametrize("wire_format", ["bf16", "int8", "int4"])
def test_units_of_several_threads(wire_format):
    case = Case(numels=([300_007], [70_001]), wires=(wire_format,), num_parts=1, block=128)
    check_codecs(case, codecs=ON_THREADS)


@pytest.mark.parametrize(
    ("wire_format", "dtype", "gap"),
    [
        ("int8", torch.float32, 0),
        ("bf16", torch.float32, 1),
        *(pytest.param(wire, dtype, 0, marks=pytest.mark.full) for wire in ("bf16", "int4") for dtype in DTYPES),
    ],
    ids=str,
)
def test_outputs_that_bypass_the_caches(wire_format, dtype, gap):
    """The outputs are just large enough for that: 4 MiB of codes, 16 MiB of gradients. With a gap, they lack the
    alignment that it needs."""
    numel = max(2**25 // _C.code_nbits(wire_format), 2**24 // dtype.itemsize)
    numels = [2_000_000, 3, numel - 2_000_000]
    case = Case(numels=(numels, []), wires=(wire_format,), dtype=dtype, gaps=[gap], num_parts=1, block=128)
    check_codecs(case, ("pack", "unpack"), ON_THREADS)


@pytest.mark.parametrize("wire_format", ["bf16", "int8"])
def test_more_than_2_to_the_31_elements(wire_format):
    """Only the end is touched, so the tensor takes address space but hardly any memory."""
    x = torch.empty(2**31 + 1003, dtype=torch.bfloat16)
    layout = bucket_layout(wire_format, 128, 2, 0, x.numel(), 1 << 20)
    chunk = layout.num_chunks - 1
    begin = layout.lossy_range(chunk, 0)[0]
    assert begin > 2**31 - 2**22
    x[begin:] = signed(x.numel() - begin, torch.bfloat16, seed=10)
    memory, message = guarded(layout.chunk_nbytes, "cpu")
    codec = _C.Codec()
    codec.pack(layout, chunk, [x], [], 0.5, message)
    assert torch.equal(message, reference.pack(layout, chunk, x, NOTHING, 0.5))
    codec.unpack(layout, chunk, message, 2.0, [x], [])
    assert same_bits(x[begin:], reference.unpack(layout, chunk, message, 2.0, torch.bfloat16)[0])


# ---- what the result does not depend on


@pytest.mark.parametrize("wire_format", WIRES)
def test_the_threads_floating_point_mode_changes_nothing(wire_format):
    x = torch.cat([signed(4000, seed=8) * 2.0**-130, signed(1003, seed=9)])
    layout = bucket_layout(wire_format, 128, 1, 0, x.numel())
    expected = reference.pack(layout, 0, x, NOTHING, 0.5)
    for run in CODECS.values():
        _, message = guarded(layout.chunk_nbytes, "cpu")
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush denormals")
        try:
            run.codec.pack(layout, 0, [x], [], 0.5, message)
            assert torch.tensor(1e-40).mul(1.0).item() == 0  # the mode is still set
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(message, expected)


def test_one_codec_serves_several_threads():
    layout = bucket_layout("int8", 128, 2, 500, 200_003)
    codec, failures = _C.Codec("auto", 3), []
    inputs = [(signed(200_003, seed=seed), signed(500, seed=seed)) for seed in range(4)]
    expected = [reference.pack(layout, 0, *elements, 1.0) for elements in inputs]

    def work(index: int) -> None:
        lossy, exact = inputs[index]
        unpacked, (_, message) = torch.empty_like(lossy), guarded(layout.chunk_nbytes, "cpu")
        wanted = reference.unpack(layout, 0, expected[index], 1.0, torch.float32)[0]
        for _ in range(20):
            codec.pack(layout, 0, [lossy], [exact], 1.0, message)
            codec.unpack(layout, 0, message, 1.0, [unpacked], [torch.empty_like(exact)])
            if not torch.equal(message, expected[index]) or not torch.equal(unpacked, wanted):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- arguments


def test_isa_and_threads():
    assert _C.available_isas()[0] == "portable"
    assert _C.Codec().isa == _C.available_isas()[-1]
    with pytest.raises(ValueError, match="isa='sse9' is not possible here: use one of auto, portable"):
        _C.Codec("sse9")
    with pytest.raises(ValueError, match="num_threads=0 is not possible"):
        _C.Codec("auto", 0)


def message_of(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=dtype)


LAYOUT, TWO_PARTS = bucket_layout("bf16", 128, 1, 16, 1000), bucket_layout("bf16", 128, 2, 16, 1000)
NBYTES, NUMEL = LAYOUT.chunk_nbytes, LAYOUT.padded_numel
RIGHT = {
    "pack": {"chunk": 0, "lossy": [torch.zeros(1000)], "exact": [torch.zeros(16)], "out": message_of(NBYTES)},
    "unpack": {"chunk": 0, "lossy": [torch.zeros(1000)], "exact": [torch.zeros(16)], "parts": message_of(NBYTES)},
    "reduce": {"parts": message_of(NBYTES), "out": message_of(LAYOUT.part.nbytes)},
}
REFUSED = [
    ("pack unpack", {"chunk": 1}, "chunk 1 does not exist; the number of chunks is 1"),
    ("pack unpack", {"chunk": -1}, "chunk -1 does not exist; the number of chunks is 1"),
    ("pack unpack", {"lossy": [torch.zeros(999)]}, "lossy slices have 999 elements, but their layout has 1000"),
    ("pack unpack", {"exact": []}, "exact slices have 0 elements, but their layout has 16"),
    ("pack unpack", {"lossy": [torch.zeros(1000).double()]}, "float32, bfloat16 or float16, not Double"),
    ("pack unpack", {"lossy": [torch.zeros(500), torch.zeros(500).half()]}, "must have one dtype"),
    ("pack unpack", {"lossy": [torch.zeros(2000)[::2]]}, "a slice must be a contiguous CPU tensor"),
    ("pack unpack", {"lossy": [torch.zeros(1000, device="meta")]}, "not one on meta"),
    ("pack reduce", {"out": message_of(NBYTES - 1)}, "out must have .* bytes, not"),
    ("unpack reduce", {"parts": message_of(NBYTES - 1)}, "parts must have .* bytes, not"),
    ("unpack", {"parts": message_of(NBYTES, torch.int8)}, "must be uint8, not Char"),
    ("unpack", {"parts": message_of(NBYTES + 1)[1:]}, "multiple of 16"),
    ("unpack", {"num_messages": 0}, "num_messages=0 is not possible"),
    (
        "unpack",
        {"layout": TWO_PARTS, "num_messages": 2, "parts": message_of(2 * TWO_PARTS.chunk_nbytes)},
        "2 messages of 2 parts cannot be summed",
    ),
    ("reduce", {"num_parts": 2, "out": message_of(2 * LAYOUT.part_stride)}, "cannot become 2 parts of"),
    (
        "pack",
        {"residual": torch.zeros(NUMEL - 8)},
        f"residual has {NUMEL - 8} elements, but this encoder encodes {NUMEL}",
    ),
    ("pack", {"residual": torch.zeros(NUMEL).half()}, "residual must be float32, not Half"),
]


@pytest.mark.parametrize(("calls", "changed", "words"), REFUSED, ids=str)
def test_wrong_arguments_are_named(calls, changed, words):
    for name in calls.split():
        with pytest.raises((ValueError, TypeError), match=words):
            getattr(_C.Codec(), name)(**{"layout": LAYOUT, "scale": 1.0, **RIGHT[name], **changed})
