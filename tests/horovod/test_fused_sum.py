"""FusedSum: sums of named tensors, in whatever company they come, with the engine's wires."""

import threading

import pytest
import torch
import torch.distributed as dist
from models import integers, normal

import fusedcomm
from fusedcomm.config import Blocks, Chunks, Config, Feedback, LocalOptions
from fusedcomm.native import _C
from fusedcomm.session.session import Session

HANG_S = 60
SHAPE = (71, 281)


class Sums:
    """One rank's sums over the default group."""

    def __init__(self, config: Config) -> None:
        device = torch.device("cpu")
        self.session = Session(config, dist.group.WORLD, None, LocalOptions(), device, watched=False)
        self.sums = _C.FusedSum(self.session.synchronizer)
        self.world_size = dist.get_world_size()

    def start(self, tensors: dict[str, torch.Tensor], factor: float = 1.0):
        """Begins a sum, in place. Returns a function that waits for its end."""
        ended, errors = threading.Event(), []

        def done(error: str) -> None:
            errors.append(error)
            ended.set()

        self.sums.run(names=list(tensors), tensors=list(tensors.values()), factor=factor, done=done)

        def wait() -> None:
            assert ended.wait(HANG_S)
            assert errors == [""]

        return wait

    def run(self, tensors: dict[str, torch.Tensor], factor: float = 1.0) -> dict[str, torch.Tensor]:
        self.start(tensors, factor)()
        return tensors


# ---- exact results


def exact_sums(rank, world_size, config, dtype, factor):
    sums = Sums(config)
    tensors = {f"t{i}": integers(rank, shape, dtype) for i, shape in enumerate([(5,), (300, 70), (3, 5, 7), (1,)])}
    return list(sums.run(tensors, factor).values())


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("wire", "sum"),
    [("fp32", "exact"), ("bf16", "direct"), ("fp16", "direct")]
    + [(wire, sum) for wire in ("fp32", "bf16", "fp16") for sum in ("auto", "two-shot", "one-shot")],
)
@pytest.mark.parametrize("scale", [1.0, 0.5, -4.0])
def test_sums_of_whole_numbers_are_exact_on_any_number_of_ranks(ranks, world_size, dtype, wire, sum, scale):
    config = Config(wire, sum, chunks=Chunks(4096))
    for seen in ranks.run(exact_sums, config, dtype, scale * world_size, world_size=world_size):
        for tensor in seen:
            whole = [integers(rank, tensor.shape, torch.float64) for rank in range(world_size)]
            assert torch.equal(tensor, torch.stack(whole).sum(0).mul(scale).to(dtype))


def large_sum(rank, world_size, sum):
    return Sums(Config("fp16", sum)).run({"x": torch.full((100, 100), 24576.0)}, world_size)["x"].unique().tolist()


@pytest.mark.parametrize("sum", ["two-shot", "one-shot"])
def test_an_fp16_wire_carries_sums_beyond_its_range(ranks, sum):
    assert ranks.run(large_sum, sum, world_size=3) == [[73728.0]] * 3


def refusals(rank, world_size):
    sums, plain = Sums(Config("bf16")), torch.zeros(4)
    for tensors, told in (
        ([], "0 names and 0 tensors"),
        ([plain.double()], "t0 is Double, which no wire carries"),
        ([plain, plain.half()], "one dtype and one device"),
        ([torch.zeros(4, 2)[:, 0]], "has gaps in memory"),
        ([torch.zeros(1).expand(4)], "has gaps in memory"),
        ([plain.to_sparse()], "is sparse"),
    ):
        with pytest.raises(ValueError, match=told):
            sums.sums.run(names=[f"t{i}" for i in range(len(tensors))], tensors=tensors)
    with pytest.raises(ValueError, match="2 names and 1 tensors"):
        sums.sums.run(names=["t0", "t1"], tensors=[plain])


def test_what_is_no_bucket_is_refused(ranks):
    ranks.run(refusals, world_size=2)


# ---- the bits


def bits(rank, world_size, config, factors):
    sums = Sums(config)
    return [sums.run({"x": normal(rank, step, SHAPE)}, factor)["x"] for step, factor in enumerate(factors)]


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("wire", "kwargs"),
    [
        ("bf16", {"feedback": Feedback()}),
        ("fp16", {}),
        ("int8", {"feedback": Feedback("bf16")}),
        ("int4", {"feedback": Feedback(decay=0.75)}),
        ("int8", {"feedback": Feedback("bf16", decay=0.5)}),
        ("fp8", {"feedback": Feedback()}),
        ("int4", {"blocks": Blocks(rotate=True), "feedback": Feedback()}),
    ],
    ids=str,
)
def test_means_have_the_bits_of_simulate_and_a_power_of_two_rounds_nothing(ranks, world_size, wire, kwargs):
    config = Config(wire, chunks=Chunks(4096), **kwargs)
    factors = [2.0] * 4 if config.feedback else [1.0, 2.0, -0.125]
    outcome = ranks.run(bits, config, factors, world_size=world_size)
    residuals = None if config.feedback is None else fusedcomm.Residuals(config.feedback.format)
    for step, factor in enumerate(factors):
        gradients = [normal(rank, step, SHAPE) for rank in range(world_size)]
        expected = fusedcomm.simulate(gradients, config, residuals=residuals) * factor
        for on_rank in outcome:
            assert torch.equal(on_rank[step], expected), step


# ---- error feedback in changing company

COMPANIES = [
    [["a", "b", "c"]],
    [["a"], ["b", "c"]],
    [["c", "a"], ["b"]],
    [["c"], ["small"], ["a", "b"]],
    [["small", "a", "b", "c"]],
    [["a", "b", "c"], ["small"]],
]
SHAPES = {"a": (50, 101), "b": (64, 77), "c": (33, 300), "small": (10, 100)}


def conserved(rank, world_size):
    """Sums constant tensors in every company. Returns for each the sum of all results and this rank's residual."""
    sums = Sums(Config("int4", feedback=Feedback(), chunks=Chunks(4096)))
    given = {name: normal(rank, index, shape) for index, (name, shape) in enumerate(SHAPES.items())}
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    count = dict.fromkeys(SHAPES, 0)
    for company in COMPANIES * 2:
        for names in company:
            for name, mean in sums.run({name: given[name].clone() for name in names}).items():
                total[name] += mean
                count[name] += 1
    left_out = sums.session.synchronizer.residuals()
    zeros = {name: torch.zeros(tensor.numel()) for name, tensor in given.items()}
    return total, {**zeros, **left_out}, {name: count[name] * given[name] for name in given}


@pytest.mark.parametrize("world_size", [2, 3])
def test_error_feedback_loses_nothing_when_the_company_changes(ranks, world_size):
    outcome = ranks.run(conserved, world_size=world_size)
    for name in SHAPES:
        given = torch.stack([given[name] for _, _, given in outcome]).double().sum(0) / world_size
        left_out = torch.stack([left_out[name] for _, left_out, _ in outcome]).double().sum(0) / world_size
        assert left_out.abs().max() > 0.01 or name == "small"
        for total, _, _ in outcome:
            torch.testing.assert_close(total[name].double() + left_out.view(SHAPES[name]), given, rtol=0, atol=1e-4)


# ---- names


def by_name(rank, world_size):
    sums = Sums(Config("int8", wires={"exact.*": "fp32", "half.*": "bf16"}))
    config = sums.session.config
    asked = []

    def wire_of(name: str, num_dims: int) -> int:
        asked.append(name)
        return config.wire_number(name, torch.empty([0] * num_dims))

    sums.session.synchronizer.choose_wires(wire_of)
    shape = (90, 91)
    for step in range(2):
        results = sums.run({name: normal(rank, step, shape) for name in ("exact.x", "half.x", "x")})
        results |= sums.run({"bias": normal(rank, step, (4000,)), "large": normal(rank, step, shape)})
    return asked, results, [record.parameters for record in sums.session.synchronizer.buckets()]


def test_wires_go_by_name(ranks):
    for asked, results, parameters in ranks.run(by_name, world_size=2):
        assert asked == ["exact.x", "half.x", "x", "bias", "large"]
        assert parameters == [["exact.x", "half.x", "x"], ["bias", "large"]]

        def mean(wire, shape=(90, 91)):
            return fusedcomm.simulate([normal(rank, 1, shape) for rank in range(2)], Config(wire, "one-shot"))

        assert torch.equal(results["exact.x"], mean("fp32")) and torch.equal(results["bias"], mean("fp32", (4000,)))
        assert torch.equal(results["half.x"], mean("bf16"))
        assert torch.equal(results["x"], mean("int8")) and torch.equal(results["large"], mean("int8"))


def changing_shapes(rank, world_size):
    sums, results = Sums(Config("bf16", feedback=Feedback())), []
    for shape, dtype in [((80, 90), torch.float32), ((7, 9000), torch.float32), ((7, 9000), torch.bfloat16)]:
        results.append(sums.run({"x": integers(rank, shape, dtype)}, world_size)["x"])
    return results


def test_a_name_may_come_with_another_shape_or_dtype(ranks):
    for on_rank in ranks.run(changing_shapes, world_size=2):
        for tensor in on_rank:
            assert torch.equal(tensor, sum(integers(rank, tensor.shape, tensor.dtype) for rank in range(2)))


def refused(rank, world_size):
    sums, errors = Sums(Config("bf16")), []
    for tensors in ({}, {"x": torch.ones(3, dtype=torch.int64)}, {"x": torch.ones(4, 4)[:, :2]}):
        try:
            sums.run(tensors)
        except ValueError as error:
            errors.append(str(error))
    return errors, sums.run({"x": integers(rank, (40, 40))}, world_size)["x"]


def test_tensors_that_no_wire_carries_are_refused(ranks):
    for (nothing, whole, gaps), result in ranks.run(refused, world_size=2):
        assert "0 names and 0 tensors" in nothing
        assert "x is Long, which no wire carries: use float32, bfloat16 or float16" in whole
        assert "has gaps in memory" in gaps
        assert torch.equal(result, sum(integers(rank, (40, 40)) for rank in range(2)))
