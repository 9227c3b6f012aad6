"""Every front end trains like DistributedDataParallel as it comes: CASES of tests/helpers/scenarios.py, with FRONT_ENDS
of tests/helpers/front_ends.py.

In wire fp32 two ranks have DDP's bits. More ranks add up in another order: their sums are exact where gradients are
crafted so, and else differ in the last bits. So are those of the wires that round.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from front_ends import FRONT_ENDS, PLAIN, FrontEnd, adding_up, end, with_all
from models import Gradients, whole, worst
from scenarios import CASES
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

NUM_STEPS = 4
ERRORS = {"bf16": 0.005, "fp16": 0.001, "int8": 0.03, "fp8": 0.08, "int4": 0.2}
"""Relative errors of all gradients after two roundings, in blocks that span several of them; see docs/accuracy.md."""
WITH_PARAMETERS = 3
"""So many times as large where parameters are rounded, too, from which several layers compute."""
CLOSE = 1e-6
IN_DDPS_ORDER = ("hook", "hook with views", "CommState")
"""They hand DDP's own buckets to the same all-reduce, so any number of ranks has DDP's bits."""
IS_CLOSE = ("sparse", "unused and sparse", "mixed dtypes")
"""A rank adds up the entries of one row in another order than those of a dense gradient. DDP halves gradients in fp16,
which rounds the least of them."""
NOT_CARRIED = ("float64 parameters",)
"""No wire rounds these."""
LEFT_TO_TORCH = ("complex", "float64 parameters", "unused on all ranks")
"""FSDP2 itself reduces these in some steps, which is warned of."""


def trained(rank: int, name: str, front_end: FrontEnd, wire: str, num_steps: int = NUM_STEPS) -> tuple[list, dict]:
    """The gradients of all parameters after each step, None where there is none, and the state at the end. After each
    step the model is evaluated."""
    case = CASES[name]
    model = case.build(reference=front_end is PLAIN, rank=rank)
    forward, comm = front_end.make(model, front_end.config(wire), **case.ddp)
    inner = getattr(forward, "module", model)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.05)
    dtype = next(forward.parameters()).dtype
    dtype = dtype if dtype in (torch.float64, torch.bfloat16) else torch.float32  # of inputs
    gradients = []
    with Join([forward]) if case.uneven else contextlib.nullcontext():
        for step in range(max(1, num_steps - 2 * rank * case.uneven)):
            case.before_step(inner, step)
            for part in range(case.accumulate):
                with adding_up(forward, comm) if part < case.accumulate - 1 else contextlib.nullcontext():
                    x, y = case.batch(rank, case.accumulate * step + part)
                    nn.functional.mse_loss(forward(x.to(dtype)).to(y.dtype), y).backward()
            gradients.append([None if p.grad is None else whole(p.grad) for p in forward.parameters()])
            optimizer.step()
            if case.zeroing != "nothing":
                optimizer.zero_grad(set_to_none=case.zeroing == "none")
            if case.evaluates:
                forward.eval()
                with torch.no_grad():
                    forward(case.batch(rank, 1000 + step)[0].to(dtype))
                forward.train()
    state = {f"module.{key.removeprefix('module.')}": whole(value) for key, value in forward.state_dict().items()}
    if isinstance(forward, DistributedDataParallel):
        assert state.keys() == forward.state_dict().keys()
    end(comm)
    return gradients, state


def error(ours: list, theirs: list) -> float:
    """The relative error of all tensors together. Infinite where one has a tensor that the other has not."""
    if [each is None for each in ours] != [each is None for each in theirs]:
        return float("inf")
    pairs = [(a.cdouble(), b.cdouble()) for a, b in zip(ours, theirs, strict=True) if a is not None]
    squares = sum((a - b).abs().square().sum() for a, b in pairs)
    return (squares / sum(b.abs().square().sum() for _, b in pairs)).sqrt().item()


def bits(tensors: list) -> str:
    found = [
        b"" if each is None else each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors
    ]
    return hashlib.sha256(b"|".join(found)).hexdigest()


def beside_ddp(rank: int, world_size: int, name: str, wires: tuple[str, ...]) -> dict:
    """{(front end, wire): (the largest error of a step beside DDP, a digest of the gradients)}. In a wire that rounds
    there is one step, so that it begins with DDP's parameters, or under Join so many that ranks end apart."""
    expected, expected_state = trained(rank, name, PLAIN, "fp32")
    found = {}
    needs = (*CASES[name].needs, "three ranks") if world_size == 3 else CASES[name].needs
    for front_end in with_all(*needs):
        for wire in wires:
            num_steps = NUM_STEPS if wire == "fp32" or CASES[name].uneven else 1
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore" if name in LEFT_TO_TORCH else "error", ".*are reduced by torch itself")
                try:
                    steps, state = trained(rank, name, FRONT_ENDS[front_end], wire, num_steps)
                except Exception as caught:
                    caught.add_note(f"{front_end}, {wire}")
                    raise
            errors = [error(*pair) for pair in zip(steps, expected, strict=wire == "fp32")]
            if wire == "fp32":
                assert list(state) == list(expected_state)
                errors.append(error(list(state.values()), list(expected_state.values())))
            found[front_end, wire] = worst(errors), bits(sum(steps, []))
    return found


def is_rounded(name: str, front_end: str, wire: str) -> bool:
    return wire != "fp32" and (name == "plain" or (FRONT_ENDS[front_end].sum != "auto" and name not in NOT_CARRIED))


def check(subtests, name: str, of_ranks: list[dict]) -> None:
    for front_end, wire in of_ranks[0]:
        with subtests.test(front_end=front_end, wire=wire):
            errors, digests = zip(*(found[front_end, wire] for found in of_ranks), strict=True)
            is_exact = name not in IS_CLOSE and (len(of_ranks) == 2 or front_end in IN_DDPS_ORDER)
            most = ERRORS.get(wire, 0.0 if is_exact else CLOSE)
            most *= WITH_PARAMETERS if FRONT_ENDS[front_end].gathers else 1
            assert all(error <= most for error in errors)
            assert not is_rounded(name, front_end, wire) or min(errors) > 0, "nothing was rounded"
            assert CASES[name].uneven or "own names" in CASES[name].needs or len(set(digests)) == 1, "ranks differ"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n == "compiled" else n for n in CASES])
def test_two_ranks_have_ddps_bits_and_rounded_its_gradients(ranks, subtests, name):
    check(subtests, name, ranks.run(beside_ddp, name, ("fp32", "int8"), world_size=2))


@pytest.mark.parametrize("wire", ERRORS)
def test_other_wires_stay_within_their_error(ranks, subtests, wire):
    check(subtests, "plain", ranks.run(beside_ddp, "plain", (wire,), world_size=2))


MORE = [("plain", 4), *((name, 3) for name in ("plain", "sparse", "find unused", "buffers of each rank", "ignored"))]


@pytest.mark.parametrize(("name", "world_size"), MORE)
def test_more_ranks_have_ddps_gradients_up_to_the_order_of_sums(ranks, subtests, name, world_size):
    check(subtests, name, ranks.run(beside_ddp, name, ("fp32",), world_size=world_size))


# ---- exact in every wire

SHAPES = ((5000,), (64, 70), (33,), (64, 64))
SIGNS = [
    torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(50)) < 0.5, -1.0, 1.0) for shape in SHAPES
]
"""The same on all ranks. Each rank's gradients have one magnitude, so that it is every block's largest."""
NEGATIVE = [-signs.abs() for signs in SIGNS]
"""For int4, whose largest code is negative."""


def magnitude(rank: int, step: int) -> float:
    """Means over two or four ranks are small whole numbers, too."""
    return (1.0, 3.0)[rank % 2] + 2 * step


def are(gradients: Iterable[torch.Tensor], factor: float, signs: list[torch.Tensor]) -> bool:
    return all(torch.equal(whole(a), factor * b) for a, b in zip(gradients, signs, strict=True))


def crafted(rank: int, world_size: int, wire: str) -> dict[str, list[bool]]:
    """{front end: whether each step's gradients are exact}. The third step has three passes of which the last is
    sent."""
    found, signs = {}, NEGATIVE if wire == "int4" else SIGNS
    for name, front_end in FRONT_ENDS.items():
        model = Gradients(*SHAPES)
        forward, comm = front_end.make(model, front_end.config(wire), bucket_cap_mb=0.02)
        found[name] = []
        for step in range(4):
            forward.zero_grad(set_to_none=step % 2 == 0)
            values, num_passes = [magnitude(rank, step) * each for each in signs], 1
            if step == 2:
                before, num_passes = comm.stats().buckets, 3
                with adding_up(forward, comm):
                    forward(values).backward()
                    forward(values).backward()
                found[name].append(comm.stats().buckets == before or FRONT_ENDS[name].gathers)
                if "FSDP2" not in name:
                    found[name].append(are((p.grad for p in forward.parameters()), 2 * magnitude(rank, step), signs))
            forward(values).backward()
            mean = num_passes * (magnitude(0, step) + magnitude(1, step)) / 2
            found[name].append(are((p.grad for p in forward.parameters()), mean, signs))
        end(comm)
    return found


@pytest.mark.parametrize("wire", fusedcomm.WIRES)
def test_gradients_of_one_magnitude_are_exact_in_every_wire(ranks, subtests, wire):
    for rank, found in enumerate(ranks.run(crafted, wire)):
        for front_end, steps in found.items():
            with subtests.test(front_end=front_end, rank=rank):
                assert all(steps), steps


def on_a_subgroup(rank: int, world_size: int) -> dict[str, bool]:
    own = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    found = {}
    for name in with_all("groups"):
        forward, comm = FRONT_ENDS[name].make(Gradients(*SHAPES), Config("int8"), process_group=own)
        forward([(rank + 1) * signs for signs in SIGNS]).backward()
        found[name] = are((p.grad for p in forward.parameters()), 1.5 if rank < 2 else 3.5, SIGNS)
        end(comm)
    return found


def test_a_group_of_some_of_the_ranks_has_its_own_mean(ranks):
    for found in ranks.run(on_a_subgroup):
        assert all(found.values()), found
