"""The choice of a bucket's sum, and the size of a workspace: it must hold any chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm import chunks
from fusedcomm.config import WIRES, Chunks, Config
from fusedcomm.native import _C
from fusedcomm.session.plan import BucketsPlan, Row

FP32, BF16 = torch.empty(0), torch.empty(0, dtype=torch.bfloat16)
LARGE = 1 << 20


def plan(world_size: int, like: torch.Tensor, exact_numel: int, lossy_numel: int, **config) -> "_C.BucketPlan":
    slices = [(exact_numel, _C.EXACT_WIRE), (lossy_numel, 0)]
    return _C.plan_bucket(chunks.native(Config(**config), world_size), world_size, like, slices)


@pytest.mark.parametrize(
    ("wire", "world_size", "like", "exact_numel", "lossy_numel", "expected"),
    [
        ("fp32", 4, FP32, 0, LARGE, "exact"),
        ("fp32", 4, BF16, 0, LARGE, "two-shot"),
        ("fp32", 2, BF16, 0, LARGE, "one-shot"),
        ("bf16", 1, FP32, 0, LARGE, "one-shot"),
        ("bf16", 2, FP32, 0, LARGE, "one-shot"),
        ("bf16", 3, FP32, 0, LARGE, "two-shot"),
        ("bf16", 2, FP32, 8, LARGE, "one-shot"),
        ("fp16", 2, BF16, 0, LARGE, "one-shot"),
        ("int8", 2, FP32, 0, LARGE, "one-shot"),
        ("int8", 3, FP32, 8, LARGE, "two-shot"),
        ("int8", 2, FP32, LARGE, 0, "exact"),
        ("int8", 2, FP32, 0, _C.SMALL_BUCKET_NBYTES // 4, "exact"),
        ("int8", 2, FP32, 0, _C.SMALL_BUCKET_NBYTES // 4 + 1, "one-shot"),
    ],
)
def test_the_sum_is_chosen_by_wire_world_size_and_bytes(wire, world_size, like, exact_numel, lossy_numel, expected):
    chosen = plan(world_size, like, exact_numel, lossy_numel, wire=wire)
    assert chosen.sum == expected
    explained = chosen.sum == "exact" and wire != "fp32"
    assert bool(chosen.reason) == explained


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 512])
def test_the_scales_of_every_way_make_a_mean(world_size):
    for config, like in (
        ({"wire": "fp32"}, FP32),
        ({"wire": "fp16", "sum": "direct"}, FP32),
        ({"wire": "fp16", "sum": "two-shot"}, FP32),
        ({"wire": "int4", "sum": "one-shot"}, FP32),
        ({"wire": "int8"}, BF16),
    ):
        chosen = plan(world_size, like, 0, LARGE, **config)
        product = chosen.pack_scale * chosen.reduce_scale * chosen.unpack_scale
        assert product == pytest.approx(1 / world_size, rel=1e-6)


@pytest.mark.parametrize(("world_size", "predivide"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 4), (16, 4), (512, 32)])
def test_fp16_direct_divides_by_about_the_root_of_the_world_size(world_size, predivide):
    assert plan(world_size, FP32, 0, LARGE, wire="fp16", sum="direct").pack_scale == 1 / predivide


@settings(max_examples=500, deadline=None)
@given(
    wire=st.sampled_from(WIRES),
    like=st.sampled_from([FP32, BF16]),
    world_size=st.integers(1, 600),
    chunk_nbytes=st.integers(4096, 1 << 21),
    exact=st.integers(0, 1 << 18),
    lossy=st.integers(0, 1 << 22),
)
def test_a_workspace_holds_a_chunk_of_any_bucket(wire, like, world_size, chunk_nbytes, exact, lossy):
    config = chunks.native(Config(wire=wire, chunks=Chunks(chunk_nbytes)), world_size)
    chosen = _C.plan_bucket(config, world_size, like, [(exact, _C.EXACT_WIRE), (lossy, 0)])
    if chosen.sum != "exact":  # which is summed where it lies
        assert chosen.layout.chunk_nbytes <= _C.workspace_nbytes(config, world_size)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_on_an_accelerator_ddps_default_bucket_is_one_chunk(wire, world_size):
    """One chunk takes only three launches."""
    numel = 25 * (1 << 20) // 4
    native = chunks.native(Config(wire=wire), world_size, "cuda")
    for exact_numel in (0, 4096):
        slices = [(exact_numel, _C.EXACT_WIRE), (numel - exact_numel, 0)]
        plan = _C.plan_bucket(native, world_size, torch.empty(0), slices)
        assert plan.layout.num_chunks == 1


def printed(*rows: tuple[str, str, float, str]) -> list[str]:
    """The lines for buckets in a printed plan. `rows`: each bucket's wire, sum, MiB and reason."""
    buckets = tuple(
        Row(f"bucket {i}", (f"p{i}",), int(mib * (1 << 20)), wire, sum, 2, int(mib * (1 << 19)), reason)
        for i, (wire, sum, mib, reason) in enumerate(rows)
    )
    shown = BucketsPlan(
        rows=buckets,
        world_size=2,
        config=Config("int8", chunks=Chunks(1 << 20, 4)),
        device_type="cpu",
        codec="avx2",
        scratch_nbytes=0,
        exempt=(),
        predicted=False,
    )
    assert shown.buckets == buckets
    return str(shown).splitlines()[2:-1]


USUAL, SMALL = ("int8", "one-shot", 2.0, ""), ("fp32", "exact", 0.125, "small")


def test_up_to_twelve_buckets_are_printed_one_by_one():
    assert [line.split()[0] for line in printed(*[USUAL] * 12)] == [str(index) for index in range(12)]


def test_of_more_buckets_a_plan_prints_the_first_the_last_and_a_line_for_each_way_of_the_rest():
    rows = [("int8", "one-shot", 1.0, ""), *[USUAL] * 99, SMALL, *[("int8", "one-shot", 2.5, "")] * 95]
    rows += [("int8+bf16", "one-shot", 4.0, ""), SMALL, USUAL, USUAL]
    lines = printed(*rows)
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "…", "…", "…", "198", "199"]
    assert [line.strip() for line in lines[3:6]] == [
        "… 192 buckets like bucket 0: int8, one-shot, 2.000 to 2.500 MiB each, 431.500 MiB in all, sends 215.750 MiB",
        "… 2 buckets like bucket 100: fp32, exact, 0.125 MiB each, 0.250 MiB in all, sends 0.125 MiB  [small]",
        "… 1 bucket like bucket 196: int8+bf16, one-shot, 4.000 MiB each, 4.000 MiB in all, sends 2.000 MiB",
    ]
