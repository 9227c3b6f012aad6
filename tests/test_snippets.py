"""Every block of code in README.md and docs/ runs as it is printed, on two ranks, or stands in NOT_RUN with a reason;
and so do the scripts for trainers in examples/.

A ```python block that imports torch is a script of its own. The other ```python blocks of a page are one program, in
their order. A name that no block before has made comes from GIVEN, which is the same for all pages. A block that
attaches fusedcomm begins with new names. A block that gives a name several values shows choices: each of them does.

A ```bash block holds commands. A ```text block holds what is printed, so no line of it may be a command.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import FENCED, PAGES, blocks
from patience import HANG_S
from sampling import few
from scripts import ROOT, torchrun

pytestmark = pytest.mark.check

GIVEN = """
import contextlib
import types
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import fusedcomm
import fusedcomm.horovod as hvd

device, num_hosts, ranks_per_host, num_steps, step, batch_size = "cpu", 2, 1, 3, 1, 8
dataset = torch.randn(64, 64)
x, y = torch.randn(8, 64), torch.randint(8, (8,))
def batch_of(num_tokens):
    batch = torch.randn(8, 64)
    batch.num_tokens = num_tokens
    return batch
batches = [batch_of(num_tokens) for num_tokens in (3, 5, 8)]
sampler = hvd.init() or hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)

def Net():
    return torch.nn.Linear(784, 10)
class Model(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.mlp, self.lm_head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
model = Model()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]

def loss_of(output):
    return output.square().mean()
mean_loss_of = loss_of
loss = torch.nn.functional.cross_entropy
def train_step(batch=batches[0]):
    optimizer.zero_grad()
    loss_of(ddp(batch)).backward()
    optimizer.step()

comm = fusedcomm.attach(ddp, "int8")
reducer = fusedcomm.GradReducer(model, "int8")
writer = types.SimpleNamespace(add_scalar=print)
"""

ATTACHING = {"attach", "GradReducer", "DataParallel", "LocalSteps", "Members", "CommState", "ShardedOptimizer"}

TRAINERS = ("lightning", "fabric", "accelerate", "transformers")
PRINTED = {
    # In the report at attach, and in the plan of each rank.
    "docs/fsdp.md-1": ("reduce-scatters in int8 over 2 ranks", 3),
    **{f"examples/with_{trainer}.py": ("wire int8", None) for trainer in TRAINERS},
}
"""What a program must print, and how often; None: what it must print or log at all."""

NOT_RUN = {
    "from fusedcomm.integrations.": "lines of a script in examples/, which runs",
    "model, optimizer = fabric.setup": "lines of a script in examples/, which runs",
    "-import horovod.torch as hvd": "a change of a script: tests/horovod/test_examples.py makes it",
    'members = fusedcomm.Members(join="10.0.0.7': "a job on another host: tests/members/trainees.py joins jobs",
    "fusedcomm run --members -np 2 --join": "a job on another host: tests/tools/test_run_members.py gives it",
    "FUSEDCOMM_MEMBERS=/shared/job7": "several hosts with a folder that they share: tests/members/test_addresses.py",
    "make gpu": "needs a GPU; tests/bench/test_make_gpu.py runs it without one",
    "nsys profile": "needs a GPU and NVIDIA's profiler",
    "ncu --set full": "needs a GPU and NVIDIA's profiler",
    "sudo": "needs root, and hours",
    "python bench/_": "writes the pages; tests/bench/test_tables.py compares them with the results",
    "make test": ".ci/run makes it",
    "pip install": "tests/test_readme_commands.py runs it in a new environment",
    "fusedcomm probe --seconds 10": "tests/test_readme_commands.py runs it in a new environment",
    "torchrun --standalone --nproc-per-node 2 train.py": "tests/test_readme_commands.py runs it in a new environment",
}
"""How what does not run begins, and why it does not."""


def reason(code: str) -> str | None:
    """Why a block or a command does not run; None if it runs."""
    return next((why for begin, why in NOT_RUN.items() if code.startswith(begin)), None)


def bound_by(tree: ast.AST) -> set[str]:
    """The names that code binds, wherever it does."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
    return found


def read_by(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def with_given(code: str, bound: set[str]) -> str:
    """The code, after the statements of GIVEN that it needs. All names that these bind are added to `bound`."""
    needed: set[str] = set()
    own: set[str] = set()
    for statement in ast.parse(code).body:
        needed |= read_by(statement) - bound - own
        own |= bound_by(statement)
    given = []
    for statement in reversed(ast.parse(GIVEN).body):
        if bound_by(statement) & needed:
            given.append(ast.unparse(statement) + "\n")
            needed |= read_by(statement) - bound
            bound |= bound_by(statement)
    bound |= own
    return "".join(reversed(given)) + code


def choices(code: str) -> list[str]:
    """The statements of a block that gives one name several values; else the block."""
    statements = ast.parse(code).body
    targets = [ast.unparse(statement.targets) for statement in statements if isinstance(statement, ast.Assign)]
    if len(targets) == len(set(targets)):
        return [code]
    return [f"{ast.get_source_segment(code, statement)}\n" for statement in statements]


def program(snippets: list[str]) -> str:
    """The blocks of a page, as a script for torchrun."""
    bound: set[str] = set()
    text = ""
    if not any("init_process_group" in code for code in snippets):
        text = with_given('dist.init_process_group("gloo")', bound) + "\n"
    for code in (choice for snippet in snippets for choice in choices(snippet)):
        called = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
        if called & ATTACHING and text:
            text += "dist.barrier()\n"
            bound = set()
        text += with_given(code, bound) + "\n"
    return text + with_given("dist.barrier()", bound) + "\n"  # another rank may still read what this one has


def programs() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Scripts and programs, by page and number of the script on it; and the blocks of which each page's program is."""
    found: dict[str, str] = {}
    snippets: dict[str, list[str]] = {}
    for block in blocks():
        if block.language != "python" or reason(block.code):
            continue
        if re.search(r"(?m)^import torch\b(?!\.)", block.code):
            number = 1 + sum(name.startswith(f"{block.page}-") for name in found)
            found[f"{block.page}-{number}"] = block.code
        else:
            snippets.setdefault(block.page, []).append(block.code)
    of_trainers = {f"examples/with_{name}.py": (ROOT / f"examples/with_{name}.py").read_text() for name in TRAINERS}
    return found | of_trainers | {page: program(codes) for page, codes in snippets.items()}, snippets


def commands() -> list[tuple[str, str]]:
    lines = [(block.page, line) for block in blocks() if block.language == "bash" for line in block.commands]
    return [(page, line) for page, line in lines if not reason(line)]


(PROGRAMS, SNIPPETS), COMMANDS = programs(), commands()


def test_every_block_is_of_a_kind_that_runs_or_has_a_reason():
    for page in PAGES:
        text = FENCED.sub("", page.read_text())
        assert not re.search(r"```|~~~|\n\n {4,}\S", text), f"{page}: code that is not in a block of ```LANGUAGE"
    others = [block for block in blocks() if block.language not in ("python", "bash") and not reason(block.code)]
    command = r"(?m)^(\w+=\S+ )*(sudo|make|pip|git|python\d?|torchrun|fusedcomm(?! run:)|nsys|ncu|cd|export) [^\s:]"
    assert [block for block in others if block.language != "text" or re.search(command, block.code)] == []
    codes = [line for block in blocks() for line in (block.code, *block.code.splitlines())]
    assert [begin for begin in NOT_RUN if not any(code.startswith(begin) for code in codes)] == []
    assert PRINTED.keys() <= PROGRAMS.keys()


@pytest.mark.parametrize("name", few(PROGRAMS, "docs/low-bit.md", "examples/with_accelerate.py"))
def test_the_python_of_a_page_runs(tmp_path, name):
    for package in set(re.findall(r"(?m)^(?:from|import) (lightning|accelerate|transformers)\b", PROGRAMS[name])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    path = tmp_path / "train.py"
    path.write_text(PROGRAMS[name])
    done = torchrun(path, cwd=tmp_path)
    words, times = PRINTED.get(name, ("", None))
    if times is None:
        assert words in done.stdout + done.stderr
    else:
        assert done.stdout.count(words) == times


@pytest.mark.full
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=str)
def test_the_commands_of_a_page_run(tmp_path, page, command):
    """In a folder with the page's first block as train.py and model.py. Two ranks stand for the hosts of a probe, and
    127.0.0.1 for the address of this one."""
    for name in ("train.py", "model.py"):
        (tmp_path / name).write_text(with_given(SNIPPETS[page][0], set()))
    ranks = "torchrun --standalone --nproc-per-node 2 -m fusedcomm probe --seconds 5"
    script = (
        f'fusedcomm() {{ {sys.executable} -m fusedcomm "$@"; }}\n'
        f'torchrun() {{ {sys.executable} -m torch.distributed.run "$@"; }}\n'
        + re.sub(r"^torchrun .* -m fusedcomm probe", ranks, command).replace("10.0.0.7", "127.0.0.1")
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
