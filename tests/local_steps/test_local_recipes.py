"""The recipes of docs/local_steps.md run: DDP inside hosts, FSDP2 inside hosts."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from plain_simulation import Net, Run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "local_steps.md"


def recipes():
    """The code of each."""
    _, _, section = DOCUMENT.read_text().partition("\n## Inside hosts")
    return re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


def held(model):
    return torch.cat([getattr(p, "to_local", lambda p=p: p)().detach().flatten() for p in model.parameters()]).clone()


def recipe(rank, world_size, code):
    """(this rank's parameters before finish(), and after it)."""
    names = {
        **{"torch": torch, "dist": dist, "fusedcomm": fusedcomm, "Model": Net, "device": "cpu"},
        **{"num_hosts": 2, "ranks_per_host": 2, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard},
        "DistributedDataParallel": DistributedDataParallel,
    }
    assert "every=30" in code
    exec(code.replace("every=30", "every=4"), names)
    run = Run("corrected", every=4, delay=3)
    for step in range(1, 6):  # a merge is under way
        run.step(names["model"], names["optimizer"], rank, step)
    before = held(names["model"])
    names["comm"].finish()
    names["comm"].detach()
    return before, held(names["model"])


def test_each_recipe_merges_what_hosts_have_trained(ranks):
    ddp, sharded = recipes()
    for code, same_inside in ((ddp, True), (sharded, False)):
        before, after = zip(*ranks.run(recipe, code), strict=True)
        for rank in (0, 1):
            assert not torch.equal(before[rank], before[rank + 2]) and torch.equal(after[rank], after[rank + 2])
        assert same_inside == torch.equal(before[0], before[1]), code
        assert (code is sharded) != torch.equal(after[0], after[1]), code
