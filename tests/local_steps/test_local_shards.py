"""LocalSteps between hosts that train with FSDP2 or HSDP inside: the bits of DDP inside, and what is refused."""

import uuid

import pytest
import torch
import torch.distributed as dist
from plain_simulation import Net, Run
from test_local_state import file_of, read
from test_local_steps import local_steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm


class Narrow(Net):
    """Its last module has one row, so the second shard of it is empty; three rows give shards of two and one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.layers.append(nn.Linear(3, 1))
        with torch.no_grad():
            for parameter in self.layers[-1].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)


def hosts_of_two(inside):
    """(mesh of two hosts of two ranks, the dimensions that fully_shard gets). inside: "hsdp", which has copies and no
    shards, or the name of the shards' dimension."""
    names = ("hosts", "copies", "shards") if inside == "hsdp" else ("hosts", inside)
    mesh = init_device_mesh("cpu", (2, 2, 1)[: len(names)], mesh_dim_names=names)
    return mesh, mesh["copies", "shards"] if inside == "hsdp" else mesh[inside]


def sharded(inside):
    """(a sharded model, the ranks that hold the same shard)."""
    mesh, within = hosts_of_two(inside)
    model = Narrow()
    fully_shard(model.layers[2], mesh=within)
    return fully_shard(model, mesh=within), mesh.get_group("hosts")


def held(tensor, shard):
    """This rank's part of a tensor, flat. shard: (index, count), for a tensor that is not sharded."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local().detach().flatten()
    parts = tensor.detach().chunk(shard[1]) if tensor.dim() else [tensor] * shard[1]
    return parts[shard[0]].flatten() if shard[0] < len(parts) else torch.empty(0)


def all_of(model, optimizer, shard=(0, 1)):
    """This rank's part of the parameters and of the optimizer's state, flat."""
    found = [held(parameter, shard) for parameter in model.parameters()]
    for parameter in optimizer.param_groups[0]["params"]:
        for _, value in sorted(optimizer.state.get(parameter, {}).items()):
            found += [held(value, shard)] if torch.is_tensor(value) else []
    return torch.cat(found).clone()


def beside_ddp(rank, world_size, cases):
    """For each case: the steps after which a sharded model, or its optimizer's state, has not the bits of DDP's; how
    often the ranks were apart; whether finish() and a step after it have the same bits, too."""
    (groups, own) = ([dist.new_group([0, 1]), dist.new_group([2, 3])], rank // 2)
    found = []
    for run, inside, make, kwargs in cases:
        shard = (0, 1) if inside == "hsdp" else (rank % 2, 2)
        pairs = []
        for model, between in (
            sharded(inside),
            (DistributedDataParallel(Narrow(), process_group=groups[own]), hosts_of_two(inside)[0].get_group("hosts")),
        ):
            optimizer = make(model)
            pairs.append((model, optimizer, local_steps(run, model, optimizer, process_group=between, **kwargs)))
        different, apart = [], 0
        for step in range(1, run.steps + 1):
            for model, optimizer, _ in pairs:
                run.step(model, optimizer, rank, step)
            ours, ddps = (all_of(model, optimizer, shard) for model, optimizer, _ in pairs)
            different += [step] if not torch.equal(ours, ddps) else []
            hosts = [torch.empty_like(ours) for _ in range(2)]
            dist.all_gather(hosts, ours, group=between)
            apart += not torch.equal(*hosts)
        for model, optimizer, comm in pairs:
            with torch.no_grad():
                model(torch.ones(2, 6))  # FSDP2 leaves whole copies in the outermost module
            comm.finish()
            run.step(model, optimizer, rank, 99)
            comm.detach()
        ours, ddps = (all_of(model, optimizer, shard) for model, optimizer, _ in pairs)
        found.append((different, apart, torch.equal(ours, ddps)))
    return found


CASES = [
    (Run("corrected", every=5, delay=1, fragments=5, steps=8), "fsdp", momentum, {}),
    (Run("average", every=2, delay=0, steps=4), "fsdp", adamw, {}),
    (Run("nesterov", every=2, delay=1, fragments=2, steps=6), "fsdp", adamw, {"weights": "steps"}),
    (Run("corrected", every=2, delay=1, steps=4), "hsdp", adamw, {}),
]


def test_fsdp2_and_hsdp_inside_hosts_have_the_bits_of_ddp_inside(ranks):
    for of_rank in ranks.run(beside_ddp, CASES):
        for case, (different, apart, ends_equal) in zip(CASES, of_rank, strict=True):
            assert different == [] and ends_equal, case
            assert 2 <= apart, case


def lossy(rank, world_size):
    """(parameters after finish(), whether the plan and statistics are of this rank's shards alone). FSDP2's gradients
    go through fusedcomm, too."""
    run = Run("corrected", every=4, delay=2, fragments=2, steps=9)
    model, between = sharded("fsdp")
    inside = fusedcomm.attach(model, "int8", quiet=True)
    optimizer = adamw(model)
    comm = local_steps(run, model, optimizer, "int4", process_group=between)
    for step in range(1, run.steps + 1):
        run.step(model, optimizer, rank, step)
    comm.finish()
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    is_own = sum(row.numel for row in comm.plan().fragments) == own and comm.stats().drift > 0
    comm.detach()
    inside.detach()
    return all_of(model, optimizer)[:own], is_own


def test_hosts_end_with_equal_parameters_after_merges_in_four_bits(ranks):
    outcomes = ranks.run(lossy)
    assert all(is_own for _, is_own in outcomes)
    assert all(torch.equal(outcomes[rank][0], outcomes[rank + 2][0]) for rank in (0, 1))


def scaled(rank, world_size, name):
    """(the steps that this rank's optimizer made of nine, its parameters after finish())."""
    run = Run("corrected", every=3, delay=1)
    model, between = sharded(name)
    optimizer = momentum(model)
    comm = local_steps(run, model, optimizer, process_group=between)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(1, 10):
        optimizer.zero_grad()
        scaler.scale(run.loss(model, rank, step)).backward()
        if (rank, step) == (2, 4):
            next(model.parameters()).grad.to_local()[0, 0] = torch.inf  # of one shard of the second host
        scaler.step(optimizer)
        scaler.update()
    steps = comm.steps
    comm.finish()
    comm.detach()
    return steps, all_of(model, optimizer)[: sum(parameter.to_local().numel() for parameter in model.parameters())]


def test_a_host_whose_grad_scaler_skips_a_step_is_not_set_apart(ranks):
    # torch keeps what it has found for a mesh, its groups included, for equal meshes of later tests: this one is new.
    outcomes = ranks.run(scaled, f"shards {uuid.uuid4().hex}")
    assert [steps for steps, _ in outcomes] == [9, 9, 8, 8]
    assert all(torch.equal(outcomes[rank][1], outcomes[rank + 2][1]) for rank in (0, 1))


def interrupted(rank, world_size):
    """Whether a run that was saved with a merge under way ends with the bits of one that was not."""
    run = Run("nesterov", every=4, delay=3, fragments=2, steps=9)
    ends = []
    for saved_at in (None, 7):
        model, between = sharded("fsdp")
        optimizer = adamw(model)
        comm = local_steps(run, model, optimizer, process_group=between)
        for step in range(1, run.steps + 1):
            run.step(model, optimizer, rank, step)
            if step == saved_at:
                assert comm.under_way
                saved = [file_of(each.state_dict()) for each in (model, optimizer, comm)]
                comm.detach()
                model, between = sharded("fsdp")
                optimizer = adamw(model)
                comm = local_steps(run, model, optimizer, process_group=between)
                for each, state in zip((model, optimizer, comm), saved, strict=True):
                    each.load_state_dict(read(state))
        comm.detach()
        ends.append(all_of(model, optimizer))
    return torch.equal(*ends)


def test_a_sharded_run_resumes_with_its_bits(ranks):
    assert ranks.run(interrupted) == [True] * 4


def part_of_a_job(rank, world_size, files, first, last):
    """Trains samples [first, last) on hosts of two ranks from the checkpoint of any rank with the same shard, and
    returns this rank's checkpoint, its parameters and its host's samples."""
    run = Run("nesterov", every=4, delay=1, fragments=2)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("hosts", "shards"))
    model = fully_shard(Narrow(), mesh=mesh["shards"])
    parameters = [parameter.to_local().detach() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    comm = local_steps(run, model, optimizer, "int8", process_group=mesh.get_group("hosts"))
    if files:
        saved, state = files[rank % len(files)]
        torch._foreach_copy_(parameters, read(saved))
        comm.load_state_dict(read(state))
    samples = list(range(first + rank // 2, last, world_size // 2))
    for sample in samples:
        run.step(model, optimizer, rank % 2, sample)
    comm.finish()
    file = file_of([parameter.clone() for parameter in parameters]), file_of(comm.state_dict())
    comm.detach()
    return file, torch.cat([parameter.flatten() for parameter in parameters]), samples if rank % 2 == 0 else []


def test_two_hosts_go_on_as_one_and_as_two_again(ranks):
    files, samples = None, []
    for world_size, first, last in ((4, 0, 8), (2, 8, 12), (4, 12, 20)):
        outcomes = ranks.run(part_of_a_job, files, first, last, world_size=world_size)
        for rank, (_, parameters, of_host) in enumerate(outcomes):
            assert torch.equal(parameters, outcomes[rank % 2][1])
            samples += of_host
        files = [file for file, _, _ in outcomes]
    assert sorted(samples) == list(range(20))


# ---- what is refused


def refused(rank, world_size):
    """The texts of the errors of each wrong use."""
    mesh, within = hosts_of_two("fsdp")
    same, crossed = mesh.get_group("hosts"), [dist.new_group([0, 3]), dist.new_group([1, 2])][rank % 3 != 0]
    texts = []

    def refuse(model, optimizer_of=None, **kwargs):
        optimizer = torch.optim.SGD(optimizer_of or model.parameters(), lr=0.1)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            fusedcomm.LocalSteps(model, optimizer, 5, quiet=True, **kwargs)
        texts.append(str(caught.value))

    refuse(fully_shard(Narrow(), mesh=within))
    refuse(fully_shard(Narrow(), mesh=mesh), process_group=same)  # HSDP over hosts
    refuse(fully_shard(Net(), mesh=within), process_group=crossed)
    refuse(fully_shard(nn.Linear(4, 4), mesh=within), process_group=crossed)  # shards of equal shape
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=within)
    master = nn.Parameter(torch.zeros(4, 4))
    refuse(model, [master], masters={"weight": master}, process_group=same)
    return texts


def test_other_shards_replicas_and_unsharded_master_copies_are_refused(ranks):
    for rank, texts in enumerate(ranks.run(refused)):
        world, replicas, shapes, shards, masters = texts
        mates, twins = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
        there = [f"rank {each} of the job" for each in ((0, 3) if rank in (0, 3) else (1, 2))]
        assert f"layers.0.weight is sharded over the ranks {mates}" in world and "the same shard, one of each" in world
        assert f"replicated over the ranks {twins}" in replicas and "nothing to merge" in replicas
        for name, text in (("layers.0.weight", shapes), ("weight", shards)):
            first, second = (f"'{shard} of 2 along Shard(dim=0)'" for shard in ((0, 1) if rank in (0, 3) else (1, 0)))
            assert f"shards.{name} is {first} on {there[0]} and {second} on {there[1]}" in text, text
        assert "masters['weight'] is no DTensor, and the parameter is a DTensor" in masters
