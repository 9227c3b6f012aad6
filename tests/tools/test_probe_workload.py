"""The user's script that the probe trains, what is said where it cannot, and what is measured of its steps."""

import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from fusedcomm.tools.probe.team import ProbeError, Team
from fusedcomm.tools.probe.workload import PARAMETER_NUMEL, checked, load, measure_workload, synthetic, work

SCRIPT = """
import torch
def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    data = torch.randn(8, 64)
    return model, lambda model: model(data).square().mean(), torch.optim.SGD(model.parameters(), 0.1)
"""


def script(tmp_path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script(tmp_path):
    model, step, optimizer = checked(load(script(tmp_path, SCRIPT))(), CPU)
    assert step(model).numel() == 1 and optimizer is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    named = script(tmp_path, SCRIPT.replace("make", "build"))
    assert callable(load(f"{named}:build"))


def test_scripts_that_cannot_be_used(tmp_path):
    with pytest.raises(ProbeError, match="there is no file .*missing.py: name a Python file"):
        load(str(tmp_path / "missing.py"))
    with pytest.raises(ProbeError, match=r"has no function make\(\): it must return .* functions there: build"):
        load(script(tmp_path, SCRIPT.replace("make", "build")))
    with pytest.raises(ProbeError, match=r"has no function build\(\)"):
        load(script(tmp_path, SCRIPT) + ":build")
    with pytest.raises(ProbeError, match="running it failed: ZeroDivisionError"):
        load(script(tmp_path, "1 / 0"))


CPU = torch.device("cpu")
LINEAR = torch.nn.Linear(3, 3)


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


HALF = Half()
TWO = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
DATA = torch.ones(2, 3)


@pytest.mark.parametrize(
    "task, text",
    [
        (LINEAR, "returned a Linear: it must return"),
        ((LINEAR,), r"returned \(Linear\): it must return"),
        ((LINEAR, 3), r"returned \(Linear, int\)"),
        ((LINEAR, lambda model: model(DATA).sum(), "sgd"), "third result is a str"),
        ((torch.nn.ReLU(), lambda model: model(DATA).sum()), "no parameter with requires_grad"),
        ((torch.nn.Linear(3, 3, dtype=torch.float64), lambda model: 0), "parameters of torch.float64"),
        ((LINEAR, lambda model: model(DATA)), r"returned a tensor of shape \(2, 3\): it must return the loss"),
        ((LINEAR, lambda model: 3.0), "returned a float"),
        ((HALF, lambda model: model(DATA).sum()), r"does not use 2 parameter\(s\), unused.weight for example"),
        ((TWO, lambda model: model[0](DATA).sum()), "more of the model than its forward pass .* not subscriptable"),
        ((HALF, lambda model: model.used(DATA).sum()), "more of the model than its forward pass .*'used'"),
        ((LINEAR, lambda model: LINEAR(DATA).sum()), "does not call the model that it is given"),
        ((torch.nn.Linear(3, 3, device="meta"), lambda model: model(DATA).sum()), "has weight on meta: .* is cpu"),
        ((LINEAR, lambda model: model(DATA).sum().detach()), r"shape \(\) without a gradient"),
    ],
)
def test_tasks_that_cannot_be_used(task, text):
    with pytest.raises(ProbeError, match=text):
        checked(task, CPU)


# ---- what is measured


def share_of_a_core() -> float:
    """What computing gets of one while other programs use it, too."""
    began, began_cpu = time.monotonic(), time.process_time()
    while time.monotonic() - began < 0.3:
        pass
    return (time.process_time() - began_cpu) / (time.monotonic() - began)


def busy_cores(rank, world_size, compute):
    """What was measured, and this rank's least share of a core before and after."""
    task = synthetic(3 * PARAMETER_NUMEL, 0.0, torch.device("cpu"))
    task[0]._compute = {"sleeps": lambda: time.sleep(0.02), "works": lambda: work(4000, torch.device("cpu"))}[compute]
    before = share_of_a_core()
    workload = measure_workload(Team(dist.group.WORLD, torch.device("cpu")), task, 0.5)
    return workload, min(before, share_of_a_core())


@pytest.mark.alone
@pytest.mark.parametrize("compute, least, most", [("sleeps", 0.0, 0.4), ("works", 0.6, 1.1)])
def test_cores_are_as_busy_as_computing_keeps_them(ranks, compute, least, most):
    (of_all, share), (other, other_share) = ranks.run(busy_cores, compute, world_size=2)
    assert least * min(share, other_share) < of_all.busy_cores < most and of_all.busy_cores == other.busy_cores
    assert of_all.backward_s > 0.02 and of_all.numel == 3 * PARAMETER_NUMEL
