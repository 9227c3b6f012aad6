"""A CommState that was made and never called is reported once, when the process exits."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.check

MADE = """
import sys, torch, fusedcomm
state = fusedcomm.CommState("int8")
"""
STEP = """
weight = torch.ones(2, requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight], lr=0.1).step()
"""
DDP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp.register_comm_hook(state, fusedcomm.comm_hook)
ddp(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(ddp.parameters(), lr=0.1).step()
"""
STEP_WITH_HOOKS_AFTER_OURS = (
    """
from torch.optim.optimizer import register_optimizer_step_post_hook
for _ in range(2):
    register_optimizer_step_post_hook(lambda *_: print("the user's hook", file=sys.stderr))
"""
    + STEP
)


def printed_at_exit(script: str, rank: str = "0", returncode: int = 0) -> str:
    environment = {**os.environ, "RANK": rank, "FUSEDCOMM_QUIET": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == returncode, run.stderr
    return run.stderr


def test_it_is_said_once_with_the_possible_reasons():
    printed = printed_at_exit(MADE + STEP)
    assert printed.count("CommState('int8') was made and never called") == 1
    for reason in (
        "call ddp.register_comm_hook(state, fusedcomm.comm_hook) on the module that trains",
        "Lightning registers ddp_comm_hook= on CUDA only: use fusedcomm.integrations.lightning.FusedComm",
        "Accelerate's comm_hook= takes only its own hooks: use fusedcomm.integrations.accelerate.attach",
    ):
        assert printed.count(reason) == 1


@pytest.mark.sampled(by=lambda script, rank, returncode: {"code": returncode})
@pytest.mark.parametrize(
    ("script", "rank", "returncode"),
    [
        (MADE + DDP, "0", 0),
        (MADE, "0", 0),
        ("import fusedcomm, torch" + STEP + MADE, "0", 0),
        (MADE + STEP, "1", 0),
        (MADE + STEP + "raise ValueError('on purpose')", "0", 1),
        (MADE + "import copy; copy.deepcopy(state)" + STEP, "0", 0),
    ],
    ids=["called", "nothing was trained", "trained before", "another rank", "after an error", "its copy may be called"],
)
def test_else_nothing_is_said(script, rank, returncode):
    assert "never called" not in printed_at_exit(script, rank, returncode)


@pytest.mark.full
def test_other_hooks_of_optimizers_are_called():
    printed = printed_at_exit(MADE + STEP_WITH_HOOKS_AFTER_OURS)
    assert printed.count("the user's hook") == 2
    assert printed.count("was made and never called") == 1
