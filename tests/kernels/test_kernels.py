"""The kernels against the oracle: the same bytes on the wire, the same bits in memory, and nothing else touched.

Without a GPU they run on CPU tensors, in Triton's interpreter. It is slow, so what depends only on the geometry is
tested with small tiles.
"""

import dataclasses
import math

import interpreter
import pytest
import torch
from codec_cases import CASES, SEVERAL_WIRES, any_case, bucket_layout, case_of
from codec_checks import Residual, check, check_every_code, check_hosts, guarded
from hypothesis import given, settings
from values import DTYPES, WIRES

pytest.importorskip("triton")

from kernel_checks import REAL_TILES, Kernels, check_scale  # noqa: E402
from launchers import scale_in_place  # noqa: E402

from fusedcomm.kernels.variants import TILE  # noqa: E402

interpreter.mend()

# Under the interpreter numpy warns of every Inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    has_gpu = torch.cuda.is_available()
    if request.param == "cuda" and not has_gpu:
        pytest.skip("no CUDA GPU here")
    if request.param == "cpu" and has_gpu:
        pytest.skip("with a GPU the same tests run there")
    return request.param


@pytest.fixture
def run(device):
    return Kernels(device)


MANY_VALUES = ("values around codes", "every gradient of 16 bits")
WITH_EACH_WIRE = ("one run", "ragged", "residuals", "special values", "values around codes")


def sample(wire_format, dtype, name, device):
    return {"name": name, "dtype": dtype, "wire": (wire_format, name if name in WITH_EACH_WIRE else "another")}


TABLE = [
    (wire_format, dtype, name)
    for wire_format in WIRES
    for dtype in DTYPES
    for name in CASES
    if dtype == torch.float32 or name in (*WITH_EACH_WIRE, "views", "three messages", "every gradient of 16 bits")
]
"""Every case with fp32 gradients. The code that loads and stores others is the same in all of them."""


@pytest.mark.sampled(by=sample)
@pytest.mark.parametrize(("wire_format", "dtype", "name"), TABLE, ids=str)
def test_gives_the_bytes_of_the_oracle(device, wire_format, dtype, name):
    check(Kernels(device, tile=None if name in MANY_VALUES else 256), case_of(name, wire_format, dtype))


@pytest.mark.sampled
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire_format", WIRES)
def test_at_the_real_tile(device, wire_format, dtype, feedback):
    case = dataclasses.replace(REAL_TILES, wires=(wire_format,), dtype=dtype, feedback=feedback)
    check(Kernels(device, tile=None), case)


@pytest.mark.parametrize("num_programs", [1, 20])
def test_any_number_of_programs(device, num_programs):
    check(Kernels(device, num_programs=num_programs), CASES["ragged"])


def test_any_bucket(run, request):
    @given(case=any_case())
    @settings(max_examples=25 if request.config.getoption("--all") else 5, deadline=None, derandomize=True)
    def check_any(case):
        check(run, case)

    check_any()


@pytest.mark.parametrize("feedback", [False, True])
def test_wires_share_a_message(run, feedback):
    layouts = check(run, dataclasses.replace(SEVERAL_WIRES, feedback=feedback))
    assert layouts[0].num_chunks > 1


@pytest.mark.sampled
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("in_wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wire_format", WIRES)
def test_sums_in_one_wire_are_encoded_in_another(run, wire_format, in_wire, feedback):
    check_hosts(run, in_wire, wire_format, feedback)


@pytest.mark.parametrize("wire", WIRES[1:])
def test_every_code_is_decoded(device, wire):
    check_every_code(Kernels(device, tile=None), wire)


def test_a_sum_of_minus_zeros_is_minus_zero(run):
    """Nor do ranks that do not exist add anything."""
    layout = bucket_layout("fp32", 32, 3, 0, 24)
    _, reduced = guarded(layout.part.nbytes, run.device)
    minus_zeros = torch.full((24,), -0.0).view(torch.uint8).to(run.device)
    run.reduce(layout, minus_zeros, 1.0, reduced, Residual(None, 0, run.device), 0)
    assert torch.all(reduced.cpu().view(torch.int32) == -(2**31))


def test_counts_are_added_to(run):
    layout = bucket_layout("fp16", 32, 1, 0, 100)
    bucket = run.bucket(layout, torch.full((100,), math.nan, device=run.device), [(0, 40), (40, 60)], [])
    for _ in range(2):
        _, message = guarded(layout.chunk_nbytes, run.device)
        run.pack(bucket, 0, 1.0, message, Residual(None, 0, run.device))
    scale_in_place(bucket, 1.0, 1)
    assert bucket.counts() == [120, 180]


@pytest.mark.parametrize(("numel", "tile"), [(0, 64), (1, 64), (1000, 256), (1024, 256), (2 * TILE + 3, None)])
def test_scales_in_place(device, numel, tile):
    check_scale(Kernels(device, tile), numel)
