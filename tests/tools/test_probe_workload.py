"""The user's script that the probe trains, and errors if it cannot."""

import textwrap

import pytest
import torch
import torch.distributed.fsdp

import fusedcomm
from fusedcomm.tools.errors import ProbeError, ScriptError
from fusedcomm.tools.probe.script import load, naming_the_line
from fusedcomm.tools.probe.workload import checked

SCRIPT = """
import torch
def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    data = torch.randn(8, 64)
    return model, lambda model: model(data).square().mean(), torch.optim.SGD(model.parameters(), 0.1)
"""

SHARDED = """
import torch
from torch.distributed.fsdp import fully_shard
def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False), torch.nn.Linear(128, 128, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    data = torch.randn(8, 128)
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
    with pytest.raises(ProbeError, match=r"has no function make\(\): it must return .* functions there: build"):
        load(script(tmp_path, SCRIPT.replace("make", "build")))
    with pytest.raises(ProbeError, match=r"has no function build\(\)"):
        load(script(tmp_path, SCRIPT) + ":build")


def refused_attached(rank, world_size):
    model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(3, 3))
    comm = fusedcomm.attach(model, "int8", quiet=True)
    with pytest.raises(ProbeError) as raised:
        checked((model, lambda model: model(DATA).sum()), CPU)
    comm.detach()
    return str(raised.value)


def test_a_model_of_fsdp2_that_the_script_has_attached_is_refused(ranks):
    (text,) = set(ranks.run(refused_attached, world_size=2))
    assert text.endswith("already: leave one of them out. The probe attaches each choice itself")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("x = 1\n1 / 0", "model.py, line 2, in <module>: 1 / 0\n  ZeroDivisionError: division by zero"),
        ("x = 1\nfor", "model.py, line 2: for\n  SyntaxError: invalid syntax"),
        ("import nothing_of_this_name", "model.py, line 1, in <module>: import nothing_of_this_name\n  ModuleNotFound"),
        ("def make():\n  f()\ndef f():\n  return [][1]", "model.py, line 4, in f: return [][1]\n  IndexError: list"),
        (
            "import torch\ndef make():\n    torch.ones(2) @ torch.ones(3)",
            "line 3, in make: torch.ones(2) @ torch.ones(3)",
        ),
        (
            "import helper\ndef make(): helper.fail()",
            "helper.py, line 1, in fail: def fail(): raise OSError('no data')",
        ),
    ],
)
def test_an_error_in_a_script_names_its_file_and_line(tmp_path, text, place):
    (tmp_path / "helper.py").write_text("def fail(): raise OSError('no data')")
    path = script(tmp_path, text)
    with pytest.raises(ScriptError) as raised, naming_the_line(path):
        load(path)()
    assert str(raised.value).startswith(f"--script {path}: {tmp_path}/") and place in str(raised.value)


def test_an_error_that_is_not_the_scripts_stays_as_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError), naming_the_line(script(tmp_path, SCRIPT)):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), naming_the_line(None):
        raise ZeroDivisionError


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
