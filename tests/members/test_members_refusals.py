"""What Members and its reducers refuse, each with the line to write instead; joiners and strangers sent away."""

import os
import socket

import pytest
import torch
from models import Mlp, error_of
from torch.nn.parallel import DistributedDataParallel
from trainees import SHAPES, Script, Team

import fusedcomm
from fusedcomm.members.errors import JoinRefusedError
from fusedcomm.ranks import agreement

pytestmark = pytest.mark.check

INSTEAD = "fusedcomm.DataParallel(module, config=…, members=members)"


def in_backward(members, kind):
    """A reducer whose optimizer steps within the backward pass; the error."""
    model = Mlp()
    if kind == "apply":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        return error_of(RuntimeError, fusedcomm.DataParallel, model, members=members)
    ddp = fusedcomm.DataParallel(model, members=members, quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    return error_of(RuntimeError, lambda: ddp(torch.ones(2, 10)).sum().backward())


def refusals(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {"few": error_of(ValueError, fusedcomm.Members, min_ranks=world_size + 1)}
    members = fusedcomm.Members()
    sharded = Mlp()
    fully_shard(sharded)
    hybrid = Mlp()
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicas", "shards")))
    found["ddp"] = error_of(ValueError, fusedcomm.attach, DistributedDataParallel(Mlp()), "int8", members=members)
    for name, model in (("fsdp", sharded), ("hsdp", hybrid)):
        found[f"attach {name}"] = error_of(ValueError, fusedcomm.attach, model, "int8", members=members)
        found[f"reducer {name}"] = error_of(ValueError, fusedcomm.GradReducer, model, "int8", members=members)
        found[f"parallel {name}"] = error_of(ValueError, fusedcomm.DataParallel, model, config="int8", members=members)
    found["hook"] = in_backward(members, "hook")
    other = fusedcomm.Members()
    found["apply"] = in_backward(other, "apply")
    left = fusedcomm.Members()
    if rank == 0:
        left.leave()
    torch.distributed.barrier()
    found["of a rank whose peers have left"] = in_backward(left, "apply") if rank == 1 else found["apply"]
    for each in (members, other, left):
        each.leave()
    return found


def test_what_cannot_lose_a_rank_is_refused_with_the_line_to_write(ranks):
    for found in ranks.run(refusals, world_size=2):
        assert [text for text in found.values() if not text.startswith("fusedcomm")] == []
        assert "min_ranks=3 is not possible with 2 ranks: start more" in found["few"]
        assert INSTEAD in found["ddp"] and "in place of DistributedDataParallel" in found["ddp"]
        for name in ("fsdp", "hsdp"):
            for way in ("attach", "reducer", "parallel"):
                assert "lost rank's shard could not be summed again" in found[f"{way} {name}"]
                assert INSTEAD in found[f"{way} {name}"]
        assert "SGD.step() was called within a backward pass" in found["hook"]
        for name in ("apply", "of a rank whose peers have left"):
            assert "_apply_optimizer_in_backward" in found[name] and "after backward()" in found[name]


def join(address: str, shapes=SHAPES, **options) -> None:
    """Joins in this process. Raises JoinRefusedError."""
    members = fusedcomm.Members(join=address)
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    options = {"config": fusedcomm.Config("int8"), "bucket_mib": 1e-6, **options}
    try:
        fusedcomm.GradReducer(parameters, members=members, quiet=True, **options)
    finally:
        members.leave()


def strangers(address: tuple[str, int]) -> list[socket.socket]:
    """Open connections that send random bytes, a huge length, and nothing."""
    sent = (os.urandom(4096), b"fcM1" + b"\xff" * 40, b"", b"fcM1")
    connections = [socket.create_connection(address) for _ in sent]
    for connection, some in zip(connections, sent, strict=True):
        connection.sendall(some)
    return connections


def test_others_than_fitting_joiners_are_sent_away_and_nobody_waits_for_them(tmp_path, monkeypatch):
    script = Script(str(tmp_path), config={"wire": "int8"}, num_founders=2, num_steps=9, hold={"0": 4}, meets=5)
    script.die["j"] = (0, "receiving")
    team = Team(script)
    try:
        address = team.read("1", "ready")["address"]
        host, _, port = address.rpartition(":")
        connections = strangers((host, int(port)))
        with pytest.raises(JoinRefusedError, match="it has parameters .*, and the members have ") as error:
            join(address, shapes=((40, 33), (64, 32)))
        told = str(error.value)
        assert told.startswith("fusedcomm: the member at ") and "start it with the model" in told
        with pytest.raises(JoinRefusedError, match="it has config "):
            join(address, config=fusedcomm.Config("bf16"))
        with pytest.raises(JoinRefusedError, match="it has reducer "):
            join(address, bucket_mib=1)
        versions = agreement.versions()["versions"]
        for field in versions:
            others = {"versions": {**versions, field: "another"}}
            with (
                monkeypatch.context() as patch,
                pytest.raises(JoinRefusedError, match=f"it has versions .*{field}.*another.*, and the members have "),
            ):
                patch.setattr(agreement, "versions", lambda found=others: found)
                join(address)
        team.join("j", of="1")
        (tmp_path / "go").touch()
        for name in "01":
            end = team.read(name, "end")
            assert len(team.read(name, "step.8")["means"]) == len(SHAPES), end
        for connection in connections:
            connection.close()
    finally:
        (tmp_path / "go").touch()
        team.close()
