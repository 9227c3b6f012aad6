"""The layers of csrc/, fusedcomm/ and kernels/: no #include and no import goes to a higher layer or closes a circle."""

import ast
import functools
import graphlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The layers of csrc/, top to bottom. A layer includes only itself and lower layers.
CSRC = ("bindings", "frontends", "gradients", "engine", "devices", "transport", "codec", "lanes", "wire")
# The layers of fusedcomm/ and kernels/, top to bottom.
FUSEDCOMM = (
    "__main__",
    "tools",
    "horovod",
    "__init__",
    "integrations",
    "attaching",
    "fsdp",
    "ddp",
    "optimizer",
    "reducer",
    "local_steps",
    "members",
    "simulation",
    "autotune",
    "session",
    "trace",
    "devices",
    "chunks",
    "config",
    "patterns",
    "ranks",
    "kernels",
    "env",
    "files",
    "memory",
    "log",
    "native",
    "literals",
    "version",
    "_C",
)

# The front ends, in csrc/frontends/ and in fusedcomm/. What two of them need lives below them, in csrc/gradients/ and
# in fusedcomm/session/.
FRONT_ENDS = ("ddp", "reducer", "horovod")
# These, and those that are written in Python alone.
PYTHON_FRONT_ENDS = (*FRONT_ENDS, "fsdp", "local_steps")

Arrow = tuple[str, str]
"""A file or module, and one that it includes or imports."""


def upward(arrows: list[Arrow], layers: tuple[str, ...], layer_of) -> list[str]:
    """A text for each arrow to a higher layer; empty if there is none. `layers` are ordered from top to bottom."""
    found = []
    for source, target in arrows:
        above, below = layer_of(source), layer_of(target)
        for name in (above, below):
            assert name in layers, f"{source} → {target}: {name} is no layer of {', '.join(layers)}"
        if layers.index(below) < layers.index(above):
            found.append(f"{source} → {target}: {above} stands below {below}")
    return found


def circle(arrows: list[Arrow]) -> list[str]:
    """The files of one circle in their order, with the first one again at the end; empty if there is no circle."""
    targets: dict[str, set[str]] = {}
    for source, target in arrows:
        targets.setdefault(source, set()).update({target} - {source})
    try:
        graphlib.TopologicalSorter(targets).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def includes(folder: Path) -> list[Arrow]:
    return [
        (str(path.relative_to(folder)), name)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cpp")
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.M)
    ]


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def imports(path: Path, module: str) -> Iterator[str]:
    """The fusedcomm modules that a module imports anywhere in its code, except under TYPE_CHECKING."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = parsed(path)
    skipped = {
        id(node)
        for check in ast.walk(tree)
        if isinstance(check, ast.If) and isinstance(check.test, ast.Name) and check.test.id == "TYPE_CHECKING"
        for node in ast.walk(check)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fusedcomm")
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if base.split(".")[0] == "fusedcomm":
                yield from (f"{base}.{alias.name}" for alias in node.names)


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in ((ROOT / "fusedcomm", "fusedcomm"), (ROOT / "kernels", "fusedcomm.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == "fusedcomm" and parts[0] == "kernels":
                continue  # a link to kernels/
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def python_arrows() -> list[Arrow]:
    known = modules()
    arrows = []
    for module, path in known.items():
        for name in imports(path, module):
            while name not in known and name != "fusedcomm._C":
                name = name.rpartition(".")[0]
            arrows.append((module, name))
    return arrows


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def among_sisters(arrows: list[Arrow], front_end_of) -> list[str]:
    """A text for each arrow from one front end to another. `front_end_of` returns None for what is in none."""
    ends = [(source, target, front_end_of(source), front_end_of(target)) for source, target in arrows]
    return [f"{source} → {target}: a front end uses a sister" for source, target, a, b in ends if a and b and a != b]


def native_front_end(name: str) -> str | None:
    match = re.match(r"frontends/(\w+)/", name)
    return match[1] if match else None


def python_front_end(module: str) -> str | None:
    return room_of(module) if room_of(module) in PYTHON_FRONT_ENDS else None


FORBIDDEN = {
    # The sanitizers build the engine without torch.
    "torch": (r"(engine|codec|lanes|wire)/", r"#\s*include <(torch|ATen|c10|pybind11)"),
    "DDP's buckets": (r"(?!frontends/ddp/)", r"\bGradBucket\b"),
    "a certain transport": (r"gradients/", r"(?i)c10d_?transport"),
}
"""By what a part of csrc/ must not know: how the paths of that part begin, and what no file there says."""


def knowing(what: str, files: dict[str, str]) -> list[str]:
    """The files, {path in csrc/: text}, that say what they must not know."""
    part, words = FORBIDDEN[what]
    return [name for name, text in files.items() if re.match(part, name) and re.search(words, text)]


def test_no_include_runs_upward_or_in_a_circle():
    arrows = includes(ROOT / "csrc")
    assert len(arrows) > 100
    assert upward(arrows, CSRC, lambda name: name.split("/")[0]) == []
    assert circle(arrows) == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_part_of_csrc_does_not_know(what):
    paths = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    files = {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in paths}
    assert knowing(what, files) == []
    # The part has files, and there are others that know it.
    part, words = FORBIDDEN[what]
    assert any(re.match(part, name) for name in files)
    assert any(re.search(words, text) for text in files.values())


def test_no_import_runs_upward_or_in_a_circle():
    arrows = python_arrows()
    assert len(arrows) > 200
    assert upward(arrows, FUSEDCOMM, room_of) == []
    assert circle(arrows) == []


def test_no_front_end_uses_a_sister():
    assert {native_front_end(path) for path, _ in includes(ROOT / "csrc")} == {None, *FRONT_ENDS}
    assert among_sisters(includes(ROOT / "csrc"), native_front_end) == []
    assert among_sisters(python_arrows(), python_front_end) == []


# Private names of torch's that fusedcomm also has for something of its own.
TORCHS = {"_ddp", "_get_backend", "_modules", "_parameters", "_timeout", "_values", "_world"}


def private_names(tree: ast.AST) -> set[str]:
    """The private attributes, methods and variables that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def foreign_private_names(trees: dict[str, ast.AST]) -> list[str]:
    """Where a module uses a private name of another one: each use of an attribute that it does not define itself."""
    of_each = {module: private_names(tree) for module, tree in trees.items()}
    anybodys = set().union(*of_each.values()) - TORCHS
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in anybodys - of_each[module]
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_no_module_uses_a_private_name_of_another():
    assert foreign_private_names({name: parsed(path) for name, path in modules().items()}) == []


def test_a_private_name_of_another_module_is_found():
    owner, user = "class A:\n    def _run(self):\n        self._x = 1\n", "def f(a):\n    a._run()\n    a._modules\n"
    assert foreign_private_names({"owner": ast.parse(owner), "user": ast.parse(user)}) == ["user:2: a._run"]


def test_an_arrow_upward_is_found():
    arrows = [("engine/plan.h", "wire/layout.h"), ("wire/layout.h", "engine/plan.h")]
    found = upward(arrows, CSRC, lambda name: name.split("/")[0])
    assert found == ["wire/layout.h → engine/plan.h: wire stands below engine"]


def test_a_circle_is_found():
    assert circle([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]) == ["b", "c", "b"]


def test_a_sister_is_found():
    arrows = [("fusedcomm.fsdp.comm", "fusedcomm.ddp"), ("fusedcomm.fsdp.comm", "fusedcomm.fsdp.mesh")]
    assert among_sisters(arrows, python_front_end) == ["fusedcomm.fsdp.comm → fusedcomm.ddp: a front end uses a sister"]


def test_every_package_is_installed():
    packages = (ROOT / "pyproject.toml").read_text().partition("\npackages = [")[2].partition("]")[0]
    listed = set(re.findall(r'^    "(fusedcomm[\w.]*)",$', packages, re.M))
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "fusedcomm").rglob("__init__.py")]
    found = {".".join(folder.parts) for folder in folders} | {"fusedcomm.kernels"}
    assert listed == found
