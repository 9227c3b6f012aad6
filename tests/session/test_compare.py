"""Parameters that should be equal on all ranks: a rank whose parameters differ is found by name, and no other."""

import warnings

import on_streams
import pytest
import torch
from models import synchronized
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.session.checksums import checksums
from fusedcomm.session.compare import outvoted

EVERY, FAULT, STEPS = 3, 4, 12
BAD = 1
"""The rank that has the fault, before step FAULT. The comparison after it is ahead of step 6."""
RAISES = Config("int8", compare_every=EVERY, compare="raise")
FRONT_ENDS = ("hook", "CommState", "reducer", "DataParallel")


# ---- checksums


def bits_of(tensor: torch.Tensor) -> int:
    return checksums([tensor], torch.device("cpu")).item()


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [2, 1000, 65536, 200_003])
def test_one_bit_and_two_elements_in_each_others_place_change_a_checksum(dtype, numel):
    generator = torch.Generator().manual_seed(numel)
    x = torch.randint(0, 2, (numel,), generator=generator).to(dtype)
    x[0], x[-1] = 1, 0
    words = torch.view_as_real(x) if dtype.is_complex else x
    words = words.view(torch.uint8).view(-1)
    before = bits_of(x)
    assert bits_of(x.clone()) == before == bits_of(x.view(1, -1).t())
    for place in (0, len(words) // 2, len(words) - 1):
        for bit in (0, 7):
            words[place] ^= 1 << bit
            assert bits_of(x) != before
            words[place] ^= 1 << bit
    x[0], x[-1] = x[-1].clone(), x[0].clone()
    assert bits_of(x) != before


def test_a_checksum_is_of_bits_and_not_of_values():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for dtype in (torch.float32, torch.float64):
        assert bits_of(torch.tensor([0.0, 1.0], dtype=dtype)) != bits_of(torch.tensor([-0.0, 1.0], dtype=dtype))
        assert bits_of(torch.tensor([-2.0, 2.0], dtype=dtype)) != bits_of(torch.tensor([2.0, -2.0], dtype=dtype))
    assert bits_of(nan[:1]) != bits_of(nan[1:]) and bits_of(nan[:1]) == bits_of(nan[:1].clone())
    assert bits_of(torch.zeros(0)) == 0
    assert checksums([torch.ones(3), torch.zeros(2)], torch.device("cpu")).shape == (2,)


def test_those_that_differ_from_most_are_outvoted():
    assert outvoted([5, 5, 5]) == ()
    assert outvoted([5, 4, 5]) == (1,)
    assert outvoted([1, 4, 5, 4]) == (0, 2)
    assert outvoted([4, 5]) == (0, 1) and outvoted([4, 4, 5, 5]) == (0, 1, 2, 3)


# ---- the silent faults


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(45, 5)
        self.wide = nn.Linear(33, 45, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.norm(torch.tanh(self.embed(x)))))


def thaw(model, optimizer):
    model.norm.weight.requires_grad_(True)


def skip(model, optimizer):
    """As a scaler does that has found an Inf on one rank only."""
    return "skip"


def load(model, optimizer):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def flip(model, optimizer):
    model.wide.weight.data.view(-1)[77:78].view(torch.int32)[0] ^= 1 << 20


def swap(model, optimizer):
    flat = model.wide.weight.data.view(-1)
    flat[3], flat[900] = flat[900].clone(), flat[3].clone()


FAULTS = {
    "thawed": (thaw, "hook", "norm.weight"),
    "skipped": (skip, "hook", "embed.weight"),
    "loaded": (load, "DataParallel", "embed.weight"),
    **{f"flipped, {front_end}": (flip, front_end, "wide.weight") for front_end in (*FRONT_ENDS, "owners")},
    "swapped": (swap, "reducer", "wide.weight"),
}


def trained(rank, front_end, config, fault, device="cpu"):
    """Trains, with a fault before step FAULT on rank BAD. Returns the step that failed, its error, and warnings."""
    torch.manual_seed(0)
    model = Net().to(device)
    model.norm.weight.requires_grad_(False)
    forward, comm = synchronized(front_end.replace("owners", "reducer"), model, config, bucket_mib=0.01)
    if front_end == "owners":
        optimizer = fusedcomm.ShardedOptimizer(comm, torch.optim.AdamW, lr=0.01, quiet=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            found = fault(model, optimizer) if step == FAULT and rank == BAD else None
            optimizer.zero_grad()
            try:
                forward(torch.randn(4, 7, generator=generator).to(device)).square().mean().backward()
            except RuntimeError as error:
                return step, str(error), []
            if found != "skip":
                optimizer.step()
    return None, "", [str(each.message) for each in caught if "parameters" in str(each.message)]


def faulty(rank, world_size, name):
    fault, front_end, _ = FAULTS[name]
    return trained(rank, front_end, RAISES, fault)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_found_and_named_on_every_rank_and_nothing_before_it(ranks, name):
    for step, text, _ in ranks.run(faulty, name, world_size=3):
        assert step == 2 * EVERY, text
        assert f"ahead of step {step} the parameters of rank {BAD} are not those of most ranks" in text
        assert FAULTS[name][2] in text and f"(rank {BAD} is up to " in text


def warned(rank, world_size):
    return trained(rank, "hook", Config("int8", compare_every=EVERY), load)


def test_rank_0_warns_once_and_training_goes_on(ranks):
    (_, _, first), (step, _, second) = ranks.run(warned, world_size=2)
    assert step is None and second == [] and len(first) == 1
    assert "the parameters of the 2 ranks differ, and none are those of most" in first[0]
    assert "embed.weight (rank 1 is up to " in first[0] and " from rank 0)" in first[0]


def joined(rank, world_size):
    torch.manual_seed(0)
    model = Net()
    config = Config("int8", compare_every=1, compare="raise")
    ddp, comm = synchronized("hook", model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([ddp]):
        for step in range(4 + 3 * rank):
            optimizer.zero_grad()
            ddp(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    assert comm.compare_parameters() is None


def test_a_rank_that_has_run_out_of_data_is_no_alarm(ranks):
    ranks.run(joined, world_size=2)


def on_streams_of(rank, world_size, name):
    fault, front_end, _ = FAULTS[name]
    return trained(rank, front_end, RAISES, fault, on_streams.DEVICE)


@pytest.mark.parametrize("name", ["skipped", "flipped, hook"])
def test_a_fault_is_found_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams, name):
    for step, text, _ in ranks_on_streams.run(on_streams_of, name):
        assert step == 2 * EVERY and FAULTS[name][2] in text


# ---- at once, and what is compared


def at_once(rank, world_size):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    ddp = DistributedDataParallel(model)
    comm = fusedcomm.attach(ddp, Config("bf16", compare_every=None), quiet=True)
    model[1].weight.data.fill_(rank)  # ignored by DDP
    assert comm.compare_parameters() is None
    model[0].bias.data[2] += 0.5 * (rank == 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = comm.compare_parameters()
    assert (found.ranks, found.parameters) == ((2,), ("0.bias",)), found
    assert found.distances["0.bias"] == pytest.approx(0.5) and "rank 2" in str(found)
    model[0].bias.data.fill_(float("nan") if rank == 2 else 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert comm.compare_parameters().distances == {"0.bias": float("inf")}
    comm.detach()
    comm = fusedcomm.attach(ddp, "off", quiet=True)
    with pytest.raises(RuntimeError, match="config='off' compares no parameters"):
        comm.compare_parameters()


def test_parameters_are_compared_at_once_but_for_ignored_ones(ranks):
    ranks.run(at_once, world_size=3)


def replicas(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    comm = fusedcomm.attach(model, Config("int8", compare_every=2, compare="raise"), quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert comm.compare_parameters() is None
    for step in range(6):
        if step == 4 and rank >= 2:  # of the second copy
            model[1].weight.data.to_local()[0, 0] += 1
        optimizer.zero_grad()
        try:
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        except RuntimeError as error:
            return step, str(error)
        optimizer.step()
    return None, ""


def test_replicas_of_hsdp_are_compared(ranks):
    for step, text in ranks.run(replicas, world_size=4):
        assert step == 4 and "1.weight" in text, text
